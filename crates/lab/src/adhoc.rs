//! Experiments without a file: turns `lab ab --a CMD --b CMD -- WORKLOAD` and `lab profile CMD -- WORKLOAD`
//! into the text of an experiment, which is then checked, recorded and repeated like any other. For known
//! workloads (our generators and iperf3), the lab sets the duration, reads the result, starts the reflector
//! and derives the readiness probe from the target address. Explicit options take precedence.

use std::thread;

use serde_json::{Value, json};

use crate::{
    builtin_experiments::BuiltinText,
    error::LabError,
    experiment::{COMMAND_LINE, CommandLine, Experiment, Ready},
    request::{Overrides, RowSettings, RunRequest},
};

const ECHO: u16 = 3480;

#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub(crate) struct AdhocOptions {
    /// `host`, `veth` or `wire` (client, relay, peer), or a topology file [default: veth if a command
    /// contains {client}, {relay} or {peer}, otherwise host]
    #[arg(long, value_name = "T")]
    pub(crate) topology: Option<String>,
    /// CPUs of the subjects, as for `taskset -c`, or `all` [default: 0 for a known workload]
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<String>,
    /// CPUs of the workload and the helpers, or `all` [default: 1 for a known workload]
    #[arg(long, value_name = "LIST")]
    pub(crate) load_cpus: Option<String>,
    /// Namespace of the subjects [default: relay, if it exists]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Namespace of the workload [default: client, if it exists]
    #[arg(long, value_name = "NAME")]
    pub(crate) load_namespace: Option<String>,
    /// A subject is ready when ADDR:PORT answers a STUN Binding request [default: the target of `turnpike
    /// load`]
    #[arg(long, value_name = "ADDR:PORT", group = "ready")]
    pub(crate) ready_stun: Option<String>,
    /// A subject is ready when its output contains this text
    #[arg(long, value_name = "TEXT", group = "ready")]
    pub(crate) ready_log: Option<String>,
    /// A subject is ready when a UDP socket is bound to this port
    #[arg(long, value_name = "PORT", group = "ready")]
    pub(crate) ready_udp_port: Option<String>,
    /// A subject is ready when a TCP socket listens on this port
    #[arg(long, value_name = "PORT", group = "ready")]
    pub(crate) ready_tcp_port: Option<String>,
    /// Additional program that the workload needs; may be repeated [default: `turnpike reflect` at the --peer
    /// of `turnpike load turn`]
    #[arg(long, value_name = "[NAMESPACE:]CMD")]
    pub(crate) helper: Vec<String>,
    /// Format of the workload's result: turnpike, iperf3, none [default: derived from the program's name]
    #[arg(long, value_name = "F")]
    pub(crate) format: Option<String>,
    /// `stdout`, or the file that the workload writes; {result} in its command expands to a file in the run's
    /// directory [default: stdout]
    #[arg(long, value_name = "WHERE")]
    pub(crate) result: Option<String>,
    /// Namespace where arriving datagrams count as delivered; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) delivered_at: Vec<String>,
    /// Measure the whole run of a workload that ends on its own, instead of a fixed duration
    #[arg(long)]
    pub(crate) whole: bool,
}

impl AdhocOptions {
    /// Key and value of the given readiness probe.
    fn probe(&self) -> Option<(&'static str, &String)> {
        [
            ("stun", &self.ready_stun),
            ("log", &self.ready_log),
            ("udp_port", &self.ready_udp_port),
            ("tcp_port", &self.ready_tcp_port),
        ]
        .into_iter()
        .find_map(|(key, value)| Some((key, value.as_ref()?)))
    }

    fn is_on_host(&self) -> bool {
        self.topology.as_deref() == Some("host")
    }

