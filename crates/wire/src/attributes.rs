//! The walk over a STUN message's attributes that the indications and the message integrity share
//! (RFC 8489 sections 5 and 14). Strict, bounded by the message, and without allocation.
//!
//! ```text
//!  0      2        4        8               20
//!  ┌──────┬────────┬────────┬───────────────┬───────────────────────────────────┐
//!  │ type │ length │ cookie │ transaction   │ attributes: type, length, value,  │
//!  │      │        │        │               │ padding to a multiple of four     │
//!  └──────┴────────┴────────┴───────────────┴───────────────────────────────────┘
//! ```

/// Bytes before the first attribute.
pub(crate) const HEADER_LEN: usize = 20;
/// Bytes before an attribute's value.
pub(crate) const ATTRIBUTE_HEADER_LEN: usize = 4;
/// The magic cookie.
pub(crate) const COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];

/// Attribute types (RFC 8489 section 18.3, RFC 8656 section 18, RFC 6062 section 6.2).
pub(crate) mod kind {
    pub(crate) const MAPPED_ADDRESS: u16 = 0x0001;
    pub(crate) const USERNAME: u16 = 0x0006;
    pub(crate) const MESSAGE_INTEGRITY: u16 = 0x0008;
    pub(crate) const ERROR_CODE: u16 = 0x0009;
    pub(crate) const UNKNOWN_ATTRIBUTES: u16 = 0x000A;
    pub(crate) const CHANNEL_NUMBER: u16 = 0x000C;
    pub(crate) const LIFETIME: u16 = 0x000D;
    pub(crate) const XOR_PEER_ADDRESS: u16 = 0x0012;
    pub(crate) const DATA: u16 = 0x0013;
    pub(crate) const REALM: u16 = 0x0014;
    pub(crate) const NONCE: u16 = 0x0015;
    pub(crate) const XOR_RELAYED_ADDRESS: u16 = 0x0016;
    pub(crate) const REQUESTED_ADDRESS_FAMILY: u16 = 0x0017;
    pub(crate) const EVEN_PORT: u16 = 0x0018;
    pub(crate) const REQUESTED_TRANSPORT: u16 = 0x0019;
    pub(crate) const DONT_FRAGMENT: u16 = 0x001A;
    pub(crate) const MESSAGE_INTEGRITY_SHA256: u16 = 0x001C;
    pub(crate) const PASSWORD_ALGORITHM: u16 = 0x001D;
    pub(crate) const USERHASH: u16 = 0x001E;
    pub(crate) const XOR_MAPPED_ADDRESS: u16 = 0x0020;
    pub(crate) const RESERVATION_TOKEN: u16 = 0x0022;
    pub(crate) const CONNECTION_ID: u16 = 0x002A;
    pub(crate) const FINGERPRINT: u16 = 0x8028;
}

/// One attribute in its message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attribute<'a> {
    /// Where its header begins, counted from the start of the message.
    pub(crate) offset: usize,
    pub(crate) kind: u16,
    /// Without padding.
    pub(crate) value: &'a [u8],
    /// Whether the message ends after it.
    pub(crate) is_last: bool,
}

/// The bytes are no STUN message, or an attribute reaches beyond the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Checks the header of a message and walks its attributes. Ends after the first error.
#[derive(Clone, Debug)]
pub(crate) struct Attributes<'a> {
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
        if well_formed { Ok(Self { message, offset: HEADER_LEN }) } else { Err(Malformed) }
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
