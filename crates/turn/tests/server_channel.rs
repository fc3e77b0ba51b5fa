//! Channels (RFC 8656 section 12).

use crate::common::*;
use turnpike_turn::wire::channel_data::ChannelRange;

const OTHER: &str = "198.41.0.5:7000";

#[test]
fn a_channel_carries_payloads_both_ways() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    for payload in [&b""[..], b"1", b"four", b"seventeen bytes .."] {
        let message = channel_data(0x4000, payload);
        let expected =
            Outcome::ToPeer { relay, peer: address(PEER), payload: payload.to_vec(), dont_fragment: false };
        assert_eq!(world.feed(&message), expected);
        // Padding is allowed over UDP (section 12.5), and is not part of the payload.
        assert_eq!(world.feed(&[&message[..], &[0; 3]].concat()), expected);
        assert_eq!(
            world.peer_sends(relay, PEER, payload),
            Outcome::ToClient { client: world.client, bytes: message }
        );
    }
}

#[test]
fn unrelayable_channel_data_is_dropped_with_a_reason() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    for (bytes, reason) in [
        (channel_data(0x4001, b"x"), DropReason::UnboundChannel),
        (channel_data(0x4FFF, b"x"), DropReason::UnboundChannel),
        (channel_data(0x5000, b"x"), DropReason::ChannelNumber),
        (channel_data(0x7FFF, b"x"), DropReason::ChannelNumber),
        (vec![0x40, 0, 0], DropReason::Truncated),
        (vec![0x40, 0, 0, 5, 1, 2, 3, 4], DropReason::Truncated),
    ] {
        assert_eq!(world.feed(&bytes), Outcome::Drop(reason));
    }
    world.client = client(1);
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::NoAllocation));
}

#[test]
fn rfc_5766_channel_numbers_are_accepted_if_configured() {
    let mut world = World::with(ServerConfig { channels: ChannelRange::Rfc5766, ..config() });
    let (alice, _) = world.allocated();
    world.ask(&Ask::bind(0x7FFF, PEER).signed(&alice)).success();
    assert!(world.feed(&channel_data(0x7FFF, b"x")).goes_to_peer());
    assert_eq!(world.ask(&Ask::bind(0x8000, OTHER).signed(&alice)).code(), Some(400));
}

#[test]
fn the_servers_own_services_are_never_peers() {
    let own: SocketAddr = "198.41.0.4:3478".parse().unwrap();
    let mut rules = config();
    rules.peers.own = OwnEndpoints::new([], [], [own], 49_152..=65_535);
    let mut world = World::with(rules);
    let (alice, _) = world.allocated();
    for (peer, code) in [("198.41.0.4:3478", 403), ("198.41.0.4:22", 403), ("[::ffff:198.41.0.4]:3478", 443)]
    {
        assert_eq!(world.ask(&Ask::bind(0x4000, peer).signed(&alice)).code(), Some(code), "{peer}");
    }
    world.ask(&Ask::permit("198.41.0.4:3478").signed(&alice)).success();
    assert_eq!(world.feed(&Ask::send("198.41.0.4:3478", b"x")), Outcome::Drop(DropReason::PeerRefused));
    assert_eq!(world.feed(&Ask::send("198.41.0.4:3479", b"x")), Outcome::Drop(DropReason::PeerRefused));
    assert!(world.feed(&Ask::send("198.41.0.4:50000", b"x")).goes_to_peer());
}

#[test]
fn malformed_bindings_are_refused() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    let cases = [
        ("no number", Ask::new(CHANNEL_BIND).peer(PEER), 400),
        ("no peer", Ask::new(CHANNEL_BIND).raw(0x000C, &[0x40, 0, 0, 0]), 400),
        ("number of two bytes", Ask::new(CHANNEL_BIND).raw(0x000C, &[0x40, 0]).peer(PEER), 400),
        (
            "malformed peer",
            Ask::new(CHANNEL_BIND).raw(0x000C, &[0x40, 0, 0, 0]).raw(0x0012, &[0, 3, 0, 0]),
            400,
        ),
        ("below the range", Ask::bind(0x3FFF, PEER), 400),
        ("above the range", Ask::bind(0x5000, PEER), 400),
        ("above the range of RFC 5766", Ask::bind(0x8000, PEER), 400),
        ("port 0", Ask::bind(0x4000, "198.41.0.4:0"), 400),
        ("another family", Ask::bind(0x4000, PEER_V6), 443),
        ("a refused peer", Ask::bind(0x4000, "10.0.0.1:1"), 403),
    ];
    for (what, ask, code) in cases {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(code), "{what}");
    }
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4FFF, OTHER).signed(&alice)).success();
}

#[test]
fn neither_number_nor_peer_can_be_bound_twice() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.ask(&Ask::bind(0x4000, OTHER).signed(&alice)).code(), Some(400));
    assert_eq!(world.ask(&Ask::bind(0x4001, PEER).signed(&alice)).code(), Some(400));
    // A different port makes a different transport address.
    world.ask(&Ask::bind(0x4001, "198.41.0.4:7001").signed(&alice)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.sleep(599);
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::refresh(600).signed(&alice)).success();
    assert_eq!(world.ask(&Ask::bind(0x4000, OTHER).signed(&alice)).code(), Some(400));
    world.sleep(1);
    world.ask(&Ask::bind(0x4000, OTHER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4002, PEER).signed(&alice)).success();
}

