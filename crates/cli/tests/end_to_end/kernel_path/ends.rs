//! A flow is removed from the kernel before the response to the request that ends it.

use super::{
    PEER, SERVER, by_each,
    client::{bound, is_silent, received},
    on_links,
    relays::Pair,
};
use crate::prelude::*;

const CHANNEL: u16 = 0x4001;

#[test]
fn nothing_is_relayed_after_the_response_to_a_zero_refresh() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 2);
        pair.client.refresh(0);
        pair.client.send(CHANNEL, b"late");
        pair.peer.send_to(b"late", pair.client.relayed).expect("the send succeeds");
        assert!(is_silent(&pair.peer), "to the peer");
        assert!(is_silent(pair.client.socket()), "to the client");
        assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 0);
    });
}

#[test]
fn reload_cuts_off_newly_refused_peers() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", "[peers]\ndeny = []\n");
        let mut server = links.serve(&["-c", file.to_str().expect("a name")]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        fs::write(&file, "[peers]\ndeny = [\"10.77.2.2/32\"]\n").expect("the file is writable");
        server.program.signal("HUP");
        server.program.line_with("reloaded");
        eventually("no kernel flows remain", || server.metrics().sum("turnpike_kernel_flows", "") == 0);
        pair.client.send(CHANNEL, b"late");
        pair.peer.send_to(b"late", pair.client.relayed).expect("the send succeeds");
        assert!(is_silent(&pair.peer) && is_silent(pair.client.socket()));
    });
}

#[test]
fn other_channels_continue_when_one_peer_changes() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&[]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        let other = bound(PEER[0]);
        pair.client.bind(0x4002, other.local_addr().expect("bound"));
        let before = server.across();
        eventually("the kernel relays both channels", || {
            pair.exchange(33);
            pair.client.send(0x4002, b"other");
            assert_eq!(received(&other).0, b"other");
            other.send_to(b"back", pair.client.relayed).expect("the send succeeds");
            assert_eq!(pair.client.receive(), Some((0x4002, b"back".to_vec())));
            server.across() > before + 12
        });
        // Another source port on the peer's machine has no channel but is still permitted, because
        // permissions are per IP address.
        let stranger = bound(PEER[0]);
        stranger.send_to(b"strange", pair.client.relayed).expect("the send succeeds");
        let message = pair.client.receive_message().expect("a Data indication");
        assert_eq!(message[..2], [0x00, 0x17], "{message:02x?}");
    });
}

#[test]
fn moved_allocation_keeps_its_kernel_flows() {
    on_links(turnpike_testkit::this_test!(), |links| {
        for workers in ["1", "2"] {
            let server = links.serve(&["--workers", workers]);
            let reflect = Reflect::start(PEER[0], &[]);
            let result = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
                .to(reflect.address)
                .with("--clients 10 --rate 500 --migrate 0.5 --duration 3")
                .run()
                .ended(0)
                .result();
            let number = |name: &str| result[name].as_u64().expect("a number");
            assert!(number("received") * 10 > number("sent") * 9, "{result}");
            assert!(server.across() > number("received"), "{} of {result}", server.across());
            eventually("all allocations have ended", || {
                server.metrics().sum("turnpike_allocations", "") == 0
            });
            assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 0);
        }
    });
}

#[test]
fn tcp_clients_create_no_kernel_flows() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&[]);
        let reflect = Reflect::start(PEER[0], &[]);
        let run = Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body")
            .to(reflect.address)
            .with("--clients 3 --rate 200 --transport tcp --duration 1")
            .run()
            .ended(0);
        assert_eq!(run.result()["lost"].as_u64(), Some(0));
        assert_eq!(server.across(), 0);
    });
}
