//! Clients of one kind (without an allocation, or in a handshake) in order of arrival, limited in total and
//! per network. If the set is full, a new client evicts the oldest one. Each worker has its own set with its
//! [`share`] of the limits.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_turn::server::ConnectionLimits;

/// Milliseconds for which [`Bounded::is_crowded`] protects a member. Without this protection, if many clients
/// arrived at once, each would evict its predecessor and none would finish. A handshake or allocation takes
/// two round trips; clients resend an unanswered ClientHello after 500 ms or more.
const GRACE_MS: u64 = 500;

pub(crate) struct Bounded {
    most: usize,
    most_per_network: usize,
    members: BTreeMap<u64, QueueMember>,
    /// Member numbers by network: a new client of a network at its limit evicts the oldest of them.
    networks: HashMap<IpAddr, BTreeSet<u64>, RandomState>,
    next: u64,
}

#[derive(Clone, Copy)]
struct QueueMember {
    slot: usize,
    network: Option<IpAddr>,
    since_ms: u64,
}

impl QueueMember {
    fn is_young(&self, now_ms: u64) -> bool {
        now_ms < self.since_ms + GRACE_MS
    }
}

/// Limits in total and per network.
pub(crate) type Limits = [usize; 2];

/// A worker's limits on clients without an allocation.
pub(crate) fn idle_limits(of: &ConnectionLimits, workers: usize) -> Limits {
    [of.idle_connections, of.idle_connections_per_address].map(|limit| share(limit, workers))
}

impl Bounded {
    pub(crate) fn new(limits: Limits) -> Self {
        let [most, most_per_network] = limits.map(|limit| limit.max(1));
        let (members, networks) = (BTreeMap::new(), HashMap::default());
        Self { most, most_per_network, members, networks, next: 0 }
    }

    pub(crate) fn limit(&mut self, limits: Limits) {
        [self.most, self.most_per_network] = limits.map(|limit| limit.max(1));
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn most(&self) -> usize {
        self.most
    }

    pub(crate) fn has(&self, network: IpAddr) -> bool {
        self.networks.contains_key(&network)
    }

    pub(crate) fn newest(&self) -> Option<usize> {
        self.members.values().next_back().map(|member| member.slot)
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> {
        self.members.values().map(|member| member.slot)
    }

    /// Slot to evict before another client from this network can be added.
    pub(crate) fn in_the_way(&self, network: IpAddr) -> Option<usize> {
        self.in_the_way_of(network).or_else(|| self.in_the_way_of_all())
    }

    pub(crate) fn in_the_way_of(&self, network: IpAddr) -> Option<usize> {
        self.oldest_of(network).map(|member| member.slot)
    }

    pub(crate) fn in_the_way_of_all(&self) -> Option<usize> {
        self.oldest().map(|member| member.slot)
    }

    /// Returns true if a new client must wait, because its network or the set is full and the oldest member there
    /// is still protected.
    pub(crate) fn is_crowded(&self, network: IpAddr, now_ms: u64) -> bool {
        let oldest = self.oldest_of(network).or_else(|| self.oldest());
        oldest.is_some_and(|member| member.is_young(now_ms))
    }

    pub(crate) fn is_crowded_by(&self, network: IpAddr, now_ms: u64) -> bool {
        self.oldest_of(network).is_some_and(|member| member.is_young(now_ms))
    }

    pub(crate) fn is_crowded_by_all(&self, now_ms: u64) -> bool {
        self.oldest().is_some_and(|member| member.is_young(now_ms))
    }

    fn oldest_of(&self, network: IpAddr) -> Option<&QueueMember> {
        let numbers = self.networks.get(&network).filter(|numbers| numbers.len() >= self.most_per_network)?;
        self.members.get(numbers.first()?)
    }

    fn oldest(&self) -> Option<&QueueMember> {
        self.members.values().next().filter(|_| self.members.len() >= self.most)
    }

    pub(crate) fn enter(&mut self, slot: usize, network: Option<IpAddr>, now_ms: u64) -> u64 {
        let number = self.next;
        self.next += 1;
        self.members.insert(number, QueueMember { slot, network: None, since_ms: now_ms });
        if let Some(network) = network {
            self.set_network(number, network);
        }
        number
    }

    pub(crate) fn set_network(&mut self, number: u64, network: IpAddr) {
        let Some(member) = self.members.get_mut(&number) else { return };
        member.network = Some(network);
        self.networks.entry(network).or_default().insert(number);
    }

    pub(crate) fn leave(&mut self, number: u64) {
        let Some(QueueMember { network: Some(network), .. }) = self.members.remove(&number) else { return };
        if let Some(numbers) = self.networks.get_mut(&network) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.networks.remove(&network);
            }
        }
    }
}

