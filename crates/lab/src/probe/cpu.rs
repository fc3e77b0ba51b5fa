//! Time that the machine's CPUs and the subject's processes have spent, and how often they were switched.

use std::{fs, path::Path};

use crate::{error::LabError, program};

/// Units of `/proc/stat` and `/proc/PID/stat` a second: USER_HZ, 100 on every Linux that is not Alpha or ia64.
const TICKS_PER_SECOND: f64 = 100.0;

/// Seconds that one CPU has spent since boot, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CpuTime {
    pub(crate) user: f64,
    pub(crate) nice: f64,
    pub(crate) system: f64,
    /// Idle and iowait. Exact on a tickless kernel, where the busy kinds are sampled at each timer tick.
    pub(crate) idle: f64,
    pub(crate) irq: f64,
    pub(crate) softirq: f64,
    pub(crate) steal: f64,
}

impl CpuTime {
    /// All CPUs, by their number.
    pub(crate) fn read_all() -> Result<Vec<(usize, Self)>, LabError> {
        let text = fs::read_to_string("/proc/stat").map_err(LabError::io("cannot read /proc/stat"))?;
        Ok(Self::parse_all(&text))
    }

    fn parse_all(text: &str) -> Vec<(usize, Self)> {
        text.lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                // The line of all CPUs together has no number.
                let number = words.next()?.strip_prefix("cpu")?.parse().ok()?;
                let seconds: Vec<f64> = words
                    .map(|ticks| ticks.parse::<f64>().map(|ticks| ticks / TICKS_PER_SECOND))
                    .collect::<Result<_, _>>()
                    .ok()?;
                let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = seconds[..] else {
                    return None;
                };
                Some((number, Self { user, nice, system, idle: idle + iowait, irq, softirq, steal }))
            })
            .collect()
    }

    /// Seconds not idle, as the kernel sampled them; stolen time is nobody's work here.
    pub(crate) fn busy(&self) -> f64 {
        self.user + self.nice + self.system + self.irq + self.softirq
    }

    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let difference = |now: f64, then: f64| (now - then).max(0.0);
        Self {
            user: difference(self.user, earlier.user),
            nice: difference(self.nice, earlier.nice),
            system: difference(self.system, earlier.system),
            idle: difference(self.idle, earlier.idle),
            irq: difference(self.irq, earlier.irq),
            softirq: difference(self.softirq, earlier.softirq),
            steal: difference(self.steal, earlier.steal),
        }
    }
}

/// What a process group has used: a program that forks is measured whole.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct GroupUse {
    /// Seconds, all threads, children that have ended and been waited for included.
    pub(crate) user: f64,
    pub(crate) system: f64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    /// Moves between CPUs; `None` where the kernel does not tell (no CONFIG_SCHED_DEBUG).
    pub(crate) migrations: Option<u64>,
    /// Resident set now, and at most so far, bytes.
    pub(crate) resident: u64,
    pub(crate) resident_peak: u64,
    pub(crate) processes: u32,
    pub(crate) threads: u32,
}

impl GroupUse {
    /// Sums over the processes whose group is `group`; zeros when there is none any more.
    pub(crate) fn read(group: u32) -> Self {
        let mut sum = Self { migrations: Some(0), ..Self::default() };
        for pid in program::group(group) {
            sum.add(pid);
        }
        if sum.threads == 0 {
            sum.migrations = None;
        }
        sum
    }

    pub(crate) fn total(&self) -> f64 {
        self.user + self.system
    }

    fn add(&mut self, pid: u32) {
        let base = format!("/proc/{pid}");
        let Some((user, system)) =
            fs::read_to_string(format!("{base}/stat")).ok().and_then(|text| parse_times(&text))
        else {
            return;
        };
        self.user += user;
        self.system += system;
        self.processes += 1;
        let status = fs::read_to_string(format!("{base}/status")).unwrap_or_default();
        self.resident += field(&status, "VmRSS:").unwrap_or(0) * 1024;
        self.resident_peak += field(&status, "VmHWM:").unwrap_or(0) * 1024;
        for task in fs::read_dir(format!("{base}/task")).into_iter().flatten().flatten() {
            self.add_thread(&task.path());
        }
    }

