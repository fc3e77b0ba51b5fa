//! Programs that run alongside the workload: a subject or a helper, possibly consisting of several processes,
//! such as the nodes of a fleet.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::fill::{CommandLine, Variables};
use crate::{error::LabError, record, tools};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServiceSpec {
    pub(crate) name: String,
    pub(crate) command: CommandLine,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// List as for `taskset -c`.
    pub(crate) cpus: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) ready: Option<Ready>,
    /// Variables of this service. Those of the current subject are also available to the workload.
    #[serde(default)]
    pub(crate) vars: BTreeMap<String, toml::Value>,
    #[serde(default)]
    pub(crate) node: Vec<SubjectNode>,
    #[serde(default)]
    pub(crate) files: BTreeMap<String, String>,
    /// URL of Prometheus metrics, in the form `http://ADDRESS:PORT/PATH`.
    pub(crate) metrics: Option<String>,
    pub(crate) version: Option<CommandLine>,
    #[serde(default)]
    pub(crate) optional: bool,
    #[serde(skip)]
    pub(super) is_included: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ready {
    /// Ready when `ADDRESS:PORT` answers a STUN Binding request over UDP.
    pub(crate) stun: Option<String>,
    pub(crate) log: Option<String>,
    /// Ready when a UDP socket in the service's namespace is bound to this port.
    pub(crate) udp_port: Option<String>,
    /// Ready when a TCP socket in the service's namespace listens on this port.
    pub(crate) tcp_port: Option<String>,
    /// Namespace from which to probe; defaults to the service's own namespace.
    pub(crate) from: Option<String>,
    #[serde(default = "ten")]
    pub(crate) within: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SubjectNode {
    pub(crate) name: String,
    pub(crate) cpus: Option<String>,
    pub(crate) namespace: Option<String>,
    #[serde(default)]
    pub(crate) vars: BTreeMap<String, toml::Value>,
}

impl ServiceSpec {
    pub(super) fn check_tools(&self, variables: &Variables) -> Result<(), LabError> {
        for process in self.processes(variables)? {
            require(&process.command.words()?, &self.name)?;
        }
        Ok(())
    }

    fn fill(&self, variables: &Variables) -> Result<Self, LabError> {
        let mut filled = self.clone();
        filled.command = CommandLine::Words(variables.command(&self.command)?);
        for (_, text) in filled.texts() {
            *text = variables.text(text)?;
        }
        // Only known names are replaced, because configuration languages use braces themselves.
        let file = |(name, content): (&String, &String)| {
            (variables.replace_known(name), variables.replace_known(content))
        };
        filled.files = self.files.iter().map(file).collect();
        Ok(filled)
    }

    /// All text settings except commands, by key.
    pub(super) fn texts(&mut self) -> Vec<(String, &mut String)> {
        let mut texts: Vec<(String, &mut String)> =
            self.env.iter_mut().map(|(name, value)| (format!("env.{name}"), value)).collect();
        texts.extend(self.metrics.as_mut().map(|url| ("metrics".to_owned(), url)));
        let probes = self.ready.iter_mut().flat_map(Ready::probes);
        texts.extend(probes.filter_map(|(key, text, _)| Some((format!("ready.{key}"), text.as_mut()?))));
        texts
    }

    pub(crate) fn scope(&self, variables: &Variables) -> Result<Variables, LabError> {
        variables.with(&self.vars)
    }

    pub(crate) fn process_names(&self) -> Vec<String> {
        match &self.node[..] {
            [] => vec![self.name.clone()],
            nodes => nodes.iter().map(|node| self.name_of(node)).collect(),
        }
    }

    fn name_of(&self, node: &SubjectNode) -> String {
        format!("{}-{}", self.name, node.name)
    }

    /// Returns one service (without `nodes`) for each process, with all variables replaced.
    pub(crate) fn processes(&self, variables: &Variables) -> Result<Vec<Self>, LabError> {
        let own = self.scope(variables)?;
        if self.node.is_empty() {
            return Ok(vec![self.fill(&own)?]);
        }
        let process = |node: &SubjectNode| {
            let mut filled = self.fill(&node.scope(&own)?)?;
            filled.name = self.name_of(node);
            filled.namespace = node.namespace.clone().or(filled.namespace);
            filled.cpus = node.cpus.clone().or(filled.cpus);
            filled.node.clear();
            Ok::<_, LabError>(filled)
        };
        self.node.iter().map(process).collect()
    }

    /// Description for a record. The commands of several processes are joined as for a shell.
    pub(crate) fn describe(&self, variables: &Variables) -> Result<record::RecordedSubject, LabError> {
        let (mut commands, mut cpus) = (Vec::new(), Vec::new());
        for process in self.processes(variables)? {
            commands.push(process.command.words()?);
            cpus.extend(process.cpus);
        }
        cpus.dedup();
        Ok(record::RecordedSubject {
            name: self.name.clone(),
            command: commands.join(&"&".to_owned()),
            cpus: (!cpus.is_empty()).then(|| cpus.join(",")),
        })
    }
}

impl SubjectNode {
    pub(crate) fn scope(&self, variables: &Variables) -> Result<Variables, LabError> {
        let mut own = variables.with(&self.vars)?;
        own.set("node", &self.name);
        Ok(own)
    }
}

impl Ready {
    fn probes(&mut self) -> [(&'static str, &mut Option<String>, &'static str); 4] {
        [
            ("stun", &mut self.stun, "answers STUN"),
            ("log", &mut self.log, "appears in its output"),
            ("udp_port", &mut self.udp_port, "is bound as a UDP port"),
            ("tcp_port", &mut self.tcp_port, "is a listening TCP port"),
        ]
    }

    pub(crate) fn probe(&self) -> Option<(&'static str, String, &'static str)> {
        let mut all = self.clone();
        let mut given =
            all.probes().into_iter().filter_map(|(key, value, does)| Some((key, value.take()?, does)));
        given.next().filter(|_| given.next().is_none())
    }
}

pub(super) fn require(words: &[String], who: &str) -> Result<(), LabError> {
    words.first().map_or(Ok(()), |program| tools::require(program, &format!("for {who}")).map(drop))
}

fn ten() -> f64 {
    10.0
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Experiment;
    use super::*;

    const FLEET: &str = "
name = 'x'
metric = 'delivered_pps'
[vars]
port = 7
[[subject]]
name = 'pair'
vars = { both = '{relay}:{port} {peer}:{port}' }
command = 'relay --as {node} --at {own}:{port}'
env = { NODE = '{node}' }
files = { '{node}.toml' = 'at = {own}' }
namespace = 'relay'
cpus = '0'
[[subject.node]]
name = 'one'
vars = { own = '{relay}' }
[[subject.node]]
name = 'two'
vars = { own = '{peer}' }
namespace = 'peer'
[workload]
command = 'load {both*}'
";

    fn variables(experiment: &Experiment) -> Variables {
        let addresses = experiment.topology().unwrap().unwrap().addresses();
        experiment.variables(&addresses, &experiment.points()[0], Path::new("d"))
    }

    #[test]
    fn each_node_is_a_process_with_its_own_variables() {
        let experiment = Experiment::parse(Path::new("x.toml"), FLEET).unwrap();
        let variables = variables(&experiment);
        let [pair] = &experiment.subject[..] else { panic!("not one subject") };
        let processes = pair.processes(&variables).unwrap();
        let [one, two] = &processes[..] else { panic!("not two processes") };
        assert_eq!((one.name.as_str(), two.name.as_str()), ("pair-one", "pair-two"));
        assert_eq!(two.command.words().unwrap(), ["relay", "--as", "two", "--at", "10.77.2.2:7"]);
        assert_eq!((&*two.env["NODE"], &*two.files["two.toml"]), ("two", "at = 10.77.2.2"));
        let places = [one, two].map(|node| (node.namespace.as_deref(), node.cpus.as_deref()));
        assert_eq!(places, [(Some("relay"), Some("0")), (Some("peer"), Some("0"))]);

        let load = pair.scope(&variables).unwrap().command(&experiment.workload.command).unwrap();
        assert_eq!(load, ["load", "10.77.1.1:7", "10.77.2.2:7"]);
        let described = pair.describe(&variables).unwrap();
        assert_eq!(
            described.command.join(" "),
            "relay --as one --at 10.77.1.1:7 & relay --as two --at 10.77.2.2:7"
        );
        assert_eq!(described.cpus.as_deref(), Some("0"));
    }

    #[test]
    fn a_service_without_nodes_is_one_process() {
        let start = FLEET.find("[[subject.node]]").unwrap();
        let text = [&FLEET[..start], &FLEET[FLEET.find("[workload]").unwrap()..]].concat();
        let text = text.replace("{node}", "it").replace("{own}", "{relay}");
        let experiment = Experiment::parse(Path::new("x.toml"), &text).unwrap();
        let variables = variables(&experiment);
        let processes = experiment.subject[0].processes(&variables).unwrap();
        let [one] = &processes[..] else { panic!("not one process") };
        assert_eq!((one.name.as_str(), one.cpus.as_deref()), ("pair", Some("0")));
        assert_eq!(one.command.words().unwrap()[4], "10.77.1.1:7");
    }

    #[test]
    fn errors_in_nodes_are_reported_at_their_positions() {
        let changes = [
            ("name = 'one'", "name = 'O ne'\nkpus = '1'"),
            ("name = 'two'", "name = 'two'\ncpus = '1-0'"),
            ("own = '{peer}'", "own = '{peeer}'"),
            ("namespace = 'peer'", "namespace = 'pear'"),
        ];
        let text = changes.iter().fold(FLEET.to_owned(), |text, (from, to)| text.replace(from, to));
        let told = Experiment::parse(Path::new("x.toml"), &text).unwrap_err().to_string();
        for part in [
            "x.toml:15:8: name \"O ne\": expected at most 32 lower-case letters",
            "x.toml:16:1: unknown key \"kpus\"; did you mean \"cpus\"?",
            "x.toml:20:8: pair-two: cpus \"1-0\": expected a list",
            "x.toml:21:16: unknown variable {peeer}; did you mean {peer}?",
            "x.toml:22:13: no namespace \"pear\"; did you mean \"peer\"?",
        ] {
            assert!(told.contains(part), "{part} is missing from {told}");
        }
        let twice = FLEET.replace("'two'", "'one'");
        let told = Experiment::parse(Path::new("x.toml"), &twice).unwrap_err().to_string();
        assert_eq!(told, "x.toml:18:8: \"pair-one\" is used twice");
        let text = FLEET.replace("load {both*}", "load {own}");
        let told = Experiment::parse(Path::new("x.toml"), &text).unwrap_err().to_string();
        assert!(told.starts_with("x.toml:22:11: unknown variable {own}"), "{told}");
    }
}
