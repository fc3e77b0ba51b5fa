//! Description of the machine for the record.

use std::{collections::BTreeMap, fs, path::Path, thread};

use jiff::Timestamp;
use procfs::{Current as _, Meminfo};

use crate::{
    experiment::{Experiment, fill::Variables},
    record::Environment,
    tools,
    topology::{Topology, offload},
};

pub(crate) fn describe(experiment: &Experiment, topology: &Topology, variables: &Variables) -> Environment {
    let mut notes = vec![
        format!("load average {}", read("/proc/loadavg")),
        format!("net.core.rmem_max {}", read("/proc/sys/net/core/rmem_max")),
        format!("net.core.netdev_max_backlog {}", read("/proc/sys/net/core/netdev_max_backlog")),
    ];
    if topology.names().next().is_none() {
        notes.push("on the host, without namespaces".to_owned());
    } else if topology.offloads.values().any(BTreeMap::is_empty) {
        notes.push(format!("offloads: {}", offload::UNKNOWN));
    }
    let (commit, dirty) = commit();
    Environment {
        kernel: read("/proc/sys/kernel/osrelease"),
        cpu_model: cpu_model(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        cores: thread::available_parallelism()
            .map_or(0, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
        memory_bytes: Meminfo::current().map_or(0, |memory| memory.mem_total),
        idle: idle(Path::new("/sys"), Path::new(CPU_DMA_LATENCY)),
        offloads: topology.offloads.clone(),
        tools: versions(experiment, variables),
        commit,
        dirty,
        notes,
    }
}

pub(crate) fn now() -> String {
    show_time(Timestamp::now())
}

pub(crate) fn show_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

pub(crate) fn stamp() -> String {
    Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}

fn versions(experiment: &Experiment, variables: &Variables) -> BTreeMap<String, String> {
    let mut versions = BTreeMap::new();
    for service in experiment.services() {
        // The experiment specifies the command that prints the version, because an unknown server might start when given `--version`.
        if let Some(command) = &service.version
            && let Ok(command) = variables.command(command)
            && let Some(version) = first_line(&command)
        {
            versions.insert(service.name.clone(), version);
        }
    }
    if let Some(version) = first_line(["perf", "--version"]) {
        versions.insert("perf".to_owned(), version);
    }
    versions
}

fn commit() -> (Option<String>, bool) {
    let commit = first_line(["git", "rev-parse", "--short=12", "HEAD"]);
    let dirty = commit.is_some()
        && tools::output(["git", "status", "--porcelain", "--untracked-files=no"])
            .is_ok_and(|changes| !changes.trim().is_empty());
    (commit, dirty)
}

fn first_line<W: AsRef<str>>(command: impl IntoIterator<Item = W>) -> Option<String> {
    let text = tools::output(command).ok()?;
    text.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

fn cpu_model(cpuinfo: &str) -> String {
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "unknown".to_owned(), |(_, model)| model.to_owned())
}

/// Describes how idle CPUs wait. A virtual CPU that halts as soon as it is idle is descheduled by its host
/// and wakes up slowly; one that polls before halting keeps running.
fn idle(sys: &Path, latency: &Path) -> String {
    let value = |path: &str| Some(fs::read_to_string(sys.join(path)).ok()?.trim().to_owned());
    let cpuidle = |name: &str| value(&format!("devices/system/cpu/cpuidle/{name}"));
    let Some(driver) = cpuidle("current_driver") else { return "no driver".to_owned() };
    let governor = cpuidle("current_governor_ro").or_else(|| cpuidle("current_governor"));
    let governor = governor.as_deref().unwrap_or("unknown");
    let polls =
        value(GUEST_HALT_POLL).and_then(|text| text.parse::<u64>().ok()).filter(|_| governor == "haltpoll");
    let polls = polls
        .map_or_else(String::new, |nanoseconds| format!(", polls for at most {} µs", nanoseconds / 1_000));
    let latency = fs::read(latency).ok().and_then(|bytes| Some(i32::from_ne_bytes(bytes.try_into().ok()?)));
    let awake = latency
        .filter(|micros| *micros < UNLIMITED_US)
        .map_or_else(String::new, |micros| format!(", at most {micros} µs to wake up"));
    format!("driver {driver}, governor {governor}{polls}{awake}")
}

/// Maximum wake-up latency of CPUs in microseconds (`Documentation/power/pm_qos_interface.rst`); 0 makes an
/// idle CPU poll.
const CPU_DMA_LATENCY: &str = "/dev/cpu_dma_latency";

const UNLIMITED_US: i32 = 2_000_000_000;

/// Maximum polling time of an idle guest CPU before it halts, in nanoseconds.
const GUEST_HALT_POLL: &str = "module/haltpoll/parameters/guest_halt_poll_ns";

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    #[test]
    fn idle_behaviour_is_described() {
        let sys = Dir::new();
        let latency = sys.file("cpu_dma_latency", UNLIMITED_US.to_ne_bytes());
        let idle = |sys: &Path| idle(sys, &latency);
        assert_eq!(idle(sys.path()), "no driver");
        let cpuidle = |name: &str| format!("devices/system/cpu/cpuidle/{name}");
        sys.file(&cpuidle("current_driver"), "intel_idle\n");
        sys.file(&cpuidle("current_governor_ro"), "menu\n");
        sys.file(GUEST_HALT_POLL, "200000\n");
        assert_eq!(idle(sys.path()), "driver intel_idle, governor menu");
        sys.file(&cpuidle("current_governor_ro"), "haltpoll\n");
        assert_eq!(idle(sys.path()), "driver intel_idle, governor haltpoll, polls for at most 200 µs");
        sys.file("cpu_dma_latency", 0_i32.to_ne_bytes());
        sys.file(&cpuidle("current_governor_ro"), "menu\n");
        assert_eq!(idle(sys.path()), "driver intel_idle, governor menu, at most 0 µs to wake up");
    }

    #[test]
    fn cpu_model_and_time_are_readable() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: Some CPU: v2\n"), "Some CPU: v2");
        let now = now();
        assert!(now.len() == 20 && now.ends_with('Z') && now.contains('T'), "{now}");
    }
}
