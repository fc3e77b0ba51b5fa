//! What the state machine asks about users: keys and quotas; and about addresses, whether one is ours. `relay` and `daemon` answer.

use std::net::{IpAddr, SocketAddr};

use turnpike_wire::integrity::{Key, KeyAlgorithm};

use super::RelayTransport;

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
    },
    /// No such user.
    NoSuchUser,
    /// A time-limited username whose time is over.
    Expired {
        /// Seconds since then.
        ago: u64,
    },
    /// A user, but no key that verifies.
    WrongKey {
        /// Who; a USERHASH alone would tell the operator nothing.
        username: Box<str>,
    },
    /// Nobody can tell without waiting: ask the store by [`super::Effect::LookUp`], which [`super::Server::credentials`] answers.
    Later,
}

/// Which quota an allocation would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaRefusal {
    /// Allocations of this user: 486.
    User,
    /// Allocations of the client's address prefix: 486.
    Prefix,
    /// Allocations of the realm, or in total: 508.
    Total,
}

/// How many allocations there may be, as one worker sees it. Called on requests only, never on the packet path.
pub trait Quotas {
    /// Counts one more allocation of `identity`, which is unique within `realm`, by a client of this prefix
    /// ([`super::ServerConfig::prefixes`]), or refuses.
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
}
