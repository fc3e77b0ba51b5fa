//! What `turnpike user`, `secret`, `realm` and `key` write.

use zeroize::Zeroizing;

use crate::{ApiKey, UserKeys};

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
    /// Another secret that signs; those that there are count a while longer.
    RotateSecret {
        /// Where.
        realm: String,
        /// Which.
        secret: Zeroizing<String>,
        /// Now, in Unix seconds.
        since: u64,
        /// The last Unix second of the others, but for those that end sooner; [`crate::CUT_OFF`] ends all that still count at once.
        until: u64,
    },
    /// A key of an application, in place of one of the same name.
    PutApiKey(ApiKey),
    /// A key no more.
    RemoveApiKey {
        /// Which.
        name: String,
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
    /// Bytes a second of each of its allocations, each way.
    pub max_bps: u64,
}

impl RealmOptions {
    /// By coturn's names.
    pub(crate) fn named(self) -> [(&'static str, u64); 3] {
        let Self { total_quota, user_quota, max_bps } = self;
        [("total-quota", total_quota), ("user-quota", user_quota), ("max-bps", max_bps)]
    }
}
