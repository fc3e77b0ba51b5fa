//! MESSAGE-INTEGRITY, MESSAGE-INTEGRITY-SHA256, FINGERPRINT and long-term keys (RFC 8489 sections 9, 14.5-14.7).
//!
//! `stun_types` derives the MAC from the key's algorithm; RFC 8489 lets a client sign with SHA-256 under an MD5 key
//! (section 9.2.4), and a store may hold nothing but the key. Hence this module, checked against `stun_types` where
//! both can do the same.

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
    /// MESSAGE-INTEGRITY-SHA256, HMAC-SHA256, 16 to 32 bytes on receipt, 32 when we write it.
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

/// A key for message integrity. Never printed; equality takes constant time.
#[derive(Clone)]
pub struct Key {
    _bytes: Vec<u8>,
}

impl Key {
    /// The long-term key of a user (RFC 8489 section 9.2.2). The caller has applied OpaqueString if it wants it.
    #[must_use]
    pub fn long_term(_algorithm: KeyAlgorithm, _username: &str, _realm: &str, _password: &[u8]) -> Self {
        todo!()
    }
    /// A stored key, or a short-term password.
    #[must_use]
    pub fn from_bytes(_bytes: &[u8]) -> Self {
        todo!()
    }
}

/// Which integrity attribute a well-formed message carries; with both, the SHA-256 one counts.
#[must_use]
pub fn mac_of(_message: &[u8]) -> Option<Mac> {
    todo!()
}

/// Verifies one integrity attribute of a message, in constant time. Attributes after it are not covered, and callers
/// must ignore them (RFC 8489 section 14.5).
pub fn verify(_message: &[u8], _key: &Key, _mac: Mac) -> Result<(), IntegrityError> {
    todo!()
}

/// Appends an integrity attribute to a message and sets its length field.
pub fn sign(_message: &mut Vec<u8>, _key: &Key, _mac: Mac) {
    todo!()
}

/// Appends FINGERPRINT and sets the length field.
pub fn append_fingerprint(_message: &mut Vec<u8>) {
    todo!()
}

/// USERHASH: `SHA-256(username ":" realm)` (RFC 8489 section 14.4).
#[must_use]
pub fn userhash(_username: &str, _realm: &str) -> [u8; 32] {
    todo!()
}
