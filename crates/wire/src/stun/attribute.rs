//! The walk over a message's attributes that all readers share (RFC 8489 sections 5 and 14), and what their types are called.

use super::{ATTRIBUTE_HEADER_LEN, COOKIE, HEADER_LEN};

/// Attribute types (RFC 8489 section 18.3, RFC 8656 section 18, RFC 6062 section 6.2, RFC 5780 section 7, RFC 7635 section 6, RFC 8016
/// section 3.3, RFC 8445 section 16.1). Those from 0x8000 on may be passed over by whoever does not know them.
#[expect(missing_docs, reason = "the RFCs' names")]
pub mod kind {
    pub const MAPPED_ADDRESS: u16 = 0x0001;
    pub const CHANGE_REQUEST: u16 = 0x0003;
    pub const USERNAME: u16 = 0x0006;
    pub const MESSAGE_INTEGRITY: u16 = 0x0008;
    pub const ERROR_CODE: u16 = 0x0009;
    pub const UNKNOWN_ATTRIBUTES: u16 = 0x000A;
    pub const CHANNEL_NUMBER: u16 = 0x000C;
    pub const LIFETIME: u16 = 0x000D;
    pub const XOR_PEER_ADDRESS: u16 = 0x0012;
    pub const DATA: u16 = 0x0013;
    pub const REALM: u16 = 0x0014;
    pub const NONCE: u16 = 0x0015;
    pub const XOR_RELAYED_ADDRESS: u16 = 0x0016;
    pub const REQUESTED_ADDRESS_FAMILY: u16 = 0x0017;
    pub const EVEN_PORT: u16 = 0x0018;
    pub const REQUESTED_TRANSPORT: u16 = 0x0019;
    pub const DONT_FRAGMENT: u16 = 0x001A;
    pub const ACCESS_TOKEN: u16 = 0x001B;
    pub const MESSAGE_INTEGRITY_SHA256: u16 = 0x001C;
    pub const PASSWORD_ALGORITHM: u16 = 0x001D;
    pub const USERHASH: u16 = 0x001E;
    pub const XOR_MAPPED_ADDRESS: u16 = 0x0020;
    pub const RESERVATION_TOKEN: u16 = 0x0022;
    pub const PRIORITY: u16 = 0x0024;
    pub const USE_CANDIDATE: u16 = 0x0025;
    pub const PADDING: u16 = 0x0026;
    pub const RESPONSE_PORT: u16 = 0x0027;
    pub const CONNECTION_ID: u16 = 0x002A;
    pub const ADDITIONAL_ADDRESS_FAMILY: u16 = 0x8000;
    pub const ADDRESS_ERROR_CODE: u16 = 0x8001;
    pub const PASSWORD_ALGORITHMS: u16 = 0x8002;
    pub const ALTERNATE_DOMAIN: u16 = 0x8003;
    pub const ICMP: u16 = 0x8004;
    pub const SOFTWARE: u16 = 0x8022;
    pub const ALTERNATE_SERVER: u16 = 0x8023;
    pub const FINGERPRINT: u16 = 0x8028;
    pub const ICE_CONTROLLED: u16 = 0x8029;
    pub const ICE_CONTROLLING: u16 = 0x802A;
    pub const RESPONSE_ORIGIN: u16 = 0x802B;
    pub const OTHER_ADDRESS: u16 = 0x802C;
    pub const THIRD_PARTY_AUTHORIZATION: u16 = 0x802E;
    pub const MOBILITY_TICKET: u16 = 0x8030;
}

/// One attribute in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Where its header begins, counted from the start of the message.
    pub offset: usize,
    /// Its type; [`kind`] has names.
    pub kind: u16,
    /// Without padding.
    pub value: &'a [u8],
    /// Whether the message ends after it.
    pub is_last: bool,
}

/// The bytes are no STUN message, or an attribute reaches beyond the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Checks the header of a message and walks its attributes. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Attributes<'a> {
    message: &'a [u8],
    offset: usize,
}

impl<'a> Attributes<'a> {
    /// The two top bits must be zero, the cookie right, and the length field that of the bytes at hand, a multiple
    /// of four (RFC 8489 section 5).
    #[inline]
    pub(crate) fn of(message: &'a [u8]) -> Result<Self, Malformed> {
        let [first, _, high, low, c0, c1, c2, c3, ..] = message else { return Err(Malformed) };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        let well_formed = first & 0xC0 == 0
            && [*c0, *c1, *c2, *c3] == COOKIE
            && message.len() == HEADER_LEN + length
            && length & 3 == 0;
        if well_formed { Ok(Self::behind_header(message)) } else { Err(Malformed) }
    }

    /// Of a message whose header has been checked.
    #[inline]
    pub(super) fn behind_header(message: &'a [u8]) -> Self {
        Self { message, offset: HEADER_LEN }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>, Malformed>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let offset = self.offset;
        let [k0, k1, l0, l1, rest @ ..] = self.message.get(offset..)? else {
            // `offset` and the length of the message are multiples of four, so that nothing is left here.
            return None;
        };
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        let padded = length.next_multiple_of(4);
        if padded > rest.len() {
            self.offset = self.message.len();
            return Some(Err(Malformed));
        }
        self.offset = offset + ATTRIBUTE_HEADER_LEN + padded;
        Some(Ok(Attribute {
            offset,
            kind: u16::from_be_bytes([*k0, *k1]),
            value: &rest[..length],
            is_last: padded == rest.len(),
        }))
    }
}

/// What FINGERPRINT must hold when its header begins at `offset` (RFC 8489 section 14.7): the CRC-32 of everything
/// before it under a length field that ends with it.
pub(crate) fn fingerprint(message: &[u8], offset: usize) -> [u8; 4] {
    const XOR: u32 = 0x5354_554E;
    let header = header_ending_at(message, offset + ATTRIBUTE_HEADER_LEN + 4);
    let crc = stun_types::attribute::Fingerprint::compute(&[&header, &message[4..offset]]);
    (u32::from_be_bytes(crc) ^ XOR).to_be_bytes()
}

/// The first four bytes of a message, with the length field of one that ends at `end`.
///
/// A message cannot be longer than its length field can say; one that is gets the longest possible length, which is
/// wrong for any receiver, but never a short one that would make a stream's remainder look like the next message.
pub(crate) fn header_ending_at(message: &[u8], end: usize) -> [u8; 4] {
    let [high, low] = u16::try_from(end - HEADER_LEN).unwrap_or(0xFFFC).to_be_bytes();
    [message[0], message[1], high, low]
}
