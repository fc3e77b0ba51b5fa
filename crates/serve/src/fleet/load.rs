//! Load of this node, from the workers' counters and the CPU time of their threads.

use std::{collections::HashMap, fs, path::Path};

use turnpike_fleet::Load;
use turnpike_relay::{Config, Relay};

/// Time constant of the averaged rates: a single busy second must not cause redirects.
const MEAN_MS: f64 = 10_000.0;

/// Configured capacity of this node. 0 ports means unlimited.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    most_allocations: u32,
    ports: u32,
}

impl Room {
    #[cfg(test)]
    pub(super) const fn new(most_allocations: u32, ports: u32) -> Self {
        Self { most_allocations, ports }
    }

    /// True if the remaining room is reserved for clients that do not follow redirects.
    pub(super) fn is_nearly_full(self, allocations: u32) -> bool {
        let Self { most_allocations, ports } = self;
        Load { allocations, most_allocations, ports, ..Load::default() }.is_nearly_full()
    }

    pub(super) fn of(config: &Config) -> Self {
        // Shared ports cannot run out.
        let ports = if config.shared_ports > 0 {
            0
        } else {
            (usize::from(config.ports.end() - config.ports.start()) + 1) * config.relay.len()
        };
        Self {
            most_allocations: u32::try_from(config.limits.allocations).unwrap_or(u32::MAX),
            ports: u32::try_from(ports).unwrap_or(u32::MAX),
        }
    }
}

pub(super) struct LoadGauge {
    /// True with busy polling, which always uses a whole core, so that CPU time does not reflect the load.
    polls: bool,
    before: Option<Sample>,
    bits_per_second: f64,
    cpu: HashMap<String, f64>,
}

struct Sample {
    at_ms: u64,
    /// Relayed payload bytes since the start, both directions.
    bytes: u64,
    /// CPU time since the start in nanoseconds, by thread.
    cpu_ns: HashMap<String, u64>,
}

impl LoadGauge {
    pub(super) fn new(config: &Config) -> Self {
        Self { polls: !config.busy_poll.is_zero(), before: None, bits_per_second: 0.0, cpu: HashMap::new() }
    }

    pub(super) fn measure(
        &mut self,
        relay: &Relay,
        now_ms: u64,
        allocations: u32,
        room: Room,
        most_bits_per_second: u64,
    ) -> Load {
        let snapshots = relay.snapshots();
        let bytes = snapshots.iter().map(|of| of.turn.to_peer_bytes + of.turn.to_client_bytes).sum();
        let cpu_ns = if self.polls { HashMap::new() } else { threads(Path::new("/proc/self/task")) };
        self.take(Sample { at_ms: now_ms, bytes, cpu_ns });
        self.load(allocations, room, most_bits_per_second)
    }

    #[expect(clippy::cast_precision_loss, reason = "rates fit into 52 bits")]
    fn take(&mut self, sample: Sample) {
        let Some(before) = self.before.replace(sample) else { return };
        let Some(now) = &self.before else { return };
        let passed_ms = now.at_ms.saturating_sub(before.at_ms) as f64;
        if passed_ms <= 0.0 {
            return;
        }
        let weight = 1.0 - (-passed_ms / MEAN_MS).exp();
        let bits = now.bytes.saturating_sub(before.bytes) as f64 * 8.0;
        self.bits_per_second += weight * (bits / passed_ms * 1000.0 - self.bits_per_second);
        for (thread, ns) in &now.cpu_ns {
            let Some(earlier) = before.cpu_ns.get(thread) else { continue };
            let share = ns.saturating_sub(*earlier) as f64 / (passed_ms * 1e6);
            let mean = self.cpu.entry(thread.clone()).or_default();
            *mean += weight * (share.min(1.0) - *mean);
        }
    }

