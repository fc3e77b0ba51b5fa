//! Sends the events of a webhook's spools in order, one request at a time, until the receiver accepts each of them.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use hyper::body::Bytes;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    back_off::BackOff,
    post::Receiver,
    progress::{Shared, Stage, with},
    spool::{Record, Spool},
    spool_directory::SpoolDirectory,
};

const ONE: &str = "application/cloudevents+json; charset=utf-8";
const BATCH: &str = "application/cloudevents-batch+json; charset=utf-8";
/// Maximum number of events in a request.
const MOST_EVENTS: usize = 100;
const MOST_BYTES: usize = 256 << 10;
/// Interval at which spools of exited processes are looked for.
const ADOPTION: Duration = Duration::from_secs(60);

pub(crate) struct Delivery {
    pub(crate) shared: Arc<Shared>,
    pub(crate) receiver: Receiver,
    pub(crate) back_off: BackOff,
    pub(crate) is_batch: bool,
    pub(crate) directory: SpoolDirectory,
    /// Spools of exited processes, oldest first.
    pub(crate) old: Vec<Spool>,
    pub(crate) reported: Option<Instant>,
}

/// Minimum interval between log lines about a failing receiver.
const REPORT_AGAIN: Duration = Duration::from_secs(60);

impl Delivery {
    /// Runs until the webhook stops, or, when it finishes, until everything is delivered or the receiver fails.
    pub(crate) async fn run(mut self) {
        for spool in std::mem::take(&mut self.old) {
            if !self.adopt(spool).await {
                return;
            }
        }
        let mut looked = Instant::now();
        loop {
            if self.shared.stage() == Stage::Stopping {
                return;
            }
            if looked.elapsed() >= ADOPTION {
                looked = Instant::now();
                if !self.adopt_abandoned().await {
                    return;
                }
            }
            let spool = Arc::clone(&self.shared.spool);
            match self.deliver_some(&spool).await {
                Some(true) => {}
                Some(false) if self.shared.is_done() => return,
                Some(false) => _ = timeout(ADOPTION, self.shared.work.notified()).await,
                None => return,
            }
        }
    }

    async fn adopt_abandoned(&mut self) -> bool {
        let directory = self.directory.clone();
        let found = tokio::task::spawn_blocking(move || directory.abandoned()).await;
        let Ok(Ok(found)) = found else { return true };
        for spool in found {
            if !self.adopt(spool).await {
                return false;
            }
        }
        true
    }

    /// Delivers and removes a spool; returns false if the webhook must end first.
    async fn adopt(&mut self, spool: Spool) -> bool {
        let spool = Arc::new(Mutex::new(spool));
        loop {
            match self.deliver_some(&spool).await {
                Some(true) => {}
                Some(false) => break,
                None => return false,
            }
        }
        if let Ok(spool) = Arc::try_unwrap(spool) {
            let spool = spool.into_inner().unwrap_or_else(PoisonError::into_inner);
            let removed = tokio::task::spawn_blocking(move || spool.remove_all()).await;
            if let Ok(Err(error)) = removed {
                tracing::warn!("webhook {}: cannot remove a delivered spool: {error}", self.shared.host);
            }
        }
        true
    }

    /// Delivers the next events; returns false if there are none, and `None` if the webhook must end.
    async fn deliver_some(&mut self, spool: &Arc<Mutex<Spool>>) -> Option<bool> {
        let taken = loop {
            let is_last = self.shared.stage() != Stage::Running;
            match with(spool, |spool| spool.take(MOST_EVENTS, MOST_BYTES)).await {
                Ok(taken) => break taken,
                Err(error) => {
                    tracing::error!("webhook {}: cannot read its spool: {error}", self.shared.host);
                    if is_last {
                        return None;
                    }
                    self.pause(Duration::from_secs(10)).await?;
                }
            }
        };
        if taken.is_empty() {
            return Some(false);
        }
        if self.is_batch {
            let body = batch(&taken);
            self.deliver(BATCH, body, spool, taken.last()?.sequence, taken.len() as u64).await?;
        } else {
            for record in taken {
                self.deliver(ONE, record.json.into(), spool, record.sequence, 1).await?;
            }
        }
        Some(true)
    }

    async fn deliver(
        &mut self,
        content_type: &'static str,
        body: Bytes,
        spool: &Arc<Mutex<Spool>>,
        last: u64,
        count: u64,
    ) -> Option<()> {
        let began = Instant::now();
        loop {
            let shared = Arc::clone(&self.shared);
            let is_last = shared.stage() != Stage::Running;
            let posted = tokio::select! {
                posted = self.receiver.post(content_type, body.clone()) => posted,
                () = shared.stopped() => return None,
            };
            match posted {
                Ok(()) => break,
                Err(failure) => {
                    self.shared.counts.failures.fetch_add(1, Ordering::Relaxed);
                    if is_last {
                        return None;
                    }
                    let pause = self.back_off.failed(rand::random(), failure.wished);
                    if self.reported.is_none_or(|at| at.elapsed() >= REPORT_AGAIN) {
                        self.reported = Some(Instant::now());
                        let (host, why) = (&self.shared.host, failure.why);
                        tracing::warn!("webhook {host}: {why}; its events are kept and sent again");
                    }
                    self.pause(pause).await?;
                }
            }
        }
        self.shared.counts.delivered.fetch_add(count, Ordering::Relaxed);
        if self.back_off.failures() > 0 && began.elapsed() >= REPORT_AGAIN {
            let (attempts, seconds) = (self.back_off.failures(), began.elapsed().as_secs());
            tracing::info!(
                "webhook {}: delivers again after {attempts} failures in {seconds} s",
                self.shared.host
            );
        }
        self.back_off.succeeded();
        let recorded = with(spool, move |spool| spool.delivered(last)).await;
        if let Err(error) = recorded {
            tracing::warn!(
                "webhook {}: cannot record a delivery, so a restart repeats it: {error}",
                self.shared.host
            );
        }
        self.shared.show_waiting();
        Some(())
    }

    /// Sleeps, but not past the begin of the end, when one more attempt is made; `None` if the webhook must end.
    async fn pause(&self, pause: Duration) -> Option<()> {
        tokio::select! {
            () = sleep(pause) => {}
            () = self.shared.ending() => {}
        }
        (self.shared.stage() != Stage::Stopping).then_some(())
    }
}

fn batch(records: &[Record]) -> Bytes {
    let mut body = Vec::with_capacity(records.iter().map(|record| record.json.len() + 1).sum::<usize>() + 1);
    for record in records {
        body.push(if body.is_empty() { b'[' } else { b',' });
        body.extend_from_slice(&record.json);
    }
    body.push(b']');
    body.into()
}
