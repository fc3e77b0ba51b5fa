//! `[oauth]`: third-party authorization (RFC 7635), with tokens instead of passwords.

use std::fs;

use turnpike_convert::toml_text::{list, quoted};
use turnpike_strict::{ValueNode, find};
use turnpike_turn::access_token::TokenKey;
use turnpike_wire::names::is_username;
use turnpike_wire::secret::MASK;

use super::{
    key::{ValueKind, text},
    read::ValueReader,
};
use crate::{Secret, access_tokens::token_key};

#[derive(Clone, Debug, PartialEq)]
pub struct OauthSettings {
    /// Server name in the tokens; if empty, the name of `server.realm` is used.
    pub server_name: String,
    /// Tolerated clock difference in seconds.
    pub skew: u32,
    pub keys: Vec<TokenKeySettings>,
}

impl Default for OauthSettings {
    fn default() -> Self {
        Self { server_name: String::new(), skew: 5, keys: Vec::new() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct TokenKeySettings {
    pub kid: String,
    pub key: TokenKey,
    /// Maximum lifetime, in seconds, of tokens made with this key.
    pub max_lifetime: u32,
    /// Realm that accepts the tokens; `None` means `server.realm`.
    pub realm: Option<String>,
}

pub(super) const SERVER_NAME: ValueKind<String> =
    text!("a name of at most 255 bytes without control characters, or \"\" for server.realm", |name| {
        name.len() <= 255 && !name.contains(char::is_control)
    });

pub(super) const KEYS: ValueKind<Vec<TokenKeySettings>> = ValueKind::list(
    "[[oauth.key]] with a kid and either key = \"base64 of 16 or 32 bytes\" or key_file = \"FILE\"; optionally algorithm \
               (\"A128GCM\", \"A256GCM\"), lifetime (seconds, 1 to 31536000) and realm",
    |reader, node| reader.list(node, issuer_key),
    |keys| {
        list(keys.iter().map(|key| {
            let realm =
                key.realm.as_deref().map_or_else(String::new, |name| format!(", realm = {}", quoted(name)));
            format!(
                "{{ kid = {}, key = {}, algorithm = {}, lifetime = {}{realm} }}",
                quoted(&key.kid),
                quoted(MASK),
                quoted(key.key.algorithm()),
                key.max_lifetime
            )
        }))
    },
)
.secret();

fn issuer_key(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<TokenKeySettings> {
    let entries = reader.table(node, &["kid", "key", "key_file", "algorithm", "lifetime", "realm"])?;
    let find = |wanted| find(entries, wanted);
    let Some(kid_node) = find("kid") else {
        return reader.refuse(node, Some("it has no kid".to_owned()));
    };
    let kid = reader.text(kid_node)?;
    if !is_username(&kid) {
        let why = "a kid is 1 to 508 bytes long, without control characters or colons";
        return reader.refuse(kid_node, Some(why.to_owned()));
    }
    let (at, key) = match (find("key"), find("key_file")) {
        (Some(key), None) => (key, reader.secret(key)?),
        (None, Some(file)) => {
            let path = reader.text(file)?;
            match fs::read_to_string(&path).map(Secret::new) {
                Ok(text) => (file, Secret::new(text.reveal().lines().next().unwrap_or_default())),
                Err(error) => return reader.refuse(file, Some(format!("cannot read {path}: {error}"))),
            }
        }
        _ => return reader.refuse(node, Some("it needs either a key or a key_file".to_owned())),
    };
    let key = match token_key(&key) {
        Ok(key) => key,
        Err(error) => return reader.refuse(at, Some(error.to_string())),
    };
    if let Some(algorithm) = find("algorithm")
        && reader.text(algorithm)? != key.algorithm()
    {
        let why = format!("a key of this length is for {}", key.algorithm());
        return reader.refuse(algorithm, Some(why));
    }
    let max_lifetime = match find("lifetime") {
        Some(node) => reader.integer(node, &(1..=31_536_000))?,
        None => 86_400,
    };
    let realm = match find("realm") {
        Some(node) => Some(reader.text(node)?),
        None => None,
    };
    Some(TokenKeySettings { kid, key, max_lifetime, realm })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The default is from RFC 7635 section 7.
    #[test]
    fn default_clock_skew_is_five_seconds() {
        assert_eq!(OauthSettings::default().skew, 5);
    }
}
