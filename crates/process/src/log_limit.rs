//! Limits on log lines that clients cause: refusals, which anyone on the network can cause, and ended
//! sessions, of which a user can cause thousands per second. The limits protect the disk, and keep one
//! client from displacing the lines of others. Suppressed lines are counted.

use std::{
    collections::HashMap,
    hash::Hash,
    net::IpAddr,
    ops::AddAssign,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use turnpike_rates::{Rate, Rates};

use crate::log_queue::LogCounts;

/// Limits refusal lines of all workers together. Metrics count every refusal.
pub struct RefusalLineLimit {
    rates: Rates,
    suppressed: u64,
    counts: Arc<LogCounts>,
}

impl RefusalLineLimit {
    /// Limit per address: a burst of 20, then one per second.
    const EACH: Rate = Rate::new(20, 1000);
    /// Total limit: ten per second, which is at most a gigabyte per week.
    const TOTAL: Rate = Rate::new(100, 100);
    const MOST: usize = 4096;

    #[must_use]
    pub fn new(counts: Arc<LogCounts>) -> Self {
        Self { rates: Rates::new(Self::EACH, Self::TOTAL, Self::MOST), suppressed: 0, counts }
    }

    /// Returns true if this refusal is to be logged; `suppressed` is then increased by the number of
    /// refusals that have not been logged since the last line.
    pub fn admit(&mut self, now: Duration, source: IpAddr, suppressed: &mut u64) -> bool {
        let admitted = self.rates.admit_address(micros(now), source);
        let unlogged = *suppressed + u64::from(!admitted);
        self.counts.refusals.fetch_add(unlogged, Ordering::Relaxed);
        self.suppressed += unlogged;
        if admitted {
            *suppressed = std::mem::take(&mut self.suppressed);
        }
        admitted
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    pub count: u64,
    /// Bytes to peers or targets.
    pub out_bytes: u64,
    /// Bytes to clients.
    pub in_bytes: u64,
}

impl Sum {
    #[must_use]
    pub fn one(out_bytes: u64, in_bytes: u64) -> Self {
        Self { count: 1, out_bytes, in_bytes }
    }
}

impl AddAssign for Sum {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.out_bytes += other.out_bytes;
        self.in_bytes += other.in_bytes;
    }
}

/// Limits lines about ended sessions or connections. Lines above the limit are summarized by user or
/// client.
pub struct EndLimit<K> {
    rates: Rates,
    sums: HashMap<K, Sum>,
    others: Sum,
    due: Option<Duration>,
    counts: Arc<LogCounts>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct LineSummary<K> {
    pub of: Vec<(K, Sum)>,
    pub others: Option<Sum>,
}

impl<K: Hash + Eq> EndLimit<K> {
    /// Period over which a summary is collected.
    const PATIENCE: Duration = Duration::from_secs(5);
    const NAMED: usize = 32;

    #[must_use]
    pub fn new(rates: Rates, counts: Arc<LogCounts>) -> Self {
        Self { rates, sums: HashMap::new(), others: Sum::default(), due: None, counts }
    }

    /// Returns true if the end of this session or connection is to be logged, which `ask` decides from the
    /// rates; otherwise adds it to the summary for `whose`.
    pub fn admit(
        &mut self,
        now: Duration,
        sum: Sum,
        ask: impl FnOnce(&mut Rates, u64) -> bool,
        whose: impl FnOnce() -> K,
    ) -> bool {
        if ask(&mut self.rates, micros(now)) {
            return true;
        }
        self.counts.ends.fetch_add(1, Ordering::Relaxed);
        self.due.get_or_insert(now + Self::PATIENCE);
        let whose = whose();
        if let Some(known) = self.sums.get_mut(&whose) {
            *known += sum;
        } else if self.sums.len() < Self::NAMED {
            self.sums.insert(whose, sum);
        } else {
            self.others += sum;
        }
        false
    }

    pub fn due(&mut self, now: Duration) -> Option<LineSummary<K>> {
        if self.due.is_some_and(|due| due <= now) { self.take() } else { None }
    }

    /// Takes the summary early, because the log is about to end.
    pub fn take(&mut self) -> Option<LineSummary<K>> {
        self.due.take()?;
        let others = std::mem::take(&mut self.others);
        Some(LineSummary { of: self.sums.drain().collect(), others: (others.count > 0).then_some(others) })
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn refusals_are_limited_per_address_and_counted() {
        let counts = Arc::new(LogCounts::default());
        let mut limit = RefusalLineLimit::new(Arc::clone(&counts));
        let mut admitted = |seconds: u32, source: &str, tries: usize| {
            let source = source.parse().expect("an address");
            (0..tries)
                .filter_map(|_| {
                    let mut suppressed = 1;
                    limit.admit(SECOND * seconds, source, &mut suppressed).then_some(suppressed)
                })
                .collect::<Vec<u64>>()
        };
        assert_eq!(admitted(5, "192.0.2.1", 100), vec![1; 20]);
        // Each of 80 unlogged lines stands for two refusals, and this line follows one more.
        assert_eq!(admitted(5, "198.51.100.1", 1), [161]);
        assert_eq!(admitted(6, "192.0.2.1", 100), [1]);
        assert_eq!(admitted(8, "192.0.2.1", 3), [99 * 2 + 1, 1]);
        assert_eq!(counts.refusals.load(Ordering::Relaxed), 100 + 80 + 1 + 100 + 99 + 3 + 1);
    }

    fn ends(limit: &mut EndLimit<String>, now: Duration, user: &str, count: u64) -> u64 {
        let one =
            || limit.admit(now, Sum::one(100, 7), |rates, now| rates.admit(now, user), || user.to_owned());
        std::iter::repeat_with(one).take(usize::try_from(count).expect("small")).map(u64::from).sum()
    }

    #[test]
    fn session_ends_above_a_users_rate_are_summarized() {
        let counts = Arc::new(LogCounts::default());
        let rates = Rates::new(Rate::new(10, 1000), Rate::new(1000, 1), 64);
        let mut limit = EndLimit::new(rates, Arc::clone(&counts));
        assert_eq!(ends(&mut limit, SECOND, "many", 500), 10);
        assert_eq!(ends(&mut limit, SECOND, "few", 5), 5);
        assert_eq!(limit.due(SECOND * 2), None, "sums wait");
        assert_eq!(ends(&mut limit, SECOND * 2, "many", 10), 1);
        let sum = Sum { count: 499, out_bytes: 49_900, in_bytes: 7 * 499 };
        let summary = LineSummary { of: vec![("many".to_owned(), sum)], others: None };
        assert_eq!(limit.due(SECOND * 6), Some(summary));
        assert_eq!(limit.due(SECOND * 100), None, "reported once");
        assert_eq!(limit.take(), None);
        assert_eq!(counts.ends.load(Ordering::Relaxed), 499);
    }

    #[test]
    fn the_number_of_summaries_is_bounded() {
        let mut limit = EndLimit::new(Rates::new(Rate::new(0, 1), Rate::new(0, 1), 4), Arc::default());
        for user in 0..100 {
            assert_eq!(ends(&mut limit, SECOND, &user.to_string(), 2), 0);
        }
        let summary = limit.take().expect("a summary is waiting");
        assert_eq!(summary.of.len(), 32);
        assert_eq!(summary.others.map(|sum| sum.count), Some(2 * 68));
    }
}
