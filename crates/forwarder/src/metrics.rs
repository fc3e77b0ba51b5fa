//! `/metrics` of the forwarder: counters per rule and per target address. The number of time series is
//! bounded: `rule` and `target` come from the configuration, and the addresses of a name are limited.

use std::{fmt, sync::Arc, time::Duration};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};
use turnpike_forward::{
    CONNECT_BOUNDS, EndReason, KernelSnapshot, RuleId, RuleSnapshot, RuleStanding, TargetFailure,
    TargetSnapshot,
};
use turnpike_process::{
    ControlStatus, MetricsPage,
    exposition::{self, MetricFamilies, ProcessMetrics, by_name, count, counter},
    kernel_path,
    log_queue::LogCounts,
};

pub(crate) fn page(
    rules: impl Fn() -> Vec<(RuleId, RuleSnapshot)> + Send + Sync + 'static,
    kernel: impl Fn() -> Option<KernelSnapshot> + Send + Sync + 'static,
    status: Arc<ControlStatus>,
    log: Arc<LogCounts>,
) -> MetricsPage {
    exposition::page(
        move |common| {
            let rules = rules().into_iter().map(|(id, snapshot)| (id.0, snapshot)).collect();
            ForwarderScrape { rules, kernel: kernel(), common }
        },
        status,
        log,
    )
}

#[derive(Debug)]
struct ForwarderScrape {
    rules: Vec<(String, RuleSnapshot)>,
    kernel: Option<KernelSnapshot>,
    common: ProcessMetrics,
}

impl Collector for ForwarderScrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = MetricFamilies { encoder, label: "rule", snapshots: &self.rules };
        page.gauge("forward_listening", "1 while the rule listens; 0 while it cannot be bound.", |rule| {
            u64::from(rule.standing == RuleStanding::Listening)
        })?;
        page.gauge("forward_connections", "Current connections and sessions.", |rule| rule.active)?;
        page.each("forward_accepted", "Connections accepted and sessions started.", |rule| rule.accepted)?;
        page.by("forward_ended", "Ended connections and sessions by reason.", "reason", |rule| {
            by_name(|reason| ended(rule, reason))
        })?;
        page.by("forward_bytes", "Payload bytes forwarded.", "direction", |rule| {
            both_ways([rule.to_target_bytes, rule.to_client_bytes])
        })?;
        page.by("forward_datagrams", "Datagrams forwarded.", "direction", |rule| {
            both_ways([rule.to_target_datagrams, rule.to_client_datagrams])
        })?;
        page.each("forward_spliced_bytes", "Payload bytes that never entered user space.", |rule| {
            rule.spliced_bytes
        })?;
        page.by(
            "kernel_datagrams",
            "Datagrams forwarded by the kernel, updated every second; included in forward_datagrams.",
            "direction",
            |rule| both_ways(rule.kernel.datagrams),
        )?;
        page.by(
            "kernel_bytes",
            "Payload bytes of datagrams and TCP forwarded by the kernel; included in forward_bytes.",
            "direction",
            |rule| both_ways(rule.kernel.bytes),
        )?;
        page.each(
            "forward_dropped_datagrams",
            "Datagrams dropped: session limit, full queue, or too long for the other side.",
            |rule| rule.dropped_datagrams,
        )?;
        page.each(
            "forward_limited_datagrams",
            "Datagrams dropped because of the bandwidth limit of their rule or session.",
            |rule| rule.limited_datagrams,
        )?;
        page.each(
            "forward_pauses",
            "Pauses in reading a TCP connection because of the bandwidth limit of the connection or its rule.",
            |rule| rule.pauses,
        )?;
        self.targets(&mut page.encoder)?;
        if let Some(kernel) = &self.kernel {
            kernel_path::encode(&mut page.encoder, kernel)?;
        }
        self.common.encode(&mut page.encoder)
    }
}

type Write<'w> = dyn FnMut(&[(&str, &str)], &TargetSnapshot) -> fmt::Result + 'w;

