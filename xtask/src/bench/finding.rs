//! What one trial found, the figures drawn from it, and why one might doubt them.

use serde_json::{Value, json};

use super::{
    counters::{Arrivals, Memory, Window},
    rounds::Found,
    subject::Load,
    workload::{Metric, Transport},
};

/// What the generator calls a connection that broke or could not be opened.
const BROKEN_LINKS: [&str; 3] = ["connection_lost", "connect_failed", "refresh_failed"];
/// Bytes before the payload of ChannelData (RFC 8656 section 12.4).
const CHANNEL_DATA_HEADER: u32 = 4;
/// IPv4 and TCP with timestamps.
const TCP_HEADERS: u64 = 52;

/// What one trial found.
#[derive(Clone, Debug)]
pub(crate) enum Finding {
    Traffic(Box<Traffic>),
    Idle(Idle),
}

/// Traffic or churn, over the window.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub(crate) window: Window,
    /// What the generator was asked for.
    pub(crate) load: Load,
    /// The generator's own result, over its own slightly longer window.
    pub(crate) report: Option<Value>,
}

/// Memory of idle allocations.
#[derive(Clone, Debug)]
pub(crate) struct Idle {
    pub(crate) allocations: u32,
    pub(crate) before: Memory,
    pub(crate) after: Memory,
    /// Sockets opened for them.
    pub(crate) sockets: u64,
    pub(crate) kernel_bytes_per_socket: Option<u64>,
}

impl Finding {
    /// The figure a requirement asks for, where this trial has it.
    pub(crate) fn figure(&self, metric: Metric) -> Option<f64> {
        match (self, metric) {
            (Self::Traffic(traffic), Metric::PerBusySecond) => Some(traffic.per_busy_second()),
            (Self::Traffic(traffic), Metric::PerProcessSecond) => Some(traffic.per_process_second()),
            (Self::Traffic(traffic), Metric::Loss) => traffic.loss(),
            (Self::Traffic(traffic), Metric::P50) => traffic.reported(&["rtt_us", "p50"]),
            (Self::Traffic(traffic), Metric::P99) => traffic.reported(&["rtt_us", "p99"]),
            (Self::Traffic(traffic), Metric::Allocations) => traffic.allocations_per_second(),
            (Self::Idle(idle), Metric::AllocationBytes) => Some(idle.bytes_per_allocation()),
            _ => None,
        }
    }
}

