//! Syscalls of the subject with counts and durations, from `perf trace -s` or else `strace -c`. They are traced in a separate run, because
//! both tools slow down the subject.

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
    tool: Tool,
    result: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    PerfTrace,
    Strace,
}

impl Tracing {
    /// Attaches a tracer to the processes; returns `None` if none is available.
    pub(crate) fn start(pids: &[u32], mark: &str, directory: &Path) -> Result<Option<Self>, LabError> {
        let Some(tool) = tool() else { return Ok(None) };
        let result = directory.join("syscalls.txt");
        let _ = fs::remove_file(&result);
        let result_word = result.display().to_string();
        let mut command = match tool {
            Tool::PerfTrace => words(["perf", "trace", "-s", "-o", &result_word]),
            Tool::Strace => words(["strace", "-c", "-f", "-o", &result_word]),
        };
        let words: Vec<String> = pids.iter().map(u32::to_string).collect();
        command.extend(match tool {
            Tool::PerfTrace => vec!["-p".to_owned(), words.join(",")],
            Tool::Strace => words.into_iter().flat_map(|pid| ["-p".to_owned(), pid]).collect(),
        });
        let mut tracer = ChildProgram::attach("the tracer", command, mark, directory.join("syscalls.log"))?;
        match tool {
            Tool::PerfTrace => tracer.await_counters(ATTACH),
            Tool::Strace => {
                let deadline = Instant::now() + ATTACH;
                while !pids.iter().all(|pid| is_traced(*pid))
                    && tracer.ended().is_none()
                    && Instant::now() < deadline
                {
                    thread::sleep(LOOK);
                }
            }
        }
        Ok(Some(Self { tracer, tool, result }))
    }

    pub(crate) fn finish(self) -> Vec<Syscall> {
        self.tracer.detach();
        let text = fs::read_to_string(&self.result).unwrap_or_default();
        let mut table = match self.tool {
            Tool::PerfTrace => parse_perf(&text),
            Tool::Strace => parse_strace(&text),
        };
        table.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        table
    }
}

fn is_traced(pid: u32) -> bool {
    let status =
        i32::try_from(pid).ok().and_then(|pid| Process::new(pid).and_then(|process| process.status()).ok());
    status.is_some_and(|status| status.tracerpid != 0)
}

/// Chooses the tracer. perf slows the subject down less, but needs tracepoints, which containers and user namespaces often lack.
fn tool() -> Option<Tool> {
    let perf_traces = tools::find("perf").is_some()
        && std::process::Command::new("perf")
            .args(["trace", "-s", "--", "true"])
            .output()
            .is_ok_and(|output| !parse_perf(&String::from_utf8_lossy(&output.stderr)).is_empty());
    if perf_traces { Some(Tool::PerfTrace) } else { tools::find("strace").map(|_| Tool::Strace) }
}

/// Adds up the tables of all threads: name, calls, errors, total milliseconds, ...
fn parse_perf(text: &str) -> Vec<Syscall> {
    let rows = text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, calls, errors, total, _min, _avg, _max, ..] = words[..] else { return None };
        let total: f64 = total.parse().ok()?;
        Some(Syscall {
            name: name.to_owned(),
            calls: calls.parse().ok()?,
            errors: errors.parse().ok()?,
            seconds: total / 1e3,
        })
    });
    summed(rows)
}

/// Parses `strace -c`: % time, seconds, usecs/call, calls, [errors], name.
fn parse_strace(text: &str) -> Vec<Syscall> {
    let rows = text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, errors) = match words[..] {
            [_, _, _, _, name] => (name, 0),
            [_, _, _, _, errors, name] => (name, errors.parse().ok()?),
            _ => return None,
        };
        if name == "total" {
            return None;
        }
        Some(Syscall {
            name: name.to_owned(),
            calls: words[3].parse().ok()?,
            errors,
            seconds: words[1].parse().ok()?,
        })
    });
    summed(rows)
}

fn summed(rows: impl Iterator<Item = Syscall>) -> Vec<Syscall> {
    let mut table: Vec<Syscall> = Vec::new();
    for row in rows {
        match table.iter_mut().find(|known| known.name == row.name) {
            Some(known) => {
                known.calls += row.calls;
                known.errors += row.errors;
                known.seconds += row.seconds;
            }
            None => table.push(row),
        }
    }
    table
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
    fn perf_tables_of_several_threads_are_summed() {
        let text = "
 Summary of events:

 a (11), 58 events, 90.6%

   syscall            calls  errors  total       min       avg       max       stddev
                                     (msec)    (msec)    (msec)    (msec)        (%)
   --------------- --------  ------ -------- --------- --------- ---------     ------
   sendmmsg              10      1    12.000     0.013     0.016     0.019      4.14%
   epoll_wait             2      0     1.000     0.014     0.014     0.014      0.35%

 a (12), 2 events, 9.4%

   sendmmsg               5      0     4.000     0.013     0.016     0.019      4.14%
";
        let table = parse_perf(text);
        assert_eq!(table.len(), 2);
        assert_eq!(table[0], Syscall { name: "sendmmsg".to_owned(), calls: 15, errors: 1, seconds: 0.016 });
    }

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
        let table = parse_strace(text);
        assert_eq!(table.len(), 2);
        assert_eq!((table[0].calls, table[0].errors), (5, 0));
        assert_eq!((table[1].name.as_str(), table[1].calls, table[1].errors), ("access", 2, 1));
    }
}
