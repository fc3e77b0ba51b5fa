//! The signals that a program handles: SIGTERM and SIGINT end it, SIGHUP has a daemon reload, SIGUSR2 go on in a new process.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

use crate::control::{Asked, Request};

pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    user2: Signal,
}

impl Signals {
    /// From now on no signal of these has its default action.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    /// Passes each on as what it asks for, as long as somebody takes it.
    pub(crate) async fn pass_on(mut self, requests: mpsc::Sender<Request>) {
        while requests.send(self.next().await).await.is_ok() {}
    }

    async fn next(&mut self) -> Request {
        tokio::select! {
            _ = self.terminate.recv() => Request::Drain(None),
            _ = self.interrupt.recv() => {
                // Ctrl-C: somebody sits there and waits.
                Request::Drain(io::stdin().is_terminal().then_some(Duration::ZERO))
            }
            _ = self.hangup.recv() => Request::Reload(None),
            _ = self.user2.recv() => Request::Upgrade(Asked::default()),
        }
    }
}

/// Blocks until SIGTERM or SIGINT, for programs that have nothing else to wait for.
///
/// # Errors
/// When signals cannot be caught.
pub fn wait_for_stop() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    })
}
