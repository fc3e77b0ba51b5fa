//! `turnpike serve`: starts the TURN server, and is the [`Service`] that reloads, drains and upgrades it.

use std::{
    fmt::Display,
    io::Write,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use tokio::{sync::watch, task::JoinHandle, time::timeout};
use turnpike_admin::{Applications, Interface, Serving};
use turnpike_api::{Job, Reloaded};
use turnpike_config::{Loaded, Mistake, Mistakes, Settings, Sources, User, UserSecret};
use turnpike_net::{Datapath, PassedSockets};
use turnpike_relay::{
    CredentialStore, Kernel, Relay, RelayState, Relistened, SessionLog, TurnedAway, Waiting,
};
use turnpike_turn::server::{Effect, NonceKey};

use crate::{
    admin::{self, AdminView, MetricsPage, ServerHandle},
    certificates::{Certificates, Contexts},
    changes::ServeChanges,
    control::{self, Control, Service, Status, say_warnings},
    credentials::Credentials,
    error::DaemonError,
    fleet::{self, Begun, Fleet, FleetEstate, NodeKeys, StatusLines, StatusWriter},
    kernel_path,
    log_limit::LogCounts,
    logging,
    machine::Machine,
    own_addresses::News,
    passed,
    plan::{self, Plan},
    refusals::Refusals,
    rlimit,
    sandbox::{self, Needs},
    serve_estate::{ServeEstate, ServeInheritance},
    serve_metrics::{self, Snapshots},
    session_log::{SessionLogWriter, SessionLogger, session_log},
    session_totals::SessionTotals,
    store::{self, MadeUp, Merged, OpenError, OpenStore, SharedStore},
    upgrade::{self, Estate, Heir},
};

/// Runs a TURN server until a signal or an administrator ends it. A generated credential goes to `out`, once.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn serve(sources: &Sources, out: &mut dyn Write) -> Result<(), DaemonError> {
    sandbox::forbid_core_dumps();
    upgrade::begin("serve", |heir| {
        // Before anything else is opened.
        let (before, passed) = match heir {
            Some(heir) => {
                let (before, passed) = ServeInheritance::new(heir)?;
                (Some(before), passed)
            }
            None => (None, PassedSockets::from_service_manager()?),
        };
        let sources = sources.clone().with_fallback(passed::settings_of_serve(&passed));
        let loaded = sources.load()?;
        check_store(&loaded.settings)?;
        let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
        let datapath = loaded.settings.datapath;
        let datapath = before.as_ref().map_or(datapath, |before| before.kept_datapath(datapath).0);
        let needs = || Needs::of_server(&sources, &Settings { datapath, ..loaded.settings.clone() });
        sandbox::enter(&loaded.settings.sandbox, needs);
        let found = Found { sources, loaded, passed: Arc::new(passed), before };
        control::run((&level, format), async |control| TurnServer::start(found, control, out, heir).await)
    })
}

/// Whether the settings name stores that can be some; they are not connected to.
fn check_store(settings: &Settings) -> Result<(), Mistakes> {
    store::address(settings)?;
    fleet::address(settings).map(drop)
}

/// What a server begins with.
struct Found {
    sources: Sources,
    loaded: Loaded,
    /// By a service manager.
    passed: Arc<PassedSockets>,
    /// In place of which it begins.
    before: Option<ServeInheritance>,
}

struct TurnServer {
    sources: Sources,
    /// What the relay was started with; keys that a reload cannot change keep these values.
    started: Settings,
    settings: Settings,
    /// For whoever looks.
    shown: watch::Sender<Shown>,
    /// Where there is no store to keep it.
    generated: Option<User>,
    store: Option<OpenStore>,
    /// The same for metrics.
    shared_store: SharedStore,
    fleet: Arc<Fleet>,
    relay: Arc<Relay>,
    /// What a service manager has passed.
    passed: Arc<PassedSockets>,
    machine: Machine,
    /// What the limit of open files was raised for.
    open_files: u64,
    /// Listeners without a socket, as the log has them.
    waiting: Vec<Waiting>,
    certificates: Certificates,
    /// For applications, and the admin interface.
    pages: [Arc<Serving>; 2],
    metrics: MetricsPage,
}

