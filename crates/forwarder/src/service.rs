//! `turnpike forward`: the forwarder as a [`Service`].

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle};
use turnpike_admin::{AdminInterface, Serving};
use turnpike_api::{Job, Reloaded};
use turnpike_config::{
    DatapathChoice,
    forward::{Format, ForwardLoaded, ForwardSettings, ForwardSources},
};
use turnpike_forward::{Bind, ConnectionLog, Forwarder, Protocol, Rule, RuleId, Settings, StartError};
use turnpike_net::{Datapath, PassedSockets, SocketProtocol};
use turnpike_process::{
    Control, MetricsPage, PidFile, ProcessError, Service, Stop, kernel_path,
    log_queue::LogCounts,
    log_refused, log_warnings, need_restart, passed, rlimit, sandbox,
    upgrade::{self, HandoverState, PreviousProcess},
    warn,
};

use crate::{
    admin::ForwarderAdmin,
    changes::ForwardChanges,
    connection_file::ConnectionFile,
    connection_log::{Records, SharedRecords, connection_log},
    denial::AccessLists,
    error::ForwarderError,
    handover::{ForwardHandover, PreviousForwarder},
    metrics,
    needs::{forwarder_needs, has_leases, rule_privileges},
};

/// Runs the forwarder until a signal or an administrator stops it.
pub fn forward(sources: &ForwardSources) -> Result<(), ForwarderError> {
    sandbox::forbid_core_dumps();
    upgrade::begin(PortForwarder::NAME, |previous| {
        // Take over sockets before any others are opened.
        let (before, passed) = previous.as_mut().map(PreviousForwarder::new).transpose()?.unzip();
        let passed =
            passed.map_or_else(PassedSockets::from_service_manager, Ok).map_err(ProcessError::from)?;
        let sources = sources.clone().with_fallback(passed::settings(&passed));
        let loaded = sources.load()?;
        let logging = (loaded.settings.log.clone(), loaded.settings.telemetry.clone());
        sandbox::enter(&loaded.settings.sandbox, || forwarder_needs(&sources, &loaded));
        let found = StartState { sources, loaded, passed: Arc::new(passed), before };
        turnpike_process::run((&logging.0, &logging.1), async |control| {
            PortForwarder::start(found, control, previous)
        })
    })
}

struct StartState {
    sources: ForwardSources,
    loaded: ForwardLoaded,
    passed: Arc<PassedSockets>,
    before: Option<PreviousForwarder>,
}

struct PortForwarder {
    sources: ForwardSources,
    /// Settings at startup, used for keys that a reload cannot change.
    started: ForwardSettings,
    settings: ForwardSettings,
    shown: watch::Sender<Arc<ForwardSettings>>,
    workers: usize,
    datapath: Datapath,
    has_logged_kernel: bool,
    /// Passed sockets, kept as long as listeners may still be bound.
    passed: Arc<PassedSockets>,
    stop: Arc<Stop>,
    forwarder: Arc<Forwarder>,
    records: SharedRecords,
    page: Arc<Serving>,
    metrics: MetricsPage,
    /// Must be dropped after the forwarder.
    pid_file: PidFile,
}

