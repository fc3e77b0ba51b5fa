//! Encrypts data in the store with a key derived from the fleet's secret, and derives opaque bucket names.
//!
//! ```text
//!  0             12                                   +16
//!  ┌─────────────┬────────────────────────────┬───────┐
//!  │ nonce       │ AES-256-GCM of the text    │ tag   │   the purpose is associated data
//!  └─────────────┴────────────────────────────┴───────┘
//! ```

use std::fmt;

use aes_gcm::{
    Aes256Gcm,
    aead::{AeadInOut as _, KeyInit as _},
};
use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use zeroize::{Zeroize as _, Zeroizing};

use crate::lease::QuotaBucket;

const NONCE_LEN: usize = 12;
/// Length of the tag, which authenticates nonce and text and is different for each sealed text.
pub(crate) const TAG_LEN: usize = 16;

/// Keys derived from the fleet's secret; never printed, and overwritten on drop.
#[derive(Clone)]
pub struct Sealer {
    sealing: Zeroizing<[u8; 32]>,
    naming: Zeroizing<[u8; 32]>,
}

impl Sealer {
    #[must_use]
    pub fn new(secret: &str) -> Self {
        let key = |purpose: &[u8]| Zeroizing::new(hmac(secret.as_bytes(), &[purpose]));
        Self { sealing: key(b"turnpike fleet seal"), naming: key(b"turnpike fleet bucket") }
    }

    /// Encrypts a text with the purpose as associated data, so that it cannot be opened for another purpose.
    /// `nonce` must be random; even among 2^32 texts, two are unlikely to have the same nonce.
    #[must_use]
    pub fn seal(&self, purpose: &str, text: &[u8], nonce: [u8; NONCE_LEN]) -> Vec<u8> {
        let mut sealed = Vec::with_capacity(NONCE_LEN + text.len() + TAG_LEN);
        sealed.extend_from_slice(&nonce);
        sealed.extend_from_slice(text);
        let (nonce, purpose) = ((&nonce).into(), purpose.as_bytes());
        let cipher = Aes256Gcm::new((&*self.sealing).into());
        match cipher.encrypt_inout_detached(nonce, purpose, (&mut sealed[NONCE_LEN..]).into()) {
            Ok(tag) => sealed.extend_from_slice(&<[u8; TAG_LEN]>::from(tag)),
            // AES-GCM fails only above 64 GiB; the empty result cannot be opened.
            Err(_) => {
                sealed.zeroize();
                sealed.clear();
            }
        }
        sealed
    }

    /// Decrypts a text sealed with the same secret and purpose; `None` for anything else.
    #[must_use]
    pub fn open(&self, purpose: &str, sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let (text, tag) = rest.split_last_chunk::<TAG_LEN>()?;
        let mut text = Zeroizing::new(text.to_vec());
        let cipher = Aes256Gcm::new((&*self.sealing).into());
        let opened = cipher.decrypt_inout_detached(
            nonce.into(),
            purpose.as_bytes(),
            text.as_mut_slice().into(),
            tag.into(),
        );
        opened.ok().map(|()| text)
    }

    /// Bucket of all allocations.
    #[must_use]
    pub fn total(&self) -> QuotaBucket {
        self.bucket(&[b"total"])
    }

    #[must_use]
    pub fn realm(&self, realm: &str) -> QuotaBucket {
        self.bucket(&[b"realm\0", realm.as_bytes()])
    }

    /// Bucket of a user. Buckets never collide, because realm names contain no control characters.
    #[must_use]
    pub fn user(&self, realm: &str, identity: &str) -> QuotaBucket {
        self.bucket(&[b"user\0", realm.as_bytes(), b"\0", identity.as_bytes()])
    }

    /// Opaque name for a field of the record of certificate orders.
    #[must_use]
    pub fn order(&self, field: &str) -> QuotaBucket {
        self.bucket(&[b"order\0", field.as_bytes()])
    }

    fn bucket(&self, parts: &[&[u8]]) -> QuotaBucket {
        let mut bucket = QuotaBucket::default();
        bucket.0.copy_from_slice(&hmac(&*self.naming, parts)[..16]);
        bucket
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(..)")
    }
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    #[expect(clippy::expect_used, reason = "an HMAC accepts a key of any length")]
    let mut hmac =
        <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(key).expect("an HMAC accepts a key of any length");
    parts.iter().for_each(|part| hmac.update(part));
    hmac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONCE: [u8; 12] = [9; 12];

    #[test]
    fn sealed_text_opens_only_for_its_purpose_and_secret() {
        let sealer = Sealer::new("a secret of the fleet");
        let sealed = sealer.seal("card", b"who I am", NONCE);
        assert_eq!(sealer.open("card", &sealed).unwrap().as_slice(), b"who I am");
        assert!(sealer.open("ring", &sealed).is_none());
        assert!(Sealer::new("another secret").open("card", &sealed).is_none());
        for bit in 0..sealed.len() * 8 {
            let mut forged = sealed.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert!(sealer.open("card", &forged).is_none(), "bit {bit}");
        }
        for length in 0..sealed.len() {
            assert!(sealer.open("card", &sealed[..length]).is_none());
        }
        assert!(!format!("{sealer:?}").contains("secret"));
    }

    #[test]
    fn bucket_names_are_unique_per_subject_and_fleet() {
        let sealer = Sealer::new("one");
        let buckets = [
            sealer.total(),
            sealer.realm(""),
            sealer.realm("a"),
            sealer.user("a", ""),
            sealer.user("", "a"),
            sealer.user("a", "b"),
            sealer.user("b", "a"),
            sealer.order("a"),
            Sealer::new("two").user("a", "b"),
        ];
        for (at, one) in buckets.iter().enumerate() {
            assert!(!buckets[..at].contains(one), "{at}");
        }
        assert_eq!(sealer.user("a", "b"), Sealer::new("one").user("a", "b"));
    }

    proptest! {
        #[test]
        fn any_sealed_text_round_trips(text: Vec<u8>, purpose in "[a-z]{0,8}", nonce: [u8; 12]) {
            let sealer = Sealer::new("a secret of the fleet");
            let sealed = sealer.seal(&purpose, &text, nonce);
            prop_assert_eq!(sealed.len(), 28 + text.len());
            let opened = sealer.open(&purpose, &sealed).unwrap();
            prop_assert_eq!(opened.as_slice(), text);
        }

        #[test]
        fn arbitrary_bytes_do_not_open(bytes: Vec<u8>) {
            prop_assert!(Sealer::new("s").open("card", &bytes).is_none());
        }
    }
}
