//! RTP streams of one direction.

mod arrival;
mod clock;
mod stream;

use super::{measured::MeasuredFlow, rtcp::Block};
use arrival::Arrival;
use stream::{Stream, Totals};

/// Time without a datagram after which a stream gives its place to a new one.
const IDLE_US: u64 = 10_000_000;

/// RTP streams (SSRC) of one direction. Further streams are not measured while these are active.
const MOST_STREAMS: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Bounded by [`MOST_STREAMS`].
    streams: Vec<Stream>,
    /// Datagrams whose successor would begin a stream (RFC 3550 appendix A.1).
    candidates: [Option<Arrival>; MOST_STREAMS],
    /// Place of the next candidate.
    turn: usize,
    /// Totals of streams that gave up their places.
    ended: Totals,
    last_us: Option<u64>,
    longest_gap_us: u64,
}

impl Flow {
    #[inline]
    pub(super) fn arrived(&mut self, at_us: u64, datagram: &[u8]) {
        let Some(arrival) = Arrival::read(at_us, datagram) else { return };
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.ssrc == arrival.ssrc) {
            stream.arrived(&arrival);
        } else if !self.begin(&arrival) {
            return;
        }
        if let Some(last_us) = self.last_us.replace(at_us) {
            self.longest_gap_us = self.longest_gap_us.max(at_us.saturating_sub(last_us));
        }
    }

    /// Returns true if the datagram is the second of a stream.
    fn begin(&mut self, arrival: &Arrival) -> bool {
        let known = self.candidates.iter_mut().find(|it| it.is_some_and(|it| it.ssrc == arrival.ssrc));
        let Some(known) = known else {
            self.candidates[self.turn] = Some(*arrival);
            self.turn = (self.turn + 1) % MOST_STREAMS;
            return false;
        };
        let Some(first) = known.replace(*arrival) else { return false };
        if arrival.sequence != first.sequence.wrapping_add(1) {
            return false;
        }
        if self.streams.len() >= MOST_STREAMS {
            let is_idle = |stream: &Stream| arrival.at_us.saturating_sub(stream.last_us()) >= IDLE_US;
            let Some(idle) = self.streams.iter().position(is_idle) else { return false };
            self.ended.add(&self.streams.swap_remove(idle).totals());
        }
        *known = None;
        let mut stream = Stream::new(&first);
        stream.arrived(arrival);
        if self.streams.capacity() == 0 {
            self.streams.reserve_exact(MOST_STREAMS);
        }
        self.streams.push(stream);
        true
    }

    pub(super) fn reported(&mut self, at_us: u64, block: &Block) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.ssrc == block.ssrc) {
            stream.reported(at_us, block);
        }
    }

    fn totals(&self) -> Totals {
        let mut totals = self.ended;
        self.streams.iter().for_each(|stream| totals.add(&stream.totals()));
        totals
    }

    /// Retransmissions have timestamps of the past, so the jitter is that of the stream with the most datagrams.
    fn main(&self) -> Option<&Stream> {
        self.streams.iter().max_by_key(|stream| stream.totals().received)
    }

    /// Quality on arrival at the relay; `None` before the first stream.
    pub(super) fn measured(&self) -> Option<MeasuredFlow> {
        let (main, totals) = (self.main()?, self.totals());
        Some(MeasuredFlow {
            expected: totals.expected,
            lost: totals.expected.saturating_sub(totals.received),
            reordered: totals.reordered,
            jitter_us: main.jitter_us(),
            longest_gap_us: self.longest_gap_us,
        })
    }

    /// Quality that the receiver reports; `None` before the first report.
    pub(super) fn measured_behind(&self) -> Option<MeasuredFlow> {
        let (main, totals) = (self.main()?, self.totals());
        (totals.expected_behind > 0).then(|| MeasuredFlow {
            expected: totals.expected_behind,
            lost: totals.lost_behind,
            reordered: 0,
            jitter_us: main.jitter_behind_us(),
            longest_gap_us: 0,
        })
    }
}
