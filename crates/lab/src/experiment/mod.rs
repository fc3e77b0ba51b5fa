//! Experiment files: subjects, load, number of rounds and deciding metric. They are validated when they are read, before anything runs.

mod check;
pub(crate) mod fill;
mod service;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use turnpike_strict::Document;

use self::{fill::Variables, service::require};
pub(crate) use self::{
    fill::{CommandLine, plain},
    service::{Ready, ServiceSpec},
};
use crate::{
    builtin_experiments::{BuiltinText, EXPERIMENTS, PARTS},
    error::LabError,
    invalid_rounds::VoidLimits,
    record::{Threshold, VerdictRules},
    tools,
    topology::spec::Spec,
};

pub(crate) const COMMAND_LINE: &str = "command line";

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Experiment {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) about: String,
    /// `veth` or `wire` (client, relay, peer), `host`, or a topology file relative to this file.
    #[serde(default = "veth")]
    pub(crate) topology: String,
    pub(crate) metric: String,
    #[serde(default)]
    pub(crate) metrics: Vec<String>,
    #[serde(default = "eight")]
    pub(crate) rounds: u32,
    #[serde(default = "five")]
    pub(crate) duration: f64,
    #[serde(default = "one")]
    pub(crate) warmup: f64,
    /// Length in seconds of the first run after each start, which is discarded; 0 for none.
    #[serde(default = "one")]
    pub(crate) discard: f64,
    /// Seed; if absent, a random one is drawn and printed.
    pub(crate) seed: Option<u64>,
    /// Runs the baseline twice per round, to determine the noise floor.
    #[serde(default = "yes")]
    pub(crate) aa: bool,
    /// Reads hardware counters with `perf stat`, which slows down all subjects equally.
    #[serde(default = "yes")]
    pub(crate) counters: bool,
    /// Shared part; its variables and programs come before those of this file.
    include: Option<String>,
    #[serde(default)]
    without: Vec<String>,
    #[serde(default)]
    pub(crate) vars: BTreeMap<String, toml::Value>,
    /// Variables with several values: each combination is an experiment with its own record.
    #[serde(default)]
    pub(crate) sweep: BTreeMap<String, Vec<toml::Value>>,
    #[serde(default)]
    pub(crate) rules: VerdictRules,
    #[serde(default)]
    pub(crate) limits: VoidLimits,
    #[serde(default)]
    pub(crate) must: Vec<Threshold>,
    #[serde(default)]
    pub(crate) aim: Vec<Threshold>,
    #[serde(default)]
    pub(crate) subject: Vec<ServiceSpec>,
    #[serde(default)]
    pub(crate) helper: Vec<ServiceSpec>,
    pub(crate) workload: WorkloadSpec,
    #[serde(skip)]
    pub(crate) path: PathBuf,
    #[serde(skip)]
    pub(crate) parts: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExperimentPart {
    #[serde(default)]
    vars: BTreeMap<String, toml::Value>,
    #[serde(default)]
    subject: Vec<ServiceSpec>,
    #[serde(default)]
    helper: Vec<ServiceSpec>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkloadSpec {
    pub(crate) command: CommandLine,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cpus: Option<String>,
    pub(crate) namespace: Option<String>,
    #[serde(default)]
    pub(crate) format: ResultFormat,
    #[serde(default = "result_file")]
    pub(crate) result: String,
    /// Maps metrics to the paths of numbers in the result, such as `"end.sum.bits_per_second"`.
    #[serde(default)]
    pub(crate) fields: BTreeMap<String, String>,
    /// Namespaces in which arriving datagrams count as delivered; if absent, the workload's own count is used.
    #[serde(default)]
    pub(crate) delivered_at: Vec<String>,
    /// Measures the whole run of a workload whose duration cannot be set.
    #[serde(default)]
    pub(crate) whole: bool,
    /// Seconds to wait between two runs with the same subject, because coturn keeps the 5-tuple of a deleted allocation for one second.
    #[serde(default)]
    pub(crate) rest: f64,
    #[serde(default = "thirty")]
    pub(crate) patience: f64,
    /// Variable that `find-max` and `sweep` set: datagrams per second, or the number of `clients`.
    #[serde(default = "rate")]
    pub(crate) rate: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ResultFormat {
    #[default]
    Turnpike,
    Iperf3,
    None,
}

impl Experiment {
    pub(crate) fn find(wanted: &Path) -> Result<BuiltinText, LabError> {
        EXPERIMENTS.find(wanted, Path::new("experiments"))
    }

    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, LabError> {
        Self::parse_with(path, text, &BTreeMap::new())
    }

    pub(crate) fn parse_with(
        path: &Path,
        text: &str,
        parts: &BTreeMap<String, String>,
    ) -> Result<Self, LabError> {
        let (mut experiment, mut document): (Self, _) = Document::parse(path, text)?;
        if path == Path::new(COMMAND_LINE) {
            document.forget_places();
        }
        path.clone_into(&mut experiment.path);
        if let Some(name) = experiment.include.clone()
            && let Err(error) = experiment.include_part(&name, parts)
        {
            document.problem("include", error.to_string());
        }
        experiment.check(&mut document);
        document.finish()?;
        Ok(experiment)
    }

    fn include_part(&mut self, name: &str, known: &BTreeMap<String, String>) -> Result<(), LabError> {
        let BuiltinText { path, text } = match known.get(name) {
            Some(text) => BuiltinText { path: name.into(), text: text.clone() },
            None => PARTS.find(Path::new(name), self.path.parent().unwrap_or(Path::new(".")))?,
        };
        let (mut part, document): (ExperimentPart, _) = Document::parse(&path, &text)?;
        document.finish()?;
        part.subject.retain(|service| !self.without.contains(&service.name));
        for service in part.subject.iter_mut().chain(&mut part.helper) {
            service.is_included = true;
        }
        for (name, value) in part.vars {
            self.vars.entry(name).or_insert(value);
        }
        self.subject.splice(..0, part.subject);
        self.helper.splice(..0, part.helper);
        self.parts.insert(name.to_owned(), text);
        Ok(())
    }

    /// Removes subjects whose program is not installed; returns a message for each.
    pub(crate) fn drop_missing_subjects(&mut self, variables: &Variables) -> Vec<String> {
        let mut told = Vec::new();
        self.subject.retain(|service| {
            let found = service.check_tools(variables);
            let missing = found.err().filter(|_| service.optional);
            told.extend(missing.iter().map(|error| format!("{} is skipped: {error}", service.name)));
            missing.is_none()
        });
        told
    }

    pub(crate) fn topology(&self) -> Result<Option<Spec>, LabError> {
        match self.topology.as_str() {
            "host" => Ok(None),
            name => Spec::load(name, self.path.parent().unwrap_or(Path::new("."))).map(Some),
        }
    }

    pub(crate) fn wants_certificate(&self) -> bool {
        let names = |text: &String| text.contains("{cert}");
        let commands = self.services().map(|service| &service.command).chain([&self.workload.command]);
        commands.filter_map(|command| command.words().ok()).flatten().any(|word| names(&word))
            || self.services().flat_map(|service| service.files.values()).any(names)
    }

    pub(crate) fn services(&self) -> impl Iterator<Item = &ServiceSpec> {
        self.helper.iter().chain(&self.subject)
    }

    /// Values of the variables for each combination of the sweep, in the order of the file.
    pub(crate) fn points(&self) -> Vec<BTreeMap<String, String>> {
        let mut points = vec![self.vars.iter().map(|(name, value)| (name.clone(), plain(value))).collect()];
        for (name, values) in &self.sweep {
            points = points
                .iter()
                .flat_map(|point: &BTreeMap<String, String>| {
                    values.iter().map(|value| {
                        let mut point = point.clone();
                        point.insert(name.clone(), plain(value));
                        point
                    })
                })
                .collect();
        }
        points
    }

    pub(crate) fn variables(
        &self,
        addresses: &BTreeMap<String, String>,
        point: &BTreeMap<String, String>,
        directory: &Path,
    ) -> Variables {
        let experiments = self.path.parent().unwrap_or(Path::new(""));
        let mut variables = Variables::new(experiments, addresses, point, directory);
        variables.set_window(self.warmup, self.duration);
        variables
    }

    pub(crate) fn workload_of_first(&self, variables: &Variables) -> Result<Vec<String>, LabError> {
        match self.subject.first() {
            Some(subject) => subject.scope(variables)?.command(&self.workload.command),
            None => variables.command(&self.workload.command),
        }
    }

    pub(crate) fn check_tools(&self, variables: &Variables) -> Result<(), LabError> {
        for service in self.services() {
            service.check_tools(variables)?;
        }
        require(&self.workload_of_first(variables)?, "the workload")?;
        let is_pinned = |service: &ServiceSpec| {
            service.cpus.is_some() || service.node.iter().any(|node| node.cpus.is_some())
        };
        if self.services().any(is_pinned) || self.workload.cpus.is_some() {
            tools::require("taskset", "to pin programs to CPUs")?;
        }
        Ok(())
    }
}

/// Functions for `#[serde(default = …)]`.
macro_rules! defaults {
    ($($name:ident: $kind:ty = $value:expr;)*) => {
        $(fn $name() -> $kind {
            $value
        })*
    };
}

defaults! {
    veth: String = "veth".to_owned();
    result_file: String = "{result}".to_owned();
    rate: String = "rate".to_owned();
    yes: bool = true;
    one: f64 = 1.0;
    five: f64 = 5.0;
    thirty: f64 = 30.0;
    eight: u32 = 8;
}

#[cfg(test)]
mod tests;
