//! Usage reported by the workers and not yet taken by the ledger. Each worker has a table of its own, which only
//! the ledger also locks, for as long as it takes to swap the table.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::oneshot;
use turnpike_relay::AllocationLog;
use turnpike_stores::UsageAmount;
use turnpike_turn::server::{AllocationUsage, Effect, UsageReport};

use super::account::{OTHER, label};

/// Maximum number of accounts per worker between two collections.
const MOST_ACCOUNTS: usize = 65_536;

/// The workers' end of the ledger.
pub(crate) struct UsageLog {
    recorder: Arc<UsageRecorder>,
    /// Dropped with the last worker.
    _alive: oneshot::Sender<()>,
}

impl UsageLog {
    pub(super) fn new(recorder: Arc<UsageRecorder>, alive: oneshot::Sender<()>) -> Self {
        Self { recorder, _alive: alive }
    }
}

impl AllocationLog for UsageLog {
    fn effect(&self, worker: usize, effect: &Effect) {
        if let Some(report) = UsageReport::of_ended(effect) {
            self.recorder.record(worker, &report);
        }
    }
}

pub(crate) struct UsageRecorder(Box<[Mutex<WorkerUsage>]>);

#[derive(Default)]
pub(super) struct WorkerUsage {
    /// Indexed by realm and label.
    pub(super) realms: HashMap<Arc<str>, HashMap<Box<str>, UsageAmount>>,
    accounts: usize,
    /// Reports counted under [`OTHER`].
    pub(super) summed: u64,
}

impl UsageRecorder {
    pub(super) fn new(workers: usize) -> Self {
        Self((0..workers.max(1)).map(|_| Mutex::default()).collect())
    }

    pub(super) fn record(&self, worker: usize, report: &UsageReport<'_>) {
        let usage = &self.0[worker % self.0.len()];
        usage.lock().unwrap_or_else(PoisonError::into_inner).add(report);
    }

    pub(super) fn take(&self) -> impl Iterator<Item = WorkerUsage> {
        self.0.iter().map(|usage| mem::take(&mut *usage.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl WorkerUsage {
    fn add(&mut self, report: &UsageReport<'_>) {
        let amount = amount(report);
        let name = label(report.identity, report.username);
        let accounts = match self.realms.get_mut(report.realm) {
            Some(accounts) => accounts,
            None => self.realms.entry(Arc::clone(report.realm)).or_default(),
        };
        if let Some(sum) = accounts.get_mut(&*name) {
            sum.add(&amount);
        } else if self.accounts < MOST_ACCOUNTS {
            self.accounts += 1;
            accounts.insert(name.into(), amount);
        } else {
            self.summed += 1;
            accounts.entry(OTHER.into()).or_default().add(&amount);
        }
    }
}

fn amount(report: &UsageReport<'_>) -> UsageAmount {
    let AllocationUsage { lived_ms, to_peer, to_client } = report.usage;
    let allocations = u64::from(report.is_first);
    UsageAmount { allocations, lived_ms, to_peer, to_client, peak_bps: 0 }
}
