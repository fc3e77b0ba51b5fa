//! Bandwidth limits: one token bucket for each direction of a rule, shared by the workers, and one
//! for each direction of a connection.
//!
//! Times are milliseconds of the workers' common clock.

use crate::{
    Limits,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

/// Indices of the directions: from clients to targets, and from targets to clients.
pub(crate) const UP: usize = 0;
pub(crate) const DOWN: usize = 1;

/// Capacity of a bucket in milliseconds at its rate: a worker that is behind schedule can catch up by this
/// much.
const BURST_MS: u64 = 100;
/// Minimum capacity in bytes: larger than the payload of one segment.
const LEAST_BURST: u64 = 2048;
/// Tokens per byte, chosen so that each millisecond yields an integer number of tokens at any integer
/// rate.
const BYTE: i64 = 1000;
/// Minimum number of bytes per turn in the queue, so that hundreds of waiting connections do not
/// each move one byte at a time.
const LEAST_SHARE: u64 = 512;

#[derive(Debug)]
pub(crate) struct ByteBucket {
    /// Bytes per second.
    rate: u64,
    most: i64,
    tokens: AtomicI64,
    filled: AtomicU64,
}

impl ByteBucket {
    fn new(rate: u64) -> Self {
        let most = (rate / (1000 / BURST_MS)).max(LEAST_BURST);
        let most = i64::try_from(most).unwrap_or(i64::MAX / BYTE).saturating_mul(BYTE);
        Self { rate, most, tokens: AtomicI64::new(most), filled: AtomicU64::new(0) }
    }

    fn refill(&self, now: u64) {
        let before = self.filled.load(Relaxed);
        if now <= before || self.filled.compare_exchange(before, now, Relaxed, Relaxed).is_err() {
            return;
        }
        let gained = i64::try_from(self.rate.saturating_mul(now - before)).unwrap_or(i64::MAX);
        let fill = |tokens: i64| Some(tokens.saturating_add(gained).min(self.most));
        // This cannot fail, because the closure always returns a value.
        let _ = self.tokens.fetch_update(Relaxed, Relaxed, fill);
    }

    /// Takes up to `want` bytes; returns 0 if the bucket is empty.
    fn take(&self, want: u64, now: u64) -> u64 {
        self.refill(now);
        let want = i64::try_from(want).unwrap_or(i64::MAX);
        let granted = |tokens: i64| (tokens / BYTE).clamp(0, want);
        let before =
            self.tokens.fetch_update(Relaxed, Relaxed, |tokens| Some(tokens - granted(tokens) * BYTE));
        granted(before.unwrap_or(0)).unsigned_abs()
    }

    fn give_back(&self, bytes: u64) {
        if bytes > 0 {
            self.tokens.fetch_add(i64::try_from(bytes).unwrap_or(0).saturating_mul(BYTE), Relaxed);
        }
    }

    fn has_some(&self, now: u64) -> bool {
        self.refill(now);
        self.tokens.load(Relaxed) >= BYTE
    }

    /// Charges a whole datagram. The balance may become negative, so that a datagram larger than
    /// the bucket can pass.
    fn spend(&self, bytes: u64) {
        self.tokens.fetch_sub(i64::try_from(bytes).unwrap_or(0).saturating_mul(BYTE), Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct RuleRates {
    rule: Option<[ByteBucket; 2]>,
    per_connection: Option<u64>,
    /// Number of flows of all workers that are waiting for the rule's tokens.
    waiting: [AtomicUsize; 2],
}

impl RuleRates {
    pub(crate) fn new(limits: &Limits) -> Option<Arc<Self>> {
        let Limits { max_bytes_per_second, max_bytes_per_second_per_connection, .. } = limits;
        if max_bytes_per_second.is_none() && max_bytes_per_second_per_connection.is_none() {
            return None;
        }
        Some(Arc::new(Self {
            rule: max_bytes_per_second.map(|rate| [ByteBucket::new(rate), ByteBucket::new(rate)]),
            per_connection: *max_bytes_per_second_per_connection,
            waiting: Default::default(),
        }))
    }
}

/// Bandwidth limits as they apply to one connection or session.
#[derive(Debug)]
pub(crate) struct Pace {
    rates: Arc<RuleRates>,
    own: Option<[ByteBucket; 2]>,
    /// Ticket in the queue per direction; 0 if not waiting.
    ticket: [u64; 2],
}

impl Pace {
    pub(crate) fn of(rates: Option<&Arc<RuleRates>>) -> Option<Box<Self>> {
        rates.map(|rates| {
            let own = rates.per_connection.map(|rate| [ByteBucket::new(rate), ByteBucket::new(rate)]);
            Box::new(Self { rates: Arc::clone(rates), own, ticket: [0; 2] })
        })
    }

    fn buckets(&self, way: usize) -> impl Iterator<Item = &ByteBucket> {
        self.own.iter().chain(self.rates.rule.iter()).map(move |buckets| &buckets[way])
    }

    /// Takes up to `want` bytes. The caller returns unused bytes.
    pub(crate) fn take(&self, way: usize, want: u64, now: u64) -> u64 {
        let mut granted = want;
        for bucket in self.buckets(way) {
            let less = bucket.take(granted, now);
            if less < granted
                && let Some(own) = &self.own
                && !std::ptr::eq(bucket, &raw const own[way])
            {
                own[way].give_back(granted - less);
            }
            granted = less;
        }
        granted
    }

    pub(crate) fn give_back(&self, way: usize, bytes: u64) {
        self.buckets(way).for_each(|bucket| bucket.give_back(bytes));
    }

    pub(crate) fn has_some(&self, way: usize, now: u64) -> bool {
        self.buckets(way).all(|bucket| bucket.has_some(now))
    }

    /// True if a datagram may pass now; if so, it is charged.
    pub(crate) fn admits(&self, way: usize, len: usize, now: u64) -> bool {
        let admitted = self.has_some(way, now);
        if admitted {
            self.buckets(way).for_each(|bucket| bucket.spend(len as u64));
        }
        admitted
    }

    /// True if this or another flow of the rule is waiting, so that new ones must queue.
    pub(crate) fn must_queue(&self, way: usize) -> bool {
        self.ticket[way] != 0 || self.rates.rule.is_some() && self.rates.waiting[way].load(Relaxed) > 0
    }

    pub(crate) fn is_waiting(&self, way: usize) -> bool {
        self.ticket[way] != 0
    }

    pub(crate) fn holds(&self, way: usize, ticket: u64) -> bool {
        self.ticket[way] == ticket
    }

    pub(crate) fn queue(&mut self, way: usize, ticket: u64) {
        self.ticket[way] = ticket;
        self.rates.waiting[way].fetch_add(1, Relaxed);
    }

    pub(crate) fn leave_queue(&mut self, way: usize) {
        if std::mem::take(&mut self.ticket[way]) != 0 {
            self.rates.waiting[way].fetch_sub(1, Relaxed);
        }
    }

    /// Bytes that a waiting flow may take at once: an equal share of the tokens gained by the rule in
    /// `elapsed` milliseconds.
    pub(crate) fn share(&self, way: usize, elapsed: u64) -> u64 {
        let Some(rule) = &self.rates.rule else { return u64::MAX };
        let waiting = self.rates.waiting[way].load(Relaxed).max(1) as u64;
        (rule[way].rate.saturating_mul(elapsed.clamp(1, BURST_MS)) / 1000 / waiting).max(LEAST_SHARE)
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        self.leave_queue(UP);
        self.leave_queue(DOWN);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use super::*;

    fn pace(rule: Option<u64>, own: Option<u64>) -> (Arc<RuleRates>, Box<Pace>) {
        let limits = Limits {
            max_bytes_per_second: rule,
            max_bytes_per_second_per_connection: own,
            ..Limits::default()
        };
        let rates = RuleRates::new(&limits).unwrap();
        let pace = Pace::of(Some(&rates)).unwrap();
        (rates, pace)
    }

    #[test]
    fn bucket_yields_exactly_its_rate_after_the_burst() {
        // These rates are not an integer number of bytes per millisecond.
        for rate in [1001, 30_303, 10_000_000_007] {
            let bucket = ByteBucket::new(rate);
            let burst = bucket.take(u64::MAX, 1);
            assert_eq!(burst, (rate / 10).max(LEAST_BURST));
            let taken: u64 = (2..=10_001).map(|now| bucket.take(u64::MAX, now)).sum();
            assert_eq!(taken, rate * 10, "{rate}");
        }
    }

    #[test]
    fn lower_limit_applies_and_the_other_bucket_is_refunded() {
        let (_, pace) = pace(Some(100_000), Some(1_000_000));
        assert_eq!(pace.take(UP, u64::MAX, 1), 10_000);
        assert_eq!(pace.take(UP, u64::MAX, 1), 0);
        assert_eq!(pace.own.as_ref().unwrap()[UP].take(u64::MAX, 1), 90_000);
        assert_eq!(pace.take(DOWN, u64::MAX, 1), 10_000, "each direction has its own bucket");
    }

    #[test]
    fn datagram_beyond_the_bucket_passes_and_leaves_a_debt() {
        let (_, pace) = pace(None, Some(10_000));
        let passed = (1..=10_000).filter(|now| pace.admits(UP, 60_000, *now)).count();
        // The bucket has 2,048 bytes at first and gets 100,000 later: one datagram passes immediately, and
        // one once the debt of 57,952 bytes is paid.
        assert_eq!(passed, 2);
    }

    #[test]
    fn dropped_flow_leaves_the_queue() {
        let (rates, mut pace) = pace(Some(1000), None);
        let other = Pace::of(Some(&rates)).unwrap();
        pace.queue(UP, 7);
        assert!(pace.holds(UP, 7) && other.must_queue(UP) && !other.must_queue(DOWN));
        drop(pace);
        assert!(!other.must_queue(UP));
    }
}
