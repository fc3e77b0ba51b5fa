use turnpike_testkit::Dir;

use super::*;
use crate::metric;

const MINIMAL: &str = "
name = 'x'
metric = 'delivered_pps'
topology = 'host'
[[subject]]
name = 'a'
command = 'sleep 60'
[workload]
command = ['true', '{duration}']
";

fn parse(text: &str) -> Result<Experiment, LabError> {
    Experiment::parse(Path::new("x.toml"), text)
}

fn refusal(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn defaults_follow_the_method() {
    let experiment = parse(MINIMAL).unwrap();
    assert!(experiment.rounds >= experiment.rules.min_rounds);
    assert!(experiment.aa && experiment.discard > 0.0);
    assert_eq!(experiment.points().len(), 1);
}

#[test]
fn a_mistyped_key_is_reported_with_line_and_nearest_key() {
    let text = MINIMAL.replace("metric =", "metrik =");
    assert_eq!(refusal(&text), "x.toml:3:1: unknown key \"metrik\"; did you mean \"metric\"?");
    let text = MINIMAL.replace("command = 'sleep 60'", "command = 'sleep 60'\nredy = {}");
    assert_eq!(refusal(&text), "x.toml:8:1: unknown key \"redy\"; did you mean \"ready\"?");
}

#[test]
fn a_mistyped_metric_namespace_or_variable_is_reported() {
    assert!(
        refusal(&MINIMAL.replace("delivered_pps", "deliverd_pps"))
            .contains("did you mean \"delivered_pps\"?")
    );
    let text =
        MINIMAL.replace("topology = 'host'", "").replace("[workload]", "[workload]\nnamespace = 'cleint'");
    assert!(refusal(&text).contains("did you mean \"client\"?"), "{}", refusal(&text));
    assert!(refusal(&MINIMAL.replace("{duration}", "{duratoin}")).contains("did you mean {duration}?"));
    let text = MINIMAL.replace("[workload]", "[workload]\nnamespace = 'client'");
    assert!(refusal(&text).contains("\"host\" has none"));
}

#[test]
fn all_errors_are_reported_together_with_their_positions() {
    let text = "
name = 'X y'
metrik = 'delivered_pps'
metrics = ['delivered_pps', 'latency_p98_us']
rounds = 0
duration = 'long'
[limits]
late_p99_us = 0
[[subject]]
name = 'a'
command = 'sleep {duratoin}'
namespace = 'realy'
[[subject]]
name = 'a'
ready = { stun = '{relay}:1', log = 'x' }
[workload]
command = 'true {duration}'
format = 'jsn'
";
    assert_eq!(
        refusal(text).lines().collect::<Vec<_>>(),
        [
            "x.toml:2:8: name \"X y\": expected lower-case letters, digits and hyphens, starting with a letter",
            "x.toml:3:1: unknown key \"metrik\"; did you mean \"metric\"?",
            &format!(
                "x.toml:4:29: no metric \"latency_p98_us\"; did you mean \"latency_p90_us\"? (expected one of {})",
                names()
            ),
            "x.toml:5:10: rounds 0: expected 1 to 1000",
            "x.toml:6:12: duration: found string \"long\"; expected a number",
            "x.toml:8:15: late_p99_us 0: expected microseconds, above 0",
            "x.toml:11:11: unknown variable {duratoin}; did you mean {duration}?",
            "x.toml:12:13: no namespace \"realy\"; did you mean \"relay\"?",
            "x.toml:13:1: [[subject]] lacks the required key \"command\"",
            "x.toml:14:8: \"a\" is used twice",
            "x.toml:15:9: a: ready needs exactly one of stun, log, udp_port, tcp_port",
            "x.toml:18:10: format: found \"jsn\"; expected one of turnpike, iperf3, none",
        ]
    );
}

fn names() -> String {
    metric::METRICS.iter().map(|metric| metric.name).collect::<Vec<_>>().join(", ")
}

#[test]
fn an_unknown_metric_lists_the_known_ones() {
    let told = refusal(&MINIMAL.replace("delivered_pps", "speed"));
    assert_eq!(told, format!("x.toml:3:10: no metric \"speed\" (expected one of {})", names()));
    let fields = "fields = { speed = 'a.b' }\ncommand = ['true'";
    assert!(parse(&MINIMAL.replace("delivered_pps", "speed").replace("command = ['true'", fields)).is_ok());
}

#[test]
fn errors_in_command_line_experiments_have_no_line_numbers() {
    let error = Experiment::parse(Path::new(COMMAND_LINE), &MINIMAL.replace("delivered_pps", "delivered"))
        .and_then(|_| Experiment::parse(Path::new(COMMAND_LINE), &MINIMAL.replace("{duration}", "{x}")))
        .unwrap_err();
    assert!(error.to_string().starts_with("command line: unknown variable {x}"), "{error}");
}

#[test]
fn too_few_cpus_are_reported_before_anything_starts() {
    let text = MINIMAL.replace("'sleep 60'", "'sleep 60'\ncpus = '0,4000'");
    assert!(refusal(&text).contains("pinned to CPU 4000, but this machine has"), "{}", refusal(&text));
    assert!(refusal(&MINIMAL.replace("'sleep 60'", "'sleep 60'\ncpus = '3-1'")).contains("expected a list"));
}

#[test]
fn a_service_has_exactly_one_readiness_probe() {
    let text = MINIMAL.replace("'sleep 60'", "'sleep 60'\nready = { stun = '127.0.0.1:1', log = 'x' }");
    assert!(refusal(&text).contains("exactly one of"));
    let text = MINIMAL.replace("'sleep 60'", "'sleep 60'\nready = { within = 3 }");
    assert!(refusal(&text).contains("exactly one of"));
}

#[test]
fn a_sweep_has_a_point_for_each_combination() {
    let text = MINIMAL.replace("[[subject]]", "[sweep]\nclients = [1, 8]\nsize = [120, 1200]\n[[subject]]");
    let points = parse(&text).unwrap().points();
    assert_eq!(points.len(), 4);
    assert!(points.iter().any(|point| point["clients"] == "8" && point["size"] == "120"));
}

#[test]
fn a_missing_program_is_reported_with_a_remedy() {
    let experiment = parse(&MINIMAL.replace("sleep 60", "no-such-relay -x")).unwrap();
    let variables = experiment.variables(&BTreeMap::new(), &experiment.points()[0], Path::new("."));
    let error = experiment.check_tools(&variables).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`no-such-relay` is needed for a but was not found: install it, or correct its name"
    );
    assert_eq!(error.exit_code(), 2);
}

