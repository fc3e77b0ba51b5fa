//! Access of the interface to its own program, beyond what any client can ask ([`turnpike_api::Program`]).

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use turnpike_api::{Program, RelayRange, Status};
use turnpike_config::{AdminSettings, Settings};
use turnpike_net::Datapath;
use turnpike_relay::{Relay, RelayState, certificates::Certificate};

use crate::accounts::Store;

/// The program that an interface belongs to.
pub trait Owner: Program {
    /// Settings of the interface in force.
    fn settings(&self) -> AdminSettings;
    /// The TURN server; `None` of a forwarder, and once the server has stopped.
    fn server(&self) -> Option<ServerView>;
}

/// A TURN server at this moment. The server cannot stop while this exists, so it is dropped before any wait.
pub struct ServerView {
    /// Its workers.
    pub relay: Arc<Relay>,
    /// The configuration, with additions of the store.
    pub settings: Arc<Settings>,
    /// The store of users, if there is one.
    pub store: Option<Store>,
    /// Certificates that clients get.
    pub certificates: Arc<[Certificate]>,
    /// Addresses of relayed transport addresses.
    pub addresses: Arc<[RelayState]>,
    /// I/O path for datagrams.
    pub datapath: Datapath,
    /// Reason for the choice.
    pub datapath_reason: Arc<str>,
}

impl ServerView {
    /// Relay addresses with their ports and their state.
    pub(crate) fn relay_ranges(&self) -> Vec<RelayRange> {
        let ports = &self.settings.ports;
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

/// State of a program that was started then, so long ago.
pub(crate) fn status_of(program: &dyn Owner, at: Timestamp, uptime: Duration) -> Status {
    let datapath = program.server().map(|server| {
        let kernel = server.relay.kernel().map(|_| "kernel".to_owned());
        let step = kernel.unwrap_or_else(|| server.datapath.to_string());
        turnpike_api::Datapath { step, why: server.datapath_reason.to_string() }
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

/// Time as RFC 3339, without fractions.
pub(crate) fn seconds(at: Timestamp) -> String {
    Timestamp::from_second(at.as_second()).unwrap_or(at).to_string()
}
