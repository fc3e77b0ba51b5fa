//! What a worker's state machine asks about users: the credential store that all workers share, and quotas over all
//! workers. Requests come here, packets never do.

use std::{
    hash::BuildHasher,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_turn::server::{Gate, Lookup, QuotaRefusal, User};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::CredentialStore;

/// The store in force; a reload puts another one in its place.
pub(crate) type SharedStore = Arc<RwLock<Arc<dyn CredentialStore>>>;

/// One worker's view.
pub(crate) struct WorkerGate {
    store: SharedStore,
    quotas: Arc<Quotas>,
}

impl WorkerGate {
    pub(crate) fn new(store: SharedStore, quotas: Arc<Quotas>) -> Self {
        Self { store, quotas }
    }
}

impl Gate for WorkerGate {
    fn check(
        &mut self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup {
        let store = Arc::clone(&self.store.read().unwrap_or_else(PoisonError::into_inner));
        store.check(user, realm, algorithm, unix, verify)
    }

    fn acquire(&mut self, identity: &str) -> Result<(), QuotaRefusal> {
        self.quotas.acquire(identity)
    }

    fn release(&mut self, identity: &str) {
        self.quotas.release(identity);
    }
}

const SHARDS: usize = 16;

/// Allocations per user and in total.
pub(crate) struct Quotas {
    total: AtomicUsize,
    most: usize,
    most_per_user: usize,
    hasher: RandomState,
    shards: [Mutex<HashMap<Box<str>, usize, RandomState>>; SHARDS],
}

impl Quotas {
    pub(crate) fn new(most: usize, most_per_user: usize) -> Self {
        Self {
            total: AtomicUsize::new(0),
            most,
            most_per_user,
            hasher: RandomState::default(),
            shards: std::array::from_fn(|_| Mutex::default()),
        }
    }

    fn shard(&self, identity: &str) -> &Mutex<HashMap<Box<str>, usize, RandomState>> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let index = self.hasher.hash_one(identity) as usize % SHARDS;
        &self.shards[index]
    }

    pub(crate) fn acquire(&self, identity: &str) -> Result<(), QuotaRefusal> {
        let within = |n: usize| (n < self.most).then_some(n + 1);
        self.total
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .map_err(|_| QuotaRefusal::Total)?;
        let mut users = self.shard(identity).lock().unwrap_or_else(PoisonError::into_inner);
        let count = users.entry_ref(identity).or_insert(0);
        if *count >= self.most_per_user {
            drop(users);
            self.total.fetch_sub(1, Ordering::Relaxed);
            return Err(QuotaRefusal::User);
        }
        *count += 1;
        Ok(())
    }

    pub(crate) fn release(&self, identity: &str) {
        let mut users = self.shard(identity).lock().unwrap_or_else(PoisonError::into_inner);
        let Some(count) = users.get_mut(identity) else { return };
        *count -= 1;
        if *count == 0 {
            users.remove(identity);
        }
        self.total.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_at_the_limit_is_refused_and_leaves_the_total_alone() {
        let quotas = Quotas::new(10, 2);
        assert_eq!(quotas.acquire("a"), Ok(()));
        assert_eq!(quotas.acquire("a"), Ok(()));
        assert_eq!(quotas.acquire("a"), Err(QuotaRefusal::User));
        assert_eq!(quotas.total.load(Ordering::Relaxed), 2);
        assert_eq!(quotas.acquire("b"), Ok(()));
    }

    #[test]
    fn the_total_bounds_all_users_and_a_release_makes_room() {
        let quotas = Quotas::new(2, 2);
        assert_eq!(quotas.acquire("a"), Ok(()));
        assert_eq!(quotas.acquire("b"), Ok(()));
        assert_eq!(quotas.acquire("c"), Err(QuotaRefusal::Total));
        quotas.release("a");
        assert_eq!(quotas.acquire("c"), Ok(()));
    }

    #[test]
    fn a_user_without_allocations_takes_no_memory() {
        let quotas = Quotas::new(10, 2);
        for _ in 0..1000 {
            assert_eq!(quotas.acquire("a"), Ok(()));
            quotas.release("a");
        }
        assert!(quotas.shards.iter().all(|shard| shard.lock().unwrap().is_empty()));
        assert_eq!(quotas.total.load(Ordering::Relaxed), 0);
    }
}
