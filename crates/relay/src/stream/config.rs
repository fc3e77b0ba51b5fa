//! What the stream side of the runtime is told at start.

use std::{net::SocketAddr, sync::Arc};

use turnpike_turn::server::{Cidr, ConnectionLimits};

use super::TlsContext;
use crate::bounded::share;

/// Settings of TCP and TLS listeners; the default listens nowhere and has the documented limits.
#[derive(Clone, Debug, Default)]
pub struct StreamConfig {
    /// TCP listeners. With `tls`, they take TLS clients too, told apart by the first byte.
    pub listen: Vec<SocketAddr>,
    /// Further listeners, which are nothing without `tls`.
    pub tls_listen: Vec<SocketAddr>,
    /// Whether `tls_listen` refuses clients without TLS.
    pub tls_only: bool,
    /// Certificates and all else that TLS needs.
    pub tls: Option<Arc<TlsContext>>,
    /// Names that TLS and DTLS clients ask for (SNI) and that lead to realms of their own: such clients have a listener number of their
    /// own ([`crate::Layout`]).
    pub server_names: Vec<String>,
    /// Proxies: who connects from here must tell of its client by a PROXY header (version 1 or 2).
    pub proxies: Vec<Cidr>,
    /// Limits of connections.
    pub limits: ConnectionLimits,
}

impl StreamConfig {
    /// Connections that are accepted from one listener in one tick, at most. Each listener of each worker may have as many descriptors
    /// more than the limits say for as long.
    pub const ACCEPTS: usize = 32;

    /// Connections without an allocation that so many workers may have together.
    pub fn most_idle(&self, workers: usize) -> usize {
        workers * share(self.limits.idle_connections, workers)
    }
}
