//! `turnpike serve`: the TURN server as a [`Service`].

use std::{
    fmt::Display,
    io::Write,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use tokio::{sync::watch, task::JoinHandle, time::timeout};
use turnpike_acme::{Acme, Wanted};
use turnpike_admin::{AdminInterface, Applications, Serving};
use turnpike_api::{Job, Reloaded};
use turnpike_config::{ConfiguredUser, LoadedConfig, Mistakes, Settings, Sources, UserSecret, VolumeQuota};
use turnpike_net::{Datapath, PassedSockets};
use turnpike_process::{
    Control, MetricsPage, ProcessError, Service, kernel_path,
    log_queue::LogCounts,
    log_refused, log_warnings, logging, need_restart, passed, rlimit, sandbox,
    upgrade::{self, HandoverState, PreviousProcess},
    warn,
};
use turnpike_relay::{
    AllocationLog, CredentialStore, Kernel, Relay, RelayState, Relistened, TurnedAway, WaitingListener,
    certificates::Certificate,
};
use turnpike_stores::UsageStore;
use turnpike_turn::server::{Effect, NonceKey, QualityLevel};

use crate::{
    admin::ServerAdmin,
    allocation_log::{AllocationLogWriter, AllocationLogger, allocation_log},
    certificate_files,
    certificates::{Certificates, Contexts},
    changes::ServeChanges,
    credentials::CredentialTable,
    effective_settings::EffectiveSettings,
    ended_allocations::EndedAllocations,
    error::ServeError,
    events::{ServerEvents, StateWatch},
    fleet::{self, Begun, FleetHandover, FleetMembership, NodeKeys, StatusLines, StatusWriter},
    generated_user::random_user,
    geoip::{self, Database, GeoIpFiles},
    handover::{PreviousServer, ServeHandover},
    machine::Machine,
    metrics::{self, MetricSources, ServerSnapshots},
    needs::server_needs,
    own_addresses::AddressNotifications,
    passed_listeners::passed_listeners,
    peer_names::PeerNames,
    plan::{self, RelayPlan},
    quality::{self, QualityMonitor},
    refusals::Refusals,
    store::{self, MadeUp, Merged, OpenError, OpenStore, StoreInUse},
    usage::{self, QuotaKeeper, UsageLedger, UsageLog, UsageTimes},
};

/// Runs a TURN server until a signal or an administrator stops it. Prints a generated credential to `out`
/// once.
pub fn serve(sources: &Sources, out: &mut dyn Write) -> Result<(), ServeError> {
    sandbox::forbid_core_dumps();
    upgrade::begin(TurnServer::NAME, |previous| {
        // Takes over the previous process's sockets before opening new ones.
        let (before, passed) = previous.as_mut().map(PreviousServer::new).transpose()?.unzip();
        let passed =
            passed.map_or_else(PassedSockets::from_service_manager, Ok).map_err(ProcessError::from)?;
        let sources = sources.clone().with_fallback(passed_listeners(&passed));
        let loaded = certificate_files::load(&sources)?;
        check_store(&loaded.settings)?;
        let geoip = geoip::read(&loaded.settings).map_err(Mistakes::sorted)?;
        let logging = (loaded.settings.log.clone(), loaded.settings.telemetry.clone());
        let datapath = loaded.settings.datapath;
        let datapath = before.as_ref().map_or(datapath, |before| before.kept_datapath(datapath).0);
        let needs = || server_needs(&sources, &Settings { datapath, ..loaded.settings.clone() });
        sandbox::enter(&loaded.settings.sandbox, needs);
        let found = StartState { sources, loaded, geoip, passed: Arc::new(passed), before };
        turnpike_process::run((&logging.0, &logging.1), async |control| {
            TurnServer::start(found, control, out, previous).await
        })
    })
}

fn check_store(settings: &Settings) -> Result<(), Mistakes> {
    store::address(settings)?;
    fleet::address(settings).map(drop)
}

struct StartState {
    sources: Sources,
    loaded: LoadedConfig<Certificate>,
    geoip: Vec<Database>,
    passed: Arc<PassedSockets>,
    before: Option<PreviousServer>,
}

struct TurnServer {
    sources: Sources,
    /// Settings at startup, for keys that a reload cannot change.
    started: Settings,
    settings: Settings,
    shown: watch::Sender<EffectiveSettings>,
    /// The generated user, if it is not kept in a store.
    generated: Option<ConfiguredUser>,
    store: Option<OpenStore>,
    shared_store: StoreInUse,
    fleet: Arc<FleetMembership>,
    relay: Arc<Relay>,
    passed: Arc<PassedSockets>,
    machine: Machine,
    peer_names: PeerNames,
    /// Value to which the limit on open files was raised.
    open_files: u64,
    waiting: Vec<WaitingListener>,
    certificates: Certificates,
    acme: Acme,
    geoip: GeoIpFiles,
    events: Arc<ServerEvents>,
    state_watch: StateWatch,
    quotas: watch::Sender<Vec<VolumeQuota>>,
    quality: watch::Sender<QualityLevel>,
    pages: [Arc<Serving>; 2],
    metrics: MetricsPage,
}

impl TurnServer {
    async fn start(
        found: StartState,
        control: &Control,
        out: &mut dyn Write,
        previous: &mut Option<PreviousProcess>,
    ) -> Result<(Self, JoinHandle<()>), ServeError> {
        let StartState { sources, loaded, geoip, passed, mut before } = found;
        let LoadedConfig { mut settings, certificates, warnings, .. } = loaded;
        log_warnings(&warnings);
        let started = settings.clone();
        if let Some(before) = &before {
            before.keep(&mut settings);
        }
        let (mut store, generated) = open_store(&mut settings, before.as_ref()).await?;
        let peer_names = PeerNames::start(&settings).await;
        let merged = merge(&settings, store.as_mut(), &peer_names);
        let certificates = Certificates::new(&settings, certificates)?;
        let (fleet, begun) = join_fleet(&settings, before.as_ref()).await?;
        let mut machine = Machine::find(before.as_ref().map_or(&[], PreviousServer::relay_addresses));
        let news = AddressNotifications::subscribe();
        // Catches address changes from before the subscription.
        machine.may_have_changed();
        let as_before = (before.as_ref(), &machine);
        let mut plan = plan_start(&merged, fleet.keys(), &certificates, &passed, as_before)?;
        raise_open_files(&plan, &settings);
        let geoip = GeoIpFiles::new(&settings, geoip);
        plan.config.server.networks = Some(geoip.in_use());

        let (page, applications) = listen_for_pages(&settings, before.as_mut())?;
        // Peers must not reach these listeners. They trust loopback, and relayed TCP connections would come
        // from the server's own address.
        plan.config.listeners_beside = [page.addresses(), applications.addresses()].concat();
        let events = Arc::new(ServerEvents::start(&settings));
        let usage = usage::open(&settings)?;
        let quotas = watch::Sender::new(settings.usage.quotas.clone());
        let keeper = QuotaKeeper::new(quotas.subscribe(), fleet.used_quotas(), Arc::clone(&events));
        let recorded = record_usage(usage.as_ref(), &settings, &fleet, (plan.config.workers, keeper));
        let (log, logs) = allocation_logs(&fleet, &events, &geoip, recorded);
        let is_first = before.is_none();
        let credentials = credentials(&merged, store.as_ref());
        let relay = start_relay(&plan, &fleet, credentials, log, before)?;
        let is_attached = previous.is_none();
        take_over(previous, control, &relay, &plan)?;
        log_started(&plan, &relay);
        page.say_where();
        applications.say_where();
        sandbox::log();
        if is_attached {
            log_attached(&relay, plan.config.kernel_flows, plan.config.datapath);
        }
        log_notes(&plan);
        certificates.log();
        if let Some(generated) = generated.as_ref().filter(|_| is_first) {
            generated.print(&settings.realm, out);
        }
        store::note_realm(&settings);
        let shared_store = StoreInUse::default();
        store::share(&shared_store, store.as_ref());
        let orders = fleet.begin(begun, &relay, &plan.config, Arc::clone(&shared_store));

        tokio::spawn(report_news(control.clone(), news));
        machine.put_into_force(&plan.config);
        let waiting = relay.waiting();
        log_waiting(&waiting);
        let shown = watch::Sender::new(EffectiveSettings::new(&settings, &merged, &machine));
        let quality = Arc::clone(&logs.quality);
        let measured = watch::Sender::new(settings.quality);
        tokio::spawn(quality::collect(Arc::downgrade(&relay), measured.subscribe(), {
            let monitor = Arc::clone(&quality);
            move |id, client, quality: &_| monitor.report(id, client, quality)
        }));
        let acme = Acme::start(Wanted::new(&settings, certificates.tls.clone(), fleet.shared_orders()));
        let seen = (&relay, &shown, &peer_names);
        let metrics =
            metrics_page(seen, (&certificates, &acme, &shared_store, &geoip), &fleet, &logs, control);
        let program = Arc::new(ServerAdmin {
            control: control.clone(),
            metrics: Arc::clone(&metrics),
            relay: Arc::downgrade(&relay),
            shown: shown.subscribe(),
            store: Arc::clone(&shared_store),
            certificates: certificates.told(),
            acme: acme.status(),
            datapath: plan.config.datapath,
            datapath_reason: plan.datapath_reason.as_str().into(),
            fleet: orders,
            refusals: Arc::clone(&logs.refusals),
            events: Arc::clone(&events.hub),
            usage,
            geoip: geoip.in_use(),
            quality,
        });
        let pages =
            [applications.serve(Arc::<ServerAdmin>::clone(&program)), page.serve(program)].map(Arc::new);
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
            peer_names,
            open_files: plan.open_files(),
            waiting,
            certificates,
            acme,
            geoip,
            events,
            state_watch: StateWatch::default(),
            quotas,
            quality: measured,
            pages,
            metrics,
        };
        let relay = Arc::downgrade(&server.relay);
        Ok((server, tokio::spawn(logs.write(relay))))
    }

    /// Applies new settings. If it fails, nothing has changed.
    async fn take(&mut self, loaded: LoadedConfig<Certificate>) -> Result<Reloaded, Vec<String>> {
        let LoadedConfig { settings: mut new, certificates, certificate_problems: problems, warnings } =
            loaded;
        let unchangeable = self.started.unchangeable(&new);
        new.keep_unchangeable(&self.settings);
        let refused = |error: &dyn Display| log_refused(error, NOT_RELOADED);
        let store = if new.store == self.settings.store {
            None
        } else {
            Some(OpenStore::open(&new, true).await.map_err(|error| refused(&error))?)
        };
        if let (Some(Some(new)), Some(old)) = (&store, &self.store) {
            new.replace(old);
        }
        let in_use = store.as_ref().unwrap_or(&self.store).as_ref().is_some_and(OpenStore::is_in_use);
        if plan::has_no_users(&new) && !in_use {
            if self.generated.is_none() {
                return Err(refused(&"it has neither users nor secrets, so no client could authenticate"));
            }
            new.auth.users.extend(self.generated.clone());
        }
        let contexts = self.certificates.contexts(&new, &certificates, &problems);
        let contexts = contexts.map_err(|error| refused(&error))?;
        let notes = self.put_into_force(&new, store, contexts).map_err(|error| refused(&error))?;
        let mut reloaded = Reloaded::default();
        warnings.into_iter().chain(notes).for_each(|warning| warn(&mut reloaded, warning));
        need_restart(&mut reloaded, &unchangeable);
        let old = std::mem::replace(&mut self.settings, new);
        store::note_realm(&self.settings);
        self.fleet.set(&self.settings);
        self.events.set(&self.settings);
        self.quotas.send_replace(self.settings.usage.quotas.clone());
        self.quality.send_replace(self.settings.quality);
        let changes = ServeChanges::new(&old, &self.settings);
        reloaded.changed = changes.lines();
        self.certificates.reload(&self.settings, certificates, &problems, &mut reloaded);
        self.geoip.reload(&self.settings, &mut reloaded).await;
        self.acme.set(Wanted::new(&self.settings, self.certificates.tls.clone(), self.fleet.shared_orders()));
        changes.log(&self.settings);
        // Comes last, so that the changes are still logged at the old level.
        if old.log.level != self.settings.log.level
            && let Err(error) = logging::set_level(&self.settings.log.level)
        {
            warn(&mut reloaded, format!("log.level unchanged ({}): {error}", old.log.level));
        }
        Ok(reloaded)
    }

    /// Applies settings merged with the current or a `new` store: the part of a reload that can fail. If it
    /// fails, nothing has changed. Returns lines for the log.
    fn put_into_force(
        &mut self,
        settings: &Settings,
        new: Option<Option<OpenStore>>,
        (tls, dtls): Contexts,
    ) -> Result<Vec<String>, ServeError> {
        let (is_new, mut store) = match new {
            Some(new) => (true, new),
            None => (false, self.store.take()),
        };
        let in_force = store.as_ref().and_then(OpenStore::taken);
        let layout = self.relay.layout();
        let merged = merge(settings, store.as_mut(), &self.peer_names);
        let mut plan = RelayPlan::new(
            &merged,
            self.fleet.keys(),
            tls.clone(),
            dtls.clone(),
            Some(&layout),
            &self.machine,
        );
        plan.config.server.networks = Some(self.geoip.in_use());
        let is_served = |transport, at| plan.listens(transport, at);
        let is_passed_served = passed::check(&self.passed, plan.config.workers, is_served);
        let relistened = is_passed_served.map_err(ServeError::from).and_then(|()| {
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
            if let Some(store) = self.store.as_mut().filter(|_| !is_new) {
                store.put_back(in_force);
            }
        })?;
        self.peer_names.set(settings);
        (self.certificates.tls, self.certificates.dtls) = (tls, dtls);
        if plan.open_files() != self.open_files {
            raise_open_files(&plan, settings);
            self.open_files = plan.open_files();
        }
        self.machine.put_into_force(&plan.config);
        self.shown.send_replace(EffectiveSettings::new(settings, &merged, &self.machine));
        self.fleet.listens(&self.relay, &plan.config);
        log_relistened(&relistened);
        let waiting = self.relay.waiting();
        if waiting != self.waiting {
            log_waiting(&waiting);
            self.waiting = waiting;
        }
        Ok(plan.notes)
    }
}

