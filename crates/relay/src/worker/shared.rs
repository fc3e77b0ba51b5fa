//! Relay sockets that several allocations of this worker have together (`Config::shared_ports`). The state machine tells their peers
//! apart; here stands which sockets there are, and how many allocations each has. Clients over UDP share none with others: an upgrade
//! ([`crate::upgrade`]) takes the former to another process, and the latter stay.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use turnpike_net::SocketId;
use turnpike_turn::server::{Family, SharedPort};

use super::out::side;
use crate::Config;

/// Sockets, by their numbers. One is opened while there are fewer than there may be, and closed with the last of its allocations.
pub(super) struct SharedPorts {
    /// So many of a family there may be for clients over UDP, and so many for others: IPv4, IPv6.
    most: [usize; 2],
    /// The same of one address.
    most_of_address: usize,
    /// Addresses and ports of those that newcomers may have.
    drawn: (Vec<IpAddr>, RangeInclusive<u16>),
    places: Vec<Option<Place>>,
}

/// One socket.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) socket: SocketId,
    pub(super) bound: SocketAddr,
    /// What clients are told.
    pub(super) relayed: SocketAddr,
    /// Whether its clients come over UDP.
    pub(super) by_datagrams: bool,
    allocations: usize,
}

impl SharedPorts {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            most: most(config),
            most_of_address: config.shared_ports,
            drawn: drawn(config),
            places: Vec::new(),
        }
    }

    /// From now on addresses and ports are those of this configuration. Sockets on others are closed with the last of their allocations,
    /// and given to no more.
    pub(super) fn reconfigure(&mut self, config: &Config) {
        self.most = most(config);
        self.most_of_address = config.shared_ports;
        self.drawn = drawn(config);
    }

    /// Whether ports of this family are shared.
    pub(super) fn shares(&self, family: Family) -> bool {
        self.most[side(family)] > 0
    }

    /// Whether there may be one more for such clients, on this address if one is named.
    pub(super) fn may_open(&self, family: Family, by_datagrams: bool, at: Option<IpAddr>) -> bool {
        let open = || self.of(family, by_datagrams);
        let on = |ip: IpAddr| open().filter(move |(_, place)| place.bound.ip() == ip).count();
        open().count() < self.most[side(family)] && at.is_none_or(|ip| on(ip) < self.most_of_address)
    }

    /// One more, which no allocation has so far; its number.
    pub(super) fn open(
        &mut self,
        socket: SocketId,
        bound: SocketAddr,
        relayed: SocketAddr,
        by_datagrams: bool,
    ) -> SharedPort {
        let at = self.places.iter().position(Option::is_none).unwrap_or(self.places.len());
        let port = number(at);
        self.adopt(port, socket, bound, relayed, by_datagrams);
        port
    }

    /// One that has this number already.
    pub(super) fn adopt(
        &mut self,
        SharedPort(port): SharedPort,
        socket: SocketId,
        bound: SocketAddr,
        relayed: SocketAddr,
        by_datagrams: bool,
    ) {
        let at = usize::from(port);
        if self.places.len() <= at {
            self.places.resize(at + 1, None);
        }
        self.places[at] = Some(Place { socket, bound, relayed, by_datagrams, allocations: 0 });
    }

    /// All of clients over UDP.
    pub(super) fn portable(&self) -> impl Iterator<Item = (SharedPort, Place)> {
        let places = self.places.iter().enumerate();
        let places = places.filter_map(|(at, place)| Some((number(at), (*place)?)));
        places.filter(|(_, place)| place.by_datagrams)
    }

    /// That of this family with the fewest allocations of such clients, so that as few as can be want the same peers; one on this address
    /// before any other.
    pub(super) fn emptiest(
        &self,
        family: Family,
        by_datagrams: bool,
        at: Option<IpAddr>,
    ) -> Option<SharedPort> {
        let is_elsewhere = |place: &Place| at.is_some_and(|ip| place.bound.ip() != ip);
        let places = self.of(family, by_datagrams);
        places.min_by_key(|(_, place)| (is_elsewhere(place), place.allocations)).map(|(port, _)| port)
    }

    pub(super) fn get(&self, SharedPort(port): SharedPort) -> Option<Place> {
        *self.places.get(usize::from(port))?
    }

    /// One more allocation has it.
    pub(super) fn join(&mut self, SharedPort(port): SharedPort) {
        if let Some(Some(place)) = self.places.get_mut(usize::from(port)) {
            place.allocations += 1;
        }
    }

    /// Drops a reference; true if it was the last and the socket is to be closed.
    pub(super) fn leave(&mut self, SharedPort(port): SharedPort) -> bool {
        let Some(slot) = self.places.get_mut(usize::from(port)) else { return true };
        let Some(place) = slot else { return true };
        place.allocations = place.allocations.saturating_sub(1);
        let is_last = place.allocations == 0;
        if is_last {
            *slot = None;
        }
        is_last
    }

    /// Those that newcomers may have who come like this.
    fn of(&self, family: Family, by_datagrams: bool) -> impl Iterator<Item = (SharedPort, &Place)> {
        let places = self.places.iter().enumerate();
        let places = places.filter_map(|(at, place)| Some((number(at), place.as_ref()?)));
        places.filter(move |(_, place)| {
            let (addresses, ports) = &self.drawn;
            let is_drawn = addresses.contains(&place.bound.ip()) && ports.contains(&place.bound.port());
            let suits = place.by_datagrams == by_datagrams && is_drawn;
            suits && place.bound.is_ipv4() == (family == Family::V4)
        })
    }
}

