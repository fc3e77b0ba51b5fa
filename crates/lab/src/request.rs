//! Request for a run, saved next to the record so that `lab rerun` can repeat it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use rand::Rng;
use serde::{Deserialize, Serialize};
use turnpike_strict::{Document, hint};

use crate::{
    builtin_experiments::BuiltinText,
    environment,
    error::LabError,
    experiment::{COMMAND_LINE, Experiment, fill::TURNPIKE},
    record::{BuildFile, RunRecord, Threshold, write_json, write_whole},
    search::RatePlan,
};

const EXPERIMENT: &str = "experiment.toml";
const REQUEST: &str = "request.json";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunRequest {
    /// Path of the experiment file, the base of relative paths in it.
    path: PathBuf,
    pub(crate) changes: Overrides,
    pub(crate) point: BTreeMap<String, String>,
    pub(crate) seed: u64,
    #[serde(default)]
    pub(crate) task: Task,
    /// Settings from a suite row or the command line, which override the file.
    #[serde(default)]
    pub(crate) variant: RowSettings,
    pub(crate) command: Vec<String>,
    #[serde(default)]
    parts: BTreeMap<String, String>,
    /// Text of the file when it was used; the file may have changed since.
    #[serde(skip)]
    text: String,
    /// Builds in the record that this request repeats.
    #[serde(skip)]
    pub(crate) repeats: Option<Vec<BuildFile>>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RowSettings {
    pub(crate) topology: Option<String>,
    #[serde(default)]
    pub(crate) must: Vec<Threshold>,
    #[serde(default)]
    pub(crate) aim: Vec<Threshold>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    #[default]
    Compare,
    Rates {
        plan: RatePlan,
        rounds: u32,
    },
    Profile,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, clap::Args)]
pub(crate) struct Overrides {
    /// Number of rounds; a verdict needs at least 6
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<u32>,
    /// Measured seconds per run
    #[arg(long, value_name = "S")]
    pub(crate) duration: Option<f64>,
    /// Seconds of load before the measurement
    #[arg(long, value_name = "S")]
    pub(crate) warmup: Option<f64>,
    /// Seconds of the first run after each start, which is discarded; 0 for none. Experiments that discard
    /// nothing (memory) are unaffected
    #[arg(long, value_name = "S")]
    pub(crate) discard: Option<f64>,
    /// Deciding metric
    #[arg(long, value_name = "NAME")]
    pub(crate) metric: Option<String>,
    /// Seed for the order of the runs [default: drawn at random and printed]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Also make one run per subject under `strace`
    #[arg(long)]
    pub(crate) syscalls: bool,
    /// Void a run if the generator falls behind by more than this (99th percentile, microseconds) [default:
    /// 1000]
    #[arg(long, value_name = "US")]
    pub(crate) max_late_us: Option<f64>,
    /// Void a run if the hypervisor steals more than this of the machine's CPU time [default: 1]
    #[arg(long, value_name = "PERCENT")]
    pub(crate) max_steal: Option<f64>,
    /// Void a run if other processes use more than this of the subject's cores [default: 3]
    #[arg(long, value_name = "PERCENT")]
    #[serde(default)]
    pub(crate) max_foreign: Option<f64>,
}

impl RunRequest {
    /// Creates a request for each selected point. `set` assigns variables and thereby selects points of the sweep.
    pub(crate) fn of(
        BuiltinText { path, text }: BuiltinText,
        changes: &Overrides,
        variant: &RowSettings,
        set: &[String],
    ) -> Result<Vec<Self>, LabError> {
        let mut experiment = Experiment::parse(&path, &text)?;
        changes.apply(variant, &mut experiment)?;
        let settings = parse_settings(set, &experiment)?;
        let mut points = experiment.points();
        for point in &mut points {
            point.extend(settings.clone());
        }
        points.dedup();
        let seed = experiment.seed.unwrap_or_else(draw_seed);
        Ok(points
            .into_iter()
            .map(|point| Self {
                path: path.clone(),
                changes: changes.clone(),
                point,
                seed,
                task: Task::Compare,
                variant: variant.clone(),
                parts: experiment.parts.clone(),
                command: std::env::args().collect(),
                text: text.clone(),
                repeats: None,
            })
            .collect())
    }

