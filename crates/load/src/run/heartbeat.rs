//! Periodic work of a thread besides its traffic.

use std::time::Duration;

use super::{RunShared, RunTallies, RunTimes};
use crate::{LoadError, clock::thread_cpu};

const PUBLISH_NS: u64 = 200_000_000;

pub(crate) struct Heartbeat<'a, C> {
    shared: &'a RunShared<'a, C>,
    thread: usize,
    next: u64,
    measure: u64,
    cpu: Option<Duration>,
}

impl<'a, C> Heartbeat<'a, C> {
    pub(crate) fn new(shared: &'a RunShared<'a, C>, thread: usize, schedule: RunTimes) -> Self {
        Self { shared, thread, next: schedule.start, measure: schedule.measure, cpu: None }
    }

    #[inline]
    pub(crate) fn is_due(&self, now: u64) -> bool {
        now >= self.next
    }

    #[inline]
    pub(crate) fn beat(
        &mut self,
        now: u64,
        tallies: &mut RunTallies,
        schedule: &mut RunTimes,
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

    pub(crate) fn cpu(&self) -> Option<Duration> {
        self.cpu.zip(thread_cpu()).map(|(from, to)| to.saturating_sub(from))
    }
}
