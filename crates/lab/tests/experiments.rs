//! Complete experiments with tiny programs: records, and the handling of failures.
#![allow(clippy::unwrap_used, reason = "a failed step must fail the test")]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use support::{
    Dir, can_run, ended, entries, eventually, has_all, lab, marked, namespaces, needs, only_directory, ran,
    record_in, run, said, script, signal,
};
use turnpike_lab::{RunRecord, invalid_rounds::VoidReason, record::Round};

#[test]
fn as_lab() {
    support::as_lab();
}

/// Experiment with two UDP echoes; `changes` are replacements in its text.
fn experiment(directory: &Path, changes: &[(&str, &str)]) -> PathBuf {
    let (echo, load) = (script("echo.py"), script("load.py"));
    let mut text = format!(
        r#"
name = "echoes"
metric = "cpu_us_per_packet"
rounds = 2
duration = 0.5
warmup = 0.1
discard = 0.3
seed = 11
counters = false
limits = {{ steal_percent = 100.0 }}

[[subject]]
name = "first"
command = "python3 {echo} {{relay}} 4000"
namespace = "relay"
ready = {{ udp_port = "4000" }}

[[subject]]
name = "second"
command = "python3 {echo} {{relay}} 4000 -1"
namespace = "relay"
ready = {{ udp_port = "4000", within = 10 }}

[workload]
command = "python3 {load} {{relay}} 4000 500 {{total}}"
result = "stdout"
namespace = "client"
delivered_at = ["client"]
patience = 20
"#
    );
    for (from, to) in changes {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    let path = directory.join("echoes.toml");
    fs::write(&path, text).unwrap();
    path
}

struct Case {
    directory: Dir,
    path: PathBuf,
    out: PathBuf,
}

impl Case {
    fn new(changes: &[(&str, &str)]) -> Self {
        Self::made(|directory| experiment(directory, changes))
    }

    fn made(make: impl FnOnce(&Path) -> PathBuf) -> Self {
        let directory = Dir::new();
        Self { path: make(directory.path()), out: directory.at("out"), directory }
    }

    fn command(&self) -> Command {
        lab(&["run", self.path.to_str().unwrap(), "--out", self.out.to_str().unwrap()])
    }

    fn run(&self, code: i32) -> String {
        ended(code, &self.command().output().unwrap())
    }

    fn record(&self) -> RunRecord {
        record_in(&self.out)
    }
}

fn is_late(round: &Round) -> bool {
    matches!(round.voided, Some(VoidReason::GeneratorLate { .. }))
}

/// Runs the experiment file that `make` writes and expects this exit code; returns the output and the record, or
/// `None` if it cannot run.
fn recorded(code: i32, make: impl FnOnce(&Path) -> PathBuf) -> Option<(String, RunRecord)> {
    if !can_run(&["python3"]) {
        return None;
    }
    let case = Case::made(make);
    Some((case.run(code), case.record()))
}

fn assert_nothing_left(pid: u32) {
    let id = format!("{pid}.0");
    assert_eq!(namespaces(&format!("tplab-{id}-")), Vec::<String>::new());
    assert_eq!(marked(&id), 0);
    assert!(!Path::new(&format!("/run/turnpike-lab/{id}.json")).exists());
}

#[test]
fn a_run_is_recorded_with_figures_from_the_kernel() {
    needs!("python3");
    // The whole run is measured, so that both counts cover the same time.
    let case = Case::new(&[("patience = 20", "patience = 20\nwhole = true")]);
    case.run(0);
    let record_directory = only_directory(&case.out);
    let record = RunRecord::load(&record_directory).unwrap();
    assert_eq!((record.rounds.len(), record.aa.len(), record.seed), (4, 2, 11));
    assert!(!record.interrupted);
    assert!(record_directory.join("report.html").is_file());
    assert_eq!(record.environment.offloads.len(), 4);

    // The order follows the plan of three runs per round: both subjects and the baseline again.
    let plan = turnpike_lab::order::plan(11, 3, 2);
    for (index, order) in plan.iter().enumerate() {
        let place = |round: &Round| order[round.order_in_round as usize];
        for round in record.rounds.iter().filter(|round| round.index as usize == index) {
            assert_eq!(place(round), if round.subject == "first" { 0 } else { 1 });
        }
        let again = record.aa.iter().find(|round| round.index as usize == index).unwrap();
        assert_eq!(place(again), 2);
    }
    for round in record.rounds.iter().chain(&record.aa) {
        assert_eq!(round.voided, None);
        let metric = |name: &str| {
            *round.metrics.get(name).unwrap_or_else(|| panic!("{name} is missing from {round:?}"))
        };
        // Datagrams are counted in the kernel and by the generator. The IP counters also include IPv6 neighbour discovery.
        let (counted, reported) = (metric("delivered"), metric("generator_received"));
        assert!(reported > 50.0 && (0.0..=20.0).contains(&(counted - reported)), "{counted}, {reported}");
        assert!((metric("net.client.udp_in") - reported).abs() <= 1.0, "{round:?}");
        assert!((metric("segments_per_superpacket") - 1.0).abs() < 0.1);
        assert!(metric("rss_bytes") > 1e6 && metric("context_switches") > 10.0);
        assert!(metric("latency_p50_us") > 1.0 && round.latency.is_some());
        assert!(round.not_supported.contains("batch_occupancy"));
    }

    // Repeats the run from the record alone.
    fs::remove_file(case.directory.at("echoes.toml")).unwrap();
    let second = case.directory.at("again");
    ran(0, &["rerun", record_directory.to_str().unwrap(), "--out", second.to_str().unwrap()]);
    let again = record_in(&second);
    let order = |record: &RunRecord| {
        record.rounds.iter().map(|round| (round.subject.clone(), round.order_in_round)).collect::<Vec<_>>()
    };
    assert_eq!(order(&again), order(&record));
    assert_eq!(again.experiment, record.experiment);
}

/// Turns the second subject into two echoes in two namespaces; the second one exits after `left` datagrams.
fn fleet(directory: &Path, left: &str) -> PathBuf {
    let nodes = r#"[[subject.node]]
name = "one"
namespace = "relay"
vars = { own = "{relay}", left = "-1" }
[[subject.node]]
name = "two"
namespace = "peer"
vars = { own = "{peer}", left = "LEFT" }

[workload]"#;
    let changes = [
        ("{relay} 4000\"\nnamespace", "{relay} 4000\"\nvars = { all = \"{relay}\" }\nnamespace"),
        (
            "{relay} 4000 -1\"\nnamespace = \"relay\"",
            "{own} 4000 {left}\"\nvars = { all = \"{relay},{peer}\" }",
        ),
        ("load.py {relay}", "load.py {all}"),
        ("[workload]", &nodes.replace("LEFT", left)),
    ];
    experiment(directory, &changes)
}

#[test]
fn several_processes_form_one_subject() {
    let Some((_, record)) = recorded(0, |directory| fleet(directory, "-1")) else { return };
    let of = |name: &str| record.rounds.iter().find(|round| round.subject == name).unwrap();
    let metric = |round: &Round, name: &str| {
        *round.metrics.get(name).unwrap_or_else(|| panic!("{name} is missing from {round:?}"))
    };
    let (one, two) = (of("first"), of("second"));
    assert!(metric(one, "net.relay.udp_in") > 50.0 && metric(one, "net.peer.udp_in") < 1.0, "{one:?}");
    let at_nodes = ["net.relay.udp_in", "net.peer.udp_in"].map(|name| metric(two, name));
    assert!(at_nodes.iter().all(|count| *count > 25.0), "{two:?}");
    assert!((at_nodes[0] - at_nodes[1]).abs() <= 2.0, "the nodes' shares differ: {two:?}");
    let cpu: f64 = ["cpu.second-one_s", "cpu.second-two_s"].map(|name| metric(two, name)).iter().sum();
    assert!((cpu - metric(two, "subject_cpu_s")).abs() < 0.05, "{two:?}");
    let alone = metric(one, "rss_bytes");
    assert!(metric(two, "rss_bytes") > 1.5 * alone, "{alone}, {two:?}");
    let command = record.experiment.subjects[1].command.join(" ");
    assert!(
        command.contains("10.77.1.1 4000 -1 & python3") && command.ends_with("10.77.2.2 4000 -1"),
        "{command}"
    );
}

#[test]
fn a_node_that_crashes_fails_its_subject_and_is_reported() {
    let Some((said, record)) = recorded(1, |directory| fleet(directory, "150")) else { return };
    assert!(said.contains("under load, second-two exited with code 7"), "{said}");
    let failed = |round: &Round| matches!(round.voided, Some(VoidReason::SubjectFailed { .. }));
    assert!(record.rounds.iter().all(|round| failed(round) == (round.subject == "second")), "{record:?}");
}

#[test]
fn a_crashed_subject_is_reported() {
    // The subject survives the discarded run and exits in the measured one.
    let changes = [("4000 -1\"", "4000 300\""), ("rounds = 2", "rounds = 3")];
    let Some((said, record)) = recorded(1, |directory| experiment(directory, &changes)) else { return };
    assert!(said.contains("under load, second exited with code 7"), "{said}");
    assert!(said.contains("this is the end"), "no last output: {said}");
    let failed: Vec<&Round> = record.rounds.iter().filter(|round| round.subject == "second").collect();
    assert_eq!(failed.len(), 2, "abandoned after two failures");
    for round in failed {
        assert!(
            matches!(&round.voided, Some(VoidReason::SubjectFailed { how }) if how.contains("code 7;")),
            "{round:?}"
        );
        assert!(round.metrics.is_empty());
    }
    assert!(!said.contains("faster"), "a verdict: {said}");
}

#[test]
fn a_failing_optional_subject_is_abandoned() {
    let changes = [
        ("name = \"second\"", "name = \"second\"\noptional = true"),
        ("4000 -1\"", "none\""),
        ("rounds = 2", "rounds = 3"),
    ];
    let Some((said, record)) = recorded(1, |directory| experiment(directory, &changes)) else { return };
    assert!(said.contains("second failed every time: continuing without it"), "{said}");
    let runs = |name: &str| record.rounds.iter().filter(|round| round.subject == name).count();
    assert_eq!((runs("first"), record.aa.len(), runs("second")), (3, 3, 2));
}

#[test]
fn a_subject_rests_between_two_runs_as_configured() {
    let directory = Dir::new();
    let (path, times) = (directory.at("rest.toml"), directory.at("times"));
    let text = format!(
        r#"
name = "rest"
topology = "host"
metric = "subject_cpu_s"
rounds = 1
aa = false
discard = 0.1
counters = false
[[subject]]
name = "sleeper"
command = "sleep 600"
[workload]
command = ["sh", "-c", "date +%s%N >>{times}; sleep 0.1; date +%s%N >>{times}"]
format = "none"
whole = true
rest = 0.7
"#,
        times = times.display()
    );
    fs::write(&path, text).unwrap();
    let out = directory.at("out");
    let output = run(&["run", path.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    assert_eq!(entries(&out), 1, "{}", said(&output));
    let times = fs::read_to_string(times).unwrap();
    let times: Vec<u64> = times.lines().map(|line| line.parse().unwrap()).collect();
    let [_, first_ended, second_began, _] = times[..] else { panic!("{times:?}") };
    assert!(second_began - first_ended >= 700_000_000, "{times:?}");
}

#[test]
fn a_generator_that_fell_behind_voids_runs_with_advice() {
    needs!("python3");
    let case = Case::new(&[("500 {total}\"", "500 {total} 30\"")]);
    let arguments = [
        "run",
        case.path.to_str().unwrap(),
        "--metric",
        "delivered_pps",
        "--out",
        case.out.to_str().unwrap(),
    ];
    let output = ran(1, &arguments);
    let record = case.record();
    assert!(record.rounds.iter().all(is_late));
    assert_eq!(record.rounds.len(), 4, "such rounds are not repeated");
    has_all(
        &output,
        &[
            "fell behind in 6 of 6 runs",
            "the limit is 1000 µs (late_p99_us)",
            "--load-cpus",
            "--max-late-us ",
        ],
    );

    let allowed = case.directory.at("allowed");
    let arguments =
        [&arguments[..4], &["--max-late-us", "10000000", "--out", allowed.to_str().unwrap()]].concat();
    let output = ran(0, &arguments);
    let record = record_in(&allowed);
    assert_eq!(record.experiment.limits.late_p99_us, 1e7);
    assert!(record.rounds.iter().all(|round| round.voided.is_none()), "{output}");
}

#[test]
fn ab_with_only_void_rounds_prints_advice() {
    needs!("python3");
    let directory = Dir::new();
    let out = directory.at("out");
    let (echo, load) = (script("echo.py"), script("load.py"));
    let subject = format!("python3 {echo} {{relay}} 4000");
    let workload = format!("python3 {load} {{relay}} 4000 500 {{total}} 30");
    let mut arguments =
        vec!["ab", "--a", &subject, "--b", &subject, "--ready-udp-port", "4000", "--format", "turnpike"];
    arguments.extend(["--delivered-at", "client", "--metric", "delivered_pps", "--max-steal", "100"]);
    arguments.extend(["--rounds", "1", "--duration", "0.5", "--warmup", "0.1", "--discard", "0"]);
    arguments.extend(["--out", out.to_str().unwrap(), "--"]);
    arguments.extend(workload.split(' '));
    let output = ran(1, &arguments);
    let record = record_in(&out);
    assert!(record.rounds.iter().all(is_late));
    has_all(
        &output,
        &[
            "of 3 runs: 1 % of its datagrams",
            "the limit is 1000 µs (late_p99_us)",
            "a lower rate",
            "--max-late-us ",
        ],
    );
}

#[test]
fn cost_per_datagram_counts_if_the_generator_fell_behind() {
    // The rate is so low that even a busy machine sends the datagrams in time, except during the stalls.
    let changes = [("500 {total}\"", "200 {total} 30\"")];
    let Some((said, record)) = recorded(0, |directory| experiment(directory, &changes)) else { return };
    assert!(said.contains("the generator fell behind"), "{said}");
    assert!(record.rounds.iter().all(is_late));
    let counting = |metric: &str| record.rounds.iter().filter(|round| record.counts(round, metric)).count();
    assert!(counting("cpu_us_per_packet") >= 2, "{said}");
    assert_eq!(counting("latency_p99_us"), 0);
}

#[test]
fn all_errors_in_a_file_are_reported_before_the_start() {
    let case = Case::new(&[
        ("rounds = 2", "rouds = 2"),
        ("\"cpu_us_per_packet\"", "\"cpu\""),
        ("patience = 20", "patience = true"),
    ]);
    let output = case.run(2);
    let file = case.path.display();
    has_all(
        &output,
        &[
            format!("{file}:3:10: no metric \"cpu\" (expected one of delivered_pps, "),
            format!("{file}:4:1: unknown key \"rouds\"; did you mean \"rounds\"?"),
            format!("{file}:29:12: patience: found boolean true; expected a number"),
        ],
    );
    assert_eq!(entries(&case.out), 0);
}

#[test]
fn a_subject_that_is_never_ready_leaves_nothing_behind() {
    needs!("python3");
    let case = Case::new(&[("udp_port = \"4000\", within = 10", "stun = \"{relay}:4000\", within = 1")]);
    // A UDP echo returns the request, which is not a response.
    let child = case.command().spawn().unwrap();
    let pid = child.id();
    let output = ended(2, &child.wait_with_output().unwrap());
    assert!(
        output.contains("second is not ready after 1 s (no answer to STUN from 10.77.1.1:4000)"),
        "{output}"
    );
    assert_eq!(entries(&case.out), 0);
    assert_nothing_left(pid);
}

#[test]
fn ctrl_c_keeps_finished_measurements() {
    needs!("python3");
    let case = Case::new(&[("rounds = 2", "rounds = 100")]);
    let child = case.command().spawn().unwrap();
    let pid = child.id();
    eventually("the first run is recorded", || {
        entries(&case.out) == 1 && only_directory(&case.out).join("record.json").exists()
    });
    signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "not every subject has run: {}", said(&output));
    assert!(said(&output).contains("interrupted: finished measurements are kept"), "{}", said(&output));
    let record = case.record();
    assert!(record.interrupted && record.rounds.len() + record.aa.len() >= 1);
    assert!(only_directory(&case.out).join("report.html").is_file());
    assert_nothing_left(pid);
}

#[test]
fn sigkill_leaves_nothing_behind() {
    needs!("python3");
    let case = Case::new(&[("discard = 0.3", "discard = 60")]);
    let mut child = case
        .command()
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let id = format!("{}.0", child.id());
    // Three anchors, the subject and the generator.
    eventually("everything is running", || marked(&id) >= 5);
    signal(&child, "KILL");
    child.wait().unwrap();
    eventually("the guardian has acted", || {
        namespaces(&format!("tplab-{id}-")).is_empty() && marked(&id) == 0
    });
    eventually("the state file is gone", || !Path::new(&format!("/run/turnpike-lab/{id}.json")).exists());
}

#[test]
fn missing_tools_and_mistyped_keys_exit_with_code_2() {
    let cases = [
        (("python3 ", "no-such-program "), "`no-such-program` is needed"),
        (
            ("warmup = 0.1", "warmpu = 0.1"),
            "echoes.toml:6:1: unknown key \"warmpu\"; did you mean \"warmup\"?",
        ),
        (("namespace = \"client\"", "namespace = \"cleint\""), "did you mean \"client\"?"),
        (("counters = false", "rules = { resolutoin = 0.1 }"), "did you mean \"resolution\"?"),
    ];
    for (change, expected) in cases {
        if expected.contains("missing") && !can_run(&[]) {
            continue;
        }
        let case = Case::new(&[change]);
        let output = case.run(2);
        assert!(output.contains(expected), "{output}");
        assert_eq!(entries(&case.out), 0);
    }
}

#[test]
fn two_commands_are_compared_without_a_file() {
    needs!("python3");
    let directory = Dir::new();
    let out = directory.at("out");
    let (echo, load) = (script("echo.py"), script("load.py"));
    let port = 20_000 + std::process::id() % 20_000;
    let subject = format!("python3 {echo} 127.0.0.1 {port}");
    // Stolen CPU time and lateness are not under test.
    let limits = "--max-steal 100 --max-late-us 10000000";
    let options =
        format!("--ready-udp-port {port} --format turnpike --rounds 1 --duration 0.3 --warmup 0.1 {limits}");
    let words = format!("ab {options} --discard 0 --out {}", out.display());
    let mut words: Vec<&str> = words.split(' ').chain(["--a", &subject, "--b", &subject, "--"]).collect();
    let load = format!("python3 {load} 127.0.0.1 {port} 300 {{total}}");
    words.extend(load.split(' '));
    let output = ran(0, &words);
    assert!(
        output.contains("\npackets_per_cpu_s: b against a: cannot tell"),
        "one round is too few: {output}"
    );
    let record = record_in(&out);
    assert!(record.rounds[0].metrics["delivered_pps"] > 50.0, "{:?}", record.rounds[0]);
}

#[test]
fn a_search_finds_a_rate_and_records_its_trials() {
    needs!("python3");
    let case = Case::new(&[
        ("4000 500 {total}", "4000 {rate} {total}"),
        ("[[subject]]\nname = \"first\"", "[vars]\nrate = 200\n\n[[subject]]\nname = \"first\""),
    ]);
    let text = fs::read_to_string(&case.path).unwrap();
    let (first, rest) = text.split_once("[[subject]]\nname = \"second\"").unwrap();
    let (_, workload) = rest.split_once("[workload]").unwrap();
    fs::write(&case.path, format!("{first}[workload]{workload}")).unwrap();
    // Even the highest rate of such a low range is sustainable, so the search is short.
    let options = "--min 50 --max 200 --trial 0.3 --width 50 --loss 0.5 --rounds 1";
    let output = {
        let words = format!("find-max {} {options} --out {}", case.path.display(), case.out.display());
        ran(0, &words.split(' ').collect::<Vec<_>>())
    };
    let record = case.record();
    assert_eq!(record.sweeps.len(), 1);
    for sweep in &record.sweeps {
        let found = &sweep.found[0];
        assert!(found.lower_pps.is_some(), "{output}");
        // Trials, and the latencies at 30, 60 and 80 %.
        assert!(sweep.points.len() >= 4);
        let lowest = &sweep.points[sweep.points.len() - 3];
        assert!(lowest.latency.is_some() && lowest.offered_pps < 0.5 * found.lower_pps.unwrap() as f64);
    }
    assert!(record.rounds[0].metrics.contains_key("find_max_0.5_pps"));
}
