//! Time-limited credentials of the TURN REST API (draft-uberti-behave-turn-rest; coturn's `use-auth-secret`
//! and `static-auth-secret`), and stored keys. `turnpike credentials` prints them, and the server checks
//! them.
//!
//! `username = expiry ":" id`, `password = base64(HMAC-SHA1(secret, username))`, expiry in seconds of Unix
//! time. The server also accepts coturn's other forms; see [`parse`].

use std::time::{SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use turnpike_wire::{
    integrity::{Key, KeyAlgorithm},
    precis::opaque_string,
};

use crate::Secret;

/// Formats random bytes as a new secret in hex digits.
#[must_use]
pub fn new_secret(random: [u8; 32]) -> Secret {
    Secret::new(hex::encode(random))
}

pub fn password(secret: &Secret, username: &str) -> Secret {
    let mut mac = Hmac::<Sha1>::new_from_slice(secret.reveal().as_bytes())
        .unwrap_or_else(|_| unreachable!("HMAC accepts keys of any length"));
    mac.update(username.as_bytes());
    Secret::new(STANDARD.encode(mac.finalize().into_bytes()))
}

pub fn username(expiry: u64, id: &str) -> String {
    format!("{expiry}:{id}")
}

/// Maximum number of seconds until an expiry: ten years. A later expiry is an error, usually a time in
/// milliseconds.
pub const MAX_AHEAD: u64 = 10 * 366 * 86_400;

/// Number of digits in any Unix time since 2001. The unusual forms need at least as many; otherwise
/// `sip:5060` would be a time-limited username.
const TIME_DIGITS: usize = 10;

/// Splits a time-limited username into its expiry and id. The forms are those of coturn 4.17
/// (`get_rest_api_timestamp` in `userdb.c`):
///
/// ```text
/// EXPIRY:ID     digits before the first colon
/// EXPIRY        only a number, without an id
/// :EXPIRY       a number after a leading colon
/// ID:EXPIRY     other text before the first colon
/// ```
///
/// coturn reads the last three with atol(3), which ignores text after the digits. A number that is too large
/// becomes [`u64::MAX`].
pub fn parse(username: &str) -> Option<(u64, &str)> {
    match username.split_once(':') {
        Some(("", rest)) => leading_time(rest),
        Some((expiry, id)) if is_number(expiry) => Some((number(expiry), id)),
        Some((id, expiry)) => leading_time(expiry).map(|(expiry, _)| (expiry, id)),
        None if is_number(username) => Some((number(username), "")),
        None => leading_time(username),
    }
}

/// Splits a leading time and the text after it, without a colon between the two.
fn leading_time(text: &str) -> Option<(u64, &str)> {
    // Characters that strtol(3) skips before the digits.
    let text = text.trim_start_matches([' ', '\t', '\n', '\u{b}', '\u{c}', '\r']);
    let text = text.strip_prefix('+').unwrap_or(text);
    let len = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, rest) = text.split_at(len);
    (len >= TIME_DIGITS).then(|| (number(digits), rest.strip_prefix(':').unwrap_or(rest)))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn number(digits: &str) -> u64 {
    digits.parse().unwrap_or(u64::MAX)
}

/// Long-term keys of a user in hex digits, MD5 and SHA-256 (RFC 8489 sections 9.2.2 and 18.5.1).
pub fn stored_keys(name: &str, realm: &str, password: &Secret) -> (String, String) {
    let key = |algorithm| {
        let key = Key::long_term(algorithm, &opaque_string(name), realm, password.reveal().as_bytes());
        hex::encode(key.expose())
    };
    (key(KeyAlgorithm::Md5), key(KeyAlgorithm::Sha256))
}

/// Identifies a secret where it must not be shown: the first 16 hex digits of its SHA-256.
pub fn fingerprint(secret: &Secret) -> String {
    hex::encode(&Sha256::digest(secret.reveal())[..8])
}

/// Username and password, valid for `ttl` seconds from now, as two lines for people and scripts.
pub fn time_limited(secret: &Secret, id: &str, ttl: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let username = username(now.saturating_add(ttl), id);
    format!("username: {username}\npassword: {}", password(secret, &username).reveal())
}

pub fn user_entry(name: &str, realm: &str, password: &Secret) -> String {
    let (md5, sha256) = stored_keys(name, realm, password);
    let name = toml::Value::String(name.to_owned());
    format!("{{ name = {name}, key = [\"{md5}\", \"{sha256}\"] }}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with `printf %s 1700000000:alice | openssl dgst -sha1 -hmac north -binary | base64`.
    #[test]
    fn password_is_the_base64_of_the_hmac_sha1_of_the_username() {
        let made = password(&Secret::new("north"), "1700000000:alice");
        assert_eq!(made.reveal(), "Cd/49soE35ICqcJF/bCTn8Z4OyE=");
    }

    #[test]
    fn stored_keys_are_the_hashes_of_name_realm_and_password() {
        let (md5, sha256) = stored_keys("user", "realm", &Secret::new("pass"));
        assert_eq!(md5, "8493fbc53ba582fb4c044c456bdc40eb");
        assert_eq!(sha256, "07e934117abd40836e7c6329b54731b2b2d2a5f9a71f544922d75e0730d8251b");
    }

    #[test]
    fn fingerprint_is_the_beginning_of_a_hash() {
        assert_eq!(fingerprint(&Secret::new("north")), "dc365e79d41cfae1");
    }

    #[test]
    fn time_limited_username_starts_with_digits() {
        assert_eq!(parse("1700000000:alice"), Some((1_700_000_000, "alice")));
        assert_eq!(parse("1700000000:a:b"), Some((1_700_000_000, "a:b")));
        assert_eq!(parse("1700000000"), Some((1_700_000_000, "")));
        for other in ["alice", "+5:alice", ":alice", "", "-1:a"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    /// Each name was checked with `get_rest_api_timestamp` and `get_real_username` of coturn 4.17.
    #[test]
    fn coturn_forms_are_time_limited_usernames() {
        for (name, parsed) in [
            ("bob:1700000000", Some((1_700_000_000, "bob"))),
            ("bob:1700000000:x", Some((1_700_000_000, "bob"))),
            ("@bob:1700000000", Some((1_700_000_000, "@bob"))),
            ("+1:1700000000", Some((1_700_000_000, "+1"))),
            (":1700000000", Some((1_700_000_000, ""))),
            (":1700000000:bob", Some((1_700_000_000, "bob"))),
            ("bob: +1700000000 ", Some((1_700_000_000, "bob"))),
            ("1700000000bob", Some((1_700_000_000, "bob"))),
            ("99999999999999999999999:bob", Some((u64::MAX, "bob"))),
            ("bob:99999999999999999999999", Some((u64::MAX, "bob"))),
            // coturn reads this as an expired time in 1970.
            ("sip:5060", None),
            ("bob:alice", None),
            ("@bob:matrix.example.org", None),
            ("100bob", None),
            (":", None),
            ("::1700000000", None),
        ] {
            assert_eq!(parse(name), parsed, "{name}");
        }
    }
}
