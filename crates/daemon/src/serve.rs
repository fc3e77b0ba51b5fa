//! `turnpike serve`: starts the TURN server, and is the [`Service`] that reloads and drains it.

use std::{
    io::Write,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle};
use turnpike_config::{Loaded, Mistake, Settings, Sources, User, UserSecret, realms};
use turnpike_relay::{CredentialStore, Hook, Kernel, Layout, Relay, RelayAddress, SessionLog};
use turnpike_turn::server::NonceKey;

use crate::{
    admin::{AdminInterface, Job, Listening, Program, Server},
    certificates::Certificates,
    changes::ServeChanges,
    control::{self, Control, Reloaded, Service, say_warnings},
    credentials::Credentials,
    error::DaemonError,
    own_addresses::OwnAddresses,
    plan::{self, Plan},
    refusals::Refusals,
    rlimit, serve_metrics,
    serve_metrics::Snapshots,
    session_log::session_log,
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
    let loaded = sources.load()?;
    let (level, format) = (loaded.settings.log_level.clone(), loaded.settings.log_format);
    control::run((&level, format), async |control| {
        TurnServer::start(sources.clone(), loaded, control, out, interface)
    })
}

struct TurnServer {
    sources: Sources,
    /// What the relay was started with; keys that a reload cannot change keep these values.
    started: Settings,
    settings: Settings,
    /// For whoever looks.
    shown: watch::Sender<Arc<Settings>>,
    generated: Option<User>,
    nonce_key: NonceKey,
    relay: Arc<Relay>,
    /// What the listeners and relay addresses of the settings came to.
    layout: Layout,
    addresses: Vec<RelayAddress>,
    certificates: Certificates,
}

impl TurnServer {
    fn start(
        sources: Sources,
        loaded: Loaded,
        control: &Control,
        out: &mut dyn Write,
        interface: &dyn AdminInterface,
    ) -> Result<(Self, JoinHandle<()>), DaemonError> {
        let Loaded { mut settings, certificates, warnings } = loaded;
        say_warnings(&warnings);
        let generated = plan::generated_user(&settings);
        settings.users.extend(generated.clone());
        let nonce_key = NonceKey(rand::random());
        let certificates = Certificates::new(&settings, certificates)?;
        let mut plan = Plan::new(&settings, nonce_key, certificates.tls.clone(), certificates.dtls.clone());
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
        let refusals = Arc::<Refusals>::default();
        let (logger, writer) = session_log(Arc::clone(&refusals));
        let log_counts = logger.counts();
        let log: Arc<dyn SessionLog> = Arc::new(logger);
        let credentials: Arc<dyn CredentialStore> = Arc::new(Credentials::new(&settings));
        let relay = Arc::new(Relay::start(&plan.config, credentials, log)?);
        say_what_started(&plan, &relay, &*page);
        certificates.say();
        if let Some(user) = &generated {
            print_credential(user, &settings.realm, out);
        }

        // Weak, so that the last owner can stop the relay while others look at it.
        let weak = Arc::downgrade(&relay);
        if let Some(own) = own {
            tokio::spawn(own.keep_current(Weak::clone(&weak)));
        }
        let shown = watch::Sender::new(Arc::new(settings.clone()));
        let told = certificates.told();
        page.serve(Program {
            job: Job::Serve,
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
                let relay = Weak::clone(&weak);
                Arc::new(move || relay.upgrade().map_or(0, |relay| allocations(&relay)))
            },
            metrics: {
                let (relay, status) = (Weak::clone(&weak), Arc::clone(control.status()));
                let snapshots = move || {
                    relay.upgrade().map_or_else(Default::default, |relay| {
                        let kernel = relay.kernel().map(Kernel::snapshot);
                        let workers = relay.snapshots();
                        let listeners = relay.by_listener(&workers);
                        Snapshots { workers, realms: relay.realms(), listeners, kernel }
                    })
                };
                serve_metrics::page(snapshots, Arc::clone(&told), status, log_counts)
            },
            server: Some(Server {
                relay: weak,
                settings: shown.subscribe(),
                certificates: told,
                addresses: plan.config.relay.clone().into(),
                datapath: plan.config.datapath,
                datapath_reason: plan.datapath_reason.as_str().into(),
                refusals,
            }),
            rules: None,
        });
        let server = Self {
            sources,
            started: settings.clone(),
            settings,
            shown,
            generated,
            nonce_key,
            relay,
            layout: plan.config.layout(),
            addresses: plan.config.relay,
            certificates,
        };
        Ok((server, tokio::spawn(writer.run())))
    }

    /// What has changed, or why it cannot be taken.
    fn take(&mut self, loaded: Loaded, problems: &[Mistake]) -> Result<Reloaded, Vec<String>> {
        let Loaded { settings: mut new, certificates, warnings } = loaded;
        if plan::generated_user(&new).is_some() {
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
        reloaded.need_restart(&self.started.unchangeable(&new));
        let credentials: Arc<dyn CredentialStore> = Arc::new(Credentials::new(&new));
        self.layout.add_server_names(realms::server_names(&new));
        let server = plan::server_config(&new, &self.layout, &self.addresses, self.nonce_key);
        self.relay.reconfigure(&server, &self.layout, &credentials, &realms::limits(&new));
        let changes = ServeChanges::new(&self.settings, &new);
        reloaded.changed = changes.lines();
        self.certificates.reload(&new, certificates, problems, &mut reloaded);
        changes.say(&new);
        self.shown.send_replace(Arc::new(new.clone()));
        self.settings = new;
        Ok(reloaded)
    }
}

impl Service for TurnServer {
    /// Takes what a running server can change from the configuration. Certificates that cannot be used keep the old ones in force,
    /// and nothing else: who is to lose access must not keep it because of them.
    fn reload(&mut self) -> Result<Reloaded, Vec<String>> {
        match self.sources.load_but_certificates() {
            Ok((loaded, problems)) => self.take(loaded, &problems),
            Err(errors) => {
                Err(control::say_refused(&errors, "configuration not reloaded: the old one stays in force"))
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
        allocations(&self.relay)
    }

    fn say_left(&self, open: u64) {
        tracing::warn!(allocations = open, "sessions still open are ended");
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
    page.say_where();
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