impl TurnServer {
    fn put_into_force_again(&mut self) -> Result<Vec<String>, ServeError> {
        let contexts = (self.certificates.tls.clone(), self.certificates.dtls.clone());
        self.put_into_force(&self.settings.clone(), None, contexts)
    }
}

const LAST_CHANGES: Duration = Duration::from_secs(2);
const NOT_RELOADED: &str = "configuration not reloaded: the old one stays in use";

async fn open_store(
    settings: &mut Settings,
    before: Option<&PreviousServer>,
) -> Result<(Option<OpenStore>, Option<Generated>), ServeError> {
    let store = OpenStore::open(settings, false).await.map_err(|error| match error {
        OpenError::Address(errors) => ServeError::Config(errors),
        OpenError::Store(error) => ServeError::Store(error),
    })?;
    if let (Some(store), Some(before)) = (&store, before) {
        before.remember_ended_secrets(&store.directory);
    }
    let generated = match before {
        None => generate_credential(settings, store.as_ref()).await,
        Some(before) => keep_credential(settings, store.as_ref(), before)?,
    };
    Ok((store, generated))
}

/// The workers' end of the usage ledger, and the end that saves.
type UsageEnds = (UsageLog, UsageLedger);

fn record_usage(
    store: Option<&Arc<UsageStore>>,
    settings: &Settings,
    fleet: &FleetMembership,
    (workers, quotas): (usize, QuotaKeeper),
) -> Option<UsageEnds> {
    let times = UsageTimes::from(&settings.usage);
    store.map(|store| UsageLedger::new(Arc::clone(store), fleet.node_name(), times, workers, quotas))
}

