//! What a workload reports, whatever its format, as metrics.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    experiment::{Format, Workload},
    metric,
    record::{Latency, Round},
};

/// A workload's own account of its own window.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) latency: Option<Latency>,
    /// Bytes of a datagram, where there is one size.
    pub(crate) size: Option<f64>,
    /// Datagrams sent and received.
    pub(crate) sent: Option<u64>,
    pub(crate) received: Option<u64>,
    pub(crate) notes: Vec<String>,
}

/// Reads a result; an error is a sentence part.
pub(crate) fn read(workload: &Workload, text: &str) -> Result<Outcome, String> {
    if workload.format == Format::None {
        return Ok(Outcome::default());
    }
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("the workload's result is no JSON: {error}"))?;
    match workload.format {
        Format::Turnpike => turnpike(&value),
        Format::Iperf3 => iperf3(&value),
        Format::Json | Format::None => by_fields(&value, &workload.fields),
    }
}

impl Outcome {
    /// Adds what the workload says to what the counters said in the window of `elapsed` seconds. Delivered datagrams
    /// are the counters', where these count.
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
        // One way of counting for both: payload of the datagrams counted, or what the workload saw arrive.
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

/// The contract of DESIGN.md.
fn turnpike(value: &Value) -> Result<Outcome, String> {
    let number = |path: &str| at(value, path);
    let sent = number("sent").ok_or("the workload's result has no \"sent\": is it one of our generators?")?;
    let mut metrics = BTreeMap::new();
    for (name, path) in [
        (metric::OFFERED_PPS, "send_pps"),
        (metric::DELIVERED_PPS, "recv_pps"),
        ("delivered_bps", "recv_bps"),
        ("jitter_us", "jitter_us"),
        (metric::LATE_P99_US, "late_us.p99"),
        ("generator_sent", "sent"),
        ("generator_received", "received"),
        ("generator_duplicated", "duplicated"),
        ("generator_reordered", "reordered"),
    ] {
        metrics.extend(number(path).map(|value| (name.to_owned(), value)));
    }
    // Figures that only one mode has keep their names.
    for listed in metric::METRICS {
        metrics.extend(number(listed.name).map(|value| (listed.name.to_owned(), value)));
    }
    if let Some(lost) = number("lost") {
        metrics.insert("loss_percent".to_owned(), if sent > 0.0 { lost * 100.0 / sent } else { 0.0 });
    }
    let latency = latency(value.get("rtt_us"));
    if let Some(latency) = &latency {
        put_latency(latency, &mut metrics);
    }
    let errors = value.get("errors").and_then(Value::as_object).into_iter().flatten();
    let errors = errors
        .filter(|(_, count)| count.as_f64() != Some(0.0))
        .map(|(name, count)| format!("generator: {name} {count}"));
    let notes = value.get("notes").and_then(Value::as_array).into_iter().flatten();
    let notes = notes.filter_map(Value::as_str).map(|note| format!("generator: {note}"));
    Ok(Outcome {
        metrics,
        latency,
        size: number("size"),
        sent: count(number("sent")),
        received: count(number("received")),
        notes: errors.chain(notes).collect(),
    })
}

fn latency(value: Option<&Value>) -> Option<Latency> {
    let number = |name: &str| value?.get(name)?.as_f64();
    Some(Latency {
        min: number("min")?,
        p50: number("p50")?,
        p90: number("p90")?,
        p99: number("p99")?,
        p999: number("p999")?,
        max: number("max")?,
        histogram: Vec::new(),
    })
    .filter(|latency| latency.max > 0.0)
}

fn put_latency(latency: &Latency, metrics: &mut BTreeMap<String, f64>) {
    for (name, value) in [
        ("latency_p50_us", latency.p50),
        ("latency_p90_us", latency.p90),
        ("latency_p99_us", latency.p99),
        ("latency_p999_us", latency.p999),
        ("latency_max_us", latency.max),
    ] {
        metrics.insert(name.to_owned(), value);
    }
}

/// `iperf3 --json`, TCP or UDP, without the seconds omitted by `-O`.
fn iperf3(value: &Value) -> Result<Outcome, String> {
    if let Some(error) = value.get("error").and_then(Value::as_str) {
        return Err(format!("iperf3: {error}"));
    }
    let number = |path: &str| at(value, path);
    let mut outcome = Outcome::default();
    let mut put =
        |name: &str, value: Option<f64>| outcome.metrics.extend(value.map(|value| (name.to_owned(), value)));
    if number("end.sum.lost_percent").is_some() {
        let packets = number("end.sum.packets").unwrap_or(0.0);
        let lost = number("end.sum.lost_packets").unwrap_or(0.0);
        // iperf3 3.12 miscounts what is lost when seconds are omitted (-O), up to millions of percent.
        if !(0.0..=packets).contains(&lost) {
            return Err(format!(
                "iperf3 says that {lost} of {packets} datagrams were lost: leave out --omit"
            ));
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
        put("delivered_bps", Some(rate.ok_or("iperf3's result has no sum of what was received")?));
        put("retransmits", number("end.sum_sent.retransmits"));
    }
    Ok(outcome)
}

fn by_fields(value: &Value, fields: &BTreeMap<String, String>) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    for (name, path) in fields {
        let value =
            at(value, path).ok_or_else(|| format!("the workload's result has no number at \"{path}\""))?;
        outcome.metrics.insert(name.clone(), value);
    }
    outcome.sent = count(outcome.metrics.get("generator_sent").copied());
    outcome.received = count(outcome.metrics.get("generator_received").copied());
    Ok(outcome)
}

/// The number at a path such as `end.streams.0.bytes`.
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
    clippy::cast_sign_loss,
    reason = "a count of datagrams, checked to be one"
)]
fn count(value: Option<f64>) -> Option<u64> {
    value.filter(|value| (0.0..9e15).contains(value)).map(|value| value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(format: &str) -> Workload {
        toml::from_str(&format!(
            "command = 'x'\nformat = '{format}'\nfields = {{ transactions_per_s = 'a.1.rate' }}"
        ))
        .unwrap()
    }

    const OURS: &str = r#"{"sent":1000,"received":990,"lost":10,"duplicated":0,"reordered":2,"send_pps":100.0,
        "recv_pps":99.0,"recv_bps":95040.0,"rtt_us":{"min":1,"p50":2,"p90":3,"p99":4,"p999":5,"max":6},"jitter_us":0.5,
        "late_us":{"p50":1,"p99":1500,"max":3000},"clients":4,"size":120,"rate":100.0,"duration_s":10.0,
        "datapath":"gso","errors":{"send_would_block":3,"none":0},"connections_per_s":7.5}"#;

    #[test]
    fn our_generators_contract_becomes_metrics() {
        let outcome = read(&workload("turnpike"), OURS).unwrap();
        assert_eq!(outcome.metrics["offered_pps"], 100.0);
        assert_eq!(outcome.metrics["loss_percent"], 1.0);
        assert_eq!(outcome.metrics[metric::LATE_P99_US], 1500.0);
        assert_eq!(outcome.metrics["latency_p999_us"], 5.0);
        assert_eq!(outcome.metrics["connections_per_s"], 7.5);
        assert_eq!((outcome.sent, outcome.received), (Some(1000), Some(990)));
        assert_eq!(outcome.notes, ["generator: send_would_block 3"]);
    }

    #[test]
    fn counted_datagrams_beat_reported_ones() {
        let mut round = Round::new(0, "a", 0);
        round.metrics.insert(metric::DELIVERED.to_owned(), 500.0);
        round.metrics.insert(metric::DELIVERED_PPS.to_owned(), 250.0);
        read(&workload("turnpike"), OURS).unwrap().complete(2.0, &mut round);
        assert_eq!(round.metrics[metric::DELIVERED_PPS], 250.0);
        assert_eq!(round.metrics[metric::DELIVERED_BYTES], 500.0 * 120.0);
        assert_eq!(round.metrics["delivered_bps"], 500.0 * 120.0 * 8.0 / 2.0);
    }

    #[test]
    fn without_counters_the_report_counts_over_our_window() {
        let mut round = Round::new(0, "a", 0);
        read(&workload("turnpike"), OURS).unwrap().complete(2.0, &mut round);
        assert_eq!(round.metrics[metric::DELIVERED], 198.0);
        assert_eq!(round.metrics[metric::DELIVERED_BYTES], 95040.0 / 8.0 * 2.0);
    }

    #[test]
    fn iperf3_tcp_udp_and_failure_are_told_apart() {
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
    fn any_json_is_read_by_its_fields() {
        let outcome = read(&workload("json"), r#"{"a":[{},{"rate":12.5}]}"#).unwrap();
        assert_eq!(outcome.metrics["transactions_per_s"], 12.5);
        assert!(read(&workload("json"), r#"{"a":[]}"#).unwrap_err().contains("a.1.rate"));
        assert!(read(&workload("json"), "nothing").is_err());
    }
}
