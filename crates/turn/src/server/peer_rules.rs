//! Which peers may be relayed to ("Safe by default"). A relay stands inside the network that it serves; without these
//! rules it is a door to everything there (RFC 8656 section 21.1.5 and what attackers did with open relays).

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use turnpike_wire::address::canonical_ip;

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

/// Deny rules win over allow rules; allow rules win over the built-in refusal of special ranges.
#[derive(Clone, Debug, Default)]
pub struct PeerRules {
    /// Allowed though special.
    pub allow: Vec<Cidr>,
    /// Refused though public.
    pub deny: Vec<Cidr>,
    /// The server's own listeners, canonical: never a peer, whatever is allowed. Through them a client could nest allocations
    /// in one another, and each of its datagrams would pass the relay as often as its TTL lets it.
    pub own: Vec<SocketAddr>,
}

/// By what a peer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerDenial {
    /// A deny rule.
    Rule(Cidr),
    /// It is an endpoint of this server, and those are no peers by default.
    Own,
    /// No rule allows its special range, and those are refused by default.
    Special,
}

impl PeerDenial {
    /// The values of a label in metrics, in the order of [`PeerDenial::index`].
    pub const NAMES: [&'static str; 3] = ["rule", "own", "special"];

    /// Which of [`PeerDenial::NAMES`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Rule(_) => 0,
            Self::Own => 1,
            Self::Special => 2,
        }
    }
}

impl PeerRules {
    /// By what a peer is refused that is not permitted.
    #[must_use]
    pub fn denial(&self, peer: SocketAddr) -> PeerDenial {
        let ip = canonical_ip(peer.ip());
        let embedded = match ip {
            IpAddr::V4(_) => [None; 3],
            IpAddr::V6(ip) => embedded_v4(ip),
        };
        let spellings = || embedded.iter().flatten().map(|embedded| IpAddr::V4(embedded.ip)).chain([ip]);
        match self.deny.iter().find(|rule| spellings().any(|ip| rule.contains(ip))) {
            Some(rule) => PeerDenial::Rule(*rule),
            None if self.permits(ip) => PeerDenial::Own,
            None => PeerDenial::Special,
        }
    }

    /// Whether this peer may be relayed to: its address is permitted, and it is none of our own listeners.
    #[must_use]
    #[inline]
    pub fn permits_endpoint(&self, peer: SocketAddr) -> bool {
        !self.is_own(peer) && self.permits(peer.ip())
    }

    /// The port first: it settles nearly every question without looking at an address.
    #[inline]
    fn is_own(&self, peer: SocketAddr) -> bool {
        self.own.iter().any(|own| own.port() == peer.port() && own.ip() == canonical_ip(peer.ip()))
    }

    /// Whether this peer may be relayed to, in any spelling of its address.
    ///
    /// An IPv6 address that embeds IPv4 addresses (6to4, NAT64, Teredo, ...) is judged as itself and as each of
    /// them: a rule on the IPv4 range holds for its embedded forms too. An IPv6 allow rule covers an embedded form only
    /// if it is at least as narrow as the range that embeds, so that allowing `2000::/3` does not open 10.0.0.0/8 by
    /// way of 6to4.
    #[must_use]
    pub fn permits(&self, peer: IpAddr) -> bool {
        let peer = canonical_ip(peer);
        match peer {
            IpAddr::V4(ip) => self.permits_as(peer, 0).unwrap_or_else(|| !is_special_v4(ip)),
            IpAddr::V6(ip) => {
                let embedded = embedded_v4(ip);
                for Embedded { ip, .. } in embedded.iter().flatten() {
                    if self.denies(IpAddr::V4(*ip)) {
                        return false;
                    }
                }
                let narrowest = embedded.iter().flatten().map(|embedded| embedded.prefix).max().unwrap_or(0);
                self.permits_as(peer, narrowest).unwrap_or_else(|| {
                    !is_special_v6(ip)
                        && embedded.iter().flatten().all(|embedded| {
                            self.allows(IpAddr::V4(embedded.ip), 0) || !is_special_v4(embedded.ip)
                        })
                })
            }
        }
    }