async fn join_fleet(
    settings: &Settings,
    before: Option<&PreviousServer>,
) -> Result<(Arc<FleetMembership>, Begun), ServeError> {
    let own_key = before.map_or_else(|| NonceKey(rand::random()), PreviousServer::own_key);
    FleetMembership::join(settings, own_key, before.map(PreviousServer::fleet)).await
}

fn plan_start(
    merged: &Merged,
    keys: NodeKeys,
    certificates: &Certificates,
    passed: &Arc<PassedSockets>,
    (before, machine): (Option<&PreviousServer>, &Machine),
) -> Result<RelayPlan, ServeError> {
    let (tls, dtls) = (certificates.tls.clone(), certificates.dtls.clone());
    let mut plan = RelayPlan::new(merged, keys, tls, dtls, before.map(PreviousServer::layout), machine);
    passed::check(passed, plan.config.workers, |transport, at| plan.listens(transport, at))?;
    passed::log_few_workers(passed, merged.settings.origin("server.workers"), plan.config.workers);
    plan.config.passed = Arc::clone(passed);
    if let Some(before) = before {
        plan.config.datapath = before.datapath();
        plan.datapath_reason = "kept from the previous process".to_owned();
        if let (Some(tls), Some(keys)) = (&certificates.tls, before.tickets()) {
            tls.take_over(keys);
        }
    }
    Ok(plan)
}

