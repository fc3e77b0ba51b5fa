//! Record of a run: everything needed to judge it again, to repeat it, and to decide what it can be compared
//! with.
//!
//! A directory holds `record.json`, the source of truth, and `report.html`, which is generated from it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize, Serializer};

use crate::error::LabError;
use crate::invalid_rounds::{Void, VoidLimits};
use crate::metric;
use crate::search::FoundRate;
use crate::stats;

/// Version of the JSON. Raised when an older reader would misunderstand it, not for a new optional field.
pub(crate) const FORMAT: u32 = 1;

/// Relative difference of offered load up to which two runs count as equally loaded. A generator that is late
/// at times stays far below; one that cannot reach the rate does not.
const SAME_LOAD: f64 = 0.05;

/// File name inside the record's directory.
pub(crate) const FILE: &str = "record.json";

/// Record of one experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// `FORMAT` of the writer.
    pub format: u32,
    /// Unique name, usually that of the directory.
    pub id: String,
    /// Start time, RFC 3339.
    pub started: String,
    /// Command line.
    pub command: Vec<String>,
    /// Seed of the order of the runs and the bootstrap.
    pub seed: u64,
    pub environment: Environment,
    pub experiment: RecordedExperiment,
    /// One entry per run and subject, in order of execution.
    pub rounds: Vec<Round>,
    /// Second runs of the baseline: entry `index` pairs with the baseline's run in round `index`.
    #[serde(default)]
    pub aa: Vec<Round>,
    /// Rate sweeps and find-max searches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweeps: Vec<Sweep>,
    /// Files of the measured programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<BuildFile>,
    /// Syscalls per subject, longest duration first, from a separate run, since tracing slows the subject
    /// down.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub syscalls: BTreeMap<String, Vec<Syscall>>,
    /// Sampled CPU profile per subject.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub profiles: BTreeMap<String, CpuProfile>,
    /// Stopped before all rounds were done.
    #[serde(default)]
    pub interrupted: bool,
}

/// File named by a command, as it was at the start of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildFile {
    /// Subject or helper it belongs to, or "the workload".
    pub name: String,
    /// Index of the command's word: 0 is the program, others are scripts and configurations.
    pub word: usize,
    /// Resolved path.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Modification time, RFC 3339.
    pub modified: String,
    /// SHA-256 in hexadecimal digits; absent for unreadable or too large files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Version, if known without running the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Row of a table of syscalls.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Syscall {
    /// Name without the prefix `sys_`.
    pub name: String,
    pub calls: u64,
    /// Failed calls, including `EAGAIN`.
    pub errors: u64,
    /// Seconds spent, including waiting.
    pub seconds: f64,
}

/// Samples of a subject under load; the flame graph is `flame.svg` next to the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuProfile {
    pub samples: u64,
    /// Share of samples in the kernel, percent.
    pub kernel_percent: f64,
    /// Hottest symbols first.
    pub symbols: Vec<Symbol>,
}

/// Function with its own samples, excluding callees.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Symbol {
    /// Demangled name.
    pub name: String,
    pub kernel: bool,
    /// Percent of the samples.
    pub percent: f64,
}

/// Machine and software.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// Kernel release.
    pub kernel: String,
    pub cpu_model: String,
    /// Logical CPUs online.
    pub cores: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Idle behaviour of the CPUs, and the polling time of a guest before it halts; empty in old records.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub idle: String,
    /// Interface to feature to state (`tx-udp-segmentation`, `generic-receive-offload`).
    pub offloads: BTreeMap<String, BTreeMap<String, bool>>,
    /// Tool (`iperf3`, `perf`, a subject) to version.
    pub tools: BTreeMap<String, String>,
    /// Commit of the repository in the working directory, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The working tree differed from that commit.
    pub dirty: bool,
    pub notes: Vec<String>,
}

/// Requested experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedExperiment {
    pub name: String,
    /// Compared programs; the first is the baseline.
    pub subjects: Vec<RecordedSubject>,
    /// Description or command line of the workload; equal text means equal workload.
    pub workload: String,
    /// CPUs of the workload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_cpus: Option<String>,
    /// Deciding metric.
    pub metric: String,
    /// Requested rounds.
    pub rounds: u32,
    /// Measured seconds per run.
    pub duration_s: f64,
    /// Uncounted seconds before the measurement.
    pub warmup_s: f64,
    #[serde(default)]
    pub rules: VerdictRules,
    #[serde(default)]
    pub limits: VoidLimits,
    /// Required thresholds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub must: Vec<Threshold>,
    /// Desired thresholds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aim: Vec<Threshold>,
}

