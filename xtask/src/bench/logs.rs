//! The output of the programs of one trial, and what `perf` saw of it.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::netns::Process;
use crate::Failure;

/// Where the programs of one trial write.
pub(crate) struct Logs<'a> {
    pub(crate) directory: &'a Path,
    /// Begins every file's name.
    pub(crate) label: &'a str,
}

impl Logs<'_> {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{}-{name}", self.label))
    }

    /// The last lines of each of these logs, for an error message.
    pub(crate) fn tails(&self, names: &[&str]) -> String {
        let mut tails = String::new();
        for name in names {
            let text = fs::read(self.path(name)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(5)..] {
                tails.push_str(&format!("\n  {name}: {line}"));
            }
        }
        tails
    }
}

/// `perf` on one core, run from another.
pub(crate) struct Profile(Process);

impl Profile {
    /// Samples core `watched` for so many seconds.
    pub(crate) fn start(logs: &Logs<'_>, watched: usize, from: usize, seconds: f64) -> Result<Self, Failure> {
        let mut perf = Command::new("taskset");
        perf.args(["-c", &from.to_string(), "perf", "record", "-q", "-F", "999", "-g", "-o"])
            .arg(logs.path("relay-core.perf"))
            .args(["-C", &watched.to_string(), "--", "sleep", &seconds.to_string()])
            .stdout(Stdio::null())
            .stderr(File::create(logs.path("perf.log"))?);
        Process::start(&mut perf).map(Self)
    }

    /// Writes what `perf` saw as text beside its data.
    pub(crate) fn finish(mut self, logs: &Logs<'_>) -> Result<(), Failure> {
        if !self.0.ends_before(Instant::now() + Duration::from_secs(20))? {
            return Err("perf does not end".into());
        }
        let text = logs.path("relay-core.txt");
        let status = Command::new("perf")
            .args(["report", "--stdio", "--no-children", "-g", "none", "--percent-limit", "0.3", "-i"])
            .arg(logs.path("relay-core.perf"))
            .stdin(Stdio::null())
            .stdout(File::create(&text)?)
            .stderr(Stdio::null())
            .status()?;
        if !status.success() {
            return Err(format!("perf report failed; see {}", logs.path("perf.log").display()).into());
        }
        eprint!("(profile: {}) ", text.display());
        Ok(())
    }
}
