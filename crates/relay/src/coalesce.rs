//! Delays wake-ups: if datagrams arrive one by one, the worker sleeps for a fixed time and then handles
//! several together. This is the opposite of busy polling ([`turnpike_net::Poller::set_busy_poll`]).
//!
//! ```text
//!  wait ─▶ tick ─▶ sleep until `time` has passed since the wake-up ─▶ wait, returns immediately ─▶ tick …
//! ```
//!
//! The pause is a plain sleep: epoll_pwait2 with a timeout would return on the first datagram, and a timerfd
//! would cost two more system calls. During the sleep no thread waits on the poller, so arriving datagrams
//! cause no wake-ups.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Interval over which the rate is measured.
const WINDOW: Duration = Duration::from_millis(2);
/// Number of datagrams that make a pause worthwhile. A single datagram would have woken the worker anyway,
/// and sleeping costs as much as that wake-up.
const WORTH: u64 = 2;
/// Number of windows for which pauses are skipped after a window whose pauses gathered too few datagrams:
/// clients that wait for replies send nothing during a pause.
const REST: u32 = 50;
/// Maximum number of datagrams in a tick that may be followed by a pause. Larger ticks are batched well
/// enough, so the next one starts immediately.
const SMALL: u64 = 32;
/// Shortest pause; falling asleep and waking up takes about as long.
const SHORTEST: Duration = Duration::from_micros(10);

#[derive(Debug)]
pub(crate) struct Coalescer {
    time: Duration,
    woke: Instant,
    seen: u64,
    window: Window,
    is_worth_it: bool,
    rest: u32,
    pauses: u64,
}

#[derive(Debug)]
struct Window {
    began: Instant,
    seen: u64,
    pauses: u64,
}

impl Coalescer {
    pub(crate) fn new(time: Duration) -> Self {
        Self::starting(time, Instant::now())
    }

    fn starting(time: Duration, now: Instant) -> Self {
        let window = Window { began: now, seen: 0, pauses: 0 };
        Self { time, woke: now, seen: 0, window, is_worth_it: false, rest: 0, pauses: 0 }
    }

    #[inline]
    pub(crate) fn woke(&mut self) {
        self.woke = Instant::now();
    }

    /// Sleeps if worthwhile. Call before each wait, with the number of `datagrams` received so far. Requires
    /// [`turnpike_net::rlimit::exact_timers`].
    pub(crate) fn pause(&mut self, datagrams: u64) {
        if let Some(pause) = self.decide(Instant::now(), datagrams) {
            thread::sleep(pause);
        }
    }

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
    const WORK: Duration = Duration::from_micros(6);

    struct Simulated {
        coalescer: Coalescer,
        start: Instant,
        now: Instant,
        received: u64,
        wakeups: u64,
        worst: Duration,
    }

    impl Simulated {
        fn new() -> Self {
            let start = Instant::now();
            let coalescer = Coalescer::starting(TIME, start);
            Self { coalescer, start, now: start, received: 0, wakeups: 0, worst: Duration::ZERO }
        }

        fn run(&mut self, arrivals: &[Duration]) {
            let mut rest = arrivals;
            while let [first, ..] = rest {
                self.now = self.now.max(self.start + *first);
                let here = rest.iter().take_while(|at| self.start + **at <= self.now).count();
                self.tick(self.start + *first, here as u64);
                rest = &rest[here..];
            }
        }

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

    fn steady(rate: u32, from: Duration, lasts: Duration) -> Vec<Duration> {
        let gap = Duration::from_secs(1) / rate;
        (0..).map(|n| from + gap * n).take_while(|at| *at < from + lasts).collect()
    }

    #[test]
    fn steady_datagrams_are_batched_within_the_maximum_delay() {
        for (rate, least) in [(40_000, 3), (100_000, 8), (150_000, 11)] {
            let mut worker = Simulated::new();
            worker.run(&steady(rate, Duration::ZERO, Duration::from_millis(500)));
            let each = worker.received / worker.wakeups;
            assert!(each >= least, "{rate}/s: {each} datagrams per wake-up");
            // The previous tick may add its own processing time.
            assert!(worker.worst <= TIME + WORK * 20, "{rate}/s: {:?}", worker.worst);
        }
    }

    #[test]
    fn low_rates_cause_no_pauses() {
        let mut worker = Simulated::new();
        worker.run(&steady(10_000, Duration::ZERO, Duration::from_millis(500)));
        assert_eq!(worker.coalescer.pauses(), 0);
        assert_eq!(worker.wakeups, worker.received);
    }

    #[test]
    fn first_datagrams_after_a_gap_are_served_immediately() {
        let mut worker = Simulated::new();
        worker.run(&steady(100_000, Duration::ZERO, Duration::from_millis(100)));
        let before = worker.coalescer.pauses();
        assert!(before > 500, "{before}");
        let silence = Duration::from_millis(400);
        worker.worst = Duration::ZERO;
        worker.run(&steady(100, silence, Duration::from_secs(1)));
        assert_eq!((worker.coalescer.pauses(), worker.worst), (before, Duration::ZERO));
    }

    /// A client that sends its next datagram only after the reply to the previous one does not benefit from
    /// pauses.
    #[test]
    fn request_reply_traffic_is_rarely_delayed() {
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
        assert!(pauses > 0 && pauses < 100_000 / 20, "{pauses} pauses in 100000 round trips");
    }

    #[test]
    fn backlog_is_handled_without_a_pause() {
        let mut worker = Simulated::new();
        worker.run(&steady(100_000, Duration::ZERO, Duration::from_millis(100)));
        let came = worker.now;
        assert_eq!(worker.tick(came, SMALL + 1), None);
        // A wake-up without datagrams, for example for a timer.
        let came = worker.now;
        assert_eq!(worker.tick(came, 0), None);
        let came = worker.now;
        assert_eq!(worker.tick(came, 3), Some(TIME - WORK * 3));
    }

    #[test]
    fn pause_lasts_for_the_rest_of_the_interval() {
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
