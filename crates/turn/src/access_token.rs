//! Self-contained access tokens (RFC 7635 section 6.2), which an authorization server issues to a client for
//! a TURN server that shares a key with it.
//!
//! ```text
//!  0        2              14                                                        +16
//! ┌────────┬───────────────┬────────────┬─────────┬───────────────┬──────────────┬─────────┐
//! │ 12     │ nonce         │ key_length │ mac_key │ timestamp     │ lifetime     │ AEAD    │
//! │ 16 bit │ 12 bytes      │ 16 bit     │         │ 48.16, 64 bit │ s, 32 bit    │ tag     │
//! └────────┴───────────────┴────────────┴─────────┴───────────────┴──────────────┴─────────┘
//!                           └────────────── encrypted, with the server's name ───┘
//!                                           as associated data
//! ```

use std::fmt;

use aes_gcm::{
    Aes128Gcm, Aes256Gcm,
    aead::{AeadInOut, KeyInit},
};
use subtle::ConstantTimeEq as _;
use turnpike_wire::integrity::Key;
use zeroize::{Zeroize as _, Zeroizing};

/// Nonce length in bytes; RFC 5116 allows no other for AES-GCM (sections 5.1 and 5.2).
pub const NONCE_LEN: usize = 12;
/// Length of a `mac_key` in bytes. RFC 7635 requires 20, and 32 suits HMAC-SHA256; a key shorter than 16
/// could be guessed.
pub const MAC_KEY_LEN: std::ops::RangeInclusive<usize> = 16..=64;

const TAG_LEN: usize = 16;
const HEAD_LEN: usize = 2 + NONCE_LEN;
const FIELDS_LEN: usize = 2 + 8 + 4;
const MAX_SEALED_LEN: usize = FIELDS_LEN + *MAC_KEY_LEN.end();

/// Key shared with an authorization server. `Debug` hides it, and dropping it erases it.
#[derive(Clone)]
pub enum TokenKey {
    A128Gcm([u8; 16]),
    A256Gcm([u8; 32]),
}

impl TokenKey {
    /// A key of 16 bytes selects AES-128, one of 32 bytes AES-256.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if let Ok(key) = bytes.try_into() {
            return Some(Self::A128Gcm(key));
        }
        bytes.try_into().ok().map(Self::A256Gcm)
    }

    #[must_use]
    pub const fn algorithm(&self) -> &'static str {
        match self {
            Self::A128Gcm(_) => "A128GCM",
            Self::A256Gcm(_) => "A256GCM",
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::A128Gcm(key) => key,
            Self::A256Gcm(key) => key,
        }
    }

    fn encrypt(&self, nonce: &[u8; NONCE_LEN], name: &str, text: &mut [u8]) -> Option<[u8; TAG_LEN]> {
        let (nonce, name) = (nonce.into(), name.as_bytes());
        let tag = match self {
            Self::A128Gcm(key) => Aes128Gcm::new(key.into()).encrypt_inout_detached(nonce, name, text.into()),
            Self::A256Gcm(key) => Aes256Gcm::new(key.into()).encrypt_inout_detached(nonce, name, text.into()),
        };
        tag.ok().map(Into::into)
    }

    fn decrypt(&self, nonce: &[u8; NONCE_LEN], name: &str, text: &mut [u8], tag: &[u8; TAG_LEN]) -> bool {
        let (nonce, name, tag) = (nonce.into(), name.as_bytes(), tag.into());
        let done = match self {
            Self::A128Gcm(key) => {
                Aes128Gcm::new(key.into()).decrypt_inout_detached(nonce, name, text.into(), tag)
            }
            Self::A256Gcm(key) => {
                Aes256Gcm::new(key.into()).decrypt_inout_detached(nonce, name, text.into(), tag)
            }
        };
        done.is_ok()
    }
}

impl Drop for TokenKey {
    fn drop(&mut self) {
        match self {
            Self::A128Gcm(key) => key.zeroize(),
            Self::A256Gcm(key) => key.zeroize(),
        }
    }
}

impl fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenKey({}, ..)", self.algorithm())
    }
}

impl PartialEq for TokenKey {
    fn eq(&self, other: &Self) -> bool {
        self.bytes().ct_eq(other.bytes()).into()
    }
}