fn listen_for_pages(
    settings: &Settings,
    before: Option<&mut PreviousServer>,
) -> Result<(AdminInterface, Applications), ServeError> {
    let sockets = before.map(PreviousServer::page).unwrap_or_default();
    let for_applications = |name: &str| settings.credentials.listen.iter().any(|at| at.to_string() == name);
    let (of_applications, sockets) = sockets.into_iter().partition(|(name, _)| for_applications(name));
    let is_explicit = settings.is_explicit("admin.listen");
    let page = AdminInterface::listen(Job::Serve, &settings.admin, is_explicit, sockets)?;
    Ok((page, Applications::listen(settings, of_applications)?))
}

fn start_relay(
    plan: &RelayPlan,
    fleet: &Arc<FleetMembership>,
    credentials: Arc<dyn CredentialStore>,
    log: Arc<dyn AllocationLog>,
    before: Option<PreviousServer>,
) -> Result<Arc<Relay>, ServeError> {
    let fleet: Option<Arc<dyn turnpike_relay::Fleet>> = Some(Arc::<FleetMembership>::clone(fleet));
    Ok(Arc::new(match before.map(PreviousServer::into_relay) {
        None => Relay::start_in(fleet, &plan.config, credentials, log)?,
        Some(from) => Relay::start_from_handover(fleet, &plan.config, &plan.layout, credentials, log, from)?,
    }))
}

