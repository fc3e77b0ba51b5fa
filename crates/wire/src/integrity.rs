//! MESSAGE-INTEGRITY, MESSAGE-INTEGRITY-SHA256, FINGERPRINT and long-term keys (RFC 8489 sections 9, 14.5-14.7).
//!
//! `stun_types` derives the MAC from the key's algorithm; RFC 8489 lets a client sign with SHA-256 under an MD5 key
//! (section 9.2.4), and a store may hold nothing but the key. Hence this module, checked against `stun_types` where
//! both can do the same.

use std::fmt;

use hmac::{Hmac, Mac as _};
use md5::Md5;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use crate::stun::{
    ATTRIBUTE_HEADER_LEN, Attribute, Attributes, HEADER_LEN, Malformed, fingerprint, header_ending_at, kind,
};

/// How a long-term key is derived from the password (RFC 8489 section 18.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyAlgorithm {
    /// `MD5(username ":" realm ":" password)`, 16 bytes; number 0x0001.
    Md5,
    /// `SHA-256(username ":" realm ":" password)`, 32 bytes; number 0x0002.
    Sha256,
}

/// Which attribute authenticates a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mac {
    /// MESSAGE-INTEGRITY, HMAC-SHA1, 20 bytes.
    Sha1,
    /// MESSAGE-INTEGRITY-SHA256, HMAC-SHA256, 32 bytes.
    Sha256,
}

/// Why a message is not authentic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    /// The message carries no such attribute.
    #[error("the message carries no MESSAGE-INTEGRITY attribute of this kind")]
    Missing,
    /// The attribute has an impossible length, or the message is malformed.
    #[error("the MESSAGE-INTEGRITY attribute is malformed")]
    Malformed,
    /// The MAC does not match.
    #[error("the MAC does not match")]
    Mismatch,
}

/// A key for message integrity. Never printed; equality takes constant time; overwritten when dropped.
#[derive(Clone)]
pub struct Key {
    bytes: Zeroizing<Box<[u8]>>,
}

impl Key {
    /// The long-term key of a user (RFC 8489 section 9.2.2). The caller has applied OpaqueString if it wants it.
    #[must_use]
    pub fn long_term(algorithm: KeyAlgorithm, username: &str, realm: &str, password: &[u8]) -> Self {
        let parts = [username.as_bytes(), b":", realm.as_bytes(), b":", password];
        match algorithm {
            KeyAlgorithm::Md5 => Self::from_bytes(&digest::<Md5>(&parts)),
            KeyAlgorithm::Sha256 => Self::from_bytes(&digest::<Sha256>(&parts)),
        }
    }

    /// A stored key, or a short-term password. Any length will do for an HMAC.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self { bytes: Zeroizing::new(bytes.into()) }
    }

    /// The key itself, for who keeps it where it is needed next. Not to be printed.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.bytes.ct_eq(&other.bytes).into()
    }
}

impl Eq for Key {}

/// Which integrity attribute a well-formed message carries; with both, the SHA-256 one counts.
///
/// `None` also for a message that is not well-formed. After MESSAGE-INTEGRITY only MESSAGE-INTEGRITY-SHA256 and
/// FINGERPRINT count, after the latter two nothing does (RFC 8489 sections 14.5 to 14.7).
#[must_use]
pub fn mac_of(message: &[u8]) -> Option<Mac> {
    let mut found = None;
    for attribute in Attributes::of(message).ok()? {
        match attribute.ok()?.kind {
            kind::MESSAGE_INTEGRITY => found = Some(Mac::Sha1),
            kind::MESSAGE_INTEGRITY_SHA256 => return Some(Mac::Sha256),
            kind::FINGERPRINT => break,
            _ => {}
        }
    }
    found
}

/// Verifies one integrity attribute of a message, in constant time. Attributes after it are not covered, and callers
/// must ignore them (RFC 8489 section 14.5), as `stun_types::message::Message::iter_attributes` does.
///
/// The MAC is taken over the message up to the attribute, under a length field that ends with the attribute; what
/// was appended later, a FINGERPRINT or a second integrity attribute, is thereby left out.
pub fn verify(message: &[u8], key: &Key, mac: Mac) -> Result<(), IntegrityError> {
    let attribute = find(message, mac)?;
    let length = attribute.value.len();
    // A shorter value is for usages of STUN that allow it (RFC 8489 section 14.6), and TURN (RFC 8656) does not.
    if length != mac.len() {
        return Err(IntegrityError::Malformed);
    }
    let header = header_ending_at(message, attribute.offset + ATTRIBUTE_HEADER_LEN + length);
    let parts = [&header, &message[4..attribute.offset]];
    let result = match mac {
        Mac::Sha1 => start::<Hmac<Sha1>>(key, parts).verify_slice(attribute.value),
        Mac::Sha256 => start::<Hmac<Sha256>>(key, parts).verify_slice(attribute.value),
    };
    result.map_err(|_| IntegrityError::Mismatch)
}

