//! Events of a program, for all its webhooks and subscribers.

use std::{
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde::Serialize;
use tokio::time::timeout;

use crate::{
    buffer::{Buffer, Subscription},
    event::{Event, LOST, LostEvents},
    spool_directory::SpoolDirectory,
    webhook::{Timing, Webhook, WebhookCounts, WebhookOptions},
};

#[derive(Clone, Debug, Default)]
pub struct Options {
    pub webhooks: Vec<WebhookOptions>,
    /// Directory of the spools.
    pub dir: PathBuf,
    /// Maximum size of each webhook's spool in bytes.
    pub spool: u64,
    /// Returns true for addresses that webhooks must not reach.
    pub refuses: Option<fn(IpAddr) -> bool>,
    pub timing: Timing,
}

impl Options {
    /// True if a webhook that both contain can continue.
    fn is_like(&self, other: &Self) -> bool {
        self.dir == other.dir
            && self.spool == other.spool
            && self.refuses.is_some() == other.refuses.is_some()
            && self.timing == other.timing
    }
}

/// Cheap while there are neither webhooks nor subscribers: see [`Events::is_wanted`].
#[derive(Debug)]
pub struct Events {
    source: Arc<str>,
    buffer: Arc<Buffer>,
    webhooks: Mutex<(Options, Vec<Webhook>)>,
    is_wanted: AtomicBool,
}

impl Events {
    /// `source` names this program in the events, as a URI reference.
    #[must_use]
    pub fn new(source: &str) -> Self {
        Self {
            source: source.into(),
            buffer: Arc::default(),
            webhooks: Mutex::default(),
            is_wanted: AtomicBool::new(false),
        }
    }

    /// False if [`Self::emit`] would do nothing.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Relaxed)
    }

    /// Emits an event without waiting.
    pub fn emit(&self, kind: &'static str, data: &impl Serialize) {
        if !self.is_wanted() {
            return;
        }
        let event = Arc::new(Event::new(&self.source, kind, data));
        let webhooks = self.lock();
        let is_kept = self.buffer.push(&event);
        webhooks.1.iter().for_each(|webhook| webhook.push(&event));
        if !is_kept && webhooks.1.is_empty() {
            self.is_wanted.store(false, Ordering::Relaxed);
        }
    }

    /// Reports `count` events that were dropped before they could be emitted.
    pub fn lost(&self, count: u64, reason: &'static str) {
        self.emit(LOST, &LostEvents::unnumbered(count, reason));
    }

    /// Starts, changes and stops webhooks. Must be called within a tokio runtime.
    pub fn set(&self, options: Options) {
        let mut webhooks = self.lock();
        let (old_options, old) = std::mem::take(&mut *webhooks);
        let is_like = options.is_like(&old_options);
        let mut kept: Vec<Webhook> = Vec::new();
        let mut stopped = Vec::new();
        for webhook in old {
            if is_like && options.webhooks.contains(&webhook.options) {
                kept.push(webhook);
            } else {
                stopped.push((webhook.options.url.clone(), Some(webhook.stop())));
            }
        }
        for wanted in &options.webhooks {
            if kept.iter().any(|webhook| webhook.options == *wanted) {
                continue;
            }
            let directory = SpoolDirectory::new(&options.dir, &wanted.url, &self.source, options.spool);
            let previous = stopped.iter_mut().find(|(url, task)| *url == wanted.url && task.is_some());
            let previous = previous.and_then(|(_, task)| task.take());
            match Webhook::start(wanted.clone(), directory, (options.refuses, options.timing), previous) {
                Ok(webhook) => kept.push(webhook),
                Err(why) => tracing::error!("webhook not started: {why}"),
            }
        }
        if !kept.is_empty() {
            self.is_wanted.store(true, Ordering::Relaxed);
        }
        *webhooks = (options, kept);
    }

    /// Subscribes to the stream after the event with the number `last`, or from now on. `None` if there are too many subscribers.
    /// An empty list of types means all.
    pub fn subscribe(&self, last: Option<u64>, types: Vec<&'static str>) -> Option<Subscription> {
        let _webhooks = self.lock();
        let subscription = self.buffer.subscribe(Arc::clone(&self.source), last, types)?;
        self.is_wanted.store(true, Ordering::Relaxed);
        Some(subscription)
    }

    pub fn counts(&self) -> Vec<WebhookCounts> {
        self.lock().1.iter().map(Webhook::counts).collect()
    }

    /// Writes all events to the disk, and delivers as many as it can within `patience`.
    pub async fn close(&self, patience: Duration) {
        let (_, webhooks) = std::mem::take(&mut *self.lock());
        let tasks: Vec<_> = webhooks.into_iter().map(Webhook::finish).collect();
        let _ = timeout(patience, async {
            for task in tasks {
                let _ = task.await;
            }
        })
        .await;
    }

    fn lock(&self) -> MutexGuard<'_, (Options, Vec<Webhook>)> {
        self.webhooks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
