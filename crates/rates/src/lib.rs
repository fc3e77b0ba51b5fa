//! Rate limits for events caused by unauthenticated sources. Each source has a token bucket, and all sources
//! share another one, so that a source that exceeds its own rate does not use up the total.
#![forbid(unsafe_code)]

use std::{
    hash::{BuildHasher, Hash},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Rate of a token bucket. The bucket's state is a single number: the time in microseconds at which it is
/// full again.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    interval_us: u64,
    window_us: u64,
}

impl Rate {
    /// Allows `burst` tokens at once, then one every `interval_ms` milliseconds.
    #[must_use]
    pub const fn new(burst: u32, interval_ms: u64) -> Self {
        // A widening cast: `From` cannot be used in a const fn.
        Self { interval_us: interval_ms * 1000, window_us: interval_ms * 1000 * burst as u64 }
    }

    /// Allows `rate` tokens per second, with a burst worth `burst_seconds`. The microsecond resolution caps
    /// the rate at a million per second.
    #[must_use]
    pub fn per_second(rate: u32, burst_seconds: u64) -> Self {
        let interval_us = (1_000_000 / u64::from(rate.max(1))).max(1);
        Self { interval_us, window_us: (burst_seconds * 1_000_000).max(interval_us) }
    }

    /// Takes a token and returns the new state; `None` if the bucket is empty.
    #[must_use]
    pub fn spend(self, full_at: u64, now_us: u64) -> Option<u64> {
        let full_at = full_at.max(now_us) + self.interval_us;
        (full_at <= now_us + self.window_us).then_some(full_at)
    }

    /// Multiplies the rate.
    const fn times(self, factor: u64) -> Self {
        Self { interval_us: self.interval_us / factor, window_us: self.window_us }
    }
}

/// Token buckets of sources, stored by hash. Memory is bounded: full buckets are removed when space is
/// needed, and a source for which there is no space is subject only to the total.
pub struct Rates {
    each: Rate,
    total: Rate,
    most: usize,
    buckets: HashMap<u64, u64, RandomState>,
    all: u64,
    hasher: RandomState,
    /// Time of the next sweep, in microseconds.
    sweep_at: u64,
}

impl Rates {
    /// Rate of a site (IPv4 /24 or IPv6 /48), as a multiple of the rate of a single address.
    const SITE: u64 = 4;
    /// Minimum time between two sweeps of a full table, in microseconds.
    const SWEEP_US: u64 = 1_000_000;

    /// Creates the limiter for up to `most` tracked sources.
    #[must_use]
    pub fn new(each: Rate, total: Rate, most: usize) -> Self {
        let hasher = RandomState::default();
        Self { each, total, most, buckets: HashMap::default(), all: 0, hasher, sweep_at: 0 }
    }

    /// Reserves memory for all sources, so that a flood causes no allocations.
    pub fn make_room_for_all(&mut self) {
        self.buckets.reserve(self.most.saturating_sub(self.buckets.len()));
    }

    /// True if `source` is within its rate and the total.
    pub fn admit(&mut self, now_us: u64, source: impl Hash) -> bool {
        let source = self.hasher.hash_one(source);
        self.spend(now_us, &[(source, self.each)])
    }

    /// True if this address is within its own rate, the rate of its site and the total. An IPv6 /64 counts as one
    /// address. A site, an IPv4 /24 or IPv6 /48, has four times the rate of an address, however many
    /// addresses it uses.
    pub fn admit_address(&mut self, now_us: u64, ip: IpAddr) -> bool {
        let host = host(ip);
        let site: IpAddr = match host {
            IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() & !0 << 8).into(),
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !0 << 80).into(),
        };
        let [host, site] = [(host, "host"), (site, "site")].map(|level| self.hasher.hash_one(level));
        let levels = [(host, self.each), (site, self.each.times(Self::SITE))];
        self.spend(now_us, &levels)
    }

    /// Takes a token from every bucket, or from none.
    fn spend(&mut self, now_us: u64, sources: &[(u64, Rate)]) -> bool {
        let bucket = |source: &u64| self.buckets.get(source).copied().unwrap_or(0);
        let has_token = |(source, rate): &(u64, Rate)| rate.spend(bucket(source), now_us).is_some();
        if !sources.iter().all(has_token) {
            return false;
        }
        let Some(all) = self.total.spend(self.all, now_us) else { return false };
        self.all = all;
        for (source, rate) in sources {
            if self.buckets.len() >= self.most
                && !self.buckets.contains_key(source)
                && !self.make_room(now_us)
            {
                continue;
            }
            let full_at = self.buckets.entry(*source).or_insert(0);
            *full_at = rate.spend(*full_at, now_us).unwrap_or(*full_at);
        }
        true
    }

    fn make_room(&mut self, now_us: u64) -> bool {
        if now_us >= self.sweep_at {
            self.sweep_at = now_us + Self::SWEEP_US;
            self.buckets.retain(|_, full_at| *full_at > now_us);
        }
        self.buckets.len() < self.most
    }
}

