//! The control thread: starts the relay, then waits for signals, reloads, scrapes and log lines until it is told to
//! stop.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{net::TcpListener, task::JoinHandle};
use turnpike_relay::{
    CredentialStore, DtlsContext, DtlsError, Layout, Relay, SessionLog, StartError, TlsContext,
};
use turnpike_turn::server::NonceKey;

use crate::{
    admin::{self, AdminError, AdminState},
    changes::{self, ServeChanges},
    config::{
        Certificate, ConfigError, ConfigErrors, Loaded, Settings, Sources, User, UserSecret,
        certificates::{self, CertificateWatch},
    },
    control::{self, Next},
    credentials::Credentials,
    in_force::InForce,
    limits, logging, metrics,
    own_addresses::OwnAddresses,
    plan::{self, Plan},
    realms,
    session_log::{SessionLogWriter, session_log},
    signals::Signals,
};

/// Why `serve` ended other than by being told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Nothing was started.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The relay did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The admin address that was asked for cannot be had.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A worker ended by itself.
    #[error(
        "a worker has ended though nobody stopped it; the log lines above may say why, and a restart helps"
    )]
    Worker,
    /// rustls.
    #[error("cannot prepare TLS: {0}")]
    Tls(String),
    /// dimpl.
    #[error(transparent)]
    Dtls(#[from] DtlsError),
    /// The control thread itself.
    #[error("cannot start the control thread: {0}")]
    Control(#[source] io::Error),
}

/// Runs a TURN server until a signal ends it. A generated credential goes to `out`, once.
///
/// # Errors
/// See [`ServeError`]; configuration errors come before any socket is opened.
pub fn serve(sources: &Sources, out: &mut dyn Write) -> Result<(), ServeError> {
    let loaded = sources.load()?;
    logging::init(&loaded.settings.log_level, loaded.settings.log_format);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ServeError::Control)?;
    runtime.block_on(Control::run(sources, loaded, out))
}

struct Control<'a> {
    sources: &'a Sources,
    /// What the relay was started with; keys that a reload cannot change keep these values.
    started: Settings,
    settings: Settings,
    generated: Option<User>,
    nonce_key: NonceKey,
    relay: Arc<Relay>,
    /// What the listeners and relay addresses of the settings came to.
    layout: Layout,
    addresses: Vec<turnpike_relay::RelayAddress>,
    draining: Arc<AtomicBool>,
    tls: Option<Arc<TlsContext>>,
    dtls: Option<Arc<DtlsContext>>,
    /// In force.
    certificates: Vec<Certificate>,
    watch: CertificateWatch,
    in_force: Arc<InForce>,
}

