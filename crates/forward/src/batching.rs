//! Pauses for a worker that only moves bulk data in small pieces, so that the next wake-up moves
//! more data.
//!
//! Each piece costs a wake-up, a few system calls, and a wake-up of its reader. A core that keeps up with its
//! streams often sees only 64 KiB at a time. The pause works like a network card's interrupt
//! moderation. It does not apply to interactive traffic, slow streams, or cores that are busy
//! enough to see large pieces.

use std::time::Duration;

/// Length of a pause. At a total of 2 GB/s, 600 kB arrive in this time, far less than fits into the
/// streams' receive buffers.
pub(crate) const REST: Duration = Duration::from_micros(300);
/// Pauses are suspended for this many milliseconds after any work other than bulk transfer.
const ALERT_MS: u64 = 10;
/// Number of consecutive lean wake-ups, each within [`GAP_MS`] of the previous one, that indicate a fast
/// stream.
const RUN: u32 = 8;
const GAP_MS: u64 = 2;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeUp {
    /// Number of splices that moved little data.
    pub(crate) lean: u32,
    /// Number of reads into the buffer, new connections, datagrams and commands.
    pub(crate) other: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Batching {
    /// Time of the last work of any other kind, in milliseconds.
    other: u64,
    /// Time of the last lean wake-up in milliseconds, and length of the current run.
    lean: u64,
    run: u32,
}

impl Batching {
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
    fn fast_bulk_pauses_once_detected() {
        let rests = after(&mut Batching::default(), 1000, 12);
        assert_eq!(rests.iter().position(|rests| *rests), Some(RUN as usize - 1));
        assert!(rests[RUN as usize - 1..].iter().all(|rests| *rests));
    }

    #[test]
    fn slow_bulk_never_pauses() {
        let mut gather = Batching::default();
        assert!((0..100).all(|at| !gather.should_sleep(1000 + at * (GAP_MS + 1), LEAN)));
    }

    #[test]
    fn large_pieces_need_no_pause() {
        let mut gather = Batching::default();
        after(&mut gather, 1000, 12);
        assert!(!gather.should_sleep(1006, FULL));
        assert!(gather.should_sleep(1006, LEAN), "one full piece does not end the run");
    }

    #[test]
    fn other_work_suspends_pauses() {
        let mut gather = Batching::default();
        after(&mut gather, 1000, 12);
        assert!(!gather.should_sleep(1006, OTHER));
        let rests = after(&mut gather, 1006, 40);
        assert!(rests[..20].iter().all(|rests| !rests), "within {ALERT_MS} ms");
        assert!(rests[39]);
    }
}