impl TurnServer {
    async fn start(
        found: Found,
        control: &Control,
        out: &mut dyn Write,
        heir: &mut Option<Heir>,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let Found { sources, loaded, passed, mut before } = found;
        let Loaded { mut settings, certificates, warnings } = loaded;
        say_warnings(&warnings);
        let started = settings.clone();
        if let Some(before) = &before {
            before.keep(&mut settings);
        }
        let (mut store, generated) = open_store(&mut settings, before.as_ref()).await?;
        let merged = merge(&settings, store.as_mut());
        let certificates = Certificates::new(&settings, certificates)?;
        let (fleet, begun) = join_fleet(&settings, before.as_ref()).await?;
        let mut machine = Machine::find(before.as_ref().map_or(&[], ServeInheritance::relay_addresses));
        let news = News::subscribe();
        // What has changed in between is seen by the first look.
        machine.may_have_changed();
        let as_before = (before.as_ref(), &machine);
        let mut plan = plan_start(&merged, fleet.keys(), &certificates, &passed, as_before)?;
        raise_open_files(&plan, &settings);

        let (page, applications) = listen_for_pages(&settings, before.as_mut())?;
        // They take loopback for this machine, and a client that has TCP relayed would come from the server's own address.
        plan.config.listeners_beside = [page.addresses(), applications.addresses()].concat();
        let (log, logs) = session_logs(&fleet);
        let is_first = before.is_none();
        let credentials = credentials(&merged, store.as_ref());
        let relay = start_relay(&plan, &fleet, credentials, log, before)?;
        let is_attached = take_over(heir, control.status(), &relay, &plan)?;
        say_what_started(&plan, &relay);
        page.say_where();
        applications.say_where();
        sandbox::say();
        if is_attached {
            say_where_attached(&relay, plan.config.max_kernel_flows, plan.config.datapath);
        }
        say_notes(&plan);
        certificates.say();
        if let Some(generated) = generated.as_ref().filter(|_| is_first) {
            generated.print(&settings.realm, out);
        }
        store::note_realm(&settings);
        let shared_store = SharedStore::default();
        store::share(&shared_store, store.as_ref());
        let orders = fleet.begin(begun, &relay, &plan, Arc::clone(&shared_store));

        tokio::spawn(control.clone().follow_machine(news));
        machine.put_into_force(&plan.config);
        let waiting = relay.waiting();
        say_waiting(&waiting);
        let shown = watch::Sender::new(Shown::new(&settings, &merged, &machine));
        let server = ServerHandle {
            relay: Arc::downgrade(&relay),
            shown: shown.subscribe(),
            store: Arc::clone(&shared_store),
            certificates: certificates.told(),
            datapath: plan.config.datapath,
            datapath_reason: plan.datapath_reason.as_str().into(),
            fleet: orders,
            refusals: Arc::clone(&logs.refusals),
        };
        let metrics = metrics_page(&server, &fleet, &logs, control);
        let program = Arc::new(admin_view(control, Arc::clone(&metrics), server));
        let pages =
            [applications.serve(Arc::<AdminView>::clone(&program)), page.serve(program)].map(Arc::new);
        let server = Self {
            sources,
            started,
            settings,
            shown,
            generated: generated.and_then(Generated::not_kept),
            store,
            shared_store,
            fleet,
            relay,
            passed,
            machine,
            open_files: plan.open_files(),
            waiting,
            certificates,
            pages,
            metrics,
        };
        Ok((server, tokio::spawn(logs.write())))
    }

