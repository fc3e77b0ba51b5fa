//! Fuzz target: arbitrary bytes as a stream, in arbitrary pieces.

use crate::prelude::*;
use turnpike_testkit::fuzz::{self, Input};
use turnpike_wire::{
    channel_data::ChannelRange,
    frame::{self, Frame, FrameError, Framer, MAX_MESSAGE_LEN},
    stun,
};

#[derive(Debug, PartialEq, Eq)]
struct Followed {
    messages: Vec<Vec<u8>>,
    end: Result<(), FrameError>,
    held: Vec<u8>,
}

#[test]
fn frames() {
    fuzz::target("frames", seeds, |bytes| {
        let mut input = Input::new(bytes);
        let limit = *input.choice(&[MAX_MESSAGE_LEN, 64, 1500]);
        let step = input.byte();
        let stream = input.rest();
        let whole = follow(limit, [stream]);
        assert_eq!(follow(limit, pieces(stream, step)), whole);
        assert_eq!(walked(limit, stream), whole);
    });
}

/// Pieces of pseudo-random length, from a few bytes to a few hundred.
fn pieces(mut stream: &[u8], step: u8) -> impl Iterator<Item = &[u8]> {
    let mut state = u32::from(step);
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let most = if step < 128 { 5 } else { 400 };
        let length = 1 + usize::try_from(state >> 16).expect("16 bits") % most;
        let (piece, rest) = stream.split_at(length.min(stream.len()));
        stream = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

fn follow<'s>(limit: usize, pieces: impl IntoIterator<Item = &'s [u8]>) -> Followed {
    let mut framer = Framer::new();
    let mut messages = Vec::new();
    for piece in pieces {
        if let Err(error) = framer.feed(piece, limit, |message| messages.push(message.to_vec())) {
            return Followed { messages, end: Err(error), held: Vec::new() };
        }
        assert!(framer.held().len() < limit, "held bytes reach the message limit");
    }
    Followed { messages, end: Ok(()), held: framer.held().to_vec() }
}

fn walked(limit: usize, stream: &[u8]) -> Followed {
    let (mut messages, mut at) = (Vec::new(), 0);
    loop {
        let rest = &stream[at..];
        match frame::first(rest, limit) {
            Ok(Frame::Message { len, next }) => {
                assert!(len <= next && next - len == usize::from(frame::padding(len)) && next <= limit);
                is_one(&rest[..len]);
                messages.push(rest[..len].to_vec());
                at += next;
            }
            Ok(Frame::Unfinished { wanted }) => {
                assert!(rest.len() < wanted && wanted <= limit);
                return Followed { messages, end: Ok(()), held: rest.to_vec() };
            }
            Err(error) => return Followed { messages, end: Err(error), held: Vec::new() },
        }
    }
}

fn is_one(message: &[u8]) {
    if message[0] & 0xC0 == 0 {
        assert!(stun::Header::new_checked(message).is_ok());
    } else if let Ok(data) = ChannelData::parse_within(ChannelRange::Rfc5766, message) {
        assert_eq!(data.payload().len() + ChannelData::HEADER_LEN, message.len());
    } else {
        panic!("neither ChannelData nor a STUN message");
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let captured = ["stun", "channel_data"].into_iter().flat_map(fuzz::captured);
    let mut stream = vec![0, 7];
    for message in captured.take(16) {
        stream.extend_from_slice(&message);
        stream.resize(2 + (stream.len() - 2).next_multiple_of(4), 0);
    }
    let message =
        [&[0, 1, 0, 8, 0x21, 0x12, 0xA4, 0x42][..], &[7; 12], &[0x80, 0x22, 0, 3, 1, 2, 3, 0]].concat();
    let data = [0x40, 0, 0, 5, 1, 2, 3, 4, 5, 0, 0, 0];
    let both = [&[1, 200][..], &message, &data, &message, &data[..7]].concat();
    vec![stream, both, [&[2, 3][..], &data, &[0x40, 1, 0xFF, 0xFF, 9]].concat(), vec![0, 1, 0x16, 3, 3]]
}
