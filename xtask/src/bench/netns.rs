//! The network that a benchmark runs in, and the certainty that it goes away again.
//!
//! ```text
//!   client namespace          relay namespace              peer namespace
//!   10.77.1.2  c-r ──veth── r-c 10.77.1.1
//!                               10.77.2.1 r-p ──veth── p-r  10.77.2.2
//! ```
//!
//! A guardian process holds the reading end of a pipe to us. When the pipe closes, because we are done or because
//! we died of whatever signal, it kills what still runs inside the namespaces and deletes them. So no signal needs
//! handling here, and not even SIGKILL leaves anything behind.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::Failure;

/// Every namespace of every run starts with this.
const FAMILY: &str = "tp-bench-";

pub(crate) const CLIENT_IP: &str = "10.77.1.2";
pub(crate) const RELAY_LISTEN_IP: &str = "10.77.1.1";
pub(crate) const RELAY_PEER_IP: &str = "10.77.2.1";
pub(crate) const PEER_IP: &str = "10.77.2.2";

/// One of the three namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Client,
    Relay,
    Peer,
}

impl Place {
    const ALL: [Self; 3] = [Self::Client, Self::Relay, Self::Peer];

    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Relay => "relay",
            Self::Peer => "peer",
        }
    }
}

/// Where a program runs and with which priority.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat {
    pub(crate) place: Place,
    pub(crate) core: usize,
    pub(crate) nice: i8,
}

/// Three namespaces in a row; gone when dropped.
pub(crate) struct Network {
    prefix: String,
    /// One sleeping process a namespace, through whose `/proc/PID/net` its counters are read.
    anchors: Vec<Process>,
    guardian: Child,
}

impl Network {
    /// Makes the namespaces, needs root.
    pub(crate) fn up() -> Result<Self, Failure> {
        let prefix = format!("{FAMILY}{}-", std::process::id());
        let guardian = Command::new(std::env::current_exe()?)
            .args(["bench", "guardian", &prefix])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Ctrl-C reaches the foreground process group; the guardian must outlive it.
            .process_group(0)
            .spawn()?;
        let mut network = Self { prefix, anchors: Vec::new(), guardian };
        network.build()?;
        Ok(network)
    }

