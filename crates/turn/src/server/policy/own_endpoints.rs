//! What is ours: the addresses of this machine, those that clients are told in their place, and where we listen. To a service there a
//! relayed datagram comes from the machine itself, and is believed as such; so of all ports the relay's alone are open.
//!
//! Behind a NAT our clients are each other's peers by external addresses, and so are services of this machine that a rule allows, such as a
//! media server. What goes there does not leave by the NAT, which would have to send it back (hairpinning, RFC 4787 section 6): it goes to the
//! address that is bound, and comes from there.

use std::{
    iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
};

use turnpike_wire::address::{canonical, canonical_ip};

/// Addresses and endpoints of the server itself. 127.0.0.0/8 and ::1 are always among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnEndpoints {
    /// Sorted, external ones included.
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
    /// What a NAT in front of us may lead to any of our listeners.
    external: Vec<IpAddr>,
    translations: Vec<Translation>,
    listeners: Vec<SocketAddr>,
    relay_ports: Vec<RangeInclusive<u16>>,
    /// Whether the relay has a loopback address: elsewhere no port of loopback is one of its.
    relays_on_loopback: bool,
}

/// What a NAT in front of us does with the ports of the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Translation {
    /// What clients are told.
    external: IpAddr,
    /// What is bound.
    internal: IpAddr,
}

impl Default for OwnEndpoints {
    /// Of a server that listens nowhere: loopback, and the relay ports of RFC 8656 section 7.2.
    fn default() -> Self {
        Self::new([], [], [], 49_152..=65_535)
    }
}

impl OwnEndpoints {
    /// `addresses` are this machine's, `relays` those that the relay gives ports of, each with what clients are told in its place.
    /// `listeners` are sockets of ours that are never a peer; one on a wildcard address counts on every address of both
    /// families. `relay_ports` are those of relayed transport addresses.
    pub fn new(
        addresses: impl IntoIterator<Item = IpAddr>,
        relays: impl IntoIterator<Item = (IpAddr, Option<IpAddr>)>,
        listeners: impl IntoIterator<Item = SocketAddr>,
        relay_ports: RangeInclusive<u16>,
    ) -> Self {
        let (bound, told): (Vec<_>, Vec<_>) = relays.into_iter().unzip();
        let external: Vec<IpAddr> = told.iter().copied().flatten().map(canonical_ip).collect();
        let translations = translations(&bound, &told);
        let relays_on_loopback = bound.iter().any(IpAddr::is_loopback);
        let listeners: Vec<SocketAddr> = listeners.into_iter().map(canonical).collect();
        let (mut v4, mut v6) = (Vec::new(), vec![Ipv6Addr::LOCALHOST]);
        let others =
            bound.into_iter().chain(external.iter().copied()).chain(listeners.iter().map(SocketAddr::ip));
        for ip in addresses.into_iter().chain(others) {
            match canonical_ip(ip) {
                IpAddr::V4(ip) => v4.push(ip),
                IpAddr::V6(ip) => v6.push(ip),
            }
        }
        v4.sort_unstable();
        v4.dedup();
        v6.sort_unstable();
        v6.dedup();
        let relay_ports = vec![relay_ports];
        Self { v4, v6, external, translations, listeners, relay_ports, relays_on_loopback }
    }

    /// Further addresses by which a NAT leads to our listeners, and to nothing of the relay's.
    #[must_use]
    pub fn with_external(mut self, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        for ip in addresses.into_iter().map(canonical_ip) {
            self.external.push(ip);
            match ip {
                IpAddr::V4(ip) => insert(&mut self.v4, ip),
                IpAddr::V6(ip) => insert(&mut self.v6, ip),
            }
        }
        self
    }

    /// Ports that are given to nobody any more, while allocations of before still have some of them.
    #[must_use]
    pub fn with_former_ports(mut self, ranges: impl IntoIterator<Item = RangeInclusive<u16>>) -> Self {
        self.relay_ports.extend(ranges);
        self
    }

    /// Whether this port may be closed on an address of ours. Settles most questions without looking any address up. `ip` is canonical.
    #[inline]
    pub(crate) fn guards(&self, ip: IpAddr, port: u16) -> bool {
        ip.is_loopback() || !self.is_relay_port(port) || self.is_listener_port(port)
    }

    /// Whether the address is one of ours; it is canonical.
    #[inline]
    pub(crate) fn has(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => ip.is_loopback() || self.v4.binary_search(&ip).is_ok(),
            IpAddr::V6(ip) => self.v6.binary_search(&ip).is_ok(),
        }
    }

    /// Whether a listener of ours is reached by this port of an address that is ours.
    pub(crate) fn listens(&self, ip: IpAddr, port: u16) -> bool {
        let by_nat = self.external.contains(&ip);
        let is_reached = |at: &SocketAddr| by_nat || at.ip() == ip || at.ip().is_unspecified();
        self.listeners.iter().any(|at| at.port() == port && is_reached(at))
    }

    /// Whether the relay may have given this port of an address that is ours to a client.
    pub(crate) fn relays_on(&self, ip: IpAddr, port: u16) -> bool {
        self.is_relay_port(port) && (self.relays_on_loopback || !ip.is_loopback())
    }

    /// Whether a NAT stands in front of the relay, as far as we know.
    #[inline]
    pub(crate) fn are_translated(&self) -> bool {
        !self.translations.is_empty()
    }

    /// Where a peer is reached that a client names and may have: at the address that is bound for an external one of the relay's, and else where it
    /// is. Never one of our listeners.
    pub(crate) fn internal(&self, peer: SocketAddr) -> SocketAddr {
        let found = self.translations.iter().find(|it| it.external == peer.ip());
        match found.filter(|_| !self.is_listener_port(peer.port())) {
            Some(it) => SocketAddr::new(it.internal, peer.port()),
            None => peer,
        }
    }

    /// The opposite: the peer that a client knows behind a source address. `may_have` tells whether the client has named a peer and may
    /// have it, for an address may have had several names since the start.
    pub(crate) fn external(&self, peer: SocketAddr, may_have: impl Fn(SocketAddr) -> bool) -> SocketAddr {
        let names = self.translations.iter().filter(|it| it.internal == peer.ip());
        let mut peers = names.map(|it| SocketAddr::new(it.external, peer.port()));
        peers.find(|peer| !self.is_listener_port(peer.port()) && may_have(*peer)).unwrap_or(peer)
    }

    /// All addresses of the peer that has this one: what is bound, and what clients are told in its place.
    pub(crate) fn aliases(&self, ip: IpAddr) -> impl Iterator<Item = IpAddr> + '_ {
        let internal = self.translations.iter().find(|it| it.external == ip).map_or(ip, |it| it.internal);
        let told = self.translations.iter().filter(move |it| it.internal == internal);
        iter::once(internal).chain(told.map(|it| it.external))
    }

    fn is_listener_port(&self, port: u16) -> bool {
        self.listeners.iter().any(|at| at.port() == port)
    }

    fn is_relay_port(&self, port: u16) -> bool {
        self.relay_ports.iter().any(|range| range.contains(&port))
    }
}

