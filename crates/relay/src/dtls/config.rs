//! DTLS settings.

use std::{net::SocketAddr, sync::Arc};

use turnpike_turn::server::{ClientRules, ConnectionLimits};

use super::DtlsContext;

/// Settings for DTLS listeners. The default has no listeners and the documented limits.
#[derive(Clone, Debug, Default)]
pub struct DtlsConfig {
    /// UDP addresses; ignored without `context`. Plain UDP may use the same address: the two share a socket,
    /// and the first byte of a datagram selects the protocol.
    pub listen: Vec<SocketAddr>,
    pub context: Option<Arc<DtlsContext>>,
    /// Clients that these rules refuse get no answer to a ClientHello.
    pub clients: ClientRules,
    pub limits: ConnectionLimits,
}
