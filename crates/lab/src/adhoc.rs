//! Experiments without a file: `lab ab --a CMD --b CMD -- WORKLOAD` and `lab profile CMD -- WORKLOAD` are turned into the
//! text of one, so that they are checked, recorded and repeated like any other.

mod known;

use toml::{Table, Value};

use self::known::Known;
use crate::{
    builtin_experiments::Text,
    error::LabError,
    experiment::{COMMAND_LINE, CommandLine, Experiment},
    request::{Changes, Request, Variant},
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
    let format = setting.format.as_deref().unwrap_or("none");
    let usual = match (format, setting.delivered_at.is_empty(), pinned(setting.cpus.as_deref())) {
        ("iperf3", _, _) => "cpu_s_per_gb",
        ("none", true, _) => "subject_cpu_s",
        // The softirqs on the subject's CPU are its doing too.
        (_, false, Some(_)) => "packets_per_busy_s",
        _ => "packets_per_cpu_s",
    };
    let mut document = table([
        ("name", Some(name)),
        ("topology", setting.topology.as_deref()),
        ("metric", Some(changes.metric.as_deref().unwrap_or(usual))),
    ]);
    let services = subjects.iter().map(|(name, command)| Value::Table(subject(name, command, setting)));
    let helpers = setting.helper.iter().enumerate().map(|(index, text)| helper(index + 1, text, setting));
    let helpers = helpers.chain(known.reflector.as_deref().map(|address| reflector(address, setting)));
    document.insert("metrics".to_owned(), known.metrics.to_vec().into());
    document.insert("subject".to_owned(), Value::Array(services.collect()));
    document.insert("helper".to_owned(), Value::Array(helpers.map(Value::Table).collect()));
    document.insert("workload".to_owned(), Value::Table(load(&known.workload, format, setting)));
    document
}

fn subject(name: &str, command: &str, setting: &Setting) -> Table {
    let mut service = table([
        ("name", Some(name)),
        ("command", Some(&known::this_program(command))),
        ("cpus", pinned(setting.cpus.as_deref())),
        ("namespace", setting.place(setting.namespace.as_deref(), "relay")),
    ]);
    let ready = table([
        ("stun", setting.ready_stun.as_deref()),
        ("tcp", setting.ready_tcp.as_deref()),
        ("log", setting.ready_log.as_deref()),
        ("udp_port", setting.ready_udp_port.as_deref()),
        ("tcp_port", setting.ready_tcp_port.as_deref()),
    ]);
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
    table([
        ("name", Some(&format!("helper-{number}"))),
        ("command", Some(&known::this_program(command))),
        ("namespace", space),
        ("cpus", pinned(setting.load_cpus.as_deref())),
    ])
}

fn reflector(address: &str, setting: &Setting) -> Table {
    let mut service = table([
        ("name", Some("reflector")),
        ("command", Some(&format!("{{turnpike}} reflect --listen {address} --workers 1"))),
        ("namespace", setting.place(None, "peer")),
        ("cpus", pinned(setting.load_cpus.as_deref())),
    ]);
    let ready = table([("udp_port", Some(address.rsplit(':').next().unwrap_or(address)))]);
    service.insert("ready".to_owned(), Value::Table(ready));
    service
}

fn load(command: &[String], format: &str, setting: &Setting) -> Table {
    let mut load = table([
        ("format", Some(format)),
        ("result", Some(setting.result.as_deref().unwrap_or("stdout"))),
        ("cpus", pinned(setting.load_cpus.as_deref())),
        ("namespace", setting.place(setting.load_namespace.as_deref(), "client")),
    ]);
    load.insert("command".to_owned(), command.to_vec().into());
    load.insert("delivered_at".to_owned(), setting.delivered_at.clone().into());
    load.insert("whole".to_owned(), Value::Boolean(setting.whole));
    load
}

/// `all` is no pinning.
fn pinned(cpus: Option<&str>) -> Option<&str> {
    cpus.filter(|list| *list != "all")
}

/// Of those keys that have a value.
fn table<const N: usize>(entries: [(&str, Option<&str>); N]) -> Table {
    let entries = entries.into_iter();
    entries.filter_map(|(key, value)| Some((key.to_owned(), Value::from(value?)))).collect()
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
