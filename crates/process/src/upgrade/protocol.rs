//! Messages between the two processes of an upgrade, as JSON on a [`Channel`](turnpike_worker::Channel).

use serde::{Deserialize, Serialize};

/// Version of the protocol, incremented by every incompatible change.
pub(super) const PROTOCOL: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromOld {
    /// First message, before the offer. All versions understand it.
    Hello {
        protocol: u32,
        version: String,
        service: String,
    },
    /// All sessions have arrived: start serving.
    Commit,
    Released,
    /// Metrics of the old process; repeated until that process exits.
    Metrics(String),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromNew {
    /// Everything except the sessions is in place.
    Ready {
        version: String,
        /// Flows in the kernel stay, so the old process does not have to remove them.
        #[serde(default)]
        keeps_flows: bool,
    },
    /// The new process cannot take over. All versions understand this.
    Refused {
        why: String,
    },
    Taken {
        sessions: usize,
    },
    Serving,
}
