//! Rules for peers. Without such rules, a relay would expose the network that it serves (RFC 8656 section
//! 21.1.5).

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    str::FromStr,
};

use smallvec::SmallVec;
use turnpike_wire::address::canonical_ip;

use crate::server::OwnEndpoints;

/// Address prefix, such as `10.0.0.0/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    pub base: IpAddr,
    pub bits: u8,
}

impl Cidr {
    /// Prefixes and addresses of different families never match; IPv4-mapped addresses count as IPv4.
    #[must_use]
    #[inline]
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.base, canonical_ip(ip)) {
            (IpAddr::V4(base), IpAddr::V4(ip)) => (base.to_bits() ^ ip.to_bits()) & mask_v4(self.bits) == 0,
            (IpAddr::V6(base), IpAddr::V6(ip)) => (base.to_bits() ^ ip.to_bits()) & mask_v6(self.bits) == 0,
            _ => false,
        }
    }

    #[must_use]
    pub fn nth(&self, n: u32) -> Option<IpAddr> {
        let ip = match self.base {
            IpAddr::V4(base) => base.to_bits().checked_add(n).map(Ipv4Addr::from_bits)?.into(),
            IpAddr::V6(base) => base.to_bits().checked_add(n.into()).map(Ipv6Addr::from_bits)?.into(),
        };
        self.contains(ip).then_some(ip)
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let base: IpAddr = address.parse().map_err(|_| {
            format!(
                "{text:?} is not an address prefix: expected for example 10.0.0.0/8, 2001:db8::/32 or 192.0.2.1"
            )
        })?;
        let most = if base.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            None => most,
            Some(bits) => bits
                .parse::<u8>()
                .ok()
                .filter(|parsed| *parsed <= most)
                .ok_or_else(|| format!("{text:?} has prefix length {bits:?}: expected 0 to {most}"))?,
        };
        let first = first_address(base, bits);
        if first != base {
            return Err(format!("{text} has host bits set: write {first}/{bits}"));
        }
        // ::ffff:10.0.0.0/104 is another notation for 10.0.0.0/8; addresses are compared in canonical form.
        match (base, canonical_ip(base)) {
            (IpAddr::V6(_), base @ IpAddr::V4(_)) if bits >= 96 => Ok(Self { base, bits: bits - 96 }),
            _ => Ok(Self { base, bits }),
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.bits)
    }
}

/// Exception to the deny rules, such as `10.1.0.0/16`, `192.0.2.7:5060` or `[2001:db8::7]:5000-5100`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowRule {
    prefix: Cidr,
    ports: Option<RangeInclusive<u16>>,
    opens_own: bool,
}

impl AllowRule {
    /// Rule that does not open services on this machine, like the entries in coturn's allow list, which have
    /// no ports.
    #[must_use]
    pub fn of_others(prefix: Cidr) -> Self {
        Self { prefix, ports: None, opens_own: false }
    }

    /// Limits the rule to these ports.
    #[must_use]
    pub fn at_ports(self, ports: Option<RangeInclusive<u16>>) -> Self {
        Self { ports, ..self }
    }

    #[inline]
    fn covers(&self, ip: IpAddr, port: Option<u16>) -> bool {
        let has_port = |ports: &RangeInclusive<u16>| port.is_none_or(|port| ports.contains(&port));
        self.prefix.contains(ip) && self.ports.as_ref().is_none_or(has_port)
    }

    /// True if the rule applies even to the server's own addresses: it is a single address, or lies
    /// within loopback.
    fn names(&self, ip: IpAddr, port: u16) -> bool {
        let Cidr { base, bits } = self.prefix;
        let is_named = match base {
            IpAddr::V4(base) => bits == 32 || (bits >= 8 && base.is_loopback()),
            IpAddr::V6(_) => bits == 128,
        };
        self.opens_own && is_named && self.covers(ip, Some(port))
    }
}

impl From<Cidr> for AllowRule {
    fn from(prefix: Cidr) -> Self {
        Self { prefix, ports: None, opens_own: true }
    }
}

impl FromStr for AllowRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (prefix, ports) = match split_ports(text) {
            Some((address, ports)) => {
                if address.parse::<IpAddr>().is_err() {
                    return Err(format!(
                        "{text:?} is not an address with ports: expected for example 192.0.2.7:5060, \
                         [2001:db8::7]:5060 or 192.0.2.7:5000-5100"
                    ));
                }
                (address.parse()?, Some(port_range(text, ports)?))
            }
            None => (text.parse::<Cidr>()?, None),
        };
        let Cidr { base, bits } = prefix;
        if base.is_unspecified() && bits == (if base.is_ipv4() { 32 } else { 128 }) {
            return Err(format!("{base} is never a peer: write {base}/0 for all addresses of its family"));
        }
        Ok(Self { prefix, ports, opens_own: true })
    }
}