    /// What has changed, or why it cannot be taken: then nothing has changed.
    async fn take(&mut self, loaded: Loaded, problems: &[Mistake]) -> Result<Reloaded, Vec<String>> {
        let Loaded { settings: mut new, certificates, warnings } = loaded;
        let unchangeable = self.started.unchangeable(&new);
        new.keep_unchangeable(&self.settings);
        let refused = |error: &dyn Display| control::say_refused(error, NOT_RELOADED);
        let store = if new.store == self.settings.store {
            None
        } else {
            Some(OpenStore::open(&new, true).await.map_err(|error| refused(&error))?)
        };
        if let (Some(Some(new)), Some(old)) = (&store, &self.store) {
            new.replace(old);
        }
        let in_use = store.as_ref().unwrap_or(&self.store).as_ref().is_some_and(OpenStore::is_in_use);
        if plan::names_nobody(&new) && !in_use {
            if self.generated.is_none() {
                return Err(refused(&"it names neither users nor secrets, so nobody could authenticate"));
            }
            new.users.extend(self.generated.clone());
        }
        let contexts = self.certificates.contexts(&new, &certificates, problems);
        let contexts = contexts.map_err(|error| refused(&error))?;
        let notes = self.put_into_force(&new, store, contexts).map_err(|error| refused(&error))?;
        let mut reloaded = Reloaded::default();
        warnings.into_iter().chain(notes).for_each(|warning| control::warn(&mut reloaded, warning));
        control::need_restart(&mut reloaded, &unchangeable);
        let old = std::mem::replace(&mut self.settings, new);
        store::note_realm(&self.settings);
        self.fleet.set(&self.settings);
        let changes = ServeChanges::new(&old, &self.settings);
        reloaded.changed = changes.lines();
        self.certificates.reload(&self.settings, certificates, problems, &mut reloaded);
        changes.say(&self.settings);
        // Last, so that nobody misses what has changed because the level has.
        if old.log_level != self.settings.log_level
            && let Err(error) = logging::set_level(&self.settings.log_level)
        {
            control::warn(&mut reloaded, format!("log.level stays {}: {error}", old.log_level));
        }
        Ok(reloaded)
    }

    /// Settings with what the store says, be it the one that there was or a `new` one: all of a reload that can fail. Where it does, nothing
    /// has changed. What the log should say.
    fn put_into_force(
        &mut self,
        settings: &Settings,
        new: Option<Option<OpenStore>>,
        (tls, dtls): Contexts,
    ) -> Result<Vec<String>, DaemonError> {
        let (is_new, mut store) = match new {
            Some(new) => (true, new),
            None => (false, self.store.take()),
        };
        let in_force = store.as_ref().and_then(OpenStore::taken);
        let layout = self.relay.layout();
        let merged = merge(settings, store.as_mut());
        let plan =
            Plan::new(&merged, self.fleet.keys(), tls.clone(), dtls.clone(), Some(&layout), &self.machine);
        let is_served = |transport, at| plan.listens(transport, at);
        let relistened = passed::check(&self.passed, plan.config.workers, is_served).and_then(|()| {
            let credentials = credentials(&merged, store.as_ref());
            Ok(self.relay.reconfigure(&plan.config, &plan.layout, &credentials)?)
        });
        if is_new && relistened.is_ok() {
            store::share(&self.shared_store, store.as_ref());
        }
        if !is_new || relistened.is_ok() {
            self.store = store;
        }
        let relistened = relistened.inspect_err(|_| {
            // The previous values stay in force.
            if let Some(store) = self.store.as_mut().filter(|_| !is_new) {
                store.put_back(in_force);
            }
        })?;
        (self.certificates.tls, self.certificates.dtls) = (tls, dtls);
        if plan.open_files() != self.open_files {
            raise_open_files(&plan, settings);
            self.open_files = plan.open_files();
        }
        self.machine.put_into_force(&plan.config);
        self.shown.send_replace(Shown::new(settings, &merged, &self.machine));
        self.fleet.listens(&self.relay, &plan);
        say_relistened(&relistened);
        let waiting = self.relay.waiting();
        if waiting != self.waiting {
            say_waiting(&waiting);
            self.waiting = waiting;
        }
        Ok(plan.notes)
    }
}

