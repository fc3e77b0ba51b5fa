//! Tests with a process to themselves: for its descriptors, its memory or its namespaces. The test starts its own program again, for
//! itself alone; the rest of it runs in there.

use std::{
    env,
    ffi::OsString,
    process::{Command, Output},
};

const INSIDE: &str = "TURNPIKE_TEST_ALONE";

/// Runs `body` in a process of its own. `test` is the name of the calling test, with its modules.
pub fn in_own_process(test: &str, body: impl FnOnce()) {
    again(test, &[], body);
}

/// The same with so many descriptors at most (RLIMIT_NOFILE), which neither it nor its children can raise. Says why the test does not
/// run where it cannot be made so.
pub fn with_descriptors(test: &str, most: u32, body: impl FnOnce()) {
    // Root may raise every limit, but for who has given that up.
    let script = format!(
        "ulimit -n {most} || exit 1; [ \"$(id -u)\" != 0 ] || exec setpriv --bounding-set=-sys_resource -- \"$0\" \"$@\"; \
         exec \"$0\" \"$@\""
    );
    let launcher = ["sh", "-c", &script];
    if !is_inside(test) && !works(&launcher, &["true"]) {
        return skip("cannot give up raising the limit of descriptors");
    }
    again(test, &launcher, body);
}

/// The same in namespaces of its own, `kinds` being letters of unshare(1). Where the machine does not let `probe` run so, says why
/// the test does not run.
pub fn in_namespaces(test: &str, kinds: &str, probe: &[&str], body: impl FnOnce()) {
    if is_inside(test) {
        return body();
    }
    // A user namespace needs no privilege, but is often forbidden in containers, where root may do without.
    let flags = [format!("-{kinds}"), format!("-r{kinds}")];
    match flags.iter().find(|flags| works(&["unshare", flags], probe)) {
        Some(flags) => again(test, &["unshare", flags], body),
        None => skip(&format!("unshare -{kinds} {} does not work here", probe.join(" "))),
    }
}

/// The same in a network namespace of its own with loopback up.
pub fn in_network_namespace(test: &str, body: impl FnOnce()) {
    const UP: [&str; 5] = ["ip", "link", "set", "lo", "up"];
    in_namespaces(test, "n", &UP, || {
        run(UP[0], &UP[1..]);
        body();
    });
}

/// Runs a program that must succeed.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Name of the test function that this stands in, as the test program knows it.
#[macro_export]
macro_rules! this_test {
    () => {{
        fn here() {}
        $crate::alone::path_of(here)
    }};
}

/// Path of the function that `inner` is declared in, without the crate.
#[doc(hidden)]
pub fn path_of<T>(_inner: T) -> &'static str {
    let path = std::any::type_name::<T>().trim_end_matches("::here");
    let path = path.split_once("::{{closure}}").map_or(path, |(path, _)| path);
    path.split_once("::").map_or(path, |(_, path)| path)
}

/// What a test cannot do without; where that is missing, says why and ends the test.
#[macro_export]
macro_rules! need {
    ($what:expr) => {
        match $what {
            Ok(there) => there,
            Err(why) => return $crate::alone::skip(why.as_ref()),
        }
    };
}

/// Says that a test did not run; `./test` collects these lines.
#[expect(clippy::print_stdout, reason = "libtest shows it, and ./test reads it")]
pub fn skip(why: &str) {
    println!("SKIPPED: {why}");
}

/// Whether this is the process that was started for this test.
fn is_inside(test: &str) -> bool {
    env::var_os(INSIDE).is_some_and(|inside| inside == test)
}

/// Whether a launcher can start this program.
fn works(launcher: &[&str], program: &[&str]) -> bool {
    let output = Command::new(launcher[0]).args(&launcher[1..]).args(program).output();
    output.is_ok_and(|output| output.status.success())
}

/// Runs `body` if this is the process for it; else starts that one, by the program and arguments of `launcher` in front of its own.
fn again(test: &str, launcher: &[&str], body: impl FnOnce()) {
    if is_inside(test) {
        return body();
    }
    let own = env::current_exe().unwrap_or_else(|error| panic!("where is this program? {error}"));
    let words: Vec<OsString> = launcher.iter().map(OsString::from).chain([own.into()]).collect();
    let output = Command::new(&words[0])
        .args(&words[1..])
        // Whoever runs it has asked for it, also where it is one that takes long.
        .args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(INSIDE, test)
        .output()
        .unwrap_or_else(|error| panic!("{:?}: {error}", words[0]));
    let said = tell(&output);
    assert!(output.status.success(), "{test} failed in its own process");
    assert!(said.contains("1 passed"), "{test} is no test of this program");
}

/// Shows what was said inside, without libtest's own words: the test is counted out here.
#[expect(clippy::print_stdout, reason = "passes on what the test inside said")]
fn tell(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for line in said.lines() {
        // What a test says first stands behind its name.
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
    fn a_limit_holds_inside_alone() {
        let outside = std::process::id();
        with_descriptors(crate::this_test!(), 50, || {
            let taken = process::take_descriptors();
            assert!(taken.len() < 50);
        });
        assert_eq!(std::process::id(), outside);
    }

    #[test]
    fn what_fails_inside_fails_outside() {
        let test = crate::this_test!();
        assert_eq!(test, "alone::tests::what_fails_inside_fails_outside");
        let inside = is_inside(test);
        let failed = panic::catch_unwind(|| in_own_process(test, || panic!("as it should")));
        if inside {
            panic::resume_unwind(failed.expect_err("it panics"));
        }
        assert!(failed.is_err());
    }

    #[test]
    fn a_name_that_no_test_has_is_told() {
        assert!(panic::catch_unwind(|| in_own_process("alone::tests::no_such_test", || {})).is_err());
    }
}