impl PortForwarder {
    fn start(
        found: StartState,
        control: &Control,
        previous: &mut Option<PreviousProcess>,
    ) -> Result<(Self, JoinHandle<()>), ForwarderError> {
        let StartState { sources, loaded, passed, mut before } = found;
        let ForwardLoaded { settings, format, included, warnings } = loaded;
        log_source(sources.file(), format, &included, settings.rules.len());
        log_warnings(&warnings);
        let (workers, datapath, reason) = threads(&settings, before.as_ref());
        passed::check(&passed, workers, |transport, at| listens(&settings.rules, transport, at))?;
        passed::log_few_workers(&passed, settings.origin("forward.workers"), workers);
        raise_open_files(&settings, workers);

        let records = SharedRecords::new(Mutex::new(open_records(&settings)?));
        let sockets = before.as_mut().map(PreviousForwarder::page).unwrap_or_default();
        let is_explicit = settings.is_explicit("admin.listen");
        let page = AdminInterface::listen(Job::Forward, &settings.admin, is_explicit, sockets)?;
        let (logger, writer) = connection_log(Arc::clone(&records));
        let log_counts = logger.counts();
        let log: Arc<dyn ConnectionLog> = Arc::new(logger);
        let stop = control.status().stop();
        let runtime = for_runtime(&settings, &settings, (workers, datapath), &passed, stop);
        let is_first = before.is_none();
        let (forwarder, failed) = match before {
            None => Forwarder::start(&runtime, &settings.rules, log)?,
            Some(before) => {
                Forwarder::start_from_handover(&runtime, &settings.rules, log, before.into_forwarder())?
            }
        };
        log_left_out(&failed);
        let forwarder = Arc::new(forwarder);
        let is_attached = previous.is_none();
        take_over(previous, control, &forwarder, &settings, datapath)?;
        let pid_file = match PidFile::write(settings.pid_file.as_deref()) {
            // Not fatal, because clients are already being served.
            Err(error) if !is_first => {
                tracing::warn!("{error}");
                PidFile::NONE
            }
            written => written?,
        };
        log_listeners(&settings, &forwarder, |_| true);
        page.say_where();
        tracing::info!("data path {datapath}: {reason}; workers: {workers}");
        sandbox::log();
        let has_logged_kernel = if is_attached {
            log_kernel(&settings, &forwarder, &settings.rules, datapath)
        } else {
            forwarder.kernel().is_some()
        };

        let shown = watch::Sender::new(Arc::new(settings.clone()));
        let metrics = metrics_page(&forwarder, control, log_counts);
        let page = Arc::new(page.serve(Arc::new(ForwarderAdmin {
            control: control.clone(),
            metrics: Arc::clone(&metrics),
            forwarder: Arc::downgrade(&forwarder),
            shown: shown.subscribe(),
        })));
        let service = Self {
            sources,
            started: settings.clone(),
            settings,
            shown,
            workers,
            datapath,
            has_logged_kernel,
            passed,
            stop: Arc::clone(stop),
            forwarder,
            records,
            page,
            metrics,
            pid_file,
        };
        Ok((service, tokio::spawn(writer.run())))
    }

    fn for_runtime(&self, settings: &ForwardSettings) -> Settings {
        for_runtime(settings, &self.started, (self.workers, self.datapath), &self.passed, &self.stop)
    }

    async fn take(&mut self, loaded: ForwardLoaded) -> Result<Reloaded, ForwarderError> {
        let ForwardLoaded { settings: new, format, included, warnings } = loaded;
        let mut reloaded = Reloaded::default();
        warnings.into_iter().for_each(|warning| warn(&mut reloaded, warning));
        need_restart(&mut reloaded, &self.started.unchangeable(&new));
        if let Some(gone) = sandbox::given_up(rule_privileges(&new)) {
            return Err(ForwarderError::Sandbox(gone));
        }
        let records = open_records(&new)?;
        let runtime = self.for_runtime(&new);
        let (forwarder, rules) = (Arc::clone(&self.forwarder), new.rules.clone());
        // A reload blocks on name lookups.
        let reload = tokio::task::spawn_blocking(move || forwarder.reload(&runtime, &rules));
        let failed = reload.await.map_err(io::Error::other).map_err(StartError::from)??;
        reloaded.warnings.extend(log_left_out(&failed));
        if !self.has_logged_kernel {
            self.has_logged_kernel = log_kernel(&self.started, &self.forwarder, &new.rules, self.datapath);
        }
        if let Err(error) =
            passed::check(&self.passed, self.workers, |transport, at| listens(&new.rules, transport, at))
        {
            warn(&mut reloaded, error.to_string());
        }
        // The file is reopened even if nothing has changed, because log rotation moves the old file away.
        *self.records.lock().unwrap_or_else(PoisonError::into_inner) = records;
        if self.settings.pid_file != new.pid_file {
            // Remove the old file first, because the new path may lead to the same file.
            self.pid_file = PidFile::NONE;
            match PidFile::write(new.pid_file.as_deref()) {
                Ok(file) => self.pid_file = file,
                Err(error) => warn(&mut reloaded, error.to_string()),
            }
        }
        log_source(self.sources.file(), format, &included, new.rules.len());
        let changes = ForwardChanges::new(&self.settings, &new);
        changes.log(new.rules.len());
        reloaded.changed = changes.lines();
        self.shown.send_replace(Arc::new(new.clone()));
        self.settings = new;
        Ok(reloaded)
    }
}

