//! The server's own addresses, local and external, and its listeners. A service on this machine would trust a
//! relayed datagram as local, so only relay ports are open to peers.
//!
//! Behind a NAT, clients of this server use external addresses to reach each other as peers. They reach local
//! services that a rule allows, such as a media server, in the same way. Such traffic goes directly to the
//! bound address, because the NAT might not support hairpinning (RFC 4787 section 6).

use std::{
    iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
};

use turnpike_wire::address::{canonical, canonical_ip};

/// The server's own addresses, including 127.0.0.0/8 and ::1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnEndpoints {
    /// Sorted, including external addresses.
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
    /// External addresses. A NAT may forward traffic for them to any listener.
    external: Vec<IpAddr>,
    translations: Vec<Translation>,
    listeners: Vec<SocketAddr>,
    relay_ports: Vec<RangeInclusive<u16>>,
    /// True if a relay address is on loopback. If false, no loopback port is a relay port.
    relays_on_loopback: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Translation {
    external: IpAddr,
    internal: IpAddr,
}

impl Default for OwnEndpoints {
    /// Only loopback addresses, no listeners, and the relay ports of RFC 8656 section 7.2.
    fn default() -> Self {
        Self::new([], [], [], 49_152..=65_535)
    }
}

impl OwnEndpoints {
    /// Listeners are never peers; a wildcard listener is treated as listening on every address.
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

    /// Adds addresses that a NAT forwards to listeners, but not to relay ports.
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

    /// Adds relay ports that existing allocations may still use.
    #[must_use]
    pub fn with_former_ports(mut self, ranges: impl IntoIterator<Item = RangeInclusive<u16>>) -> Self {
        self.relay_ports.extend(ranges);
        self
    }

    /// Decides most cases without an address lookup. `ip` must be canonical.
    #[inline]
    pub(crate) fn guards(&self, ip: IpAddr, port: u16) -> bool {
        ip.is_loopback() || !self.is_relay_port(port) || self.is_listener_port(port)
    }

    #[inline]
    pub(crate) fn has(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => ip.is_loopback() || self.v4.binary_search(&ip).is_ok(),
            IpAddr::V6(ip) => self.v6.binary_search(&ip).is_ok(),
        }
    }

    /// True if this port of one of the server's own addresses reaches a listener.
    pub(crate) fn listens(&self, ip: IpAddr, port: u16) -> bool {
        let by_nat = self.external.contains(&ip);
        let is_reached = |at: &SocketAddr| by_nat || at.ip() == ip || at.ip().is_unspecified();
        self.listeners.iter().any(|at| at.port() == port && is_reached(at))
    }

    pub(crate) fn relays_on(&self, ip: IpAddr, port: u16) -> bool {
        self.is_relay_port(port) && (self.relays_on_loopback || !ip.is_loopback())
    }

    #[inline]
    pub(crate) fn are_translated(&self) -> bool {
        !self.translations.is_empty()
    }

    /// Translates an external relay address to the bound one; leaves other addresses unchanged. Listener
    /// ports are never translated.
    pub(crate) fn internal(&self, peer: SocketAddr) -> SocketAddr {
        let found = self.translations.iter().find(|it| it.external == peer.ip());
        match found.filter(|_| !self.is_listener_port(peer.port())) {
            Some(it) => SocketAddr::new(it.internal, peer.port()),
            None => peer,
        }
    }

    /// Inverse of [`Self::internal`]. An address may have had several external ones, so `may_have` picks the
    /// one that the client uses.
    pub(crate) fn external(&self, peer: SocketAddr, may_have: impl Fn(SocketAddr) -> bool) -> SocketAddr {
        let names = self.translations.iter().filter(|it| it.internal == peer.ip());
        let mut peers = names.map(|it| SocketAddr::new(it.external, peer.port()));
        peers.find(|peer| !self.is_listener_port(peer.port()) && may_have(*peer)).unwrap_or(peer)
    }

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

/// Pairs bound addresses with their external ones. If two have the same external address, the first one wins.
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

    /// Two relay addresses behind NATs, one of which had a different external address before a reload, plus
    /// an IPv6 address and one without a NAT.
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
    fn external_ports_map_to_bound_ports() {
        let own = own();
        assert!(own.are_translated());
        for (named, reached) in [
            ("203.0.114.5:50000", "10.0.0.5:50000"),
            ("203.0.114.4:50999", "10.0.0.5:50999"),
            ("203.0.114.6:40009", "10.0.0.6:40009"),
            ("[2600:1::5]:50001", "[fd00::5]:50001"),
            ("203.0.114.5:10000", "10.0.0.5:10000"),
        ] {
            assert_eq!(own.internal(at(named)), at(reached), "{named}");
            assert_eq!(own.external(at(reached), |peer| peer == at(named)), at(named), "{reached}");
            assert_eq!(own.external(at(reached), |_| false), at(reached), "no known external address");
        }
    }

    #[test]
    fn listeners_and_other_addresses_are_not_translated() {
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
    fn an_external_address_with_relay_ports_is_not_translated() {
        let relays = [("10.0.0.5", Some("10.0.0.6")), ("10.0.0.6", None), ("10.0.0.7", Some("10.0.0.7"))];
        let relays = relays.map(|(bound, told)| (ip(bound), told.map(ip)));
        assert!(!OwnEndpoints::new([], relays, [], 50_000..=50_999).are_translated());
    }

    #[test]
    fn an_address_and_its_aliases_are_one_peer() {
        let own = own();
        for one in ["10.0.0.5", "203.0.114.5", "203.0.114.4"] {
            let mut aliases: Vec<IpAddr> = own.aliases(ip(one)).collect();
            aliases.sort_unstable();
            assert_eq!(aliases, ["10.0.0.5", "203.0.114.4", "203.0.114.5"].map(ip), "{one}");
        }
        assert!(own.aliases(ip("198.41.0.4")).eq([ip("198.41.0.4")]));
    }

    #[test]
    fn an_address_that_reaches_only_listeners_is_one_of_the_servers() {
        let own = own();
        assert!(own.has(ip("203.0.114.9")) && own.listens(ip("203.0.114.9"), 50_443));
    }
}
