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
fn defaults_are_as_the_method_asks() {
    let experiment = parse(MINIMAL).unwrap();
    assert!(experiment.rounds >= experiment.rules().min_rounds);
    assert!(experiment.aa && experiment.discard > 0.0);
    assert_eq!(experiment.points().len(), 1);
}

#[test]
fn a_mistyped_key_is_named_with_line_and_nearest_key() {
    let text = MINIMAL.replace("metric =", "metrik =");
    assert_eq!(refusal(&text), "x.toml:3:1: unknown key \"metrik\"; did you mean \"metric\"?");
    let text = MINIMAL.replace("command = 'sleep 60'", "command = 'sleep 60'\nredy = {}");
    assert_eq!(refusal(&text), "x.toml:8:1: unknown key \"redy\"; did you mean \"ready\"?");
}

#[test]
fn a_mistyped_metric_namespace_or_variable_is_named() {
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
fn all_mistakes_of_a_file_are_told_at_once_each_with_its_place() {
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
ready = { tcp = '{relay}:1', log = 'x' }
[workload]
command = 'true {duration}'
format = 'jsn'
";
    assert_eq!(
        refusal(text).lines().collect::<Vec<_>>(),
        [
            "x.toml:2:8: name \"X y\": expected lower case letters, digits and hyphens, a letter first",
            "x.toml:3:1: unknown key \"metrik\"; did you mean \"metric\"?",
            &format!(
                "x.toml:4:29: no metric \"latency_p98_us\"; did you mean \"latency_p90_us\"? (there are: {})",
                names()
            ),
            "x.toml:5:10: rounds 0: expected 1 to 1000",
            "x.toml:6:12: duration: found string \"long\"; expected a number",
            "x.toml:8:15: late_p99_us 0: expected microseconds, above 0",
            "x.toml:11:11: {duratoin} stands for nothing; did you mean {duration}?",
            "x.toml:12:13: no namespace \"realy\"; did you mean \"relay\"?",
            "x.toml:13:1: [[subject]] has no \"command\", which is needed",
            "x.toml:14:8: \"a\" is named twice",
            "x.toml:15:9: a: ready needs exactly one of stun, tcp, http, log, udp_port, tcp_port",
            "x.toml:18:10: format: found \"jsn\"; expected one of turnpike, iperf3, json, none; did you mean \"json\"?",
        ]
    );
}

fn names() -> String {
    metric::METRICS.iter().map(|metric| metric.name).collect::<Vec<_>>().join(", ")
}

#[test]
fn an_unknown_metric_is_told_with_all_that_there_are() {
    let told = refusal(&MINIMAL.replace("delivered_pps", "speed"));
    assert_eq!(told, format!("x.toml:3:10: no metric \"speed\" (there are: {})", names()));
    // A field of the result is a metric too.
    let fields = "format = 'json'\nfields = { speed = 'a.b' }\ncommand = ['true'";
    assert!(parse(&MINIMAL.replace("delivered_pps", "speed").replace("command = ['true'", fields)).is_ok());
}

#[test]
fn what_was_typed_has_no_line_of_a_file() {
    let error = Experiment::parse(Path::new(COMMAND_LINE), &MINIMAL.replace("delivered_pps", "delivered"))
        .and_then(|_| Experiment::parse(Path::new(COMMAND_LINE), &MINIMAL.replace("{duration}", "{x}")))
        .unwrap_err();
    assert!(error.to_string().starts_with("command line: {x} stands for nothing"), "{error}");
}

#[test]
fn too_few_cpus_are_noticed_before_anything_starts() {
    let text = MINIMAL.replace("'sleep 60'", "'sleep 60'\ncpus = '0,4000'");
    assert!(refusal(&text).contains("pinned to CPU 4000, but this machine has"), "{}", refusal(&text));
    assert!(refusal(&MINIMAL.replace("'sleep 60'", "'sleep 60'\ncpus = '3-1'")).contains("expected a list"));
}

#[test]
fn a_readiness_probe_is_exactly_one() {
    let text = MINIMAL.replace("'sleep 60'", "'sleep 60'\nready = { tcp = '127.0.0.1:1', log = 'x' }");
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
fn a_missing_program_is_a_sentence_with_the_remedy() {
    let experiment = parse(&MINIMAL.replace("sleep 60", "no-such-relay -x")).unwrap();
    let variables = Variables::new(&experiment, &BTreeMap::new(), &experiment.points()[0], Path::new("."));
    let error = experiment.check_tools(&variables).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`no-such-relay` is missing, needed for a: install it, or correct its name"
    );
    assert_eq!(error.exit_code(), 2);
}

#[test]
fn every_shipped_experiment_is_valid() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments");
    let mut count = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            if let Err(error) = Experiment::load(&path) {
                // A machine with fewer CPUs than the experiment pins to is no mistake of the file.
                assert!(error.to_string().contains("but this machine has"), "{error}");
            }
            count += 1;
        }
    }
    assert!(count >= 6, "{count} experiments");
}
