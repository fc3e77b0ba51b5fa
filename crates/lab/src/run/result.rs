//! Conversion of workload results to metrics.

use std::collections::BTreeMap;

use serde_json::Value;
use turnpike_measure::LoadReport;

use crate::{
    experiment::{ResultFormat, WorkloadSpec},
    metric,
    record::{LatencySummary, Round},
};

const BROKEN: [&str; 3] = ["connection_lost", "connect_failed", "refresh_failed"];

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct WorkloadResult {
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) latency: Option<LatencySummary>,
    pub(crate) size: Option<f64>,
    pub(crate) sent: Option<u64>,
    pub(crate) received: Option<u64>,
    pub(crate) clients: Option<u64>,
    pub(crate) notes: Vec<String>,
}

/// Parses a workload's result. The error is a lower-case fragment, which the caller embeds in a sentence.
pub(crate) fn read(workload: &WorkloadSpec, text: &str) -> Result<WorkloadResult, String> {
    let mut outcome = match workload.format {
        ResultFormat::None => return Ok(WorkloadResult::default()),
        ResultFormat::Turnpike => turnpike(text)?,
        ResultFormat::Iperf3 => iperf3(&json(text)?)?,
    };
    if !workload.fields.is_empty() {
        outcome.take_fields(&json(text)?, &workload.fields)?;
    }
    Ok(outcome)
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("the workload's result is not JSON: {error}"))
}

impl WorkloadResult {
    fn take_fields(&mut self, value: &Value, fields: &BTreeMap<String, String>) -> Result<(), String> {
        for (name, path) in fields {
            let number = at(value, path)
                .ok_or_else(|| format!("the workload's result has no number at \"{path}\""))?;
            self.metrics.insert(name.clone(), number);
        }
        self.sent = self.sent.or(count(self.metrics.get("generator_sent").copied()));
        self.received = self.received.or(count(self.metrics.get("generator_received").copied()));
        Ok(())
    }

    /// Adds the result's figures to a round. The kernel's count of delivered datagrams takes precedence over the workload's.
    pub(crate) fn complete(self, elapsed: f64, round: &mut Round) {
        let counted = round.metrics.get(metric::DELIVERED).copied();
        for (name, value) in self.metrics {
            if !(counted.is_some() && name == metric::DELIVERED_PPS) {
                round.metrics.insert(name, value);
            }
        }
        if counted.is_none()
            && let Some(rate) = round.metrics.get(metric::DELIVERED_PPS).copied()
        {
            round.metrics.insert(metric::DELIVERED.to_owned(), rate * elapsed);
        }
        // Payload bytes of the counted datagrams, or else the workload's own figure.
        let bytes = match (counted, self.size) {
            (Some(datagrams), Some(size)) => Some(datagrams * size),
            _ => round.metrics.get("delivered_bps").map(|rate| rate / 8.0 * elapsed),
        };
        if let Some(bytes) = bytes {
            round.metrics.insert(metric::DELIVERED_BYTES.to_owned(), bytes);
            round.metrics.insert("delivered_bps".to_owned(), bytes * 8.0 / elapsed);
        }
        round.latency = self.latency;
        round.notes.extend(self.notes);
        metric::derive(&mut round.metrics);
    }
}