fn metrics_page(
    (relay, shown, names): (&Arc<Relay>, &watch::Sender<EffectiveSettings>, &PeerNames),
    (certificates, acme, store, geoip): (&Certificates, &Acme, &StoreInUse, &GeoIpFiles),
    fleet: &Arc<FleetMembership>,
    logs: &AllocationLogs,
    control: &Control,
) -> MetricsPage {
    let (relay, shown, names) = (Arc::downgrade(relay), shown.subscribe(), names.clone());
    let snapshots = move || {
        let relays = Arc::clone(&shown.borrow().addresses);
        relay.upgrade().map_or_else(Default::default, |relay| snapshots(&relay, relays, &names))
    };
    let sources = MetricSources {
        certificates: certificates.told(),
        acme: acme.status(),
        store: Arc::clone(store),
        ended: Arc::clone(&logs.totals),
        usage: logs.ledger.as_ref().map(UsageLedger::counts),
        geoip: geoip.in_use(),
        quality: Arc::clone(&logs.quality),
    };
    let (fleet, events) = (Arc::clone(fleet), Arc::clone(&logs.events.hub));
    let (fleet, webhooks) = (move || fleet.counts(), move || events.counts());
    metrics::page(snapshots, sources, fleet, webhooks, Arc::clone(control.status()), Arc::clone(&logs.counts))
}

fn snapshots(relay: &Relay, relays: Arc<[RelayState]>, names: &PeerNames) -> ServerSnapshots {
    let workers = relay.snapshots();
    let listeners = relay.by_listener(&workers);
    let kernel = relay.kernel().map(Kernel::snapshot);
    let (workers, peer_names) = (metrics::numbered(workers), names.states());
    ServerSnapshots { workers, realms: relay.realms(), listeners, relays, peer_names, kernel }
}