impl Found for Finding {
    fn summary(&self) -> String {
        match self {
            Self::Traffic(traffic) => traffic.summary(),
            Self::Idle(idle) => format!(
                "{:.0} B resident per allocation, {:.2} sockets",
                idle.bytes_per_allocation(),
                idle.sockets_per_allocation()
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
    /// Why this trial over TCP or TLS has no figure at all, if it has none: connections broke, so that fewer clients were
    /// served than the workload says, or nothing came back.
    pub(crate) fn void(&self) -> Option<String> {
        self.report.as_ref().filter(|_| self.load.transport.is_stream())?;
        let broken: f64 = BROKEN_LINKS.iter().filter_map(|name| self.reported(&["errors", name])).sum();
        // Each allocation of a churn has a connection of its own; one that breaks counts as lost.
        let allowed = if self.load.churn { 0.01 * self.reported(&["sent"]).unwrap_or(0.0) } else { 0.0 };
        if broken > allowed {
            return Some(format!("{broken} of the generator's connections broke"));
        }
        if self.reported(&["received"]).unwrap_or(0.0) == 0.0 {
            return Some("nothing came back".to_owned());
        }
        None
    }

    /// Datagrams that reached either far end. Over UDP both are counted by the IP layer. A stream's segments are no
    /// datagrams: there the generator's rate, taken over a window of its own around ours, stands for the client's side.
    pub(crate) fn delivered(&self) -> u64 {
        let to_client = if self.load.transport.is_stream() {
            let rate = self.reported(&["recv_pps"]).unwrap_or(0.0);
            whole(rate * self.window.elapsed)
        } else {
            self.window.to_client.packets
        };
        to_client + self.window.to_peer.packets
    }

    /// Messages that the client's namespace received over plain TCP by the bytes of the kernel's count: `InOctets` less the
    /// headers, divided by the padded length of a message. `None` where bytes do not tell: TLS puts any number into a record.
    fn messages_by_octets(&self) -> Option<f64> {
        if self.load.transport != Transport::Tcp || self.load.churn {
            return None;
        }
        let Arrivals { octets, buffers, .. } = self.window.to_client;
        let message = CHANNEL_DATA_HEADER + self.load.size.next_multiple_of(4);
        Some(as_f64(octets.saturating_sub(buffers * TCP_HEADERS)) / f64::from(message))
    }

    /// Share of TLS handshakes that resumed a session.
    fn resumed(&self) -> Option<f64> {
        let resumed = self.reported(&["resumed_handshakes"])?;
        let all = resumed + self.reported(&["full_handshakes"])?;
        (all > 0.0).then(|| resumed / all)
    }

    pub(crate) fn busy(&self) -> f64 {
        self.window.busy()
    }

    pub(crate) fn per_busy_second(&self) -> f64 {
        quotient(self.delivered(), self.busy())
    }

    pub(crate) fn per_process_second(&self) -> f64 {
        quotient(self.delivered(), self.window.subject.total())
    }

    /// Share of the core's busy time that did not go to the subject: other programs, mostly. More than a few
    /// percent says that the machine was not quiet.
    pub(crate) fn foreign_share(&self) -> f64 {
        ((self.busy() - self.window.subject.total()) / self.window.elapsed).max(0.0)
    }

    /// Segments per super-packet that the relay sent to the peer.
    pub(crate) fn segments_per_send(&self) -> f64 {
        ratio(self.window.to_peer.packets, self.window.to_peer.buffers)
    }

    pub(crate) fn load_core_share(&self) -> f64 {
        self.window.load_core_share()
    }

    pub(crate) fn loss(&self) -> Option<f64> {
        let sent = self.reported(&["sent"])?;
        (sent > 0.0).then_some(self.reported(&["lost"])? / sent)
    }

    /// `None` where more than a twentieth was refused or lost: then the refusals were measured, and whatever made
    /// them (a port used again too soon, a quota), but not how fast the relay can allocate.
    pub(crate) fn allocations_per_second(&self) -> Option<f64> {
        if self.loss()? > 0.05 { None } else { self.reported(&["recv_pps"]) }
    }

    /// Packets that the generator sent and received per second of its processor time.
    pub(crate) fn generator_per_second(&self) -> Option<f64> {
        let packets = (self.reported(&["send_pps"])? + self.reported(&["recv_pps"])?) * self.window.elapsed;
        (self.window.generator.total() > 0.0).then(|| packets / self.window.generator.total())
    }

    /// A number of the generator's result.
    pub(crate) fn reported(&self, path: &[&str]) -> Option<f64> {
        path.iter().try_fold(self.report.as_ref()?, |value, key| value.get(key))?.as_f64()
    }

    /// Notes on whether the figure can be trusted.
    pub(crate) fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if self.foreign_share() > 0.03 {
            caveats.push(format!("{:.0} % of the relay's core went elsewhere", self.foreign_share() * 100.0));
        }
        if self.window.core.steal / self.window.elapsed > 0.01 {
            caveats.push(format!(
                "{:.1} % stolen by the hypervisor",
                self.window.core.steal / self.window.elapsed * 100.0
            ));
        }
        if self.load_core_share() > 0.97 {
            caveats.push("load core saturated".to_owned());
        }
        if let Some(late) = self.reported(&["late_us", "p99"])
            && late > 1000.0
        {
            caveats.push(format!("generator late, p99 {late:.0} us"));
        }
        if let (Some(asked), Some(sent)) = (self.load.rate, self.reported(&["send_pps"]))
            && sent < 0.98 * f64::from(asked)
        {
            caveats.push(format!("offered {sent:.0}/s in place of {asked}"));
        }
        // Names of what went wrong, such as `allocation_mismatch_437` of a port used again too soon.
        let errors = self.report.as_ref().and_then(|report| report.get("errors")?.as_object());
        for (name, count) in errors.into_iter().flatten() {
            let share = count.as_f64().unwrap_or(0.0) / self.reported(&["sent"]).unwrap_or(0.0).max(1.0);
            if share > 0.01 {
                caveats.push(format!("{name}: {count}"));
            }
        }
        if let Some(by_octets) = self.messages_by_octets() {
            let counted = self.reported(&["recv_pps"]).unwrap_or(0.0) * self.window.elapsed;
            if (counted / by_octets - 1.0).abs() > 0.05 {
                caveats
                    .push(format!("generator counted {counted:.0}, the kernel's bytes say {by_octets:.0}"));
            }
        }
        if let Some(resumed) = self.resumed().filter(|resumed| self.load.churn && *resumed < 0.9) {
            caveats.push(format!("{:.0} % of sessions resumed", resumed * 100.0));
        }
        if self.window.backlog_drops > 0 {
            caveats.push(format!("{} backlog drops", self.window.backlog_drops));
        }
        caveats
    }

    fn summary(&self) -> String {
        let mut line = format!(
            "{:>7.1}k/busy s, {:.2} us each ({:.2} process), {:.1}k/s delivered, core {:.0} %, load core {:.0} %, {:.1} a send",
            self.per_busy_second() / 1e3,
            1e6 * self.busy() / as_f64(self.delivered()),
            1e6 * self.window.subject.total() / as_f64(self.delivered()),
            quotient(self.delivered(), self.window.elapsed) / 1e3,
            100.0 * self.busy() / self.window.elapsed,
            100.0 * self.load_core_share(),
            self.segments_per_send(),
        );
        if let (Some(loss), Some(p50), Some(p99)) =
            (self.loss(), self.reported(&["rtt_us", "p50"]), self.reported(&["rtt_us", "p99"]))
        {
            line.push_str(&format!(", lost {:.3} %, p50 {p50:.0} us, p99 {p99:.0} us", loss * 100.0));
        }
        for caveat in self.caveats() {
            line.push_str(&format!(" [{caveat}]"));
        }
        line
    }

    fn to_json(&self) -> Value {
        let mut json = self.window.to_json();
        json["transport"] = json!(self.load.transport.name());
        json["delivered"] = json!(self.delivered());
        json["messages_by_octets"] = json!(self.messages_by_octets());
        json["packets_per_busy_second"] = json!(self.per_busy_second());
        json["foreign_share"] = json!(self.foreign_share());
        json["segments_per_send"] = json!(self.segments_per_send());
        json["caveats"] = json!(self.caveats());
        json["generator"] = json!(self.report);
        json
    }
}

impl Idle {
    fn bytes_per_allocation(&self) -> f64 {
        self.per_allocation(self.after.resident.saturating_sub(self.before.resident))
    }

    fn sockets_per_allocation(&self) -> f64 {
        self.per_allocation(self.sockets)
    }

    /// Kernel memory of the sockets, empty ones; the same for every relay that opens as many.
    pub(crate) fn kernel_bytes_per_allocation(&self) -> Option<f64> {
        Some(self.per_allocation(self.sockets * self.kernel_bytes_per_socket?))
    }

    fn per_allocation(&self, total: u64) -> f64 {
        as_f64(total) / f64::from(self.allocations)
    }

    fn to_json(&self) -> Value {
        json!({
            "allocations": self.allocations,
            "resident_bytes_per_allocation": self.bytes_per_allocation(),
            "proportional_bytes_per_allocation":
                self.per_allocation(self.after.proportional.saturating_sub(self.before.proportional)),
            "resident_before": self.before.resident,
            "resident_after": self.after.resident,
            "sockets_per_allocation": self.sockets_per_allocation(),
            "kernel_bytes_per_allocation_at_least": self.kernel_bytes_per_allocation(),
        })
    }
}

fn quotient(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { as_f64(count) / seconds } else { 0.0 }
}

fn ratio(count: u64, of: u64) -> f64 {
    as_f64(count) / as_f64(of.max(1))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a count of packets, not negative"
)]
fn whole(count: f64) -> u64 {
    count.round() as u64
}

/// Exact below 2^53, far beyond any count here.
fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::{
        super::counters::{Arrivals, CoreTime, ProcessTime},
        *,
    };

