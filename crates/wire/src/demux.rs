//! Which protocol a datagram on a TURN port belongs to, from its first byte (RFC 8656 section 12, RFC 7983).

/// What the first two bits of a datagram say it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `0b00`: a STUN or TURN message.
    Stun,
    /// `0b01`: ChannelData.
    ChannelData,
    /// Anything else, or nothing at all.
    Other,
}

/// Classifies a datagram by its first byte.
#[must_use]
pub fn classify(datagram: &[u8]) -> Kind {
    match datagram.first().map(|byte| byte >> 6) {
        Some(0) => Kind::Stun,
        Some(1) => Kind::ChannelData,
        _ => Kind::Other,
    }
}
