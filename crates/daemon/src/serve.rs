//! `turnpike serve`: starts the TURN server, and is the [`Service`] that reloads and drains it.

use std::{
    io::Write,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle};
use turnpike_config::{Loaded, Mistake, Mistakes, Settings, Sources, User, UserSecret, realms};
use turnpike_net::PassedSockets;
use turnpike_relay::{Attachment, CredentialStore, Hook, Kernel, Layout, Relay, RelayAddress, SessionLog};
use turnpike_turn::server::Effect;

use crate::{
    admin::{AdminInterface, Job, Listening, Program, Server},
    certificates::Certificates,
    changes::ServeChanges,
    control::{self, Control, Reloaded, Service, say_warnings},
    credentials::Credentials,
    error::DaemonError,
    fleet::{self, Fleet, StatusLines},
    own_addresses::OwnAddresses,
    passed,
    plan::{self, Plan},
    rlimit, serve_metrics,
    session_log::{SessionLogger, session_log},
    store::{self, MadeUp, Merged, OpenError, OpenStore, SharedStore},
};

/// Runs a TURN server until a signal or an administrator ends it. A generated credential goes to `out`, once.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn serve(
    sources: &Sources,
    out: &mut dyn Write,
    interface: &dyn AdminInterface,
) -> Result<(), DaemonError> {
    // Before anything else is opened.
    let passed = PassedSockets::from_service_manager()?;
    let sources = sources.clone().with_fallback(passed::settings_of_serve(&passed));
    let loaded = sources.load()?;
    check_store(&loaded.settings)?;
    let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
    control::run((&level, format), async |control| {
        TurnServer::start(sources, loaded, Arc::new(passed), control, out, interface).await
    })
}

/// Whether the settings name stores that can be some; they are not connected to.
///
/// # Errors
/// As those of the rest of the configuration.
pub fn check_store(settings: &Settings) -> Result<(), Mistakes> {
    store::address(settings)?;
    fleet::address(settings).map(drop)
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
    /// What the listeners and relay addresses of the settings came to.
    layout: Layout,
    addresses: Vec<RelayAddress>,
    certificates: Certificates,
}

