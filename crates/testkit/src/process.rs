//! What a process takes: memory, descriptors, processor time.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::PathBuf,
};

/// Memory of this process that is its own, in bytes: pages in use that no file has (RssAnon of proc_pid_status(5)).
pub fn memory() -> u64 {
    memory_at("/proc/self/status")
}

/// The same of another process.
pub fn memory_of(pid: u32) -> u64 {
    memory_at(&format!("/proc/{pid}/status"))
}

/// How much [`memory`] has grown when `work` is done; 0 if it has shrunk.
pub fn grown(work: impl FnOnce()) -> u64 {
    let before = memory();
    work();
    memory().saturating_sub(before)
}

/// Descriptors that this process has open.
pub fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Takes every descriptor that is left.
pub fn take_descriptors() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// A thread of this process, under watch. It can be asked without a descriptor to spare.
#[derive(Debug)]
pub struct Thread(File);

impl Thread {
    /// The first thread with this name, of at most 15 bytes. One that has just been made gives itself the name.
    pub fn named(name: &str) -> Self {
        let has_name = |path: &PathBuf| {
            fs::read_to_string(path.join("comm")).is_ok_and(|found| found.trim_end() == name)
        };
        crate::eventually(&format!("a thread {name}"), || {
            let mut threads = fs::read_dir("/proc/self/task").ok()?.flatten().map(|entry| entry.path());
            Some(Self(File::open(threads.find(has_name)?.join("stat")).ok()?))
        })
    }

    /// Waits until the thread sleeps, as one does that has nothing to do. One that goes in circles never does.
    pub fn comes_to_rest(&self) {
        // Often in a row, for it might be seen in the middle of a call that waits for a moment.
        crate::eventually("the thread sleeps", || (0..20).all(|_| self.state() == Some('S')));
    }

    /// The third field of proc_pid_stat(5); the second is a name in brackets.
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
    fn what_is_kept_shows() {
        let mut kept = Vec::new();
        let grown = grown(|| kept = black_box(vec![7_u8; 32 << 20]));
        assert!(grown >= 16 << 20, "{grown}");
        drop(kept);
    }

    #[test]
    fn a_thread_that_waits_is_at_rest_and_one_that_spins_is_not() {
        let (stop, stopped) = mpsc::channel::<()>();
        let spins = thread::Builder::new()
            .name("tk-spins".to_owned())
            .spawn(move || while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {})
            .unwrap();
        let spinning = crate::eventually("it runs", spinning_thread);
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