    const LOAD: Load = Load {
        transport: Transport::Udp,
        clients: 1,
        rate: None,
        size: 121,
        burst: 1,
        window: None,
        churn: false,
        seconds: 6.0,
        warmup: 0.5,
    };

    fn over(transport: Transport, churn: bool, report: Value) -> Traffic {
        Traffic { load: Load { transport, churn, ..LOAD }, report: Some(report), ..traffic() }
    }

    fn traffic() -> Traffic {
        let arrivals = |packets, buffers| Arrivals { packets, buffers, ..Arrivals::default() };
        Traffic {
            window: Window {
                elapsed: 5.0,
                to_client: arrivals(400_000, 400_000),
                to_peer: arrivals(800_000, 50_000),
                core: CoreTime { idle: 2.0, ..CoreTime::default() },
                load_core: CoreTime { idle: 0.05, ..CoreTime::default() },
                subject: ProcessTime { user: 0.5, system: 2.0 },
                generator: ProcessTime { user: 1.0, system: 1.0 },
                ..Window::default()
            },
            load: LOAD,
            report: Some(json!({
                "sent": 1000, "lost": 5, "send_pps": 200_000.0, "recv_pps": 100_000.0,
                "rtt_us": { "p50": 60.5, "p99": 200 }, "late_us": { "p99": 1500.0 },
            })),
        }
    }

