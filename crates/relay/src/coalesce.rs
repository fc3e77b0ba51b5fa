//! A pause before the wait: a worker whose datagrams come one by one sleeps for a set time rather than until the next of them, and so finds
//! several when it wakes up. The opposite of busy polling ([`turnpike_net::poll::Poller::set_busy_poll`]).
//!
//! ```text
//!  wait ─▶ tick ─▶ pause until the set time has passed since the wake-up ─▶ wait, which returns at once ─▶ tick …
//! ```
//!
//! It is a plain sleep. A wait with a time-out (epoll_pwait2) would end with the first datagram, which is what is to be avoided, and a timer
//! of its own in the set of the poller (timerfd) would take two calls more. While the worker sleeps, nobody waits at the poller, and a
//! datagram that arrives wakes nobody up.

use std::{
    thread,
    time::{Duration, Instant},
};

/// For so long the rate is counted before it is judged again.
const WINDOW: Duration = Duration::from_millis(2);
/// So many datagrams a pause has to gather: one would have woken the worker up anyway, and sleeping costs as much as that.
const WORTH: u64 = 2;
/// Windows without a pause after one in which pauses did not gather that: whoever waits for an answer sends nothing meanwhile.
const REST: u32 = 50;
/// A tick of more datagrams has gathered enough by itself; the next one shall begin at once.
const SMALL: u64 = 32;
/// What is left of the time is not slept through when it is less: to fall asleep and to wake up takes about as long.
const SHORTEST: Duration = Duration::from_micros(10);

/// Decides when a worker pauses, and pauses. One for each worker.
#[derive(Debug)]
pub(crate) struct Coalescer {
    /// Between two wake-ups.
    time: Duration,
    /// When the worker woke up last.
    woke: Instant,
    /// Datagrams that it had received by the end of its last tick.
    seen: u64,
    window: Window,
    /// What the last window was good for.
    is_worth_it: bool,
    /// Windows until pauses are tried again.
    rest: u32,
    pauses: u64,
}

#[derive(Debug)]
struct Window {
    began: Instant,
    /// Datagrams received by then.
    seen: u64,
    /// Pauses since.
    pauses: u64,
}

impl Coalescer {
    /// One that delays no datagram by more than `time`, and pauses only where that gathers others.
    pub(crate) fn new(time: Duration) -> Self {
        Self::starting(time, Instant::now())
    }

    fn starting(time: Duration, now: Instant) -> Self {
        let window = Window { began: now, seen: 0, pauses: 0 };
        Self { time, woke: now, seen: 0, window, is_worth_it: false, rest: 0, pauses: 0 }
    }

    /// To be called when a wait has ended.
    #[inline]
    pub(crate) fn woke(&mut self) {
        self.woke = Instant::now();
    }

    /// To be called before a wait, with all datagrams that were received so far. Sleeps, or not; see [`turnpike_net::rlimit::exact_timers`].
    pub(crate) fn pause(&mut self, datagrams: u64) {
        if let Some(pause) = self.decide(Instant::now(), datagrams) {
            thread::sleep(pause);
        }
    }

    /// How often it has slept.
    pub(crate) fn pauses(&self) -> u64 {
        self.pauses
    }

    fn decide(&mut self, now: Instant, datagrams: u64) -> Option<Duration> {
        let in_tick = datagrams.wrapping_sub(self.seen);
        self.seen = datagrams;
        let elapsed = now.saturating_duration_since(self.window.began);
        if elapsed >= WINDOW {
            self.judge(elapsed, datagrams);
            self.window = Window { began: now, seen: datagrams, pauses: 0 };
        }
        if !self.is_worth_it || in_tick == 0 || in_tick > SMALL {
            return None;
        }
        let left = self.time.checked_sub(now.saturating_duration_since(self.woke))?;
        if left < SHORTEST {
            return None;
        }
        self.pauses += 1;
        self.window.pauses += 1;
        Some(left)
    }

