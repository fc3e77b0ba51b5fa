//! OpaqueString (RFC 8265 section 4.2), which RFC 8489 applies to usernames, realms and passwords.

use std::borrow::Cow;

use precis_profiles::{OpaqueString, precis_core::profile::Profile as _};

/// Applies OpaqueString. A string with a forbidden character stays unchanged, because it may already be in
/// use as a name.
#[must_use]
pub fn opaque_string(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    OpaqueString::new().enforce(text).unwrap_or(Cow::Borrowed(text))
}

pub(crate) fn opaque_bytes(bytes: &[u8]) -> Cow<'_, [u8]> {
    match str::from_utf8(bytes).map(opaque_string) {
        Ok(Cow::Owned(text)) => Cow::Owned(text.into_bytes()),
        _ => Cow::Borrowed(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_composed_and_spaces_are_ascii() {
        for (text, expected) in [
            ("alice", "alice"),
            (" two  spaces ", " two  spaces "),
            ("e\u{301}", "\u{e9}"),
            ("no\u{a0}break", "no break"),
            ("\u{3000}wide", " wide"),
            // Neither width nor case is mapped.
            ("\u{ff21}\u{df}", "\u{ff21}\u{df}"),
            // OpaqueString forbids the soft hyphen, which SASLprep removed (RFC 5769 section 2.4).
            ("TheMatrIX", "TheMatrIX"),
            (
                "\u{30de}\u{30c8}\u{30ea}\u{30c3}\u{30af}\u{30b9}",
                "\u{30de}\u{30c8}\u{30ea}\u{30c3}\u{30af}\u{30b9}",
            ),
        ] {
            assert_eq!(opaque_string(text), expected, "{text:?}");
            assert_eq!(&*opaque_bytes(text.as_bytes()), expected.as_bytes());
        }
    }

    #[test]
    fn strings_the_profile_forbids_stay_unchanged() {
        for text in ["", "e\u{301}\u{7f}", "The\u{ad}M\u{aa}tr\u{2168}", "e\u{301}\u{200b}"] {
            assert_eq!(opaque_string(text), text);
        }
        assert_eq!(&*opaque_bytes(b"\xff\xfe"), b"\xff\xfe");
    }
}
