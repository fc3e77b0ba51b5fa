//! CPU time of the machine and of processes, and context switches.

use std::fs;

use procfs::process::{Process, Task};

use crate::{error::LabError, program};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CpuTime {
    /// Busy time in seconds, sampled by the kernel; excludes stolen time.
    pub(crate) busy: f64,
    /// Idle time including iowait. Exact on a tickless kernel, whereas busy time is sampled at each timer
    /// tick.
    pub(crate) idle: f64,
    pub(crate) softirq: f64,
    pub(crate) steal: f64,
}

impl CpuTime {
    /// Reads the CPUs with their numbers, which `procfs` drops.
    pub(crate) fn read_all() -> Result<Vec<(usize, Self)>, LabError> {
        let text = fs::read_to_string("/proc/stat").map_err(LabError::io("cannot read /proc/stat"))?;
        Ok(Self::parse_all(&text))
    }

    fn parse_all(text: &str) -> Vec<(usize, Self)> {
        let a_second = ticks_a_second();
        text.lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let number = words.next()?.strip_prefix("cpu")?.parse().ok()?;
                let seconds: Vec<f64> = words
                    .map(|ticks| ticks.parse::<f64>().map(|ticks| ticks / a_second))
                    .collect::<Result<_, _>>()
                    .ok()?;
                let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = seconds[..] else {
                    return None;
                };
                let busy = user + nice + system + irq + softirq;
                Some((number, Self { busy, idle: idle + iowait, softirq, steal }))
            })
            .collect()
    }

    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let difference = |now: f64, then: f64| (now - then).max(0.0);
        Self {
            busy: difference(self.busy, earlier.busy),
            idle: difference(self.idle, earlier.idle),
            softirq: difference(self.softirq, earlier.softirq),
            steal: difference(self.steal, earlier.steal),
        }
    }
}

/// Resource use of a process group, so that a program that forks is measured as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct GroupUse {
    pub(crate) user: f64,
    pub(crate) system: f64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    /// Moves between CPUs; `None` if the kernel does not report them (no CONFIG_SCHED_DEBUG).
    pub(crate) migrations: Option<u64>,
    pub(crate) resident: u64,
    pub(crate) resident_peak: u64,
    pub(crate) threads: u32,
}

impl GroupUse {
    pub(crate) fn read(groups: &[u32]) -> Self {
        let mut sum = Self { migrations: Some(0), ..Self::default() };
        for process in groups.iter().flat_map(|group| program::members(*group)) {
            sum.add(&process);
        }
        if sum.threads == 0 {
            sum.migrations = None;
        }
        sum
    }

    pub(crate) fn total(&self) -> f64 {
        self.user + self.system
    }

    fn add(&mut self, process: &Process) {
        let Ok(stat) = process.stat() else { return };
        let seconds = |own: u64, of_children: i64| (own as f64 + of_children as f64) / ticks_a_second();
        self.user += seconds(stat.utime, stat.cutime);
        self.system += seconds(stat.stime, stat.cstime);
        if let Ok(status) = process.status() {
            self.resident += status.vmrss.unwrap_or(0) * 1024;
            self.resident_peak += status.vmhwm.unwrap_or(0) * 1024;
        }
        for task in process.tasks().into_iter().flatten().flatten() {
            self.add_thread(&task);
        }
    }

    fn add_thread(&mut self, task: &Task) {
        let Ok(status) = task.status() else { return };
        self.threads += 1;
        self.voluntary_switches += status.voluntary_ctxt_switches.unwrap_or(0);
        self.involuntary_switches += status.nonvoluntary_ctxt_switches.unwrap_or(0);
        let sched = fs::read_to_string(format!("/proc/{}/task/{}/sched", task.pid, task.tid));
        let moves = sched.ok().and_then(|text| parse_migrations(&text));
        self.migrations = self.migrations.zip(moves).map(|(sum, more)| sum + more);
    }
}

/// Memory of a process group in bytes. Shared pages are divided among the processes that use them, so that memory shared after a fork is
/// counted once.
pub(crate) fn memory(group: u32) -> u64 {
    program::members(group)
        .filter_map(|process| process.smaps_rollup().ok())
        .flat_map(|rollup| rollup.memory_map_rollup.0)
        .filter_map(|map| map.extension.map.get("Pss").copied())
        .sum()
}

/// Finds `ksoftirqd` and pinned NAPI threads, whose work is not charged to any program.
pub(crate) fn network_threads(cpus: &[usize]) -> Vec<u32> {
    let serves = |process: &Process| {
        // All kernel threads are children of kthreadd.
        let name = process.stat().ok().filter(|stat| stat.ppid == 2)?.comm;
        if let Some(cpu) = name.strip_prefix("ksoftirqd/") {
            return Some(cpu.parse().is_ok_and(|cpu: usize| cpus.contains(&cpu)));
        }
        let allowed = process.status().ok().filter(|_| name.starts_with("napi/"))?.cpus_allowed_list?;
        let mut allowed = allowed.into_iter().flat_map(|(first, last)| first..=last);
        Some(allowed.all(|cpu| cpus.contains(&(cpu as usize))))
    };
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    all.filter(|process| serves(process) == Some(true))
        .filter_map(|process| u32::try_from(process.pid()).ok())
        .collect()
}

