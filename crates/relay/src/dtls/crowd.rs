//! Associations of one kind in the order in which they came, with a bound for all and one per network. A newcomer to a full crowd takes the
//! place of the oldest, unless that came a moment ago: if many come at once, each would push out the one before it, and none would finish.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Milliseconds in which a member keeps its place. A handshake takes two round trips, and so does an allocation; clients repeat a ClientHello
/// that is not answered after 500 ms or later.
const GRACE_MS: u64 = 500;

pub(super) struct Crowd {
    most: usize,
    most_per_network: usize,
    members: BTreeMap<u64, Member>,
    /// Numbers by network: a network at its limit asks for its oldest with each newcomer.
    networks: HashMap<IpAddr, BTreeSet<u64>, RandomState>,
    next: u64,
}

#[derive(Clone, Copy)]
struct Member {
    slot: usize,
    network: IpAddr,
    since_ms: u64,
}

impl Crowd {
    /// Bounds of at least 1.
    pub(super) fn new(most: usize, most_per_network: usize) -> Self {
        Self {
            most: most.max(1),
            most_per_network: most_per_network.max(1),
            members: BTreeMap::new(),
            networks: HashMap::default(),
            next: 0,
        }
    }

    /// The same with other bounds; nobody has to go for that.
    pub(super) fn limit(&mut self, most: usize, most_per_network: usize) {
        (self.most, self.most_per_network) = (most.max(1), most_per_network.max(1));
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// The slot that must leave before one more of this address can come.
    pub(super) fn in_the_way(&self, address: IpAddr) -> Option<usize> {
        self.oldest_in_the_way(address).map(|member| member.slot)
    }

    /// Returns true if a newcomer has to wait: all places are taken, and the oldest member came a moment ago.
    pub(super) fn is_crowded(&self, address: IpAddr, now_ms: u64) -> bool {
        self.oldest_in_the_way(address).is_some_and(|member| now_ms < member.since_ms + GRACE_MS)
    }

    fn oldest_in_the_way(&self, address: IpAddr) -> Option<&Member> {
        let neighbours = self.networks.get(&network(address));
        let oldest = match neighbours.filter(|numbers| numbers.len() >= self.most_per_network) {
            Some(numbers) => numbers.first(),
            None if self.members.len() >= self.most => self.members.keys().next(),
            None => None,
        };
        oldest.and_then(|number| self.members.get(number))
    }

    /// One more; the number to leave with.
    pub(super) fn enter(&mut self, slot: usize, address: IpAddr, now_ms: u64) -> u64 {
        let (number, network) = (self.next, network(address));
        self.next += 1;
        self.members.insert(number, Member { slot, network, since_ms: now_ms });
        self.networks.entry(network).or_default().insert(number);
        number
    }

    pub(super) fn leave(&mut self, number: u64) {
        let Some(Member { network, .. }) = self.members.remove(&number) else { return };
        if let Some(numbers) = self.networks.get_mut(&network) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.networks.remove(&network);
            }
        }
    }
}

/// Who can send from one address can mostly send from its neighbours too: /24 and /56.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() >> 8 << 8).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 72 << 72).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_in_the_way_of_all_and_of_its_network() {
        let mut crowd = Crowd::new(4, 2);
        let [a, neighbour, b, c] =
            ["192.0.2.1", "192.0.2.200", "2001:db8::1", "2001:db8:0:100::1"].map(|ip| ip.parse().unwrap());
        crowd.enter(10, b, 0);
        let second = crowd.enter(11, a, 0);
        assert_eq!(crowd.in_the_way(a), None);
        crowd.enter(12, neighbour, 0);
        assert_eq!(crowd.in_the_way(a), Some(11), "the oldest of its network, not of all");
        assert_eq!(crowd.in_the_way(c), None);
        crowd.enter(13, c, 0);
        assert_eq!(crowd.in_the_way(c), Some(10), "the oldest of all");
        crowd.leave(second);
        assert_eq!(crowd.in_the_way(a), None);
        assert_eq!(crowd.len(), 3);
    }

    #[test]
    fn newcomers_wait_while_the_oldest_is_young() {
        let mut crowd = Crowd::new(4, 2);
        let [a, b] = ["192.0.2.1", "198.51.100.1"].map(|ip| ip.parse().unwrap());
        crowd.enter(10, a, 1000);
        assert!(!crowd.is_crowded(a, 1000), "there is room");
        crowd.enter(11, a, 1400);
        assert!(crowd.is_crowded(a, 1000 + GRACE_MS - 1));
        assert!(!crowd.is_crowded(b, 1000), "another network");
        assert!(!crowd.is_crowded(a, 1000 + GRACE_MS));
        assert_eq!(crowd.in_the_way(a), Some(10));
    }

    #[test]
    fn networks_without_members_take_no_memory() {
        let mut crowd = Crowd::new(4, 2);
        for n in 0..1000 {
            let number = crowd.enter(0, Ipv4Addr::from_bits(n << 8).into(), 0);
            crowd.leave(number);
        }
        assert!(crowd.networks.is_empty() && crowd.members.is_empty());
    }
}
