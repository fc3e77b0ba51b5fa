//! Pauses between attempts: exponential, with jitter, so that many nodes do not return to a recovered receiver at the same moment.

use std::time::Duration;

#[derive(Debug)]
pub(crate) struct BackOff {
    first: Duration,
    most: Duration,
    failures: u32,
}

impl BackOff {
    pub(crate) fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, failures: 0 }
    }

    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Pause after another failure. `chance` is random, 0 to 1; `wished` is the receiver's Retry-After.
    pub(crate) fn failed(&mut self, chance: f64, wished: Option<Duration>) -> Duration {
        let doubled = self.first.saturating_mul(1 << self.failures.min(20));
        self.failures = self.failures.saturating_add(1);
        let pause = doubled.min(self.most).mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0);
        pause.max(wished.unwrap_or_default().min(self.most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum_and_start_again_after_success() {
        let seconds = Duration::from_secs;
        let mut pauses = BackOff::new(seconds(1), seconds(60));
        let taken: Vec<u64> = (0..8).map(|_| pauses.failed(1.0, None).as_secs()).collect();
        assert_eq!(taken, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses.failed(0.0, None), seconds(30), "jitter at most halves a pause");
        pauses.succeeded();
        assert_eq!(pauses.failed(1.0, Some(seconds(7))), seconds(7));
        assert_eq!(pauses.failed(1.0, Some(seconds(3600))), seconds(60), "a receiver cannot stop delivery");
        for _ in 0..100 {
            pauses.failed(1.0, None);
        }
        assert_eq!(pauses.failed(1.0, None), seconds(60));
    }
}
