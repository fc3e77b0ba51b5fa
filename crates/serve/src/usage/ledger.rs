//! Collects the workers' reports and saves them in batches.

use std::{
    collections::HashMap,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};
use turnpike_config::UsageSettings;
use turnpike_relay::Relay;
use turnpike_stores::{DAY, UsageAccount, UsageAmount, UsageBatch, UsageRun, UsageStore};

use super::{
    account::account,
    counts::UsageCounts,
    quota_keeper::QuotaKeeper,
    recorder::{UsageLog, UsageRecorder},
    unsaved::Unsaved,
};

/// Two intervals and a write are at most the ten seconds that a killed process may lose.
const INTERVAL: Duration = Duration::from_secs(4);
/// Maximum number of rows in memory.
const MOST_ROWS: usize = 100_000;
/// Maximum number of rows per batch, so that a transaction remains short.
const MOST_PER_BATCH: usize = 20_000;
/// Maximum time for a batch. A batch that takes longer may have been saved; sending it again does not double
/// it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit of the last attempt, since the end of the process waits for at most 5 s.
const LAST_PATIENCE: Duration = Duration::from_millis(1500);
const LAST_ATTEMPTS: usize = 3;
const CLEANUP: Duration = Duration::from_secs(3600);

/// Retention of sums, in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageTimes {
    hours: u64,
    days: u64,
}

impl From<&UsageSettings> for UsageTimes {
    fn from(settings: &UsageSettings) -> Self {
        let [hours, days] = [settings.hour_days, settings.days].map(|days| u64::from(days) * DAY);
        Self { hours: hours.min(days), days }
    }
}

pub(crate) struct UsageLedger {
    store: Arc<UsageStore>,
    recorder: Arc<UsageRecorder>,
    ended: oneshot::Receiver<()>,
    counts: Arc<UsageCounts>,
    run: UsageRun,
    times: UsageTimes,
    quotas: QuotaKeeper,
    unsaved: Unsaved,
    /// The batch being saved. It stays as it is until its answer arrives: its number must mean the same rows.
    batch: Option<UsageBatch>,
    saved: Saved,
    /// Time of the previous collection.
    collected: Instant,
    cleaned: Option<Instant>,
    has_failed: bool,
}

/// Content of the database about this run.
#[derive(Default)]
struct Saved {
    batches: u64,
    is_idle: bool,
    is_last: bool,
}

impl UsageLedger {
    pub(crate) fn new(
        store: Arc<UsageStore>,
        node: String,
        times: UsageTimes,
        workers: usize,
        quotas: QuotaKeeper,
    ) -> (UsageLog, Self) {
        let (alive, ended) = oneshot::channel();
        let recorder = Arc::new(UsageRecorder::new(workers));
        let ledger = Self {
            store,
            recorder: Arc::clone(&recorder),
            ended,
            counts: Arc::default(),
            run: UsageRun { id: hex::encode(rand::random::<[u8; 16]>()), node, started: unix() },
            times,
            quotas,
            unsaved: Unsaved::new(MOST_ROWS),
            batch: None,
            saved: Saved::default(),
            collected: Instant::now(),
            cleaned: None,
            has_failed: false,
        };
        (UsageLog::new(recorder, alive), ledger)
    }

    pub(crate) fn counts(&self) -> Arc<UsageCounts> {
        Arc::clone(&self.counts)
    }

    /// Runs until the last worker has ended.
    pub(crate) async fn run(mut self, relay: Weak<Relay>) {
        self.save(true, false).await;
        self.quotas.set_time(unix());
        loop {
            self.quotas.announce(&self.store).await;
            let is_saved = self.unsaved_rows() == 0;
            let read_quotas = async {
                if is_saved {
                    self.quotas.read(&self.store, INTERVAL).await;
                }
            };
            let is_last = tokio::select! {
                biased;
                _ = &mut self.ended => true,
                // A slow answer must not delay the next collection.
                _ = async { tokio::join!(sleep(INTERVAL), read_quotas) } => false,
            };
            if is_last {
                break;
            }
            let is_idle = relay.upgrade().is_some_and(|relay| relay.allocations() == 0);
            collect(&relay, &self.recorder).await;
            self.take_in();
            self.save(is_idle, false).await;
            self.clean_up().await;
        }
        self.take_in();
        for attempt in 0..LAST_ATTEMPTS {
            self.save(true, true).await;
            if self.saved.is_last {
                return;
            }
            if attempt + 1 < LAST_ATTEMPTS {
                sleep(Duration::from_millis(100)).await;
            }
        }
        let rows = self.unsaved_rows();
        tracing::error!(rows, "the last usage could not be saved in {} and is lost", self.store.name());
    }

