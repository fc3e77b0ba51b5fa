//! Framing of messages in a byte stream (RFC 8489 section 6.2.2, RFC 8656 section 12.5), independent of
//! segment boundaries.
//!
//! ```text
//! │ STUN: 20 bytes + length                │ ChannelData: 4 bytes + length │ padding to 4 │ STUN …
//! ```

use crate::{
    demux::{self, Kind},
    stun::{COOKIE, HEADER_LEN},
};

/// Maximum length of a STUN message: a header, and the largest multiple of 4 that fits into the length field.
/// ChannelData is shorter, even with padding. An indication with the longest UDP datagram (65,507 bytes)
/// needs nearly this much.
pub const MAX_MESSAGE_LEN: usize = HEADER_LEN + 65_532;

const CHANNEL_DATA_HEADER_LEN: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    Message {
        len: usize,
        /// Offset of the next message.
        next: usize,
    },
    Unfinished {
        /// Number of bytes needed before another attempt can make progress.
        wanted: usize,
    },
}

/// Framing error, after which the next message boundary is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FrameError {
    /// Neither STUN nor ChannelData by its first two bits, or STUN without the magic cookie.
    #[error("neither a STUN message nor ChannelData")]
    NotStun,
    /// STUN message whose length is not a multiple of 4 (RFC 8489 section 5).
    #[error("the length of a STUN message is not a multiple of 4")]
    Length,
    #[error("the message is longer than allowed here")]
    TooLong,
}

/// `limit` includes padding. Fails as soon as the bytes cannot start a valid message.
#[inline]
pub fn first(bytes: &[u8], limit: usize) -> Result<Frame, FrameError> {
    let (len, next) = match (demux::classify(bytes), bytes.get(2..4)) {
        (Kind::Other, _) if !bytes.is_empty() => return Err(FrameError::NotStun),
        (_, None) | (Kind::Other, _) => return Ok(Frame::Unfinished { wanted: CHANNEL_DATA_HEADER_LEN }),
        (Kind::ChannelData, Some(length)) => {
            let len = CHANNEL_DATA_HEADER_LEN + usize::from(u16::from_be_bytes([length[0], length[1]]));
            (len, len.next_multiple_of(4))
        }
        (Kind::Stun, Some(length)) => {
            let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
            if !length.is_multiple_of(4) {
                return Err(FrameError::Length);
            }
            match bytes.get(4..8) {
                // Check the cookie first: a stream of another protocol that starts with a small byte would
                // otherwise wait for the length that it seems to announce.
                None => return Ok(Frame::Unfinished { wanted: 8 }),
                Some(cookie) if *cookie != COOKIE => return Err(FrameError::NotStun),
                Some(_) => {}
            }
            (HEADER_LEN + length, HEADER_LEN + length)
        }
    };
    if next > limit {
        Err(FrameError::TooLong)
    } else if bytes.len() < next {
        Ok(Frame::Unfinished { wanted: next })
    } else {
        Ok(Frame::Message { len, next })
    }
}

/// Number of zero bytes, 0 to 3, after `len` bytes of payload.
#[inline]
#[must_use]
pub const fn padding(len: usize) -> u8 {
    #[expect(clippy::cast_possible_truncation, reason = "0 to 3")]
    {
        (len.wrapping_neg() % 4) as u8
    }
}

/// Holds the received part of an incomplete message. Complete messages bypass it: the caller parses them in
/// its own buffer, with [`Framer::held`] in front.
#[derive(Debug, Default)]
pub struct Framer {
    held: Vec<u8>,
    wanted: usize,
}

/// Capacity that is kept: enough for messages that fit into an Ethernet frame.
const KEEP: usize = 2048;

impl Framer {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// True if the held bytes plus `received` may contain a message. Otherwise adds `received` to the held
    /// bytes.
    pub fn completes(&mut self, received: &[u8]) -> bool {
        let enough = self.held.len() + received.len() >= self.wanted;
        if !enough {
            self.held.extend_from_slice(received);
        }
        enough
    }

    /// `rest` is the start of a message that needs `wanted` bytes.
    pub fn hold(&mut self, rest: &[u8], wanted: usize) {
        self.held.clear();
        if rest.is_empty() {
            self.wanted = 0;
            if self.held.capacity() > KEEP {
                self.held = Vec::new();
            }
            return;
        }
        self.wanted = wanted;
        self.held.extend_from_slice(rest);
    }