impl fmt::Display for AllowRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(ports) = &self.ports else { return self.prefix.fmt(f) };
        SocketAddr::new(self.prefix.base, *ports.start()).fmt(f)?;
        if ports.start() == ports.end() { Ok(()) } else { write!(f, "-{}", ports.end()) }
    }
}

fn split_ports(text: &str) -> Option<(&str, &str)> {
    match text.strip_prefix('[') {
        Some(rest) => rest.split_once("]:").or(Some((text, ""))),
        None => text.split_once(':').filter(|(_, behind)| !behind.contains(':')),
    }
}

fn port_range(text: &str, ports: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(format!("{text:?} has port {ports:?}: expected 1 to 65535, or a range such as 5000-5100")),
    }
}

/// Peer rules. Deny rules take precedence over allow rules, and allow rules over the built-in refusal of
/// special ranges. On the server's own addresses, only relay ports are allowed, unless an allow rule names
/// the address; its listeners and the unspecified address are never peers. With `allow_only`, peers without
/// an allow rule are refused, even public ones.
#[derive(Clone, Debug, Default)]
pub struct PeerRules {
    pub allow: Vec<AllowRule>,
    pub deny: Vec<Cidr>,
    pub allow_only: bool,
    pub own: OwnEndpoints,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerDenial {
    Rule(Cidr),
    Own,
    Special,
    NotAllowed,
}

impl PeerDenial {
    pub const NAMES: [&'static str; 4] = ["rule", "own", "special", "not_allowed"];

    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Rule(_) => 0,
            Self::Own => 1,
            Self::Special => 2,
            Self::NotAllowed => 3,
        }
    }
}

impl PeerRules {
    #[must_use]
    pub fn denial(&self, peer: SocketAddr) -> PeerDenial {
        let embedded = match peer.ip() {
            IpAddr::V4(_) => SmallVec::new(),
            IpAddr::V6(ip) => embedded_v4(ip),
        };
        let spellings = || embedded.iter().map(|embedded| IpAddr::V4(embedded.ip)).chain([peer.ip()]);
        let is_closed = || spellings().any(|ip| self.closes(ip, Some(peer.port()), peer.ip()));
        match self.deny.iter().find(|rule| spellings().any(|ip| rule.contains(ip))) {
            Some(rule) => PeerDenial::Rule(*rule),
            None if self.permits(peer.ip()) && is_closed() => PeerDenial::Own,
            None if self.allow_only => PeerDenial::NotAllowed,
            None => PeerDenial::Special,
        }
    }

    /// Like [`Self::permits`], but also checks the port.
    #[must_use]
    #[inline]
    pub fn permits_endpoint(&self, peer: SocketAddr) -> bool {
        self.permits_at(peer.ip(), Some(peer.port()))
    }

    /// True if clients may use some port of this peer. The notation of its address makes no difference,
    /// except that the IPv4-mapped form counts as an IPv6 address, which never appears on the wire.
    ///
    /// An IPv6 address that embeds IPv4 addresses (6to4, NAT64, Teredo, ...) must pass as itself and as each
    /// of them: a rule on an IPv4 range also covers its embedded forms. An IPv6 allow rule covers an embedded
    /// form only if it is at least as narrow as the embedding range, so that allowing `2000::/3` does not
    /// allow 10.0.0.0/8 through 6to4.
    #[must_use]
    pub fn permits(&self, peer: IpAddr) -> bool {
        self.permits_at(peer, None)
    }

    #[inline]
    fn permits_at(&self, peer: IpAddr, port: Option<u16>) -> bool {
        match peer {
            IpAddr::V4(ip) => {
                !ip.is_unspecified()
                    && !self.closes(peer, port, peer)
                    && self
                        .permits_as(peer, port, 0)
                        .unwrap_or_else(|| !self.allow_only && !is_special_v4(ip))
            }
            IpAddr::V6(ip) => self.permits_v6(ip, port),
        }
    }

