//! `turnpike serve`: starts the TURN server, and is the [`Service`] that reloads and drains it.

use std::{
    io::Write,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{net::TcpListener, task::JoinHandle};
use turnpike_config::{Loaded, Mistake, Settings, Sources, User, UserSecret, realms};
use turnpike_relay::{CredentialStore, Kernel, Layout, Relay, RelayAddress, SessionLog};
use turnpike_turn::server::NonceKey;

use crate::{
    admin::{self, AdminState},
    certificates::Certificates,
    changes::ServeChanges,
    control::{self, Service, Status, say_warnings},
    credentials::Credentials,
    error::DaemonError,
    kernel_path,
    own_addresses::OwnAddresses,
    plan::{self, Plan},
    rlimit, serve_metrics,
    session_log::session_log,
};

/// Runs a TURN server until a signal ends it. A generated credential goes to `out`, once.
///
/// # Errors
/// See [`DaemonError`]; configuration errors come before any socket is opened.
pub fn serve(sources: &Sources, out: &mut dyn Write) -> Result<(), DaemonError> {
    let loaded = sources.load()?;
    let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
    control::run((&level, format), async |status| {
        TurnServer::start(sources.clone(), loaded, status, out).await
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
}

impl TurnServer {
    async fn start(
        sources: Sources,
        loaded: Loaded,
        status: &Arc<Status>,
        out: &mut dyn Write,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let Loaded { mut settings, certificates, warnings } = loaded;
        say_warnings(&warnings);
        let generated = plan::generated_user(&settings);
        settings.users.extend(generated.clone());
        let nonce_key = NonceKey(rand::random());
        let certificates = Certificates::new(&settings, certificates)?;
        let mut plan = Plan::new(&settings, nonce_key, certificates.tls.clone(), certificates.dtls.clone());
        raise_open_files(&plan);

        let page = admin::bind(settings.admin, settings.is_explicit("admin.listen")).await?;
        // The page asks nobody who he is, and a client that has TCP relayed would come from the server's own address.
        plan.config.listeners_beside = page.iter().filter_map(|page| page.local_addr().ok()).collect();
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
        say_what_started(&plan, &relay, page.as_ref());
        certificates.say();
        if let Some(user) = &generated {
            print_credential(user, &settings.realm, out);
        }

        // Weak, so that the last owner can stop the relay while others look at it.
        let weak = Arc::downgrade(&relay);
        if let Some(own) = own {
            tokio::spawn(own.keep_current(Weak::clone(&weak)));
        }
        if let Some(page) = page {
            let snapshots = move || {
                weak.upgrade().map_or_else(Default::default, |relay| {
                    let kernel = relay.kernel().map(Kernel::snapshot);
                    (relay.snapshots(), relay.realms(), kernel)
                })
            };
            let metrics = serve_metrics::page(snapshots, certificates.told(), Arc::clone(status), log_counts);
            let hosts = settings.admin_hosts.clone();
            admin::spawn(page, AdminState { metrics, draining: status.draining(), hosts });
        }
        let server = Self {
            sources,
            started: settings.clone(),
            settings,
            generated,
            nonce_key,
            relay,
            layout: plan.config.layout(),
            addresses: plan.config.relay,
            certificates,
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
}

fn raise_open_files(plan: &Plan) {
    let subject = format!("{} allocations", plan.config.max_allocations);
    rlimit::raise_open_files(plan.open_files(), &subject, "limits.allocations");
}

fn say_what_started(plan: &Plan, relay: &Relay, page: Option<&TcpListener>) {
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
    if config.shared_ports > 0 {
        tracing::info!(
            "allocations of a worker share {} ports on each of these; there, an address of peers is one client's alone",
            config.shared_ports
        );
    }
    tracing::info!("data path {}: {}; workers: {}", config.datapath, plan.datapath_reason, config.workers);
    if let Some(kernel) = relay.kernel() {
        kernel_path::say(kernel, config.max_kernel_flows, config.datapath);
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