fn merge(settings: &Settings, store: Option<&mut OpenStore>, names: &PeerNames) -> Merged {
    let mut merged = match store {
        Some(store) => store.take(settings),
        None => Merged::of(settings),
    };
    merged.allow = names.rules(settings);
    merged
}

fn credentials(merged: &Merged, store: Option<&OpenStore>) -> Arc<dyn CredentialStore> {
    let in_use = store.filter(|store| store.is_in_use()).map(|store| store.directory.clone());
    Arc::new(CredentialTable::new(&merged.settings, in_use))
}

enum Generated {
    ForThisRun(ConfiguredUser),
    Kept(MadeUp),
}

fn keep_credential(
    settings: &mut Settings,
    store: Option<&OpenStore>,
    before: &PreviousServer,
) -> Result<Option<Generated>, ServeError> {
    if !plan::has_no_users(settings) {
        return Ok(None);
    }
    if let Some(user) = before.generated() {
        settings.auth.users.push(user.clone());
        return Ok(Some(Generated::ForThisRun(user)));
    }
    if store.is_some_and(OpenStore::is_in_use) {
        return Ok(None);
    }
    let absent = "the configuration no longer has users or secrets, so no client could authenticate";
    Err(ProcessError::Upgrade(absent.to_owned()).into())
}

/// Generates a credential if none is configured: in the embedded store if possible, otherwise for this
/// process only.
async fn generate_credential(settings: &mut Settings, store: Option<&OpenStore>) -> Option<Generated> {
    if !plan::has_no_users(settings) {
        return None;
    }
    if let Some(store) = store {
        match store.make_up_a_user(settings).await {
            None => return None,
            Some(Ok(made)) => return Some(Generated::Kept(made)),
            Some(Err(error)) => {
                tracing::warn!("{error}; the generated credential is valid only until this process exits");
            }
        }
    }
    let user = random_user();
    settings.auth.users.push(user.clone());
    Some(Generated::ForThisRun(user))
}

impl Service for TurnServer {
    const NAME: &'static str = "serve";
    const OPEN: &'static str = "allocations";
    const GAUGES: &'static [&'static str] = &[
        "turnpike_allocations",
        "turnpike_realm_allocations",
        "turnpike_listener_allocations",
        "turnpike_connections",
        "turnpike_dtls_associations",
        "turnpike_peer_connections_open",
        "turnpike_handed_on_open",
        "turnpike_kernel_flows",
    ];

    /// Applies all keys that can be changed in a running server. If certificates are unusable, the rest
    /// still applies: a removed user must lose access.
    async fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
        match certificate_files::load_for_reload(&self.sources) {
            Ok(loaded) => self.take(loaded).await,
            Err(errors) => Err(log_refused(&errors, NOT_RELOADED)),
        }
    }

    fn tick(&mut self) {
        self.certificates.look(&self.settings);
        self.geoip.look(&self.settings);
        let told = (&*self.certificates.told(), &*self.acme.status(), &*self.fleet);
        self.state_watch.look(&self.events, told, self.relay.allocations());
        if self.store.as_ref().is_some_and(OpenStore::has_news) {
            tracing::info!("realms, limits, token keys or peer rules in the store have changed");
            if let Err(error) = self.put_into_force_again() {
                tracing::error!("cannot apply the changes in the store: {error}");
            }
        }
        if self.peer_names.has_news()
            && let Err(error) = self.put_into_force_again()
        {
            tracing::error!("cannot apply the new addresses of peers.allow: {error}");
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

    fn drain_deadline(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown.deadline.into())
    }

    fn drain(&mut self, deadline: Duration) {
        self.fleet.stop_taking();
        self.relay.set_draining(true);
        self.events.drain_begins(self.open(), Some(deadline));
        let deadline_s = deadline.as_secs();
        tracing::info!(allocations = self.open(), deadline_s, "draining: no new allocations");
    }

    fn makes_progress(&self) -> bool {
        self.relay.makes_progress()
    }

    fn open(&self) -> u64 {
        self.relay.allocations()
    }

    fn log_left(&self, open: u64) {
        tracing::warn!(allocations = open, "ending the allocations still open");
    }

    async fn leave(&mut self) {
        // Lets changes in progress finish and reach the fleet; later changes are refused.
        self.pages.iter().for_each(|page| page.close());
        let settled = async {
            for page in &self.pages {
                page.settled().await;
            }
        };
        if timeout(LAST_CHANGES, settled).await.is_err() {
            tracing::warn!(
                "stopping while an administrative change is in progress: its result is unknown, so see the audit log"
            );
        }
        self.fleet.leave().await;
    }

    fn handover_state(&self) -> Arc<dyn HandoverState> {
        Arc::new(ServeHandover {
            relay: Arc::clone(&self.relay),
            fleet: FleetHandover::new(Arc::clone(&self.fleet)),
            generated: self.generated.clone(),
            tickets: self.certificates.tls.as_ref().map(|tls| tls.ticket_keys()),
            store: self.store.as_ref().map(|store| store.directory.clone()),
            pages: self.pages.clone(),
            passed: Arc::clone(&self.passed),
        })
    }

    fn metrics(&self) -> &MetricsPage {
        &self.metrics
    }

    fn exported_metrics(&self) -> MetricsPage {
        let page = Arc::clone(&self.metrics);
        Arc::new(move || turnpike_admin::with_own_metrics(page(), true))
    }

    fn upgrade_deadline(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown.upgrade_deadline.into())
    }

    fn handed_over(&mut self, deadline: Duration) {
        self.pages.iter().for_each(|page| page.leave());
        // The CA's validation requests now reach the new process.
        self.acme.stop();
        let (allocations, connections) = self.relay.left();
        let deadline_s = deadline.as_secs();
        tracing::info!(
            allocations,
            connections,
            deadline_s,
            "handed over to the new process; allocations over TCP, TLS and DTLS stay in this process until they end"
        );
    }

    fn left(&self) -> u64 {
        let (allocations, connections) = self.relay.left();
        allocations + connections
    }
}

