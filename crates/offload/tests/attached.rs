//! Where the programs are attached, and that nothing stays when whoever attached them is gone.

use std::{
    env,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use aya::programs::{SchedClassifier, TcAttachType};
use turnpike_offload::{Hook, Kernel, OffloadError, Settings};
use turnpike_testkit::{alone::skip, eventually};

/// Starts this program again as the one that will be killed.
const HOLDER: &str = "TURNPIKE_OFFLOAD_HOLDER";

pub(crate) fn settings(hook: Hook) -> Settings {
    Settings {
        listeners: vec!["10.78.0.1:3478".parse().expect("an address")],
        relay_ports: 49_152..=65_535,
        flows: 65_536,
        sockets: 1000,
        hook,
    }
}

fn ip(words: &str) {
    let output = Command::new("ip").args(words.split(' ')).output().expect("ip(8) runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A namespace of this thread's own with a link: `one` has an address, `other` has none. False, and said, where that cannot be had.
pub(crate) fn with_a_link() -> bool {
    // SAFETY: changes this thread's namespace only, and that of threads and programs which it starts.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        skip("no permission for network namespaces");
        return false;
    }
    ip("link add one type veth peer name other");
    ip("addr add 10.78.0.1/24 dev one");
    ip("link set one up");
    ip("link set other addrgenmode none up");
    ip("link set lo up");
    // The far end has to receive by NAPI for XDP.
    let made = Command::new("ethtool").args(["-K", "other", "gro", "on"]).status();
    assert!(made.is_ok_and(|made| made.success()), "ethtool(8) runs");
    true
}

/// `None`, and said, where nobody may.
pub(crate) fn start(hook: Hook) -> Option<Kernel> {
    match Kernel::start(&settings(hook)) {
        Ok(kernel) => Some(kernel),
        Err(OffloadError::Capability { missing, .. }) => {
            skip(&format!("this process lacks {missing}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Programs attached by links.
fn links(interface: &str) -> usize {
    let (_, programs) =
        SchedClassifier::query_tcx(interface, TcAttachType::Ingress).expect("the kernel tells");
    programs.len()
}

/// Programs attached by filters.
fn filters(interface: &str) -> usize {
    let output = Command::new("tc")
        .args(["filter", "show", "dev", interface, "ingress"])
        .output()
        .expect("tc(8) runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter(|line| line.contains("turnpike")).count()
}

/// Programs in drivers, and generic ones.
fn in_drivers(interface: &str) -> [bool; 2] {
    let output = Command::new("ip").args(["link", "show", "dev", interface]).output().expect("ip(8) runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // Behind the name of the first line.
    [" xdp ", " xdpgeneric "].map(|mode| text.contains(mode))
}

/// A program that another test starts has all descriptors of this process for a moment, and so holds the links that they stand for.
fn nothing_is_left(interfaces: &[&str]) {
    let left =
        |it: &&str| links(it) + filters(it) + in_drivers(it).iter().filter(|is_there| **is_there).count();
    eventually("nothing is left", || interfaces.iter().map(left).sum::<usize>() == 0);
}

fn attached(kernel: &Kernel) -> Vec<(String, Hook)> {
    kernel.attached().into_iter().map(|it| (it.interface, it.hook)).collect()
}

fn is_attached_to(kernel: &Kernel, names: &[&str]) -> bool {
    kernel.attached().iter().map(|it| &it.interface[..]).eq(names.iter().copied())
}

#[test]
fn ethernet_with_an_address_is_what_it_is_attached_to() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Tcx) else { return };
    assert_eq!(attached(&kernel), [("one".to_owned(), Hook::Tcx)]);
    // On loopback it marks what our relayed addresses send to each other.
    assert_eq!([links("one"), links("other"), links("lo")], [1, 0, 1]);
    ip("addr add 10.78.1.1/24 dev other");
    eventually("it follows", || is_attached_to(&kernel, &["one", "other"]));
    assert_eq!(links("other"), 1);
    ip("addr del 10.78.1.1/24 dev other");
    eventually("it lets go", || is_attached_to(&kernel, &["one"]));
    eventually("and is gone", || links("other") == 0);
    drop(kernel);
    nothing_is_left(&["one", "other", "lo"]);
}

#[test]
fn in_the_driver_where_that_can_and_at_tc_where_not() {
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
        [("bridge".to_owned(), Hook::Tcx), ("one".to_owned(), Hook::Xdp)],
        "{told:?}"
    );
    assert!(told[0].why.as_ref().is_some_and(|why| why.contains("software (bridge)")), "{told:?}");
    assert_eq!((in_drivers("one"), links("one"), links("bridge"), links("lo")), ([true, false], 0, 1, 1));
    ip("link set one down");
    eventually("it lets go", || is_attached_to(&kernel, &["bridge"]));
    eventually("and is gone", || in_drivers("one") == [false, false]);
    ip("link set one up");
    eventually("it follows", || is_attached_to(&kernel, &["bridge", "one"]));
    assert_eq!(in_drivers("one"), [true, false]);
    drop(kernel);
    nothing_is_left(&["one", "bridge", "lo"]);
}

#[test]
fn generic_where_that_is_asked_for() {
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
fn without_a_driver_that_can_there_is_no_start() {
    if !with_a_link() || start(Hook::Tcx).is_none() {
        return;
    }
    ip("link del one");
    ip("link add one type bridge");
    ip("addr add 10.78.0.1/24 dev one");
    ip("link set one up");
    let error = Kernel::start(&settings(Hook::Xdp)).err().expect("it cannot").to_string();
    assert!(
        error.contains("one: ") && error.contains("(bridge)") && error.contains("--datapath kernel"),
        "{error}"
    );
    nothing_is_left(&["one", "lo"]);
}

#[test]
fn below_linux_6_6_filters_do_it_and_go_with_it() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Clsact) else { return };
    assert_eq!(attached(&kernel), [("one".to_owned(), Hook::Clsact)]);
    assert_eq!((filters("one"), filters("lo"), links("one")), (1, 1, 0));
    drop(kernel);
    nothing_is_left(&["one", "lo"]);
}

/// Two processes of ours, one after the other: what the first one had goes by its own doing alone.
#[test]
fn a_successor_is_loaded_beside_it_and_attached_behind_it() {
    if !with_a_link() {
        return;
    }
    let programs = || links("one") + filters("one") + in_drivers("one").into_iter().filter(|it| *it).count();
    for hook in [Hook::Tcx, Hook::Clsact, Hook::Xdp] {
        let Some(old) = start(hook) else { return };
        let new = Kernel::load(&settings(hook)).expect("as the old one");
        assert_eq!((programs(), attached(&new)), (1, vec![]), "{hook:?}");
        old.detach();
        // A process that is just being started may hold a copy of a link until it is another program.
        eventually("the old one is gone", || programs() == 0);
        assert_eq!(attached(&old), [], "{hook:?}");
        new.attach().expect("as the old one");
        assert_eq!((programs(), attached(&new)), (1, vec![("one".to_owned(), hook)]), "{hook:?}");
        // Neither what it could have left behind, nor once more.
        drop(old);
        new.attach().expect("it is");
        assert_eq!(programs(), 1, "{hook:?}");
        drop(new);
        eventually("and so is the new one", || programs() == 0);
    }
}

/// No test, but what the next one starts.
#[test]
fn holder() {
    let Ok(hook) = env::var(HOLDER) else { return };
    let hooks = [Hook::Tcx, Hook::Clsact, Hook::Xdp];
    let hook = hooks.into_iter().find(|it| it.name() == hook).expect("one of these");
    let kernel = start(hook).expect("as outside");
    println!("attached to {}", kernel.attached()[0].interface);
    loop {
        std::thread::park();
    }
}

#[test]
fn a_process_that_is_killed_leaves_no_link_and_its_filter_goes_with_the_next() {
    if !with_a_link() || start(Hook::Tcx).is_none() {
        return;
    }
    for hook in ["tcx", "clsact", "xdp"] {
        let mut holder = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "attached::holder", "--nocapture"])
            .env(HOLDER, hook)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts again");
        let mut lines = BufReader::new(holder.stdout.take().expect("piped")).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line.contains("attached to one"))), "{hook}");
        let all = || links("one") + filters("one") + usize::from(in_drivers("one")[0]);
        assert_eq!(all(), 1, "{hook}");
        holder.kill().expect("it can be killed");
        holder.wait().expect("it has ended");
        if hook == "clsact" {
            assert_eq!(filters("one"), 1, "a filter outlives its process");
            drop(start(Hook::Clsact));
        }
        nothing_is_left(&["one", "lo"]);
    }
}
