//! Validation of experiments beyond their syntax. Each error is reported with the location of its key, and all errors are reported
//! together.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    thread,
};

use turnpike_strict::{Document, hint, nearest};

use super::{Experiment, ServiceSpec, fill::Variables, plain};
use crate::{
    error::LabError,
    metric,
    probe::cpu::cpu_list,
    record::Threshold,
    topology::spec::{PLAIN, Spec, is_plain},
};

impl Experiment {
    pub(crate) fn check(&self, document: &mut Document) {
        self.check_figures(document);
        self.check_thresholds(document);
        let spec = match self.topology() {
            Ok(spec) => spec,
            Err(error) => {
                document.problem("topology", error.to_string());
                // If the topology is invalid, its namespaces and addresses are unknown, so they are not
                // checked.
                self.check_services(None, document);
                self.check_metrics(document);
                return;
            }
        };
        let known: BTreeSet<String> =
            spec.iter().flat_map(|spec| &spec.namespace).map(|space| space.name.clone()).collect();
        self.check_services(Some(&known), document);
        self.check_metrics(document);
        self.check_variables(spec.as_ref(), document);
    }

    fn check_figures(&self, document: &mut Document) {
        if !is_plain(&self.name, 64) {
            document.problem("name", format!("name \"{}\": expected {PLAIN}", self.name));
        }
        let limits = self.limits;
        if !(limits.late_p99_us > 0.0 && limits.late_p99_us.is_finite()) {
            document.problem(
                "limits.late_p99_us",
                format!("late_p99_us {}: expected microseconds, above 0", limits.late_p99_us),
            );
        }
        let percent = |value| (value, 0.0..=100.0, "");
        let seconds = |value| (Some(value), 0.0..=600.0, " seconds");
        for (path, (value, range, unit)) in [
            ("duration", (Some(self.duration), 0.1..=3600.0, " seconds")),
            ("warmup", seconds(self.warmup)),
            ("discard", seconds(self.discard)),
            ("workload.rest", seconds(self.workload.rest)),
            ("rounds", (Some(f64::from(self.rounds)), 1.0..=1000.0, "")),
            ("limits.steal_percent", percent(Some(limits.steal_percent))),
            ("limits.foreign_percent", percent(Some(limits.foreign_percent))),
            ("limits.loss_percent", percent(limits.loss_percent)),
            ("limits.broken_percent", percent(limits.broken_percent)),
        ] {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let name = path.strip_prefix("limits.").unwrap_or(path);
                let (least, most) = range.into_inner();
                document.problem(path, format!("{name} {value}: expected {least} to {most}{unit}"));
            }
        }
        if self.subject.is_empty() {
            document.problem("subject", "no [[subject]]: give at least one program to measure");
        }
        for name in self.sweep.iter().filter(|(_, values)| values.is_empty()).map(|(name, _)| name) {
            document.problem(&format!("sweep.{name}"), format!("sweep.{name} has no values"));
        }
    }

    fn placed_services(&self) -> impl Iterator<Item = (String, &ServiceSpec)> {
        fn placed<'a>(list: &str, services: &'a [ServiceSpec]) -> Vec<(String, &'a ServiceSpec)> {
            let (included, own): (Vec<&ServiceSpec>, _) =
                services.iter().partition(|service| service.is_included);
            let own =
                own.into_iter().enumerate().map(|(index, service)| (format!("{list}[{index}]"), service));
            included.into_iter().map(|service| ("include".to_owned(), service)).chain(own).collect()
        }
        placed("helper", &self.helper).into_iter().chain(placed("subject", &self.subject))
    }

    fn check_services(&self, spaces: Option<&BTreeSet<String>>, document: &mut Document) {
        let mut names = BTreeSet::new();
        let mut places = Vec::new();
        for (path, service) in self.placed_services() {
            let name = &service.name;
            if !is_plain(name, 32) {
                document.problem(&format!("{path}.name"), no_name(name));
            } else if !names.insert(name.clone()) {
                document.problem(&format!("{path}.name"), format!("\"{name}\" is used twice"));
            }
            if let Some(ready) = &service.ready {
                if ready.probe().is_none() {
                    document.problem(
                        &format!("{path}.ready"),
                        format!("{name}: ready needs exactly one of stun, log, udp_port, tcp_port"),
                    );
                }
                places.push((format!("{path}.ready.from"), ready.from.as_ref()));
            }
            for file in service.files.keys().filter(|file| file.contains('/') || file.starts_with('.')) {
                document.problem(
                    &format!("{path}.files.{file}"),
                    format!(
                        "{name}: file \"{file}\": expected a file name without a directory or a leading dot"
                    ),
                );
            }
            places.push((format!("{path}.namespace"), service.namespace.as_ref()));
            check_cpus(name, service.cpus.as_deref(), &path, document);
            for (index, node) in service.node.iter().enumerate() {
                let path = format!("{path}.node[{index}]");
                let name = format!("{name}-{}", node.name);
                if !is_plain(&node.name, 32) {
                    document.problem(&format!("{path}.name"), no_name(&node.name));
                } else if !names.insert(name.clone()) {
                    document.problem(&format!("{path}.name"), format!("\"{name}\" is used twice"));
                }
                places.push((format!("{path}.namespace"), node.namespace.as_ref()));
                check_cpus(&name, node.cpus.as_deref(), &path, document);
            }
        }
        check_cpus("the workload", self.workload.cpus.as_deref(), "workload", document);
        places.push(("workload.namespace".to_owned(), self.workload.namespace.as_ref()));
        let far_ends = self.workload.delivered_at.iter().enumerate();
        places.extend(far_ends.map(|(index, name)| (format!("workload.delivered_at[{index}]"), Some(name))));
        let Some(spaces) = spaces else { return };
        for (path, name) in places {
            if let Some(name) = name.filter(|name| !spaces.contains(*name)) {
                document.problem(&path, no_namespace(name, spaces));
            }
        }
    }

    fn check_metrics(&self, document: &mut Document) {
        let of_processes: Vec<String> = self
            .services()
            .flat_map(ServiceSpec::process_names)
            .map(|process| metric::of_process(&process))
            .collect();
        let asked = self.metrics.iter().enumerate().map(|(index, name)| (format!("metrics[{index}]"), name));
        let thresholds =
            self.placed_thresholds().map(|(path, threshold)| (format!("{path}.metric"), &threshold.metric));
        for (path, name) in asked.chain([("metric".to_owned(), &self.metric)]).chain(thresholds) {
            // Fields of the result are also metrics, and so is the CPU time of each process.
            let fields = &self.workload.fields;
            let is_known = match metric::is_of_process(name) {
                true => of_processes.contains(name),
                false => metric::find(name).is_some(),
            };
            if is_known || fields.contains_key(name) || document.is_wrong("workload.fields") {
                continue;
            }
            let known =
                || metric::METRICS.iter().map(|metric| metric.name).chain(fields.keys().map(String::as_str));
            let hint = nearest(name, known().chain(of_processes.iter().map(String::as_str)))
                .map_or_else(String::new, |meant| format!("; did you mean \"{meant}\"?"));
            let list = known().collect::<Vec<_>>().join(", ");
            document.problem(&path, format!("no metric \"{name}\"{hint} (expected one of {list})"));
        }
    }

    fn placed_thresholds(&self) -> impl Iterator<Item = (String, &Threshold)> {
        let placed = |list: &'static str| move |(index, threshold)| (format!("{list}[{index}]"), threshold);
        let must = self.must.iter().enumerate().map(placed("must"));
        must.chain(self.aim.iter().enumerate().map(placed("aim")))
    }

    fn check_thresholds(&self, document: &mut Document) {
        let names = || self.subject.iter().map(|service| service.name.as_str());
        for (path, threshold) in self.placed_thresholds() {
            if let Some(mistake) = threshold.mistake() {
                document.problem(&path, mistake);
            }
            for (key, name) in [("subject", &threshold.subject), ("against", &threshold.against)] {
                let Some(name) = name.as_deref().filter(|name| names().all(|known| known != *name)) else {
                    continue;
                };
                let what = format!("no subject \"{name}\"; {}", hint(name, names()));
                document.problem(&format!("{path}.{key}"), what);
            }
        }
    }

    fn check_variables(&self, spec: Option<&Spec>, document: &mut Document) {
        let addresses = spec.map(Spec::addresses).unwrap_or_default();
        for point in self.points() {
            let variables = self.variables(&addresses, &point, Path::new("."));
            let mut tell = |path: &str, error: LabError| document.problem(path, error.to_string());
            for (path, service) in self.placed_services() {
                let Some(own) = scope(&variables, &service.vars, &path, &mut tell) else { continue };
                for (index, node) in service.node.iter().enumerate() {
                    let at = format!("{path}.node[{index}]");
                    if let Some(mut own) = scope(&own, &node.vars, &at, &mut tell) {
                        own.set("node", &node.name);
                        check_texts(service, &own, &path, &mut tell);
                    }
                }
                if service.node.is_empty() {
                    check_texts(service, &own, &path, &mut tell);
                }
            }
            // The workload is checked with the variables of each subject in turn.
            for variables in self.subject.iter().filter_map(|subject| subject.scope(&variables).ok()) {
                if let Err(error) = variables.command(&self.workload.command) {
                    tell("workload.command", error);
                }
                let texts =
                    self.workload.env.iter().map(|(name, text)| (format!("workload.env.{name}"), text));
                for (path, text) in texts.chain([("workload.result".to_owned(), &self.workload.result)]) {
                    if let Err(error) = variables.text(text) {
                        tell(&path, error);
                    }
                }
            }
        }
    }
}

