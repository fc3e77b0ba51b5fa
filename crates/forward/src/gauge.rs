//! Shared counter with a limit, for connections and sessions of a rule and of the process.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

pub(crate) struct Gauge {
    now: AtomicU64,
    limit: AtomicUsize,
}

impl Gauge {
    pub(crate) fn new(limit: usize) -> Self {
        Self { now: AtomicU64::new(0), limit: AtomicUsize::new(limit) }
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Takes a slot if one is free. A refused caller is never counted, not even briefly, so it cannot cause
    /// another refusal.
    pub(crate) fn enter(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed) as u64;
        let within = |now: u64| (now < limit).then_some(now + 1);
        self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// Counts a handed-over connection regardless of the limit.
    pub(crate) fn resume(&self) {
        self.now.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }
}
