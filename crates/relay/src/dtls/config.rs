//! What the DTLS side of the runtime is told at start.

use std::{net::SocketAddr, sync::Arc};

use turnpike_turn::server::ConnectionLimits;

use super::DtlsContext;

/// Settings of DTLS listeners; the default listens nowhere and has the documented limits.
#[derive(Clone, Debug, Default)]
pub struct DtlsConfig {
    /// UDP addresses, which are nothing without `context`. One that plain UDP listens on as well is one socket for both, told
    /// apart by the first byte of each datagram.
    pub listen: Vec<SocketAddr>,
    /// Certificates and all else that DTLS needs.
    pub context: Option<Arc<DtlsContext>>,
    /// Limits of associations, which count as connections.
    pub limits: ConnectionLimits,
}
