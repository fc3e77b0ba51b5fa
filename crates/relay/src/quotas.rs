//! How many allocations there may be, over all workers: of a user, of a realm, in total. Touched by requests, never by packets.

use std::{hash::BuildHasher, sync::PoisonError};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_turn::server::QuotaRefusal;

use crate::{
    RealmLimits, SHARDS,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

type Counts = HashMap<Box<str>, usize, RandomState>;

/// Allocations per user, per realm and in total.
pub(crate) struct Quotas {
    total: AtomicUsize,
    most: usize,
    most_per_user: usize,
    /// What a reload may change, and what realms hold. Few entries, touched once per allocation.
    realms: Mutex<Realms>,
    hasher: RandomState,
    /// By realm and identity: see [`user_key`].
    users: [Mutex<Counts>; SHARDS],
}

#[derive(Default)]
struct Realms {
    limits: HashMap<Box<str>, RealmLimits, RandomState>,
    held: Counts,
}

impl Quotas {
    pub(crate) fn new(most: usize, most_per_user: usize) -> Self {
        Self {
            total: AtomicUsize::new(0),
            most,
            most_per_user,
            realms: Mutex::default(),
            hasher: RandomState::default(),
            users: std::array::from_fn(|_| Mutex::default()),
        }
    }

    /// From now on these limits hold; realms that are not named have none of their own.
    pub(crate) fn limit(&self, limits: &[RealmLimits]) {
        let limits = limits.iter().map(|limits| (limits.realm.as_str().into(), limits.clone())).collect();
        self.realms().limits = limits;
    }

    /// Allocations of each realm that has any, in no order.
    pub(crate) fn held(&self) -> Vec<(Box<str>, usize)> {
        self.realms().held.iter().map(|(realm, count)| (realm.clone(), *count)).collect()
    }

    /// Users that have an allocation.
    pub(crate) fn users(&self) -> usize {
        self.users.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    /// Counts one more, or nothing. The user's own limit comes first: whoever has reached that takes no place in the realm or in total
    /// from others, not even until the refusal.
    pub(crate) fn acquire(&self, realm: &str, identity: &str) -> Result<(), QuotaRefusal> {
        let key = user_key(realm, identity);
        self.acquire_for(&key, self.most_per_user_of(realm))?;
        let within = |n: usize| (n < self.most).then_some(n + 1);
        let acquired = self.acquire_in(realm).and_then(|()| {
            let counted = self.total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within);
            counted.map(|_| ()).map_err(|_| {
                self.release_in(realm);
                QuotaRefusal::Total
            })
        });
        if acquired.is_err() {
            give_back(&mut self.users_of(&key), &key);
        }
        acquired
    }

    pub(crate) fn release(&self, realm: &str, identity: &str) {
        let key = user_key(realm, identity);
        if !give_back(&mut self.users_of(&key), &key) {
            return;
        }
        self.release_in(realm);
        self.total.fetch_sub(1, Ordering::Relaxed);
    }

    fn most_per_user_of(&self, realm: &str) -> usize {
        let limit = self.realms().limits.get(realm).and_then(|limits| limits.allocations_per_user);
        limit.unwrap_or(self.most_per_user)
    }

    fn acquire_in(&self, realm: &str) -> Result<(), QuotaRefusal> {
        let mut realms = self.realms();
        let most = realms.limits.get(realm).and_then(|limits| limits.allocations).unwrap_or(usize::MAX);
        if take(&mut realms.held, realm, most) { Ok(()) } else { Err(QuotaRefusal::Total) }
    }

    fn release_in(&self, realm: &str) {
        give_back(&mut self.realms().held, realm);
    }

    fn acquire_for(&self, key: &str, most: usize) -> Result<(), QuotaRefusal> {
        if take(&mut self.users_of(key), key, most) { Ok(()) } else { Err(QuotaRefusal::User) }
    }

    fn realms(&self) -> MutexGuard<'_, Realms> {
        self.realms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn users_of(&self, key: &str) -> MutexGuard<'_, Counts> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let index = self.hasher.hash_one(key) as usize % SHARDS;
        self.users[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One user of one realm. Realms have no control characters in their names, so that no identity can reach into another realm.
pub(crate) fn user_key(realm: &str, identity: &str) -> String {
    [realm, "\0", identity].concat()
}

/// Counts one more, unless there are as many as there may be.
fn take(counts: &mut Counts, key: &str, most: usize) -> bool {
    if counts.get(key).copied().unwrap_or(0) >= most {
        return false;
    }
    *counts.entry_ref(key).or_insert(0) += 1;
    true
}

/// Counts one less, and keeps no zeros. False if nothing was counted.
fn give_back(counts: &mut Counts, key: &str) -> bool {
    let Some(count) = counts.get_mut(key) else { return false };
    *count -= 1;
    if *count == 0 {
        counts.remove(key);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const REALM: &str = "here";

    fn limits(realm: &str, allocations: Option<usize>, allocations_per_user: Option<usize>) -> RealmLimits {
        RealmLimits { realm: realm.to_owned(), allocations, allocations_per_user }
    }

    #[test]
    fn a_user_at_the_limit_is_refused_and_leaves_the_total_alone() {
        let quotas = Quotas::new(10, 2);
        assert_eq!(quotas.acquire(REALM, "a"), Ok(()));
        assert_eq!(quotas.acquire(REALM, "a"), Ok(()));
        assert_eq!(quotas.acquire(REALM, "a"), Err(QuotaRefusal::User));
        assert_eq!(quotas.total.load(Ordering::Relaxed), 2);
        assert_eq!(quotas.held(), [(REALM.into(), 2)]);
        assert_eq!(quotas.acquire(REALM, "b"), Ok(()));
    }

    #[test]
    fn a_user_at_the_limit_is_told_so_in_a_full_house_too() {
        let quotas = Quotas::new(1, 1);
        assert_eq!(quotas.acquire(REALM, "a"), Ok(()));
        assert_eq!(quotas.acquire(REALM, "a"), Err(QuotaRefusal::User));
        assert_eq!(quotas.acquire(REALM, "b"), Err(QuotaRefusal::Total));
    }

    #[test]
    fn the_total_bounds_all_users_and_a_release_makes_room() {
        let quotas = Quotas::new(2, 2);
        assert_eq!(quotas.acquire(REALM, "a"), Ok(()));
        assert_eq!(quotas.acquire("there", "b"), Ok(()));
        assert_eq!(quotas.acquire(REALM, "c"), Err(QuotaRefusal::Total));
        quotas.release(REALM, "a");
        assert_eq!(quotas.acquire(REALM, "c"), Ok(()));
    }

    #[test]
    fn a_user_without_allocations_takes_no_memory() {
        let quotas = Quotas::new(10, 2);
        quotas.limit(&[limits("full", Some(0), None), limits("closed", None, Some(0))]);
        for _ in 0..1000 {
            assert_eq!(quotas.acquire("closed", "a"), Err(QuotaRefusal::User));
            assert_eq!(quotas.acquire(REALM, "a"), Ok(()));
            quotas.release(REALM, "a");
            assert_eq!(quotas.acquire("full", "a"), Err(QuotaRefusal::Total));
        }
        assert!(quotas.users.iter().all(|shard| shard.lock().unwrap().is_empty()));
        assert!(quotas.held().is_empty());
        assert_eq!(quotas.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_realm_has_limits_of_its_own_and_takes_nothing_from_another() {
        let quotas = Quotas::new(10, 2);
        quotas.limit(&[limits("small", Some(2), Some(1))]);
        assert_eq!(quotas.acquire("small", "a"), Ok(()));
        assert_eq!(quotas.acquire("small", "a"), Err(QuotaRefusal::User));
        assert_eq!(quotas.acquire("small", "b"), Ok(()));
        assert_eq!(quotas.acquire("small", "c"), Err(QuotaRefusal::Total));
        assert_eq!(quotas.acquire(REALM, "a"), Ok(()), "a namesake elsewhere");
        assert_eq!(quotas.acquire(REALM, "small\0c"), Ok(()));
        quotas.release(REALM, "small\0c");
        quotas.release("small", "a");
        assert_eq!(quotas.acquire("small", "c"), Ok(()));
        assert_eq!((quotas.total.load(Ordering::Relaxed), quotas.users()), (3, 3));
    }

    #[test]
    fn new_limits_hold_for_what_comes_and_leave_what_is() {
        let quotas = Quotas::new(10, 2);
        for user in ["a", "b", "c"] {
            assert_eq!(quotas.acquire(REALM, user), Ok(()));
        }
        quotas.limit(&[limits(REALM, Some(2), None)]);
        quotas.release(REALM, "a");
        assert_eq!(quotas.acquire(REALM, "d"), Err(QuotaRefusal::Total));
        quotas.limit(&[]);
        assert_eq!(quotas.acquire(REALM, "d"), Ok(()));
    }

    #[test]
    fn what_was_never_acquired_cannot_be_released() {
        let quotas = Quotas::new(10, 2);
        assert_eq!(quotas.acquire(REALM, "a"), Ok(()));
        quotas.release("there", "a");
        quotas.release(REALM, "b");
        assert_eq!(quotas.total.load(Ordering::Relaxed), 1);
        assert_eq!(quotas.held(), [(REALM.into(), 1)]);
    }
}
