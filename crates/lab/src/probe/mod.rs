//! Snapshots of all counters of a run, and the figures computed from two snapshots. The counters come from the kernel; the generator's own
//! figures are not used here.

pub(crate) mod cpu;
pub(crate) mod hardware;
pub(crate) mod inside;
pub(crate) mod network;
pub(crate) mod prometheus;
pub(crate) mod syscalls;

use std::{collections::BTreeMap, net::SocketAddr, time::Instant};

use self::{
    cpu::{CpuTime, GroupUse},
    network::Network,
};
use crate::{error::LabError, experiment::ServiceSpec, metric, record::Round, topology::Topology};

const HOST: &str = "host";
/// Clock tick in seconds, the unit of Linux CPU time (USER_HZ, proc_pid_stat(5)).
const TICK_S: f64 = 0.01;

#[derive(Clone, Debug, Default)]
pub(crate) struct CounterScope {
    /// Namespaces by name, each with the ID of a process in it; if there are none, the host is measured.
    spaces: Vec<(String, u32)>,
    subject: Vec<u32>,
    subject_spaces: Vec<String>,
    subject_cpus: Vec<usize>,
    named: Vec<(String, u32)>,
    network_threads: Vec<u32>,
    /// Kernel threads that receive packets, by `NAMESPACE.DEVICE`.
    receivers: BTreeMap<String, Vec<u32>>,
    /// Metrics endpoints, each with a process in the namespace from which to query it.
    metrics: Vec<(SocketAddr, String, Option<u32>)>,
    pub(crate) delivered_at: Vec<String>,
}

impl CounterScope {
    pub(crate) fn new(topology: &Topology) -> Result<Self, LabError> {
        let mut spaces = Vec::new();
        for name in topology.names() {
            spaces.push((name.to_owned(), topology.anchor(name)?));
        }
        if spaces.is_empty() {
            spaces.push((HOST.to_owned(), std::process::id()));
        }
        Ok(Self { spaces, receivers: topology.receivers.clone(), ..Self::default() })
    }

    pub(crate) fn add_node(
        &mut self,
        process: &ServiceSpec,
        group: u32,
        topology: &Topology,
    ) -> Result<(), LabError> {
        self.subject.push(group);
        self.named.push((process.name.clone(), group));
        self.subject_spaces.extend(process.namespace.clone());
        self.subject_cpus.extend(process.cpus.as_deref().and_then(cpu::cpu_list).unwrap_or_default());
        self.subject_cpus.sort_unstable();
        self.subject_cpus.dedup();
        self.network_threads = cpu::network_threads(&self.subject_cpus);
        if let Some(url) = &process.metrics {
            let (address, path) = inside::parse_url(url)?;
            let space = process.namespace.as_deref().map(|name| topology.anchor(name)).transpose()?;
            self.metrics.push((address, path, space));
        }
        Ok(())
    }

    pub(crate) fn add_helper(&mut self, name: &str, group: u32) {
        self.named.push((name.to_owned(), group));
    }

    fn is_of_subject(&self, space: &str) -> bool {
        match &self.subject_spaces[..] {
            [] => space == HOST,
            spaces => spaces.iter().any(|name| name == space),
        }
    }

