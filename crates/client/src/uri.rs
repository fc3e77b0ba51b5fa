//! Server URIs: `turn:` and `turns:` (RFC 7065), `stun:` and `stuns:` (RFC 7064), or just `HOST[:PORT]`.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use strum::{Display, EnumString};
use turnpike_wire::address::split_zone;

use crate::{InvalidSetting, transport::ClientTransport};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerUri {
    pub scheme: Scheme,
    /// Host name or address; an IPv6 address has no brackets.
    pub host: String,
    pub port: Option<u16>,
    /// True for `?transport=tcp`, false for `?transport=udp`.
    pub tcp: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, EnumString)]
#[strum(serialize_all = "lowercase", ascii_case_insensitive)]
pub enum Scheme {
    Stun,
    Stuns,
    Turn,
    Turns,
}

impl ServerUri {
    /// Transport implied by the URI. The default is TLS over TCP for `turns:` and UDP for `turn:` (RFC 7065
    /// section 3.1 with RFC 5928); `turns:` over UDP is DTLS (RFC 7350).
    pub fn transport(&self) -> ClientTransport {
        match (self.is_secure(), self.tcp) {
            (false, None | Some(false)) => ClientTransport::Udp,
            (false, Some(true)) => ClientTransport::Tcp,
            (true, None | Some(true)) => ClientTransport::Tls,
            (true, Some(false)) => ClientTransport::Dtls,
        }
    }

    pub fn is_secure(&self) -> bool {
        matches!(self.scheme, Scheme::Stuns | Scheme::Turns)
    }

    pub fn is_turn(&self) -> bool {
        matches!(self.scheme, Scheme::Turn | Scheme::Turns)
    }

    pub fn allows(&self, transport: ClientTransport) -> bool {
        let tcp = transport.is_stream();
        (!self.is_secure() || transport.is_secure()) && self.tcp.is_none_or(|wanted| wanted == tcp)
    }

    pub fn name(&self) -> Option<&str> {
        (self.host.parse::<Ipv4Addr>().is_err() && !is_ipv6(&self.host)).then_some(&self.host)
    }

    pub fn port_for(&self, transport: ClientTransport) -> u16 {
        self.port.unwrap_or_else(|| transport.default_port())
    }
}

/// Canonical form of a TURN URI with a scheme; fails for anything else.
pub fn turn_uri(text: &str) -> Result<String, String> {
    let uri = text.parse::<ServerUri>().map_err(|error| error.to_string())?;
    // The scheme is checked here, because the parser also accepts names without one, but browsers do not.
    let has_scheme = text.starts_with("turn:") || text.starts_with("turns:");
    if uri.is_turn() && has_scheme {
        Ok(uri.to_string())
    } else {
        Err("not a turn: or turns: URI".to_owned())
    }
}

impl From<SocketAddr> for ServerUri {
    fn from(address: SocketAddr) -> Self {
        let zone = match address {
            SocketAddr::V6(v6) if v6.scope_id() > 0 => format!("%{}", v6.scope_id()),
            _ => String::new(),
        };
        let host = format!("{}{zone}", address.ip());
        Self { scheme: Scheme::Turn, host, port: Some(address.port()), tcp: None }
    }
}

