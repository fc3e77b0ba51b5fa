//! Send and Data indications (RFC 8656 section 11) on a path that neither allocates nor copies the payload.
//!
//! An indication is written as three pieces, `header ++ payload ++ zero padding`, so that the payload can stay
//! where the kernel put it. DATA is always the last attribute.

use std::net::{IpAddr, SocketAddr};

use crate::address::canonical;
use crate::attributes::{
    ATTRIBUTE_HEADER_LEN, Attribute, Attributes, COOKIE, HEADER_LEN, Malformed, fingerprint,
    header_ending_at, kind,
};

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
    /// Not this indication, a wrong length field, or an attribute that cannot be.
    #[error("not a well-formed STUN message")]
    Malformed,
    /// XOR-PEER-ADDRESS or DATA is missing.
    #[error("XOR-PEER-ADDRESS or DATA is missing")]
    Missing,
    /// A comprehension-required attribute that turnpike does not know; the whole indication is to be dropped
    /// (RFC 8489 section 6.3.2).
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

/// The longest payload that an indication's 16-bit length field has room for, whatever the address family. Longer
/// than any that fits into a UDP datagram with its header; on a stream the caller must drop what is longer.
pub const MAX_PAYLOAD_LEN: u16 = 0xFFFC - 28;
const _: () = assert!(MAX_HEADER_LEN - HEADER_LEN == 28, "what the length field counts before the payload");

/// Whether the datagram's type and cookie say that it is this indication; [`parse`] does the rest.
#[inline]
#[must_use]
pub fn is(which: Indication, datagram: &[u8]) -> bool {
    let [t0, t1, _, _, c0, c1, c2, c3, ..] = datagram else { return false };
    [*t0, *t1] == which.message_type() && [*c0, *c1, *c2, *c3] == COOKIE
}

/// Parses an indication. A Data indication that carries ICMP instead of DATA is `Missing` here and goes through
/// `turn_types`.
///
/// Attributes may stand in any order; of several alike the first counts (RFC 8489 section 14). What follows a
/// MESSAGE-INTEGRITY is ignored (section 14.5), known attributes that mean nothing here are too (section 6.3).
/// FINGERPRINT, if there is one, must be the last attribute and match.
pub fn parse(which: Indication, datagram: &[u8]) -> Result<View<'_>, IndicationError> {
    if !is(which, datagram) {
        return Err(IndicationError::Malformed);
    }
    let mut peer = None;
    let mut data = None;
    let mut dont_fragment = false;
    let mut integrity_seen = false;
    for attribute in Attributes::of(datagram)? {
        let attribute = attribute?;
        match attribute.kind {
            kind::FINGERPRINT => check_fingerprint(datagram, &attribute)?,
            _ if integrity_seen => {}
            kind::XOR_PEER_ADDRESS if peer.is_none() => {
                peer = Some(xor_address(attribute.value, datagram).ok_or(IndicationError::Malformed)?);
            }
            kind::DATA if data.is_none() => data = Some(attribute.value),
            kind::DONT_FRAGMENT if attribute.value.is_empty() => dont_fragment = which == Indication::Send,
            kind::DONT_FRAGMENT => return Err(IndicationError::Malformed),
            kind::MESSAGE_INTEGRITY | kind::MESSAGE_INTEGRITY_SHA256 => integrity_seen = true,
            other if comprehended(other) => {}
            unknown => return Err(IndicationError::UnknownAttribute(unknown)),
        }
    }
    let peer = peer.ok_or(IndicationError::Missing)?;
    let data = data.ok_or(IndicationError::Missing)?;
    Ok(View { peer, data, dont_fragment })
}

