//! State shared by all rules of all workers, replaced as a whole by a reload.

use std::{net::IpAddr, sync::Arc};

use crate::{Access, Address, ConnectionLog, Rule, circles::Circles, gauge::Gauge, here::Listening};

pub(crate) struct ForwardCommon {
    pub(crate) access: Access,
    /// Number of connections and sessions of all rules, with its limit.
    pub(crate) total: Arc<Gauge>,
    pub(crate) log: Arc<dyn ConnectionLog>,
    pub(crate) circles: Arc<Circles>,
    pub(crate) listening: Listening,
}

impl ForwardCommon {
    /// Checks the global lists, then those of the rule.
    pub(crate) fn admits(&self, rule: &Rule, client: IpAddr) -> bool {
        self.access.admits(client) && rule.access.admits(client)
    }

    /// Like [`ForwardCommon::admits`], but for any client. A client of a Unix socket has no address, so file
    /// permissions decide. The exception is a rule with an `allow` list, which is meant for clients behind
    /// proxies: it refuses clients without an address.
    pub(crate) fn admits_from(&self, rule: &Rule, client: &Address) -> bool {
        client.ip().map_or(rule.access.allow.is_empty(), |client| self.admits(rule, client))
    }
}
