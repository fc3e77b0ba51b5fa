//! Errors that any service may end with.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use turnpike_net::PassedError;

/// Each message is one sentence that says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The sockets passed by the service manager cannot be used.
    #[error(transparent)]
    Passed(#[from] PassedError),
    /// No listener would read from a socket passed by the service manager.
    #[error("the service manager has passed {transport} {address} ({name:?}), and {problem}")]
    Unserved {
        /// `udp` or `tcp`.
        transport: &'static str,
        /// Bound address.
        address: SocketAddr,
        /// Name in the unit.
        name: String,
        /// Reason and remedy.
        problem: String,
    },
    /// A file that the configuration names cannot be written.
    #[error("cannot write {what} {}: {source}; name another file, or none", path.display())]
    File {
        /// Kind of file.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// This process was to take over from another one, which goes on by itself.
    #[error("cannot take over: {0}")]
    Upgrade(String),
    /// The control thread cannot start.
    #[error("cannot start the control thread: {0}")]
    Control(#[source] io::Error),
    /// A worker ended by itself.
    #[error(
        "a worker has ended though nobody stopped it; the log lines above may say why, and a restart helps"
    )]
    Worker,
}

impl ProcessError {
    /// For [`Result::map_err`].
    pub fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}