impl<'a> Control<'a> {
    async fn run(sources: &'a Sources, loaded: Loaded, out: &mut dyn Write) -> Result<(), ServeError> {
        // Before anything else, so that no signal finds its default action while sessions exist.
        let mut signals = Signals::new().map_err(ServeError::Control)?;
        let Loaded { mut settings, certificates, warnings } = loaded;
        let identities = certificates::identities(&certificates);
        tracing::info!("turnpike {}", env!("CARGO_PKG_VERSION"));
        say_warnings(&warnings);
        let generated = plan::generated_user(&settings);
        settings.users.extend(generated.clone());
        let nonce_key = NonceKey(rand::random());
        let tls = if identities.is_empty() {
            None
        } else {
            let context = TlsContext::new(&identities);
            Some(Arc::new(context.map_err(|error| ServeError::Tls(error.to_string()))?))
        };
        let dtls = if settings.dtls_listen.is_empty() {
            None
        } else {
            let handshake = Duration::from_secs(u64::from(settings.first_message_timeout));
            Some(Arc::new(DtlsContext::new(&identities, handshake)?))
        };
        let mut plan = Plan::new(&settings, nonce_key, tls.clone(), dtls.clone());
        raise_open_files(&plan);

        let admin = admin::bind(settings.admin, settings.is_explicit("admin.listen")).await?;
        // The page asks nobody who he is, and a client that has TCP relayed would come from the server's own address.
        plan.config.listeners_beside =
            admin.iter().filter_map(|listener| listener.local_addr().ok()).collect();
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
        let log_counts = logger.counts();
        let log: Arc<dyn SessionLog> = Arc::new(logger);
        let credentials: Arc<dyn CredentialStore> = Arc::new(Credentials::new(&settings));
        let relay = Arc::new(Relay::start(&plan.config, credentials, log)?);
        say_what_started(&plan, &relay, admin.as_ref());
        let in_force = Arc::new(InForce::default());
        in_force.show(&certificates);
        if let Some(user) = &generated {
            print_credential(user, &settings.realm, out);
        }

        let control = Self {
            sources,
            started: settings.clone(),
            watch: CertificateWatch::new(&settings),
            tls,
            dtls,
            certificates,
            settings,
            generated,
            nonce_key,
            layout: plan.config.layout(),
            addresses: plan.config.relay.clone(),
            draining: Arc::new(AtomicBool::new(false)),
            relay,
            in_force,
        };
        // Weak, for the same reason as below.
        let own = own.map(|own| tokio::spawn(own.keep_current(Arc::downgrade(&control.relay))));
        if let Some(listener) = admin {
            // Weak, so that the last owner can stop the relay while a scrape is under way.
            let relay = Arc::downgrade(&control.relay);
            let state = AdminState {
                metrics: metrics::page(
                    move || {
                        relay
                            .upgrade()
                            .map_or_else(Default::default, |relay| (relay.snapshots(), relay.realms()))
                    },
                    Arc::clone(&control.in_force),
                    Arc::clone(&control.draining),
                    log_counts,
                ),
                draining: Arc::clone(&control.draining),
                hosts: control.started.admin_hosts.clone(),
            };
            admin::spawn(listener, state);
        }
        control.until_stopped(&mut signals, writer, own).await
    }

    async fn until_stopped(
        mut self,
        signals: &mut Signals,
        writer: SessionLogWriter,
        own: Option<JoinHandle<()>>,
    ) -> Result<(), ServeError> {
        let log = tokio::spawn(writer.run());
        let failed = loop {
            let deadline = self.settings.shutdown_deadline;
            let look = || {
                if self.watch.has_changed() {
                    self.reload_certificates();
                }
                self.in_force.look();
                self.relay.has_failed()
            };
            match control::next(signals, deadline, look).await {
                Next::Reload => self.reload(),
                Next::Drain(patience) => {
                    self.drain(signals, patience).await;
                    break false;
                }
                Next::Failed => break true,
            }
        };
        self.draining.store(true, Ordering::Relaxed);
        if let Some(own) = own {
            own.abort();
        }
        control::stop("relay", self.relay, Relay::stop, log).await;
        tracing::info!("stopped");
        if failed { Err(ServeError::Worker) } else { Ok(()) }
    }

    /// Waits for the sessions to end: at most `patience`, and no longer than until the next signal.
    async fn drain(&self, signals: &mut Signals, patience: Duration) {
        self.draining.store(true, Ordering::Relaxed);
        self.relay.drain();
        let open = self.allocations();
        tracing::info!(allocations = open, deadline_s = patience.as_secs(), "draining: no new allocations");
        let deadline = self.settings.shutdown_deadline;
        let left = control::drained(signals, deadline, patience, || self.allocations()).await;
        if left > 0 {
            tracing::warn!(allocations = left, "sessions still open are ended");
        }
    }

    fn allocations(&self) -> u64 {
        self.relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum()
    }

    /// Takes what a running server can change from the configuration; a broken one changes nothing. Certificates that cannot be used
    /// keep the old ones in force, and nothing else: who is to lose access must not keep it because of them.
    fn reload(&mut self) {
        let loaded = self.sources.load_but_certificates().map_err(|errors| {
            control::say_refused(&errors, "configuration not reloaded: the old one stays in force");
        });
        let taken = loaded.is_ok_and(|(loaded, problems)| self.take(loaded, &problems));
        self.in_force.count_config(taken);
    }