    #[test]
    fn packets_per_busy_second_counts_both_far_ends_and_leaves_idle_time_out() {
        assert_eq!(traffic().per_busy_second(), 400_000.0);
        assert_eq!(traffic().segments_per_send(), 16.0);
    }

    #[test]
    fn on_a_stream_the_generator_counts_for_the_client_and_the_kernel_for_the_peer() {
        let report = json!({ "recv_pps": 10_000.0, "received": 60_000 });
        for transport in [Transport::Tcp, Transport::Tls] {
            assert_eq!(over(transport, false, report.clone()).delivered(), 50_000 + 800_000);
        }
    }

    #[test]
    fn bytes_of_the_kernel_that_contradict_the_generator_are_a_caveat() {
        // 50,000 messages of 121 bytes, padded to 124, with 4 of header, in 1,000 buffers.
        let caveats = |octets, transport| {
            let mut traffic = over(transport, false, json!({ "recv_pps": 10_000.0 }));
            traffic.window.to_client = Arrivals { octets, buffers: 1000, ..Arrivals::default() };
            traffic.caveats().join("; ")
        };
        let right = 50_000 * 128 + 1000 * 52;
        assert!(!caveats(right, Transport::Tcp).contains("bytes say"));
        assert!(caveats(2 * right, Transport::Tcp).contains("bytes say"));
        assert!(!caveats(2 * right, Transport::Tls).contains("bytes say"));
    }

    #[test]
    fn a_broken_connection_voids_a_trial_over_streams() {
        let errors =
            |name: &str, count: u64| json!({ "sent": 1000, "received": 900, "errors": { name: count } });
        let void = |transport, churn, report| over(transport, churn, report).void();
        assert!(void(Transport::Tcp, false, errors("connection_lost", 1)).is_some());
        assert!(void(Transport::Tls, false, errors("connect_failed", 1)).is_some());
        assert_eq!(void(Transport::Tls, false, errors("send_would_block", 500)), None);
        assert_eq!(void(Transport::Udp, false, errors("connection_lost", 1)), None);
        assert_eq!(void(Transport::Tls, true, errors("connection_lost", 10)), None);
        assert!(void(Transport::Tls, true, errors("connection_lost", 11)).is_some());
        assert!(void(Transport::Tls, false, json!({ "sent": 1000, "received": 0 })).is_some());
    }

