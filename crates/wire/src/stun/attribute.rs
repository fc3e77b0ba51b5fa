//! The walk over a message's attributes that all readers share (RFC 8489 sections 5 and 14), and what their types are called.

use super::{ATTRIBUTE_HEADER_LEN, HEADER_LEN, Invalid};

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
    /// draft-ietf-tram-stun-origin, which expired; coturn's users choose their realm by it.
    pub const ORIGIN: u16 = 0x802F;
    pub const MOBILITY_TICKET: u16 = 0x8030;
    /// The number that ADDITIONAL-ADDRESS-FAMILY had in the drafts before RFC 8656. coturn's client asks with it.
    pub const DRAFT_ADDITIONAL_ADDRESS_FAMILY: u16 = 0x8032;

    /// Whether a TURN message may have it: those of RFC 8489, RFC 8656 and RFC 6062, and all that need not be comprehended. What the
    /// other RFCs add is for whoever offers it to know.
    #[must_use]
    pub const fn is_comprehended(kind: u16) -> bool {
        kind >= 0x8000
            || matches!(
                kind,
                MAPPED_ADDRESS
                    | USERNAME
                    | MESSAGE_INTEGRITY
                    | ERROR_CODE
                    | UNKNOWN_ATTRIBUTES
                    | CHANNEL_NUMBER
                    | LIFETIME
                    | XOR_PEER_ADDRESS
                    | DATA
                    | REALM
                    | NONCE
                    | XOR_RELAYED_ADDRESS
                    | REQUESTED_ADDRESS_FAMILY
                    | EVEN_PORT
                    | REQUESTED_TRANSPORT
                    | DONT_FRAGMENT
                    | MESSAGE_INTEGRITY_SHA256
                    | PASSWORD_ALGORITHM
                    | USERHASH
                    | XOR_MAPPED_ADDRESS
                    | RESERVATION_TOKEN
                    | CONNECTION_ID
            )
    }
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
    pub(crate) is_last: bool,
}

impl Attribute<'_> {
    /// What a FINGERPRINT must be: the last attribute, and the CRC of all before it (RFC 8489 section 14.7).
    pub(crate) fn check_fingerprint(&self, message: &[u8]) -> Result<(), Invalid> {
        if self.value.len() != 4 || !self.is_last {
            return Err(Invalid::Attribute);
        }
        if self.value == fingerprint(message, self.offset) { Ok(()) } else { Err(Invalid::Fingerprint) }
    }
}

/// Walks the attributes of a message whose header has been checked. Ends after the first that reaches beyond the end.
#[derive(Clone, Debug)]
pub(crate) struct Attributes<'a> {
    rest: &'a [u8],
    /// Of the rest, in the message.
    offset: usize,
}

impl<'a> Attributes<'a> {
    #[inline]
    pub(crate) fn of(message: &'a [u8]) -> Self {
        Self::at(message, HEADER_LEN)
    }

    /// From this one on.
    #[inline]
    pub(super) fn at(message: &'a [u8], offset: usize) -> Self {
        Self { rest: message.get(offset..).unwrap_or_default(), offset }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>, Invalid>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        // Lengths of messages are multiples of four, so that what is shorter is nothing.
        let [k0, k1, l0, l1, rest @ ..] = self.rest else { return None };
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        let padded = (length + 3) & !3;
        let Some((value, rest)) = rest.split_at_checked(padded) else {
            self.rest = &[];
            return Some(Err(Invalid::Attribute));
        };
        let attribute = Attribute {
            offset: self.offset,
            kind: u16::from_be_bytes([*k0, *k1]),
            value: &value[..length],
            is_last: rest.is_empty(),
        };
        self.rest = rest;
        self.offset += ATTRIBUTE_HEADER_LEN + padded;
        Some(Ok(attribute))
    }
}

/// What FINGERPRINT must hold when its header begins at `offset` (RFC 8489 section 14.7): the CRC-32 of everything
/// before it under a length field that ends with it.
pub(super) fn fingerprint(message: &[u8], offset: usize) -> [u8; 4] {
    const XOR: u32 = 0x5354_554E;
    static CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
    let mut digest = CRC.digest();
    digest.update(&header_ending_at(message, offset + ATTRIBUTE_HEADER_LEN + 4));
    digest.update(&message[4..offset]);
    (digest.finalize() ^ XOR).to_be_bytes()
}

/// The first four bytes of a message, with the length field of one that ends at `end`.
///
/// A message cannot be longer than its length field can say; one that is gets the longest possible length, which is
/// wrong for any receiver, but never a short one that would make a stream's remainder look like the next message.
pub(crate) fn header_ending_at(message: &[u8], end: usize) -> [u8; 4] {
    let [high, low] = u16::try_from(end - HEADER_LEN).unwrap_or(0xFFFC).to_be_bytes();
    [message[0], message[1], high, low]
}
