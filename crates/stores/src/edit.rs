//! Changes made by `turnpike user`, `secret`, `realm` and `key`.

use turnpike_wire::secret::Secret;

use crate::{ApiKey, StoredLimits, UserKeys};

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
        limits: StoredLimits,
    },
    /// Removes limits, origins and peer rules of a realm. Users and secrets stay.
    RemoveRealm {
        realm: String,
    },
}
