//! `turnpike forward`: starts the forwarder, and is the [`Service`] that reloads, drains and upgrades it.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use tokio::task::JoinHandle;
use turnpike_config::forward::{Format, ForwardLoaded, ForwardSettings, ForwardSources, protocol_name};
use turnpike_forward::{ConnectionLog, Forwarder, Protocol, Settings, StartError};
use turnpike_net::Datapath;

use crate::{
    admin::{self, AdminState, MetricsPage},
    admin_page::AdminPage,
    changes::ForwardChanges,
    connection_file::ConnectionFile,
    connection_log::{Records, SharedRecords, connection_log},
    control::{self, Service, Status, say_warnings},
    denial::Lists,
    error::DaemonError,
    forward_estate::{ForwardEstate, ForwardInheritance},
    forward_metrics, rlimit,
    upgrade::{self, Estate, Heir},
};

/// Forwards until a signal ends it.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn forward(sources: &ForwardSources) -> Result<(), DaemonError> {
    upgrade::begin("forward", |heir| {
        let loaded = sources.load()?;
        let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
        control::run((&level, format), async |status| {
            PortForwarder::start(sources.clone(), loaded, status, heir).await
        })
    })
}

struct PortForwarder {
    sources: ForwardSources,
    /// What the forwarder was started with; keys that a reload cannot change keep these values.
    started: ForwardSettings,
    settings: ForwardSettings,
    workers: usize,
    datapath: Datapath,
    forwarder: Arc<Forwarder>,
    records: SharedRecords,
    page: Option<AdminPage>,
    metrics: MetricsPage,
    /// Behind the forwarder: it is there for as long as that.
    pid_file: PidFile,
}

impl PortForwarder {
    async fn start(
        sources: ForwardSources,
        loaded: ForwardLoaded,
        status: &Arc<Status>,
        heir: &mut Option<Heir>,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let ForwardLoaded { settings, format, included, warnings } = loaded;
        say_source(sources.file(), format, &included, settings.rules.len());
        say_warnings(&warnings);
        let mut before = heir.as_mut().map(ForwardInheritance::new).transpose()?;
        let (workers, datapath, reason) = threads(&settings, before.as_ref());
        raise_open_files(&settings, workers);

        let records = SharedRecords::new(Mutex::new(open_records(&settings)?));
        let socket = before.as_mut().and_then(|before| before.page(settings.admin));
        let is_explicit = settings.is_explicit("admin.listen");
        let mut page = AdminPage::bind(settings.admin, is_explicit, socket).await?;
        let (logger, writer) = connection_log(Arc::clone(&records));
        let log_counts = logger.counts();
        let log: Arc<dyn ConnectionLog> = Arc::new(logger);
        let runtime = for_runtime(&settings, workers, datapath);
        let is_first = before.is_none();
        let (forwarder, failed) = match before {
            None => Forwarder::start(&runtime, &settings.rules, log)?,
            Some(before) => {
                Forwarder::start_as_heir(&runtime, &settings.rules, log, before.into_forwarder())?
            }
        };
        say_left_out(&failed);
        if forwarder.listeners().is_empty() {
            return Err(DaemonError::NothingLeft);
        }
        take_over(heir, status, &forwarder)?;
        let pid_file = match PidFile::write(settings.pid_file.as_deref()) {
            // Clients are served by now.
            Err(error) if !is_first => {
                tracing::warn!("{error}");
                PidFile(None)
            }
            written => written?,
        };
        say_what_started(&settings, &forwarder, page.as_ref().map(AdminPage::address));
        tracing::info!("data path {datapath}: {reason}; workers: {workers}");

        let forwarder = Arc::new(forwarder);
        // Weak, so that the last owner can stop the forwarder while a scrape is under way.
        let weak = Arc::downgrade(&forwarder);
        let snapshots = move || weak.upgrade().map_or_else(Vec::new, |forwarder| forwarder.snapshots());
        let metrics = forward_metrics::page(snapshots, Arc::clone(status), log_counts);
        if let Some(page) = &mut page {
            let (metrics, hosts) = (Arc::clone(&metrics), settings.admin_hosts.clone());
            page.begin(AdminState { metrics, draining: status.draining(), hosts });
        }
        let service = Self {
            sources,
            started: settings.clone(),
            settings,
            workers,
            datapath,
            forwarder,
            records,
            page,
            metrics,
            pid_file,
        };
        Ok((service, tokio::spawn(writer.run())))
    }

