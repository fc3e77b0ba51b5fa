//! `turnpike forward`: starts the forwarder, and is the [`Service`] that reloads and drains it.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use tokio::{net::TcpListener, task::JoinHandle};
use turnpike_config::{
    DatapathChoice,
    forward::{Format, ForwardLoaded, ForwardSettings, ForwardSources, protocol_name},
};
use turnpike_forward::{ConnectionLog, Forwarder, Hook, Kernel, Protocol, Rule, Settings, StartError};
use turnpike_net::Datapath;

use crate::{
    admin::{self, AdminState},
    changes::ForwardChanges,
    connection_file::ConnectionFile,
    connection_log::{Records, SharedRecords, connection_log},
    control::{self, Service, Status, say_warnings},
    denial::Lists,
    error::DaemonError,
    forward_metrics, kernel_path, rlimit,
};

/// Forwards until a signal ends it.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn forward(sources: &ForwardSources) -> Result<(), DaemonError> {
    let loaded = sources.load()?;
    let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
    control::run((&level, format), async |status| PortForwarder::start(sources.clone(), loaded, status).await)
}

struct PortForwarder {
    sources: ForwardSources,
    /// What the forwarder was started with; keys that a reload cannot change keep these values.
    started: ForwardSettings,
    settings: ForwardSettings,
    workers: usize,
    datapath: Datapath,
    /// It has been said what the kernel's program was attached to.
    says_kernel: bool,
    forwarder: Arc<Forwarder>,
    records: SharedRecords,
    /// Behind the forwarder: it is there for as long as that.
    pid_file: PidFile,
}

impl PortForwarder {
    async fn start(
        sources: ForwardSources,
        loaded: ForwardLoaded,
        status: &Arc<Status>,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let ForwardLoaded { settings, format, included, warnings } = loaded;
        say_source(sources.file(), format, &included, settings.rules.len());
        say_warnings(&warnings);
        let workers =
            settings.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let (datapath, reason) = match settings.datapath {
            DatapathChoice::Step(step) => (step, "as configured".to_owned()),
            _ => Datapath::best(),
        };
        raise_open_files(&settings, workers);

        let records = SharedRecords::new(Mutex::new(open_records(&settings)?));
        let page = admin::bind(settings.admin, settings.is_explicit("admin.listen")).await?;
        let (logger, writer) = connection_log(Arc::clone(&records));
        let log_counts = logger.counts();
        let log: Arc<dyn ConnectionLog> = Arc::new(logger);
        let (forwarder, failed) =
            Forwarder::start(&for_runtime(&settings, &settings, workers, datapath), &settings.rules, log)?;
        say_left_out(&failed);
        if forwarder.listeners().is_empty() {
            return Err(DaemonError::NothingLeft);
        }
        let pid_file = PidFile::write(settings.pid_file.as_deref())?;
        say_what_started(&settings, &forwarder, page.as_ref());
        tracing::info!("data path {datapath}: {reason}; workers: {workers}");
        let says_kernel = say_kernel(&settings, &forwarder, &settings.rules, datapath);

        let forwarder = Arc::new(forwarder);
        if let Some(page) = page {
            // Weak, so that the last owner can stop the forwarder while a scrape is under way.
            let weak = Arc::downgrade(&forwarder);
            let snapshots = move || {
                weak.upgrade().map_or_else(Default::default, |forwarder| {
                    (forwarder.snapshots(), forwarder.kernel().as_deref().map(Kernel::snapshot))
                })
            };
            let metrics = forward_metrics::page(snapshots, Arc::clone(status), log_counts);
            let hosts = settings.admin_hosts.clone();
            admin::spawn(page, AdminState { metrics, draining: status.draining(), hosts });
        }
        let service = Self {
            sources,
            started: settings.clone(),
            settings,
            workers,
            datapath,
            says_kernel,
            forwarder,
            records,
            pid_file,
        };
        Ok((service, tokio::spawn(writer.run())))
    }

    fn take(&mut self, loaded: ForwardLoaded) -> Result<(), DaemonError> {
        let ForwardLoaded { settings: new, format, included, warnings } = loaded;
        say_warnings(&warnings);
        control::say_unchangeable(&self.started.unchangeable(&new));
        let records = open_records(&new)?;
        let runtime = for_runtime(&new, &self.started, self.workers, self.datapath);
        say_left_out(&self.forwarder.reload(&runtime, &new.rules)?);
        if !self.says_kernel {
            self.says_kernel = say_kernel(&self.started, &self.forwarder, &new.rules, self.datapath);
        }
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
}

/// `started` is what the forwarder was started with, for what a reload cannot change.
fn for_runtime(
    settings: &ForwardSettings,
    started: &ForwardSettings,
    workers: usize,
    datapath: Datapath,
) -> Settings {
    Settings {
        workers,
        datapath,
        kernel: started.datapath == DatapathChoice::Kernel,
        max_kernel_flows: started.kernel_flows,
        kernel_hook: Hook::Best,
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

fn say_what_started(settings: &ForwardSettings, forwarder: &Forwarder, page: Option<&TcpListener>) {
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

/// What the kernel forwards itself, if it does, and what that means.
fn say_kernel(started: &ForwardSettings, forwarder: &Forwarder, rules: &[Rule], datapath: Datapath) -> bool {
    let by_default = started.datapath == DatapathChoice::Kernel;
    let asked = |rule: &&Rule| rule.protocol == Protocol::Udp && rule.kernel.unwrap_or(by_default);
    for rule in rules.iter().filter(asked) {
        if let Some(obstacle) = rule.kernel_obstacle() {
            tracing::info!("rule {}: its datagrams stay in user space: {obstacle}", rule.id.0);
        }
    }
    let Some(kernel) = forwarder.kernel() else { return false };
    kernel_path::say(&kernel, started.kernel_flows, datapath);
    tracing::warn!(
        "what the kernel forwards itself never meets this machine's firewall (netfilter), nor its IPsec policies: clients are kept away \
         by allow and deny alone"
    );
    true
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
