//! Interfaces to which programs are attached, and removal of the programs when the process ends.

use crate::prelude::*;
use std::{
    env,
    fs::DirEntry,
    io::{BufRead as _, BufReader},
    os::fd::OwnedFd,
    process::{Command, Stdio},
};

use aya::programs::TcAttachType;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use turnpike_offload::{Counted, Flows, Kernel, KernelSettings, OffloadError};
use turnpike_testkit::eventually;

use crate::program::has_xdp;

const HOLDER: &str = "TURNPIKE_OFFLOAD_HOLDER";

pub(crate) fn settings(hook: Hook) -> KernelSettings {
    KernelSettings {
        listeners: vec!["10.78.0.1:3478".parse().expect("an address")],
        relay_ports: 49_152..=65_535,
        flows: 65_536,
        sockets: 1000,
        hook,
        leases: false,
        measures: false,
    }
}

fn ip(words: &str) {
    let output = Command::new("ip").args(words.split(' ')).output().expect("ip(8) runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Creates a namespace for this thread with a link: `one` has an address, `other` has none. Without
/// permission, prints a skip notice and returns false.
pub(crate) fn with_a_link() -> bool {
    // SAFETY: affects only the network namespace of this thread and of the threads and processes it starts
    // later.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        skip("no permission for network namespaces");
        return false;
    }
    ip("link add one type veth peer name other");
    ip("addr add 10.78.0.1/24 dev one");
    ip("link set one up");
    // Separate commands: before Linux 6.0, an interface that is brought up in the request that sets
    // addrgenmode still gets an address.
    ip("link set other addrgenmode none");
    ip("link set other up");
    ip("link set lo up");
    // XDP needs NAPI on the far end.
    let made = Command::new("ethtool").args(["-K", "other", "gro", "on"]).status();
    assert!(made.is_ok_and(|made| made.success()), "ethtool(8) failed");
    true
}

fn is_offered(hook: Hook) -> bool {
    match hook {
        Hook::Tcx => SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok(),
        Hook::Xdp | Hook::XdpGeneric => has_xdp(),
        Hook::Best | Hook::Clsact => true,
    }
}

fn at_tc() -> Hook {
    if is_offered(Hook::Tcx) { Hook::Tcx } else { Hook::Clsact }
}

pub(crate) fn start(hook: Hook) -> Option<Kernel> {
    if !is_offered(hook) {
        skip(&format!("this kernel has no {}", hook.name()));
        return None;
    }
    match Kernel::start(&settings(hook)) {
        Ok(kernel) => Some(kernel),
        Err(OffloadError::Capability { missing, .. }) => {
            skip(&format!("this process lacks {missing}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn links(interface: &str) -> usize {
    if !is_offered(Hook::Tcx) {
        return 0;
    }
    let (_, programs) =
        SchedClassifier::query_tcx(interface, TcAttachType::Ingress).expect("a query of tcx programs");
    programs.len()
}

fn filters(interface: &str) -> usize {
    let output = Command::new("tc")
        .args(["filter", "show", "dev", interface, "ingress"])
        .output()
        .expect("tc(8) runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter(|line| line.contains("turnpike")).count()
}

fn programs(interface: &str) -> usize {
    links(interface) + filters(interface)
}

fn in_drivers(interface: &str) -> [bool; 2] {
    let output = Command::new("ip").args(["link", "show", "dev", interface]).output().expect("ip(8) runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    [" xdp ", " xdpgeneric "].map(|mode| text.contains(mode))
}

/// Polls, because a program started by another test briefly holds all descriptors of this process, including
/// the links.
fn nothing_is_left(interfaces: &[&str]) {
    let left = |it: &&str| programs(it) + in_drivers(it).iter().filter(|is_there| **is_there).count();
    eventually("nothing is left", || interfaces.iter().map(left).sum::<usize>() == 0);
}

fn attached(kernel: &Kernel) -> Vec<(String, Hook)> {
    kernel.attached().into_iter().map(|it| (it.interface, it.hook)).collect()
}

fn is_attached_to(kernel: &Kernel, names: &[&str]) -> bool {
    kernel.attached().iter().map(|it| &it.interface[..]).eq(names.iter().copied())
}

#[test]
fn programs_are_attached_to_ethernet_interfaces_with_an_address() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Best) else { return };
    assert_eq!(attached(&kernel), [("one".to_owned(), at_tc())]);
    // On loopback, the program marks packets between our own relayed addresses.
    assert_eq!(["one", "other", "lo"].map(programs), [1, 0, 1]);
    ip("addr add 10.78.1.1/24 dev other");
    eventually("the program is attached", || is_attached_to(&kernel, &["one", "other"]));
    assert_eq!(programs("other"), 1);
    ip("addr del 10.78.1.1/24 dev other");
    eventually("the program is no longer attached", || is_attached_to(&kernel, &["one"]));
    eventually("the program is removed from the interface", || programs("other") == 0);
    drop(kernel);
    nothing_is_left(&["one", "other", "lo"]);
}

#[test]
fn xdp_falls_back_to_tc_per_interface() {
    if !with_a_link() {
        return;
    }
    ip("link add bridge type bridge");
    ip("addr add 10.78.7.1/24 dev bridge");
    ip("link set bridge up");
    let Some(kernel) = start(Hook::Xdp) else { return };
    let told = kernel.attached();
    assert_eq!(
        attached(&kernel),
        [("bridge".to_owned(), at_tc()), ("one".to_owned(), Hook::Xdp)],
        "{told:?}"
    );
    assert!(told[0].why.as_ref().is_some_and(|why| why.contains("virtual interface (bridge)")), "{told:?}");
    assert_eq!((in_drivers("one"), ["one", "bridge", "lo"].map(programs)), ([true, false], [0, 1, 1]));
    ip("link set one down");
    eventually("the program is no longer attached", || is_attached_to(&kernel, &["bridge"]));
    eventually("the program is removed from the interface", || in_drivers("one") == [false, false]);
    ip("link set one up");
    eventually("the program is attached", || is_attached_to(&kernel, &["bridge", "one"]));
    assert_eq!(in_drivers("one"), [true, false]);
    drop(kernel);
    nothing_is_left(&["one", "bridge", "lo"]);
}

#[test]
fn generic_xdp_is_used_on_request() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::XdpGeneric) else { return };
    assert_eq!(attached(&kernel), [("one".to_owned(), Hook::XdpGeneric)]);
    assert_eq!(in_drivers("one"), [false, true]);
    drop(kernel);
    nothing_is_left(&["one", "lo"]);
}

#[test]
fn xdp_without_a_suitable_driver_fails_at_startup() {
    if !with_a_link() || start(Hook::XdpGeneric).is_none() {
        return;
    }
    ip("link del one");
    ip("link add one type bridge");
    ip("addr add 10.78.0.1/24 dev one");
    ip("link set one up");
    let error = Kernel::start(&settings(Hook::Xdp)).err().expect("no driver supports XDP").to_string();
    assert!(
        error.contains("one: ") && error.contains("(bridge)") && error.contains("--datapath kernel"),
        "{error}"
    );
    nothing_is_left(&["one", "lo"]);
}

#[test]
fn filters_are_used_before_linux_6_6_and_removed_at_the_end() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Clsact) else { return };
    assert_eq!(attached(&kernel), [("one".to_owned(), Hook::Clsact)]);
    assert_eq!((filters("one"), filters("lo"), links("one")), (1, 1, 0));
    drop(kernel);
    nothing_is_left(&["one", "lo"]);
}

fn seen_by() -> Vec<u32> {
    let mut numbers = Vec::new();
    if is_offered(Hook::Tcx) {
        let (_, programs) =
            SchedClassifier::query_tcx("one", TcAttachType::Ingress).expect("a query of tcx programs");
        numbers.extend(programs.iter().map(|program| program.id()));
    }
    for (words, before) in
        [("tc filter show dev one ingress", "turnpike"), ("ip link show dev one", "prog/xdp")]
    {
        let (program, words) = words.split_once(' ').expect("a program and its arguments");
        let output = Command::new(program).args(words.split(' ')).output().expect("the program runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for line in text.lines().filter(|line| line.contains(before)) {
            let mut words = line.split_whitespace().skip_while(|word| *word != "id").skip(1);
            numbers.push(words.next().and_then(|id| id.parse().ok()).unwrap_or_else(|| panic!("{line}")));
        }
    }
    numbers
}

fn passed(old: &Kernel, settings: &KernelSettings) -> Kernel {
    let (passed, descriptors) = old.export_fds().expect("descriptors");
    Kernel::from_handover(settings, passed, descriptors).expect("the new process takes the maps over")
}

fn target() -> SocketAddr {
    SocketAddr::from(([10, 78, 0, 3], 9))
}

fn install(flows: &mut Flows, port: u16) -> FlowKey {
    let state = flows.state().expect("the table has room");
    let socket = flows.socket().expect("the table has room");
    let remote = SocketAddr::from(([10, 78, 0, 2], port));
    let local = SocketAddr::from(([10, 78, 0, 1], 50_000));
    let installed = flows.install(&NewFlow {
        kind: Kind::ToClient,
        remote,
        local,
        channel: None,
        from: local,
        to: target(),
        state: &state,
        socket,
        expires_ns: u64::MAX,
    });
    // The flow stays installed, as if the process had been killed.
    assert!(installed.is_ok(), "there is room");
    FlowKey::new(remote, local, None)
}

#[test]
fn a_successor_replaces_programs_on_the_same_links_and_keeps_flows() {
    if !with_a_link() {
        return;
    }
    for hook in [Hook::Tcx, Hook::Clsact, Hook::Xdp] {
        let Some(old) = start(hook) else { continue };
        let first = seen_by();
        assert_eq!(first.len(), 1, "{hook:?}");
        let mut flows = old.flows().expect("descriptors");
        let (known, stranger) = (install(&mut flows, 1), install(&mut flows, 2));
        let failed = passed(&old, &settings(hook));
        assert!(failed.keeps_flows() && failed.attached().is_empty(), "{hook:?}");
        drop(failed);
        assert_eq!((seen_by(), flows.keys().len(), old.snapshot().flows), (first.clone(), 2, 2), "{hook:?}");

        let new = passed(&old, &settings(hook));
        let mut here = new.flows().expect("descriptors");
        assert!(
            here.adopt(&stranger, SocketAddr::from(([10, 78, 0, 4], 9))).is_none(),
            "the flow leads to another address"
        );
        let flow = here.adopt(&known, target()).expect("the flow is installed");
        let state = here.adopt_state(&flow, Counted::default());
        here.adopt_socket(&flow);
        old.hand_on();
        assert_eq!(
            (seen_by(), old.snapshot().flows),
            (first.clone(), 0),
            "{hook:?}: the old program is still attached"
        );
        drop((flows, old));
        assert_eq!(seen_by(), first, "{hook:?}: the program stays attached after the old process has ended");
        new.attach().expect("the new process attaches its program");
        let second = seen_by();
        assert!(second.len() == 1 && second != first, "{hook:?}: {first:?} {second:?}");
        assert_eq!(attached(&new), [("one".to_owned(), hook)], "{hook:?}");
        assert_eq!((here.keys(), new.snapshot().flows), (vec![known], 1), "{hook:?}: {stranger:?} remains");
        // State and socket of the flow are not reused.
        let other = install(&mut here, 3);
        assert_eq!(here.keys().len(), 2, "{other:?}");
        here.remove(flow);
        here.give_back_state(state);
        assert_eq!(here.keys(), [other], "{hook:?}");
        drop((here, new));
        nothing_is_left(&["one", "lo"]);
    }
}

#[test]
fn a_successor_with_other_maps_or_hooks_starts_without_flows() {
    if !with_a_link() {
        return;
    }
    for (before, after) in [
        (Hook::Tcx, KernelSettings { flows: 1000, ..settings(Hook::Tcx) }),
        (Hook::Tcx, KernelSettings { sockets: 1001, ..settings(Hook::Tcx) }),
        (Hook::Tcx, settings(Hook::Xdp)),
        (Hook::Xdp, settings(Hook::Tcx)),
        (Hook::Xdp, settings(Hook::XdpGeneric)),
        (Hook::Clsact, settings(Hook::Xdp)),
    ] {
        let Some(old) = start(before).filter(|_| is_offered(after.hook)) else { continue };
        let mut flows = old.flows().expect("descriptors");
        install(&mut flows, 1);
        let first = seen_by();
        let new = passed(&old, &after);
        let keeps = matches!((before, after.hook), (Hook::Xdp, Hook::XdpGeneric));
        assert_eq!(new.keeps_flows(), keeps, "{before:?} {after:?}");
        old.hand_on();
        assert_eq!(seen_by(), first, "{before:?} {after:?}");
        new.attach().expect("the new process can attach");
        // The kernel releases the old program a moment after its link is closed.
        eventually(&format!("{before:?} {after:?}: only the new one is attached"), || {
            let second = seen_by();
            second.len() == 1 && second != first
        });
        assert_eq!(attached(&new), [("one".to_owned(), after.hook)], "{before:?}");
        assert!(new.flows().expect("descriptors").keys().is_empty());
        drop((flows, old, new));
        nothing_is_left(&["one", "lo"]);
    }
}

/// Copies of the links, like those that a process forked by another thread holds until it calls exec.
fn links_of_this_process() -> Vec<OwnedFd> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("Linux 5.3");
    let all = fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let is_link = |entry: &DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|to| {
            to.to_string_lossy().contains("bpf_link") || to.to_string_lossy().contains("bpf-link")
        })
    };
    let numbers = all.filter(is_link).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(|number| pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).ok()).collect()
}