impl TurnServer {
    /// The same settings, with what the store or the machine says now.
    fn put_into_force_again(&mut self) -> Result<Vec<String>, DaemonError> {
        let contexts = (self.certificates.tls.clone(), self.certificates.dtls.clone());
        self.put_into_force(&self.settings.clone(), None, contexts)
    }
}

/// Time that changes at work have when the program ends.
const LAST_CHANGES: Duration = Duration::from_secs(2);
const NOT_RELOADED: &str = "configuration not reloaded: the old one stays in force";

/// What holds, for whoever looks at it.
#[derive(Clone)]
pub(crate) struct Shown {
    pub(crate) configured: Arc<Settings>,
    /// With what the store adds.
    pub(crate) in_force: Arc<Settings>,
    /// Those that relayed transport addresses are made on.
    pub(crate) addresses: Arc<[RelayState]>,
}

impl Shown {
    fn new(configured: &Settings, merged: &Merged, machine: &Machine) -> Self {
        Self {
            configured: Arc::new(configured.clone()),
            in_force: Arc::new(merged.settings.clone()),
            addresses: machine.states().into(),
        }
    }
}

/// The store, and who was made up where nobody could authenticate.
async fn open_store(
    settings: &mut Settings,
    before: Option<&ServeInheritance>,
) -> Result<(Option<OpenStore>, Option<Generated>), DaemonError> {
    let store = OpenStore::open(settings, false).await.map_err(|error| match error {
        OpenError::Address(errors) => DaemonError::Config(errors),
        OpenError::Store(error) => DaemonError::Store(error),
    })?;
    if let (Some(store), Some(before)) = (&store, before) {
        before.remember_ended_secrets(&store.directory);
    }
    let generated = match before {
        None => generate_credential(settings, store.as_ref()).await,
        Some(before) => inherit_credential(settings, store.as_ref(), before)?,
    };
    Ok((store, generated))
}

async fn join_fleet(
    settings: &Settings,
    before: Option<&ServeInheritance>,
) -> Result<(Arc<Fleet>, Begun), DaemonError> {
    let own_key = before.map_or_else(|| NonceKey(rand::random()), ServeInheritance::own_key);
    Fleet::join(settings, own_key, before.map(ServeInheritance::fleet)).await
}

/// What a server starts with: like the process before, where there is one.
fn plan_start(
    merged: &Merged,
    keys: NodeKeys,
    certificates: &Certificates,
    passed: &Arc<PassedSockets>,
    (before, machine): (Option<&ServeInheritance>, &Machine),
) -> Result<Plan, DaemonError> {
    let (tls, dtls) = (certificates.tls.clone(), certificates.dtls.clone());
    let mut plan = Plan::new(merged, keys, tls, dtls, before.map(ServeInheritance::layout), machine);
    passed::check(passed, plan.config.workers, |transport, at| plan.listens(transport, at))?;
    passed::say_few_workers(passed, merged.settings.origin("server.workers"), plan.config.workers);
    plan.config.passed = Arc::clone(passed);
    if let Some(before) = before {
        plan.config.datapath = before.datapath();
        plan.datapath_reason = "that of the process before".to_owned();
        if let (Some(tls), Some(keys)) = (&certificates.tls, before.tickets()) {
            tls.take_over(keys);
        }
    }
    Ok(plan)
}

