//! Rules that hand connections of other protocols on to a web server, so that it can share the TURN server's port.

use std::{fmt, net::SocketAddr, str::FromStr};

use turnpike_wire::{client_hello::ClientHello, names::server_name, proxy_protocol::ProxyVersion};

/// Application protocols of TURN and STUN (RFC 7443). Clients that offer them are never handed on. TURN comes
/// first, because a client that offers both needs more than Binding.
pub const TURN_PROTOCOLS: [&str; 2] = ["stun.turn", "stun.nat-discovery"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOnRule {
    pub selector: Selector,
    pub to: SocketAddr,
    /// Version of the PROXY header that precedes the client's bytes.
    pub proxy_protocol: Option<ProxyVersion>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// TLS connections whose ClientHello matches both lists. An empty list matches everything; at least one is not
    /// empty.
    Tls { names: Vec<NamePattern>, protocols: Vec<ProtocolName> },
    /// Connections that use neither TLS nor STUN.
    Plain,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamePattern {
    /// This name only; in lower case.
    Exact(String),
    /// `*.example.org`: every name below this domain, however deep. Lower case, with the leading dot.
    Below(String),
    /// `*`, which matches every name.
    Any,
}

/// Name of an application protocol (RFC 7301) other than those of TURN: 1 to 255 printable ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolName(String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Match {
    No,
    ByWildcard,
    Yes,
}

impl HandOnRule {
    /// Returns the first rule that matches this client, or `None` if the TURN server keeps the connection.
    /// Wildcards do not match names for which `is_own` returns true, because those belong to the TURN server.
    pub fn for_tls<'r>(
        rules: &'r [Self],
        hello: &ClientHello<'_>,
        is_own: impl Fn(&str) -> bool,
    ) -> Option<&'r Self> {
        if hello.protocols().any(|offered| TURN_PROTOCOLS.iter().any(|turn| turn.as_bytes() == offered)) {
            return None;
        }
        let name = hello.server_name.map(str::to_ascii_lowercase);
        let is_own = name.as_deref().is_some_and(is_own);
        rules.iter().find(|rule| match rule.matches(name.as_deref(), hello) {
            Match::No => false,
            Match::ByWildcard => !is_own,
            Match::Yes => true,
        })
    }

    pub fn for_plain(rules: &[Self]) -> Option<&Self> {
        rules.iter().find(|rule| rule.selector == Selector::Plain)
    }

    fn matches(&self, name: Option<&str>, hello: &ClientHello<'_>) -> Match {
        let Selector::Tls { names, protocols } = &self.selector else { return Match::No };
        let is_offered = |wanted: &ProtocolName| hello.protocols().any(|name| name == wanted.0.as_bytes());
        if !protocols.is_empty() && !protocols.iter().any(is_offered) {
            return Match::No;
        }
        if names.is_empty() {
            return Match::Yes;
        }
        let Some(name) = name else { return Match::No };
        let matches = names.iter().map(|pattern| pattern.matches(name));
        matches
            .fold(Match::No, |best, next| if best == Match::Yes || next == Match::No { best } else { next })
    }
}

impl NamePattern {
    fn matches(&self, name: &str) -> Match {
        match self {
            Self::Exact(own) if own == name => Match::Yes,
            Self::Below(domain) if name.len() > domain.len() && name.ends_with(domain) => Match::ByWildcard,
            Self::Any => Match::ByWildcard,
            Self::Exact(_) | Self::Below(_) => Match::No,
        }
    }
}

impl FromStr for NamePattern {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix('*') {
            Some("") => Ok(Self::Any),
            Some(rest) => {
                let domain = rest.strip_prefix('.').ok_or("a wildcard is * or *.DOMAIN")?;
                server_name(domain).map(|domain| Self::Below(format!(".{domain}")))
            }
            None => server_name(text).map(Self::Exact),
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => f.write_str(name),
            Self::Below(domain) => write!(f, "*{domain}"),
            Self::Any => f.write_str("*"),
        }
    }
}

