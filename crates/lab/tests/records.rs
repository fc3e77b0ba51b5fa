//! What becomes of records: sweeps as curves, repeated, put side by side, and put into the log.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use support::{can_run, only_directory, run, said};
use turnpike_lab::Record;

#[test]
fn as_lab() {
    support::as_lab();
}

fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support").join(name).display().to_string()
}

fn experiment(directory: &Path) -> PathBuf {
    let (echo, load) = (script("echo.py"), script("load.py"));
    let text = format!(
        r#"
name = "echoes"
metric = "cpu_us_per_packet"
duration = 0.4
warmup = 0
discard = 0
counters = false
limits = {{ steal_percent = 100.0, late_p99_us = 1e9 }}
[vars]
rate = 100
[[subject]]
name = "only"
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
    let path = directory.join("echoes.toml");
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_sweep_is_drawn_repeated_and_compared() {
    if !can_run(&["python3"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = experiment(directory.path());
    let (first, second) = (directory.path().join("first"), directory.path().join("second"));
    let out = |base: &Path| base.to_str().unwrap().to_owned();
    let output = run(&["sweep", path.to_str().unwrap(), "--rates", "100,300", "--out", &out(&first)]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(said(&output).matches("/s offered").count(), 2, "{}", said(&output));
    let first = only_directory(&first);
    let html = fs::read_to_string(first.join("report.html")).unwrap();
    for title in ["Delivered over offered", "Loss over offered", "Latency p99 over offered"] {
        assert!(html.contains(title), "{title}");
    }
    assert!(html.matches("<svg").count() >= 3);

    // A sweep again, not a comparison of one subject with nobody.
    fs::remove_file(path).unwrap();
    let output = run(&["rerun", first.to_str().unwrap(), "--out", &out(&second)]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let second = only_directory(&second);
    let rates = |directory: &Path| -> Vec<f64> {
        let points = &Record::load(directory).unwrap().sweeps[0].points;
        points.iter().map(|point| (point.offered_pps / 50.0).round() * 50.0).collect()
    };
    assert_eq!(rates(&second), rates(&first));

    // Side by side; of another day and kernel, not so.
    let report = |other: &Path| {
        let mut command = support::lab(&["report", first.to_str().unwrap(), other.to_str().unwrap()]);
        command.current_dir(directory.path()).output().unwrap()
    };
    let output = report(&second);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(!said(&output).contains("NOT COMPARABLE"), "{}", said(&output));
    let mut other = Record::load(&second).unwrap();
    other.environment.kernel = "2.6.32".to_owned();
    other.save(&second).unwrap();
    let output = report(&second);
    assert!(
        said(&output).contains("NOT COMPARABLE") && said(&output).contains("2.6.32"),
        "{}",
        said(&output)
    );
    let page = fs::read_to_string(directory.path().join("lab-comparison.html")).unwrap();
    assert!(page.contains("These records are not comparable."));
}

#[test]
fn syscalls_stand_in_the_record_and_in_the_report() {
    if !can_run(&["python3", "strace"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = experiment(directory.path());
    let out = directory.path().join("out");
    let arguments =
        ["run", path.to_str().unwrap(), "--rounds", "1", "--syscalls", "--out", out.to_str().unwrap()];
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let directory = only_directory(&out);
    let record = Record::load(&directory).unwrap();
    let table = &record.syscalls["only"];
    let calls =
        |name: &str| table.iter().filter(|row| row.name.starts_with(name)).map(|row| row.calls).sum::<u64>();
    // An echo receives and sends once each, 40 times in the window, less while it waits for its tracer.
    let (received, sent) = (calls("recv"), calls("send"));
    assert!(received >= 10 && received.abs_diff(sent) <= 1, "{table:?}");
    assert!(fs::read_to_string(directory.join("report.html")).unwrap().contains("Syscalls of only"));
}
