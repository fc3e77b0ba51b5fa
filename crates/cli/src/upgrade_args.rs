//! The flags of `upgrade`.

use std::path::PathBuf;

use clap::Args;
use turnpike_process::upgrade::Which;

/// Flags of `upgrade`.
#[derive(Args)]
pub(crate) struct UpgradeArgs {
    /// Number of the process to be upgraded [default: the only one that can be asked]
    #[arg(long, value_name = "PID", conflicts_with = "socket")]
    pid: Option<u32>,

    /// Socket on which the process can be asked [default: PID.sock in $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/turnpike or /run/turnpike]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Program to be started, of root or of the service's user [default: what has the name of the running one now]
    #[arg(long, value_name = "PATH")]
    pub(crate) binary: Option<PathBuf>,
}

impl UpgradeArgs {
    /// Who is to be asked.
    pub(crate) fn which(&self) -> Which {
        match (&self.socket, self.pid) {
            (Some(socket), _) => Which::Socket(socket.clone()),
            (None, Some(pid)) => Which::Process(pid),
            (None, None) => Which::Only,
        }
    }
}
