//! What a thread does now and then beside its traffic.

use std::time::Duration;

use super::{RunShared, RunTallies, Schedule};
use crate::{LoadError, clock::thread_cpu};

/// How often counts are handed to the reporter.
const PUBLISH_NS: u64 = 200_000_000;

/// Hands counts to the reporter, hears whether the run was stopped, and keeps the CPU time of the measured part.
pub(crate) struct Heartbeat<'a, C> {
    shared: &'a RunShared<'a, C>,
    thread: usize,
    next: u64,
    measure: u64,
    /// The thread's CPU time when measuring began.
    cpu: Option<Duration>,
}

impl<'a, C> Heartbeat<'a, C> {
    pub(crate) fn new(shared: &'a RunShared<'a, C>, thread: usize, schedule: Schedule) -> Self {
        Self { shared, thread, next: schedule.start, measure: schedule.measure, cpu: None }
    }

    /// Whether the next [`Heartbeat::beat`] is one.
    #[inline]
    pub(crate) fn is_due(&self, now: u64) -> bool {
        now >= self.next
    }

    /// To be called often; whether it was time. `schedule` is brought up to date; `under_way` tells what was sent and may still be
    /// answered.
    #[inline]
    pub(crate) fn beat(
        &mut self,
        now: u64,
        tallies: &mut RunTallies,
        schedule: &mut Schedule,
        under_way: impl FnOnce() -> u64,
    ) -> Result<bool, LoadError> {
        if !self.is_due(now) {
            return Ok(false);
        }
        self.shared.check_on(schedule)?;
        tallies.publish(&self.shared.slots[self.thread], under_way());
        self.next = now + PUBLISH_NS;
        if self.cpu.is_none() && now >= self.measure {
            self.cpu = thread_cpu();
        }
        Ok(true)
    }

    /// The thread's CPU time since measuring began.
    pub(crate) fn cpu(&self) -> Option<Duration> {
        self.cpu.zip(thread_cpu()).map(|(from, to)| to.saturating_sub(from))
    }
}
