//! The kernel path from an operator's point of view: at startup, when interfaces change, and when it is
//! unavailable.

use super::{
    CLIENT, Links, PEER, SERVER, by_each,
    client::{Client, bound, received},
    on_links,
    relays::Pair,
};
use crate::prelude::*;

const USER: &str = "65534";

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
fn server_kernel_path_works_with_three_capabilities() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let as_user = unprivileged(links, ",+net_admin,+bpf,+perfmon");
        let mut server = links.serve_as(as_user, &["--datapath", datapath]);
        let line = server.program.line_with("data path kernel: attached");
        let how = if datapath == "xdp" { " to c, p (xdp)" } else { " to c, p (tcx)" };
        assert!(line.contains(how), "{line}");
        server.program.line_with("bypass this machine's firewall");
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
    });
}

#[test]
fn startup_without_capabilities_names_the_missing_ones() {
    on_links(turnpike_testkit::this_test!(), |links| {
        for (given, missing) in [
            ("", "lacks CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON"),
            (",+bpf,+perfmon", "lacks CAP_NET_ADMIN"),
            (",+net_admin", "lacks CAP_BPF, CAP_PERFMON"),
        ] {
            let mut command = unprivileged(links, given);
            let serve =
                turnpike(&["serve", "--listen", "10.77.1.1:3478", "--admin", "off", "--datapath", "kernel"]);
            command.arg(serve.get_program()).args(serve.get_args());
            let ended = Program::start(&mut command).wait(SOON).ended(1).says("--datapath kernel");
            assert!(ended.stderr.contains(missing) && ended.stderr.contains("setcap"), "{}", ended.output());
        }
    });
}

#[test]
fn new_and_removed_interfaces_are_followed() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let mut server = links.serve(&["--datapath", datapath]);
        links.inside(&["ip", "link", "add", "late", "type", "veth", "peer", "name", "later"]);
        links.inside(&["ip", "addr", "add", "10.99.0.1/24", "dev", "late"]);
        links.inside(&["ip", "link", "set", "late", "up"]);
        server.program.line_with("attached to late");
        links.inside(&["ip", "link", "del", "late"]);
        server.program.line_with("late is down or has lost its address");
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
fn changed_routes_are_followed() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        // The peer is reachable over the other link, whose other end also has the peer's address.
        links.inside(&["ip", "route", "add", "10.77.2.2/32", "via", "10.77.1.2", "dev", "c"]);
        let back = ["10.77.2.1/32", "via", "10.77.1.1", "dev", "c"];
        if datapath == "xdp" {
            // Packets that arrive on a link other than that of the return route stay in user space.
            let before = server.passes("source");
            eventually("an answer over the old link is seen", || {
                pair.exchange(100);
                server.passes("source") > before
            });
            run("ip", &[&["route", "add"], &back[..]].concat());
        }
        pair.settle(&server);
        let sent_by_old = || {
            let said = links.inside_says(&["ip", "-s", "link", "show", "p"]);
            let bytes = said.lines().last().and_then(|line| line.split_whitespace().next());
            bytes.and_then(|bytes| bytes.parse::<u64>().ok()).expect("ip has the counter")
        };
        let before = sent_by_old();
        for _ in 0..20 {
            pair.exchange(700);
        }
        assert!(sent_by_old() < before + 700, "no datagram was sent over the old link");
        links.inside(&["ip", "route", "del", "10.77.2.2/32"]);
        if datapath == "xdp" {
            run("ip", &[&["route", "del"], &back[..]].concat());
        }
        pair.settle(&server);
    });
}

#[test]
fn moved_neighbours_are_followed() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        // Announces itself by ARP, like a machine that takes over an address.
        fs::write("/proc/sys/net/ipv4/conf/p/arp_notify", "1").expect("the namespace is private");
        let number = if datapath == "xdp" { "02:00:00:00:00:07" } else { "02:00:00:00:00:06" };
        run("ip", &["link", "set", "p", "address", number]);
        let before = server.across();
        pair.reach_again(&server, before + 20);
        pair.settle(&server);
        assert!(links.inside_says(&["ip", "neigh", "show", "dev", "p"]).contains(number));
    });
}

#[test]
fn clients_and_peers_behind_routers_are_reached() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let far = [ip("10.77.9.9"), ip("fd77:9::9")];
        let home = ip("10.77.8.8");
        for device in ["c", "p"] {
            // The machine does not answer ARP requests for these addresses on the link itself.
            fs::write(format!("/proc/sys/net/ipv4/conf/{device}/arp_ignore"), "1")
                .expect("the test's own namespace");
        }
        for address in [far[0], far[1], home] {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            run("ip", &["addr", "replace", &format!("{address}/{bits}"), "dev", "lo"]);
        }
        let router = link_local("p");
        let leads = |to: IpAddr, via: &[&str], device: &str| {
            let to = to.to_string();
            links.inside(&[&["ip", "route", "replace", &to, "via"], via, &["dev", device]].concat());
        };
        leads(home, &["10.77.1.2"], "c");
        leads(far[0], &["10.77.2.2"], "p");
        leads(far[1], &[&router], "p");
        let server = links.serve(&["--datapath", datapath]);
        for family in [0, 1] {
            let client = Client::allocate(home, SocketAddr::new(SERVER[0], 3478), family == 1);
            let peer = bound(far[family]);
            client.bind(0x4001, peer.local_addr().expect("bound"));
            let mut pair = Pair { client, peer, sent: 0 };
            pair.settle(&server);
            if family == 0 {
                // An IPv6 router as next hop for an IPv4 address (ip-route(8), via inet6).
                leads(far[0], &["inet6", &router], "p");
                links.inside(&["ip", "neigh", "flush", "dev", "p"]);
                pair.settle(&server);
            }
        }
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn ip_says(arguments: &[&str]) -> String {
    let output = Command::new("ip").args(arguments).output().expect("ip is installed");
    String::from_utf8(output.stdout).expect("text")
}

