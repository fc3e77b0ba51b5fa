//! Counters of one worker: plain integers, cheap enough for the packet path.

/// Never reset; `allocations`-like gauges live in [`super::Server`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Payload datagrams relayed client to peer.
    pub to_peer_datagrams: u64,
    /// Payload bytes relayed client to peer.
    pub to_peer_bytes: u64,
    /// Payload datagrams relayed peer to client.
    pub to_client_datagrams: u64,
    /// Payload bytes relayed peer to client.
    pub to_client_bytes: u64,
}
