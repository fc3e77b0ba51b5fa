//! Link faults for `turnpike forward`: no stream is cut, and every byte arrives.

use std::thread;

use serde_json::Value;

use super::{
    Row, Wanted,
    forwarder::Forwarder,
    link_faults, or_thorough,
    talks::{self, Fate, Target},
};
use turnpike_trials::links::{Links, PEER, SERVER, on_links};

/// Runs a fault on the links between clients and target; no connection may break.
pub(super) fn on_a_link(
    test: &str,
    what: &'static str,
    fault: impl FnOnce(&Links, &Forwarder, &mut Row),
    check: impl FnOnce(&Value),
) {
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    on_links(test, |links| {
        let forwarder = Forwarder::between(SERVER[0], Target::on(PEER[0]), Wanted::inside(links));
        let seen = forwarder.row(Row::new(name, what), |forwarder, row| fault(links, forwarder, row));
        assert_eq!(seen["cut"], 0, "{seen}");
        check(&seen);
    });
}

fn was_felt(seen: &Value) {
    assert!(seen["lost"].as_u64() > Some(0), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn interfaces_of_a_forwarder_go_down_and_up() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: the target link, then the client link down for 3 s",
        |links, _, _| link_faults::go_down_and_up(links),
        was_felt,
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn an_address_of_a_forwarder_is_removed() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: the address towards targets, then the listener address removed for 3 s",
        |links, forwarder, row| {
            let mut fates = Vec::new();
            link_faults::lose_their_addresses(links, |_| fates.push(talks::newcomer(forwarder.tcp)));
            assert!(!fates.contains(&Fate::Served), "a new client was served in the meantime: {fates:?}");
            row.note("no new client served in the meantime; existing connections waited and continued");
        },
        was_felt,
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_mtu_of_a_forwarder_becomes_small() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: MTU of both links 1,000, then 1,500 again",
        |links, forwarder, row| {
            link_faults::become_narrow(links, || {
                let before = fragments(links);
                let fate = talks::newcomer_of_udp(forwarder.udp, 1400);
                assert_eq!(fate, Fate::Served, "a datagram of 1,400 bytes");
                // Two fragments to the target and two back to the client.
                assert!(fragments(links) >= before + 4, "the datagram was not fragmented");
            });
            row.note("a 1,400-byte datagram was echoed in fragments");
        },
        |_| {},
    );
}

fn fragments(links: &Links) -> u64 {
    let said = links.inside_says(&["cat", "/proc/net/snmp"]);
    let mut lines = said.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, figures) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let found = names.split(' ').zip(figures.split(' ')).find(|(name, _)| *name == "FragCreates");
    found.and_then(|(_, figure)| figure.parse().ok()).expect("the kernel has the counter")
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn queues_of_a_forwarder_are_full() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: both link queues limited to 1 Mbit/s (ENOBUFS)",
        |links, _, row| {
            let dropped = link_faults::are_full(links);
            assert!(dropped > 0, "the queues were not full");
            row.note(format!("{dropped} packets refused by the queues"));
        },
        was_felt,
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn links_of_a_forwarder_lose_many_packets() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: 30 % of all packets lost on both links, in both directions",
        |links, forwarder, row| {
            let mut served = 0;
            let lost = link_faults::lose(links, 30, || {
                // Packets are lost only while clients wait, because a connection in TCP back-off doubles its timeout each time.
                thread::scope(|scope| {
                    let come = || talks::newcomer(forwarder.tcp) == Fate::Served;
                    let newcomers: Vec<_> = (0..8).map(|_| scope.spawn(come)).collect();
                    link_faults::a_while();
                    link_faults::a_while();
                    served =
                        newcomers.into_iter().filter_map(|one| one.join().ok()).filter(|got| *got).count();
                });
            });
            assert!(served > 0, "no new client was served");
            row.note(format!("{served} of 8 new clients served within 6 s"));
            assert!(lost > or_thorough(100, 1000), "only {lost} packets lost");
            row.note(format!("{lost} packets lost"));
        },
        was_felt,
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_firewall_of_a_forwarder_is_full() {
    on_a_link(
        turnpike_testkit::this_test!(),
        "forward: firewall connection table full",
        |links, forwarder, row| {
            link_faults::have_a_full_firewall(links, || {
                let fates = (talks::newcomer(forwarder.tcp), talks::newcomer_of_udp(forwarder.udp, 100));
                assert_eq!(fates, (Fate::Unheard, Fate::Unheard), "new clients over TCP and UDP");
            });
            row.note("simulated with nftables");
        },
        |seen| assert_eq!(seen["lost"], 0, "{seen}"),
    );
}