impl ForwarderScrape {
    fn targets(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut gauge = |name, help, value: fn(&TargetSnapshot) -> u64| {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            self.each(&mut |labels, target| metric.encode_family(&labels)?.encode_gauge(&value(target)))
        };
        gauge(
            "forward_target_up",
            "0 if the last health check, connection or UDP session of a target address failed; otherwise 1.",
            |target| u64::from(target.up),
        )?;
        gauge(
            "forward_target_connections",
            "Connections to and sessions with a target, open or being opened.",
            |target| target.counts.open,
        )?;
        let mut metric = counter(
            encoder,
            "forward_target_connected",
            "Connections accepted by a target, and UDP sessions started with it.",
        )?;
        self.each(&mut |labels, target| count(&mut metric, labels, target.counts.connected))?;
        let mut metric = counter(
            encoder,
            "forward_target_failed",
            "Failed connections to and sessions with a target, by reason.",
        )?;
        self.each(&mut |labels, target| {
            let failed = |failure: TargetFailure| target.counts.failed[failure as usize];
            by_name(failed).into_iter().try_for_each(|(reason, failed)| {
                count(&mut metric, &[labels, &[("reason", reason)]].concat(), failed)
            })
        })?;
        let mut metric = counter(encoder, "forward_target_bytes", "Payload bytes forwarded, by target.")?;
        self.each(&mut |labels, TargetSnapshot { counts, .. }| {
            count(&mut metric, &[labels, &[("direction", "to_target")]].concat(), counts.to_target_bytes)?;
            count(&mut metric, &[labels, &[("direction", "to_client")]].concat(), counts.to_client_bytes)
        })?;
        let mut metric = encoder.encode_descriptor(
            "forward_target_connect_seconds",
            "Time until a TCP target accepted the connection.",
            None,
            MetricType::Histogram,
        )?;
        self.each(&mut |labels, TargetSnapshot { counts, .. }| {
            let bounds = CONNECT_BOUNDS.iter().map(Duration::as_secs_f64).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts.connect_times).collect();
            let total = counts.connect_times.iter().sum();
            let sum = counts.connect_time.as_secs_f64();
            metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, total, &buckets, None)
        })
    }

    fn each(&self, write: &mut Write<'_>) -> fmt::Result {
        for (rule, snapshot) in &self.rules {
            for target in &snapshot.targets {
                let (name, address) = (target.target.to_string(), target.address.to_string());
                write(&[("rule", rule), ("target", &name), ("address", &address)], target)?;
            }
        }
        Ok(())
    }
}

fn both_ways([to_target, to_client]: [u64; 2]) -> Vec<(&'static str, u64)> {
    vec![("to_target", to_target), ("to_client", to_client)]
}

fn ended(rule: &RuleSnapshot, reason: EndReason) -> u64 {
    rule.ended.iter().filter(|(found, _)| *found == reason).map(|(_, count)| count).sum()
}

#[cfg(test)]
mod tests {
    use turnpike_forward::{ByKernel, Endpoint, Host, PortRange, Tally};

    use super::*;

    const PAGE: &str = include_str!("../../../docs/forward.md");

    fn target(port: u16) -> Endpoint {
        let host = Host::Name("db.example.org".to_owned());
        Endpoint { host, ports: PortRange { first: port, last: port }, weight: 3 }
    }

