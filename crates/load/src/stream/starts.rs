//! When requests start, and on which client: at once where one is free (closed loop), or when they are due (open loop).

use std::collections::VecDeque;

use turnpike_measure::Rate;

use super::{LONGEST_SLEEP_NS, StreamShared};
use crate::{
    pacer::Pacer,
    run::{Errors, RunTallies, Schedule},
};

/// Requests that were due in the measured time, and found no free client until its end.
pub(super) const NOT_STARTED: &str = "not_started";

/// Responses that have not come so long after the end are lost.
const LONGEST_DRAIN_NS: u64 = 3_000_000_000;

/// The starts of one thread's requests.
pub(super) struct Starts {
    pub(super) schedule: Schedule,
    pacer: Option<Pacer>,
    clients: usize,
    /// Clients without a request, and from when on they may have one; the longest first.
    free: VecDeque<(usize, u64)>,
}

impl Starts {
    /// `clients` of this thread, of which the first has number `first`.
    #[expect(clippy::cast_precision_loss, reason = "client counts are small")]
    pub(super) fn new(shared: &StreamShared<'_>, schedule: Schedule, clients: usize, first: usize) -> Self {
        let pacer = match shared.config.rate_and_limits().0 {
            Rate::Max => None,
            Rate::Pps(rate) => {
                let all = shared.config.clients() as f64;
                let share = rate * clients as f64 / all;
                // Threads take turns instead of all starting at once.
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive")]
                let offset = (first as f64 / all * 1e9 / share) as u64;
                Some(Pacer::new(schedule.start + offset, share))
            }
        };
        Self { schedule, pacer, clients, free: (0..clients).map(|index| (index, 0)).collect() }
    }

    /// The next client that may start, and when its request was due.
    #[inline]
    pub(super) fn next(&mut self, now: u64, tallies: &mut RunTallies) -> Option<(usize, u64)> {
        let (index, free_since) = *self.free.front().filter(|(_, from)| *from <= now)?;
        let due = self.take(now, free_since, tallies)?;
        self.free.pop_front();
        Some((index, due))
    }

    /// Frees a client, from then on.
    pub(super) fn free(&mut self, index: usize, from: u64) {
        self.free.push_back((index, from));
    }

    /// Frees a client, or returns when its next request was due where no other has waited for longer.
    pub(super) fn go_on(&mut self, index: usize, now: u64, tallies: &mut RunTallies) -> Option<u64> {
        let due = if self.free.is_empty() { self.take(now, now, tallies) } else { None };
        if due.is_none() {
            self.free(index, now);
        }
        due
    }

    /// Clients with a request.
    pub(super) fn busy(&self) -> usize {
        self.clients - self.free.len()
    }

    /// Whether the run has ended, and all responses have come or are lost.
    pub(super) fn is_over(&self, now: u64) -> bool {
        let end = self.schedule.end;
        now >= end && (self.busy() == 0 || now - end > LONGEST_DRAIN_NS)
    }

    /// When the next request was due, if it may start now on a client that is free since `free_since`. Only what passes after both is
    /// the generator's lateness; the wait for a client is the server's, and part of the round trip.
    #[inline]
    fn take(&mut self, now: u64, free_since: u64, tallies: &mut RunTallies) -> Option<u64> {
        if now < self.schedule.start || now >= self.schedule.end {
            return None;
        }
        let Some(pacer) = &mut self.pacer else { return Some(now) };
        let due = pacer.due();
        if due > now {
            return None;
        }
        pacer.advance();
        tallies.of(due >= self.schedule.measure).late.record(now.saturating_sub(due.max(free_since)) / 1_000);
        Some(due)
    }

    /// Nanoseconds until something may start.
    pub(super) fn pause(&self, now: u64) -> u64 {
        let Some((_, from)) = self.free.front().filter(|_| now < self.schedule.end) else {
            return LONGEST_SLEEP_NS;
        };
        let next = match &self.pacer {
            _ if now < self.schedule.start => self.schedule.start,
            Some(pacer) => pacer.due(),
            None => now,
        };
        next.min(self.schedule.end).max(*from).saturating_sub(now)
    }

    /// Counts what was due and could not start.
    pub(super) fn end(&mut self, errors: &mut Errors) {
        let Some(pacer) = &mut self.pacer else { return };
        let mut missed = 0;
        while pacer.due() < self.schedule.end {
            missed += u64::from(pacer.due() >= self.schedule.measure);
            pacer.advance();
        }
        if missed > 0 {
            errors.insert(NOT_STARTED, missed);
        }
    }
}
