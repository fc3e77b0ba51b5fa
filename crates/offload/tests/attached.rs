//! Where the program is attached, and that nothing stays when whoever attached it is gone.

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

#[test]
fn ethernet_with_an_address_is_what_it_is_attached_to() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Tcx) else { return };
    assert_eq!(kernel.interfaces(), ["one"]);
    assert_eq!([links("one"), links("other"), links("lo")], [1, 0, 0]);
    ip("addr add 10.78.1.1/24 dev other");
    eventually("it follows", || kernel.interfaces() == ["one", "other"]);
    assert_eq!(links("other"), 1);
    ip("addr del 10.78.1.1/24 dev other");
    eventually("it lets go", || kernel.interfaces() == ["one"]);
    eventually("and is gone", || links("other") == 0);
    drop(kernel);
    assert_eq!([links("one"), links("other")], [0, 0]);
}

#[test]
fn below_linux_6_6_filters_do_it_and_go_with_it() {
    if !with_a_link() {
        return;
    }
    let Some(kernel) = start(Hook::Clsact) else { return };
    assert_eq!((kernel.interfaces(), filters("one"), links("one")), (vec!["one".to_owned()], 1, 0));
    drop(kernel);
    assert_eq!(filters("one"), 0);
}

/// Two processes of ours, one after the other: what the first one had goes by its own doing alone.
#[test]
fn a_successor_is_loaded_beside_it_and_attached_behind_it() {
    if !with_a_link() {
        return;
    }
    let attached = || links("one") + filters("one");
    for hook in [Hook::Tcx, Hook::Clsact] {
        let Some(old) = start(hook) else { return };
        let new = Kernel::load(&settings(hook)).expect("as the old one");
        assert_eq!((attached(), new.interfaces()), (1, vec![]), "{hook:?}");
        old.detach();
        assert_eq!((attached(), old.interfaces()), (0, vec![]), "{hook:?}");
        new.attach().expect("as the old one");
        assert_eq!((attached(), new.interfaces()), (1, vec!["one".to_owned()]), "{hook:?}");
        // Neither what it could have left behind, nor once more.
        drop(old);
        new.attach().expect("it is");
        assert_eq!(attached(), 1, "{hook:?}");
        drop(new);
        assert_eq!(attached(), 0, "{hook:?}");
    }
}

/// No test, but what the next one starts.
#[test]
fn holder() {
    let Ok(hook) = env::var(HOLDER) else { return };
    let kernel = start(if hook == "tcx" { Hook::Tcx } else { Hook::Clsact }).expect("as outside");
    println!("attached to {}", kernel.interfaces().join(" "));
    loop {
        std::thread::park();
    }
}

#[test]
fn a_process_that_is_killed_leaves_no_link_and_its_filter_goes_with_the_next() {
    if !with_a_link() || start(Hook::Tcx).is_none() {
        return;
    }
    for hook in ["tcx", "clsact"] {
        let mut holder = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "attached::holder", "--nocapture"])
            .env(HOLDER, hook)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts again");
        let mut lines = BufReader::new(holder.stdout.take().expect("piped")).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line.contains("attached to one"))), "{hook}");
        assert_eq!(links("one") + filters("one"), 1, "{hook}");
        holder.kill().expect("it can be killed");
        holder.wait().expect("it has ended");
        if hook == "tcx" {
            eventually("nothing is left", || links("one") == 0);
        } else {
            assert_eq!(filters("one"), 1, "a filter outlives its process");
            drop(start(Hook::Clsact));
            assert_eq!(filters("one"), 0);
        }
    }
}
