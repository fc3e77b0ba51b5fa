//! What the DTLS side of the runtime is told at start.

use std::{net::SocketAddr, sync::Arc};

use super::DtlsContext;

/// Settings of DTLS listeners; the default listens nowhere and has the documented limits.
#[derive(Clone, Debug)]
pub struct DtlsConfig {
    /// UDP addresses, which are nothing without `context`. One that plain UDP listens on as well is one socket for both, told
    /// apart by the first byte of each datagram.
    pub listen: Vec<SocketAddr>,
    /// Certificates and all else that DTLS needs.
    pub context: Option<Arc<DtlsContext>>,
    /// Handshakes that are not finished, in total; each worker has its share and some more for chance.
    pub max_half_open: usize,
    /// The same for one IPv4 /24 or one IPv6 /56.
    pub max_half_open_per_network: usize,
    /// Milliseconds for a handshake.
    pub handshake_ms: u64,
    /// Associations without an allocation, in total; each worker has its share and some more for chance.
    pub max_idle: usize,
    /// The same for one IPv4 /24 or one IPv6 /56.
    pub max_idle_per_network: usize,
    /// Milliseconds that an association without an allocation may stay silent.
    pub idle_ms: u64,
}

impl Default for DtlsConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            context: None,
            max_half_open: 1024,
            max_half_open_per_network: 256,
            handshake_ms: 10_000,
            max_idle: 4096,
            max_idle_per_network: 512,
            idle_ms: 60_000,
        }
    }
}
