//! What one trial of a forwarder found, the figures drawn from it, and why one might doubt them.

use serde_json::{Value, json};

use super::{
    super::{
        counters::{Arrivals, Memory, ProcessTime, Window},
        rounds::Found,
    },
    workload::{Metric, Shape},
};

/// Bytes of an IPv4 header and of a TCP header with timestamps, as every segment of a long connection has them.
const HEADERS: u64 = 20 + 32;

/// What one trial found.
#[derive(Clone, Debug)]
pub(crate) enum Finding {
    Traffic(Box<Traffic>),
    Idle(Idle),
}

/// Traffic over the window.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub(crate) shape: Shape,
    pub(crate) window: Window,
    /// The softirq thread of the forwarder's core.
    pub(crate) ksoftirqd: ProcessTime,
    /// The generator's own result, over its own slightly longer window.
    pub(crate) report: Value,
}

/// Memory of idle connections.
#[derive(Clone, Debug)]
pub(crate) struct Idle {
    pub(crate) connections: u32,
    pub(crate) before: Memory,
    pub(crate) after: Memory,
    /// TCP sockets opened for them in the forwarder's namespace.
    pub(crate) sockets: u64,
}

impl Finding {
    /// A figure of the workload, where this trial has it.
    pub(crate) fn figure(&self, metric: Metric) -> Option<f64> {
        match self {
            Self::Traffic(traffic) => traffic.figure(metric),
            Self::Idle(idle) => (metric == Metric::ConnectionBytes).then(|| idle.bytes_per_connection()),
        }
    }
}

impl Found for Finding {
    fn summary(&self) -> String {
        match self {
            Self::Traffic(traffic) => traffic.summary(),
            Self::Idle(idle) => format!(
                "{:.0} B resident per connection ({:.0} B proportional), {:.2} sockets",
                idle.bytes_per_connection(),
                idle.proportional_bytes_per_connection(),
                idle.per_connection(idle.sockets)
            ),
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Traffic(traffic) => traffic.to_json(),
            Self::Idle(idle) => idle.to_json(),
        }
    }
}

impl Traffic {
    fn figure(&self, metric: Metric) -> Option<f64> {
        let per_gb = |seconds: f64| positive(self.bytes() / 1e9).map(|gigabytes| seconds / gigabytes);
        let packets = as_f64(self.packets());
        match metric {
            Metric::CoreSecondsPerGb => per_gb(self.window.busy()),
            Metric::ProcessSecondsPerGb => per_gb(self.window.subject.total()),
            Metric::Gbits => Some(self.bytes() * 8e-9 / self.window.elapsed),
            Metric::Rate => self.rate(),
            Metric::P50 => self.latency("p50"),
            Metric::PerBusySecond => positive(self.window.busy()).map(|busy| packets / busy),
            Metric::PerProcessSecond => positive(self.window.subject.total()).map(|busy| packets / busy),
            Metric::ConnectionBytes => None,
        }
    }

    /// TCP payload that reached the server's namespace: a super-packet has one header, and `InOctets` counts it once.
    fn bytes(&self) -> f64 {
        let Arrivals { octets, buffers, .. } = self.window.to_peer;
        as_f64(octets.saturating_sub(buffers * HEADERS))
    }

    /// Packets that reached either far end.
    fn packets(&self) -> u64 {
        self.window.to_client.packets + self.window.to_peer.packets
    }

    /// Transactions or connections a second, as the generator counts them. `None` where more than a hundredth failed: then
    /// the failures were measured.
    fn rate(&self) -> Option<f64> {
        let rate =
            self.reported(&["transactions_per_s"]).or_else(|| self.reported(&["connections_per_s"]))?;
        (self.lost_share() <= 0.01).then_some(rate)
    }

    /// What was delivered a second, in the unit of the workload: bytes, transactions, connections or datagrams.
    pub(crate) fn delivered_per_second(&self) -> Option<f64> {
        match self.shape {
            Shape::Bulk { .. } => Some(self.bytes() / self.window.elapsed),
            Shape::Exchange { .. } | Shape::Connect { .. } => self.rate(),
            Shape::Datagrams { .. } => Some(as_f64(self.packets()) / self.window.elapsed),
            Shape::Idle { .. } => None,
        }
    }

    /// Seconds of the forwarder's core per unit delivered.
    pub(crate) fn core_cost(&self) -> Option<f64> {
        self.cost(self.window.busy())
    }

