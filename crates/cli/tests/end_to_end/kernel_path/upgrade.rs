//! Upgrades with the kernel path: links and flows are handed over, and the kernel relays without interruption.

use crate::prelude::*;
use std::os::unix::fs::PermissionsExt as _;

use super::{
    PEER, SERVER, Server, by_each, on_links,
    relays::{Pair, number},
    run,
};

/// Client datagrams passed to user space because they match no flow. (Datagrams from unknown peers to relay
/// ports may come from a process that tests its sockets' features.)
fn without_flow(server: &Server<'_>) -> u64 {
    server.passes("unknown_channel")
}

fn flows(server: &Server<'_>) -> u64 {
    server.metrics().sum("turnpike_kernel_flows", "")
}

fn with_setting(dir: &Dir, setting: &str) -> String {
    started_by(dir, setting, &format!("{setting} exec"))
}

fn in_user_space(dir: &Dir) -> String {
    // Uses only shell builtins, because the sandbox would forbid a subprocess.
    let change = r#"for it; do shift; [ "$it" = kernel ] && it=gso; set -- "$@" "$it"; done"#;
    started_by(dir, "in-user-space", &format!("{change}\nexec"))
}

fn started_by(dir: &Dir, name: &str, exec: &str) -> String {
    let program = turnpike(&[]).get_program().to_string_lossy().into_owned();
    let path = dir.file(name, format!("#!/bin/sh\n{exec} {program} \"$@\"\n"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the test's own file");
    path.display().to_string()
}

fn ends_with_its_total(mut pair: Pair, server: &mut Server<'_>) {
    pair.exchange(20);
    pair.client.refresh(0);
    let client = pair.client.socket().local_addr().expect("bound");
    let line = server.program.line_with(&format!("client={client} transport="));
    assert_eq!(number(&line, "to_peer_datagrams"), pair.sent, "{line}");
    assert_eq!(number(&line, "to_client_datagrams"), pair.sent, "{line}");
}

#[test]
fn upgrade_keeps_kernel_relaying_without_loss_or_reordering() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--workers", "2", "--datapath", datapath]);
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
        let before = without_flow(&server);
        for _ in 0..2 {
            assert_eq!(flows(&server), 80);
            ends(upgraded.upgrade());
            goes_across();
            assert_eq!(flows(&server), 80);
        }
        assert_eq!(without_flow(&server), before, "a flow was missing");
        load.signal("INT");
        let result = load.wait(SOON).result();
        let nothing = ["lost", "reordered"].map(|key| result[key].as_u64());
        assert_eq!(nothing, [Some(0), Some(0)], "{result}");
        eventually("all allocations have ended", || server.metrics().sum("turnpike_allocations", "") == 0);
        assert_eq!(flows(&server), 0);
        // The reflector has returned everything, and each process has counted its part in both directions.
        let [to_peer, to_client] = ["to_peer", "to_client"].map(|direction| {
            let label = format!("direction=\"{direction}\"");
            server.metrics().sum("turnpike_relayed_datagrams_total", &label)
        });
        assert_eq!(to_peer, to_client, "{result}");
        assert!(result["received"].as_u64().is_some_and(|received| received <= to_client), "{result}");
        assert_eq!(server.metrics().sum("turnpike_upgrades_total", "result=\"done\""), 2);
    });
}

#[test]
fn upgrade_keeps_totals_exact_and_queued_datagrams_in_order() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let mut server = links.serve(&["--datapath", datapath]);
        let mut upgraded = Upgraded::new(&server.program);
        let mut pairs = [Pair::new(0, 0), Pair::new(1, 1)];
        pairs.iter_mut().for_each(|pair| pair.settle(&server));
        for _ in 0..2 {
            (0..30).for_each(|_| pairs.iter_mut().for_each(|pair| pair.exchange(40)));
            ends(upgraded.upgrade());
            pairs.iter_mut().for_each(|pair| pair.exchange(40));
            pairs.iter_mut().for_each(|pair| pair.settle(&server));
        }
        for pair in pairs {
            ends_with_its_total(pair, &mut server);
        }
        assert_eq!(flows(&server), 0);
    });
}

#[test]
fn failed_upgrade_keeps_flows_and_another_table_size_recreates_them() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = Dir::new();
        // The sandbox allows execution only in readable directories.
        let config = dir.file("turnpike.toml", "");
        let config = config.to_str().expect("the test's path is UTF-8");
        let mut server = links.serve(&["-c", config, "--workers", "2"]);
        let mut upgraded = Upgraded::new(&server.program);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        let before = without_flow(&server);
        for (setting, why) in
            [("TURNPIKE_SERVER_WORKERS=0", "server.workers"), ("TURNPIKE_SERVER_REALM=other", "realm")]
        {
            let asked = upgraded.ask(&["--binary", &with_setting(&dir, setting)]);
            assert!(asked.code == Some(1) && asked.stderr.contains(why), "{}", asked.output());
            (0..20).for_each(|_| pair.exchange(40));
            pair.settle(&server);
            assert_eq!((flows(&server), without_flow(&server)), (2, before), "{setting}");
        }
        let asked =
            upgraded.ask(&["--binary", &with_setting(&dir, "TURNPIKE_LIMITS_KERNEL_FLOWS=5000")]).ended(0);
        let old = upgraded.pid();
        upgraded.took_over(&asked.stdout);
        ends(old);
        pair.settle(&server);
        assert_eq!((flows(&server), server.metrics().sum("turnpike_kernel_flows_limit", "")), (2, 5000));
        ends_with_its_total(pair, &mut server);
    });
}

