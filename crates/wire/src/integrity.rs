//! Keys and MACs for message integrity (RFC 8489 sections 9.2, 14.5 and 14.6). SHA-256 may sign with an MD5
//! key (section 9.2.4), so key and MAC algorithm are independent.

use std::fmt;

use hmac::{Hmac, KeyInit};
use md5::Md5;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use crate::precis::{opaque_bytes, opaque_string};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyAlgorithm {
    /// `MD5(username ":" realm ":" password)`, 16 bytes; number 0x0001.
    Md5,
    /// `SHA-256(username ":" realm ":" password)`, 32 bytes; number 0x0002.
    Sha256,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mac {
    /// MESSAGE-INTEGRITY, HMAC-SHA1, 20 bytes.
    Sha1,
    /// MESSAGE-INTEGRITY-SHA256, HMAC-SHA256, 32 bytes.
    Sha256,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    #[error("the message has no MESSAGE-INTEGRITY attribute of this kind")]
    Missing,
    #[error("the MESSAGE-INTEGRITY attribute is malformed")]
    Malformed,
    #[error("the MAC does not match")]
    Mismatch,
}

/// Key for message integrity. `Debug` hides it, comparison takes constant time, and dropping it erases it.
#[derive(Clone)]
pub struct Key {
    bytes: Zeroizing<Box<[u8]>>,
}

impl Key {
    /// Applies OpaqueString to realm and password (RFC 8489 section 9.2.2), but not to `username`.
    #[must_use]
    pub fn long_term(algorithm: KeyAlgorithm, username: &str, realm: &str, password: &[u8]) -> Self {
        Self::unprepared(
            algorithm,
            username,
            &opaque_string(realm),
            &Zeroizing::new(opaque_bytes(password).into_owned()),
        )
    }

    /// Like [`Key::long_term`], but does not apply OpaqueString.
    #[must_use]
    pub fn unprepared(algorithm: KeyAlgorithm, username: &str, realm: &str, password: &[u8]) -> Self {
        let parts = [username.as_bytes(), b":", realm.as_bytes(), b":", password];
        match algorithm {
            KeyAlgorithm::Md5 => Self::from_bytes(&digest::<Md5>(&parts)),
            KeyAlgorithm::Sha256 => Self::from_bytes(&digest::<Sha256>(&parts)),
        }
    }

    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self { bytes: Zeroizing::new(bytes.into()) }
    }

    /// MAC over the concatenated parts, in the first [`Mac::len`] bytes of the result.
    pub(crate) fn mac(&self, mac: Mac, parts: [&[u8]; 2]) -> [u8; 32] {
        let mut value = [0; 32];
        match mac {
            Mac::Sha1 => value[..20].copy_from_slice(&hmac_over::<Hmac<Sha1>>(self, parts)),
            Mac::Sha256 => value.copy_from_slice(&hmac_over::<Hmac<Sha256>>(self, parts)),
        }
        value
    }

    /// The key's bytes, which must never be printed.
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

/// USERHASH: `SHA-256(OpaqueString(username) ":" OpaqueString(realm))` (RFC 8489 section 14.4).
#[must_use]
pub fn userhash(username: &str, realm: &str) -> [u8; 32] {
    digest::<Sha256>(&[opaque_string(username).as_bytes(), b":", opaque_string(realm).as_bytes()]).into()
}

impl KeyAlgorithm {
    /// Algorithm number with no parameters, as encoded in PASSWORD-ALGORITHMS.
    #[must_use]
    pub const fn attribute(self) -> [u8; 4] {
        match self {
            Self::Md5 => [0, 1, 0, 0],
            Self::Sha256 => [0, 2, 0, 0],
        }
    }

    #[must_use]
    pub fn numbered(number: u16) -> Option<Self> {
        [Self::Md5, Self::Sha256].into_iter().find(|it| it.attribute()[..2] == number.to_be_bytes())
    }
}

impl Mac {
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
        }
    }
}

fn hmac_over<M: hmac::Mac + KeyInit>(key: &Key, parts: [&[u8]; 2]) -> hmac::digest::Output<M> {
    let mut mac = M::new_from_slice(&key.bytes).expect("HMAC accepts keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes()
}

fn digest<D: Digest>(parts: &[&[u8]]) -> hmac::digest::Output<D> {
    let mut digest = D::new();
    for part in parts {
        digest.update(part);
    }
    digest.finalize()
}