    /// Seconds of the forwarder's process per unit delivered.
    pub(crate) fn process_cost(&self) -> Option<f64> {
        self.cost(self.window.subject.total())
    }

    fn cost(&self, seconds: f64) -> Option<f64> {
        let delivered = positive(self.delivered_per_second()? * self.window.elapsed)?;
        Some(seconds / delivered)
    }

    fn lost_share(&self) -> f64 {
        let sent = self.reported(&["sent"]).unwrap_or(0.0).max(1.0);
        self.reported(&["lost"]).unwrap_or(0.0) / sent
    }

    /// Share of the window that the core spent on neither the forwarder nor its own softirq thread: other programs.
    pub(crate) fn foreign_share(&self) -> f64 {
        let known = self.window.subject.total() + self.ksoftirqd.total();
        ((self.window.busy() - known) / self.window.elapsed).max(0.0)
    }

    /// Share of the window that the softirq thread took.
    pub(crate) fn ksoftirqd_share(&self) -> f64 {
        self.ksoftirqd.total() / self.window.elapsed
    }

    /// A quantile of the generator's round trips in microseconds; bulk has none.
    pub(crate) fn latency(&self, quantile: &str) -> Option<f64> {
        if matches!(self.shape, Shape::Bulk { .. }) { None } else { self.reported(&["rtt_us", quantile]) }
    }

    /// A number of the generator's result.
    fn reported(&self, path: &[&str]) -> Option<f64> {
        path.iter().try_fold(&self.report, |value, key| value.get(key))?.as_f64()
    }

    /// Notes on whether the figures can be trusted.
    fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if self.foreign_share() > 0.03 {
            caveats.push(format!(
                "{:.0} % of the forwarder's core went elsewhere",
                self.foreign_share() * 100.0
            ));
        }
        let stolen = self.window.core.steal / self.window.elapsed;
        if stolen > 0.01 {
            caveats.push(format!("{:.1} % stolen by the hypervisor", stolen * 100.0));
        }
        if !matches!(self.shape, Shape::Datagrams { .. }) && self.lost_share() > 0.001 {
            caveats.push(format!("{:.2} % failed", self.lost_share() * 100.0));
        }
        let errors = self.report.get("errors").and_then(Value::as_object);
        for (name, count) in errors.into_iter().flatten() {
            caveats.push(format!("{name}: {count}"));
        }
        if self.window.backlog_drops > 0 {
            caveats.push(format!("{} backlog drops", self.window.backlog_drops));
        }
        caveats
    }

    fn summary(&self) -> String {
        let delivered = self.delivered_per_second();
        let rate = delivered.map_or("-".to_owned(), |rate| show_rate(self.shape, rate));
        let cost = |cost: Option<f64>| cost.map_or("-".to_owned(), |cost| show_cost(self.shape, cost));
        let mut line = format!(
            "{rate}, {} ({} process), core {:.0} %, load core {:.0} %",
            cost(self.core_cost()),
            cost(self.process_cost()),
            100.0 * self.window.busy() / self.window.elapsed,
            100.0 * self.window.load_core_share(),
        );
        if let (Some(p50), Some(p99)) = (self.latency("p50"), self.latency("p99")) {
            line.push_str(&format!(", p50 {p50:.0} us, p99 {p99:.0} us"));
        }
        for caveat in self.caveats() {
            line.push_str(&format!(" [{caveat}]"));
        }
        line
    }

    fn to_json(&self) -> Value {
        let mut json = self.window.to_json();
        json["delivered_per_second"] = json!(self.delivered_per_second());
        json["payload_bytes_to_server"] = json!(self.bytes());
        json["core_s_per_unit"] = json!(self.core_cost());
        json["process_s_per_unit"] = json!(self.process_cost());
        json["ksoftirqd_s"] = self.ksoftirqd.to_json();
        json["foreign_share"] = json!(self.foreign_share());
        json["caveats"] = json!(self.caveats());
        json["generator"] = self.report.clone();
        json
    }
}

impl Idle {
    fn bytes_per_connection(&self) -> f64 {
        self.per_connection(self.after.resident.saturating_sub(self.before.resident))
    }

    fn proportional_bytes_per_connection(&self) -> f64 {
        self.per_connection(self.after.proportional.saturating_sub(self.before.proportional))
    }

    fn per_connection(&self, total: u64) -> f64 {
        as_f64(total) / f64::from(self.connections)
    }

