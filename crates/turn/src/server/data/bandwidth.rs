//! Bandwidth limits in bits per second of payload, per direction: for an allocation, its user, its realm, and
//! the server.
//!
//! ```text
//!  allocation             Bucket   not shared: plain numbers
//!  user, realm, total     Pool     shared by the workers, atomic ──▶ Lease   a worker's part, spent without asking the pool
//!                                                                      └▶ Share   an allocation's fair part of the pool
//! ```
//!
//! Callers pass the time in milliseconds of a clock common to all workers. The packet path does not allocate
//! memory, lock or read a clock, and allocations without limits carry no state.
//!
//! **Accuracy.** A bucket admits its rate plus its burst. A datagram longer than the burst passes when the
//! bucket is full, and must be paid off before the next one. [`pool`] describes the accuracy and fairness of
//! pools.

mod limit;
mod pool;

use std::{collections::HashMap, ops::RangeInclusive};

use super::{quality::Meter, tap::Tap};
use crate::{
    server::{AllocationSlot, DropReason, Effect, Policy, Server},
    time::Now,
};
use limit::{BYTE, Limit, gained, needed_ms};
pub(crate) use pool::Leases;
pub use pool::Pools;
use pool::{LEAST_POOL, PoolMember};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    ToPeer,
    ToClient,
}

/// Bits per second in each direction; `None` for unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    pub per_allocation: Option<u64>,
    pub per_user: Option<u64>,
    pub per_realm: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    pub rates: Rates,
    /// Bits per second.
    pub total: Option<u64>,
    /// Burst, in milliseconds' worth of the rate. Default 250.
    pub burst_ms: u32,
    pub realms: HashMap<Box<str>, Rates>,
}

impl Default for Bandwidth {
    fn default() -> Self {
        Self { rates: Rates::default(), total: None, burst_ms: 250, realms: HashMap::new() }
    }
}

impl Bandwidth {
    pub const MOST: u64 = 1_000_000_000_000;
    /// Valid rates in bits per second; below the lowest, nothing could be relayed.
    pub const RATES: RangeInclusive<u64> = 1000..=Self::MOST;

    /// Valid rate nearest to a number of bytes per second, the unit of coturn's `max-bps`.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> u64 {
        bytes.saturating_mul(8).clamp(*Self::RATES.start(), *Self::RATES.end())
    }

    fn of(&self, realm: &str) -> Rates {
        self.realms.get(realm).copied().unwrap_or(self.rates)
    }

    fn is_unlimited(&self) -> bool {
        self.total.is_none() && self.rates == Rates::default() && self.realms.is_empty()
    }
}

/// Levels, in the order in which they are checked. A refusal by one level does not count against the later
/// ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateLevel {
    Allocation,
    User,
    Realm,
    Total,
}

