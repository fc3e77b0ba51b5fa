//! Permissions, and Send and Data indications (RFC 8656 sections 9 to 11).

use crate::common::*;
use turn_types::attribute::DontFragment;
use turnpike_turn::wire::indication;

#[test]
fn data_flows_both_ways_with_a_permission() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    for payload in [&b""[..], b"1", b"four", b"seventeen bytes .."] {
        let expected =
            Outcome::ToPeer { relay, peer: address(PEER), payload: payload.to_vec(), dont_fragment: false };
        assert_eq!(world.feed(&Ask::send(PEER, payload)), expected);
        let Outcome::ToClient { client, bytes } = world.peer_sends(relay, PEER, payload) else { panic!() };
        assert_eq!(client, world.client);
        let view = indication::parse(indication::Indication::Data, &bytes).unwrap();
        assert_eq!((view.peer, view.data), (address(PEER), payload));
    }
}

#[test]
fn no_data_flows_without_a_permission() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    world.ask(&Ask::permit("198.41.0.5:0").signed(&alice)).success();
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.dropped(DropReason::NoPermission), 4);
}

#[test]
fn permissions_and_channels_belong_to_one_allocation_and_end_with_it() {
    let mut world = World::new();
    let nothing_flows = |world: &mut World, relay| {
        assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
        assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::NoPermission));
        assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    };
    let (alice, _) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.client = client(40_001);
    let (_, other) = world.allocated();
    nothing_flows(&mut world, other);
    world.client = client(40_000);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    let (_, next) = world.allocated();
    nothing_flows(&mut world, next);
}

#[test]
fn a_permission_covers_all_ports_of_an_address() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit("198.41.0.4:0").signed(&alice)).success();
    for peer in ["198.41.0.4:1", "198.41.0.4:65535"] {
        assert!(world.feed(&Ask::send(peer, b"x")).goes_to_peer());
        assert!(world.peer_sends(relay, peer, b"x").goes_to_client());
    }
}

#[test]
fn a_permission_lasts_300_seconds_from_its_last_refresh() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.sleep(299);
    assert!(world.peer_sends(relay, PEER, b"x").goes_to_client());
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.sleep(299);
    // Traffic does not refresh the permission (section 9).
    assert!(world.feed(&Ask::send(PEER, b"x")).goes_to_peer());
    world.sleep(1);
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
}

#[test]
fn a_request_installs_all_permissions_or_none() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    let many = Ask::permit(PEER).peer("198.41.0.5:1").peer("198.41.0.6:1");
    world.ask(&many.signed(&alice)).success();
    for peer in [PEER, "198.41.0.5:9", "198.41.0.6:9"] {
        assert!(world.peer_sends(relay, peer, b"x").goes_to_client());
    }
    let one_refused = Ask::permit("198.41.0.7:1").peer("127.0.0.1:1");
    assert_eq!(world.ask(&one_refused.signed(&alice)).code(), Some(403));
    let one_malformed = Ask::permit("198.41.0.7:1").raw(0x0012, &[0, 1, 0, 0]);
    assert_eq!(world.ask(&one_malformed.signed(&alice)).code(), Some(400));
    let one_of_the_other_family = Ask::permit("198.41.0.7:1").peer(PEER_V6);
    assert_eq!(world.ask(&one_of_the_other_family.signed(&alice)).code(), Some(443));
    assert_eq!(world.peer_sends(relay, "198.41.0.7:1", b"x"), Outcome::Drop(DropReason::NoPermission));
}

#[test]
fn a_request_without_a_peer_is_400() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    assert_eq!(world.ask(&Ask::new(CREATE_PERMISSION).signed(&alice)).code(), Some(400));
}

