//! Runs the lab as a separate process, to test signals, exit codes and leftovers.
#![allow(dead_code, unused_imports, reason = "each test file uses only a part of this module")]
#![allow(clippy::unwrap_used, reason = "a failed step must fail the test")]

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
};

use turnpike_lab::RunRecord;
pub(crate) use turnpike_testkit::{Dir, eventually};

const ARGUMENTS: &str = "TURNPIKE_LAB_TEST_ARGUMENTS";

/// Body of the test `as_lab` in each file; does nothing unless [`lab`] has started this program.
pub(crate) fn as_lab() {
    if let Ok(arguments) = std::env::var(ARGUMENTS) {
        let arguments = std::iter::once("turnpike lab").chain(arguments.split('\x1f'));
        std::process::exit(i32::from(turnpike_lab::main(arguments)));
    }
}

pub(crate) fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support").join(name).display().to_string()
}

pub(crate) fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "as_lab", "--nocapture"])
        .env(ARGUMENTS, arguments.join("\x1f"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    lab(arguments).output().unwrap()
}

/// Output of a run that must end with this exit code.
#[track_caller]
pub(crate) fn ran(code: i32, arguments: &[&str]) -> String {
    ended(code, &run(arguments))
}

#[track_caller]
pub(crate) fn ended(code: i32, output: &Output) -> String {
    let told = said(output);
    assert_eq!(output.status.code(), Some(code), "{told}");
    told
}

#[track_caller]
pub(crate) fn has_all(text: &str, parts: &[impl AsRef<str>]) {
    let parts = parts.iter().map(AsRef::as_ref);
    for part in parts {
        assert!(text.contains(part), "{part} is missing from {text}");
    }
}

/// Record of the only run below `out`.
#[track_caller]
pub(crate) fn record_in(out: &Path) -> RunRecord {
    RunRecord::load(&only_directory(out)).unwrap()
}

/// Ends the test unless namespaces and these programs are available.
macro_rules! needs {
    ($($program:literal),*) => {
        if !support::can_run(&[$($program),*]) {
            return;
        }
    };
}
pub(crate) use needs;

pub(crate) fn said(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Checks that namespaces and these programs are available; if not, prints the reason and returns false. For an
/// ordinary user, reruns the whole test as root of a user namespace and returns false.
pub(crate) fn can_run(programs: &[&str]) -> bool {
    for program in ["ip", "nsenter", "unshare"].iter().chain(programs) {
        let found = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .any(|path| path.join(program).is_file());
        if !found {
            eprintln!("SKIPPED: `{program}` is not installed");
            return false;
        }
    }
    if !is_root() {
        run_in_user_namespace();
        return false;
    }
    if !Command::new("unshare").args(["-n", "true"]).status().unwrap().success() {
        eprintln!("SKIPPED: no permission for network namespaces");
        return false;
    }
    true
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Reruns the test of this thread as root of a user namespace.
fn run_in_user_namespace() {
    const NAMESPACES: [&str; 3] = ["--map-root-user", "--mount", "--net"];
    if !Command::new("unshare").args(NAMESPACES).arg("true").stderr(Stdio::null()).status().unwrap().success()
    {
        eprintln!(
            "SKIPPED: network namespaces need root, or a kernel that lets users create user namespaces"
        );
        return;
    }
    let test = thread::current().name().expect("libtest names each thread after its test").to_owned();
    // ip(8) keeps the names of namespaces below /run, which belongs to root. Without loopback there is no
    // routing table.
    let output = Command::new("unshare")
        .args(NAMESPACES)
        .args(["sh", "-c", r#"mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@""#, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{test} failed as root of a user namespace: {}", said(&output));
    for line in said(&output).lines().filter(|line| line.starts_with("SKIPPED: ")) {
        eprintln!("{line}");
    }
}

pub(crate) fn namespaces(prefix: &str) -> Vec<String> {
    let list = Command::new("ip").args(["netns", "list"]).output().unwrap();
    String::from_utf8_lossy(&list.stdout)
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| name.starts_with(prefix))
        .map(str::to_owned)
        .collect()
}

pub(crate) fn marked(id: &str) -> usize {
    let mark = format!("TPLAB={id}");
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| {
            fs::read(entry.path().join("environ"))
                .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|word| word == mark.as_bytes()))
        })
        .count()
}

pub(crate) fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
}

pub(crate) fn only_directory(base: &Path) -> std::path::PathBuf {
    let entries: Vec<_> = fs::read_dir(base).unwrap().flatten().map(|entry| entry.path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.into_iter().next().unwrap()
}

pub(crate) fn entries(base: &Path) -> usize {
    fs::read_dir(base).map_or(0, Iterator::count)
}
