//! Experiments without a file: `lab ab --a CMD --b CMD -- WORKLOAD` and `lab profile CMD -- WORKLOAD` are turned into the
//! text of one, so that they are checked, recorded and repeated like any other.

mod known;

use toml::{Table, Value};

use self::known::Known;
use crate::{
    error::LabError,
    experiment::{COMMAND_LINE, CommandLine, Experiment},
    request::{Changes, Request, Variant},
    shelf::Text,
};

/// Where and how the programs of an ad-hoc experiment run.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub(crate) struct Setting {
    /// `host`, `veth` or `wire` (client, relay, peer), or a topology file [default: veth if a command names {client}, {relay}
    /// or {peer}, else host]
    #[arg(long, value_name = "T")]
    pub(crate) topology: Option<String>,
    /// CPUs of the subjects, as `taskset -c` takes them, or `all` [default: 0, with a workload that is known]
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<String>,
    /// CPUs of the workload and the helpers, or `all` [default: 1, with a workload that is known]
    #[arg(long, value_name = "LIST")]
    pub(crate) load_cpus: Option<String>,
    /// Namespace of the subjects [default: relay, where there is one]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Namespace of the workload [default: client, where there is one]
    #[arg(long, value_name = "NAME")]
    pub(crate) load_namespace: Option<String>,
    /// A subject is ready when ADDR:PORT answers a STUN Binding request [default: the address that `turnpike load` is
    /// aimed at]
    #[arg(long, value_name = "ADDR:PORT", group = "ready")]
    pub(crate) ready_stun: Option<String>,
    /// ... when ADDR:PORT accepts a TCP connection
    #[arg(long, value_name = "ADDR:PORT", group = "ready")]
    pub(crate) ready_tcp: Option<String>,
    /// ... when its output has this text
    #[arg(long, value_name = "TEXT", group = "ready")]
    pub(crate) ready_log: Option<String>,
    /// ... when a UDP socket is bound to this port
    #[arg(long, value_name = "PORT", group = "ready")]
    pub(crate) ready_udp_port: Option<String>,
    /// ... when a TCP socket listens on this port
    #[arg(long, value_name = "PORT", group = "ready")]
    pub(crate) ready_tcp_port: Option<String>,
    /// A program that the workload needs beside the subject; may be repeated [default: `turnpike reflect` at the --peer
    /// of `turnpike load turn`]
    #[arg(long, value_name = "[NAMESPACE:]CMD")]
    pub(crate) helper: Vec<String>,
    /// How the workload's result is read: turnpike, iperf3, none [default: by the program's name]
    #[arg(long, value_name = "F")]
    pub(crate) format: Option<String>,
    /// `stdout`, or the file that the workload writes; {result} in its command is such a file [default: stdout]
    #[arg(long, value_name = "WHERE")]
    pub(crate) result: Option<String>,
    /// Namespaces at which arriving datagrams count as delivered; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) delivered_at: Vec<String>,
    /// The workload ends by itself and counts whole, instead of running for a duration
    #[arg(long)]
    pub(crate) whole: bool,
}

impl Setting {
    /// Whether the command line says when a subject is ready.
    fn has_probe(&self) -> bool {
        [&self.ready_stun, &self.ready_tcp, &self.ready_log, &self.ready_udp_port, &self.ready_tcp_port]
            .into_iter()
            .any(Option::is_some)
    }

    fn is_on_host(&self) -> bool {
        self.topology.as_deref() == Some("host")
    }

    /// The namespace that was given, or else the usual one where there are namespaces.
    fn place<'a>(&self, given: Option<&'a str>, usual: &'a str) -> Option<&'a str> {
        given.or_else(|| (!self.is_on_host()).then_some(usual))
    }
}

/// A request that compares `subjects`, name and command line, under `workload`.
pub(crate) fn request(
    name: &str,
    subjects: &[(&str, &str)],
    workload: &[String],
    setting: &Setting,
    changes: &Changes,
) -> Result<Request, LabError> {
    if workload.is_empty() {
        return Err(LabError::usage("no workload: put its command after `--`"));
    }
    let commands: Vec<&str> = subjects.iter().map(|(_, command)| *command).collect();
    let known = known::complete(setting, workload, &commands)?;
    let text = document(name, subjects, &known, changes).to_string();
    let requests = Request::of(Text { path: COMMAND_LINE.into(), text }, changes, &Variant::default(), &[])?;
    requests.into_iter().next().ok_or_else(|| LabError::failed("an experiment without a point"))
}

