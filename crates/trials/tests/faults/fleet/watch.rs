//! Samples the allocations of all nodes several times a second.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{network::NODES, service::World};
use turnpike_trials::{Metrics, get_unix};

pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    ends: AtomicBool,
    samples: Mutex<Vec<Sample>>,
}

struct Sample {
    at: Instant,
    /// `None` for a node that does not answer.
    nodes: [Option<Node>; NODES],
}

#[derive(Clone, Copy)]
struct Node {
    granted: i64,
    /// The quota user's allocations on this node, in all of its processes.
    greedy: i64,
}

impl Watch {
    pub(super) fn start(world: &World) -> Self {
        let shared = Arc::new(Shared { ends: AtomicBool::new(false), samples: Mutex::default() });
        let sockets: [PathBuf; NODES] = std::array::from_fn(|node| world.nodes[node].admin());
        let (watching, greedy) = (Arc::clone(&shared), world.greedy.granted());
        let thread = thread::spawn(move || {
            while !watching.ends.load(Relaxed) {
                let nodes = std::array::from_fn(|node| {
                    let (_, text) = get_unix(&sockets[node], "/metrics").ok()?;
                    let metrics = Metrics::new(text);
                    let granted = metrics.maybe("turnpike_allocations_opened_total")?;
                    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
                    Some(Node { granted: count(granted), greedy: count(greedy(node)) })
                });
                watching.samples().push(Sample { at: Instant::now(), nodes });
                thread::sleep(Duration::from_millis(200));
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// Maximum number of allocations that one node granted within a second, excluding the quota user's.
    pub(super) fn most_in_a_second(&self) -> u64 {
        let of_node = |node: usize| {
            let grants = self.grants(node);
            let within_a_second = |(place, (end, _)): (usize, &(Instant, i64))| -> i64 {
                let recent = |(at, _): &&(Instant, i64)| end.duration_since(*at) < Duration::from_secs(1);
                grants[..=place].iter().rev().take_while(recent).map(|(_, new)| new).sum()
            };
            grants.iter().enumerate().map(within_a_second).max().unwrap_or_default()
        };
        (0..NODES).map(of_node).max().and_then(|most| u64::try_from(most).ok()).unwrap_or_default()
    }

    /// Allocations granted by each node since `begin`, excluding the quota user's.
    pub(super) fn granted_since(&self, begin: Instant) -> [u64; NODES] {
        std::array::from_fn(|node| {
            let grants = self.grants(node);
            let new: i64 = grants.iter().filter(|(at, _)| *at >= begin).map(|(_, new)| new).sum();
            u64::try_from(new).unwrap_or_default()
        })
    }

    fn grants(&self, node: usize) -> Vec<(Instant, i64)> {
        let mut before: Option<Node> = None;
        let new = |sample: &Sample| {
            let now = sample.nodes[node]?;
            let before = before.replace(now)?;
            // A new process starts at zero.
            let begun = if now.granted < before.granted { 0 } else { before.granted };
            Some((sample.at, now.granted - begun - (now.greedy - before.greedy)))
        };
        self.shared.samples().iter().filter_map(new).collect()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn samples(&self) -> std::sync::MutexGuard<'_, Vec<Sample>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