/// The listeners of the admin interface and those for applications, by what the process before has lent.
fn listen_for_pages(
    settings: &Settings,
    before: Option<&mut ServeInheritance>,
) -> Result<(Interface, Applications), DaemonError> {
    let lent = before.map(ServeInheritance::page).unwrap_or_default();
    let for_applications = |name: &str| settings.credentials.listen.iter().any(|at| at.to_string() == name);
    let (lent_to_applications, lent) = lent.into_iter().partition(|(name, _)| for_applications(name));
    let is_explicit = settings.is_explicit("admin.listen");
    let page = Interface::listen(Job::Serve, &settings.admin, is_explicit, lent)?;
    Ok((page, Applications::listen(settings, lent_to_applications)?))
}

/// Its workers take the sessions of the process before in, where there is one.
fn start_relay(
    plan: &Plan,
    fleet: &Arc<Fleet>,
    credentials: Arc<dyn CredentialStore>,
    log: Arc<dyn SessionLog>,
    before: Option<ServeInheritance>,
) -> Result<Arc<Relay>, DaemonError> {
    let fleet: Option<Arc<dyn turnpike_relay::Fleet>> = Some(Arc::<Fleet>::clone(fleet));
    Ok(Arc::new(match before.map(ServeInheritance::into_relay) {
        None => Relay::start_in(fleet, &plan.config, credentials, log)?,
        Some(from) => Relay::start_as_heir(fleet, &plan.config, &plan.layout, credentials, log, from)?,
    }))
}

fn metrics_page(
    server: &ServerHandle,
    fleet: &Arc<Fleet>,
    logs: &SessionLogs,
    control: &Control,
) -> MetricsPage {
    let relay = Weak::clone(&server.relay);
    let shown = server.shown.clone();
    let snapshots = move || {
        let relays = Arc::clone(&shown.borrow().addresses);
        relay.upgrade().map_or_else(Default::default, |relay| snapshots(&relay, relays))
    };
    let told = (Arc::clone(&server.certificates), Arc::clone(&server.store), Arc::clone(&logs.totals));
    let (fleet, status) = (Arc::clone(fleet), Arc::clone(control.status()));
    serve_metrics::page(snapshots, told, move || fleet.counts(), status, Arc::clone(&logs.counts))
}

fn admin_view(control: &Control, metrics: MetricsPage, server: ServerHandle) -> AdminView {
    let (of_admin, of_toml) = (server.shown.clone(), server.shown.clone());
    let (relay, carried) = (Weak::clone(&server.relay), Arc::clone(control.status().carried()));
    AdminView {
        job: Job::Serve,
        control: control.clone(),
        admin: Arc::new(move || of_admin.borrow().configured.admin.clone()),
        toml: Arc::new(move || of_toml.borrow().configured.to_toml()),
        open: Arc::new(move || {
            relay.upgrade().map_or(0, |relay| allocations(&relay)) + carried.apart("turnpike_allocations")
        }),
        metrics,
        server: Some(server),
        rules: None,
    }
}

fn snapshots(relay: &Relay, relays: Arc<[RelayState]>) -> Snapshots {
    let workers = relay.snapshots();
    let listeners = relay.by_listener(&workers);
    Snapshots {
        workers,
        realms: relay.realms(),
        listeners,
        relays,
        kernel: relay.kernel().map(Kernel::snapshot),
    }
}

/// Settings with what the store adds.
fn merge(settings: &Settings, store: Option<&mut OpenStore>) -> Merged {
    match store {
        Some(store) => store.take(settings),
        None => Merged::of(settings),
    }
}

fn credentials(merged: &Merged, store: Option<&OpenStore>) -> Arc<dyn CredentialStore> {
    let in_use = store.filter(|store| store.is_in_use()).map(|store| store.directory.clone());
    Arc::new(Credentials::new(&merged.settings, in_use))
}

/// A credential that was made up because nobody could have authenticated.
enum Generated {
    /// It is gone with this process.
    ForThisRun(User),
    /// In the embedded store.
    Kept(MadeUp),
}

