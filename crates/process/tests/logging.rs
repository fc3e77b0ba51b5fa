//! Log lines on stderr, tested from outside: the subscriber is process-wide, and lines of the `log` crate
//! take a different path than those of `tracing`.
#![allow(clippy::unwrap_used, reason = "clippy.toml excuses test functions, not their helpers")]

use std::process::Command;

use turnpike_config::LogFormat;
use turnpike_process::logging;
use turnpike_testkit::names::CORPUS;
use turnpike_wire::escape;

const SPEAKER: &str = "TURNPIKE_TEST_SPEAKS";

/// Child process of a test.
#[test]
fn speaker() {
    let Ok(filter) = std::env::var(SPEAKER) else { return };
    logging::init(&filter, LogFormat::Text);
    log::warn!(target: "dimpl::dtls12::engine", "said by a stranger");
    log::error!(target: "dimpl", "said by a stranger");
    tracing::error!(target: "dimpl::message", "said by a stranger");
    log::warn!(target: "dimplomatic", "said by log");
    tracing::warn!("said by tracing");
}

#[test]
fn per_message_loggers_are_silenced_whatever_the_filter() {
    for filter in ["info", "trace", "warn,dimpl=trace"] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "speaker", "--nocapture"])
            .env(SPEAKER, filter)
            .output()
            .unwrap();
        let heard = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{heard}");
        assert!(!heard.contains("said by a stranger"), "{filter}: {heard}");
        assert!(heard.contains("said by log") && heard.contains("said by tracing"), "{filter}: {heard}");
    }
}

/// Child process of a test.
#[test]
fn changer() {
    if std::env::var(SPEAKER).as_deref() != Ok("changes") {
        return;
    }
    logging::init("warn", LogFormat::Text);
    assert_eq!(logging::level(), "warn");
    let say = |when: &str| {
        tracing::info!("info {when}");
        tracing::debug!("debug {when}");
        tracing::info!(target: "turnpike::audit", "audit {when}");
        tracing::error!(target: "dimpl::message", "said by a stranger");
    };
    say("before");
    logging::set_level("debug").unwrap();
    assert_eq!(logging::level(), "debug");
    say("meanwhile");
    assert!(logging::set_level("deb").unwrap_err().contains("deb"));
    assert_eq!(logging::level(), "debug");
    logging::set_level("off").unwrap();
    say("after");
}

#[test]
fn levels_change_at_run_time_and_audit_lines_are_always_written() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "changer", "--nocapture"])
        .env(SPEAKER, "changes")
        .output()
        .unwrap();
    let heard = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{heard}");
    let said: Vec<&str> =
        heard.lines().filter_map(|line| line.split_once(": ")).map(|(_, said)| said.trim()).collect();
    assert_eq!(
        said,
        ["audit before", "info meanwhile", "debug meanwhile", "audit meanwhile", "audit after"],
        "{heard}"
    );
}

/// Child process of a test.
#[test]
fn namer() {
    let format = match std::env::var(SPEAKER).as_deref() {
        Ok("names text") => LogFormat::Text,
        Ok("names journald") => LogFormat::Journald,
        Ok("names json") => LogFormat::Json,
        _ => return,
    };
    logging::init("info", format);
    for (name, _) in CORPUS {
        tracing::info!(target: "a", user = name, "named");
        tracing::info!(target: "a", user = ?name, named = %name, "of {name}");
    }
}

#[test]
fn names_are_escaped_in_lines_and_kept_in_json() {
    let lines = |format: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "namer", "--nocapture"])
            .env(SPEAKER, format!("names {format}"))
            .output()
            .unwrap();
        let heard = String::from_utf8(output.stderr).unwrap();
        assert!(heard.chars().all(|character| character == '\n' || escape::is_plain(character)), "{heard}");
        let lines: Vec<String> = heard
            .lines()
            .filter(|line| line.contains("a: ") || line.contains("\"a\""))
            .map(str::to_owned)
            .collect();
        assert_eq!(lines.len(), 2 * CORPUS.len(), "{heard}");
        lines
    };
    for format in ["text", "journald"] {
        for (line, (_, shown)) in lines(format).iter().step_by(2).zip(CORPUS) {
            assert!(line.ends_with(&format!(": named user=\"{shown}\"")), "{line}");
        }
    }
    for (pair, (name, _)) in lines("json").chunks(2).zip(CORPUS) {
        let read = |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap();
        assert_eq!(read(&pair[0])["user"], *name);
        assert_eq!(read(&pair[1])["named"], *name);
        assert_eq!(read(&pair[1])["message"], format!("of {name}"));
    }
}

/// Child process of a test.
#[test]
fn journalist() {
    if std::env::var(SPEAKER).as_deref() != Ok("journal") {
        return;
    }
    logging::init("trace", LogFormat::Journald);
    tracing::error!(target: "a::b", code = 5, "refused");
    tracing::warn!(target: "a", "doubtful");
    tracing::info!(target: "a", "done");
    tracing::debug!(target: "a", "looked at");
}

#[test]
fn journal_lines_start_with_the_priority_and_have_no_time() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "journalist", "--nocapture"])
        .env(SPEAKER, "journal")
        .output()
        .unwrap();
    let heard = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = heard.lines().filter(|line| line.starts_with('<')).collect();
    assert_eq!(
        lines,
        ["<3>a::b: refused code=5", "<4>a: doubtful", "<6>a: done", "<7>a: looked at"],
        "{heard}"
    );
}
