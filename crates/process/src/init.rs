//! Process 1 of a container. The container ends with it, so it runs the service as a child that upgrades can
//! replace: it passes signals on, reaps orphans, and exits once no child is left.

use std::{
    env, io,
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode},
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, WaitStatus, kill_process_group, wait},
};
use tokio::{
    runtime,
    signal::unix::{self, SignalKind, signal},
};

use crate::passed;

/// True for process 1, except with passed sockets, which are meant for one process ID (`LISTEN_PID`).
#[must_use]
pub fn is_needed() -> bool {
    std::process::id() == 1 && env::var_os(passed::VARIABLE).is_none()
}

/// Runs this program again, with the same arguments, and returns the exit code of the last process.
pub fn run() -> io::Result<ExitCode> {
    runtime::Builder::new_current_thread().enable_io().build()?.block_on(supervise())
}

async fn supervise() -> io::Result<ExitCode> {
    // Done first, because the kernel drops signals that process 1 does not handle.
    let mut signals = Signals::new()?;
    let group = start()?;
    let mut code = 0;
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((_, status))) => code = exit_code(status),
            Ok(None) => {
                if let Some(signal) = signals.next().await {
                    let _ = kill_process_group(group, signal);
                }
            }
            Err(Errno::CHILD) => return Ok(ExitCode::from(code)),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Starts the service in a process group of its own, which the processes of later upgrades join.
fn start() -> io::Result<Pid> {
    let mut arguments = env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let child = command.args(arguments).process_group(0).spawn()?;
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The code that shells report: 128 plus the number of the signal if one ended the process.
fn exit_code(status: WaitStatus) -> u8 {
    let code = status.exit_status().or_else(|| Some(128 + status.terminating_signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

struct Signals {
    child: unix::Signal,
    terminate: unix::Signal,
    interrupt: unix::Signal,
    hangup: unix::Signal,
    user2: unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            child: signal(SignalKind::child())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    /// The next signal for the service; `None` if a child has ended.
    async fn next(&mut self) -> Option<Signal> {
        tokio::select! {
            _ = self.child.recv() => None,
            _ = self.terminate.recv() => Some(Signal::TERM),
            _ = self.interrupt.recv() => Some(Signal::INT),
            _ = self.hangup.recv() => Some(Signal::HUP),
            _ = self.user2.recv() => Some(Signal::USR2),
        }
    }
}
