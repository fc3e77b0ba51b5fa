//! STUN messages (RFC 8489): a checked view of received ones, a writer of new ones. Nothing here allocates or logs, whatever the bytes.
//!
//! ```text
//!  0      2        4        8               20
//!  ┌──────┬────────┬────────┬───────────────┬───────────────────────────────────┐
//!  │ type │ length │ cookie │ transaction   │ attributes: type, length, value,  │
//!  │      │        │        │               │ padding to a multiple of four     │
//!  └──────┴────────┴────────┴───────────────┴───────────────────────────────────┘
//! ```
//!
//! [`View::new_checked`] goes once over the whole message; what it has accepted can be asked without any further error. What a method
//! means, and which attributes it needs, is for others to know.

mod attribute;
mod value;
mod writer;

pub use attribute::{Attribute, Attributes, Malformed, kind};
pub use value::{ErrorCode, address, unknown_attributes, xor_address};
pub use writer::Writer;

pub(crate) use attribute::{fingerprint, header_ending_at};
pub(crate) use value::{FAMILY_IPV4, FAMILY_IPV6, xored};

use crate::integrity::Mac;

/// Bytes before the first attribute.
pub const HEADER_LEN: usize = 20;
/// Bytes before an attribute's value.
pub const ATTRIBUTE_HEADER_LEN: usize = 4;
/// The magic cookie.
pub const COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];

/// The 96 bits by which an answer finds its request.
pub type Transaction = [u8; 12];

/// What a message is for (RFC 8489 section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Wants an answer.
    Request,
    /// Wants none.
    Indication,
    /// Of what was asked for.
    Success,
    /// With ERROR-CODE.
    Error,
}

/// Numbers of methods (RFC 8489 section 18.2, RFC 8656 section 17, RFC 6062 section 6.1).
pub mod method {
    /// Binding.
    pub const BINDING: u16 = 0x001;
    /// Allocate.
    pub const ALLOCATE: u16 = 0x003;
    /// Refresh.
    pub const REFRESH: u16 = 0x004;
    /// Send, an indication.
    pub const SEND: u16 = 0x006;
    /// Data, an indication.
    pub const DATA: u16 = 0x007;
    /// CreatePermission.
    pub const CREATE_PERMISSION: u16 = 0x008;
    /// ChannelBind.
    pub const CHANNEL_BIND: u16 = 0x009;
    /// Connect.
    pub const CONNECT: u16 = 0x00A;
    /// ConnectionBind.
    pub const CONNECTION_BIND: u16 = 0x00B;
    /// ConnectionAttempt, an indication.
    pub const CONNECTION_ATTEMPT: u16 = 0x00C;
}

/// What the header says but for the length: all that there is to know of a message without attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Its purpose.
    pub class: Class,
    /// Twelve bits; [`method`] has those of TURN.
    pub method: u16,
    /// Whose answer it is, or will be.
    pub transaction: Transaction,
}

/// Why bytes are no STUN message. Each is a reason to count, none is worth a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Invalid {
    /// The first two bits are not zero: another protocol at the same port (RFC 7983).
    #[error("not STUN")]
    NotStun,
    /// Shorter than a header, or than its length field says.
    #[error("cut short")]
    Truncated,
    /// Longer than its length field says, or that is no multiple of four.
    #[error("a length that cannot be")]
    Length,
    /// No cookie: RFC 3489, or none of the STUN protocols.
    #[error("no magic cookie")]
    Cookie,
    /// An attribute that reaches beyond the end.
    #[error("an attribute beyond the end")]
    Attribute,
    /// A FINGERPRINT that does not match, or is not the last attribute (RFC 8489 section 14.7).
    #[error("FINGERPRINT does not match")]
    Fingerprint,
}

/// A checked message. It has its attributes in the order of the message, ending where what counts ends: at MESSAGE-INTEGRITY, at
/// MESSAGE-INTEGRITY-SHA256 or at FINGERPRINT (RFC 8489 sections 14.5 to 14.7).
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    header: Header,
    mac: Option<Mac>,
    fingerprint: bool,
    /// Where what counts ends.
    end: usize,
}