impl TurnServer {
    async fn start(
        sources: Sources,
        loaded: Loaded,
        passed: Arc<PassedSockets>,
        control: &Control,
        out: &mut dyn Write,
        interface: &dyn AdminInterface,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let Loaded { mut settings, certificates, warnings } = loaded;
        say_warnings(&warnings);
        let mut store = OpenStore::open(&settings, false).await.map_err(|error| match error {
            OpenError::Address(errors) => DaemonError::Config(errors),
            OpenError::Store(error) => DaemonError::Store(error),
        })?;
        let generated = generate_credential(&mut settings, store.as_ref()).await;
        let merged = merge(&settings, store.as_mut());
        let certificates = Certificates::new(&settings, certificates)?;
        let (fleet, begun) = Fleet::join(&settings).await?;
        let mut plan = Plan::new(&merged, fleet.keys(), certificates.tls.clone(), certificates.dtls.clone());
        passed::check(&passed, plan.config.workers, |transport, at| plan.listens(transport, at))?;
        plan.config.passed = passed;
        raise_open_files(&plan);

        let is_explicit = settings.is_explicit("admin.listen");
        let page = interface.listen(Job::Serve, &settings.admin, is_explicit).map_err(DaemonError::Admin)?;
        // It takes loopback for this machine, and a client that has TCP relayed would come from the server's own address.
        plan.config.listeners_beside = page.addresses();
        let own = OwnAddresses::new()
            .inspect(|own| plan.config.addresses = own.list())
            .inspect_err(|error| {
                tracing::warn!(
                    "cannot read the addresses of this machine ({error}): of its services, peers are kept away only from those \
                     on loopback, on relay addresses and where turnpike listens; let the process open AF_NETLINK sockets"
                );
            })
            .ok();
        let (logger, writer) = session_log();
        let (log_counts, totals) = (logger.counts(), logger.totals());
        let (lines, publisher) = fleet.status_lines().unzip();
        let log: Arc<dyn SessionLog> = Arc::new(Logs { logger, lines });
        let credentials = credentials(&merged, store.as_ref());
        let others: Arc<dyn turnpike_relay::Fleet> = Arc::<Fleet>::clone(&fleet);
        let relay = Arc::new(Relay::start_in(Some(others), &plan.config, credentials, log)?);
        say_what_started(&plan, &relay, &*page);
        certificates.say();
        if let Some(generated) = &generated {
            generated.print(&settings.realm, out);
        }
        let shared_store = SharedStore::default();
        store::share(&shared_store, store.as_ref());
        let orders = fleet.begin(begun, &relay, &plan, Arc::clone(&shared_store));

        // Weak, so that the last owner can stop the relay while others look at it.
        let weak = Arc::downgrade(&relay);
        if let Some(own) = own {
            tokio::spawn(own.keep_current(Weak::clone(&weak)));
        }
        let shown = watch::Sender::new(Shown::new(&settings, &merged));
        let told = certificates.told();
        page.serve(Program {
            job: Job::Serve,
            control: control.clone(),
            admin: {
                let shown = shown.subscribe();
                Arc::new(move || shown.borrow().configured.admin.clone())
            },
            toml: {
                let shown = shown.subscribe();
                Arc::new(move || shown.borrow().configured.to_toml())
            },
            open: {
                let relay = Weak::clone(&weak);
                Arc::new(move || relay.upgrade().map_or(0, |relay| allocations(&relay)))
            },
            metrics: {
                let (relay, status) = (Weak::clone(&weak), Arc::clone(control.status()));
                let snapshots = move || {
                    relay.upgrade().map_or_else(Default::default, |relay| {
                        let kernel = relay.kernel().map(Kernel::snapshot);
                        (relay.snapshots(), relay.realms(), kernel)
                    })
                };
                let told = (Arc::clone(&told), Arc::clone(&shared_store), totals);
                let fleet = Arc::clone(&fleet);
                serve_metrics::page(snapshots, told, move || fleet.counts(), status, log_counts)
            },
            server: Some(Server {
                relay: weak,
                shown: shown.subscribe(),
                store: Arc::clone(&shared_store),
                certificates: told,
                addresses: plan.config.relay.clone().into(),
                datapath: plan.config.datapath,
                datapath_reason: plan.datapath_reason.as_str().into(),
                fleet: orders,
            }),
        });
        let server = Self {
            sources,
            started: settings.clone(),
            settings,
            shown,
            generated: generated.and_then(Generated::not_kept),
            store,
            shared_store,
            fleet,
            relay,
            layout: plan.config.layout(),
            addresses: plan.config.relay,
            certificates,
        };
        let writing = async move {
            match publisher {
                Some(publisher) => _ = tokio::join!(writer.run(), publisher.run()),
                None => writer.run().await,
            }
        };
        Ok((server, tokio::spawn(writing)))
    }

    /// What has changed, or why it cannot be taken.
    async fn take(&mut self, loaded: Loaded, problems: &[Mistake]) -> Result<Reloaded, Vec<String>> {
        let Loaded { settings: mut new, certificates, warnings } = loaded;
        let unchangeable = self.started.unchangeable(&new);
        // Where the embedded store is, is for a restart.
        new.store.state.clone_from(&self.started.store.state);
        let store =
            if new.store == self.settings.store { None } else { Some(OpenStore::open(&new, true).await) };
        let store = store.transpose().map_err(|error| {
            control::say_refused(&error, "configuration not reloaded: the old one stays in force")
        })?;
        let in_use = store.as_ref().unwrap_or(&self.store).as_ref().is_some_and(OpenStore::is_in_use);
        if plan::names_nobody(&new) && !in_use {
            if self.generated.is_none() {
                let refused = "configuration not reloaded: it names neither users nor secrets, so nobody could authenticate";
                tracing::error!("{refused}");
                return Err(vec![refused.to_owned()]);
            }
            new.users.extend(self.generated.clone());
        }
        let mut reloaded = Reloaded::default();
        reloaded.warn_all(warnings);
        reloaded.warn_all(plan::alternates_that_are_us(&new));
        reloaded.need_restart(&unchangeable);
        if let Some(store) = store {
            self.store = store;
            store::share(&self.shared_store, self.store.as_ref());
        }
        let old = std::mem::replace(&mut self.settings, new);
        self.fleet.set(&self.settings);
        self.put_into_force();
        let changes = ServeChanges::new(&old, &self.settings);
        reloaded.changed = changes.lines();
        self.certificates.reload(&self.settings, certificates, problems, &mut reloaded);
        changes.say(&self.settings);
        Ok(reloaded)
    }

