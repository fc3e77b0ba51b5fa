//! Counters of one flow.

use turnpike_measure::{ArrivalOrder, Jitter, Sequence};

use crate::{payload::PayloadStamp, run::RunTally};

#[derive(Default)]
pub(crate) struct FlowCounters {
    pub(crate) next_sequence: u64,
    pub(crate) jitter: Jitter,
    /// Packets with sequence numbers below this one are no longer in flight.
    pub(crate) settled: u64,
    pub(crate) sent: u64,
    received: u64,
    seen: Sequence,
}

impl FlowCounters {
    #[inline]
    pub(crate) fn arrived(
        &mut self,
        stamp: PayloadStamp,
        len: usize,
        now_ns: u64,
        measured: bool,
        tally: &mut RunTally,
    ) -> bool {
        if stamp.sequence >= self.next_sequence {
            return false;
        }
        match self.seen.note(stamp.sequence) {
            ArrivalOrder::InOrder => {}
            ArrivalOrder::Reordered | ArrivalOrder::TooOld => tally.reordered += 1,
            ArrivalOrder::Duplicate => {
                tally.duplicated += 1;
                return true;
            }
        }
        let latency_us = now_ns.saturating_sub(stamp.due_ns) / 1_000;
        tally.received += 1;
        tally.received_bytes += len as u64;
        tally.record_rtt(latency_us);
        if measured {
            self.received += 1;
            self.jitter.note(latency_us);
        }
        true
    }

    pub(crate) fn under_way(&self) -> u64 {
        self.next_sequence - self.seen.next().max(self.settled)
    }

    pub(crate) fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }
}
