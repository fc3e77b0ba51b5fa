//! What the stream side of the runtime is told at start.

use std::{net::SocketAddr, sync::Arc};

use turnpike_turn::server::Cidr;

use super::TlsContext;
use crate::bounded::share;

/// Settings of TCP and TLS listeners; the default listens nowhere and has the documented limits.
#[derive(Clone, Debug)]
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
    /// Bytes of relayed datagrams that wait for one client to read. Beyond it the oldest are dropped.
    pub queue: usize,
    /// Milliseconds until the first complete message, TLS handshake included.
    pub first_message_ms: u64,
    /// Milliseconds that a connection without an allocation may stay silent.
    pub idle_ms: u64,
    /// Connections without an allocation, in total; each worker has its share and some more for chance. Beyond, the oldest gives
    /// way once it is 500 ms old; until then newcomers wait.
    pub max_idle: usize,
    /// The same from one IPv4 address or one IPv6 /64.
    pub max_idle_per_address: usize,
}

impl StreamConfig {
    /// Connections that are accepted from one listener in one tick, at most. Each listener of each worker may have as many descriptors
    /// more than the limits say for as long.
    pub const ACCEPTS: usize = 32;

    /// Connections without an allocation that so many workers may have together.
    pub fn most_idle(&self, workers: usize) -> usize {
        workers * share(self.max_idle, workers)
    }
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            tls_listen: Vec::new(),
            tls_only: false,
            tls: None,
            server_names: Vec::new(),
            proxies: Vec::new(),
            queue: 256 << 10,
            first_message_ms: 10_000,
            idle_ms: 60_000,
            max_idle: 4096,
            max_idle_per_address: 512,
        }
    }
}
