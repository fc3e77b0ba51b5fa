//! Signals: SIGTERM and SIGINT stop the program, SIGHUP reloads, SIGUSR2 upgrades.

use std::{
    io::{self, IsTerminal},
    sync::{Arc, mpsc as std_mpsc},
    thread,
};

use tokio::{
    runtime,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};
use turnpike_api::Drain;

use crate::request::{Request, Stop, UpgradeRequest};

/// Sends a request for each signal. Runs in its own thread, so that even a control loop that is waiting
/// for a name server learns that it must stop. Returns once none of these signals has its default
/// action any more.
pub(crate) fn pass_on(requests: mpsc::Sender<Request>, stop: Arc<Stop>) -> io::Result<()> {
    let (sender, caught) = std_mpsc::channel();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let runtime = match runtime::Builder::new_current_thread().enable_io().build() {
            Ok(runtime) => runtime,
            Err(error) => return sender.send(Err(error)),
        };
        runtime.block_on(async {
            match Signals::new() {
                Ok(signals) => {
                    let sent = sender.send(Ok(()));
                    signals.pass_on(requests, &stop).await;
                    sent
                }
                Err(error) => sender.send(Err(error)),
            }
        })
    })?;
    caught.recv().map_err(io::Error::other)?
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    user2: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    async fn pass_on(mut self, requests: mpsc::Sender<Request>, stop: &Stop) {
        loop {
            let request = self.next().await;
            if matches!(request, Request::Drain(_)) {
                stop.request();
            }
            if requests.send(request).await.is_err() {
                return;
            }
        }
    }

    async fn next(&mut self) -> Request {
        tokio::select! {
            _ = self.terminate.recv() => Request::Drain(Drain::default()),
            _ = self.interrupt.recv() => {
                // Ctrl-C at a terminal: stop immediately.
                let deadline_s = io::stdin().is_terminal().then_some(0);
                Request::Drain(Drain { deadline_s, ..Drain::default() })
            }
            _ = self.hangup.recv() => Request::Reload(None),
            _ = self.user2.recv() => Request::Upgrade(UpgradeRequest::default()),
        }
    }
}

/// Blocks until SIGTERM or SIGINT, for programs that have nothing else to do.
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