#[test]
fn included_parts_come_first_and_are_validated() {
    let directory = Dir::new();
    std::fs::create_dir(directory.at("parts")).unwrap();
    let part = directory.at("parts/both.toml");
    let with = MINIMAL.replace("[[subject]]", "include = 'both'\n[vars]\nport = 7\n[[subject]]");
    let path = directory.at("x.toml");
    let parsed = || Experiment::parse(&path, &with);

    std::fs::write(
        &part,
        "[vars]\nport = 5\nsize = 9\n[[subject]]\nname = 'first'\ncommand = 'sleep {size}'\n",
    )
    .unwrap();
    let experiment = parsed().unwrap();
    let names: Vec<&str> = experiment.subject.iter().map(|service| service.name.as_str()).collect();
    assert_eq!(names, ["first", "a"]);
    assert_eq!(
        (plain(&experiment.vars["port"]), plain(&experiment.vars["size"])),
        ("7".to_owned(), "9".to_owned())
    );

    // The recorded part is used even if its file has changed or no longer exists.
    std::fs::remove_file(&part).unwrap();
    assert!(Experiment::parse_with(&path, &with, &experiment.parts).is_ok());
    let told = parsed().unwrap_err().to_string();
    assert!(
        told.ends_with("x.toml:5:11: no part both: give a file, or a name from `turnpike lab list`"),
        "{told}"
    );
    std::fs::write(&part, "[[subjects]]\n").unwrap();
    let told = parsed().unwrap_err().to_string();
    assert!(
        told.contains("x.toml:5:11: ") && told.contains("both.toml:1:3: unknown key \"subjects\""),
        "{told}"
    );
    std::fs::write(&part, "[[subject]]\nname = 'a'\ncommand = 'sleep {duratoin}'\n").unwrap();
    let told = parsed().unwrap_err().to_string();
    assert!(
        told.contains("x.toml:5:11: unknown variable {duratoin}") && told.contains("\"a\" is used twice"),
        "{told}"
    );
}

#[test]
fn missing_optional_subjects_are_skipped_with_a_note() {
    let text = MINIMAL.replace(
        "[workload]",
        "[[subject]]\nname = 'b'\ncommand = 'no-such-relay'\noptional = true\n[workload]",
    );
    let mut experiment = parse(&text).unwrap();
    let variables = experiment.variables(&BTreeMap::new(), &experiment.points()[0], Path::new("."));
    let told = experiment.drop_missing_subjects(&variables);
    assert_eq!(
        told,
        ["b is skipped: `no-such-relay` is needed for b but was not found: install it, or correct its name"]
    );
    assert_eq!(experiment.subject.len(), 1);
    assert!(experiment.check_tools(&variables).is_ok());
}

#[test]
fn the_cpu_time_of_a_process_is_a_metric() {
    let text =
        |name: &str| MINIMAL.replace("'delivered_pps'", &format!("'delivered_pps'\nmetrics = ['{name}']"));
    assert!(parse(&text("cpu.a_s")).is_ok());
    let told = refusal(&text("cpu.aa_s"));
    assert!(told.starts_with("x.toml:4:12: no metric \"cpu.aa_s\"; did you mean \"cpu.a_s\"?"), "{told}");
}

#[test]
fn thresholds_are_validated_at_their_position() {
    let text = MINIMAL.replace(
        "[workload]",
        "[[must]]\nmetric = 'delivered'\nat_least = 1\nat_most = 2\n[[aim]]\nmetric = 'speed'\nat_least = 1\nagainst = 'c'\n[workload]",
    );
    let told = refusal(&text);
    for part in [
        "x.toml:8:1: a threshold needs exactly one of at_least and at_most",
        "x.toml:13:10: no metric \"speed\"",
        "x.toml:15:11: no subject \"c\"",
    ] {
        assert!(told.contains(part), "{part} is missing from {told}");
    }
}