/// First address of a host's prefix: an IPv4 address or an IPv6 /64.
#[must_use]
pub fn host(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !0 << 64).into(),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn rates(most: usize) -> Rates {
        Rates::new(Rate::new(5, 1000), Rate::new(50, 100), most)
    }

    fn admitted(rates: &mut Rates, now_us: u64, ip: &str, tries: usize) -> usize {
        let ip = ip.parse().unwrap();
        (0..tries).filter(|_| rates.admit_address(now_us, ip)).count()
    }

    #[test]
    fn a_source_gets_its_burst_and_then_its_rate() {
        let mut rates = rates(100);
        assert_eq!(admitted(&mut rates, 0, "192.0.2.1", 1000), 5);
        assert_eq!(admitted(&mut rates, SECOND - 1, "192.0.2.1", 1000), 0);
        assert_eq!(admitted(&mut rates, 3 * SECOND, "192.0.2.1", 1000), 3);
        assert_eq!(admitted(&mut rates, 3 * SECOND, "::ffff:192.0.2.1", 9), 0, "in IPv4-mapped notation");
    }

    #[test]
    fn an_exhausted_source_leaves_the_total_to_others() {
        let mut rates = rates(100);
        assert_eq!(admitted(&mut rates, 0, "192.0.2.1", 100_000), 5);
        assert_eq!(admitted(&mut rates, 0, "198.51.100.1", 5), 5);
    }

    #[test]
    fn a_site_has_four_times_the_rate_of_one_address() {
        let mut rates = rates(1000);
        let v4: usize = (0..200).map(|n| admitted(&mut rates, 0, &format!("192.0.2.{n}"), 3)).sum();
        assert_eq!(v4, 20);
        let v6: usize = (0..200).map(|n| admitted(&mut rates, 0, &format!("2001:db8:1:{n}::{n}"), 3)).sum();
        assert_eq!(v6, 20);
        let one: usize = (0..200).map(|n| admitted(&mut rates, 0, &format!("2001:db8:2:1::{n}"), 1)).sum();
        assert_eq!(one, 5, "a /64 counts as one address");
    }

    #[test]
    fn all_sources_share_a_total_rate() {
        let mut rates = rates(1000);
        let mut each = |now_us| (0..200).filter(|n| rates.admit(now_us, n)).count();
        assert_eq!(each(0), 50);
        assert_eq!(each(SECOND), 10);
    }

    #[test]
    fn memory_is_bounded_and_untracked_sources_still_pass() {
        let mut rates = Rates::new(Rate::new(1, 1_000_000), Rate::new(1000, 1), 16);
        assert_eq!((0..500).filter(|n| rates.admit(0, n)).count(), 500);
        assert_eq!(rates.buckets.len(), 16);
        // Full buckets make room for others; buckets that are not full stay.
        let mut rates = Rates::new(Rate::new(2, 1000), Rate::new(1000, 1), 16);
        assert_eq!((0..16).filter(|n| rates.admit(0, n)).count(), 16);
        assert!(rates.admit(500_000, 3) && !rates.admit(900_000, 3));
        assert!(rates.admit(SECOND, 99) && rates.admit(SECOND, 99) && !rates.admit(SECOND, 99));
        assert!(rates.buckets.len() == 2 && rates.admit(SECOND, 3) && !rates.admit(SECOND, 3));
    }
}
