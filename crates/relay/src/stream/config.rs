//! TCP and TLS settings.

use std::{net::SocketAddr, sync::Arc};

use turnpike_rules::{HandOnRule, Selector};
use turnpike_turn::server::{Cidr, ClientRules, ConnectionLimits};

use super::TlsContext;
use crate::bounded::share;

/// Settings for TCP and TLS listeners. The default has no listeners and the documented limits.
#[derive(Clone, Debug, Default)]
pub struct StreamConfig {
    /// TCP listeners. With `tls` they also accept TLS clients, recognised by their first byte.
    pub listen: Vec<SocketAddr>,
    /// TLS listeners; ignored without `tls`.
    pub tls_listen: Vec<SocketAddr>,
    pub tls_only: bool,
    pub tls: Option<Arc<TlsContext>>,
    /// Server names (SNI) of TLS and DTLS clients that have their own realms, and therefore their own
    /// listener numbers ([`crate::Layout`]).
    pub server_names: Vec<String>,
    /// Addresses of proxies, whose connections must start with a PROXY header (version 1 or 2).
    pub proxies: Vec<Cidr>,
    /// Clients whose connections are closed before they send anything.
    pub clients: ClientRules,
    /// Rules that select connections for a web server; the first matching rule applies.
    pub hand_on: Vec<HandOnRule>,
    pub limits: ConnectionLimits,
}

impl StreamConfig {
    /// Maximum connections accepted per listener and tick. During a tick, each listener of each worker may
    /// exceed the limits by this many connections.
    pub const ACCEPTS: usize = 32;

    pub(super) fn hands_on_tls(&self) -> bool {
        self.hand_on.iter().any(|rule| rule.selector != Selector::Plain)
    }

    /// Returns true if a certificate or realm lists exactly this name.
    pub(super) fn is_own_name(&self, name: &str) -> bool {
        self.server_names.iter().any(|own| own.eq_ignore_ascii_case(name))
            || self.tls.as_ref().is_some_and(|tls| tls.has_certificate_for(name))
    }

    pub fn most_handed_on(&self, workers: usize) -> usize {
        if self.hand_on.is_empty() { 0 } else { workers * share(self.limits.handed_on, workers) }
    }

    pub fn most_idle(&self, workers: usize) -> usize {
        workers * share(self.limits.idle_connections, workers)
    }
}
