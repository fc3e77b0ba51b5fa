//! Starting, watching and stopping the workers.

use std::{io, net::SocketAddr, sync::Arc};

use turnpike_net::{rx::RxStats, tx::TxStats};
use turnpike_turn::server::{Effect, Lookup, ServerConfig, Stats, User};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::Config;

/// Users and their keys; shared by all workers, asked on requests only.
pub trait CredentialStore: Send + Sync {
    /// As [`turnpike_turn::server::Gate::check`].
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup;
}

/// Hears of sessions and refusals, from the workers' threads; must not block.
pub trait SessionLog: Send + Sync {
    /// One effect of worker number `worker`.
    fn effect(&self, worker: usize, effect: &Effect);
}

/// Why the relay did not start; each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A listener could not be bound.
    #[error("cannot listen on udp {address}: {source}; {remedy}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A relay address is not one of this machine.
    #[error(
        "relay address {address} cannot be bound: {source}; name an address of this machine with --relay-ip"
    )]
    RelayAddress {
        /// Which.
        address: std::net::IpAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Threads, epoll or the like.
    #[error("cannot start a worker: {0}")]
    Worker(#[from] io::Error),
}

/// What one worker has counted, at most 100 ms old.
#[derive(Clone, Debug, Default)]
pub struct WorkerSnapshot {
    /// Allocations that exist.
    pub allocations: u64,
    /// The state machine's counters.
    pub turn: Stats,
    /// Receive occupancy.
    pub rx: RxStats,
    /// Send occupancy.
    pub tx: TxStats,
    /// Times that the worker woke up.
    pub wakeups: u64,
}

/// A running relay. Dropping it stops the workers.
pub struct Relay {}

impl Relay {
    /// Binds all listeners, probes every relay address and starts the workers; on error nothing is left open.
    pub fn start(
        _config: &Config,
        _credentials: Arc<dyn CredentialStore>,
        _log: Arc<dyn SessionLog>,
    ) -> Result<Self, StartError> {
        todo!()
    }

    /// The addresses listened on, with real ports where the configuration said 0.
    #[must_use]
    pub fn listeners(&self) -> &[SocketAddr] {
        todo!()
    }

    /// What each worker has counted.
    #[must_use]
    pub fn snapshots(&self) -> Vec<WorkerSnapshot> {
        todo!()
    }

    /// New settings of the state machine, from now on.
    pub fn reconfigure(&self, _server: &ServerConfig, _credentials: &Arc<dyn CredentialStore>) {
        todo!()
    }

    /// No new allocations from now on.
    pub fn drain(&self) {
        todo!()
    }

    /// Ends all sessions and joins the workers.
    pub fn stop(self) {
        todo!()
    }
}
