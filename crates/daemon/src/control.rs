//! The control loop, one for `serve` and `forward`: an actor that takes [`Request`]s one after the other, and in between looks after
//! its [`Service`]. Signals are requests like any other, and so is what an administrator asks for.

use std::{
    fmt::Display,
    future,
    ops::ControlFlow,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime,
    sync::{Notify, mpsc, oneshot},
    task::{self, JoinHandle},
    time::{Instant, sleep, timeout},
};
use turnpike_api::{Draining, NotReloaded, Reloaded};
use turnpike_config::LogFormat;

use crate::{
    carried_metrics::CarriedMetrics,
    error::DaemonError,
    logging,
    own_addresses::News,
    sandbox,
    service_manager::ServiceManager,
    signals,
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
/// How long a reload may take to end once the program is to end.
const GRACE: Duration = Duration::from_secs(1);
/// How long a service may take to say goodbye to others: longer than each part of that has, changes at work and a fleet.
const GOODBYE: Duration = Duration::from_secs(6);
/// Requests that may wait; whoever has one more waits with it.
const REQUESTS: usize = 16;

/// What a control loop can be asked for.
#[derive(Debug)]
pub(crate) enum Request {
    /// Read the configuration again; whoever wants to know is told what came of it.
    Reload(Option<oneshot::Sender<Result<Reloaded, NotReloaded>>>),
    /// Take nothing new, and end with the last session, after at most so long: `None` is what the configuration says. Asked for
    /// again, end at once.
    Drain(Option<Duration>),
    /// The same; asked for again, a time counts anew, and no time changes nothing.
    DrainWithin(Option<Duration>, oneshot::Sender<Draining>),
    /// Go on in a new process.
    Upgrade(Asked),
    /// Addresses or routes of this machine may have changed.
    MachineChanged,
}

/// Warns in the log and in the answer to a reload.
pub(crate) fn warn(reloaded: &mut Reloaded, warning: impl Into<String>) {
    let warning = warning.into();
    tracing::warn!("{warning}");
    reloaded.warnings.push(warning);
}

/// Names keys that a reload cannot change.
pub(crate) fn need_restart(reloaded: &mut Reloaded, keys: &[&str]) {
    for key in keys {
        tracing::warn!("{key} has changed, but takes effect only after a restart");
        reloaded.after_restart.push((*key).to_owned());
    }
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
    /// What [`Service::open`] counts.
    const OPEN: &'static str;

    /// Reads the configuration again; a broken one changes nothing, and is told line by line.
    fn reload(&mut self) -> impl Future<Output = Result<Reloaded, Vec<String>>>;
    /// Called each second.
    fn look(&mut self) {}
    /// Addresses or routes of this machine may have changed.
    fn machine_changed(&mut self) {}
    /// Follows what has changed; called each second and after each change, but not during an upgrade.
    fn follow_machine(&mut self, _is_serving: bool) {}
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
    /// Says goodbye to other programs, before it is dropped.
    fn leave(&mut self) -> impl Future<Output = ()> {
        async {}
    }
}

/// Wish of a signal that the program end, for whatever waits for others meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    is_asked: Arc<AtomicBool>,
    notify: Notify,
}

impl Stop {
    /// Ends all waits from now on.
    pub(crate) fn ask(&self) {
        self.is_asked.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Acquire)
    }

    /// The same, for threads.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_asked)
    }

    async fn asked(&self) {
        // Registered before the flag is read, so that no call of `ask` is missed.
        let notified = self.notify.notified();
        if !self.is_asked() {
            notified.await;
        }
    }
}

/// What is told of the control loop.
#[derive(Debug, Default)]
pub(crate) struct Status {
    stop: Arc<Stop>,
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

    pub(crate) fn stop(&self) -> &Arc<Stop> {
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

    /// Counters of the previous process, if there was one.
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

/// The way to a control loop.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    requests: mpsc::Sender<Request>,
    status: Arc<Status>,
}

impl Control {
    fn new() -> (Self, mpsc::Receiver<Request>) {
        let (requests, received) = mpsc::channel(REQUESTS);
        (Self { requests, status: Arc::default() }, received)
    }

    /// Has the configuration read again.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub(crate) async fn reload(&self) -> Result<Reloaded, NotReloaded> {
        let (sender, answer) = oneshot::channel();
        let _ = self.requests.send(Request::Reload(Some(sender))).await;
        // Nobody answers any more in a program that has ended its loop.
        answer.await.unwrap_or(Err(NotReloaded::Draining))
    }

