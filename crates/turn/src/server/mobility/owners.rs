//! Table of the workers that own mobile allocations (RFC 8016). All workers of a server share it, because a
//! ticket may reach any of them. The lock is taken by requests with tickets and when allocations begin, move
//! or end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::quality::RandomState;
use hashbrown::HashMap;

#[derive(Clone, Debug, Default)]
pub struct MobileOwners(Arc<Mutex<HashMap<u64, u16, RandomState>>>);

impl MobileOwners {
    /// The allocation may still be in transit to this worker.
    pub(crate) fn get(&self, key: u64) -> Option<u16> {
        self.lock().get(&key).copied()
    }

    /// Registers an allocation; returns false if the key is taken.
    pub(crate) fn add(&self, key: u64, worker: u16) -> bool {
        self.lock().try_insert(key, worker).is_ok()
    }

    pub(crate) fn set(&self, key: u64, worker: u16) {
        self.lock().insert(key, worker);
    }

    pub(crate) fn remove(&self, key: u64) {
        self.lock().remove(&key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, u16, RandomState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
