//! Network namespaces joined by veth pairs, with reliable cleanup.
//!
//! If the lab runs as root, each namespace has a name, `tplab-ID-NAME`, which is visible in `ip netns` and used to find stale namespaces.
//! Otherwise the namespaces are inside a user namespace. In both cases, a sleeping anchor process keeps each namespace alive, and all other
//! processes enter the namespace through it. Nothing outside the namespaces is modified.

mod guardian;
mod napi;
pub(crate) mod offload;
pub(crate) mod spec;
pub(crate) mod state;
pub(crate) mod userns;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use turnpike_strict::hint;

use self::{
    guardian::Guardian,
    spec::{Namespace, Spec},
    state::{ProcessIdentity, SpaceState, TopologyState},
};
use crate::{
    error::LabError,
    program::{self, MARK},
    tools::{self, output_in, words},
};

const FAMILY: &str = "tplab-";
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Topology {
    state: TopologyState,
    pub(crate) addresses: BTreeMap<String, String>,
    pub(crate) offloads: BTreeMap<String, BTreeMap<String, bool>>,
    /// IDs of the kernel threads that receive packets, by `NAMESPACE.DEVICE`.
    pub(crate) receivers: BTreeMap<String, Vec<u32>>,
    /// Process that cleans up if the lab dies; `None` for a topology of `lab up`.
    guardian: Option<Guardian>,
}

impl Topology {
    pub(crate) fn up(spec: &Spec, id: &str) -> Result<Self, LabError> {
        if let Some(state) = TopologyState::load(id)?
            && !state.is_stale()
        {
            return Err(LabError::usage(format!(
                "topology \"{id}\" is already up: remove it with `turnpike lab down`"
            )));
        }
        remove_stale()?;
        let mut lab = Self::new(id, None);
        match lab.build(spec) {
            Ok(()) => Ok(lab),
            Err(error) => {
                remove(&lab.state)?;
                Err(error)
            }
        }
    }

    pub(crate) fn for_run(spec: Option<&Spec>) -> Result<Self, LabError> {
        remove_stale()?;
        // Several runs within one process, as in tests, must not share namespaces.
        static RUNS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let run = RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut lab =
            Self::new(&format!("{}.{run}", std::process::id()), ProcessIdentity::of(std::process::id()));
        let spaces = spec.map_or(&[][..], |spec| &spec.namespace);
        let names: Vec<String> = if userns::is_root() {
            spaces.iter().map(|space| lab.netns_name(&space.name)).collect()
        } else {
            Vec::new()
        };
        lab.state.save()?;
        lab.guardian = Some(Guardian::start(lab.id(), &state::path_of(lab.id())?, &names)?);
        if let Some(spec) = spec {
            lab.build(spec)?;
        }
        Ok(lab)
    }

    pub(crate) fn find(id: &str) -> Result<Self, LabError> {
        match TopologyState::load(id)? {
            Some(state) if state.is_whole() => Ok(Self::of(state)),
            _ => {
                Err(LabError::usage(format!("topology \"{id}\" is not up: create it with `turnpike lab up`")))
            }
        }
    }

    fn new(id: &str, owner: Option<ProcessIdentity>) -> Self {
        Self::of(TopologyState {
            id: id.to_owned(),
            owner,
            user_namespace: !userns::is_root(),
            spaces: Vec::new(),
        })
    }

    fn of(state: TopologyState) -> Self {
        let (addresses, offloads, receivers) = Default::default();
        Self { state, addresses, offloads, receivers, guardian: None }
    }

    pub(crate) fn id(&self) -> &str {
        &self.state.id
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.state.spaces.iter().map(|space| space.name.as_str())
    }

    /// Process that keeps the namespace alive; its `/proc/PID/net` has the namespace's counters.
    pub(crate) fn anchor(&self, name: &str) -> Result<u32, LabError> {
        self.space(name).map(|space| space.anchor.pid)
    }

    pub(crate) fn entry(&self, name: Option<&str>) -> Result<Vec<String>, LabError> {
        match name {
            Some(name) => Ok(self.entry_of(self.anchor(name)?)),
            None => Ok(Vec::new()),
        }
    }

    fn entry_of(&self, anchor: u32) -> Vec<String> {
        let mut entry = words(["nsenter", "-t", &anchor.to_string(), "-n"]);
        // The owner's user namespace must be entered first, unless this process is already inside it.
        if self.state.user_namespace && userns::inherited_directory().is_none() {
            entry.extend(words(["-U", "--preserve-credentials"]));
        }
        entry.push("--".to_owned());
        entry
    }

