//! A degraded path between clients and the UDP rule of `turnpike forward`. For TCP, which retransmits, see
//! forward_links.rs.

use serde_json::Value;

use super::{
    Row, Wanted,
    forwarder::Forwarder,
    link_faults::a_while,
    path::Path,
    talks::{self, Fate},
    within,
};
use turnpike_trials::SOON;

fn worsened(name: &'static str, what: &'static str, [lost, doubled, late]: [u32; 3]) -> Value {
    let forwarder = Forwarder::local(Wanted::default());
    let path = Path::to(forwarder.udp);
    forwarder.row_by(path.address, Row::new(name, what), |_, row| {
        path.worsen(lost, doubled, late);
        let before = path.passed();
        a_while();
        let fate = talks::newcomer_of_udp(path.address, 100);
        assert_eq!(fate, Fate::Served, "a new client sends more than once");
        a_while();
        row.note(format!("{} datagrams on this path; a new client served", path.passed() - before));
        path.worsen(0, 0, 0);
    })
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn many_datagrams_to_a_forwarder_are_lost() {
    let seen = worsened(
        "many_datagrams_to_a_forwarder_are_lost",
        "forward: 30 % of client datagrams lost in both directions",
        [30, 0, 0],
    );
    assert!(seen["lost"].as_u64() > Some(0) && seen["cut"] == 0, "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn many_datagrams_to_a_forwarder_are_reordered() {
    let seen = worsened(
        "many_datagrams_to_a_forwarder_are_reordered",
        "forward: 20 % of client datagrams reordered",
        [0, 0, 20],
    );
    assert!(seen["reordered"].as_u64() > Some(0), "{seen}");
    super::forwards::unharmed(&seen);
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn many_datagrams_to_a_forwarder_are_duplicated() {
    let seen = worsened(
        "many_datagrams_to_a_forwarder_are_duplicated",
        "forward: 20 % of client datagrams duplicated",
        [0, 20, 0],
    );
    assert!(seen["duplicated"].as_u64() > Some(0), "{seen}");
    super::forwards::unharmed(&seen);
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_nat_in_front_of_a_forwarder_rebinds_all_at_once() {
    let forwarder = Forwarder::local(Wanted::default());
    let path = Path::to(forwarder.udp);
    let clients = Forwarder::clients();
    let row = Row::new(
        "a_nat_in_front_of_a_forwarder_rebinds_all_at_once",
        "forward: a NAT changes the ports of all UDP clients at once",
    );
    let seen = forwarder.row_by(path.address, row, |forwarder, row| {
        let begun =
            |forwarder: &Forwarder| forwarder.metrics().sum("turnpike_forward_accepted_total", "rule=\"u\"");
        let before = begun(forwarder);
        path.rebind();
        within(SOON, "each client has a new session", || begun(forwarder) >= before + clients);
        within(SOON, "the sessions of the old ports have ended", || forwarder.kept().sessions <= 2 * clients);
        row.note(format!("{} new sessions; the old ones ended after `idle`", begun(forwarder) - before));
    });
    // Only datagrams in flight to an old port are lost.
    assert_eq!(seen["cut"], 0, "{seen}");
}