    fn place<'a>(&self, given: Option<&'a str>, usual: &'a str) -> Option<&'a str> {
        given.or_else(|| (!self.is_on_host()).then_some(usual))
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Adhoc {
    setting: AdhocOptions,
    workload: Vec<String>,
    reflector: Option<String>,
    metrics: &'static [&'static str],
}

pub(crate) fn request(
    name: &str,
    subjects: &[(&str, &str)],
    workload: &[String],
    setting: &AdhocOptions,
    changes: &Overrides,
) -> Result<RunRequest, LabError> {
    if workload.is_empty() {
        return Err(LabError::usage("no workload: give its command after `--`"));
    }
    let commands: Vec<&str> = subjects.iter().map(|(_, command)| *command).collect();
    let adhoc = Adhoc::new(setting, workload, &commands)?;
    let text = document(name, subjects, &adhoc, changes)?;
    let requests = RunRequest::of(
        BuiltinText { path: COMMAND_LINE.into(), text },
        changes,
        &RowSettings::default(),
        &[],
    )?;
    requests.into_iter().next().ok_or_else(|| LabError::failed("the experiment has no points"))
}

pub(crate) fn describe(experiment: &Experiment) -> String {
    let line = |name: &str,
                namespace: &Option<String>,
                cpus: &Option<String>,
                ready: &str,
                command: &CommandLine| {
        let space = namespace.as_deref().map_or("on the host".to_owned(), |name| format!("in {name}"));
        let cpus = cpus.as_deref().map_or_else(String::new, |cpus| format!(", CPU {cpus}"));
        format!("{name} ({space}{cpus}{ready}): {}\n", command.words().unwrap_or_default().join(" "))
    };
    let services = experiment.services().map(|service| {
        let ready = service.ready.as_ref().and_then(Ready::probe);
        let ready = ready.map_or_else(String::new, |(_, value, does)| format!(", ready when {value} {does}"));
        line(&service.name, &service.namespace, &service.cpus, &ready, &service.command)
    });
    let load = &experiment.workload;
    let load = line("workload", &load.namespace, &load.cpus, "", &load.command);
    format!("{}{load}deciding: {}", services.collect::<String>(), experiment.metric)
}

impl Adhoc {
    fn new(setting: &AdhocOptions, workload: &[String], commands: &[&str]) -> Result<Self, LabError> {
        let mut adhoc = Self { setting: setting.clone(), workload: workload.to_vec(), ..Self::default() };
        if adhoc.setting.topology.is_none() {
            let mut texts =
                commands.iter().copied().chain(workload.iter().chain(&setting.helper).map(String::as_str));
            let routed =
                texts.any(|text| ["{client", "{relay", "{peer"].iter().any(|name| text.contains(name)));
            adhoc.setting.topology = Some(if routed { "veth" } else { "host" }.to_owned());
        }
        let program = workload.first().map_or("", |word| word.rsplit('/').next().unwrap_or(word));
        match (program, workload.get(1).map(String::as_str)) {
            ("turnpike" | "{turnpike}", Some("load")) => adhoc.load()?,
            ("iperf3", _) => adhoc.iperf3(),
            _ => {}
        }
        if let Some(program) = adhoc.workload.first_mut().filter(|program| *program == "turnpike") {
            "{turnpike}".clone_into(program);
        }
        Ok(adhoc)
    }

    fn load(&mut self) -> Result<(), LabError> {
        for option in ["--duration", "--warmup"] {
            if has(&self.workload, option) {
                return Err(LabError::usage(format!(
                    "the lab sets the workload's {option}: give {option} before the `--`"
                )));
            }
            self.workload.extend([option.to_owned(), format!("{{{}}}", &option[2..])]);
        }
        let setting = &mut self.setting;
        if setting.format.is_none() && !has(&self.workload, "--json") {
            self.workload.extend(["--json".to_owned(), "{result}".to_owned()]);
            setting.result = Some("{result}".to_owned());
        }
        setting.format.get_or_insert_with(|| "turnpike".to_owned());
        let mode = self.workload.get(2).cloned().unwrap_or_default();
        let target = self.workload.get(3).filter(|word| !word.starts_with('-')).cloned();
        let target = target.map(|target| target.trim_start_matches("turn:").to_owned());
        let routed = matches!(setting.topology.as_deref(), Some("veth" | "wire"));
        if mode == "turn" {
            if !has(&self.workload, "--peer") {
                let host = if routed { "{peer}" } else { "127.0.0.1" };
                self.workload.extend(["--peer".to_owned(), format!("{host}:{ECHO}")]);
            }
            if setting.helper.is_empty() {
                self.reflector = value(&self.workload, "--peer");
            }
            if routed && setting.delivered_at.is_empty() {
                setting.delivered_at = vec!["client".to_owned(), "peer".to_owned()];
            }
            self.metrics =
                &["delivered_pps", "cpu_us_per_packet", "loss_percent", "latency_p50_us", "latency_p99_us"];
        }
        if let Some(target) = target.filter(|_| setting.probe().is_none()) {
            let port = target.rsplit_once(':').filter(|(_, port)| !port.contains(['}', ']']));
            match (mode.as_str(), port) {
                ("turn", Some(_)) => setting.ready_stun = Some(target.clone()),
                ("turn", None) => setting.ready_stun = Some(format!("{target}:3478")),
                ("udp", Some((_, port))) => setting.ready_udp_port = Some(port.to_owned()),
                (_, Some((_, port))) => setting.ready_tcp_port = Some(port.to_owned()),
                (_, None) => {}
            }
        }
        pin(setting);
        Ok(())
    }

