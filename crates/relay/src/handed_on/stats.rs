//! Counters of connections that were handed on, and the reasons why they end.

use strum::{IntoStaticStr, VariantArray};

/// Kind of traffic by which a rule selected a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum HandedOnBy {
    /// TLS, selected by server name or application protocol.
    Tls,
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum HandOnEnd {
    /// Both sides have closed their sending direction.
    Closed,
    /// Reset by the client, or timed out in the kernel.
    ClientReset,
    ServerReset,
    /// The web server refused the connection or is unreachable.
    Unreachable,
    ConnectTimeout,
    /// One side has closed its sending direction, and the other has sent nothing for too long.
    HalfClosed,
    /// Not connected: too many handed-on connections in total.
    Limit,
    /// Not connected: too many handed-on connections from the client's address.
    LimitAddress,
    /// Not connected: no file descriptors or ports left.
    Exhausted,
    Shutdown,
}

/// Counters that are never reset, except the gauge `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandOnStats {
    /// Current connections, including those that the web server has not accepted yet.
    pub open: u64,
    pub taken: [u64; HandedOnBy::VARIANTS.len()],
    pub ended: [u64; HandOnEnd::VARIANTS.len()],
    /// Bytes received from clients, without the PROXY header.
    pub from_clients: u64,
    pub from_servers: u64,
    pub spliced_bytes: u64,
}

impl HandOnStats {
    pub fn taken(&self, by: HandedOnBy) -> u64 {
        self.taken[by as usize]
    }

    pub fn ended(&self, reason: HandOnEnd) -> u64 {
        self.ended[reason as usize]
    }
}
