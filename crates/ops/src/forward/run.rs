//! The control thread of `turnpike forward`: starts the workers, then waits for signals, reloads, scrapes and log lines until it
//! is told to stop.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::net::TcpListener;
use turnpike_forward::{ConnectionLog, Forwarder, Protocol, Settings, StartError};
use turnpike_net::Datapath;

use super::{
    Format, ForwardLoaded, ForwardSettings, ForwardSources,
    connection_file::ConnectionFile,
    connection_log::{ConnectionLogWriter, Records, SharedRecords, connection_log},
    denial::Lists,
    metrics,
    rule_keys::protocol_name,
};
use crate::{
    admin::{self, AdminError, AdminState},
    changes::ForwardChanges,
    config::ConfigErrors,
    control::{self, Next},
    limits, logging,
    signals::Signals,
};

/// Why `forward` ended other than by being told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// Nothing was started.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The forwarder did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Every rule failed, each for the reason in the log.
    #[error("no rule is left to run; the log lines above say why of each")]
    NothingLeft,
    /// The admin address that was asked for cannot be had.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A file that the configuration names.
    #[error("cannot write {what} {}: {source}; name another file, or none", path.display())]
    File {
        /// Which of them.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A worker ended by itself.
    #[error(
        "a worker has ended though nobody stopped it; the log lines above may say why, and a restart helps"
    )]
    Worker,
    /// The control thread itself.
    #[error("cannot start the control thread: {0}")]
    Control(#[source] io::Error),
}

/// Forwards until a signal ends it.
///
/// # Errors
/// See [`ForwardError`]; configuration errors come before any socket is opened.
pub fn forward(sources: &ForwardSources) -> Result<(), ForwardError> {
    let loaded = sources.load()?;
    logging::init(&loaded.settings.log_level, loaded.settings.log_format);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ForwardError::Control)?;
    runtime.block_on(Control::run(sources, loaded))
}

struct Control<'a> {
    sources: &'a ForwardSources,
    /// What the forwarder was started with; keys that a reload cannot change keep these values.
    started: ForwardSettings,
    settings: ForwardSettings,
    workers: usize,
    datapath: Datapath,
    forwarder: Arc<Forwarder>,
    records: SharedRecords,
    draining: Arc<AtomicBool>,
    /// Removed at the end.
    pid_file: PidFile,
}

impl<'a> Control<'a> {
    async fn run(sources: &'a ForwardSources, loaded: ForwardLoaded) -> Result<(), ForwardError> {
        // Before anything else, so that no signal finds its default action while connections exist.
        let mut signals = Signals::new().map_err(ForwardError::Control)?;
        let ForwardLoaded { settings, format, included, warnings } = loaded;
        tracing::info!("turnpike {}", env!("CARGO_PKG_VERSION"));
        say_source(sources.file(), format, &included, settings.rules.len());
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));

        let workers =
            settings.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let (datapath, reason) = match settings.datapath {
            Some(step) => (step, "as configured".to_owned()),
            None => Datapath::best(),
        };
        raise_open_files(&settings, workers);

        let records = SharedRecords::new(Mutex::new(open_records(&settings)?));
        let admin = admin::bind(settings.admin, settings.is_explicit("admin.listen")).await?;
        let (logger, writer) = connection_log(Arc::clone(&records));
        let log_counts = logger.counts();
        let log: Arc<dyn ConnectionLog> = Arc::new(logger);
        let (forwarder, failed) =
            Forwarder::start(&for_runtime(&settings, workers, datapath), &settings.rules, log)?;
        say_left_out(&failed);
        if forwarder.listeners().is_empty() {
            return Err(ForwardError::NothingLeft);
        }
        let pid_file = PidFile::write(settings.pid_file.as_deref())?;
        say_what_started(&settings, &forwarder, admin.as_ref());
        tracing::info!("data path {datapath}: {reason}; workers: {workers}");

        let control = Self {
            sources,
            started: settings.clone(),
            settings,
            workers,
            datapath,
            forwarder: Arc::new(forwarder),
            records,
            draining: Arc::new(AtomicBool::new(false)),
            pid_file,
        };
        if let Some(listener) = admin {
            // Weak, so that the last owner can stop the forwarder while a scrape is under way.
            let forwarder = Arc::downgrade(&control.forwarder);
            let snapshots =
                move || forwarder.upgrade().map_or_else(Vec::new, |forwarder| forwarder.snapshots());
            let state = AdminState {
                metrics: metrics::page(snapshots, Arc::clone(&control.draining), log_counts),
                draining: Arc::clone(&control.draining),
                hosts: control.started.admin_hosts.clone(),
            };
            admin::spawn(listener, state);
        }
        control.until_stopped(&mut signals, writer).await
    }

    async fn until_stopped(
        mut self,
        signals: &mut Signals,
        writer: ConnectionLogWriter,
    ) -> Result<(), ForwardError> {
        let log = tokio::spawn(writer.run());
        let failed = loop {
            let deadline = self.settings.shutdown_deadline;
            match control::next(signals, deadline, || self.forwarder.has_failed()).await {
                Next::Reload => self.reload(),
                Next::Drain(patience) => {
                    self.drain(signals, patience).await;
                    break false;
                }
                Next::Failed => break true,
            }
        };
        self.draining.store(true, Ordering::Relaxed);
        control::stop("forwarder", self.forwarder, Forwarder::stop, log).await;
        self.pid_file.remove();
        tracing::info!("stopped");
        if failed { Err(ForwardError::Worker) } else { Ok(()) }
    }

    /// Waits for the connections to end: at most `patience`, and no longer than until the next signal.
    async fn drain(&self, signals: &mut Signals, patience: Duration) {
        self.draining.store(true, Ordering::Relaxed);
        self.forwarder.drain();
        let open = self.forwarder.active();
        tracing::info!(
            connections = open,
            deadline_s = patience.as_secs(),
            "draining: nothing new is accepted"
        );
        let deadline = self.settings.shutdown_deadline;
        let left = control::drained(signals, deadline, patience, || self.forwarder.active()).await;
        if left > 0 {
            tracing::warn!(connections = left, "connections still open are ended");
        }
    }

    /// Takes rules and settings anew; what is broken changes nothing.
    fn reload(&mut self) {
        let refused = "rules not reloaded: the old ones stay in force";
        let ForwardLoaded { settings: new, format, included, warnings } = match self.sources.load() {
            Ok(loaded) => loaded,
            Err(errors) => return control::say_refused(&errors, refused),
        };
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        control::say_unchangeable(&self.started.unchangeable(&new));
        let records = match open_records(&new) {
            Ok(records) => records,
            Err(error) => {
                tracing::error!("{error}");
                tracing::error!("{refused}");
                return;
            }
        };
        let runtime = for_runtime(&new, self.workers, self.datapath);
        match self.forwarder.reload(&runtime, &new.rules) {
            Ok(failed) => say_left_out(&failed),
            Err(error) => {
                tracing::error!("{error}");
                tracing::error!("{refused}");
                return;
            }
        }
        // Opened anew even where nothing changed: log rotation moves the old one away.
        *self.records.lock().unwrap_or_else(PoisonError::into_inner) = records;
        if self.settings.pid_file != new.pid_file {
            self.pid_file.remove();
            match PidFile::write(new.pid_file.as_deref()) {
                Ok(file) => self.pid_file = file,
                Err(error) => tracing::warn!("{error}"),
            }
        }
        say_source(self.sources.file(), format, &included, new.rules.len());
        ForwardChanges::new(&self.settings, &new).say(new.rules.len());
        self.settings = new;
    }
}

