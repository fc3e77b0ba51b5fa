//! Limits on allocations across all workers: per user, per address prefix, per realm and in total. They are
//! checked only for requests, never for relayed packets.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash},
    net::IpAddr,
    sync::PoisonError,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_turn::server::{QuotaRefusal, UserRef};

use crate::{
    Config, RealmLimits, SHARDS,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

type UsageCounts<K = Box<str>> = HashMap<K, usize, RandomState>;
pub(crate) struct Quotas {
    total: AtomicUsize,
    /// Reloadable limits and counts per realm: few entries, accessed twice per allocation.
    realms: Mutex<RealmQuotas>,
    hasher: RandomState,
    users: [Mutex<UsageCounts>; SHARDS],
    prefixes: [Mutex<UsageCounts<IpAddr>>; SHARDS],
}

#[derive(Default)]
struct RealmQuotas {
    most: usize,
    most_per_prefix: usize,
    most_per_user: usize,
    limits: HashMap<Box<str>, RealmLimits, RandomState>,
    held: UsageCounts,
}

struct Most {
    in_total: usize,
    in_realm: usize,
    of_prefix: usize,
    of_user: usize,
}

impl Quotas {
    pub(crate) fn new(config: &Config) -> Self {
        let quotas = Self {
            total: AtomicUsize::new(0),
            realms: Mutex::default(),
            hasher: RandomState::default(),
            users: std::array::from_fn(|_| Mutex::default()),
            prefixes: std::array::from_fn(|_| Mutex::default()),
        };
        quotas.limit(config);
        quotas
    }

    /// Applies the limits of this configuration to new allocations; realms without limits use the defaults.
    pub(crate) fn limit(&self, config: &Config) {
        let own = config.realm_limits.iter();
        let limits = own.map(|limits| (limits.realm.as_str().into(), limits.clone())).collect();
        let mut realms = self.realms();
        realms.most = config.limits.allocations;
        realms.most_per_prefix = config.limits.allocations_per_prefix.unwrap_or(usize::MAX);
        realms.most_per_user = config.limits.allocations_per_user;
        realms.limits = limits;
    }

    pub(crate) fn limits_of(&self, realm: &str) -> (Option<usize>, usize) {
        let realms = self.realms();
        let limits = realms.limits.get(realm);
        let of_user = limits.and_then(|limits| limits.allocations_per_user).unwrap_or(realms.most_per_user);
        (limits.and_then(|limits| limits.allocations), of_user)
    }

    /// Number of allocations per realm in arbitrary order, without empty realms.
    pub(crate) fn held(&self) -> Vec<(Box<str>, usize)> {
        self.realms().held.iter().map(|(realm, count)| (realm.clone(), *count)).collect()
    }

    pub(crate) fn users(&self) -> usize {
        self.users.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    /// Counts a new allocation, or changes nothing and returns the limit that would be exceeded. The limits
    /// of the user and the prefix are checked first, so that a refused client is never counted for the realm
    /// or the total, even briefly.
    pub(crate) fn acquire(&self, user: UserRef<'_>, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        let (key, most) = (user.key(), self.most(user.realm));
        let key = key.as_str();
        if !take(&mut self.lock(&self.users, key), key, most.of_user, || key.into()) {
            return Err(QuotaRefusal::User);
        }
        let acquired = self.acquire_from(prefix, user.realm, &most);
        if acquired.is_err() {
            give_back(&mut self.lock(&self.users, key), key);
        }
        acquired
    }

    pub(crate) fn release(&self, user: UserRef<'_>, prefix: IpAddr) {
        let key = user.key();
        if !give_back(&mut self.lock(&self.users, key.as_str()), key.as_str()) {
            return;
        }
        give_back(&mut self.lock(&self.prefixes, &prefix), &prefix);
        self.release_in(user.realm);
        self.total.fetch_sub(1, Ordering::Relaxed);
    }

    fn most(&self, realm: &str) -> Most {
        let realms = self.realms();
        let limits = realms.limits.get(realm);
        Most {
            in_total: realms.most,
            in_realm: limits.and_then(|limits| limits.allocations).unwrap_or(usize::MAX),
            of_prefix: realms.most_per_prefix,
            of_user: limits.and_then(|limits| limits.allocations_per_user).unwrap_or(realms.most_per_user),
        }
    }

    fn acquire_from(&self, prefix: IpAddr, realm: &str, most: &Most) -> Result<(), QuotaRefusal> {
        // Counted even if there is no limit, because a reload may set one.
        if !take(&mut self.lock(&self.prefixes, &prefix), &prefix, most.of_prefix, || prefix) {
            return Err(QuotaRefusal::Prefix);
        }
        let acquired = self.acquire_in(realm, most);
        if acquired.is_err() {
            give_back(&mut self.lock(&self.prefixes, &prefix), &prefix);
        }
        acquired
    }

    fn acquire_in(&self, realm: &str, most: &Most) -> Result<(), QuotaRefusal> {
        if !take(&mut self.realms().held, realm, most.in_realm, || realm.into()) {
            return Err(QuotaRefusal::Total);
        }
        let within = |n: usize| (n < most.in_total).then_some(n + 1);
        let counted = self.total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within);
        counted.map(|_| ()).map_err(|_| {
            self.release_in(realm);
            QuotaRefusal::Total
        })
    }

    fn release_in(&self, realm: &str) {
        give_back(&mut self.realms().held, realm);
    }

    fn realms(&self) -> MutexGuard<'_, RealmQuotas> {
        self.realms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock<'q, T>(&self, shards: &'q [Mutex<T>; SHARDS], key: &(impl Hash + ?Sized)) -> MutexGuard<'q, T> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let index = self.hasher.hash_one(key) as usize % SHARDS;
        shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take<K: Hash + Eq + Borrow<Q>, Q: Hash + Eq + ?Sized>(
    counts: &mut UsageCounts<K>,
    key: &Q,
    most: usize,
    owned: impl FnOnce() -> K,
) -> bool {
    match counts.get_mut(key) {
        Some(count) if *count < most => *count += 1,
        None if most > 0 => _ = counts.insert(owned(), 1),
        _ => return false,
    }
    true
}

fn give_back<K: Hash + Eq + Borrow<Q>, Q: Hash + Eq + ?Sized>(counts: &mut UsageCounts<K>, key: &Q) -> bool {
    let Some(count) = counts.get_mut(key) else { return false };
    *count -= 1;
    if *count == 0 {
        counts.remove(key);
    }
    true
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::AllocationLimits;

    use super::*;

    const REALM: &str = "here";
    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn limits(realm: &str, allocations: Option<usize>, allocations_per_user: Option<usize>) -> RealmLimits {
        RealmLimits { realm: realm.to_owned(), allocations, allocations_per_user, ..RealmLimits::default() }
    }

    fn config(most: usize, most_per_user: usize, realm_limits: &[RealmLimits]) -> Config {
        Config {
            limits: AllocationLimits {
                allocations: most,
                allocations_per_user: most_per_user,
                ..AllocationLimits::default()
            },
            realm_limits: realm_limits.to_vec(),
            ..Config::default()
        }
    }

    fn quotas(most: usize, most_per_user: usize) -> Quotas {
        Quotas::new(&config(most, most_per_user, &[]))
    }

    #[test]
    fn refusal_at_the_user_limit_leaves_the_total_unchanged() {
        let quotas = quotas(10, 2);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Err(QuotaRefusal::User));
        assert_eq!(quotas.total.load(Ordering::Relaxed), 2);
        assert_eq!(quotas.held(), [(REALM.into(), 2)]);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "b"), HOME), Ok(()));
    }

    #[test]
    fn user_limit_is_reported_before_the_total_limit() {
        let quotas = quotas(1, 1);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Err(QuotaRefusal::User));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "b"), HOME), Err(QuotaRefusal::Total));
    }

    #[test]
    fn release_makes_room_within_the_total_limit() {
        let quotas = quotas(2, 2);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new("there", "b"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "c"), HOME), Err(QuotaRefusal::Total));
        quotas.release(UserRef::new(REALM, "a"), HOME);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "c"), HOME), Ok(()));
    }

    #[test]
    fn user_without_allocations_takes_no_memory() {
        let quotas = quotas(10, 2);
        quotas.limit(&config(10, 2, &[limits("full", Some(0), None), limits("closed", None, Some(0))]));
        for _ in 0..1000 {
            assert_eq!(quotas.acquire(UserRef::new("closed", "a"), HOME), Err(QuotaRefusal::User));
            assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
            quotas.release(UserRef::new(REALM, "a"), HOME);
            assert_eq!(quotas.acquire(UserRef::new("full", "a"), HOME), Err(QuotaRefusal::Total));
        }
        assert!(quotas.users.iter().all(|shard| shard.lock().unwrap().is_empty()));
        assert!(quotas.held().is_empty());
        assert_eq!(quotas.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn realms_have_independent_limits() {
        let quotas = quotas(10, 2);
        quotas.limit(&config(10, 2, &[limits("small", Some(2), Some(1))]));
        assert_eq!(quotas.acquire(UserRef::new("small", "a"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new("small", "a"), HOME), Err(QuotaRefusal::User));
        assert_eq!(quotas.acquire(UserRef::new("small", "b"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new("small", "c"), HOME), Err(QuotaRefusal::Total));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()), "same name in another realm");
        assert_eq!(quotas.acquire(UserRef::new(REALM, "small\0c"), HOME), Ok(()));
        quotas.release(UserRef::new(REALM, "small\0c"), HOME);
        quotas.release(UserRef::new("small", "a"), HOME);
        assert_eq!(quotas.acquire(UserRef::new("small", "c"), HOME), Ok(()));
        assert_eq!((quotas.total.load(Ordering::Relaxed), quotas.users()), (3, 3));
    }

    #[test]
    fn new_limits_apply_to_new_allocations_only() {
        let quotas = quotas(10, 2);
        for user in ["a", "b", "c"] {
            assert_eq!(quotas.acquire(UserRef::new(REALM, user), HOME), Ok(()));
        }
        quotas.limit(&config(10, 2, &[limits(REALM, Some(2), None)]));
        quotas.release(UserRef::new(REALM, "a"), HOME);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "d"), HOME), Err(QuotaRefusal::Total));
        quotas.limit(&config(10, 2, &[]));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "d"), HOME), Ok(()));
    }

    #[test]
    fn release_without_acquire_changes_nothing() {
        let quotas = quotas(10, 2);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
        quotas.release(UserRef::new("there", "a"), HOME);
        quotas.release(UserRef::new(REALM, "b"), HOME);
        assert_eq!(quotas.total.load(Ordering::Relaxed), 1);
        assert_eq!(quotas.held(), [(REALM.into(), 1)]);
    }

    #[test]
    fn refusal_at_the_prefix_limit_leaves_other_counts_unchanged() {
        let mut config = config(10, 9, &[]);
        config.limits.allocations_per_prefix = Some(2);
        let quotas = Quotas::new(&config);
        let other = "2001:db8::".parse().unwrap();
        assert_eq!(quotas.acquire(UserRef::new(REALM, "a"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new("there", "b"), HOME), Ok(()));
        assert_eq!(quotas.acquire(UserRef::new(REALM, "c"), HOME), Err(QuotaRefusal::Prefix));
        assert_eq!((quotas.total.load(Ordering::Relaxed), quotas.held().len()), (2, 2));
        assert!(quotas.users.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>() == 2);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "c"), other), Ok(()));
        quotas.release(UserRef::new(REALM, "a"), HOME);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "c"), HOME), Ok(()));
        // Allocations created while there was no limit are counted once it is set again.
        config.limits.allocations_per_prefix = None;
        quotas.limit(&config);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "d"), HOME), Ok(()));
        config.limits.allocations_per_prefix = Some(3);
        quotas.limit(&config);
        assert_eq!(quotas.acquire(UserRef::new(REALM, "d"), HOME), Err(QuotaRefusal::Prefix));
        for (realm, user, prefix) in
            [("there", "b", HOME), (REALM, "c", HOME), (REALM, "d", HOME), (REALM, "c", other)]
        {
            quotas.release(UserRef::new(realm, user), prefix);
        }
        assert!(quotas.prefixes.iter().all(|shard| shard.lock().unwrap().is_empty()));
    }
}