/// Part of a limit that each worker may use. The kernel distributes clients randomly, so a margin of 5 +
/// 5⌊√share⌋ is added to the even share: an even share of 8, for example, becomes 23.
pub(crate) fn share(limit: usize, workers: usize) -> usize {
    let share = limit.div_ceil(workers.max(1));
    (share + 5 * share.isqrt() + 5).min(limit)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use turnpike_turn::server::PrefixLengths;

    use super::*;

    fn of(address: &str) -> IpAddr {
        PrefixLengths::SITE.of(address.parse().unwrap())
    }

    #[test]
    fn oldest_member_of_the_full_set_or_network_is_evicted() {
        let mut bounded = Bounded::new([4, 2]);
        let [a, neighbour, b, c] = ["192.0.2.1", "192.0.2.200", "2001:db8::1", "2001:db8:0:100::1"].map(of);
        bounded.enter(10, Some(b), 0);
        let second = bounded.enter(11, Some(a), 0);
        assert_eq!(bounded.in_the_way(a), None);
        bounded.enter(12, Some(neighbour), 0);
        assert_eq!(bounded.in_the_way(a), Some(11), "oldest of its network");
        assert_eq!(bounded.in_the_way(c), None);
        bounded.enter(13, Some(c), 0);
        assert_eq!(bounded.in_the_way(c), Some(10), "oldest of all");
        bounded.leave(second);
        assert_eq!(bounded.in_the_way(a), None);
        assert_eq!(bounded.len(), 3);
    }

    #[test]
    fn members_count_towards_their_network_once_it_is_known() {
        let mut bounded = Bounded::new([4, 1]);
        let [a, same, other] = ["2001:db8::1", "2001:db8::2", "192.0.2.1"]
            .map(|address| PrefixLengths::HOST.of(address.parse().unwrap()));
        let first = bounded.enter(10, None, 0);
        let second = bounded.enter(11, Some(a), 0);
        assert_eq!((bounded.in_the_way_of(other), bounded.in_the_way_of(same)), (None, Some(11)));
        bounded.set_network(first, other);
        assert_eq!(bounded.in_the_way_of(other), Some(10));
        bounded.leave(first);
        bounded.leave(second);
        assert!(bounded.is_empty() && bounded.networks.is_empty());
    }

    #[test]
    fn new_members_wait_while_the_oldest_is_young() {
        let mut bounded = Bounded::new([4, 2]);
        let [a, b] = ["192.0.2.1", "198.51.100.1"].map(of);
        bounded.enter(10, Some(a), 1000);
        assert!(!bounded.is_crowded(a, 1000), "there is room");
        bounded.enter(11, Some(a), 1400);
        assert!(bounded.is_crowded(a, 1000 + GRACE_MS - 1));
        assert!(!bounded.is_crowded(b, 1000), "another network");
        assert!(!bounded.is_crowded(a, 1000 + GRACE_MS));
        assert_eq!(bounded.in_the_way(a), Some(10));
    }

    #[test]
    fn random_distribution_stays_within_the_share_of_a_worker() {
        for (limit, workers) in [(512, 64), (256, 64), (512, 2), (4096, 8), (3, 4), (512, 1)] {
            let most = share(limit, workers);
            let mut random = 7_u64;
            for _ in 0..100 {
                let mut of_worker = vec![0; workers];
                for _ in 0..limit {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    of_worker[(random >> 33) as usize % workers] += 1;
                }
                let fullest = of_worker.into_iter().max().unwrap();
                assert!(
                    fullest <= most,
                    "{fullest} clients on one worker, at most {most} allowed; limit {limit}, {workers} workers"
                );
            }
        }
        assert_eq!((share(512, 1), share(512, 64), share(3, 4)), (512, 23, 3));
    }

    #[test]
    fn networks_without_members_take_no_memory() {
        let mut bounded = Bounded::new([4, 2]);
        for n in 0..1000 {
            let number = bounded.enter(0, Some(Ipv4Addr::from_bits(n << 8).into()), 0);
            bounded.leave(number);
        }
        assert!(bounded.networks.is_empty() && bounded.members.is_empty());
    }
}
