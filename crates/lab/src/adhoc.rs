//! Experiments without a file: `lab ab --a CMD --b CMD -- WORKLOAD` and `lab profile CMD -- WORKLOAD` are turned into the
//! text of one, so that they are checked, recorded and repeated like any other.

use std::path::Path;

use toml::{Table, Value};

use crate::{
    error::LabError,
    request::{Changes, Request},
};

/// Where and how the programs of an ad-hoc experiment run.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Setting {
    /// `host`, `routed` (client, relay, peer), or a topology file
    #[arg(long, value_name = "T", default_value = "host")]
    pub(crate) topology: String,
    /// CPUs of the subjects, as `taskset -c` takes them
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<String>,
    /// CPUs of the workload
    #[arg(long, value_name = "LIST")]
    pub(crate) load_cpus: Option<String>,
    /// Namespace of the subjects [default: relay, where there is one]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Namespace of the workload [default: client, where there is one]
    #[arg(long, value_name = "NAME")]
    pub(crate) load_namespace: Option<String>,
    /// A subject is ready when ADDR:PORT answers a STUN Binding request
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
    /// A program that the workload needs beside the subject, such as a reflector; may be repeated
    #[arg(long, value_name = "[NAMESPACE:]CMD")]
    pub(crate) helper: Vec<String>,
    /// How the workload's result is read: turnpike, iperf3, none
    #[arg(long, value_name = "F", default_value = "none")]
    pub(crate) format: String,
    /// `stdout`, or the file that the workload writes; {result} in its command is such a file
    #[arg(long, value_name = "WHERE", default_value = "stdout")]
    pub(crate) result: String,
    /// Namespaces at which arriving datagrams count as delivered; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) delivered_at: Vec<String>,
    /// The workload ends by itself and counts whole, instead of running for a duration
    #[arg(long)]
    pub(crate) whole: bool,
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
    let text = document(name, subjects, workload, setting, changes).to_string();
    let requests = Request::of_text(Path::new("command line"), text, changes, &[])?;
    requests.into_iter().next().ok_or_else(|| LabError::failed("an experiment without a point"))
}

fn document(
    name: &str,
    subjects: &[(&str, &str)],
    workload: &[String],
    setting: &Setting,
    changes: &Changes,
) -> Table {
    let on_host = setting.topology == "host";
    let place = |given: &Option<String>, usual: &str| match given {
        Some(name) => Some(name.clone()),
        None => (!on_host).then(|| usual.to_owned()),
    };
    let mut document = Table::new();
    put(&mut document, "name", name);
    put(&mut document, "topology", &setting.topology);
    let usual = match (setting.format.as_str(), setting.delivered_at.is_empty()) {
        ("iperf3", _) => "cpu_s_per_gb",
        ("none", true) => "subject_cpu_s",
        _ => "packets_per_cpu_s",
    };
    put(&mut document, "metric", changes.metric.as_deref().unwrap_or(usual));

    let services = subjects.iter().map(|(name, command)| {
        let mut service = Table::new();
        put(&mut service, "name", name);
        put(&mut service, "command", command);
        put_some(&mut service, "cpus", setting.cpus.as_deref());
        put_some(&mut service, "namespace", place(&setting.namespace, "relay").as_deref());
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
        Value::Table(service)
    });
    document.insert("subject".to_owned(), Value::Array(services.collect()));

    let helpers = setting.helper.iter().enumerate().map(|(index, text)| {
        let (space, command) = match text.split_once(':') {
            Some((space, command)) if !on_host && !space.contains(char::is_whitespace) => {
                (Some(space), command)
            }
            _ => (None, text.as_str()),
        };
        let mut service = Table::new();
        put(&mut service, "name", &format!("helper-{}", index + 1));
        put(&mut service, "command", command);
        put_some(&mut service, "namespace", space);
        put_some(&mut service, "cpus", setting.load_cpus.as_deref());
        Value::Table(service)
    });
    document.insert("helper".to_owned(), Value::Array(helpers.collect()));

    let mut load = Table::new();
    let words = |words: &[String]| Value::Array(words.iter().cloned().map(Value::String).collect());
    load.insert("command".to_owned(), words(workload));
    put(&mut load, "format", &setting.format);
    put(&mut load, "result", &setting.result);
    put_some(&mut load, "cpus", setting.load_cpus.as_deref());
    put_some(&mut load, "namespace", place(&setting.load_namespace, "client").as_deref());
    load.insert("delivered_at".to_owned(), words(&setting.delivered_at));
    load.insert("whole".to_owned(), Value::Boolean(setting.whole));
    document.insert("workload".to_owned(), Value::Table(load));
    document
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
            topology: "routed".to_owned(),
            ready_tcp: Some("{relay}:5201".to_owned()),
            helper: vec!["peer:iperf3 -s".to_owned()],
            format: "iperf3".to_owned(),
            result: "stdout".to_owned(),
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
    fn a_missing_workload_is_refused() {
        let error =
            request("ab", &[("a", "true")], &[], &Setting::default(), &Changes::default()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
