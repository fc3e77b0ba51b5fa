//! `turnpike serve`: starts the TURN server, and is the [`Service`] that reloads, drains and upgrades it.

use std::{
    io::Write,
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::task::JoinHandle;
use turnpike_config::{Loaded, Mistake, Settings, Sources, User, UserSecret, realms};
use turnpike_relay::{CredentialStore, Hook, Kernel, Layout, Relay, RelayAddress, SessionLog};
use turnpike_turn::server::NonceKey;

use crate::{
    admin::{self, AdminState, MetricsPage},
    admin_page::AdminPage,
    certificates::Certificates,
    changes::ServeChanges,
    control::{self, Service, Status, say_warnings},
    credentials::Credentials,
    error::DaemonError,
    own_addresses::OwnAddresses,
    plan::{self, Plan},
    rlimit,
    serve_estate::{ServeEstate, ServeInheritance},
    serve_metrics,
    session_log::session_log,
    upgrade::{self, Estate, Heir},
};

/// Runs a TURN server until a signal ends it. A generated credential goes to `out`, once.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn serve(sources: &Sources, out: &mut dyn Write) -> Result<(), DaemonError> {
    upgrade::begin("serve", |heir| {
        let loaded = sources.load()?;
        let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
        control::run((&level, format), async |status| {
            TurnServer::start(sources.clone(), loaded, status, out, heir).await
        })
    })
}

struct TurnServer {
    sources: Sources,
    /// What the relay was started with; keys that a reload cannot change keep these values.
    started: Settings,
    settings: Settings,
    generated: Option<User>,
    nonce_key: NonceKey,
    relay: Arc<Relay>,
    /// What the listeners and relay addresses of the settings came to.
    layout: Layout,
    addresses: Vec<RelayAddress>,
    certificates: Certificates,
    page: Option<AdminPage>,
    metrics: MetricsPage,
}

impl TurnServer {
    async fn start(
        sources: Sources,
        loaded: Loaded,
        status: &Arc<Status>,
        out: &mut dyn Write,
        heir: &mut Option<Heir>,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let Loaded { mut settings, certificates, warnings } = loaded;
        say_warnings(&warnings);
        let started = settings.clone();
        let mut before = heir.as_mut().map(ServeInheritance::new).transpose()?;
        if let Some(before) = &before {
            before.keep(&mut settings);
        }
        let generated = match (plan::generated_user(&settings), &before) {
            (Some(_), Some(before)) => Some(before.generated()?),
            (generated, _) => generated,
        };
        settings.users.extend(generated.clone());
        let nonce_key = before.as_ref().map_or_else(|| NonceKey(rand::random()), ServeInheritance::nonce_key);
        let certificates = Certificates::new(&settings, certificates)?;
        let mut plan = Plan::new(&settings, nonce_key, certificates.tls.clone(), certificates.dtls.clone());
        if let Some(before) = &before {
            plan.config.datapath = before.datapath();
            plan.datapath_reason = "that of the process before".to_owned();
            if let (Some(tls), Some(keys)) = (&certificates.tls, before.tickets()) {
                tls.take_over(keys);
            }
        }
        raise_open_files(&plan);

        let socket = before.as_mut().and_then(|before| before.page(settings.admin));
        let is_explicit = settings.is_explicit("admin.listen");
        let mut page = AdminPage::bind(settings.admin, is_explicit, socket).await?;
        // The page asks nobody who he is, and a client that has TCP relayed would come from the server's own address.
        plan.config.listeners_beside = page.iter().map(AdminPage::address).collect();
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
        let is_first = before.is_none();
        let relay = Arc::new(match before {
            None => Relay::start(&plan.config, credentials, log)?,
            Some(before) => Relay::start_as_heir(&plan.config, credentials, log, before.into_relay())?,
        });
        // Weak, so that the last owner can stop the relay while others look at it.
        let weak = Arc::downgrade(&relay);
        take_over(heir, status, &relay)?;
        say_what_started(&plan, &relay, page.as_ref().map(AdminPage::address));
        certificates.say();
        if let Some(user) = generated.as_ref().filter(|_| is_first) {
            print_credential(user, &settings.realm, out);
        }

        if let Some(own) = own {
            tokio::spawn(own.keep_current(Weak::clone(&weak)));
        }
        let snapshots = move || {
            weak.upgrade().map_or_else(Default::default, |relay| {
                let kernel = relay.kernel().map(Kernel::snapshot);
                (relay.snapshots(), relay.realms(), kernel)
            })
        };
        let metrics = serve_metrics::page(snapshots, certificates.told(), Arc::clone(status), log_counts);
        if let Some(page) = &mut page {
            let (metrics, hosts) = (Arc::clone(&metrics), settings.admin_hosts.clone());
            page.begin(AdminState { metrics, draining: status.draining(), hosts });
        }
        let server = Self {
            sources,
            started,
            settings,
            generated,
            nonce_key,
            relay,
            layout: plan.config.layout(),
            addresses: plan.config.relay,
            certificates,
            page,
            metrics,
        };
        Ok((server, tokio::spawn(writer.run())))
    }

