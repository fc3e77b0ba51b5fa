//! Associations of one kind in the order in which they came, with a bound for all and one per network. Whoever comes to a full
//! crowd takes the place of the oldest.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;

pub(super) struct Crowd {
    most: usize,
    most_per_network: usize,
    /// Slot and network by number.
    members: BTreeMap<u64, (usize, IpAddr)>,
    /// Numbers by network: a network at its limit asks for its oldest with each newcomer.
    networks: HashMap<IpAddr, BTreeSet<u64>, RandomState>,
    next: u64,
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

    /// Who must leave before one more of this address can come, if anybody.
    pub(super) fn in_the_way(&self, address: IpAddr) -> Option<usize> {
        let neighbours = self.networks.get(&network(address));
        let oldest = match neighbours.filter(|numbers| numbers.len() >= self.most_per_network) {
            Some(numbers) => numbers.first(),
            None if self.members.len() >= self.most => self.members.keys().next(),
            None => None,
        };
        oldest.and_then(|number| self.members.get(number)).map(|member| member.0)
    }

    /// One more; the number to leave with.
    pub(super) fn enter(&mut self, slot: usize, address: IpAddr) -> u64 {
        let (number, network) = (self.next, network(address));
        self.next += 1;
        self.members.insert(number, (slot, network));
        self.networks.entry(network).or_default().insert(number);
        number
    }

    pub(super) fn leave(&mut self, number: u64) {
        let Some((_, network)) = self.members.remove(&number) else { return };
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
        crowd.enter(10, b);
        let second = crowd.enter(11, a);
        assert_eq!(crowd.in_the_way(a), None);
        crowd.enter(12, neighbour);
        assert_eq!(crowd.in_the_way(a), Some(11), "the oldest of its network, not of all");
        assert_eq!(crowd.in_the_way(c), None);
        crowd.enter(13, c);
        assert_eq!(crowd.in_the_way(c), Some(10), "the oldest of all");
        crowd.leave(second);
        assert_eq!(crowd.in_the_way(a), None);
        assert_eq!(crowd.len(), 3);
    }

    #[test]
    fn networks_without_members_take_no_memory() {
        let mut crowd = Crowd::new(4, 2);
        for n in 0..1000 {
            let number = crowd.enter(0, Ipv4Addr::from_bits(n << 8).into());
            crowd.leave(number);
        }
        assert!(crowd.networks.is_empty() && crowd.members.is_empty());
    }
}