/// CPU seconds of all other processes that may run on these CPUs, including their reaped children.
pub(crate) fn time_of_others(subject: &[u32], network_threads: &[u32], cpus: &[usize]) -> f64 {
    let may_run_there = |process: &Process| {
        let allowed = process.status().ok()?.cpus_allowed_list?;
        Some(
            allowed
                .into_iter()
                .any(|(first, last)| cpus.iter().any(|cpu| (first as usize..=last as usize).contains(cpu))),
        )
    };
    let time_of = |process: Process| {
        let stat = process.stat().ok()?;
        let pid = u32::try_from(stat.pid).ok()?;
        let is_subject = u32::try_from(stat.pgrp).is_ok_and(|group| subject.contains(&group));
        let is_other = !is_subject && !network_threads.contains(&pid);
        let ticks = (stat.utime + stat.stime) as f64 + (stat.cutime + stat.cstime) as f64;
        (is_other && may_run_there(&process) == Some(true)).then_some(ticks)
    };
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    all.filter_map(time_of).sum::<f64>() / ticks_a_second()
}

pub(crate) fn time_of(pids: &[u32]) -> f64 {
    let ticks = pids.iter().filter_map(|pid| {
        let stat = Process::new(i32::try_from(*pid).ok()?).ok()?.stat().ok()?;
        Some((stat.utime + stat.stime) as f64)
    });
    ticks.sum::<f64>() / ticks_a_second()
}

pub(crate) fn last_cpu(pids: &[u32]) -> Option<u32> {
    let cpu = Process::new(i32::try_from(*pids.first()?).ok()?).ok()?.stat().ok()?.processor?;
    u32::try_from(cpu).ok()
}

fn ticks_a_second() -> f64 {
    procfs::ticks_per_second() as f64
}

fn parse_migrations(sched: &str) -> Option<u64> {
    let line = sched.lines().find(|line| line.starts_with("se.nr_migrations"))?;
    line.rsplit_once(':')?.1.trim().parse().ok()
}

pub(crate) fn cpu_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.trim().parse::<usize>().ok()?..=last.trim().parse().ok()?;
        if range.is_empty() {
            return None;
        }
        cpus.extend(range);
    }
    Some(cpus)
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
        assert_eq!((first.softirq, first.steal), (0.22, 0.05));
        assert!((first.idle - 978.65).abs() < 1e-9);
        assert!((first.busy - 148.25).abs() < 1e-9);
    }

    #[test]
    fn migrations_are_found_by_name() {
        assert_eq!(parse_migrations("x (1, #threads: 1)\n----\nse.nr_migrations   :      17\n"), Some(17));
        assert_eq!(parse_migrations("nothing"), None);
    }

    #[test]
    fn receiving_threads_of_a_cpu_are_kernel_threads() {
        for pid in network_threads(&[0]) {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
            assert!(comm.trim() == "ksoftirqd/0" || comm.starts_with("napi/"), "{comm}");
        }
        assert_eq!(network_threads(&[100_000]), Vec::<u32>::new());
        assert!(last_cpu(&[std::process::id()]).is_some() && last_cpu(&[]).is_none());
        let own = time_of(&[std::process::id()]);
        assert!((0.0..1e6).contains(&own), "{own}");
    }

    #[test]
    fn time_of_others_includes_programs_allowed_on_the_cpus() {
        let own = u32::try_from(rustix::process::getpgrp().as_raw_nonzero().get()).unwrap();
        while time_of(&[std::process::id()]) <= 0.0 {
            std::hint::black_box(program::members(own).count());
        }
        let cpus: Vec<usize> = (0..1024).collect();
        let (with, without) = (time_of_others(&[], &[], &cpus), time_of_others(&[own], &[], &cpus));
        assert!(with > without && without > 0.0, "{with} {without}");
        assert!(time_of_others(&[], &[], &[1_000_000]).abs() < f64::EPSILON);
    }

    #[test]
    fn cpu_lists_may_contain_ranges() {
        assert_eq!(cpu_list("0,2-4"), Some(vec![0, 2, 3, 4]));
    }

    #[test]
    fn usage_is_zero_only_for_a_missing_group() {
        assert_eq!(GroupUse::read(&[u32::MAX]).threads, 0);
        let group = rustix::process::getpgrp().as_raw_nonzero().get();
        let used = GroupUse::read(&[u32::try_from(group).unwrap(), u32::MAX]);
        assert!(used.threads > 0 && used.resident > 0);
        assert!(memory(u32::try_from(group).unwrap()) > 0);
    }
}
