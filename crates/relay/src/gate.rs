//! What a worker's state machine asks about users: the credential store that all workers share, and quotas over all
//! workers; and about addresses, whether one is relayed by any of them. Requests come here, packets never do.

use std::{
    borrow::Borrow,
    hash::{BuildHasher, Hash},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_turn::server::{
    CredentialQuery, Destination, Gate, Lookup, Newcomer, QuotaRefusal, RelayTransport, Transport, User,
    gate::user_key,
};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::{Config, CredentialStore, Fleet, PendingLookup, RealmLimits, SharedQuota, ports::Ports};

/// The store in force; a reload puts another one in its place.
pub(crate) type SharedStore = Arc<RwLock<Arc<dyn CredentialStore>>>;

/// One worker's view.
pub(crate) struct WorkerGate {
    store: SharedStore,
    quotas: Arc<Quotas>,
    ports: Arc<Ports>,
    fleet: Option<Arc<dyn Fleet>>,
}

impl WorkerGate {
    pub(crate) fn new(
        store: SharedStore,
        quotas: Arc<Quotas>,
        ports: Arc<Ports>,
        fleet: Option<Arc<dyn Fleet>>,
    ) -> Self {
        Self { store, quotas, ports, fleet }
    }
}

impl WorkerGate {
    /// Asks the store what it could not tell without waiting.
    pub(crate) fn look_up(&self, query: CredentialQuery, answer: PendingLookup) {
        let store = Arc::clone(&self.store.read().unwrap_or_else(PoisonError::into_inner));
        store.look_up(query, answer);
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

    fn is_relayed(&mut self, address: SocketAddr, transport: RelayTransport) -> bool {
        self.ports.are_relayed(address, transport)
    }

    fn is_banned(&mut self, unix: u64, realm: &str, names: [&str; 2], client: IpAddr) -> bool {
        self.fleet.as_ref().is_some_and(|fleet| fleet.is_banned(unix, realm, names, client))
    }

    fn elsewhere(&mut self, newcomer: &Newcomer<'_>, transport: Transport) -> Option<Destination> {
        self.fleet.as_ref()?.elsewhere(newcomer, transport)
    }

    fn node(&mut self, node: u16, transport: Transport, v4: bool) -> Option<Destination> {
        self.fleet.as_ref()?.node(node, transport, v4)
    }
}

impl turnpike_turn::server::Quotas for WorkerGate {
    fn acquire(&mut self, realm: &str, identity: &str, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        self.quotas.acquire(realm, identity, prefix)?;
        let Some(fleet) = &self.fleet else { return Ok(()) };
        let (of_realm, of_user) = self.quotas.limits_of(realm);
        let shared = SharedQuota { realm, identity, of_realm, of_user };
        fleet.acquire(shared).inspect_err(|_| self.quotas.release(realm, identity, prefix))
    }

    fn release(&mut self, realm: &str, identity: &str, prefix: IpAddr) {
        self.quotas.release(realm, identity, prefix);
        if let Some(fleet) = &self.fleet {
            fleet.release(realm, identity);
        }
    }
}

const SHARDS: usize = 16;

type Counts<K = Box<str>> = HashMap<K, usize, RandomState>;

/// Allocations per user, per address prefix, per realm and in total.
pub(crate) struct Quotas {
    total: AtomicUsize,
    most: AtomicUsize,
    most_per_prefix: AtomicUsize,
    /// What realms may have and hold. Few entries, touched once per allocation.
    realms: Mutex<Realms>,
    hasher: RandomState,
    /// By realm and identity: see [`user_key`].
    users: [Mutex<Counts>; SHARDS],
    prefixes: [Mutex<Counts<IpAddr>>; SHARDS],
}

#[derive(Default)]
struct Realms {
    most_per_user: usize,
    limits: HashMap<Box<str>, RealmLimits, RandomState>,
    held: Counts,
}

impl Quotas {
    pub(crate) fn new(config: &Config) -> Self {
        let quotas = Self {
            total: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            most_per_prefix: AtomicUsize::new(0),
            realms: Mutex::default(),
            hasher: RandomState::default(),
            users: std::array::from_fn(|_| Mutex::default()),
            prefixes: std::array::from_fn(|_| Mutex::default()),
        };
        quotas.limit(config);
        quotas
    }

    /// From now on the limits of this configuration hold for what comes; realms that are not named have none of their own.
    pub(crate) fn limit(&self, config: &Config) {
        self.most.store(config.max_allocations, Ordering::Relaxed);
        let most_per_prefix = config.max_allocations_per_prefix.unwrap_or(usize::MAX);
        self.most_per_prefix.store(most_per_prefix, Ordering::Relaxed);
        let own = config.realm_limits.iter();
        let limits = own.map(|limits| (limits.realm.as_str().into(), limits.clone())).collect();
        let mut realms = self.realms();
        realms.most_per_user = config.max_allocations_per_user;
        realms.limits = limits;
    }

    /// The most that a realm may have, and each of its users.
    pub(crate) fn limits_of(&self, realm: &str) -> (Option<usize>, usize) {
        let realms = self.realms();
        let limits = realms.limits.get(realm);
        let of_user = limits.and_then(|limits| limits.allocations_per_user).unwrap_or(realms.most_per_user);
        (limits.and_then(|limits| limits.allocations), of_user)
    }

    /// Allocations of each realm that has any, in no order.
    pub(crate) fn held(&self) -> Vec<(Box<str>, usize)> {
        self.realms().held.iter().map(|(realm, count)| (realm.clone(), *count)).collect()
    }

    /// Users that have an allocation.
    pub(crate) fn users(&self) -> usize {
        self.users.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    pub(crate) fn acquire(&self, realm: &str, identity: &str, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        let most = self.most.load(Ordering::Relaxed);
        let within = |n: usize| (n < most).then_some(n + 1);
        self.total
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .map_err(|_| QuotaRefusal::Total)?;
        let acquired = self.acquire_in(realm).and_then(|most_per_user| {
            self.acquire_for(&user_key(realm, identity), most_per_user)
                .and_then(|()| {
                    self.acquire_from(prefix)
                        .inspect_err(|_| _ = self.release_for(&user_key(realm, identity)))
                })
                .inspect_err(|_| self.release_in(realm))
        });
        if acquired.is_err() {
            self.total.fetch_sub(1, Ordering::Relaxed);
        }
        acquired
    }

    pub(crate) fn release(&self, realm: &str, identity: &str, prefix: IpAddr) {
        if !self.release_for(&user_key(realm, identity)) {
            return;
        }
        give_back(&mut self.lock(&self.prefixes, &prefix), &prefix);
        self.release_in(realm);
        self.total.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts one more in the realm; the most that each of its users may have.
    fn acquire_in(&self, realm: &str) -> Result<usize, QuotaRefusal> {
        let mut realms = self.realms();
        let limits = realms.limits.get(realm);
        let most = limits.and_then(|limits| limits.allocations).unwrap_or(usize::MAX);
        let most_per_user =
            limits.and_then(|limits| limits.allocations_per_user).unwrap_or(realms.most_per_user);
        let count = realms.held.entry_ref(realm).or_insert(0);
        if *count >= most {
            if *count == 0 {
                realms.held.remove(realm);
            }
            return Err(QuotaRefusal::Total);
        }
        *count += 1;
        Ok(most_per_user)
    }

    fn release_in(&self, realm: &str) {
        give_back(&mut self.realms().held, realm);
    }

    fn acquire_for(&self, key: &str, most: usize) -> Result<(), QuotaRefusal> {
        let mut users = self.lock(&self.users, key);
        let count = users.entry_ref(key).or_insert(0);
        if *count >= most {
            return Err(QuotaRefusal::User);
        }
        *count += 1;
        Ok(())
    }

    /// False if nothing was counted.
    fn release_for(&self, key: &str) -> bool {
        give_back(&mut self.lock(&self.users, key), key)
    }

    fn acquire_from(&self, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        let most = self.most_per_prefix.load(Ordering::Relaxed);
        let mut prefixes = self.lock(&self.prefixes, &prefix);
        // Without a limit they are counted all the same: there may be one later.
        let count = prefixes.entry(prefix).or_insert(0);
        if *count >= most {
            return Err(QuotaRefusal::Prefix);
        }
        *count += 1;
        Ok(())
    }

    fn realms(&self) -> MutexGuard<'_, Realms> {
        self.realms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock<'q, T>(&self, shards: &'q [Mutex<T>; SHARDS], key: &(impl Hash + ?Sized)) -> MutexGuard<'q, T> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let index = self.hasher.hash_one(key) as usize % SHARDS;
        shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts one less, and keeps no zeros. False if nothing was counted.
fn give_back<K: Hash + Eq + Borrow<Q>, Q: Hash + Eq + ?Sized>(counts: &mut Counts<K>, key: &Q) -> bool {
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
    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn limits(realm: &str, allocations: Option<usize>, allocations_per_user: Option<usize>) -> RealmLimits {
        RealmLimits { realm: realm.to_owned(), allocations, allocations_per_user, ..RealmLimits::default() }
    }

    fn config(most: usize, most_per_user: usize, realm_limits: &[RealmLimits]) -> Config {
        Config {
            max_allocations: most,
            max_allocations_per_user: most_per_user,
            realm_limits: realm_limits.to_vec(),
            ..Config::default()
        }
    }

    fn quotas(most: usize, most_per_user: usize) -> Quotas {
        Quotas::new(&config(most, most_per_user, &[]))
    }

    #[test]
    fn a_user_at_the_limit_is_refused_and_leaves_the_total_alone() {
        let quotas = quotas(10, 2);
        assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()));
        assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()));
        assert_eq!(quotas.acquire(REALM, "a", HOME), Err(QuotaRefusal::User));
        assert_eq!(quotas.total.load(Ordering::Relaxed), 2);
        assert_eq!(quotas.held(), [(REALM.into(), 2)]);
        assert_eq!(quotas.acquire(REALM, "b", HOME), Ok(()));
    }

    #[test]
    fn the_total_bounds_all_users_and_a_release_makes_room() {
        let quotas = quotas(2, 2);
        assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()));
        assert_eq!(quotas.acquire("there", "b", HOME), Ok(()));
        assert_eq!(quotas.acquire(REALM, "c", HOME), Err(QuotaRefusal::Total));
        quotas.release(REALM, "a", HOME);
        assert_eq!(quotas.acquire(REALM, "c", HOME), Ok(()));
    }

    #[test]
    fn a_user_without_allocations_takes_no_memory() {
        let quotas = quotas(10, 2);
        quotas.limit(&config(10, 2, &[limits("full", Some(0), None)]));
        for _ in 0..1000 {
            assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()));
            quotas.release(REALM, "a", HOME);
            assert_eq!(quotas.acquire("full", "a", HOME), Err(QuotaRefusal::Total));
        }
        assert!(quotas.users.iter().all(|shard| shard.lock().unwrap().is_empty()));
        assert!(quotas.held().is_empty());
        assert_eq!(quotas.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_realm_has_limits_of_its_own_and_takes_nothing_from_another() {
        let quotas = quotas(10, 2);
        quotas.limit(&config(10, 2, &[limits("small", Some(2), Some(1))]));
        assert_eq!(quotas.acquire("small", "a", HOME), Ok(()));
        assert_eq!(quotas.acquire("small", "a", HOME), Err(QuotaRefusal::User));
        assert_eq!(quotas.acquire("small", "b", HOME), Ok(()));
        assert_eq!(quotas.acquire("small", "c", HOME), Err(QuotaRefusal::Total));
        assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()), "a namesake elsewhere");
        assert_eq!(quotas.acquire(REALM, "small\0c", HOME), Ok(()));
        quotas.release(REALM, "small\0c", HOME);
        quotas.release("small", "a", HOME);
        assert_eq!(quotas.acquire("small", "c", HOME), Ok(()));
        assert_eq!((quotas.total.load(Ordering::Relaxed), quotas.users()), (3, 3));
    }

    #[test]
    fn new_limits_hold_for_what_comes_and_leave_what_is() {
        let quotas = quotas(10, 2);
        for user in ["a", "b", "c"] {
            assert_eq!(quotas.acquire(REALM, user, HOME), Ok(()));
        }
        quotas.limit(&config(10, 2, &[limits(REALM, Some(2), None)]));
        quotas.release(REALM, "a", HOME);
        assert_eq!(quotas.acquire(REALM, "d", HOME), Err(QuotaRefusal::Total));
        quotas.limit(&config(10, 2, &[]));
        assert_eq!(quotas.acquire(REALM, "d", HOME), Ok(()));
    }

    #[test]
    fn what_was_never_acquired_cannot_be_released() {
        let quotas = quotas(10, 2);
        assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()));
        quotas.release("there", "a", HOME);
        quotas.release(REALM, "b", HOME);
        assert_eq!(quotas.total.load(Ordering::Relaxed), 1);
        assert_eq!(quotas.held(), [(REALM.into(), 1)]);
    }

    /// Shares a limit of two, and bans whoever is called `mallory`.
    #[derive(Default)]
    struct Shared(Mutex<Vec<String>>);

    impl Fleet for Shared {
        fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal> {
            let mut held = self.0.lock().unwrap();
            if held.len() >= 2 {
                return Err(QuotaRefusal::Everywhere);
            }
            held.push(format!("{asked:?}"));
            Ok(())
        }
        fn release(&self, _: &str, _: &str) {
            self.0.lock().unwrap().pop();
        }
        fn is_banned(&self, _: u64, _: &str, names: [&str; 2], _: IpAddr) -> bool {
            names.contains(&"mallory")
        }
        fn elsewhere(&self, _: &Newcomer<'_>, _: Transport) -> Option<Destination> {
            None
        }
        fn node(&self, _: u16, _: Transport, _: bool) -> Option<Destination> {
            None
        }
    }

    #[test]
    fn what_the_fleet_refuses_is_given_back_here() {
        use turnpike_turn::server::Quotas as _;
        let config = config(10, 5, &[limits(REALM, Some(7), None)]);
        let store: SharedStore = Arc::new(RwLock::new(Arc::new(()) as Arc<dyn CredentialStore>));
        let (quotas, fleet) = (Arc::new(Quotas::new(&config)), Arc::<Shared>::default());
        let ports = Arc::new(Ports::new(&config));
        let mut gate = WorkerGate::new(store, Arc::clone(&quotas), ports, Some(Arc::<Shared>::clone(&fleet)));
        assert_eq!((gate.acquire(REALM, "a", HOME), gate.acquire("there", "b", HOME)), (Ok(()), Ok(())));
        let asked = |realm, identity, of_realm| {
            format!("{:?}", SharedQuota { realm, identity, of_realm, of_user: 5 })
        };
        assert_eq!(*fleet.0.lock().unwrap(), [asked(REALM, "a", Some(7)), asked("there", "b", None)]);
        assert_eq!(gate.acquire(REALM, "c", HOME), Err(QuotaRefusal::Everywhere));
        assert_eq!((quotas.total.load(Ordering::Relaxed), quotas.users()), (2, 2));
        gate.release(REALM, "a", HOME);
        assert_eq!(gate.acquire(REALM, "c", HOME), Ok(()));
        assert!(gate.is_banned(0, REALM, ["x", "mallory"], HOME));
        assert!(!gate.is_banned(0, REALM, ["x", "y"], HOME));
    }

    #[test]
    fn a_prefix_at_the_limit_is_refused_and_leaves_all_else_alone() {
        let mut config = config(10, 9, &[]);
        config.max_allocations_per_prefix = Some(2);
        let quotas = Quotas::new(&config);
        let other = "2001:db8::".parse().unwrap();
        assert_eq!(quotas.acquire(REALM, "a", HOME), Ok(()));
        assert_eq!(quotas.acquire("there", "b", HOME), Ok(()));
        assert_eq!(quotas.acquire(REALM, "c", HOME), Err(QuotaRefusal::Prefix));
        assert_eq!((quotas.total.load(Ordering::Relaxed), quotas.held().len()), (2, 2));
        assert!(quotas.users.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>() == 2);
        assert_eq!(quotas.acquire(REALM, "c", other), Ok(()));
        quotas.release(REALM, "a", HOME);
        assert_eq!(quotas.acquire(REALM, "c", HOME), Ok(()));
        // Lifted, and set again: what came meanwhile counts.
        config.max_allocations_per_prefix = None;
        quotas.limit(&config);
        assert_eq!(quotas.acquire(REALM, "d", HOME), Ok(()));
        config.max_allocations_per_prefix = Some(3);
        quotas.limit(&config);
        assert_eq!(quotas.acquire(REALM, "d", HOME), Err(QuotaRefusal::Prefix));
        for (realm, user, prefix) in
            [("there", "b", HOME), (REALM, "c", HOME), (REALM, "d", HOME), (REALM, "c", other)]
        {
            quotas.release(realm, user, prefix);
        }
        assert!(quotas.prefixes.iter().all(|shard| shard.lock().unwrap().is_empty()));
    }
}
