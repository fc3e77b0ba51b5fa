//! Entries of `peers.allow`: prefixes, addresses with ports, and host names whose addresses the server looks up.

use std::{fmt, net::IpAddr, ops::RangeInclusive, str::FromStr};

use turnpike_turn::server::{AllowRule, Cidr};
use turnpike_wire::names::server_name;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedPeer {
    Rule(AllowRule),
    Name(AllowedName),
}

/// A host, or some of its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedName {
    pub name: String,
    ports: Option<RangeInclusive<u16>>,
}

impl AllowedPeer {
    /// Maximum number of names, each of which is looked up again and again.
    pub const MOST_NAMES: usize = 64;

    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Rule(_) => None,
            Self::Name(named) => Some(&named.name),
        }
    }

    /// Rules for this entry, with the `addresses` of its name.
    pub fn rules(&self, addresses: &[IpAddr]) -> Vec<AllowRule> {
        match self {
            Self::Rule(rule) => vec![rule.clone()],
            Self::Name(AllowedName { ports, .. }) => addresses
                .iter()
                .map(|ip| {
                    let prefix = Cidr { base: *ip, bits: if ip.is_ipv4() { 32 } else { 128 } };
                    // A name server must not open services on this machine.
                    AllowRule::of_others(prefix).at_ports(ports.clone())
                })
                .collect(),
        }
    }
}

impl FromStr for AllowedPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = match text.parse() {
            Ok(rule) => return Ok(Self::Rule(rule)),
            Err(refused) => refused,
        };
        // A prefix has a slash, a name has none.
        if text.contains('/') {
            return Err(refused);
        }
        let (host, ports) = text.split_once(':').map_or((text, None), |(host, ports)| (host, Some(ports)));
        let host = host.strip_suffix('.').unwrap_or(host);
        // Otherwise mistyped addresses would be names.
        let is_name =
            host.rsplit('.').next().is_some_and(|last| last.contains(|c: char| c.is_ascii_alphabetic()));
        let name = server_name(host).ok().filter(|_| is_name).ok_or(refused)?;
        let ports = ports.map(|ports| range(ports).ok_or_else(|| wrong_ports(text, ports))).transpose()?;
        Ok(Self::Name(AllowedName { name, ports }))
    }
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (0 < first && first <= last).then_some(first..=last)
}

fn wrong_ports(text: &str, ports: &str) -> String {
    format!("{text:?} has port {ports:?}: expected 1 to 65535, or a range such as 5000-5100")
}

impl fmt::Display for AllowedPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => rule.fmt(f),
            Self::Name(AllowedName { name, ports: None }) => f.write_str(name),
            Self::Name(AllowedName { name, ports: Some(ports) }) if ports.start() == ports.end() => {
                write!(f, "{name}:{}", ports.start())
            }
            Self::Name(AllowedName { name, ports: Some(ports) }) => {
                write!(f, "{name}:{}-{}", ports.start(), ports.end())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn entry_round_trips_through_text(text in "[a-z0-9.:/\\[\\]-]{0,24}(:[0-9]{1,5}(-[0-9]{1,5})?)?") {
            if let Ok(peer) = text.parse::<AllowedPeer>() {
                prop_assert_eq!(peer.to_string().parse(), Ok(peer));
            }
        }
    }

    #[test]
    fn names_have_a_letter_in_their_last_label() {
        for (text, name, shown) in [
            ("sfu.internal", "sfu.internal", "sfu.internal"),
            ("SFU.Internal.:5000-5100", "sfu.internal", "sfu.internal:5000-5100"),
            ("sfu:443", "sfu", "sfu:443"),
            ("10-0-0-1.example.org", "10-0-0-1.example.org", "10-0-0-1.example.org"),
        ] {
            let peer: AllowedPeer = text.parse().unwrap();
            assert_eq!((peer.name(), &*peer.to_string()), (Some(name), shown));
        }
        for rule in ["10.0.0.0/8", "192.0.2.7:5060", "[2001:db8::7]:5000-5100", "::1"] {
            assert_eq!(rule.parse::<AllowedPeer>().unwrap().name(), None, "{rule}");
        }
        for (wrong, why) in [
            ("10.0.0.1/33", "prefix length"),
            ("10.0.0.256", "not an address prefix"),
            ("fe80::1/129", "prefix length"),
            ("sfu.internal/24", "not an address prefix"),
            ("sfu.internal:0", "has port \"0\""),
            ("sfu.internal:9-8", "has port \"9-8\""),
            ("*.internal", "not an address prefix"),
        ] {
            let refused = wrong.parse::<AllowedPeer>().unwrap_err();
            assert!(refused.contains(why), "{wrong}: {refused}");
        }
    }

    #[test]
    fn name_allows_its_addresses_on_its_ports() {
        let addresses = ["10.0.0.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        let rules = |text: &str| {
            let rules = text.parse::<AllowedPeer>().unwrap().rules(&addresses);
            rules.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(rules("sfu"), ["10.0.0.1/32", "2001:db8::1/128"]);
        assert_eq!(rules("sfu:7"), ["10.0.0.1:7", "[2001:db8::1]:7"]);
        assert_eq!(rules("10.0.0.0/8"), ["10.0.0.0/8"]);
    }
}
