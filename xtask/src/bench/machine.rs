//! What the machine must offer and what it is: stated before a run and kept with its results.

use std::{
    env, fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Map, Value, json};

use super::{
    netns::{Network, Place},
    options::Run,
    subject::Subject,
    workload::Transport,
};
use crate::Failure;

/// Sockets of 10,000 allocations with room to spare.
const WANTED_FILES: u32 = 1 << 20;
/// The least that 10,000 allocations work with, where a relay opens one socket for each.
const NEEDED_FILES: u32 = 10_500;

/// Namespaces need root; each missing tool is named with its package.
pub(crate) fn demand_root_and_tools() -> Result<(), Failure> {
    if fs::metadata("/proc/self")?.uid() != 0 {
        return Err("network namespaces need root: run this with sudo".into());
    }
    let tools = [
        ("ip", "iproute2"),
        ("taskset", "util-linux"),
        ("setsid", "util-linux"),
        ("prlimit", "util-linux"),
        ("kill", "procps"),
    ];
    for (tool, package) in tools {
        if find(tool).is_none() {
            return Err(format!("`{tool}` is missing: apt-get install {package}").into());
        }
    }
    Ok(())
}

/// Each missing relay is named with its package.
pub(crate) fn demand_programs(subjects: &[Subject]) -> Result<(), Failure> {
    for subject in subjects {
        let command = subject.command(Transport::Udp);
        let program = command.first().ok_or("a subject without a command")?;
        if find(program).is_none() {
            let remedy = if program == "turnserver" { ": apt-get install coturn" } else { "" };
            return Err(format!("`{program}` of subject {} is missing{remedy}", subject.name).into());
        }
    }
    Ok(())
}

/// Raises the limit of this process as far as the kernel lets it; all programs under test inherit it.
pub(crate) fn raise_open_files_limit() -> Result<(), Failure> {
    let pid = std::process::id().to_string();
    // Beyond the hard limit one needs CAP_SYS_RESOURCE, which root in a container may lack; then up to it.
    let hard = parse_hard_limit(&read("/proc/self/limits")).unwrap_or(0).to_string();
    let candidates = [
        format!("--nofile={WANTED_FILES}:{WANTED_FILES}"),
        format!("--nofile={hard}:"),
        format!("--nofile={NEEDED_FILES}:"),
    ];
    for limit in candidates.iter().filter(|limit| **limit != "--nofile=0:") {
        if Command::new("prlimit").args(["--pid", &pid, limit]).stderr(Stdio::null()).status()?.success() {
            return Ok(());
        }
    }
    Err(format!("10,000 allocations need {NEEDED_FILES} open files: raise the hard limit (`ulimit -Hn`)")
        .into())
}

/// The hard limit of open files in `/proc/PID/limits`; `None` where there is no limit.
fn parse_hard_limit(limits: &str) -> Option<u32> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// What a reader of the figures must know about the machine; the benchmark adds its subjects.
pub(crate) fn describe(network: &Network, run: &Run) -> Map<String, Value> {
    let facts = [
        ("kernel", json!(read("/proc/sys/kernel/osrelease"))),
        ("processor", json!(processor())),
        ("commit", json!(first_line("git", &["describe", "--always", "--dirty"]))),
        ("load_average", json!(read("/proc/loadavg"))),
        ("relay_core", json!(run.relay_cpu)),
        ("load_core", json!(run.load_cpu)),
        ("nice", json!(run.nice)),
        ("receive_packet_steering", json!("off")),
        ("offloads", offloads(network)),
        ("rmem_max", json!(read("/proc/sys/net/core/rmem_max"))),
        ("rmem_default", json!(read("/proc/sys/net/core/rmem_default"))),
        ("netdev_max_backlog", json!(read("/proc/sys/net/core/netdev_max_backlog"))),
    ];
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The version of a Debian package.
pub(crate) fn package_version(package: &str) -> String {
    first_line("dpkg-query", &["--show", "--showformat=${Version}", package])
}

/// As one types it to get the same again.
pub(crate) fn command_line() -> String {
    let arguments: Vec<String> = env::args().skip(1).collect();
    format!("cargo xtask {}", arguments.join(" "))
}

/// The root of the repository, wherever below it the command was typed.
pub(crate) fn repository() -> Result<PathBuf, Failure> {
    // Cargo runs us with this set; a copied binary falls back to where it was built.
    let manifest =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    Ok(manifest.parent().ok_or("xtask has no parent directory")?.to_owned())
}

/// The relay's devices by `ethtool`, or what `ip` knows of them.
fn offloads(network: &Network) -> Value {
    const WANTED: [&str; 6] = [
        "generic-segmentation-offload",
        "generic-receive-offload",
        "tx-udp-segmentation",
        "rx-gro-list",
        "rx-udp-gro-forwarding",
        "tx-checksumming",
    ];
    let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
    if find("ethtool").is_some()
        && let Ok(text) = network.output(Place::Relay, &words("ethtool -k r-p"))
    {
        let lines: Vec<&str> = text
            .lines()
            .map(str::trim)
            .filter(|line| WANTED.iter().any(|name| line.starts_with(name)))
            .collect();
        return json!(lines.join(", "));
    }
    let text = network.output(Place::Relay, &words("ip -d link show r-p")).unwrap_or_default();
    let mut sizes = Vec::new();
    let mut tokens = text.split_whitespace();
    while let Some(token) = tokens.next() {
        if token.starts_with("gso_") || token.starts_with("gro_") {
            sizes.push(format!("{token} {}", tokens.next().unwrap_or_default()));
        }
    }
    json!(format!("veth defaults ({}); ethtool, which would list them, is not installed", sizes.join(", ")))
}

/// A command line; paths of this machine are nobody else's business.
pub(crate) fn show_command(command: &[String]) -> String {
    let mut shown = command.to_vec();
    if let Some(name) = shown.first_mut()
        && let Some(file) = Path::new(name).file_name()
    {
        *name = file.to_string_lossy().into_owned();
    }
    shown.join(" ")
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cores = text.lines().filter(|line| line.starts_with("processor")).count();
    let model =
        text.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    format!("{}, {cores} cores", model.unwrap_or("unknown"))
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

pub(crate) fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Path::new(program).is_file().then(|| program.into());
    }
    env::split_paths(&env::var_os("PATH")?)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_without_its_directory() {
        let command = ["/somewhere/turnpike".to_owned(), "serve".to_owned()];
        assert_eq!(show_command(&command), "turnpike serve");
    }

    #[test]
    fn the_hard_limit_is_the_second_number() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 20000                files     \n";
        assert_eq!(parse_hard_limit(limits), Some(20000));
        assert_eq!(parse_hard_limit("Max processes 1 2 processes\n"), None);
    }

    #[test]
    fn programs_are_found_on_the_path_or_where_said() {
        assert!(find("sh").is_some());
        assert!(find("/no/such/program").is_none());
        assert!(find("no-such-program-anywhere").is_none());
    }

    #[test]
    fn the_repository_holds_the_workspace() {
        assert!(repository().unwrap().join("Cargo.toml").is_file());
    }
}