    fn space(&self, name: &str) -> Result<&SpaceState, LabError> {
        self.state.spaces.iter().find(|space| space.name == name).ok_or_else(|| {
            let known: Vec<&str> = self.names().collect();
            LabError::usage(format!("no namespace \"{name}\"; {}", hint(name, known.iter().copied())))
        })
    }

    fn netns_name(&self, name: &str) -> String {
        format!("{FAMILY}{}-{name}", self.id())
    }

    fn build(&mut self, spec: &Spec) -> Result<(), LabError> {
        self.state.save()?;
        if spec.has_napi_threads() {
            napi::require(spec)?;
        }
        for space in &spec.namespace {
            self.add_space(space)?;
        }
        let has_ipv6 = fs::exists("/proc/net/if_inet6").unwrap_or(false);
        for link in &spec.link {
            let [a, b] = &link.ends;
            // The link is created in the namespace of one end, because without root this process has no privileges in its own namespace.
            let (mtu, pid) = (link.mtu, self.anchor(&b.namespace)?);
            let add = format!(
                "ip link add {} mtu {mtu} type veth peer name {} mtu {mtu} netns {pid}",
                a.device, b.device
            );
            output_in(&self.entry(Some(&a.namespace))?, &add.split(' ').collect::<Vec<_>>())?;
        }
        for end in spec.ends() {
            let entry = self.entry(Some(&end.namespace))?;
            for address in &end.addresses {
                // Skips duplicate address detection, which takes a second and is pointless on a link with two ends.
                let v6 = address.contains(':');
                if v6 && !has_ipv6 {
                    continue;
                }
                let extra: &[&str] = if v6 { &["nodad"] } else { &[] };
                output_in(&entry, &[&["ip", "addr", "add", address, "dev", &end.device], extra].concat())?;
            }
            let held = offload::apply(&entry, &end.device, &end.wanted(&spec.offloads))?;
            self.offloads.insert(format!("{}/{}", end.namespace, end.device), held);
            output_in(&entry, &["ip", "link", "set", &end.device, "up"])?;
        }
        for end in spec.ends() {
            let entry = self.entry(Some(&end.namespace))?;
            let held = self.offloads.get(&format!("{}/{}", end.namespace, end.device));
            if held.is_some_and(|held| held.get("gro") == Some(&true)) {
                // XDP on the other end can redirect packets here only if GRO is turned on while both ends are up.
                for switch in ["off", "on"] {
                    output_in(&entry, &["ethtool", "-K", &end.device, "gro", switch])?;
                }
            }
            if let Some(cpu) = end.napi_cpu {
                let pids = napi::pin(&entry, &end.device, cpu)?;
                if let Some(mitigation) = &end.mitigation {
                    napi::mitigate(&entry, &end.device, mitigation)?;
                }
                self.receivers.insert(format!("{}.{}", end.namespace, end.device), pids);
            }
        }
        for space in &spec.namespace {
            self.route(space, has_ipv6)?;
        }
        self.addresses = spec.addresses();
        Ok(())
    }