fn link_local(device: &str) -> String {
    eventually("duplicate address detection is done", || {
        let said = ip_says(&["-o", "-6", "addr", "show", "dev", device, "scope", "link", "-tentative"]);
        let address = said.split_whitespace().find_map(|word| word.strip_suffix("/64"));
        address.map(str::to_owned)
    })
}

#[test]
fn dead_gateway_is_replaced_by_another() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let said = ip_says(&["-o", "link", "show", "dev", "p"]);
        let number = said.split_whitespace().skip_while(|word| *word != "link/ether").nth(1);
        let number = number.expect("an Ethernet device has an address");
        run("ip", &["addr", "replace", "10.77.9.9/32", "dev", "lo"]);
        for (router, how) in [("10.77.2.7", "reachable"), ("10.77.2.3", "permanent")] {
            run("ip", &["addr", "replace", &format!("{router}/24"), "dev", "p"]);
            let neighbour = ["neigh", "replace", router, "lladdr", number, "dev", "p", "nud", how];
            links.inside(&[&["ip"], &neighbour[..]].concat());
            links.inside(&["ip", "route", "append", "default", "via", router, "dev", "p"]);
        }
        let server = links.serve(&["--datapath", datapath]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(ip("10.77.9.9"));
        client.bind(0x4001, peer.local_addr().expect("bound"));
        let mut pair = Pair { client, peer, sent: 0 };
        pair.settle(&server);
        // Any other netlink event, such as a new IPv6 address, would trigger a lookup of all routes.
        eventually("the links have settled", || {
            !links.inside_says(&["ip", "-6", "addr", "show", "tentative"]).contains("inet6")
        });
        pair.settle(&server);
        // No event reports the dead router; the kernel switches after ARP fails.
        run("ip", &["addr", "del", "10.77.2.7/24", "dev", "p"]);
        links.inside(&["ip", "neigh", "replace", "10.77.2.7", "dev", "p", "nud", "failed"]);
        let before = server.across();
        pair.reach_again(&server, before + 20);
        pair.settle(&server);
        for router in ["10.77.2.7", "10.77.2.3"] {
            links.inside(&["ip", "route", "del", "default", "via", router, "dev", "p"]);
            links.inside(&["ip", "neigh", "replace", router, "lladdr", number, "dev", "p", "nud", "stale"]);
            links.inside(&["ip", "neigh", "del", router, "dev", "p"]);
        }
    });
}

#[test]
fn flows_return_to_the_kernel_under_load() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let reflect = Reflect::start(PEER[0], &[]);
        let load = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
            .to(reflect.address)
            .with("--clients 200 --rate 15000 --duration 8")
            .start();
        eventually("the kernel relays the flows", || server.across() > 5000);
        let no_route = server.passes("no_route");
        links.inside(&["ip", "route", "add", "unreachable", "10.77.2.2/32"]);
        eventually("the kernel relays nothing", || server.passes("no_route") > no_route + 1000);
        links.inside(&["ip", "route", "del", "unreachable", "10.77.2.2/32"]);
        let before = server.across();
        eventually("the kernel relays the flows again", || server.across() > before + 10_000);
        assert_eq!(load.wait(SOON).code, Some(0));
    });
}

#[test]
fn smaller_mtu_is_respected_under_traffic() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        let too_big = server.passes("too_big");
        for (mtu, len) in [("1280", 1260), ("1500", 1400), ("1000", 990), ("1500", 1400)] {
            links.inside(&["ip", "link", "set", "p", "mtu", mtu]);
            // Tests only the direction to the peer, because the peer's own MTU limits its datagrams.
            let payload = vec![7; len];
            pair.client.send(0x4001, &payload);
            assert_eq!(received(&pair.peer).0, payload);
            pair.exchange(500);
        }
        assert_eq!(server.passes("too_big") - too_big, 2);
        // Below 1,280 bytes the kernel removes IPv6 and its addresses from a link.
        links.inside(&["ip", "addr", "replace", "fd77:2::1/64", "dev", "p", "nodad"]);
        pair.settle(&server);
    });
}

#[test]
fn killed_server_leaves_nothing_attached() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let mut server = links.serve(&["--datapath", datapath]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        server.program.signal("KILL");
        eventually("the server has ended", || server.program.has_ended());
        // An attached program would still have the flow; nothing else handles these datagrams.
        pair.client.send(0x4001, b"into the void");
        pair.peer.send_to(b"into the void", pair.client.relayed).expect("the send succeeds");
        assert!(super::client::is_silent(&pair.peer) && super::client::is_silent(pair.client.socket()));
        assert!(!links.inside_says(&["ip", "link", "show"]).contains("xdp"));
        let again = links.serve(&["--datapath", datapath]);
        Pair::new(0, 0).settle(&again);
    });
}
