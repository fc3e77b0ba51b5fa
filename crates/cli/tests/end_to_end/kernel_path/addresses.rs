//! Machine addresses change while the kernel relays flows that use them.

use super::{
    CLIENT, Links, PEER, SERVER, by_each,
    client::{Client, bound, is_silent},
    relays::Pair,
};
use crate::prelude::*;

const CHANNEL: u16 = 0x4001;
const OTHER: &str = "10.77.2.9";

fn lease(links: &Links, address: &str) {
    links.inside(&["ip", "addr", "add", &format!("{address}/24"), "dev", "p"]);
    links.inside(&["ip", "route", "replace", "default", "via", "10.77.2.2", "dev", "p"]);
}

fn end_lease(links: &Links, address: &str) {
    links.inside(&["ip", "addr", "del", &format!("{address}/24"), "dev", "p"]);
}

fn allocations_wait_for_their_address(links: &Links, datapath: &str) {
    links.inside(&["ip", "route", "replace", "default", "via", "10.77.2.2", "dev", "p"]);
    let server = links.serve(&["--datapath", datapath, "--relay-ip", "auto"]);
    let mut old = Pair::new(0, 0);
    old.settle(&server);
    end_lease(links, "10.77.2.1");
    lease(links, OTHER);
    let up = format!("turnpike_relay_address_up{{address=\"{OTHER}\"}} 1");
    eventually("the server has the new address", || server.metrics().text().contains(&up));
    let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
    assert_eq!(client.relayed.ip().to_string(), OTHER);
    old.client.send(CHANNEL, b"away");
    assert!(is_silent(&old.peer), "nothing is sent from an address that the machine does not have");
    let peer = bound(PEER[0]);
    client.bind(CHANNEL, peer.local_addr().expect("bound"));
    let mut new = Pair { client, peer, sent: 0 };
    new.settle(&server);

    links.inside(&["ip", "addr", "add", "10.77.2.1/24", "dev", "p"]);
    old.reach_again(&server, server.across());
    old.settle(&server);
    new.settle(&server);
    for pair in [&old, &new] {
        pair.client.refresh(0);
    }
    eventually("both allocations have ended", || server.metrics().sum("turnpike_allocations", "") == 0);
    assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 0);
    drop(server);
    links.inside(&["ip", "addr", "flush", "dev", "p", "scope", "global"]);
    lease(links, "10.77.2.1");
    links.inside(&["ip", "addr", "add", "fd77:2::1/64", "dev", "p", "nodad"]);
}

#[test]
fn existing_allocations_wait_for_their_address_and_new_ones_use_another() {
    by_each(turnpike_testkit::this_test!(), allocations_wait_for_their_address);
}
