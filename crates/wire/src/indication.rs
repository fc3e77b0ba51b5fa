//! Send and Data indications (RFC 8656 section 11) on a path that neither allocates nor copies the payload.
//!
//! An indication is written as three pieces, `header ++ payload ++ zero padding`, so that the payload can stay
//! where the kernel put it. DATA is always the last attribute.

use std::net::SocketAddr;

/// The longest header that [`write_header`] makes: STUN header 20, XOR-PEER-ADDRESS (IPv6) 24, DATA header 4.
pub const MAX_HEADER_LEN: usize = 48;

/// Which of the two indications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indication {
    /// Client to server (type 0x0016).
    Send,
    /// Server to client (type 0x0017).
    Data,
}

/// Why bytes are not an indication that can be relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndicationError {
    /// Not a STUN message, or its length field is wrong.
    #[error("not a well-formed STUN message")]
    Malformed,
    /// XOR-PEER-ADDRESS or DATA is missing.
    #[error("XOR-PEER-ADDRESS or DATA is missing")]
    Missing,
    /// A comprehension-required attribute that an indication does not have (RFC 8489 section 6.3.2).
    #[error("unknown comprehension-required attribute {0:#06x}")]
    UnknownAttribute(u16),
    /// A FINGERPRINT that does not match.
    #[error("FINGERPRINT does not match")]
    Fingerprint,
}

/// A checked view of a Send or Data indication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<'a> {
    /// XOR-PEER-ADDRESS, canonical.
    pub peer: SocketAddr,
    /// DATA, a part of the datagram that was parsed.
    pub data: &'a [u8],
    /// Whether DONT-FRAGMENT is present (Send only).
    pub dont_fragment: bool,
}

/// Whether the datagram's type and cookie say that it is this indication; [`parse`] does the rest.
#[must_use]
pub fn is(_which: Indication, _datagram: &[u8]) -> bool {
    todo!()
}

/// Parses an indication. A Data indication that carries ICMP instead of DATA is `Missing` here and goes through
/// `turn_types`.
pub fn parse(_which: Indication, _datagram: &[u8]) -> Result<View<'_>, IndicationError> {
    todo!()
}

/// Writes everything that stands before the payload and returns its length.
pub fn write_header(
    _which: Indication,
    _transaction: [u8; 12],
    _peer: SocketAddr,
    _payload_len: u16,
    _out: &mut [u8; MAX_HEADER_LEN],
) -> usize {
    todo!()
}

/// Zero bytes that stand after a payload of this length (0 to 3).
#[must_use]
pub const fn padding(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}
