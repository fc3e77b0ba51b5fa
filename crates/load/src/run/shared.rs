//! State shared by the threads of a run: clock, start and end.

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

pub(crate) struct RunShared<'a, C> {
    pub(crate) config: &'a C,
    pub(crate) frame: RunFrame,
    pub(crate) clock: Clock,
    pub(crate) slots: Vec<Mutex<RunTallies>>,
    pub(crate) ready_clients: AtomicUsize,
    ready_threads: AtomicUsize,
    /// Time at which traffic starts, in nanoseconds on the run's clock; 0 during setup.
    start_ns: AtomicU64,
    cut_ns: AtomicU64,
    stopped: AtomicBool,
    failure: Mutex<Option<LoadError>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RunTimes {
    pub(crate) start: u64,
    pub(crate) measure: u64,
    pub(crate) end: u64,
}

impl RunTimes {
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

    pub(crate) fn thread_is_ready(&self) {
        /// Time from setting the start time until the start; long enough for every thread to see the start time first.
        const NOTICE_NS: u64 = 20_000_000;
        if self.ready_threads.fetch_add(1, SeqCst) + 1 == self.frame.threads {
            self.start_ns.store(self.clock.ns() + NOTICE_NS, SeqCst);
        }
    }

    pub(crate) fn schedule(&self) -> Option<RunTimes> {
        let start = self.start_ns.load(SeqCst);
        let measure = start.saturating_add(nanos(self.frame.warmup));
        let end = measure.saturating_add(nanos(self.frame.duration)).min(self.cut_ns.load(SeqCst));
        (start > 0).then_some(RunTimes { start, measure, end })
    }

    /// Ends the run early and keeps the results so far. Fails the run if nothing has been measured yet.
    pub(crate) fn interrupt(&self) {
        /// Time until an interrupted run ends. Longer than the interval at which threads call [`Self::check_on`], so that all of them end
        /// at the same time.
        const NOTICE_NS: u64 = 300_000_000;
        let cut = self.clock.ns() + NOTICE_NS;
        match self.schedule() {
            Some(schedule) if cut > schedule.measure => {
                self.cut_ns.fetch_min(cut, SeqCst);
            }
            Some(_) => self.fail(LoadError::Interrupted { during: "during the warm-up" }),
            None => self.fail(LoadError::Interrupted { during: "while the clients were being set up" }),
        }
    }

    pub(crate) fn measured(&self) -> (Duration, bool) {
        match self.schedule() {
            Some(schedule) if schedule.measured() < self.frame.duration => (schedule.measured(), true),
            _ => (self.frame.duration, false),
        }
    }

    /// Fails if another thread has failed, and updates the schedule. Must be called at least five times a
    /// second.
    pub(crate) fn check_on(&self, schedule: &mut RunTimes) -> Result<(), LoadError> {
        self.check()?;
        if let Some(current) = self.schedule() {
            *schedule = current;
        }
        Ok(())
    }

    pub(crate) fn wait_for_start(&self) -> Result<RunTimes, LoadError> {
        loop {
            self.check()?;
            if let Some(schedule) = self.schedule() {
                return Ok(schedule);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

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

    /// Number of items, out of `total`, that belong to `thread`, and the index of the first one.
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
    fn all_threads_of_an_interrupted_run_end_together() {
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
        // A second interrupt must not postpone the end.
        let end = seen.end;
        shared.interrupt();
        shared.check_on(&mut seen).unwrap();
        assert_eq!(seen.end, end);
    }

    #[test]
    fn interrupting_before_the_measurement_fails_the_run() {
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
    fn times_beyond_the_range_of_the_clock_saturate() {
        let (warmup, duration) = (Duration::from_secs(1), Duration::MAX);
        let frame = RunFrame { clients: 1, threads: 1, warmup, duration, kind: CountKind::Answered };
        let shared = RunShared::new(&(), frame);
        assert!(shared.schedule().is_none());
        shared.thread_is_ready();
        let schedule = shared.schedule().unwrap();
        assert_eq!((schedule.measure, schedule.end), (schedule.start + 1_000_000_000, u64::MAX));
    }
}
