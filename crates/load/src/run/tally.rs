//! Per-thread counters, and how they reach the reporter.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use turnpike_client::ErrorCounts;
use turnpike_measure::Latency;

use crate::profile::StreamFigures;

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
    /// Consecutive equal round-trip times are recorded together. They are common, because a batch shares one clock read and often one due
    /// time.
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

#[derive(Default)]
pub(crate) struct RunTallies {
    pub(crate) warmup: RunTally,
    pub(crate) measured: RunTally,
    pub(crate) under_way: u64,
}

impl RunTallies {
    #[inline]
    pub(crate) fn of(&mut self, measured: bool) -> &mut RunTally {
        if measured { &mut self.measured } else { &mut self.warmup }
    }

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

#[derive(Default)]
pub(crate) struct ThreadResult {
    pub(crate) errors: ErrorCounts,
    /// Sum and number of the flows' jitter estimates, in microseconds.
    pub(crate) jitter: (f64, u64),
    pub(crate) streams: Vec<StreamFigures>,
    pub(crate) garbled: u64,
    /// CPU time during the measurement, including the wait for the last replies.
    pub(crate) cpu: Option<Duration>,
    /// Mode-specific figures, of which the maximum over all threads is reported.
    pub(crate) extra: BTreeMap<&'static str, f64>,
    /// Mode-specific figures that are summed over all threads.
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
    fn published_counts_are_collected_once() {
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
        // `under_way` is a gauge: each collection adds the latest value.
        assert_eq!(total.under_way, 5 + 5);
    }
}
