//! Processes that took a running program's place.

use std::{fs, process::Command, thread};

use super::{Finished, Program, eventually, upgradable};

/// A program of a test and those that came after it; they end with this.
pub struct Upgraded {
    /// The first is the program itself, the last the one that serves.
    pids: Vec<u32>,
}

impl Upgraded {
    pub fn new(program: &Program) -> Self {
        Self { pids: vec![program.pid()] }
    }

    /// The process that serves.
    pub fn pid(&self) -> u32 {
        self.pids.last().copied().unwrap_or_default()
    }

    /// Asks it to go on in another one.
    pub fn ask(&self, more: &[&str]) -> Finished {
        let pid = self.pid().to_string();
        Program::run(&mut upgradable(&[&["upgrade", "--pid", &pid], more].concat()))
    }

    /// The same, which must not fail; the number of the process before.
    pub fn upgrade(&mut self) -> u32 {
        let before = self.pid();
        let asked = self.ask(&[]).ended(0);
        self.took_over(&asked.stdout);
        before
    }

    /// A line says which process serves now.
    pub fn took_over(&mut self, line: &str) {
        let (_, rest) = line.split_once("process ").unwrap_or_else(|| panic!("no process in {line:?}"));
        let (pid, _) = rest.split_once(" serves").unwrap_or_else(|| panic!("nobody serves in {line:?}"));
        self.pids.push(pid.parse().unwrap_or_else(|error| panic!("{line:?}: {error}")));
    }
}

impl Drop for Upgraded {
    fn drop(&mut self) {
        for pid in self.pids.iter().skip(1).filter(|pid| lives(**pid)) {
            // Where it has just ended there is nobody to be told.
            let _ = Command::new("sh").args(["-c", &format!("kill -KILL {pid}")]).status();
            // Until then it has its sockets.
            if !thread::panicking() {
                ends(*pid);
            }
        }
    }
}

/// Whether a process of this number runs. One whose parent has not asked for its end runs no more.
pub fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Waits for its end.
pub fn ends(pid: u32) {
    eventually(&format!("process {pid} ends"), || !lives(pid));
}
