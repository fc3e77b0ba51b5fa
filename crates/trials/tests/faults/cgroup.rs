//! Control groups for tests: freeze one thread, limit the memory of a process.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use super::within;
use turnpike_trials::SOON;

const ROOT: &str = "/sys/fs/cgroup";

pub(super) struct Frozen {
    group: PathBuf,
    thread: u32,
    home: PathBuf,
    control: (&'static str, &'static str, &'static str),
}

/// A process in a group that accounts for its memory and may limit it.
pub(crate) struct Group {
    group: PathBuf,
    process: u32,
    home: PathBuf,
}

impl Frozen {
    pub(super) fn thread(thread: u32) -> Result<Self, String> {
        // Version 1 groups consist of threads. In version 2, a threaded group must be inside the process's
        // group.
        let (base, home, members, control) = match place(thread, "freezer") {
            Some(home) => {
                (PathBuf::from(ROOT).join("freezer"), home, "tasks", ("freezer.state", "FROZEN", "THAWED"))
            }
            None => {
                let home = place(thread, "").ok_or("there is no freezer for threads")?;
                (home.clone(), home, "cgroup.threads", ("cgroup.freeze", "1", "0"))
            }
        };
        let group = base.join(format!("turnpike-test-{thread}"));
        let why = |error: io::Error| format!("a thread cannot be frozen here: {error}");
        fs::create_dir(&group).map_err(why)?;
        let frozen = Self { home: home.join(members), thread, control, group };
        if members == "cgroup.threads" {
            fs::write(frozen.group.join("cgroup.type"), "threaded").map_err(why)?;
        }
        fs::write(frozen.group.join(members), thread.to_string()).map_err(why)?;
        fs::write(frozen.group.join(control.0), control.1).map_err(why)?;
        Ok(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join(self.control.0), self.control.2);
        let _ = fs::write(&self.home, self.thread.to_string());
        remove(&self.group);
    }
}

impl Group {
    /// Moves a process to its own group; on failure returns the reason.
    pub(crate) fn of_process(pid: u32) -> Result<Self, String> {
        let why = |error: io::Error| format!("the memory of a process cannot be limited here: {error}");
        let (base, home) = match place(pid, "memory") {
            Some(home) => (PathBuf::from(ROOT).join("memory"), home),
            None => (PathBuf::from(ROOT), place(pid, "").ok_or("there are no control groups")?),
        };
        let group = base.join(format!("turnpike-test-{pid}"));
        let limited = Self { group, process: pid, home: home.join("cgroup.procs") };
        fs::create_dir(&limited.group).map_err(why)?;
        fs::metadata(limited.limit()).map_err(why)?;
        fs::write(limited.group.join("cgroup.procs"), pid.to_string()).map_err(why)?;
        Ok(limited)
    }

    pub(super) fn to(&self, bytes: u64) -> io::Result<()> {
        fs::write(self.limit(), bytes.to_string())
    }

    /// Bytes in use, including the page cache.
    pub(super) fn used(&self) -> u64 {
        let text = ["memory.usage_in_bytes", "memory.current"]
            .iter()
            .find_map(|name| fs::read_to_string(self.group.join(name)).ok());
        text.and_then(|text| text.trim().parse().ok()).expect("the kernel reports memory use")
    }

    /// Number of times that the limit was hit: reclaim, refusal or OOM kill.
    pub(super) fn refusals(&self) -> u64 {
        if let Ok(text) = fs::read_to_string(self.group.join("memory.failcnt")) {
            return text.trim().parse().expect("a number");
        }
        let events =
            fs::read_to_string(self.group.join("memory.events")).expect("version 2 has memory.events");
        let most = events.lines().find_map(|line| line.strip_prefix("max ")?.parse().ok());
        most.expect("memory.events has the counter")
    }

    /// Kernel memory of the group (slabs, sockets), if reported.
    pub(crate) fn kernel(&self) -> Option<u64> {
        if let Ok(text) = fs::read_to_string(self.group.join("memory.kmem.usage_in_bytes")) {
            return text.trim().parse().ok();
        }
        let stat = fs::read_to_string(self.group.join("memory.stat")).ok()?;
        stat.lines().find_map(|line| line.strip_prefix("kernel ")?.parse().ok())
    }

    fn limit(&self) -> PathBuf {
        let first = self.group.join("memory.limit_in_bytes");
        if first.exists() { first } else { self.group.join("memory.max") }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(&self.home, self.process.to_string());
        remove(&self.group);
    }
}

/// Directory of a thread's group, for a version 1 controller, or `""` for version 2.
fn place(thread: u32, controller: &str) -> Option<PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{thread}/cgroup")).ok()?;
    let line = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        controllers.split(',').any(|name| name == controller).then(|| fields.next()).flatten()
    })?;
    let dir = Path::new(ROOT).join(controller).join(line.trim_start_matches('/'));
    dir.is_dir().then_some(dir)
}

fn remove(group: &Path) {
    for _ in 0..100 {
        if fs::remove_dir(group).is_ok() || !group.exists() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    within(SOON, "the control group can be removed", || fs::remove_dir(group).is_ok());
}
