//! The control loop, one for `serve` and `forward`: an actor that takes [`Request`]s one after the other, and in between looks after
//! its [`Service`]. Signals are requests like any other.

use std::{
    fmt::Display,
    future,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime,
    sync::mpsc,
    task::{self, JoinHandle},
    time::{Instant, sleep, timeout},
};
use turnpike_config::LogFormat;

use crate::{
    carried_metrics::CarriedMetrics,
    error::DaemonError,
    logging,
    signals::Signals,
    upgrade::{self, Door, Estate, Patience, Program, Successor},
};

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
#[derive(Debug)]
pub(crate) enum Request {
    /// Read the configuration again.
    Reload,
    /// Take nothing new, and end with the last session, after at most so long: `None` is what the configuration says. Asked for
    /// again, end at once.
    Drain(Option<Duration>),
    /// Go on in a new process.
    Upgrade(Asked),
}

/// Who asks for an upgrade, and of what.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// The program to be started; this one's own where none is named.
    pub(crate) program: Option<PathBuf>,
    /// Who hears of each step, beside the log.
    pub(crate) told: Option<mpsc::UnboundedSender<Told>>,
}

/// What comes of an upgrade: steps, and then how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Step(String),
    Done(String),
    Failed(String),
}

impl Asked {
    fn tell(&self, told: Told) {
        match &told {
            Told::Step(text) | Told::Done(text) => tracing::info!("upgrade: {text}"),
            Told::Failed(why) => tracing::error!("not upgraded, all goes on as before: {why}"),
        }
        if let Some(listening) = &self.told {
            let _ = listening.send(told);
        }
    }
}

/// What runs, and knows how to do what is asked for. Dropping it ends all sessions and joins the workers.
pub(crate) trait Service: Send + 'static {
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
    /// Sessions and connections now.
    fn open(&self) -> u64;
    /// Says that so many are ended.
    fn say_left(&self, open: u64);
    /// What goes to a new process.
    fn estate(&self) -> Arc<dyn Estate>;
    /// What the admin page shows.
    fn metrics(&self) -> String;
    /// What the configuration allows to what an upgrade has left here.
    fn patience_after_upgrade(&self) -> Duration;
    /// Another process serves from now on. What has not gone lives on here, for at most so long.
    fn handed_over(&mut self, patience: Duration);
    /// What lives on here: sessions, connections and whatever else a client has.
    fn left(&self) -> u64;
}

/// What is told of the control loop, on the admin page.
#[derive(Debug, Default)]
pub(crate) struct Status {
    draining: AtomicBool,
    reloaded: AtomicU64,
    refused: AtomicU64,
    upgraded: AtomicU64,
    not_upgraded: AtomicU64,
    carried: Arc<CarriedMetrics>,
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

