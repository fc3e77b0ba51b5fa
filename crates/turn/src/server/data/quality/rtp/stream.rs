//! Sequence numbers of one RTP stream (RFC 3550 appendix A.1), and the reports of its receiver.

use super::{arrival::Arrival, clock::Clock};
use crate::server::data::quality::{
    kernel::{KernelStream, KnownStream, Progress},
    rtcp::Block,
};

/// A larger step ahead is a restart, if the next datagram follows it.
const MOST_MISSING: u16 = 3000;
/// Datagrams behind the highest one whose arrival is known.
const REMEMBERED: u16 = 128;
/// Age of a stream up to which the receiver is taken to have begun with it.
const YOUNG_US: u64 = 30_000_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) expected: u64,
    /// Without duplicates.
    pub(super) received: u64,
    pub(super) reordered: u64,
    /// Behind the relay: relayed until the latest report, and lost of these.
    pub(super) expected_behind: u64,
    pub(super) lost_behind: u64,
}

impl Totals {
    pub(super) fn add(&mut self, more: &Self) {
        self.expected += more.expected;
        self.received += more.received;
        self.reordered += more.reordered;
        self.expected_behind += more.expected_behind;
        self.lost_behind += more.lost_behind;
    }

    fn lost(&self) -> u64 {
        self.expected.saturating_sub(self.received)
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) ssrc: u32,
    highest: u16,
    /// A bit for each of the last numbers up to the highest one, which is the lowest bit. Numbers from before the start are not expected,
    /// and count as arrived.
    arrived: u128,
    /// Number that would confirm a restart.
    restart: Option<u16>,
    totals: Totals,
    clock: Clock,
    began_us: u64,
    last_us: u64,
    /// Loss in the receiver's reports that is not counted: from before measurement began.
    uncounted: Option<i64>,
    jitter_behind_us: u64,
}

impl Stream {
    pub(super) fn new(first: &Arrival) -> Self {
        Self {
            ssrc: first.ssrc,
            highest: first.sequence,
            arrived: u128::MAX,
            restart: None,
            totals: Totals { expected: 1, received: 1, ..Totals::default() },
            clock: Clock::new(first),
            began_us: first.at_us,
            last_us: first.at_us,
            uncounted: None,
            jitter_behind_us: 0,
        }
    }

    /// Stream that began in the kernel; its counters follow with [`Stream::counted`].
    pub(super) fn of_kernel(kernel: &KernelStream) -> Self {
        let KernelStream { ssrc, payload_type, highest: sequence, timestamp, at_us, .. } = *kernel;
        let last = Arrival { at_us, payload_type, sequence, timestamp, ssrc };
        Self { totals: Totals::default(), ..Self::new(&last) }
    }

    /// Counts the datagrams from one that came to user space before the kernel followed the stream.
    pub(super) fn follows(&mut self, before: &Arrival, kernel: &KernelStream) {
        let first = u32::from(kernel.highest).wrapping_sub(kernel.expected.saturating_sub(1));
        let ahead = first.wrapping_sub(before.sequence.into()) & 0xFFFF;
        if (1..u32::from(MOST_MISSING)).contains(&ahead) {
            self.totals.expected += u64::from(ahead);
            self.totals.received += 1;
        }
    }

    /// Adds the kernel's counts.
    pub(super) fn counted(&mut self, kernel: &KernelStream, progress: &Progress) {
        self.totals.expected += progress.expected;
        self.totals.received += progress.received;
        self.totals.reordered += progress.reordered;
        // Other flows in the kernel may hold an old copy of the stream.
        if progress.expected > 0 {
            (self.highest, self.arrived, self.restart) = (kernel.highest, u128::MAX, None);
            self.last_us = kernel.at_us;
            self.clock.counted(kernel);
        }
    }

    pub(super) fn known(&self) -> KnownStream {
        KnownStream {
            ssrc: self.ssrc,
            payload_type: 0,
            highest: self.highest,
            is_confirmed: true,
            unit: self.clock.unit(),
        }
    }

    pub(super) fn unit(&self) -> u32 {
        self.clock.unit()
    }

    pub(super) fn last_us(&self) -> u64 {
        self.last_us
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn jitter_us(&self) -> u64 {
        self.clock.jitter_us()
    }

    pub(super) fn jitter_behind_us(&self) -> u64 {
        self.jitter_behind_us
    }

    #[inline]
    pub(super) fn arrived(&mut self, arrival: &Arrival) {
        self.last_us = arrival.at_us;
        let (ahead, behind) =
            (arrival.sequence.wrapping_sub(self.highest), self.highest.wrapping_sub(arrival.sequence));
        if ahead == 1 {
            self.arrived = self.arrived << 1 | 1;
            self.highest = arrival.sequence;
            self.totals.expected += 1;
            self.restart = None;
        } else if (2..MOST_MISSING).contains(&ahead) {
            self.arrived = self.arrived.checked_shl(ahead.into()).unwrap_or(0) | 1;
            self.highest = arrival.sequence;
            self.totals.expected += u64::from(ahead);
            self.restart = None;
        } else if behind < REMEMBERED {
            let bit = 1 << behind;
            if self.arrived & bit != 0 {
                return;
            }
            self.arrived |= bit;
            self.totals.reordered += 1;
        } else if self.restart == Some(arrival.sequence) {
            // The datagram that announced the restart was not counted.
            (self.highest, self.arrived, self.restart) = (arrival.sequence, u128::MAX, None);
            self.totals.expected += 2;
            self.totals.received += 1;
            let Self { clock, uncounted, .. } = self;
            (*clock, *uncounted) = (Clock::new(arrival), None);
            self.began_us = arrival.at_us;
        } else {
            self.restart = Some(arrival.sequence.wrapping_add(1));
            return;
        }
        self.totals.received += 1;
        self.clock.arrived(arrival);
    }

    /// Subtracts the loss before the relay from that which the receiver counts.
    pub(super) fn reported(&mut self, at_us: u64, block: &Block) {
        // Datagrams on their way to the receiver. Its report cannot be about datagrams that the relay has not seen.
        let ahead = self.highest.wrapping_sub(block.highest);
        if ahead >= MOST_MISSING {
            return;
        }
        let lost = i64::from(block.lost) - self.totals.lost().cast_signed();
        let is_young = at_us.saturating_sub(self.began_us) < YOUNG_US;
        let uncounted = *self.uncounted.get_or_insert(if is_young { 0 } else { lost });
        let expected = self.totals.received.saturating_sub(ahead.into());
        let lost = u64::try_from(lost - uncounted).unwrap_or(0).min(expected);
        // A late datagram before the relay may lower the figure; totals must not fall.
        self.totals.expected_behind = self.totals.expected_behind.max(expected);
        self.totals.lost_behind = self.totals.lost_behind.max(lost);
        self.jitter_behind_us = self.clock.us(block.jitter);
    }
}