/// What runs where, for whoever left that to the lab.
pub(crate) fn describe(experiment: &Experiment) -> String {
    let place = |namespace: &Option<String>, cpus: &Option<String>| {
        let space = namespace.as_deref().map_or("on the host".to_owned(), |name| format!("in {name}"));
        cpus.as_deref().map_or(space.clone(), |cpus| format!("{space}, CPU {cpus}"))
    };
    let words = |command: &CommandLine| command.words().unwrap_or_default().join(" ");
    let mut text = String::new();
    for service in experiment.services() {
        let ready = service.ready.as_ref().map_or_else(String::new, |ready| format!(", {ready}"));
        let place = place(&service.namespace, &service.cpus);
        text += &format!("{} ({place}{ready}): {}\n", service.name, words(&service.command));
    }
    let load = &experiment.workload;
    text += &format!("workload ({}): {}\n", place(&load.namespace, &load.cpus), words(&load.command));
    text + &format!("deciding: {}", experiment.metric)
}

fn document(name: &str, subjects: &[(&str, &str)], known: &Known, changes: &Changes) -> Table {
    let setting = &known.setting;
    let mut document = Table::new();
    put(&mut document, "name", name);
    put_some(&mut document, "topology", setting.topology.as_deref());
    let format = setting.format.as_deref().unwrap_or("none");
    let usual = match (format, setting.delivered_at.is_empty(), pinned(setting.cpus.as_deref())) {
        ("iperf3", _, _) => "cpu_s_per_gb",
        ("none", true, _) => "subject_cpu_s",
        // The softirqs on the subject's CPU are its doing too.
        (_, false, Some(_)) => "packets_per_busy_s",
        _ => "packets_per_cpu_s",
    };
    put(&mut document, "metric", changes.metric.as_deref().unwrap_or(usual));
    let further = known.metrics.iter().map(|name| Value::String((*name).to_owned()));
    document.insert("metrics".to_owned(), Value::Array(further.collect()));
    let services = subjects.iter().map(|(name, command)| Value::Table(subject(name, command, setting)));
    document.insert("subject".to_owned(), Value::Array(services.collect()));
    let helpers = setting.helper.iter().enumerate().map(|(index, text)| helper(index + 1, text, setting));
    let helpers = helpers.chain(known.reflector.as_deref().map(|address| reflector(address, setting)));
    document.insert("helper".to_owned(), Value::Array(helpers.map(Value::Table).collect()));
    document.insert("workload".to_owned(), Value::Table(load(&known.workload, format, setting)));
    document
}

fn subject(name: &str, command: &str, setting: &Setting) -> Table {
    let mut service = Table::new();
    put(&mut service, "name", name);
    put(&mut service, "command", &known::this_program(command));
    put_some(&mut service, "cpus", pinned(setting.cpus.as_deref()));
    put_some(&mut service, "namespace", setting.place(setting.namespace.as_deref(), "relay"));
    let probes = [
        ("stun", &setting.ready_stun),
        ("tcp", &setting.ready_tcp),
        ("log", &setting.ready_log),
        ("udp_port", &setting.ready_udp_port),
        ("tcp_port", &setting.ready_tcp_port),
    ];
    let mut ready = Table::new();
    for (probe, value) in probes {
        put_some(&mut ready, probe, value.as_deref());
    }
    if !ready.is_empty() {
        service.insert("ready".to_owned(), Value::Table(ready));
    }
    service
}

/// `[NAMESPACE:]CMD`.
fn helper(number: usize, text: &str, setting: &Setting) -> Table {
    let (space, command) = match text.split_once(':') {
        Some((space, command)) if !setting.is_on_host() && !space.contains(char::is_whitespace) => {
            (Some(space), command)
        }
        _ => (None, text),
    };
    let mut service = Table::new();
    put(&mut service, "name", &format!("helper-{number}"));
    put(&mut service, "command", &known::this_program(command));
    put_some(&mut service, "namespace", space);
    put_some(&mut service, "cpus", pinned(setting.load_cpus.as_deref()));
    service
}

