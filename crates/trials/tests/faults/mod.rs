//! Faults under load: clients on calls, and one fault. Each test records the clients' losses and the warnings in the log, requires full
//! recovery, and is a row in docs/dev/reliability.md. `cargo xtask faults` runs all of them in sequence with more clients and the release
//! build; the long ones run only there.

mod allocations;
mod cgroup;
mod clock;
mod crowd;
mod fleet;
mod forward_abuse;
mod forward_limits;
mod forward_links;
mod forward_rough;
mod forward_storm;
mod forwarder;
mod forwards;
mod limits;
mod link_faults;
mod links;
mod others;
mod path;
mod restarts;
mod rough;
mod row;
mod server;
mod stalled;
mod stores;
mod talks;
mod visitor;

use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use allocations::{allocation_p99, allocations_under};
pub(crate) use cgroup::Group;
use crowd::Crowd;
pub(crate) use limits::cpu_ms;
use row::{Row, as_before};
pub(crate) use server::{Server, Wanted};

/// Output directory set by `cargo xtask faults`; if it is unset, tests are shorter.
fn rows() -> Option<PathBuf> {
    std::env::var_os("TURNPIKE_TEST_ROWS").map(PathBuf::from)
}

fn or_thorough<T>(short: T, thorough: T) -> T {
    if rows().is_some() { thorough } else { short }
}

fn within(patience: Duration, what: &str, mut ask: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !ask() {
        assert!(Instant::now() < deadline, "{what}: not within {patience:?}");
        thread::sleep(Duration::from_millis(50));
    }
}