    /// Calls `message` with each complete message, without padding, even if a later one is invalid.
    pub fn feed(
        &mut self,
        mut received: &[u8],
        limit: usize,
        mut message: impl FnMut(&[u8]),
    ) -> Result<(), FrameError> {
        while !self.held.is_empty() {
            let missing = self.wanted - self.held.len();
            let (head, tail) = received.split_at(missing.min(received.len()));
            if !self.completes(head) {
                return Ok(());
            }
            self.held.extend_from_slice(head);
            received = tail;
            match first(&self.held, limit)? {
                Frame::Message { len, .. } => {
                    message(&self.held[..len]);
                    self.hold(&[], 0);
                }
                Frame::Unfinished { wanted } => self.wanted = wanted,
            }
        }
        loop {
            match first(received, limit)? {
                Frame::Message { len, next } => {
                    message(&received[..len]);
                    received = &received[next..];
                }
                Frame::Unfinished { wanted } => {
                    self.hold(received, wanted);
                    return Ok(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stun(attributes: &[u8]) -> Vec<u8> {
        let length = u16::try_from(attributes.len()).unwrap().to_be_bytes();
        [&[0, 1], &length[..], &COOKIE, &[7; 12], attributes].concat()
    }

    fn channel_data(payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
        [&[0x40, 1], &length[..], payload].concat()
    }

    fn padded(mut message: Vec<u8>) -> Vec<u8> {
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    #[test]
    fn padding_completes_a_multiple_of_four() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(padding), [0, 3, 2, 1, 0, 3]);
    }

    #[test]
    fn a_message_ends_after_its_padding_and_is_delivered_without_it() {
        for payload in 0..9 {
            let message = channel_data(&vec![1; payload]);
            let bytes = padded(message.clone());
            assert_eq!(usize::from(padding(message.len())), bytes.len() - message.len());
            for end in 0..bytes.len() {
                let wanted = if end < 4 { 4 } else { bytes.len() };
                assert_eq!(first(&bytes[..end], MAX_MESSAGE_LEN), Ok(Frame::Unfinished { wanted }));
            }
            let expected = Frame::Message { len: message.len(), next: bytes.len() };
            assert_eq!(first(&bytes, MAX_MESSAGE_LEN), Ok(expected));
        }
        let bytes = stun(&[0x80, 0x22, 0, 0]);
        assert_eq!(first(&bytes, MAX_MESSAGE_LEN), Ok(Frame::Message { len: 24, next: 24 }));
    }

    #[test]
    fn the_longest_message_of_either_kind_fits() {
        let bytes = padded(channel_data(&vec![1; 65_535]));
        assert_eq!(first(&bytes, MAX_MESSAGE_LEN), Ok(Frame::Message { len: 65_539, next: 65_540 }));
        let bytes = stun(&vec![1; 65_532]);
        let whole = Frame::Message { len: MAX_MESSAGE_LEN, next: MAX_MESSAGE_LEN };
        assert_eq!(first(&bytes, MAX_MESSAGE_LEN), Ok(whole));
    }

    #[test]
    fn an_invalid_stream_is_refused_at_the_earliest_byte() {
        for byte in 0x80..=0xFF {
            assert_eq!(first(&[byte], 100), Err(FrameError::NotStun));
        }
        let mut wrong_cookie = stun(&[]);
        wrong_cookie[5] ^= 1;
        assert_eq!(first(&wrong_cookie[..7], 100), Ok(Frame::Unfinished { wanted: 8 }));
        assert_eq!(first(&wrong_cookie[..8], 100), Err(FrameError::NotStun));
        assert_eq!(first(&stun(&[])[..8], 100), Ok(Frame::Unfinished { wanted: 20 }));
        assert_eq!(first(&[0, 1, 0, 3], 100), Err(FrameError::Length));
        assert_eq!(first(&[0x40, 0, 0, 97], 100), Err(FrameError::TooLong));
        assert_eq!(first(&[0x40, 0, 0, 96], 100), Ok(Frame::Unfinished { wanted: 100 }));
        assert_eq!(first(&[0, 1, 0, 84, 0x21, 0x12, 0xA4, 0x42], 100), Err(FrameError::TooLong));
    }

    #[test]
    fn a_long_message_does_not_keep_its_memory() {
        let mut framer = Framer::new();
        let bytes = padded(channel_data(&vec![1; 60_000]));
        let mut seen = 0;
        for chunk in bytes.chunks(1000) {
            framer.feed(chunk, MAX_MESSAGE_LEN, |_| seen += 1).unwrap();
        }
        assert_eq!((seen, framer.held.capacity()), (1, 0));
    }
}
