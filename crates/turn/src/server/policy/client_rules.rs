//! Clients that the server serves: by address prefix, checked for each request, and by country and autonomous system, checked for each
//! new allocation.

use std::{
    fmt::{self, Debug, Write as _},
    net::IpAddr,
    str::FromStr,
};

use crate::server::Cidr;

/// Deny rules take precedence. Without allow rules, all other clients are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientRules {
    pub allow: Vec<ClientRule>,
    pub deny: Vec<ClientRule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientRule {
    Prefix(Cidr),
    Country(Country),
    /// Number of an autonomous system.
    System(u32),
}

/// ISO 3166-1 code: two upper-case letters.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Country([u8; 2]);

/// Country and autonomous system of an address, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClientNetwork {
    pub country: Option<Country>,
    /// Number of the autonomous system.
    pub asn: Option<u32>,
}

/// Finds the networks of clients. Called only for requests, in the worker's thread, so it must not block.
pub trait ClientNetworks: Debug + Send + Sync {
    fn network(&self, client: IpAddr) -> ClientNetwork;
}

impl ClientRules {
    /// Checks a client by its address alone. Clients that a rule on networks may still allow are admitted.
    #[must_use]
    #[inline]
    pub fn admits(&self, client: IpAddr) -> bool {
        (self.allow.is_empty() && self.deny.is_empty()) || self.admit_by_prefixes(client)
    }

    #[cold]
    fn admit_by_prefixes(&self, client: IpAddr) -> bool {
        !self.deny.iter().any(|rule| rule.has(client))
            && (self.allow.is_empty()
                || self.allow.iter().any(|rule| rule.is_on_networks() || rule.has(client)))
    }

    /// Checks a client for a new allocation; `network` is called only if rules depend on it.
    pub fn admits_allocation(&self, client: IpAddr, network: impl FnOnce() -> ClientNetwork) -> bool {
        let mut rules = self.allow.iter().chain(&self.deny);
        if !rules.any(ClientRule::is_on_networks) {
            return self.admits(client);
        }
        let network = network();
        let has =
            |rules: &[ClientRule]| rules.iter().any(|rule| rule.has(client) || rule.has_network(network));
        !has(&self.deny) && (self.allow.is_empty() || has(&self.allow))
    }
}

impl ClientRule {
    /// True for a rule on a country or an autonomous system.
    #[must_use]
    pub const fn is_on_networks(&self) -> bool {
        matches!(self, Self::Country(_) | Self::System(_))
    }

    fn has(&self, client: IpAddr) -> bool {
        matches!(self, Self::Prefix(prefix) if prefix.contains(client))
    }

    fn has_network(&self, network: ClientNetwork) -> bool {
        match self {
            Self::Prefix(_) => false,
            Self::Country(country) => network.country == Some(*country),
            Self::System(asn) => network.asn == Some(*asn),
        }
    }
}

impl FromStr for ClientRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is =
            |prefix: &str| text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        if is("country:") {
            let code = text["country:".len()..].to_ascii_uppercase();
            let country = Country::new(&code).ok_or_else(|| {
                format!("{text:?} has no country code: expected two letters (ISO 3166-1), such as country:DE")
            })?;
            return Ok(Self::Country(country));
        }
        if is("AS") {
            let digits = &text["AS".len()..];
            let number =
                digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
            let number = number.filter(|number| *number > 0);
            return number.map(Self::System).ok_or_else(|| {
                format!("{text:?} is not an autonomous system: expected AS and a number of 1 to 4294967295")
            });
        }
        text.parse().map(Self::Prefix)
    }
}

impl fmt::Display for ClientRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefix(prefix) => fmt::Display::fmt(prefix, f),
            Self::Country(country) => write!(f, "country:{country}"),
            Self::System(number) => write!(f, "AS{number}"),
        }
    }
}

impl From<Cidr> for ClientRule {
    fn from(prefix: Cidr) -> Self {
        Self::Prefix(prefix)
    }
}