    #[test]
    fn every_counter_has_a_series_per_rule() {
        let snapshot = RuleSnapshot {
            standing: RuleStanding::Listening,
            active: 3,
            accepted: 10,
            ended: vec![(EndReason::Denied, 2)],
            to_target_bytes: 100,
            to_client_datagrams: 7,
            kernel: ByKernel { datagrams: [0, 5], bytes: [60, 0] },
            ..RuleSnapshot::default()
        };
        let id = RuleId("tcp://0.0.0.0:9000".to_owned());
        let page = page(
            move || {
                let other = (RuleId("b".to_owned()), RuleSnapshot::default());
                vec![(id.clone(), snapshot.clone()), other]
            },
            || None,
            Arc::default(),
            Arc::new(LogCounts { lost: 4.into(), ends: 9.into(), ..LogCounts::default() }),
        );
        let text = page();
        for line in [
            "turnpike_forward_listening{rule=\"tcp://0.0.0.0:9000\"} 1",
            "turnpike_forward_listening{rule=\"b\"} 0",
            "turnpike_forward_connections{rule=\"tcp://0.0.0.0:9000\"} 3",
            "turnpike_forward_accepted_total{rule=\"tcp://0.0.0.0:9000\"} 10",
            "turnpike_forward_ended_total{rule=\"tcp://0.0.0.0:9000\",reason=\"denied\"} 2",
            "turnpike_forward_ended_total{rule=\"b\",reason=\"finished\"} 0",
            "turnpike_forward_ended_total{rule=\"b\",reason=\"untrusted_proxy\"} 0",
            "turnpike_forward_bytes_total{rule=\"tcp://0.0.0.0:9000\",direction=\"to_target\"} 100",
            "turnpike_forward_datagrams_total{rule=\"tcp://0.0.0.0:9000\",direction=\"to_client\"} 7",
            "turnpike_forward_spliced_bytes_total{rule=\"b\"} 0",
            "turnpike_kernel_datagrams_total{rule=\"tcp://0.0.0.0:9000\",direction=\"to_client\"} 5",
            "turnpike_kernel_bytes_total{rule=\"tcp://0.0.0.0:9000\",direction=\"to_target\"} 60",
            "turnpike_forward_dropped_datagrams_total{rule=\"b\"} 0",
            "turnpike_log_lines_lost_total 4",
            "turnpike_log_lines_suppressed_total{kind=\"end\"} 9",
            "turnpike_draining 0.0",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn every_counter_of_a_target_has_a_series_per_address() {
        let mut counts = Tally::default();
        (counts.open, counts.connected, counts.failed) = (2, 5, [0, 3, 0, 0]);
        (counts.to_target_bytes, counts.to_client_bytes) = (10, 20);
        (counts.connect_times[0], counts.connect_times[2], counts.connect_times[15]) = (1, 3, 1);
        counts.connect_time = Duration::from_millis(12_500);
        let target = target(5432);
        let address = std::net::SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 5432)).into();
        let targets = vec![TargetSnapshot { target, address, up: true, counts }];
        let snapshot = RuleSnapshot { targets, ..RuleSnapshot::default() };
        let page = page(
            move || vec![(RuleId("r".to_owned()), snapshot.clone())],
            || None,
            Arc::default(),
            Arc::default(),
        );
        let text = page();
        let labels = "rule=\"r\",target=\"db.example.org:5432\",address=\"[::1]:5432\"";
        for line in [
            format!("turnpike_forward_target_up{{{labels}}} 1"),
            format!("turnpike_forward_target_connections{{{labels}}} 2"),
            format!("turnpike_forward_target_connected_total{{{labels}}} 5"),
            format!("turnpike_forward_target_failed_total{{{labels},reason=\"timeout\"}} 3"),
            format!("turnpike_forward_target_failed_total{{{labels},reason=\"refused\"}} 0"),
            format!("turnpike_forward_target_bytes_total{{{labels},direction=\"to_target\"}} 10"),
            format!("turnpike_forward_target_bytes_total{{{labels},direction=\"to_client\"}} 20"),
            format!("turnpike_forward_target_connect_seconds_sum{{{labels}}} 12.5"),
            format!("turnpike_forward_target_connect_seconds_count{{{labels}}} 5"),
            format!("turnpike_forward_target_connect_seconds_bucket{{le=\"0.0002\",{labels}}} 1"),
            format!("turnpike_forward_target_connect_seconds_bucket{{le=\"0.001\",{labels}}} 4"),
            format!("turnpike_forward_target_connect_seconds_bucket{{le=\"10.0\",{labels}}} 4"),
            format!("turnpike_forward_target_connect_seconds_bucket{{le=\"+Inf\",{labels}}} 5"),
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
    }

    /// Name of a sample in the documentation, where a histogram's three series share one name.
    fn of_histogram(sample: &str) -> &str {
        let suffixes = ["_seconds_bucket", "_seconds_sum", "_seconds_count"];
        let found = suffixes.iter().find(|suffix| sample.ends_with(**suffix));
        found.map_or(sample, |suffix| &sample[..sample.len() - suffix.len() + "_seconds".len()])
    }

    #[test]
    fn the_page_documents_exactly_the_metrics() {
        let target = TargetSnapshot {
            target: target(80),
            address: std::net::SocketAddr::from(([10, 0, 0, 2], 80)).into(),
            up: true,
            counts: Tally::default(),
        };
        let rule = RuleSnapshot { targets: vec![target], ..Default::default() };
        let page = page(
            move || vec![(RuleId("r".to_owned()), rule.clone())],
            || Some(KernelSnapshot::default()),
            Arc::default(),
            Arc::default(),
        );
        let text = page();
        let samples: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split(['{', ' ']).next())
            .map(of_histogram)
            .collect();
        let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let named: Vec<&str> = PAGE.split(word).filter(|word| word.starts_with("turnpike_")).collect();
        for sample in &samples {
            assert!(named.contains(sample), "docs/forward.md does not describe {sample}");
        }
        for name in &named {
            assert!(samples.contains(name), "docs/forward.md describes {name}, which is not a metric");
        }
        let ended = text.lines().filter(|line| line.starts_with("turnpike_forward_ended_total{"));
        for reason in ended.filter_map(|line| line.split("reason=\"").nth(1)?.split('"').next()) {
            assert!(
                PAGE.contains(&format!("`{reason}`")),
                "docs/forward.md does not describe the reason {reason}"
            );
        }
    }
}
