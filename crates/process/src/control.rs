//! Control loop: an actor that carries out one [`Request`] at a time and runs its [`Service`] in between.
//! Signals and administrators send the same requests.

use std::{
    fmt::Display,
    future,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime,
    sync::mpsc,
    task::{self, JoinHandle},
    time::{Instant, sleep, timeout},
};
use turnpike_api::{Drain, Draining, NotReloaded, Reloaded};
use turnpike_config::{LogSettings, TelemetrySettings};
use turnpike_telemetry::Exporter;

use crate::{
    error::ProcessError,
    logging,
    request::{Control, ControlStatus, Request, UpgradeProgress, UpgradeRequest},
    sandbox,
    service::Service,
    service_manager::ServiceManager,
    signals,
    upgrade::{self, Patience, ProgramFile, Successor, UpgradeSocket},
};

/// Interval of [`Service::tick`] and of checks for failed workers. A failed worker leaves its clients
/// unserved, so the process exits, and the service manager restarts it.
const TICK: Duration = Duration::from_secs(1);
const DRAIN_POLL: Duration = Duration::from_millis(100);
/// Delay before a drain relies on snapshots, which may be 100 ms old.
const DRAIN_SETTLE: Duration = Duration::from_millis(250);
/// Time limit for writing the log lines left in the workers' queue.
const LAST_LINES: Duration = Duration::from_secs(5);
/// Time limit for a reload in progress when the program has to stop.
const GRACE: Duration = Duration::from_secs(1);
/// Time limit for [`Service::leave`]: longer than the time limits of its parts, which wait for changes in
/// progress and for the fleet.
const GOODBYE: Duration = Duration::from_secs(6);

/// Runs a service until a signal or an administrator stops it. `start` returns the service and the task that
/// writes its log.
pub fn run<S: Service, E: From<ProcessError>>(
    (log, telemetry): (&LogSettings, &TelemetrySettings),
    start: impl AsyncFnOnce(&Control) -> Result<(S, JoinHandle<()>), E>,
) -> Result<(), E> {
    logging::init(&log.level, log.format);
    let telemetry = telemetry_options(telemetry);
    let records = turnpike_telemetry::queue(&telemetry);
    let runtime =
        runtime::Builder::new_current_thread().enable_all().build().map_err(ProcessError::Control)?;
    let ended = runtime.block_on(async {
        let (control, mut requests) = Control::new(S::GAUGES);
        let stop = Arc::clone(control.status().stop());
        // Done first, so that no signal has its default action while sessions exist.
        signals::pass_on(control.requests().clone(), Arc::clone(&stop)).map_err(ProcessError::Control)?;
        tracing::info!("turnpike {}", env!("CARGO_PKG_VERSION"));
        // Opened before the service manager learns that this process is ready.
        let socket = UpgradeSocket::open(control.requests().clone());
        let started = tokio::select! {
            biased;
            started = start(&control) => Some(started),
            () = stop.requested() => None,
        };
        // If startup fails after a stop request, the request interrupted it, so this is not an error.
        let Some(started) = started.filter(|started| started.is_ok() || !stop.is_requested()) else {
            log_stopped();
            return Ok(());
        };
        let (mut service, log) = started?;
        let exporter = records
            .and_then(|records| Exporter::start(&telemetry, S::NAME, service.exported_metrics(), records));
        let mut manager = ServiceManager::of_this_process();
        manager.notify_ready();
        let failed = until_ended(&mut service, control.status(), &mut manager, &mut requests, socket).await;
        drop(requests);
        control.status().set_draining();
        let _ = timeout(GOODBYE, service.leave()).await;
        // Joining threads blocks, and the log must be written in the meantime.
        if tokio::task::spawn_blocking(move || drop(service)).await.is_err() {
            tracing::warn!("the workers did not stop cleanly");
        }
        // Once the workers are gone, the log task ends when its queue is empty.
        let _ = timeout(LAST_LINES, log).await;
        log_stopped();
        if let Some(exporter) = exporter {
            let _ = tokio::task::spawn_blocking(|| exporter.finish()).await;
        }
        if failed { Err(ProcessError::Worker.into()) } else { Ok(()) }
    });
    // A name lookup in progress may take half a minute, and its result is not needed.
    runtime.shutdown_background();
    ended
}

