//! A count with a limit, which all workers share: of connections and sessions, of one rule and of all.

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

    /// Takes a place, if there is one. Whoever finds none never counts, so that nobody is refused for the sake of somebody who was
    /// refused.
    pub(crate) fn enter(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed) as u64;
        let within = |now: u64| (now < limit).then_some(now + 1);
        self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// One more, whatever the limit is: it was let in by another process.
    pub(crate) fn resume(&self) {
        self.now.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }
}
