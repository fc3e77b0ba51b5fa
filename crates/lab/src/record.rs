//! A run, kept: everything needed to judge it again, to repeat it, and to say what it may be compared with.
//!
//! A directory holds `record.json`, which is the truth, and `report.html`, which is made from it.

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

/// Relative difference of offered load up to which two runs were offered the same: a rate held by a generator that is
/// late now and then stays far within it, one that it cannot reach does not.
const SAME_LOAD: f64 = 0.05;

/// File name inside the record's directory.
pub(crate) const FILE: &str = "record.json";

/// One run of one experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// `FORMAT` of the writer.
    pub format: u32,
    /// Unique name; the directory is usually called so.
    pub id: String,
    /// When it began, RFC 3339.
    pub started: String,
    /// The command line that began it.
    pub command: Vec<String>,
    /// Fixes the order of the runs and the bootstrap.
    pub seed: u64,
    /// Where it ran.
    pub environment: Environment,
    /// What was asked for.
    pub experiment: RecordedExperiment,
    /// One entry for each run of each subject, in the order in which they ran.
    pub rounds: Vec<Round>,
    /// The second runs of the baseline: entry `index` pairs with the baseline's run in round `index`.
    #[serde(default)]
    pub aa: Vec<Round>,
    /// Rate sweeps and find-max searches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweeps: Vec<Sweep>,
    /// The files that were run: which build each path stood for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<BuildFile>,
    /// Syscalls of each subject, the longest first, from a run of its own: tracing slows the subject down.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub syscalls: BTreeMap<String, Vec<Syscall>>,
    /// Where each subject spent its time, by samples.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub profiles: BTreeMap<String, CpuProfile>,
    /// Stopped before all rounds were done.
    #[serde(default)]
    pub interrupted: bool,
}

/// A file that a command named, as it was when the run began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildFile {
    /// The subject or helper that it belongs to, or "the workload".
    pub name: String,
    /// Which word of the command named it: 0 is the program itself, others are scripts and configurations.
    pub word: usize,
    /// Path, links followed.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// When it was last written, RFC 3339.
    pub modified: String,
    /// SHA-256 of its content in hexadecimal digits; absent where it could not be read or is too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Its version, where that is known without starting it in an unknown way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// One row of a table of syscalls.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Syscall {
    /// Name without the prefix `sys_`.
    pub name: String,
    /// Calls.
    pub calls: u64,
    /// Those that failed, `EAGAIN` among them.
    pub errors: u64,
    /// Seconds spent in it, those of waiting included.
    pub seconds: f64,
}

/// Samples of a subject under load; the flame graph is `flame.svg` beside the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuProfile {
    /// Samples taken.
    pub samples: u64,
    /// Of those in the kernel, percent.
    pub kernel_percent: f64,
    /// The hottest, the hottest first.
    pub symbols: Vec<Symbol>,
}

/// A function in which samples fell; what it called is not counted to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Symbol {
    /// Name, demangled.
    pub name: String,
    /// Whether it belongs to the kernel.
    pub kernel: bool,
    /// Percent of the samples.
    pub percent: f64,
}

/// The machine and what was on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// Kernel release.
    pub kernel: String,
    /// CPU model as the kernel names it.
    pub cpu_model: String,
    /// Logical CPUs online.
    pub cores: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// What CPUs do that have nothing to do, and for how long a guest's poll first; empty in records of before it was asked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub idle: String,
    /// Interface to feature to on or off (`tx-udp-segmentation`, `generic-receive-offload`).
    pub offloads: BTreeMap<String, BTreeMap<String, bool>>,
    /// Tool (`iperf3`, `perf`, a subject) to version.
    pub tools: BTreeMap<String, String>,
    /// Commit of the repository it was started in, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The working tree differed from that commit.
    pub dirty: bool,
    /// Anything else that a reader must know.
    pub notes: Vec<String>,
}

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedExperiment {
    /// Its name.
    pub name: String,
    /// Those compared; the first is the baseline.
    pub subjects: Vec<RecordedSubject>,
    /// The workload in words or as its command line; equal text means equal workload.
    pub workload: String,
    /// CPUs it was pinned to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_cpus: Option<String>,
    /// Metric that decides; the others explain.
    pub metric: String,
    /// Rounds wanted.
    pub rounds: u32,
    /// Measured seconds of each run.
    pub duration_s: f64,
    /// Seconds before that, which do not count.
    pub warmup_s: f64,
    /// When a verdict is given.
    #[serde(default)]
    pub rules: VerdictRules,
    /// When a run is void.
    #[serde(default)]
    pub limits: VoidLimits,
    /// Lines that figures must stay on the right side of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub must: Vec<Threshold>,
    /// Lines that they should.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aim: Vec<Threshold>,
}

