//! RTP streams of one direction.

mod arrival;
mod clock;
mod stream;

use super::{
    kernel::{KERNEL_STREAMS, KernelFlow, KernelStream, KnownStream, Progress},
    measured::MeasuredFlow,
    rtcp::Block,
};
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
    /// One per flow of the allocation in the kernel.
    kernel: Vec<KernelFlow>,
}

impl Flow {
    #[inline]
    pub(super) fn arrived(&mut self, at_us: u64, datagram: &[u8]) {
        let Some(arrival) = Arrival::read(at_us, datagram) else { return };
        if !self.kernel.is_empty() && self.is_counted(&arrival) {
            return;
        }
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.ssrc == arrival.ssrc) {
            stream.arrived(&arrival);
        } else if !self.begin(&arrival) {
            return;
        }
        if let Some(last_us) = self.last_us.replace(at_us).filter(|_| self.kernel.is_empty()) {
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
        let mut stream = Stream::new(&first);
        stream.arrived(arrival);
        self.place(stream, arrival.at_us).is_some()
    }

    /// Adds a stream if there is room.
    fn place(&mut self, stream: Stream, at_us: u64) -> Option<&mut Stream> {
        if self.streams.len() >= MOST_STREAMS {
            let is_idle = |stream: &Stream| at_us.saturating_sub(stream.last_us()) >= IDLE_US;
            let idle = self.streams.iter().position(is_idle)?;
            self.ended.add(&self.streams.swap_remove(idle).totals());
        }
        self.candidates.iter_mut().for_each(|it| _ = it.take_if(|it| it.ssrc == stream.ssrc));
        if self.streams.capacity() == 0 {
            self.streams.reserve_exact(MOST_STREAMS);
        }
        self.streams.push(stream);
        self.streams.last_mut()
    }

    /// Counts a datagram of a stream that the kernel follows; false for other streams.
    fn is_counted(&mut self, arrival: &Arrival) -> bool {
        if self.kernel.iter_mut().any(|flow| flow.passed(arrival.ssrc)) {
            return true;
        }
        // New streams in the kernel take their places first.
        if self.streams.iter().all(|stream| stream.ssrc != arrival.ssrc) {
            self.add_counted();
        }
        false
    }

    /// Adds the kernel's counts since the last time; true if there were any.
    pub(super) fn add_counted(&mut self) -> bool {
        let mut flows = std::mem::take(&mut self.kernel);
        let mut any = false;
        for flow in &mut flows {
            self.longest_gap_us = self.longest_gap_us.max(flow.streams.longest_gap_us());
            for place in 0..KERNEL_STREAMS {
                let Some((stream, progress)) = flow.progress(place) else { continue };
                any = true;
                let Some(known) = self.add_progress(&stream, &progress) else { continue };
                let unit = known.unit();
                if unit != stream.unit {
                    flow.streams.set_unit(place, &stream, unit);
                }
            }
        }
        self.kernel = flows;
        any
    }

    fn add_progress(&mut self, kernel: &KernelStream, progress: &Progress) -> Option<&mut Stream> {
        let known = self.streams.iter().position(|stream| stream.ssrc == kernel.ssrc);
        let stream = match known {
            Some(at) => &mut self.streams[at],
            None => {
                let before = self.candidates.iter().flatten().find(|it| it.ssrc == kernel.ssrc).copied();
                let stream = self.place(Stream::of_kernel(kernel), kernel.at_us)?;
                if let Some(before) = before {
                    stream.follows(&before, kernel);
                }
                stream
            }
        };
        stream.counted(kernel, progress);
        Some(stream)
    }

    pub(super) fn known(&self) -> Vec<KnownStream> {
        let candidates = self.candidates.iter().flatten().map(|first| KnownStream {
            ssrc: first.ssrc,
            payload_type: first.payload_type,
            highest: first.sequence,
            is_confirmed: false,
            unit: 0,
        });
        self.streams.iter().map(Stream::known).chain(candidates).take(KERNEL_STREAMS).collect()
    }

    pub(super) fn has_kernel(&self, id: u16) -> bool {
        self.kernel.iter().any(|flow| flow.id == id)
    }

    pub(super) fn add_kernel(&mut self, flow: KernelFlow) {
        self.kernel.push(flow);
    }

    /// Returns true if there was anything to add.
    pub(super) fn retain_kernel(&mut self, has: impl Fn(u16) -> bool) -> bool {
        if self.kernel.iter().all(|flow| has(flow.id)) {
            return false;
        }
        let any = self.add_counted();
        self.kernel.retain(|flow| has(flow.id));
        // Gaps before the next datagram are unknown.
        self.last_us = None;
        any
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
