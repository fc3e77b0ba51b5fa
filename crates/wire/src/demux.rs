//! Which protocol a datagram on a TURN port belongs to, from its first byte (RFC 8656 section 12, RFC 7983).

use crate::stun::Attributes;

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

/// Whether a datagram is exactly one STUN message (RFC 8489 sections 5 and 14): cookie, a length field that is that
/// of the datagram, and attributes that end where it ends.
///
/// To be asked before `stun_types::message::Message::from_bytes`, which takes a length field that is too short, reads
/// attributes beyond it, and writes a log line about every malformed message that it meets.
#[must_use]
pub fn is_stun_message(datagram: &[u8]) -> bool {
    Attributes::of(datagram).is_ok_and(|mut attributes| attributes.all(|attribute| attribute.is_ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_top_bits_tell_the_protocols_apart() {
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

    #[test]
    fn a_message_ends_where_its_length_field_says() {
        let binding = [0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x42, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        assert!(is_stun_message(&binding));
        assert!(!is_stun_message(&binding[..19]));
        assert!(!is_stun_message(&[&binding[..], &[0x80, 0x22, 0, 0]].concat()), "bytes after the end");

        let with = |length: u8, tail: &[u8]| {
            let mut message = [&binding[..], tail].concat();
            message[3] = length;
            message
        };
        assert!(is_stun_message(&with(4, &[0x80, 0x22, 0, 0])));
        assert!(is_stun_message(&with(8, &[0x80, 0x22, 0, 1, 7, 0, 0, 0])));
        assert!(!is_stun_message(&with(4, &[0x80, 0x22, 0, 1])), "an attribute beyond the end");
        assert!(!is_stun_message(&with(5, &[0x80, 0x22, 0, 1, 7])), "an attribute without padding");
        assert!(!is_stun_message(&with(8, &[0x80, 0x22, 0, 0])), "a length field beyond the end");
        assert!(!is_stun_message(&with(2, &[0, 0])), "half an attribute header");
        let second = with(8, &[0x80, 0x22, 0, 0, 0x80, 0x22, 0, 1]);
        assert!(!is_stun_message(&second), "the second attribute beyond the end");

        let mut wrong = binding;
        wrong[7] ^= 1;
        assert!(!is_stun_message(&wrong), "the cookie");
        let mut wrong = binding;
        wrong[0] = 0x40;
        assert!(!is_stun_message(&wrong), "the top bits");
    }
}