impl Service for PortForwarder {
    const NAME: &'static str = "forward";
    const OPEN: &'static str = "connections";
    const GAUGES: &'static [&'static str] =
        &["turnpike_forward_connections", "turnpike_forward_target_connections", "turnpike_kernel_flows"];

    async fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
        let taken = match self.sources.load() {
            Ok(loaded) => self.take(loaded).await,
            Err(mistakes) => Err(mistakes.into()),
        };
        taken.map_err(|error| log_refused(&error, "rules not reloaded: the old ones stay in use"))
    }

    fn tick(&mut self) {
        let runtime = self.for_runtime(&self.settings);
        let come = self.forwarder.retry(&runtime);
        if !come.is_empty() {
            log_listeners(&self.settings, &self.forwarder, |id| come.contains(id));
        }
    }

    fn has_failed(&self) -> bool {
        self.forwarder.has_failed()
    }

    fn drain_deadline(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown.deadline.into())
    }

    fn drain(&mut self, deadline: Duration) {
        self.forwarder.drain();
        // Drop the duplicates of listeners, which would keep them open.
        self.passed = Arc::default();
        let deadline_s = deadline.as_secs();
        tracing::info!(connections = self.open(), deadline_s, "draining: no new connections");
    }

    fn makes_progress(&self) -> bool {
        self.forwarder.makes_progress()
    }

    fn open(&self) -> u64 {
        self.forwarder.active()
    }

    fn log_left(&self, open: u64) {
        tracing::warn!(connections = open, "ending the connections still open");
    }

    fn handover_state(&self) -> Arc<dyn HandoverState> {
        Arc::new(ForwardHandover {
            forwarder: Arc::clone(&self.forwarder),
            page: Arc::clone(&self.page),
            passed: Arc::clone(&self.passed),
        })
    }

    fn metrics(&self) -> &MetricsPage {
        &self.metrics
    }

    fn exported_metrics(&self) -> MetricsPage {
        let page = Arc::clone(&self.metrics);
        Arc::new(move || turnpike_admin::with_own_metrics(page(), false))
    }

    fn upgrade_deadline(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown.upgrade_deadline.into())
    }

    fn handed_over(&mut self, deadline: Duration) {
        self.page.leave();
        self.pid_file.leave();
        let deadline_s = deadline.as_secs();
        tracing::info!(
            connections = self.open(),
            deadline_s,
            "handed over to the new process; TCP connections stay in this process until they end"
        );
    }

    fn left(&self) -> u64 {
        self.open()
    }
}

fn take_over(
    previous: &mut Option<PreviousProcess>,
    control: &Control,
    forwarder: &Arc<Forwarder>,
    settings: &ForwardSettings,
    datapath: Datapath,
) -> Result<(), ProcessError> {
    let receive = || forwarder.received().map_err(|error| format!("cannot take over the sessions: {error}"));
    let (weak, settings) = (Arc::downgrade(forwarder), settings.clone());
    let released = move || {
        let Some(forwarder) = weak.upgrade() else { return };
        match forwarder.attach_kernel() {
            Ok(()) => _ = log_kernel(&settings, &forwarder, &settings.rules, datapath),
            Err(error) => tracing::error!(
                "cannot attach the eBPF program after the upgrade; user space forwards the datagrams: {error}"
            ),
        }
    };
    upgrade::take_over(previous, control.status().carried(), false, receive, || forwarder.serve(), released)
}

fn threads(settings: &ForwardSettings, before: Option<&PreviousForwarder>) -> (usize, Datapath, String) {
    let workers = settings.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let (datapath, reason) = match settings.datapath {
        DatapathChoice::Step(step) => (step, "as configured".to_owned()),
        _ => Datapath::best(),
    };
    let Some((kept_workers, kept_datapath)) = before.map(PreviousForwarder::kept) else {
        return (workers, datapath, reason);
    };
    let differ = [
        (workers != kept_workers, "forward.workers"),
        (
            matches!(settings.datapath, DatapathChoice::Step(step) if step != kept_datapath),
            "forward.datapath",
        ),
    ];
    let differ: Vec<&str> = differ.into_iter().filter(|(differs, _)| *differs).map(|(_, key)| key).collect();
    need_restart(&mut Reloaded::default(), &differ);
    (kept_workers, kept_datapath, "kept from the previous process".to_owned())
}

fn metrics_page(forwarder: &Arc<Forwarder>, control: &Control, log: Arc<LogCounts>) -> MetricsPage {
    let (weak, of_kernel) = (Arc::downgrade(forwarder), Arc::downgrade(forwarder));
    let rules = move || weak.upgrade().map_or_else(Vec::new, |forwarder| forwarder.snapshots());
    let kernel = move || Some(of_kernel.upgrade()?.kernel()?.snapshot());
    metrics::page(rules, kernel, Arc::clone(control.status()), log)
}

/// `started` contains the settings at startup, for keys that a reload cannot change.
fn for_runtime(
    settings: &ForwardSettings,
    started: &ForwardSettings,
    (workers, datapath): (usize, Datapath),
    passed: &Arc<PassedSockets>,
    stop: &Stop,
) -> Settings {
    let leases = has_leases(started);
    Settings {
        workers,
        datapath,
        kernel: started.datapath == DatapathChoice::Kernel || leases,
        max_kernel_flows: started.kernel_flows,
        kernel_leases: leases,
        busy_poll: Duration::from_micros(settings.busy_poll_us.into()),
        access: settings.access.clone(),
        max_connections: settings.max_connections,
        resolve_every: Duration::from_secs(settings.resolve_every.into()),
        keep_going: settings.keep_going,
        passed: Arc::clone(passed),
        stopping: stop.flag(),
    }
}