#[test]
fn a_successor_changes_the_hook_while_old_links_are_still_open() {
    if !with_a_link() {
        return;
    }
    for (before, after) in [(Hook::Xdp, Hook::XdpGeneric), (Hook::Tcx, Hook::Xdp)] {
        let Some(old) = start(before).filter(|_| is_offered(after)) else { continue };
        let first = seen_by();
        let new = passed(&old, &settings(after));
        let held = links_of_this_process();
        assert!(!held.is_empty(), "{before:?} has no links");
        old.hand_on();
        new.attach().expect("the interface is free");
        let second = seen_by();
        assert!(
            second.len() == 1 && second != first,
            "{before:?} {after:?}: only the new one is attached, immediately"
        );
        drop((held, old, new));
        nothing_is_left(&["one", "lo"]);
    }
}

#[test]
fn holder() {
    let Ok(hook) = env::var(HOLDER) else { return };
    let hooks = [Hook::Tcx, Hook::Clsact, Hook::Xdp];
    let hook = hooks.into_iter().find(|it| it.name() == hook).expect("a known hook");
    let kernel = start(hook).expect("the parent was able to start the kernel path");
    println!("attached to {}", kernel.attached()[0].interface);
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_process_leaves_at_most_a_filter_which_the_next_one_removes() {
    if !with_a_link() || start(Hook::Best).is_none() {
        return;
    }
    for hook in [Hook::Tcx, Hook::Clsact, Hook::Xdp].into_iter().filter(|hook| is_offered(*hook)) {
        let hook = hook.name();
        let mut holder = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "attached::holder", "--nocapture"])
            .env(HOLDER, hook)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test program starts");
        let mut lines = BufReader::new(holder.stdout.take().expect("piped")).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line.contains("attached to one"))), "{hook}");
        let all = || programs("one") + usize::from(in_drivers("one")[0]);
        assert_eq!(all(), 1, "{hook}");
        holder.kill().expect("the process can be killed");
        holder.wait().expect("the process has ended");
        if hook == "clsact" {
            assert_eq!(filters("one"), 1, "a filter outlives its process");
        }
        // Before Linux 6.6, loopback gets a filter whichever hook is chosen.
        if hook == "clsact" || !is_offered(Hook::Tcx) {
            drop(start(Hook::Clsact));
        }
        nothing_is_left(&["one", "lo"]);
    }
}

#[test]
fn filters_belong_to_one_process_until_it_has_detached_them() {
    if !with_a_link() {
        return;
    }
    let Some(first) = start(Hook::Clsact) else { return };
    let second = Kernel::start(&settings(Hook::Clsact));
    assert!(matches!(second, Err(OffloadError::Taken)), "the first process's filters must stay");
    assert_eq!(filters("one"), 1);
    let (passed, descriptors) = first.export_fds().expect("descriptors");
    let new = Kernel::from_handover(&settings(Hook::Clsact), passed, descriptors).expect("it is passed");
    new.attach().expect("the filter can be replaced");
    first.hand_on();
    drop(first);
    assert!(matches!(Kernel::start(&settings(Hook::Clsact)), Err(OffloadError::Taken)));
    drop(new);
    drop(start(Hook::Clsact).expect("the claim is free again"));
    nothing_is_left(&["one", "lo"]);
}