    /// Number of datagrams that have arrived, by default at the subject; `None` on the host, which also has other traffic.
    pub(crate) fn arrived(&self) -> Result<Option<u64>, LabError> {
        let watched = |name: &String| match &self.delivered_at[..] {
            [] => self.subject_spaces.contains(name),
            places => places.contains(name),
        };
        let mut arrived = None;
        for (_, pid) in self.spaces.iter().filter(|(name, _)| watched(name)) {
            *arrived.get_or_insert(0) += Network::read(*pid)?.datagrams;
        }
        Ok(arrived)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct CounterReading {
    pub(crate) taken: Instant,
    spaces: BTreeMap<String, Network>,
    cpus: Vec<(usize, CpuTime)>,
    network_threads: f64,
    /// CPU on which each device's thread last ran, and its CPU time in seconds.
    receivers: BTreeMap<String, (u32, f64)>,
    others: f64,
    subject: GroupUse,
    named: Vec<f64>,
    generator: GroupUse,
    exported: Option<BTreeMap<String, f64>>,
}

impl CounterReading {
    pub(crate) fn take(scope: &CounterScope, generator: u32) -> Result<Self, LabError> {
        // Metrics are fetched first: this costs the subject CPU time, and the timed counters must be read close together.
        let mut exported = None;
        for (address, path, space) in &scope.metrics {
            if let Some(text) = inside::inside(*space, || inside::http_get(*address, path))? {
                prometheus::add(exported.get_or_insert_default(), &text);
            }
        }
        let mut spaces = BTreeMap::new();
        for (name, pid) in &scope.spaces {
            spaces.insert(name.clone(), Network::read(*pid)?);
        }
        Ok(Self {
            taken: Instant::now(),
            cpus: CpuTime::read_all()?,
            network_threads: cpu::time_of(&scope.network_threads),
            receivers: scope
                .receivers
                .iter()
                .filter_map(|(device, pids)| {
                    Some((device.clone(), (cpu::last_cpu(pids)?, cpu::time_of(pids))))
                })
                .collect(),
            others: match &scope.subject_cpus[..] {
                [] => 0.0,
                cpus => cpu::time_of_others(&scope.subject, &scope.network_threads, cpus),
            },
            subject: GroupUse::read(&scope.subject),
            named: scope.named.iter().map(|(_, group)| GroupUse::read(&[*group]).total()).collect(),
            generator: GroupUse::read(&[generator]),
            spaces,
            exported,
        })
    }

    pub(crate) fn since(&self, earlier: &Self, scope: &CounterScope, round: &mut Round) {
        let elapsed = self.taken.duration_since(earlier.taken).as_secs_f64();
        round.metrics.insert("elapsed_s".to_owned(), elapsed);
        self.network_since(earlier, scope, elapsed, round);
        self.machine_since(earlier, scope, elapsed, round);
        self.subject_since(earlier, round);
        for ((name, _), (now, then)) in scope.named.iter().zip(self.named.iter().zip(&earlier.named)) {
            round.metrics.insert(metric::of_process(name), (now - then).max(0.0));
        }
        match (&earlier.exported, &self.exported) {
            (Some(before), Some(after)) if prometheus::occupancy(before, after).is_some() => {
                round.metrics.extend(
                    prometheus::occupancy(before, after).map(|mean| ("batch_occupancy".to_owned(), mean)),
                );
            }
            _ => {
                round.not_supported.insert("batch_occupancy".to_owned());
            }
        }
    }

    fn network_since(&self, earlier: &Self, scope: &CounterScope, elapsed: f64, round: &mut Round) {
        let (mut delivered, mut packets, mut drops, mut socket_drops) = (0, 0, 0, 0);
        for (name, now) in &self.spaces {
            let Some(then) = earlier.spaces.get(name) else { continue };
            let change = now.since(then);
            if scope.delivered_at.contains(name) {
                delivered += change.datagrams;
                packets += change.rx_packets();
            }
            if scope.is_of_subject(name) {
                socket_drops += change.receive_buffer_errors();
            }
            drops += change.drops();
            // The host's interfaces carry unrelated traffic, and there may be dozens of them.
            if name != HOST {
                change.metrics(name, &mut round.metrics);
            }
        }
        for (device, (cpu, seconds)) in &self.receivers {
            let Some((_, then)) = earlier.receivers.get(device) else { continue };
            round.metrics.insert(format!("net.{device}.receiver_cpu"), f64::from(*cpu));
            round.metrics.insert(format!("net.{device}.receiver_s"), seconds - then);
        }
        let mut put = |name: &str, value: f64| round.metrics.insert(name.to_owned(), value);
        put("interface_drops", drops as f64);
        put("socket_drops", socket_drops as f64);
        if !scope.delivered_at.is_empty() {
            put(metric::DELIVERED, delivered as f64);
            put(metric::DELIVERED_PPS, delivered as f64 / elapsed);
            if packets > 0 {
                put(metric::SEGMENTS_PER_SUPERPACKET, delivered as f64 / packets as f64);
            }
        }
    }

    fn machine_since(&self, earlier: &Self, scope: &CounterScope, elapsed: f64, round: &mut Round) {
        let (mut busy, mut softirq, mut steal, mut core_busy, mut cores) = (0.0, 0.0, 0.0, 0.0, 0);
        for (number, now) in &self.cpus {
            let Some((_, then)) = earlier.cpus.iter().find(|(earlier, _)| earlier == number) else {
                continue;
            };
            let change = now.since(then);
            busy += change.busy;
            softirq += change.softirq;
            steal += change.steal;
            cores += 1;
            if scope.subject_cpus.contains(number) {
                core_busy += (elapsed - change.idle).clamp(0.0, elapsed);
            }
        }
        let mut put = |name: &str, value: f64| round.metrics.insert(name.to_owned(), value);
        put("machine_cpu_s", busy);
        put("machine_softirq_s", softirq);
        put(metric::STEAL_PERCENT, steal * 100.0 / (elapsed * f64::from(cores).max(1.0)));
        if !scope.subject_cpus.is_empty() {
            put(metric::CORE_BUSY_S, core_busy);
            let receiving = self.network_threads - earlier.network_threads;
            let own = self.subject.total() - earlier.subject.total() + receiving;
            // Two upper bounds for the CPU time of other processes on these cores, of which the smaller is used. The first includes time
            // for entering and leaving idle, which is not charged to any process; the second, reduced by one tick, includes time on other
            // cores.
            let left = (core_busy - own).max(0.0);
            let foreign = left.min((self.others - earlier.others - TICK_S).max(0.0));
            put("network_threads_s", receiving);
            put("idle_transitions_s", left - foreign);
            put(metric::FOREIGN_PERCENT, foreign * 100.0 / (elapsed * scope.subject_cpus.len() as f64));
        }
        let generator = self.generator.total() - earlier.generator.total();
        put("generator_cpu_s", generator.max(0.0));
    }

    fn subject_since(&self, earlier: &Self, round: &mut Round) {
        let (now, then) = (&self.subject, &earlier.subject);
        let mut put = |name: &str, value: f64| round.metrics.insert(name.to_owned(), value);
        put(metric::SUBJECT_USER_S, (now.user - then.user).max(0.0));
        put(metric::SUBJECT_SYSTEM_S, (now.system - then.system).max(0.0));
        let switches = |group: &GroupUse| group.voluntary_switches + group.involuntary_switches;
        put("context_switches", switches(now).saturating_sub(switches(then)) as f64);
        put(
            "context_switches_involuntary",
            now.involuntary_switches.saturating_sub(then.involuntary_switches) as f64,
        );
        put("rss_bytes", now.resident_peak as f64);
        put("rss_now_bytes", now.resident as f64);
        put("threads", f64::from(now.threads));
        match now.migrations.zip(then.migrations) {
            Some((now, then)) => {
                put("migrations", now.saturating_sub(then) as f64);
            }
            None => {
                round.not_supported.insert("migrations".to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Window of ten seconds on a machine with two CPUs. The subject is pinned to the first CPU, which is idle for `idle` seconds.
    fn window(idle: f64, subject: f64, network_threads: f64, others: f64) -> Round {
        let scope = CounterScope { subject_cpus: vec![0], ..CounterScope::default() };
        let reading = |taken, idle, subject, network_threads, others| CounterReading {
            taken,
            spaces: BTreeMap::new(),
            cpus: vec![(0, CpuTime { idle, ..CpuTime::default() }), (1, CpuTime::default())],
            network_threads,
            receivers: BTreeMap::new(),
            others,
            subject: GroupUse { user: subject, ..GroupUse::default() },
            named: Vec::new(),
            generator: GroupUse::default(),
            exported: None,
        };
        let opened = Instant::now();
        let before = reading(opened, 100.0, 7.0, 3.0, 50.0);
        let end = opened + Duration::from_secs(10);
        let after = reading(end, 100.0 + idle, 7.0 + subject, 3.0 + network_threads, 50.0 + others);
        let mut round = Round::new(0, "a", 0);
        after.since(&before, &scope, &mut round);
        round
    }

    #[test]
    fn foreign_time_is_bounded_by_runtime_and_remaining_core_time() {
        let close = |name: &str, round: Round, expected: f64| {
            assert!((round.metrics[name] - expected).abs() < 1e-9, "{name}: {:?}", round.metrics);
        };
        let foreign = |round, percent| close(metric::FOREIGN_PERCENT, round, percent);
        // The CPU is busy for 6 s: 4 s in the subject, 1.5 s in network threads, and 0.5 s elsewhere. Other processes ran for 0.2 s or 3 s.
        foreign(window(4.0, 4.0, 1.5, 0.21), 2.0);
        close("idle_transitions_s", window(4.0, 4.0, 1.5, 0.21), 0.3);
        foreign(window(4.0, 4.0, 1.5, 0.01), 0.0);
        foreign(window(4.0, 4.0, 1.5, 3.0), 5.0);
        foreign(window(4.0, 4.0, 2.0, 3.0), 0.0);
        foreign(window(4.0, 4.0, 1.5, 0.0), 0.0);
        foreign(window(4.0, 7.0, 0.0, 1.0), 0.0);
        foreign(window(10.0, 0.0, 0.0, 1.0), 0.0);
        close(metric::CORE_BUSY_S, window(10.0, 0.0, 0.0, 1.0), 0.0);
    }

    #[test]
    fn only_disturbed_windows_are_void() {
        let limits = crate::invalid_rounds::VoidLimits::default();
        let disturbed = window(4.0, 4.0, 1.5, 3.0);
        assert!(matches!(
            limits.check(&disturbed.metrics),
            Some(crate::invalid_rounds::VoidReason::CoresShared { .. })
        ));
        assert_eq!(limits.check(&window(4.0, 4.0, 1.5, 0.2).metrics), None);
    }
}
