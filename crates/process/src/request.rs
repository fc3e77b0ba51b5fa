//! Requests to the control loop, their answers, and [`Control`], which sends them.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::sync::{Notify, mpsc, oneshot};
use turnpike_api::{Drain, Draining, Later, NotReloaded, Process, Reloaded, Sandbox};

use crate::{carried_metrics::CarriedMetrics, logging, sandbox};

/// Maximum number of waiting requests; additional senders wait.
const BACKLOG: usize = 16;

#[derive(Debug)]
pub(crate) enum Request {
    Reload(Option<oneshot::Sender<Result<Reloaded, NotReloaded>>>),
    /// Stops accepting clients, and exits once enough sessions have ended or a time limit has passed. A second
    /// request stops the process immediately.
    Drain(Drain),
    /// Like [`Request::Drain`], but a second request only changes the limits that it contains.
    DrainWithin(Drain, oneshot::Sender<Draining>),
    Upgrade(UpgradeRequest),
    MachineChanged,
}

#[derive(Debug, Default)]
pub(crate) struct UpgradeRequest {
    /// Program to start; by default this process's own.
    pub(crate) program: Option<PathBuf>,
    pub(crate) progress: Option<mpsc::UnboundedSender<UpgradeProgress>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpgradeProgress {
    Step(String),
    Done(String),
    Failed(String),
}

impl UpgradeRequest {
    pub(crate) fn report(&self, progress: UpgradeProgress) {
        match &progress {
            UpgradeProgress::Step(text) | UpgradeProgress::Done(text) => tracing::info!("upgrade: {text}"),
            UpgradeProgress::Failed(why) => {
                tracing::error!("upgrade failed; this process keeps serving: {why}");
            }
        }
        if let Some(sender) = &self.progress {
            let _ = sender.send(progress);
        }
    }
}

/// Set by a signal that stops the program, for code that is waiting for something else.
#[derive(Debug, Default)]
pub struct Stop {
    is_requested: Arc<AtomicBool>,
    notify: Notify,
}

impl Stop {
    pub(crate) fn request(&self) {
        self.is_requested.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    pub(crate) fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::Acquire)
    }

    #[must_use]
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_requested)
    }

    pub(crate) async fn requested(&self) {
        // Registered before reading the flag, so that no call of `request` is missed.
        let notified = self.notify.notified();
        if !self.is_requested() {
            notified.await;
        }
    }
}

#[derive(Debug, Default)]
pub struct ControlStatus {
    stop: Arc<Stop>,
    draining: AtomicBool,
    reloaded: AtomicU64,
    refused: AtomicU64,
    upgraded: AtomicU64,
    not_upgraded: AtomicU64,
    carried: Arc<CarriedMetrics>,
}

impl ControlStatus {
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    #[must_use]
    pub fn stop(&self) -> &Arc<Stop> {
        &self.stop
    }

    pub(crate) fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn reloads(&self) -> [(&'static str, u64); 2] {
        [("loaded", &self.reloaded), ("failed", &self.refused)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    pub(crate) fn upgrades(&self) -> [(&'static str, u64); 2] {
        [("done", &self.upgraded), ("failed", &self.not_upgraded)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    #[must_use]
    pub fn carried(&self) -> &Arc<CarriedMetrics> {
        &self.carried
    }

    pub(crate) fn count_upgrade(&self, done: bool) {
        let count = if done { &self.upgraded } else { &self.not_upgraded };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_reload(&self, taken: bool) {
        let count = if taken { &self.reloaded } else { &self.refused };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Debug)]
pub struct Control {
    requests: mpsc::Sender<Request>,
    status: Arc<ControlStatus>,
}

impl Control {
    pub(crate) fn new(gauges: &'static [&'static str]) -> (Self, mpsc::Receiver<Request>) {
        let (requests, received) = mpsc::channel(BACKLOG);
        let carried = Arc::new(CarriedMetrics::new(gauges));
        (Self { requests, status: Arc::new(ControlStatus { carried, ..ControlStatus::default() }) }, received)
    }

    /// Notifies the service of possible address or route changes; returns false once the program has ended.
    pub async fn machine_changed(&self) -> bool {
        self.requests.send(Request::MachineChanged).await.is_ok()
    }

    #[must_use]
    pub fn status(&self) -> &Arc<ControlStatus> {
        &self.status
    }

    pub(crate) fn requests(&self) -> &mpsc::Sender<Request> {
        &self.requests
    }
}

impl Process for Control {
    fn is_draining(&self) -> bool {
        self.status.is_draining()
    }

    fn reload(&self) -> Later<'_, Result<Reloaded, NotReloaded>> {
        Box::pin(async {
            let (sender, answer) = oneshot::channel();
            let _ = self.requests.send(Request::Reload(Some(sender))).await;
            answer.await.unwrap_or(Err(NotReloaded::Draining))
        })
    }

    fn drain(&self, wanted: Drain) -> Later<'_, Option<Draining>> {
        Box::pin(async move {
            let (sender, answer) = oneshot::channel();
            let _ = self.requests.send(Request::DrainWithin(wanted, sender)).await;
            answer.await.ok()
        })
    }

    fn log_level(&self) -> String {
        logging::level()
    }

    fn set_log_level(&self, level: &str) -> Result<(), String> {
        logging::set_level(level)
    }

    fn sandbox(&self) -> Option<Sandbox> {
        sandbox::in_force().cloned()
    }
}