impl RateLevel {
    pub const NAMES: [&'static str; 4] = ["allocation", "user", "realm", "total"];

    #[must_use]
    pub const fn drop_reason(self) -> DropReason {
        match self {
            Self::Allocation => DropReason::AllocationBandwidth,
            Self::User => DropReason::UserBandwidth,
            Self::Realm => DropReason::RealmBandwidth,
            Self::Total => DropReason::TotalBandwidth,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldUp {
    pub level: RateLevel,
    pub until_ms: u64,
}

/// Smallest burst of a bucket: a datagram of common MTU size, with some margin.
const LEAST_BURST: i64 = 2048 * BYTE;

fn cost(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX).saturating_mul(BYTE)
}

#[derive(Clone, Copy, Debug)]
struct RateBucket {
    tokens: i64,
    filled_ms: u64,
}

impl RateBucket {
    fn refill(&mut self, limit: Limit, now_ms: u64) {
        let elapsed = now_ms.saturating_sub(self.filled_ms);
        if elapsed > 0 {
            self.filled_ms = now_ms;
            self.tokens = self.tokens.saturating_add(gained(limit.rate, elapsed)).min(limit.burst);
        }
    }

    /// A full bucket admits any cost.
    fn has(&self, limit: Limit, cost: i64) -> bool {
        self.tokens >= cost.min(limit.burst)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Limited {
    own: Option<(Limit, [RateBucket; 2])>,
    /// Indexed like [`SHARED`].
    members: [Option<PoolMember>; 3],
    /// See [`crate::server::VolumeLimits::per_user`].
    slowed: Option<u64>,
    pub(crate) tap: Option<Box<dyn Tap>>,
    pub(crate) meter: Option<Box<Meter>>,
}

const SHARED: [RateLevel; 3] = [RateLevel::User, RateLevel::Realm, RateLevel::Total];

impl Limited {
    /// True if the packet path must look at the allocation's datagrams.
    pub(crate) fn is_needed(&self) -> bool {
        self.is_limited() || self.tap.is_some() || self.meter.is_some()
    }

    fn is_limited(&self) -> bool {
        self.own.is_some() || self.members.iter().any(Option::is_some)
    }

    #[inline]
    pub(crate) fn admit(&mut self, way: Way, bytes: usize, now_ms: u64) -> Result<(), HeldUp> {
        if self.is_limited() { self.ask_limits(way, cost(bytes), now_ms) } else { Ok(()) }
    }

    #[inline(never)]
    fn ask_limits(&mut self, way: Way, cost: i64, now_ms: u64) -> Result<(), HeldUp> {
        if let Some((limit, buckets)) = &mut self.own {
            let bucket = &mut buckets[way as usize];
            bucket.refill(*limit, now_ms);
            if !bucket.has(*limit, cost) {
                let missing = cost.min(limit.burst) - bucket.tokens;
                let until_ms = now_ms + needed_ms(limit.rate, missing);
                return Err(HeldUp { level: RateLevel::Allocation, until_ms });
            }
        }
        for (level, member) in SHARED.into_iter().zip(&mut self.members) {
            if let Some(member) = member
                && !member.admits(way, cost, now_ms)
            {
                return Err(HeldUp { level, until_ms: member.until_ms(way, cost, now_ms) });
            }
        }
        self.spend(way, cost);
        Ok(())
    }

    /// Takes up to `want` bytes, but at least one.
    fn take(&mut self, way: Way, want: u64, now_ms: u64) -> Result<u64, HeldUp> {
        let mut granted = cost(usize::try_from(want).unwrap_or(usize::MAX));
        if let Some((limit, buckets)) = &mut self.own {
            let bucket = &mut buckets[way as usize];
            bucket.refill(*limit, now_ms);
            granted = granted.min(bucket.tokens);
            if granted < BYTE {
                let until_ms = now_ms + needed_ms(limit.rate, LEAST_BURST - bucket.tokens);
                return Err(HeldUp { level: RateLevel::Allocation, until_ms });
            }
        }
        for (level, member) in SHARED.into_iter().zip(&mut self.members) {
            if let Some(member) = member {
                granted = member.offers(way, granted, now_ms);
                if granted < BYTE {
                    return Err(HeldUp { level, until_ms: member.until_ms(way, LEAST_BURST, now_ms) });
                }
            }
        }
        let bytes = granted / BYTE;
        self.spend(way, bytes * BYTE);
        Ok(bytes.unsigned_abs())
    }

    pub(crate) fn allowance(&self, now_ms: u64) -> Option<[i64; 2]> {
        let (limit, buckets) = self.own?;
        Some(buckets.map(|mut bucket| {
            bucket.refill(limit, now_ms);
            bucket.tokens
        }))
    }

    /// Buckets with the tokens of a moved allocation. They are not refilled until [`Server::limit`] applies
    /// the limits of this worker.
    pub(crate) fn carried(tokens: [i64; 2], now_ms: u64) -> Box<Self> {
        let buckets = tokens.map(|tokens| RateBucket { tokens, filled_ms: now_ms });
        Box::new(Self { own: Some((Limit { rate: 0, burst: 0 }, buckets)), ..Self::default() })
    }

    fn give_back(&mut self, way: Way, bytes: u64) {
        let tokens = cost(usize::try_from(bytes).unwrap_or(usize::MAX));
        if let Some((limit, buckets)) = &mut self.own {
            let bucket = &mut buckets[way as usize];
            bucket.tokens = bucket.tokens.saturating_add(tokens).min(limit.burst);
        }
        for member in self.members.iter_mut().flatten() {
            member.give_back(way, tokens);
        }
    }

    fn spend(&mut self, way: Way, cost: i64) {
        if let Some((_, buckets)) = &mut self.own {
            buckets[way as usize].tokens -= cost;
        }
        for member in self.members.iter_mut().flatten() {
            member.spend(way, cost);
        }
    }
}

impl<P: Policy> Server<P> {
    #[must_use]
    pub fn is_limited(&mut self, allocation: AllocationSlot) -> bool {
        let limits = self.data.forwarding.get(allocation).and_then(|entry| entry.limits.as_ref());
        limits.is_some_and(|limits| limits.is_limited() || limits.tap.is_some())
    }

    /// Takes up to `want` bytes for connections of this allocation (RFC 6062), at least one; unused bytes
    /// must be returned with [`Server::give_back_bytes`]. An error is counted as a pause.
    pub fn take_bytes(
        &mut self,
        now: Now,
        allocation: AllocationSlot,
        way: Way,
        want: u64,
    ) -> Result<u64, HeldUp> {
        let limits = self.data.forwarding.get(allocation).and_then(|entry| entry.limits.as_deref_mut());
        let Some(limits) = limits else { return Ok(want) };
        let taken = limits.take(way, want, now.ms);
        if let Err(held_up) = taken {
            self.data.stats.bandwidth_pauses[held_up.level as usize] += 1;
        }
        taken
    }

    pub fn give_back_bytes(&mut self, allocation: AllocationSlot, way: Way, bytes: u64) {
        let limits = self.data.forwarding.get(allocation).and_then(|entry| entry.limits.as_deref_mut());
        if let Some(limits) = limits {
            limits.give_back(way, bytes);
        }
    }

    /// Counts a datagram dropped by a caller that was asked to wait ([`Verdict::Wait`]) but could not.
    pub fn not_waited(&mut self, otherwise: DropReason) {
        self.data.stats.drop(otherwise);
    }

    /// An allocation keeps its tokens across reloads and moves, so that moving gains no extra burst.
    pub(crate) fn apply_rates(&mut self, now: Now, index: u32) {
        let Some((_, entry)) = self.data.forwarding.at(index) else { return };
        let mut before = entry.limits.take();
        let tap = before.as_mut().and_then(|limits| limits.tap.take());
        let meter = before.as_mut().and_then(|limits| limits.meter.take());
        // Connections (RFC 6062) are not measured.
        let meter = if entry.relays_tcp { None } else { Meter::at_level(meter, self.config.quality) };
        let bandwidth = &self.config.bandwidth;
        let Some(state) = self.states.get(index) else { return };
        let slowed = self.policy.volume_limits(state.user(), &state.username).per_user;
        if slowed.is_none() && bandwidth.is_unlimited() {
            let limits = Limited { tap, meter, ..Limited::default() };
            entry.limits = limits.is_needed().then(|| Box::new(limits));
            return;
        }
        let Rates { per_allocation, per_user, per_realm } = bandwidth.of(&state.realm);
        let own = per_allocation.map(|rate| {
            let limit = Limit::new(rate, bandwidth.burst_ms, LEAST_BURST);
            let had = before.as_ref().and_then(|limits| limits.own);
            let full = [RateBucket { tokens: limit.burst, filled_ms: now.ms }; 2];
            let buckets = had.map_or(full, |(_, buckets)| buckets);
            (limit, buckets.map(|bucket| RateBucket { tokens: bucket.tokens.min(limit.burst), ..bucket }))
        });
        let (pools, leases) = (&self.pools, &mut self.leases);
        let mut member = |rate: Option<u64>, name: &str| {
            let limit = Limit::new(rate?, bandwidth.burst_ms, LEAST_POOL);
            Some(PoolMember::new(leases.get(pools, name, limit, now.ms)))
        };
        // A user's key contains a control character, which realm names cannot contain. One user's allocations may
        // have different rates, since their credentials may come from different API keys.
        let mut user = state.user().key();
        if let Some(slowed) = slowed {
            user.insert_str(0, &format!("\0{slowed}\0"));
        }
        let members = [
            member(slowed.into_iter().chain(per_user).min(), &user),
            member(per_realm, &state.realm),
            member(bandwidth.total, ""),
        ];
        let limits = Limited { own, members, slowed, tap, meter };
        if limits.is_needed() {
            entry.limits = Some(Box::new(limits));
        }
    }

    /// Applies the rate of a volume quota that was used up, raised or reset since the last call.
    pub(crate) fn follow_volume(&mut self, now: Now, index: u32) {
        let Some((allocation, entry)) = self.data.forwarding.at(index) else { return };
        let before = entry.limits.as_ref().and_then(|limits| limits.slowed);
        let Some(state) = self.states.get(index) else { return };
        if self.policy.volume_limits(state.user(), &state.username).per_user != before {
            self.apply_rates(now, index);
            self.data.effects.push_back(Effect::Limited { allocation });
        }
    }
}

#[cfg(test)]
mod tests;
