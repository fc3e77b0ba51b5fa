//! A webhook: its queue, its spool, and the tasks between them.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hyper::Uri;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};
use turnpike_wire::secret::Secret;

use crate::{
    back_off::BackOff,
    delivery::Delivery,
    event::{Event, LOST, LostEvents},
    post::{Receiver, RefusedAddress},
    progress::{Counts, Shared, Stage, with},
    queue::{Queue, Taken},
    spool::Spool,
    spool_directory::SpoolDirectory,
};

/// Maximum number of events written at once.
const BATCH: usize = 1024;
/// Interval of fdatasync: maximum time whose events a power failure can take.
const SYNC: Duration = Duration::from_secs(1);
/// Pause after a failed write, usually because the disk is full.
const DISK_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq)]
pub struct WebhookOptions {
    pub url: String,
    pub secret: Secret,
    /// Wanted types; empty for all.
    pub types: Vec<&'static str>,
    /// Several events per request.
    pub batch: bool,
}

/// Pauses and timeouts of deliveries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Pause after the first failure; later ones double it, up to `most`.
    pub first: Duration,
    pub most: Duration,
    /// Timeout of a request.
    pub request: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { first: seconds(1), most: seconds(60), request: seconds(10) }
    }
}

/// Counters of a webhook since it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WebhookCounts {
    /// Host and port in its URL.
    pub host: String,
    pub delivered: u64,
    pub lost: u64,
    /// Failed requests.
    pub failures: u64,
    /// Events that are kept until they can be delivered.
    pub waiting: u64,
}

#[derive(Debug)]
pub(crate) struct Webhook {
    pub(crate) options: WebhookOptions,
    host: String,
    queue: Arc<Queue>,
    counts: Arc<Counts>,
    stage: watch::Sender<Stage>,
    task: JoinHandle<()>,
}

impl Webhook {
    /// `previous` is the task of the same webhook with other options; it ends first.
    pub(crate) fn start(
        options: WebhookOptions,
        directory: SpoolDirectory,
        (refuses, timing): (Option<RefusedAddress>, Timing),
        previous: Option<JoinHandle<()>>,
    ) -> Result<Self, String> {
        let uri: Uri = options.url.parse().map_err(|error| format!("the URL is invalid: {error}"))?;
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let host = authority.rsplit('@').next().unwrap_or_default().to_owned();
        let queue = Arc::<Queue>::default();
        let counts = Arc::<Counts>::default();
        let (stage, stages) = watch::channel(Stage::Running);
        let secret = options.secret.clone();
        let run = Run {
            host: host.clone(),
            queue: Arc::clone(&queue),
            counts: Arc::clone(&counts),
            stage: stages,
            directory,
            receiver: Receiver::new(uri, secret, refuses, timing.request),
            back_off: BackOff::new(timing.first, timing.most),
            is_batch: options.batch,
        };
        let task = tokio::spawn(async move {
            if let Some(previous) = previous {
                let _ = previous.await;
            }
            run.run().await;
        });
        Ok(Self { options, host, queue, counts, stage, task })
    }

    pub(crate) fn push(&self, event: &Arc<Event>) {
        if self.options.types.is_empty() || self.options.types.contains(&event.kind) || event.kind == LOST {
            self.queue.push(Arc::clone(event));
        }
    }

    pub(crate) fn counts(&self) -> WebhookCounts {
        let Counts { delivered, lost_in_queue, lost_in_spool, failures, waiting } = &*self.counts;
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        WebhookCounts {
            host: self.host.clone(),
            delivered: get(delivered),
            lost: get(lost_in_queue) + get(lost_in_spool),
            failures: get(failures),
            waiting: get(waiting),
        }
    }

    /// Ends the webhook after writing its queue to the disk.
    pub(crate) fn stop(self) -> JoinHandle<()> {
        self.end(Stage::Stopping)
    }

    /// Ends the webhook after a last attempt to deliver its events.
    pub(crate) fn finish(self) -> JoinHandle<()> {
        self.end(Stage::Finishing)
    }

    fn end(self, stage: Stage) -> JoinHandle<()> {
        self.stage.send_replace(stage);
        self.queue.close();
        self.task
    }
}