#[test]
fn permissions_are_limited_and_expired_ones_make_room() {
    let mut world = World::with(ServerConfig {
        limits: ServerLimits { permissions: 20, ..ServerLimits::default() },
        ..config()
    });
    let (alice, _) = world.allocated();
    let peer = |n: u32| format!("198.41.1.{n}:1");
    for n in 0..20 {
        // A peer that a request names twice takes up one permission, even at the limit.
        world.ask(&Ask::permit(&peer(n)).peer(&peer(n)).signed(&alice)).success();
    }
    assert_eq!(world.ask(&Ask::permit(&peer(20)).signed(&alice)).code(), Some(508));
    assert_eq!(world.ask(&Ask::bind(0x4000, &peer(20)).signed(&alice)).code(), Some(508));
    assert_eq!(world.server.stats().permission_limit, 2);
    world.ask(&Ask::permit(&peer(3)).peer(&peer(3)).signed(&alice)).success();
    world.sleep(299);
    world.ask(&Ask::permit(&peer(0)).signed(&alice)).success();
    world.sleep(1);
    let nineteen = (21..40).fold(Ask::new(CREATE_PERMISSION), |ask, n| ask.peer(&peer(n)));
    world.ask(&nineteen.signed(&alice)).success();
    assert_eq!(world.ask(&Ask::permit(&peer(40)).signed(&alice)).code(), Some(508));
    assert!(world.feed(&Ask::send(&peer(0), b"x")).goes_to_peer());
    assert!(world.feed(&Ask::send(&peer(30), b"x")).goes_to_peer());
    assert_eq!(world.feed(&Ask::send(&peer(40), b"x")), Outcome::Drop(DropReason::NoPermission));
}

#[test]
fn dont_fragment_applies_from_ipv4_to_ipv4_and_from_streams() {
    const V6: &str = "[2001:db8::7]:40000";
    let (udp, tcp, tls, dtls) = (0, 1, 2, 3);
    for (listener, from, peer, counts) in [
        (udp, "192.0.2.7:40000", PEER, true),
        (dtls, "192.0.2.7:40000", PEER, true),
        (udp, "192.0.2.7:40000", PEER_V6, false),
        (udp, V6, PEER, false),
        (udp, V6, PEER_V6, false),
        (dtls, V6, PEER, false),
        // Section 15: data from streams is not translated packet by packet.
        (tcp, "192.0.2.7:40000", PEER, true),
        (tcp, "192.0.2.7:40000", PEER_V6, true),
        (tls, V6, PEER_V6, true),
    ] {
        let mut world = World::with(streams());
        (world.client.listener.0, world.client.address) = (listener, address(from));
        let alice = world.credentials("alice", Scheme::Md5);
        let family = if peer == PEER { AddressFamily::IPV4 } else { AddressFamily::IPV6 };
        let allocate = Ask::allocate().with(&turn::RequestedAddressFamily::new(family));
        world.ask(&allocate.signed(&alice)).success();
        world.ask(&Ask::permit(peer).signed(&alice)).success();
        let ask = Ask::indication(SEND).peer(peer).with(&DontFragment::new()).with(&turn::Data::new(b"x"));
        let Outcome::ToPeer { dont_fragment, .. } = world.feed(&ask.bytes()) else { panic!("{from} {peer}") };
        assert_eq!(dont_fragment, counts, "listener {listener}, {from} to {peer}");
        assert!(matches!(world.feed(&Ask::send(peer, b"x")), Outcome::ToPeer { dont_fragment: false, .. }));
    }
}

#[test]
fn an_invalid_send_indication_is_dropped_with_a_reason() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    let data = turn::Data::new(b"x");
    let mut broken_fingerprint = Ask::indication(SEND).peer(PEER).with(&data).fingerprint().bytes();
    *broken_fingerprint.last_mut().unwrap() ^= 1;
    for (bytes, reason) in [
        (Ask::indication(SEND).peer(PEER).bytes(), DropReason::MissingAttribute),
        (Ask::indication(SEND).with(&data).bytes(), DropReason::MissingAttribute),
        (Ask::indication(SEND).peer(PEER).with(&data).raw(0x7FFF, b"").bytes(), DropReason::UnknownAttribute),
        (Ask::indication(SEND).raw(0x0012, &[0; 3]).with(&data).bytes(), DropReason::Malformed),
        (broken_fingerprint, DropReason::Fingerprint),
        (Ask::send("198.41.0.4:0", b"x"), DropReason::PeerRefused),
        (Ask::send(PEER_V6, b"x"), DropReason::PeerFamily),
    ] {
        assert_eq!(world.feed(&bytes), Outcome::Drop(reason));
    }
    world.client = client(1);
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::NoAllocation));
}

