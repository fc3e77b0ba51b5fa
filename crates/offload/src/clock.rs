//! The clock of the programs.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The kernel's monotonic clock in nanoseconds, as the program reads it (bpf_ktime_get_ns).
#[must_use]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Times of a worker's clock, which counts milliseconds from its start, as times of the programs.
#[derive(Clone, Copy, Debug)]
pub struct WorkerClock {
    /// [`now_ns`] when the worker's clock began.
    base_ns: u64,
}

impl WorkerClock {
    /// A clock that began so long ago.
    #[must_use]
    pub fn at(elapsed: Duration) -> Self {
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        Self { base_ns: now_ns().saturating_sub(elapsed_ns) }
    }

    /// A time of this clock in nanoseconds of [`now_ns`].
    #[must_use]
    pub fn ns(&self, ms: u64) -> u64 {
        self.base_ns.saturating_add(ms.saturating_mul(1_000_000))
    }
}
