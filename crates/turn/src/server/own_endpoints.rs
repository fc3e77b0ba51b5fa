//! What is ours: the addresses of this machine, those that clients are told in their place, and where we listen. To a service there a
//! relayed datagram comes from the machine itself, and is believed as such; so of all ports the relay's alone are open.

use std::{
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
    listeners: Vec<SocketAddr>,
    relay_ports: Vec<RangeInclusive<u16>>,
    /// Whether the relay has a loopback address: elsewhere no port of loopback is one of its.
    relays_on_loopback: bool,
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
        let (bound, external): (Vec<_>, Vec<_>) = relays.into_iter().unzip();
        let external: Vec<IpAddr> = external.into_iter().flatten().map(canonical_ip).collect();
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
        Self { v4, v6, external, listeners, relay_ports: vec![relay_ports], relays_on_loopback }
    }

    /// Ports that are given to nobody any more, while allocations of before still have some of them.
    #[must_use]
    pub fn with_former_ports(mut self, ranges: impl IntoIterator<Item = RangeInclusive<u16>>) -> Self {
        self.relay_ports.extend(ranges);
        self
    }

    /// Whether this port may be closed on an address of ours. Settles most questions without looking any address up. `ip` is canonical.
    #[inline]
    pub(super) fn guards(&self, ip: IpAddr, port: u16) -> bool {
        ip.is_loopback()
            || !self.is_relay_port(port)
            || self.listeners.iter().any(|listener| listener.port() == port)
    }

    /// Whether the address is one of ours; it is canonical.
    #[inline]
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => ip.is_loopback() || self.v4.binary_search(&ip).is_ok(),
            IpAddr::V6(ip) => self.v6.binary_search(&ip).is_ok(),
        }
    }

    /// Whether a listener of ours is reached by this port of an address that is ours.
    pub(super) fn listens(&self, ip: IpAddr, port: u16) -> bool {
        let by_nat = self.external.contains(&ip);
        let is_reached = |at: &SocketAddr| by_nat || at.ip() == ip || at.ip().is_unspecified();
        self.listeners.iter().any(|at| at.port() == port && is_reached(at))
    }

    /// Whether the relay may have given this port of an address that is ours to a client.
    pub(super) fn relays_on(&self, ip: IpAddr, port: u16) -> bool {
        self.is_relay_port(port) && (self.relays_on_loopback || !ip.is_loopback())
    }

    fn is_relay_port(&self, port: u16) -> bool {
        self.relay_ports.iter().any(|range| range.contains(&port))
    }
}
