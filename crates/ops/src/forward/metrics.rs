//! `/metrics` of the forwarder: counters per rule. The label `rule` comes from the configuration, so that no client chooses how
//! many time series there are.

use std::{
    fmt,
    sync::{Arc, atomic::AtomicBool},
};

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};
use turnpike_forward::{EndReason, RuleId, RuleSnapshot};

use crate::{
    exposition::{self, Common, Families},
    log_limit::LogCounts,
};

/// The exposition text of live snapshots, for the admin page.
pub(crate) fn page(
    snapshots: impl Fn() -> Vec<(RuleId, RuleSnapshot)> + Send + Sync + 'static,
    draining: Arc<AtomicBool>,
    log: Arc<LogCounts>,
) -> exposition::Page {
    let rules = move || snapshots().into_iter().map(|(id, snapshot)| (id.0, snapshot)).collect();
    exposition::page(move |common| Scrape { rules: rules(), common }, draining, log)
}

#[derive(Debug)]
struct Scrape {
    /// By name.
    rules: Vec<(String, RuleSnapshot)>,
    common: Common,
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Families { encoder, label: "rule", snapshots: &self.rules };
        page.gauge("forward_connections", "Connections and sessions that exist.", |rule| rule.active)?;
        page.each("forward_accepted", "Connections accepted and sessions begun.", |rule| rule.accepted)?;
        page.by("forward_ended", "Connections and sessions that ended, by reason.", "reason", |rule| {
            ALL_REASONS.iter().map(|(reason, name)| (*name, ended(rule, *reason))).collect()
        })?;
        page.by("forward_bytes", "Payload bytes forwarded.", "direction", |rule| {
            vec![("to_target", rule.to_target_bytes), ("to_client", rule.to_client_bytes)]
        })?;
        page.by("forward_datagrams", "Datagrams forwarded.", "direction", |rule| {
            vec![("to_target", rule.to_target_datagrams), ("to_client", rule.to_client_datagrams)]
        })?;
        page.each("forward_spliced_bytes", "Payload bytes that never entered user space.", |rule| {
            rule.spliced_bytes
        })?;
        page.each(
            "forward_dropped_datagrams",
            "Datagrams dropped: session limit, full queue, too long for the other side.",
            |rule| rule.dropped_datagrams,
        )?;
        page.each(
            "forward_limited_datagrams",
            "Datagrams dropped because their rule or session had moved its bytes a second.",
            |rule| rule.limited_datagrams,
        )?;
        page.each(
            "forward_pauses",
            "Times that a TCP connection stopped reading because its rule or it had moved its bytes a second.",
            |rule| rule.pauses,
        )?;
        self.common.encode(&mut page.encoder)
    }
}

/// Each has a series from the start, so that a first denial shows as an increase.
const ALL_REASONS: [(EndReason, &str); 15] = [
    (EndReason::Finished, "finished"),
    (EndReason::ClientReset, "client_reset"),
    (EndReason::TargetReset, "target_reset"),
    (EndReason::TargetDown, "target_down"),
    (EndReason::Idle, "idle"),
    (EndReason::ConnectFailed, "connect_failed"),
    (EndReason::Denied, "denied"),
    (EndReason::HalfClosed, "half_closed"),
    (EndReason::Limit, "limit"),
    (EndReason::Evicted, "evicted"),
    (EndReason::ClientLimit, "client_limit"),
    (EndReason::ClientRate, "client_rate"),
    (EndReason::BadProxyHeader, "bad_proxy_header"),
    (EndReason::UntrustedProxy, "untrusted_proxy"),
    (EndReason::Shutdown, "shutdown"),
];

fn ended(rule: &RuleSnapshot, reason: EndReason) -> u64 {
    rule.ended.iter().filter(|(found, _)| *found == reason).map(|(_, count)| count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_has_a_series_per_rule() {
        let snapshot = RuleSnapshot {
            active: 3,
            accepted: 10,
            ended: vec![(EndReason::Denied, 2)],
            to_target_bytes: 100,
            to_client_datagrams: 7,
            ..RuleSnapshot::default()
        };
        let id = RuleId("tcp://0.0.0.0:9000".to_owned());
        let page = page(
            move || vec![(id.clone(), snapshot.clone()), (RuleId("b".to_owned()), RuleSnapshot::default())],
            Arc::default(),
            Arc::new(LogCounts { lost: 4.into(), ends: 9.into(), ..LogCounts::default() }),
        );
        let text = page().expect("encodes");
        for line in [
            "turnpike_forward_connections{rule=\"tcp://0.0.0.0:9000\"} 3",
            "turnpike_forward_accepted_total{rule=\"tcp://0.0.0.0:9000\"} 10",
            "turnpike_forward_ended_total{rule=\"tcp://0.0.0.0:9000\",reason=\"denied\"} 2",
            "turnpike_forward_ended_total{rule=\"b\",reason=\"finished\"} 0",
            "turnpike_forward_ended_total{rule=\"b\",reason=\"untrusted_proxy\"} 0",
            "turnpike_forward_bytes_total{rule=\"tcp://0.0.0.0:9000\",direction=\"to_target\"} 100",
            "turnpike_forward_datagrams_total{rule=\"tcp://0.0.0.0:9000\",direction=\"to_client\"} 7",
            "turnpike_forward_spliced_bytes_total{rule=\"b\"} 0",
            "turnpike_forward_dropped_datagrams_total{rule=\"b\"} 0",
            "turnpike_log_lines_lost_total 4",
            "turnpike_log_lines_suppressed_total{kind=\"end\"} 9",
            "turnpike_draining 0.0",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
