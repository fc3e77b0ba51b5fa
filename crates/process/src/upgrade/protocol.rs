//! Messages between the two processes of an upgrade, as JSON on a [`Channel`](turnpike_net::Channel).

use serde::{Deserialize, Serialize};

/// Raised when processes of different versions can no longer understand each other.
pub(super) const PROTOCOL: u32 = 1;

/// Message to the new process.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromOld {
    /// Comes first, before the offer. All versions understand it.
    Hello { protocol: u32, version: String, service: String },
    /// All sessions have arrived: serve.
    Commit,
    /// The kernel's path belongs to the new process.
    Released,
    /// Metrics of the old process; repeated until it ends.
    Metrics(String),
}

/// Answer of the new process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromNew {
    /// Everything but the sessions is in place.
    Ready {
        version: String,
        /// The flows in the kernel go on, so the old process need not take them out.
        #[serde(default)]
        keeps_flows: bool,
    },
    /// The new process cannot take over. All versions understand this.
    Refused { why: String },
    /// Number of sessions that have arrived.
    Taken { sessions: usize },
    /// The new process serves.
    Serving,
}
