//! Experiment files: who is compared, under which load, how often, and what decides. Checked when read, so that a
//! mistake costs a second and not half an hour.

pub(crate) mod fill;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fmt,
    path::{Path, PathBuf},
    thread,
};

use serde::Deserialize;

use self::fill::Variables;
use crate::{
    error::LabError,
    metric,
    strict::{self, nearest},
    tools,
    topology::spec::{Spec, is_plain},
    verdict::Rules,
    void::Limits,
};

/// An experiment file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Experiment {
    pub(crate) name: String,
    /// One sentence for whoever reads the progress and the notes of the record.
    #[serde(default)]
    pub(crate) about: String,
    /// `routed` (client, relay, peer), `host`, or a topology file relative to this file.
    #[serde(default = "routed")]
    pub(crate) topology: String,
    /// The metric that decides.
    pub(crate) metric: String,
    /// Further metrics that the summary judges.
    #[serde(default)]
    pub(crate) metrics: Vec<String>,
    #[serde(default = "eight")]
    pub(crate) rounds: u32,
    /// Measured seconds of a run.
    #[serde(default = "five")]
    pub(crate) duration: f64,
    /// Seconds of load before them.
    #[serde(default = "one")]
    pub(crate) warmup: f64,
    /// Seconds of the first run after each start, which is thrown away; 0 for none.
    #[serde(default = "one")]
    pub(crate) discard: f64,
    /// Order and bootstrap; drawn and printed if absent.
    pub(crate) seed: Option<u64>,
    /// Whether the baseline runs twice a round, for the noise floor.
    #[serde(default = "yes")]
    pub(crate) aa: bool,
    /// Hardware counters by `perf stat`; its cost is the same for all subjects.
    #[serde(default = "yes")]
    pub(crate) counters: bool,
    /// One further run a subject under `perf trace` or `strace`, for the table of syscalls.
    #[serde(default)]
    pub(crate) syscalls: bool,
    /// Names for use in commands.
    #[serde(default)]
    pub(crate) vars: BTreeMap<String, toml::Value>,
    /// Names with several values: each combination is an experiment with its own record.
    #[serde(default)]
    pub(crate) sweep: BTreeMap<String, Vec<toml::Value>>,
    #[serde(default)]
    rules: RuleChanges,
    #[serde(default)]
    limits: LimitChanges,
    /// Those compared; the first is the baseline.
    pub(crate) subject: Vec<Service>,
    /// Started before the subject, anew each time: reflectors, servers behind a forwarder.
    #[serde(default)]
    pub(crate) helper: Vec<Service>,
    pub(crate) workload: Workload,
    /// Where relative paths start and what messages call it.
    #[serde(skip)]
    pub(crate) path: PathBuf,
}

/// What the file says of [`Rules`].
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleChanges {
    min_rounds: Option<u32>,
    resolution: Option<f64>,
    need_noise_floor: Option<bool>,
    max_voided: Option<f64>,
}

/// What the file says of [`Limits`].
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitChanges {
    late_p99_us: Option<f64>,
    steal_percent: Option<f64>,
}

/// A program that runs while the load does.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) command: CommandLine,
    pub(crate) cwd: Option<PathBuf>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// As `taskset -c` takes it.
    pub(crate) cpus: Option<String>,
    /// Absent for the host.
    pub(crate) namespace: Option<String>,
    pub(crate) ready: Option<Ready>,
    /// Written into `{dir}` before it starts: configuration files.
    #[serde(default)]
    pub(crate) files: BTreeMap<String, String>,
    /// `http://ADDRESS:PORT/PATH` of Prometheus metrics.
    pub(crate) metrics: Option<String>,
    /// Prints its version.
    pub(crate) version: Option<CommandLine>,
}

/// When a program has started.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ready {
    /// `ADDRESS:PORT` answers a STUN Binding request over UDP.
    pub(crate) stun: Option<String>,
    /// `ADDRESS:PORT` accepts a TCP connection.
    pub(crate) tcp: Option<String>,
    /// `http://ADDRESS:PORT/PATH` answers 200.
    pub(crate) http: Option<String>,
    /// Its output has this text.
    pub(crate) log: Option<String>,
    /// A UDP socket of its namespace is bound to this port.
    pub(crate) udp_port: Option<String>,
    /// A TCP socket of its namespace listens on this port: unlike `tcp`, nothing is connected.
    pub(crate) tcp_port: Option<String>,
    /// The namespace that asks; its own if absent.
    pub(crate) from: Option<String>,
    /// Seconds until it counts as failed.
    #[serde(default = "ten")]
    pub(crate) within: f64,
}

