//! Metrics by name: units, preferred directions, and formulas of derived metrics.
//!
//! Names are stable, because records are compared years later. Metrics not listed here can be recorded too;
//! their verdicts are *higher* or *lower* instead of *faster* or *slower*.

use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preference {
    Higher,
    Lower,
    Neither,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    /// Unit; empty for plain counts and ratios.
    pub(crate) unit: &'static str,
    pub(crate) better: Preference,
    pub(crate) about: &'static str,
}

pub(crate) const DELIVERED: &str = "delivered";
pub(crate) const DELIVERED_PPS: &str = "delivered_pps";
pub(crate) const OFFERED_PPS: &str = "offered_pps";
pub(crate) const DELIVERED_BYTES: &str = "delivered_bytes";
pub(crate) const SUBJECT_CPU_S: &str = "subject_cpu_s";
pub(crate) const SUBJECT_USER_S: &str = "subject_user_s";
pub(crate) const SUBJECT_SYSTEM_S: &str = "subject_system_s";
pub(crate) const LOSS_PERCENT: &str = "loss_percent";
pub(crate) const BROKEN_PERCENT: &str = "broken_percent";
pub(crate) const MEMORY_BYTES: &str = "memory_bytes";
pub(crate) const MEMORY_PER_CLIENT_BYTES: &str = "memory_per_client_bytes";
pub(crate) const FOREIGN_PERCENT: &str = "foreign_percent";
pub(crate) const CORE_BUSY_S: &str = "core_busy_s";
pub(crate) const STEAL_PERCENT: &str = "steal_percent";
pub(crate) const LATE_P99_US: &str = "late_p99_us";
pub(crate) const CPU_US_PER_PACKET: &str = "cpu_us_per_packet";
pub(crate) const PACKETS_PER_CPU_S: &str = "packets_per_cpu_s";
pub(crate) const CPU_S_PER_GB: &str = "cpu_s_per_gb";
pub(crate) const BUSY_S_PER_GB: &str = "busy_s_per_gb";
pub(crate) const BUSY_US_PER_PACKET: &str = "busy_us_per_packet";
pub(crate) const PACKETS_PER_BUSY_S: &str = "packets_per_busy_s";
pub(crate) const SEGMENTS_PER_SUPERPACKET: &str = "segments_per_superpacket";
pub(crate) const OVERLOAD_SHARE: &str = "overload_share";

