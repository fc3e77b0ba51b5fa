//! Clock of the kernel programs.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Monotonic clock in nanoseconds, as programs read it (bpf_ktime_get_ns).
#[must_use]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Converts a worker's clock, in milliseconds since its start, to the programs' clock.
#[derive(Clone, Copy, Debug)]
pub struct WorkerClock {
    base_ns: u64,
}

impl WorkerClock {
    #[must_use]
    pub fn at(elapsed: Duration) -> Self {
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        Self { base_ns: now_ns().saturating_sub(elapsed_ns) }
    }

    /// Converts from nanoseconds of [`now_ns`] to microseconds of the worker's clock.
    #[must_use]
    pub fn us(&self, ns: u64) -> u64 {
        ns.saturating_sub(self.base_ns) / 1000
    }

    /// Converts to nanoseconds of [`now_ns`].
    #[must_use]
    pub fn ns(&self, ms: u64) -> u64 {
        self.base_ns.saturating_add(ms.saturating_mul(1_000_000))
    }
}
