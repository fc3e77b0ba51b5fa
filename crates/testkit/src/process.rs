//! Resources of a process: memory, descriptors, threads.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::PathBuf,
};

/// Anonymous memory of this process in bytes (RssAnon of proc_pid_status(5)).
pub fn memory() -> u64 {
    memory_at("/proc/self/status")
}

pub fn memory_of(pid: u32) -> u64 {
    memory_at(&format!("/proc/{pid}/status"))
}

pub fn grown(work: impl FnOnce()) -> u64 {
    let before = memory();
    work();
    memory().saturating_sub(before)
}

/// Repeats `work` until memory no longer grows. Memory for buffers, the allocator and huge pages (2 MiB at a time) grows during the first
/// runs; a leak grows with every run.
pub fn settles(mut work: impl FnMut()) {
    const RUNS: usize = 10;
    let growth: Vec<u64> = (0..RUNS).map(|_| grown(&mut work)).take_while(|bytes| *bytes > 0).collect();
    assert!(growth.len() < RUNS, "memory grew in each of {RUNS} runs: {growth:?} bytes");
}

pub fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

pub fn take_descriptors() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// A thread of this process, which can be observed even if no descriptor is left.
#[derive(Debug)]
pub struct Thread(File);

impl Thread {
    /// Waits for a thread with this name (at most 15 bytes). Waiting is necessary because new threads set their names themselves.
    pub fn named(name: &str) -> Self {
        let has_name = |path: &PathBuf| {
            fs::read_to_string(path.join("comm")).is_ok_and(|found| found.trim_end() == name)
        };
        crate::eventually(&format!("a thread {name}"), || {
            let mut threads = fs::read_dir("/proc/self/task").ok()?.flatten().map(|entry| entry.path());
            Some(Self(File::open(threads.find(has_name)?.join("stat")).ok()?))
        })
    }

    /// Waits until the thread sleeps, which a spinning thread never does.
    pub fn comes_to_rest(&self) {
        // Takes many samples in a row, because a busy thread may briefly wait in a system call.
        crate::eventually("the thread sleeps", || (0..20).all(|_| self.state() == Some('S')));
    }

    /// State of the thread, the third field of proc_pid_stat(5); the second is the name in parentheses.
    fn state(&self) -> Option<char> {
        let mut bytes = [0; 512];
        let len = self.0.read_at(&mut bytes, 0).ok()?;
        let text = String::from_utf8_lossy(&bytes[..len]);
        text.rsplit_once(") ")?.1.chars().next()
    }
}

fn memory_at(path: &str) -> u64 {
    let status = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = field.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or_else(|| panic!("no RssAnon in {path}")) * 1024
}

#[cfg(test)]
mod tests {
    use std::{hint::black_box, sync::mpsc, thread};

    use super::*;

    #[test]
    fn kept_memory_is_measured() {
        let mut kept = Vec::new();
        let grown = grown(|| kept = black_box(vec![7_u8; 32 << 20]));
        assert!(grown >= 16 << 20, "{grown}");
        drop(kept);
    }

    #[test]
    fn sleeping_and_spinning_threads_are_distinguished() {
        let (stop, stopped) = mpsc::channel::<()>();
        let spins = thread::Builder::new()
            .name("tk-spins".to_owned())
            .spawn(move || while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {})
            .unwrap();
        let spinning = crate::eventually("the thread runs", spinning_thread);
        assert!((0..1000).all(|_| spinning.state() == Some('R')));
        drop(stop);
        spins.join().unwrap();
        let (stop, stopped) = mpsc::channel::<()>();
        let waits = thread::Builder::new().name("tk-waits".to_owned()).spawn(move || stopped.recv()).unwrap();
        Thread::named("tk-waits").comes_to_rest();
        drop(stop);
        assert!(waits.join().unwrap().is_err());
    }

    fn spinning_thread() -> Option<Thread> {
        let thread = Thread::named("tk-spins");
        (thread.state() == Some('R')).then_some(thread)
    }
}
