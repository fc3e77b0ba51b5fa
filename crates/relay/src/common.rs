//! Settings and shared state of all workers of a relay.

use std::{
    sync::{Arc, RwLock},
    time::Instant,
};

use turnpike_offload::Kernel;

use crate::{
    AllocationLog, Config, CredentialStore, DtlsConfig, Fleet, Layout, StreamConfig, policy::SharedStore,
    ports::Ports, quotas::Quotas,
};
pub(crate) struct RelayCommon {
    pub(crate) config: Config,
    /// Origin of the clock that all workers use for buckets and reservations.
    pub(crate) started: Instant,
    pub(crate) layout: Arc<Layout>,
    pub(crate) store: SharedStore,
    pub(crate) quotas: Arc<Quotas>,
    pub(crate) ports: Arc<Ports>,
    pub(crate) streams: Arc<StreamConfig>,
    pub(crate) dtls: Arc<DtlsConfig>,
    pub(crate) log: Arc<dyn AllocationLog>,
    pub(crate) fleet: Option<Arc<dyn Fleet>>,
    pub(crate) kernel: Option<Arc<Kernel>>,
    /// True if allocations are taken over from another process, which keeps serving clients until the
    /// handover.
    pub(crate) takes_over: bool,
}

impl RelayCommon {
    pub(crate) fn new(
        config: Config,
        layout: Layout,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn AllocationLog>,
        kernel: Option<Arc<Kernel>>,
        takes_over: bool,
    ) -> Self {
        let quotas = Quotas::new(&config);
        Self {
            started: Instant::now(),
            layout: Arc::new(layout),
            store: Arc::new(RwLock::new(credentials)),
            quotas: Arc::new(quotas),
            ports: Arc::new(Ports::new(&config)),
            streams: Arc::new(config.streams.clone()),
            dtls: Arc::new(config.dtls.clone()),
            log,
            fleet: None,
            kernel,
            takes_over,
            config,
        }
    }
}
