//! A benchmark that dies takes its namespaces and programs with it.

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use std::{
    os::unix::fs::MetadataExt,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");

#[test]
fn a_killed_benchmark_leaves_no_namespace_and_no_program() {
    if let Some(reason) = obstacle() {
        eprintln!("skipped: {reason}");
        return;
    }
    // Never serves, so that the benchmark waits for it while we kill.
    let mut bench = Command::new(XTASK)
        .args(["bench", "relay", "--generator", "uclient", "--without", "coturn", "--without", "turnpike"])
        .args(["--subject", "idler=sleep 4711", "--rounds", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let prefix = format!("tp-bench-{}-", bench.id());
    let relay = format!("{prefix}relay");
    // The anchor and the subject.
    let up = until(|| pids_in(&relay).len() >= 2);
    let inside = pids_in(&relay);
    end(&mut bench);
    assert!(up, "the benchmark did not start its subject");
    assert!(until(|| namespaces(&prefix).is_empty()), "left behind: {:?}", namespaces(&prefix));
    // Ended or, where nobody reaps orphans, a zombie without a command line.
    let runs = |pid: &String| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|command| command.starts_with(b"sleep"))
    };
    assert!(until(|| !inside.iter().any(runs)), "still running: {inside:?}");
}

fn obstacle() -> Option<&'static str> {
    if std::fs::metadata("/proc/self").map_or(true, |process| process.uid() != 0) {
        return Some("not root");
    }
    let ip = Command::new("ip").args(["netns", "list"]).output();
    if !ip.is_ok_and(|output| output.status.success()) {
        return Some("no `ip netns` here");
    }
    let probe = format!("tp-probe-{}", std::process::id());
    let netns = |verb: &str| Command::new("ip").args(["netns", verb, &probe]).stderr(Stdio::null()).status();
    let may = netns("add").is_ok_and(|status| status.success());
    let _ = netns("del");
    (!may).then_some("may not make network namespaces")
}

fn end(bench: &mut Child) {
    // SIGKILL: nothing in the process itself can clean up.
    bench.kill().unwrap();
    bench.wait().unwrap();
}

fn namespaces(prefix: &str) -> Vec<String> {
    lines(&["netns", "list"]).into_iter().filter(|name| name.starts_with(prefix)).collect()
}

fn pids_in(namespace: &str) -> Vec<String> {
    lines(&["netns", "pids", namespace])
}

fn lines(arguments: &[&str]) -> Vec<String> {
    let output = Command::new("ip").args(arguments).output().unwrap();
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

fn until(condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}
