//! What the control threads of `serve` and `forward` do alike once they run: wait for signals and for workers that end by
//! themselves, wait for the last session after a drain, and stop in order.

use std::{sync::Arc, time::Duration};

use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::{
    config::ConfigErrors,
    signals::{Signals, Wish},
};

/// How often a drain looks whether the last session is gone.
const DRAIN_POLL: Duration = Duration::from_millis(100);
/// Snapshots may be 100 ms old, so that "no sessions" counts only after that.
const DRAIN_SETTLE: Duration = Duration::from_millis(250);
/// How often the workers are looked after. One that ended leaves its share of the clients unserved, and the service manager
/// can do more about that than half a server.
const WORKER_CHECK: Duration = Duration::from_secs(1);
/// How long the log may take to write what the workers left in its queue.
const LAST_LINES: Duration = Duration::from_secs(5);

/// What a control thread has to do next.
pub(crate) enum Next {
    /// Read the configuration again.
    Reload,
    /// End, after at most so long.
    Drain(Duration),
    /// End: a worker has.
    Failed,
}

/// Waits for a signal, or for `has_failed`; `deadline` as for [`Signals::next`].
pub(crate) async fn next(signals: &mut Signals, deadline: u32, has_failed: impl Fn() -> bool) -> Next {
    loop {
        tokio::select! {
            wish = signals.next(deadline) => return match wish {
                Wish::Reload => Next::Reload,
                Wish::Drain(patience) => Next::Drain(patience),
            },
            () = sleep(WORKER_CHECK) => if has_failed() {
                return Next::Failed;
            },
        }
    }
}

/// Waits until nothing is `open` any more: at most `patience`, and no longer than until the next signal. Returns what is left.
pub(crate) async fn drained(
    signals: &mut Signals,
    deadline: u32,
    patience: Duration,
    open: impl Fn() -> u64,
) -> u64 {
    let start = Instant::now();
    loop {
        let waited = start.elapsed();
        if waited >= patience {
            break;
        }
        if waited >= DRAIN_SETTLE && open() == 0 {
            return 0;
        }
        tokio::select! {
            () = sleep(DRAIN_POLL.min(patience - waited)) => {}
            wish = signals.next(deadline) => match wish {
                Wish::Drain(_) => {
                    tracing::warn!("second signal: stopping at once");
                    break;
                }
                Wish::Reload => tracing::warn!("no reload while draining"),
            },
        }
    }
    open()
}

/// Stops a server that nobody else owns, and lets the log end; `what` names the server.
pub(crate) async fn stop<S: Send + Sync + 'static>(
    what: &str,
    server: Arc<S>,
    stop: impl FnOnce(S) + Send + 'static,
    log: JoinHandle<()>,
) {
    // Joins threads, and the log must be written meanwhile.
    let stopped = tokio::task::spawn_blocking(move || Arc::into_inner(server).map(stop)).await;
    if !matches!(stopped, Ok(Some(()))) {
        tracing::warn!("the {what} did not stop in order");
    }
    // With the workers gone the log has no more writers, and ends when it is empty.
    let _ = tokio::time::timeout(LAST_LINES, log).await;
}

/// Says why a reload changes nothing.
pub(crate) fn say_refused(errors: &ConfigErrors, refused: &str) {
    for error in &errors.0 {
        tracing::error!("{error}");
    }
    tracing::error!("{refused}");
}

/// Says which keys a reload cannot change.
pub(crate) fn say_unchangeable(keys: &[&str]) {
    for key in keys {
        tracing::warn!("{key} has changed, but takes effect only after a restart");
    }
}
