//! The control loop, one for `serve` and `forward`: an actor that takes [`Request`]s one after the other, and in between looks after
//! its [`Service`]. Signals are requests like any other.

use std::{
    fmt::Display,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime,
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use turnpike_config::LogFormat;

use crate::{error::DaemonError, logging, service_manager::ServiceManager, signals::Signals};

/// How often the service is looked after. A worker that ended leaves its share of the clients unserved, and the service manager can
/// do more about that than half a server.
const LOOK: Duration = Duration::from_secs(1);
/// How often a drain looks whether the last session is gone.
const DRAIN_POLL: Duration = Duration::from_millis(100);
/// Snapshots may be 100 ms old, so that "no sessions" counts only after that.
const DRAIN_SETTLE: Duration = Duration::from_millis(250);
/// How long the log may take to write what the workers left in its queue.
const LAST_LINES: Duration = Duration::from_secs(5);
/// Requests that may wait; whoever has one more waits with it.
const REQUESTS: usize = 16;

/// What a control loop can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Read the configuration again.
    Reload,
    /// Take nothing new, and end with the last session, after at most so long: `None` is what the configuration says. Asked for
    /// again, end at once.
    Drain(Option<Duration>),
}

/// What runs, and knows how to do what is asked for. Dropping it ends all sessions and joins the workers.
pub(crate) trait Service: Send + 'static {
    /// What [`Service::open`] counts.
    const OPEN: &'static str;

    /// Reads the configuration again; a broken one changes nothing, and is told. Whether it was taken.
    fn reload(&mut self) -> bool;
    /// Called each second.
    fn look(&mut self) {}
    /// Whether a worker has ended though nobody stopped it.
    fn has_failed(&self) -> bool;
    /// What the configuration allows for [`Request::Drain`].
    fn patience(&self) -> Duration;
    /// Takes nothing new from now on, and says so.
    fn drain(&mut self, patience: Duration);
    /// Whether all workers have taken commands since the last call of this.
    fn makes_progress(&self) -> bool;
    /// Sessions and connections now.
    fn open(&self) -> u64;
    /// Says that so many are ended.
    fn say_left(&self, open: u64);
}

/// What is told of the control loop, on the admin page.
#[derive(Debug, Default)]
pub(crate) struct Status {
    draining: AtomicBool,
    reloaded: AtomicU64,
    refused: AtomicU64,
}

impl Status {
    /// Whether nothing new is taken any more.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The same, for who knows nothing of this loop.
    pub(crate) fn draining(self: &Arc<Self>) -> Arc<dyn Fn() -> bool + Send + Sync> {
        let status = Arc::clone(self);
        Arc::new(move || status.is_draining())
    }

