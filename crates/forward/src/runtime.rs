//! Starting, changing, watching and stopping the workers.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_net::Datapath;

use crate::{Access, Rule, RuleId};

/// What holds for all rules.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Threads; at least 1.
    pub workers: usize,
    /// How datagrams enter and leave.
    pub datapath: Datapath,
    /// Asked before each rule's own.
    pub access: Access,
    /// Connections and sessions of all rules at a time.
    pub max_connections: usize,
    /// Age at which a resolved name is resolved again.
    pub resolve_every: Duration,
    /// Start although some rules cannot be bound.
    pub keep_going: bool,
}

/// Why the forwarder did not start, or why a reload was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A rule's listener could not be bound.
    #[error("rule {rule}: cannot listen on {address}: {source}; {remedy}")]
    Listen {
        /// Which.
        rule: String,
        /// Where.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// Threads, epoll or the like.
    #[error(
        "cannot start a worker: {0}; raise the limit of open files (ulimit -n) or of threads (ulimit -u)"
    )]
    Worker(#[from] io::Error),
}

/// Why a connection or session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndReason {
    /// Both sides had said all.
    Finished,
    /// RST from the client.
    ClientReset,
    /// RST from the target.
    TargetReset,
    /// No byte for the idle timeout.
    Idle,
    /// No target could be reached.
    ConnectFailed,
    /// Refused by allow and deny lists.
    Denied,
    /// A limit on connections.
    Limit,
    /// A malformed or missing PROXY header.
    BadProxyHeader,
    /// Its rule was removed or changed (UDP), or the forwarder stops.
    Shutdown,
}

/// One ended connection or session; for its log line.
#[derive(Clone, Debug)]
pub struct ConnectionReport {
    /// Rule.
    pub rule: RuleId,
    /// Client.
    pub client: SocketAddr,
    /// The target that was reached, if any.
    pub target: Option<SocketAddr>,
    /// Bytes from the client to the target.
    pub to_target: u64,
    /// Bytes from the target to the client.
    pub to_client: u64,
    /// How long it lived.
    pub lived: Duration,
    /// Why it ended.
    pub reason: EndReason,
}

/// Hears of ended connections, from the workers' threads; must not block.
pub trait ConnectionLog: Send + Sync {
    /// One connection or session is over.
    fn ended(&self, report: ConnectionReport);
}

/// Counters of one rule, over all workers, at most 100 ms old.
#[derive(Clone, Debug, Default)]
pub struct RuleSnapshot {
    /// Connections and sessions now.
    pub active: u64,
    /// Since the start.
    pub accepted: u64,
    /// Ended, by reason.
    pub ended: Vec<(EndReason, u64)>,
    /// Bytes to targets.
    pub to_target_bytes: u64,
    /// Bytes to clients.
    pub to_client_bytes: u64,
    /// Datagrams to targets (UDP).
    pub to_target_datagrams: u64,
    /// Datagrams to clients (UDP).
    pub to_client_datagrams: u64,
    /// Bytes moved by splice.
    pub spliced_bytes: u64,
    /// Datagrams dropped: session limit, queue overflow, too long for the other side.
    pub dropped_datagrams: u64,
}

/// A running forwarder. Dropping it stops the workers.
pub struct Forwarder {}

impl Forwarder {
    /// Binds the listeners of all rules and starts the workers; on error nothing is left open (unless
    /// [`Settings::keep_going`], which returns the rules that failed).
    ///
    /// # Errors
    /// [`StartError`], which names the rule and says what to change.
    pub fn start(
        _settings: &Settings,
        _rules: &[Rule],
        _log: Arc<dyn ConnectionLog>,
    ) -> Result<(Self, Vec<StartError>), StartError> {
        todo!()
    }

    /// The addresses listened on, with real ports where the rule said 0.
    #[must_use]
    pub fn listeners(&self) -> Vec<(RuleId, SocketAddr)> {
        todo!()
    }

    /// Adds, changes and removes rules; connections of unchanged rules live on, those of removed ones are left to finish,
    /// their listeners close. On error the old rules stay in force.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn reload(&self, _settings: &Settings, _rules: &[Rule]) -> Result<(), StartError> {
        todo!()
    }

    /// Counters of each rule.
    #[must_use]
    pub fn snapshots(&self) -> Vec<(RuleId, RuleSnapshot)> {
        todo!()
    }

    /// Closes the listeners; connections live on.
    pub fn drain(&self) {
        todo!()
    }

    /// Connections and sessions now.
    #[must_use]
    pub fn active(&self) -> u64 {
        todo!()
    }

    /// Ends everything and joins the workers.
    pub fn stop(self) {
        todo!()
    }
}