struct AllocationLogs {
    writer: AllocationLogWriter,
    publisher: Option<StatusWriter>,
    counts: Arc<LogCounts>,
    totals: Arc<EndedAllocations>,
    refusals: Arc<Refusals>,
    events: Arc<ServerEvents>,
    ledger: Option<UsageLedger>,
    quality: Arc<QualityMonitor>,
}

fn allocation_logs(
    fleet: &FleetMembership,
    events: &Arc<ServerEvents>,
    geoip: &GeoIpFiles,
    recorded: Option<UsageEnds>,
) -> (Arc<dyn AllocationLog>, AllocationLogs) {
    let refusals = Arc::<Refusals>::default();
    let (logger, writer) = allocation_log(Arc::clone(&refusals), events, geoip.in_use());
    let (counts, totals) = (logger.counts(), logger.totals());
    let (lines, publisher) = fleet.status_lines().unzip();
    let (usage, ledger) = recorded.unzip();
    let events = Arc::clone(events);
    let quality = Arc::new(QualityMonitor::new(geoip.in_use()));
    let ends = Arc::clone(&quality);
    let logs = AllocationLogs { writer, publisher, counts, totals, refusals, events, ledger, quality };
    (Arc::new(Logs { logger, lines, usage, quality: ends }), logs)
}

impl AllocationLogs {
    async fn write(self, relay: Weak<Relay>) {
        let Self { writer, publisher, ledger, events, .. } = self;
        let publish = async {
            if let Some(publisher) = publisher {
                publisher.run().await;
            }
        };
        let keep_ledger = async {
            if let Some(ledger) = ledger {
                ledger.run(relay).await;
            }
        };
        tokio::join!(writer.run(), publish, keep_ledger);
        events.close().await;
    }
}

struct Logs {
    logger: AllocationLogger,
    lines: Option<StatusLines>,
    usage: Option<UsageLog>,
    quality: Arc<QualityMonitor>,
}

impl AllocationLog for Logs {
    fn effect(&self, worker: usize, effect: &Effect) {
        if let Some(lines) = &self.lines {
            lines.effect(worker, effect);
        }
        if let Some(usage) = &self.usage {
            usage.effect(worker, effect);
        }
        self.quality.effect(effect);
        self.logger.effect(worker, effect);
    }

    fn turned_away(&self, worker: usize, turned: &TurnedAway) {
        self.logger.turned_away(worker, turned);
    }
}

