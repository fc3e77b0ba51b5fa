//! Errors that can make any service exit.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use turnpike_net::PassedError;

/// Each message is one sentence and includes a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    #[error(transparent)]
    Passed(#[from] PassedError),
    /// A passed socket that no listener would read from.
    #[error("the service manager passed {transport} {address} ({name:?}), but {problem}")]
    Unserved {
        /// `udp` or `tcp`.
        transport: &'static str,
        address: SocketAddr,
        /// Name of the socket in the unit.
        name: String,
        problem: String,
    },
    #[error("cannot write {what} {}: {source}; configure another file, or none", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot take over: {0}")]
    Upgrade(String),
    #[error("cannot start the control thread: {0}")]
    Control(#[source] io::Error),
    #[error("a worker has ended unexpectedly; see the log lines above, and restart")]
    Worker,
}

impl ProcessError {
    pub fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}
