//! Bounded queue from the workers to the log. Workers never wait; the writer takes many entries at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

use crate::logging;

/// Maximum number of waiting entries: twice the default limit of allocations and connections, so that
/// stopping loses no lines. Above that, lines are dropped and counted, so that workers are never blocked. The
/// queue grows as needed; an entry takes about 200 bytes.
pub const BACKLOG: usize = 32_768;

const BATCH: usize = 1024;
/// Pause between batches. If the writer waited for each entry, the worker would have to wake another thread
/// (two system calls) per entry; polling costs the worker nothing.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum time between calls to the writer, so that it can write summaries.
const QUIET: Duration = Duration::from_secs(1);

/// Interval between reports about lost lines while none can be written.
const REPORT_AGAIN: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub struct LogCounts {
    pub lost: AtomicU64,
    pub refusals: AtomicU64,
    pub ends: AtomicU64,
}

pub struct LogSender<T> {
    sender: mpsc::Sender<T>,
    counts: Arc<LogCounts>,
}

pub struct LogReceiver<T> {
    receiver: mpsc::Receiver<T>,
    counts: Arc<LogCounts>,
}

#[must_use]
pub fn log_queue<T>(backlog: usize) -> (LogSender<T>, LogReceiver<T>) {
    let (sender, receiver) = mpsc::channel(backlog);
    let counts = Arc::<LogCounts>::default();
    (LogSender { sender, counts: Arc::clone(&counts) }, LogReceiver { receiver, counts })
}

impl<T> LogSender<T> {
    pub fn send(&self, entry: T) {
        if self.sender.try_send(entry).is_err() {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[must_use]
    pub fn counts(&self) -> Arc<LogCounts> {
        Arc::clone(&self.counts)
    }
}

impl<T> LogReceiver<T> {
    #[must_use]
    pub fn counts(&self) -> Arc<LogCounts> {
        Arc::clone(&self.counts)
    }

    /// Writes until the last sender is dropped. `write` gets a batch of entries and the number of lines lost
    /// since the last call; it is called every second even without entries.
    pub async fn run(mut self, mut write: impl FnMut(&mut Vec<T>, u64)) {
        let mut batch = Vec::new();
        let mut reported = logging::unwritten();
        let mut next_report = Instant::now();
        // The timeout loses no entry: tokio's `recv_many` is cancel safe.
        while !matches!(timeout(QUIET, self.receiver.recv_many(&mut batch, BATCH)).await, Ok(0)) {
            let unwritten = logging::unwritten();
            let lost = self.counts.lost.load(Ordering::Relaxed) + unwritten;
            let report = lost > reported && self.receiver.is_empty() && Instant::now() >= next_report;
            write(&mut batch, if report { lost - reported } else { 0 });
            batch.clear();
            if report && logging::unwritten() > unwritten {
                // The report itself may not have been written.
                next_report = Instant::now() + REPORT_AGAIN;
            } else if report {
                reported = lost;
            }
            if self.receiver.len() < BATCH {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn entries_lost_to_a_full_backlog_are_reported_once() {
        let (sender, receiver) = log_queue(2);
        for entry in 0..5 {
            sender.send(entry);
        }
        assert_eq!(sender.counts().lost.load(Ordering::Relaxed), 3);
        drop(sender);
        let mut seen = Vec::new();
        receiver.run(|batch, lost| seen.push((batch.clone(), lost))).await;
        assert_eq!(seen, [(vec![0, 1], 3)]);
    }
}