    pub(crate) fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Reloads by result.
    pub(crate) fn reloads(&self) -> [(&'static str, u64); 2] {
        [("loaded", &self.reloaded), ("failed", &self.refused)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    fn count_reload(&self, taken: bool) {
        let count = if taken { &self.reloaded } else { &self.refused };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs what `start` starts until a signal ends it. `start` gets what the admin page is to tell, and gives back the service and the
/// task that writes its log.
pub(crate) fn run<S: Service>(
    (level, format): (&str, LogFormat),
    start: impl AsyncFnOnce(&Arc<Status>) -> Result<(S, JoinHandle<()>), DaemonError>,
) -> Result<(), DaemonError> {
    logging::init(level, format);
    let runtime =
        runtime::Builder::new_current_thread().enable_all().build().map_err(DaemonError::Control)?;
    runtime.block_on(async {
        // Before anything else, so that no signal finds its default action while sessions exist.
        let signals = Signals::new().map_err(DaemonError::Control)?;
        tracing::info!("turnpike {}", env!("CARGO_PKG_VERSION"));
        let status = Arc::<Status>::default();
        let (mut service, log) = start(&status).await?;
        let (sender, mut requests) = mpsc::channel(REQUESTS);
        tokio::spawn(signals.pass_on(sender));
        let mut manager = ServiceManager::of_this_process();
        manager.ready();
        let failed = until_ended(&mut service, &status, &mut manager, &mut requests).await;
        status.set_draining();
        // Joins threads, and the log must be written meanwhile.
        if tokio::task::spawn_blocking(move || drop(service)).await.is_err() {
            tracing::warn!("the workers did not stop in order");
        }
        // With the workers gone the log has no more writers, and ends when it is empty.
        let _ = timeout(LAST_LINES, log).await;
        tracing::info!("stopped");
        if failed { Err(DaemonError::Worker) } else { Ok(()) }
    })
}

/// Does what is asked for until the end; whether that came by a worker that failed.
async fn until_ended<S: Service>(
    service: &mut S,
    status: &Status,
    manager: &mut ServiceManager,
    requests: &mut mpsc::Receiver<Request>,
) -> bool {
    let mut draining: Option<(Instant, Duration)> = None;
    loop {
        let pause = match draining {
            None => LOOK,
            Some((since, patience)) => {
                let left = patience.saturating_sub(since.elapsed());
                if left.is_zero() || since.elapsed() >= DRAIN_SETTLE && service.open() == 0 {
                    break;
                }
                DRAIN_POLL.min(left)
            }
        };
        let does = if draining.is_some() { "draining" } else { "serving" };
        manager.look(|| service.makes_progress(), || format!("{does}; {}: {}", S::OPEN, service.open()));
        let request = tokio::select! {
            request = requests.recv() => request,
            () = sleep(pause.min(manager.pause())) => {
                if draining.is_none() {
                    service.look();
                }
                if service.has_failed() {
                    return true;
                }
                continue;
            }
        };
        match (request, draining) {
            (Some(Request::Reload), None) => {
                manager.reloading();
                let taken = service.reload();
                manager.reloaded(taken);
                status.count_reload(taken);
            }
            (Some(Request::Reload), Some(_)) => tracing::warn!("no reload while draining"),
            (Some(Request::Drain(patience)), None) => {
                let patience = patience.unwrap_or_else(|| service.patience());
                status.set_draining();
                manager.stopping(patience);
                service.drain(patience);
                draining = Some((Instant::now(), patience));
            }
            (Some(Request::Drain(_)), Some(_)) => {
                tracing::warn!("second signal: stopping at once");
                break;
            }
            // Nobody is left who could ask for anything.
            (None, _) => break,
        }
    }
    let open = service.open();
    if open > 0 {
        service.say_left(open);
    }
    false
}

/// Sentences for the log.
pub(crate) fn say_warnings(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

/// Says why a reload changes nothing: of a configuration one line a mistake.
pub(crate) fn say_refused(error: &dyn Display, refused: &str) {
    for line in error.to_string().lines() {
        tracing::error!("{line}");
    }
    tracing::error!("{refused}");
}

/// Says which keys a reload cannot change.
pub(crate) fn say_unchangeable(keys: &[&str]) {
    for key in keys {
        tracing::warn!("{key} has changed, but takes effect only after a restart");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// What was asked of it, in order; `open` sessions, one of which ends each time that somebody looks.
    #[derive(Default)]
    struct Recorder {
        said: Mutex<Vec<String>>,
        open: AtomicU64,
        failed: bool,
        good: bool,
    }

    impl Recorder {
        fn say(&self, what: impl Into<String>) {
            self.said.lock().expect("no panic").push(what.into());
        }
    }

    impl Service for Recorder {
        const OPEN: &'static str = "sessions";

        fn reload(&mut self) -> bool {
            self.say("reload");
            self.good
        }
        fn has_failed(&self) -> bool {
            self.failed
        }
        fn patience(&self) -> Duration {
            Duration::from_secs(30)
        }
        fn drain(&mut self, patience: Duration) {
            self.say(format!("drain {}", patience.as_secs()));
        }
        fn makes_progress(&self) -> bool {
            true
        }
        fn open(&self) -> u64 {
            let next = |open: u64| Some(open.saturating_sub(1));
            self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).expect("always some")
        }
        fn say_left(&self, open: u64) {
            self.say(format!("left {open}"));
        }
    }

    /// What it does with these requests, the time that passes in between being tokio's.
    async fn told(mut service: Recorder, requests: &[Request]) -> (bool, Vec<String>, Status) {
        let (sender, mut receiver) = mpsc::channel(REQUESTS);
        for request in requests {
            sender.send(*request).await.expect("there is room");
        }
        let status = Status::default();
        let mut manager = ServiceManager::of_this_process();
        let failed = until_ended(&mut service, &status, &mut manager, &mut receiver).await;
        drop(sender);
        (failed, service.said.into_inner().expect("no panic"), status)
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_with_the_last_session() {
        let service = Recorder { open: 9.into(), ..Recorder::default() };
        let (failed, said, status) = told(service, &[Request::Drain(None)]).await;
        assert_eq!((failed, said), (false, vec!["drain 30".to_owned()]));
        assert!(status.is_draining());
    }

    #[tokio::test(start_paused = true)]
    async fn the_patience_of_a_drain_ends_and_a_second_one_has_none() {
        for (requests, drain) in [
            (&[Request::Drain(None)][..], "drain 30"),
            (&[Request::Drain(None), Request::Drain(None)], "drain 30"),
            (&[Request::Drain(Some(Duration::ZERO))], "drain 0"),
        ] {
            let service = Recorder { open: 1_000_000.into(), ..Recorder::default() };
            let begun = Instant::now();
            let (failed, said, _) = told(service, requests).await;
            assert!(
                !failed && said.len() == 2 && said[0] == drain && said[1].starts_with("left "),
                "{said:?}"
            );
            assert_eq!(begun.elapsed() >= Duration::from_secs(30), requests == [Request::Drain(None)]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reloads_are_counted_by_result_and_refused_while_draining() {
        let all = [Request::Reload, Request::Reload, Request::Drain(None), Request::Reload];
        let (_, said, status) = told(Recorder { good: true, ..Recorder::default() }, &all).await;
        assert_eq!(said, ["reload", "reload", "drain 30"]);
        assert_eq!(status.reloads(), [("loaded", 2), ("failed", 0)]);
        let (_, _, status) = told(Recorder::default(), &all).await;
        assert_eq!(status.reloads(), [("loaded", 0), ("failed", 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_ends_by_itself_ends_the_service_draining_or_not() {
        for requests in [&[][..], &[Request::Drain(None)]] {
            let service = Recorder { failed: true, open: 1_000_000.into(), ..Recorder::default() };
            assert!(told(service, requests).await.0, "{requests:?}");
        }
    }
}
