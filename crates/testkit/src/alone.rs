//! Runs a test in a process of its own, with its own descriptors, memory or namespaces. For this, the test program starts itself again with
//! only that test.

use std::{
    env,
    ffi::OsString,
    process::{Command, Output},
};

const INSIDE: &str = "TURNPIKE_TEST_ALONE";

/// Runs `body` in a new process. `test` is the calling test's full name.
pub fn in_own_process(test: &str, body: impl FnOnce()) {
    again(test, &[], body);
}

/// Like [`in_own_process`], with at most `most` descriptors (RLIMIT_NOFILE), which neither the process nor its children can raise. Skips
/// the test with a reason if this is impossible.
pub fn with_descriptors(test: &str, most: u32, body: impl FnOnce()) {
    // Root can raise every limit unless it drops the capability.
    let script = format!(
        "ulimit -n {most} || exit 1; [ \"$(id -u)\" != 0 ] || exec setpriv --bounding-set=-sys_resource -- \"$0\" \"$@\"; \
         exec \"$0\" \"$@\""
    );
    let launcher = ["sh", "-c", &script];
    if !is_inside(test) && !works(&launcher, &["true"]) {
        return skip("cannot drop the capability to raise the descriptor limit");
    }
    again(test, &launcher, body);
}

/// Like [`in_own_process`], in new namespaces; `kinds` are option letters of unshare(1). Skips the test with a reason if `probe` fails in
/// the namespaces.
pub fn in_namespaces(test: &str, kinds: &str, probe: &[&str], body: impl FnOnce()) {
    if is_inside(test) {
        return body();
    }
    // A user namespace needs no privileges but is often forbidden in containers, where root can do without one.
    let flags = [format!("-{kinds}"), format!("-r{kinds}")];
    match flags.iter().find(|flags| works(&["unshare", flags], probe)) {
        Some(flags) => again(test, &["unshare", flags], body),
        None => skip(&format!("unshare -{kinds} {} does not work here", probe.join(" "))),
    }
}

/// Like [`in_namespaces`], with a new network namespace in which loopback is up.
pub fn in_network_namespace(test: &str, body: impl FnOnce()) {
    const UP: [&str; 5] = ["ip", "link", "set", "lo", "up"];
    in_namespaces(test, "n", &UP, || {
        run(UP[0], &UP[1..]);
        body();
    });
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Expands to the name of the enclosing test function, as libtest prints it.
#[macro_export]
macro_rules! this_test {
    () => {{
        fn here() {}
        $crate::alone::path_of(here)
    }};
}

/// Path, without the crate, of the function in which the function `inner` is declared.
#[doc(hidden)]
pub fn path_of<T>(_inner: T) -> &'static str {
    let path = std::any::type_name::<T>().trim_end_matches("::here");
    let path = path.split_once("::{{closure}}").map_or(path, |(path, _)| path);
    path.split_once("::").map_or(path, |(_, path)| path)
}

/// Unwraps a requirement of the test; if it is missing, prints the reason and ends the test.
#[macro_export]
macro_rules! need {
    ($what:expr) => {
        match $what {
            Ok(there) => there,
            Err(why) => return $crate::alone::skip(why.as_ref()),
        }
    };
}

#[expect(clippy::print_stdout, reason = "libtest shows the line, and ./test reads it")]
pub fn skip(why: &str) {
    println!("SKIPPED: {why}");
}

fn is_inside(test: &str) -> bool {
    env::var_os(INSIDE).is_some_and(|inside| inside == test)
}

fn works(launcher: &[&str], program: &[&str]) -> bool {
    let output = Command::new(launcher[0]).args(&launcher[1..]).args(program).output();
    output.is_ok_and(|output| output.status.success())
}

/// Runs `body` if this is the process started for it; otherwise starts that process through `launcher`.
fn again(test: &str, launcher: &[&str], body: impl FnOnce()) {
    if is_inside(test) {
        return body();
    }
    let own = env::current_exe().unwrap_or_else(|error| panic!("cannot find this program: {error}"));
    let words: Vec<OsString> = launcher.iter().map(OsString::from).chain([own.into()]).collect();
    let output = Command::new(&words[0])
        .args(&words[1..])
        // Includes ignored tests, because the caller selected this one explicitly.
        .args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(INSIDE, test)
        .output()
        .unwrap_or_else(|error| panic!("{:?}: {error}", words[0]));
    let said = tell(&output);
    assert!(output.status.success(), "{test} failed in its own process");
    assert!(said.contains("1 passed"), "{test} is not a test of this program");
}

#[expect(clippy::print_stdout, reason = "prints the output of the inner test")]
fn tell(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for line in said.lines() {
        // libtest prints the first output of a test on the line with its name.
        let words = if line.starts_with("test ") {
            line.split_once(" ... ").map_or("", |split| split.1)
        } else {
            line
        };
        if !matches!(words, "" | "ok" | "FAILED") && !words.starts_with("running ") {
            println!("{words}");
        }
    }
    String::from_utf8_lossy(&output.stderr).lines().for_each(|line| println!("{line}"));
    said
}

#[cfg(test)]
mod tests {
    use std::panic;

    use super::*;
    use crate::process;

    #[test]
    fn a_limit_applies_only_in_the_new_process() {
        let outside = std::process::id();
        with_descriptors(crate::this_test!(), 50, || {
            let taken = process::take_descriptors();
            assert!(taken.len() < 50);
        });
        assert_eq!(std::process::id(), outside);
    }

    #[test]
    fn an_inner_failure_fails_the_outer_test() {
        let test = crate::this_test!();
        assert_eq!(test, "alone::tests::an_inner_failure_fails_the_outer_test");
        let inside = is_inside(test);
        let failed = panic::catch_unwind(|| in_own_process(test, || panic!("expected")));
        if inside {
            panic::resume_unwind(failed.expect_err("the closure panics"));
        }
        assert!(failed.is_err());
    }

    #[test]
    fn an_unknown_test_name_is_reported() {
        assert!(panic::catch_unwind(|| in_own_process("alone::tests::no_such_test", || {})).is_err());
    }
}