/// True if a rule listens on this address or on a name that may resolve to it.
fn listens(rules: &[Rule], transport: SocketProtocol, address: SocketAddr) -> bool {
    rules.iter().any(|rule| {
        transport_of(rule) == transport
            && (rule.bind == address.ip().into() || matches!(rule.bind, Bind::Name(_)))
            && (rule.ports.first..=rule.ports.last).contains(&address.port())
    })
}

fn transport_of(rule: &Rule) -> SocketProtocol {
    match rule.protocol {
        Protocol::Tcp | Protocol::TcpToUdp { .. } => SocketProtocol::Tcp,
        Protocol::Udp | Protocol::UdpToTcp { .. } => SocketProtocol::Udp,
    }
}

fn log_source(file: Option<&Path>, format: Option<Format>, included: &[PathBuf], rules: usize) {
    included.iter().for_each(|path| tracing::info!("{} is included", path.display()));
    match (file, format) {
        (Some(path), Some(format)) => {
            tracing::info!("{} is read as {format}; rules: {rules}", path.display());
        }
        _ => tracing::info!("rules on the command line: {rules}"),
    }
}

fn log_left_out(failed: &[StartError]) -> Vec<String> {
    let lines = failed.iter().map(|error| format!("{error}; retrying every second (keep_going)"));
    lines.inspect(|line| tracing::error!("{line}")).collect()
}

/// Logs one line per rule, because a range may have thousands of ports.
fn log_listeners(settings: &ForwardSettings, forwarder: &Forwarder, is_wanted: impl Fn(&RuleId) -> bool) {
    let listeners = forwarder.listeners();
    for of_rule in listeners.chunk_by(|(one, _), (other, _)| one == other) {
        let [(id, first), ..] = of_rule else { continue };
        if !is_wanted(id) {
            continue;
        }
        let rule = settings.rules.iter().find(|rule| rule.id == *id);
        let transport: &str = (&rule.map_or(SocketProtocol::Tcp, transport_of)).into();
        let protocol = rule.map_or("", |rule| rule.protocol.name());
        let targets = rule.map_or_else(String::new, |rule| {
            rule.targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        });
        let last = match of_rule {
            [_, .., (_, last)] => format!("-{}", last.port()),
            _ => String::new(),
        };
        tracing::info!("listening on {transport} {first}{last} for {targets} ({protocol}, rule {})", id.0);
    }
}

fn log_kernel(started: &ForwardSettings, forwarder: &Forwarder, rules: &[Rule], datapath: Datapath) -> bool {
    let by_default = started.datapath == DatapathChoice::Kernel;
    let asked = |rule: &&Rule| rule.protocol == Protocol::Udp && rule.kernel.unwrap_or(by_default);
    for rule in rules.iter().filter(asked) {
        if let Some(obstacle) = rule.kernel_obstacle() {
            tracing::info!("rule {}: its datagrams stay in user space: {obstacle}", rule.id.0);
        }
    }
    let Some(kernel) = forwarder.kernel() else {
        let lack = forwarder.kernel_lack();
        lack.iter().for_each(|lack| kernel_path::log_lack(lack));
        return lack.is_some();
    };
    kernel_path::log_attached(&kernel, started.kernel_flows, datapath);
    if kernel.has_leases() {
        return true;
    }
    tracing::warn!(
        "packets forwarded by the kernel bypass this machine's firewall (netfilter) and IPsec policies: only allow and \
         deny restrict clients"
    );
    true
}

/// A connection has two sockets and, during bulk transfer, two pipes from a pool; few connections are in bulk
/// transfer at the same time.
fn raise_open_files(settings: &ForwardSettings, workers: usize) {
    let ports: usize =
        settings.rules.iter().map(|rule| usize::from(rule.ports.last - rule.ports.first) + 1).sum();
    let needed = ports * workers + 2 * settings.max_connections + 256 * workers + 64;
    let subject = format!("{} connections", settings.max_connections);
    rlimit::raise_open_files(needed as u64, turnpike_admin::DESCRIPTORS, &subject, "forward.max_connections");
}

fn open_records(settings: &ForwardSettings) -> Result<Records, ForwarderError> {
    let lists = AccessLists::new(settings);
    let Some(path) = &settings.connections else {
        return Ok(Records { lists, file: None });
    };
    let file = ConnectionFile::open(path, settings.connections_format, &settings.rules)
        .map_err(ProcessError::file("the connection log file", path))?;
    Ok(Records { lists, file: Some(file) })
}