fn turnpike(text: &str) -> Result<WorkloadResult, String> {
    let report: LoadReport = serde_json::from_str(text).map_err(|error| {
        format!("the workload's result does not have the format of our generators: {error}")
    })?;
    let percent = |count: u64| if report.sent == 0 { 0.0 } else { count as f64 * 100.0 / report.sent as f64 };
    let broken = BROKEN.iter().filter_map(|name| report.errors.get(*name)).sum();
    let mut metrics: BTreeMap<String, f64> = [
        (metric::OFFERED_PPS, report.send_pps),
        (metric::DELIVERED_PPS, report.recv_pps),
        ("delivered_bps", report.recv_bps),
        ("jitter_us", report.jitter_us),
        (metric::LATE_P99_US, report.late_us.p99 as f64),
        (metric::LOSS_PERCENT, report.loss_percent()),
        (metric::BROKEN_PERCENT, percent(broken)),
        ("generator_sent", report.sent as f64),
        ("generator_received", report.received as f64),
        ("generator_duplicated", report.duplicated as f64),
        ("generator_reordered", report.reordered as f64),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    metrics.extend(report.extra);
    let latency = (report.rtt_us.max > 0).then(|| LatencySummary::from(report.rtt_us));
    metrics.extend(latency.iter().flat_map(LatencySummary::metrics));
    let errors = report.errors.iter().filter(|(_, count)| **count > 0);
    let errors = errors.map(|(name, count)| format!("generator: {name} {count}"));
    let notes = report.notes.iter().map(|note| format!("generator: {note}"));
    Ok(WorkloadResult {
        metrics,
        latency,
        size: Some(report.size as f64),
        sent: Some(report.sent),
        received: Some(report.received),
        clients: Some(report.clients),
        notes: errors.chain(notes).collect(),
    })
}

/// Reads `iperf3 --json` for TCP or UDP, without the seconds omitted by `-O`.
fn iperf3(value: &Value) -> Result<WorkloadResult, String> {
    if let Some(error) = value.get("error").and_then(Value::as_str) {
        return Err(format!("iperf3: {error}"));
    }
    let number = |path: &str| at(value, path);
    let mut outcome = WorkloadResult::default();
    let mut put =
        |name: &str, value: Option<f64>| outcome.metrics.extend(value.map(|value| (name.to_owned(), value)));
    if number("end.sum.lost_percent").is_some() {
        let packets = number("end.sum.packets").unwrap_or(0.0);
        let lost = number("end.sum.lost_packets").unwrap_or(0.0);
        // iperf3 3.12 miscounts losses when seconds are omitted (-O), up to millions of percent.
        if !(0.0..=packets).contains(&lost) {
            return Err(format!("iperf3 reports {lost} of {packets} datagrams as lost: do not use --omit"));
        }
        let seconds = number("end.sum.seconds").filter(|seconds| *seconds > 0.0);
        let received = packets - lost;
        put("loss_percent", Some(if packets > 0.0 { lost * 100.0 / packets } else { 0.0 }));
        put(metric::OFFERED_PPS, seconds.map(|seconds| packets / seconds));
        put(metric::DELIVERED_PPS, seconds.map(|seconds| received / seconds));
        put("jitter_us", number("end.sum.jitter_ms").map(|jitter| jitter * 1e3));
        let size = number("start.test_start.blksize");
        let rate = seconds.zip(size).map(|(seconds, size)| received * size * 8.0 / seconds);
        put("delivered_bps", rate);
        outcome.size = size;
        outcome.sent = count(Some(packets));
        outcome.received = count(Some(received));
    } else {
        let rate = number("end.sum_received.bits_per_second");
        put("delivered_bps", Some(rate.ok_or("iperf3's result has no total of received data")?));
        put("retransmits", number("end.sum_sent.retransmits"));
    }
    Ok(outcome)
}

fn at(value: &Value, path: &str) -> Option<f64> {
    path.split('.')
        .try_fold(value, |value, key| match value {
            Value::Array(items) => items.get(key.parse::<usize>().ok()?),
            other => other.get(key),
        })?
        .as_f64()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a datagram count; the filter above the cast checks the range"
)]
fn count(value: Option<f64>) -> Option<u64> {
    value.filter(|value| (0.0..9e15).contains(value)).map(|value| value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(format: &str) -> WorkloadSpec {
        toml::from_str(&format!("command = 'x'\nformat = '{format}'")).unwrap()
    }

    fn with_fields(format: &str, fields: &str) -> WorkloadSpec {
        toml::from_str(&format!("command = 'x'\nformat = '{format}'\nfields = {fields}")).unwrap()
    }

    const OURS: &str = r#"{"sent":1000,"received":990,"lost":10,"duplicated":0,"reordered":2,"send_pps":100.0,
        "recv_pps":99.0,"recv_bps":95040.0,"rtt_us":{"min":1,"p50":2,"p90":3,"p99":4,"p999":5,"max":6},"jitter_us":0.5,
        "late_us":{"p50":1,"p99":1500,"max":3000},"clients":4,"size":120,"rate":100.0,"duration_s":10.0,
        "datapath":"gso","errors":{"send_would_block":3,"connect_failed":20,"none":0},"connections_per_s":7.5}"#;

    #[test]
    fn results_from_our_generators_become_metrics() {
        let outcome = read(&workload("turnpike"), OURS).unwrap();
        assert_eq!(outcome.metrics["offered_pps"], 100.0);
        assert_eq!(outcome.metrics["loss_percent"], 1.0);
        assert_eq!(outcome.metrics[metric::LATE_P99_US], 1500.0);
        assert_eq!(outcome.metrics["latency_p999_us"], 5.0);
        assert_eq!(outcome.metrics["connections_per_s"], 7.5);
        assert_eq!((outcome.sent, outcome.received), (Some(1000), Some(990)));
        assert_eq!((outcome.metrics[metric::BROKEN_PERCENT], outcome.clients), (2.0, Some(4)));
        assert_eq!(outcome.notes, ["generator: connect_failed 20", "generator: send_would_block 3"]);
        assert!(
            read(&workload("turnpike"), &OURS.replace("\"sent\":1000,", "")).unwrap_err().contains("`sent`")
        );
    }

    #[test]
    fn fields_rename_figures_of_our_generators() {
        let named = with_fields("turnpike", "{ allocations_per_s = 'recv_pps' }");
        let outcome = read(&named, OURS).unwrap();
        assert_eq!((outcome.metrics["allocations_per_s"], outcome.metrics["offered_pps"]), (99.0, 100.0));
    }

    #[test]
    fn counted_datagrams_take_precedence_over_reported_ones() {
        let mut round = Round::new(0, "a", 0);
        round.metrics.insert(metric::DELIVERED.to_owned(), 500.0);
        round.metrics.insert(metric::DELIVERED_PPS.to_owned(), 250.0);
        read(&workload("turnpike"), OURS).unwrap().complete(2.0, &mut round);
        assert_eq!(round.metrics[metric::DELIVERED_PPS], 250.0);
        assert_eq!(round.metrics[metric::DELIVERED_BYTES], 500.0 * 120.0);
        assert_eq!(round.metrics["delivered_bps"], 500.0 * 120.0 * 8.0 / 2.0);
    }

    #[test]
    fn the_report_is_used_if_there_are_no_counters() {
        let mut round = Round::new(0, "a", 0);
        read(&workload("turnpike"), OURS).unwrap().complete(2.0, &mut round);
        assert_eq!(round.metrics[metric::DELIVERED], 198.0);
        assert_eq!(round.metrics[metric::DELIVERED_BYTES], 95040.0 / 8.0 * 2.0);
    }

    #[test]
    fn iperf3_results_are_read_for_tcp_udp_and_errors() {
        let tcp = r#"{"end":{"sum_sent":{"retransmits":4},"sum_received":{"bits_per_second":8e9}}}"#;
        assert_eq!(read(&workload("iperf3"), tcp).unwrap().metrics["delivered_bps"], 8e9);
        let udp = r#"{"start":{"test_start":{"blksize":1200}},"end":{"sum":{"lost_percent":10.0,"packets":1000,
            "lost_packets":100,"seconds":2.0,"jitter_ms":0.25}}}"#;
        let outcome = read(&workload("iperf3"), udp).unwrap();
        assert_eq!(outcome.metrics[metric::DELIVERED_PPS], 450.0);
        assert_eq!(outcome.metrics["delivered_bps"], 450.0 * 9600.0);
        assert_eq!(outcome.metrics["jitter_us"], 250.0);
        let wrong = udp.replace("\"lost_packets\":100", "\"lost_packets\":-7");
        assert!(read(&workload("iperf3"), &wrong).unwrap_err().contains("--omit"));
        let failed = read(&workload("iperf3"), r#"{"error":"unable to connect"}"#);
        assert_eq!(failed.unwrap_err(), "iperf3: unable to connect");
    }

    #[test]
    fn fields_may_be_inside_lists() {
        let value = json(r#"{"a":[{},{"rate":12.5}]}"#).unwrap();
        assert_eq!((at(&value, "a.1.rate"), at(&value, "a.2.rate")), (Some(12.5), None));
        let absent = with_fields("turnpike", "{ allocations_per_s = 'a.1.rate' }");
        assert!(read(&absent, OURS).unwrap_err().contains("a.1.rate"));
    }
}
