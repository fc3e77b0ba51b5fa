//! What all rules of a worker have in common; replaced as a whole by a reload.

use std::{net::IpAddr, sync::Arc};

use crate::{Access, Address, ConnectionLog, Rule, circles::Circles, gauge::Gauge, here::Listening};

/// Shared by all workers.
pub(crate) struct Common {
    pub(crate) access: Access,
    /// Connections and sessions of all rules, and the limit on them.
    pub(crate) total: Arc<Gauge>,
    pub(crate) log: Arc<dyn ConnectionLog>,
    pub(crate) circles: Arc<Circles>,
    pub(crate) listening: Listening,
}

impl Common {
    /// The global lists and a rule's own, asked in that order.
    pub(crate) fn admits(&self, rule: &Rule, client: IpAddr) -> bool {
        self.access.admits(client) && rule.access.admits(client)
    }

    /// As [`Common::admits`]. A client of a Unix socket has no address: the permissions of the socket's file say who may connect,
    /// and only a rule that asks its proxies for clients of certain addresses wants none without.
    pub(crate) fn admits_from(&self, rule: &Rule, client: &Address) -> bool {
        client.ip().map_or(rule.access.allow.is_empty(), |client| self.admits(rule, client))
    }
}