fn telemetry_options(settings: &TelemetrySettings) -> turnpike_telemetry::Options {
    let TelemetrySettings { endpoint, headers, interval } = settings.clone();
    turnpike_telemetry::Options { endpoint, headers, interval: Duration::from_secs(interval.into()) }
}

fn log_stopped() {
    tracing::info!("stopped");
}

enum ControlStage {
    Serving,
    Upgrading(Upgrading),
    Draining(Until),
    /// Another process now serves clients; this process keeps the sessions that have not moved.
    HandedOver(Successor, Until),
}

struct Upgrading {
    request: Arc<UpgradeRequest>,
    ended: JoinHandle<Upgraded>,
    cancelled: Arc<AtomicBool>,
    /// Requested during the upgrade.
    drain: Option<Drain>,
}

/// The new process and a summary, or the reason for the failure.
type Upgraded = Result<(Successor, String), String>;

#[derive(Clone, Copy)]
struct Until {
    since: Instant,
    patience: Duration,
    /// Number of sessions that need not end.
    most: u64,
}

impl Until {
    fn new(patience: Duration) -> Self {
        Self { since: Instant::now(), patience, most: 0 }
    }

    fn left(&self) -> Duration {
        self.patience.saturating_sub(self.since.elapsed())
    }

    fn is_over(&self, open: impl FnOnce() -> u64) -> bool {
        self.left().is_zero() || self.since.elapsed() >= DRAIN_SETTLE && open() <= self.most
    }
}

impl Upgrading {
    fn begin<S: Service>(service: &S, request: UpgradeRequest) -> Self {
        let (request, cancelled) = (Arc::new(request), Arc::<AtomicBool>::default());
        let (of_thread, stop) = (Arc::clone(&request), Arc::clone(&cancelled));
        let (state, metrics) = (service.handover_state(), Arc::clone(service.metrics()));
        let ended = task::spawn_blocking(move || {
            let program = ProgramFile::find(of_thread.program.as_deref())?;
            let step = |text: String| of_thread.report(UpgradeProgress::Step(text));
            let handed_over = (S::NAME, &*state, &metrics);
            upgrade::hand_over(handed_over, &program, Patience::default(), &stop, &step)
        });
        Self { request, ended, cancelled, drain: None }
    }

    /// Cancels the upgrade if it is not too late, and drains afterwards.
    fn cancel(self, drain: Drain) -> Self {
        self.cancelled.store(true, Ordering::Relaxed);
        Self { drain: Some(drain), ..self }
    }

    fn conclude(&self, ended: Upgraded, service: &mut impl Service, status: &ControlStatus) -> ControlStage {
        status.count_upgrade(ended.is_ok());
        match ended {
            Ok((successor, how)) => {
                let patience = service.upgrade_deadline();
                turnpike_telemetry::hand_over();
                service.handed_over(patience);
                self.request.report(UpgradeProgress::Done(how));
                ControlStage::HandedOver(successor, Until::new(patience))
            }
            Err(why) => {
                self.request.report(UpgradeProgress::Failed(why));
                ControlStage::Serving
            }
        }
    }
}

impl ControlStage {
    async fn upgraded(&mut self) -> Upgraded {
        match self {
            Self::Upgrading(upgrading) => {
                (&mut upgrading.ended).await.unwrap_or_else(|panic| Err(panic.to_string()))
            }
            _ => future::pending().await,
        }
    }

