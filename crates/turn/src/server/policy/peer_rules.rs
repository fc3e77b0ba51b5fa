//! Which peers may be relayed to ("Safe by default"). A relay stands inside the network that it serves; without these
//! rules it is a door to everything there (RFC 8656 section 21.1.5 and what attackers did with open relays).

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    str::FromStr,
};

use smallvec::SmallVec;
use turnpike_wire::address::canonical_ip;

use crate::server::OwnEndpoints;

/// An address prefix, such as `10.0.0.0/8`, `2001:db8::/32` or a lone address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// First address.
    pub base: IpAddr,
    /// Leading bits that count.
    pub bits: u8,
}

impl Cidr {
    /// Whether the address lies in it. An IPv4 prefix holds no IPv6 address and the other way round; IPv4-mapped
    /// addresses are IPv4.
    #[must_use]
    #[inline]
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.base, canonical_ip(ip)) {
            (IpAddr::V4(base), IpAddr::V4(ip)) => (base.to_bits() ^ ip.to_bits()) & mask_v4(self.bits) == 0,
            (IpAddr::V6(base), IpAddr::V6(ip)) => (base.to_bits() ^ ip.to_bits()) & mask_v6(self.bits) == 0,
            _ => false,
        }
    }

    /// The address that is so many behind the first one, if it lies in it.
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
                "{text:?} is no address prefix: expected one such as 10.0.0.0/8, 2001:db8::/32 or 192.0.2.1"
            )
        })?;
        let most = if base.is_ipv4() { 32 } else { 128 };
        let bits =
            match bits {
                None => most,
                Some(bits) => bits.parse::<u8>().ok().filter(|parsed| *parsed <= most).ok_or_else(|| {
                    format!("{text:?} has a prefix length of {bits:?}: expected 0 to {most}")
                })?,
            };
        let first = first_address(base, bits);
        if first != base {
            return Err(format!("{text} has host bits set: write {first}/{bits}"));
        }
        // ::ffff:10.0.0.0/104 is 10.0.0.0/8 in another spelling; addresses are compared in canonical form.
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

/// What is allowed though it would be refused: a prefix, or one address with a port or a range of ports, such as `10.1.0.0/16`,
/// `192.0.2.7:5060` or `[2001:db8::7]:5000-5100`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowRule {
    prefix: Cidr,
    /// `None` for all.
    ports: Option<RangeInclusive<u16>>,
    /// Whether it may open ports of our own.
    opens_own: bool,
}

impl AllowRule {
    /// Allows the peers of a prefix, but no service of this machine: coturn's lists of peers know no ports.
    #[must_use]
    pub fn of_others(prefix: Cidr) -> Self {
        Self { prefix, ports: None, opens_own: false }
    }

    /// `port` is `None` where any will do.
    #[inline]
    fn covers(&self, ip: IpAddr, port: Option<u16>) -> bool {
        let has_port = |ports: &RangeInclusive<u16>| port.is_none_or(|port| ports.contains(&port));
        self.prefix.contains(ip) && self.ports.as_ref().is_none_or(has_port)
    }

    /// Whether it can be meant for an address of our own: it holds no other, or it is about loopback, which is always ours.
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
                        "{text:?} has ports behind what is not one address: expected one such as 192.0.2.7:5060, \
                         [2001:db8::7]:5060 or 192.0.2.7:5000-5100"
                    ));
                }
                (address.parse()?, Some(port_range(text, ports)?))
            }
            None => (text.parse::<Cidr>()?, None),
        };
        let Cidr { base, bits } = prefix;
        if base.is_unspecified() && bits == (if base.is_ipv4() { 32 } else { 128 }) {
            return Err(format!(
                "{base} is nobody's address, and never a peer: write {base}/0 for all of its family"
            ));
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

/// What stands before and behind the colon of `a.b.c.d:ports` or `[v6]:ports`.
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
        _ => Err(format!(
            "{text:?} has a port of {ports:?}: expected one of 1 to 65535, or two such as 5000-5100"
        )),
    }
}

/// Deny rules win over allow rules; allow rules win over the built-in refusal of special ranges. Of our own addresses the relay's ports
/// alone are open, unless an allow rule names one; our listeners and the unspecified address are never a peer. With `allow_only`, what no
/// allow rule names is refused, public or not.
#[derive(Clone, Debug, Default)]
pub struct PeerRules {
    /// Allowed though special, or ours.
    pub allow: Vec<AllowRule>,
    /// Refused though public.
    pub deny: Vec<Cidr>,
    /// Whether all are refused that `allow` does not name.
    pub allow_only: bool,
    /// What is ours.
    pub own: OwnEndpoints,
}

/// By what a peer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerDenial {
    /// A deny rule.
    Rule(Cidr),
    /// It is a service of this machine, and those are no peers by default.
    Own,
    /// No rule allows its special range, and those are refused by default.
    Special,
    /// No rule allows it, and no other may be a peer.
    NotAllowed,
}

