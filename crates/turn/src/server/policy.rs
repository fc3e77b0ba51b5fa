//! Decisions that the state machine leaves to others, as four traits: [`Users`], [`Quotas`], [`Restrictions`] and [`Redirects`]. Requests
//! call them, packets never do, and none may wait. `relay` and `daemon` implement them; the rules that need nobody else are in the files
//! of this folder.

pub(crate) mod alternate;
pub(crate) mod amplification;
pub(crate) mod own_endpoints;
pub(crate) mod peer_rules;
pub(crate) mod prefix;
pub(crate) mod session_limit;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::integrity::{Key, KeyAlgorithm};

use super::{Client, Occasion, RelayTransport, Transport};
use crate::time::Now;

/// All decisions about requests; implemented by every type that has the four parts.
pub trait Policy: Users + Quotas + Restrictions + Redirects {}

impl<P: Users + Quotas + Restrictions + Redirects> Policy for P {}

/// Users and their keys.
pub trait Users {
    /// Looks a user up and calls `verify` with each candidate key (several when secrets rotate) until it returns true.
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup;
}

/// No users.
impl Users for () {
    fn check(
        &self,
        _: User<'_>,
        _: &str,
        _: KeyAlgorithm,
        _: u64,
        _: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup {
        Lookup::NoSuchUser
    }
}

/// Limits on the number of allocations.
pub trait Quotas {
    /// Counts one more allocation of a user, by a client of this prefix ([`super::ServerConfig::prefixes`]), or refuses.
    ///
    /// # Errors
    /// The limit that is reached; then nothing is counted.
    fn acquire(&self, user: UserRef<'_>, prefix: IpAddr) -> Result<(), QuotaRefusal>;

    /// Counts one less.
    fn release(&self, user: UserRef<'_>, prefix: IpAddr);
}

/// Clients that are refused whatever their credentials and quotas.
pub trait Restrictions {
    /// True if a relayed transport address of any worker is this one, as bound or as clients are told; canonical. By default none is.
    fn is_relayed(&self, _address: SocketAddr, _transport: RelayTransport) -> bool {
        false
    }

    /// True if the user, by username or identity, or the client's address is banned: 403. By default none is.
    fn is_banned(&self, _unix: u64, _user: UserRef<'_>, _username: &str, _client: IpAddr) -> bool {
        false
    }
}

/// Other servers of the fleet.
pub trait Redirects {
    /// True if this server, which drains, has redirected the client and it came back from the same 5-tuple: it does not follow redirects, and
    /// is served. By default none is.
    fn comes_back(&self, _attempt: &AllocateAttempt<'_>) -> bool {
        false
    }

    /// The server that gets a client of this transport instead of this one. By default none.
    fn redirect_target(&self, _attempt: &AllocateAttempt<'_>, _transport: Transport) -> Option<Destination> {
        None
    }

    /// The client-facing address of another node, by its number, for this transport and the client's family. By default none.
    fn node(&self, _node: u16, _transport: Transport, _v4: bool) -> Option<Destination> {
        None
    }
}

/// A user as quotas count it: an identity, which is unique within its realm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserRef<'a> {
    /// The realm.
    pub realm: &'a str,
    /// The username, or for a time-limited credential the ID in it.
    pub identity: &'a str,
}

impl<'a> UserRef<'a> {
    /// This user of this realm.
    #[must_use]
    pub const fn new(realm: &'a str, identity: &'a str) -> Self {
        Self { realm, identity }
    }

    /// A key for tables. Realm names have no control characters, so no identity can reach into another realm.
    #[must_use]
    pub fn key(self) -> String {
        [self.realm, "\0", self.identity].concat()
    }
}

/// How a request names its user.
#[derive(Clone, Copy, Debug)]
pub enum User<'a> {
    /// USERNAME.
    Name(&'a str),
    /// USERHASH (RFC 8489 section 14.4).
    Hash(&'a [u8; 32]),
}

/// Result of a credential check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// `verify` accepted a key.
    Accepted {
        /// The username as it stands in the key, for the session's log line (and to answer a USERHASH request).
        username: Box<str>,
        /// Identity that quotas count: for `expiry:id` credentials derived from the id, else the username.
        identity: Box<str>,
        /// Last Unix second of a time-limited credential. It makes no allocation after that, but those that it made go on.
        until_unix: Option<u64>,
    },
    /// No such user.
    NoSuchUser,
    /// A time-limited username whose time is over, and no key that verifies.
    Expired {
        /// Seconds since then.
        ago: u64,
    },
    /// A time-limited username with an expiry that lies too far ahead to be meant.
    TooFarAhead {
        /// Seconds from now.
        ahead: u64,
    },
    /// A user, but no key that verifies.
    WrongKey {
        /// For the log; a USERHASH alone would not help the operator.
        username: Box<str>,
    },
    /// The store must be queried asynchronously: by [`crate::server::Effect::LookUp`], which [`crate::server::Server::credentials`] answers.
    Later,
}

/// Which quota an allocation would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaRefusal {
    /// Allocations of this user: 486.
    User,
    /// Allocations of the client's address prefix: 486.
    Prefix,
    /// Allocations of the realm, or in total: 508, and another server may have room.
    Total,
    /// Allocations of the realm or in total, over all servers that share the limit: 508 as well, and no other server would say otherwise.
    Everywhere,
    /// Not known yet: this server has used up its share of such a limit, and asks for more. It knows within a few tenths of a second.
    Undecided {
        /// Of the user's limit, or else of the realm's or the total.
        is_user: bool,
    },
}

/// An Allocate request that another server might serve.
#[derive(Clone, Copy, Debug)]
pub struct AllocateAttempt<'a> {
    /// Time of the request.
    pub now: Now,
    /// The client's 5-tuple.
    pub client: Client,
    /// Its user.
    pub user: UserRef<'a>,
    /// Of the request; a retransmission has the same.
    pub transaction: [u8; 12],
    /// Reason for a redirect.
    pub occasion: Occasion,
}

/// Where a client is sent by 300 (Try Alternate).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Of the family of the client's own address.
    pub address: SocketAddr,
    /// The same server's address of the other family, if it has one.
    pub second: Option<SocketAddr>,
    /// The name in its certificate, where clients are to be told one.
    pub domain: Option<Arc<str>>,
}
