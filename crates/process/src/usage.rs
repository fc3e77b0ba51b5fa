//! Resource usage of this process, from /proc; unreadable values are omitted.

use procfs::process::{LimitValue, Process};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProcessUsage {
    pub cpu_seconds: Option<f64>,
    pub resident_bytes: Option<u64>,
    pub open_fds: Option<u64>,
    pub max_fds: Option<u64>,
    /// Start time of the process in Unix seconds.
    pub start_time_seconds: Option<f64>,
}

impl ProcessUsage {
    #[expect(
        clippy::cast_precision_loss,
        reason = "ticks since the machine booted, and seconds since 1970, fit into 53 bits"
    )]
    pub fn read() -> Self {
        let process = Process::myself().ok();
        let stat = process.as_ref().and_then(|process| process.stat().ok());
        let status = process.as_ref().and_then(|process| process.status().ok());
        let limits = process.as_ref().and_then(|process| process.limits().ok());
        let seconds = |ticks: u64| ticks as f64 / procfs::ticks_per_second() as f64;
        let boot = procfs::boot_time_secs().ok();
        Self {
            cpu_seconds: stat.as_ref().map(|stat| seconds(stat.utime + stat.stime)),
            resident_bytes: status.and_then(|status| status.vmrss).map(|kib| kib * 1024),
            open_fds: process.and_then(|process| process.fd_count().ok()).map(|count| count as u64),
            max_fds: limits.and_then(|limits| match limits.max_open_files.soft_limit {
                LimitValue::Value(most) => Some(most),
                LimitValue::Unlimited => None,
            }),
            start_time_seconds: boot.zip(stat).map(|(boot, stat)| boot as f64 + seconds(stat.starttime)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_of_this_process_are_readable() {
        let usage = ProcessUsage::read();
        assert!(usage.resident_bytes.is_some_and(|bytes| bytes > 100_000), "{usage:?}");
        assert!(usage.open_fds.is_some_and(|fds| fds >= 3), "{usage:?}");
        assert!(usage.max_fds.is_some() && usage.cpu_seconds.is_some(), "{usage:?}");
        assert!(usage.start_time_seconds.is_some_and(|start| start > 1.6e9), "{usage:?}");
    }
}