#[test]
fn a_peer_is_permitted_while_it_has_a_channel() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::refresh(3600).signed(&alice)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    // A CreatePermission does not shorten the permission.
    world.sleep(1);
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    let answered = |world: &mut World| {
        let delivered = Outcome::ToClient { client: world.client, bytes: channel_data(0x4000, b"x") };
        assert_eq!(world.peer_sends(relay, PEER, b"x"), delivered);
        assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
        assert!(world.feed(&Ask::send(PEER, b"x")).goes_to_peer());
    };
    // Refreshes the channel as aioice does.
    for _ in 0..4 {
        world.sleep(500);
        answered(&mut world);
        world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    }
    world.sleep(100);
    // A second channel to the same address outlives the first.
    world.ask(&Ask::bind(0x4001, "198.41.0.4:7001").signed(&alice)).success();
    world.sleep(499);
    answered(&mut world);
    world.sleep(1);
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert!(world.peer_sends(relay, "198.41.0.4:7001", b"x").goes_to_client());
    world.sleep(100);
    assert_eq!(world.peer_sends(relay, "198.41.0.4:7001", b"x"), Outcome::Drop(DropReason::NoPermission));
}

#[test]
fn a_reload_applies_channels_permit_and_new_denials() {
    let strict = ServerConfig { channels_permit: false, ..config() };
    let mut world = World::with(strict);
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.sleep(200);
    world.server.reconfigure(world.now, Arc::new(config()));
    world.sleep(399);
    assert!(world.peer_sends(relay, PEER, b"x").goes_to_client());
    world.ask(&Ask::refresh(600).signed(&alice)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    let peers = PeerRules { deny: vec!["198.41.0.4/32".parse().unwrap()], ..PeerRules::default() };
    world.server.reconfigure(world.now, Arc::new(ServerConfig { peers, ..config() }));
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
}

#[test]
fn a_channel_lasts_600_s_and_its_permission_300_s_if_so_configured() {
    let mut world = World::with(ServerConfig { channels_permit: false, ..config() });
    let (alice, relay) = world.allocated();
    world.ask(&Ask::refresh(3600).signed(&alice)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.sleep(299);
    assert!(world.peer_sends(relay, PEER, b"x").goes_to_client());
    assert!(world.feed(&Ask::send(PEER, b"x")).goes_to_peer());
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    world.sleep(1);
    // Section 9: without the permission, data from the peer is dropped. Section 12.6: data refreshes neither
    // the permission nor the channel.
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::NoPermission));
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    assert_eq!(
        world.peer_sends(relay, PEER, b"x"),
        Outcome::ToClient { client: world.client, bytes: channel_data(0x4000, b"x") }
    );
    world.sleep(299);
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    world.sleep(1);
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    // Binding the channel again refreshes the permission too.
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert!(world.peer_sends(relay, PEER, b"x").goes_to_client());
}

#[test]
fn channels_are_limited_and_expired_ones_make_room() {
    let mut world = World::with(ServerConfig {
        limits: ServerLimits { channels: 12, ..ServerLimits::default() },
        ..config()
    });
    let (alice, relay) = world.allocated();
    world.ask(&Ask::refresh(3600).signed(&alice)).success();
    let peer = |n: u16| format!("198.41.0.4:{}", 7000 + n);
    for n in 0..12 {
        world.ask(&Ask::bind(0x4000 + n, &peer(n)).signed(&alice)).success();
    }
    assert_eq!(world.ask(&Ask::bind(0x4100, &peer(100)).signed(&alice)).code(), Some(508));
    assert_eq!(world.server.stats().channel_limit, 1);
    for n in 0..12 {
        let message = channel_data(0x4000 + n, b"x");
        assert!(matches!(world.feed(&message), Outcome::ToPeer { peer: to, .. } if to == address(&peer(n))));
        let Outcome::ToClient { bytes, .. } = world.peer_sends(relay, &peer(n), b"x") else { panic!() };
        assert_eq!(bytes, message);
    }
    world.sleep(600);
    world.ask(&Ask::bind(0x4100, &peer(100)).signed(&alice)).success();
}

#[test]
fn a_channel_belongs_to_one_allocation() {
    let mut world = World::new();
    let (alice, first) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.client = client(40_001);
    let (alice, second) = world.allocated();
    world.ask(&Ask::bind(0x4000, OTHER).signed(&alice)).success();
    for (port, relay, peer) in [(40_000, first, PEER), (40_001, second, OTHER), (40_000, first, PEER)] {
        world.client = client(port);
        assert!(matches!(
            world.feed(&channel_data(0x4000, b"x")),
            Outcome::ToPeer { relay: through, peer: to, .. } if through == relay && to == address(peer)
        ));
    }
}
