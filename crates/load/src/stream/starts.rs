//! When requests start: at once where a client is free (closed loop), or when they are due (open loop).

use turnpike_measure::Rate;

use super::StreamShared;
use crate::{
    pacer::Pacer,
    run::{Errors, RunTallies, Schedule},
};

/// Requests that were due in the measured time, and found no free client until its end.
pub(super) const NOT_STARTED: &str = "not_started";

/// The starts of one thread's requests.
pub(super) struct Starts {
    schedule: Schedule,
    pacer: Option<Pacer>,
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
        Self { schedule, pacer }
    }

    /// When the next request was due, if the run goes on until `end` and it may start now on a client that is free since `free_since`. Only what passes
    /// after both is the generator's lateness; the wait for a client is the server's, and part of the round trip.
    #[inline]
    pub(super) fn take(
        &mut self,
        now: u64,
        free_since: u64,
        end: u64,
        tallies: &mut RunTallies,
    ) -> Option<u64> {
        if now < self.schedule.start || now >= end {
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

    /// Nanoseconds until something may start, if a client is free; at most until the end.
    pub(super) fn pause(&self, now: u64, end: u64) -> u64 {
        let next = match &self.pacer {
            _ if now < self.schedule.start => self.schedule.start,
            Some(pacer) => pacer.due(),
            None => now,
        };
        next.min(end).saturating_sub(now)
    }

    /// Counts what was due and could not start.
    pub(super) fn end(&mut self, end: u64, errors: &mut Errors) {
        let Some(pacer) = &mut self.pacer else { return };
        let mut missed = 0;
        while pacer.due() < end {
            missed += u64::from(pacer.due() >= self.schedule.measure);
            pacer.advance();
        }
        if missed > 0 {
            errors.insert(NOT_STARTED, missed);
        }
    }
}
