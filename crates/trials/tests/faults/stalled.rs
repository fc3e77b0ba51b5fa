//! A stalled worker: the cgroup freezer stops one thread of the server.

use std::{fs, thread, time::Duration};

use super::{Crowd, Row, Server, Wanted, cgroup::Frozen, within};
use turnpike_trials::{SOON, need};

#[test]
fn a_worker_stalls() {
    let mut server = Server::start(watched(Wanted::flags(&["--workers", "2"])));
    // Skips the test early if a thread cannot be frozen.
    drop(need!(Frozen::thread(worker(server.pid(), "relay-0"))));
    let crowd = Crowd::patient(&server, "60");
    let seen =
        Row::new("a_worker_stalls", "one of two workers stalls").run(&mut server, crowd, |server, row| {
            let says = |server: &Server, text: &str| server.lines().iter().any(|line| line.contains(text));
            let frozen = Frozen::thread(worker(server.pid(), "relay-0"))
                .expect("freezing this thread has already succeeded");
            within(SOON, "the watchdog reports the stall", || says(server, "a worker has been stuck"));
            thread::sleep(Duration::from_millis(500));
            drop(frozen);
            within(SOON, "the watchdog reports the recovery", || says(server, "all workers respond again"));
            row.note("no client had to reconnect: datagrams waiting in the sockets were relayed");
        });
    assert_eq!(seen["returns_done"], 0, "{seen}");
}

/// Sets a watchdog interval of a fifth of a second.
pub(super) fn watched(mut wanted: Wanted) -> Wanted {
    wanted.environment.push(("NOTIFY_SOCKET", "/nonexistent/notify".to_owned()));
    wanted.environment.push(("WATCHDOG_USEC", "600000".to_owned()));
    wanted
}

pub(super) fn worker(pid: u32, name: &str) -> u32 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is running");
    let named = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|found| found.trim_end() == name)
    };
    let task = tasks.flatten().find(named).expect("the worker exists");
    task.file_name().to_string_lossy().parse().expect("a number")
}
