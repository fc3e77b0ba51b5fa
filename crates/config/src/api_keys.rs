//! API keys in the form `tpk_NAME.SECRET`, with 256 random bits. The name selects the hash to compare with,
//! and identifies a key found in a log.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::Secret;

/// Prefix that scanners for leaked secrets look for.
const PREFIX: &str = "tpk_";

/// SHA-256 of a key. The key has 256 random bits, so it cannot be guessed from the hash.
pub type KeyHash = [u8; 32];

#[must_use]
pub fn make(name: &str, random: [u8; 32]) -> Secret {
    Secret::new(format!("{PREFIX}{name}.{}", URL_SAFE_NO_PAD.encode(random)))
}

#[must_use]
pub fn hash(key: &Secret) -> KeyHash {
    Sha256::digest(key.reveal()).into()
}

#[must_use]
pub fn hash_digits(key: &Secret) -> String {
    hex::encode(hash(key))
}

/// Name in the key, unverified.
#[must_use]
pub fn name_of(key: &Secret) -> Option<&str> {
    let (name, _) = key.reveal().strip_prefix(PREFIX)?.split_once('.')?;
    is_name(name).then_some(name)
}

/// Returns true if `of` is the hash of `key`. Constant-time: without a hash, it compares with a decoy.
#[must_use]
pub fn is_key_of(key: &Secret, of: Option<&KeyHash>) -> bool {
    let decoy = KeyHash::default();
    let is_same: bool = hash(key).ct_eq(of.unwrap_or(&decoy)).into();
    is_same && of.is_some()
}

/// Accepts 1 to 64 characters that need no escaping anywhere.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let is_plain =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_matches_its_hash_and_contains_its_name() {
        let key = make("shop-1", [7; 32]);
        assert_eq!(name_of(&key), Some("shop-1"));
        assert_eq!(key.reveal().len(), "tpk_shop-1.".len() + 43);
        let hash = hash(&key);
        assert!(is_key_of(&key, Some(&hash)));
        assert!(!is_key_of(&make("shop-1", [8; 32]), Some(&hash)), "another key with the same name");
        assert!(!is_key_of(&key, None));
        assert!(!is_key_of(&Secret::new(format!("{} ", key.reveal())), Some(&hash)));
    }

    #[test]
    fn invalid_key_has_no_name() {
        for bad in ["", "tpk_", "tpk_a", "tpk_.x", "a.x", "tpk_A.x", "tpk_a b.x", "TPK_a.x"] {
            assert_eq!(name_of(&Secret::new(bad)), None, "{bad}");
        }
        assert_eq!(name_of(&Secret::new("tpk_a.b.c")), Some("a"));
    }

    #[test]
    fn key_names_allow_only_plain_characters() {
        assert!(is_name("a") && is_name("shop_2-b") && is_name(&"x".repeat(64)));
        for bad in ["", "A", "a.b", "a b", "ä", "a/b", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