impl FromStr for ProtocolName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if TURN_PROTOCOLS.contains(&text) {
            return Err("clients that offer this protocol always stay with the TURN server");
        }
        if !(1..=255).contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("not the name of an application protocol");
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ProtocolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use turnpike_wire::client_hello::{Parsed, parse};

    use super::*;

    fn rule(names: &[&str], protocols: &[&str], port: u16) -> HandOnRule {
        HandOnRule {
            selector: Selector::Tls {
                names: names.iter().map(|name| name.parse().unwrap()).collect(),
                protocols: protocols.iter().map(|name| name.parse().unwrap()).collect(),
            },
            to: ([127, 0, 0, 1], port).into(),
            proxy_protocol: None,
        }
    }

    fn vector(bytes: &[u8]) -> Vec<u8> {
        [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
    }

    fn chosen(rules: &[HandOnRule], name: Option<&str>, protocols: &[&str]) -> Option<u16> {
        let mut extensions = Vec::new();
        if let Some(name) = name {
            let list = vector(&[&[0][..], &vector(name.as_bytes())].concat());
            extensions.extend([&[0, 0][..], &vector(&list)].concat());
        }
        if !protocols.is_empty() {
            let list = protocols
                .iter()
                .flat_map(|name| [&[u8::try_from(name.len()).unwrap()][..], name.as_bytes()].concat());
            extensions.extend([&[0, 16][..], &vector(&vector(&list.collect::<Vec<u8>>()))].concat());
        }
        let body = [&[3, 3][..], &[7; 32], &[0], &vector(&[0x13, 1]), &[1, 0], &vector(&extensions)].concat();
        let message = [&[1, 0][..], &vector(&body)].concat();
        let stream = [&[22, 3, 1][..], &vector(&message)].concat();
        let mut joined = Vec::new();
        let Parsed::Hello(hello) = parse(&stream, &mut joined) else { panic!("not a ClientHello") };
        let is_own = |name: &str| name == "turn.example.org";
        HandOnRule::for_tls(rules, &hello, is_own).map(|rule| rule.to.port())
    }

    #[test]
    fn first_matching_rule_decides_and_turn_keeps_the_rest() {
        let rules = [
            rule(&["www.example.org", "example.org"], &[], 1),
            rule(&["*.example.org"], &[], 2),
            rule(&[], &["http/1.1", "h2"], 3),
        ];
        for (name, protocols, expected) in [
            (Some("WWW.example.org"), &[][..], Some(1)),
            (Some("example.org"), &[], Some(1)),
            (Some("cloud.example.org"), &[], Some(2)),
            (Some("a.b.example.org"), &["h2"], Some(2)),
            (Some("notexample.org"), &[], None),
            (Some("other.example.net"), &["h2", "http/1.1"], Some(3)),
            (None, &["http/1.1"], Some(3)),
            (None, &[], None),
            (Some("other.example.net"), &["http/0.9"], None),
        ] {
            assert_eq!(chosen(&rules, name, protocols), expected, "{name:?} {protocols:?}");
        }
    }

    #[test]
    fn turn_keeps_its_own_names_and_protocols() {
        let wildcards = [rule(&["*.example.org"], &[], 1), rule(&["*"], &[], 2)];
        assert_eq!(chosen(&wildcards, Some("turn.example.org"), &[]), None);
        assert_eq!(chosen(&wildcards, Some("other.example.net"), &[]), Some(2));
        assert_eq!(
            chosen(&wildcards, None, &[]),
            None,
            "a client that sends no server name matches no name pattern"
        );
        for protocol in TURN_PROTOCOLS {
            assert_eq!(chosen(&wildcards, Some("www.example.org"), &["h2", protocol]), None);
            assert!(protocol.parse::<ProtocolName>().is_err());
        }
        let exact = [rule(&["*", "turn.example.org"], &[], 1)];
        assert_eq!(chosen(&exact, Some("turn.example.org"), &[]), Some(1), "named exactly");
        let browser = [rule(&[], &["h2"], 1)];
        assert_eq!(chosen(&browser, Some("turn.example.org"), &["h2"]), Some(1));
    }

    #[test]
    fn both_criteria_of_a_rule_must_hold() {
        let rules = [rule(&["*.example.org"], &["h2"], 1)];
        assert_eq!(chosen(&rules, Some("www.example.org"), &["h2"]), Some(1));
        assert_eq!(chosen(&rules, Some("www.example.org"), &["http/1.1"]), None);
        assert_eq!(chosen(&rules, Some("www.example.net"), &["h2"]), None);
    }

    #[test]
    fn patterns_round_trip_and_reject_other_wildcards() {
        for text in ["*", "*.example.org", "www.example.org"] {
            assert_eq!(text.parse::<NamePattern>().unwrap().to_string(), text);
        }
        for text in ["", "*example.org", "www.*.org", "192.0.2.1", "*.", "a b"] {
            assert!(text.parse::<NamePattern>().is_err(), "{text}");
        }
    }
}