impl PeerDenial {
    /// The values of a label in metrics, in the order of [`PeerDenial::index`].
    pub const NAMES: [&'static str; 4] = ["rule", "own", "special", "not_allowed"];

    /// Which of [`PeerDenial::NAMES`].
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
    /// By what a peer is refused that is not permitted.
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

    /// Whether this peer may be relayed to: address and port are permitted, and it is no service of this machine.
    #[must_use]
    #[inline]
    pub fn permits_endpoint(&self, peer: SocketAddr) -> bool {
        self.permits_at(peer.ip(), Some(peer.port()))
    }

    /// Whether this peer may be relayed to on any port of its, in any spelling of its address. IPv4-mapped is none: what stands there is
    /// an IPv6 address that is on no wire.
    ///
    /// An IPv6 address that embeds IPv4 addresses (6to4, NAT64, Teredo, ...) is judged as itself and as each of
    /// them: a rule on the IPv4 range holds for its embedded forms too. An IPv6 allow rule covers an embedded form only
    /// if it is at least as narrow as the range that embeds, so that allowing `2000::/3` does not open 10.0.0.0/8 by
    /// way of 6to4.
    #[must_use]
    pub fn permits(&self, peer: IpAddr) -> bool {
        self.permits_at(peer, None)
    }

    /// `port` is `None` where any will do: there is one that is open on each address.
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
            // An address that embeds one which a rule names is that one.
            !(is_special_v6(ip) || self.allow_only && embedded.is_empty())
                && embedded
                    .iter()
                    .all(|embedded| self.allows(IpAddr::V4(embedded.ip), port, 0) || is_open(embedded.ip))
        })
    }

    /// Whether this is a port of ours that is not open: a listener, or one that is not the relay's and that no rule names, be it by this
    /// address or as it was `spelled`.
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

    /// What the configured rules say about this spelling, if anything.
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

/// An IPv4 address inside an IPv6 address.
#[derive(Clone, Copy)]
struct Embedded {
    ip: Ipv4Addr,
    /// Length of the prefix that makes it one.
    prefix: u8,
}

/// Where in an address of 64:ff9b:1::/48 the IPv4 one may be depends on how long a prefix the operator of its NAT64 took: by prefixes of
/// 48, 56, 64 and 96 bits, the bytes that hold it (RFC 6052 section 2.2, which leaves out byte 8).
const LOCAL_NAT64: [[usize; 4]; 4] = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]];

/// Whether it is an address of 6to4 or Teredo, whose packets a tunnel may send back (RFC 8656 section 21.4).
pub(crate) fn is_tunneled(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if matches!(ip.segments(), [0x2002, ..] | [0x2001, 0, ..]))
}

/// Whether it is of the prefix for NAT64 that any network may use (RFC 8215).
fn is_local_nat64(ip: Ipv6Addr) -> bool {
    matches!(ip.segments(), [0x64, 0xff9b, 1, ..])
}

/// Every IPv4 address that this one leads to, or may lead to. IPv4-mapped ones lead nowhere.
fn embedded_v4(ip: Ipv6Addr) -> SmallVec<[Embedded; 6]> {
    let bits = ip.to_bits();
    let segments = ip.segments();
    #[expect(clippy::cast_possible_truncation, reason = "32 of the 128 bits are meant")]
    let at = |shift: u32| Ipv4Addr::from_bits((bits >> shift) as u32);
    let mut found = SmallVec::new();
    match segments {
        // IPv4-compatible (RFC 4291 section 2.5.5.1, deprecated); :: and ::1 fall into 0.0.0.0/8 here.
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
            // Read with a shorter prefix than the operator's, an address begins with the zeros between the two.
            found.extend(
                possible.filter(|ip| ip.octets()[0] != 0).map(|ip| Embedded { ip, prefix: 48 }),
            );
        }
        _ => {}
    }
    // ISATAP (RFC 5214 section 6.1): an interface identifier under any prefix.
    if segments[4] & !0x0200 == 0 && segments[5] == 0x5efe {
        found.push(Embedded { ip: at(0), prefix: 96 });
    }
    found
}

/// Whether it is, or embeds, the unspecified address, which Linux takes for its own.
fn leads_to_unspecified(ip: Ipv6Addr, embedded: &[Embedded]) -> bool {
    ip.is_unspecified()
        || embedded.iter().any(|embedded| embedded.ip.is_unspecified())
        || (is_local_nat64(ip) && ip.to_bits() << 48 == 0)
}

/// Ranges that are refused unless a rule allows them, as an [`IpRange`](crate::ip_range::IpRange) is written: those of [`is_special_v4`]
/// and [`is_special_v6`]. An IPv6 address that embeds a refused IPv4 address is refused too and is not listed here.
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

/// Ranges of the IANA IPv4 special-purpose registry that lead nowhere public, and multicast.
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

/// Ranges of the IANA IPv6 special-purpose registry that lead nowhere public, and multicast.
fn is_special_v6(ip: Ipv6Addr) -> bool {
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => true, // unspecified, loopback
        [0x64, 0xff9b, 1, ..] => true,        // local-use NAT64: who knows what is behind it (RFC 8215)
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
