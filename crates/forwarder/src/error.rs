//! Errors in starting and running a forwarder.

use turnpike_config::Mistakes;
use turnpike_process::ProcessError;

/// Each message is one sentence with a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwarderError {
    /// Errors in the configuration; no socket was opened.
    #[error(transparent)]
    Config(#[from] Mistakes),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Start(#[from] turnpike_forward::StartError),
    #[error(transparent)]
    Admin(#[from] turnpike_admin::ListenError),
    #[error("the rules need the capabilities {0}, which were dropped at startup: restart to keep them")]
    Sandbox(String),
}
