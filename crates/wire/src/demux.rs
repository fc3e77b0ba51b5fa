//! Protocols on a TURN port, by the first byte of a datagram (RFC 8656 section 12, RFC 7983).

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `0b00`: STUN or TURN message.
    Stun,
    /// `0b01`: ChannelData.
    ChannelData,
    /// Anything else, or an empty datagram.
    Other,
}

#[must_use]
pub fn classify(datagram: &[u8]) -> Kind {
    match datagram.first().map(|byte| byte >> 6) {
        Some(0) => Kind::Stun,
        Some(1) => Kind::ChannelData,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_top_bits_select_the_protocol() {
        assert_eq!(classify(&[]), Kind::Other);
        for first in 0..=u8::MAX {
            let expected = match first {
                0x00..=0x3F => Kind::Stun,
                0x40..=0x7F => Kind::ChannelData,
                _ => Kind::Other,
            };
            assert_eq!(classify(&[first, 0, 0, 0]), expected, "{first:#04x}");
        }
    }
}