    #[test]
    fn sessions_that_were_not_resumed_are_a_caveat_of_churn() {
        let caveats = |full: u64, churn| {
            let report = json!({ "sent": 1000, "full_handshakes": full, "resumed_handshakes": 900 });
            over(Transport::Tls, churn, report).caveats().join("; ")
        };
        assert!(caveats(900, true).contains("50 % of sessions resumed"));
        assert!(!caveats(64, true).contains("resumed") && !caveats(900, false).contains("resumed"));
    }

    #[test]
    fn time_of_others_on_the_relays_core_is_a_caveat() {
        let disturbed = traffic();
        assert!((disturbed.foreign_share() - 0.1).abs() < 1e-9);
        assert!(disturbed.caveats().iter().any(|caveat| caveat.starts_with("10 % of the relay's core")));
        let mut quiet = traffic();
        quiet.window.subject = ProcessTime { user: 1.0, system: 2.0 };
        assert!(!quiet.caveats().iter().any(|caveat| caveat.contains("relay's core")));
    }

    #[test]
    fn a_saturated_or_late_generator_is_a_caveat() {
        let caveats = traffic().caveats().join("; ");
        assert!(caveats.contains("load core saturated") && caveats.contains("p99 1500 us"), "{caveats}");
    }

    #[test]
    fn less_offered_than_asked_for_is_a_caveat() {
        let asked =
            |rate| Traffic { load: Load { rate: Some(rate), ..LOAD }, ..traffic() }.caveats().join("; ");
        assert!(asked(250_000).contains("offered 200000/s in place of 250000"), "{}", asked(250_000));
        assert!(!asked(200_000).contains("offered"));
    }

    #[test]
    fn errors_of_more_than_a_percent_are_a_caveat() {
        let report = json!({ "sent": 1000, "errors": { "quota_486": 11, "timeout": 10 } });
        let caveats = Traffic { report: Some(report), ..traffic() }.caveats().join("; ");
        assert!(caveats.contains("quota_486: 11") && !caveats.contains("timeout"), "{caveats}");
    }

    #[test]
    fn figures_come_from_the_generators_result() {
        let finding = Finding::Traffic(Box::new(traffic()));
        assert_eq!(finding.figure(Metric::Loss), Some(0.005));
        assert_eq!(finding.figure(Metric::P50), Some(60.5));
        assert_eq!(finding.figure(Metric::P99), Some(200.0));
        assert_eq!(finding.figure(Metric::AllocationBytes), None);
        assert_eq!(traffic().generator_per_second(), Some(750_000.0));
        let silent = Finding::Traffic(Box::new(Traffic { report: None, ..traffic() }));
        assert_eq!(silent.figure(Metric::P50), None);
        assert_eq!(silent.figure(Metric::PerBusySecond), Some(400_000.0));
    }

    #[test]
    fn a_rate_of_allocations_that_were_mostly_refused_is_no_figure() {
        let rate = |lost: u64| {
            let report = json!({ "sent": 1000, "lost": lost, "recv_pps": 128.0 });
            Finding::Traffic(Box::new(Traffic { report: Some(report), ..traffic() }))
                .figure(Metric::Allocations)
        };
        assert_eq!((rate(0), rate(50), rate(51)), (Some(128.0), Some(128.0), None));
    }

    #[test]
    fn memory_is_divided_by_allocations() {
        let memory = |resident| Memory { resident, proportional: resident };
        let idle = Idle {
            allocations: 10_000,
            before: memory(5_000_000),
            after: memory(25_000_000),
            sockets: 20_000,
            kernel_bytes_per_socket: Some(2560),
        };
        assert_eq!(idle.bytes_per_allocation(), 2000.0);
        assert_eq!(idle.kernel_bytes_per_allocation(), Some(5120.0));
    }
}