#[test]
fn clients_still_share_a_relayed_address_after_an_upgrade() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let mut server = links.serve(&["--shared-ports", "1"]);
        let mut upgraded = Upgraded::new(&server.program);
        let mut pairs: Vec<Pair> = (3..=5).map(Pair::apart).collect();
        pairs.iter_mut().for_each(|pair| pair.settle(&server));
        let before = without_flow(&server);
        ends(upgraded.upgrade());
        pairs.iter_mut().for_each(|pair| pair.settle(&server));
        assert_eq!((flows(&server), without_flow(&server)), (6, before));
        let mut newcomer = Pair::apart(6);
        newcomer.settle(&server);
        assert_eq!(newcomer.client.relayed, pairs[0].client.relayed);
        for pair in pairs {
            ends_with_its_total(pair, &mut server);
        }
        assert_eq!(flows(&server), 2, "the new client's flows");
    });
}

#[test]
fn limits_and_drain_apply_after_an_upgrade() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", "");
        let mut server = links.serve(&["-c", file.to_str().expect("a name")]);
        let mut upgraded = Upgraded::new(&server.program);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        ends(upgraded.upgrade());
        let signal = |name: &str, upgraded: &Upgraded| {
            run("kill", &["-s", name, &upgraded.pid().to_string()]);
        };
        let limits = "[limits]\nbits_per_second_per_allocation = \"8M\"\nburst = 20\n";
        fs::write(&file, limits).expect("the test's own file");
        signal("HUP", &upgraded);
        eventually("user space relays the traffic", || flows(&server) == 0);
        let before = server.across();
        (0..20).for_each(|_| pair.exchange(20));
        assert_eq!(server.across(), before);
        // The kernel has no flows of rate-limited clients to hand over; a reload removes the limit as usual.
        ends(upgraded.upgrade());
        (0..20).for_each(|_| pair.exchange(20));
        assert_eq!(flows(&server), 0);
        fs::write(&file, "").expect("the test's own file");
        signal("HUP", &upgraded);
        pair.settle(&server);
        assert_eq!(flows(&server), 2);
        signal("TERM", &upgraded);
        server.program.line_with("draining");
        pair.settle(&server);
        ends_with_its_total(pair, &mut server);
        ends(upgraded.pid());
    });
}

#[test]
fn upgraded_server_keeps_its_data_path() {
    on_links(turnpike_testkit::this_test!(), |links| {
        // The sandbox allows execution only in readable directories.
        let dir = Dir::new();
        let config = dir.file("turnpike.toml", "");
        let mut server = links.serve(&["-c", config.to_str().expect("the test's path is UTF-8")]);
        let mut upgraded = Upgraded::new(&server.program);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        goes_on_in_user_space(&mut upgraded, &dir);
        server.program.line_with("server.datapath has changed, but takes effect only after a restart");
        pair.settle(&server);
        assert_eq!(flows(&server), 2);
        ends_with_its_total(pair, &mut server);
    });
}

#[test]
fn upgraded_forwarder_may_switch_to_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        links.bursts_come_whole(false);
        let reflect = Reflect::start(PEER[0], &[]);
        let dir = Dir::new();
        let (at, to) = (format!("{}:5000", SERVER[0]), reflect.address);
        let rule = format!("[[rule]]\nprotocol = \"udp\"\nlisten = \"{at}\"\ntarget = \"{to}\"\n");
        let config = dir.file("forward.toml", rule);
        let forward = links.forward(&["-c", config.to_str().expect("the test's path is UTF-8")]);
        let mut upgraded = Upgraded::new(&forward.program);
        let rate = ["--clients", "4", "--rate", "4000", "--burst", "4", "--duration", "600", "--json", "-"];
        let load = Program::start(&mut turnpike(&[&["load", "udp", &at][..], &rate].concat()));
        // Short bursts from sockets without GRO.
        eventually("the kernel forwards datagrams", || forward.across() > 4000);
        goes_on_in_user_space(&mut upgraded, &dir);
        let forwarded = || forward.metrics().sum("turnpike_forward_datagrams_total", "");
        let before = forwarded();
        eventually("the datagrams are forwarded", || forwarded() > before + 8000);
        assert!(forward.metrics().maybe("turnpike_kernel_flows").is_none(), "nothing is in the kernel");
        load.signal("INT");
        let result = load.wait(SOON).result();
        let nothing = ["lost", "reordered"].map(|key| result[key].as_u64());
        assert_eq!(nothing, [Some(0), Some(0)], "{result}");
    });
}

fn goes_on_in_user_space(upgraded: &mut Upgraded, dir: &Dir) {
    let old = upgraded.pid();
    let asked = upgraded.ask(&["--binary", &in_user_space(dir)]).ended(0);
    upgraded.took_over(&asked.stdout);
    ends(old);
}
