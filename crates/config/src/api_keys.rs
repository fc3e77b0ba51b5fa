//! Keys by which applications ask for credentials, made by `turnpike key`: `tpk_NAME.SECRET`, with a secret of 256 random bits. The name
//! says whose hash a key is held against, and whose key it is that somebody has found in a log.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::Secret;

/// By which scanners for leaked secrets find one.
const PREFIX: &str = "tpk_";

/// SHA-256 of a key: all that a store has of it. No key can be guessed by it, for it is as long as its hash.
pub type KeyHash = [u8; 32];

/// A new key of this name, of these random bytes.
#[must_use]
pub fn make(name: &str, random: [u8; 32]) -> Secret {
    Secret::new(format!("{PREFIX}{name}.{}", URL_SAFE_NO_PAD.encode(random)))
}

/// What a store has of a key.
#[must_use]
pub fn hash(key: &Secret) -> KeyHash {
    Sha256::digest(key.reveal()).into()
}

/// The same as hex digits.
#[must_use]
pub fn hash_digits(key: &Secret) -> String {
    hex::encode(hash(key))
}

/// Whose key it says it is.
#[must_use]
pub fn name_of(key: &Secret) -> Option<&str> {
    let (name, _) = key.reveal().strip_prefix(PREFIX)?.split_once('.')?;
    is_name(name).then_some(name)
}

/// Whether it is the key of this hash; of no hash it is none, which takes as long to say.
#[must_use]
pub fn is_key_of(key: &Secret, of: Option<&KeyHash>) -> bool {
    let decoy = KeyHash::default();
    let is_same: bool = hash(key).ct_eq(of.unwrap_or(&decoy)).into();
    is_same && of.is_some()
}

/// A name has 1 to 64 of these characters, which mean nothing special anywhere.
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
    fn a_key_is_known_by_its_hash_and_says_whose_it_is() {
        let key = make("shop-1", [7; 32]);
        assert_eq!(name_of(&key), Some("shop-1"));
        assert_eq!(key.reveal().len(), "tpk_shop-1.".len() + 43);
        let hash = hash(&key);
        assert!(is_key_of(&key, Some(&hash)));
        assert!(!is_key_of(&make("shop-1", [8; 32]), Some(&hash)), "another one of the same name");
        assert!(!is_key_of(&key, None));
        assert!(!is_key_of(&Secret::new(format!("{} ", key.reveal())), Some(&hash)));
    }

    #[test]
    fn what_is_no_key_names_nobody() {
        for bad in ["", "tpk_", "tpk_a", "tpk_.x", "a.x", "tpk_A.x", "tpk_a b.x", "TPK_a.x"] {
            assert_eq!(name_of(&Secret::new(bad)), None, "{bad}");
        }
        assert_eq!(name_of(&Secret::new("tpk_a.b.c")), Some("a"));
    }

    #[test]
    fn names_are_plain() {
        assert!(is_name("a") && is_name("shop_2-b") && is_name(&"x".repeat(64)));
        for bad in ["", "A", "a.b", "a b", "ä", "a/b", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
