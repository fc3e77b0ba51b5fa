//! DTLS counters.

use strum::{IntoStaticStr, VariantArray};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DtlsEnd {
    Client,
    Replaced,
    Handshake,
    Protocol,
    /// The client had no allocation for too long.
    Idle,
    /// The client had no allocation, and another client needed its slot.
    Evicted,
    Shutdown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DtlsFailure {
    Timeout,
    Evicted,
    Version,
    /// The client supports only DTLS 1.3 and sent no key share for X25519, P-256 or P-384.
    KeyShare,
    /// No common cipher suite, signature scheme or extension.
    Incompatible,
    /// The client ended the handshake, for example because it does not trust the certificate. A plaintext
    /// alert, as sent by DTLS 1.2 clients, may be forged, so it is counted only after the handshake timeout.
    Closed,
    Misbehaved,
    /// The server shut down, or the client started over.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DtlsDrop {
    /// Not DTLS, for example plain STUN.
    NotDtls,
    /// The client's address is refused by [`turnpike_turn::server::ClientRules`].
    ClientRefused,
    /// A fragment of a ClientHello that cannot be reassembled.
    Fragmented,
    Malformed,
    TooLong,
    /// A ClientHello whose cookie is forged, has expired, or belongs to another client.
    BadCookie,
    /// The reply would be longer than the request.
    Amplification,
    /// Too many handshakes at once, or recent clients occupy all slots. The client's retransmission is served
    /// later.
    Busy,
    NoAssociation,
    /// The datagram had no effect, for example because it contained a forged, broken or repeated record, or
    /// an acknowledgement.
    NoEffect,
    /// The datagram contained a plaintext alert during a handshake. The alert may be forged and is ignored;
    /// the rest is processed.
    PlainAlert,
    /// The arena had no room for the plaintext.
    NoRoom,
    /// The message to the client was longer than a record may be.
    RecordTooLong,
    /// The datagram was to be forwarded to the old process during an upgrade, but that process reads too
    /// slowly.
    OldProcess,
}

/// Counters that are never reset, except the gauges `half_open` and `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DtlsStats {
    pub half_open: u64,
    pub open: u64,
    pub cookies: u64,
    pub handshakes_1_2: u64,
    pub handshakes_1_3: u64,
    pub failed: [u64; DtlsFailure::VARIANTS.len()],
    pub ended: [u64; DtlsEnd::VARIANTS.len()],
    pub dropped: [u64; DtlsDrop::VARIANTS.len()],
    pub datagrams: u64,
    pub received: u64,
    pub sent: u64,
}

impl DtlsStats {
    pub fn failed(&self, why: DtlsFailure) -> u64 {
        self.failed[why as usize]
    }

    pub fn ended(&self, why: DtlsEnd) -> u64 {
        self.ended[why as usize]
    }

    pub fn dropped(&self, why: DtlsDrop) -> u64 {
        self.dropped[why as usize]
    }
}
