//! Due times of bursts: an open loop that never waits for replies.

/// Due times at a fixed rate, computed from a counter and therefore free of drift.
#[derive(Clone, Debug)]
pub(crate) struct Pacer {
    start_ns: u64,
    interval_ns: f64,
    index: u64,
}

impl Pacer {
    pub(crate) fn new(start_ns: u64, per_second: f64) -> Self {
        Self { start_ns, interval_ns: 1e9 / per_second, index: 0 }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "exact up to 2^53 ns, 104 days")]
    pub(crate) fn due(&self) -> u64 {
        self.start_ns.saturating_add((self.index as f64 * self.interval_ns) as u64)
    }

    #[inline]
    pub(crate) fn advance(&mut self) {
        self.index += 1;
    }

    /// Skips all bursts due before `ns`.
    #[expect(clippy::cast_possible_truncation, reason = "exact up to 2^53 ns, 104 days")]
    pub(crate) fn skip_to(&mut self, ns: u64) {
        if self.due() < ns {
            self.index = ((ns - self.start_ns) as f64 / self.interval_ns).ceil() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_times_neither_drift_nor_skip() {
        let mut pacer = Pacer::new(1_000, 30_000.0);
        for _ in 0..30_000 * 3 {
            pacer.advance();
        }
        assert_eq!(pacer.due(), 1_000 + 3_000_000_000);
    }

    #[test]
    fn skip_to_skips_only_earlier_due_times() {
        let mut pacer = Pacer::new(1_000, 1_000.0);
        pacer.skip_to(1_000);
        assert_eq!(pacer.due(), 1_000);
        for time in [2_500_000, 4_001_000] {
            pacer.skip_to(time);
            assert!((time..time + 1_000_000).contains(&pacer.due()), "{pacer:?}");
        }
        let due = pacer.due();
        pacer.skip_to(3_000_000);
        assert_eq!(pacer.due(), due, "skipping backwards has no effect");
    }
}
