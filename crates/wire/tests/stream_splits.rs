//! Message framing is independent of segment boundaries (RFC 8489 section 6.2.2).

use proptest::prelude::*;
use turnpike_wire::frame::{Frame, FrameError, Framer, MAX_MESSAGE_LEN, first};

fn message() -> impl Strategy<Value = Vec<u8>> {
    let attributes = prop_oneof![Just(0_u16), 1..8_u16, 200..300_u16];
    let payload = prop_oneof![Just(0_u16), 1..40_u16, 1000..1300_u16];
    prop_oneof![
        attributes.prop_map(|words| {
            let head =
                [&[0, 1], &(words * 4).to_be_bytes()[..], &[0x21, 0x12, 0xA4, 0x42], &[9; 12]].concat();
            [head, vec![5; usize::from(words) * 4]].concat()
        }),
        (0x4000..=0x7FFF_u16, payload).prop_map(|(channel, len)| {
            [&channel.to_be_bytes()[..], &len.to_be_bytes(), &vec![6; usize::from(len)]].concat()
        }),
    ]
}

fn stream_of(messages: &[Vec<u8>]) -> Vec<u8> {
    let mut stream = Vec::new();
    for message in messages {
        stream.extend_from_slice(message);
        stream.resize(stream.len().next_multiple_of(4), 0);
    }
    stream
}

fn fed<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Result<Vec<Vec<u8>>, FrameError> {
    let (mut framer, mut seen) = (Framer::new(), Vec::new());
    for chunk in chunks {
        framer.feed(chunk, MAX_MESSAGE_LEN, |message| seen.push(message.to_vec()))?;
    }
    Ok(seen)
}

/// Receives like the relay: into a buffer with a gap in front for the held bytes.
fn received<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Result<Vec<Vec<u8>>, FrameError> {
    let (mut framer, mut seen) = (Framer::new(), Vec::new());
    for chunk in chunks {
        if !framer.completes(chunk) {
            continue;
        }
        let joined = [framer.held(), chunk].concat();
        let mut rest = &joined[..];
        let wanted = loop {
            match first(rest, MAX_MESSAGE_LEN)? {
                Frame::Message { len, next } => {
                    seen.push(rest[..len].to_vec());
                    rest = &rest[next..];
                }
                Frame::Unfinished { wanted } => break wanted,
            }
        };
        framer.hold(rest, wanted);
    }
    Ok(seen)
}

#[test]
fn every_split_point_yields_the_same_messages() {
    let request =
        [&[0, 1, 0, 8, 0x21, 0x12, 0xA4, 0x42][..], &[9; 12], &[0x80, 0x22, 0, 4, 1, 2, 3, 4]].concat();
    let data = |len: u8| [&[0x40, 0, 0, len][..], &vec![len; usize::from(len)]].concat();
    let messages = [request.clone(), data(5), data(0), request, data(4), data(7)];
    let stream = stream_of(&messages);
    for split in 0..=stream.len() {
        let (head, tail) = stream.split_at(split);
        assert_eq!(fed([head, tail].into_iter()).unwrap(), messages, "split at {split}");
        assert_eq!(received([head, tail].into_iter()).unwrap(), messages, "split at {split}");
    }
    assert_eq!(fed(stream.chunks(1)).unwrap(), messages);
    assert_eq!(received(stream.chunks(1)).unwrap(), messages);
}

proptest! {
    #[test]
    fn any_cuts_yield_the_same_messages(
        messages in prop::collection::vec(message(), 0..6),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let stream = stream_of(&messages);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let chunks = || cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]);
        prop_assert_eq!(fed(chunks()).unwrap(), &messages[..]);
        prop_assert_eq!(received(chunks()).unwrap(), &messages[..]);
    }

    #[test]
    fn any_pieces_of_any_bytes_give_the_same_result(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        size in 1..50_usize,
    ) {
        // The kind of error may depend on the pieces; its occurrence and the messages before it may not.
        let whole = fed(std::iter::once(&bytes[..]));
        let cut = fed(bytes.chunks(size));
        prop_assert_eq!(whole.is_err(), cut.is_err());
        if let (Ok(whole), Ok(cut)) = (whole, cut) {
            prop_assert_eq!(whole, cut);
        }
    }
}
