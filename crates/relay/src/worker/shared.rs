//! Relay sockets shared by several allocations of a worker (`Config::shared_ports`). The state machine
//! distinguishes the allocations by their peers; this file tracks the sockets and how much they are used. UDP
//! clients share sockets only with each other, because an upgrade ([`crate::upgrade`]) moves them to another
//! process but leaves other clients where they are.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use turnpike_net::SocketId;
use turnpike_turn::server::{Family, SharedPort};

use super::out::side;
use crate::Config;

/// Shared sockets by number. They are opened on demand up to a limit, and closed when their last allocation
/// ends.
pub(super) struct SharedPorts {
    /// Maximum number of sockets for UDP clients, and the same number again for all other clients: IPv4,
    /// IPv6.
    most: [usize; 2],
    most_of_address: usize,
    /// Addresses and ports available to new allocations.
    drawn: (Vec<IpAddr>, RangeInclusive<u16>),
    places: Vec<Option<SharedPortUse>>,
}
#[derive(Clone, Copy)]
pub(super) struct SharedPortUse {
    pub(super) socket: SocketId,
    pub(super) bound: SocketAddr,
    pub(super) relayed: SocketAddr,
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

    /// Applies a new configuration. Sockets outside its addresses and ports get no more allocations and are
    /// closed when their last one ends.
    pub(super) fn reconfigure(&mut self, config: &Config) {
        self.most = most(config);
        self.most_of_address = config.shared_ports;
        self.drawn = drawn(config);
    }

    pub(super) fn shares(&self, family: Family) -> bool {
        self.most[side(family)] > 0
    }

    pub(super) fn may_open(&self, family: Family, by_datagrams: bool, at: Option<IpAddr>) -> bool {
        let open = || self.of(family, by_datagrams);
        let on = |ip: IpAddr| open().filter(move |(_, place)| place.bound.ip() == ip).count();
        open().count() < self.most[side(family)] && at.is_none_or(|ip| on(ip) < self.most_of_address)
    }

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
        self.places[at] = Some(SharedPortUse { socket, bound, relayed, by_datagrams, allocations: 0 });
    }

    pub(super) fn portable(&self) -> impl Iterator<Item = (SharedPort, SharedPortUse)> {
        let places = self.places.iter().enumerate();
        let places = places.filter_map(|(at, place)| Some((number(at), (*place)?)));
        places.filter(|(_, place)| place.by_datagrams)
    }

    /// Socket of this kind with the fewest allocations, which keeps conflicts over peers rare; prefers the
    /// address `at`.
    pub(super) fn emptiest(
        &self,
        family: Family,
        by_datagrams: bool,
        at: Option<IpAddr>,
    ) -> Option<SharedPort> {
        let is_elsewhere = |place: &SharedPortUse| at.is_some_and(|ip| place.bound.ip() != ip);
        let places = self.of(family, by_datagrams);
        places.min_by_key(|(_, place)| (is_elsewhere(place), place.allocations)).map(|(port, _)| port)
    }

    pub(super) fn get(&self, SharedPort(port): SharedPort) -> Option<SharedPortUse> {
        *self.places.get(usize::from(port))?
    }

    pub(super) fn join(&mut self, SharedPort(port): SharedPort) {
        if let Some(Some(place)) = self.places.get_mut(usize::from(port)) {
            place.allocations += 1;
        }
    }

    /// Drops a reference; returns true if it was the last, so that the socket must be closed.
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

    fn of(&self, family: Family, by_datagrams: bool) -> impl Iterator<Item = (SharedPort, &SharedPortUse)> {
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

/// Maximum sockets per family: IPv4, IPv6.
fn most(config: &Config) -> [usize; 2] {
    [true, false].map(|v4| {
        let addresses = config.relay.iter().filter(|address| address.bind.is_ipv4() == v4).count();
        // The 16-bit socket numbers must cover both families and both kinds of clients.
        config.shared_ports.saturating_mul(addresses).min(usize::from(u16::MAX / 4))
    })
}

fn number(at: usize) -> SharedPort {
    // `most` ensures that the number fits.
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
    fn shared_sockets_are_limited_per_address_and_off_by_default() {
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
    fn new_allocations_use_the_ports_of_the_reloaded_configuration() {
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
    fn allocations_are_spread_and_the_last_closes_the_socket() {
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
        assert_eq!(open(&mut ports, 9, "127.0.0.1:9"), port, "the number is reused");
        assert_eq!(ports.get(port).unwrap().socket, SocketId(9));
    }

    #[test]
    fn clients_share_a_socket_of_their_own_address() {
        let mut ports = ports(1, &["127.0.0.1", "127.0.0.2"]);
        let [one, two] = ["127.0.0.1", "127.0.0.2"].map(|ip| Some(ip.parse().unwrap()));
        assert!(ports.may_open(Family::V4, true, two));
        let port = open(&mut ports, 1, "127.0.0.2:1");
        ports.join(port);
        assert!(!ports.may_open(Family::V4, true, two) && ports.may_open(Family::V4, true, one));
        let other = open(&mut ports, 2, "127.0.0.1:1");
        assert_eq!(
            ports.emptiest(Family::V4, true, two),
            Some(port),
            "the client's own address is preferred although its socket has more allocations"
        );
        assert_eq!(ports.emptiest(Family::V4, true, None), Some(other));
    }

    #[test]
    fn udp_clients_share_only_with_udp_clients() {
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
        // The number stays the same in another process, whether or not lower numbers are in use there.
        let mut there = self::ports(1, &["127.0.0.1"]);
        there.adopt(SharedPort(7), SocketId(3), bound, bound, true);
        there.join(SharedPort(7));
        assert_eq!(there.emptiest(Family::V4, true, None), Some(SharedPort(7)));
        assert!(there.leave(SharedPort(7)));
    }
}
