//! Hardware counters from `perf stat`. Most virtual machines lack them; each event is then reported as
//! unsupported, which is not an error.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    error::LabError,
    program::ChildProgram,
    tools::{self, words},
};

pub(crate) const EVENTS: [(&str, &str); 4] = [
    ("cycles", "cycles"),
    ("instructions", "instructions"),
    ("cache-misses", "cache_misses"),
    ("branch-misses", "branch_misses"),
];

pub(crate) fn supported() -> bool {
    tools::find("perf").is_some()
        && std::process::Command::new("perf")
            .args(["stat", "-x", ",", "-e", "cycles", "--", "true"])
            .output()
            .is_ok_and(|output| {
                output.status.success()
                    && parse(&String::from_utf8_lossy(&output.stderr)).contains_key("cycles")
            })
}

pub(crate) struct Counting {
    perf: ChildProgram,
    result: PathBuf,
}

impl Counting {
    pub(crate) fn start(pids: &[u32], mark: &str, directory: &Path) -> Result<Self, LabError> {
        let result = directory.join("perf-stat.csv");
        // Remove the old file, so that figures from an earlier run are not read.
        let _ = std::fs::remove_file(&result);
        let events: Vec<&str> = EVENTS.iter().map(|(perf, _)| *perf).collect();
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let mut command =
            words(["perf", "stat", "-x", ",", "-e", &events.join(","), "-p", &pids.join(","), "-o"]);
        command.push(result.display().to_string());
        let perf = ChildProgram::attach("perf stat", command, mark, directory.join("perf-stat.log"))?;
        Ok(Self { perf, result })
    }

    pub(crate) fn finish(self) -> BTreeMap<String, f64> {
        self.perf.detach();
        parse(&std::fs::read_to_string(&self.result).unwrap_or_default())
    }
}

/// Parses `perf stat -x,`: value, unit, event, ...; the value may be `<not supported>` or `<not counted>`.
fn parse(text: &str) -> BTreeMap<String, f64> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(',');
            let value: f64 = fields.next()?.trim().parse().ok()?;
            // A modifier such as `:u` means that the kernel was not counted.
            let event = fields.nth(1)?.split(':').next()?;
            let (_, name) = EVENTS.iter().find(|(perf, _)| *perf == event)?;
            Some(((*name).to_owned(), value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_events_are_omitted() {
        let text = "# started on x\n\n1234567,,cycles,1000,100.00,,\n<not supported>,,instructions,0,100.00,,\n\
                    99,,cache-misses:u,1000,100.00,,\n<not counted>,,branch-misses,0,0.00,,\n";
        let counted = parse(text);
        assert_eq!(counted.get("cycles"), Some(&1_234_567.0));
        assert_eq!(counted.get("cache_misses"), Some(&99.0));
        assert_eq!(counted.len(), 2);
    }
}