    fn add_space(&mut self, space: &Namespace) -> Result<(), LabError> {
        let (netns, holder) = if userns::is_root() {
            let name = self.netns_name(&space.name);
            tools::output(["ip", "netns", "add", &name])?;
            let path = format!("--net=/run/netns/{name}");
            (Some(name), words(["nsenter", &path, "--", "sleep", "infinity"]))
        } else {
            (None, words(["unshare", "-n", "--", "sleep", "infinity"]))
        };
        let anchor = Command::new(&holder[0])
            .args(&holder[1..])
            .env(MARK, self.id())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(LabError::io("cannot start `sleep`"))?
            .id();
        let identity = ProcessIdentity::of(anchor)
            .ok_or_else(|| LabError::failed("an anchor process exited immediately"))?;
        self.state.spaces.push(SpaceState { name: space.name.clone(), anchor: identity, netns });
        self.state.save()?;
        let deadline = Instant::now() + PATIENCE;
        while fs::read_to_string(format!("/proc/{anchor}/comm")).unwrap_or_default().trim() != "sleep" {
            if Instant::now() > deadline || !identity.is_alive() {
                return Err(LabError::failed(format!("`{}` has not started", holder.join(" "))));
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn route(&self, space: &Namespace, has_ipv6: bool) -> Result<(), LabError> {
        let entry = self.entry(Some(&space.name))?;
        output_in(&entry, &["ip", "link", "set", "lo", "up"])?;
        let mut settings = space.sysctl.clone();
        if space.forward {
            settings.insert("ipv4/ip_forward".to_owned(), "1".to_owned());
            if has_ipv6 {
                settings.insert("ipv6/conf/all/forwarding".to_owned(), "1".to_owned());
            }
        }
        for (name, value) in &settings {
            // /proc/sys/net shows the namespace of the process that opens it.
            let script = "printf %s \"$2\" > \"/proc/sys/net/$1\"";
            output_in(&entry, &["sh", "-c", script, "sysctl", name, value])?;
        }
        for gateway in &space.gateways {
            if gateway.is_ipv4() || has_ipv6 {
                output_in(&entry, &["ip", "route", "add", "default", "via", &gateway.to_string()])?;
            }
        }
        for prefix in space.local.iter().filter(|prefix| has_ipv6 || !prefix.contains(':')) {
            output_in(&entry, &["ip", "route", "add", "local", prefix, "dev", "lo"])?;
        }
        for (prefix, gateway) in space.routes.iter().filter(|(_, gateway)| has_ipv6 || gateway.is_ipv4()) {
            output_in(&entry, &["ip", "route", "add", prefix, "via", &gateway.to_string()])?;
        }
        Ok(())
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        if let Some(guardian) = self.guardian.take() {
            program::sweep(self.id());
            drop(guardian);
        }
    }
}

/// Returns the number of topologies removed, including stale ones.
pub(crate) fn down(id: &str) -> Result<usize, LabError> {
    let mut ended = 0;
    if let Some(state) = TopologyState::load(id)? {
        remove(&state)?;
        ended += 1;
    }
    Ok(ended + remove_stale()?)
}

/// Removes what crashed runs left behind: states whose owner has exited, and the lab's namespaces that have no state.
pub(crate) fn remove_stale() -> Result<usize, LabError> {
    // Names are read before states. Another running lab saves its state before it creates namespaces, so each of its names seen here has a
    // state.
    let named = userns::is_root() && tools::find("ip").is_some();
    let names = if named { netns_names()? } else { Vec::new() };
    let (stale, alive): (Vec<TopologyState>, Vec<TopologyState>) =
        state::all()?.into_iter().partition(TopologyState::is_stale);
    for state in &stale {
        remove(state)?;
    }
    let mut removed = stale.len();
    for name in names {
        let belongs_to = |state: &TopologyState| name.starts_with(&format!("{FAMILY}{}-", state.id));
        if !alive.iter().any(belongs_to) {
            remove_netns(&name)?;
            removed += usize::from(!stale.iter().any(belongs_to));
        }
    }
    Ok(removed)
}

fn remove(state: &TopologyState) -> Result<(), LabError> {
    program::sweep(&state.id);
    if userns::is_root() && tools::find("ip").is_some() {
        // Namespaces are matched by name, because the lab may have died between creating and recording one.
        let family = format!("{FAMILY}{}-", state.id);
        for name in netns_names()?.iter().filter(|name| name.starts_with(&family)) {
            remove_netns(name)?;
        }
    }
    state.remove()
}

fn remove_netns(name: &str) -> Result<(), LabError> {
    // A process that has cleared its environment no longer has the mark, but is still in the namespace.
    let pids = tools::output(["ip", "netns", "pids", name]).unwrap_or_default();
    for pid in pids.split_whitespace().filter_map(|pid| program::to_pid(pid.parse().ok()?)) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    match tools::output(["ip", "netns", "del", name]) {
        Err(error) if fs::exists(Path::new("/run/netns").join(name)).unwrap_or(true) => Err(error),
        _ => Ok(()),
    }
}

fn netns_names() -> Result<Vec<String>, LabError> {
    Ok(parse_netns_names(&tools::output(["ip", "netns", "list"])?))
}

fn parse_netns_names(list: &str) -> Vec<String> {
    list.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| name.starts_with(FAMILY))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_of_the_lab_are_listed() {
        let list = "tplab-7-client (id: 0)\ntplab-up-peer\nmine\nx-tplab-7-relay\n";
        assert_eq!(parse_netns_names(list), ["tplab-7-client", "tplab-up-peer"]);
    }
}