    /// Looks back at a window.
    fn judge(&mut self, elapsed: Duration, datagrams: u64) {
        let count = datagrams.wrapping_sub(self.window.seen);
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let expected = count.saturating_mul(nanoseconds(self.time)) / nanoseconds(elapsed).max(1);
        if count < WORTH * self.window.pauses {
            self.rest = REST;
        }
        self.is_worth_it = self.rest == 0 && expected >= WORTH;
        self.rest = self.rest.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_micros(100);
    /// What a datagram takes.
    const WORK: Duration = Duration::from_micros(6);

    /// A worker on a clock of its own.
    struct Simulated {
        coalescer: Coalescer,
        start: Instant,
        now: Instant,
        received: u64,
        wakeups: u64,
        /// The longest that a datagram has waited.
        worst: Duration,
    }

    impl Simulated {
        fn new() -> Self {
            let start = Instant::now();
            let coalescer = Coalescer::starting(TIME, start);
            Self { coalescer, start, now: start, received: 0, wakeups: 0, worst: Duration::ZERO }
        }

        /// Handles what arrives at these times (after the start, ascending), each as soon as the worker may.
        fn run(&mut self, arrivals: &[Duration]) {
            let mut rest = arrivals;
            while let [first, ..] = rest {
                self.now = self.now.max(self.start + *first);
                let here = rest.iter().take_while(|at| self.start + **at <= self.now).count();
                self.tick(self.start + *first, here as u64);
                rest = &rest[here..];
            }
        }

        /// One tick of so many datagrams, the first of which came then; what was decided behind it.
        fn tick(&mut self, came: Instant, datagrams: u64) -> Option<Duration> {
            self.wakeups += 1;
            self.worst = self.worst.max(self.now - came);
            self.coalescer.woke = self.now;
            self.received += datagrams;
            self.now += WORK * u32::try_from(datagrams).unwrap();
            let pause = self.coalescer.decide(self.now, self.received);
            self.now += pause.unwrap_or_default();
            pause
        }
    }

    /// So many a second for so long, from then on.
    fn steady(rate: u32, from: Duration, lasts: Duration) -> Vec<Duration> {
        let gap = Duration::from_secs(1) / rate;
        (0..).map(|n| from + gap * n).take_while(|at| *at < from + lasts).collect()
    }

    #[test]
    fn a_stream_of_lone_datagrams_is_gathered_and_none_waits_longer_than_it_may() {
        for (rate, least) in [(40_000, 3), (100_000, 8), (150_000, 11)] {
            let mut worker = Simulated::new();
            worker.run(&steady(rate, Duration::ZERO, Duration::from_millis(500)));
            let each = worker.received / worker.wakeups;
            assert!(each >= least, "{rate} a second: {each} at a time");
            // Beyond the time set, only what the tick before it takes.
            assert!(worker.worst <= TIME + WORK * 20, "{rate} a second: {:?}", worker.worst);
        }
    }

    #[test]
    fn few_datagrams_are_not_kept_waiting() {
        let mut worker = Simulated::new();
        worker.run(&steady(10_000, Duration::ZERO, Duration::from_millis(500)));
        assert_eq!(worker.coalescer.pauses(), 0);
        assert_eq!(worker.wakeups, worker.received);
    }

    #[test]
    fn the_first_datagram_after_silence_is_served_at_once_and_the_next_too() {
        let mut worker = Simulated::new();
        worker.run(&steady(100_000, Duration::ZERO, Duration::from_millis(100)));
        let before = worker.coalescer.pauses();
        assert!(before > 500, "{before}");
        let silence = Duration::from_millis(400);
        worker.worst = Duration::ZERO;
        worker.run(&steady(100, silence, Duration::from_secs(1)));
        assert_eq!((worker.coalescer.pauses(), worker.worst), (before, Duration::ZERO));
    }

    /// A client that sends its next datagram only when it has the answer to the last gains nothing by pauses.
    #[test]
    fn who_waits_for_each_answer_is_left_alone_most_of_the_time() {
        let mut worker = Simulated::new();
        let rtt = Duration::from_micros(20);
        let mut arrives = worker.now;
        for _ in 0..100_000 {
            worker.now = worker.now.max(arrives);
            let served = worker.now;
            worker.tick(arrives, 1);
            arrives = served + WORK + rtt;
        }
        let pauses = worker.coalescer.pauses();
        assert!(pauses > 0 && pauses < 100_000 / 20, "{pauses} of 100000");
    }

    #[test]
    fn a_backlog_is_worked_off_without_a_pause() {
        let mut worker = Simulated::new();
        worker.run(&steady(100_000, Duration::ZERO, Duration::from_millis(100)));
        let came = worker.now;
        assert_eq!(worker.tick(came, SMALL + 1), None);
        // Nothing was received: a timer, say.
        let came = worker.now;
        assert_eq!(worker.tick(came, 0), None);
        let came = worker.now;
        assert_eq!(worker.tick(came, 3), Some(TIME - WORK * 3));
    }

    #[test]
    fn what_is_left_of_the_time_is_slept_and_no_more() {
        let mut worker = Simulated::new();
        worker.run(&steady(100_000, Duration::ZERO, Duration::from_millis(100)));
        for (datagrams, pause) in
            [(1, Some(TIME - WORK)), (15, Some(TIME - WORK * 15)), (16, None), (17, None)]
        {
            let came = worker.now;
            assert_eq!(worker.tick(came, datagrams), pause, "{datagrams}");
        }
    }
}
