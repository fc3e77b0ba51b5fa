//! Circuit breaker: after consecutive failures, requests fail without waiting, and a probe tries the store
//! until it answers.

use std::time::Duration;

/// Number of consecutive failures that opens the breaker. A single failure may be due to a stale
/// connection.
const ENOUGH: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    open: bool,
}

impl Breaker {
    /// Returns true while requests must not use the store.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Returns true if this failure opens the breaker. The caller must then probe the store, and call
    /// [`Breaker::close`] when it answers.
    pub(crate) fn fail(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        let opens = !self.open && self.failures >= ENOUGH;
        self.open |= opens;
        opens
    }

    /// Records an answer. An answer that arrives late does not close the breaker; only the probe does.
    pub(crate) fn succeed(&mut self) {
        if !self.open {
            self.failures = 0;
        }
    }

    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }
}

pub(crate) fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(FIRST_PAUSE), |pause| Some((*pause * 2).min(LONGEST_PAUSE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_failures_open_the_breaker_and_a_probe_closes_it() {
        let mut breaker = Breaker::default();
        assert_eq!([breaker.fail(), breaker.fail()], [false, false]);
        breaker.succeed();
        assert_eq!([breaker.fail(), breaker.fail()], [false, false], "not consecutive");
        assert!(breaker.fail() && breaker.is_open());
        assert!(!breaker.fail(), "the breaker opens only once");
        breaker.succeed();
        assert!(breaker.is_open(), "a late answer does not close the breaker");
        breaker.close();
        assert!(!breaker.is_open());
        assert_eq!([breaker.fail(), breaker.fail()], [false, false]);
    }

    #[test]
    fn probes_slow_down_but_never_stop() {
        let all: Vec<_> = pauses().take(20).collect();
        assert!(all.is_sorted() && all[0] == FIRST_PAUSE && all[19] == LONGEST_PAUSE, "{all:?}");
    }
}
