//! Chains of processes created by upgrades.

use std::{fs, process::Command, thread};

use super::{Finished, Program, eventually, upgradable};

/// A program and the processes that have replaced it in upgrades; kills all of them when dropped.
pub struct Upgraded {
    /// The first is the original program, the last the serving process.
    pids: Vec<u32>,
}

impl Upgraded {
    pub fn new(program: &Program) -> Self {
        Self { pids: vec![program.pid()] }
    }

    pub fn pid(&self) -> u32 {
        self.pids.last().copied().unwrap_or_default()
    }

    pub fn ask(&self, more: &[&str]) -> Finished {
        let pid = self.pid().to_string();
        Program::run(&mut upgradable(&[&["upgrade", "--pid", &pid], more].concat()))
    }

    /// Upgrades and requires success; returns the previous PID.
    pub fn upgrade(&mut self) -> u32 {
        let before = self.pid();
        let asked = self.ask(&[]).ended(0);
        self.took_over(&asked.stdout);
        before
    }

    pub fn took_over(&mut self, line: &str) {
        let (_, rest) =
            line.split_once("process ").unwrap_or_else(|| panic!("no serving process in {line:?}"));
        let (pid, _) = rest.split_once(" serves").unwrap_or_else(|| panic!("no process ID in {line:?}"));
        self.pids.push(pid.parse().unwrap_or_else(|error| panic!("{line:?}: {error}")));
    }
}

impl Drop for Upgraded {
    fn drop(&mut self) {
        for pid in self.pids.iter().skip(1).filter(|pid| lives(**pid)) {
            let _ = Command::new("sh").args(["-c", &format!("kill -KILL {pid}")]).status();
            // Wait for the exit, because the sockets stay in use until then.
            if !thread::panicking() {
                ends(*pid);
            }
        }
    }
}

/// Returns true if the process is running; a zombie does not count.
pub fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

pub fn ends(pid: u32) {
    eventually(&format!("process {pid} ends"), || !lives(pid));
}
