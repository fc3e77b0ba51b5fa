//! What the threads of a run share: its clock, its beginning and its end.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use super::{RunFrame, tally::RunTallies};
use crate::{
    LoadError,
    clock::{Clock, nanos},
};

/// Made once, borrowed by all threads.
pub(crate) struct RunShared<'a, C> {
    pub(crate) config: &'a C,
    pub(crate) frame: RunFrame,
    pub(crate) clock: Clock,
    /// One per thread.
    pub(crate) slots: Vec<Mutex<RunTallies>>,
    /// Clients that are set up.
    pub(crate) ready_clients: AtomicUsize,
    ready_threads: AtomicUsize,
    /// When traffic starts, in nanoseconds of the clock; 0 while clients are being set up.
    start_ns: AtomicU64,
    /// Where an interrupted run ends; `u64::MAX` for one that is not.
    cut_ns: AtomicU64,
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

impl Schedule {
    /// From the end of the warm-up to the end.
    pub(crate) fn measured(self) -> Duration {
        Duration::from_nanos(self.end.saturating_sub(self.measure))
    }
}

impl<'a, C> RunShared<'a, C> {
    pub(crate) fn new(config: &'a C, frame: RunFrame) -> Self {
        Self {
            config,
            frame,
            clock: Clock::start(),
            slots: (0..frame.threads).map(|_| Mutex::default()).collect(),
            ready_clients: AtomicUsize::new(0),
            ready_threads: AtomicUsize::new(0),
            start_ns: AtomicU64::new(0),
            cut_ns: AtomicU64::new(u64::MAX),
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
        let end = measure.saturating_add(nanos(self.frame.duration)).min(self.cut_ns.load(SeqCst));
        (start > 0).then_some(Schedule { start, measure, end })
    }

    /// Ends the run before its time: what has been measured until then counts. Before there is anything, the run fails.
    pub(crate) fn interrupt(&self) {
        /// Longer than any thread goes on without looking ([`Self::check_on`]), so that all end at the same moment.
        const NOTICE_NS: u64 = 300_000_000;
        let cut = self.clock.ns() + NOTICE_NS;
        match self.schedule() {
            Some(schedule) if cut > schedule.measure => {
                self.cut_ns.fetch_min(cut, SeqCst);
            }
            Some(_) => self.fail(LoadError::Interrupted { during: "in the warm-up" }),
            None => self.fail(LoadError::Interrupted { during: "while the clients were being set up" }),
        }
    }

    /// The measured time of a run that has ended, and whether it is shorter than was asked for.
    pub(crate) fn measured(&self) -> (Duration, bool) {
        match self.schedule() {
            Some(schedule) if schedule.measured() < self.frame.duration => (schedule.measured(), true),
            _ => (self.frame.duration, false),
        }
    }

    /// Whether another thread has failed, and since when the run has another end: to be called five times a second.
    pub(crate) fn check_on(&self, schedule: &mut Schedule) -> Result<(), LoadError> {
        self.check()?;
        if let Some(current) = self.schedule() {
            *schedule = current;
        }
        Ok(())
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
    use crate::progress::CountKind;

    fn shared(warmup: Duration) -> RunShared<'static, ()> {
        let duration = Duration::from_secs(100);
        RunShared::new(&(), RunFrame { clients: 1, threads: 1, warmup, duration, kind: CountKind::Answered })
    }

    #[test]
    fn an_interrupted_run_ends_for_all_threads_at_the_same_later_moment() {
        let shared = shared(Duration::ZERO);
        shared.thread_is_ready();
        let planned = shared.schedule().unwrap();
        let mut seen = planned;
        shared.check_on(&mut seen).unwrap();
        assert_eq!((seen.end, shared.measured()), (planned.end, (Duration::from_secs(100), false)));
        let now = shared.clock.ns();
        shared.interrupt();
        shared.check_on(&mut seen).unwrap();
        assert!(seen.end > now && seen.end < planned.end, "{now} {seen:?}");
        assert_eq!((seen.start, seen.measure), (planned.start, planned.measure));
        assert_eq!(shared.measured(), (seen.measured(), true));
        // A second one does not put the end off.
        let end = seen.end;
        shared.interrupt();
        shared.check_on(&mut seen).unwrap();
        assert_eq!(seen.end, end);
    }

    #[test]
    fn a_run_interrupted_before_anything_was_measured_fails_and_says_when() {
        let early = shared(Duration::ZERO);
        early.interrupt();
        assert!(early.check().is_err());
        assert!(early.take_failure().unwrap().to_string().contains("being set up"));
        let warm = shared(Duration::from_secs(50));
        warm.thread_is_ready();
        warm.interrupt();
        assert!(warm.take_failure().unwrap().to_string().contains("warm-up"));
    }

    #[test]
    fn times_beyond_the_clocks_end_are_no_overflow() {
        let (warmup, duration) = (Duration::from_secs(1), Duration::MAX);
        let frame = RunFrame { clients: 1, threads: 1, warmup, duration, kind: CountKind::Answered };
        let shared = RunShared::new(&(), frame);
        assert!(shared.schedule().is_none());
        shared.thread_is_ready();
        let schedule = shared.schedule().unwrap();
        assert_eq!((schedule.measure, schedule.end), (schedule.start + 1_000_000_000, u64::MAX));
    }
}