impl Country {
    /// `None` unless the code has two upper-case letters.
    #[must_use]
    pub fn new(code: &str) -> Option<Self> {
        let code: [u8; 2] = code.as_bytes().try_into().ok()?;
        code.iter().all(u8::is_ascii_uppercase).then_some(Self(code))
    }
}

impl fmt::Display for Country {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|letter| f.write_char((*letter).into()))
    }
}

impl Debug for Country {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(allow: &[&str], deny: &[&str]) -> ClientRules {
        let parsed = |texts: &[&str]| texts.iter().map(|text| text.parse().expect("a rule")).collect();
        ClientRules { allow: parsed(allow), deny: parsed(deny) }
    }

    #[test]
    fn deny_wins_over_allow_and_no_allow_rule_admits_all() {
        for (allow, deny, client, admitted) in [
            (&[][..], &[][..], "192.0.2.7", true),
            (&[], &["192.0.2.0/24"], "192.0.2.7", false),
            (&[], &["192.0.2.0/24"], "::ffff:192.0.2.7", false),
            (&[], &["192.0.2.0/24"], "198.51.100.1", true),
            (&["192.0.2.0/24"], &[], "192.0.2.7", true),
            (&["192.0.2.0/24"], &[], "198.51.100.1", false),
            (&["192.0.2.0/24"], &[], "2001:db8::1", false),
            (&["192.0.2.0/24"], &["192.0.2.7"], "192.0.2.7", false),
        ] {
            let rules = rules(allow, deny);
            let client: IpAddr = client.parse().expect("an address");
            assert_eq!(rules.admits(client), admitted, "{rules:?} {client}");
            let looked = || panic!("no rule depends on the network");
            assert_eq!(rules.admits_allocation(client, looked), admitted, "{rules:?} {client}");
        }
    }

    #[test]
    fn rules_on_networks_apply_to_allocations_only() {
        let network = |country: &str, asn| ClientNetwork {
            country: Country::new(country),
            asn: Some(asn).filter(|n| *n > 0),
        };
        for (allow, deny, network, packets, allocations) in [
            (&[][..], &["country:DE"][..], network("DE", 0), true, false),
            (&[], &["country:DE"], network("FR", 0), true, true),
            (&[], &["country:DE"], network("", 0), true, true),
            (&[], &["AS64500"], network("FR", 64500), true, false),
            (&[], &["AS64500"], network("FR", 64501), true, true),
            (&["country:DE"], &[], network("DE", 64500), true, true),
            (&["country:DE"], &[], network("", 0), true, false),
            (&["country:DE"], &["AS64500"], network("DE", 64500), true, false),
            (&["country:DE"], &["192.0.2.0/24"], network("DE", 0), false, false),
            (&["country:DE", "192.0.2.0/24"], &[], network("FR", 0), true, true),
            (&["country:DE", "198.51.100.0/24"], &[], network("FR", 0), true, false),
        ] {
            let rules = rules(allow, deny);
            let client: IpAddr = "192.0.2.7".parse().expect("an address");
            assert_eq!(rules.admits(client), packets, "{rules:?} {network:?}");
            assert_eq!(rules.admits_allocation(client, || network), allocations, "{rules:?} {network:?}");
        }
    }

    #[test]
    fn rules_are_read_and_written_in_one_form() {
        for (text, written) in [
            ("192.0.2.0/24", Some("192.0.2.0/24")),
            ("192.0.2.7", Some("192.0.2.7/32")),
            ("country:de", Some("country:DE")),
            ("Country:DE", Some("country:DE")),
            ("as64500", Some("AS64500")),
            ("AS4294967295", Some("AS4294967295")),
            ("AS4294967296", None),
            ("AS0", None),
            ("AS", None),
            ("AS+1", None),
            ("AS 1", None),
            ("country:", None),
            ("country:DEU", None),
            ("country:D1", None),
            ("country:ÄÖ", None),
            ("DE", None),
            ("", None),
            ("é", None),
        ] {
            let read = text.parse::<ClientRule>();
            assert_eq!(read.as_ref().ok().map(ToString::to_string).as_deref(), written, "{text}");
        }
    }
}
