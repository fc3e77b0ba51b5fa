//! How clients reach a server.

use std::{fmt, str::FromStr};

/// The transport between a TURN client and its server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Datagrams.
    #[default]
    Udp,
    /// A connection.
    Tcp,
    /// TLS over TCP.
    Tls,
    /// DTLS over UDP (RFC 7350).
    Dtls,
}

/// The name is none of `udp`, `tcp`, `tls`, `dtls`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown value {0:?}: expected udp, tcp, tls or dtls")]
pub struct UnknownTransport(String);

impl Transport {
    /// All of them, the plain ones first.
    pub const ALL: [Self; 4] = [Self::Udp, Self::Tcp, Self::Tls, Self::Dtls];

    /// Whether messages arrive in order and complete, so that nothing is sent again (RFC 8489 section 6.2.2).
    #[must_use]
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }

    /// Whether the server shows a certificate.
    #[must_use]
    pub fn is_secure(self) -> bool {
        matches!(self, Self::Tls | Self::Dtls)
    }

    /// The default port: 3478, or 5349 with a certificate (RFC 8656 section 6).
    #[must_use]
    pub fn default_port(self) -> u16 {
        if self.is_secure() { 5349 } else { 3478 }
    }
}

impl FromStr for Transport {
    type Err = UnknownTransport;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|transport| transport.to_string() == name)
            .ok_or_else(|| UnknownTransport(name.to_owned()))
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Dtls => "dtls",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for transport in Transport::ALL {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        assert!("sctp".parse::<Transport>().is_err());
    }
}