    /// Settings and store as they are.
    fn put_into_force(&mut self) {
        let merged = merge(&self.settings, self.store.as_mut());
        self.layout.add_server_names(realms::server_names(&merged.settings));
        let server = plan::server_config(&merged, &self.layout, &self.addresses, self.fleet.keys());
        let credentials = credentials(&merged, self.store.as_ref());
        self.relay.reconfigure(&server, &self.layout, &credentials, &realms::limits(&merged.settings));
        self.shown.send_replace(Shown::new(&self.settings, &merged));
    }
}

/// Settings, for whoever looks at them.
#[derive(Clone)]
pub(crate) struct Shown {
    pub(crate) configured: Arc<Settings>,
    /// With what the store adds.
    pub(crate) in_force: Arc<Settings>,
}

impl Shown {
    fn new(configured: &Settings, merged: &Merged) -> Self {
        Self { configured: Arc::new(configured.clone()), in_force: Arc::new(merged.settings.clone()) }
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
            Err(errors) => {
                Err(control::say_refused(&errors, "configuration not reloaded: the old one stays in force"))
            }
        }
    }

    fn look(&mut self) {
        self.certificates.look(&self.settings);
        if self.store.as_ref().is_some_and(OpenStore::has_news) {
            tracing::info!("the store has other realms, limits, token keys or peer rules now");
            self.put_into_force();
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
        self.fleet.leave().await;
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
}

fn allocations(relay: &Relay) -> u64 {
    relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum()
}

fn raise_open_files(plan: &Plan) {
    let subject = format!("{} allocations", plan.config.max_allocations);
    rlimit::raise_open_files(plan.open_files(), &subject, "limits.allocations");
}

fn say_what_started(plan: &Plan, relay: &Relay, page: &dyn Listening) {
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
    for address in &config.relay {
        let (first, last) = (config.ports.start(), config.ports.end());
        match address.external {
            Some(external) => {
                tracing::info!("relaying on {} as {external}, ports {first}-{last}", address.bind);
            }
            None => tracing::info!("relaying on {}, ports {first}-{last}", address.bind),
        }
    }
    tracing::info!("data path {}: {}; workers: {}", config.datapath, plan.datapath_reason, config.workers);
    if let Some(kernel) = relay.kernel() {
        let attached = kernel.attached();
        let where_to = if attached.is_empty() {
            "to no interface yet: none is Ethernet, up, and has an address".to_owned()
        } else {
            format!("to {}", named_by_hook(&attached))
        };
        let flows = config.max_kernel_flows;
        tracing::info!(
            "data path kernel: attached {where_to}; room for {flows} flows; everything else by {}",
            config.datapath
        );
        for Attachment { interface, hook, why } in &attached {
            if let Some(why) = why {
                tracing::warn!(
                    "data path kernel: not in the driver of {interface}, but at {}: {why}",
                    hook.name()
                );
            }
        }
    }
    page.say_where();
    for note in &plan.notes {
        tracing::warn!("{note}");
    }
    if !config.server.authenticate {
        tracing::warn!("auth.required is false: anybody who reaches this server may relay through it");
    }
}

/// As `eth0, eth1 (xdp), docker0 (tcx)`.
fn named_by_hook(attached: &[Attachment]) -> String {
    let mut hooks: Vec<Hook> = attached.iter().map(|it| it.hook).collect();
    hooks.sort_by_key(|hook| !hook.is_xdp());
    hooks.dedup();
    let named = hooks.into_iter().map(|hook| {
        let of_it = attached.iter().filter(|it| it.hook == hook).map(|it| &it.interface[..]);
        format!("{} ({})", of_it.collect::<Vec<_>>().join(", "), hook.name())
    });
    named.collect::<Vec<_>>().join(", ")
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
