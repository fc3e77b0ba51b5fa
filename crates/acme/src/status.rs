//! Status of orders, for metrics and the API.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

#[derive(Debug, Default)]
pub struct AcmeStatus {
    names: Mutex<BTreeMap<String, NameStatus>>,
    issued: AtomicU64,
    failed: AtomicU64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameStatus {
    /// Unix second at which the next order is due.
    pub next: u64,
    /// Failed attempts since the last success.
    pub failures: u32,
    /// Error of the last attempt, if it failed.
    pub error: Option<String>,
    /// Reason why no order can be placed at present.
    pub held_up: Option<String>,
}

impl AcmeStatus {
    pub fn names(&self) -> BTreeMap<String, NameStatus> {
        self.lock().clone()
    }

    /// Number of finished orders by result.
    pub fn orders(&self) -> [(&'static str, u64); 2] {
        [("issued", &self.issued), ("failed", &self.failed)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    pub(crate) fn keep(&self, is_wanted: impl Fn(&str) -> bool) {
        self.lock().retain(|name, _| is_wanted(name));
    }

    pub(crate) fn show(&self, name: String, status: NameStatus) {
        self.lock().insert(name, status);
    }

    /// Records why orders are held up; returns false if this reason was already recorded.
    pub(crate) fn hold_up(&self, name: String, why: &str, next: u64) -> bool {
        let mut names = self.lock();
        let status = names.entry(name).or_default();
        if status.held_up.as_deref() == Some(why) {
            return false;
        }
        (status.next, status.held_up) = (next, Some(why.to_owned()));
        true
    }

    pub(crate) fn free(&self, name: &str) {
        if let Some(status) = self.lock().get_mut(name) {
            status.held_up = None;
        }
    }

    pub(crate) fn count(&self, is_issued: bool) {
        let count = if is_issued { &self.issued } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, NameStatus>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