    fn iperf3(&mut self) {
        let setting = &mut self.setting;
        if setting.format.is_none() && !has(&self.workload, "--json") && !has(&self.workload, "-J") {
            self.workload.push("--json".to_owned());
        }
        if !["-t", "--time", "-n", "--bytes", "-k"].iter().any(|option| has(&self.workload, option)) {
            self.workload.extend(["--time".to_owned(), "{whole_total}".to_owned()]);
        }
        setting.format.get_or_insert_with(|| "iperf3".to_owned());
        self.metrics = &["delivered_bps"];
        pin(setting);
    }
}

fn document(
    name: &str,
    subjects: &[(&str, &str)],
    adhoc: &Adhoc,
    changes: &Overrides,
) -> Result<String, LabError> {
    let setting = &adhoc.setting;
    let format = setting.format.as_deref().unwrap_or("none");
    let usual = match (format, setting.delivered_at.is_empty(), pinned(setting.cpus.as_deref())) {
        ("iperf3", _, _) => "cpu_s_per_gb",
        ("none", true, _) => "subject_cpu_s",
        (_, false, Some(_)) => "packets_per_busy_s",
        _ => "packets_per_cpu_s",
    };
    let load_cpus = pinned(setting.load_cpus.as_deref());
    let subject = |(name, command): &(&str, &str)| {
        json!({
            "name": name,
            "command": this_program(command),
            "cpus": pinned(setting.cpus.as_deref()),
            "namespace": setting.place(setting.namespace.as_deref(), "relay"),
            "ready": setting.probe().map(|(key, value)| json!({ key: value })),
        })
    };
    let helper = |(index, text): (usize, &String)| {
        let (space, command) = match text.split_once(':') {
            Some((space, command)) if !setting.is_on_host() && !space.contains(char::is_whitespace) => {
                (Some(space), command)
            }
            _ => (None, text.as_str()),
        };
        json!({
            "name": format!("helper-{}", index + 1),
            "command": this_program(command),
            "namespace": space,
            "cpus": load_cpus,
        })
    };
    let reflector = |address: &String| {
        json!({
            "name": "reflector",
            "command": format!("{{turnpike}} reflect --listen {address} --workers 1"),
            "namespace": setting.place(None, "peer"),
            "cpus": load_cpus,
            "ready": { "udp_port": address.rsplit(':').next() },
        })
    };
    let helpers = setting.helper.iter().enumerate().map(helper);
    let mut document = json!({
        "name": name,
        "topology": setting.topology,
        "metric": changes.metric.as_deref().unwrap_or(usual),
        "metrics": adhoc.metrics,
        "subject": subjects.iter().map(subject).collect::<Vec<_>>(),
        "helper": helpers.chain(adhoc.reflector.iter().map(reflector)).collect::<Vec<_>>(),
        "workload": {
            "format": format,
            "result": setting.result.as_deref().unwrap_or("stdout"),
            "cpus": load_cpus,
            "namespace": setting.place(setting.load_namespace.as_deref(), "client"),
            "command": adhoc.workload,
            "delivered_at": setting.delivered_at,
            "whole": setting.whole,
        },
    });
    drop_nulls(&mut document);
    toml::to_string(&document).map_err(|error| LabError::failed(error.to_string()))
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(entries) => {
            entries.retain(|_, value| !value.is_null());
            entries.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// CPUs to pin to; `None` for `all`, which disables pinning.
fn pinned(cpus: Option<&str>) -> Option<&str> {
    cpus.filter(|list| *list != "all")
}

fn this_program(command: &str) -> String {
    match command.strip_prefix("turnpike ") {
        Some(rest) => format!("{{turnpike}} {rest}"),
        None => command.to_owned(),
    }
}

fn pin(setting: &mut AdhocOptions) {
    let several = thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
    if several && setting.cpus.is_none() && setting.load_cpus.is_none() {
        setting.cpus = Some("0".to_owned());
        setting.load_cpus = Some("1".to_owned());
    }
}

fn has(words: &[String], option: &str) -> bool {
    words
        .iter()
        .any(|word| word == option || word.strip_prefix(option).is_some_and(|rest| rest.starts_with('=')))
}

fn value(words: &[String], option: &str) -> Option<String> {
    words.iter().enumerate().find_map(|(at, word)| {
        if word == option {
            words.get(at + 1).cloned()
        } else {
            word.strip_prefix(option)?.strip_prefix('=').map(str::to_owned)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_command_line_becomes_an_experiment() {
        let setting = AdhocOptions {
            ready_tcp_port: Some("5201".to_owned()),
            helper: vec!["peer:iperf3 -s".to_owned()],
            ..AdhocOptions::default()
        };
        let subjects = [("a", "socat \"TCP-LISTEN:1,fork\" x"), ("b", "sleep 1")];
        let workload = words("iperf3 -c {relay} -t {whole_duration} --json");
        let request = request("ab", &subjects, &workload, &setting, &Overrides::default()).unwrap();
        let experiment = request.experiment().unwrap();
        assert_eq!(experiment.metric, "cpu_s_per_gb");
        assert_eq!(experiment.subject[1].namespace.as_deref(), Some("relay"));
        assert_eq!(experiment.subject[0].command.words().unwrap(), ["socat", "TCP-LISTEN:1,fork", "x"]);
        assert_eq!(experiment.helper[0].namespace.as_deref(), Some("peer"));
        assert_eq!(experiment.workload.namespace.as_deref(), Some("client"));
    }

    #[test]
    fn the_short_form_adds_client_and_reflector() {
        let serve = "serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p --allow-peer {peer}/32";
        let (a, b) = (format!("./old/turnpike {serve}"), format!("turnpike {serve}"));
        let workload = words("turnpike load turn {relay}:3478 --user u:p --rate max");
        let request = request(
            "ab",
            &[("a", &a), ("b", &b)],
            &workload,
            &AdhocOptions::default(),
            &Overrides::default(),
        )
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
        let error = request("ab", &[("a", "true")], &[], &AdhocOptions::default(), &Overrides::default())
            .unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }

    fn completed(setting: &AdhocOptions, workload: &str) -> Adhoc {
        Adhoc::new(setting, &words(workload), &["./new/turnpike serve"]).unwrap()
    }

    #[test]
    fn a_generator_gets_its_duration_and_reflector() {
        let known =
            completed(&AdhocOptions::default(), "turnpike load turn {relay}:3478 --user u:p --rate max");
        assert_eq!(
            known.workload,
            words(
                "{turnpike} load turn {relay}:3478 --user u:p --rate max --duration {duration} --warmup {warmup} \
                 --json {result} --peer {peer}:3480"
            )
        );
        assert_eq!(known.reflector.as_deref(), Some("{peer}:3480"));
        let setting = known.setting;
        assert_eq!(setting.topology.as_deref(), Some("veth"));
        assert_eq!(setting.ready_stun.as_deref(), Some("{relay}:3478"));
        assert_eq!(
            (setting.format.as_deref(), setting.result.as_deref()),
            (Some("turnpike"), Some("{result}"))
        );
        assert_eq!(setting.delivered_at, ["client", "peer"]);
    }

    #[test]
    fn everything_runs_on_the_host_if_no_command_names_a_namespace() {
        let known = completed(&AdhocOptions::default(), "./turnpike load turn turn:127.0.0.1");
        assert_eq!(known.setting.topology.as_deref(), Some("host"));
        assert_eq!(known.setting.ready_stun.as_deref(), Some("127.0.0.1:3478"));
        assert_eq!(known.reflector.as_deref(), Some("127.0.0.1:3480"));
        assert!(known.setting.delivered_at.is_empty());
        assert_eq!(known.workload[0], "./turnpike", "a path to another build stays as it is");
    }

    #[test]
    fn explicit_options_take_precedence() {
        let setting = AdhocOptions {
            topology: Some("host".to_owned()),
            cpus: Some("1".to_owned()),
            ready_log: Some("up".to_owned()),
            helper: words("reflector"),
            ..AdhocOptions::default()
        };
        let known = completed(&setting, "turnpike load turn 127.0.0.1:99 --peer=127.0.0.1:7");
        assert_eq!((known.setting.cpus.as_deref(), known.setting.load_cpus.as_deref()), (Some("1"), None));
        assert_eq!((known.setting.ready_stun, known.reflector), (None, None));
        assert_eq!(value(&known.workload, "--peer").as_deref(), Some("127.0.0.1:7"));
    }

    #[test]
    fn stream_subjects_are_ready_when_their_port_listens() {
        let known = completed(&AdhocOptions::default(), "turnpike load rr {relay}:5000 --clients 8");
        assert_eq!(known.setting.ready_tcp_port.as_deref(), Some("5000"));
        assert_eq!(known.reflector, None);
    }

    #[test]
    fn iperf3_gets_json_output_and_a_duration() {
        let known = completed(&AdhocOptions::default(), "iperf3 -c {relay} -P 4");
        assert_eq!(known.workload, words("iperf3 -c {relay} -P 4 --json --time {whole_total}"));
        assert_eq!(known.setting.format.as_deref(), Some("iperf3"));
    }

    #[test]
    fn explicit_durations_are_refused_and_unknown_workloads_are_unchanged() {
        let error = Adhoc::new(&AdhocOptions::default(), &words("turnpike load turn x:1 --duration 9"), &[])
            .unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("before the `--`"), "{error}");
        let known = completed(&AdhocOptions::default(), "sleep 5");
        assert_eq!(
            (known.workload, known.setting.format, known.setting.cpus),
            (words("sleep 5"), None, None)
        );
    }
}
