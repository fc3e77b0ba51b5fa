//! Use of records: graphs of sweeps, reruns and comparisons.
#![allow(clippy::unwrap_used, reason = "a failed step must fail the test")]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use support::{Dir, needs, only_directory, ran, record_in, run, said, script};
use turnpike_lab::RunRecord;

#[test]
fn as_lab() {
    support::as_lab();
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
    needs!("python3");
    let directory = Dir::new();
    let path = experiment(directory.path());
    let (first, second) = (directory.at("first"), directory.at("second"));
    let out = |base: &Path| base.to_str().unwrap().to_owned();
    let output = ran(0, &["sweep", path.to_str().unwrap(), "--rates", "100,300", "--out", &out(&first)]);
    assert_eq!(output.matches("/s offered").count(), 2, "{output}");
    let first = only_directory(&first);
    let html = fs::read_to_string(first.join("report.html")).unwrap();
    for title in ["Delivered vs. offered rate", "Loss vs. offered rate", "p99 latency vs. offered rate"] {
        assert!(html.contains(title), "{title}");
    }
    assert!(html.matches("<svg").count() >= 3);

    fs::remove_file(path).unwrap();
    ran(0, &["rerun", first.to_str().unwrap(), "--out", &out(&second)]);
    let second = only_directory(&second);
    let rates = |directory: &Path| -> Vec<f64> {
        let points = &RunRecord::load(directory).unwrap().sweeps[0].points;
        points.iter().map(|point| (point.offered_pps / 50.0).round() * 50.0).collect()
    };
    assert_eq!(rates(&second), rates(&first));

    // The records are comparable, unless the kernel has changed since.
    let report = |other: &Path| ran(0, &["report", first.to_str().unwrap(), other.to_str().unwrap()]);
    let output = report(&second);
    assert!(!output.contains("NOT COMPARABLE"), "{output}");
    let mut other = RunRecord::load(&second).unwrap();
    other.environment.kernel = "2.6.32".to_owned();
    other.save(&second).unwrap();
    let output = report(&second);
    assert!(output.contains("NOT COMPARABLE") && output.contains("2.6.32"), "{output}");
}

#[test]
fn rerun_and_report_notice_a_replaced_build() {
    needs!("python3");
    let directory = Dir::new();
    let path = experiment(directory.path());
    let subject = directory.at("subject.py");
    fs::copy(script("echo.py"), &subject).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace(&script("echo.py"), subject.to_str().unwrap())).unwrap();
    let out = directory.at("out");
    let arguments = ["run", path.to_str().unwrap(), "--rounds", "1", "--out", out.to_str().unwrap()];
    ran(0, &arguments);
    let first = only_directory(&out);
    let record = RunRecord::load(&first).unwrap();
    let measured = record.programs.iter().find(|build| build.path.ends_with("subject.py")).unwrap();
    assert_eq!((measured.name.as_str(), measured.word), ("only", 1));
    assert_eq!(measured.sha256.as_ref().unwrap().len(), 64);
    let report = || said(&run(&["report", first.to_str().unwrap()]));
    assert!(report().contains("subject.py, SHA-256 ") && !report().contains("has changed"), "{}", report());

    let mut changed = fs::read_to_string(&subject).unwrap();
    changed.push_str("# another build\n");
    fs::write(&subject, changed).unwrap();
    assert!(report().contains("subject.py has changed: then SHA-256 "), "{}", report());
    let second = directory.at("second");
    let output = ran(0, &["rerun", first.to_str().unwrap(), "--out", second.to_str().unwrap()]);
    let words = "subject.py has changed: then SHA-256 ";
    assert!(output.contains("warning: only: ") && output.contains(words), "{output}");
    let second = record_in(&second);
    assert!(
        second.environment.notes.iter().any(|note| note.contains(words)),
        "{:?}",
        second.environment.notes
    );
    assert_ne!(second.programs, record.programs);
}

#[test]
fn a_file_replaced_during_the_experiment_is_noted() {
    needs!("python3");
    let directory = Dir::new();
    let path = experiment(directory.path());
    let settings = directory.at("settings");
    fs::write(&settings, "before\n").unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let (head, command) = text.split_once("[workload]\ncommand = \"").unwrap();
    let text = format!(
        "{head}[workload]\ncommand = \"sh -c 'echo after >> $0; exec $*' {} {command}",
        settings.display()
    );
    fs::write(&path, text).unwrap();
    let out = directory.at("out");
    let output = ran(0, &["run", path.to_str().unwrap(), "--rounds", "1", "--out", out.to_str().unwrap()]);
    let note = "a file changed during the experiment: the workload: ";
    assert!(output.contains(&format!("warning: {note}")), "{output}");
    let notes = record_in(&out).environment.notes;
    assert!(
        notes.iter().any(|text| text.starts_with(note) && text.contains("/settings has changed")),
        "{notes:?}"
    );
}

#[test]
fn record_and_report_contain_the_syscalls() {
    needs!("python3", "strace");
    let directory = Dir::new();
    let path = experiment(directory.path());
    let out = directory.at("out");
    let arguments =
        ["run", path.to_str().unwrap(), "--rounds", "1", "--syscalls", "--out", out.to_str().unwrap()];
    ran(0, &arguments);
    let directory = only_directory(&out);
    let record = RunRecord::load(&directory).unwrap();
    let table = &record.syscalls["only"];
    let calls =
        |name: &str| table.iter().filter(|row| row.name.starts_with(name)).map(|row| row.calls).sum::<u64>();
    // The echo receives and sends once per datagram, 40 times within the window, or fewer while the tracer
    // attaches.
    let (received, sent) = (calls("recv"), calls("send"));
    assert!(received >= 10 && received.abs_diff(sent) <= 1, "{table:?}");
    assert!(fs::read_to_string(directory.join("report.html")).unwrap().contains("Syscalls of only"));
}
