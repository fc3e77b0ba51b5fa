//! Result of a run: one JSON object with the same shape for every generator.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::OfferedRate;

/// Result of a run. All counts except `errors` exclude the warm-up.
///
/// A datagram is counted at the time at which it was *due*, no matter how late it was sent or returned, so
/// `sent = received + lost` holds exactly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Datagrams, requests or allocations that the kernel accepted.
    pub sent: u64,
    /// Datagrams that were returned, excluding duplicates.
    pub received: u64,
    pub lost: u64,
    pub duplicated: u64,
    pub reordered: u64,
    pub send_pps: f64,
    pub recv_pps: f64,
    /// Returned payload in bits per second.
    pub recv_bps: f64,
    pub rtt_us: Percentiles,
    /// Round-trip interarrival jitter in microseconds (RFC 3550 section 6.4.1), mean over all clients.
    pub jitter_us: f64,
    /// Delay caused by the generator itself, in microseconds from the due time to the send call.
    pub late_us: Lateness,
    pub clients: u64,
    /// Payload size in bytes.
    pub size: u64,
    pub rate: OfferedRate,
    pub duration_s: f64,
    /// I/O path used for UDP; for streams, the transport.
    pub datapath: String,
    /// Transport between client and TURN server: `udp`, `tcp`, `tls` or `dtls`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// If present, the counts above cover both directions, and `rtt_us` is one-way latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileReport>,
    pub errors: BTreeMap<String, u64>,
    /// Caveats about these figures, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Mode-specific figures by name; integers are written without a fraction.
    #[serde(flatten, serialize_with = "write_figures", deserialize_with = "read_figures")]
    pub extra: BTreeMap<String, f64>,
}

impl LoadReport {
    pub fn loss_percent(&self) -> f64 {
        percent(self.lost, self.sent)
    }

    pub fn add_figures<const N: usize>(&mut self, figures: [(&str, f64); N]) {
        self.extra.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    }
}

fn write_figures<S: Serializer>(figures: &BTreeMap<String, f64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(figures.iter().map(|(name, value)| (name, Figure(*value))))
}

fn read_figures<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Said {
        Figure(f64),
        Else(de::IgnoredAny),
    }
    let said = BTreeMap::<String, Said>::deserialize(deserializer)?;
    let figure = |(name, said)| match said {
        Said::Figure(figure) => Some((name, figure)),
        Said::Else(de::IgnoredAny) => None,
    };
    Ok(said.into_iter().filter_map(figure).collect())
}

struct Figure(f64);

