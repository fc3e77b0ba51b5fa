//! Names under which usage is recorded.

use std::borrow::Cow;

use turnpike_config::restapi_credentials;
use turnpike_stores::{CredentialOwner, UsageAccount};

/// User of accounts that share a row because there are too many.
pub(super) const OTHER: &str = "(other)";

/// Name of an allocation's owner: the name that quotas use, with the API key and the identifier if the username
/// contains them.
pub(super) fn label<'a>(identity: &'a str, username: &str) -> Cow<'a, str> {
    if identity.starts_with(':')
        && let Some((_, id)) = restapi_credentials::parse(username)
        && CredentialOwner::parse(id).is_tagged()
    {
        return Cow::Owned([":", id].concat());
    }
    Cow::Borrowed(identity)
}

/// A database cannot store the character NUL.
pub(super) fn account(realm: &str, label: &str) -> UsageAccount {
    let clean = |text: &str| text.replace('\0', "\u{fffd}").into_boxed_str();
    let Some(id) = label.strip_prefix(':') else {
        return UsageAccount { realm: clean(realm), user: clean(label), ..UsageAccount::default() };
    };
    let CredentialOwner { user, key, identifier } = CredentialOwner::parse(id);
    UsageAccount {
        realm: clean(realm),
        user: clean(user),
        key: clean(&key.unwrap_or_default()),
        identifier: clean(&identifier.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use turnpike_stores::credential_id;

    use super::*;

    fn owner(username: &str, identity: &str) -> [String; 3] {
        let UsageAccount { user, key, identifier, .. } = account("r", &label(identity, username));
        [user, key, identifier].map(String::from)
    }

    #[test]
    fn an_issued_username_names_user_key_and_identifier() {
        assert_eq!(owner("alice", "alice"), ["alice", "", ""]);
        assert_eq!(owner("1700000000:alice", ":alice"), ["alice", "", ""]);
        let issued = format!("1700000000:{}", credential_id("alice", Some("shop"), Some("order 7; a")));
        assert_eq!(owner(&issued, ":alice"), ["alice", "shop", "order 7; a"]);
        assert_eq!(owner("a\0b;key=x", "a\0b;key=x"), ["a\u{fffd}b;key=x", "", ""]);
    }
}
