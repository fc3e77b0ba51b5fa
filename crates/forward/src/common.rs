//! What all rules of a worker have in common; replaced as a whole by a reload.

use std::{net::IpAddr, sync::Arc};

use crate::{Access, ConnectionLog, Rule, state::Gauge};

/// Shared by all workers.
pub(crate) struct Common {
    pub(crate) access: Access,
    /// Connections and sessions of all rules, and the limit on them.
    pub(crate) total: Arc<Gauge>,
    pub(crate) log: Arc<dyn ConnectionLog>,
}

impl Common {
    /// The global lists and a rule's own, asked in that order.
    pub(crate) fn admits(&self, rule: &Rule, client: IpAddr) -> bool {
        self.access.admits(client) && rule.access.admits(client)
    }
}
