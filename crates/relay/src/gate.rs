//! What a worker's state machine asks about users: the credential store that all workers share, and quotas over all
//! workers; and about addresses, whether one is relayed by any of them. Requests come here, packets never do.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
};

use turnpike_turn::server::{
    AllocateAttempt, CredentialQuery, Destination, Gate, Lookup, QuotaRefusal, RelayTransport, Transport,
    User,
};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::{CredentialStore, Fleet, PendingLookup, SharedQuota, ports::Ports, quotas::Quotas};

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

    fn comes_back(&mut self, attempt: &AllocateAttempt<'_>) -> bool {
        self.fleet.as_ref().is_some_and(|fleet| fleet.comes_back(attempt))
    }

    fn redirect_target(
        &mut self,
        attempt: &AllocateAttempt<'_>,
        transport: Transport,
    ) -> Option<Destination> {
        self.fleet.as_ref()?.redirect_target(attempt, transport)
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
#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use turnpike_turn::server::{AllocationLimits, Quotas as _};

    use super::*;
    use crate::{Config, RealmLimits};

    const REALM: &str = "here";
    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

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
        fn comes_back(&self, _: &AllocateAttempt<'_>) -> bool {
            false
        }
        fn redirect_target(&self, _: &AllocateAttempt<'_>, _: Transport) -> Option<Destination> {
            None
        }
        fn node(&self, _: u16, _: Transport, _: bool) -> Option<Destination> {
            None
        }
    }

    #[test]
    fn what_the_fleet_refuses_is_given_back_here() {
        let limits = RealmLimits { realm: REALM.to_owned(), allocations: Some(7), ..RealmLimits::default() };
        let config = Config {
            limits: AllocationLimits {
                allocations: 10,
                allocations_per_user: 5,
                ..AllocationLimits::default()
            },
            realm_limits: vec![limits],
            ..Config::default()
        };
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
        assert_eq!((quotas.held().len(), quotas.users()), (2, 2));
        gate.release(REALM, "a", HOME);
        assert_eq!(gate.acquire(REALM, "c", HOME), Ok(()));
        assert!(gate.is_banned(0, REALM, ["x", "mallory"], HOME));
        assert!(!gate.is_banned(0, REALM, ["x", "y"], HOME));
    }
}
