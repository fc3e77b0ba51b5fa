//! Waiting to be told to stop, for programs that have nothing else to wait for.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// Blocks until SIGTERM or SIGINT.
///
/// # Errors
/// When signals cannot be caught.
pub fn wait() -> io::Result<()> {
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
