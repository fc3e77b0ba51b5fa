//! Faults under load: clients on calls, one thing that breaks, and what came of it. What the clients saw, what the log said, and whether
//! all is as before once it is over; nothing may stay broken. Each test is a row of docs/reliability.md. `cargo xtask faults` runs all of
//! them, one after the other, with more clients and the release build; those that take long run there only.

mod abuse;
mod cgroup;
mod clock;
mod crowd;
mod fleet;
mod forward_links;
mod forwarder;
mod forwards;
mod limits;
mod links;
mod path;
mod restarts;
mod rough;
mod row;
mod server;
mod stalled;
mod stores;
mod talks;

use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

pub(crate) use cgroup::Group;
use crowd::Crowd;
pub(crate) use limits::cpu_ms;
use row::{Row, as_before};
pub(crate) use server::{Server, Wanted};

use crate::harness::Load;

/// Where `cargo xtask faults` wants the rows; tests by themselves are shorter.
fn rows() -> Option<PathBuf> {
    std::env::var_os("TURNPIKE_TEST_ROWS").map(PathBuf::from)
}

/// One of two, the second being for `cargo xtask faults`.
fn or_thorough<T>(short: T, thorough: T) -> T {
    if rows().is_some() { thorough } else { short }
}

/// Asks until the answer is yes.
fn within(patience: Duration, what: &str, mut ask: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !ask() {
        assert!(Instant::now() < deadline, "{what}: not within {patience:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Allocations that are made and deleted, for `seconds`, by these clients: the 99th percentile of the time that one takes, in
/// milliseconds. All must be granted.
fn allocation_p99(server: &Server, user: &str, seconds: &str) -> f64 {
    let run = Load::as_user(server.address, user)
        .with(&[
            "--mode",
            "allocate",
            "--clients",
            "4",
            "--rate",
            "100",
            "--warmup",
            "0.2",
            "--duration",
            seconds,
        ])
        .run();
    let result = run.result();
    assert_eq!((run.code, &result["lost"]), (Some(0), &0.into()), "{}", run.output());
    result["rtt_us"]["p99"].as_f64().expect("a number") / 1_000.0
}

/// What [`allocation_p99`] finds in turns without a fault and under it: the median of each.
fn allocations_under(
    server: &mut Server,
    user: &str,
    mut fault: impl FnMut(&mut Server, bool),
) -> (f64, f64) {
    let (mut normal, mut under) = (Vec::new(), Vec::new());
    for _ in 0..or_thorough(1, 5) {
        normal.push(allocation_p99(server, user, or_thorough("0.5", "2")));
        fault(server, true);
        under.push(allocation_p99(server, user, or_thorough("0.5", "2")));
        fault(server, false);
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    (median(normal), median(under))
}
