//! Time-limited credentials of the TURN REST API, which coturn has as `use-auth-secret` and `static-auth-secret`
//! (draft-uberti-behave-turn-rest), and stored keys: what `turnpike credentials` prints and the store checks.
//!
//! `username = expiry ":" id`, `password = base64(HMAC-SHA1(secret, username))`, expiry in seconds of Unix time.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, Mac as _};
use md5::{Digest as _, Md5};
use sha1::Sha1;
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::Secret;

/// A secret that nobody has had before: 256 bits, as hex digits.
#[must_use]
pub fn random_secret() -> Secret {
    Secret::new(hex::encode(rand::random::<[u8; 32]>()))
}

/// The password that belongs to a time-limited username.
pub fn password(secret: &Secret, username: &str) -> Secret {
    let mut mac = Hmac::<Sha1>::new_from_slice(secret.reveal().as_bytes())
        .unwrap_or_else(|_| unreachable!("any key length"));
    mac.update(username.as_bytes());
    Secret::new(STANDARD.encode(mac.finalize().into_bytes()))
}

/// A username that is good until `expiry` (Unix seconds).
pub fn username(expiry: u64, id: &str) -> String {
    format!("{expiry}:{id}")
}

/// Splits a time-limited username into its expiry and id; a lone number is a username without id.
pub fn parse(username: &str) -> Option<(u64, &str)> {
    let (expiry, id) = username.split_once(':').unwrap_or((username, ""));
    // `parse` alone would take "+5".
    if expiry.is_empty() || !expiry.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some((expiry.parse().ok()?, id))
}

/// The long-term keys of a user in hex digits, MD5 and SHA-256 (RFC 8489 sections 9.2.2 and 18.5.1), for
/// `auth.users` with `key` instead of a password.
pub fn stored_keys(name: &str, realm: &str, password: &Secret) -> (String, String) {
    let text = Zeroizing::new(format!("{name}:{realm}:{}", password.reveal()));
    (hex::encode(Md5::digest(&text)), hex::encode(Sha256::digest(&text)))
}

/// What a secret is called where it must not be shown: the first 16 hex digits of its SHA-256.
pub fn fingerprint(secret: &Secret) -> String {
    hex::encode(&Sha256::digest(secret.reveal())[..8])
}

/// Username and password from `secret`, good for `ttl` seconds from now, as two lines for people and scripts.
pub fn time_limited(secret: &Secret, id: &str, ttl: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let username = username(now.saturating_add(ttl), id);
    format!("username: {username}\npassword: {}", password(secret, &username).reveal())
}

/// An entry of `auth.users` that holds a user's keys instead of the password.
pub fn user_entry(name: &str, realm: &str, password: &Secret) -> String {
    let (md5, sha256) = stored_keys(name, realm, password);
    let name = toml::Value::String(name.to_owned());
    format!("{{ name = {name}, key = [\"{md5}\", \"{sha256}\"] }}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made with `printf %s 1700000000:alice | openssl dgst -sha1 -hmac north -binary | base64`.
    #[test]
    fn password_is_the_base64_of_the_hmac_sha1_of_the_username() {
        let made = password(&Secret::new("north"), "1700000000:alice");
        assert_eq!(made.reveal(), "Cd/49soE35ICqcJF/bCTn8Z4OyE=");
    }

    /// The MD5 is the example of RFC 8489 section 9.2.2; the other made with `sha256sum`.
    #[test]
    fn stored_keys_are_the_hashes_of_name_realm_and_password() {
        let (md5, sha256) = stored_keys("user", "realm", &Secret::new("pass"));
        assert_eq!(md5, "8493fbc53ba582fb4c044c456bdc40eb");
        assert_eq!(sha256, "07e934117abd40836e7c6329b54731b2b2d2a5f9a71f544922d75e0730d8251b");
    }

    /// Made with `printf %s north | sha256sum`.
    #[test]
    fn a_fingerprint_is_the_beginning_of_a_hash() {
        assert_eq!(fingerprint(&Secret::new("north")), "dc365e79d41cfae1");
    }

    #[test]
    fn only_digits_before_the_colon_make_a_time_limited_username() {
        assert_eq!(parse("1700000000:alice"), Some((1_700_000_000, "alice")));
        assert_eq!(parse("1700000000:a:b"), Some((1_700_000_000, "a:b")));
        assert_eq!(parse("1700000000"), Some((1_700_000_000, "")));
        for other in ["alice", "+5:alice", ":alice", "", "99999999999999999999999:alice", "-1:a"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
