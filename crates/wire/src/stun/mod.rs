//! STUN messages (RFC 8489): a checked view and a writer. This is the only code that iterates over
//! attributes. Reading neither allocates nor logs, whatever the bytes; only [`ErrorCode::text`] allocates.
//!
//! ```text
//!  0      2        4        8               20
//!  ┌──────┬────────┬────────┬───────────────┬───────────────────────────────────┐
//!  │ type │ length │ cookie │ transaction   │ attributes: type, length, value,  │
//!  │      │        │        │               │ padding to a multiple of four     │
//!  └──────┴────────┴────────┴───────────────┴───────────────────────────────────┘
//! ```
//!
//! [`View::new_checked`] checks the whole message once, after which accessors cannot fail. The meaning of
//! each method and its required attributes are up to the callers.

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

pub const HEADER_LEN: usize = 20;
pub const ATTRIBUTE_HEADER_LEN: usize = 4;
pub const COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];

/// Transaction ID: 96 bits that match a response to its request.
pub type Transaction = [u8; 12];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Request,
    Indication,
    Success,
    Error,
}

pub mod method {
    pub const BINDING: u16 = 0x001;
    pub const ALLOCATE: u16 = 0x003;
    pub const REFRESH: u16 = 0x004;
    pub const SEND: u16 = 0x006;
    pub const DATA: u16 = 0x007;
    pub const CREATE_PERMISSION: u16 = 0x008;
    pub const CHANNEL_BIND: u16 = 0x009;
    pub const CONNECT: u16 = 0x00A;
    pub const CONNECTION_BIND: u16 = 0x00B;
    pub const CONNECTION_ATTEMPT: u16 = 0x00C;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    pub class: Class,
    /// Method number, twelve bits.
    pub method: u16,
    pub transaction: Transaction,
}

/// Callers count invalid messages and do not log them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Invalid {
    /// The first two bits are not zero: another protocol on the same port (RFC 7983).
    #[error("not STUN")]
    NotStun,
    #[error("truncated")]
    Truncated,
    /// Longer than its length field, or a length that is not a multiple of four.
    #[error("invalid length")]
    Length,
    #[error("no magic cookie")]
    Cookie,
    /// An attribute extends beyond the end, or FINGERPRINT is not last or not four bytes long.
    #[error("invalid attribute")]
    Attribute,
    #[error("FINGERPRINT does not match")]
    Fingerprint,
}

/// Checked message. Its visible attributes are those before the first MESSAGE-INTEGRITY,
/// MESSAGE-INTEGRITY-SHA256 or FINGERPRINT.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    header: Header,
    /// Offsets of MESSAGE-INTEGRITY and MESSAGE-INTEGRITY-SHA256.
    sha1: Option<NonZero<u32>>,
    sha256: Option<NonZero<u32>>,
    fingerprint: bool,
    /// End of the visible attributes.
    end: usize,
}

impl Header {
    /// Checks everything but the attributes, which [`View::new_checked`] checks too.
    #[inline]
    pub fn new_checked(bytes: &[u8]) -> Result<Self, Invalid> {
        let (header, cookie) = Self::with_cookie(bytes)?;
        if cookie == COOKIE { Ok(header) } else { Err(Invalid::Cookie) }
    }

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

    /// Class and method bits are interleaved (RFC 8489 section 5).
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

    /// The two top bits must be zero.
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

    #[must_use]
    pub const fn answered(self, class: Class) -> Self {
        Self { class, ..self }
    }
}

impl<'a> View<'a> {
    /// Reports the first error in the order of [`Invalid`].
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, Invalid> {
        Self::walk(bytes, Header::new_checked(bytes)?)
    }

    /// Checks an RFC 3489 message, whose transaction ID includes the bits in place of the cookie. [`Header`]
    /// has the other 96 bits; [`Writer::finish_classic`] writes the response.
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