impl FromStr for ServerUri {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (scheme, rest) = split_scheme(text)?;
        if let Some(after) = rest.strip_prefix("//") {
            let name = scheme.map_or(String::new(), |scheme| format!("{scheme}:"));
            return invalid(format!("a server name has no slashes: write {:?}", name + after));
        }
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let scheme = scheme.unwrap_or(Scheme::Turn);
        let tcp = match query.map(str::to_ascii_lowercase).as_deref() {
            None => None,
            Some(_) if matches!(scheme, Scheme::Stun | Scheme::Stuns) => {
                return invalid("stun: and stuns: URIs cannot have ?transport (RFC 7064)".to_owned());
            }
            Some("transport=udp") => Some(false),
            Some("transport=tcp") => Some(true),
            Some(other) => {
                return invalid(format!(
                    "{other:?} is not a transport: use ?transport=udp or ?transport=tcp (RFC 7065)"
                ));
            }
        };
        if rest.contains('@') {
            return invalid("a server name cannot contain a user: use --user NAME:PASSWORD".to_owned());
        }
        let (host, port) = split_port(rest)?;
        let port = match port.map(|text| (text, text.parse())) {
            None => None,
            Some((_, Ok(port @ 1..))) => Some(port),
            Some((text, _)) => return invalid(format!("{text:?} is not a port (1 to 65535)")),
        };
        // URIs escape the % before a zone as %25 (RFC 6874).
        Ok(Self { scheme, host: host.replacen("%25", "%", 1), port, tcp })
    }
}

impl fmt::Display for ServerUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scheme, host, .. } = self;
        if host.contains(':') { write!(f, "{scheme}:[{host}]") } else { write!(f, "{scheme}:{host}") }?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        match self.tcp {
            Some(true) => f.write_str("?transport=tcp"),
            Some(false) => f.write_str("?transport=udp"),
            None => Ok(()),
        }
    }
}

fn invalid<T>(what: String) -> Result<T, InvalidSetting> {
    Err(InvalidSetting(what))
}

/// Splits off the scheme. Text before the first colon is a scheme unless a port or an IPv6 address follows.
fn split_scheme(text: &str) -> Result<(Option<Scheme>, &str), InvalidSetting> {
    let Some((before, after)) = text.split_once(':') else { return Ok((None, text)) };
    if let Ok(scheme) = before.parse() {
        return Ok((Some(scheme), after));
    }
    let is_address = before.starts_with('[') || is_ipv6(text);
    if after.starts_with("//") || !is_address && after.contains(':') {
        return invalid(format!(
            "unknown scheme {before:?}: expected turn:HOST[:PORT], turns:, stun: or stuns:"
        ));
    }
    Ok((None, text))
}

/// Also accepts zones, such as `fe80::1%eth0` (RFC 4007 section 11).
fn is_ipv6(text: &str) -> bool {
    text.parse::<Ipv6Addr>().is_ok() || split_zone(text).is_some()
}

