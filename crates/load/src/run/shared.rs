//! What the threads of a run share: its clock, its beginning and its end.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use super::{Frame, tally::Tallies};
use crate::{
    LoadError,
    clock::{Clock, nanos},
};

/// Made once, borrowed by all threads.
pub(crate) struct Shared<'a, C> {
    pub(crate) config: &'a C,
    pub(crate) frame: Frame,
    pub(crate) clock: Clock,
    /// One per thread.
    pub(crate) slots: Vec<Mutex<Tallies>>,
    /// Clients that are set up.
    pub(crate) ready_clients: AtomicUsize,
    ready_threads: AtomicUsize,
    /// When traffic starts, in nanoseconds of the clock; 0 while clients are being set up.
    start_ns: AtomicU64,
    stopped: AtomicBool,
    failure: Mutex<Option<LoadError>>,
}

/// The times of a run, in nanoseconds of its clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) start: u64,
    pub(crate) measure: u64,
    pub(crate) end: u64,
}

impl<'a, C> Shared<'a, C> {
    pub(crate) fn new(config: &'a C, frame: Frame) -> Self {
        Self {
            config,
            frame,
            clock: Clock::start(),
            slots: (0..frame.threads).map(|_| Mutex::default()).collect(),
            ready_clients: AtomicUsize::new(0),
            ready_threads: AtomicUsize::new(0),
            start_ns: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// The clients of this thread are ready; the last thread sets the time at which all start.
    pub(crate) fn thread_is_ready(&self) {
        /// Far enough away that every thread sees it in time.
        const NOTICE_NS: u64 = 20_000_000;
        if self.ready_threads.fetch_add(1, SeqCst) + 1 == self.frame.threads {
            self.start_ns.store(self.clock.ns() + NOTICE_NS, SeqCst);
        }
    }

    /// The times, once all threads are ready.
    pub(crate) fn schedule(&self) -> Option<Schedule> {
        let start = self.start_ns.load(SeqCst);
        // A time beyond the clock's end is that of the clock's end.
        let measure = start.saturating_add(nanos(self.frame.warmup));
        let end = measure.saturating_add(nanos(self.frame.duration));
        (start > 0).then_some(Schedule { start, measure, end })
    }

    /// Waits for the other threads; for a thread with nothing to do meanwhile.
    pub(crate) fn wait_for_start(&self) -> Result<Schedule, LoadError> {
        loop {
            self.check()?;
            if let Some(schedule) = self.schedule() {
                return Ok(schedule);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The first error of any thread stops all.
    pub(crate) fn fail(&self, error: LoadError) {
        if let Ok(mut failure) = self.failure.lock()
            && (failure.is_none() || matches!(*failure, Some(LoadError::Stopped)))
        {
            *failure = Some(error);
        }
        self.stopped.store(true, SeqCst);
    }

    pub(crate) fn take_failure(&self) -> Option<LoadError> {
        self.failure.lock().ok().and_then(|mut failure| failure.take())
    }

    pub(crate) fn check(&self) -> Result<(), LoadError> {
        if self.stopped.load(SeqCst) { Err(LoadError::Stopped) } else { Ok(()) }
    }

    /// How many of `total` things fall to thread `thread`, and the number of its first.
    pub(crate) fn share(&self, total: usize, thread: usize) -> (usize, usize) {
        let (each, more) = (total / self.frame.threads, total % self.frame.threads);
        (each + usize::from(thread < more), thread * each + thread.min(more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Kind;

    #[test]
    fn times_beyond_the_clocks_end_are_no_overflow() {
        let (warmup, duration) = (Duration::from_secs(1), Duration::MAX);
        let frame = Frame { clients: 1, threads: 1, warmup, duration, kind: Kind::Answered };
        let shared = Shared::new(&(), frame);
        assert!(shared.schedule().is_none());
        shared.thread_is_ready();
        let schedule = shared.schedule().unwrap();
        assert_eq!((schedule.measure, schedule.end), (schedule.start + 1_000_000_000, u64::MAX));
    }
}
