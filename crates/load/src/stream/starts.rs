//! Start times of requests: as soon as a client is free (closed loop), or at their due time (open loop).

use std::collections::VecDeque;

use turnpike_measure::OfferedRate;

use super::{LONGEST_SLEEP_NS, StreamShared};
use crate::{
    pacer::Pacer,
    run::{ErrorCounts, RunTallies, RunTimes},
};

/// Name of the count of requests that were due in the measured time but found no free client before its end.
pub(super) const NOT_STARTED: &str = "not_started";

const LONGEST_DRAIN_NS: u64 = 3_000_000_000;

pub(super) struct Starts {
    pub(super) schedule: RunTimes,
    pacer: Option<Pacer>,
    clients: usize,
    /// Idle clients, longest idle first, each with the time from which it may start.
    free: VecDeque<(usize, u64)>,
}

impl Starts {
    pub(super) fn new(shared: &StreamShared<'_>, schedule: RunTimes, clients: usize, first: usize) -> Self {
        let pacer = match shared.config.rate_and_limits().0 {
            OfferedRate::Max => None,
            OfferedRate::Pps(rate) => {
                let all = shared.config.clients() as f64;
                let share = rate * clients as f64 / all;
                // Each thread starts with a different phase, so that they do not all send at the same time.
                #[expect(clippy::cast_possible_truncation, reason = "positive")]
                let offset = (first as f64 / all * 1e9 / share) as u64;
                Some(Pacer::new(schedule.start + offset, share))
            }
        };
        Self { schedule, pacer, clients, free: (0..clients).map(|index| (index, 0)).collect() }
    }

    #[inline]
    pub(super) fn next(&mut self, now: u64, tallies: &mut RunTallies) -> Option<(usize, u64)> {
        let (index, free_since) = *self.free.front().filter(|(_, from)| *from <= now)?;
        let due = self.take(now, free_since, tallies)?;
        self.free.pop_front();
        Some((index, due))
    }

    pub(super) fn free(&mut self, index: usize, from: u64) {
        self.free.push_back((index, from));
    }

    /// Returns the due time of this client's next request, if one is due and no other client has been idle longer. Otherwise marks the
    /// client as idle.
    pub(super) fn go_on(&mut self, index: usize, now: u64, tallies: &mut RunTallies) -> Option<u64> {
        let due = if self.free.is_empty() { self.take(now, now, tallies) } else { None };
        if due.is_none() {
            self.free(index, now);
        }
        due
    }

    pub(super) fn busy(&self) -> usize {
        self.clients - self.free.len()
    }

    pub(super) fn is_over(&self, now: u64) -> bool {
        let end = self.schedule.end;
        now >= end && (self.busy() == 0 || now - end > LONGEST_DRAIN_NS)
    }

    /// Takes the next due request and returns its due time. Only the delay after both `free_since` and the due time counts as lateness of
    /// the generator; waiting for a free client is part of the round trip.
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

    pub(super) fn end(&mut self, errors: &mut ErrorCounts) {
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