/// Takes over from the previous process, if any. Attaches the kernel program after the old one has detached
/// its own.
fn take_over(
    previous: &mut Option<PreviousProcess>,
    control: &Control,
    relay: &Arc<Relay>,
    plan: &RelayPlan,
) -> Result<(), ProcessError> {
    let receive = || relay.received().map_err(|unfit| unfit.to_string());
    let (weak, room, datapath) = (Arc::downgrade(relay), plan.config.kernel_flows, plan.config.datapath);
    let released = move || {
        let Some(relay) = weak.upgrade() else { return };
        match relay.attach_kernel() {
            Ok(()) => log_attached(&relay, room, datapath),
            Err(error) => tracing::error!("the kernel no longer relays: {error}"),
        }
    };
    let carried = control.status().carried();
    upgrade::take_over(previous, carried, relay.keeps_flows(), receive, || relay.serve(), released)
}

async fn report_news(control: Control, mut news: AddressNotifications) {
    while control.machine_changed().await {
        news.next().await;
    }
}

fn log_waiting(waiting: &[WaitingListener]) {
    for WaitingListener { protocol, address, error } in waiting {
        match error {
            None => {
                tracing::warn!(
                    "not listening on {protocol} {address}: this machine does not have the address yet"
                );
            }
            Some(error) => tracing::error!("{error}; retrying"),
        }
    }
}

fn log_relistened(relistened: &Relistened) {
    for (protocol, address) in &relistened.opened {
        tracing::info!("listening on {protocol} {address}");
    }
    for (protocol, address) in &relistened.closed {
        let until = match *protocol {
            "udp" | "dtls" => "it accepts no new clients and closes after the last one has left",
            _ => "it is closed, but its connections stay open",
        };
        tracing::info!("no longer listening on {protocol} {address}: {until}");
    }
}

fn raise_open_files(plan: &RelayPlan, settings: &Settings) {
    let subject = format!("{} allocations", plan.most_allocations());
    let for_applications =
        if settings.credentials.listen.is_empty() { 0 } else { turnpike_admin::CREDENTIALS_DESCRIPTORS };
    let apart = turnpike_admin::DESCRIPTORS + for_applications;
    rlimit::raise_open_files(plan.open_files(), apart, &subject, "limits.allocations");
}

fn log_started(plan: &RelayPlan, relay: &Relay) {
    let config = &plan.config;
    let listeners = relay.listeners();
    let turnpike_relay::Listeners { udp, tcp, tls, dtls } = listeners;
    let on_tcp = if config.streams.tls.is_some() { ", also TLS" } else { "" };
    let on_tls = if config.streams.tls_only { ", TLS only" } else { ", also plain TCP" };
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
            "UDP clients of a worker share {0} ports on each of these addresses, and the worker's other clients share {0} more; on a shared port, each peer address belongs to one client",
            config.shared_ports
        );
    }
    tracing::info!("data path {}: {}; workers: {}", config.datapath, plan.datapath_reason, config.workers);
}

fn log_attached(relay: &Relay, room: u32, datapath: Datapath) {
    if let Some(kernel) = relay.kernel() {
        kernel_path::log_attached(kernel, room, datapath);
    } else if let Some(lack) = relay.kernel_lack() {
        kernel_path::log_lack(lack);
    }
}

fn log_notes(plan: &RelayPlan) {
    for note in &plan.notes {
        tracing::warn!("{note}");
    }
    if !plan.config.server.authenticate {
        tracing::warn!("auth.required is false: anyone who can reach this server can relay through it");
    }
}

impl Generated {
    fn not_kept(self) -> Option<ConfiguredUser> {
        match self {
            Self::ForThisRun(user) => Some(user),
            Self::Kept(_) => None,
        }
    }

    /// Prints the password, which is shown nowhere else.
    fn print(&self, realm: &str, out: &mut dyn Write) {
        let (before, user, after) = match self {
            Self::ForThisRun(user) => ("No user configured; for this run".to_owned(), user, String::new()),
            Self::Kept(MadeUp { user, dir }) => (
                "No user configured; created one".to_owned(),
                user,
                format!(
                    ", kept in {}. The password is not shown again; `turnpike user` creates more users",
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
