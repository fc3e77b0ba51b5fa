//! Limit on the connections of one listener.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::AbortHandle,
    time::{Instant, sleep_until, timeout_at},
};

use super::{CloseReasons, Closed, RequestProgress};

/// Minimum time that an idle connection keeps its slot: well-behaved clients send their requests sooner.
const GRACE: Duration = Duration::from_millis(100);
/// Time that a new connection waits for a slot before it gets 503. Later connections wait in the listen
/// backlog.
const PATIENCE: Duration = Duration::from_millis(500);
/// Maximum concurrent 503 responses; additional connections are closed without a response.
const REFUSED: usize = 8;
/// Interval between log lines about a full listener.
const LOG_PAUSE: Duration = Duration::from_secs(10);

pub(super) struct ConnectionRoom {
    places: Arc<Semaphore>,
    refused: Arc<Semaphore>,
    open: VecDeque<OpenConnection>,
    close_reasons: &'static CloseReasons,
    logged: Option<Instant>,
}

struct OpenConnection {
    task: AbortHandle,
    progress: RequestProgress,
    since: Instant,
}

pub(super) enum ConnectionAdmission {
    Free(OwnedSemaphorePermit),
    /// All connections are busy, so the new one gets 503.
    Busy(OwnedSemaphorePermit),
}

impl ConnectionRoom {
    pub(super) fn new(places: usize, close_reasons: &'static CloseReasons) -> Self {
        let (places, refused) = (Arc::new(Semaphore::new(places)), Arc::new(Semaphore::new(REFUSED)));
        Self { places, refused, open: VecDeque::new(), close_reasons, logged: None }
    }

    pub(super) fn enter(&mut self, task: AbortHandle, progress: RequestProgress) {
        self.open.push_back(OpenConnection { task, progress, since: Instant::now() });
    }

    /// Slot for a new connection, taken from an idle one if necessary. `None` if the new connection must
    /// be closed without a response.
    pub(super) async fn place(&mut self) -> Option<ConnectionAdmission> {
        let deadline = Instant::now() + PATIENCE;
        self.open.retain(|open| !open.task.is_finished());
        let mut place = Arc::clone(&self.places).try_acquire_owned().ok();
        while place.is_none() {
            let freed = Arc::clone(&self.places).acquire_owned();
            if self.close_idle() {
                place = timeout_at(deadline, freed).await.ok().and_then(Result::ok);
            } else if Instant::now() >= deadline {
                break;
            } else {
                let again = (Instant::now() + GRACE).min(deadline);
                tokio::select! {
                    freed = freed => place = freed.ok(),
                    () = sleep_until(again) => {}
                }
            }
        }
        if place.is_none() {
            self.log();
        }
        let busy = || Arc::clone(&self.refused).try_acquire_owned().ok().map(ConnectionAdmission::Busy);
        place.map(ConnectionAdmission::Free).or_else(busy)
    }

    /// Closes a connection whose response has been sent or, if there is none, the oldest idle one.
    fn close_idle(&mut self) -> bool {
        if let Some(index) = self.open.iter().position(|open| open.progress.is_answered())
            && let Some(OpenConnection { task, .. }) = self.open.remove(index)
        {
            task.abort();
            return true;
        }
        let idle = |open: &OpenConnection| open.progress.waits() && open.since.elapsed() >= GRACE;
        let oldest = self.open.iter().position(idle).and_then(|index| self.open.remove(index));
        let Some(OpenConnection { task, .. }) = oldest else { return false };
        task.abort();
        self.close_reasons.count(Closed::Crowded);
        true
    }

    fn log(&mut self) {
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_PAUSE) {
            self.logged = Some(Instant::now());
            tracing::warn!("all connections of {} are busy: new connections get 503", self.close_reasons.of);
        }
    }
}
