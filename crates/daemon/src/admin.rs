//! The seam to the admin interface, which is a crate of its own: who makes it, and what it may ask of a running program.

use std::{
    error::Error,
    fmt, io,
    net::SocketAddr,
    os::fd::OwnedFd,
    pin::Pin,
    sync::{Arc, Weak},
};

use tokio::sync::watch;
use turnpike_config::{AdminSettings, Certificate, Settings};
use turnpike_forward::{RuleId, RuleSnapshot};
use turnpike_net::Datapath;
use turnpike_relay::{Relay, RelayState};

use crate::{
    certificates::Told,
    control::Control,
    fleet::FleetOrders,
    refusals::{RefusalFilter, RefusalGroup, Refusals},
    serve::Shown,
    store::{SharedStore, Store, shared},
};

/// Descriptors set apart for the admin interface and for files that are read while the program runs: one for each connection, one for
/// each of those that are just being closed, and some for configuration, certificates and `/proc`.
pub(crate) const DESCRIPTORS: u64 = 48;

/// More of them, where applications ask for credentials on a listener of its own.
pub(crate) const CREDENTIALS_DESCRIPTORS: u64 = 144;

/// Makes the text of `/metrics`, in the format of OpenMetrics, anew at each scrape.
pub(crate) type MetricsPage = Arc<dyn Fn() -> Result<String, fmt::Error> + Send + Sync>;

/// What each rule of a forwarder has counted.
pub(crate) type Rules = Arc<dyn Fn() -> Vec<(RuleId, RuleSnapshot)> + Send + Sync>;

/// Why there is no admin interface; the message says what to change.
pub type AdminError = Box<dyn Error + Send + Sync>;

/// A listening socket of the interface for another process, by what the configuration calls it.
pub type Lent = (String, OwnedFd);

/// Makes the admin interface of a program. Called on the control thread, within its runtime.
pub trait AdminInterface {
    /// Listens, and answers nobody yet; by what another process has `lent` where that is the same address. What nobody has asked for
    /// (not `explicit`) and cannot be had is left out and said.
    ///
    /// # Errors
    /// Of addresses that somebody has asked for.
    fn listen(
        &self,
        job: Job,
        settings: &AdminSettings,
        explicit: bool,
        lent: Vec<Lent>,
    ) -> Result<Box<dyn Listening>, AdminError>;

    /// Listens where applications are to ask for credentials, and answers nobody yet; nowhere, if that is not configured. By what another
    /// process has `lent`, as [`AdminInterface::listen`].
    ///
    /// # Errors
    /// Of addresses that cannot be had, and of the certificate.
    fn listen_for_applications(
        &self,
        settings: &Settings,
        lent: Vec<Lent>,
    ) -> Result<Box<dyn Listening>, AdminError>;
}

/// Which program it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// `turnpike serve`.
    Serve,
    /// `turnpike forward`.
    Forward,
}

/// Listens, and answers nobody yet.
pub trait Listening {
    /// Where by TCP, with real ports.
    fn addresses(&self) -> Vec<SocketAddr>;
    /// Says where in the log.
    fn say_where(&self);
    /// Answers from now on.
    fn serve(self: Box<Self>, program: Program) -> Arc<dyn Serving>;
}

/// Answers, until the program ends; to be kept for as long.
pub trait Serving: Send + Sync {
    /// Its sockets, for another process.
    ///
    /// # Errors
    /// Those of dup(2).
    fn lend(&self) -> io::Result<Vec<Lent>>;
    /// Another process has them, and answers.
    fn leave(&self);
    /// The program ends: nothing more is accepted.
    fn close(&self);
    /// Returns when no change is at work.
    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// A running program, for whoever asks it from the runtime of its control thread.
#[derive(Clone)]
pub struct Program {
    /// Which.
    pub job: Job,
    /// What it can be asked for.
    pub control: Control,
    pub(crate) admin: Arc<dyn Fn() -> AdminSettings + Send + Sync>,
    pub(crate) toml: Arc<dyn Fn() -> String + Send + Sync>,
    pub(crate) open: Arc<dyn Fn() -> u64 + Send + Sync>,
    pub(crate) metrics: MetricsPage,
    pub(crate) server: Option<Server>,
    pub(crate) rules: Option<Rules>,
}

impl Program {
    /// Who may use the admin interface, now.
    #[must_use]
    pub fn admin(&self) -> AdminSettings {
        (self.admin)()
    }

    /// The effective configuration, secrets masked.
    #[must_use]
    pub fn to_toml(&self) -> String {
        (self.toml)()
    }

    /// Sessions or connections now.
    #[must_use]
    pub fn open(&self) -> u64 {
        (self.open)()
    }

    /// The text of `/metrics`.
    ///
    /// # Errors
    /// None that is known.
    pub fn metrics(&self) -> Result<String, fmt::Error> {
        (self.metrics)()
    }

    /// Clients that the TURN server has refused lately, the last ones first; `None` where there is no such server.
    #[must_use]
    pub fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<RefusalGroup>> {
        self.server.as_ref().map(|server| server.refusals.find(wanted, most))
    }

    /// What each rule of the forwarder has counted; none where there is no forwarder.
    #[must_use]
    pub fn rules(&self) -> Vec<(RuleId, RuleSnapshot)> {
        self.rules.as_ref().map_or_else(Vec::new, |rules| rules())
    }

    /// The TURN server, if it is one and runs still.
    #[must_use]
    pub fn server(&self) -> Option<ServerView> {
        let server = self.server.as_ref()?;
        let Shown { in_force, addresses, .. } = server.shown.borrow().clone();
        Some(ServerView {
            relay: server.relay.upgrade()?,
            settings: in_force,
            store: shared(&server.store),
            certificates: server.certificates.in_use(),
            addresses,
            datapath: server.datapath,
            datapath_reason: Arc::clone(&server.datapath_reason),
        })
    }

    /// Other servers that are one service with this one, and who is banned; `None` of a forwarder.
    #[must_use]
    pub fn fleet(&self) -> Option<FleetOrders> {
        self.server.as_ref().map(|server| server.fleet.clone())
    }
}

/// What is known of a TURN server.
#[derive(Clone)]
pub(crate) struct Server {
    /// Weak, so that the last owner can stop the relay while others look at it.
    pub(crate) relay: Weak<Relay>,
    pub(crate) shown: watch::Receiver<Shown>,
    pub(crate) store: SharedStore,
    pub(crate) certificates: Arc<Told>,
    pub(crate) datapath: Datapath,
    pub(crate) datapath_reason: Arc<str>,
    pub(crate) fleet: FleetOrders,
    pub(crate) refusals: Arc<Refusals>,
}

/// A TURN server as it is now. To be dropped soon: the server does not stop as long as this is there.
pub struct ServerView {
    /// What relays.
    pub relay: Arc<Relay>,
    /// What is configured, with what the store adds.
    pub settings: Arc<Settings>,
    /// Where more users are, if there is one.
    pub store: Option<Store>,
    /// Those that are shown to clients.
    pub certificates: Arc<[Certificate]>,
    /// Those that relayed transport addresses are made on.
    pub addresses: Arc<[RelayState]>,
    /// The step of the ladder.
    pub datapath: Datapath,
    /// Why that.
    pub datapath_reason: Arc<str>,
}
