//! What reaches stderr, looked at from outside: the subscriber is the process's, and lines of the `log` crate take another way to
//! it than those of `tracing`.
#![allow(clippy::unwrap_used, reason = "clippy.toml excuses test functions, not their helpers")]

use std::process::Command;

use turnpike_config::LogFormat;
use turnpike_daemon::logging;

const SPEAKER: &str = "TURNPIKE_TEST_SPEAKS";

/// Not a test of its own: what the other one starts.
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
fn crates_that_a_stranger_can_make_speak_are_not_heard_whatever_the_filter_says() {
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
