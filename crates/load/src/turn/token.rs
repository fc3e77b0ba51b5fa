//! Access tokens (RFC 7635) as `turnpike credentials --token-key` prints them.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use turnpike_turn::client;

/// What an authorization server gave to a client, in place of a user and a password. Read from the lines of `turnpike credentials
/// --token-key`, `username:`, `mac_key:`, `access_token:` and `expires_in:`, in any order; blanks do for line ends.
#[derive(Clone)]
pub struct AccessToken {
    /// USERNAME: the name (kid) of the key that the token is made with.
    pub kid: String,
    /// Token and session key.
    pub(super) secret: client::AccessToken,
    /// Seconds for which it was good when it was made, where that was told.
    pub expires_in: Option<u64>,
}

/// What is wrong with the text of a token; says nothing of the text itself, which is secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAccessToken {
    /// A line is missing.
    #[error(
        "{0} is missing: give all that `turnpike credentials --token-key` prints, in quotes where it is an argument"
    )]
    Missing(&'static str),
    /// Not base64.
    #[error("{0} is no base64")]
    Encoding(&'static str),
    /// Not a number of seconds.
    #[error("expires_in is no number of seconds")]
    ExpiresIn,
}

impl FromStr for AccessToken {
    type Err = InvalidAccessToken;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let field = |name: &'static str| {
            let mut words = text.split_whitespace();
            words.find(|word| word.strip_suffix(':') == Some(name))?;
            // Another name is not the value of this one.
            words.next().filter(|word| !word.ends_with(':'))
        };
        let bytes = |name| {
            let text = field(name).ok_or(InvalidAccessToken::Missing(name))?;
            STANDARD.decode(text).map_err(|_| InvalidAccessToken::Encoding(name))
        };
        let kid = field("username").ok_or(InvalidAccessToken::Missing("username"))?.to_owned();
        let expires_in = field("expires_in").map(str::parse).transpose();
        Ok(Self {
            kid,
            secret: client::AccessToken { mac_key: bytes("mac_key")?, token: bytes("access_token")? },
            expires_in: expires_in.map_err(|_| InvalidAccessToken::ExpiresIn)?,
        })
    }
}

/// Without the secrets.
impl fmt::Debug for AccessToken {
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
    fn what_credentials_prints_is_read_on_lines_or_on_one() {
        for text in [PRINTED.to_owned(), PRINTED.replace('\n', " "), PRINTED.replace('\n', "\r\n")] {
            let token: AccessToken = text.parse().expect("a token");
            assert_eq!((token.kid.as_str(), token.expires_in), ("north", Some(60)));
            assert_eq!(token.secret.mac_key, (1..=16).collect::<Vec<u8>>());
            assert_eq!(token.secret.token, [0, 12, 0xDE, 0xAE, 0xFF]);
            assert!(!format!("{token:?}").contains("AQIDB"), "{token:?}");
        }
        let without = PRINTED.replace("expires_in: 60", "");
        assert_eq!(without.parse::<AccessToken>().expect("a token").expires_in, None);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let refused = |text: &str| text.parse::<AccessToken>().expect_err("no token");
        for name in ["username", "mac_key", "access_token"] {
            assert_eq!(refused(&PRINTED.replace(name, "x")), InvalidAccessToken::Missing(name));
        }
        // What a shell passes on of output without quotes.
        assert_eq!(refused("username:"), InvalidAccessToken::Missing("username"));
        assert_eq!(refused("username: mac_key: AAAA"), InvalidAccessToken::Missing("username"));
        assert_eq!(refused(&PRINTED.replace("AAz", "%%")), InvalidAccessToken::Encoding("access_token"));
        assert_eq!(refused(&PRINTED.replace("60", "soon")), InvalidAccessToken::ExpiresIn);
    }
}