fn drawn(config: &Config) -> (Vec<IpAddr>, RangeInclusive<u16>) {
    (config.relays_up().map(|address| address.bind).collect(), config.ports.clone())
}

/// How many of each family there may be: IPv4, IPv6.
fn most(config: &Config) -> [usize; 2] {
    [true, false].map(|v4| {
        let addresses = config.relay.iter().filter(|address| address.bind.is_ipv4() == v4).count();
        // Numbers of both families, and of both kinds of clients, have 16 bits.
        config.shared_ports.saturating_mul(addresses).min(usize::from(u16::MAX / 4))
    })
}

fn number(at: usize) -> SharedPort {
    // `most` has seen to it.
    SharedPort(u16::try_from(at).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RelayAddress;

    fn ports(shared_ports: usize, addresses: &[&str]) -> SharedPorts {
        let relay = addresses.iter().map(|ip| RelayAddress { bind: ip.parse().unwrap(), external: None });
        let config = Config { shared_ports, relay: relay.collect(), ports: 1..=65_535, ..Config::default() };
        SharedPorts::new(&config)
    }

    fn open(ports: &mut SharedPorts, socket: u32, bound: &str) -> SharedPort {
        let bound = bound.parse().unwrap();
        ports.open(SocketId(socket), bound, bound, true)
    }

    #[test]
    fn there_are_so_many_of_each_address_and_none_by_default() {
        let none = ports(0, &["127.0.0.1", "::1"]);
        assert!(!none.shares(Family::V4) && !none.may_open(Family::V4, true, None));
        let mut ports = ports(2, &["127.0.0.1", "127.0.0.2", "::1"]);
        for port in 1..=4 {
            assert!(ports.may_open(Family::V4, true, None));
            open(&mut ports, port, &format!("127.0.0.1:{port}"));
        }
        assert!(!ports.may_open(Family::V4, true, None));
        open(&mut ports, 5, "[::1]:5");
        assert!(ports.may_open(Family::V6, true, None));
        open(&mut ports, 6, "[::1]:6");
        assert!(!ports.may_open(Family::V6, true, None));
    }

    #[test]
    fn after_a_reload_newcomers_have_sockets_of_its_addresses_and_ports_alone() {
        let mut ports = ports(1, &["127.0.0.1"]);
        let old = open(&mut ports, 1, "127.0.0.1:50001");
        (0..2).for_each(|_| ports.join(old));
        let relay = |ip: &str| vec![RelayAddress { bind: ip.parse().unwrap(), external: None }];
        let config = |ip, ports| Config { shared_ports: 1, relay: relay(ip), ports, ..Config::default() };
        for config in [config("127.0.0.2", 49_152..=65_535), config("127.0.0.1", 50_002..=50_009)] {
            ports.reconfigure(&config);
            assert!(
                ports.may_open(Family::V4, true, None) && ports.emptiest(Family::V4, true, None).is_none()
            );
            assert_eq!(ports.get(old).unwrap().socket, SocketId(1));
        }
        ports.reconfigure(&config("127.0.0.1", 50_000..=50_009));
        assert_eq!(
            (ports.may_open(Family::V4, true, None), ports.emptiest(Family::V4, true, None)),
            (false, Some(old))
        );
        assert_eq!([(); 2].map(|()| ports.leave(old)), [false, true]);
    }

    #[test]
    fn allocations_are_spread_and_the_last_one_closes() {
        let mut ports = ports(3, &["127.0.0.1"]);
        assert_eq!(ports.emptiest(Family::V4, true, None), None);
        for port in 1..=3 {
            open(&mut ports, port, &format!("127.0.0.1:{port}"));
        }
        let mut given = [0; 3];
        for _ in 0..9 {
            let port = ports.emptiest(Family::V4, true, None).unwrap();
            given[usize::from(port.0)] += 1;
            ports.join(port);
        }
        assert_eq!(given, [3; 3]);
        assert_eq!(ports.emptiest(Family::V6, true, None), None);
        let port = SharedPort(1);
        assert_eq!([(); 3].map(|()| ports.leave(port)), [false, false, true]);
        assert!(ports.get(port).is_none() && ports.may_open(Family::V4, true, None));
        assert_eq!(open(&mut ports, 9, "127.0.0.1:9"), port, "its number is given again");
        assert_eq!(ports.get(port).unwrap().socket, SocketId(9));
    }

    #[test]
    fn each_address_has_as_many_and_its_clients_get_one_of_it() {
        let mut ports = ports(1, &["127.0.0.1", "127.0.0.2"]);
        let [one, two] = ["127.0.0.1", "127.0.0.2"].map(|ip| Some(ip.parse().unwrap()));
        assert!(ports.may_open(Family::V4, true, two));
        let port = open(&mut ports, 1, "127.0.0.2:1");
        ports.join(port);
        assert!(!ports.may_open(Family::V4, true, two) && ports.may_open(Family::V4, true, one));
        let other = open(&mut ports, 2, "127.0.0.1:1");
        assert_eq!(ports.emptiest(Family::V4, true, two), Some(port), "though it has more allocations");
        assert_eq!(ports.emptiest(Family::V4, true, None), Some(other));
    }

    #[test]
    fn clients_over_udp_share_with_no_others() {
        let mut ports = ports(1, &["127.0.0.1"]);
        let plain = open(&mut ports, 1, "127.0.0.1:1");
        assert!(!ports.may_open(Family::V4, true, None) && ports.may_open(Family::V4, false, None));
        assert_eq!(ports.emptiest(Family::V4, false, None), None);
        let bound = "127.0.0.1:2".parse().unwrap();
        let other = ports.open(SocketId(2), bound, bound, false);
        let both = [true, false].map(|by_datagrams| ports.emptiest(Family::V4, by_datagrams, None));
        assert_eq!(both, [Some(plain), Some(other)]);
        let portable: Vec<SharedPort> = ports.portable().map(|(port, _)| port).collect();
        assert_eq!(portable, [plain]);
        // In another process it has the same number, whatever there is before it.
        let mut there = self::ports(1, &["127.0.0.1"]);
        there.adopt(SharedPort(7), SocketId(3), bound, bound, true);
        there.join(SharedPort(7));
        assert_eq!(there.emptiest(Family::V4, true, None), Some(SharedPort(7)));
        assert!(there.leave(SharedPort(7)));
    }
}
