//! What the kernel says about this process, from /proc; values it does not tell are left out.

use std::fs;

/// USER_HZ: the unit of the times in /proc/self/stat, 100 on every Linux architecture that Rust has.
const TICKS_PER_SECOND: f64 = 100.0;

/// Usage of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ProcessUsage {
    /// User and system CPU time in seconds.
    pub(crate) cpu_seconds: Option<f64>,
    /// Resident memory in bytes.
    pub(crate) resident_bytes: Option<u64>,
    pub(crate) open_fds: Option<u64>,
    /// Soft limit of open file descriptors.
    pub(crate) max_fds: Option<u64>,
    /// Start, in seconds of Unix time.
    pub(crate) start_time_seconds: Option<f64>,
}

impl ProcessUsage {
    /// Reads /proc.
    pub(crate) fn read() -> Self {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        let stat = text("/proc/self/stat");
        let boot = field_after(&text("/proc/stat"), "btime ");
        Self {
            cpu_seconds: cpu_seconds(&stat),
            resident_bytes: field_after(&text("/proc/self/status"), "VmRSS:").map(|kib| kib * 1024),
            open_fds: fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as u64),
            max_fds: field_after(&text("/proc/self/limits"), "Max open files"),
            #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 fit into 53 bits")]
            start_time_seconds: boot.zip(stat_field(&stat, 22)).map(|(boot, ticks)| boot as f64 + ticks),
        }
    }
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    Some(stat_field(stat, 14)? + stat_field(stat, 15)?)
}

/// A field of /proc/self/stat counted from 1 (proc(5)) in seconds. The second field is the program's name, which may
/// hold blanks and parentheses, so counting starts after the last closing one.
fn stat_field(stat: &str, number: usize) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: f64 = rest.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()?;
    Some(ticks / TICKS_PER_SECOND)
}

/// The first number after `label` at the start of a line.
fn field_after(text: &str, label: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(label))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_blanks_does_not_shift_the_fields() {
        let stat = "7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 1 0 4200 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(stat_field(stat, 22), Some(42.0));
    }

    #[test]
    fn this_process_has_all_values() {
        let usage = ProcessUsage::read();
        assert!(usage.resident_bytes.is_some_and(|bytes| bytes > 100_000), "{usage:?}");
        assert!(usage.open_fds.is_some_and(|fds| fds >= 3), "{usage:?}");
        assert!(usage.max_fds.is_some() && usage.cpu_seconds.is_some(), "{usage:?}");
        assert!(usage.start_time_seconds.is_some_and(|start| start > 1.6e9), "{usage:?}");
    }
}
