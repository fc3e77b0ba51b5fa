//! Implements the policies that a worker's state machine consults: credential store, quotas, relayed
//! addresses and fleet.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
};

use turnpike_turn::server::{
    AllocateAttempt, CredentialCheck, CredentialQuery, Destination, QuotaRefusal, Redirects, RelayTransport,
    Restrictions, Transport, User, UserRef, Users, VolumeLimits,
};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::{CredentialStore, Fleet, PendingLookup, SharedQuota, ports::Ports, quotas::Quotas};

pub(crate) type SharedStore = Arc<RwLock<Arc<dyn CredentialStore>>>;
pub(crate) struct WorkerPolicy {
    store: SharedStore,
    quotas: Arc<Quotas>,
    ports: Arc<Ports>,
    fleet: Option<Arc<dyn Fleet>>,
}

impl WorkerPolicy {
    pub(crate) fn new(
        store: SharedStore,
        quotas: Arc<Quotas>,
        ports: Arc<Ports>,
        fleet: Option<Arc<dyn Fleet>>,
    ) -> Self {
        Self { store, quotas, ports, fleet }
    }
}

impl WorkerPolicy {
    pub(crate) fn look_up(&self, query: CredentialQuery, answer: PendingLookup) {
        let store = Arc::clone(&self.store.read().unwrap_or_else(PoisonError::into_inner));
        store.look_up(query, answer);
    }
}

impl Users for WorkerPolicy {
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        let store = Arc::clone(&self.store.read().unwrap_or_else(PoisonError::into_inner));
        store.check(user, realm, algorithm, unix, verify)
    }
}

impl Restrictions for WorkerPolicy {
    fn is_relayed(&self, address: SocketAddr, transport: RelayTransport) -> bool {
        self.ports.are_relayed(address, transport)
    }

    fn volume_limits(&self, user: UserRef<'_>, username: &str) -> VolumeLimits {
        self.fleet.as_ref().map_or_else(VolumeLimits::default, |fleet| fleet.volume_limits(user, username))
    }

    fn is_banned(&self, unix: u64, user: UserRef<'_>, username: &str, client: IpAddr) -> bool {
        self.fleet.as_ref().is_some_and(|fleet| fleet.is_banned(unix, user, username, client))
    }
}

impl Redirects for WorkerPolicy {
    fn comes_back(&self, attempt: &AllocateAttempt<'_>) -> bool {
        self.fleet.as_ref().is_some_and(|fleet| fleet.comes_back(attempt))
    }

    fn redirect_target(&self, attempt: &AllocateAttempt<'_>, transport: Transport) -> Option<Destination> {
        self.fleet.as_ref()?.redirect_target(attempt, transport)
    }

    fn node(&self, node: u16, transport: Transport, v4: bool) -> Option<Destination> {
        self.fleet.as_ref()?.node(node, transport, v4)
    }
}

impl turnpike_turn::server::Quotas for WorkerPolicy {
    fn acquire(&self, user: UserRef<'_>, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        self.quotas.acquire(user, prefix)?;
        let Some(fleet) = &self.fleet else { return Ok(()) };
        let (of_realm, of_user) = self.quotas.limits_of(user.realm);
        let shared = SharedQuota { user, of_realm, of_user };
        fleet.acquire(shared).inspect_err(|_| self.quotas.release(user, prefix))
    }

    fn release(&self, user: UserRef<'_>, prefix: IpAddr) {
        self.quotas.release(user, prefix);
        if let Some(fleet) = &self.fleet {
            fleet.release(user);
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
        fn release(&self, _: UserRef<'_>) {
            self.0.lock().unwrap().pop();
        }
        fn is_banned(&self, _: u64, user: UserRef<'_>, _: &str, _: IpAddr) -> bool {
            user.identity == "mallory"
        }
    }

    impl Redirects for Shared {}

    #[test]
    fn quota_is_released_if_the_fleet_refuses() {
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
        let policy = WorkerPolicy::new(store, Arc::clone(&quotas), ports, Some(Arc::<Shared>::clone(&fleet)));
        assert_eq!(
            (
                policy.acquire(UserRef::new(REALM, "a"), HOME),
                policy.acquire(UserRef::new("there", "b"), HOME)
            ),
            (Ok(()), Ok(()))
        );
        let asked = |realm, identity, of_realm| {
            format!("{:?}", SharedQuota { user: UserRef::new(realm, identity), of_realm, of_user: 5 })
        };
        assert_eq!(*fleet.0.lock().unwrap(), [asked(REALM, "a", Some(7)), asked("there", "b", None)]);
        assert_eq!(policy.acquire(UserRef::new(REALM, "c"), HOME), Err(QuotaRefusal::Everywhere));
        assert_eq!((quotas.held().len(), quotas.users()), (2, 2));
        policy.release(UserRef::new(REALM, "a"), HOME);
        assert_eq!(policy.acquire(UserRef::new(REALM, "c"), HOME), Ok(()));
        assert!(policy.is_banned(0, UserRef::new(REALM, "mallory"), "x", HOME));
        assert!(!policy.is_banned(0, UserRef::new(REALM, "y"), "x", HOME));
    }
}
