//! Changes made by `turnpike user`, `secret`, `realm` and `key`.

use turnpike_wire::secret::Secret;

use crate::{ApiKey, UserKeys};

#[derive(Clone, Debug)]
pub enum Edit {
    PutUser {
        realm: String,
        name: String,
        keys: UserKeys,
    },
    RemoveUser {
        realm: String,
        name: String,
    },
    AddSecret {
        realm: String,
        secret: Secret,
    },
    RemoveSecret {
        realm: String,
        secret: Secret,
    },
    /// Makes `secret` the signing secret; the others expire at `until`.
    RotateSecret {
        realm: String,
        secret: Secret,
        /// Current time in Unix seconds.
        since: u64,
        /// Last Unix second in which the other secrets are valid; [`crate::CUT_OFF`] invalidates all of
        /// them immediately.
        until: u64,
    },
    PutApiKey(ApiKey),
    RemoveApiKey {
        name: String,
    },
    PutRealm {
        realm: String,
        options: RealmOptions,
    },
    /// Removes limits, origins and peer rules of a realm. Users and secrets stay.
    RemoveRealm {
        realm: String,
    },
}

/// Limits of a realm, named as in coturn; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RealmOptions {
    pub total_quota: u64,
    pub user_quota: u64,
    /// Bytes per second of each allocation, in each direction.
    pub max_bps: u64,
}

impl RealmOptions {
    pub(crate) fn named(self) -> [(&'static str, u64); 3] {
        let Self { total_quota, user_quota, max_bps } = self;
        [("total-quota", total_quota), ("user-quota", user_quota), ("max-bps", max_bps)]
    }
}
