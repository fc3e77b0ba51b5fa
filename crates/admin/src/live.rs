//! Current activity, read once per second for all watchers, and kept for the last minutes.
//!
//! ```text
//!  each second    workers: publish! ─▶ Reading ─▶ Live ─▶ Frame ─▶ newest ─▶ watchers (routes::live), GET /v1/live
//!                                        │ the previous one └─▶ History
//!  while watched  talkers: allocations, slice by slice
//! ```
//!
//! A slow watcher skips readings; a watcher that does not read at all is disconnected. No worker waits for
//! any of this.

mod history;
mod reading;
mod talkers;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use http_body_util::channel::Sender;
use hyper::body::Bytes;
use jiff::Timestamp;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch},
    time::{Instant as Deadline, MissedTickBehavior, interval, timeout, timeout_at},
};
use turnpike_api::{History, Live, Status, Talkers};
use turnpike_turn::server::stats::ALLOCATION_MS;
use turnpike_wire::escape;

use crate::{
    program::{Owner, status_of},
    threads::Threads,
};
use history::Minutes;
use reading::Reading;

/// Interval of readings.
const TICK: Duration = Duration::from_secs(1);
/// Timeout for a worker's answer, after which the worker is reported as not answering.
const PATIENCE: Duration = Duration::from_millis(500);
/// Maximum number of watchers on all listeners together; each uses a connection.
pub(crate) const WATCHERS: usize = 8;
/// Time for a watcher to receive sent events.
const SLOW: Duration = Duration::from_secs(10);
/// Time after a request during which the program is considered watched.
const WATCHED_MS: u64 = 15_000;
const MINUTE: usize = 60;

type AllocationTimes = [u64; ALLOCATION_MS.len() + 1];

pub(crate) struct Feed {
    program: Arc<dyn Owner>,
    /// Wall clock for the time of day, and monotonic clock for the uptime.
    started: (Timestamp, Instant),
    newest: watch::Sender<Option<Arc<Frame>>>,
    minutes: Mutex<Minutes>,
    talkers: Mutex<Option<Arc<Talkers>>>,
    watchers: Arc<Semaphore>,
    /// Time of the last request in milliseconds since startup.
    asked_ms: AtomicU64,
}

pub(crate) struct Frame {
    pub(crate) live: Live,
    /// `live` as an event, serialized on first use.
    event: OnceLock<Bytes>,
}

impl Frame {
    fn event(&self) -> Bytes {
        self.event.get_or_init(|| event("live", &self.live)).clone()
    }
}

fn event(name: &str, data: &impl serde::Serialize) -> Bytes {
    let json = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {}\n\n", escape::json(&json)).into()
}

impl Feed {
    pub(crate) fn start(program: Arc<dyn Owner>) -> Arc<Self> {
        let feed = Arc::new(Self {
            program,
            started: (Timestamp::now(), Instant::now()),
            newest: watch::Sender::new(None),
            minutes: Mutex::default(),
            talkers: Mutex::default(),
            watchers: Arc::new(Semaphore::new(WATCHERS)),
            asked_ms: AtomicU64::new(u64::MAX),
        });
        tokio::spawn(Arc::clone(&feed).read());
        tokio::spawn(talkers::compare(Arc::clone(&feed)));
        feed
    }

    pub(crate) fn status(&self) -> Status {
        let (at, since) = self.started;
        status_of(&*self.program, at, since.elapsed())
    }

    pub(crate) async fn newest(&self) -> Option<Arc<Frame>> {
        self.mark();
        let mut newest = self.newest.subscribe();
        let found = timeout(3 * TICK, newest.wait_for(Option::is_some)).await;
        found.ok()?.ok()?.clone()
    }

    pub(crate) fn history(&self) -> History {
        self.minutes.lock().unwrap_or_else(PoisonError::into_inner).history()
    }

    pub(crate) fn watcher(self: &Arc<Self>) -> Option<LiveWatcher> {
        let place = Arc::clone(&self.watchers).try_acquire_owned().ok()?;
        Some(LiveWatcher { feed: Arc::clone(self), _place: place })
    }

    fn mark(&self) {
        self.asked_ms.store(self.since_ms(), Ordering::Relaxed);
    }