    /// False where it cannot be taken.
    fn take(&mut self, loaded: Loaded, problems: &[Mistake]) -> bool {
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
        say_warnings(&plan::alternates_that_are_us(&new).collect::<Vec<_>>());
        control::say_unchangeable(&self.started.unchangeable(&new));
        // What is counted is shared by those that there are.
        new.workers = self.settings.workers;
        let credentials: Arc<dyn CredentialStore> = Arc::new(Credentials::new(&new));
        self.layout.add_server_names(realms::server_names(&new));
        let server = plan::server_config(&new, &self.layout, &self.addresses, self.nonce_key);
        self.relay.reconfigure(&server, &self.layout, &credentials, &realms::limits(&new));
        self.certificates.reload(&new, certificates, problems);
        ServeChanges::new(&self.settings, &new).say(&new);
        self.settings = new;
        true
    }
}

impl Service for TurnServer {
    /// Takes what a running server can change from the configuration. Certificates that cannot be used keep the old ones in force,
    /// and nothing else: who is to lose access must not keep it because of them.
    fn reload(&mut self) -> bool {
        match self.sources.load_but_certificates() {
            Ok((loaded, problems)) => self.take(loaded, &problems),
            Err(errors) => {
                control::say_refused(&errors, "configuration not reloaded: the old one stays in force");
                false
            }
        }
    }

    fn look(&mut self) {
        self.certificates.look(&self.settings);
    }

    fn has_failed(&self) -> bool {
        self.relay.has_failed()
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.settings.shutdown_deadline.into())
    }

    fn drain(&mut self, patience: Duration) {
        self.relay.drain();
        let deadline_s = patience.as_secs();
        tracing::info!(allocations = self.open(), deadline_s, "draining: no new allocations");
    }

    fn open(&self) -> u64 {
        self.relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum()
    }

    fn say_left(&self, open: u64) {
        tracing::warn!(allocations = open, "sessions still open are ended");
    }

    fn estate(&self) -> Arc<dyn Estate> {
        Arc::new(ServeEstate {
            relay: Arc::clone(&self.relay),
            generated: self.generated.clone(),
            tickets: self.certificates.tls.as_ref().map(|tls| tls.ticket_keys()),
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

/// Goes on where the process before stops, if there is one.
fn take_over(heir: &mut Option<Heir>, status: &Status, relay: &Arc<Relay>) -> Result<(), DaemonError> {
    if let Some(heir) = heir {
        let inherited = || relay.inherited().map_err(|unfit| DaemonError::Upgrade(unfit.to_string()));
        heir.take_over(status.carried(), inherited, || relay.serve())?;
    }
    // From now on nothing goes back to that one.
    if let Some(heir) = heir.take() {
        let weak = Arc::downgrade(relay);
        heir.listen(Arc::clone(status.carried()), move || {
            let attached = weak.upgrade().map_or(Ok(()), |relay| relay.attach_kernel());
            if let Err(error) = attached {
                tracing::error!("the kernel relays nothing from now on: {error}");
            }
        });
    }
    Ok(())
}

fn raise_open_files(plan: &Plan) {
    let subject = format!("{} allocations", plan.config.max_allocations);
    rlimit::raise_open_files(plan.open_files(), &subject, "limits.allocations");
}

fn say_what_started(plan: &Plan, relay: &Relay, page: Option<SocketAddr>) {
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
        let how = if kernel.hook() == Hook::Tcx { "tcx" } else { "clsact" };
        let interfaces = kernel.interfaces();
        let where_to = if interfaces.is_empty() {
            "to no interface yet: none is Ethernet, up, and has an address".to_owned()
        } else {
            format!("to {} ({how})", interfaces.join(", "))
        };
        let flows = config.max_kernel_flows;
        tracing::info!(
            "data path kernel: attached {where_to}; room for {flows} flows; everything else by {}",
            config.datapath
        );
    }
    admin::say_where(page);
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