/// What makes the load and how its result is read.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Workload {
    pub(crate) command: CommandLine,
    pub(crate) cwd: Option<PathBuf>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cpus: Option<String>,
    pub(crate) namespace: Option<String>,
    /// How its JSON is read.
    #[serde(default)]
    pub(crate) format: Format,
    /// `stdout`, or the file that it writes.
    #[serde(default = "result_file")]
    pub(crate) result: String,
    /// For `format = "json"`: metric to the path of a number, such as `"end.sum.bits_per_second"`.
    #[serde(default)]
    pub(crate) fields: BTreeMap<String, String>,
    /// Namespaces at which arriving datagrams count as delivered; absent: what the workload itself says.
    #[serde(default)]
    pub(crate) delivered_at: Vec<String>,
    /// Whether it takes no duration and what counts is its whole run.
    #[serde(default)]
    pub(crate) whole: bool,
    /// Seconds that it may take beyond warm-up and duration.
    #[serde(default = "thirty")]
    pub(crate) patience: f64,
    /// The rate variable that `find-max` and `sweep` set, in datagrams a second.
    #[serde(default = "rate")]
    pub(crate) rate: String,
}

/// Formats of results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// The generators' contract of DESIGN.md.
    #[default]
    Turnpike,
    /// `iperf3 --json`.
    Iperf3,
    /// Any JSON object, by `fields`.
    Json,
    /// No result: the counters alone.
    None,
}

/// A command as one line (split as a shell would, no shell runs) or as a list of words.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a command line or a list of words")]
pub(crate) enum CommandLine {
    Line(String),
    Words(Vec<String>),
}

impl CommandLine {
    /// The words, variables still in them.
    pub(crate) fn words(&self) -> Result<Vec<String>, LabError> {
        let words = match self {
            Self::Line(line) => shlex::split(line)
                .ok_or_else(|| LabError::usage(format!("`{line}`: a quote is not closed")))?,
            Self::Words(words) => words.clone(),
        };
        if words.is_empty() { Err(LabError::usage("a command is empty")) } else { Ok(words) }
    }
}

impl Experiment {
    pub(crate) fn load(path: &Path) -> Result<Self, LabError> {
        let path = resolve(path)?;
        let mut experiment: Self = strict::read(&path)?;
        experiment.path = path;
        experiment.check()?;
        Ok(experiment)
    }

