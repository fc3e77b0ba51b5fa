//! What happens to the server's links: they go down, lose their address, become narrow or full.

use std::{net::SocketAddr, thread, time::Duration};

use serde_json::Value;

use super::{Crowd, Row, Server, Wanted, or_thorough};
use crate::{
    harness::{Load, PASSWORD, USER},
    kernel_path::{Links, RELAY, SERVER, on_links},
};

/// Has something happen to a link for a while, with clients on calls over it; `test` is the calling test's name with its modules.
fn on_a_link(
    test: &str,
    what: &'static str,
    fault: impl FnOnce(&Links, &Server, &mut Row),
    check: impl FnOnce(&Value),
) {
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    on_links(test, |links| {
        let mut wanted = Wanted::flags(&["--workers", "2"]);
        wanted.entry = [vec!["nsenter".to_owned()], links.nsenter()].concat();
        let address = SocketAddr::new(SERVER[0], 3478);
        let mut server = Server::on(address, RELAY[0], wanted);
        let crowd = Crowd::at(address, "10.77.2.2:0", "2");
        let mut row = Row::new(name, what);
        row.leaves_sessions = true;
        let seen = row.run(&mut server, crowd, |server, row| fault(links, server, row));
        check(&seen);
    });
}

/// How long a fault of a link lasts.
fn a_while() {
    thread::sleep(or_thorough(Duration::from_millis(500), Duration::from_secs(3)));
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn an_interface_goes_down_and_up() {
    on_a_link(
        "faults::links::an_interface_goes_down_and_up",
        "the interfaces to peers and to clients go down for 3 s, one after the other",
        |links, _, _| {
            for device in ["p", "c"] {
                links.inside(&["ip", "link", "set", device, "down"]);
                a_while();
                links.inside(&["ip", "link", "set", device, "up"]);
                a_while();
            }
        },
        |_| {},
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn an_address_is_removed() {
    on_a_link(
        "faults::links::an_address_is_removed",
        "the address of relays, then that of the listener, is removed for 3 s",
        |links, _, _| {
            for (device, address) in [("p", "10.77.2.1/24"), ("c", "10.77.1.1/24")] {
                links.inside(&["ip", "addr", "del", address, "dev", device]);
                a_while();
                links.inside(&["ip", "addr", "add", address, "dev", device]);
                a_while();
            }
        },
        |_| {},
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_mtu_becomes_small() {
    on_a_link(
        "faults::links::the_mtu_becomes_small",
        "both links take 1,000 bytes for a while, then 1,500 again",
        |links, _, _| {
            for mtu in ["1000", "1500"] {
                ["p", "c"].iter().for_each(|device| links.inside(&["ip", "link", "set", device, "mtu", mtu]));
                a_while();
            }
        },
        |seen| assert_eq!(seen["returns_done"], 0, "{seen}"),
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn a_queue_is_full() {
    on_a_link(
        "faults::links::a_queue_is_full",
        "the queues of both links take 1 Mbit/s, the rest is refused (ENOBUFS)",
        |links, server, row| {
            for device in ["p", "c"] {
                links.inside(&[
                    "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", "1mbit", "burst", "3k",
                    "limit", "6k",
                ]);
            }
            a_while();
            ["p", "c"].iter().for_each(|device| links.inside(&["tc", "qdisc", "del", "dev", device, "root"]));
            let refused = server.metrics().sum("turnpike_tx_dropped_total", "");
            row.note(format!("{refused} datagrams were not taken by the kernel, and counted"));
        },
        |_| {},
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_table_of_connections_is_full() {
    on_a_link(
        "faults::links::the_table_of_connections_is_full",
        "a firewall with a table of connections that is full: no new ones",
        |links, server, row| {
            let nft = |words: &str| links.inside(&["nft", words]);
            nft("add table inet full");
            nft("add chain inet full out { type filter hook output priority 0; }");
            nft("add chain inet full in { type filter hook input priority 0; }");
            // As a full table does it: who is known goes on, who is new finds no place.
            a_while();
            nft("add rule inet full in ct state new drop");
            nft("add rule inet full out ct state new drop");
            let run = Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
                .with(&["--profile", "audio", "--clients", "2", "--peer", "10.77.2.2:0", "--duration", "0.5"])
                .run();
            assert_eq!(run.code, Some(1), "{}", run.output());
            nft("delete table inet full");
            row.note("nf_conntrack_max is one for all namespaces: in its place nftables drops what is new (ct state)");
        },
        |seen| assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}"),
    );
}
