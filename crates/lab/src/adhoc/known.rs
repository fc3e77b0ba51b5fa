//! What the lab knows of workloads that it meets often, so that the ad-hoc command stays short: our generators and
//! iperf3 are told for how long, their results are read, the reflector is started, and readiness is asked for at the
//! address that they are aimed at. Whatever the command line says itself is left alone.

use std::thread;

use super::Setting;
use crate::error::LabError;

/// The reflector's usual port.
const ECHO: u16 = 3480;

/// What was added to a command line.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Known {
    pub(super) setting: Setting,
    pub(super) workload: Vec<String>,
    /// Where a reflector of ours must listen.
    pub(super) reflector: Option<String>,
    /// Metrics judged beside the deciding one.
    pub(super) metrics: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// `turnpike load MODE TARGET`.
    Load,
    Iperf3,
    Other,
}

/// Completes `setting` and `workload` by what is known of the workload's program. `commands` are those of the subjects.
pub(super) fn complete(setting: &Setting, workload: &[String], commands: &[&str]) -> Result<Known, LabError> {
    let mut known = Known { setting: setting.clone(), workload: workload.to_vec(), ..Known::default() };
    if known.setting.topology.is_none() {
        let mut texts =
            commands.iter().copied().chain(workload.iter().chain(&setting.helper).map(String::as_str));
        let routed = texts.any(|text| ["{client", "{relay", "{peer"].iter().any(|name| text.contains(name)));
        known.setting.topology = Some(if routed { "veth" } else { "host" }.to_owned());
    }
    match kind(workload) {
        Kind::Load => known.load()?,
        Kind::Iperf3 => known.iperf3(),
        Kind::Other => {}
    }
    if let Some(program) = known.workload.first_mut().filter(|program| *program == "turnpike") {
        "{turnpike}".clone_into(program);
    }
    Ok(known)
}

/// The same command with `turnpike` in front replaced by this program.
pub(super) fn this_program(command: &str) -> String {
    match command.strip_prefix("turnpike ") {
        Some(rest) => format!("{{turnpike}} {rest}"),
        None => command.to_owned(),
    }
}

fn kind(workload: &[String]) -> Kind {
    let program = workload.first().map_or("", |word| word.rsplit('/').next().unwrap_or(word));
    match (program, workload.get(1).map(String::as_str)) {
        ("turnpike" | "{turnpike}", Some("load")) => Kind::Load,
        ("iperf3", _) => Kind::Iperf3,
        _ => Kind::Other,
    }
}

impl Known {
    fn load(&mut self) -> Result<(), LabError> {
        for option in ["--duration", "--warmup"] {
            if has(&self.workload, option) {
                return Err(LabError::usage(format!(
                    "{option} of the workload is the lab's to set: give {option} before the `--`"
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
        if let Some(target) = target.filter(|_| !setting.has_probe()) {
            let port = target.rsplit(':').next().filter(|port| !port.contains(['}', ']']));
            match (mode.as_str(), port) {
                ("turn", Some(port)) if *port == target => {
                    setting.ready_stun = Some(format!("{target}:3478"));
                }
                ("turn", None) => setting.ready_stun = Some(format!("{target}:3478")),
                ("turn", Some(_)) => setting.ready_stun = Some(target.clone()),
                ("udp", Some(port)) => setting.ready_udp_port = Some(port.to_owned()),
                (_, Some(port)) => setting.ready_tcp_port = Some(port.to_owned()),
                _ => {}
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

/// The subject on a CPU of its own, where the machine has two and the command line says nothing.
fn pin(setting: &mut Setting) {
    let several = thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
    if several && setting.cpus.is_none() && setting.load_cpus.is_none() {
        setting.cpus = Some("0".to_owned());
        setting.load_cpus = Some("1".to_owned());
    }
}

/// Whether an option is there, alone or as `--option=value`.
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
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn known(setting: &Setting, workload: &str) -> Known {
        complete(setting, &words(workload), &["./new/turnpike serve"]).unwrap()
    }

    #[test]
    fn a_generator_is_told_its_time_and_gets_its_reflector() {
        let known = known(&Setting::default(), "turnpike load turn {relay}:3478 --user u:p --rate max");
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
    fn without_names_of_namespaces_all_runs_on_the_host() {
        let known = known(&Setting::default(), "./turnpike load turn turn:127.0.0.1");
        assert_eq!(known.setting.topology.as_deref(), Some("host"));
        assert_eq!(known.setting.ready_stun.as_deref(), Some("127.0.0.1:3478"));
        assert_eq!(known.reflector.as_deref(), Some("127.0.0.1:3480"));
        assert!(known.setting.delivered_at.is_empty());
        assert_eq!(known.workload[0], "./turnpike", "another build stays another build");
    }

    #[test]
    fn what_the_command_line_says_is_left_alone() {
        let setting = Setting {
            topology: Some("host".to_owned()),
            cpus: Some("1".to_owned()),
            ready_log: Some("up".to_owned()),
            helper: words("reflector"),
            ..Setting::default()
        };
        let known = known(&setting, "turnpike load turn 127.0.0.1:99 --peer=127.0.0.1:7");
        assert_eq!((known.setting.cpus.as_deref(), known.setting.load_cpus.as_deref()), (Some("1"), None));
        assert_eq!((known.setting.ready_stun, known.reflector), (None, None));
        assert_eq!(value(&known.workload, "--peer").as_deref(), Some("127.0.0.1:7"));
    }

    #[test]
    fn streams_are_ready_when_their_port_listens() {
        let known = known(&Setting::default(), "turnpike load rr {relay}:5000 --clients 8");
        assert_eq!(known.setting.ready_tcp_port.as_deref(), Some("5000"));
        assert_eq!(known.reflector, None);
    }

    #[test]
    fn iperf3_is_asked_for_json_and_told_its_time() {
        let known = known(&Setting::default(), "iperf3 -c {relay} -P 4");
        assert_eq!(known.workload, words("iperf3 -c {relay} -P 4 --json --time {whole_total}"));
        assert_eq!(known.setting.format.as_deref(), Some("iperf3"));
    }

    #[test]
    fn a_time_of_its_own_is_refused_and_an_unknown_workload_is_as_it_was() {
        let error =
            complete(&Setting::default(), &words("turnpike load turn x:1 --duration 9"), &[]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("before the `--`"), "{error}");
        let known = known(&Setting::default(), "sleep 5");
        assert_eq!(
            (known.workload, known.setting.format, known.setting.cpus),
            (words("sleep 5"), None, None)
        );
    }
}
