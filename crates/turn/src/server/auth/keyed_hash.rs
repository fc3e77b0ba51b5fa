//! Keyed hash for tables that survive an upgrade; its key is derived from the nonce key.

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

pub(crate) struct KeyedHash(Hmac<Sha256>);

impl KeyedHash {
    /// `key` is the nonce key.
    pub(crate) fn new(key: &[u8; 32], purpose: &[u8]) -> Self {
        let mut own = keyed(key);
        own.update(purpose);
        Self(keyed(&own.finalize().into_bytes().into()))
    }

    /// Does not delimit parts of variable length.
    pub(crate) fn of(&self, parts: &[&[u8]]) -> u64 {
        let mut hash = self.0.clone();
        parts.iter().for_each(|part| hash.update(part));
        let [b0, b1, b2, b3, b4, b5, b6, b7, ..] = <[u8; 32]>::from(hash.finalize().into_bytes());
        u64::from_be_bytes([b0, b1, b2, b3, b4, b5, b6, b7])
    }
}

fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(key).expect("HMAC accepts keys of any length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_depends_only_on_key_purpose_and_parts() {
        let hash = |key, purpose: &[u8], parts: &[&[u8]]| KeyedHash::new(&[key; 32], purpose).of(parts);
        let one = hash(1, b"a", &[b"x", b"y"]);
        assert_eq!(one, hash(1, b"a", &[b"xy"]));
        for other in [hash(2, b"a", &[b"xy"]), hash(1, b"b", &[b"xy"]), hash(1, b"a", &[b"yx"])] {
            assert_ne!(one, other);
        }
    }
}
