//! Iteration over the attributes of a message (RFC 8489 sections 5 and 14), and their types.

use super::{ATTRIBUTE_HEADER_LEN, HEADER_LEN, Invalid};

/// Attribute types of RFC 8489 section 18.3, RFC 8656 section 18, RFC 6062 section 6.2, RFC 5780 section 7,
/// RFC 7635 section 6, RFC 8016 section 3.3, RFC 8445 section 16.1.
pub mod kind {
    use std::fmt;

    macro_rules! kinds {
        ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
            $($(#[$doc])* pub const $name: u16 = $value;)*

            /// Displays the RFC name, or the number if unknown.
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub struct Name(pub u16);

            impl fmt::Display for Name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    match self.0 {
                        $($value => f.write_str(&stringify!($name).replace('_', "-")),)*
                        other => write!(f, "0x{other:04x}"),
                    }
                }
            }
        };
    }

    kinds! {
        MAPPED_ADDRESS = 0x0001;
        CHANGE_REQUEST = 0x0003;
        USERNAME = 0x0006;
        MESSAGE_INTEGRITY = 0x0008;
        ERROR_CODE = 0x0009;
        UNKNOWN_ATTRIBUTES = 0x000A;
        CHANNEL_NUMBER = 0x000C;
        LIFETIME = 0x000D;
        XOR_PEER_ADDRESS = 0x0012;
        DATA = 0x0013;
        REALM = 0x0014;
        NONCE = 0x0015;
        XOR_RELAYED_ADDRESS = 0x0016;
        REQUESTED_ADDRESS_FAMILY = 0x0017;
        EVEN_PORT = 0x0018;
        REQUESTED_TRANSPORT = 0x0019;
        DONT_FRAGMENT = 0x001A;
        ACCESS_TOKEN = 0x001B;
        MESSAGE_INTEGRITY_SHA256 = 0x001C;
        PASSWORD_ALGORITHM = 0x001D;
        USERHASH = 0x001E;
        XOR_MAPPED_ADDRESS = 0x0020;
        RESERVATION_TOKEN = 0x0022;
        PRIORITY = 0x0024;
        USE_CANDIDATE = 0x0025;
        PADDING = 0x0026;
        RESPONSE_PORT = 0x0027;
        CONNECTION_ID = 0x002A;
        ADDITIONAL_ADDRESS_FAMILY = 0x8000;
        ADDRESS_ERROR_CODE = 0x8001;
        PASSWORD_ALGORITHMS = 0x8002;
        ALTERNATE_DOMAIN = 0x8003;
        ICMP = 0x8004;
        SOFTWARE = 0x8022;
        ALTERNATE_SERVER = 0x8023;
        FINGERPRINT = 0x8028;
        ICE_CONTROLLED = 0x8029;
        ICE_CONTROLLING = 0x802A;
        RESPONSE_ORIGIN = 0x802B;
        OTHER_ADDRESS = 0x802C;
        THIRD_PARTY_AUTHORIZATION = 0x802E;
        /// draft-ietf-tram-stun-origin (expired). coturn selects the realm by this attribute.
        ORIGIN = 0x802F;
        MOBILITY_TICKET = 0x8030;
        /// Code point of ADDITIONAL-ADDRESS-FAMILY in the drafts of RFC 8656, used by coturn's client.
        DRAFT_ADDITIONAL_ADDRESS_FAMILY = 0x8032;
    }

    /// Returns true for the attributes of RFC 8489, RFC 8656 and RFC 6062, and for all comprehension-optional
    /// ones.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Offset of the attribute's header in the message.
    pub offset: usize,
    pub kind: u16,
    pub value: &'a [u8],
    /// True if the message ends after this attribute.
    pub(crate) is_last: bool,
}

impl Attribute<'_> {
    /// FINGERPRINT must be last and match everything before it (RFC 8489 section 14.7).
    pub(crate) fn check_fingerprint(&self, message: &[u8]) -> Result<(), Invalid> {
        if self.value.len() != 4 || !self.is_last {
            return Err(Invalid::Attribute);
        }
        if self.value == fingerprint(message, self.offset) { Ok(()) } else { Err(Invalid::Fingerprint) }
    }
}

/// Iterator over attributes; ends after the first one that extends beyond the message.
#[derive(Clone, Debug)]
pub(crate) struct Attributes<'a> {
    rest: &'a [u8],
    offset: usize,
}

impl<'a> Attributes<'a> {
    #[inline]
    pub(crate) fn of(message: &'a [u8]) -> Self {
        Self::at(message, HEADER_LEN)
    }

    #[inline]
    pub(super) fn at(message: &'a [u8], offset: usize) -> Self {
        Self { rest: message.get(offset..).unwrap_or_default(), offset }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>, Invalid>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        // Message lengths are multiples of four, so nothing is left if there are fewer than four bytes.
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

/// CRC-32 of everything before `offset`, with a length field that ends after the attribute.
pub(super) fn fingerprint(message: &[u8], offset: usize) -> [u8; 4] {
    const XOR: u32 = 0x5354_554E;
    static CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
    let mut digest = CRC.digest();
    digest.update(&header_ending_at(message, offset + ATTRIBUTE_HEADER_LEN + 4));
    digest.update(&message[4..offset]);
    (digest.finalize() ^ XOR).to_be_bytes()
}

/// A message too long for the length field gets the maximum length, which any receiver rejects. A wrapped
/// short length would make the rest of a stream look like the next message.
pub(crate) fn header_ending_at(message: &[u8], end: usize) -> [u8; 4] {
    let [high, low] = u16::try_from(end - HEADER_LEN).unwrap_or(0xFFFC).to_be_bytes();
    [message[0], message[1], high, low]
}