    fn add_thread(&mut self, task: &Path) {
        let Ok(status) = fs::read_to_string(task.join("status")) else { return };
        self.threads += 1;
        self.voluntary_switches += field(&status, "voluntary_ctxt_switches:").unwrap_or(0);
        self.involuntary_switches += field(&status, "nonvoluntary_ctxt_switches:").unwrap_or(0);
        let moves = fs::read_to_string(task.join("sched")).ok().and_then(|text| parse_migrations(&text));
        self.migrations = self.migrations.zip(moves).map(|(sum, more)| sum + more);
    }
}

/// The fields of `/proc/PID/stat` after the name, which is in parentheses and may itself hold spaces and parentheses.
fn after_name(stat: &str) -> Option<impl Iterator<Item = &str>> {
    stat.rsplit_once(')').map(|(_, fields)| fields.split_whitespace())
}

/// User and system seconds, those of waited-for children included.
fn parse_times(stat: &str) -> Option<(f64, f64)> {
    // utime, stime, cutime, cstime are fields 14 to 17, counted from 1; the first after the name is the third.
    let ticks: Vec<f64> =
        after_name(stat)?.skip(11).take(4).map(str::parse).collect::<Result<_, _>>().ok()?;
    let [user, system, children_user, children_system] = ticks[..] else { return None };
    Some(((user + children_user) / TICKS_PER_SECOND, (system + children_system) / TICKS_PER_SECOND))
}

/// A number of `/proc/PID/status`.
fn field(status: &str, name: &str) -> Option<u64> {
    status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

fn parse_migrations(sched: &str) -> Option<u64> {
    let line = sched.lines().find(|line| line.starts_with("se.nr_migrations"))?;
    line.rsplit_once(':')?.1.trim().parse().ok()
}

/// CPUs of a list such as `0,2-3`.
pub(crate) fn cpu_list(list: &str) -> Vec<usize> {
    list.split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.trim().parse::<usize>().ok()?..=last.trim().parse().ok()?)
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "\
cpu  21235 5004 6129 192800 610 0 77 19 0 0
cpu0 9700 2500 2600 97800 65 3 22 5 0 0
cpu10 1 1 1 1 1 1 1 1 0 0
intr 336889 0
";

    #[test]
    fn each_cpu_is_read_from_its_own_line() {
        let all = CpuTime::parse_all(STAT);
        assert_eq!(all.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 10]);
        let first = all[0].1;
        assert_eq!((first.user, first.softirq, first.steal), (97.0, 0.22, 0.05));
        assert!((first.idle - 978.65).abs() < 1e-9);
        assert!((first.busy() - 148.25).abs() < 1e-9);
    }

    #[test]
    fn times_survive_a_name_with_spaces_and_parentheses_and_include_children() {
        let stat = "42 (a) b (c) S 1 40 42 0 -1 4194304 100 0 0 0 250 1750 30 50 20 0 3 0 12345 1000 200";
        assert_eq!(parse_times(stat), Some((2.8, 18.0)));
        assert_eq!(parse_times("42 (short) S 1"), None);
    }

    #[test]
    fn migrations_and_status_fields_are_found_by_name() {
        assert_eq!(parse_migrations("x (1, #threads: 1)\n----\nse.nr_migrations   :      17\n"), Some(17));
        assert_eq!(parse_migrations("nothing"), None);
        assert_eq!(field("VmHWM:\t    1234 kB\nvoluntary_ctxt_switches:\t9\n", "VmHWM:"), Some(1234));
    }

    #[test]
    fn cpu_lists_have_ranges() {
        assert_eq!(cpu_list("0,2-4"), [0, 2, 3, 4]);
    }

    #[test]
    fn a_group_that_is_gone_is_zero_and_a_busy_one_is_not() {
        assert_eq!(GroupUse::read(u32::MAX).threads, 0);
        let group = rustix::process::getpgrp().as_raw_nonzero().get();
        let used = GroupUse::read(u32::try_from(group).unwrap());
        assert!(used.threads > 0 && used.resident > 0);
    }
}
