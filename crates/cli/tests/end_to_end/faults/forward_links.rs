//! What happens to the links of `turnpike forward`: streams stay whole to the byte, and go on.

use std::{thread, time::Duration};

use serde_json::Value;

use super::{Row, Wanted, forwarder::Forwarder, or_thorough, talks::Target};
use crate::kernel_path::{Links, PEER, SERVER, on_links};

/// Has something happen to the links, with clients at one and the target at the other; no connection may be cut by it.
fn on_a_link(test: &str, what: &'static str, fault: impl FnOnce(&Links)) {
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    on_links(test, |links| {
        let wanted =
            Wanted { entry: [vec!["nsenter".to_owned()], links.nsenter()].concat(), ..Wanted::default() };
        let forwarder = Forwarder::between(SERVER[0], Target::on(PEER[0]), wanted);
        let seen: Value = forwarder.row(Row::new(name, what), |_, _| fault(links));
        assert_eq!(seen["cut"], 0, "{seen}");
    });
}

fn a_while() {
    thread::sleep(or_thorough(Duration::from_millis(500), Duration::from_secs(3)));
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn interfaces_of_a_forwarder_go_down_and_up() {
    on_a_link(
        "faults::forward_links::interfaces_of_a_forwarder_go_down_and_up",
        "forward: the interfaces to targets and to clients go down for 3 s, one after the other",
        |links| {
            for device in ["p", "c"] {
                links.inside(&["ip", "link", "set", device, "down"]);
                a_while();
                links.inside(&["ip", "link", "set", device, "up"]);
                a_while();
            }
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_mtu_of_a_forwarder_becomes_small() {
    on_a_link(
        "faults::forward_links::the_mtu_of_a_forwarder_becomes_small",
        "forward: both links take 1,000 bytes for a while, then 1,500 again",
        |links| {
            for mtu in ["1000", "1500"] {
                ["p", "c"].iter().for_each(|device| links.inside(&["ip", "link", "set", device, "mtu", mtu]));
                a_while();
            }
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn queues_of_a_forwarder_are_full() {
    on_a_link(
        "faults::forward_links::queues_of_a_forwarder_are_full",
        "forward: the queues of both links take 1 Mbit/s, the rest is refused (ENOBUFS)",
        |links| {
            for device in ["p", "c"] {
                let limit = ["tbf", "rate", "1mbit", "burst", "3k", "limit", "6k"];
                links.inside(&[&["tc", "qdisc", "add", "dev", device, "root"], &limit[..]].concat());
            }
            a_while();
            ["p", "c"].iter().for_each(|device| links.inside(&["tc", "qdisc", "del", "dev", device, "root"]));
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn links_of_a_forwarder_lose_much() {
    on_a_link(
        "faults::forward_links::links_of_a_forwarder_lose_much",
        "forward: 10 % of all packets lost on both links, both ways",
        |links| {
            let nft = |words: &str| links.inside(&["nft", words]);
            nft("add table inet lossy");
            for hook in ["input", "output"] {
                nft(&format!("add chain inet lossy {hook} {{ type filter hook {hook} priority 0; }}"));
                nft(&format!("add rule inet lossy {hook} numgen random mod 100 < 10 drop"));
            }
            a_while();
            a_while();
            nft("delete table inet lossy");
        },
    );
}
