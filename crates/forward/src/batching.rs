//! Batching of bulk: a worker that only moves bulk in small pieces pauses briefly, so that the next wake-up moves more at once.
//!
//! Each piece costs a wake-up of ours, a few system calls and, on its way out, a wake-up of its reader. A core that keeps up
//! with its streams easily meets them 64 KiB at a time. Resting is what interrupt moderation does in a network card. It never
//! happens while anything but bulk is served, for slow streams, or when the pieces are large because the core is busy anyway.

use std::time::Duration;

/// Length of a pause. At 2 GB/s 600 kB arrive meanwhile, of all streams together, far less than their receive buffers hold.
pub(crate) const REST: Duration = Duration::from_micros(300);
/// Time without pauses after anything else was served.
const ALERT_MS: u64 = 10;
/// So many lean wake-ups, each within [`GAP_MS`] of the one before, make a fast stream.
const RUN: u32 = 8;
const GAP_MS: u64 = 2;

/// What one wake-up was about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeUp {
    /// Splices that brought little.
    pub(crate) lean: u32,
    /// Everything else: reads by the buffer, new connections, datagrams, commands.
    pub(crate) other: u32,
}

/// Decides when to rest.
#[derive(Debug, Default)]
pub(crate) struct Batching {
    /// When something else was last served; milliseconds.
    other: u64,
    /// When the last lean wake-up was, and how many came one after the other.
    lean: u64,
    run: u32,
}

impl Batching {
    /// Whether to rest after this wake-up.
    pub(crate) fn should_sleep(&mut self, now: u64, wake_up: WakeUp) -> bool {
        if wake_up.other > 0 {
            self.other = now;
            self.run = 0;
            return false;
        }
        if wake_up.lean == 0 {
            return false;
        }
        let fast = now <= self.lean + GAP_MS;
        self.run = if fast { self.run.saturating_add(1) } else { 1 };
        self.lean = now;
        self.run >= RUN && now > self.other + ALERT_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAN: WakeUp = WakeUp { lean: 3, other: 0 };
    const FULL: WakeUp = WakeUp { lean: 0, other: 0 };
    const OTHER: WakeUp = WakeUp { lean: 3, other: 1 };

    fn after(gather: &mut Batching, from: u64, wake_ups: u32) -> Vec<bool> {
        (0..wake_ups).map(|at| gather.should_sleep(from + u64::from(at) / 2, LEAN)).collect()
    }

    #[test]
    fn fast_bulk_rests_once_it_has_shown_itself() {
        let rests = after(&mut Batching::default(), 1000, 12);
        assert_eq!(rests.iter().position(|rests| *rests), Some(RUN as usize - 1));
        assert!(rests[RUN as usize - 1..].iter().all(|rests| *rests));
    }

    #[test]
    fn slow_bulk_never_rests() {
        let mut gather = Batching::default();
        assert!((0..100).all(|at| !gather.should_sleep(1000 + at * (GAP_MS + 1), LEAN)));
    }

    #[test]
    fn pieces_that_are_large_already_need_no_rest() {
        let mut gather = Batching::default();
        after(&mut gather, 1000, 12);
        assert!(!gather.should_sleep(1006, FULL));
        assert!(gather.should_sleep(1006, LEAN), "one of them does not end the run");
    }

    #[test]
    fn anything_else_is_served_without_a_rest_and_keeps_the_worker_alert() {
        let mut gather = Batching::default();
        after(&mut gather, 1000, 12);
        assert!(!gather.should_sleep(1006, OTHER));
        let rests = after(&mut gather, 1006, 40);
        assert!(rests[..20].iter().all(|rests| !rests), "within {ALERT_MS} ms");
        assert!(rests[39]);
    }
}