    /// Time until the next call; `None` if the program must exit.
    fn pause(&mut self, service: &impl Service, status: &ControlStatus) -> Option<Duration> {
        match self {
            Self::Serving | Self::Upgrading(_) => Some(TICK),
            Self::Draining(until) => {
                if until.is_over(|| service.open()) {
                    return None;
                }
                Some(DRAIN_POLL.min(until.left()))
            }
            Self::HandedOver(successor, until) => {
                // The previous process may still reach its clients through this process.
                if until.is_over(|| service.left() + u64::from(status.carried().lives())) {
                    return None;
                }
                successor.send_metrics(service.metrics());
                Some(TICK.min(until.left()))
            }
        }
    }

    /// Lets the service follow address changes, except during an upgrade, while its sockets move.
    fn follow_machine(&self, service: &mut impl Service) {
        if !matches!(self, Self::Upgrading(_)) {
            service.follow_machine(matches!(self, Self::Serving));
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Upgrading(_) => "upgrading",
            Self::Draining(_) => "draining",
            Self::HandedOver(..) => "handed over",
        }
    }

    fn obstacle(&self) -> String {
        match self {
            Self::Serving => "now".to_owned(),
            Self::Upgrading(_) => "during an upgrade".to_owned(),
            Self::Draining(_) => "while draining".to_owned(),
            Self::HandedOver(successor, _) => format!("here: process {} has taken over", successor.id()),
        }
    }

    fn refuse_reload(&self) -> NotReloaded {
        tracing::warn!("no reload {}", self.obstacle());
        if matches!(self, Self::Draining(_)) { NotReloaded::Draining } else { NotReloaded::Upgrade }
    }
}

