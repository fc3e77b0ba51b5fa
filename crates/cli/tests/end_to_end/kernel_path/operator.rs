//! What an operator sees: at start, when interfaces come and go, and when the kernel path cannot be had.

use std::process::Command;

use super::{Links, on_links, relays::Pair};
use crate::harness::{Program, SOON, eventually, turnpike};

const USER: &str = "65534";

/// Starts a program as somebody who is not root, with these capabilities.
pub(super) fn unprivileged(links: &Links, capabilities: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args(links.nsenter());
    command.args(["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--no-new-privs"]);
    command.args([
        "--inh-caps",
        &format!("-all{capabilities}"),
        "--ambient-caps",
        &format!("-all{capabilities}"),
    ]);
    command.arg("--").env_clear();
    command
}

#[test]
fn an_ordinary_user_with_three_capabilities_has_it() {
    on_links("kernel_path::operator::an_ordinary_user_with_three_capabilities_has_it", |links| {
        let mut server = links.serve_as(unprivileged(links, ",+net_admin,+bpf,+perfmon"), &[]);
        let line = server.program.line_with("data path kernel: attached");
        assert!(line.contains(" to c, p (tcx)"), "{line}");
        server.program.line_with("never meets this machine's firewall");
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
    });
}

#[test]
fn without_capabilities_the_start_fails_and_says_which() {
    on_links("kernel_path::operator::without_capabilities_the_start_fails_and_says_which", |links| {
        for (given, missing) in [
            ("", "lacks CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON"),
            (",+bpf,+perfmon", "lacks CAP_NET_ADMIN"),
            (",+net_admin", "lacks CAP_BPF, CAP_PERFMON"),
        ] {
            let mut command = unprivileged(links, given);
            let serve =
                turnpike(&["serve", "--listen", "10.77.1.1:3478", "--admin", "off", "--datapath", "kernel"]);
            command.arg(serve.get_program()).args(serve.get_args());
            let ended = Program::start(&mut command).wait(SOON);
            assert_eq!(ended.code, Some(1), "{}", ended.output());
            assert!(ended.stderr.contains("--datapath kernel"), "{}", ended.output());
            assert!(ended.stderr.contains(missing) && ended.stderr.contains("setcap"), "{}", ended.output());
        }
    });
}

#[test]
fn interfaces_that_come_and_go_are_followed() {
    on_links("kernel_path::operator::interfaces_that_come_and_go_are_followed", |links| {
        let mut server = links.serve(&[]);
        links.inside(&["ip", "link", "add", "late", "type", "veth", "peer", "name", "later"]);
        links.inside(&["ip", "addr", "add", "10.99.0.1/24", "dev", "late"]);
        links.inside(&["ip", "link", "set", "late", "up"]);
        server.program.line_with("attached to late");
        links.inside(&["ip", "link", "del", "late"]);
        server.program.line_with("late is down, or has no address any more");
        // And those that stay still work, also when they were gone for a moment.
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        links.inside(&["ip", "link", "set", "p", "down"]);
        server.program.line_with("p is down");
        links.inside(&["ip", "link", "set", "p", "up"]);
        server.program.line_with("attached to p");
        links.inside(&["ip", "addr", "replace", "fd77:2::1/64", "dev", "p", "nodad"]);
        eventually("the link is up", || links.inside_says(&["ip", "link", "show", "p"]).contains("state UP"));
        pair.settle(&server);
    });
}

#[test]
fn a_route_that_changes_is_followed() {
    on_links("kernel_path::operator::a_route_that_changes_is_followed", |links| {
        let server = links.serve(&[]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        // The peer is reached by the other link, whose far end has its address just as well.
        links.inside(&["ip", "route", "add", "10.77.2.2/32", "via", "10.77.1.2", "dev", "c"]);
        pair.settle(&server);
        let far = links.inside_says(&["ip", "-s", "link", "show", "p"]);
        for _ in 0..20 {
            pair.exchange(700);
        }
        let sent = |text: &str| text.lines().last().map(str::to_owned);
        let now = links.inside_says(&["ip", "-s", "link", "show", "p"]);
        assert_eq!(sent(&far), sent(&now), "nothing left by the old link");
        links.inside(&["ip", "route", "del", "10.77.2.2/32"]);
        pair.settle(&server);
    });
}

#[test]
fn a_server_that_is_killed_leaves_nothing_behind() {
    on_links("kernel_path::operator::a_server_that_is_killed_leaves_nothing_behind", |links| {
        let mut server = links.serve(&[]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        server.program.signal("KILL");
        eventually("it has ended", || server.program.has_ended());
        // Were the program still there, the flow would be: nobody else takes these datagrams.
        pair.client.send(0x4001, b"into the void");
        pair.peer.send_to(b"into the void", pair.client.relayed).expect("it leaves");
        assert!(super::client::is_silent(&pair.peer) && super::client::is_silent(&pair.client.socket));
        let again = links.serve(&[]);
        Pair::new(0, 0).settle(&again);
    });
}
