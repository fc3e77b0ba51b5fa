//! Ctrl-C handling: after the first Ctrl-C, the lab stops and reports the measurements finished so far; after the second, it exits
//! immediately and leaves the cleanup to the guardian.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tokio::signal::unix::{SignalKind, signal};

/// Flag that is set by Ctrl-C. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    pub(crate) fn on_signals() -> Self {
        static STOP: OnceLock<StopFlag> = OnceLock::new();
        STOP.get_or_init(|| {
            let stop = Self::default();
            let listener = stop.clone();
            // If the thread cannot be started, signals keep their default action and the guardian cleans up.
            let _ = thread::Builder::new().name("signals".to_owned()).spawn(move || listener.listen());
            stop
        })
        .clone()
    }

    pub(crate) fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn listen(&self) {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
        runtime.block_on(async {
            let (Ok(mut int), Ok(mut term), Ok(mut hup)) = (
                signal(SignalKind::interrupt()),
                signal(SignalKind::terminate()),
                signal(SignalKind::hangup()),
            ) else {
                return;
            };
            loop {
                tokio::select! {
                    _ = int.recv() => {}
                    _ = term.recv() => {}
                    _ = hup.recv() => {}
                }
                if self.requested() {
                    std::process::exit(130);
                }
                self.request();
            }
        });
    }
}