/// Carries out requests until the program must exit; returns true if a worker failed. `socket` stays open
/// while this process can be upgraded.
async fn until_ended<S: Service>(
    service: &mut S,
    status: &ControlStatus,
    manager: &mut ServiceManager,
    requests: &mut mpsc::Receiver<Request>,
    mut socket: Option<UpgradeSocket>,
) -> bool {
    let mut stage = ControlStage::Serving;
    while let Some(pause) = stage.pause(service, status) {
        let name = stage.name();
        manager.tick(|| service.makes_progress(), || format!("{name}; {}: {}", S::OPEN, service.open()));
        let request = tokio::select! {
            request = requests.recv() => request,
            ended = stage.upgraded() => {
                // Starts a drain requested during the upgrade.
                let drain = if let ControlStage::Upgrading(upgrading) = stage {
                    stage = upgrading.conclude(ended, service, status);
                    upgrading.drain
                } else {
                    None
                };
                if matches!(stage, ControlStage::HandedOver(..)) {
                    drop(socket.take());
                }
                let Some(wanted) = drain else { continue };
                Some(Request::Drain(wanted))
            }
            () = sleep(pause.min(manager.pause())) => {
                if matches!(stage, ControlStage::Serving) {
                    service.tick();
                }
                stage.follow_machine(service);
                // If a worker fails during an upgrade, let the upgrade fail first.
                if !matches!(stage, ControlStage::Upgrading(_)) && service.has_failed() {
                    return true;
                }
                continue;
            }
        };
        let Some(request) = request else {
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
        ControlStage::HandedOver(successor, _) => {
            successor.send_metrics(service.metrics());
            service.left()
        }
        _ => service.open(),
    };
    if open > 0 {
        service.log_left(open);
    }
    false
}

/// Carries out a request, and returns the next stage; `Break` if the program must exit.
async fn carry_out(
    request: Request,
    stage: ControlStage,
    service: &mut impl Service,
    status: &ControlStatus,
    manager: &mut ServiceManager,
) -> ControlFlow<ControlStage, ControlStage> {
    let next = match (request, stage) {
        (Request::Reload(answer), stage) => {
            let result = match &stage {
                ControlStage::Serving => reload(service, status, manager).await,
                stage => Err(stage.refuse_reload()),
            };
            if let Some(answer) = answer {
                // If the client has disconnected, the result is still in the log.
                let _ = answer.send(result);
            }
            stage
        }
        (Request::MachineChanged, stage) => {
            service.machine_changed();
            stage.follow_machine(service);
            stage
        }
        (Request::Upgrade(request), ControlStage::Serving) => {
            ControlStage::Upgrading(Upgrading::begin(service, request))
        }
        (Request::Upgrade(request), stage) => {
            request.report(UpgradeProgress::Failed(format!("no upgrade {}", stage.obstacle())));
            stage
        }
        (Request::Drain(wanted), ControlStage::Serving) => {
            ControlStage::Draining(drain(service, status, manager, wanted))
        }
        (Request::Drain(wanted), ControlStage::Upgrading(upgrading)) if upgrading.drain.is_none() => {
            ControlStage::Upgrading(upgrading.cancel(wanted))
        }
        (Request::Drain(wanted), ControlStage::HandedOver(successor, _)) if !status.is_draining() => {
            ControlStage::HandedOver(successor, drain(service, status, manager, wanted))
        }
        (Request::Drain(_), last) => {
            tracing::warn!("second signal: stopping immediately");
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
    status: &ControlStatus,
    manager: &mut ServiceManager,
) -> Result<Reloaded, NotReloaded> {
    manager.notify_reloading();
    let result = tokio::select! {
        biased;
        result = manager.stay_alive_for(service.reload()) => result.map_err(NotReloaded::Refused),
        // Nothing has changed yet, because a reload waits only before it makes changes. A reload that blocks
        // its thread checks for a stop request itself.
        () = async { status.stop().requested().await; sleep(GRACE).await } => Err(NotReloaded::Draining),
    };
    manager.notify_reloaded(result.is_ok());
    status.count_reload(result.is_ok());
    result
}

fn drain(
    service: &mut impl Service,
    status: &ControlStatus,
    manager: &ServiceManager,
    wanted: Drain,
) -> Until {
    let patience = wanted.patience().unwrap_or_else(|| service.drain_deadline());
    status.set_draining();
    manager.notify_stopping(patience);
    service.drain(patience);
    Until { most: wanted.until.unwrap_or(0), ..Until::new(patience) }
}

/// Drains on behalf of an administrator. A drain in progress continues with the limits set in
/// `wanted`; an upgrade is cancelled first.
fn drain_within(
    service: &mut impl Service,
    status: &ControlStatus,
    manager: &ServiceManager,
    wanted: Drain,
    stage: ControlStage,
) -> (ControlStage, Until) {
    let again = |going: Until| {
        let most = wanted.until.unwrap_or(going.most);
        match wanted.patience() {
            Some(patience) => {
                manager.notify_stopping(patience);
                Until { most, ..Until::new(patience) }
            }
            None => Until { most, ..going },
        }
    };
    match stage {
        ControlStage::Draining(going) => {
            let until = again(going);
            (ControlStage::Draining(until), until)
        }
        ControlStage::HandedOver(successor, going) if status.is_draining() => {
            let until = again(going);
            (ControlStage::HandedOver(successor, until), until)
        }
        ControlStage::HandedOver(successor, _) => {
            let until = drain(service, status, manager, wanted);
            (ControlStage::HandedOver(successor, until), until)
        }
        ControlStage::Serving => {
            let until = drain(service, status, manager, wanted);
            (ControlStage::Draining(until), until)
        }
        ControlStage::Upgrading(upgrading) => {
            let until = Until::new(wanted.patience().unwrap_or_else(|| service.drain_deadline()));
            (ControlStage::Upgrading(upgrading.cancel(wanted)), until)
        }
    }
}

pub fn warn(reloaded: &mut Reloaded, warning: impl Into<String>) {
    let warning = warning.into();
    tracing::warn!("{warning}");
    reloaded.warnings.push(warning);
}

pub fn need_restart(reloaded: &mut Reloaded, keys: &[&str]) {
    for key in keys {
        tracing::warn!("{key} has changed, but takes effect only after a restart");
        reloaded.after_restart.push((*key).to_owned());
    }
}

pub fn log_warnings(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

/// Logs why a reload is refused, one line per error, and returns the lines.
pub fn log_refused(error: &dyn Display, refused: &str) -> Vec<String> {
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
    use std::{
        io,
        sync::{Mutex, atomic::AtomicU64},
    };

    use tokio::sync::oneshot;
    use turnpike_api::Process as _;
    use turnpike_worker::Channel;

    use super::*;
    use crate::{
        MetricsPage,
        upgrade::{HandoverOffer, HandoverState},
    };

    /// Records calls in order. Each time its `open` sessions are counted, one of them ends.
    struct Recorder {
        calls: Mutex<Vec<String>>,
        open: AtomicU64,
        failed: bool,
        good: bool,
        waits: bool,
        metrics: MetricsPage,
    }

    impl Default for Recorder {
        fn default() -> Self {
            Self {
                calls: Mutex::default(),
                open: AtomicU64::default(),
                failed: false,
                good: false,
                waits: false,
                metrics: Arc::new(String::new),
            }
        }
    }

    impl Recorder {
        fn record(&self, call: impl Into<String>) {
            self.calls.lock().expect("no panic").push(call.into());
        }
    }

    impl Service for Recorder {
        const NAME: &'static str = "serve";
        const GAUGES: &'static [&'static str] = &[];
        const OPEN: &'static str = "sessions";

        async fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
            self.record("reload");
            if self.waits {
                return future::pending().await;
            }
            if self.good { Ok(Reloaded::default()) } else { Err(vec!["line 1".to_owned()]) }
        }
        fn has_failed(&self) -> bool {
            self.failed
        }
        fn drain_deadline(&self) -> Duration {
            Duration::from_secs(30)
        }
        fn drain(&mut self, patience: Duration) {
            self.record(format!("drain {}", patience.as_secs()));
        }
        fn makes_progress(&self) -> bool {
            true
        }
        fn open(&self) -> u64 {
            let next = |open: u64| Some(open.saturating_sub(1));
            self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).expect("always some")
        }
        fn log_left(&self, open: u64) {
            self.record(format!("left {open}"));
        }
        fn handover_state(&self) -> Arc<dyn HandoverState> {
            Arc::new(Nothing)
        }
        fn metrics(&self) -> &MetricsPage {
            &self.metrics
        }
        fn exported_metrics(&self) -> MetricsPage {
            Arc::clone(&self.metrics)
        }
        fn upgrade_deadline(&self) -> Duration {
            Duration::from_secs(60)
        }
        fn handed_over(&mut self, patience: Duration) {
            self.record(format!("handed over {}", patience.as_secs()));
        }
        fn left(&self) -> u64 {
            self.open()
        }
    }

    struct Nothing;

    impl HandoverState for Nothing {
        fn offer(&self) -> io::Result<HandoverOffer> {
            HandoverOffer::new(&(), Vec::new(), Vec::new())
        }
        fn pause(&self, _: bool) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn export(&self, _: Vec<Channel>, _: Duration) -> io::Result<usize> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn resume(&self) {}
        fn forget(&self) {}
    }

    async fn calls_of(
        mut service: Recorder,
        requests: impl IntoIterator<Item = Request>,
    ) -> (bool, Vec<String>, Arc<ControlStatus>) {
        let (control, mut receiver) = Control::new(&[]);
        for request in requests {
            control.requests().send(request).await.expect("there is room");
        }
        let mut manager = ServiceManager::of_this_process();
        let failed = until_ended(&mut service, control.status(), &mut manager, &mut receiver, None).await;
        (failed, service.calls.into_inner().expect("no panic"), Arc::clone(control.status()))
    }

    async fn asked<T>(
        mut service: Recorder,
        ask: impl AsyncFnOnce(&Control) -> T,
    ) -> (T, Vec<String>, Duration) {
        let begun = Instant::now();
        let (control, mut receiver) = Control::new(&[]);
        let status = Arc::clone(control.status());
        let mut manager = ServiceManager::of_this_process();
        let (answer, _) = tokio::join!(ask(&control), async {
            until_ended(&mut service, &status, &mut manager, &mut receiver, None).await;
            drop(receiver);
        });
        (answer, service.calls.into_inner().expect("no panic"), begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_signal_interrupts_a_waiting_reload() {
        let service = Recorder { good: true, waits: true, ..Recorder::default() };
        let (control, mut receiver) = Control::new(&[]);
        let status = Arc::clone(control.status());
        let mut manager = ServiceManager::of_this_process();
        let (reloaded, _) = tokio::join!(
            async {
                let (sender, answer) = oneshot::channel();
                control.requests().send(Request::Reload(Some(sender))).await.expect("there is room");
                sleep(Duration::from_secs(1)).await;
                control.requests().send(Request::Drain(Drain::default())).await.expect("there is room");
                status.stop().request();
                timeout(2 * GRACE, answer).await.expect("soon").expect("an answer")
            },
            async {
                let mut service = service;
                until_ended(&mut service, &status, &mut manager, &mut receiver, None).await;
                assert_eq!(service.calls.into_inner().expect("no panic"), ["reload", "drain 30"]);
            },
        );
        assert_eq!(reloaded, Err(NotReloaded::Draining));
        assert_eq!(status.reloads(), [("loaded", 0), ("failed", 1)]);
    }

    #[test]
    fn a_signal_interrupts_startup_and_its_name_lookups() {
        let begun = std::time::Instant::now();
        let started = async |control: &Control| -> Result<(Recorder, JoinHandle<()>), ProcessError> {
            task::spawn_blocking(|| std::thread::sleep(Duration::from_secs(20)));
            let stop = Arc::clone(control.status().stop());
            tokio::spawn(async move {
                sleep(Duration::from_millis(10)).await;
                stop.request();
            });
            future::pending().await
        };
        let log = LogSettings { level: "error".to_owned(), ..LogSettings::default() };
        run((&log, &TelemetrySettings::default()), started).expect("a signal is not an error");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_with_the_last_session() {
        let service = Recorder { open: 9.into(), ..Recorder::default() };
        let (failed, calls, status) = calls_of(service, [Request::Drain(Drain::default())]).await;
        assert_eq!((failed, calls), (false, vec!["drain 30".to_owned()]));
        assert!(status.is_draining());
    }

    fn within(seconds: u32) -> Drain {
        Drain { deadline_s: Some(seconds), ..Drain::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_does_not_wait_for_sessions_below_its_threshold() {
        let drain = |until| Request::Drain(Drain { until, ..Drain::default() });
        let service = || Recorder { open: 100.into(), ..Recorder::default() };
        let (_, calls, _) = calls_of(service(), [drain(Some(60))]).await;
        assert_eq!(calls, ["drain 30", "left 59"]);
        let (_, calls, _) = calls_of(service(), [drain(None)]).await;
        assert_eq!(calls, ["drain 30"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_has_a_deadline_and_a_second_signal_stops_immediately() {
        for (requests, drain) in [
            (&[Drain::default()][..], "drain 30"),
            (&[Drain::default(); 2], "drain 30"),
            (&[within(0)], "drain 0"),
        ] {
            let service = Recorder { open: 1_000_000.into(), ..Recorder::default() };
            let begun = Instant::now();
            let (failed, calls, _) = calls_of(service, requests.iter().copied().map(Request::Drain)).await;
            assert!(
                !failed && calls.len() == 2 && calls[0] == drain && calls[1].starts_with("left "),
                "{calls:?}"
            );
            assert_eq!(begun.elapsed() >= Duration::from_secs(30), requests == [Drain::default()]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reloads_are_counted_by_result_and_refused_while_draining() {
        let all = || {
            [
                Request::Reload(None),
                Request::Reload(None),
                Request::Drain(Drain::default()),
                Request::Reload(None),
            ]
        };
        let (_, calls, status) = calls_of(Recorder { good: true, ..Recorder::default() }, all()).await;
        assert_eq!(calls, ["reload", "reload", "drain 30"]);
        assert_eq!(status.reloads(), [("loaded", 2), ("failed", 0)]);
        let (_, _, status) = calls_of(Recorder::default(), all()).await;
        assert_eq!(status.reloads(), [("loaded", 0), ("failed", 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_worker_stops_the_service_even_while_draining() {
        for drains in [0, 1] {
            let service = Recorder { failed: true, open: 1_000_000.into(), ..Recorder::default() };
            assert!(
                calls_of(service, (0..drains).map(|_| Request::Drain(Drain::default()))).await.0,
                "{drains}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_is_answered_with_its_result() {
        let ask = async |control: &Control| {
            let first = control.reload().await;
            control.drain(Drain::default()).await.expect("the drain begins");
            (first, control.reload().await)
        };
        let good = Recorder { good: true, open: 9.into(), ..Recorder::default() };
        let (answer, calls, _) = asked(good, ask).await;
        assert_eq!(answer, (Ok(Reloaded::default()), Err(NotReloaded::Draining)));
        assert_eq!(calls, ["reload", "drain 30"]);
        let bad = Recorder { open: 9.into(), ..Recorder::default() };
        let (answer, ..) = asked(bad, ask).await;
        assert_eq!(answer.0, Err(NotReloaded::Refused(vec!["line 1".to_owned()])));
    }

    #[tokio::test(start_paused = true)]
    async fn an_administrator_may_change_the_deadline_of_a_drain() {
        const HOUR: Duration = Duration::from_secs(3600);
        let busy = || Recorder { open: 1_000_000.into(), ..Recorder::default() };
        let (answer, calls, lasted) = asked(busy(), async |control| {
            let first = control.drain(Drain::default()).await.expect("the drain begins");
            assert!(control.is_draining());
            sleep(Duration::from_secs(10)).await;
            let again = control.drain(Drain::default()).await.expect("still running");
            let longer = control.drain(within(3600)).await.expect("still running");
            [first, again, longer].map(|draining| draining.deadline_s)
        })
        .await;
        assert_eq!(answer, [30.0, 20.0, HOUR.as_secs_f64()]);
        assert_eq!((calls.len(), calls[0].as_str()), (2, "drain 30"), "one drain only: {calls:?}");
        assert_eq!(lasted, HOUR + Duration::from_secs(10));
        let (answer, _, lasted) = asked(busy(), async |control| {
            control.drain(Drain::default()).await.expect("the drain begins");
            control.drain(within(0)).await.expect("the drain ends");
            control.drain(Drain::default()).await
        })
        .await;
        assert_eq!((answer, lasted), (None, Duration::ZERO), "no waiting for a program that has ended");
    }

    fn upgrade_to(program: &str) -> (Request, mpsc::UnboundedReceiver<UpgradeProgress>) {
        let (sender, steps) = mpsc::unbounded_channel();
        (Request::Upgrade(UpgradeRequest { program: Some(program.into()), progress: Some(sender) }), steps)
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_upgrade_is_reported_and_the_service_continues() {
        let (request, mut steps) = upgrade_to("/bin/false");
        let requests = [request, Request::Reload(None), Request::Drain(Drain::default())];
        let (failed, calls, status) = calls_of(Recorder::default(), requests).await;
        // Later requests are carried out after the upgrade, except the reload.
        assert_eq!((failed, calls), (false, vec!["drain 30".to_owned()]));
        assert_eq!(status.upgrades(), [("done", 0), ("failed", 1)]);
        let mut last = None;
        while let Some(step) = steps.recv().await {
            last = Some(step);
        }
        assert!(matches!(last, Some(UpgradeProgress::Failed(_))), "{last:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_draining_service_refuses_an_upgrade() {
        let (request, mut steps) = upgrade_to("/bin/false");
        let (_, calls, status) =
            calls_of(Recorder::default(), [Request::Drain(Drain::default()), request]).await;
        assert_eq!(calls, ["drain 30"]);
        assert_eq!(steps.recv().await, Some(UpgradeProgress::Failed("no upgrade while draining".to_owned())));
        assert_eq!(steps.recv().await, None);
        assert_eq!(status.upgrades(), [("done", 0), ("failed", 0)]);
    }
}
