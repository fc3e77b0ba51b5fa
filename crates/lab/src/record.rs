//! Record of a run: everything needed to judge the run again, to repeat it, and to decide which records it can be compared with.
//!
//! A directory contains `record.json`, the source of truth, and `report.html`, which is generated from it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize, Serializer};

use crate::error::LabError;
use crate::invalid_rounds::{VoidLimits, VoidReason};
use crate::metric;
use crate::search::FoundRate;
use crate::stats;

/// Version of the JSON format. It is increased when older readers would misunderstand new records, but not for a new optional field.
pub(crate) const FORMAT: u32 = 1;

/// Maximum relative difference in offered load between runs that count as equally loaded. A generator that falls behind only occasionally
/// causes a far smaller difference.
const SAME_LOAD: f64 = 0.05;

pub(crate) const FILE: &str = "record.json";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    pub format: u32,
    pub id: String,
    pub started: String,
    pub command: Vec<String>,
    pub seed: u64,
    pub environment: Environment,
    pub experiment: RecordedExperiment,
    /// One entry for each run of a subject, in order of execution. Second runs of the baseline are in `aa`.
    pub rounds: Vec<Round>,
    /// Second runs of the baseline: entry `index` is paired with the baseline's run in round `index`.
    #[serde(default)]
    pub aa: Vec<Round>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweeps: Vec<Sweep>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<BuildFile>,
    /// Syscalls per subject, from a separate run, since tracing slows the subject down.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub syscalls: BTreeMap<String, Vec<Syscall>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub profiles: BTreeMap<String, CpuProfile>,
    #[serde(default)]
    pub interrupted: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildFile {
    /// Name of the service that uses the program, or "the workload".
    pub name: String,
    pub word: usize,
    pub path: String,
    pub size: u64,
    pub modified: String,
    /// Hash in hexadecimal; absent for files that are unreadable or too large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Syscall {
    pub name: String,
    pub calls: u64,
    /// Number of calls that failed, including those with `EAGAIN`.
    pub errors: u64,
    pub seconds: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuProfile {
    pub samples: u64,
    pub kernel_percent: f64,
    pub symbols: Vec<Symbol>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Symbol {
    pub name: String,
    pub kernel: bool,
    pub percent: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    pub kernel: String,
    pub cpu_model: String,
    pub cores: u32,
    pub memory_bytes: u64,
    /// Behaviour of idle CPUs, including how long a guest polls before it halts; empty in old records.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub idle: String,
    /// Maps interface and feature to its state (`tx-udp-segmentation`, `generic-receive-offload`).
    pub offloads: BTreeMap<String, BTreeMap<String, bool>>,
    /// Maps a tool (`iperf3`, `perf`, a subject) to its version.
    pub tools: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub dirty: bool,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedExperiment {
    pub name: String,
    /// Subjects, the baseline first.
    pub subjects: Vec<RecordedSubject>,
    /// Description of the workload; equal text means equal workload.
    pub workload: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_cpus: Option<String>,
    pub metric: String,
    pub rounds: u32,
    pub duration_s: f64,
    pub warmup_s: f64,
    #[serde(default)]
    pub rules: VerdictRules,
    #[serde(default)]
    pub limits: VoidLimits,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub must: Vec<Threshold>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aim: Vec<Threshold>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerdictRules {
    pub min_rounds: u32,
    /// Smallest relevant relative difference (0.05 is 5 %); the verdict *no difference shown* needs a
    /// narrower interval.
    pub resolution: f64,
    pub need_noise_floor: bool,
    pub max_voided: f64,
}

impl Default for VerdictRules {
    fn default() -> Self {
        Self { min_rounds: 6, resolution: 0.05, need_noise_floor: true, max_voided: 0.25 }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    pub metric: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// Subject that must meet the threshold; defaults to the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// Subject to compare with; defaults to every other subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub own: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedSubject {
    pub name: String,
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    pub index: u32,
    pub subject: String,
    /// Position within the round, counted from 0 and including `aa` runs.
    pub order_in_round: u32,
    /// Metrics by name. Non-finite values, which JSON cannot represent, are dropped.
    #[serde(default, serialize_with = "finite_only")]
    pub metrics: BTreeMap<String, f64>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_supported: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub voided: Option<VoidReason>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencySummary>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Latencies in microseconds, from the time at which a datagram was due.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencySummary {
    pub min: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    pub subject: String,
    /// Index of the round; `None` if the sweep is not repeated in rounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u32>,
    pub points: Vec<SweepPoint>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found: Vec<FoundRate>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SweepPoint {
    /// Offered rate: datagrams per second, or the number of clients.
    #[serde(default)]
    pub rate_pps: u64,
    pub offered_pps: f64,
    pub delivered_pps: f64,
    pub loss_percent: f64,
    pub duration_s: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencySummary>,
}

impl Round {
    pub(crate) fn new(index: u32, subject: impl Into<String>, order_in_round: u32) -> Self {
        Self { index, subject: subject.into(), order_in_round, ..Self::default() }
    }
}

impl Syscall {
    pub(crate) fn us_per_call(&self) -> f64 {
        if self.calls == 0 { 0.0 } else { self.seconds * 1e6 / self.calls as f64 }
    }
}

impl LatencySummary {
    pub(crate) fn metrics(&self) -> [(String, f64); 5] {
        let percentiles =
            [("p50", self.p50), ("p90", self.p90), ("p99", self.p99), ("p999", self.p999), ("max", self.max)];
        percentiles.map(|(name, value)| (format!("latency_{name}_us"), value))
    }
}

impl From<turnpike_measure::Percentiles> for LatencySummary {
    fn from(of: turnpike_measure::Percentiles) -> Self {
        let [min, p50, p90, p99, p999, max] =
            [of.min, of.p50, of.p90, of.p99, of.p999, of.max].map(|us| us as f64);
        Self { min, p50, p90, p99, p999, max }
    }
}

impl RunRecord {
    pub(crate) fn baseline(&self) -> Option<&str> {
        self.experiment.subjects.first().map(|subject| subject.name.as_str())
    }

    pub(crate) fn candidates(&self) -> impl Iterator<Item = &str> {
        self.experiment.subjects.iter().skip(1).map(|subject| subject.name.as_str())
    }

    pub(crate) fn metrics(&self) -> BTreeSet<&str> {
        self.rounds.iter().flat_map(|round| round.metrics.keys()).map(String::as_str).collect()
    }

    /// Returns true if a run counts for a metric: either it is not void, or it is void only because the generator fell behind, the metric
    /// [survives](metric::survives_lateness) this, and the load equals that of the other runs. Without the last condition, a generator that
    /// fell behind for one subject could decide the verdict, because the cost per datagram depends on the load.
    pub fn counts(&self, round: &Round, metric: &str) -> bool {
        match &round.voided {
            None => true,
            Some(VoidReason::GeneratorLate { .. }) => {
                metric::survives_lateness(metric) && self.had_the_usual_load(round)
            }
            Some(_) => false,
        }
    }

    /// True if the load of this run equals the median load of each subject. There is a median for each subject, because the baseline, which
    /// runs twice per round, would dominate an overall median.
    fn had_the_usual_load(&self, round: &Round) -> bool {
        let offered = |round: &Round| round.metrics.get(metric::OFFERED_PPS).copied();
        let Some(this) = offered(round) else { return false };
        self.experiment.subjects.iter().all(|subject| {
            let own = self.rounds.iter().chain(&self.aa).filter(|run| run.subject == subject.name);
            let usual = stats::median(&own.filter_map(offered).collect::<Vec<_>>());
            usual.is_none_or(|usual| (this - usual).abs() <= SAME_LOAD * usual)
        })
    }

    pub(crate) fn values(&self, subject: &str, metric: &str) -> Vec<f64> {
        self.rounds
            .iter()
            .filter(|round| round.subject == subject && self.counts(round, metric))
            .filter_map(|round| round.metrics.get(metric).copied())
            .collect()
    }

    pub(crate) fn pairs(&self, other: &str, subject: &str, metric: &str) -> Vec<(f64, f64)> {
        paired(&self.of_subject(other, metric), &self.of_subject(subject, metric))
    }

    pub(crate) fn aa_pairs(&self, metric: &str) -> Vec<(f64, f64)> {
        let baseline = self.baseline().unwrap_or_default();
        paired(&self.of_subject(baseline, metric), &self.by_index(self.aa.iter(), metric))
    }

    /// Writes the record to `dir`. The previous file stays intact if the lab crashes.
    pub fn save(&self, dir: &Path) -> Result<(), LabError> {
        write_json(&dir.join(FILE), self)
    }

    pub fn load(dir: &Path) -> Result<Self, LabError> {
        #[derive(Deserialize)]
        struct FormatVersion {
            format: u32,
        }
        let path = if dir.is_dir() { dir.join(FILE) } else { dir.to_owned() };
        let refuse = |what: String| LabError::usage(format!("{}: {what}", path.display()));
        let json = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
        let bad = |error| refuse(format!("not a lab record: {error}"));
        // The version is parsed first, because the rest of a newer format may not parse.
        let FormatVersion { format } = serde_json::from_str(&json).map_err(bad)?;
        if format > FORMAT {
            return Err(refuse(format!(
                "it has format {format}, but this version reads only formats up to {FORMAT}: use the version that wrote it"
            )));
        }
        serde_json::from_str(&json).map_err(bad)
    }

    fn of_subject(&self, subject: &str, metric: &str) -> BTreeMap<u32, f64> {
        self.by_index(self.rounds.iter().filter(|round| round.subject == subject), metric)
    }

    fn by_index<'a>(&self, rounds: impl Iterator<Item = &'a Round>, metric: &str) -> BTreeMap<u32, f64> {
        rounds
            .filter(|round| self.counts(round, metric))
            .filter_map(|round| Some((round.index, *round.metrics.get(metric)?)))
            .collect()
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Writes to a temporary file and renames it.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> Result<(), LabError> {
    let beside = path.with_extension("new");
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&beside, content))
        .and_then(|()| fs::rename(&beside, path))
        .map_err(LabError::io(format!("cannot write {}", path.display())))
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), LabError> {
    let json = serde_json::to_string_pretty(value).map_err(|error| LabError::failed(error.to_string()))?;
    write_whole(path, json.as_bytes())
}

fn finite_only<S: Serializer>(metrics: &BTreeMap<String, f64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(metrics.iter().filter(|(_, value)| value.is_finite()))
}

fn paired(baseline: &BTreeMap<u32, f64>, other: &BTreeMap<u32, f64>) -> Vec<(f64, f64)> {
    baseline.iter().filter_map(|(index, value)| Some((*value, *other.get(index)?))).collect()
}

#[cfg(test)]
pub(crate) mod tests;
