//! Errors when starting or running a server.

use turnpike_config::Mistakes;
use turnpike_process::ProcessError;
use turnpike_relay::DtlsError;

/// Each message is one sentence and includes a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] Mistakes),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Relay(#[from] turnpike_relay::StartError),
    #[error(transparent)]
    Store(#[from] turnpike_stores::StoreError),
    /// Clients redirected by name would reach the wrong node.
    #[error(
        "another running node of the fleet is named {name}: set a different name for this one in fleet.node"
    )]
    NameTaken { name: String },
    /// No number is left for this node, because node numbers are only 12 bits long.
    #[error("the fleet has 4095 nodes, the maximum: stop one, or start another fleet with fleet.name")]
    FleetFull,
    #[error(
        "the nodes in {store} use another fleet.secret: set theirs, or start another fleet with fleet.name"
    )]
    OtherSecret { store: String },
    #[error(
        "no store configured: set one with --store URL, or a directory for the embedded one with --state DIR"
    )]
    NoStore,
    #[error(transparent)]
    Admin(#[from] turnpike_admin::ListenError),
    #[error("cannot prepare TLS: {0}")]
    Tls(String),
    #[error(transparent)]
    Dtls(#[from] DtlsError),
}