/// Of two bound addresses with one external address the first counts. An address on which the relay has ports itself leads to those.
fn translations(bound: &[IpAddr], told: &[Option<IpAddr>]) -> Vec<Translation> {
    let bound: Vec<IpAddr> = bound.iter().copied().map(canonical_ip).collect();
    let mut translations: Vec<Translation> = Vec::new();
    for (internal, external) in bound.iter().copied().zip(told) {
        let Some(external) = external.map(canonical_ip) else { continue };
        let is_known = translations.iter().any(|it| it.external == external);
        if !is_known && !bound.contains(&external) && external.is_ipv4() == internal.is_ipv4() {
            translations.push(Translation { external, internal });
        }
    }
    translations
}

fn insert<A: Ord>(sorted: &mut Vec<A>, address: A) {
    if let Err(at) = sorted.binary_search(&address) {
        sorted.insert(at, address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// Two relay addresses behind NATs, one of which was told otherwise before a reload; one of IPv6; one that is nobody's but ours.
    fn own() -> OwnEndpoints {
        let relays = [
            ("10.0.0.5", Some("203.0.114.5")),
            ("10.0.0.6", Some("203.0.114.6")),
            ("10.0.0.5", Some("203.0.114.4")),
            ("fd00::5", Some("2600:1::5")),
            ("203.0.114.7", None),
        ];
        let relays = relays.map(|(bound, told)| (ip(bound), told.map(ip)));
        OwnEndpoints::new([], relays, [at("0.0.0.0:3478"), at("127.0.0.1:50443")], 50_000..=50_999)
            .with_former_ports([40_000..=40_009])
            .with_external([ip("203.0.114.9")])
    }

    #[test]
    fn ports_of_an_external_address_are_reached_where_they_are_bound() {
        let own = own();
        assert!(own.are_translated());
        for (named, reached) in [
            ("203.0.114.5:50000", "10.0.0.5:50000"),
            ("203.0.114.4:50999", "10.0.0.5:50999"),
            ("203.0.114.6:40009", "10.0.0.6:40009"),
            ("[2600:1::5]:50001", "[fd00::5]:50001"),
            // A media server of this machine, which a rule allows.
            ("203.0.114.5:10000", "10.0.0.5:10000"),
        ] {
            assert_eq!(own.internal(at(named)), at(reached), "{named}");
            assert_eq!(own.external(at(reached), |peer| peer == at(named)), at(named), "{reached}");
            assert_eq!(own.external(at(reached), |_| false), at(reached), "under no name");
        }
    }

    #[test]
    fn no_listener_and_no_other_address_is_reached_so() {
        let own = own();
        for peer in [
            "203.0.114.5:3478",
            "203.0.114.5:50443",
            "203.0.114.7:50000",
            "203.0.114.9:50000",
            "198.41.0.4:50000",
            "10.0.0.5:50000",
        ] {
            assert_eq!(own.internal(at(peer)), at(peer));
        }
        for peer in ["10.0.0.5:3478", "10.0.0.5:50443", "10.0.0.7:50000", "203.0.114.5:50000"] {
            assert_eq!(own.external(at(peer), |_| true), at(peer));
        }
    }

    #[test]
    fn an_external_address_on_which_the_relay_has_ports_is_itself() {
        let relays = [("10.0.0.5", Some("10.0.0.6")), ("10.0.0.6", None), ("10.0.0.7", Some("10.0.0.7"))];
        let relays = relays.map(|(bound, told)| (ip(bound), told.map(ip)));
        assert!(!OwnEndpoints::new([], relays, [], 50_000..=50_999).are_translated());
    }

    #[test]
    fn an_address_and_all_its_names_are_one_peer() {
        let own = own();
        for one in ["10.0.0.5", "203.0.114.5", "203.0.114.4"] {
            let mut aliases: Vec<IpAddr> = own.aliases(ip(one)).collect();
            aliases.sort_unstable();
            assert_eq!(aliases, ["10.0.0.5", "203.0.114.4", "203.0.114.5"].map(ip), "{one}");
        }
        assert!(own.aliases(ip("198.41.0.4")).eq([ip("198.41.0.4")]));
    }

    #[test]
    fn an_address_that_leads_to_listeners_alone_is_ours_all_the_same() {
        let own = own();
        assert!(own.has(ip("203.0.114.9")) && own.listens(ip("203.0.114.9"), 50_443));
    }
}
