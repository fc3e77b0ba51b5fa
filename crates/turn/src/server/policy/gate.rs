//! What the state machine asks about users: keys and quotas; and about addresses, whether one is ours. `relay` and `daemon` answer.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::{
    server::{Client, Occasion, RelayTransport, Transport},
    time::Now,
};

/// How a request names its user.
#[derive(Clone, Copy, Debug)]
pub enum User<'a> {
    /// USERNAME.
    Name(&'a str),
    /// USERHASH (RFC 8489 section 14.4).
    Hash(&'a [u8; 32]),
}

/// What became of a credential check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// `verify` accepted a key.
    Accepted {
        /// The username as it stands in the key, for the session's log line (and to answer a USERHASH request).
        username: Box<str>,
        /// Whom quotas count: for `expiry:id` credentials something made of the id, else the username.
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
        /// Who; a USERHASH alone would tell the operator nothing.
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

/// Who asks for an allocation, and why it might not be made here.
#[derive(Clone, Copy, Debug)]
pub struct AllocateAttempt<'a> {
    /// When.
    pub now: Now,
    /// The client's 5-tuple.
    pub client: Client,
    /// The realm of its user.
    pub realm: &'a str,
    /// Whom quotas count.
    pub identity: &'a str,
    /// Of the request: the same one may come again.
    pub transaction: [u8; 12],
    /// Why.
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

/// How many allocations there may be, as one worker sees it. Called on requests only, never on the packet path.
pub trait Quotas {
    /// Counts one more allocation of `identity`, which is unique within `realm`, by a client of this prefix
    /// ([`crate::server::ServerConfig::prefixes`]), or refuses.
    fn acquire(&mut self, realm: &str, identity: &str, prefix: IpAddr) -> Result<(), QuotaRefusal>;

    /// Counts one less.
    fn release(&mut self, realm: &str, identity: &str, prefix: IpAddr);
}

/// A name for one user of one realm. Realms have no control characters in their names, so that no identity can reach into another realm.
#[must_use]
pub fn user_key(realm: &str, identity: &str) -> String {
    [realm, "\0", identity].concat()
}

/// Users, their keys and relayed addresses, as one worker sees them. Called on requests only, never on the packet path.
pub trait Gate: Quotas {
    /// Looks a user up and calls `verify` with each candidate key (several when secrets rotate) until it returns true. Must not wait.
    fn check(
        &mut self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup;

    /// Whether a relayed transport address of any worker is this one, as bound or as clients are told; canonical. By default none is.
    fn is_relayed(&mut self, _address: SocketAddr, _transport: RelayTransport) -> bool {
        false
    }

    /// Whether this user, or who comes from there, may have nothing for now: 403. By default nobody is banned.
    fn is_banned(&mut self, _unix: u64, _realm: &str, _names: [&str; 2], _client: IpAddr) -> bool {
        false
    }

    /// Whether a client that this server, which drains, has redirected came back from the same 5-tuple: it does not follow redirects, and is served.
    /// By default none is.
    fn comes_back(&mut self, _attempt: &AllocateAttempt<'_>) -> bool {
        false
    }

    /// Where a client goes that came over this transport, if not here. By default there is nowhere.
    fn redirect_target(
        &mut self,
        _attempt: &AllocateAttempt<'_>,
        _transport: Transport,
    ) -> Option<Destination> {
        None
    }

    /// Where clients of another node of the fleet come in, by its number, over this transport and from an address of this family. By
    /// default there is none.
    fn node(&mut self, _node: u16, _transport: Transport, _v4: bool) -> Option<Destination> {
        None
    }
}
