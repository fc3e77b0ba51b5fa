//! A long-term credential as it is typed: `NAME:PASSWORD`.

use std::{fmt, str::FromStr};

use crate::InvalidSetting;

/// Digits of a time since 2001, in seconds.
const TIME_DIGITS: usize = 10;

/// Name and password of a user.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// Username; a time-limited one holds a colon.
    pub name: String,
    /// Its password.
    pub password: String,
}

impl FromStr for Login {
    type Err = InvalidSetting;

    /// The first colon ends the name. Behind a time-limited name (`EXPIRY:ID` or `ID:EXPIRY`) it is the last, as its password is base64.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = |what: &str| Err(InvalidSetting(format!("{what}: expected NAME:PASSWORD")));
        let split = if is_time_limited(text) { text.rsplit_once(':') } else { text.split_once(':') };
        match split {
            None => refused("there is no colon, and so no password"),
            Some(("", _)) => refused("there is no name in front of the colon"),
            Some((_, "")) => refused("the password behind the colon is empty"),
            Some((name, password)) => Ok(Self { name: name.to_owned(), password: password.to_owned() }),
        }
    }
}

/// Whether two colons or more stand in `text`, and a time before one of the first two.
fn is_time_limited(text: &str) -> bool {
    let mut parts = text.split(':');
    let (Some(first), Some(second), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    (!first.is_empty() && digits(first) == first.len()) || digits(second) >= TIME_DIGITS
}

/// Without the password.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Login({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_splits_at_the_colon_that_ends_its_name() {
        for (text, name, password) in [
            ("a:b", "a", "b"),
            ("a:b:c", "a", "b:c"),
            ("1700000000:alice:c2VjcmV0", "1700000000:alice", "c2VjcmV0"),
            ("alice:1700000000:c2VjcmV0", "alice:1700000000", "c2VjcmV0"),
            (":1700000000:c2VjcmV0", ":1700000000", "c2VjcmV0"),
            ("1700000000:pw", "1700000000", "pw"),
        ] {
            let login = Login { name: name.to_owned(), password: password.to_owned() };
            assert_eq!(text.parse(), Ok(login), "{text}");
        }
        for (text, why) in
            [("a", "no colon"), (":b", "no name"), ("a:", "password behind the colon is empty")]
        {
            assert!(text.parse::<Login>().is_err_and(|error| error.0.contains(why)), "{text}");
        }
    }
}
