//! The worker that has each mobile allocation (RFC 8016), shared by all workers of a server: a ticket may be presented at any of them. Read and changed
//! by requests with tickets and by allocations that begin, move and end; bounded by the number of mobile allocations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::quality::RandomState;
use hashbrown::HashMap;

/// Worker numbers by the keys of mobile allocations.
#[derive(Clone, Debug, Default)]
pub struct MobileOwners(Arc<Mutex<HashMap<u64, u16, RandomState>>>);

impl MobileOwners {
    /// The worker that has the allocation, or is about to get it.
    pub(crate) fn get(&self, key: u64) -> Option<u16> {
        self.lock().get(&key).copied()
    }

    /// False if the key is taken.
    pub(crate) fn add(&self, key: u64, worker: u16) -> bool {
        self.lock().try_insert(key, worker).is_ok()
    }

    /// The allocation moves to this worker.
    pub(crate) fn set(&self, key: u64, worker: u16) {
        self.lock().insert(key, worker);
    }

    /// The allocation has ended.
    pub(crate) fn remove(&self, key: u64) {
        self.lock().remove(&key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, u16, RandomState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
