//! `--datapath auto`: the kernel path for flows that nothing else on this machine changes.

use super::{
    Links, PEER, SERVER, Server,
    client::bound,
    forwards::{Session, at, rule},
    on_links,
    operator::unprivileged,
    relays::Pair,
};
use crate::prelude::*;

fn mark(links: &Links) {
    links.inside(&["nft", "add", "table", "ip", "t"]);
    links.inside(&["nft", "add chain ip t c { type filter hook output priority 0; }"]);
    links.inside(&["nft", "add rule ip t c udp dport != 0 meta mark set 7"]);
}

/// Exchanges datagrams until the marks have ended the leases and the kernel no longer relays anything.
fn stays_in_user_space(server: &Server<'_>, mut exchange: impl FnMut()) {
    let refused = || server.metrics().sum("turnpike_kernel_leases_refused_total", "reason=\"mark\"");
    eventually("the leases have ended", || {
        exchange();
        refused() > 2
    });
    // Metrics are up to a second old.
    thread::sleep(Duration::from_secs(2));
    let before = server.across();
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        exchange();
    }
    thread::sleep(Duration::from_secs(2));
    assert_eq!(server.across(), before);
}

#[test]
fn auto_relays_in_the_kernel_in_every_combination_of_families() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let mut server = links.serve(&["--datapath", "auto"]);
        server.program.line_with("data path kernel: attached to c, p (tcx)");
        for (client, peer) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut pair = Pair::new(client, peer);
            pair.settle(&server);
        }
        assert!(server.passes("lease") > 0);
        assert_eq!(server.metrics().sum("turnpike_kernel_leases_refused_total", ""), 0);
    });
}

#[test]
fn auto_leaves_marked_datagrams_to_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&["--datapath", "auto"]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        mark(links);
        stays_in_user_space(&server, || pair.exchange(20));
        links.inside(&["nft", "delete", "table", "ip", "t"]);
        pair.settle(&server);
    });
}

#[test]
fn auto_names_a_rule_with_a_rate_limit() {
    on_links(turnpike_testkit::this_test!(), |links| {
        links.inside(&["nft", "add", "table", "ip", "t"]);
        links.inside(&["nft", "add chain ip t c { type filter hook input priority 0; }"]);
        links.inside(&["nft", "add rule ip t c udp dport 9 limit rate 5/second accept"]);
        let mut server = links.serve(&["--datapath", "auto"]);
        server.program.line_with("a rule in nftables chain t c uses limit");
        let status = server.status();
        assert!(status.contains("not in the kernel: a rule in nftables chain t c uses limit"), "{status}");
        let mut pair = Pair::new(0, 0);
        for _ in 0..50 {
            pair.exchange(20);
        }
        links.inside(&["nft", "delete", "table", "ip", "t"]);
        server.program.line_with("no rule keeps flows in user space any more");
        pair.settle(&server);
    });
}

#[test]
fn auto_serves_in_user_space_without_capabilities() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let mut server = links.serve_as(unprivileged(links, ""), &["--datapath", "auto"]);
        let line = server.program.line_with("no in-kernel data path");
        assert!(line.contains("lacks CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON"), "{line}");
        let status = server.status();
        assert!(status.contains("\"gso\"") && status.contains("lacks CAP_NET_ADMIN"), "{status}");
        Pair::new(0, 0).exchange(20);
    });
}

#[test]
fn auto_forwards_unchanged_datagrams_in_the_kernel() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let targets = [0, 1].map(|family| bound(PEER[family]));
        let rules = [0, 1].map(|family| rule(at(family, 5000), &targets[family], ""));
        let mut forward = links.forward(&["--datapath", "auto", &rules[0], &rules[1]]);
        forward.program.line_with("data path kernel: attached to c, p (tcx)");
        for family in [0, 1] {
            Session::new(family, at(family, 5000), &targets[family]).settle(&forward);
        }
        assert_eq!(forward.metrics().sum("turnpike_kernel_leases_refused_total", ""), 0);
        let mut session = Session::new(0, at(0, 5000), &targets[0]);
        session.settle(&forward);
        mark(links);
        stays_in_user_space(&forward, || session.exchange(20));
        links.inside(&["nft", "delete", "table", "ip", "t"]);
        session.settle(&forward);
    });
}

#[test]
fn auto_forwards_in_user_space_without_capabilities() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let target = bound(PEER[0]);
        let rule = rule(at(0, 5000), &target, "");
        let mut forward = links.forward_as(unprivileged(links, ""), &["--datapath", "auto", &rule]);
        let line = forward.program.line_with("no in-kernel data path");
        assert!(line.contains("lacks CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON"), "{line}");
        Session::new(0, at(0, 5000), &target).exchange(20);
    });
}

#[test]
fn upgrade_with_auto_keeps_flows_in_the_kernel_and_their_leases() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&["--workers", "2", "--datapath", "auto"]);
        let reflect = Reflect::start(PEER[0], &[]);
        let mut upgraded = Upgraded::new(&server.program);
        let load = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
            .with("--clients 40 --rate 2000 --warmup 0.1 --duration 600")
            .to(reflect.address)
            .start();
        let goes_across = || {
            let before = server.across();
            eventually("the kernel relays the traffic", || server.across() > before + 2000);
        };
        goes_across();
        for _ in 0..2 {
            ends(upgraded.upgrade());
            goes_across();
            assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 80);
        }
        mark(links);
        stays_in_user_space(&server, || thread::sleep(Duration::from_millis(100)));
        load.signal("INT");
        let result = load.wait(SOON).result();
        let nothing = ["lost", "reordered"].map(|key| result[key].as_u64());
        assert_eq!(nothing, [Some(0), Some(0)], "{result}");
    });
}
