//! From the workers to the log: a bounded queue that workers never wait for, and a writer that takes many at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::mpsc;

/// Entries that may wait for the control thread: twice the default limit of allocations and of connections, so that a stop
/// loses none of their lines. Beyond that lines are lost and counted rather than a worker held up. The queue grows as needed; an
/// entry has about 200 bytes.
pub(crate) const BACKLOG: usize = 32_768;

/// Lines written in one go.
const BATCH: usize = 1024;
/// After that: a writer that waits for the next entry costs the worker a wake-up of another thread (two system calls)
/// for each entry, one that looks again a little later costs it none.
const PAUSE: Duration = Duration::from_millis(20);

/// The workers' end.
pub(crate) struct LogSender<T> {
    sender: mpsc::Sender<T>,
    lost: Arc<AtomicU64>,
}

/// The control thread's end.
pub(crate) struct LogReceiver<T> {
    receiver: mpsc::Receiver<T>,
    lost: Arc<AtomicU64>,
}

/// Both ends.
pub(crate) fn log_queue<T>(backlog: usize) -> (LogSender<T>, LogReceiver<T>) {
    let (sender, receiver) = mpsc::channel(backlog);
    let lost = Arc::new(AtomicU64::new(0));
    (LogSender { sender, lost: Arc::clone(&lost) }, LogReceiver { receiver, lost })
}

impl<T> LogSender<T> {
    /// Hands an entry over, or counts it as lost.
    pub(crate) fn send(&self, entry: T) {
        if self.sender.try_send(entry).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn lost_counter(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.lost)
    }
}

impl<T> LogReceiver<T> {
    /// Writes until the last sender is gone: `write` gets some entries at a time, and how many were lost since the last time.
    pub(crate) async fn run(mut self, mut write: impl FnMut(&mut Vec<T>, u64)) {
        let mut batch = Vec::new();
        let mut reported = 0;
        while self.receiver.recv_many(&mut batch, BATCH).await > 0 {
            let lost = self.lost.load(Ordering::Relaxed);
            let report = lost > reported && self.receiver.is_empty();
            write(&mut batch, if report { lost - reported } else { 0 });
            batch.clear();
            if report {
                reported = lost;
            }
            if self.receiver.len() < BATCH {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// How many refusals become lines: a token bucket. A stranger's tries must not fill the disk; the counters count them all.
#[derive(Default)]
pub(crate) struct RefusalLimit {
    /// The bucket as a time: full when this lies in the past, empty when `BURST` seconds ahead.
    drained: Duration,
    suppressed: u64,
}

impl RefusalLimit {
    /// Lines at once.
    const BURST: u32 = 20;
    /// One more line each.
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Whether this refusal becomes a line; if so, `suppressed` also counts those that did not since the last line.
    pub(crate) fn admit(&mut self, now: Duration, suppressed: &mut u64) -> bool {
        let drained = self.drained.max(now) + Self::INTERVAL;
        if drained > now + Self::INTERVAL * Self::BURST {
            self.suppressed += *suppressed + 1;
            return false;
        }
        self.drained = drained;
        *suppressed += std::mem::take(&mut self.suppressed);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_refusals_at_once_then_one_a_second_and_the_rest_is_counted() {
        let mut limit = RefusalLimit::default();
        let mut admitted = |seconds: u64, tries: usize| {
            (0..tries)
                .filter_map(|_| {
                    let mut suppressed = 1;
                    limit.admit(Duration::from_secs(seconds), &mut suppressed).then_some(suppressed)
                })
                .collect::<Vec<u64>>()
        };
        assert_eq!(admitted(5, 100), vec![1; 20]);
        // 80 lines with one suppressed refusal each stand for 160, and this one brings its own.
        assert_eq!(admitted(6, 100), [161]);
        assert_eq!(admitted(8, 3), [99 * 2 + 1, 1]);
    }

    #[tokio::test]
    async fn a_full_backlog_loses_entries_and_says_so_once() {
        let (sender, receiver) = log_queue(2);
        for entry in 0..5 {
            sender.send(entry);
        }
        assert_eq!(sender.lost_counter().load(Ordering::Relaxed), 3);
        drop(sender);
        let mut seen = Vec::new();
        receiver.run(|batch, lost| seen.push((batch.clone(), lost))).await;
        assert_eq!(seen, [(vec![0, 1], 3)]);
    }
}
