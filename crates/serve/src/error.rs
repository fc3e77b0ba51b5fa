//! Errors of starting and running a server.

use turnpike_config::Mistakes;
use turnpike_process::ProcessError;
use turnpike_relay::DtlsError;

/// Each message is one sentence that says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Nothing was started, and no socket opened.
    #[error(transparent)]
    Config(#[from] Mistakes),
    /// An error that any service may end with.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The relay did not start.
    #[error(transparent)]
    Relay(#[from] turnpike_relay::StartError),
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
    /// An address for the admin interface that was asked for cannot be had.
    #[error(transparent)]
    Admin(#[from] turnpike_admin::ListenError),
    /// rustls.
    #[error("cannot prepare TLS: {0}")]
    Tls(String),
    /// dimpl.
    #[error(transparent)]
    Dtls(#[from] DtlsError),
}