    pub(crate) fn load(directory: &Path) -> Result<Self, LabError> {
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read_to_string(&path).map_err(|error| {
                LabError::usage(format!(
                    "cannot read {}: {error}: give the directory of a lab record",
                    path.display()
                ))
            })
        };
        let request = read(REQUEST)?;
        let mut request: Self = serde_json::from_str(&request).map_err(|error| {
            LabError::usage(format!("{} is not a lab request: {error}", directory.join(REQUEST).display()))
        })?;
        request.text = read(EXPERIMENT)?;
        request.repeats = RunRecord::load(directory).ok().map(|record| record.programs);
        Ok(request)
    }

    pub(crate) fn save(&self, directory: &Path) -> Result<(), LabError> {
        write_json(&directory.join(REQUEST), self)?;
        write_whole(&directory.join(EXPERIMENT), self.text.as_bytes())
    }

    pub(crate) fn experiment(&self) -> Result<Experiment, LabError> {
        let mut experiment = Experiment::parse_with(&self.path, &self.text, &self.parts)?;
        self.changes.apply(&self.variant, &mut experiment)?;
        Ok(experiment)
    }

    pub(crate) fn point_name(&self, experiment: &Experiment) -> String {
        let parts: Vec<String> = experiment
            .sweep
            .keys()
            .filter_map(|name| Some(format!("{name}-{}", self.point.get(name)?)))
            .collect();
        parts
            .join("-")
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '_' })
            .collect()
    }

    pub(crate) fn make_directory(&self, base: &Path, experiment: &Experiment) -> Result<PathBuf, LabError> {
        let parts = [experiment.name.clone(), self.point_name(experiment), environment::stamp()];
        let name = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-");
        for attempt in 1..1000 {
            let directory =
                if attempt == 1 { base.join(&name) } else { base.join(format!("{name}-{attempt}")) };
            if !directory.exists() {
                let cannot = LabError::io(format!("cannot create {}", directory.display()));
                fs::create_dir_all(&directory).map_err(cannot)?;
                // The path must be absolute, because programs start in other directories.
                return directory
                    .canonicalize()
                    .map_err(LabError::io("cannot resolve the record's directory"));
            }
        }
        Err(LabError::failed(format!("{} already has 999 records from this second", base.display())))
    }
}

impl Overrides {
    fn apply(&self, variant: &RowSettings, experiment: &mut Experiment) -> Result<(), LabError> {
        if let Some(topology) = &variant.topology {
            topology.clone_into(&mut experiment.topology);
        }
        if !(variant.must.is_empty() && variant.aim.is_empty()) {
            (experiment.must, experiment.aim) = (variant.must.clone(), variant.aim.clone());
        }
        experiment.rounds = self.rounds.unwrap_or(experiment.rounds);
        experiment.duration = self.duration.unwrap_or(experiment.duration);
        experiment.warmup = self.warmup.unwrap_or(experiment.warmup);
        // Experiments that measure growth since the start never discard a run, whatever the suite sets.
        if experiment.discard > 0.0 {
            experiment.discard = self.discard.unwrap_or(experiment.discard);
        }
        experiment.metric = self.metric.clone().unwrap_or_else(|| experiment.metric.clone());
        experiment.seed = self.seed.or(experiment.seed);
        let limits = &mut experiment.limits;
        limits.late_p99_us = self.max_late_us.unwrap_or(limits.late_p99_us);
        limits.steal_percent = self.max_steal.unwrap_or(limits.steal_percent);
        limits.foreign_percent = self.max_foreign.unwrap_or(limits.foreign_percent);
        // The file has been validated, so any error is in the command line.
        let mut document = Document::without_places(Path::new(COMMAND_LINE));
        experiment.check(&mut document);
        Ok(document.finish()?)
    }
}

