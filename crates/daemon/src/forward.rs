//! `turnpike forward`: starts the forwarder, and is the [`Service`] that reloads and drains it.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle};
use turnpike_config::forward::{Format, ForwardLoaded, ForwardSettings, ForwardSources, protocol_name};
use turnpike_forward::{ConnectionLog, Forwarder, Protocol, Rule, Settings, StartError};
use turnpike_net::{Datapath, PassedSockets, passed::Transport};

use crate::{
    admin::{AdminInterface, Job, Listening, Program},
    changes::ForwardChanges,
    connection_file::ConnectionFile,
    connection_log::{Records, SharedRecords, connection_log},
    control::{self, Control, Reloaded, Service, say_warnings},
    denial::Lists,
    error::DaemonError,
    forward_metrics, passed, rlimit,
};

/// Forwards until a signal or an administrator ends it.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn forward(sources: &ForwardSources, interface: &dyn AdminInterface) -> Result<(), DaemonError> {
    // Before anything else is opened.
    let passed = PassedSockets::from_service_manager()?;
    let sources = sources.clone().with_fallback(passed::settings_of_forward(&passed));
    let loaded = sources.load()?;
    let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
    control::run((&level, format), async |control| {
        PortForwarder::start(sources, loaded, Arc::new(passed), control, interface)
    })
}

struct PortForwarder {
    sources: ForwardSources,
    /// What the forwarder was started with; keys that a reload cannot change keep these values.
    started: ForwardSettings,
    settings: ForwardSettings,
    /// For whoever looks.
    shown: watch::Sender<Arc<ForwardSettings>>,
    workers: usize,
    datapath: Datapath,
    /// For as long as something may be bound anew.
    passed: Arc<PassedSockets>,
    forwarder: Arc<Forwarder>,
    records: SharedRecords,
    /// Behind the forwarder: it is there for as long as that.
    pid_file: PidFile,
}

impl PortForwarder {
    fn start(
        sources: ForwardSources,
        loaded: ForwardLoaded,
        passed: Arc<PassedSockets>,
        control: &Control,
        interface: &dyn AdminInterface,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let ForwardLoaded { settings, format, included, warnings } = loaded;
        say_source(sources.file(), format, &included, settings.rules.len());
        say_warnings(&warnings);
        let workers =
            settings.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let (datapath, reason) = match settings.datapath {
            Some(step) => (step, "as configured".to_owned()),
            None => Datapath::best(),
        };
        passed::check(&passed, workers, |transport, at| listens(&settings.rules, transport, at))?;
        raise_open_files(&settings, workers);

        let records = SharedRecords::new(Mutex::new(open_records(&settings)?));
        let is_explicit = settings.is_explicit("admin.listen");
        let page =
            interface.listen(Job::Forward, &settings.admin, is_explicit).map_err(DaemonError::Admin)?;
        let (logger, writer) = connection_log(Arc::clone(&records));
        let log_counts = logger.counts();
        let log: Arc<dyn ConnectionLog> = Arc::new(logger);
        let (forwarder, failed) =
            Forwarder::start(&for_runtime(&settings, workers, datapath, &passed), &settings.rules, log)?;
        say_left_out(&failed);
        if forwarder.listeners().is_empty() {
            return Err(DaemonError::NothingLeft);
        }
        let pid_file = PidFile::write(settings.pid_file.as_deref())?;
        say_what_started(&settings, &forwarder, &*page);
        tracing::info!("data path {datapath}: {reason}; workers: {workers}");

        let forwarder = Arc::new(forwarder);
        // Weak, so that the last owner can stop the forwarder while others look at it.
        let weak = Arc::downgrade(&forwarder);
        let shown = watch::Sender::new(Arc::new(settings.clone()));
        page.serve(Program {
            job: Job::Forward,
            control: control.clone(),
            admin: {
                let settings = shown.subscribe();
                Arc::new(move || settings.borrow().admin.clone())
            },
            toml: {
                let settings = shown.subscribe();
                Arc::new(move || settings.borrow().to_toml())
            },
            open: {
                let forwarder = Weak::clone(&weak);
                Arc::new(move || forwarder.upgrade().map_or(0, |forwarder| forwarder.active()))
            },
            metrics: {
                let snapshots =
                    move || weak.upgrade().map_or_else(Vec::new, |forwarder| forwarder.snapshots());
                forward_metrics::page(snapshots, Arc::clone(control.status()), log_counts)
            },
            server: None,
        });
        let service = Self {
            sources,
            started: settings.clone(),
            settings,
            shown,
            workers,
            datapath,
            passed,
            forwarder,
            records,
            pid_file,
        };
        Ok((service, tokio::spawn(writer.run())))
    }

    fn take(&mut self, loaded: ForwardLoaded) -> Result<Reloaded, DaemonError> {
        let ForwardLoaded { settings: new, format, included, warnings } = loaded;
        let mut reloaded = Reloaded::default();
        reloaded.warn_all(warnings);
        reloaded.need_restart(&self.started.unchangeable(&new));
        let records = open_records(&new)?;
        let runtime = for_runtime(&new, self.workers, self.datapath, &self.passed);
        let failed = self.forwarder.reload(&runtime, &new.rules)?;
        reloaded.warnings.extend(say_left_out(&failed));
        if let Err(error) =
            passed::check(&self.passed, self.workers, |transport, at| listens(&new.rules, transport, at))
        {
            reloaded.warn(error.to_string());
        }
        // Opened anew even where nothing changed: log rotation moves the old one away.
        *self.records.lock().unwrap_or_else(PoisonError::into_inner) = records;
        if self.settings.pid_file != new.pid_file {
            // The old one goes first: the new name may lead to the same file.
            self.pid_file = PidFile(None);
            match PidFile::write(new.pid_file.as_deref()) {
                Ok(file) => self.pid_file = file,
                Err(error) => reloaded.warn(error.to_string()),
            }
        }
        say_source(self.sources.file(), format, &included, new.rules.len());
        let changes = ForwardChanges::new(&self.settings, &new);
        changes.say(new.rules.len());
        reloaded.changed = changes.lines();
        self.shown.send_replace(Arc::new(new.clone()));
        self.settings = new;
        Ok(reloaded)
    }
}

