//! What `turnpike user`, `secret` and `realm` write.

use zeroize::Zeroizing;

use crate::UserKeys;

/// A change of a store.
#[derive(Clone, Debug)]
pub enum Edit {
    /// A user, in place of one of the same name.
    PutUser {
        /// Where.
        realm: String,
        /// Who.
        name: String,
        /// With which keys.
        keys: UserKeys,
    },
    /// A user no more.
    RemoveUser {
        /// Where.
        realm: String,
        /// Who.
        name: String,
    },
    /// A secret of time-limited credentials.
    AddSecret {
        /// Where.
        realm: String,
        /// Which.
        secret: Zeroizing<String>,
    },
    /// A secret no more.
    RemoveSecret {
        /// Where.
        realm: String,
        /// Which.
        secret: Zeroizing<String>,
    },
    /// A realm, with limits in place of those that it has.
    PutRealm {
        /// Its name.
        realm: String,
        /// Its limits.
        options: RealmOptions,
    },
    /// A realm no more: its limits, origins and peer rules. Users and secrets stay.
    RemoveRealm {
        /// Its name.
        realm: String,
    },
}

/// Limits of a realm, as coturn names them; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RealmOptions {
    /// Allocations of all its users together.
    pub total_quota: u64,
    /// Allocations of each of its users.
    pub user_quota: u64,
}