impl Serialize for Figure {
    #[expect(clippy::cast_possible_truncation, reason = "whole, and in the range in which f64 is exact")]
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        /// Value up to which f64 represents every integer: 2^53.
        const EXACT: f64 = 9_007_199_254_740_992.0;
        if self.0.fract() == 0.0 && self.0.abs() <= EXACT {
            serializer.serialize_i64(self.0 as i64)
        } else {
            serializer.serialize_f64(self.0)
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Percentiles {
    pub min: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

/// Lateness (99th percentile, microseconds) above which the offered load differs too much from the requested one: dozens of datagrams
/// become due in 1 ms, and are then sent in one burst.
pub const LATE_P99_US: u64 = 1_000;

/// Delay between due time and send, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lateness {
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    ToPeer,
    ToClient,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::ToPeer => "to peer",
            Self::ToClient => "to client",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileReport {
    pub name: String,
    pub seed: u64,
    pub to_peer: Leg,
    pub to_client: Leg,
    pub streams: Vec<StreamReport>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamReport {
    pub name: String,
    pub direction: Direction,
    #[serde(flatten)]
    pub leg: Leg,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Leg {
    /// Packets that were due and accepted by the kernel.
    pub sent: u64,
    pub received: u64,
    /// `sent - received`, including packets that the generator's kernel rejected.
    pub lost: u64,
    pub duplicated: u64,
    pub reordered: u64,
    pub send_pps: f64,
    pub recv_pps: f64,
    /// Received payload in bits per second.
    pub recv_bps: f64,
    /// Microseconds from the due time to the arrival at the other end.
    pub latency_us: Percentiles,
    /// Interarrival jitter in microseconds (RFC 3550 section 6.4.1), mean over all flows.
    pub jitter_us: f64,
}

impl Leg {
    pub fn loss_percent(&self) -> f64 {
        percent(self.lost, self.sent)
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg() -> Leg {
        Leg {
            sent: 500,
            received: 495,
            lost: 5,
            duplicated: 0,
            reordered: 0,
            send_pps: 50.0,
            recv_pps: 49.5,
            recv_bps: 100.0,
            latency_us: Percentiles::default(),
            jitter_us: 1.5,
        }
    }

    fn report() -> LoadReport {
        LoadReport {
            sent: 1_000,
            received: 990,
            lost: 10,
            duplicated: 1,
            reordered: 2,
            send_pps: 100.0,
            recv_pps: 99.0,
            recv_bps: 99.0 * 120.0 * 8.0,
            rtt_us: Percentiles { min: 1, p50: 2, p90: 3, p99: 4, p999: 5, max: 6 },
            jitter_us: 0.5,
            late_us: Lateness { p50: 1, p99: 2, max: 3 },
            clients: 4,
            size: 120,
            rate: OfferedRate::Pps(100.0),
            duration_s: 10.0,
            datapath: "gso".to_owned(),
            transport: Some("udp".to_owned()),
            relay: None,
            profile: None,
            errors: BTreeMap::from([("send_would_block".to_owned(), 3)]),
            notes: Vec::new(),
            extra: BTreeMap::from([
                ("amplification".to_owned(), 0.25),
                ("full_handshakes".to_owned(), 12.0),
                ("huge".to_owned(), 1e300),
            ]),
        }
    }

    #[test]
    fn json_uses_the_documented_names() {
        let json: serde_json::Value = serde_json::to_value(report()).unwrap();
        for name in [
            "sent",
            "received",
            "lost",
            "duplicated",
            "reordered",
            "send_pps",
            "recv_pps",
            "recv_bps",
            "rtt_us",
            "jitter_us",
            "late_us",
            "clients",
            "size",
            "rate",
            "duration_s",
            "datapath",
            "errors",
        ] {
            assert!(json.get(name).is_some(), "{name} is missing");
        }
        for name in ["min", "p50", "p90", "p99", "p999", "max"] {
            assert!(json["rtt_us"].get(name).is_some(), "rtt_us.{name} is missing");
        }
        for name in ["p50", "p99", "max"] {
            assert!(json["late_us"].get(name).is_some(), "late_us.{name} is missing");
        }
        assert_eq!(json["amplification"], 0.25);
        assert_eq!(json["full_handshakes"].as_u64(), Some(12));
        assert_eq!(json["huge"], 1e300);
        assert_eq!(json["transport"], "udp");
        assert!(json.get("relay").is_none());
        assert!(json.get("notes").is_none() && json.get("profile").is_none());
    }

    #[test]
    fn a_report_survives_a_json_round_trip() {
        let text = serde_json::to_string(&report()).unwrap();
        assert_eq!(serde_json::from_str::<LoadReport>(&text).unwrap(), report());
        let streams =
            vec![StreamReport { name: "audio".to_owned(), direction: Direction::ToClient, leg: leg() }];
        let profile =
            ProfileReport { name: "call".to_owned(), seed: 7, to_peer: leg(), to_client: leg(), streams };
        let shaped = LoadReport { profile: Some(profile), ..report() };
        let json = serde_json::to_value(&shaped).unwrap();
        assert_eq!(json["profile"]["streams"][0]["direction"], "to_client");
        assert_eq!(json["profile"]["streams"][0]["lost"], 5);
        assert_eq!(json["profile"]["to_peer"]["latency_us"]["p99"], 0);
        assert_eq!(serde_json::from_value::<LoadReport>(json).unwrap(), shaped);
        let more = text.replacen('{', r#"{"seats":[1,2],"by_flow":{"p50":3},"#, 1);
        assert_eq!(serde_json::from_str::<LoadReport>(&more).unwrap(), report());
    }

    #[test]
    fn loss_is_a_percentage_of_sent_datagrams() {
        assert_eq!(report().loss_percent(), 1.0);
        assert_eq!(LoadReport { sent: 0, lost: 0, ..report() }.loss_percent(), 0.0);
    }
}
