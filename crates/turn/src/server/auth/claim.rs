//! The user of a request: claimed, proven, and authorized by a token.

use std::{str, sync::Arc};

use serde::{Deserialize, Serialize};
use turnpike_wire::{
    integrity::{Key, Mac},
    stun::kind,
};

use crate::{
    server::{
        CredentialRefusal, User, UserRef,
        auth::{nonce::Standing, realm::Terms, secret},
        request::Request,
    },
    time::Now,
};

/// Bytes of USERNAME. RFC 8489 section 14.3 has fewer than 509, and 763 from clients of RFC 5389.
const MAX_USERNAME_LEN: usize = 763;

/// The proven sender of a request. By default no user.
#[derive(Default)]
pub(crate) struct Who {
    /// Users of the same name in two realms are two users.
    pub(crate) realm: Arc<str>,
    pub(crate) username: Box<str>,
    pub(crate) identity: Box<str>,
    /// Of a client that authenticates with a token.
    pub(crate) grant: Option<Box<Grant>>,
    /// Last Unix second of a time-limited credential.
    pub(crate) until_unix: Option<u64>,
}

impl Who {
    /// The user, as quotas count it.
    pub(crate) fn user(&self) -> UserRef<'_> {
        UserRef::new(&self.realm, &self.identity)
    }

    /// So many seconds, but no longer than the token lives.
    pub(crate) fn limit(&self, now: Now, seconds: u32) -> u32 {
        self.grant.as_ref().map_or(seconds, |grant| grant.limit(now, seconds))
    }

    /// Seconds since a time-limited credential expired.
    pub(crate) fn expired(&self, now: Now) -> Option<u64> {
        now.unix.checked_sub(self.until_unix?).filter(|ago| *ago > 0)
    }
}

/// Claims of a signed request, before any of them is proven.
pub(crate) struct Claim<'a> {
    pub(crate) user: User<'a>,
    pub(crate) realm: Arc<Terms>,
    pub(crate) mac: Mac,
    /// Standing of its nonce.
    pub(crate) standing: Standing,
}

/// A request that is authentic.
pub(crate) struct Proof {
    pub(crate) key: Key,
    pub(crate) username: Box<str>,
    /// Identity that quotas count; with a token, its holder.
    pub(crate) identity: Box<str>,
    /// Where a token authenticates it.
    pub(crate) grant: Option<Box<Grant>>,
    /// Last Unix second of a time-limited credential.
    pub(crate) until_unix: Option<u64>,
}

/// The verdict on credentials: a proof, or the reason of a refusal with the username where the store knows it better than the request.
pub(crate) type Checked = Result<Proof, (Option<Box<str>>, CredentialRefusal)>;

/// Facts of an accepted token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// Signs the client's requests.
    #[serde(with = "secret::key")]
    pub(crate) key: Key,
    /// Unix seconds at which it ends, the allowed skew left out.
    pub(crate) until_unix: u64,
}

impl Grant {
    /// Whether both are of one token: its key is secret, and known to one client.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.key == other.key
    }

    /// No allocation outlives its token (section 9). One second is left to those that live within the allowed skew.
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

/// The user that a request names.
pub(crate) fn claimed(user: User<'_>) -> &str {
    match user {
        User::Name(name) => name,
        User::Hash(_) => "(userhash)",
    }
}
