//! A worker that does not run any more: one thread of the server, by the freezer of control groups.

use std::{fs, thread, time::Duration};

use super::{Crowd, Row, Server, Wanted, cgroup::Frozen, within};
use turnpike_trials::{SOON, need};

#[test]
fn a_worker_stalls() {
    let mut server = Server::start(watched(Wanted::flags(&["--workers", "2"])));
    // Ways that a machine does not have are told before anything else.
    drop(need!(Frozen::thread(worker(server.pid(), "relay-0"))));
    let crowd = Crowd::patient(&server, "60");
    let seen =
        Row::new("a_worker_stalls", "one of two workers stalls").run(&mut server, crowd, |server, row| {
            let says = |server: &Server, text: &str| server.lines().iter().any(|line| line.contains(text));
            let frozen = Frozen::thread(worker(server.pid(), "relay-0")).expect("it went before");
            within(SOON, "the watchdog says so", || says(server, "a worker has taken no command"));
            thread::sleep(Duration::from_millis(500));
            drop(frozen);
            within(SOON, "it says the end too", || says(server, "all workers take commands again"));
            row.note("no client had to reconnect: datagrams waiting in the sockets were relayed");
        });
    assert_eq!(seen["returns_done"], 0, "{seen}");
}

/// Under a watchdog that wants a sign of life each fifth of a second.
pub(super) fn watched(mut wanted: Wanted) -> Wanted {
    wanted.environment.push(("NOTIFY_SOCKET", "/nonexistent/notify".to_owned()));
    wanted.environment.push(("WATCHDOG_USEC", "600000".to_owned()));
    wanted
}

/// The number of a worker's thread.
pub(super) fn worker(pid: u32, name: &str) -> u32 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let named = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|found| found.trim_end() == name)
    };
    let task = tasks.flatten().find(named).expect("there is a worker");
    task.file_name().to_string_lossy().parse().expect("a number")
}
