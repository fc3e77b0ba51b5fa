//! Names of TURN servers as people write them: `turn:HOST[:PORT]` (RFC 7065), or plain `HOST[:PORT]`.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr, ToSocketAddrs},
    str::FromStr,
};

/// The port of TURN and STUN over UDP (RFC 8656 section 6).
pub const DEFAULT_PORT: u16 = 3478;

/// A server that speaks TURN over UDP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnUri {
    /// Host name or address, IPv6 without brackets.
    pub host: String,
    /// UDP port.
    pub port: u16,
}

/// What is wrong with a server's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTurnUri {
    /// Another scheme or transport than this program has.
    #[error("only turn: over UDP is supported, such as turn:example.org:3478")]
    Unsupported,
    /// Nothing that could be a host or a port.
    #[error("expected turn:HOST[:PORT] or HOST[:PORT], an IPv6 address in brackets, a port of 1 to 65535")]
    Malformed,
}

impl FromStr for TurnUri {
    type Err = InvalidTurnUri;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.starts_with("turns:") || text.starts_with("stun:") || text.starts_with("stuns:") {
            return Err(InvalidTurnUri::Unsupported);
        }
        let text = text.strip_prefix("turn:").unwrap_or(text);
        let rest = match text.split_once('?') {
            None => text,
            Some((rest, "transport=udp")) => rest,
            Some(_) => return Err(InvalidTurnUri::Unsupported),
        };
        let (host, port) = split(rest).ok_or(InvalidTurnUri::Malformed)?;
        let port = match port {
            None => DEFAULT_PORT,
            Some(port) => port.parse().ok().filter(|port| *port > 0).ok_or(InvalidTurnUri::Malformed)?,
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl TurnUri {
    /// All addresses of the host. May ask the name server, and so may wait.
    ///
    /// # Errors
    /// Those of name resolution; no address at all is an error too.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let found: Vec<SocketAddr> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        }
        Ok(found)
    }
}

/// Host and port; only an IPv6 address may hold colons, and only in brackets when a port follows.
fn split(text: &str) -> Option<(&str, Option<&str>)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, after) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>().ok()?;
        return match after.strip_prefix(':') {
            Some(port) => Some((host, Some(port))),
            None => after.is_empty().then_some((host, None)),
        };
    }
    if text.parse::<Ipv6Addr>().is_ok() {
        return Some((text, None));
    }
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let is_host = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || "/@[]".contains(c));
    is_host.then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_name_a_host_and_a_port() {
        for (text, host, port) in [
            ("turn:example.org", "example.org", 3478),
            ("turn:example.org:5000", "example.org", 5000),
            ("turn:192.0.2.1?transport=udp", "192.0.2.1", 3478),
            ("turn:[2001:db8::1]:5000", "2001:db8::1", 5000),
            ("[::1]", "::1", 3478),
            ("::1", "::1", 3478),
            ("127.0.0.1:1", "127.0.0.1", 1),
        ] {
            assert_eq!(text.parse(), Ok(TurnUri { host: host.to_owned(), port }), "{text}");
        }
    }

    #[test]
    fn what_is_no_server_is_refused() {
        for text in ["", "turn:", "a:b", "a:0", "a:70000", "[::1", "[a]:1", "[::1]x", "a:1:2", "turn://a"] {
            assert_eq!(text.parse::<TurnUri>(), Err(InvalidTurnUri::Malformed), "{text}");
        }
        for text in ["turns:a", "stun:a", "turn:a?transport=tcp"] {
            assert_eq!(text.parse::<TurnUri>(), Err(InvalidTurnUri::Unsupported), "{text}");
        }
    }

    #[test]
    fn an_address_resolves_to_itself() {
        let uri: TurnUri = "turn:127.0.0.1:9".parse().expect("valid");
        assert_eq!(uri.resolve().expect("no name server needed"), [SocketAddr::from(([127, 0, 0, 1], 9))]);
    }
}
