//! A user's long-term keys in a store, in hex digits; never the password.
//!
//! coturn writes 32 digits, the MD5 key, and reads only the first 32. Our keys have 96 digits, MD5 followed
//! by SHA-256, which work in both programs. 64 digits are a SHA-256 key.

use turnpike_wire::integrity::{Key, KeyAlgorithm};
use zeroize::Zeroizing;

const MD5_DIGITS: usize = 32;
const SHA256_DIGITS: usize = 64;

/// One key for each algorithm; `None` if it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserKeys {
    md5: Option<Key>,
    sha256: Option<Key>,
}

impl UserKeys {
    #[must_use]
    pub fn new(name: &str, realm: &str, password: &str) -> Self {
        let key = |algorithm| Some(Key::long_term(algorithm, name, realm, password.as_bytes()));
        Self { md5: key(KeyAlgorithm::Md5), sha256: key(KeyAlgorithm::Sha256) }
    }

    /// Parses hex digits, possibly with the trailing spaces of a `char(128)` column. Returns `None` for
    /// anything else.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        let bytes = Zeroizing::new(hex::decode(text.trim_end()).ok()?);
        let (md5, sha256) = match 2 * bytes.len() {
            MD5_DIGITS => (Some(&bytes[..]), None),
            SHA256_DIGITS => (None, Some(&bytes[..])),
            both if both == MD5_DIGITS + SHA256_DIGITS => {
                let (md5, sha256) = bytes.split_at(MD5_DIGITS / 2);
                (Some(md5), Some(sha256))
            }
            _ => return None,
        };
        Some(Self { md5: md5.map(Key::from_bytes), sha256: sha256.map(Key::from_bytes) })
    }

    #[must_use]
    pub fn to_hex(&self) -> Zeroizing<String> {
        let digits =
            |key: &Option<Key>| key.as_ref().map_or_else(String::new, |key| hex::encode(key.expose()));
        Zeroizing::new(digits(&self.md5) + &digits(&self.sha256))
    }

    #[must_use]
    pub fn get(&self, algorithm: KeyAlgorithm) -> Option<&Key> {
        match algorithm {
            KeyAlgorithm::Md5 => self.md5.as_ref(),
            KeyAlgorithm::Sha256 => self.sha256.as_ref(),
        }
    }

    #[must_use]
    pub fn kinds(&self) -> &'static str {
        match (&self.md5, &self.sha256) {
            (Some(_), Some(_)) => "MD5, SHA-256",
            (Some(_), None) => "MD5",
            (None, Some(_)) => "SHA-256",
            (None, None) => "none",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The MD5 key is from coturn's example database.
    #[test]
    fn keys_are_derived_from_name_realm_and_password() {
        let keys = UserKeys::new("gorst", "north.gov", "hero");
        let digits = keys.to_hex();
        assert_eq!(&digits[..32], "7da2270ccfa49786e0115366d3a3d14d");
        assert_eq!(digits.len(), 96);
        assert_eq!(UserKeys::from_hex(&digits), Some(keys.clone()));
        assert_eq!(UserKeys::from_hex(&format!("{:128}", *digits)), Some(keys));
    }

    #[test]
    fn digit_count_selects_the_algorithms() {
        for (digits, kinds) in [(32, "MD5"), (64, "SHA-256"), (96, "MD5, SHA-256")] {
            let keys = UserKeys::from_hex(&"a1".repeat(digits / 2)).expect("keys");
            assert_eq!((keys.kinds(), keys.to_hex().len()), (kinds, digits));
        }
        for bad in ["", "a", &"a".repeat(31), &"a".repeat(128), &"g".repeat(32), "hunter2"] {
            assert_eq!(UserKeys::from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn debug_output_never_contains_a_key() {
        assert!(!format!("{:?}", UserKeys::from_hex(&"ab".repeat(16))).contains("ab"));
    }
}