fn for_runtime(settings: &ForwardSettings, workers: usize, datapath: Datapath) -> Settings {
    Settings {
        workers,
        datapath,
        busy_poll: Duration::from_micros(settings.busy_poll_us.into()),
        access: settings.access.clone(),
        max_connections: settings.max_connections,
        resolve_every: Duration::from_secs(settings.resolve_every.into()),
        keep_going: settings.keep_going,
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

fn say_left_out(failed: &[StartError]) {
    for error in failed {
        tracing::error!("{error}; the other rules run (keep_going)");
    }
}

fn say_what_started(settings: &ForwardSettings, forwarder: &Forwarder, admin: Option<&TcpListener>) {
    for (id, address) in forwarder.listeners() {
        let rule = settings.rules.iter().find(|rule| rule.id == id);
        let transport = match rule.map(|rule| rule.protocol) {
            Some(Protocol::Tcp | Protocol::TcpToUdp { .. }) | None => "tcp",
            Some(Protocol::Udp | Protocol::UdpToTcp { .. }) => "udp",
        };
        let protocol = rule.map_or("", |rule| protocol_name(rule.protocol));
        let targets = rule.map_or_else(String::new, |rule| {
            rule.targets.iter().map(super::parts::show_endpoint).collect::<Vec<_>>().join(", ")
        });
        tracing::info!("listening on {transport} {address} for {targets} ({protocol}, rule {})", id.0);
    }
    admin::say_where(admin);
}

/// Each connection has two sockets and, as bulk, two pipes; pipes are pooled, and few connections are bulk at a time.
fn raise_open_files(settings: &ForwardSettings, workers: usize) {
    let ports: usize =
        settings.rules.iter().map(|rule| usize::from(rule.ports.last - rule.ports.first) + 1).sum();
    let needed = ports * workers + 2 * settings.max_connections + 256 * workers + 64;
    let subject = format!("{} connections", settings.max_connections);
    limits::raise_open_files(needed as u64, &subject, "forward.max_connections");
}

/// The lists, and the file of connections if there is one.
fn open_records(settings: &ForwardSettings) -> Result<Records, ForwardError> {
    let lists = Lists::new(settings);
    let Some(path) = &settings.connection_file else {
        return Ok(Records { lists, file: None });
    };
    let file = ConnectionFile::open(path, settings.connection_format, &settings.rules).map_err(|source| {
        ForwardError::File { what: "the file of connections", path: path.clone(), source }
    })?;
    Ok(Records { lists, file: Some(file) })
}

/// The file with the process ID, if there is one.
struct PidFile(Option<PathBuf>);

impl PidFile {
    fn write(path: Option<&Path>) -> Result<Self, ForwardError> {
        if let Some(path) = path {
            fs::write(path, format!("{}\n", std::process::id())).map_err(|source| ForwardError::File {
                what: "the process ID to",
                path: path.to_owned(),
                source,
            })?;
        }
        Ok(Self(path.map(Path::to_owned)))
    }

    fn remove(&mut self) {
        if let Some(path) = self.0.take()
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
    }
}
