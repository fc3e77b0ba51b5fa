//! Keys and tokens of third-party authorization (RFC 7635).

use std::time::{SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use turnpike_turn::access_token::{AccessToken, NONCE_LEN, TokenKey};
use zeroize::Zeroizing;

use crate::Secret;

/// Length of generated keys: the output size of HMAC-SHA256, above RFC 7635's minimum of 20 bytes.
const MAC_KEY_LEN: usize = 32;

/// Reason why text is not a key. The messages never quote the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenKeyError {
    #[error("a key is base64 of 16 bytes (A128GCM) or 32 bytes (A256GCM); this is not base64")]
    Encoding,
    #[error("a key is base64 of 16 bytes (A128GCM) or 32 bytes (A256GCM); this decodes to {0} bytes")]
    Length(usize),
}

pub fn token_key(text: &Secret) -> Result<TokenKey, TokenKeyError> {
    let bytes = STANDARD.decode(text.reveal().trim()).map_err(|_| TokenKeyError::Encoding)?;
    let bytes = Zeroizing::new(bytes);
    TokenKey::from_bytes(&bytes).ok_or(TokenKeyError::Length(bytes.len()))
}

pub struct MadeToken {
    pub access_token: Secret,
    pub mac_key: Secret,
}

/// Random bytes for one token: its MAC key, and the nonce used to encrypt it.
pub type TokenRandom = ([u8; MAC_KEY_LEN], [u8; NONCE_LEN]);

/// Makes a token for `server_name`, issued at `unix` (seconds) and valid for `ttl` seconds.
#[must_use]
pub fn make(
    key: &TokenKey,
    server_name: &str,
    unix: u64,
    ttl: u32,
    (mac_key, nonce): TokenRandom,
) -> MadeToken {
    let mac_key = Zeroizing::new(mac_key);
    let token = AccessToken::new(&*mac_key, unix, ttl)
        .map_or_else(Vec::new, |token| token.seal(key, server_name, nonce));
    MadeToken {
        access_token: Secret::new(STANDARD.encode(token)),
        mac_key: Secret::new(STANDARD.encode(*mac_key)),
    }
}

/// Makes a token for `server_name`, valid for `ttl` seconds from now, and formats it as `name: value`
/// lines. `kid` is the name of `key` in the server's `oauth.key`.
pub fn access_token(
    key: &Secret,
    kid: &str,
    server_name: &str,
    ttl: u32,
    random: TokenRandom,
) -> Result<String, TokenKeyError> {
    let key = token_key(key)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let MadeToken { access_token, mac_key } = make(&key, server_name, now, ttl, random);
    let (access_token, mac_key) = (access_token.reveal(), mac_key.reveal());
    Ok(format!("username: {kid}\nmac_key: {mac_key}\naccess_token: {access_token}\nexpires_in: {ttl}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_token_decrypts_with_its_key_and_server_name() {
        let text = STANDARD.encode([7; 32]);
        let made = access_token(&Secret::new(&*text), "north", "turn.example.org", 60, ([1; 32], [2; 12]))
            .expect("a key");
        let field = |name: &str| {
            let line = made.lines().find_map(|line| line.strip_prefix(name)).expect("the field exists");
            line.trim_start_matches(": ").to_owned()
        };
        let bytes = STANDARD.decode(field("access_token")).expect("base64");
        let key = token_key(&Secret::new(text)).expect("a key");
        let token = AccessToken::open(&key, "turn.example.org", &bytes).expect("the token opens");
        assert_eq!(STANDARD.encode(token.mac_key()), field("mac_key"));
        assert_eq!((token.lifetime, field("username").as_str()), (60, "north"));
        assert!(AccessToken::open(&key, "turn.example.com", &bytes).is_err());
    }

    #[test]
    fn invalid_key_error_does_not_quote_the_text() {
        let read = |text: &str| token_key(&Secret::new(text));
        assert_eq!(read("hunter2!"), Err(TokenKeyError::Encoding));
        assert_eq!(read(&STANDARD.encode([0; 33])), Err(TokenKeyError::Length(33)));
        assert!(read(&format!("{}\n", STANDARD.encode([0; 16]))).is_ok());
    }
}
