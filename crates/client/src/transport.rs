//! Transport protocols between client and server.

use strum::{Display, EnumString, VariantNames};

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Display, EnumString, VariantNames,
)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum ClientTransport {
    #[default]
    Udp,
    Tcp,
    Tls,
    Dtls,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown value {value:?}: expected {}", in_words(expected))]
pub struct UnknownName {
    value: String,
    expected: &'static [&'static str],
}

impl UnknownName {
    pub fn of<T: VariantNames>(value: &str) -> Self {
        Self { value: value.to_owned(), expected: T::VARIANTS }
    }
}

fn in_words(names: &[&str]) -> String {
    match names {
        [names @ .., before, last] => [names, &[format!("{before} or {last}").as_str()]].concat().join(", "),
        names => names.concat(),
    }
}

impl ClientTransport {
    pub const ALL: [Self; 4] = [Self::Udp, Self::Tcp, Self::Tls, Self::Dtls];

    /// True if the transport is reliable and ordered, so that requests are not retransmitted (RFC 8489
    /// section 6.2.2).
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }

    pub fn is_secure(self) -> bool {
        matches!(self, Self::Tls | Self::Dtls)
    }

    /// Default port: 3478, or 5349 for secure transports (RFC 8656 section 6).
    pub fn default_port(self) -> u16 {
        if self.is_secure() { 5349 } else { 3478 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for transport in ClientTransport::ALL {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        let unknown = "sctp".parse::<ClientTransport>().unwrap_err().to_string();
        assert_eq!(unknown, "unknown value \"sctp\": expected udp, tcp, tls or dtls");
    }
}
