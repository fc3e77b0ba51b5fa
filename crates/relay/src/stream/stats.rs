//! Counters of a worker's streams and the reasons why connections end. Each reason is a counter.

use strum::{IntoStaticStr, VariantArray};
use turnpike_tls::KeyExchangeGroup;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum CloseReason {
    Client,
    /// Reset by the client, or timed out in the kernel.
    Broken,
    NotStun,
    Length,
    /// A message longer than the maximum for a request or, once the client has had an allocation, for
    /// ChannelData.
    TooLong,
    /// The client did not send a complete message, or finish the handshake, in time.
    NoMessage,
    Idle,
    Handshake,
    Tls,
    NoCertificate,
    /// A client without TLS on a TLS-only listener.
    PlainRefused,
    /// STUN without TLS on a TLS-only listener.
    PlainStun,
    /// A trusted proxy sent no PROXY header, or a malformed one.
    ProxyHeader,
    UntrustedProxy,
    /// The client's address is refused by [`turnpike_turn::server::ClientRules`].
    ClientRefused,
    /// A PROXY header with the 5-tuple of a live connection.
    Duplicate,
    /// The client does not read the replies to its requests.
    RepliesUnread,
    /// The oldest connection without an allocation, evicted for a new client when the total limit was
    /// reached.
    Evicted,
    /// Evicted or refused because its address was at the limit.
    LimitAddress,
    DataConnection,
    /// A certificate authority connected only to validate a name (RFC 8737).
    Challenge,
    /// Moved to the worker that has the state to which the client's request refers.
    HandedOver,
    /// Handed on to a web server ([`crate::handed_on`]).
    HandedOn,
    Shutdown,
}

impl CloseReason {
    /// Returns true if the server refused or disconnected a client, which operators may want to see.
    pub(super) fn turns_away(self) -> bool {
        !matches!(
            self,
            Self::Client
                | Self::Broken
                | Self::Idle
                | Self::DataConnection
                | Self::Challenge
                | Self::HandedOver
                | Self::HandedOn
                | Self::Shutdown
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum HandshakeFailure {
    Timeout,
    Evicted,
    Closed,
    Garbage,
    /// No common protocol version, cipher suite or signature scheme.
    Incompatible,
    /// The client offered only ALPN protocols that the server does not know (RFC 7443).
    Alpn,
    /// The client ended the handshake, for example because it does not trust the certificate.
    Alert,
    /// No client certificate, or one that is not valid.
    ClientCertificate,
    /// The handshake was longer than any valid handshake.
    TooLong,
    Misbehaved,
    Other,
}

/// Counters that are never reset, except the gauge `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamStats {
    pub open: u64,
    pub accepted: u64,
    pub adopted: u64,
    pub plain: u64,
    pub handshakes_full: u64,
    pub handshakes_resumed: u64,
    pub handshakes_by_group: [u64; KeyExchangeGroup::VARIANTS.len()],
    pub handshakes_failed: [u64; HandshakeFailure::VARIANTS.len()],
    pub closed: [u64; CloseReason::VARIANTS.len()],
    /// Number of times accepting paused for lack of file descriptors or memory.
    pub accept_pauses: u64,
    pub queue_drops: u64,
    /// Total size of dropped datagrams in bytes, headers included.
    pub queue_dropped_bytes: u64,
    pub reads: u64,
    /// Bytes read, before decryption.
    pub read_bytes: u64,
    pub received: u64,
    pub sent: u64,
    pub writes: u64,
}

impl StreamStats {
    pub fn closed(&self, reason: CloseReason) -> u64 {
        self.closed[reason as usize]
    }

    pub fn failed(&self, reason: HandshakeFailure) -> u64 {
        self.handshakes_failed[reason as usize]
    }

    pub fn by_group(&self, group: KeyExchangeGroup) -> u64 {
        self.handshakes_by_group[group as usize]
    }
}