/// Appends an integrity attribute to a message and sets its length field.
///
/// The message is one that we are writing: a header of 20 bytes and whole, padded attributes, the length field not
/// yet of interest. Shorter than a header, it is left alone.
pub fn sign(message: &mut Vec<u8>, key: &Key, mac: Mac) {
    let offset = message.len();
    if !is_unfinished_message(message) {
        return;
    }
    set_length(message, offset + ATTRIBUTE_HEADER_LEN + mac.len());
    match mac {
        Mac::Sha1 => {
            let value = start::<Hmac<Sha1>>(key, [message.as_slice()]).finalize().into_bytes();
            append(message, kind::MESSAGE_INTEGRITY, &value);
        }
        Mac::Sha256 => {
            let value = start::<Hmac<Sha256>>(key, [message.as_slice()]).finalize().into_bytes();
            append(message, kind::MESSAGE_INTEGRITY_SHA256, &value);
        }
    }
}

/// Appends FINGERPRINT and sets the length field. The message is as for [`sign`]; nothing may be appended later.
pub fn append_fingerprint(message: &mut Vec<u8>) {
    let offset = message.len();
    if !is_unfinished_message(message) {
        return;
    }
    let value = fingerprint(message, offset);
    append(message, kind::FINGERPRINT, &value);
    let end = message.len();
    set_length(message, end);
}

/// Whether the message's FINGERPRINT is its last attribute and matches. `None` if it carries none, or is not
/// well-formed up to there.
#[must_use]
pub fn check_fingerprint(message: &[u8]) -> Option<bool> {
    for attribute in Attributes::of(message).ok()? {
        let attribute = attribute.ok()?;
        if attribute.kind == kind::FINGERPRINT {
            return Some(attribute.is_last && attribute.value == fingerprint(message, attribute.offset));
        }
    }
    None
}

/// USERHASH: `SHA-256(username ":" realm)` (RFC 8489 section 14.4).
#[must_use]
pub fn userhash(username: &str, realm: &str) -> [u8; 32] {
    digest::<Sha256>(&[username.as_bytes(), b":", realm.as_bytes()]).into()
}

impl Mac {
    /// Of the value.
    const fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
        }
    }
}

impl From<Malformed> for IntegrityError {
    fn from(Malformed: Malformed) -> Self {
        Self::Malformed
    }
}

/// The attribute that [`mac_of`] would see.
fn find(message: &[u8], mac: Mac) -> Result<Attribute<'_>, IntegrityError> {
    for attribute in Attributes::of(message)? {
        let attribute = attribute?;
        match (attribute.kind, mac) {
            (kind::MESSAGE_INTEGRITY, Mac::Sha1) | (kind::MESSAGE_INTEGRITY_SHA256, Mac::Sha256) => {
                return Ok(attribute);
            }
            (kind::MESSAGE_INTEGRITY_SHA256 | kind::FINGERPRINT, _) => break,
            _ => {}
        }
    }
    Err(IntegrityError::Missing)
}

fn is_unfinished_message(message: &[u8]) -> bool {
    debug_assert!(
        message.len() >= HEADER_LEN && message.len().is_multiple_of(4),
        "no STUN message to append to"
    );
    message.len() >= HEADER_LEN
}

fn append(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    #[expect(clippy::cast_possible_truncation, reason = "every value here is at most 32 bytes long")]
    let length = value.len() as u16;
    message.extend_from_slice(&kind.to_be_bytes());
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(value);
}

fn set_length(message: &mut [u8], end: usize) {
    let header = header_ending_at(message, end);
    message[..4].copy_from_slice(&header);
}

fn start<'a, M: hmac::Mac + hmac::digest::KeyInit>(
    key: &Key,
    parts: impl IntoIterator<Item = &'a [u8]>,
) -> M {
    let mut mac = <M as hmac::Mac>::new_from_slice(&key.bytes).expect("an HMAC takes a key of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

fn digest<D: Digest>(parts: &[&[u8]]) -> hmac::digest::Output<D> {
    let mut digest = D::new();
    for part in parts {
        digest.update(part);
    }
    digest.finalize()
}