/// Splits text into host and port. Only an IPv6 address may contain colons; it needs brackets if a port
/// follows.
fn split_port(text: &str) -> Result<(&str, Option<&str>), InvalidSetting> {
    let bad = || {
        InvalidSetting(format!(
            "{text:?} is not a host name or address; an IPv6 address with a port needs brackets: turn:[2001:db8::1]:3478"
        ))
    };
    if let Some(rest) = text.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or_else(bad)?;
        if !is_ipv6(host) {
            return Err(bad());
        }
        return match after.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if after.is_empty() => Ok((host, None)),
            None => Err(bad()),
        };
    }
    if is_ipv6(text) {
        return Ok((text, None));
    }
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let is_host = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || "/[]".contains(c));
    if is_host { Ok((host, port)) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_notation_yields_host_port_and_transport() {
        for (text, host, port, transport) in [
            ("turn:example.org", "example.org", 3478, ClientTransport::Udp),
            ("turn:example.org:5000?transport=tcp", "example.org", 5000, ClientTransport::Tcp),
            ("turn:192.0.2.1?transport=udp", "192.0.2.1", 3478, ClientTransport::Udp),
            ("turns:example.org", "example.org", 5349, ClientTransport::Tls),
            ("TURNS:example.org:443?transport=TCP", "example.org", 443, ClientTransport::Tls),
            ("turns:example.org?transport=udp", "example.org", 5349, ClientTransport::Dtls),
            ("stun:example.org", "example.org", 3478, ClientTransport::Udp),
            ("stuns:example.org:7", "example.org", 7, ClientTransport::Tls),
            ("turn:[2001:db8::1]:5000", "2001:db8::1", 5000, ClientTransport::Udp),
            ("turn:2001:db8::1", "2001:db8::1", 3478, ClientTransport::Udp),
            ("[::1]", "::1", 3478, ClientTransport::Udp),
            ("::1", "::1", 3478, ClientTransport::Udp),
            ("turn:[fe80::1%eth0]:5000", "fe80::1%eth0", 5000, ClientTransport::Udp),
            ("turn:[fe80::1%25eth0]", "fe80::1%eth0", 3478, ClientTransport::Udp),
            ("fe80::1%2", "fe80::1%2", 3478, ClientTransport::Udp),
            ("127.0.0.1:1", "127.0.0.1", 1, ClientTransport::Udp),
            ("localhost", "localhost", 3478, ClientTransport::Udp),
        ] {
            let uri: ServerUri = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            let found = (uri.host.as_str(), uri.port_for(uri.transport()), uri.transport());
            assert_eq!(found, (host, port, transport), "{text}");
            assert!(uri.allows(transport), "{text}");
            assert_eq!(uri.to_string().parse(), Ok(uri), "{text} written and read again");
        }
    }

    #[test]
    fn each_error_has_its_own_message() {
        for (text, word) in [
            ("", "not a host name"),
            ("turn:", "not a host name"),
            ("a:b", "not a port"),
            ("a:0", "not a port"),
            ("turn:a:70000", "not a port"),
            ("[::1", "brackets"),
            ("[a]:1", "brackets"),
            ("[::1]x", "brackets"),
            ("[fe80::1%]:1", "brackets"),
            ("[a%eth0]:1", "brackets"),
            ("[fe80::1%eth 0]:1", "brackets"),
            ("[fe80::1%eth0%1]:1", "brackets"),
            ("turn:a b", "not a host name"),
            ("turn://a:1", "\"turn:a:1\""),
            ("http://a", "unknown scheme"),
            ("sip:a:1", "expected turn:"),
            ("turn:a?transport=sctp", "?transport=udp or ?transport=tcp"),
            ("turn:a?x=1", "?transport=udp or ?transport=tcp"),
            ("stun:a?transport=tcp", "RFC 7064"),
            ("turn:user@a", "--user"),
        ] {
            let error = text.parse::<ServerUri>().expect_err(text).to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn turn_uri_needs_its_scheme() {
        assert_eq!(turn_uri("turns:a:443?transport=TCP").as_deref(), Ok("turns:a:443?transport=tcp"));
        for other in ["turn.example.org", "stun:a", "TURN:a", "turn:a b"] {
            assert!(turn_uri(other).is_err(), "{other}");
        }
    }

    #[test]
    fn a_uri_rules_out_some_transports() {
        let allowed = |text: &str| {
            let uri: ServerUri = text.parse().expect("valid");
            ClientTransport::ALL.into_iter().filter(|transport| uri.allows(*transport)).collect::<Vec<_>>()
        };
        assert_eq!(allowed("turn:a"), ClientTransport::ALL);
        assert_eq!(allowed("turn:a?transport=tcp"), [ClientTransport::Tcp, ClientTransport::Tls]);
        assert_eq!(allowed("turns:a"), [ClientTransport::Tls, ClientTransport::Dtls]);
        assert_eq!(allowed("turns:a?transport=udp"), [ClientTransport::Dtls]);
    }

    #[test]
    fn parsing_arbitrary_text_does_not_panic() {
        let pieces =
            ["turn:", "s", "[", "]", ":", "::1", "?", "transport=", "tcp", "@", "//", "a", "1", " ", "é"];
        for a in pieces {
            for b in pieces {
                for c in pieces {
                    for d in pieces {
                        let text = [a, b, c, d].concat();
                        if let Ok(uri) = text.parse::<ServerUri>() {
                            assert_eq!(uri.to_string().parse(), Ok(uri), "{text}");
                        }
                    }
                }
            }
        }
    }
}