    fn to_json(&self) -> Value {
        json!({
            "connections": self.connections,
            "resident_bytes_per_connection": self.bytes_per_connection(),
            "proportional_bytes_per_connection": self.proportional_bytes_per_connection(),
            "resident_before": self.before.resident,
            "resident_after": self.after.resident,
            "sockets_per_connection": self.per_connection(self.sockets),
        })
    }
}

/// A rate with its unit.
pub(crate) fn show_rate(shape: Shape, per_second: f64) -> String {
    match shape {
        Shape::Bulk { .. } => format!("{:.1} Gbit/s", per_second * 8e-9),
        _ => format!("{:.1}k/s", per_second / 1e3),
    }
}

/// What one unit costs.
pub(crate) fn show_cost(shape: Shape, seconds: f64) -> String {
    match shape {
        Shape::Bulk { .. } => format!("{:.3} s/GB", seconds * 1e9),
        _ => format!("{:.2} us each", seconds * 1e6),
    }
}

fn positive(value: f64) -> Option<f64> {
    (value > 0.0).then_some(value)
}

/// Exact below 2^53, far beyond any count here.
fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::{super::super::counters::CoreTime, *};

    fn traffic(shape: Shape, report: Value) -> Traffic {
        Traffic {
            shape,
            window: Window {
                elapsed: 5.0,
                to_client: Arrivals { packets: 1_000_000, ..Arrivals::default() },
                to_peer: Arrivals {
                    packets: 2_000_000,
                    buffers: 100_000,
                    octets: 10_000_000_000 + 100_000 * HEADERS,
                    ..Arrivals::default()
                },
                core: CoreTime { idle: 3.0, ..CoreTime::default() },
                subject: ProcessTime { user: 0.1, system: 1.4 },
                ..Window::default()
            },
            ksoftirqd: ProcessTime { user: 0.0, system: 0.4 },
            report,
        }
    }

    fn bulk() -> Traffic {
        traffic(Shape::Bulk { streams: 1 }, json!({}))
    }

    #[test]
    fn bulk_counts_payload_at_the_server_and_idle_time_is_no_cost() {
        assert_eq!(bulk().figure(Metric::CoreSecondsPerGb), Some(0.2));
        assert_eq!(bulk().figure(Metric::ProcessSecondsPerGb), Some(0.15));
        assert_eq!(bulk().figure(Metric::Gbits), Some(16.0));
        assert_eq!(bulk().figure(Metric::Rate), None);
    }

    #[test]
    fn nothing_delivered_is_no_cost_rather_than_a_free_one() {
        let mut nothing = bulk();
        nothing.window.to_peer = Arrivals::default();
        assert_eq!(nothing.figure(Metric::CoreSecondsPerGb), None);
        assert_eq!(nothing.core_cost(), None);
    }

    #[test]
    fn datagrams_count_at_both_ends() {
        let udp = traffic(Shape::Datagrams { flows: 1, burst: 16 }, json!({}));
        assert_eq!(udp.figure(Metric::PerBusySecond), Some(1_500_000.0));
        assert_eq!(udp.figure(Metric::PerProcessSecond), Some(2_000_000.0));
    }

    #[test]
    fn the_softirq_thread_is_not_another_program() {
        assert!((bulk().foreign_share() - 0.02).abs() < 1e-9);
        let without = Traffic { ksoftirqd: ProcessTime::default(), ..bulk() };
        assert!((without.foreign_share() - 0.1).abs() < 1e-9);
        assert!(without.caveats()[0].contains("10 % of the forwarder's core"));
    }

    #[test]
    fn a_rate_with_failures_is_none() {
        let rate = |lost| {
            let report =
                json!({ "sent": 1000, "lost": lost, "connections_per_s": 200.0, "rtt_us": { "p50": 95 } });
            traffic(Shape::Connect { at_once: 32, reset: false }, report).figure(Metric::Rate)
        };
        assert_eq!((rate(10), rate(11)), (Some(200.0), None));
    }

    #[test]
    fn memory_is_divided_by_connections() {
        let memory = |resident| Memory { resident, proportional: resident / 2 };
        let idle =
            Idle { connections: 5000, before: memory(5_000_000), after: memory(10_000_000), sockets: 10_000 };
        assert_eq!(Finding::Idle(idle.clone()).figure(Metric::ConnectionBytes), Some(1000.0));
        assert_eq!(idle.to_json()["sockets_per_connection"], json!(2.0));
    }
}
