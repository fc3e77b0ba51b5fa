//! RTP streams that the programs count.

use crate::prelude::*;
use std::collections::BTreeSet;

use proptest::{prelude::*, sample::select, test_runner::TestRunner};
use turnpike_offload::{
    layout::{LONGEST_GAP, RTCP_DUE, STREAM_WORDS, STREAMS, STREAMS_HEAD, STREAMS_WORDS},
    streams::CountedStream,
};

use crate::{
    golden::{GOLDEN, bytes, frame, tables},
    program::{Program, places, with_program},
};

const TO_PEER: usize = 0;
const TO_CLIENT: usize = 1;

struct Bench<'p> {
    program: &'p mut Program,
    place: Place,
    /// Frame up to the payload.
    head: Vec<u8>,
    has_header: bool,
}

impl<'p> Bench<'p> {
    fn new(program: &'p mut Program, place: Place, golden: usize) -> Self {
        program.fill(&tables(&GOLDEN[golden]));
        program.set_streams([0; STREAMS_WORDS]);
        let has_header = golden == TO_PEER;
        let arrives = bytes(GOLDEN[golden].arrives);
        let head = arrives[..42 + if has_header { 4 } else { 0 }].to_vec();
        Self { program, place, head, has_header }
    }

    fn frame(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = [&self.head[..], payload].concat();
        let length = u16::try_from(bytes.len() - 34).expect("short");
        bytes[16..18].copy_from_slice(&(length + 20).to_be_bytes());
        bytes[24..26].fill(0);
        let words = bytes[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
        let sum: u32 = words.sum();
        let check = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("folded");
        bytes[24..26].copy_from_slice(&check.to_be_bytes());
        bytes[38..40].copy_from_slice(&length.to_be_bytes());
        // No checksum.
        bytes[40..42].fill(0);
        if self.has_header {
            bytes[44..46].copy_from_slice(&u16::try_from(payload.len()).expect("short").to_be_bytes());
        }
        bytes
    }

    /// `stays` is true for a datagram that goes to user space.
    fn run(&mut self, payload: &[u8], stays: bool) -> Count {
        self.program.settle();
        self.program.measure(if stays { u64::MAX } else { 0 });
        let bytes = self.frame(payload);
        let outcome = self.program.run(self.place, &frame(&bytes, Summed::Nothing)).expect("a valid frame");
        match outcome.action {
            Action::Across { count, .. } | Action::Up(Some(count)) => count,
            other => panic!("{other:?}"),
        }
    }

    fn rtp(&mut self, ssrc: u32, sequence: u16, timestamp: u32, stays: bool) -> Count {
        let [s0, s1] = sequence.to_be_bytes();
        let mut payload = vec![0x80, 111, s0, s1];
        payload.extend(timestamp.to_be_bytes());
        payload.extend(ssrc.to_be_bytes());
        payload.extend([0; 20]);
        self.run(&payload, stays)
    }

    fn streams(&self) -> Vec<CountedStream> {
        let words = self.program.streams();
        let streams = words[STREAMS_HEAD..].chunks(STREAM_WORDS);
        let read = streams.map(|words| CountedStream::of_words(words.try_into().expect("a stream")));
        read.flatten().collect()
    }

    fn only_stream(&self) -> CountedStream {
        let [stream] = self.streams()[..] else { panic!("{:?}", self.streams()) };
        stream
    }
}

fn each_place(test: impl Fn(&mut Program, Place)) {
    with_program(|program| places().iter().for_each(|place| test(program, *place)));
}

#[test]
fn loss_order_and_duplicates_are_counted_in_both_directions() {
    each_place(|program, place| {
        for (golden, relayed) in [(TO_PEER, Count::ToPeer), (TO_CLIENT, Count::ToClient)] {
            let mut bench = Bench::new(program, place, golden);
            // 65534 to 5 without 1 and 3; 2 arrives late, and twice.
            for sequence in [65_534, 65_535, 0, 4, 2, 2, 5] {
                assert_eq!(bench.rtp(7, sequence, 0, false), relayed);
            }
            let stream = bench.only_stream();
            assert_eq!((stream.ssrc, stream.payload_type, stream.highest), (7, 111, 5));
            assert!(stream.is_confirmed);
            assert_eq!((stream.expected, stream.received, stream.reordered), (8, 6, 1), "{place:?}");
        }
    });
}

#[test]
fn datagrams_for_user_space_advance_the_stream_and_are_received_there() {
    each_place(|program, place| {
        let mut bench = Bench::new(program, place, TO_CLIENT);
        for (sequence, stays) in [(10, true), (11, true), (12, false), (13, true), (15, false), (16, true)] {
            let count = if stays { Count::Settling } else { Count::ToClient };
            assert_eq!(bench.rtp(7, sequence, 0, stays), count);
        }
        let stream = bench.only_stream();
        assert_eq!((stream.expected, stream.received, stream.highest), (7, 2, 16));
    });
}

#[test]
fn a_restart_continues_the_stream_after_two_datagrams() {
    each_place(|program, place| {
        let mut bench = Bench::new(program, place, TO_PEER);
        for sequence in [10, 11, 40_000, 12, 50_000, 50_001, 50_002] {
            bench.rtp(7, sequence, 0, false);
        }
        let stream = bench.only_stream();
        assert_eq!((stream.expected, stream.received, stream.highest), (6, 6, 50_002));
    });
}

#[test]
fn at_most_four_streams_are_counted_and_other_payloads_take_no_place() {
    each_place(|program, place| {
        let mut bench = Bench::new(program, place, TO_PEER);
        // Random payloads that look like RTP begin no stream.
        for number in 1..20 {
            bench.rtp(1000 + number, 3, 0, false);
        }
        assert!(bench.streams().iter().all(|stream| !stream.is_confirmed));
        for sequence in 0..3 {
            for ssrc in 1..=5 {
                bench.rtp(ssrc, sequence, 0, false);
                bench.rtp(ssrc, sequence + 1, 0, false);
            }
        }
        let streams = bench.streams();
        assert!(
            streams.len() == STREAMS && streams.iter().all(|stream| stream.is_confirmed && stream.ssrc < 6)
        );
        // TURN channels, QUIC, ZRTP and short RTP.
        let before = bench.program.streams();
        for payload in [&[0x40; 40][..], &[0xc3; 40], &[16; 40], &[0x80, 111, 0, 1]] {
            assert_eq!(bench.run(payload, false), Count::ToPeer);
        }
        assert_eq!(bench.program.streams(), before);
    });
}

#[test]
fn stun_and_due_rtcp_go_to_user_space() {
    each_place(|program, place| {
        let mut bench = Bench::new(program, place, TO_CLIENT);
        let (stun, rtcp) = ([0; 20], [[0x81, 201, 0, 7].as_slice(), &[0; 28]].concat());
        for _ in 0..2 {
            assert_eq!(bench.run(&stun, false), Count::Measured);
        }
        assert_eq!(bench.run(&rtcp, false), Count::Measured);
        assert_eq!(bench.run(&rtcp, false), Count::ToClient);
        let mut words = bench.program.streams();
        assert!(words[RTCP_DUE] > now_ns());
        words[RTCP_DUE] = 0;
        bench.program.set_streams(words);
        assert_eq!(bench.run(&rtcp, false), Count::Measured);
        assert_eq!(bench.streams(), []);
    });
}

#[test]
fn jitter_follows_arrivals_if_the_clock_rate_is_known() {
    each_place(|program, place| {
        let mut bench = Bench::new(program, place, TO_PEER);
        bench.rtp(7, 0, 0, false);
        bench.rtp(7, 1, 0, false);
        bench.rtp(7, 2, 80_000, false);
        assert_eq!(bench.only_stream().jitter_ns, 0, "the rate is unknown");
        let mut words = bench.program.streams();
        // 8 kHz: 125 µs per unit.
        words[STREAMS_HEAD + 1] |= (125_000 << 8) << 32;
        bench.program.set_streams(words);
        // A second late each, except for the few microseconds between the runs.
        let mut jitter = 0.0;
        for step in 1..20_u32 {
            let timestamp = 80_000_u32.wrapping_sub(8000 * step);
            bench.rtp(7, 2 + u16::try_from(step).expect("small"), timestamp, false);
            jitter += (1e9 - jitter) / 16.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "below a second")]
        let measured = bench.only_stream().jitter_ns as f64;
        assert!((measured / jitter - 1.0).abs() < 0.2, "{measured} instead of {jitter}");
        assert!(bench.program.streams()[LONGEST_GAP] > 0);
    });
}