    #[must_use]
    pub fn header(&self) -> Header {
        self.header
    }

    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Strongest MAC present: SHA-256 if the message has both. The MAC is not verified here; see
    /// [`View::verify`].
    #[inline]
    #[must_use]
    pub fn mac(&self) -> Option<Mac> {
        self.sha256.map(|_| Mac::Sha256).or(self.sha1.map(|_| Mac::Sha1))
    }

    /// Verifies the MAC in constant time. Attributes that were appended after it make no difference.
    pub fn verify(&self, key: &Key, mac: Mac) -> Result<(), IntegrityError> {
        let offset = match mac {
            Mac::Sha1 => self.sha1,
            Mac::Sha256 => self.sha256,
        };
        let offset = offset.ok_or(IntegrityError::Missing)?.get() as usize;
        let value = match Attributes::at(self.bytes, offset).next() {
            // RFC 8489 section 14.6 lets STUN usages allow truncated values; TURN (RFC 8656) does not.
            Some(Ok(attribute)) if attribute.value.len() == mac.len() => attribute.value,
            _ => return Err(IntegrityError::Malformed),
        };
        let header = header_ending_at(self.bytes, offset + ATTRIBUTE_HEADER_LEN + mac.len());
        let right = key.mac(mac, [&header, &self.bytes[4..offset]]);
        if right[..mac.len()].ct_eq(value).into() { Ok(()) } else { Err(IntegrityError::Mismatch) }
    }

    /// True if there is a FINGERPRINT, which has been verified. A client that sends a FINGERPRINT expects one
    /// in the response.
    #[must_use]
    pub fn has_fingerprint(&self) -> bool {
        self.fingerprint
    }

    #[inline]
    pub fn attributes(&self) -> impl Iterator<Item = Attribute<'a>> + Clone + use<'a> {
        Attributes::of(&self.bytes[..self.end]).filter_map(Result::ok)
    }

    #[inline]
    pub fn all(&self, kind: u16) -> impl Iterator<Item = &'a [u8]> + Clone + use<'a> {
        self.attributes().filter(move |attribute| attribute.kind == kind).map(|attribute| attribute.value)
    }

    /// First attribute of this type; others are ignored (RFC 8489 section 14).
    #[inline]
    #[must_use]
    pub fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.all(kind).next()
    }

    /// `None` unless the value is four bytes long.
    #[must_use]
    pub fn number(&self, kind: u16) -> Option<u32> {
        self.get(kind)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// `None` if malformed.
    #[must_use]
    pub fn xor_address(&self, kind: u16) -> Option<SocketAddr> {
        xor_address(self.get(kind)?, &self.header.transaction)
    }

    /// `None` if the value is not UTF-8 or longer than 763 bytes (RFC 8489 section 14.9).
    #[must_use]
    pub fn text(&self, kind: u16) -> Option<&'a str> {
        self.get(kind).filter(|value| value.len() <= 763).and_then(|value| str::from_utf8(value).ok())
    }

    #[must_use]
    pub fn error(&self) -> Option<ErrorCode<'a>> {
        self.get(kind::ERROR_CODE).and_then(ErrorCode::of)
    }

    /// Types below 0x8000 for which `comprehends` returns false, in message order, possibly repeated.
    pub fn unknown(&self, comprehends: impl Fn(u16) -> bool) -> impl Iterator<Item = u16> {
        let required = self.attributes().map(|attribute| attribute.kind).filter(|kind| *kind < 0x8000);
        required.filter(move |kind| !comprehends(*kind))
    }
}

/// Offset in compact form, because views are passed by value.
fn place(offset: usize) -> Option<NonZero<u32>> {
    u32::try_from(offset).ok().and_then(NonZero::new)
}

impl Mac {
    const fn kind(self) -> u16 {
        match self {
            Self::Sha1 => kind::MESSAGE_INTEGRITY,
            Self::Sha256 => kind::MESSAGE_INTEGRITY_SHA256,
        }
    }
}