#[test]
fn a_payload_too_long_for_the_client_is_dropped() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    assert!(matches!(world.peer_sends(relay, PEER, &vec![0; 65_471]), Outcome::Drop(DropReason::Oversized)));
    assert!(world.peer_sends(relay, PEER, &vec![0; 65_468]).goes_to_client());
    assert!(matches!(world.peer_sends(relay, PEER, &vec![0; 70_000]), Outcome::Drop(DropReason::Oversized)));
}

#[test]
fn data_indications_have_distinct_transaction_ids() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    let transactions: std::collections::HashSet<Vec<u8>> = (0..100)
        .map(|_| match world.peer_sends(relay, PEER, b"x") {
            Outcome::ToClient { bytes, .. } => bytes[8..20].to_vec(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(transactions.len(), 100);
}

/// IPv4-mapped addresses are encoded as IPv6 (RFC 8656 sections 10.2, 11.2, 12.2; RFC 6062 section 5.2), but
/// none appears on the wire.
#[test]
fn an_ipv4_mapped_peer_is_not_an_ipv4_peer() {
    const MAPPED: &str = "[::ffff:198.41.0.4]:7000";
    let also = turn::AdditionalAddressFamily::new(AddressFamily::IPV6);
    let v6 = turn::RequestedAddressFamily::new(AddressFamily::IPV6);
    for (ask, code, reason) in [
        (Ask::allocate(), 443, DropReason::PeerFamily),
        (Ask::allocate().with(&v6), 403, DropReason::PeerRefused),
        (Ask::allocate().with(&also), 403, DropReason::PeerRefused),
    ] {
        let mut opened = config();
        opened.peers.allow = vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
        let mut world = World::with(opened);
        let alice = world.credentials("alice", Scheme::Md5);
        world.ask(&ask.signed(&alice)).success();
        assert_eq!(world.ask(&Ask::permit(MAPPED).signed(&alice)).code(), Some(code));
        assert_eq!(world.ask(&Ask::bind(0x4000, MAPPED).signed(&alice)).code(), Some(code));
        // A permission for the IPv4 address makes no difference.
        if code == 443 {
            world.ask(&Ask::permit(PEER).signed(&alice)).success();
        }
        assert_eq!(world.feed(&Ask::send(MAPPED, b"x")), Outcome::Drop(reason));
    }
}

#[test]
fn an_address_that_becomes_the_servers_own_allows_only_relay_ports() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    for (number, peer) in [(0x4000, "198.41.0.4:22"), (0x4001, "198.41.0.4:50000"), (0x4002, "198.41.0.5:22")]
    {
        world.ask(&Ask::bind(number, peer).signed(&alice)).success();
    }
    let mut grown = config();
    grown.peers.own = OwnEndpoints::new([address(PEER).ip()], [], [], 49_152..=65_535);
    world.server.reconfigure(world.now, grown.into());
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert_eq!(world.feed(&Ask::send("198.41.0.4:22", b"x")), Outcome::Drop(DropReason::PeerRefused));
    assert!(world.feed(&channel_data(0x4001, b"x")).goes_to_peer());
    assert!(world.feed(&channel_data(0x4002, b"x")).goes_to_peer());
    assert!(world.peer_sends(relay, "198.41.0.4:50000", b"x").goes_to_client());
    world.server.reconfigure(world.now, config().into());
    world.ask(&Ask::bind(0x4000, "198.41.0.4:22").signed(&alice)).success();
}

#[test]
fn new_peer_rules_end_refused_permissions_and_channels() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit("198.41.0.5:1").signed(&alice)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, "198.41.0.5:1").signed(&alice)).success();
    let mut refusing = config();
    refusing.peers.deny.push("198.41.0.4/32".parse().unwrap());
    world.server.reconfigure(world.now, refusing.into());
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.ask(&Ask::permit(PEER).signed(&alice)).code(), Some(403));
    assert!(world.feed(&channel_data(0x4001, b"x")).goes_to_peer());
}
