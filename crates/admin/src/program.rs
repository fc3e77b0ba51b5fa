//! Access to the interface's own program, beyond the public [`turnpike_api::Program`].

use std::{net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use turnpike_api::{CertificateOrder, Program, QualityProblem, RelayRange, Status, quality::Quality};
use turnpike_config::{AdminSettings, Settings};
use turnpike_events::Events;
use turnpike_net::Datapath;
use turnpike_relay::{Relay, RelayState, certificates::Certificate};
use turnpike_stores::UsageStore;
use turnpike_turn::server::{AllocationId, ClientNetwork, ClientNetworks};

use crate::accounts::AccountStore;

pub trait Owner: Program {
    fn settings(&self) -> AdminSettings;
    /// The running TURN server; `None` for a forwarder, and after the server has stopped.
    fn server(&self) -> Option<ServerView>;
    /// Events for applications; `None` for a forwarder.
    fn events(&self) -> Option<Arc<Events>> {
        None
    }
}

/// Quality of media by allocation.
pub trait AllocationQualities: Send + Sync {
    /// `None` if none was measured.
    fn quality(&self, id: AllocationId) -> Option<Quality>;
    /// `None` without trouble.
    fn problem(&self, id: AllocationId) -> Option<QualityProblem>;
}

/// The TURN server that is currently running. The server cannot stop while this exists, so drop it
/// before waiting for anything.
pub struct ServerView {
    pub relay: Arc<Relay>,
    /// Effective settings, including those from the store.
    pub settings: Arc<Settings>,
    pub store: Option<AccountStore>,
    /// Certificates for clients.
    pub certificates: Arc<[Certificate]>,
    pub orders: Vec<CertificateOrder>,
    pub addresses: Arc<[RelayState]>,
    pub datapath: Datapath,
    /// Reason for the choice of the data path.
    pub datapath_reason: Arc<str>,
    /// The usage ledger; `None` if usage is not recorded.
    pub usage: Option<Arc<UsageStore>>,
    /// Countries and autonomous systems of clients; `None` if all are unknown.
    pub networks: Option<Arc<dyn ClientNetworks>>,
    /// Quality of media; `None` if it is not measured.
    pub qualities: Option<Arc<dyn AllocationQualities>>,
}

impl ServerView {
    pub(crate) fn network(&self, client: IpAddr) -> ClientNetwork {
        self.networks.as_ref().map_or_else(ClientNetwork::default, |networks| networks.network(client))
    }

    pub(crate) fn quality(&self, id: AllocationId) -> Option<Quality> {
        self.qualities.as_ref()?.quality(id)
    }

    pub(crate) fn quality_problem(&self, id: AllocationId) -> Option<QualityProblem> {
        self.qualities.as_ref()?.problem(id)
    }

    pub(crate) fn relay_ranges(&self) -> Vec<RelayRange> {
        let ports = &self.settings.relay.ports;
        let range = |state: &RelayState| RelayRange {
            address: state.address.bind.to_string(),
            external: state.address.external.map(|external| external.to_string()),
            first_port: *ports.start(),
            last_port: *ports.end(),
            up: state.is_up,
            since: Timestamp::try_from(state.since).map(seconds).unwrap_or_default(),
        };
        self.addresses.iter().map(range).collect()
    }
}

pub(crate) fn status_of(program: &dyn Owner, at: Timestamp, uptime: Duration) -> Status {
    let datapath = program.server().map(|server| {
        let obstacle = match server.relay.kernel() {
            Some(kernel) => kernel.obstacle(),
            None => server.relay.kernel_lack().map(str::to_owned),
        };
        let is_in_kernel = server.relay.kernel().is_some() && obstacle.is_none();
        let step = if is_in_kernel { "kernel".to_owned() } else { server.datapath.to_string() };
        let obstacle = obstacle.map(|obstacle| format!("; not in the kernel: {obstacle}"));
        let why = format!("{}{}", server.datapath_reason, obstacle.unwrap_or_default());
        turnpike_api::DatapathStatus { step, why }
    });
    Status {
        job: program.job(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        started_at: seconds(at),
        uptime_s: uptime.as_secs(),
        draining: program.process().is_draining(),
        open: program.open(),
        datapath,
        relays: program.server().map_or_else(Vec::new, |server| server.relay_ranges()),
        node: program.fleet().and_then(|fleet| fleet.node()),
        sandbox: program.process().sandbox(),
    }
}

/// Formats a time as RFC 3339, without fractions of a second.
pub(crate) fn seconds(at: Timestamp) -> String {
    Timestamp::from_second(at.as_second()).unwrap_or(at).to_string()
}
