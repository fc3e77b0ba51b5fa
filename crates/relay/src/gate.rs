//! What a worker's state machine asks about users: the credential store that all workers share, and quotas over all
//! workers; and about addresses, whether one is relayed by any of them. Requests come here, packets never do.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
};

use turnpike_turn::server::{CredentialQuery, Gate, Lookup, QuotaRefusal, RelayTransport, User};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::{CredentialStore, PendingLookup, ports::Ports, quotas::Quotas};

/// The store in force; a reload puts another one in its place.
pub(crate) type SharedStore = Arc<RwLock<Arc<dyn CredentialStore>>>;

/// One worker's view.
pub(crate) struct WorkerGate {
    store: SharedStore,
    quotas: Arc<Quotas>,
    ports: Arc<Ports>,
}

impl WorkerGate {
    pub(crate) fn new(store: SharedStore, quotas: Arc<Quotas>, ports: Arc<Ports>) -> Self {
        Self { store, quotas, ports }
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
}

impl turnpike_turn::server::Quotas for WorkerGate {
    fn acquire(&mut self, realm: &str, identity: &str, prefix: IpAddr) -> Result<(), QuotaRefusal> {
        self.quotas.acquire(realm, identity, prefix)
    }

    fn release(&mut self, realm: &str, identity: &str, prefix: IpAddr) {
        self.quotas.release(realm, identity, prefix);
    }
}
