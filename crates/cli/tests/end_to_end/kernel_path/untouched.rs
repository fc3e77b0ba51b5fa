//! Packets that the kernel path passes to user space behave as with any other data path, and are
//! counted by reason.

use super::{
    PEER,
    client::{bound, is_silent, received},
    on_links,
    relays::Pair,
};
use crate::prelude::*;

const CHANNEL: u16 = 0x4001;

#[test]
fn packets_unsupported_by_the_kernel_use_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&[]);
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        let peer = pair.peer.local_addr().expect("bound");

        // Longer than the MTU: fragments in both directions.
        for len in [1473, 2900] {
            pair.exchange(len);
        }
        assert!(server.passes("fragment") > 0);

        // Datagrams that fit the MTU on arrival but not on the way out, because of the four-byte header or a link
        // with a smaller MTU.
        pair.exchange(1472);
        links.inside(&["ip", "link", "set", "p", "mtu", "1300"]);
        let long = vec![9; 1300];
        pair.client.send(CHANNEL, &long);
        assert_eq!(received(&pair.peer).0, long);
        links.inside(&["ip", "link", "set", "p", "mtu", "1500"]);
        assert!(server.passes("too_big") >= 2, "{}", server.passes("too_big"));

        let before = server.passes("padded");
        pair.client.socket().send(&[&[0x40, 0x01, 0, 3][..], b"abc\0"].concat()).expect("the send succeeds");
        assert_eq!(received(&pair.peer).0, b"abc");
        assert!(server.passes("padded") > before);

        pair.client.permit(peer);
        pair.client.indicate(peer, b"indicated");
        assert_eq!(received(&pair.peer).0, b"indicated");
        assert!(server.passes("not_channel_data") > 0);

        pair.client.socket().set_ttl(1).expect("a TTL");
        pair.client.send(CHANNEL, b"dies here");
        assert!(is_silent(&pair.peer));
        pair.client.socket().set_ttl(64).expect("a TTL");
        assert!(server.passes("ttl") > 0);
        assert!(server.metrics().sum("turnpike_ttl_expired_total", "") > 0);

        pair.client.send(0x4009, b"unbound");
        assert!(is_silent(&pair.peer));
        assert!(server.passes("unknown_channel") + server.passes("not_channel_data") > 0);
        let stranger = bound(PEER[0]);
        stranger.send_to(b"a stranger", pair.client.relayed).expect("the send succeeds");
        eventually("the pass is counted", || server.passes("unknown_peer") > 0);
        pair.client.receive_message().expect("a Data indication, because permissions cover all ports");

        pair.settle(&server);
        assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
    });
}

#[test]
fn flows_beyond_a_full_table_use_user_space() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = turnpike_trials::Dir::new();
        let file = dir.file("turnpike.toml", "[limits]\nkernel_flows = 4\n");
        let server = links.serve(&["-c", file.to_str().expect("a name")]);
        let mut pairs: Vec<Pair> = (0..4).map(|_| Pair::new(0, 0)).collect();
        for pair in &mut pairs {
            pair.exchange(50);
        }
        let metrics = server.metrics();
        assert_eq!(metrics.sum("turnpike_kernel_flows", ""), 4);
        assert_eq!(metrics.sum("turnpike_kernel_flows_limit", ""), 4);
        assert!(metrics.sum("turnpike_kernel_flows_refused_total", "") >= 2);
        // An allocation that ends makes room for another's flow, which is added when its channel is
        // refreshed.
        pairs.remove(0).client.refresh(0);
        let peer = pairs[2].peer.local_addr().expect("bound");
        pairs[2].client.bind(CHANNEL, peer);
        pairs[2].settle(&server);
    });
}

#[test]
fn rate_limited_clients_stay_in_user_space_until_a_reload() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let dir = turnpike_trials::Dir::new();
        let limits = "[limits]\nbits_per_second_per_allocation = \"8M\"\nburst = 20\n";
        let file = dir.file("turnpike.toml", limits);
        let mut server = links.serve(&["-c", file.to_str().expect("a name")]);
        let mut pair = Pair::new(0, 0);
        for _ in 0..50 {
            pair.exchange(20);
        }
        assert_eq!(server.across(), 0);
        eventually("the channel kept in user space is counted", || {
            server.metrics().sum("turnpike_kernel_channels_limited_total", "") == 1
        });
        assert!(server.passes("unknown_channel") + server.passes("unknown_peer") > 0);
        let dropped =
            || server.metrics().sum("turnpike_dropped_datagrams_total", "reason=\"allocation_bandwidth\"");
        eventually("a datagram is dropped", || {
            (0..100).for_each(|_| pair.client.send(CHANNEL, &[7; 1000]));
            dropped() > 0
        });

        std::fs::write(&file, "").expect("the test's own file");
        server.program.signal("HUP");
        server.program.line_with("configuration reloaded");
        let mut pair = Pair::new(0, 0);
        pair.settle(&server);
        std::fs::write(&file, limits).expect("the test's own file");
        server.program.signal("HUP");
        eventually("user space relays again", || {
            let before = server.across();
            (0..20).for_each(|_| pair.exchange(20));
            server.across() == before && server.metrics().sum("turnpike_kernel_flows", "") == 0
        });
    });
}