pub(crate) const METRICS: &[Metric] = &[
    higher(DELIVERED_PPS, "/s", "delivered at the far ends"),
    higher(DELIVERED, "", "delivered at the far ends"),
    higher(DELIVERED_BYTES, "B", "payload delivered at the far ends"),
    higher("delivered_bps", "bit/s", "payload delivered at the far ends"),
    neither(OFFERED_PPS, "/s", "sent by the generator"),
    lower(LOSS_PERCENT, "%", "loss"),
    lower(BROKEN_PERCENT, "%", "connections that broke or could not be opened"),
    higher("transactions_per_s", "/s", "requests answered"),
    higher("connections_per_s", "/s", "connections opened and closed"),
    higher("allocations_per_s", "/s", "allocations granted and deleted"),
    higher("binds_per_s", "/s", "channels bound"),
    higher("thin_pps", "/s", "datagrams returned to the low-rate clients"),
    lower("generator_reordered", "", "datagrams received out of order"),
    higher(PACKETS_PER_CPU_S, "/s", "delivered per CPU-second of the subject"),
    higher(PACKETS_PER_BUSY_S, "/s", "delivered per busy second of the subject's cores"),
    lower(CPU_US_PER_PACKET, "µs", "CPU time of the subject per delivered datagram"),
    lower(BUSY_US_PER_PACKET, "µs", "busy time of the subject's cores per delivered datagram"),
    lower(CPU_S_PER_GB, "s", "CPU time of the subject per delivered GB"),
    lower(BUSY_S_PER_GB, "s", "busy time of the subject's cores per delivered GB"),
    lower(SUBJECT_CPU_S, "s", "CPU time of the subject"),
    lower(SUBJECT_USER_S, "s", "CPU time of the subject in user space"),
    lower(SUBJECT_SYSTEM_S, "s", "CPU time of the subject in the kernel"),
    lower(CORE_BUSY_S, "s", "busy time of the subject's cores"),
    neither(FOREIGN_PERCENT, "%", "share of the subject's cores used by other processes"),
    lower("machine_cpu_s", "s", "CPU time of the whole machine"),
    neither("machine_softirq_s", "s", "CPU time of the whole machine in softirqs"),
    neither(STEAL_PERCENT, "%", "CPU time stolen by the hypervisor"),
    lower("latency_p50_us", "µs", "latency from the due time, median"),
    lower("latency_p90_us", "µs", "latency from the due time, 90 %"),
    lower("latency_p99_us", "µs", "latency from the due time, 99 %"),
    lower("latency_p999_us", "µs", "latency from the due time, 99.9 %"),
    lower("latency_max_us", "µs", "latency from the due time, maximum"),
    lower("jitter_us", "µs", "interarrival jitter (RFC 3550)"),
    neither(LATE_P99_US, "µs", "lateness of the generator, 99 %"),
    higher("find_max_0_pps", "/s", "highest rate without loss"),
    higher("find_max_0.1_pps", "/s", "highest rate with at most 0.1 % loss"),
    higher("find_max_0.5_pps", "/s", "highest rate with at most 0.5 % loss"),
    higher("find_max_0_clients", "", "highest number of clients without loss"),
    higher("find_max_0.1_clients", "", "highest number of clients with at most 0.1 % loss"),
    higher("find_max_0.5_clients", "", "highest number of clients with at most 0.5 % loss"),
    higher(OVERLOAD_SHARE, "", "share of the highest rate delivered when twice that rate is offered"),
    lower(MEMORY_PER_CLIENT_BYTES, "B", "memory of the subject per client (allocation or connection)"),
    lower(MEMORY_BYTES, "B", "memory of the subject (proportional set size)"),
    lower("rss_bytes", "B", "peak resident memory of the subject"),
    lower("context_switches", "", "context switches of the subject"),
    lower("migrations", "", "migrations of the subject between CPUs"),
    lower("syscalls", "", "system calls of the subject"),
    lower("cycles", "", "CPU cycles of the subject"),
    lower("instructions", "", "instructions of the subject"),
    lower("cache_misses", "", "cache misses of the subject"),
    lower("branch_misses", "", "mispredicted branches of the subject"),
    lower("socket_drops", "", "datagrams dropped because receive buffers were full"),
    lower("interface_drops", "", "packets dropped at interfaces"),
    neither(SEGMENTS_PER_SUPERPACKET, "", "datagrams per interface packet"),
    neither("batch_occupancy", "", "datagrams per receive call"),
];

const fn higher(name: &'static str, unit: &'static str, about: &'static str) -> Metric {
    Metric { name, unit, better: Preference::Higher, about }
}

const fn lower(name: &'static str, unit: &'static str, about: &'static str) -> Metric {
    Metric { name, unit, better: Preference::Lower, about }
}

const fn neither(name: &'static str, unit: &'static str, about: &'static str) -> Metric {
    Metric { name, unit, better: Preference::Neither, about }
}

static OF_PROCESS: Metric = lower("cpu.NAME_s", "s", "CPU time of the process and its children");

pub(crate) fn of_process(name: &str) -> String {
    format!("cpu.{name}_s")
}

pub(crate) fn is_of_process(name: &str) -> bool {
    name.starts_with("cpu.") && name.ends_with("_s")
}

pub(crate) fn find(name: &str) -> Option<&'static Metric> {
    let listed = METRICS.iter().find(|metric| metric.name == name);
    listed.or_else(|| is_of_process(name).then_some(&OF_PROCESS))
}

pub(crate) fn direction(name: &str) -> Preference {
    find(name).map_or(Preference::Neither, |metric| metric.better)
}

/// Returns true if a run whose generator fell behind still counts for this metric.
///
/// Lateness changes the offered load and its timing, and with them all rates, losses and latencies. The subject's cost *per delivered
/// datagram* is unaffected, because CPU time and delivered datagrams are both counted over one window, independently of the generator.
pub(crate) fn survives_lateness(name: &str) -> bool {
    [
        CPU_US_PER_PACKET,
        BUSY_US_PER_PACKET,
        PACKETS_PER_CPU_S,
        PACKETS_PER_BUSY_S,
        CPU_S_PER_GB,
        BUSY_S_PER_GB,
        MEMORY_PER_CLIENT_BYTES,
    ]
    .contains(&name)
}

pub(crate) fn unit(name: &str) -> &'static str {
    find(name).map_or("", |metric| metric.unit)
}