/// One step of a stream.
#[derive(Clone, Copy, Debug)]
enum Step {
    Next { lost: u16, stays: bool },
    Late(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (select(&[0_u16, 0, 0, 0, 1, 2, 70]), prop::bool::weighted(0.2))
            .prop_map(|(lost, stays)| Step::Next { lost, stays }),
        1 => (1..64_u16).prop_map(Step::Late),
    ]
}

#[test]
fn random_streams_are_counted_exactly() {
    each_place(|program, place| {
        let mut runner = TestRunner::new(ProptestConfig { cases: 20, ..ProptestConfig::default() });
        let program = RefCell::new(program);
        let inputs = (any::<u16>(), prop::collection::vec(step(), 1..60));
        let result = runner.run(&inputs, |(first, steps)| {
            let mut program = program.borrow_mut();
            let mut bench = Bench::new(&mut program, place, TO_PEER);
            let number =
                |at: i64| first.wrapping_add(u16::try_from(at.rem_euclid(1 << 16)).expect("reduced"));
            let (mut highest, mut seen, mut received, mut late) = (1, BTreeSet::from([0, 1]), 2, 0);
            bench.rtp(9, number(0), 0, false);
            bench.rtp(9, number(1), 0, false);
            for step in steps {
                let (at, stays) = match step {
                    Step::Next { lost, stays } => (highest + 1 + i64::from(lost), stays),
                    Step::Late(behind) => (highest - i64::from(behind), false),
                };
                bench.rtp(9, number(at), 0, stays);
                // Numbers from before the start count as arrived.
                if at >= 0 && seen.insert(at) {
                    received += u32::from(!stays);
                    late += u32::from(at < highest);
                    highest = highest.max(at);
                }
            }
            let stream = bench.only_stream();
            let expected = u32::try_from(highest + 1).expect("small");
            prop_assert_eq!((stream.expected, stream.received, stream.reordered), (expected, received, late));
            Ok(())
        });
        result.expect("the counters of each stream match");
    });
}
