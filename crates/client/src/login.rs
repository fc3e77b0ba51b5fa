//! Long-term credential as typed: `NAME:PASSWORD`.

use std::{fmt, str::FromStr};

use crate::InvalidSetting;

/// Number of digits of a Unix time in seconds (since 2001).
const TIME_DIGITS: usize = 10;

#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// Username; a time-limited one contains a colon.
    pub name: String,
    pub password: String,
}

impl FromStr for Login {
    type Err = InvalidSetting;

    /// The name ends at the first colon. The name of a time-limited credential ends at the last colon, since
    /// its base64 password contains none.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = |what: &str| Err(InvalidSetting(format!("{what}: expected NAME:PASSWORD")));
        let split = if is_time_limited(text) { text.rsplit_once(':') } else { text.split_once(':') };
        match split {
            None => refused("there is no colon, so no password was given"),
            Some(("", _)) => refused("the name before the colon is empty"),
            Some((_, "")) => refused("the password after the colon is empty"),
            Some((name, password)) => Ok(Self { name: name.to_owned(), password: password.to_owned() }),
        }
    }
}

/// Returns true if `text` has two or more colons, with a time before one of the first two.
fn is_time_limited(text: &str) -> bool {
    let mut parts = text.split(':');
    let (Some(first), Some(second), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    (!first.is_empty() && digits(first) == first.len()) || digits(second) >= TIME_DIGITS
}

/// Omits the password.
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
            [("a", "no colon"), (":b", "name before"), ("a:", "password after the colon is empty")]
        {
            assert!(text.parse::<Login>().is_err_and(|error| error.0.contains(why)), "{text}");
        }
    }
}