    fn load(&self, allocations: u32, room: Room, most_bits_per_second: u64) -> Load {
        let busiest = self.cpu.values().copied().fold(0.0, f64::max);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "neither is below 0, and the second is at most 1000"
        )]
        let (bits_per_second, cpu) = (self.bits_per_second as u64, (busiest * 1000.0) as u16);
        let Room { most_allocations, ports } = room;
        Load {
            allocations,
            most_allocations,
            bits_per_second,
            most_bits_per_second,
            cpu,
            // An estimate: most allocations have one port, some have two.
            ports_left: ports.saturating_sub(allocations),
            ports,
        }
    }
}

/// CPU time of each worker thread in nanoseconds (proc_pid_schedstat(5)). Empty if the kernel does not report
/// it.
fn threads(directory: &Path) -> HashMap<String, u64> {
    let Ok(threads) = fs::read_dir(directory) else { return HashMap::new() };
    let one = |thread: fs::DirEntry| {
        let path = thread.path();
        let name = fs::read_to_string(path.join("comm")).ok().filter(|name| name.starts_with("relay-"))?;
        let stat = fs::read_to_string(path.join("schedstat")).ok()?;
        Some((name.trim().to_owned(), stat.split_whitespace().next()?.parse().ok()?))
    };
    threads.flatten().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::AllocationLimits;

    use super::*;

    fn room() -> Room {
        let relay = turnpike_relay::RelayAddress { bind: [127, 0, 0, 1].into(), external: None };
        Room::of(&Config {
            relay: vec![relay],
            limits: AllocationLimits { allocations: 100, ..AllocationLimits::default() },
            ports: 50_000..=50_999,
            ..Config::default()
        })
    }

    fn sample(at_ms: u64, bytes: u64, cpu_ms: [u64; 2]) -> Sample {
        let cpu_ns = ["relay-0", "relay-1"].into_iter().zip(cpu_ms);
        Sample { at_ms, bytes, cpu_ns: cpu_ns.map(|(name, ms)| (name.to_owned(), ms * 1_000_000)).collect() }
    }

    #[test]
    fn load_is_the_time_average_of_the_busiest_worker() {
        let mut gauge = LoadGauge::new(&Config::default());
        (0..60).for_each(|second| {
            gauge.take(sample(second * 1000, second * 1000, [second * 500, second * 100]));
        });
        let load = gauge.load(7, room(), 9);
        assert!((7900..=8000).contains(&load.bits_per_second), "{load:?}");
        assert!((495..=500).contains(&load.cpu), "{load:?}");
        assert_eq!((load.allocations, load.most_allocations, load.most_bits_per_second), (7, 100, 9));
        assert_eq!((load.ports_left, load.ports), (993, 1000));
        // One second at full load changes the average little.
        gauge.take(sample(60_000, 60_000, [29_500 + 1000, 6000]));
        assert!((500..560).contains(&gauge.load(7, room(), 9).cpu), "{:?}", gauge.load(7, room(), 9));
    }

    #[test]
    fn shared_ports_do_not_limit_the_load() {
        let config = Config {
            limits: AllocationLimits { allocations: 100, ..AllocationLimits::default() },
            shared_ports: 4,
            ..Config::default()
        };
        let load = LoadGauge::new(&config).load(99, Room::of(&config), 0);
        assert_eq!((load.ports, load.is_full()), (0, false), "{load:?}");
        assert!((load.busy() - 0.99).abs() < 1e-9);
    }

    #[test]
    fn worker_threads_are_found_by_their_names() {
        let sleeps = |name: &str| {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            let (begun, begins) = std::sync::mpsc::channel();
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                let _ = begun.send(());
                let _ = receiver.recv();
            });
            begins.recv().expect("the thread is running and has set its name");
            (sender, thread.expect("a thread"))
        };
        let others = [sleeps("relay-7"), sleeps("other")];
        let found = threads(Path::new("/proc/self/task"));
        // Kernels without scheduler statistics report no threads.
        if Path::new("/proc/self/schedstat").exists() {
            assert!(found.contains_key("relay-7") && !found.contains_key("other"), "{found:?}");
        }
        for (sender, thread) in others {
            drop(sender);
            thread.join().expect("no panic");
        }
    }
}
