//! Bound on log lines of refusals, by source, so that no client keeps another's out of the log.

use std::net::IpAddr;

use crate::rates::{Rate, Rates};

/// Twenty of one address at once, and then one a second.
const EACH: Rate = Rate::new(20, 1000);
/// Of all of them: what a log can be asked to take from one worker.
const TOTAL: Rate = Rate::new(200, 10);
/// More than can have something in their buckets at the same time.
const MOST: usize = 4096;

pub(crate) struct RefusalLog {
    rates: Rates,
    suppressed: u64,
}

impl Default for RefusalLog {
    fn default() -> Self {
        Self { rates: Rates::new(EACH, TOTAL, MOST), suppressed: 0 }
    }
}

impl RefusalLog {
    /// `Some(how many were suppressed since the last, whoever's they were)` if this one may become an effect.
    pub(crate) fn admit(&mut self, now_ms: u64, source: IpAddr) -> Option<u64> {
        if self.rates.admit_address(now_ms.saturating_mul(1000), source) {
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_cannot_silence_another_and_what_is_suppressed_is_counted() {
        let mut refusals = RefusalLog::default();
        let mut admitted = |now_ms, source: &str, tries| {
            let source = source.parse().unwrap();
            (0..tries).filter_map(|_| refusals.admit(now_ms, source)).collect::<Vec<_>>()
        };
        assert_eq!(admitted(5000, "192.0.2.1", 100_000), vec![0; 20]);
        assert_eq!(admitted(5000, "198.51.100.1", 2), [99_980, 0]);
        assert_eq!(admitted(6000, "192.0.2.1", 1000), [0]);
        assert_eq!(admitted(7000, "192.0.2.1", 1), [999]);
    }
}