fn reflector(address: &str, setting: &Setting) -> Table {
    let mut service = Table::new();
    put(&mut service, "name", "reflector");
    put(&mut service, "command", &format!("{{turnpike}} reflect --listen {address} --workers 1"));
    put_some(&mut service, "namespace", setting.place(None, "peer"));
    put_some(&mut service, "cpus", pinned(setting.load_cpus.as_deref()));
    let mut ready = Table::new();
    put(&mut ready, "udp_port", address.rsplit(':').next().unwrap_or(address));
    service.insert("ready".to_owned(), Value::Table(ready));
    service
}

fn load(command: &[String], format: &str, setting: &Setting) -> Table {
    let words = |words: &[String]| Value::Array(words.iter().cloned().map(Value::String).collect());
    let mut load = Table::new();
    load.insert("command".to_owned(), words(command));
    put(&mut load, "format", format);
    put(&mut load, "result", setting.result.as_deref().unwrap_or("stdout"));
    put_some(&mut load, "cpus", pinned(setting.load_cpus.as_deref()));
    put_some(&mut load, "namespace", setting.place(setting.load_namespace.as_deref(), "client"));
    load.insert("delivered_at".to_owned(), words(&setting.delivered_at));
    load.insert("whole".to_owned(), Value::Boolean(setting.whole));
    load
}

/// `all` is no pinning.
fn pinned(cpus: Option<&str>) -> Option<&str> {
    cpus.filter(|list| *list != "all")
}

fn put(table: &mut Table, key: &str, value: &str) {
    table.insert(key.to_owned(), Value::String(value.to_owned()));
}

fn put_some(table: &mut Table, key: &str, value: Option<&str>) {
    if let Some(value) = value {
        put(table, key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_command_line_becomes_an_experiment() {
        let setting = Setting {
            ready_tcp: Some("{relay}:5201".to_owned()),
            helper: vec!["peer:iperf3 -s".to_owned()],
            ..Setting::default()
        };
        let subjects = [("a", "socat \"TCP-LISTEN:1,fork\" x"), ("b", "sleep 1")];
        let workload = words("iperf3 -c {relay} -t {whole_duration} --json");
        let request = request("ab", &subjects, &workload, &setting, &Changes::default()).unwrap();
        let experiment = request.experiment().unwrap();
        assert_eq!(experiment.metric, "cpu_s_per_gb");
        assert_eq!(experiment.subject[1].namespace.as_deref(), Some("relay"));
        assert_eq!(experiment.subject[0].command.words().unwrap(), ["socat", "TCP-LISTEN:1,fork", "x"]);
        assert_eq!(experiment.helper[0].namespace.as_deref(), Some("peer"));
        assert_eq!(experiment.workload.namespace.as_deref(), Some("client"));
    }

    #[test]
    fn the_short_form_runs_a_relay_between_its_client_and_a_reflector() {
        let serve = "serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p --allow-peer {peer}/32";
        let (a, b) = (format!("./old/turnpike {serve}"), format!("turnpike {serve}"));
        let workload = words("turnpike load turn {relay}:3478 --user u:p --rate max");
        let request =
            request("ab", &[("a", &a), ("b", &b)], &workload, &Setting::default(), &Changes::default())
                .unwrap();
        let experiment = request.experiment().unwrap();
        let [reflector] = &experiment.helper[..] else { panic!("{:?}", experiment.helper) };
        assert_eq!(reflector.namespace.as_deref(), Some("peer"));
        assert_eq!(reflector.ready.as_ref().unwrap().udp_port.as_deref(), Some("3480"));
        assert_eq!(experiment.subject[0].command.words().unwrap()[0], "./old/turnpike");
        assert_eq!(experiment.subject[1].command.words().unwrap()[0], "{turnpike}");
        assert_eq!(experiment.subject[1].ready.as_ref().unwrap().stun.as_deref(), Some("{relay}:3478"));
        let told = describe(&experiment);
        assert!(told.contains("ready when {relay}:3478 answers STUN): ./old/turnpike serve"), "{told}");
        assert!(told.contains("reflector (in peer"), "{told}");
        assert!(experiment.metrics.iter().any(|metric| metric == "latency_p99_us"));
    }

    #[test]
    fn a_missing_workload_is_refused() {
        let error =
            request("ab", &[("a", "true")], &[], &Setting::default(), &Changes::default()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
