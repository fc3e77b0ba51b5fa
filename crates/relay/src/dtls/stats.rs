//! What is counted of DTLS.

use crate::stream::stats::reasons;

reasons! {
    /// Why an association ended.
    DtlsEnd {
        /// The client said farewell (close_notify).
        Client => "client",
        /// The client began anew from the same address and port.
        Replaced => "replaced",
        /// The handshake failed; see [`DtlsFailure`].
        Handshake => "handshake",
        /// The client broke the protocol after the handshake.
        Protocol => "protocol",
        /// No allocation, and nothing asked for one for too long.
        Idle => "idle",
        /// It had no allocation, and another client needed its place.
        Evicted => "evicted",
        /// The server stops.
        Shutdown => "shutdown",
    }
}

reasons! {
    /// Why a handshake failed.
    DtlsFailure {
        /// Not finished in time.
        Timeout => "timeout",
        /// Another handshake needed its place.
        Evicted => "evicted",
        /// No protocol version in common.
        Version => "version",
        /// DTLS 1.3 only, without a key share of X25519, P-256 or P-384.
        KeyShare => "key_share",
        /// No cipher suite, signature or extension in common.
        Incompatible => "incompatible",
        /// The client gave up: it does not trust the certificate, for instance. Where it says so in the clear, as clients of DTLS
        /// 1.2 do, this is counted when the time for the handshake is over, for anybody can say so in its name.
        Closed => "closed",
        /// The client broke the protocol.
        Misbehaved => "misbehaved",
        /// The server stops, or the client began anew.
        Other => "other",
    }
}

reasons! {
    /// Why a datagram on a DTLS listener was dropped.
    DtlsDrop {
        /// No DTLS: plain STUN, for instance.
        NotDtls => "not_dtls",
        /// A ClientHello in fragments.
        Fragmented => "fragmented",
        /// A ClientHello or a handshake message that cannot be.
        Malformed => "malformed",
        /// Too long for a handshake.
        TooLong => "too_long",
        /// A ClientHello with a cookie that is not ours, not this client's, or too old.
        BadCookie => "bad_cookie",
        /// The answer would have been longer than the question.
        Amplification => "amplification",
        /// More handshakes at a time than a worker carries on with; the client tries again.
        Busy => "busy",
        /// A record of an association that does not exist.
        NoAssociation => "no_association",
        /// Nothing came of it: a record that is forged, broken or repeated, or an acknowledgement.
        NoEffect => "no_effect",
        /// Held an alert in the clear while hands were being shaken, which may be forged: that is left out, and the rest is read.
        PlainAlert => "plain_alert",
        /// Decrypted, and no room for it.
        NoRoom => "no_room",
        /// For a client, and longer than a record.
        RecordTooLong => "record_too_long",
    }
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
    /// Handshakes that failed, in the order of [`DtlsFailure::ALL`].
    pub failed: [u64; DtlsFailure::ALL.len()],
    /// Associations that ended, in the order of [`DtlsEnd::ALL`].
    pub ended: [u64; DtlsEnd::ALL.len()],
    /// Datagrams dropped, in the order of [`DtlsDrop::ALL`].
    pub dropped: [u64; DtlsDrop::ALL.len()],
    /// Datagrams received on DTLS listeners.
    pub datagrams: u64,
    /// Messages decrypted.
    pub received: u64,
    /// Messages encrypted.
    pub sent: u64,
}

impl DtlsStats {
    /// How many handshakes failed for this reason.
    #[must_use]
    pub fn failed(&self, why: DtlsFailure) -> u64 {
        self.failed[why as usize]
    }

    /// How many associations ended for this reason.
    #[must_use]
    pub fn ended(&self, why: DtlsEnd) -> u64 {
        self.ended[why as usize]
    }

    /// How many datagrams were dropped for this reason.
    #[must_use]
    pub fn dropped(&self, why: DtlsDrop) -> u64 {
        self.dropped[why as usize]
    }
}
