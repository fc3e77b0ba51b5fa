//! What a probe found: facts for programs, and lines with a verdict and a remedy each for people.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::Serialize;

use crate::attack::facts::AttackFacts;

/// How good or bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// A fact that is neither good nor bad.
    Note,
    /// Some clients will have trouble, or somebody may come to harm.
    Warn,
    /// Broken, or open to abuse.
    Bad,
}

impl FromStr for Level {
    type Err = String;

    /// A limit: `warn` or `bad`.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "warn" => Ok(Self::Warn),
            "bad" => Ok(Self::Bad),
            _ => Err(format!("unknown value {name:?}: expected warn or bad")),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Bad => "bad",
        })
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How good or bad.
    pub level: Level,
    /// What it is about: a transport, `certificate`, `credentials`, `relay`, `features`, `nat` or `peers`.
    pub area: String,
    /// What was found, one sentence.
    pub what: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// One way to reach the server.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TransportFacts {
    /// Address and port that were tried.
    pub address: String,
    /// Whether a STUN Binding was answered.
    pub reachable: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Milliseconds from the first packet to an open connection, its handshake included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_ms: Option<f64>,
    /// TLS or DTLS version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// ALPN as agreed on (RFC 7443).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpn: Option<String>,
    /// Round trip of Bindings that were answered at first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<RoundTrip>,
    /// This side's address as the server sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped: Option<String>,
    /// What the server shows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<CertificateFacts>,
}

/// Round trips in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RoundTrip {
    /// The shortest.
    pub min: u64,
    /// The middle one.
    pub median: u64,
    /// Bindings sent.
    pub asked: usize,
    /// Answered without a second transmission.
    pub answered: usize,
}

/// A server's own certificate.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CertificateFacts {
    /// Distinguished name.
    pub subject: String,
    /// Distinguished name of who signed it.
    pub issuer: String,
    /// DNS names and addresses that it is for.
    pub names: Vec<String>,
    /// RFC 3339.
    pub not_before: String,
    /// RFC 3339.
    pub not_after: String,
    /// Whole days until then, negative when it is over.
    pub days_left: i64,
    /// Why the certificate cannot be read: all of the above is empty then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
    /// Certificates that the server sends, its own included (DTLS shows its own only).
    pub chain: usize,
    /// Whether it verifies.
    pub verifies: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distrust: Option<String>,
}

/// NAT behaviour (RFC 5780).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NatFacts {
    /// `none`, `endpoint-independent`, `address-dependent`, `address-and-port-dependent`, or `unknown`.
    pub mapping: String,
    /// `endpoint-independent`, `address-dependent`, `address-and-port-dependent`, or `unknown`.
    pub filtering: String,
    /// The server's second address.
    pub other_address: String,
}

/// Whether the server would send to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeerFacts {
    /// The peer.
    pub peer: String,
    /// What kind of address that is.
    pub kind: String,
    /// Whether a permission or a channel was granted; `None` (null) where the server refused for another reason than the
    /// peer's address, as for want of room.
    pub allowed: Option<bool>,
    /// The server's answers.
    pub answer: String,
}

/// The whole result.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProbeReport {
    /// As the user wrote it.
    pub server: String,
    /// Whether the server can be used as it was named, with the credential that was given.
    pub usable: bool,
    /// SOFTWARE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub software: Option<String>,
    /// REALM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// By transport: `udp`, `tcp`, `tls`, `dtls`.
    pub transports: BTreeMap<String, TransportFacts>,
    /// By transport: port 443, if the name leads to another one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub port_443: BTreeMap<String, TransportFacts>,
    /// The same at the name's address of the other family, where it has one.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub other_family: BTreeMap<String, TransportFacts>,
    /// Whether the credential is good; absent where none was given or nothing could be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_accepted: Option<bool>,
    /// Relayed addresses that were handed out.
    pub relayed: Vec<String>,
    /// What the server can do, by name; absent is what could not be asked.
    pub features: BTreeMap<String, bool>,
    /// Absent where the server has no OTHER-ADDRESS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat: Option<NatFacts>,
    /// Peers that should be refused.
    pub peers: Vec<PeerFacts>,
    /// What an attacker would have found, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attack: Option<AttackFacts>,
    /// The lines.
    pub findings: Vec<Finding>,
}

impl ProbeReport {
    /// The worst of all lines.
    #[must_use]
    pub fn worst(&self) -> Level {
        self.findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
    }

    pub(crate) fn line(&mut self, level: Level, area: impl fmt::Display, what: impl Into<String>) {
        self.findings.push(Finding { level, area: area.to_string(), what: what.into(), remedy: None });
    }

    /// A line with a remedy.
    pub(crate) fn advise(
        &mut self,
        level: Level,
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
    fn the_worst_line_is_the_verdict_and_a_note_is_no_warning() {
        let mut report = ProbeReport::default();
        assert_eq!(report.worst(), Level::Ok);
        report.line(Level::Note, "nat", "a");
        assert!(report.worst() < Level::Warn);
        report.advise(Level::Bad, "peers", "b", "c");
        report.line(Level::Warn, "relay", "d");
        assert_eq!(report.worst(), Level::Bad);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["findings"][1]["remedy"], "c");
        assert_eq!(json["findings"][2]["level"], "warn");
    }

    #[test]
    fn limits_are_warn_and_bad() {
        assert_eq!("warn".parse(), Ok(Level::Warn));
        assert_eq!("bad".parse(), Ok(Level::Bad));
        assert!("ok".parse::<Level>().is_err());
    }
}