    pub(crate) fn reloads(&self) -> [(&'static str, u64); 2] {
        [("loaded", &self.reloaded), ("failed", &self.refused)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    pub(crate) fn upgrades(&self) -> [(&'static str, u64); 2] {
        [("done", &self.upgraded), ("failed", &self.not_upgraded)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }

    /// What the process has counted whose place this one took, if there was one.
    pub(crate) fn carried(&self) -> &Arc<CarriedMetrics> {
        &self.carried
    }

    fn count_upgrade(&self, done: bool) {
        let count = if done { &self.upgraded } else { &self.not_upgraded };
        count.fetch_add(1, Ordering::Relaxed);
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
        let door = Door::open(sender.clone());
        tokio::spawn(signals.pass_on(sender));
        let failed = until_ended(&mut service, &status, &mut requests, door).await;
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

/// How far the service has come.
enum Stage {
    Serving,
    /// A new process is about to take over, unless that fails.
    Upgrading(Upgrading),
    Draining(Until),
    /// Another process serves; this one has what has stayed.
    HandedOver(Successor, Until),
}

struct Upgrading {
    asked: Arc<Asked>,
    ended: JoinHandle<Upgraded>,
    called_off: Arc<AtomicBool>,
    /// Asked for meanwhile.
    drain: Option<Option<Duration>>,
}

/// Who serves now, with a sentence about it; or why nobody else does.
type Upgraded = Result<(Successor, String), String>;

/// A time that ends; what is waited for may end before.
#[derive(Clone, Copy)]
struct Until {
    since: Instant,
    patience: Duration,
}

impl Until {
    fn new(patience: Duration) -> Self {
        Self { since: Instant::now(), patience }
    }

    fn left(&self) -> Duration {
        self.patience.saturating_sub(self.since.elapsed())
    }

    /// Whether nothing is left of the time, or of what it was given to.
    fn is_over(&self, open: impl FnOnce() -> u64) -> bool {
        self.left().is_zero() || self.since.elapsed() >= DRAIN_SETTLE && open() == 0
    }
}

impl Upgrading {
    fn begin(service: &impl Service, asked: Asked) -> Self {
        let (asked, called_off) = (Arc::new(asked), Arc::<AtomicBool>::default());
        let (asking, stop, estate) = (Arc::clone(&asked), Arc::clone(&called_off), service.estate());
        let ended = task::spawn_blocking(move || {
            let program = Program::find(asking.program.as_deref())?;
            let say = |text: String| asking.tell(Told::Step(text));
            upgrade::hand_over(&*estate, &program, Patience::default(), &stop, &say)
        });
        Self { asked, ended, called_off, drain: None }
    }

    fn conclude(&self, ended: Upgraded, service: &mut impl Service, status: &Status) -> Stage {
        status.count_upgrade(ended.is_ok());
        match ended {
            Ok((successor, how)) => {
                let patience = service.patience_after_upgrade();
                service.handed_over(patience);
                self.asked.tell(Told::Done(how));
                Stage::HandedOver(successor, Until::new(patience))
            }
            Err(why) => {
                self.asked.tell(Told::Failed(why));
                Stage::Serving
            }
        }
    }
}

impl Stage {
    /// Waits for the end of an upgrade, for ever where there is none.
    async fn upgraded(&mut self) -> Upgraded {
        match self {
            Self::Upgrading(upgrading) => {
                (&mut upgrading.ended).await.unwrap_or_else(|panic| Err(panic.to_string()))
            }
            _ => future::pending().await,
        }
    }

    /// Why there is neither a reload nor an upgrade now.
    fn obstacle(&self) -> String {
        match self {
            Self::Serving => "now".to_owned(),
            Self::Upgrading(_) => "during an upgrade".to_owned(),
            Self::Draining(_) => "while draining".to_owned(),
            Self::HandedOver(successor, _) => format!("here: process {} serves now", successor.id()),
        }
    }
}

fn drain(service: &mut impl Service, status: &Status, patience: Option<Duration>) -> Until {
    let patience = patience.unwrap_or_else(|| service.patience());
    status.set_draining();
    service.drain(patience);
    Until::new(patience)
}

/// Does what is asked for until the end; whether that came by a worker that failed. `door` is open for as long as this process can be
/// upgraded.
async fn until_ended(
    service: &mut impl Service,
    status: &Status,
    requests: &mut mpsc::Receiver<Request>,
    mut door: Option<Door>,
) -> bool {
    let mut stage = Stage::Serving;
    loop {
        let pause = match &mut stage {
            Stage::Serving | Stage::Upgrading(_) => LOOK,
            Stage::Draining(until) => {
                if until.is_over(|| service.open()) {
                    break;
                }
                DRAIN_POLL.min(until.left())
            }
            Stage::HandedOver(successor, until) => {
                // The process before this one may need it to reach its clients.
                if until.is_over(|| service.left() + u64::from(status.carried.lives())) {
                    break;
                }
                successor.tell(service.metrics());
                LOOK.min(until.left())
            }
        };
        let request = tokio::select! {
            request = requests.recv() => request,
            ended = stage.upgraded() => {
                // To be obeyed by whoever is left now.
                let drain = if let Stage::Upgrading(upgrading) = stage {
                    stage = upgrading.conclude(ended, service, status);
                    upgrading.drain
                } else {
                    None
                };
                if matches!(stage, Stage::HandedOver(..)) {
                    drop(door.take());
                }
                let Some(patience) = drain else { continue };
                Some(Request::Drain(patience))
            }
            () = sleep(pause) => {
                if matches!(stage, Stage::Serving) {
                    service.look();
                }
                // One that is stuck while it hands over fails the upgrade first.
                if !matches!(stage, Stage::Upgrading(_)) && service.has_failed() {
                    return true;
                }
                continue;
            }
        };
        let Some(request) = request else {
            // Nobody is left who could ask for anything.
            break;
        };
        stage = match (request, stage) {
            (Request::Reload, Stage::Serving) => {
                status.count_reload(service.reload());
                Stage::Serving
            }
            (Request::Reload, stage) => {
                tracing::warn!("no reload {}", stage.obstacle());
                stage
            }
            (Request::Upgrade(asked), Stage::Serving) => Stage::Upgrading(Upgrading::begin(service, asked)),
            (Request::Upgrade(asked), stage) => {
                asked.tell(Told::Failed(format!("no upgrade {}", stage.obstacle())));
                stage
            }
            (Request::Drain(patience), Stage::Serving) => Stage::Draining(drain(service, status, patience)),
            (Request::Drain(patience), Stage::Upgrading(upgrading)) if upgrading.drain.is_none() => {
                upgrading.called_off.store(true, Ordering::Relaxed);
                Stage::Upgrading(Upgrading { drain: Some(patience), ..upgrading })
            }
            (Request::Drain(patience), Stage::HandedOver(successor, _)) if !status.is_draining() => {
                Stage::HandedOver(successor, drain(service, status, patience))
            }
            (Request::Drain(_), last) => {
                tracing::warn!("second signal: stopping at once");
                stage = last;
                break;
            }
        };
    }
    let open = match &mut stage {
        Stage::HandedOver(successor, _) => {
            successor.tell(service.metrics());
            service.left()
        }
        _ => service.open(),
    };
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
    use std::{io, sync::Mutex};

    use turnpike_net::Channel;

    use super::*;
    use crate::upgrade::Offered;

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
        fn open(&self) -> u64 {
            let next = |open: u64| Some(open.saturating_sub(1));
            self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).expect("always some")
        }
        fn say_left(&self, open: u64) {
            self.say(format!("left {open}"));
        }
        fn estate(&self) -> Arc<dyn Estate> {
            Arc::new(Nothing)
        }
        fn metrics(&self) -> String {
            String::new()
        }
        fn patience_after_upgrade(&self) -> Duration {
            Duration::from_secs(60)
        }
        fn handed_over(&mut self, patience: Duration) {
            self.say(format!("handed over {}", patience.as_secs()));
        }
        fn left(&self) -> u64 {
            self.open()
        }
    }

    /// An estate for those who do not come to have it.
    struct Nothing;

    impl Estate for Nothing {
        fn service(&self) -> &'static str {
            "serve"
        }
        fn offer(&self) -> io::Result<Offered> {
            Offered::new(&(), Vec::new(), Vec::new())
        }
        fn freeze(&self) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn hand_over(&self, _: Vec<Channel>, _: Duration) -> io::Result<usize> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn thaw(&self) {}
        fn release(&self) {}
        fn metrics(&self) -> String {
            String::new()
        }
    }

    /// What it does with these requests, the time that passes in between being tokio's.
    async fn told(
        mut service: Recorder,
        requests: impl IntoIterator<Item = Request>,
    ) -> (bool, Vec<String>, Status) {
        let (sender, mut receiver) = mpsc::channel(REQUESTS);
        for request in requests {
            sender.send(request).await.expect("there is room");
        }
        let status = Status::default();
        let failed = until_ended(&mut service, &status, &mut receiver, None).await;
        drop(sender);
        (failed, service.said.into_inner().expect("no panic"), status)
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_with_the_last_session() {
        let service = Recorder { open: 9.into(), ..Recorder::default() };
        let (failed, said, status) = told(service, [Request::Drain(None)]).await;
        assert_eq!((failed, said), (false, vec!["drain 30".to_owned()]));
        assert!(status.is_draining());
    }

    #[tokio::test(start_paused = true)]
    async fn the_patience_of_a_drain_ends_and_a_second_one_has_none() {
        for (requests, drain, is_patient) in [
            (vec![Request::Drain(None)], "drain 30", true),
            (vec![Request::Drain(None), Request::Drain(None)], "drain 30", false),
            (vec![Request::Drain(Some(Duration::ZERO))], "drain 0", false),
        ] {
            let service = Recorder { open: 1_000_000.into(), ..Recorder::default() };
            let begun = Instant::now();
            let (failed, said, _) = told(service, requests).await;
            assert!(
                !failed && said.len() == 2 && said[0] == drain && said[1].starts_with("left "),
                "{said:?}"
            );
            assert_eq!(begun.elapsed() >= Duration::from_secs(30), is_patient);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reloads_are_counted_by_result_and_refused_while_draining() {
        let all = || [Request::Reload, Request::Reload, Request::Drain(None), Request::Reload];
        let (_, said, status) = told(Recorder { good: true, ..Recorder::default() }, all()).await;
        assert_eq!(said, ["reload", "reload", "drain 30"]);
        assert_eq!(status.reloads(), [("loaded", 2), ("failed", 0)]);
        let (_, _, status) = told(Recorder::default(), all()).await;
        assert_eq!(status.reloads(), [("loaded", 0), ("failed", 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_ends_by_itself_ends_the_service_draining_or_not() {
        for requests in [None, Some(Request::Drain(None))] {
            let service = Recorder { failed: true, open: 1_000_000.into(), ..Recorder::default() };
            let what = format!("{requests:?}");
            assert!(told(service, requests).await.0, "{what}");
        }
    }

    fn upgrade_to(program: &str) -> (Request, mpsc::UnboundedReceiver<Told>) {
        let (sender, told) = mpsc::unbounded_channel();
        (Request::Upgrade(Asked { program: Some(program.into()), told: Some(sender) }), told)
    }

    #[tokio::test(start_paused = true)]
    async fn an_upgrade_that_fails_is_told_and_all_goes_on() {
        let (request, mut steps) = upgrade_to("/bin/false");
        let requests = [request, Request::Reload, Request::Drain(None)];
        let (failed, said, status) = told(Recorder::default(), requests).await;
        // What was asked for meanwhile is done afterwards, but for the reload.
        assert_eq!((failed, said), (false, vec!["drain 30".to_owned()]));
        assert_eq!(status.upgrades(), [("done", 0), ("failed", 1)]);
        let mut last = None;
        while let Some(step) = steps.recv().await {
            last = Some(step);
        }
        assert!(matches!(last, Some(Told::Failed(_))), "{last:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_drains_is_not_upgraded() {
        let (request, mut steps) = upgrade_to("/bin/false");
        let (_, said, status) = told(Recorder::default(), [Request::Drain(None), request]).await;
        assert_eq!(said, ["drain 30"]);
        assert_eq!(steps.recv().await, Some(Told::Failed("no upgrade while draining".to_owned())));
        assert_eq!(steps.recv().await, None);
        // It was never begun.
        assert_eq!(status.upgrades(), [("done", 0), ("failed", 0)]);
    }
}
