//! Errors of starting and running a forwarder.

use turnpike_config::Mistakes;
use turnpike_process::ProcessError;

/// Each message is one sentence that says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwarderError {
    /// Nothing was started, and no socket opened.
    #[error(transparent)]
    Config(#[from] Mistakes),
    /// An error that any service may end with.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The workers did not start.
    #[error(transparent)]
    Start(#[from] turnpike_forward::StartError),
    /// A configured address of the admin interface is not available.
    #[error(transparent)]
    Admin(#[from] turnpike_admin::ListenError),
    /// A reload needs privileges that were given up at the start.
    #[error(
        "the rules need the capabilities {0}, which the sandbox has given up at the start: restart, and they are kept"
    )]
    Sandbox(String),
}
