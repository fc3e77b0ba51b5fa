//! The signals that a server obeys: SIGTERM and SIGINT drain, SIGHUP reloads.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a signal asks for.
pub(crate) enum Wish {
    /// End, after at most so long.
    Drain(Duration),
    /// Read the configuration again.
    Reload,
}

pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next one; `deadline` is the patience in seconds of whoever configured it.
    pub(crate) async fn next(&mut self, deadline: u32) -> Wish {
        let patience = Duration::from_secs(deadline.into());
        tokio::select! {
            _ = self.terminate.recv() => Wish::Drain(patience),
            _ = self.interrupt.recv() => {
                // Ctrl-C: somebody sits there and waits.
                let quick = io::stdin().is_terminal();
                Wish::Drain(if quick { Duration::ZERO } else { patience })
            }
            _ = self.hangup.recv() => Wish::Reload,
        }
    }
}
