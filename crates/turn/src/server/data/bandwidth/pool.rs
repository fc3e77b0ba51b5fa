//! Bandwidth shared by the allocations of a user, a realm, or the server. A pool consists of atomics, which
//! all workers use.
//!
//! **Accuracy.** In the long run, the limit is exact. The burst can be exceeded by tokens that workers have
//! leased but not spent: for each worker and direction, at most one datagram of maximum length or two slices,
//! each worth 2 ms of the rate but at least 2 KiB.
//!
//! **Fairness.** While there is enough for all, every datagram passes. Half of the burst is reserved for
//! allocations within their share: each active allocation accrues an equal share of the rate, and others may
//! use the unused part of a share (max-min fairness). A flood gets only the remainder. Demand is measured
//! four times a second.

use std::{
    fmt,
    // Not shared between workers, but worker state must be `Send`.
    sync::{Arc as Own, PoisonError, Weak},
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::{BYTE, Limit, Way, gained, needed_ms};
use crate::sync::{
    Arc, Mutex,
    atomic::{
        AtomicI64, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
        fence,
    },
};

/// Smallest pool: it must hold the longest possible payload.
pub(super) const LEAST_POOL: i64 = 65_536 * BYTE;
/// Slice that a worker leases: this many milliseconds' worth of the rate, but at least `LEAST_SLICE` tokens.
const SLICE_MS: u64 = 2;
const LEAST_SLICE: i64 = 2048 * BYTE;
/// Shares are recalculated every 256 ms.
const PERIOD_BITS: u32 = 8;
/// Weight of an allocation that uses its full share. One that uses less counts as a fraction of this.
pub(super) const WHOLE: u64 = 1 << 16;

#[derive(Debug)]
pub(super) struct RatePool {
    rate: AtomicU64,
    burst: AtomicI64,
    ways: [PoolWay; 2],
}

#[derive(Debug, Default)]
struct PoolWay {
    tokens: AtomicI64,
    filled_ms: AtomicU64,
    period: AtomicU64,
    /// Shares requested in this period and in the previous one, in units of [`WHOLE`].
    asking: AtomicU64,
    asked: AtomicU64,
}

impl RatePool {
    pub(super) fn new(limit: Limit, now_ms: u64) -> Self {
        let way = || PoolWay {
            tokens: AtomicI64::new(limit.burst),
            filled_ms: AtomicU64::new(now_ms),
            ..PoolWay::default()
        };
        Self { rate: AtomicU64::new(limit.rate), burst: AtomicI64::new(limit.burst), ways: [way(), way()] }
    }

    pub(super) fn set(&self, limit: Limit) {
        self.rate.store(limit.rate, Relaxed);
        self.burst.store(limit.burst, Relaxed);
    }

    fn limit(&self) -> Limit {
        Limit { rate: self.rate.load(Relaxed), burst: self.burst.load(Relaxed) }
    }

    /// Tokens reserved for allocations within their share.
    fn reserve(&self) -> i64 {
        self.burst.load(Relaxed) / 2
    }

    /// Number of tokens in a slice: at most 1/16 of the burst, unless that is below the minimum.
    fn slice(&self) -> i64 {
        let Limit { rate, burst } = self.limit();
        gained(rate, SLICE_MS).min(burst / 16).max(LEAST_SLICE)
    }

    /// Takes at most `want` tokens and leaves at least `floor`.
    pub(super) fn take(&self, way: Way, want: i64, floor: i64, now_ms: u64) -> i64 {
        let (limit, way) = (self.limit(), &self.ways[way as usize]);
        way.refill(limit, now_ms);
        let granted = |tokens: i64| (tokens - floor).clamp(0, want);
        let take = |tokens: i64| Some(granted(tokens)).filter(|granted| *granted > 0).map(|it| tokens - it);
        way.tokens.fetch_update(Relaxed, Relaxed, take).map_or(0, granted)
    }

    /// True if the pool can be dropped without effect, because it is full and has no members.
    pub(super) fn is_idle(pool: &Arc<Self>, now_ms: u64) -> bool {
        if Arc::strong_count(pool) > 1 {
            return false;
        }
        // Pairs with the release of the last member, so that its withdrawals are visible.
        fence(Acquire);
        pool.is_full(now_ms)
    }

    fn is_full(&self, now_ms: u64) -> bool {
        let limit = self.limit();
        self.ways.iter().all(|way| {
            way.refill(limit, now_ms);
            way.tokens.load(Relaxed) >= limit.burst
        })
    }

    pub(super) fn share(&self, way: Way) -> u64 {
        let way = &self.ways[way as usize];
        // This order matters: a reader that sees the restarted sum must also see the previous one.
        let asking = way.asking.load(Acquire);
        let all = asking.max(way.asked.load(Relaxed)).max(WHOLE);
        (self.rate.load(Relaxed).saturating_mul(WHOLE) / all).max(1)
    }

    pub(super) fn join(&self, way: Way, period: u64, weight: u64) {
        self.ways[way as usize].join(period, weight);
    }
}

impl PoolWay {
    fn refill(&self, limit: Limit, now_ms: u64) {
        let before = self.filled_ms.load(Relaxed);
        if now_ms <= before || self.filled_ms.compare_exchange(before, now_ms, Relaxed, Relaxed).is_err() {
            return;
        }
        let gained = gained(limit.rate, now_ms - before);
        let fill = |tokens: i64| Some(tokens.saturating_add(gained).min(limit.burst));
        // This cannot fail, because the closure always returns a value.
        let _ = self.tokens.fetch_update(Relaxed, Relaxed, fill);
    }

    /// Registers one more active allocation. At a period boundary it may be counted in either period.
    fn join(&self, period: u64, weight: u64) {
        let of = self.period.load(Relaxed);
        if of < period && self.period.compare_exchange(of, period, Relaxed, Relaxed).is_ok() {
            // For a moment, the sum is in both fields: if it were in neither, an allocation would get the
            // full rate as its share.
            let sum = self.asking.load(Relaxed);
            self.asked.store(if of + 1 == period { sum } else { 0 }, Relaxed);
            // Saturates, because another worker may already be a period ahead and have subtracted the sum.
            // This cannot fail, because the closure always returns a value.
            let _ = self.asking.fetch_update(Release, Relaxed, |now| Some(now.saturating_sub(sum)));
        }
        self.asking.fetch_add(weight, Relaxed);
    }
}

/// Tokens that one worker has leased but not spent. Only that worker changes it; atomic because its
/// allocations share it.
#[derive(Debug)]
pub(super) struct PoolLease {
    pool: Arc<RatePool>,
    ways: [LeasedTokens; 2],
}

#[derive(Debug, Default)]
struct LeasedTokens {
    open: AtomicI64,
    kept: AtomicI64,
}

impl PoolLease {
    pub(super) fn new(pool: Arc<RatePool>) -> Self {
        Self { pool, ways: Default::default() }
    }

    /// `within` is the part of `want` that is within the allocation's share.
    pub(super) fn offers(&self, way: Way, want: i64, within: i64, now_ms: u64) -> i64 {
        let held = &self.ways[way as usize];
        let (open, kept) = (held.open.load(Relaxed), held.kept.load(Relaxed));
        if open + kept.min(within) >= want { want } else { self.leases(way, want, within, now_ms) }
    }

    /// Slow path of [`PoolLease::offers`]: leases more from the pool.
    #[inline(never)]
    fn leases(&self, way: Way, want: i64, within: i64, now_ms: u64) -> i64 {
        let (held, pool) = (&self.ways[way as usize], &self.pool);
        let (mut open, mut kept) = (held.open.load(Relaxed), held.kept.load(Relaxed));
        let slice = pool.slice();
        let missing = want - open - kept.min(within);
        open += pool.take(way, missing.max(slice), pool.reserve(), now_ms);
        held.open.store(open, Relaxed);
        let missing = within - open - kept;
        if missing > 0 {
            kept += pool.take(way, missing.max(slice), 0, now_ms);
            held.kept.store(kept, Relaxed);
        }
        (open + kept.min(within)).clamp(0, want)
    }

    pub(super) fn spend(&self, way: Way, cost: i64, within: i64) {
        let held = &self.ways[way as usize];
        let kept = held.kept.load(Relaxed);
        let of_kept = kept.min(within);
        held.kept.store(kept - of_kept, Relaxed);
        held.open.store(held.open.load(Relaxed) - (cost - of_kept), Relaxed);
    }

    /// Keeps at most one slice of tokens and returns the rest to the pool; otherwise, the pool would refill
    /// on top of them.
    fn give_back(&self, way: Way, tokens: i64) {
        let open = &self.ways[way as usize].open;
        let has = open.load(Relaxed).saturating_add(tokens);
        let kept = has.min(self.pool.slice());
        open.store(kept, Relaxed);
        if has > kept {
            self.pool.ways[way as usize].tokens.fetch_add(has - kept, Relaxed);
        }
    }
}

impl Drop for PoolLease {
    fn drop(&mut self) {
        for (way, held) in self.pool.ways.iter().zip(&self.ways) {
            way.tokens.fetch_add(held.open.load(Relaxed) + held.kept.load(Relaxed), Relaxed);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct PoolShare {
    tokens: i64,
    /// Maximum number of tokens: this allocation's part of the burst.
    depth: i64,
    filled_ms: u64,
    /// Period in which the allocation was last counted.
    period: u64,
    asked: i64,
}

impl PoolShare {
    const NEW: Self = Self { tokens: 0, depth: 0, filled_ms: 0, period: u64::MAX, asked: 0 };

    fn refill(&mut self, pool: &RatePool, way: Way, now_ms: u64) {
        let period = now_ms >> PERIOD_BITS;
        let is_new = self.period == u64::MAX;
        let elapsed = if is_new { u64::MAX } else { now_ms.saturating_sub(self.filled_ms) };
        if period != self.period {
            self.join(pool, way, period);
        }
        if elapsed > 0 {
            self.filled_ms = now_ms;
            let (share, Limit { rate, burst }) = (pool.share(way), pool.limit());
            self.depth = gained(share, burst.unsigned_abs() / rate.max(1));
            self.tokens = self.tokens.saturating_add(gained(share, elapsed)).min(self.depth);
        }
    }

    /// Registers for a new period, weighted by the demand in the last one.
    fn join(&mut self, pool: &RatePool, way: Way, period: u64) {
        let weight = if self.period == u64::MAX {
            WHOLE
        } else {
            let whole = gained(pool.share(way), 1 << PERIOD_BITS).unsigned_abs();
            (self.asked.unsigned_abs().saturating_mul(WHOLE) / whole.max(1)).clamp(1, WHOLE)
        };
        pool.join(way, period, weight);
        (self.period, self.asked) = (period, 0);
    }

    /// Part of `cost` that is within the share: all of it or nothing. A datagram longer than `depth` is
    /// within the share if the share is full.
    fn within(&self, cost: i64) -> i64 {
        if self.tokens >= cost.min(self.depth) { cost } else { 0 }
    }
}

#[derive(Debug)]
pub(super) struct PoolMember {
    lease: Own<PoolLease>,
    shares: [PoolShare; 2],
    /// The part of the last request that was within the share.
    within: i64,
}

impl PoolMember {
    pub(super) fn new(lease: Own<PoolLease>) -> Self {
        Self { lease, shares: [PoolShare::NEW; 2], within: 0 }
    }

    pub(super) fn admits(&mut self, way: Way, cost: i64, now_ms: u64) -> bool {
        let share = self.asks(way, cost, now_ms);
        self.within = share.within(cost);
        self.lease.offers(way, cost, self.within, now_ms) >= cost
    }

    pub(super) fn offers(&mut self, way: Way, want: i64, now_ms: u64) -> i64 {
        let share = self.asks(way, want, now_ms);
        self.within = share.tokens.clamp(0, want);
        self.lease.offers(way, want, self.within, now_ms)
    }

    pub(super) fn spend(&mut self, way: Way, cost: i64) {
        let within = self.within.min(cost);
        self.shares[way as usize].tokens -= within;
        self.lease.spend(way, cost, within);
    }

    pub(super) fn give_back(&mut self, way: Way, tokens: i64) {
        let share = &mut self.shares[way as usize];
        share.tokens = share.tokens.saturating_add(tokens).min(share.depth);
        share.asked = share.asked.saturating_sub(tokens).max(0);
        self.lease.give_back(way, tokens);
    }

    pub(super) fn until_ms(&self, way: Way, cost: i64, now_ms: u64) -> u64 {
        let share = &self.shares[way as usize];
        now_ms + needed_ms(self.lease.pool.share(way), cost.min(share.depth) - share.tokens)
    }

    fn asks(&mut self, way: Way, cost: i64, now_ms: u64) -> PoolShare {
        let share = &mut self.shares[way as usize];
        share.refill(&self.lease.pool, way, now_ms);
        share.asked = share.asked.saturating_add(cost);
        *share
    }
}

/// Pools of a server, shared by its workers. Locked when an allocation begins or moves, and on reload.
#[derive(Clone, Default)]
pub struct Pools(Arc<Mutex<Registry>>);

#[derive(Default)]
struct Registry {
    pools: HashMap<Box<str>, Arc<RatePool>, RandomState>,
    /// Table size at which idle pools are removed.
    sweep_at: usize,
}

const FEW: usize = 64;

impl Pools {
    /// A pool without members stays until it is full again, so that new allocations get no fresh burst.
    fn get(&self, name: &str, limit: Limit, now_ms: u64) -> Arc<RatePool> {
        let mut registry = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = registry.pools.get(name) {
            pool.set(limit);
            return Arc::clone(pool);
        }
        if registry.pools.len() >= registry.sweep_at {
            registry.pools.retain(|_, pool| !RatePool::is_idle(pool, now_ms));
            registry.sweep_at = (registry.pools.len() * 2).max(FEW);
        }
        let pool = Arc::new(RatePool::new(limit, now_ms));
        registry.pools.insert(name.into(), Arc::clone(&pool));
        pool
    }
}

impl fmt::Debug for Pools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pools(..)")
    }
}

#[derive(Default)]
pub(crate) struct Leases {
    leases: HashMap<Box<str>, Weak<PoolLease>, RandomState>,
    sweep_at: usize,
}

impl Leases {
    pub(super) fn get(&mut self, pools: &Pools, name: &str, limit: Limit, now_ms: u64) -> Own<PoolLease> {
        let pool = pools.get(name, limit, now_ms);
        // The pool may have been dropped and recreated, leaving a lease of the old one.
        let known = self.leases.get(name).and_then(Weak::upgrade);
        if let Some(lease) = known.filter(|lease| Arc::ptr_eq(&lease.pool, &pool)) {
            return lease;
        }
        if self.leases.len() >= self.sweep_at {
            self.leases.retain(|_, lease| lease.strong_count() > 0);
            self.sweep_at = (self.leases.len() * 2).max(FEW);
        }
        let lease = Own::new(PoolLease::new(pool));
        self.leases.insert(name.into(), Own::downgrade(&lease));
        lease
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.leases.values().filter(|lease| lease.strong_count() > 0).count()
    }
}

#[cfg(test)]
impl Pools {
    pub(super) fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pools.len()
    }
}