pub(crate) fn draw_seed() -> u64 {
    u64::from(rand::rng().random::<u32>())
}

/// Parses `name=value`. A value for a swept variable collapses its points into one.
fn parse_settings(set: &[String], experiment: &Experiment) -> Result<BTreeMap<String, String>, LabError> {
    set.iter()
        .map(|text| {
            let (name, value) = text
                .split_once('=')
                .ok_or_else(|| LabError::usage(format!("--set {text}: expected NAME=VALUE")))?;
            let known = || {
                experiment.vars.keys().chain(experiment.sweep.keys()).map(String::as_str).chain([TURNPIKE])
            };
            if !known().any(|known| known == name) {
                let hint = hint(name, known());
                return Err(LabError::usage(format!("--set {text}: no variable \"{name}\"; {hint}")));
            }
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;
    use crate::search::SearchSettings;

    const TEXT: &str = "
name = 'x'
metric = 'delivered_pps'
topology = 'host'
[vars]
port = 5000
[sweep]
clients = [1, 8]
[[subject]]
name = 'a'
command = 'sleep {port}'
[workload]
command = 'true {clients}'
";

    fn requests(set: &[&str]) -> Result<Vec<RunRequest>, LabError> {
        let set: Vec<String> = set.iter().map(|text| (*text).to_owned()).collect();
        RunRequest::of(text(), &Overrides::default(), &RowSettings::default(), &set)
    }

    fn text() -> BuiltinText {
        BuiltinText { path: "x.toml".into(), text: TEXT.to_owned() }
    }

    #[test]
    fn setting_a_swept_variable_leaves_one_request() {
        assert_eq!(requests(&[]).unwrap().len(), 2);
        let one = requests(&["clients=4"]).unwrap();
        assert_eq!(one.len(), 1);
        assert_eq!(one[0].point["clients"], "4");
        assert_eq!(one[0].point_name(&one[0].experiment().unwrap()), "clients-4");
    }

    #[test]
    fn an_unknown_variable_is_refused_with_a_suggestion() {
        assert_eq!(
            requests(&["client=4"]).unwrap_err().to_string(),
            "--set client=4: no variable \"client\"; did you mean \"clients\"?"
        );
        assert!(requests(&["clients"]).is_err());
    }

    #[test]
    fn experiments_without_a_discarded_run_never_discard_one() {
        let discards = |text: &str| {
            let changes = Overrides { discard: Some(3.0), ..Overrides::default() };
            let text = BuiltinText { path: "x.toml".into(), text: text.to_owned() };
            let requests = RunRequest::of(text, &changes, &RowSettings::default(), &[]).unwrap();
            requests[0].experiment().unwrap().discard
        };
        assert_eq!(discards(TEXT), 3.0);
        assert_eq!(discards(&TEXT.replacen("[vars]", "discard = 0\n[vars]", 1)), 0.0);
    }

    #[test]
    fn a_request_survives_a_round_trip() {
        let directory = Dir::new();
        let changes = Overrides { rounds: Some(7), ..Overrides::default() };
        let threshold =
            Threshold { metric: "delivered_pps".to_owned(), at_least: Some(2.0), ..Threshold::default() };
        let variant = RowSettings { must: vec![threshold], ..RowSettings::default() };
        let mut requests = RunRequest::of(text(), &changes, &variant, &[]).unwrap();
        let request = &mut requests[1];
        request.task = Task::Rates { plan: RatePlan::FindMax(SearchSettings::default()), rounds: 3 };
        request.save(directory.path()).unwrap();
        let again = RunRequest::load(directory.path()).unwrap();
        assert_eq!(again.task, request.task);
        assert_eq!((again.seed, &again.point), (request.seed, &request.point));
        let experiment = again.experiment().unwrap();
        assert_eq!((experiment.rounds, &experiment.must, &experiment.aim), (7, &variant.must, &vec![]));
        assert!(RunRequest::load(&directory.at("none")).is_err());
    }
}
