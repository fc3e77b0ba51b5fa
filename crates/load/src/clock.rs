//! Clock of a run.

use std::time::{Duration, Instant};

/// Nanoseconds since the start of a run, shared by all its threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    epoch: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { epoch: Instant::now() }
    }

    #[inline]
    pub(crate) fn ns(&self) -> u64 {
        nanos(self.epoch.elapsed())
    }
}

/// Nanoseconds of a duration; saturates after 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// CPU time of the calling thread (proc(5), schedstat); `None` if the kernel does not account for it.
pub(crate) fn thread_cpu() -> Option<Duration> {
    let books = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    books.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}
