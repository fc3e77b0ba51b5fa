//! Rate limit for log lines about refusals, per source, so that no client can suppress the entries of
//! another.

use std::net::IpAddr;

use turnpike_rates::{Rate, Rates};

/// Per address: 20 at once, then one per second.
const EACH: Rate = Rate::new(20, 1000);
/// Per worker: 200 at once, then 100 per second.
const TOTAL: Rate = Rate::new(200, 10);
/// Maximum number of buckets. [`TOTAL`] admits so few entries that fewer buckets than this are in use at the
/// same time.
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
    /// If the entry may be logged, returns the number of entries suppressed since the last one, over all
    /// sources.
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
    fn a_source_cannot_silence_another_and_suppressed_entries_are_counted() {
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