    fn take(&mut self, loaded: ForwardLoaded) -> Result<(), DaemonError> {
        let ForwardLoaded { settings: new, format, included, warnings } = loaded;
        say_warnings(&warnings);
        control::say_unchangeable(&self.started.unchangeable(&new));
        let records = open_records(&new)?;
        say_left_out(&self.forwarder.reload(&for_runtime(&new, self.workers, self.datapath), &new.rules)?);
        // Opened anew even where nothing changed: log rotation moves the old one away.
        *self.records.lock().unwrap_or_else(PoisonError::into_inner) = records;
        if self.settings.pid_file != new.pid_file {
            // The old one goes first: the new name may lead to the same file.
            self.pid_file = PidFile(None);
            match PidFile::write(new.pid_file.as_deref()) {
                Ok(file) => self.pid_file = file,
                Err(error) => tracing::warn!("{error}"),
            }
        }
        say_source(self.sources.file(), format, &included, new.rules.len());
        ForwardChanges::new(&self.settings, &new).say(new.rules.len());
        self.settings = new;
        Ok(())
    }
}

impl Service for PortForwarder {
    fn reload(&mut self) -> bool {
        let taken = self.sources.load().map_err(DaemonError::from).and_then(|loaded| self.take(loaded));
        if let Err(error) = &taken {
            control::say_refused(error, "rules not reloaded: the old ones stay in force");
        }
        taken.is_ok()
    }

    fn has_failed(&self) -> bool {
        self.forwarder.has_failed()
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown_deadline.into())
    }

    fn drain(&mut self, patience: Duration) {
        self.forwarder.drain();
        let deadline_s = patience.as_secs();
        tracing::info!(connections = self.open(), deadline_s, "draining: nothing new is accepted");
    }

    fn open(&self) -> u64 {
        self.forwarder.active()
    }

    fn say_left(&self, open: u64) {
        tracing::warn!(connections = open, "connections still open are ended");
    }

    fn estate(&self) -> Arc<dyn Estate> {
        Arc::new(ForwardEstate {
            forwarder: Arc::clone(&self.forwarder),
            page: self.page.as_ref().map(AdminPage::lend),
            metrics: Arc::clone(&self.metrics),
        })
    }

    fn metrics(&self) -> String {
        (self.metrics)().unwrap_or_default()
    }

    fn patience_after_upgrade(&self) -> Duration {
        Duration::from_secs(self.settings.upgrade_deadline.into())
    }

    fn handed_over(&mut self, patience: Duration) {
        if let Some(page) = self.page.take() {
            page.leave();
        }
        self.pid_file.leave();
        let deadline_s = patience.as_secs();
        tracing::info!(connections = self.open(), deadline_s, "handed over; TCP connections live on here");
    }

    fn left(&self) -> u64 {
        self.open()
    }
}

/// Goes on where the process before stops, if there is one.
fn take_over(heir: &mut Option<Heir>, status: &Status, forwarder: &Forwarder) -> Result<(), DaemonError> {
    if let Some(heir) = heir {
        let unfit =
            |error: io::Error| DaemonError::Upgrade(format!("cannot take the sessions over: {error}"));
        heir.take_over(status.carried(), || forwarder.inherited().map_err(unfit), || forwarder.serve())?;
    }
    // From now on nothing goes back to that one.
    if let Some(heir) = heir.take() {
        heir.listen(Arc::clone(status.carried()), || {});
    }
    Ok(())
}

/// How many workers there are, how datagrams enter and leave them, and why so.
fn threads(settings: &ForwardSettings, before: Option<&ForwardInheritance>) -> (usize, Datapath, String) {
    let workers = settings.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let (datapath, reason) = match settings.datapath {
        Some(step) => (step, "as configured".to_owned()),
        None => Datapath::best(),
    };
    let Some((kept_workers, kept_datapath)) = before.map(ForwardInheritance::kept) else {
        return (workers, datapath, reason);
    };
    let differ = [
        (workers != kept_workers, "forward.workers"),
        (settings.datapath.is_some_and(|step| step != kept_datapath), "forward.datapath"),
    ];
    let differ: Vec<&str> = differ.into_iter().filter(|(differs, _)| *differs).map(|(_, key)| key).collect();
    control::say_unchangeable(&differ);
    (kept_workers, kept_datapath, "that of the process before".to_owned())
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

fn say_what_started(settings: &ForwardSettings, forwarder: &Forwarder, page: Option<SocketAddr>) {
    for (id, address) in forwarder.listeners() {
        let rule = settings.rules.iter().find(|rule| rule.id == id);
        let transport = match rule.map(|rule| rule.protocol) {
            Some(Protocol::Tcp | Protocol::TcpToUdp { .. }) | None => "tcp",
            Some(Protocol::Udp | Protocol::UdpToTcp { .. }) => "udp",
        };
        let protocol = rule.map_or("", |rule| protocol_name(rule.protocol));
        let targets = rule.map_or_else(String::new, |rule| {
            rule.targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        });
        tracing::info!("listening on {transport} {address} for {targets} ({protocol}, rule {})", id.0);
    }
    admin::say_where(page);
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

    /// It names another process by now.
    fn leave(&mut self) {
        self.0 = None;
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