    /// Has the program take nothing new and end with its last session or connection, after `patience` at the latest, which is what
    /// the configuration says if it is `None`. Asked for again, a patience counts anew. `None` if the program ends already.
    pub(crate) async fn drain(&self, patience: Option<Duration>) -> Option<Draining> {
        let (sender, answer) = oneshot::channel();
        let _ = self.requests.send(Request::DrainWithin(patience, sender)).await;
        answer.await.ok()
    }

    /// Passes on that this machine has changed, until the program ends.
    pub(crate) async fn follow_machine(self, mut news: News) {
        while self.requests.send(Request::MachineChanged).await.is_ok() {
            news.next().await;
        }
    }

    /// Whether nothing new is taken any more.
    pub(crate) fn is_draining(&self) -> bool {
        self.status.is_draining()
    }

    pub(crate) fn status(&self) -> &Arc<Status> {
        &self.status
    }
}

/// Runs what `start` starts until a signal ends it. `start` gets the way to this loop, and gives back the service and the task that
/// writes its log.
pub(crate) fn run<S: Service>(
    (level, format): (&str, LogFormat),
    start: impl AsyncFnOnce(&Control) -> Result<(S, JoinHandle<()>), DaemonError>,
) -> Result<(), DaemonError> {
    logging::init(level, format);
    let runtime =
        runtime::Builder::new_current_thread().enable_all().build().map_err(DaemonError::Control)?;
    let ended = runtime.block_on(async {
        let (control, mut requests) = Control::new();
        let stop = Arc::clone(&control.status.stop);
        // Before anything else, so that no signal finds its default action while sessions exist.
        signals::pass_on(control.requests.clone(), Arc::clone(&stop)).map_err(DaemonError::Control)?;
        tracing::info!("turnpike {}", env!("CARGO_PKG_VERSION"));
        // Whoever is told that this process serves may ask it at once.
        let door = Door::open(control.requests.clone());
        let started = tokio::select! {
            biased;
            started = start(&control) => Some(started),
            () = stop.asked() => None,
        };
        // One that was told to do without what it waited for fails.
        let Some(started) = started.filter(|started| started.is_ok() || !stop.is_asked()) else {
            say_stopped();
            return Ok(());
        };
        let (mut service, log) = started?;
        let mut manager = ServiceManager::of_this_process();
        manager.ready();
        let failed = until_ended(&mut service, &control.status, &mut manager, &mut requests, door).await;
        // From now on nobody who asks waits for an answer.
        drop(requests);
        control.status.set_draining();
        let _ = timeout(GOODBYE, service.leave()).await;
        // Joins threads, and the log must be written meanwhile.
        if tokio::task::spawn_blocking(move || drop(service)).await.is_err() {
            tracing::warn!("the workers did not stop in order");
        }
        // With the workers gone the log has no more writers, and ends when it is empty.
        let _ = timeout(LAST_LINES, log).await;
        say_stopped();
        if failed { Err(DaemonError::Worker) } else { Ok(()) }
    });
    // A lookup under way may take half a minute, and its result is no longer needed.
    runtime.shutdown_background();
    ended
}

