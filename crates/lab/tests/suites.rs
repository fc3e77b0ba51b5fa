//! Suites of tiny experiments: one table, one record per row, thresholds, and resuming after an interruption.
#![allow(clippy::unwrap_used, reason = "a failed step must fail the test")]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use support::{Dir, ended, eventually, has_all, lab, needs, only_directory, ran, run, said, script, signal};
use turnpike_lab::RunRecord;

#[test]
fn as_lab() {
    support::as_lab();
}

/// Suite with two rows: an echo at two rates. The second row has two thresholds: one that cannot be met and one
/// that is always met.
fn suite(directory: &Path) -> PathBuf {
    let (echo, load) = (script("echo.py"), script("load.py"));
    let experiment = format!(
        r#"
name = "echo"
metric = "delivered_pps"
rounds = 2
aa = false
duration = 0.5
warmup = 0.1
discard = 0
counters = false
rules = {{ min_rounds = 2, need_noise_floor = false }}
limits = {{ steal_percent = 100.0, late_p99_us = 1e9 }}
[sweep]
rate = [100, 200]
[[subject]]
name = "missing"
command = "no-such-echo"
optional = true
[[subject]]
name = "echo"
command = "python3 {echo} {{relay}} 4000"
namespace = "relay"
ready = {{ udp_port = "4000" }}
[workload]
command = "python3 {load} {{relay}} 4000 {{rate}} {{total}}"
result = "stdout"
namespace = "client"
delivered_at = ["client"]
"#
    );
    fs::write(directory.join("echo.toml"), experiment).unwrap();
    let path = directory.join("both.toml");
    let text = r#"
name = "both"
[[row]]
title = "slow"
experiment = "echo"
set = { rate = 100 }
[[row]]
title = "fast"
experiment = "echo"
set = { rate = 200 }
must = [
  { metric = "delivered_pps", own = true, at_least = 1e9 },
  { metric = "delivered_pps", own = true, at_least = 1 },
]
"#;
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn an_interrupted_suite_resumes() {
    needs!("python3");
    let directory = Dir::new();
    let out = directory.at("out");
    let suite = suite(directory.path());
    let child = lab(&["suite", suite.to_str().unwrap(), "--out", out.to_str().unwrap()]).spawn().unwrap();
    let journal = || fs::read_to_string(only_directory(&out).join("suite.json")).unwrap_or_default();
    eventually("the first row has a record", || {
        support::entries(&out) > 0 && journal().contains("\"record\"")
    });
    signal(&child, "INT");
    let output = ended(1, &child.wait_with_output().unwrap());
    let kept = only_directory(&out);
    let told = format!(
        "interrupted with 1 of 2 rows left: continue with `turnpike lab suite --resume {}`",
        kept.display()
    );
    assert!(output.contains(&told), "{output}");
    assert!(output.contains("not yet measured"), "{output}");

    // The directory is self-contained, so the suite file is not needed.
    fs::remove_file(suite).unwrap();
    let records = || {
        let text: serde_json::Value = serde_json::from_str(&journal()).unwrap();
        let rows = text["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["record"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let [Some(first), None] = &records()[..] else { panic!("{:?}", records()) };
    let before = RunRecord::load(&kept.join(first)).unwrap();
    let output = run(&["suite", "--resume", kept.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(3), "a threshold that must be met is missed: {}", said(&output));
    let [Some(again), Some(second)] = &records()[..] else { panic!("{:?}", records()) };
    assert_eq!(
        (again, RunRecord::load(&kept.join(again)).unwrap()),
        (first, before),
        "the finished row was not run again"
    );
    let second = RunRecord::load(&kept.join(second)).unwrap();
    assert!(!second.interrupted && second.rounds.len() == 2, "{}", said(&output));
    assert!(kept.join(first).join("report.html").is_file());

    let table = fs::read_to_string(kept.join("table.md")).unwrap();
    assert!(said(&output).contains(&table), "{}", said(&output));
    let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "| slow | delivered_pps | ",
        "| must ≥ 1.000 G/s of echo; must ≥ 1.000 /s of echo | **missed**; met |",
    ] {
        assert!(table.contains(part), "{part} is missing from {table}");
    }
    assert!(table.contains("missing is skipped: `no-such-echo` is needed"), "{table}");

    let output = ran(3, &["report", kept.to_str().unwrap()]);
    assert!(output.contains("thresholds: 1 met, 1 missed, 0 undecided"), "{output}");
}

#[test]
fn an_error_in_any_row_is_reported_before_the_start() {
    let directory = Dir::new();
    let suite = suite(directory.path());
    let text = fs::read_to_string(&suite).unwrap();
    fs::write(&suite, text.replace("rate = 200", "rat = 200").replace("rate = 100", "")).unwrap();
    let out = directory.at("out");
    let output = ran(2, &["suite", suite.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    has_all(
        &output,
        &[
            "row \"slow\": echo sweeps 2 points: set its swept variables",
            "row \"fast\": --set rat=200: no variable \"rat\"; did you mean \"rate\"?",
        ],
    );
    assert!(!out.exists());
}

#[test]
fn built_ins_are_listed_and_found_by_name() {
    let listed = said(&run(&["list"]));
    has_all(&listed, &["  relay-thin ", "  forward-udp ", "  relay ", "  forward ", "  forward-kernel "]);
    let output = ran(2, &["run", "relay-thick"]);
    assert!(output.contains("no experiment relay-thick; did you mean \"relay-thin\"?"), "{output}");
}
