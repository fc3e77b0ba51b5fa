//! STUN messages (RFC 8489): a checked view of received ones, a writer of new ones, and the only place that walks attributes. Reading
//! neither allocates nor logs, whatever the bytes; only [`ErrorCode::text`] makes a string.
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

pub use attribute::{Attribute, kind};
pub use value::{
    ErrorCode, FAMILY_IPV4, FAMILY_IPV6, address, feature, password_algorithms, security_features,
    unknown_attributes, xor_address,
};
pub use writer::Writer;

pub(crate) use attribute::{Attributes, header_ending_at};
pub(crate) use value::xored;

use std::{net::SocketAddr, num::NonZero};

use subtle::ConstantTimeEq as _;

use crate::integrity::{IntegrityError, Key, Mac};

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
    /// An attribute that reaches beyond the end, or a FINGERPRINT that is not the last one or has not four bytes.
    #[error("an attribute that cannot be")]
    Attribute,
    /// A FINGERPRINT that does not match (RFC 8489 section 14.7).
    #[error("FINGERPRINT does not match")]
    Fingerprint,
}

/// A checked message. It has its attributes in the order of the message, ending where what counts ends: at MESSAGE-INTEGRITY, at
/// MESSAGE-INTEGRITY-SHA256 or at FINGERPRINT (RFC 8489 sections 14.5 to 14.7).
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    header: Header,
    /// Where MESSAGE-INTEGRITY begins, and where MESSAGE-INTEGRITY-SHA256 does.
    sha1: Option<NonZero<u32>>,
    sha256: Option<NonZero<u32>>,
    fingerprint: bool,
    /// Where what counts ends.
    end: usize,
}

impl Header {
    /// Checks what a datagram, or one whole message of a stream, begins with: all but the attributes, which [`View::new_checked`] goes
    /// over.
    ///
    /// # Errors
    /// What is wrong first, in the order of [`Invalid`].
    #[inline]
    pub fn new_checked(bytes: &[u8]) -> Result<Self, Invalid> {
        let (header, cookie) = Self::with_cookie(bytes)?;
        if cookie == COOKIE { Ok(header) } else { Err(Invalid::Cookie) }
    }

