//! State of a webhook that its tasks share: stage, counters, and the spool between them.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::{Notify, watch};

use crate::spool::Spool;

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) delivered: AtomicU64,
    pub(crate) lost_in_queue: AtomicU64,
    pub(crate) lost_in_spool: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) waiting: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Running,
    /// The process exits: writes the queue, then delivers until the first failure.
    Finishing,
    /// The configuration changed: writes the queue.
    Stopping,
}

#[derive(Debug)]
pub(crate) struct Shared {
    /// Host and port, for the log: other parts of the URL may be secret.
    pub(crate) host: String,
    pub(crate) spool: Arc<Mutex<Spool>>,
    pub(crate) work: Notify,
    pub(crate) counts: Arc<Counts>,
    pub(crate) stage: watch::Receiver<Stage>,
    /// Set once the queue is written and closed.
    pub(crate) written: watch::Sender<bool>,
}

impl Shared {
    pub(crate) fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    pub(crate) async fn stopped(&self) {
        self.until(|stage| stage == Stage::Stopping).await;
    }

    pub(crate) async fn ending(&self) {
        self.until(|stage| stage != Stage::Running).await;
    }

    /// Without an owner that could change it, the stage stays as it is.
    async fn until(&self, is_so: impl Fn(Stage) -> bool) {
        if self.stage.clone().wait_for(|stage| is_so(*stage)).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// True if no more events can be added.
    pub(crate) fn is_done(&self) -> bool {
        *self.written.borrow() && !self.spool().has_more()
    }

    pub(crate) fn show_waiting(&self) {
        self.counts.waiting.store(self.spool().waiting(), Ordering::Relaxed);
    }

    pub(crate) fn spool(&self) -> MutexGuard<'_, Spool> {
        self.spool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `work` on another thread, because it accesses the disk.
pub(crate) async fn with<T: Send + 'static>(
    spool: &Arc<Mutex<Spool>>,
    work: impl FnOnce(&mut Spool) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let spool = Arc::clone(spool);
    let done =
        tokio::task::spawn_blocking(move || work(&mut spool.lock().unwrap_or_else(PoisonError::into_inner)));
    done.await.map_err(io::Error::other)?
}
