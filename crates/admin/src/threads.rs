//! CPU use of the worker threads, from the kernel's accounting: nothing is measured on the data path.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use procfs::process::{Process, Task};
use tokio::time::sleep;

/// Minimum interval between measurements.
const SHORTEST: Duration = Duration::from_millis(80);
/// Maximum age of a sample that is still considered current.
const LONGEST: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(crate) struct Threads(Mutex<Option<ThreadSample>>);

/// Recent CPU use of a thread, as shares of the interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ThreadUse {
    pub(crate) ran: f64,
    /// Share of time in which it was ready to run but another thread had the core.
    pub(crate) waited: f64,
}

impl Threads {
    pub(crate) async fn shares(&self) -> HashMap<String, ThreadUse> {
        let usable = |sample: &ThreadSample| (SHORTEST..LONGEST).contains(&sample.at.elapsed());
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).take().filter(usable);
        let before = match kept {
            Some(sample) => sample,
            None => {
                let sample = ThreadSample::take();
                sleep(SHORTEST).await;
                sample
            }
        };
        let now = ThreadSample::take();
        let shares = now.since(&before);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        shares
    }
}

#[derive(Debug)]
struct ThreadSample {
    at: Instant,
    /// Nanoseconds spent running, and waiting for a core, by thread name.
    threads: HashMap<String, (u64, u64)>,
}

impl ThreadSample {
    /// Reads the CPU times of all threads; empty if there is no /proc.
    fn take() -> Self {
        let tasks = Process::myself().and_then(|process| process.tasks()).into_iter().flatten().flatten();
        let thread = |task: Task| {
            let times = task.schedstat().ok()?;
            Some((task.stat().ok()?.comm, (times.sum_exec_runtime, times.run_delay)))
        };
        Self { at: Instant::now(), threads: tasks.filter_map(thread).collect() }
    }

    fn since(&self, before: &Self) -> HashMap<String, ThreadUse> {
        let span = (self.at - before.at).as_nanos().max(1);
        #[expect(clippy::cast_precision_loss, reason = "a share of a few seconds needs no more precision")]
        let share = |now: u64, then: u64| (now.saturating_sub(then) as f64 / span as f64).min(1.0);
        let both = self.threads.iter().filter_map(|(name, now)| Some((name, now, before.threads.get(name)?)));
        both.map(|(name, now, then)| {
            (name.clone(), ThreadUse { ran: share(now.0, then.0), waited: share(now.1, then.1) })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_share_is_relative_to_the_interval_and_at_most_one() {
        let at = Instant::now();
        let sample = |seconds, ran, waited| ThreadSample {
            at: at + Duration::from_secs(seconds),
            threads: [("relay-0".to_owned(), (ran, waited))].into(),
        };
        let shares = sample(2, 3_500_000_000, 1_000_000_000).since(&sample(0, 2_500_000_000, 500_000_000));
        assert_eq!(shares["relay-0"], ThreadUse { ran: 0.5, waited: 0.25 });
        assert_eq!(sample(1, 9_000_000_000, 0).since(&sample(0, 0, 0))["relay-0"].ran, 1.0);
        assert!(sample(1, 1, 1).since(&ThreadSample { at, threads: HashMap::new() }).is_empty());
    }

    #[tokio::test]
    async fn threads_are_found_by_name() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        let named = std::thread::Builder::new().name("relay-77".to_owned());
        // A thread sets its name when it starts.
        let run = move || {
            begin.send(()).unwrap();
            let _ = stopped.recv();
        };
        let thread = named.spawn(run).unwrap();
        begun.recv().unwrap();
        let threads = Threads::default();
        for _ in 0..2 {
            let shares = threads.shares().await;
            assert!(shares.contains_key("relay-77"), "{shares:?}");
        }
        drop(stop);
        thread.join().unwrap();
    }
}
