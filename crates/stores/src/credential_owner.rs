//! Owner of an issued credential, in the id of its time-limited username:
//! `USER[;key=API-KEY][;id=IDENTIFIER]`. Every server with the realm's secret can thus tell whose usage an
//! allocation is, without a look-up.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Characters that stay as they are in a key or an identifier.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialOwner<'a> {
    /// Name that quotas use.
    pub user: &'a str,
    /// Name of the API key that the credential was issued to.
    pub key: Option<Cow<'a, str>>,
    /// The application's own name for its customer.
    pub identifier: Option<Cow<'a, str>>,
}

impl<'a> CredentialOwner<'a> {
    #[must_use]
    pub fn parse(id: &'a str) -> Self {
        let (rest, identifier) = tagged(id, ";id=");
        let (user, key) = tagged(rest, ";key=");
        Self { user, key, identifier }
    }

    /// True if the id contains more than the user.
    #[must_use]
    pub fn is_tagged(&self) -> bool {
        self.key.is_some() || self.identifier.is_some()
    }
}

/// The id of a credential, for [`CredentialOwner::parse`].
#[must_use]
pub fn credential_id(user: &str, key: Option<&str>, identifier: Option<&str>) -> String {
    let mut id = user.to_owned();
    for (tag, value) in [(";key=", key), (";id=", identifier)] {
        if let Some(value) = value {
            id.push_str(tag);
            id.extend(utf8_percent_encode(value, PLAIN));
        }
    }
    id
}

/// Splits off the last tag, if its value is encoded as [`credential_id`] does it.
fn tagged<'a>(id: &'a str, tag: &str) -> (&'a str, Option<Cow<'a, str>>) {
    let Some((rest, value)) = id.rsplit_once(tag) else { return (id, None) };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte);
    match percent_decode_str(value).decode_utf8() {
        Ok(decoded) if !value.is_empty() && value.bytes().all(is_plain) => (rest, Some(decoded)),
        _ => (id, None),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_id_without_tags_is_the_user() {
        for id in ["alice", "", "a;key=", "a;key=b c", "a;id=x;y", "sip:a;transport=udp"] {
            let owner = CredentialOwner::parse(id);
            assert_eq!((owner.user, owner.is_tagged()), (id, false));
        }
    }

    #[test]
    fn tags_are_short_and_readable() {
        assert_eq!(credential_id("alice", Some("shop"), Some("order 7")), "alice;key=shop;id=order%207");
    }

    proptest! {
        #[test]
        fn an_owner_round_trips(user in ".{0,20}", key in ".{1,20}", identifier in proptest::option::of(".{1,20}")) {
            let id = credential_id(&user, Some(&key), identifier.as_deref());
            let owner = CredentialOwner::parse(&id);
            prop_assert_eq!((owner.user, owner.key.as_deref()), (&*user, Some(&*key)));
            prop_assert_eq!(owner.identifier.as_deref(), identifier.as_deref());
        }
    }
}
