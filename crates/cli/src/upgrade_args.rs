//! Flags of `upgrade`.

use std::path::PathBuf;

use clap::Args;
use turnpike_process::upgrade::Which;

#[derive(Args)]
pub(crate) struct UpgradeArgs {
    /// Process to upgrade [default: this user's only running process]
    #[arg(long, value_name = "PID", conflicts_with = "socket")]
    pid: Option<u32>,

    /// Upgrade socket of the process [default: PID.sock in $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/turnpike or /run/turnpike]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Program to start, owned by root or the service's user [default: the file that is now at the running program's path]
    #[arg(long, value_name = "PATH")]
    pub(crate) binary: Option<PathBuf>,
}

impl UpgradeArgs {
    pub(crate) fn which(&self) -> Which {
        match (&self.socket, self.pid) {
            (Some(socket), _) => Which::Socket(socket.clone()),
            (None, Some(pid)) => Which::Process(pid),
            (None, None) => Which::Only,
        }
    }
}