impl Header {
    /// The two bytes of type, in which class and method are interleaved (RFC 8489 section 5).
    ///
    /// ```text
    ///   0 0 M11 M10 M9 M8 M7 C1 M6 M5 M4 C0 M3 M2 M1 M0
    /// ```
    #[must_use]
    pub const fn message_type(self) -> u16 {
        let class = match self.class {
            Class::Request => 0x0000,
            Class::Indication => 0x0010,
            Class::Success => 0x0100,
            Class::Error => 0x0110,
        };
        class | self.method & 0x000F | (self.method & 0x0070) << 1 | (self.method & 0x0F80) << 2
    }

    /// The opposite of [`Header::message_type`], of a type whose two top bits are zero.
    #[must_use]
    pub const fn of_type(message_type: u16, transaction: Transaction) -> Self {
        let class = match message_type & 0x0110 {
            0x0000 => Class::Request,
            0x0010 => Class::Indication,
            0x0100 => Class::Success,
            _ => Class::Error,
        };
        let method = message_type & 0x000F | (message_type & 0x00E0) >> 1 | (message_type & 0x3E00) >> 2;
        Self { class, method, transaction }
    }

    /// Of the answer to a request with this header.
    #[must_use]
    pub const fn answered(self, class: Class) -> Self {
        Self { class, ..self }
    }
}

impl<'a> View<'a> {
    /// Checks a datagram, or one whole message of a stream.
    ///
    /// # Errors
    /// What is wrong first, in the order of [`Invalid`].
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, Invalid> {
        let mut view = Self::with_header(bytes)?;
        for attribute in Attributes::behind_header(bytes) {
            let Attribute { offset, kind, value, is_last } = attribute.map_err(|_| Invalid::Attribute)?;
            match kind {
                kind::FINGERPRINT => {
                    if !is_last || *value != fingerprint(bytes, offset) {
                        return Err(Invalid::Fingerprint);
                    }
                    view.fingerprint = true;
                }
                kind::MESSAGE_INTEGRITY if view.mac.is_none() => view.mac = Some(Mac::Sha1),
                kind::MESSAGE_INTEGRITY_SHA256 => view.mac = Some(Mac::Sha256),
                _ => continue,
            }
            view.end = view.end.min(offset);
        }
        Ok(view)
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> Header {
        self.header
    }

    /// The whole message.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The attribute that authenticates it; with both, the SHA-256 one counts. [`crate::integrity::verify`] looks whether it does.
    #[must_use]
    pub fn mac(&self) -> Option<Mac> {
        self.mac
    }

    /// Whether it carries a FINGERPRINT, which then is right. Who asks with one wants an answer with one.
    #[must_use]
    pub fn has_fingerprint(&self) -> bool {
        self.fingerprint
    }

    /// The attributes that count, the ones that authenticate not among them.
    #[inline]
    pub fn attributes(&self) -> impl Iterator<Item = Attribute<'a>> + Clone + use<'a> {
        // Up to here all of them were good once.
        Attributes::behind_header(&self.bytes[..self.end]).filter_map(Result::ok)
    }

    /// The value of the first attribute of a type: of several the others do not count (RFC 8489 section 14).
    #[inline]
    #[must_use]
    pub fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.attributes().find(|attribute| attribute.kind == kind).map(|attribute| attribute.value)
    }

    /// Types of attributes that whoever does not comprehend them must not pass over (below 0x8000), in the order of the message,
    /// perhaps more than once. `comprehends` is asked for each.
    pub fn unknown(&self, comprehends: impl Fn(u16) -> bool) -> impl Iterator<Item = u16> {
        let required = self.attributes().map(|attribute| attribute.kind).filter(|kind| *kind < 0x8000);
        required.filter(move |kind| !comprehends(*kind))
    }

    fn with_header(bytes: &'a [u8]) -> Result<Self, Invalid> {
        if bytes.first().is_some_and(|first| first & 0xC0 != 0) {
            return Err(Invalid::NotStun);
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(Invalid::Truncated);
        };
        let [t0, t1, l0, l1, c0, c1, c2, c3, transaction @ ..] = *header;
        let length = usize::from(u16::from_be_bytes([l0, l1]));
        if rest.len() < length {
            return Err(Invalid::Truncated);
        }
        if rest.len() != length || !length.is_multiple_of(4) {
            return Err(Invalid::Length);
        }
        if [c0, c1, c2, c3] != COOKIE {
            return Err(Invalid::Cookie);
        }
        let header = Header::of_type(u16::from_be_bytes([t0, t1]), transaction);
        Ok(Self { bytes, header, mac: None, fingerprint: false, end: bytes.len() })
    }
}
