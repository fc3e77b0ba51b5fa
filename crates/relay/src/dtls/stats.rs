//! What is counted of DTLS.

use strum::{IntoStaticStr, VariantArray};

/// Why an association ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DtlsEnd {
    /// The client said farewell (close_notify).
    Client,
    /// The client began anew from the same address and port.
    Replaced,
    /// The handshake failed; see [`DtlsFailure`].
    Handshake,
    /// The client broke the protocol after the handshake.
    Protocol,
    /// No allocation, and nothing asked for one for too long.
    Idle,
    /// It had no allocation, and another client needed its place.
    Evicted,
    /// The server stops.
    Shutdown,
}

/// Why a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DtlsFailure {
    /// Not finished in time.
    Timeout,
    /// Another handshake needed its place.
    Evicted,
    /// No protocol version in common.
    Version,
    /// DTLS 1.3 only, without a key share of X25519, P-256 or P-384.
    KeyShare,
    /// No cipher suite, signature or extension in common.
    Incompatible,
    /// The client gave up: it does not trust the certificate, for instance. Where it says so in the clear, as clients of DTLS
    /// 1.2 do, this is counted when the time for the handshake is over, for anybody can say so in its name.
    Closed,
    /// The client broke the protocol.
    Misbehaved,
    /// The server stops, or the client began anew.
    Other,
}

/// Why a datagram on a DTLS listener was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum DtlsDrop {
    /// No DTLS: plain STUN, for instance.
    NotDtls,
    /// A ClientHello in fragments.
    Fragmented,
    /// A ClientHello or a handshake message that cannot be.
    Malformed,
    /// Too long for a handshake.
    TooLong,
    /// A ClientHello with a cookie that is not ours, not this client's, or too old.
    BadCookie,
    /// The answer would have been longer than the question.
    Amplification,
    /// More handshakes at a time than a worker carries on with, or all places are taken by clients that came a moment ago. The client
    /// repeats its ClientHello, which is served then.
    Busy,
    /// A record of an association that does not exist.
    NoAssociation,
    /// Nothing came of it: a record that is forged, broken or repeated, or an acknowledgement.
    NoEffect,
    /// Held an alert in the clear while hands were being shaken, which may be forged: that is left out, and the rest is read.
    PlainAlert,
    /// Decrypted, and no room for it.
    NoRoom,
    /// For a client, and longer than a record.
    RecordTooLong,
    /// Of a client that the process before an upgrade has, which is too slow.
    OldProcess,
}

/// Never reset, but for `half_open` and `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DtlsStats {
    /// Handshakes under way.
    pub half_open: u64,
    /// Associations that exist, with a finished handshake.
    pub open: u64,
    /// Cookies sent.
    pub cookies: u64,
    /// Handshakes finished, DTLS 1.2.
    pub handshakes_1_2: u64,
    /// Handshakes finished, DTLS 1.3.
    pub handshakes_1_3: u64,
    /// Handshakes that failed, in the order of [`DtlsFailure::VARIANTS`].
    pub failed: [u64; DtlsFailure::VARIANTS.len()],
    /// Associations that ended, in the order of [`DtlsEnd::VARIANTS`].
    pub ended: [u64; DtlsEnd::VARIANTS.len()],
    /// Datagrams dropped, in the order of [`DtlsDrop::VARIANTS`].
    pub dropped: [u64; DtlsDrop::VARIANTS.len()],
    /// Datagrams received on DTLS listeners.
    pub datagrams: u64,
    /// Messages decrypted.
    pub received: u64,
    /// Messages encrypted.
    pub sent: u64,
}

impl DtlsStats {
    /// How many handshakes failed for this reason.
    pub fn failed(&self, why: DtlsFailure) -> u64 {
        self.failed[why as usize]
    }

    /// How many associations ended for this reason.
    pub fn ended(&self, why: DtlsEnd) -> u64 {
        self.ended[why as usize]
    }

    /// How many datagrams were dropped for this reason.
    pub fn dropped(&self, why: DtlsDrop) -> u64 {
        self.dropped[why as usize]
    }
}
