//! Four traits for decisions that the embedding program makes: [`Users`], [`Quotas`], [`Restrictions`] and
//! [`Redirects`]. They are called only for requests, never for packets, and no call may block. `relay` and `serve`
//! implement them; rules that need no embedding program are in this folder.

pub(crate) mod alternate;
pub(crate) mod amplification;
pub(crate) mod client_rules;
pub(crate) mod duration_limit;
pub(crate) mod own_endpoints;
pub(crate) mod peer_rules;
pub(crate) mod prefix;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::integrity::{Key, KeyAlgorithm};

use super::{Client, Occasion, RelayTransport, Transport};
use crate::time::Now;

pub trait Policy: Users + Quotas + Restrictions + Redirects {}

impl<P: Users + Quotas + Restrictions + Redirects> Policy for P {}

pub trait Users {
    /// Calls `verify` with each candidate key until it returns true.
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck;
}

impl Users for () {
    fn check(
        &self,
        _: User<'_>,
        _: &str,
        _: KeyAlgorithm,
        _: u64,
        _: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        CredentialCheck::NoSuchUser
    }
}

pub trait Quotas {
    /// Counts one more allocation, unless a limit is reached. `prefix` is the client's
    /// ([`super::ServerConfig::prefixes`]).
    fn acquire(&self, user: UserRef<'_>, prefix: IpAddr) -> Result<(), QuotaRefusal>;

    fn release(&self, user: UserRef<'_>, prefix: IpAddr);
}

pub trait Restrictions {
    /// `address` is canonical, may be bound or external, and may belong to any worker.
    fn is_relayed(&self, _address: SocketAddr, _transport: RelayTransport) -> bool {
        false
    }

    /// Consequences of volume quotas that this user, its API key or its realm has used up. Asked for new
    /// allocations, and again with each report of usage.
    fn volume_limits(&self, _user: UserRef<'_>, _username: &str) -> VolumeLimits {
        VolumeLimits::default()
    }

    /// If true, the request is refused with 403.
    fn is_banned(&self, _unix: u64, _user: UserRef<'_>, _username: &str, _client: IpAddr) -> bool {
        false
    }
}

pub trait Redirects {
    /// True if a redirected client has returned on the same 5-tuple. Such a client does not follow redirects,
    /// so it is served here.
    fn comes_back(&self, _attempt: &AllocateAttempt<'_>) -> bool {
        false
    }

    fn redirect_target(&self, _attempt: &AllocateAttempt<'_>, _transport: Transport) -> Option<Destination> {
        None
    }

    /// Client-facing address of another node, for this transport and address family.
    fn node(&self, _node: u16, _transport: Transport, _v4: bool) -> Option<Destination> {
        None
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeLimits {
    /// New allocations are refused with 486.
    pub refuse: bool,
    /// Bits per second of each user in each direction; at least 1000.
    pub per_user: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserRef<'a> {
    pub realm: &'a str,
    /// Name that is unique within the realm: the username, or the ID in a time-limited credential.
    pub identity: &'a str,
}

impl<'a> UserRef<'a> {
    #[must_use]
    pub const fn new(realm: &'a str, identity: &'a str) -> Self {
        Self { realm, identity }
    }

    /// Realm names contain no control characters, so keys of different realms never collide.
    #[must_use]
    pub fn key(self) -> String {
        [self.realm, "\0", self.identity].concat()
    }
}

#[derive(Clone, Copy, Debug)]
pub enum User<'a> {
    Name(&'a str),
    /// USERHASH (RFC 8489 section 14.4).
    Hash(&'a [u8; 32]),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialCheck {
    Accepted {
        username: Box<str>,
        /// Identity that quotas count: the ID of an `expiry:id` credential, otherwise the username.
        identity: Box<str>,
        /// Expiry in Unix seconds. After this time, the credential cannot be used for new allocations, but
        /// existing ones continue.
        until_unix: Option<u64>,
    },
    NoSuchUser,
    Expired {
        /// Seconds since expiry.
        ago: u64,
    },
    /// The credential's expiry is implausibly far in the future.
    TooFarAhead {
        /// Seconds from now.
        ahead: u64,
    },
    WrongKey {
        /// Username for the log, where a USERHASH would not help.
        username: Box<str>,
    },
    /// Keys must be looked up first: the server emits [`crate::server::Effect::LookUp`] and waits for
    /// [`crate::server::Server::finish_lookup`].
    NeedsLookup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaRefusal {
    User,
    Prefix,
    /// Error 508: the limit of the realm or the server is reached, but another server may have room.
    Total,
    /// Error 508: no other server has room either, because all servers share the limit.
    Everywhere,
    /// This server has requested a larger share of a fleet-wide limit, which takes a few tenths of a second.
    Undecided {
        /// True if it is the user's limit, false if it is the realm's or the total.
        is_user: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub struct AllocateAttempt<'a> {
    pub now: Now,
    pub client: Client,
    pub user: UserRef<'a>,
    pub transaction: [u8; 12],
    pub occasion: Occasion,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Same family as the client's address.
    pub address: SocketAddr,
    /// Same server's address in the other family.
    pub second: Option<SocketAddr>,
    /// Name in the server's certificate, if clients need it.
    pub domain: Option<Arc<str>>,
}