struct Run {
    host: String,
    queue: Arc<Queue>,
    counts: Arc<Counts>,
    stage: watch::Receiver<Stage>,
    directory: SpoolDirectory,
    receiver: Receiver,
    back_off: BackOff,
    is_batch: bool,
}

impl Run {
    async fn run(self) {
        let Some((spool, old)) = self.open().await else { return };
        let Self { host, queue, counts, stage, directory, receiver, back_off, is_batch } = self;
        let shared = Arc::new(Shared {
            host,
            spool: Arc::new(Mutex::new(spool)),
            work: Notify::new(),
            counts,
            stage,
            written: watch::Sender::new(false),
        });
        shared.show_waiting();
        let delivery = Delivery {
            shared: Arc::clone(&shared),
            receiver,
            back_off,
            is_batch,
            directory,
            old,
            reported: None,
        };
        tokio::join!(write(&shared, &queue), delivery.run());
    }

    /// Retries while the directory cannot be used; `None` if the webhook ends first.
    async fn open(&self) -> Option<(Spool, Vec<Spool>)> {
        let mut reported = false;
        loop {
            let directory = self.directory.clone();
            let opened = tokio::task::spawn_blocking(move || directory.open()).await;
            let error = match opened {
                Ok(Ok(spools)) => return Some(spools),
                Ok(Err(error)) => error,
                Err(error) => io::Error::other(error),
            };
            if !reported {
                tracing::error!("webhook {}: cannot open its spool; retrying: {error}", self.host);
                reported = true;
            }
            if *self.stage.borrow() != Stage::Running {
                return None;
            }
            sleep(DISK_PAUSE).await;
        }
    }
}

/// Moves events from the queue to the spool until the queue is closed.
async fn write(shared: &Shared, queue: &Queue) {
    let mut sync_at: Option<Instant> = None;
    let mut is_failing = false;
    loop {
        let due = async {
            match sync_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let taken = tokio::select! {
            taken = queue.take(BATCH) => taken,
            () = due => {
                sync_at = None;
                sync(shared).await;
                continue;
            }
        };
        let Some(mut taken) = taken else { break };
        shared.counts.lost_in_queue.fetch_add(taken.lost, Ordering::Relaxed);
        loop {
            let is_last = shared.stage() != Stage::Running;
            let Err(error) = append(shared, &mut taken).await else { break };
            if !is_failing {
                is_failing = true;
                tracing::error!("webhook {}: cannot write its spool; retrying: {error}", shared.host);
            }
            if is_last {
                let events = taken.events.len();
                tracing::error!("webhook {}: {events} events or more are lost", shared.host);
                shared.written.send_replace(true);
                return shared.work.notify_one();
            }
            sleep(DISK_PAUSE).await;
        }
        is_failing = false;
        shared.show_waiting();
        shared.work.notify_one();
        sync_at = sync_at.or_else(|| Some(Instant::now() + SYNC));
    }
    sync(shared).await;
    shared.written.send_replace(true);
    shared.work.notify_one();
}

/// Writes events and removes them from `taken`.
async fn append(shared: &Shared, taken: &mut Taken) -> io::Result<()> {
    let lost = std::mem::take(&mut taken.lost);
    let events = std::mem::take(&mut taken.events);
    let (written, events, dropped) = with(&shared.spool, move |spool| {
        if lost > 0 {
            spool.report(LostEvents::unnumbered(lost, "the queue was full"));
        }
        let mut at = 0;
        let written = loop {
            if at == events.len() && !spool.has_lost() {
                break Ok(());
            }
            match spool.append(&events[at..]) {
                Ok(count) => at += count,
                Err(error) => break Err(error),
            }
        };
        Ok((written, events[at..].to_vec(), spool.dropped))
    })
    .await?;
    taken.events = events;
    shared.counts.lost_in_spool.store(dropped, Ordering::Relaxed);
    written
}

async fn sync(shared: &Shared) {
    let files = with(&shared.spool, |spool| Ok(spool.sync())).await.unwrap_or_default();
    let synced =
        tokio::task::spawn_blocking(move || files.iter().try_for_each(|file| file.sync_data())).await;
    if let Ok(Err(error)) = synced {
        tracing::warn!("webhook {}: cannot sync its spool: {error}", shared.host);
    }
}
