//! Report of a probe: facts for programs, and findings with a level and a remedy for people.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::Serialize;

use crate::attack::facts::AttackFacts;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingLevel {
    Ok,
    Note,
    /// Some clients will fail, or the server may be abused.
    Warn,
    /// The server is broken or open to abuse.
    Bad,
}

impl FromStr for FindingLevel {
    type Err = String;

    /// Parses a threshold: `warn` or `bad`.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "warn" => Ok(Self::Warn),
            "bad" => Ok(Self::Bad),
            _ => Err(format!("unknown value {name:?}: expected warn or bad")),
        }
    }
}

impl fmt::Display for FindingLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Bad => "bad",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: FindingLevel,
    /// Subject of the finding: a transport, `dns`, `certificate`, `credentials`, `relay`, `features`, `nat` or
    /// `peers`.
    pub area: String,
    /// The finding, in one sentence.
    pub what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TransportFacts {
    pub address: String,
    /// True if a Binding request was answered.
    pub reachable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Milliseconds from the first packet to the open connection, handshake included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Key exchange group of TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpn: Option<String>,
    /// Round trips of Bindings answered after one transmission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<RoundTrip>,
    /// Client address as seen by the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<CertificateFacts>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RoundTrip {
    pub min: u64,
    pub median: u64,
    pub asked: usize,
    /// Binding requests answered after one transmission.
    pub answered: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CertificateFacts {
    pub subject: String,
    pub issuer: String,
    pub names: Vec<String>,
    pub not_before: String,
    pub not_after: String,
    /// Whole days until the certificate expires; negative once it has expired.
    pub days_left: i64,
    /// The renewal is overdue.
    #[serde(skip)]
    pub ends_soon: bool,
    /// Parse error; if set, all fields above are empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
    /// Number of certificates that the server sent, leaf included (for DTLS, only the leaf is known).
    pub chain: usize,
    pub verifies: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distrust: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NatFacts {
    /// `none`, `endpoint-independent`, `address-dependent`, `address-and-port-dependent`, or `unknown`.
    pub mapping: String,
    /// `endpoint-independent`, `address-dependent`, `address-and-port-dependent`, or `unknown`.
    pub filtering: String,
    pub other_address: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeerFacts {
    pub peer: String,
    pub kind: String,
    /// `None` (null) if the server refused for an unrelated reason, such as lack of room.
    pub allowed: Option<bool>,
    pub answer: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProbeReport {
    pub server: String,
    /// True if the server works with this URI and credential.
    pub usable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub software: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// Servers by transport, as HOST:PORT, found through NAPTR and SRV records (RFC 5928).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub records: BTreeMap<String, Vec<String>>,
    pub transports: BTreeMap<String, TransportFacts>,
    /// Results for port 443 by transport, if the URI leads to a different port.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub port_443: BTreeMap<String, TransportFacts>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub other_family: BTreeMap<String, TransportFacts>,
    /// Absent if no credential was given or tested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_accepted: Option<bool>,
    pub relayed: Vec<String>,
    /// Features by name; untested ones are absent.
    pub features: BTreeMap<String, bool>,
    /// Absent if the server has no OTHER-ADDRESS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat: Option<NatFacts>,
    pub peers: Vec<PeerFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attack: Option<AttackFacts>,
    pub findings: Vec<Finding>,
}

impl ProbeReport {
    pub fn worst(&self) -> FindingLevel {
        self.findings.iter().map(|finding| finding.level).max().unwrap_or(FindingLevel::Ok)
    }

    pub(crate) fn line(&mut self, level: FindingLevel, area: impl fmt::Display, what: impl Into<String>) {
        self.findings.push(Finding { level, area: area.to_string(), what: what.into(), remedy: None });
    }

    pub(crate) fn ok(&mut self, area: impl fmt::Display, what: impl Into<String>) {
        self.line(FindingLevel::Ok, area, what);
    }

    pub(crate) fn note(&mut self, area: impl fmt::Display, what: impl Into<String>) {
        self.line(FindingLevel::Note, area, what);
    }

    pub(crate) fn warn(
        &mut self,
        area: impl fmt::Display,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.advise(FindingLevel::Warn, area, what, remedy);
    }

    pub(crate) fn bad(
        &mut self,
        area: impl fmt::Display,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.advise(FindingLevel::Bad, area, what, remedy);
    }

    pub(crate) fn advise(
        &mut self,
        level: FindingLevel,
        area: impl fmt::Display,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.line(level, area, what);
        if let Some(line) = self.findings.last_mut() {
            line.remedy = Some(remedy.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_is_the_verdict() {
        let mut report = ProbeReport::default();
        assert_eq!(report.worst(), FindingLevel::Ok);
        report.note("nat", "a");
        assert!(report.worst() < FindingLevel::Warn);
        report.bad("peers", "b", "c");
        report.line(FindingLevel::Warn, "relay", "d");
        assert_eq!(report.worst(), FindingLevel::Bad);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["findings"][1]["remedy"], "c");
        assert_eq!(json["findings"][2]["level"], "warn");
    }

    #[test]
    fn thresholds_are_warn_and_bad() {
        assert_eq!("warn".parse(), Ok(FindingLevel::Warn));
        assert_eq!("bad".parse(), Ok(FindingLevel::Bad));
        assert!("ok".parse::<FindingLevel>().is_err());
    }
}
