//! Whether a store is worth asking. After a few failures in a row nobody is made to wait for it any more; it is asked by one probe at a
//! time, until it answers.

use std::time::Duration;

/// Failures in a row. One may be a connection that has gone stale.
const ENOUGH: u32 = 3;
/// Between two probes, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Counts failures.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    open: bool,
}

impl Breaker {
    /// Whether nobody is to ask.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// True if it opens by this: then somebody has to probe until [`Breaker::close`].
    pub(crate) fn fail(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        let opens = !self.open && self.failures >= ENOUGH;
        self.open |= opens;
        opens
    }

    /// An answer. One that comes late does not close it: the probe does.
    pub(crate) fn succeed(&mut self) {
        if !self.open {
            self.failures = 0;
        }
    }

    /// A probe was answered.
    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }
}

/// How long to wait before each probe.
pub(crate) fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(FIRST_PAUSE), |pause| Some((*pause * 2).min(LONGEST_PAUSE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_open_it_and_a_probe_closes_it() {
        let mut breaker = Breaker::default();
        assert_eq!([breaker.fail(), breaker.fail()], [false, false]);
        breaker.succeed();
        assert_eq!([breaker.fail(), breaker.fail()], [false, false], "not in a row");
        assert!(breaker.fail() && breaker.is_open());
        assert!(!breaker.fail(), "it opens once");
        breaker.succeed();
        assert!(breaker.is_open(), "a late answer is no probe");
        breaker.close();
        assert!(!breaker.is_open());
        assert_eq!([breaker.fail(), breaker.fail()], [false, false]);
    }

    #[test]
    fn probes_come_less_and_less_often_but_for_ever() {
        let all: Vec<_> = pauses().take(20).collect();
        assert!(all.is_sorted() && all[0] == FIRST_PAUSE && all[19] == LONGEST_PAUSE, "{all:?}");
    }
}