    fn since_ms(&self) -> u64 {
        u64::try_from(self.started.1.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn is_watched(&self) -> bool {
        let asked_ms = self.asked_ms.load(Ordering::Relaxed);
        self.watchers.available_permits() < WATCHERS
            || (asked_ms != u64::MAX && self.since_ms().saturating_sub(asked_ms) < WATCHED_MS)
    }

    fn set_talkers(&self, talkers: Option<Talkers>) {
        *self.talkers.lock().unwrap_or_else(PoisonError::into_inner) = talkers.map(Arc::new);
    }

    fn talkers(&self) -> Option<Arc<Talkers>> {
        self.talkers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn read(self: Arc<Self>) {
        let threads = Threads::default();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: Option<Reading> = None;
        let mut times: VecDeque<AllocationTimes> = VecDeque::with_capacity(MINUTE);
        loop {
            ticks.tick().await;
            let shares = threads.shares().await;
            let waits = self.probe().await;
            let now = Reading::take(&*self.program);
            if let Some(before) = &before {
                let talkers = self.talkers();
                let mut live =
                    now.since(before, self.status(), &shares, &waits, talkers.as_deref(), &*self.program);
                if let (Some(server), Some(counted)) = (&mut live.server, now.allocation_times()) {
                    let minute_ago = times.front().copied().unwrap_or_default();
                    server.opening = reading::quantiles(&minute_ago, counted);
                    if times.len() >= MINUTE {
                        times.pop_front();
                    }
                    times.push_back(*counted);
                }
                self.minutes.lock().unwrap_or_else(PoisonError::into_inner).push(now.at(), &live);
                let frame = Frame { live, event: OnceLock::new() };
                self.newest.send_replace(Some(Arc::new(frame)));
            }
            before = Some(now);
        }
    }

    /// Makes all workers publish their counters, and returns each worker's response time.
    async fn probe(&self) -> Vec<Option<Duration>> {
        let Some(server) = self.program.server() else { return Vec::new() };
        let workers = 0..server.relay.workers();
        let asked: Vec<_> = workers
            .map(|worker| {
                let (sender, answer) = oneshot::channel();
                server.relay.probe(worker, move |waited| _ = sender.send(waited));
                answer
            })
            .collect();
        drop(server);
        let deadline = Deadline::now() + PATIENCE;
        let mut waits = Vec::with_capacity(asked.len());
        for answer in asked {
            waits.push(timeout_at(deadline, answer).await.ok().and_then(Result::ok));
        }
        waits
    }
}

/// Reason why a watcher's events ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    Ended,
    Stalled,
}

pub(crate) struct LiveWatcher {
    feed: Arc<Feed>,
    _place: OwnedSemaphorePermit,
}

impl LiveWatcher {
    /// Sends the history and then at most `most` readings, while `may_watch` returns true.
    pub(crate) async fn send(
        self,
        to: &mut Sender<Bytes>,
        most: Option<u64>,
        may_watch: impl Fn() -> bool,
    ) -> Watched {
        let mut newest = self.feed.newest.subscribe();
        let mut left = most.unwrap_or(u64::MAX);
        let mut next = event("history", &self.feed.history());
        loop {
            match timeout(SLOW, to.send_data(next)).await {
                Ok(Ok(())) if left > 0 => {}
                Ok(_) => return Watched::Ended,
                Err(_) => return Watched::Stalled,
            }
            next = loop {
                if newest.changed().await.is_err() || !may_watch() {
                    return Watched::Ended;
                }
                let frame = newest.borrow_and_update().clone();
                if let Some(frame) = frame {
                    break frame.event();
                }
            };
            left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, channel::Channel};

    use super::*;
    use crate::connections::tests::IdleProgram;

    async fn heard(body: &mut Channel<Bytes>) -> Bytes {
        let frame = body.frame().await.expect("more events").expect("no error");
        frame.into_data().expect("no trailers")
    }

    /// tokio's clock is paused, and advances when all tasks are idle.
    #[tokio::test(start_paused = true)]
    async fn watchers_get_the_same_events_and_stalled_ones_are_dropped() {
        let feed = Feed::start(Arc::new(IdleProgram::default()));
        let watch = |feed: &Arc<Feed>| {
            let (mut sender, body) = Channel::<Bytes>::new(1);
            let watcher = feed.watcher().expect("a free slot");
            (tokio::spawn(async move { watcher.send(&mut sender, None, || true).await }), body)
        };
        let ((_one, mut first), (_other, mut second), (deaf, unread)) =
            (watch(&feed), watch(&feed), watch(&feed));
        assert_eq!(feed.watchers.available_permits(), WATCHERS - 3);
        assert!(heard(&mut first).await.starts_with(b"event: history\ndata: {"));
        assert!(heard(&mut second).await.ends_with(b"}\n\n"));
        for _ in 0..5 {
            let (one, other) = (heard(&mut first).await, heard(&mut second).await);
            assert!(one.starts_with(b"event: live\n"));
            assert_eq!(one.as_ptr(), other.as_ptr(), "written once");
        }
        // The other watchers continue while the one that does not read times out.
        while !deaf.is_finished() {
            heard(&mut first).await;
            heard(&mut second).await;
        }
        assert_eq!(feed.watchers.available_permits(), WATCHERS - 2);
        drop(unread);
        let told = Arc::strong_count(&feed);
        drop(first);
        while feed.watchers.available_permits() < WATCHERS - 1 {
            heard(&mut second).await;
        }
        assert!(Arc::strong_count(&feed) < told, "watchers that left are cleaned up");
    }

    #[tokio::test(start_paused = true)]
    async fn watcher_without_permission_gets_no_more_events() {
        let feed = Feed::start(Arc::new(IdleProgram::default()));
        let (mut sender, mut body) = Channel::<Bytes>::new(1);
        let watcher = feed.watcher().expect("a free slot");
        let sending = tokio::spawn(async move { watcher.send(&mut sender, None, || false).await });
        assert!(heard(&mut body).await.starts_with(b"event: history\n"));
        assert!(body.frame().await.is_none());
        sending.await.expect("no panic");
    }

    #[tokio::test(start_paused = true)]
    async fn feed_is_watched_during_a_subscription_and_after_a_request() {
        let feed = Feed::start(Arc::new(IdleProgram::default()));
        assert!(!feed.is_watched());
        let watcher = feed.watcher();
        assert!(feed.is_watched());
        drop(watcher);
        assert!(!feed.is_watched());
        assert_eq!(feed.newest().await.expect("a reading").live.status.open, 0);
        assert!(feed.is_watched());
    }
}