impl Service for PortForwarder {
    const OPEN: &'static str = "connections";

    async fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
        let taken = self.sources.load().map_err(DaemonError::from).and_then(|loaded| self.take(loaded));
        taken.map_err(|error| control::say_refused(&error, "rules not reloaded: the old ones stay in force"))
    }

    fn has_failed(&self) -> bool {
        self.forwarder.has_failed()
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown_deadline.into())
    }

    fn drain(&mut self, patience: Duration) {
        self.forwarder.drain();
        // Copies of listeners, which kept them open.
        self.passed = Arc::default();
        let deadline_s = patience.as_secs();
        tracing::info!(connections = self.open(), deadline_s, "draining: nothing new is accepted");
    }

    fn makes_progress(&self) -> bool {
        self.forwarder.makes_progress()
    }

    fn open(&self) -> u64 {
        self.forwarder.active()
    }

    fn say_left(&self, open: u64) {
        tracing::warn!(connections = open, "connections still open are ended");
    }
}

fn for_runtime(
    settings: &ForwardSettings,
    workers: usize,
    datapath: Datapath,
    passed: &Arc<PassedSockets>,
) -> Settings {
    Settings {
        workers,
        datapath,
        busy_poll: Duration::from_micros(settings.busy_poll_us.into()),
        access: settings.access.clone(),
        max_connections: settings.max_connections,
        resolve_every: Duration::from_secs(settings.resolve_every.into()),
        keep_going: settings.keep_going,
        passed: Arc::clone(passed),
    }
}

/// Whether a rule listens here.
fn listens(rules: &[Rule], transport: Transport, address: SocketAddr) -> bool {
    rules.iter().any(|rule| {
        transport_of(rule) == transport
            && rule.bind == address.ip().into()
            && (rule.ports.first..=rule.ports.last).contains(&address.port())
    })
}

/// What its clients speak.
fn transport_of(rule: &Rule) -> Transport {
    match rule.protocol {
        Protocol::Tcp | Protocol::TcpToUdp { .. } => Transport::Tcp,
        Protocol::Udp | Protocol::UdpToTcp { .. } => Transport::Udp,
    }
}

fn say_source(file: Option<&Path>, format: Option<Format>, included: &[PathBuf], rules: usize) {
    included.iter().for_each(|path| tracing::info!("{} is included", path.display()));
    match (file, format) {
        (Some(path), Some(format)) => {
            tracing::info!("{} is read as {format}; rules: {rules}", path.display());
        }
        _ => tracing::info!("rules of the command line: {rules}"),
    }
}

/// Says it, and gives the lines back.
fn say_left_out(failed: &[StartError]) -> Vec<String> {
    let lines = failed.iter().map(|error| format!("{error}; the other rules run (keep_going)"));
    lines.inspect(|line| tracing::error!("{line}")).collect()
}

fn say_what_started(settings: &ForwardSettings, forwarder: &Forwarder, page: &dyn Listening) {
    for (id, address) in forwarder.listeners() {
        let rule = settings.rules.iter().find(|rule| rule.id == id);
        let transport: &str = (&rule.map_or(Transport::Tcp, transport_of)).into();
        let protocol = rule.map_or("", |rule| protocol_name(rule.protocol));
        let targets = rule.map_or_else(String::new, |rule| {
            rule.targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        });
        tracing::info!("listening on {transport} {address} for {targets} ({protocol}, rule {})", id.0);
    }
    page.say_where();
}

/// Each connection has two sockets and, as bulk, two pipes; pipes are pooled, and few connections are bulk at a time.
fn raise_open_files(settings: &ForwardSettings, workers: usize) {
    let ports: usize =
        settings.rules.iter().map(|rule| usize::from(rule.ports.last - rule.ports.first) + 1).sum();
    let needed = ports * workers + 2 * settings.max_connections + 256 * workers + 64;
    let subject = format!("{} connections", settings.max_connections);
    rlimit::raise_open_files(needed as u64, &subject, "forward.max_connections");
}

/// The lists, and the file of connections if there is one.
fn open_records(settings: &ForwardSettings) -> Result<Records, DaemonError> {
    let lists = Lists::new(settings);
    let Some(path) = &settings.connection_file else {
        return Ok(Records { lists, file: None });
    };
    let file = ConnectionFile::open(path, settings.connection_format, &settings.rules)
        .map_err(DaemonError::file("the file of connections", path))?;
    Ok(Records { lists, file: Some(file) })
}

/// The file with the process ID, if there is one; removed with this.
struct PidFile(Option<PathBuf>);

impl PidFile {
    fn write(path: Option<&Path>) -> Result<Self, DaemonError> {
        if let Some(path) = path {
            fs::write(path, format!("{}\n", std::process::id()))
                .map_err(DaemonError::file("the process ID to", path))?;
        }
        Ok(Self(path.map(Path::to_owned)))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
    }
}