    /// From text, as if it were `path`.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, LabError> {
        let mut experiment: Self = strict::parse(&path.display().to_string(), text)?;
        path.clone_into(&mut experiment.path);
        experiment.check()?;
        Ok(experiment)
    }

    /// The topology that it runs in; `None` for the host.
    pub(crate) fn topology(&self) -> Result<Option<Spec>, LabError> {
        match self.topology.as_str() {
            "host" => Ok(None),
            "routed" => Spec::load(None).map(Some),
            file => {
                let base = self.path.parent().unwrap_or(Path::new("."));
                Spec::load(Some(&base.join(file))).map(Some)
            }
        }
    }

    /// When a verdict is given.
    pub(crate) fn rules(&self) -> Rules {
        let (usual, said) = (Rules::default(), self.rules);
        Rules {
            min_rounds: said.min_rounds.unwrap_or(usual.min_rounds),
            resolution: said.resolution.unwrap_or(usual.resolution),
            need_noise_floor: said.need_noise_floor.unwrap_or(usual.need_noise_floor),
            max_voided: said.max_voided.unwrap_or(usual.max_voided),
        }
    }

    /// When a run is void.
    pub(crate) fn limits(&self) -> Limits {
        let usual = Limits::default();
        Limits {
            late_p99_us: self.limits.late_p99_us.unwrap_or(usual.late_p99_us),
            steal_percent: self.limits.steal_percent.unwrap_or(usual.steal_percent),
        }
    }

    /// All that run beside the workload.
    pub(crate) fn services(&self) -> impl Iterator<Item = &Service> {
        self.helper.iter().chain(&self.subject)
    }

    /// One set of values for each combination of the sweep, in the order of the file.
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

    pub(crate) fn check(&self) -> Result<(), LabError> {
        self.check_figures()?;
        let spec = self.topology()?;
        let known: BTreeSet<String> =
            spec.iter().flat_map(|spec| &spec.namespace).map(|space| space.name.clone()).collect();
        self.check_services(&known)?;
        self.check_metrics()?;
        self.check_variables(spec.as_ref())
    }

    fn refuse<T>(&self, problem: impl AsRef<str>) -> Result<T, LabError> {
        Err(LabError::usage(format!("{}: {}", self.path.display(), problem.as_ref())))
    }

    fn check_figures(&self) -> Result<(), LabError> {
        if !is_plain(&self.name, 64) {
            return self
                .refuse(format!("name \"{}\": expected lower case letters, digits and hyphens", self.name));
        }
        if !(0.1..=3600.0).contains(&self.duration) {
            return self.refuse(format!("duration {}: expected 0.1 to 3600 seconds", self.duration));
        }
        for (name, value) in [("warmup", self.warmup), ("discard", self.discard)] {
            if !(0.0..=600.0).contains(&value) {
                return self.refuse(format!("{name} {value}: expected 0 to 600 seconds"));
            }
        }
        if !(1..=1000).contains(&self.rounds) {
            return self.refuse(format!("rounds {}: expected 1 to 1000", self.rounds));
        }
        if self.subject.is_empty() {
            return self.refuse("no [[subject]]: name at least one program to measure");
        }
        if let Some((name, _)) = self.sweep.iter().find(|(_, values)| values.is_empty()) {
            return self.refuse(format!("sweep.{name} has no values"));
        }
        Ok(())
    }

    fn check_services(&self, known: &BTreeSet<String>) -> Result<(), LabError> {
        let mut names = BTreeSet::new();
        for service in self.services() {
            if !is_plain(&service.name, 32) {
                return self.refuse(format!(
                    "name \"{}\": expected at most 32 lower case letters, digits and hyphens",
                    service.name
                ));
            }
            if !names.insert(&service.name) {
                return self.refuse(format!("\"{}\" is named twice", service.name));
            }
            if let Some(ready) = &service.ready
                && ready.probes() != 1
            {
                return self.refuse(format!(
                    "{}: ready needs exactly one of stun, tcp, http, log, udp_port, tcp_port",
                    service.name
                ));
            }
            for file in service.files.keys() {
                if file.contains('/') || file.starts_with('.') {
                    return self.refuse(format!("{}: file \"{file}\": expected a plain name", service.name));
                }
            }
        }
        let namespaces = self
            .services()
            .flat_map(|service| {
                [&service.namespace, service.ready.as_ref().map_or(&None, |ready| &ready.from)]
            })
            .chain([&self.workload.namespace])
            .flatten()
            .chain(&self.workload.delivered_at);
        for name in namespaces {
            if !known.contains(name) {
                return self.refuse(if known.is_empty() {
                    format!("namespace \"{name}\", but topology = \"host\" has none")
                } else {
                    match nearest(name, known.iter().map(String::as_str)) {
                        Some(meant) => format!("no namespace \"{name}\"; did you mean \"{meant}\"?"),
                        None => format!(
                            "no namespace \"{name}\"; there are: {}",
                            known.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
                        ),
                    }
                });
            }
        }
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        for (who, list) in self
            .services()
            .map(|service| (service.name.as_str(), &service.cpus))
            .chain([("the workload", &self.workload.cpus)])
        {
            let Some(list) = list else { continue };
            match highest_cpu(list) {
                None => {
                    return self
                        .refuse(format!("{who}: cpus \"{list}\": expected a list such as \"0\" or \"1-3\""));
                }
                Some(highest) if highest >= cpus => {
                    return self.refuse(format!(
                        "{who} is pinned to CPU {highest}, but this machine has {cpus}: lower `cpus`, or use more CPUs"
                    ));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn check_metrics(&self) -> Result<(), LabError> {
        // A field makes a metric of its own.
        for name in self.metrics.iter().chain([&self.metric]) {
            if metric::find(name).is_none() && !self.workload.fields.contains_key(name) {
                let known = metric::METRICS.iter().map(|metric| metric.name);
                return self.refuse(match nearest(name, known) {
                    Some(meant) => format!("no metric \"{name}\"; did you mean \"{meant}\"?"),
                    None => format!("no metric \"{name}\"; the manual lists them"),
                });
            }
        }
        if self.workload.format == Format::Json && self.workload.fields.is_empty() {
            return self.refuse("workload.format = \"json\" needs workload.fields");
        }
        Ok(())
    }

    /// Every `{name}` of every command must stand for something, at each point of the sweep.
    fn check_variables(&self, spec: Option<&Spec>) -> Result<(), LabError> {
        let addresses = spec.map(Spec::addresses).unwrap_or_default();
        for point in self.points() {
            let variables = Variables::new(self, &addresses, &point, Path::new("."));
            let filled = self.fill_all(&variables);
            if let Err(error) = filled {
                return self.refuse(error.to_string());
            }
        }
        Ok(())
    }

    fn fill_all(&self, variables: &Variables) -> Result<(), LabError> {
        for service in self.services() {
            service.fill(variables)?;
        }
        variables.command(&self.workload.command)?;
        variables.text(&self.workload.result)?;
        Ok(())
    }

    /// Fails with the remedy if a program that it starts is not installed.
    pub(crate) fn check_tools(&self, variables: &Variables) -> Result<(), LabError> {
        let base = env::current_dir().unwrap_or_default();
        for service in self.services() {
            let words = variables.command(&service.command)?;
            require(&words, service.cwd.as_deref().unwrap_or(&base), &service.name)?;
        }
        let words = variables.command(&self.workload.command)?;
        require(&words, self.workload.cwd.as_deref().unwrap_or(&base), "the workload")?;
        if self.services().any(|service| service.cpus.is_some()) || self.workload.cpus.is_some() {
            tools::require("taskset", "to pin programs to CPUs")?;
        }
        Ok(())
    }
}

impl Service {
    /// The same with all variables replaced.
    pub(crate) fn fill(&self, variables: &Variables) -> Result<Self, LabError> {
        let mut filled = self.clone();
        filled.command = CommandLine::Words(variables.command(&self.command)?);
        for value in filled.env.values_mut() {
            *value = variables.text(value)?;
        }
        for content in filled.files.values_mut() {
            // Configuration languages have braces of their own, so only known names are replaced.
            *content = variables.lenient(content);
        }
        if let Some(url) = &mut filled.metrics {
            *url = variables.text(url)?;
        }
        if let Some(ready) = &mut filled.ready {
            for value in [
                &mut ready.stun,
                &mut ready.tcp,
                &mut ready.http,
                &mut ready.log,
                &mut ready.udp_port,
                &mut ready.tcp_port,
            ]
            .into_iter()
            .flatten()
            {
                *value = variables.text(value)?;
            }
        }
        Ok(filled)
    }
}

impl Ready {
    fn probes(&self) -> usize {
        [&self.stun, &self.tcp, &self.http, &self.log, &self.udp_port, &self.tcp_port]
            .into_iter()
            .flatten()
            .count()
    }
}

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let probes = [
            (&self.stun, "answers STUN"),
            (&self.tcp, "accepts TCP"),
            (&self.http, "answers HTTP"),
            (&self.log, "is in its output"),
            (&self.udp_port, "is bound as UDP port"),
            (&self.tcp_port, "listens as TCP port"),
        ];
        for (value, does) in probes {
            if let Some(value) = value {
                write!(f, "ready when {value} {does}")?;
            }
        }
        Ok(())
    }
}

/// `NAME` alone is `experiments/NAME.toml`.
fn resolve(path: &Path) -> Result<PathBuf, LabError> {
    if path.exists() {
        return Ok(path.to_owned());
    }
    let shipped = Path::new("experiments").join(path).with_extension("toml");
    if shipped.exists() {
        return Ok(shipped);
    }
    let names: Vec<String> = std::fs::read_dir("experiments")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_owned()))
        .collect();
    let wanted = path.display().to_string();
    Err(LabError::usage(match nearest(&wanted, names.iter().map(String::as_str)) {
        Some(meant) => format!("no experiment {wanted}; did you mean \"{meant}\"?"),
        None => format!("no experiment {wanted}: give a file, or the name of one in experiments/"),
    }))
}

fn require(words: &[String], base: &Path, who: &str) -> Result<(), LabError> {
    let Some(program) = words.first() else { return Ok(()) };
    let found =
        if program.contains('/') { base.join(program).is_file() } else { tools::find(program).is_some() };
    if found { Ok(()) } else { Err(LabError::usage(tools::missing(program, &format!("for {who}")))) }
}

/// The highest CPU of a list such as `0,2-3`.
fn highest_cpu(list: &str) -> Option<usize> {
    list.split(',')
        .map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (first <= last).then_some(last)
        })
        .try_fold(0, |highest, last| Some(highest.max(last?)))
}

/// A value as it stands in a command.
fn plain(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn routed() -> String {
    "routed".to_owned()
}

fn result_file() -> String {
    "{result}".to_owned()
}

fn rate() -> String {
    "rate".to_owned()
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

fn five() -> f64 {
    5.0
}

fn ten() -> f64 {
    10.0
}

fn thirty() -> f64 {
    30.0
}

fn eight() -> u32 {
    8
}

#[cfg(test)]
mod tests;
