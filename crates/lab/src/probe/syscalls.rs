//! Syscalls of the subject with counts and durations, from `strace -c`. They are traced in a separate run, because strace slows down the
//! subject.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use procfs::process::Process;

use crate::{
    error::LabError,
    program::ChildProgram,
    record::Syscall,
    tools::{self, words},
};

/// Maximum time that a tracer needs to attach; perf first loads the kernel's type information.
pub(crate) const ATTACH: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);

pub(crate) struct Tracing {
    tracer: ChildProgram,
    result: PathBuf,
}

impl Tracing {
    /// Attaches a tracer to the processes; returns `None` if `strace` is not installed.
    pub(crate) fn start(pids: &[u32], mark: &str, directory: &Path) -> Result<Option<Self>, LabError> {
        if tools::find("strace").is_none() {
            return Ok(None);
        }
        let result = directory.join("syscalls.txt");
        let _ = fs::remove_file(&result);
        let mut command = words(["strace", "-c", "-f", "-o", &result.display().to_string()]);
        command.extend(pids.iter().flat_map(|pid| ["-p".to_owned(), pid.to_string()]));
        let mut tracer = ChildProgram::attach("the tracer", command, mark, directory.join("syscalls.log"))?;
        let deadline = Instant::now() + ATTACH;
        while !pids.iter().all(|pid| is_traced(*pid)) && tracer.ended().is_none() && Instant::now() < deadline
        {
            thread::sleep(LOOK);
        }
        Ok(Some(Self { tracer, result }))
    }

    pub(crate) fn finish(self) -> Vec<Syscall> {
        self.tracer.detach();
        let mut table = parse(&fs::read_to_string(&self.result).unwrap_or_default());
        table.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        table
    }
}

fn is_traced(pid: u32) -> bool {
    let status =
        i32::try_from(pid).ok().and_then(|pid| Process::new(pid).and_then(|process| process.status()).ok());
    status.is_some_and(|status| status.tracerpid != 0)
}

/// Parses `strace -c`: % time, seconds, usecs/call, calls, [errors], name.
fn parse(text: &str) -> Vec<Syscall> {
    let rows = text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, errors) = match words[..] {
            [_, _, _, _, name] => (name, 0),
            [_, _, _, _, errors, name] => (name, errors.parse().ok()?),
            _ => return None,
        };
        Some(Syscall {
            name: name.to_owned(),
            calls: words[3].parse().ok()?,
            errors,
            seconds: words[1].parse().ok()?,
        })
    });
    rows.filter(|row| row.name != "total").collect()
}

pub(crate) fn describe(table: &[Syscall], limit: usize) -> String {
    let mut text =
        format!("{:<20} {:>12} {:>10} {:>12} {:>10}\n", "syscall", "calls", "errors", "seconds", "us/call");
    for row in table.iter().take(limit) {
        text += &format!(
            "{:<20} {:>12} {:>10} {:>12.6} {:>10.2}\n",
            row.name,
            row.calls,
            row.errors,
            row.seconds,
            row.us_per_call()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strace_rows_are_read_with_and_without_errors() {
        let text = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 81.25    0.000130          26         5           read
 18.75    0.000030          15         2         1 access
------ ----------- ----------- --------- --------- ----------------
100.00    0.000160          22         7         1 total
";
        let table = parse(text);
        assert_eq!(table.len(), 2);
        assert_eq!((table[0].calls, table[0].errors), (5, 0));
        assert_eq!((table[1].name.as_str(), table[1].calls, table[1].errors), ("access", 2, 1));
    }
}