/// Adds derived figures, except those whose inputs are missing or whose divisor is zero.
pub(crate) fn derive(metrics: &mut BTreeMap<String, f64>) {
    if let (Some(&user), Some(&system)) = (metrics.get(SUBJECT_USER_S), metrics.get(SUBJECT_SYSTEM_S)) {
        metrics.entry(SUBJECT_CPU_S.to_owned()).or_insert(user + system);
    }
    let derived = [
        (CPU_US_PER_PACKET, SUBJECT_CPU_S, 1e6, DELIVERED),
        (BUSY_US_PER_PACKET, CORE_BUSY_S, 1e6, DELIVERED),
        (PACKETS_PER_CPU_S, DELIVERED, 1.0, SUBJECT_CPU_S),
        (PACKETS_PER_BUSY_S, DELIVERED, 1.0, CORE_BUSY_S),
        (CPU_S_PER_GB, SUBJECT_CPU_S, 1e9, DELIVERED_BYTES),
        (BUSY_S_PER_GB, CORE_BUSY_S, 1e9, DELIVERED_BYTES),
    ];
    for (name, dividend, factor, divisor) in derived {
        if let (Some(&dividend), Some(&divisor)) = (metrics.get(dividend), metrics.get(divisor))
            && divisor > 0.0
        {
            metrics.insert(name.to_owned(), dividend * factor / divisor);
        }
    }
}

/// Formats a value with its unit: four significant figures, and an SI prefix if the unit takes one.
pub(crate) fn show(name: &str, value: f64) -> String {
    let unit = unit(name);
    let (scaled, prefix) = match (unit, value.abs()) {
        ("µs" | "%" | "s", _) => (value, ""),
        (_, 1e9..) => (value / 1e9, "G"),
        (_, 1e6..) => (value / 1e6, "M"),
        (_, 1e4..) => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        0.0 => 0,
        1000.0.. => 0,
        100.0.. => 1,
        10.0.. => 2,
        1.0.. => 3,
        _ => 4,
    };
    let separator = if unit.is_empty() && prefix.is_empty() { "" } else { " " };
    format!("{scaled:.digits$}{separator}{prefix}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn names_are_unique() {
        for (i, metric) in METRICS.iter().enumerate() {
            assert!(METRICS[i + 1..].iter().all(|other| other.name != metric.name), "{} twice", metric.name);
        }
    }

    #[test]
    fn less_cpu_per_packet_and_more_packets_per_cpu_are_better() {
        assert_eq!(direction(CPU_US_PER_PACKET), Preference::Lower);
        assert_eq!(direction(PACKETS_PER_CPU_S), Preference::Higher);
        assert_eq!(direction("made_up"), Preference::Neither);
        assert_eq!((direction(&of_process("store")), unit("cpu.store_s")), (Preference::Lower, "s"));
    }

    #[test]
    fn figures_are_derived_from_the_counters() {
        let mut metrics = counters(&[
            (SUBJECT_USER_S, 1.0),
            (SUBJECT_SYSTEM_S, 3.0),
            (CORE_BUSY_S, 8.0),
            (DELIVERED, 2_000_000.0),
            (DELIVERED_BYTES, 5e8),
        ]);
        derive(&mut metrics);
        assert_eq!(metrics[SUBJECT_CPU_S], 4.0);
        assert_eq!(metrics[CPU_US_PER_PACKET], 2.0);
        assert_eq!(metrics[BUSY_US_PER_PACKET], 4.0);
        assert_eq!(metrics[PACKETS_PER_CPU_S], 500_000.0);
        assert_eq!(metrics[PACKETS_PER_BUSY_S], 250_000.0);
        assert_eq!((metrics[CPU_S_PER_GB], metrics[BUSY_S_PER_GB]), (8.0, 16.0));
    }

    #[test]
    fn zero_deliveries_do_not_produce_infinite_figures() {
        let mut metrics = counters(&[(SUBJECT_CPU_S, 1.0), (DELIVERED, 0.0), (DELIVERED_BYTES, 0.0)]);
        derive(&mut metrics);
        assert!(!metrics.contains_key(CPU_US_PER_PACKET) && !metrics.contains_key(CPU_S_PER_GB));
        assert_eq!(metrics[PACKETS_PER_CPU_S], 0.0);
    }

    #[test]
    fn values_are_shown_with_their_unit() {
        assert_eq!(show(DELIVERED_PPS, 241_700.0), "241.7 k/s");
        assert_eq!(show(CPU_US_PER_PACKET, 0.57), "0.5700 µs");
        assert_eq!(show("context_switches", 12.0), "12.00");
        assert_eq!(show("loss_percent", 0.0), "0 %");
        assert_eq!(show("delivered_bps", 4.2e9), "4.200 Gbit/s");
    }
}