/// Writes everything that stands before the payload and returns its length.
///
/// ```text
///  0        4        8             20                     32 or 44         +4
///  ┌────────┬────────┬─────────────┬──────────────────────┬─────────────────┐
///  │ type,  │ cookie │ transaction │ XOR-PEER-ADDRESS,    │ DATA type and   │ payload, padding
///  │ length │        │             │ IPv4 12, IPv6 24     │ length          │
///  └────────┴────────┴─────────────┴──────────────────────┴─────────────────┘
/// ```
///
/// An IPv4-mapped `peer` is written as the IPv4 address it stands for. `payload_len` is at most [`MAX_PAYLOAD_LEN`];
/// beyond it the header's length field stays at its maximum.
pub fn write_header(
    which: Indication,
    transaction: [u8; 12],
    peer: SocketAddr,
    payload_len: u16,
    out: &mut [u8; MAX_HEADER_LEN],
) -> usize {
    out[0..2].copy_from_slice(&which.message_type());
    out[4..8].copy_from_slice(&COOKIE);
    out[8..20].copy_from_slice(&transaction);

    out[20..22].copy_from_slice(&kind::XOR_PEER_ADDRESS.to_be_bytes());
    let peer = canonical(peer);
    let [p0, p1] = peer.port().to_be_bytes();
    let port = [p0 ^ COOKIE[0], p1 ^ COOKIE[1]];
    let data_at = match peer.ip() {
        IpAddr::V4(ip) => {
            out[22..26].copy_from_slice(&[0, XOR_IPV4_LEN, 0, FAMILY_IPV4]);
            out[28..32].copy_from_slice(&xor(ip.octets(), &COOKIE));
            32
        }
        IpAddr::V6(ip) => {
            out[22..26].copy_from_slice(&[0, XOR_IPV6_LEN, 0, FAMILY_IPV6]);
            let mask: [u8; 16] = std::array::from_fn(|at| out[4 + at]);
            out[28..44].copy_from_slice(&xor(ip.octets(), &mask));
            44
        }
    };
    out[26..28].copy_from_slice(&port);

    out[data_at..data_at + 2].copy_from_slice(&kind::DATA.to_be_bytes());
    out[data_at + 2..data_at + 4].copy_from_slice(&payload_len.to_be_bytes());
    let header_len = data_at + ATTRIBUTE_HEADER_LEN;

    let end = header_len + usize::from(payload_len).next_multiple_of(4);
    let first = header_ending_at(out, end);
    out[0..4].copy_from_slice(&first);
    header_len
}

/// Zero bytes that stand after a payload of this length (0 to 3).
#[must_use]
pub const fn padding(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

const FAMILY_IPV4: u8 = 0x01;
const FAMILY_IPV6: u8 = 0x02;
const XOR_IPV4_LEN: u8 = 8;
const XOR_IPV6_LEN: u8 = 20;

impl Indication {
    const fn message_type(self) -> [u8; 2] {
        match self {
            Self::Send => [0x00, 0x16],
            Self::Data => [0x00, 0x17],
        }
    }
}

impl From<Malformed> for IndicationError {
    fn from(Malformed: Malformed) -> Self {
        Self::Malformed
    }
}

/// The value of an XOR-…-ADDRESS attribute (RFC 8489 section 14.2), canonical. Its first byte is reserved, and
/// receivers must ignore it.
fn xor_address(value: &[u8], message: &[u8]) -> Option<SocketAddr> {
    let (mask, _) = message.get(4..)?.split_first_chunk::<16>()?;
    let [_, family, p0, p1, ip @ ..] = value else { return None };
    let port = u16::from_be_bytes([p0 ^ mask[0], p1 ^ mask[1]]);
    let ip = match *family {
        FAMILY_IPV4 => IpAddr::from(xor(<[u8; 4]>::try_from(ip).ok()?, mask)),
        FAMILY_IPV6 => IpAddr::from(xor(<[u8; 16]>::try_from(ip).ok()?, mask)),
        _ => return None,
    };
    Some(canonical(SocketAddr::new(ip, port)))
}

fn xor<const N: usize>(mut bytes: [u8; N], mask: &[u8]) -> [u8; N] {
    for (byte, mask) in bytes.iter_mut().zip(mask) {
        *byte ^= mask;
    }
    bytes
}

fn check_fingerprint(datagram: &[u8], attribute: &Attribute<'_>) -> Result<(), IndicationError> {
    if attribute.value.len() != 4 || !attribute.is_last {
        return Err(IndicationError::Malformed);
    }
    if attribute.value == fingerprint(datagram, attribute.offset) {
        Ok(())
    } else {
        Err(IndicationError::Fingerprint)
    }
}

/// Attributes that may be ignored where they mean nothing: the comprehension-optional ones, and the
/// comprehension-required ones that turnpike knows.
const fn comprehended(kind: u16) -> bool {
    kind >= 0x8000
        || matches!(
            kind,
            kind::MAPPED_ADDRESS
                | kind::USERNAME
                | kind::MESSAGE_INTEGRITY
                | kind::ERROR_CODE
                | kind::UNKNOWN_ATTRIBUTES
                | kind::CHANNEL_NUMBER
                | kind::LIFETIME
                | kind::XOR_PEER_ADDRESS
                | kind::DATA
                | kind::REALM
                | kind::NONCE
                | kind::XOR_RELAYED_ADDRESS
                | kind::REQUESTED_ADDRESS_FAMILY
                | kind::EVEN_PORT
                | kind::REQUESTED_TRANSPORT
                | kind::DONT_FRAGMENT
                | kind::MESSAGE_INTEGRITY_SHA256
                | kind::PASSWORD_ALGORITHM
                | kind::USERHASH
                | kind::XOR_MAPPED_ADDRESS
                | kind::RESERVATION_TOKEN
                | kind::CONNECTION_ID
        )
}