/// The same in the place of another process, which may have made somebody up.
fn inherit_credential(
    settings: &mut Settings,
    store: Option<&OpenStore>,
    before: &ServeInheritance,
) -> Result<Option<Generated>, DaemonError> {
    if !plan::names_nobody(settings) {
        return Ok(None);
    }
    if let Some(user) = before.generated() {
        settings.users.push(user.clone());
        return Ok(Some(Generated::ForThisRun(user)));
    }
    if store.is_some_and(OpenStore::is_in_use) {
        return Ok(None);
    }
    let nobody = "the configuration names neither users nor secrets any more, so nobody could authenticate";
    Err(DaemonError::Upgrade(nobody.to_owned()))
}

/// Where nobody could authenticate, somebody is made up: in the embedded store if that can be, else for as long as this process lives.
async fn generate_credential(settings: &mut Settings, store: Option<&OpenStore>) -> Option<Generated> {
    if !plan::names_nobody(settings) {
        return None;
    }
    if let Some(store) = store {
        match store.make_up_a_user(settings).await {
            None => return None,
            Some(Ok(made)) => return Some(Generated::Kept(made)),
            Some(Err(error)) => {
                tracing::warn!("{error}; the credential that is made up now is for this run alone");
            }
        }
    }
    let user = plan::random_user();
    settings.users.push(user.clone());
    Some(Generated::ForThisRun(user))
}

impl Service for TurnServer {
    const OPEN: &'static str = "allocations";

