//! Messages on a stream: where one ends (RFC 8656 section 12.5, RFC 8489 section 6.2.2).

use turnpike_wire::demux::{self, Kind};

/// The longest message on a stream: a STUN header and 65,535 bytes, or ChannelData with padding.
pub(crate) const MAX_FRAME: usize = 20 + 65_535;

/// The stream holds something that is no message, so that where the next one begins cannot be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotTurn;

/// How long the message is that `bytes` begin with, the padding of ChannelData included; `None` while too little of it is
/// there to tell.
pub(crate) fn length(bytes: &[u8]) -> Result<Option<usize>, NotTurn> {
    let Some(&first) = bytes.first() else { return Ok(None) };
    let size = |high: u8, low: u8| usize::from(u16::from_be_bytes([high, low]));
    match (demux::classify(&[first]), bytes) {
        (Kind::Other, _) => Err(NotTurn),
        (Kind::Stun, [_, _, high, low, ..]) => Ok(Some(20 + size(*high, *low))),
        (Kind::ChannelData, [_, _, high, low, ..]) => Ok(Some((4 + size(*high, *low)).next_multiple_of(4))),
        (Kind::Stun | Kind::ChannelData, _) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_ends_where_its_length_says_channel_data_at_a_multiple_of_four() {
        assert_eq!(length(&[]), Ok(None));
        assert_eq!(length(&[0, 1, 0]), Ok(None));
        assert_eq!(length(&[0, 1, 0, 8]), Ok(Some(28)));
        for (payload, frame) in [(0, 4), (1, 8), (4, 8), (5, 12)] {
            assert_eq!(length(&[0x40, 0, 0, payload, 9]), Ok(Some(frame)));
        }
        assert_eq!(length(&[0x40, 0, 0xFF, 0xFF]), Ok(Some(65_540)));
        for other in [0x80, 0xC0, b'H' | 0x80] {
            assert_eq!(length(&[other]), Err(NotTurn));
        }
    }
}