impl Eq for TokenKey {}

/// `Debug` hides `mac_key`, and dropping the token erases it.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken {
    mac_key: Zeroizing<Vec<u8>>,
    /// Issue time: Unix seconds in the upper 48 bits, 1/64000 s in the lower 16.
    pub timestamp: u64,
    pub lifetime: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("malformed")]
    Malformed,
    /// Encrypted with another key, issued for another server, or altered.
    #[error("not authentic: encrypted with another key or for another server name")]
    NotAuthentic,
}

impl AccessToken {
    /// `unix` is the issue time in Unix seconds. `None` if the length of `mac_key` is outside
    /// [`MAC_KEY_LEN`].
    #[must_use]
    pub fn new(mac_key: &[u8], unix: u64, lifetime: u32) -> Option<Self> {
        let fits = MAC_KEY_LEN.contains(&mac_key.len());
        fits.then(|| Self { mac_key: mac_key.to_vec().into(), timestamp: unix << 16, lifetime })
    }

    #[must_use]
    pub const fn made_unix(&self) -> u64 {
        self.timestamp >> 16
    }

    #[must_use]
    pub fn key(&self) -> Key {
        Key::from_bytes(&self.mac_key)
    }

    #[must_use]
    pub fn mac_key(&self) -> &[u8] {
        &self.mac_key
    }