    fn permits_v6(&self, ip: Ipv6Addr, port: Option<u16>) -> bool {
        let peer = IpAddr::V6(ip);
        let embedded = embedded_v4(ip);
        if ip.to_ipv4_mapped().is_some() || leads_to_unspecified(ip, &embedded) {
            return false;
        }
        let shuts_out = |ip: IpAddr| self.denies(ip) || self.closes(ip, port, peer);
        if self.closes(peer, port, peer) || embedded.iter().any(|embedded| shuts_out(embedded.ip.into())) {
            return false;
        }
        let narrowest = embedded.iter().map(|embedded| embedded.prefix).max().unwrap_or(0);
        self.permits_as(peer, port, narrowest).unwrap_or_else(|| {
            let is_open = |ip: Ipv4Addr| !self.allow_only && !is_special_v4(ip);
            // An allow rule on an embedded address covers the address that embeds it.
            !(is_special_v6(ip) || self.allow_only && embedded.is_empty())
                && embedded
                    .iter()
                    .all(|embedded| self.allows(IpAddr::V4(embedded.ip), port, 0) || is_open(embedded.ip))
        })
    }

    /// Returns true for the server's own ports, except relay ports without a listener and ports named by a
    /// rule.
    #[inline]
    fn closes(&self, ip: IpAddr, port: Option<u16>, spelled: IpAddr) -> bool {
        port.is_some_and(|port| {
            self.own.guards(ip, port) && self.own.has(ip) && self.closes_own(ip, port, spelled)
        })
    }

    #[cold]
    fn closes_own(&self, ip: IpAddr, port: u16, spelled: IpAddr) -> bool {
        let is_named = || self.allow.iter().any(|rule| rule.names(ip, port) || rule.names(spelled, port));
        self.own.listens(ip, port) || !(self.own.relays_on(ip, port) || is_named())
    }

    #[inline]
    fn permits_as(&self, peer: IpAddr, port: Option<u16>, narrowest: u8) -> Option<bool> {
        if self.denies(peer) {
            Some(false)
        } else if self.allows(peer, port, narrowest) {
            Some(true)
        } else {
            None
        }
    }

    fn denies(&self, peer: IpAddr) -> bool {
        self.deny.iter().any(|rule| rule.contains(peer))
    }

    fn allows(&self, peer: IpAddr, port: Option<u16>, narrowest: u8) -> bool {
        self.allow.iter().any(|rule| rule.prefix.bits >= narrowest && rule.covers(peer, port))
    }
}

#[derive(Clone, Copy)]
struct Embedded {
    ip: Ipv4Addr,
    prefix: u8,
}

/// Positions of the IPv4 bytes in an address of 64:ff9b:1::/48, for NAT64 prefixes of 48, 56, 64 and 96 bits
/// (RFC 6052 section 2.2, which skips byte 8). The prefix is the operator's choice, so all are considered.
const LOCAL_NAT64: [[usize; 4]; 4] = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]];

pub(crate) fn is_tunneled(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if matches!(ip.segments(), [0x2002, ..] | [0x2001, 0, ..]))
}

fn is_local_nat64(ip: Ipv6Addr) -> bool {
    matches!(ip.segments(), [0x64, 0xff9b, 1, ..])
}

/// IPv4 addresses that packets to `ip` may reach; none for IPv4-mapped addresses.
fn embedded_v4(ip: Ipv6Addr) -> SmallVec<[Embedded; 6]> {
    let bits = ip.to_bits();
    let segments = ip.segments();
    #[expect(clippy::cast_possible_truncation, reason = "takes 32 of the 128 bits")]
    let at = |shift: u32| Ipv4Addr::from_bits((bits >> shift) as u32);
    let mut found = SmallVec::new();
    match segments {
        // IPv4-compatible (RFC 4291 section 2.5.5.1, deprecated); this treats :: and ::1 as part of
        // 0.0.0.0/8.
        [0, 0, 0, 0, 0, 0, _, _]
        // IPv4-translated (RFC 7915 calls the algorithm SIIT; ::ffff:0:a.b.c.d).
        | [0, 0, 0, 0, 0xffff, 0, _, _]
        // NAT64 with the well-known prefix (RFC 6052 section 2.1).
        | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => found.push(Embedded { ip: at(0), prefix: 96 }),
        // 6to4 (RFC 3056 section 2).
        [0x2002, ..] => found.push(Embedded { ip: at(80), prefix: 16 }),
        // Teredo (RFC 4380 section 4): the server, and the client's address with all bits inverted.
        [0x2001, 0, ..] => {
            found.push(Embedded { ip: at(64), prefix: 32 });
            found.push(Embedded { ip: Ipv4Addr::from_bits(!at(0).to_bits()), prefix: 32 });
        }
        _ if is_local_nat64(ip) => {
            let octets = ip.octets();
            let possible = LOCAL_NAT64.iter().map(|places| Ipv4Addr::from(places.map(|place| octets[place])));
            // If the assumed prefix is shorter than the operator's, the first byte taken is a zero that
            // precedes the embedded address.
            found.extend(
                possible.filter(|ip| ip.octets()[0] != 0).map(|ip| Embedded { ip, prefix: 48 }),
            );
        }
        _ => {}
    }
    // ISATAP (RFC 5214 section 6.1): recognized by its interface identifier, whatever the prefix.
    if segments[4] & !0x0200 == 0 && segments[5] == 0x5efe {
        found.push(Embedded { ip: at(0), prefix: 96 });
    }
    found
}

