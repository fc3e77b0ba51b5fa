//! What a worker's streams count, and why connections end: each reason is a counter, never a log line.

use strum::{IntoStaticStr, VariantArray};

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum CloseReason {
    /// The client closed it.
    Client,
    /// It broke: reset by the client, or timed out in the kernel.
    Broken,
    /// Bytes that are neither STUN nor ChannelData where a message should begin.
    NotStun,
    /// A STUN message of a length that cannot be.
    Length,
    /// A message longer than is allowed: to begin with that is what a request needs, with an allocation all that ChannelData can
    /// hold.
    TooLong,
    /// No complete message, or no finished handshake, in the time for that.
    NoMessage,
    /// No allocation, and nothing asked for one for too long.
    Idle,
    /// The TLS handshake failed; see [`HandshakeFailure`].
    Handshake,
    /// What came after the TLS handshake was not right.
    Tls,
    /// A TLS client where no certificate is configured.
    NoCertificate,
    /// A client without TLS on a listener that is for TLS only.
    PlainRefused,
    /// The same, and its first bytes are a STUN message.
    PlainStun,
    /// A listed sender that sent no PROXY header, or a broken one.
    ProxyHeader,
    /// A PROXY header from a sender that is not listed.
    UntrustedProxy,
    /// A PROXY header with the 5-tuple of another connection, which lives.
    Duplicate,
    /// A client that does not read the replies to its requests.
    RepliesUnread,
    /// It had no allocation and was the oldest such connection when a newcomer found all places taken.
    Evicted,
    /// The same among the connections of its address.
    LimitAddress,
    /// It became a data connection (RFC 6062), and carries a peer's bytes.
    DataConnection,
    /// Another worker serves it: it has what the client asked for.
    HandedOver,
    /// The server stops.
    Shutdown,
}

impl CloseReason {
    /// Whether a client was turned away by it that may have wanted something: whoever asks why it could not come in wants to know.
    pub(super) fn turns_away(self) -> bool {
        !matches!(
            self,
            Self::Client
                | Self::Broken
                | Self::Idle
                | Self::DataConnection
                | Self::HandedOver
                | Self::Shutdown
        )
    }
}

/// Why a TLS handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum HandshakeFailure {
    /// Not finished in time.
    Timeout,
    /// It had to make room for a newcomer.
    Evicted,
    /// The client closed the connection, or it broke.
    Closed,
    /// What came is no TLS.
    Garbage,
    /// No protocol version, cipher suite or signature in common.
    Incompatible,
    /// ALPN with foreign protocols only (RFC 7443).
    Alpn,
    /// The client gave up: it does not trust the certificate, for instance.
    Alert,
    /// More than any client has to say to shake hands.
    TooLong,
    /// The client broke the protocol.
    Misbehaved,
    /// Anything else.
    Other,
}

/// Never reset, but for `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamStats {
    /// Connections that exist, of whatever stage.
    pub open: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections taken over from another worker.
    pub adopted: u64,
    /// Connections that turned out to be plain TCP, by their first byte.
    pub plain: u64,
    /// TLS handshakes finished, a whole one each.
    pub handshakes_full: u64,
    /// TLS handshakes finished by resuming a session.
    pub handshakes_resumed: u64,
    /// TLS handshakes that failed, in the order of [`HandshakeFailure::VARIANTS`].
    pub handshakes_failed: [u64; HandshakeFailure::VARIANTS.len()],
    /// Connections that ended, in the order of [`CloseReason::VARIANTS`].
    pub closed: [u64; CloseReason::VARIANTS.len()],
    /// Times that accepting paused for want of file descriptors or memory.
    pub accept_pauses: u64,
    /// Datagrams dropped because a client reads too slowly.
    pub queue_drops: u64,
    /// Bytes of these, headers included.
    pub queue_dropped_bytes: u64,
    /// Read calls.
    pub reads: u64,
    /// Bytes read, before decryption.
    pub read_bytes: u64,
    /// Messages received.
    pub received: u64,
    /// Messages queued for clients.
    pub sent: u64,
    /// Send calls.
    pub writes: u64,
}

impl StreamStats {
    /// How many connections ended for this reason.
    pub fn closed(&self, reason: CloseReason) -> u64 {
        self.closed[reason as usize]
    }

    /// How many TLS handshakes failed for this reason.
    pub fn failed(&self, reason: HandshakeFailure) -> u64 {
        self.handshakes_failed[reason as usize]
    }
}