fn say_stopped() {
    tracing::info!("stopped");
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

    /// Ends it if that can still be, and then takes nothing new.
    fn call_off(self, drain: Option<Duration>) -> Self {
        self.called_off.store(true, Ordering::Relaxed);
        Self { drain: Some(drain), ..self }
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

    /// How long it is until this is asked again; `None` at the end.
    fn pause(&mut self, service: &impl Service, status: &Status) -> Option<Duration> {
        match self {
            Self::Serving | Self::Upgrading(_) => Some(LOOK),
            Self::Draining(until) => {
                if until.is_over(|| service.open()) {
                    return None;
                }
                Some(DRAIN_POLL.min(until.left()))
            }
            Self::HandedOver(successor, until) => {
                // The process before this one may need it to reach its clients.
                if until.is_over(|| service.left() + u64::from(status.carried.lives())) {
                    return None;
                }
                successor.tell(service.metrics());
                Some(LOOK.min(until.left()))
            }
        }
    }

    /// Has the service follow the machine. During an upgrade sockets are on their way.
    fn follow_machine(&self, service: &mut impl Service) {
        if !matches!(self, Self::Upgrading(_)) {
            service.follow_machine(matches!(self, Self::Serving));
        }
    }

    /// What the service does.
    fn name(&self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Upgrading(_) => "upgrading",
            Self::Draining(_) => "draining",
            Self::HandedOver(..) => "handed over",
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

    /// The same, to whoever has asked for a reload.
    fn refuses_reload(&self) -> NotReloaded {
        tracing::warn!("no reload {}", self.obstacle());
        if matches!(self, Self::Draining(_)) { NotReloaded::Draining } else { NotReloaded::Upgrade }
    }
}

/// Does what is asked for until the end; whether that came by a worker that failed. `door` is open for as long as this process can be
/// upgraded.
async fn until_ended<S: Service>(
    service: &mut S,
    status: &Status,
    manager: &mut ServiceManager,
    requests: &mut mpsc::Receiver<Request>,
    mut door: Option<Door>,
) -> bool {
    let mut stage = Stage::Serving;
    while let Some(pause) = stage.pause(service, status) {
        let does = stage.name();
        manager.look(|| service.makes_progress(), || format!("{does}; {}: {}", S::OPEN, service.open()));
        let request = tokio::select! {
            request = requests.recv() => request,
            ended = stage.upgraded() => {
                // What was asked for meanwhile is for whoever is left now.
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
            () = sleep(pause.min(manager.pause())) => {
                if matches!(stage, Stage::Serving) {
                    service.look();
                }
                stage.follow_machine(service);
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
        match carry_out(request, stage, service, status, manager).await {
            ControlFlow::Continue(next) => stage = next,
            ControlFlow::Break(last) => {
                stage = last;
                break;
            }
        }
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

/// Does what is asked for, and tells the stage after it; `Break` where that is the end.
async fn carry_out(
    request: Request,
    stage: Stage,
    service: &mut impl Service,
    status: &Status,
    manager: &mut ServiceManager,
) -> ControlFlow<Stage, Stage> {
    let next = match (request, stage) {
        (Request::Reload(answer), stage) => {
            let result = match &stage {
                Stage::Serving => reload(service, status, manager).await,
                stage => Err(stage.refuses_reload()),
            };
            if let Some(answer) = answer {
                // Who has gone meanwhile reads it in the log.
                let _ = answer.send(result);
            }
            stage
        }
        (Request::MachineChanged, stage) => {
            service.machine_changed();
            stage.follow_machine(service);
            stage
        }
        (Request::Upgrade(asked), Stage::Serving) => Stage::Upgrading(Upgrading::begin(service, asked)),
        (Request::Upgrade(asked), stage) => {
            asked.tell(Told::Failed(format!("no upgrade {}", stage.obstacle())));
            stage
        }
        (Request::Drain(patience), Stage::Serving) => {
            Stage::Draining(drain(service, status, manager, patience))
        }
        (Request::Drain(patience), Stage::Upgrading(upgrading)) if upgrading.drain.is_none() => {
            Stage::Upgrading(upgrading.call_off(patience))
        }
        (Request::Drain(patience), Stage::HandedOver(successor, _)) if !status.is_draining() => {
            Stage::HandedOver(successor, drain(service, status, manager, patience))
        }
        (Request::Drain(_), last) => {
            tracing::warn!("second signal: stopping at once");
            return ControlFlow::Break(last);
        }
        (Request::DrainWithin(wanted, answer), stage) => {
            let (stage, until) = drain_within(service, status, manager, wanted, stage);
            let _ = answer.send(Draining { open: service.open(), deadline_s: until.left().as_secs_f64() });
            stage
        }
    };
    ControlFlow::Continue(next)
}

async fn reload(
    service: &mut impl Service,
    status: &Status,
    manager: &mut ServiceManager,
) -> Result<Reloaded, NotReloaded> {
    manager.reloading();
    let result = tokio::select! {
        biased;
        result = manager.stay_alive_for(service.reload()) => result.map_err(NotReloaded::Refused),
        // It has changed nothing yet: what it waits for comes before its changes. One that waits in a thread hears of the wish itself.
        () = async { status.stop.asked().await; sleep(GRACE).await } => Err(NotReloaded::Draining),
    };
    manager.reloaded(result.is_ok());
    status.count_reload(result.is_ok());
    result
}

fn drain(
    service: &mut impl Service,
    status: &Status,
    manager: &ServiceManager,
    patience: Option<Duration>,
) -> Until {
    let patience = patience.unwrap_or_else(|| service.patience());
    status.set_draining();
    manager.stopping(patience);
    service.drain(patience);
    Until::new(patience)
}

/// As an administrator asks for it: what is under way goes on, and has another end if one is `wanted`. An upgrade is called off first.
fn drain_within(
    service: &mut impl Service,
    status: &Status,
    manager: &ServiceManager,
    wanted: Option<Duration>,
    stage: Stage,
) -> (Stage, Until) {
    let again = |going: Until| match wanted {
        Some(patience) => {
            manager.stopping(patience);
            Until::new(patience)
        }
        None => going,
    };
    match stage {
        Stage::Draining(going) => {
            let until = again(going);
            (Stage::Draining(until), until)
        }
        Stage::HandedOver(successor, going) if status.is_draining() => {
            let until = again(going);
            (Stage::HandedOver(successor, until), until)
        }
        Stage::HandedOver(successor, _) => {
            let until = drain(service, status, manager, wanted);
            (Stage::HandedOver(successor, until), until)
        }
        Stage::Serving => {
            let until = drain(service, status, manager, wanted);
            (Stage::Draining(until), until)
        }
        Stage::Upgrading(upgrading) => {
            // It begins once the upgrade has ended.
            let until = Until::new(wanted.unwrap_or_else(|| service.patience()));
            (Stage::Upgrading(upgrading.call_off(wanted)), until)
        }
    }
}

/// Sentences for the log.
pub(crate) fn say_warnings(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

/// Says why a reload changes nothing: of a configuration one line a mistake, which it gives back.
pub(crate) fn say_refused(error: &dyn Display, refused: &str) -> Vec<String> {
    let error = error.to_string();
    let lines: Vec<String> = error.lines().map(str::to_owned).chain(sandbox::remedy(&error)).collect();
    for line in &lines {
        tracing::error!("{line}");
    }
    tracing::error!("{refused}");
    lines
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
        /// A reload never ends.
        waits: bool,
    }

    impl Recorder {
        fn say(&self, what: impl Into<String>) {
            self.said.lock().expect("no panic").push(what.into());
        }
    }

    impl Service for Recorder {
        const OPEN: &'static str = "sessions";

        async fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
            self.say("reload");
            if self.waits {
                return future::pending().await;
            }
            if self.good { Ok(Reloaded::default()) } else { Err(vec!["line 1".to_owned()]) }
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
        fn freeze(&self, _: bool) -> io::Result<()> {
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
    ) -> (bool, Vec<String>, Arc<Status>) {
        let (control, mut receiver) = Control::new();
        for request in requests {
            control.requests.send(request).await.expect("there is room");
        }
        let mut manager = ServiceManager::of_this_process();
        let failed = until_ended(&mut service, &control.status, &mut manager, &mut receiver, None).await;
        (failed, service.said.into_inner().expect("no panic"), control.status)
    }

    /// The same, while `ask` asks.
    async fn asked<T>(
        mut service: Recorder,
        ask: impl AsyncFnOnce(&Control) -> T,
    ) -> (T, Vec<String>, Duration) {
        let begun = Instant::now();
        let (control, mut receiver) = Control::new();
        let status = Arc::clone(control.status());
        let mut manager = ServiceManager::of_this_process();
        let (answer, _) = tokio::join!(ask(&control), async {
            until_ended(&mut service, &status, &mut manager, &mut receiver, None).await;
            drop(receiver);
        });
        (answer, service.said.into_inner().expect("no panic"), begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_signal_ends_a_reload_that_waits_for_others() {
        let service = Recorder { good: true, waits: true, ..Recorder::default() };
        let (control, mut receiver) = Control::new();
        let status = Arc::clone(control.status());
        let mut manager = ServiceManager::of_this_process();
        let (reloaded, _) = tokio::join!(
            async {
                let (sender, answer) = oneshot::channel();
                control.requests.send(Request::Reload(Some(sender))).await.expect("there is room");
                sleep(Duration::from_secs(1)).await;
                control.requests.send(Request::Drain(None)).await.expect("there is room");
                status.stop().ask();
                timeout(2 * GRACE, answer).await.expect("soon").expect("an answer")
            },
            async {
                let mut service = service;
                until_ended(&mut service, &status, &mut manager, &mut receiver, None).await;
                assert_eq!(service.said.into_inner().expect("no panic"), ["reload", "drain 30"]);
            },
        );
        assert_eq!(reloaded, Err(NotReloaded::Draining));
        assert_eq!(status.reloads(), [("loaded", 0), ("failed", 1)]);
    }

    #[test]
    fn a_signal_ends_a_start_that_waits_and_names_that_are_being_looked_up() {
        let begun = std::time::Instant::now();
        let started = async |control: &Control| -> Result<(Recorder, JoinHandle<()>), DaemonError> {
            // As getaddrinfo(3) does.
            task::spawn_blocking(|| std::thread::sleep(Duration::from_secs(20)));
            let stop = Arc::clone(control.status().stop());
            tokio::spawn(async move {
                sleep(Duration::from_millis(10)).await;
                stop.ask();
            });
            future::pending().await
        };
        run(("error", LogFormat::Text), started).expect("it is what was asked for");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
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
        for (requests, drain) in
            [(&[None][..], "drain 30"), (&[None, None], "drain 30"), (&[Some(Duration::ZERO)], "drain 0")]
        {
            let service = Recorder { open: 1_000_000.into(), ..Recorder::default() };
            let begun = Instant::now();
            let (failed, said, _) = told(service, requests.iter().copied().map(Request::Drain)).await;
            assert!(
                !failed && said.len() == 2 && said[0] == drain && said[1].starts_with("left "),
                "{said:?}"
            );
            assert_eq!(begun.elapsed() >= Duration::from_secs(30), requests == [None]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reloads_are_counted_by_result_and_refused_while_draining() {
        let all =
            || [Request::Reload(None), Request::Reload(None), Request::Drain(None), Request::Reload(None)];
        let (_, said, status) = told(Recorder { good: true, ..Recorder::default() }, all()).await;
        assert_eq!(said, ["reload", "reload", "drain 30"]);
        assert_eq!(status.reloads(), [("loaded", 2), ("failed", 0)]);
        let (_, _, status) = told(Recorder::default(), all()).await;
        assert_eq!(status.reloads(), [("loaded", 0), ("failed", 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_ends_by_itself_ends_the_service_draining_or_not() {
        for drains in [0, 1] {
            let service = Recorder { failed: true, open: 1_000_000.into(), ..Recorder::default() };
            assert!(told(service, (0..drains).map(|_| Request::Drain(None))).await.0, "{drains}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_a_reload_is_told_what_came_of_it() {
        let ask = async |control: &Control| {
            let first = control.reload().await;
            control.drain(None).await.expect("it begins");
            (first, control.reload().await)
        };
        let good = Recorder { good: true, open: 9.into(), ..Recorder::default() };
        let (told, said, _) = asked(good, ask).await;
        assert_eq!(told, (Ok(Reloaded::default()), Err(NotReloaded::Draining)));
        assert_eq!(said, ["reload", "drain 30"]);
        let bad = Recorder { open: 9.into(), ..Recorder::default() };
        let (told, ..) = asked(bad, ask).await;
        assert_eq!(told.0, Err(NotReloaded::Refused(vec!["line 1".to_owned()])));
    }

    #[tokio::test(start_paused = true)]
    async fn an_administrator_may_ask_for_a_drain_again_and_change_its_end() {
        const HOUR: Duration = Duration::from_secs(3600);
        let busy = || Recorder { open: 1_000_000.into(), ..Recorder::default() };
        let (told, said, lasted) = asked(busy(), async |control| {
            let first = control.drain(None).await.expect("it begins");
            assert!(control.is_draining());
            sleep(Duration::from_secs(10)).await;
            let again = control.drain(None).await.expect("it goes on");
            let longer = control.drain(Some(HOUR)).await.expect("it goes on");
            [first, again, longer].map(|draining| draining.deadline_s)
        })
        .await;
        assert_eq!(told, [30.0, 20.0, HOUR.as_secs_f64()]);
        assert_eq!((said.len(), said[0].as_str()), (2, "drain 30"), "it drains once: {said:?}");
        assert_eq!(lasted, HOUR + Duration::from_secs(10));
        let (told, _, lasted) = asked(busy(), async |control| {
            control.drain(None).await.expect("it begins");
            control.drain(Some(Duration::ZERO)).await.expect("it ends");
            control.drain(None).await
        })
        .await;
        assert_eq!((told, lasted), (None, Duration::ZERO), "nobody waits for a program that has ended");
    }

    fn upgrade_to(program: &str) -> (Request, mpsc::UnboundedReceiver<Told>) {
        let (sender, told) = mpsc::unbounded_channel();
        (Request::Upgrade(Asked { program: Some(program.into()), told: Some(sender) }), told)
    }

    #[tokio::test(start_paused = true)]
    async fn an_upgrade_that_fails_is_told_and_all_goes_on() {
        let (request, mut steps) = upgrade_to("/bin/false");
        let requests = [request, Request::Reload(None), Request::Drain(None)];
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