    /// Takes what a running server can change from the configuration. Certificates that cannot be used keep the old ones in force,
    /// and nothing else: who is to lose access must not keep it because of them.
    async fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
        match self.sources.load_but_certificates() {
            Ok((loaded, problems)) => self.take(loaded, &problems).await,
            Err(errors) => Err(control::say_refused(&errors, NOT_RELOADED)),
        }
    }

    fn look(&mut self) {
        self.certificates.look(&self.settings);
        if self.store.as_ref().is_some_and(OpenStore::has_news) {
            tracing::info!("the store has other realms, limits, token keys or peer rules now");
            if let Err(error) = self.put_into_force_again() {
                tracing::error!("what the store says now is not in force: {error}");
            }
        }
    }

    fn machine_changed(&mut self) {
        self.machine.may_have_changed();
    }

    fn follow_machine(&mut self, is_serving: bool) {
        let has_changed = self.machine.reread();
        if !is_serving {
            if has_changed {
                self.relay.set_addresses(self.machine.all());
            }
        } else if (has_changed || self.waiting.iter().any(|waiting| waiting.error.is_some()))
            && let Err(error) = self.put_into_force_again()
        {
            self.machine.not_in_force(&error);
        }
        let lost = self.machine.lost(&self.relay.relay_addresses(), Instant::now());
        if !lost.is_empty() {
            self.relay.end_at(&lost);
        }
    }

    fn has_failed(&self) -> bool {
        self.relay.has_failed()
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown_deadline.into())
    }

    fn drain(&mut self, patience: Duration) {
        self.fleet.stop_taking();
        self.relay.set_draining(true);
        let deadline_s = patience.as_secs();
        tracing::info!(allocations = self.open(), deadline_s, "draining: no new allocations");
    }

    fn makes_progress(&self) -> bool {
        self.relay.makes_progress()
    }

    fn open(&self) -> u64 {
        allocations(&self.relay)
    }

    fn say_left(&self, open: u64) {
        tracing::warn!(allocations = open, "sessions still open are ended");
    }

    async fn leave(&mut self) {
        // What a change has to say to the fleet comes before the farewell, and none begins behind it.
        self.pages.iter().for_each(|page| page.close());
        let settled = async {
            for page in &self.pages {
                page.settled().await;
            }
        };
        if timeout(LAST_CHANGES, settled).await.is_err() {
            tracing::warn!(
                "a change is still at work: the program ends without its result; see the audit log"
            );
        }
        self.fleet.leave().await;
    }

    fn estate(&self) -> Arc<dyn Estate> {
        Arc::new(ServeEstate {
            relay: Arc::clone(&self.relay),
            fleet: FleetEstate::new(Arc::clone(&self.fleet)),
            generated: self.generated.clone(),
            tickets: self.certificates.tls.as_ref().map(|tls| tls.ticket_keys()),
            store: self.store.as_ref().map(|store| store.directory.clone()),
            pages: self.pages.clone(),
            passed: Arc::clone(&self.passed),
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
        self.pages.iter().for_each(|page| page.leave());
        let (allocations, connections) = self.relay.left();
        let deadline_s = patience.as_secs();
        tracing::info!(
            allocations,
            connections,
            deadline_s,
            "handed over; sessions over streams and DTLS live on here"
        );
    }

    fn left(&self) -> u64 {
        let (allocations, connections) = self.relay.left();
        allocations + connections
    }
}

/// What becomes of what the workers tell of sessions and refusals.
struct SessionLogs {
    writer: SessionLogWriter,
    /// As coturn does, where that is wanted.
    publisher: Option<StatusWriter>,
    /// Lines that were lost or suppressed.
    counts: Arc<LogCounts>,
    totals: Arc<SessionTotals>,
    refusals: Arc<Refusals>,
}

/// Whom the workers tell, and what becomes of it.
fn session_logs(fleet: &Fleet) -> (Arc<dyn SessionLog>, SessionLogs) {
    let refusals = Arc::<Refusals>::default();
    let (logger, writer) = session_log(Arc::clone(&refusals));
    let (counts, totals) = (logger.counts(), logger.totals());
    let (lines, publisher) = fleet.status_lines().unzip();
    (Arc::new(Logs { logger, lines }), SessionLogs { writer, publisher, counts, totals, refusals })
}

impl SessionLogs {
    /// Until the last worker is gone.
    async fn write(self) {
        match self.publisher {
            Some(publisher) => _ = tokio::join!(self.writer.run(), publisher.run()),
            None => self.writer.run().await,
        }
    }
}

/// The session log, and what is published of sessions.
struct Logs {
    logger: SessionLogger,
    lines: Option<StatusLines>,
}

impl SessionLog for Logs {
    fn effect(&self, worker: usize, effect: &Effect) {
        if let Some(lines) = &self.lines {
            lines.effect(worker, effect);
        }
        self.logger.effect(worker, effect);
    }

    fn turned_away(&self, worker: usize, turned: &TurnedAway) {
        self.logger.turned_away(worker, turned);
    }
}

/// Goes on where the process before stops, if there is one. Whether the kernel's path is this one's at once: that of another process is so
/// only later.
fn take_over(
    heir: &mut Option<Heir>,
    status: &Status,
    relay: &Arc<Relay>,
    plan: &Plan,
) -> Result<bool, DaemonError> {
    let is_attached = heir.is_none();
    if let Some(heir) = heir {
        let inherited = || relay.inherited().map_err(|unfit| DaemonError::Upgrade(unfit.to_string()));
        heir.take_over(status.carried(), relay.keeps_flows(), inherited, || relay.serve())?;
    }
    // From now on nothing goes back to that one.
    if let Some(heir) = heir.take() {
        let (weak, room, datapath) =
            (Arc::downgrade(relay), plan.config.max_kernel_flows, plan.config.datapath);
        heir.listen(Arc::clone(status.carried()), move || {
            let Some(relay) = weak.upgrade() else { return };
            match relay.attach_kernel() {
                Ok(()) => say_where_attached(&relay, room, datapath),
                Err(error) => tracing::error!("the kernel relays nothing from now on: {error}"),
            }
        });
    }
    Ok(is_attached)
}

fn allocations(relay: &Relay) -> u64 {
    relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum()
}

fn say_waiting(waiting: &[Waiting]) {
    for Waiting { protocol, address, error } in waiting {
        match error {
            None => {
                tracing::warn!("not listening on {protocol} {address}: this machine does not have it yet");
            }
            Some(error) => tracing::error!("{error}; trying again"),
        }
    }
}

fn say_relistened(relistened: &Relistened) {
    for (protocol, address) in &relistened.opened {
        tracing::info!("listening on {protocol} {address}");
    }
    for (protocol, address) in &relistened.closed {
        let until = match *protocol {
            "udp" | "dtls" => "takes no new clients, and is closed when its last one is gone",
            _ => "closed; its connections live on",
        };
        tracing::info!("no longer listening on {protocol} {address}: {until}");
    }
}

fn raise_open_files(plan: &Plan, settings: &Settings) {
    let subject = format!("{} allocations", plan.most_allocations());
    let for_applications =
        if settings.credentials.listen.is_empty() { 0 } else { admin::CREDENTIALS_DESCRIPTORS };
    let apart = admin::DESCRIPTORS + for_applications;
    rlimit::raise_open_files(plan.open_files(), apart, &subject, "limits.allocations");
}

fn say_what_started(plan: &Plan, relay: &Relay) {
    let config = &plan.config;
    let listeners = relay.listeners();
    let turnpike_relay::runtime::Listeners { udp, tcp, tls, dtls } = listeners;
    let on_tcp = if config.streams.tls.is_some() { ", TLS too" } else { "" };
    let on_tls = if config.streams.tls_only { ", TLS alone" } else { ", plain TCP too" };
    for (protocol, addresses, note) in
        [("udp", udp, ""), ("tcp", tcp, on_tcp), ("tls", tls, on_tls), ("dtls", dtls, "")]
    {
        for address in addresses {
            tracing::info!("listening on {protocol} {address}{note}");
        }
    }
    for address in config.relays_up() {
        let (first, last) = (config.ports.start(), config.ports.end());
        match address.external {
            Some(external) => {
                tracing::info!("relaying on {} as {external}, ports {first}-{last}", address.bind);
            }
            None => tracing::info!("relaying on {}, ports {first}-{last}", address.bind),
        }
    }
    if config.shared_ports > 0 {
        tracing::info!(
            "clients of a worker over UDP share {0} ports on each of these, others {0} more; there, an address of peers is one client's alone",
            config.shared_ports
        );
    }
    tracing::info!("data path {}: {}; workers: {}", config.datapath, plan.datapath_reason, config.workers);
}

fn say_where_attached(relay: &Relay, room: u32, datapath: Datapath) {
    if let Some(kernel) = relay.kernel() {
        kernel_path::say(kernel, room, datapath);
    }
}

fn say_notes(plan: &Plan) {
    for note in &plan.notes {
        tracing::warn!("{note}");
    }
    if !plan.config.server.authenticate {
        tracing::warn!("auth.required is false: anybody who reaches this server may relay through it");
    }
}

impl Generated {
    fn not_kept(self) -> Option<User> {
        match self {
            Self::ForThisRun(user) => Some(user),
            Self::Kept(_) => None,
        }
    }

    /// This one password is meant to be seen: it is shown nowhere else.
    fn print(&self, realm: &str, out: &mut dyn Write) {
        let (before, user, after) = match self {
            Self::ForThisRun(user) => ("No user is configured. For this run".to_owned(), user, String::new()),
            Self::Kept(MadeUp { user, dir }) => (
                "No user was configured; here is one".to_owned(),
                user,
                format!(
                    ", kept in {}. The password is not shown again; `turnpike user` makes others",
                    dir.display()
                ),
            ),
        };
        let UserSecret::Password(password) = &user.secret else { return };
        let line = writeln!(
            out,
            "{before}: user {} password {} (realm {realm}){after}",
            user.name,
            password.reveal()
        );
        if line.and_then(|()| out.flush()).is_err() {
            tracing::warn!(
                "cannot print the generated credential: configure a user with --user NAME:PASSWORD"
            );
        }
    }
}