/// When a verdict is given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerdictRules {
    /// Rounds that must count.
    pub min_rounds: u32,
    /// Smallest relative difference worth knowing (0.05 is 5 %). *No difference shown* is said only when the interval
    /// is narrower than plus or minus this; before, it is *cannot tell*.
    pub resolution: f64,
    /// Refuse without A/A rounds.
    pub need_noise_floor: bool,
    /// Share of the rounds that may be void without casting doubt on the rest.
    pub max_voided: f64,
}

impl Default for VerdictRules {
    fn default() -> Self {
        Self { min_rounds: 6, resolution: 0.05, need_noise_floor: true, max_voided: 0.25 }
    }
}

/// One line for one figure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// The figure's metric.
    pub metric: String,
    /// It must not be lower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// It must not be higher. Exactly one of the two is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// Whose figure; absent for the last subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The figure is its ratio to this subject's; absent for every other one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// The figure is the value itself, no ratio.
    #[serde(default, skip_serializing_if = "is_false")]
    pub own: bool,
}

/// A program under test.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedSubject {
    /// Its name in the rounds.
    pub name: String,
    /// How it was started.
    pub command: Vec<String>,
    /// CPUs it was pinned to, as a list like `0,2-3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
}

/// One run of one subject.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Round number, from 0.
    pub index: u32,
    /// Name of the subject.
    pub subject: String,
    /// Place within the round, from 0, runs of `aa` included.
    pub order_in_round: u32,
    /// What was measured, by the names of `crate::metric`. JSON has no infinity: what is not finite is not kept.
    #[serde(default, serialize_with = "finite_only")]
    pub metrics: BTreeMap<String, f64>,
    /// Metrics that this machine or subject cannot give.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_supported: BTreeSet<String>,
    /// Why the run does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub voided: Option<Void>,
    /// Latency, where the workload measures it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencySummary>,
    /// What else happened, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Latency in microseconds, counted from the moment a packet was due.
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

/// What one subject did at several offered rates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// Name of the subject.
    pub subject: String,
    /// Round in which it was made, where it was repeated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u32>,
    /// The trials, in the order in which they were made.
    pub points: Vec<SweepPoint>,
    /// What a find-max search concluded from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found: Vec<FoundRate>,
}

/// One trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SweepPoint {
    /// What the rate variable was set to: datagrams a second, or clients.
    #[serde(default)]
    pub rate_pps: u64,
    /// Datagrams offered a second.
    pub offered_pps: f64,
    /// Datagrams delivered a second.
    pub delivered_pps: f64,
    /// Lost, in percent.
    pub loss_percent: f64,
    /// Measured seconds.
    pub duration_s: f64,
    /// Latency, where measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencySummary>,
}

impl Round {
    /// A run without results yet.
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
    /// Microseconds of one call; 0 without a call.
    pub(crate) fn us_per_call(&self) -> f64 {
        if self.calls == 0 { 0.0 } else { self.seconds * 1e6 / self.calls as f64 }
    }
}

impl LatencySummary {
    /// Named values as plotted, from the lowest percentile on.
    pub(crate) fn percentiles(&self) -> [(&'static str, f64); 5] {
        [("p50", self.p50), ("p90", self.p90), ("p99", self.p99), ("p99.9", self.p999), ("max", self.max)]
    }

    /// Its percentiles by the names of metrics.
    pub(crate) fn metrics(&self) -> [(String, f64); 5] {
        self.percentiles().map(|(name, value)| (format!("latency_{}_us", name.replace('.', "")), value))
    }
}

/// What our own generators report, in microseconds as here.
impl From<turnpike_measure::Percentiles> for LatencySummary {
    fn from(of: turnpike_measure::Percentiles) -> Self {
        let [min, p50, p90, p99, p999, max] =
            [of.min, of.p50, of.p90, of.p99, of.p999, of.max].map(|us| us as f64);
        Self { min, p50, p90, p99, p999, max }
    }
}

impl Record {
    /// The subject that the others are compared with: the first.
    pub(crate) fn baseline(&self) -> Option<&str> {
        self.experiment.subjects.first().map(|subject| subject.name.as_str())
    }