/// True if `ip` is or embeds the unspecified address, which Linux treats as local.
fn leads_to_unspecified(ip: Ipv6Addr, embedded: &[Embedded]) -> bool {
    ip.is_unspecified()
        || embedded.iter().any(|embedded| embedded.ip.is_unspecified())
        || (is_local_nat64(ip) && ip.to_bits() << 48 == 0)
}

/// The ranges of [`is_special_v4`] and [`is_special_v6`], which are refused unless a rule allows them, in the
/// notation of [`IpRange`](crate::ip_range::IpRange). IPv6 addresses that embed a refused IPv4 address are
/// refused too but not listed.
pub const SPECIAL: [&str; 25] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
    "::/127",
    "64:ff9b:1::/48",
    "100::-100:0:0:1:ffff:ffff:ffff:ffff",
    "2001::/23",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/9",
    "ff00::/8",
];

/// Non-public ranges of the IANA IPv4 special-purpose registry, and multicast.
fn is_special_v4(ip: Ipv4Addr) -> bool {
    matches!(
        ip.octets(),
        [0 | 10 | 127 | 224..=255, ..]      // this network, private, loopback, multicast, reserved, broadcast
            | [100, 64..=127, ..]           // shared address space (RFC 6598)
            | [169, 254, ..]                // link-local, cloud metadata
            | [172, 16..=31, ..]            // private
            | [192, 0, 0 | 2, _]            // protocol assignments, TEST-NET-1
            | [192, 88, 99, _]              // 6to4 relay anycast, deprecated (RFC 7526)
            | [192, 168, ..]                // private
            | [198, 18 | 19, ..]            // benchmarking (RFC 2544)
            | [198, 51, 100, _]             // TEST-NET-2
            | [203, 0, 113, _] // TEST-NET-3
    )
}

/// Non-public ranges of the IANA IPv6 special-purpose registry, and multicast.
fn is_special_v6(ip: Ipv6Addr) -> bool {
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => true, // unspecified, loopback
        [0x64, 0xff9b, 1, ..] => true,        // local-use NAT64, may lead anywhere (RFC 8215)
        [0x100, 0, 0, 0 | 1, ..] => true,     // discard-only, dummy prefix (RFC 6666, RFC 9780)
        [0x2001, 0..=0x1ff, ..] => true, // protocol assignments, Teredo among them (RFC 8656 section 21.4)
        [0x2001, 0xdb8, ..] => true,     // documentation
        [0x2002, ..] => true,            // 6to4 (the same section)
        [0x3fff, 0..=0xfff, ..] => true, // documentation (RFC 9637)
        [0x5f00, ..] => true,            // segment routing SIDs (RFC 9602)
        [0xfc00..=0xfdff, ..] => true,   // unique local
        [0xfe80..=0xfeff, ..] => true,   // link-local, site-local
        [0xff00..=0xffff, ..] => true,   // multicast
        _ => false,
    }
}

fn first_address(base: IpAddr, bits: u8) -> IpAddr {
    match base {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() & mask_v4(bits)).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & mask_v6(bits)).into(),
    }
}

#[inline]
fn mask_v4(bits: u8) -> u32 {
    u32::MAX.checked_shl(32_u32.saturating_sub(u32::from(bits))).unwrap_or(0)
}

#[inline]
fn mask_v6(bits: u8) -> u128 {
    u128::MAX.checked_shl(128_u32.saturating_sub(u32::from(bits))).unwrap_or(0)
}

#[cfg(test)]
mod tests;