/// Returns `None` if one of the variables at `path` is invalid.
fn scope(
    variables: &Variables,
    vars: &BTreeMap<String, toml::Value>,
    path: &str,
    tell: &mut impl FnMut(&str, LabError),
) -> Option<Variables> {
    for (name, value) in vars {
        if let Err(error) = variables.text(&plain(value)) {
            tell(&format!("{path}.vars.{name}"), error);
        }
    }
    variables.with(vars).ok()
}

fn check_texts(
    service: &ServiceSpec,
    variables: &Variables,
    path: &str,
    tell: &mut impl FnMut(&str, LabError),
) {
    for (key, command) in [("command", Some(&service.command)), ("version", service.version.as_ref())] {
        if let Some(Err(error)) = command.map(|command| variables.command(command)) {
            tell(&format!("{path}.{key}"), error);
        }
    }
    for (key, text) in service.clone().texts() {
        if let Err(error) = variables.text(text) {
            tell(&format!("{path}.{key}"), error);
        }
    }
}

fn no_name(name: &str) -> String {
    format!("name \"{name}\": expected at most 32 {PLAIN}")
}

fn no_namespace(name: &str, spaces: &BTreeSet<String>) -> String {
    if spaces.is_empty() {
        return format!("namespace \"{name}\", but topology = \"host\" has none");
    }
    format!("no namespace \"{name}\"; {}", hint(name, spaces.iter().map(String::as_str)))
}

fn check_cpus(who: &str, list: Option<&str>, path: &str, document: &mut Document) {
    let Some(list) = list else { return };
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let problem = match cpu_list(list).and_then(|cpus| cpus.into_iter().max()) {
        None => format!("{who}: cpus \"{list}\": expected a list such as \"0\" or \"1-3\""),
        Some(highest) if highest >= cpus => format!(
            "{who} is pinned to CPU {highest}, but this machine has {cpus}: lower `cpus`, or add CPUs"
        ),
        Some(_) => return,
    };
    document.problem(&format!("{path}.cpus"), problem);
}