    /// Everything but the cookie is checked.
    #[inline]
    fn with_cookie(bytes: &[u8]) -> Result<(Self, [u8; 4]), Invalid> {
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
        Ok((Self::of_type(u16::from_be_bytes([t0, t1]), transaction), [c0, c1, c2, c3]))
    }

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
    #[inline]
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
        Self::walk(bytes, Header::new_checked(bytes)?)
    }

    /// Checks a message of RFC 3489: its transaction ID has 128 bits, the first 32 of them in place of the cookie. [`Header`] has the
    /// other 96; [`Writer::finish_classic`] writes the answer.
    ///
    /// # Errors
    /// As [`View::new_checked`]; [`Invalid::Cookie`] where the cookie is there.
    pub fn new_checked_classic(bytes: &'a [u8]) -> Result<Self, Invalid> {
        match Header::with_cookie(bytes)? {
            (_, COOKIE) => Err(Invalid::Cookie),
            (header, _) => Self::walk(bytes, header),
        }
    }

    #[inline]
    fn walk(bytes: &'a [u8], header: Header) -> Result<Self, Invalid> {
        let mut view = Self { bytes, header, sha1: None, sha256: None, fingerprint: false, end: bytes.len() };
        for attribute in Attributes::of(bytes) {
            let attribute = attribute?;
            match attribute.kind {
                kind::FINGERPRINT => {
                    attribute.check_fingerprint(bytes)?;
                    view.fingerprint = true;
                }
                kind::MESSAGE_INTEGRITY if view.mac().is_none() => view.sha1 = place(attribute.offset),
                kind::MESSAGE_INTEGRITY_SHA256 if view.sha256.is_none() => {
                    view.sha256 = place(attribute.offset);
                }
                _ => continue,
            }
            view.end = view.end.min(attribute.offset);
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

    /// Which attribute authenticates it; with both, the SHA-256 one counts. [`View::verify`] looks whether it does.
    #[inline]
    #[must_use]
    pub fn mac(&self) -> Option<Mac> {
        self.sha256.map(|_| Mac::Sha256).or(self.sha1.map(|_| Mac::Sha1))
    }

    /// Verifies one of the two in constant time. It covers what stands before it, under a length field that ends with it, so that
    /// what was appended later is left out.
    ///
    /// # Errors
    /// [`IntegrityError`].
    pub fn verify(&self, key: &Key, mac: Mac) -> Result<(), IntegrityError> {
        let offset = match mac {
            Mac::Sha1 => self.sha1,
            Mac::Sha256 => self.sha256,
        };
        let offset = offset.ok_or(IntegrityError::Missing)?.get() as usize;
        let value = match Attributes::at(self.bytes, offset).next() {
            // A shorter value is for usages of STUN that allow it (RFC 8489 section 14.6), and TURN (RFC 8656) does not.
            Some(Ok(attribute)) if attribute.value.len() == mac.len() => attribute.value,
            _ => return Err(IntegrityError::Malformed),
        };
        let header = header_ending_at(self.bytes, offset + ATTRIBUTE_HEADER_LEN + mac.len());
        let right = key.mac(mac, [&header, &self.bytes[4..offset]]);
        if right[..mac.len()].ct_eq(value).into() { Ok(()) } else { Err(IntegrityError::Mismatch) }
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
        Attributes::of(&self.bytes[..self.end]).filter_map(Result::ok)
    }

    /// The values of all attributes of a type.
    #[inline]
    pub fn all(&self, kind: u16) -> impl Iterator<Item = &'a [u8]> + Clone + use<'a> {
        self.attributes().filter(move |attribute| attribute.kind == kind).map(|attribute| attribute.value)
    }

    /// The value of the first attribute of a type: of several the others do not count (RFC 8489 section 14).
    #[inline]
    #[must_use]
    pub fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.all(kind).next()
    }

    /// LIFETIME and its like; `None` also where it has not four bytes.
    #[must_use]
    pub fn number(&self, kind: u16) -> Option<u32> {
        self.get(kind)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// XOR-MAPPED-ADDRESS and its like; `None` also where it is none.
    #[must_use]
    pub fn xor_address(&self, kind: u16) -> Option<SocketAddr> {
        xor_address(self.get(kind)?, &self.header.transaction)
    }

    /// REALM and its like; `None` also where it is not UTF-8, or has more than the 763 bytes of RFC 8489 section 14.9.
    #[must_use]
    pub fn text(&self, kind: u16) -> Option<&'a str> {
        self.get(kind).filter(|value| value.len() <= 763).and_then(|value| str::from_utf8(value).ok())
    }

    /// ERROR-CODE; `None` also where it is none.
    #[must_use]
    pub fn error(&self) -> Option<ErrorCode<'a>> {
        self.get(kind::ERROR_CODE).and_then(ErrorCode::of)
    }

    /// Types of attributes that whoever does not comprehend them must not pass over (below 0x8000), in the order of the message,
    /// perhaps more than once. `comprehends` is asked for each.
    pub fn unknown(&self, comprehends: impl Fn(u16) -> bool) -> impl Iterator<Item = u16> {
        let required = self.attributes().map(|attribute| attribute.kind).filter(|kind| *kind < 0x8000);
        required.filter(move |kind| !comprehends(*kind))
    }
}

/// An offset, as small as it can be: views are handed about.
fn place(offset: usize) -> Option<NonZero<u32>> {
    u32::try_from(offset).ok().and_then(NonZero::new)
}

impl Mac {
    /// Type of its attribute.
    const fn kind(self) -> u16 {
        match self {
            Self::Sha1 => kind::MESSAGE_INTEGRITY,
            Self::Sha256 => kind::MESSAGE_INTEGRITY_SHA256,
        }
    }
}
