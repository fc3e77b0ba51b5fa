//! Access tokens (RFC 7635) as printed by `turnpike credentials --token-key`.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use turnpike_turn::client;

/// Parses `username:`, `mac_key:`, `access_token:` and `expires_in:` in any order.
#[derive(Clone)]
pub struct PrintedToken {
    /// USERNAME attribute: the name (kid) of the key with which the token was sealed.
    pub kid: String,
    pub(super) secret: client::AccessToken,
    /// Lifetime in seconds at the time of issue, if given.
    pub expires_in: Option<u64>,
}

impl FromStr for PrintedToken {
    /// Error message. It never quotes the text, because that is secret.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let field = |name: &str| {
            let mut words = text.split_whitespace();
            words.find(|word| word.strip_suffix(':') == Some(name))?;
            words.next().filter(|word| !word.ends_with(':'))
        };
        let needed = |name| {
            field(name).ok_or_else(|| {
                format!(
                    "{name} is missing: give the whole output of `turnpike credentials --token-key`, in quotes on a command line"
                )
            })
        };
        let bytes = |name| STANDARD.decode(needed(name)?).map_err(|_| format!("{name} is not base64"));
        let kid = needed("username")?.to_owned();
        let secret = client::AccessToken { mac_key: bytes("mac_key")?, token: bytes("access_token")? };
        let expires_in = field("expires_in").map(str::parse).transpose();
        let expires_in = expires_in.map_err(|_| "expires_in is not a number of seconds")?;
        Ok(Self { kid, secret, expires_in })
    }
}

/// Omits the secrets.
impl fmt::Debug for PrintedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessToken")
            .field("kid", &self.kid)
            .field("expires_in", &self.expires_in)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str =
        "username: north\nmac_key: AQIDBAUGBwgJCgsMDQ4PEA==\naccess_token: AAzerv8=\nexpires_in: 60\n";

    #[test]
    fn printed_tokens_parse_on_one_or_several_lines() {
        for text in [PRINTED.to_owned(), PRINTED.replace('\n', " "), PRINTED.replace('\n', "\r\n")] {
            let token: PrintedToken = text.parse().expect("a token");
            assert_eq!((token.kid.as_str(), token.expires_in), ("north", Some(60)));
            assert_eq!(token.secret.mac_key, (1..=16).collect::<Vec<u8>>());
            assert_eq!(token.secret.token, [0, 12, 0xDE, 0xAE, 0xFF]);
            assert!(!format!("{token:?}").contains("AQIDB"), "{token:?}");
        }
        let without = PRINTED.replace("expires_in: 60", "");
        assert_eq!(without.parse::<PrintedToken>().expect("a token").expires_in, None);
    }

    #[test]
    fn token_errors_name_the_field() {
        let refused = |text: &str| text.parse::<PrintedToken>().expect_err("no token");
        for name in ["username", "mac_key", "access_token"] {
            assert!(refused(&PRINTED.replace(name, "x")).starts_with(&format!("{name} is missing")));
        }
        // Output without quotes, which the shell has split into words.
        assert!(refused("username:").starts_with("username is missing"));
        assert!(refused("username: mac_key: AAAA").starts_with("username is missing"));
        assert_eq!(refused(&PRINTED.replace("AAz", "%%")), "access_token is not base64");
        assert_eq!(refused(&PRINTED.replace("60", "soon")), "expires_in is not a number of seconds");
    }
}
