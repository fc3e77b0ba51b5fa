//! Translates `allowed-peer-ip`, `denied-peer-ip` and `allow-loopback-peers` to peer rules. There are three
//! differences from coturn: deny overrides allow, special ranges are refused even if no rule mentions them,
//! and an allowed address of this machine exposes its services.

use std::{net::IpAddr, ops::RangeInclusive};

use turnpike_turn::{
    ip_range::{IpRange, difference, union},
    server::{Cidr, SPECIAL},
};

/// The options as given.
#[derive(Default)]
pub(super) struct PeerLists {
    pub(super) allowed: Vec<IpRange>,
    pub(super) denied: Vec<IpRange>,
    pub(super) allow_loopback: bool,
}

/// Addresses of the server that the file configures.
pub(super) struct OwnAddresses<'a> {
    /// Returns true for an address that the file mentions or that this machine has.
    pub(super) includes: &'a dyn Fn(IpAddr) -> bool,
    pub(super) are_local_named: bool,
    /// Relay ports.
    pub(super) ports: RangeInclusive<u16>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PeerRules {
    pub(super) allow: Vec<String>,
    pub(super) deny: Vec<String>,
}

impl PeerLists {
    pub(super) fn rules(&self, own: &OwnAddresses<'_>, note: &mut impl FnMut(&str, String)) -> PeerRules {
        let mapped = ranges(&["::ffff:0:0/96"]);
        // coturn refuses loopback before it evaluates its lists.
        let closed = [mapped, if self.allow_loopback { Vec::new() } else { ranges(&LOOPBACK) }].concat();
        let mut allowed = difference(&union(&self.allowed), &closed);
        let denied = difference(&union(&self.denied), &allowed);
        if self.allow_loopback {
            let opened = difference(&ranges(&LOOPBACK), &denied);
            if !opened.is_empty() {
                note("allow-loopback-peers", LOOPBACK_IS_OPEN.to_owned());
            }
            allowed = union(&[allowed, opened].concat());
        }
        private_peers(self, note);
        let allow = prefixes(&allowed).iter().map(|prefix| allow(prefix, own, note)).collect();
        doubtful(&allowed, own, note);
        let special = [closed, ranges(&SPECIAL)].concat();
        let deny = prefixes(&difference(&denied, &special)).iter().map(ToString::to_string).collect();
        PeerRules { allow, deny }
    }
}

const LOOPBACK: [&str; 2] = ["127.0.0.0/8", "::1"];

const PRIVATE: [&str; 3] = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"];

const LOOPBACK_IS_OPEN: &str = "every service on this machine's loopback is open to clients; to open only one service, set peers.allow, \
                                such as \"127.0.0.1:5060\"";

fn ranges(texts: &[&str]) -> Vec<IpRange> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

fn prefixes(ranges: &[IpRange]) -> Vec<Cidr> {
    ranges.iter().flat_map(IpRange::prefixes).collect()
}

fn alone(prefix: &Cidr) -> Option<IpAddr> {
    (prefix.bits == if prefix.base.is_ipv4() { 32 } else { 128 }).then_some(prefix.base)
}

/// A rule that allows an address of the server would expose all services on it, so it is limited to the relay
/// ports.
fn allow(prefix: &Cidr, own: &OwnAddresses<'_>, note: &mut impl FnMut(&str, String)) -> String {
    match alone(prefix).filter(|ip| !ip.is_loopback() && (own.includes)(*ip)) {
        Some(ip) => {
            let rule = relay_ports(ip, &own.ports);
            note(
                "allowed-peer-ip",
                format!(
                    "{ip} is this server's own address: peers.allow contains only its relay ports ({rule}), where clients of this server \
                     reach each other. Without the ports, every service on this machine would be open; to open a service, add it, for example {}",
                    with_ports(ip, "5060")
                ),
            );
            rule
        }
        None => prefix.to_string(),
    }
}

fn relay_ports(ip: IpAddr, ports: &RangeInclusive<u16>) -> String {
    with_ports(ip, &format!("{}-{}", ports.start(), ports.end()))
}

fn with_ports(ip: IpAddr, ports: &str) -> String {
    if ip.is_ipv4() { format!("{ip}:{ports}") } else { format!("[{ip}]:{ports}") }
}

/// Adds a note if an allowed address may be the server's own, which cannot be checked if the server is a
/// different machine.
fn doubtful(allowed: &[IpRange], own: &OwnAddresses<'_>, note: &mut impl FnMut(&str, String)) {
    let alone: Vec<IpAddr> = prefixes(allowed).iter().filter_map(alone).collect();
    let is_known = |ip: &IpAddr| ip.is_loopback() || (own.includes)(*ip);
    if own.are_local_named || alone.iter().any(|ip| !ip.is_loopback() && is_known(ip)) {
        return;
    }
    let unknown: Vec<String> =
        alone.iter().filter(|ip| !is_known(ip)).take(3).map(ToString::to_string).collect();
    if !unknown.is_empty() {
        note(
            "allowed-peer-ip",
            format!(
                "if this is the address of the server itself, remove it from peers.allow ({}): it opens every service on that address, and \
                 clients of this server can reach each other without it",
                unknown.join(", ")
            ),
        );
    }
}

/// coturn relays to private peers unless its file denies them.
fn private_peers(lists: &PeerLists, note: &mut impl FnMut(&str, String)) {
    let refused = [&lists.denied[..], &lists.allowed].concat();
    if lists.allowed.is_empty() && !difference(&ranges(&PRIVATE), &refused).is_empty() {
        note(
            "allowed-peer-ip",
            "private, link-local and other special peers, which coturn relays to, are refused by turnpike: list the ones that you need in \
             peers.allow, for example [\"10.1.0.0/16\"]"
                .to_owned(),
        );
    }
}