    /// Names of the others.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = &str> {
        self.experiment.subjects.iter().skip(1).map(|subject| subject.name.as_str())
    }

    /// Names of all metrics that some round has.
    pub(crate) fn metrics(&self) -> BTreeSet<&str> {
        self.rounds.iter().flat_map(|round| round.metrics.keys()).map(String::as_str).collect()
    }

    /// Whether a run counts for a metric: it is not void, or only the generator was late, which what a datagram costs the
    /// subject [survives](metric::survives_lateness) if the load was that of the other runs all the same: the cost
    /// depends on the load, and a generator that falls behind in the runs of one subject only must not decide.
    pub fn counts(&self, round: &Round, metric: &str) -> bool {
        match &round.voided {
            None => true,
            Some(Void::GeneratorLate { .. }) => {
                metric::survives_lateness(metric) && self.had_the_usual_load(round)
            }
            Some(_) => false,
        }
    }

    /// Whether this run was offered what the runs of each subject were: the median of theirs, but for [`SAME_LOAD`]. One
    /// median of all would be that of the baseline, which runs twice a round.
    fn had_the_usual_load(&self, round: &Round) -> bool {
        let offered = |round: &Round| round.metrics.get(metric::OFFERED_PPS).copied();
        let Some(this) = offered(round) else { return false };
        self.experiment.subjects.iter().all(|subject| {
            let own = self.rounds.iter().chain(&self.aa).filter(|run| run.subject == subject.name);
            let usual = stats::median(&own.filter_map(offered).collect::<Vec<_>>());
            usual.is_none_or(|usual| (this - usual).abs() <= SAME_LOAD * usual)
        })
    }

    /// Values of a metric over the rounds of a subject that count.
    pub(crate) fn values(&self, subject: &str, metric: &str) -> Vec<f64> {
        self.rounds
            .iter()
            .filter(|round| round.subject == subject && self.counts(round, metric))
            .filter_map(|round| round.metrics.get(metric).copied())
            .collect()
    }

    /// `(other, subject)` of each round in which both runs count and have the metric, in the order of the rounds.
    pub(crate) fn pairs(&self, other: &str, subject: &str, metric: &str) -> Vec<(f64, f64)> {
        paired(&self.of_subject(other, metric), &self.of_subject(subject, metric))
    }

    /// The same for the baseline and itself.
    pub(crate) fn aa_pairs(&self, metric: &str) -> Vec<(f64, f64)> {
        let baseline = self.baseline().unwrap_or_default();
        paired(&self.of_subject(baseline, metric), &self.by_index(self.aa.iter(), metric))
    }

    /// Writes `record.json` into `dir`, which is made if need be. A crash leaves the previous one whole.
    pub fn save(&self, dir: &Path) -> Result<(), LabError> {
        write_json(&dir.join(FILE), self)
    }

    /// Reads `record.json` of `dir`, or the file itself.
    ///
    /// # Errors
    /// When it cannot be read, is no record, or was written by a newer lab.
    pub fn load(dir: &Path) -> Result<Self, LabError> {
        #[derive(Deserialize)]
        struct FormatVersion {
            format: u32,
        }
        let path = if dir.is_dir() { dir.join(FILE) } else { dir.to_owned() };
        let refuse = |what: String| LabError::usage(format!("{}: {what}", path.display()));
        let json = fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
        let bad = |error| refuse(format!("not a record of the lab: {error}"));
        // The version first: what else a newer format holds need not make sense here.
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

/// Writes beside and renames, so that the file is the old or the new one, never half of either.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> Result<(), LabError> {
    let beside = path.with_extension("new");
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&beside, content))
        .and_then(|()| fs::rename(&beside, path))
        .map_err(LabError::io(format!("cannot write {}", path.display())))
}

/// The same for a value as JSON.
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