    /// What the configured rules say about this spelling, if anything.
    fn permits_as(&self, peer: IpAddr, narrowest: u8) -> Option<bool> {
        if self.denies(peer) {
            Some(false)
        } else if self.allows(peer, narrowest) {
            Some(true)
        } else {
            None
        }
    }

    fn denies(&self, peer: IpAddr) -> bool {
        self.deny.iter().any(|rule| rule.contains(peer))
    }

    fn allows(&self, peer: IpAddr, narrowest: u8) -> bool {
        self.allow.iter().any(|rule| rule.bits >= narrowest && rule.contains(peer))
    }
}

/// An IPv4 address inside an IPv6 address.
#[derive(Clone, Copy)]
struct Embedded {
    ip: Ipv4Addr,
    /// Length of the prefix that makes it one.
    prefix: u8,
}

/// Every IPv4 address that this one leads to. IPv4-mapped ones are IPv4 already.
fn embedded_v4(ip: Ipv6Addr) -> [Option<Embedded>; 3] {
    let bits = ip.to_bits();
    let segments = ip.segments();
    #[expect(clippy::cast_possible_truncation, reason = "32 of the 128 bits are meant")]
    let at = |shift: u32| Ipv4Addr::from_bits((bits >> shift) as u32);
    let mut found = [None; 3];
    match segments {
        // IPv4-compatible (RFC 4291 section 2.5.5.1, deprecated); :: and ::1 fall into 0.0.0.0/8 here.
        [0, 0, 0, 0, 0, 0, _, _]
        // IPv4-translated (RFC 7915 calls the algorithm SIIT; ::ffff:0:a.b.c.d).
        | [0, 0, 0, 0, 0xffff, 0, _, _]
        // NAT64 with the well-known prefix (RFC 6052 section 2.1).
        | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => found[0] = Some(Embedded { ip: at(0), prefix: 96 }),
        // 6to4 (RFC 3056 section 2).
        [0x2002, ..] => found[0] = Some(Embedded { ip: at(80), prefix: 16 }),
        // Teredo (RFC 4380 section 4): the server, and the client's address with all bits inverted.
        [0x2001, 0, ..] => {
            found[0] = Some(Embedded { ip: at(64), prefix: 32 });
            found[1] = Some(Embedded { ip: Ipv4Addr::from_bits(!at(0).to_bits()), prefix: 32 });
        }
        _ => {}
    }
    // ISATAP (RFC 5214 section 6.1): an interface identifier under any prefix.
    if segments[4] & !0x0200 == 0 && segments[5] == 0x5efe {
        found[2] = Some(Embedded { ip: at(0), prefix: 96 });
    }
    found
}

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
        [0x2001, second, ..] if second < 0x200 => second != 0, // protocol assignments, but Teredo is judged by what it embeds
        [0x2001, 0xdb8, ..] => true,                           // documentation
        [0x3fff, 0..=0xfff, ..] => true,                       // documentation (RFC 9637)
        [0x5f00, ..] => true,                                  // segment routing SIDs (RFC 9602)
        [0xfc00..=0xfdff, ..] => true,                         // unique local
        [0xfe80..=0xfeff, ..] => true,                         // link-local, site-local
        [0xff00..=0xffff, ..] => true,                         // multicast
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
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn a_prefix_that_cannot_be_says_what_to_write() {
        for (text, expected) in [
            ("10.0.0.1/8", "10.0.0.1/8 has host bits set: write 10.0.0.0/8"),
            ("2001:db8::1/32", "2001:db8::1/32 has host bits set: write 2001:db8::/32"),
            ("10.0.0.0/33", "\"10.0.0.0/33\" has a prefix length of \"33\": expected 0 to 32"),
            ("::/129", "\"::/129\" has a prefix length of \"129\": expected 0 to 128"),
            ("10.0.0.0/", "\"10.0.0.0/\" has a prefix length of \"\": expected 0 to 32"),
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap_err(), expected);
        }
        assert!("10.0.0/8".parse::<Cidr>().unwrap_err().contains("expected one such as 10.0.0.0/8"));
    }

    #[test]
    fn a_lone_address_is_a_prefix_of_itself() {
        assert_eq!(cidr("192.0.2.1"), Cidr { base: "192.0.2.1".parse().unwrap(), bits: 32 });
        assert_eq!(cidr("::1").bits, 128);
    }

    #[test]
    fn a_mapped_prefix_is_the_ipv4_prefix() {
        assert_eq!(cidr("::ffff:10.0.0.0/104"), cidr("10.0.0.0/8"));
    }

    #[test]
    fn the_zero_prefix_holds_everything_of_its_family() {
        assert!(cidr("0.0.0.0/0").contains("203.0.113.9".parse().unwrap()));
        assert!(cidr("0.0.0.0/0").contains("::ffff:203.0.113.9".parse().unwrap()));
        assert!(!cidr("0.0.0.0/0").contains("2001:db8::1".parse().unwrap()));
        assert!(cidr("::/0").contains("2001:db8::1".parse().unwrap()));
    }

    #[test]
    fn deny_wins_over_allow_and_allow_over_the_built_in_refusal() {
        let rules = PeerRules {
            allow: vec![cidr("10.0.0.0/8")],
            deny: vec![cidr("10.1.0.0/16"), cidr("8.8.8.8")],
            own: vec![],
        };
        for (peer, permitted) in [
            ("10.0.0.1", true),
            ("10.1.0.1", false),
            ("8.8.8.8", false),
            ("8.8.4.4", true),
            ("192.168.0.1", false),
            ("64:ff9b::10.0.0.1", true),
            ("64:ff9b::10.1.0.1", false),
            ("2002:0a00:0001::", true),
            ("2002:0a01:0001::", false),
            ("64:ff9b::8.8.8.8", false),
            ("::ffff:10.1.0.1", false),
        ] {
            assert_eq!(rules.permits(peer.parse().unwrap()), permitted, "{peer}");
        }
    }

    #[test]
    fn a_denial_says_whether_a_rule_or_the_default_refuses() {
        let own = "198.41.0.4:3478".parse().unwrap();
        let rules = PeerRules { allow: vec![], deny: vec![cidr("8.8.0.0/16")], own: vec![own] };
        for (peer, by) in [
            ("8.8.8.8:9", PeerDenial::Rule(cidr("8.8.0.0/16"))),
            ("[64:ff9b::8.8.8.8]:9", PeerDenial::Rule(cidr("8.8.0.0/16"))),
            ("10.0.0.1:9", PeerDenial::Special),
            ("[::ffff:10.0.0.1]:9", PeerDenial::Special),
            ("[2002:0a00:0001::]:9", PeerDenial::Special),
            ("198.41.0.4:3478", PeerDenial::Own),
        ] {
            let peer: SocketAddr = peer.parse().unwrap();
            assert!(!rules.permits_endpoint(peer), "{peer}");
            assert_eq!(rules.denial(peer), by, "{peer}");
        }
    }

    #[test]
    fn a_wide_ipv6_allow_rule_does_not_open_embedded_private_ranges() {
        let rules = PeerRules { allow: vec![cidr("2000::/3")], deny: vec![], own: vec![] };
        assert!(rules.permits("2001:db8::1".parse().unwrap()));
        assert!(!rules.permits("2002:0a00:0001::".parse().unwrap()));
        let rules = PeerRules { allow: vec![cidr("2002:a00::/24")], deny: vec![], own: vec![] };
        assert!(rules.permits("2002:0a00:0001::".parse().unwrap()));
    }
}