    /// False where it cannot be taken.
    fn take(&mut self, loaded: Loaded, problems: &[ConfigError]) -> bool {
        let Loaded { settings: mut new, certificates, warnings } = loaded;
        if plan::generated_user(&new).is_some() {
            if self.generated.is_none() {
                tracing::error!(
                    "configuration not reloaded: it names neither users nor secrets, so nobody could authenticate"
                );
                return false;
            }
            new.users.extend(self.generated.clone());
        }
        say_warnings(&warnings);
        say_warnings(&plan::circles(&new).collect::<Vec<_>>());
        control::say_unchangeable(&self.started.unchangeable(&new));
        let credentials: Arc<dyn CredentialStore> = Arc::new(Credentials::new(&new));
        self.layout.add_server_names(realms::server_names(&new));
        let server = plan::server_config(&new, &self.layout, &self.addresses, self.nonce_key);
        self.relay.reconfigure(&server, &self.layout, &credentials, &realms::limits(&new));
        self.watch = CertificateWatch::new(&new);
        self.take_certificates(certificates, problems);
        ServeChanges::new(&self.settings, &new).say(&new);
        self.settings = new;
        true
    }

    /// One of the files has changed while nobody asked for a reload.
    fn reload_certificates(&mut self) {
        let found = certificates::load(&self.settings);
        say_warnings(&found.warnings);
        self.take_certificates(found.certificates, &found.problems);
    }

    /// Shows them, if all of them can be used.
    fn take_certificates(&mut self, certificates: Vec<Certificate>, problems: &[ConfigError]) {
        if !problems.is_empty() {
            for problem in problems {
                tracing::error!("{problem}");
            }
            tracing::error!("certificates not reloaded: the old ones stay in force");
            return self.in_force.count_certificates(false);
        }
        match (&self.tls, &certificates[..]) {
            (None, []) => {}
            (None, _) => tracing::warn!("TLS begins only after a restart: there was no certificate at start"),
            (Some(_), []) => {
                tracing::warn!("no certificate is configured any more: the old ones stay in force");
            }
            (Some(tls), _) => {
                let identities = certificates::identities(&certificates);
                tls.replace(&identities);
                // A file that no longer has dtls.listen may name certificates that DTLS cannot use.
                if let Some(Err(error)) = self.dtls.as_ref().map(|dtls| dtls.replace(&identities)) {
                    tracing::warn!("{error}: DTLS keeps the old one until a restart");
                }
                self.in_force.show(&certificates);
                self.in_force.count_certificates(true);
                changes::say_certificates(&self.certificates, &certificates);
                self.certificates = certificates;
            }
        }
    }
}

fn say_warnings(warnings: &[String]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

fn raise_open_files(plan: &Plan) {
    let subject = format!("{} allocations", plan.config.max_allocations);
    limits::raise_open_files(plan.open_files(), &subject, "limits.allocations");
}

fn say_what_started(plan: &Plan, relay: &Relay, admin: Option<&TcpListener>) {
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
    admin::say_where(admin);
    for note in &plan.notes {
        tracing::warn!("{note}");
    }
    if !config.server.authenticate {
        tracing::warn!("auth.required is false: anybody who reaches this server may relay through it");
    }
}

/// This one password is meant to be seen: it exists nowhere else.
fn print_credential(user: &User, realm: &str, out: &mut dyn Write) {
    let UserSecret::Password(password) = &user.secret else {
        return;
    };
    let line = writeln!(
        out,
        "No user is configured. For this run: user {} password {} (realm {realm})",
        user.name,
        password.reveal()
    );
    if line.and_then(|()| out.flush()).is_err() {
        tracing::warn!("cannot print the generated credential: configure a user with --user NAME:PASSWORD");
    }
}
