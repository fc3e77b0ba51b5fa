//! What a thread counts, and how the reporter gets hold of it.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use turnpike_client::Errors;
use turnpike_measure::Latency;

use crate::profile::Figures;

/// Counts of one thread, or of several merged.
#[derive(Clone, Default)]
pub(crate) struct RunTally {
    pub(crate) sent: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received: u64,
    pub(crate) received_bytes: u64,
    pub(crate) duplicated: u64,
    pub(crate) reordered: u64,
    pub(crate) rtt: Latency,
    pub(crate) late: Latency,
    /// Datagrams of a batch share a clock read and often a due time: equal round trips are recorded together.
    run_us: u64,
    run_length: u32,
}

impl RunTally {
    #[inline]
    pub(crate) fn record_rtt(&mut self, us: u64) {
        if us == self.run_us {
            self.run_length += 1;
            return;
        }
        self.end_run();
        self.run_us = us;
        self.run_length = 1;
    }

    pub(crate) fn merge(&mut self, other: &mut Self) {
        other.end_run();
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.duplicated += other.duplicated;
        self.reordered += other.reordered;
        self.rtt.merge(&other.rtt);
        self.late.merge(&other.late);
    }

    /// Back to zero; the histograms keep their memory.
    pub(crate) fn clear(&mut self) {
        let Self { sent, sent_bytes, received, received_bytes, duplicated, reordered, rtt, late, .. } = self;
        for counter in [sent, sent_bytes, received, received_bytes, duplicated, reordered] {
            *counter = 0;
        }
        rtt.clear();
        late.clear();
        self.run_length = 0;
    }

    fn is_empty(&self) -> bool {
        self.sent == 0 && self.received == 0 && self.duplicated == 0 && self.late.count() == 0
    }

    fn end_run(&mut self) {
        self.rtt.record_n(self.run_us, std::mem::take(&mut self.run_length));
    }
}

/// Tallies of the warm-up and of the measured time. A datagram belongs where it was due.
#[derive(Default)]
pub(crate) struct RunTallies {
    pub(crate) warmup: RunTally,
    pub(crate) measured: RunTally,
    /// What was sent and may still be answered, when this was published.
    pub(crate) under_way: u64,
}

impl RunTallies {
    #[inline]
    pub(crate) fn of(&mut self, measured: bool) -> &mut RunTally {
        if measured { &mut self.measured } else { &mut self.warmup }
    }

    /// Hands everything over and starts from zero. `under_way`: what was sent and may still be answered.
    pub(crate) fn publish(&mut self, slot: &Mutex<Self>, under_way: u64) {
        let Ok(mut slot) = slot.lock() else { return };
        let slot = &mut *slot;
        slot.under_way = under_way;
        for (from, to) in [(&mut self.warmup, &mut slot.warmup), (&mut self.measured, &mut slot.measured)] {
            if !from.is_empty() {
                to.merge(from);
                from.clear();
            }
        }
    }

    /// Takes what has been published since the last time, into `into`.
    pub(crate) fn collect(slot: &Mutex<Self>, into: &mut Self) {
        let Ok(mut slot) = slot.lock() else { return };
        let Self { warmup, measured, under_way } = &mut *slot;
        into.under_way += *under_way;
        into.warmup.merge(warmup);
        into.measured.merge(measured);
        warmup.clear();
        measured.clear();
    }
}

/// What a thread has to say when it ends.
#[derive(Default)]
pub(crate) struct Finished {
    pub(crate) errors: Errors,
    /// Sum and number of the flows' jitter estimates, in microseconds.
    pub(crate) jitter: (f64, u64),
    /// With a profile: what each of its streams counted.
    pub(crate) streams: Vec<Figures>,
    /// Payloads that came and were none of ours.
    pub(crate) garbled: u64,
    /// CPU time of the measured part, the wait for the last replies included.
    pub(crate) cpu: Option<Duration>,
    /// Figures that only one mode has; of several threads the largest counts.
    pub(crate) extra: BTreeMap<&'static str, f64>,
    /// Such figures of which the sum over all threads counts.
    pub(crate) sums: BTreeMap<&'static str, f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_round_trips_in_a_row_are_all_counted() {
        let mut tally = RunTally::default();
        for us in [5, 5, 5, 7, 7, 5] {
            tally.received += 1;
            tally.record_rtt(us);
        }
        let mut total = RunTally::default();
        total.merge(&mut tally);
        tally.clear();
        total.merge(&mut tally);
        assert_eq!((total.rtt.count(), total.rtt.min(), total.rtt.max()), (6, 5, 7));
        assert_eq!(total.rtt.quantile(0.5), 5);
    }

    #[test]
    fn what_is_published_is_collected_once() {
        let (slot, mut total) = (Mutex::new(RunTallies::default()), RunTallies::default());
        let mut own = RunTallies::default();
        own.of(false).sent = 3;
        own.of(true).sent = 4;
        own.of(true).record_rtt(9);
        own.of(true).received = 1;
        own.publish(&slot, 6);
        own.publish(&slot, 5);
        RunTallies::collect(&slot, &mut total);
        RunTallies::collect(&slot, &mut total);
        assert_eq!((total.warmup.sent, total.measured.sent, total.measured.rtt.count()), (3, 4, 1));
        // What is under way is a level and no count: each look at it sees the latest.
        assert_eq!(total.under_way, 5 + 5);
    }
}
