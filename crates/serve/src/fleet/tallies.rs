//! Counters of a fleet node.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RedirectReason {
    Load,
    Full,
    Draining,
    /// The client connected to an address that other nodes share, and was redirected to this node's own
    /// address.
    OwnAddress,
    Owner,
}

pub(super) const REASONS: [&str; 5] = ["load", "full", "draining", "own_address", "owner"];
pub(super) const RESULTS: [&str; 2] = ["done", "failed"];
pub(super) const HEARD: [&str; 4] = ["message", "level", "unreadable", "repeated"];

#[derive(Default)]
pub(super) struct FleetCounters {
    pub(super) sent: [AtomicU64; REASONS.len()],
    pub(super) exchanges: [AtomicU64; RESULTS.len()],
    pub(super) exchange_us: AtomicU64,
    pub(super) heard: [AtomicU64; HEARD.len()],
    pub(super) lines_lost: AtomicU64,
    /// Clients served after they returned from a redirect.
    pub(super) returned: AtomicU64,
}

impl FleetCounters {
    pub(super) fn sent(&self, reason: RedirectReason) {
        self.sent[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn exchanged(&self, microseconds: u128, done: bool) {
        self.exchanges[usize::from(!done)].fetch_add(1, Ordering::Relaxed);
        self.exchange_us.fetch_add(u64::try_from(microseconds).unwrap_or_default(), Ordering::Relaxed);
    }

    pub(super) fn heard(&self, counts: [usize; HEARD.len()]) {
        for (tally, count) in self.heard.iter().zip(counts) {
            tally.fetch_add(count as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_counted_under_its_name() {
        let tallies = FleetCounters::default();
        for (reason, name) in [
            (RedirectReason::Load, "load"),
            (RedirectReason::Full, "full"),
            (RedirectReason::Draining, "draining"),
            (RedirectReason::OwnAddress, "own_address"),
            (RedirectReason::Owner, "owner"),
        ] {
            tallies.sent(reason);
            assert_eq!(REASONS[reason as usize], name);
        }
        assert!(tallies.sent.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }
}
