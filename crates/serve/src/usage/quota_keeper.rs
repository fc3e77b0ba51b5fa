//! Keeps the sums of all volume quotas up to date, and announces quotas that are nearly or completely used.
//!
//! ```text
//!  reports of this node ──▶ QuotaSums ──▶ UsedQuotas (workers)
//!  ledger: all nodes ───────▶   │
//!                               └──▶ notice in the ledger; the node that stores it first emits the event
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use tokio::{sync::watch, task::JoinHandle, time::timeout};
use turnpike_api::QuotaUse;
use turnpike_config::{EventType, QuotaAction, QuotaBy, VolumeQuota};
use turnpike_stores::{StoreError, UsageAccount, UsageBy, UsageStore};

use super::{
    quota_sums::{Notice, QuotaSums},
    used_quotas::{Subjects, UsedQuotas, both, limits_of},
};
use crate::events::ServerEvents;

/// Pause after a reading, in multiples of its time, so that it takes at most 2 % of a connection.
const PAUSE: u32 = 50;
/// Maximum number of notices announced together.
const MOST_NOTICES: usize = 200;

pub(crate) struct QuotaKeeper {
    wanted: watch::Receiver<Vec<VolumeQuota>>,
    used: Arc<UsedQuotas>,
    events: Arc<ServerEvents>,
    sums: Vec<QuotaSums>,
    next_reading: Option<Instant>,
    announcing: Option<JoinHandle<Option<Vec<Notice>>>>,
    has_failed: bool,
}

impl QuotaKeeper {
    pub(crate) fn new(
        wanted: watch::Receiver<Vec<VolumeQuota>>,
        used: Arc<UsedQuotas>,
        events: Arc<ServerEvents>,
    ) -> Self {
        let (sums, next_reading, announcing) = (Vec::new(), None, None);
        Self { wanted, used, events, sums, next_reading, announcing, has_failed: false }
    }

    /// Applies a reload and the begin of a period.
    pub(super) fn set_time(&mut self, unix: u64) {
        let wanted = self.wanted.borrow_and_update().clone();
        if self.sums.iter().map(|sums| &sums.quota).ne(&wanted) {
            let mut old = std::mem::take(&mut self.sums);
            self.sums = wanted
                .into_iter()
                .map(|quota| {
                    let is_it = |it: &QuotaSums| it.quota.by == quota.by && it.quota.per == quota.per;
                    match old.iter().position(is_it) {
                        Some(index) => old.swap_remove(index).changed(quota),
                        None => QuotaSums::new(quota, unix),
                    }
                })
                .collect();
            self.next_reading = None;
        }
        for sums in &mut self.sums {
            if sums.turn(unix) {
                self.next_reading = None;
            }
        }
    }

    pub(super) fn add(&mut self, account: &UsageAccount, bytes: u64) {
        self.sums.iter_mut().for_each(|sums| sums.add(account, bytes));
    }

    /// Puts used-up quotas into force.
    pub(super) fn apply(&self) {
        let mut subjects = Subjects::new();
        for sums in &self.sums {
            let limits = limits_of(sums.quota.then);
            for subject in sums.used_up() {
                let now = subjects.entry((sums.quota.by, subject.clone())).or_default();
                *now = both(*now, limits);
            }
        }
        self.used.set(subjects);
    }

    /// Reads the sums of all nodes. Call it only while the ledger contains everything that this node has counted;
    /// it may be cancelled.
    pub(super) async fn read(&mut self, store: &UsageStore, patience: Duration) {
        if self.sums.is_empty() || self.next_reading.is_some_and(|next| Instant::now() < next) {
            return;
        }
        let begun = Instant::now();
        let result = match timeout(patience, self.read_all(store)).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err(format!("{} does not answer within {} s", store.name(), patience.as_secs())),
        };
        self.next_reading = Some(Instant::now() + begun.elapsed() * PAUSE);
        match result {
            Ok(()) if std::mem::take(&mut self.has_failed) => {
                tracing::info!("the sums of volume quotas are up to date again");
            }
            Err(error) if !std::mem::replace(&mut self.has_failed, true) => tracing::error!(
                "the sums of volume quotas cannot be read: {error}; until then, only traffic of this node is added to them"
            ),
            Ok(()) | Err(_) => {}
        }
        self.apply();
    }

    async fn read_all(&mut self, store: &UsageStore) -> Result<(), StoreError> {
        for sums in &mut self.sums {
            let active = sums.active();
            let read = store.volumes(by(sums.quota.by), &sums.period, sums.least(), &active).await?;
            sums.read(&active, read);
        }
        Ok(())
    }

    /// Begins to announce notices that are due. Does not wait, because a cancelled announcement might be lost.
    pub(super) async fn announce(&mut self, store: &Arc<UsageStore>) {
        if let Some(announcing) = self.announcing.take_if(|announcing| announcing.is_finished()) {
            for notice in announcing.await.ok().flatten().iter().flatten() {
                self.sums.iter_mut().for_each(|sums| sums.settled(notice));
            }
        }
        let due: Vec<Notice> = self.sums.iter().flat_map(QuotaSums::notices).take(MOST_NOTICES).collect();
        if self.announcing.is_none() && !due.is_empty() {
            let (store, events) = (Arc::clone(store), Arc::clone(&self.events));
            self.announcing = Some(tokio::spawn(announced(store, events, due)));
        }
    }
}

/// Emits each notice that no node has emitted before. Returns all of them, or `None` for another attempt.
async fn announced(
    store: Arc<UsageStore>,
    events: Arc<ServerEvents>,
    due: Vec<Notice>,
) -> Option<Vec<Notice>> {
    let ids: Vec<_> = due.iter().map(|notice| (notice.id(), notice.begins)).collect();
    // An outage is logged by the ledger.
    let are_new = store.announce(&ids).await.ok()?;
    for (notice, _) in due.iter().zip(are_new).filter(|(_, is_new)| *is_new) {
        log(notice);
        events.hub.emit(EventType::Quota.name(), &event(notice));
    }
    Some(due)
}

fn by(by: QuotaBy) -> UsageBy {
    match by {
        QuotaBy::User => UsageBy::User,
        QuotaBy::Key => UsageBy::Key,
        QuotaBy::Realm => UsageBy::Realm,
    }
}

fn event(notice: &Notice) -> QuotaUse {
    let Notice { quota: VolumeQuota { by, bytes: quota, per, .. }, begins, subject, bytes, percent } = notice;
    let name = match by {
        QuotaBy::User => &subject.user,
        QuotaBy::Key => &subject.key,
        QuotaBy::Realm => &subject.realm,
    };
    let begins = i64::try_from(*begins).ok().and_then(|begins| Timestamp::from_second(begins).ok());
    QuotaUse {
        by: <&str>::from(by).to_owned(),
        name: name.to_string(),
        realm: (*by == QuotaBy::User).then(|| subject.realm.to_string()),
        per: <&str>::from(per).to_owned(),
        since: begins.unwrap_or(Timestamp::MAX).to_string(),
        percent: *percent,
        bytes: *bytes,
        quota: *quota,
    }
}

fn log(notice: &Notice) {
    let QuotaUse { by, name, realm, per, percent, bytes, quota, .. } = event(notice);
    let consequence = match notice.quota.then {
        _ if percent < 100 => String::new(),
        QuotaAction::Refuse => ": new allocations are refused".to_owned(),
        QuotaAction::Slow(rate) => format!(": each user is limited to {rate} bit/s"),
    };
    tracing::warn!(
        %by, ?name, realm = realm.as_deref(), %per, bytes, quota,
        "{percent} % of a volume quota is used{consequence}"
    );
}