/// Conditions for a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerdictRules {
    /// Minimum number of valid rounds.
    pub min_rounds: u32,
    /// Smallest relevant relative difference (0.05 is 5 %). *No difference shown* requires an interval
    /// narrower than plus or minus this; otherwise the verdict is *cannot tell*.
    pub resolution: f64,
    /// Requires A/A rounds.
    pub need_noise_floor: bool,
    /// Maximum share of void rounds.
    pub max_voided: f64,
}

impl Default for VerdictRules {
    fn default() -> Self {
        Self { min_rounds: 6, resolution: 0.05, need_noise_floor: true, max_voided: 0.25 }
    }
}

/// Limit for one figure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    pub metric: String,
    /// Lower limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// Upper limit. Exactly one of the two is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// Subject of the figure; absent for the last subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// Other subject of a ratio; absent for every other subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// The figure is the value itself instead of a ratio.
    #[serde(default, skip_serializing_if = "is_false")]
    pub own: bool,
}

/// Program under test.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedSubject {
    pub name: String,
    pub command: Vec<String>,
    /// Pinned CPUs as a list such as `0,2-3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
}

/// One run of one subject.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// From 0.
    pub index: u32,
    pub subject: String,
    /// Position within the round, from 0, including `aa` runs.
    pub order_in_round: u32,
    /// Values by metric name. Non-finite values are dropped, because JSON cannot represent them.
    #[serde(default, serialize_with = "finite_only")]
    pub metrics: BTreeMap<String, f64>,
    /// Metrics that this machine or subject cannot provide.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_supported: BTreeSet<String>,
    /// Reason why the run does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub voided: Option<Void>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencySummary>,
    /// Remarks, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Latency in microseconds since the due time.
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

/// Results of one subject at several offered rates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    pub subject: String,
    /// Round, if repeated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u32>,
    /// Trials in order of execution.
    pub points: Vec<SweepPoint>,
    /// Results of a find-max search.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found: Vec<FoundRate>,
}

/// One trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SweepPoint {
    /// Value of the rate variable: datagrams per second, or clients.
    #[serde(default)]
    pub rate_pps: u64,
    /// Datagrams offered per second.
    pub offered_pps: f64,
    /// Datagrams delivered per second.
    pub delivered_pps: f64,
    /// Loss in percent.
    pub loss_percent: f64,
    /// Measured seconds.
    pub duration_s: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencySummary>,
}

impl Round {
    pub(crate) fn new(index: u32, subject: impl Into<String>, order_in_round: u32) -> Self {
        Self { index, subject: subject.into(), order_in_round, ..Self::default() }
    }
}

impl Environment {
    /// Nine digits of the commit, with a `+` for a changed tree.
    pub(crate) fn short_commit(&self) -> String {
        let Some(commit) = &self.commit else { return "–".to_owned() };
        format!("{}{}", commit.get(..9).unwrap_or(commit), if self.dirty { "+" } else { "" })
    }
}

impl Syscall {
    /// Microseconds per call; 0 without calls.
    pub(crate) fn us_per_call(&self) -> f64 {
        if self.calls == 0 { 0.0 } else { self.seconds * 1e6 / self.calls as f64 }
    }
}

impl LatencySummary {
    /// Percentiles by name, in ascending order.
    pub(crate) fn percentiles(&self) -> [(&'static str, f64); 5] {
        [("p50", self.p50), ("p90", self.p90), ("p99", self.p99), ("p99.9", self.p999), ("max", self.max)]
    }

    /// Percentiles by metric name.
    pub(crate) fn metrics(&self) -> [(String, f64); 5] {
        self.percentiles().map(|(name, value)| (format!("latency_{}_us", name.replace('.', "")), value))
    }
}

/// Converts the microseconds of our own generators.
impl From<turnpike_measure::Percentiles> for LatencySummary {
    fn from(of: turnpike_measure::Percentiles) -> Self {
        let [min, p50, p90, p99, p999, max] =
            [of.min, of.p50, of.p90, of.p99, of.p999, of.max].map(|us| us as f64);
        Self { min, p50, p90, p99, p999, max }
    }
}

impl Record {
    /// First subject, with which the others are compared.
    pub(crate) fn baseline(&self) -> Option<&str> {
        self.experiment.subjects.first().map(|subject| subject.name.as_str())
    }