    fn build(&mut self) -> Result<(), Failure> {
        for place in Place::ALL {
            ip(&["netns", "add", &self.namespace(place)])?;
        }
        self.join((Place::Client, "c-r", CLIENT_IP), (Place::Relay, "r-c", RELAY_LISTEN_IP))?;
        self.join((Place::Relay, "r-p", RELAY_PEER_IP), (Place::Peer, "p-r", PEER_IP))?;
        for (place, gateway) in [(Place::Client, RELAY_LISTEN_IP), (Place::Peer, RELAY_PEER_IP)] {
            ip(&["-n", &self.namespace(place), "route", "add", "default", "via", gateway])?;
        }
        for place in Place::ALL {
            ip(&["-n", &self.namespace(place), "link", "set", "lo", "up"])?;
            // Receive packet steering would move the receiving side's work off the sender's core.
            self.shell(place, "for f in /sys/class/net/*/queues/rx-*/rps_cpus; do echo 0 > $f; done")?;
            let anchor = Seat { place, core: 0, nice: 0 };
            let sleeper = self.spawn_unpinned(anchor, &["sleep".into(), "infinity".into()])?;
            self.anchors.push(sleeper);
        }
        self.shell(Place::Relay, "echo 1 > /proc/sys/net/ipv4/ip_forward")?;
        // 10,000 clients on one address.
        self.shell(Place::Client, "echo 1024 65535 > /proc/sys/net/ipv4/ip_local_port_range")?;
        // An anchor is in its namespace as soon as `ip` has become `sleep`.
        let deadline = Instant::now() + Duration::from_secs(10);
        for place in Place::ALL {
            let comm = format!("/proc/{}/comm", self.pid_in(place));
            while fs::read_to_string(&comm)?.trim() != "sleep" {
                if Instant::now() > deadline {
                    return Err("`ip netns exec` does not start programs".into());
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// A process that lives in the namespace as long as the network does.
    pub(crate) fn pid_in(&self, place: Place) -> u32 {
        let index = Place::ALL.iter().position(|candidate| *candidate == place).unwrap_or(0);
        self.anchors[index].pid()
    }

    /// Starts a program pinned to its seat, with `environment` beside ours; its output goes to `log`.
    pub(crate) fn spawn(
        &self,
        seat: Seat,
        command: &[String],
        environment: &[(&str, &str)],
        log: &Path,
    ) -> Result<Process, Failure> {
        let mut pinned: Vec<String> = Vec::new();
        if seat.nice != 0 {
            // A session of its own, see `outrank`.
            pinned.extend(["setsid", "nice", "-n", &seat.nice.to_string()].map(str::to_owned));
        }
        pinned.extend(["taskset", "-c", &seat.core.to_string()].map(str::to_owned));
        pinned.extend_from_slice(command);
        let log = File::create(log)?;
        let mut child = self.inside(seat.place, &pinned);
        child.envs(environment.iter().copied()).stdout(log.try_clone()?).stderr(log);
        let process = Process::start(&mut child)?;
        if seat.nice != 0 {
            outrank(process.pid(), seat.nice)?;
        }
        Ok(process)
    }

    fn spawn_unpinned(&self, seat: Seat, command: &[String]) -> Result<Process, Failure> {
        Process::start(self.inside(seat.place, command).stdout(Stdio::null()).stderr(Stdio::null()))
    }

    /// Runs a command to its end and tells whether it succeeded; its output is discarded.
    pub(crate) fn succeeds(&self, place: Place, command: &[String]) -> Result<bool, Failure> {
        let status = self.inside(place, command).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        Ok(status.success())
    }

    /// What a command prints.
    pub(crate) fn output(&self, place: Place, command: &[String]) -> Result<String, Failure> {
        let output = self.inside(place, command).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned().into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Sets a kernel parameter of a namespace, named by its path below `/proc/sys`.
    pub(crate) fn set(&self, place: Place, parameter: &str, value: &str) -> Result<(), Failure> {
        self.shell(place, &format!("echo {value} > /proc/sys/{parameter}"))
    }

    fn shell(&self, place: Place, script: &str) -> Result<(), Failure> {
        self.output(place, &["sh".to_owned(), "-ec".to_owned(), script.to_owned()]).map(drop)
    }

    /// `ip netns exec` becomes the program, so the child's process id is the program's.
    fn inside(&self, place: Place, command: &[String]) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.namespace(place)]).args(command).stdin(Stdio::null());
        inside
    }

    fn namespace(&self, place: Place) -> String {
        format!("{}{}", self.prefix, place.name())
    }

    fn join(&self, one: (Place, &str, &str), other: (Place, &str, &str)) -> Result<(), Failure> {
        let (one_space, other_space) = (self.namespace(one.0), self.namespace(other.0));
        ip(&[
            "link",
            "add",
            one.1,
            "netns",
            &one_space,
            "type",
            "veth",
            "peer",
            "name",
            other.1,
            "netns",
            &other_space,
        ])?;
        for (space, (_, device, address)) in [(&one_space, one), (&other_space, other)] {
            ip(&["-n", space, "addr", "add", &format!("{address}/24"), "dev", device])?;
            ip(&["-n", space, "link", "set", device, "up"])?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.anchors.clear();
        drop(self.guardian.stdin.take());
        // Nothing to do about a guardian that fails: it has said why on standard error.
        let _ = self.guardian.wait();
    }
}

/// The guardian's whole life: waits until its parent is gone, then removes the parent's namespaces.
pub(crate) fn guard(prefix: &str) -> Result<(), Failure> {
    let mut nothing = Vec::new();
    std::io::stdin().read_to_end(&mut nothing)?;
    remove_namespaces(prefix)
}

/// Removes what earlier runs left behind (a guardian killed, too); returns the number of namespaces.
pub(crate) fn remove_stale() -> Result<usize, Failure> {
    let stale = stale_namespaces()?;
    for namespace in &stale {
        remove_namespaces(namespace)?;
    }
    Ok(stale.len())
}

/// Namespaces of ours whose owner no longer runs.
pub(crate) fn stale_namespaces() -> Result<Vec<String>, Failure> {
    let mut names = namespaces(FAMILY)?;
    names.retain(|name| {
        owner(name).is_none_or(|pid| {
            // A process id is reused sooner or later, perhaps by a program that is not ours.
            fs::read_to_string(format!("/proc/{pid}/comm")).map_or(true, |comm| comm.trim() != "xtask")
        })
    });
    Ok(names)
}

fn owner(namespace: &str) -> Option<u32> {
    namespace.strip_prefix(FAMILY)?.split('-').next()?.parse().ok()
}

fn remove_namespaces(prefix: &str) -> Result<(), Failure> {
    for namespace in namespaces(prefix)? {
        let pids = Command::new("ip").args(["netns", "pids", &namespace]).output()?;
        for pid in String::from_utf8_lossy(&pids.stdout).split_whitespace() {
            // It may be gone by now.
            Command::new("kill").args(["-KILL", pid]).stderr(Stdio::null()).status()?;
        }
        ip(&["netns", "del", &namespace])?;
    }
    Ok(())
}

fn namespaces(prefix: &str) -> Result<Vec<String>, Failure> {
    let list = Command::new("ip").args(["netns", "list"]).output()?;
    Ok(parse_namespaces(&String::from_utf8_lossy(&list.stdout), prefix))
}

fn parse_namespaces(list: &str, prefix: &str) -> Vec<String> {
    list.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| name.starts_with(prefix))
        .map(str::to_owned)
        .collect()
}

/// Gives the session of process `pid` its niceness among sessions. Where the kernel groups tasks by session
/// (`CONFIG_SCHED_AUTOGROUP`), a process's own niceness counts only within its session.
fn outrank(pid: u32, nice: i8) -> Result<(), Failure> {
    let autogroup = format!("/proc/{pid}/autogroup");
    if !Path::new(&autogroup).exists() {
        return Ok(());
    }
    // Until `setsid` has run, the process shares our session, whose rank is not ours to change.
    let deadline = Instant::now() + Duration::from_secs(5);
    while session(pid)? != pid {
        if Instant::now() > deadline {
            return Err("a program does not get a session of its own".into());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(fs::write(&autogroup, nice.to_string()).map_err(|error| format!("{autogroup}: {error}"))?)
}

fn session(pid: u32) -> Result<u32, Failure> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_session(&stat).ok_or_else(|| format!("/proc/{pid}/stat is not as proc(5) says").into())
}

/// The sixth field of `/proc/PID/stat`; the second is a name in parentheses that may hold anything.
fn parse_session(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(3)?.parse().ok()
}

fn ip(arguments: &[&str]) -> Result<(), Failure> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(format!("`ip {}` failed: {}", arguments.join(" "), reason.trim()).into())
}

/// A running program, killed when dropped.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Result<Self, Failure> {
        Ok(Self(command.spawn().map_err(|error| format!("cannot start {command:?}: {error}"))?))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn is_running(&mut self) -> Result<bool, Failure> {
        Ok(self.0.try_wait()?.is_none())
    }

    /// Waits for the end; `false` if the deadline comes first.
    pub(crate) fn ends_before(&mut self, deadline: Instant) -> Result<bool, Failure> {
        while self.is_running()? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(true)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_listed_with_or_without_an_id_and_never_anyone_elses() {
        let list = "tp-bench-7-client (id: 0)\ntp-bench-7-peer\ntp-bench-71-peer\nmine\nx-tp-bench-7-relay\n";
        assert_eq!(parse_namespaces(list, "tp-bench-7-"), ["tp-bench-7-client", "tp-bench-7-peer"]);
        assert_eq!(parse_namespaces(list, FAMILY).len(), 3);
    }

    #[test]
    fn the_session_is_the_sixth_field() {
        assert_eq!(parse_session("42 (a) b) S 1 40 41 0 -1 4194304"), Some(41));
        assert_eq!(parse_session("42 (a) S 1"), None);
    }

    #[test]
    fn the_owner_is_in_the_name() {
        assert_eq!(owner("tp-bench-4711-client"), Some(4711));
        assert_eq!(owner("tp-bench-x-client"), None);
    }
}
