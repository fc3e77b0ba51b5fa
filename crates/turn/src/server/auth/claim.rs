use std::{str, sync::Arc};

use serde::{Deserialize, Serialize};
use turnpike_wire::{
    integrity::{Key, Mac},
    stun::kind,
};

use crate::{
    server::{
        CredentialRefusal, User, UserRef,
        auth::{masked, nonce::Standing, realm::RealmTerms},
        request::Request,
    },
    time::Now,
};

/// Maximum length of USERNAME in bytes. RFC 8489 section 14.3 allows up to 508; RFC 5389 clients may send up
/// to 763.
const MAX_USERNAME_LEN: usize = 763;

/// Authenticated sender of a request; empty until the request has been authenticated.
#[derive(Default)]
pub(crate) struct Who {
    pub(crate) realm: Arc<str>,
    pub(crate) username: Box<str>,
    pub(crate) identity: Box<str>,
    pub(crate) grant: Option<Box<TokenGrant>>,
    pub(crate) until_unix: Option<u64>,
}

impl Who {
    pub(crate) fn user(&self) -> UserRef<'_> {
        UserRef::new(&self.realm, &self.identity)
    }

    pub(crate) fn limit(&self, now: Now, seconds: u32) -> u32 {
        self.grant.as_ref().map_or(seconds, |grant| grant.limit(now, seconds))
    }

    /// Seconds since expiry.
    pub(crate) fn expired(&self, now: Now) -> Option<u64> {
        now.unix.checked_sub(self.until_unix?).filter(|ago| *ago > 0)
    }
}

/// Unverified claims of a signed request.
pub(crate) struct SignedClaim<'a> {
    pub(crate) user: User<'a>,
    pub(crate) realm: Arc<RealmTerms>,
    pub(crate) mac: Mac,
    pub(crate) standing: Standing,
}

pub(crate) struct VerifiedUser {
    pub(crate) key: Key,
    pub(crate) username: Box<str>,
    /// Identity that quotas count; derived from the token if there is one.
    pub(crate) identity: Box<str>,
    pub(crate) grant: Option<Box<TokenGrant>>,
    /// Expiry of a time-limited credential, in Unix seconds.
    pub(crate) until_unix: Option<u64>,
}

/// Result of the credential check. If only the store knows the username (USERHASH), a refusal includes it.
pub(crate) type Checked = Result<VerifiedUser, (Option<Box<str>>, CredentialRefusal)>;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TokenGrant {
    #[serde(with = "masked::key")]
    pub(crate) key: Key,
    /// Expiry in Unix seconds, without the allowed clock skew.
    pub(crate) until_unix: u64,
}

impl TokenGrant {
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.key == other.key
    }

    /// Limits a lifetime to the remaining lifetime of the token (RFC 7635 section 9), or to one second if the
    /// token has expired by less than the allowed skew.
    pub(crate) fn limit(&self, now: Now, seconds: u32) -> u32 {
        let left = self.until_unix.saturating_sub(now.unix).max(1);
        seconds.min(u32::try_from(left).unwrap_or(u32::MAX))
    }
}

pub(crate) fn user_of<'a>(request: &Request<'a>) -> Option<User<'a>> {
    match request.get(kind::USERNAME) {
        Some(name) if name.len() <= MAX_USERNAME_LEN => str::from_utf8(name).ok().map(User::Name),
        Some(_) => None,
        None => request.get(kind::USERHASH)?.try_into().ok().map(User::Hash),
    }
}

pub(crate) fn claimed(user: User<'_>) -> &str {
    match user {
        User::Name(name) => name,
        User::Hash(_) => "(userhash)",
    }
}
