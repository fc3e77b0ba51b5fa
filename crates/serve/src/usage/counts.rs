//! Figures of the usage ledger for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(crate) struct UsageCounts {
    pub(super) saved: AtomicU64,
    pub(super) failed: AtomicU64,
    /// Rows that are not in the database yet.
    pub(super) unsaved: AtomicU64,
    /// Reports counted under `(other)`.
    pub(super) summed: AtomicU64,
}

/// [`UsageCounts`] at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UsageFigures {
    pub(crate) batches: [(&'static str, u64); 2],
    pub(crate) unsaved: u64,
    pub(crate) summed: u64,
}

impl UsageCounts {
    pub(crate) fn get(&self) -> UsageFigures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        UsageFigures {
            batches: [("saved", get(&self.saved)), ("failed", get(&self.failed))],
            unsaved: get(&self.unsaved),
            summed: get(&self.summed),
        }
    }
}
