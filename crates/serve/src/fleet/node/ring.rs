//! Keys of a node: reading, creating and restoring the fleet's key ring.

use std::sync::{MutexGuard, PoisonError};

use turnpike_stores::StoreError;

use super::OwnNode;
use crate::fleet::{
    keys::{Custody, KeyStep, NodeKeys, open_ring, seal_ring},
    unix,
};

#[derive(Debug, thiserror::Error)]
pub(in crate::fleet) enum KeyError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the fleet's keys were sealed with another fleet.secret")]
    Sealed,
}

impl OwnNode {
    pub(in crate::fleet) fn keys(&self) -> NodeKeys {
        let mut custody = self.custody();
        NodeKeys { own: custody.own().0, keys: custody.keys(), node: Some(self.number()) }
    }

    pub(in crate::fleet) fn ring_version(&self) -> u64 {
        self.custody().version()
    }

    pub(in crate::fleet) async fn check_secret(&self) -> Result<(), KeyError> {
        match self.store.ring().await? {
            Some(sealed) => open_ring(&self.sealer, &sealed).map(drop).ok_or(KeyError::Sealed),
            None => Ok(()),
        }
    }

    /// Reads, creates or restores the key ring; `stored` is its version in the store.
    pub(in crate::fleet) async fn look_after_keys(&self, stored: u64) -> Result<(), KeyError> {
        let rotation = self.setting(|settings| u64::from(settings.key_rotation));
        let step = self.custody().step(stored, unix(), rotation, rand::random());
        match step {
            KeyStep::Nothing => {}
            KeyStep::Read => {
                let Some(sealed) = self.store.ring().await? else { return Ok(()) };
                self.custody().take(open_ring(&self.sealer, &sealed).ok_or(KeyError::Sealed)?);
                self.put_keys();
            }
            KeyStep::Put { before, ring } => {
                let sealed = seal_ring(&self.sealer, &ring);
                // If another node was faster, the response to the next heartbeat contains the version of
                // that node's ring.
                if self.store.put_ring(before, ring.version, &sealed).await? {
                    self.custody().take(ring);
                    self.put_keys();
                }
            }
        }
        Ok(())
    }

    pub(in crate::fleet) fn put_keys(&self) {
        if let Some(relay) = self.relay() {
            let NodeKeys { keys, node, .. } = self.keys();
            relay.set_keys(keys, node);
        }
    }

    pub(in crate::fleet) fn custody(&self) -> MutexGuard<'_, Custody> {
        self.custody.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
