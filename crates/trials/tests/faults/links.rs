//! Faults of the server's links.

use std::net::SocketAddr;

use serde_json::Value;

use super::{Crowd, Row, Server, Wanted, link_faults, or_thorough};
use turnpike_trials::links::{Links, RELAY, SERVER, on_links};
use turnpike_trials::{Load, PASSWORD, USER};

/// Runs a fault on a link with active clients; `test` is the calling test's full name.
fn on_a_link(
    test: &str,
    what: &'static str,
    fault: impl FnOnce(&Links, &Server, &mut Row),
    check: impl FnOnce(&Value),
) {
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    on_links(test, |links| {
        let wanted = Wanted { entry: Wanted::inside(links).entry, ..Wanted::flags(&["--workers", "2"]) };
        let address = SocketAddr::new(SERVER[0], 3478);
        let mut server = Server::on(address, RELAY[0], wanted);
        let crowd = Crowd::at(address, "10.77.2.2:0", "2");
        let mut row = Row::new(name, what);
        row.leaves_sessions = true;
        let seen = row.run(&mut server, crowd, |server, row| fault(links, server, row));
        check(&seen);
    });
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn an_interface_goes_down_and_up() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "the peer link, then the client link down for 3 s",
        |links, _, _| link_faults::go_down_and_up(links),
        |seen| {
            // No data arrives while a link is down; clients that time out reconnect.
            let down = or_thorough(500.0, 3_000.0);
            assert!(
                seen["lost"].as_u64() > Some(0) && seen["pause_ms_p50"].as_f64() >= Some(0.9 * down),
                "{seen}"
            );
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn an_address_is_removed() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "the relay address, then the listener address removed for 3 s",
        |links, _, _| link_faults::lose_their_addresses(links, |_| {}),
        |seen| assert!(seen["lost"].as_u64() > Some(0), "{seen}"),
    );
}

/// Fragments sent at the far end of the links (`FragCreates`, RFC 4293).
fn fragments_of(links: &Links) -> u64 {
    let said = links.inside_says(&["cat", "/proc/net/snmp"]);
    let mut lines = said.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let names = lines.next().expect("there is a line of names").split(' ');
    let mut fields = names.zip(lines.next().expect("there is a line of counts").split(' '));
    let (_, count) = fields.find(|(name, _)| *name == "FragCreates").expect("the kernel has the counter");
    count.parse().expect("a number")
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_mtu_becomes_small() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "MTU of both links 1,000, then 1,500 again",
        |links, server, row| {
            let mut fragments = 0;
            link_faults::become_narrow(links, || {
                let before = fragments_of(links);
                Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
                    .with("--profile call --clients 2 --max-loss 0")
                    .with("--peer 10.77.2.2:0 --warmup 0.2 --duration 1")
                    .run()
                    .ended(0);
                fragments = fragments_of(links) - before;
            });
            assert!(fragments > 0, "no datagram was fragmented");
            row.note(format!("{fragments} fragments sent; two new calls lost nothing"));
            let metrics = server.metrics();
            let refused = ["too_big", "refused"]
                .map(|reason| metrics.sum("turnpike_tx_dropped_total", &format!("reason=\"{reason}\"")));
            assert_eq!(refused, [0, 0], "larger datagrams are fragmented");
            row.note("datagrams are lost only while the two ends of a link have different MTUs");
        },
        |seen| assert_eq!(seen["returns_done"], 0, "{seen}"),
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_queue_is_full() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "both link queues limited to 1 Mbit/s (ENOBUFS)",
        |links, server, row| {
            let dropped = link_faults::are_full(links);
            let refused = server.metrics().sum("turnpike_tx_dropped_total", "");
            assert!(dropped > 0 && refused > 0, "the queues dropped {dropped}, the kernel refused {refused}");
            row.note(format!("{refused} datagrams refused by the kernel and counted"));
        },
        |seen| assert!(seen["lost"].as_u64() > Some(0), "{seen}"),
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_table_of_connections_is_full() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "firewall connection table full",
        |links, server, row| {
            link_faults::have_a_full_firewall(links, || {
                Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
                    .with("--profile audio --clients 2")
                    .with("--peer 10.77.2.2:0 --duration 0.5")
                    .run()
                    .ended(1);
            });
            row.note("simulated with nftables");
        },
        |seen| assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}"),
    );
}
