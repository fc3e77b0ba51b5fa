//! Ctrl-C handling: after the first Ctrl-C, the lab stops and reports the measurements finished so far; after the second, it exits
//! immediately and leaves the cleanup to the guardian.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

/// Flag that is set by Ctrl-C. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    pub(crate) fn on_signals() -> Self {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The exit is registered first, so that only the second signal finds the flag set. If this fails, signals keep their default
            // action and the guardian cleans up.
            let _ = flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop.0))
                .and_then(|_| flag::register(signal, Arc::clone(&stop.0)));
        }
        stop
    }

    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