    /// Encrypts the token into the value of ACCESS-TOKEN. A nonce must never be reused with the same key.
    #[must_use]
    pub fn seal(&self, key: &TokenKey, server_name: &str, nonce: [u8; NONCE_LEN]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_LEN + MAX_SEALED_LEN + TAG_LEN);
        #[expect(clippy::cast_possible_truncation, reason = "both are below 65")]
        let (nonce_len, key_len) = (NONCE_LEN as u16, self.mac_key.len() as u16);
        bytes.extend_from_slice(&nonce_len.to_be_bytes());
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(&key_len.to_be_bytes());
        bytes.extend_from_slice(&self.mac_key);
        bytes.extend_from_slice(&self.timestamp.to_be_bytes());
        bytes.extend_from_slice(&self.lifetime.to_be_bytes());
        match key.encrypt(&nonce, server_name, &mut bytes[HEAD_LEN..]) {
            Some(tag) => bytes.extend_from_slice(&tag),
            // AES-GCM fails only if the plaintext is 64 GiB or longer.
            None => unreachable!("a token has at most about a hundred bytes"),
        }
        bytes
    }

    /// Decrypts the value of an ACCESS-TOKEN.
    pub fn open(key: &TokenKey, server_name: &str, bytes: &[u8]) -> Result<Self, TokenError> {
        let (nonce, sealed) = match bytes {
            [0, 12, rest @ ..] => rest.split_first_chunk::<NONCE_LEN>().ok_or(TokenError::Malformed)?,
            _ => return Err(TokenError::Malformed),
        };
        let (sealed, tag) = sealed.split_last_chunk::<TAG_LEN>().ok_or(TokenError::Malformed)?;
        if sealed.len() < FIELDS_LEN || sealed.len() > MAX_SEALED_LEN {
            return Err(TokenError::Malformed);
        }
        let mut text = Zeroizing::new([0; MAX_SEALED_LEN]);
        let text = &mut text[..sealed.len()];
        text.copy_from_slice(sealed);
        if !key.decrypt(nonce, server_name, text, tag) {
            return Err(TokenError::NotAuthentic);
        }
        let (key_len, rest) = text.split_first_chunk::<2>().ok_or(TokenError::Malformed)?;
        let (rest, lifetime) = rest.split_last_chunk::<4>().ok_or(TokenError::Malformed)?;
        let (mac_key, timestamp) = rest.split_last_chunk::<8>().ok_or(TokenError::Malformed)?;
        let key_len = usize::from(u16::from_be_bytes(*key_len));
        if key_len != mac_key.len() || !MAC_KEY_LEN.contains(&key_len) {
            return Err(TokenError::Malformed);
        }
        Ok(Self {
            mac_key: mac_key.to_vec().into(),
            timestamp: u64::from_be_bytes(*timestamp),
            lifetime: u32::from_be_bytes(*lifetime),
        })
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { timestamp, lifetime, .. } = self;
        write!(f, "AccessToken {{ timestamp: {timestamp}, lifetime: {lifetime}, .. }}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generated with Python's `cryptography`: algorithm, key, server name, nonce, mac_key, timestamp,
    /// lifetime, token.
    const VECTORS: &str = include_str!("../tests/fixtures/access_tokens.txt");

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn tokens_match_those_of_another_implementation() {
        assert_eq!(VECTORS.lines().count(), 4);
        for line in VECTORS.lines() {
            let [algorithm, key, name, nonce, mac_key, timestamp, lifetime, token] =
                line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            let key = TokenKey::from_bytes(&hex(key)).unwrap();
            assert_eq!(key.algorithm(), algorithm);
            let read = AccessToken::open(&key, name, &hex(token)).unwrap();
            let expected = AccessToken {
                mac_key: hex(mac_key).into(),
                timestamp: timestamp.parse().unwrap(),
                lifetime: lifetime.parse().unwrap(),
            };
            assert!(read == expected, "{line}");
            assert_eq!(read.seal(&key, name, hex(nonce).try_into().unwrap()), hex(token));
        }
    }

    #[test]
    fn a_token_with_a_wrong_key_or_server_or_a_changed_byte_is_not_authentic() {
        let key = TokenKey::A256Gcm([7; 32]);
        let token = AccessToken::new(&[1; 20], 1_800_000_000, 60).unwrap();
        let bytes = token.seal(&key, "turn.example.org", [9; 12]);
        let open = |key: &TokenKey, name, bytes: &[u8]| AccessToken::open(key, name, bytes);
        assert_eq!(open(&key, "turn.example.org", &bytes), Ok(token));
        for key in [TokenKey::A256Gcm([8; 32]), TokenKey::A128Gcm([7; 16])] {
            assert_eq!(open(&key, "turn.example.org", &bytes), Err(TokenError::NotAuthentic));
        }
        assert_eq!(open(&key, "turn.example.com", &bytes), Err(TokenError::NotAuthentic));
        for at in 2..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(open(&key, "turn.example.org", &changed), Err(TokenError::NotAuthentic), "byte {at}");
        }
    }

    #[test]
    fn truncated_tokens_and_invalid_lengths_are_refused() {
        let key = TokenKey::A128Gcm([7; 16]);
        let bytes = AccessToken::new(&[1; 20], 1_800_000_000, 60).unwrap().seal(&key, "x", [9; 12]);
        for length in 0..bytes.len() {
            assert!(AccessToken::open(&key, "x", &bytes[..length]).is_err(), "{length}");
        }
        assert_eq!(
            AccessToken::open(&key, "x", &[bytes, vec![0; 4000]].concat()),
            Err(TokenError::Malformed)
        );
        for mac_key_len in [0, 15, 65, 1000] {
            assert!(AccessToken::new(&vec![1; mac_key_len], 0, 1).is_none());
            let odd = AccessToken { mac_key: vec![1; mac_key_len].into(), timestamp: 0, lifetime: 1 };
            let odd = odd.seal(&key, "x", [9; 12]);
            assert_eq!(AccessToken::open(&key, "x", &odd), Err(TokenError::Malformed), "{mac_key_len}");
        }
    }

    #[test]
    fn a_wrong_key_length_field_is_malformed() {
        let key = TokenKey::A128Gcm([7; 16]);
        for lie in [0, 19, 21, u16::MAX] {
            let mut bytes = [&[0, 12][..], &[9; 12], &lie.to_be_bytes(), &[1; 20], &[0; 12]].concat();
            let tag = key.encrypt(&[9; 12], "x", &mut bytes[HEAD_LEN..]).unwrap();
            bytes.extend(tag);
            assert_eq!(AccessToken::open(&key, "x", &bytes), Err(TokenError::Malformed), "{lie}");
        }
    }

    #[test]
    fn debug_output_hides_secrets() {
        let token = AccessToken::new(&[213; 20], 0, 1).unwrap();
        let text = format!("{token:?} {:?}", TokenKey::A256Gcm([213; 32]));
        assert!(!text.contains("213") && text.contains("A256GCM"), "{text}");
    }
}
