//! Why a daemon did not start, or ended other than by being told to.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use turnpike_config::Mistakes;
use turnpike_net::PassedError;
use turnpike_relay::DtlsError;

/// Each message is one sentence that says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// Nothing was started, and no socket opened.
    #[error(transparent)]
    Config(#[from] Mistakes),
    /// What the service manager has passed cannot be taken.
    #[error(transparent)]
    Passed(#[from] PassedError),
    /// Nobody would read from a socket that the service manager has passed.
    #[error("the service manager has passed {transport} {address} ({name:?}), and {problem}")]
    Unserved {
        /// `udp` or `tcp`.
        transport: &'static str,
        /// Where it is bound.
        address: SocketAddr,
        /// As the unit calls it.
        name: String,
        /// Why, and what to do.
        problem: String,
    },
    /// The TURN server did not start.
    #[error(transparent)]
    Serve(#[from] turnpike_relay::StartError),
    /// The database with users.
    #[error(transparent)]
    Store(#[from] turnpike_stores::StoreError),
    /// Two nodes with one name would be sent each other's clients.
    #[error("another node of the fleet is called {name} and lives: give this one another name in fleet.node")]
    NameTaken {
        /// That name.
        name: String,
    },
    /// Numbers of nodes have 12 bits.
    #[error(
        "the fleet has 4095 nodes, which is as many as there may be: end one, or begin another fleet with fleet.name"
    )]
    FleetFull,
    /// Nothing that the others have sealed could be read.
    #[error(
        "the nodes in {store} have another fleet.secret: set theirs, or begin another fleet with fleet.name"
    )]
    OtherSecret {
        /// Where the fleet's store is.
        store: String,
    },
    /// Nothing to list or to change.
    #[error(
        "there is no store: name one with --store URL, or a directory for the embedded one with --state DIR"
    )]
    NoStore,
    /// The forwarder did not start.
    #[error(transparent)]
    Forward(#[from] turnpike_forward::StartError),
    /// An address for the admin interface that was asked for cannot be had.
    #[error(transparent)]
    Admin(#[from] turnpike_admin::ListenError),
    /// A file that the configuration names.
    #[error("cannot write {what} {}: {source}; name another file, or none", path.display())]
    File {
        /// Which of them.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// rustls.
    #[error("cannot prepare TLS: {0}")]
    Tls(String),
    /// dimpl.
    #[error(transparent)]
    Dtls(#[from] DtlsError),
    /// Another process was to be gone on from, and that one goes on itself.
    #[error("cannot take over: {0}")]
    Upgrade(String),
    /// The control thread itself.
    #[error("cannot start the control thread: {0}")]
    Control(#[source] io::Error),
    /// A reload wants what was given up at the start.
    #[error(
        "the rules need the capabilities {0}, which the sandbox has given up at the start: restart, and they are kept"
    )]
    Sandbox(String),
    /// A worker ended by itself.
    #[error(
        "a worker has ended though nobody stopped it; the log lines above may say why, and a restart helps"
    )]
    Worker,
}

impl DaemonError {
    /// For [`Result::map_err`].
    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}