    /// Takes the reports from the workers' tables; the hour is that of the wall clock now.
    fn take_in(&mut self) {
        let unix = unix();
        let elapsed = self.collected.elapsed().max(Duration::from_secs(1));
        self.collected = Instant::now();
        let mut round: HashMap<UsageAccount, UsageAmount> = HashMap::new();
        let mut summed = 0;
        for usage in self.recorder.take() {
            summed += usage.summed;
            for (realm, accounts) in usage.realms {
                for (label, amount) in accounts {
                    round.entry(account(&realm, &label)).or_default().add(&amount);
                }
            }
        }
        self.quotas.set_time(unix);
        for (account, mut amount) in round {
            let bytes = amount.to_peer.1 + amount.to_client.1;
            self.quotas.add(&account, bytes);
            amount.peak_bps = rate(bytes, elapsed);
            summed += u64::from(!self.unsaved.add(unix, account, &amount));
        }
        self.quotas.apply();
        self.counts.summed.fetch_add(summed, Ordering::Relaxed);
    }

    fn unsaved_rows(&self) -> usize {
        let of_batch = self.batch.iter().flat_map(|batch| &batch.hours).map(|hour| hour.rows.len());
        self.unsaved.rows() + of_batch.sum::<usize>()
    }

    /// Saves all rows, and the state of the run if it has changed.
    async fn save(&mut self, is_idle: bool, is_last: bool) {
        while let Some(batch) = self.batch.take().or_else(|| self.next_batch(is_idle, is_last)) {
            let patience = if is_last { LAST_PATIENCE } else { PATIENCE };
            let result = match timeout(patience, self.store.add(&self.run, &batch)).await {
                Ok(result) => result.map_err(|error| error.to_string()),
                Err(_) => {
                    Err(format!("{} does not answer within {} s", self.store.name(), patience.as_secs()))
                }
            };
            let counter = if result.is_ok() { &self.counts.saved } else { &self.counts.failed };
            counter.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = result {
                if !std::mem::replace(&mut self.has_failed, true) {
                    tracing::error!("usage is not saved: {error}; it stays in memory until a retry succeeds");
                }
                self.batch = Some(batch);
                break;
            }
            self.saved = Saved { batches: batch.number, is_idle: batch.is_idle, is_last: batch.is_last };
            if std::mem::take(&mut self.has_failed) {
                tracing::info!("usage is saved in {} again", self.store.name());
            }
        }
        self.counts.unsaved.store(self.unsaved_rows() as u64, Ordering::Relaxed);
    }

    fn next_batch(&mut self, is_idle: bool, is_last: bool) -> Option<UsageBatch> {
        let hours = self.unsaved.take(MOST_PER_BATCH);
        let is_all = self.unsaved.rows() == 0;
        let (is_idle, is_last) = (is_idle && is_all, is_last && is_all);
        let Saved { batches, is_idle: was_idle, is_last: was_last } = self.saved;
        let has_changed = batches == 0 || (is_idle, is_last) != (was_idle, was_last);
        let number = batches + 1;
        (has_changed || !hours.is_empty()).then(|| UsageBatch { number, hours, at: unix(), is_idle, is_last })
    }

    async fn clean_up(&mut self) {
        if self.has_failed || self.cleaned.is_some_and(|cleaned| cleaned.elapsed() < CLEANUP) {
            return;
        }
        self.cleaned = Some(Instant::now());
        let before = |kept: u64| unix().saturating_sub(kept);
        match timeout(PATIENCE, self.store.forget(before(self.times.hours), before(self.times.days))).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("old usage is not removed: {error}"),
            Err(_) => tracing::warn!("old usage is not removed: {} is slow", self.store.name()),
        }
    }
}

/// Makes all workers report, a slice at a time.
async fn collect(relay: &Weak<Relay>, recorder: &Arc<UsageRecorder>) {
    let workers = relay.upgrade().map_or(0, |relay| relay.workers());
    for worker in 0..workers {
        let mut next = Some(0);
        while let Some(slot) = next {
            let (answer, answered) = oneshot::channel();
            let Some(relay) = relay.upgrade() else { return };
            let recorder = Arc::clone(recorder);
            relay.report_usage(
                worker,
                slot,
                move |report| recorder.record(worker, report),
                move |next| _ = answer.send(next),
            );
            drop(relay);
            next = answered.await.unwrap_or_default();
        }
    }
}

/// Bits per second.
fn rate(bytes: u64, elapsed: Duration) -> u64 {
    let bits_ms = u128::from(bytes) * 8000;
    u64::try_from(bits_ms / elapsed.as_millis().max(1)).unwrap_or(u64::MAX)
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