    /// Names of the other subjects.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = &str> {
        self.experiment.subjects.iter().skip(1).map(|subject| subject.name.as_str())
    }

    /// Names of all metrics in any round.
    pub(crate) fn metrics(&self) -> BTreeSet<&str> {
        self.rounds.iter().flat_map(|round| round.metrics.keys()).map(String::as_str).collect()
    }

    /// Returns true if a run counts for a metric: it is not void, or only the generator was late and the
    /// metric [survives](metric::survives_lateness) this. In the latter case its load must equal that of the
    /// other runs, because the cost per datagram depends on the load and lateness in one subject's runs must
    /// not decide.
    pub fn counts(&self, round: &Round, metric: &str) -> bool {
        match &round.voided {
            None => true,
            Some(Void::GeneratorLate { .. }) => {
                metric::survives_lateness(metric) && self.had_the_usual_load(round)
            }
            Some(_) => false,
        }
    }

    /// Returns true if this run's offered load is within [`SAME_LOAD`] of every subject's median. A single
    /// median over all runs would be that of the baseline, which runs twice per round.
    fn had_the_usual_load(&self, round: &Round) -> bool {
        let offered = |round: &Round| round.metrics.get(metric::OFFERED_PPS).copied();
        let Some(this) = offered(round) else { return false };
        self.experiment.subjects.iter().all(|subject| {
            let own = self.rounds.iter().chain(&self.aa).filter(|run| run.subject == subject.name);
            let usual = stats::median(&own.filter_map(offered).collect::<Vec<_>>());
            usual.is_none_or(|usual| (this - usual).abs() <= SAME_LOAD * usual)
        })
    }

    /// Values of a metric over a subject's valid rounds.
    pub(crate) fn values(&self, subject: &str, metric: &str) -> Vec<f64> {
        self.rounds
            .iter()
            .filter(|round| round.subject == subject && self.counts(round, metric))
            .filter_map(|round| round.metrics.get(metric).copied())
            .collect()
    }

    /// `(other, subject)` for each round in which both runs count and have the metric, in order.
    pub(crate) fn pairs(&self, other: &str, subject: &str, metric: &str) -> Vec<(f64, f64)> {
        paired(&self.of_subject(other, metric), &self.of_subject(subject, metric))
    }

    /// Pairs of the baseline with itself.
    pub(crate) fn aa_pairs(&self, metric: &str) -> Vec<(f64, f64)> {
        let baseline = self.baseline().unwrap_or_default();
        paired(&self.of_subject(baseline, metric), &self.by_index(self.aa.iter(), metric))
    }

    /// Writes `record.json` into `dir`, creating it if necessary. A crash leaves the previous file intact.
    pub fn save(&self, dir: &Path) -> Result<(), LabError> {
        write_json(&dir.join(FILE), self)
    }

    /// Reads `record.json` of `dir`, or the file itself.
    ///
    /// # Errors
    ///
    /// The file is unreadable, not a record, or written by a newer lab.
    pub fn load(dir: &Path) -> Result<Self, LabError> {
        #[derive(Deserialize)]
        struct FormatVersion {
            format: u32,
        }
        let path = if dir.is_dir() { dir.join(FILE) } else { dir.to_owned() };
        let refuse = |what: String| LabError::usage(format!("{}: {what}", path.display()));
        let json = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
        let bad = |error| refuse(format!("not a record of the lab: {error}"));
        // The version first, because the rest of a newer format may not parse.
        let FormatVersion { format } = serde_json::from_str(&json).map_err(bad)?;
        if format > FORMAT {
            return Err(refuse(format!(
                "format {format}, this lab reads up to {FORMAT}: use the version that wrote it"
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

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_false(value: &bool) -> bool {
    !value
}

/// Writes to a temporary file and renames it, so that readers see either the old or the new content.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> Result<(), LabError> {
    let beside = path.with_extension("new");
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&beside, content))
        .and_then(|()| fs::rename(&beside, path))
        .map_err(LabError::io(format!("cannot write {}", path.display())))
}

/// Writes a value as JSON, atomically.
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
