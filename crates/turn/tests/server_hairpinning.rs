//! Clients of one server behind a NAT reach each other at their external addresses, bypassing the NAT.

use crate::common::{turn::*, *};
use turnpike_turn::wire::channel_data::ChannelNumber;

/// External and bound form of another client's relayed transport address.
const NAMED: &str = "203.0.114.5:50101";
const BOUND: &str = "10.0.0.5:50101";

/// Configuration behind a NAT for each family; `allow` may permit the use of the bound address.
fn behind_nat(allow: &[&str]) -> ServerConfig {
    let mut config = streams();
    let ip = |text: &str| text.parse().unwrap();
    let relays =
        [("10.0.0.5", "203.0.114.5"), ("fd00::5", "2600:1::5")].map(|(at, told)| (ip(at), Some(ip(told))));
    let listeners = [address("10.0.0.5:3478"), address("127.0.0.1:50443")];
    config.peers.own = OwnEndpoints::new([], relays, listeners, 49_152..=65_535);
    config.peers.allow = allow.iter().map(|rule| rule.parse().unwrap()).collect();
    config
}

fn world() -> World {
    World::with(behind_nat(&[]))
}

#[track_caller]
fn goes_to(outcome: &Outcome, wanted: &str) {
    assert!(matches!(outcome, Outcome::ToPeer { peer, .. } if *peer == address(wanted)), "{outcome:?}");
}

fn said_of(indication: &Reply) -> SocketAddr {
    indication.get::<XorPeerAddress>().addr(indication.message().transaction_id())
}

/// Peer address of a Data indication; `None` for ChannelData.
fn from(outcome: Outcome) -> Option<SocketAddr> {
    let Outcome::ToClient { bytes, .. } = outcome else { panic!("{outcome:?}") };
    (bytes[0] < 0x40).then(|| said_of(&Reply(bytes)))
}

#[test]
fn a_channel_to_another_client_uses_its_bound_address() {
    let mut world = world();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
    goes_to(&world.feed(&channel_data(0x4000, b"x")), BOUND);
    assert_eq!(from(world.peer_sends(relay, BOUND, b"x")), None);
    // Data without a channel arrives from the external address, even if the NAT does support hairpinning.
    assert_eq!(from(world.peer_sends(relay, "10.0.0.5:50102", b"x")), Some(address("203.0.114.5:50102")));
    assert_eq!(from(world.peer_sends(relay, NAMED, b"x")), Some(address(NAMED)));
    let dropped = Outcome::Drop(DropReason::NoPermission);
    for stranger in ["10.0.0.5:22", "10.0.0.5:3478", "10.0.0.5:50443", "10.0.0.6:50101"] {
        assert_eq!(world.peer_sends(relay, stranger, b"x"), dropped, "{stranger}");
    }
    let view = world.server.view(world.now, 0).unwrap();
    assert!(view.channels().map(|(_, peer, _)| peer).eq([address(NAMED)]));
    assert!(view.permissions().map(|(ip, _)| ip).eq([address(NAMED).ip()]));
    world.sleep(299);
    world.ask(&Ask::permit(NAMED).signed(&alice)).success();
    world.sleep(299);
    assert_eq!(
        from(world.peer_sends(relay, BOUND, b"x")),
        None,
        "the permission is for the external address"
    );
    world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
    assert_eq!(world.ask(&Ask::bind(0x4001, NAMED).signed(&alice)).code(), Some(400));
}

#[test]
fn indications_contain_external_addresses() {
    let mut world = world();
    let also = AdditionalAddressFamily::new(AddressFamily::IPV6);
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::allocate().with(&also).signed(&alice)).success();
    let v4 = world.last_opened();
    for (relay, named, bound) in
        [(v4, NAMED, BOUND), (RelayId { family: Family::V6, ..v4 }, "[2600:1::5]:50101", "[fd00::5]:50101")]
    {
        assert_eq!(world.feed(&Ask::send(named, b"x")), Outcome::Drop(DropReason::NoPermission));
        world.ask(&Ask::permit(named).signed(&alice)).success();
        goes_to(&world.feed(&Ask::send(named, b"x")), bound);
        assert_eq!(from(world.peer_sends(relay, bound, b"x")), Some(address(named)));
        // ICMP errors show the external address too.
        let icmp_type = if relay.family == Family::V4 { 3 } else { 1 };
        let unreachable = IcmpError { icmp_type, code: 0, info: 0 };
        let told = world.server.data.from_icmp(world.now, relay, address(bound), unreachable);
        assert_eq!(said_of(&Outcome::from(told).reply()), address(named));
    }
}

#[test]
fn connections_use_bound_addresses_and_show_external_ones() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let request = world.connecting(&Ask::connect(NAMED).signed(&alice));
    assert_eq!(request.peer, address(BOUND));
    world.connect_result(&request, Ok(())).success();
    assert_eq!(world.ask(&Ask::connect(NAMED).signed(&alice)).code(), Some(446));
    world.ask(&Ask::permit(NAMED).signed(&alice)).success();
    let FromPeer::Accepted { indication, .. } = world.peer_connects(relay, "10.0.0.5:50102") else {
        panic!()
    };
    assert_eq!(said_of(&indication), address("203.0.114.5:50102"));
    assert_eq!(
        world.ask(&Ask::connect("203.0.114.5:50102").signed(&alice)).code(),
        Some(446),
        "already connected"
    );
    assert!(matches!(world.peer_connects(relay, "10.0.0.5:22"), FromPeer::Refused(_)));
}

#[test]
fn listeners_services_and_bound_addresses_stay_refused() {
    let mut world = world();
    let (alice, _) = world.allocated();
    world.ask(&Ask::permit(NAMED).signed(&alice)).success();
    for peer in ["203.0.114.5:3478", "203.0.114.5:50443", "203.0.114.5:22", BOUND, "10.0.0.5:3478"] {
        assert_eq!(world.ask(&Ask::bind(0x4000, peer).signed(&alice)).code(), Some(403), "{peer}");
        assert_eq!(world.feed(&Ask::send(peer, b"x")), Outcome::Drop(DropReason::PeerRefused), "{peer}");
    }
    assert_eq!(world.ask(&Ask::permit(BOUND).signed(&alice)).code(), Some(403));
    let (alice, _) = world.allocated_tcp();
    for peer in ["203.0.114.5:3478", "203.0.114.5:50443", BOUND] {
        assert_eq!(world.ask(&Ask::connect(peer).signed(&alice)).code(), Some(403), "{peer}");
    }
}

/// A media server on this machine announces its public address; a 1:1 NAT need not hairpin.
#[test]
fn an_allowed_local_service_is_reached_without_the_nat() {
    let mut world = World::with(behind_nat(&["203.0.114.5:10000"]));
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, "203.0.114.5:10000").signed(&alice)).success();
    goes_to(&world.feed(&channel_data(0x4000, b"x")), "10.0.0.5:10000");
    assert_eq!(from(world.peer_sends(relay, "10.0.0.5:10000", b"x")), None);
    goes_to(&world.feed(&Ask::send("203.0.114.5:10000", b"x")), "10.0.0.5:10000");
    assert_eq!(world.peer_sends(relay, "10.0.0.5:22", b"x"), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.ask(&Ask::bind(0x4001, "203.0.114.5:22").signed(&alice)).code(), Some(403));

    let (alice, _) = world.allocated_tcp();
    let request = world.connecting(&Ask::connect("203.0.114.5:10000").signed(&alice));
    assert_eq!(request.peer, address("10.0.0.5:10000"));
}

#[test]
fn data_from_a_permitted_bound_address_shows_the_bound_address() {
    let mut world = World::with(behind_nat(&["10.0.0.5"]));
    let (alice, relay) = world.allocated();
    world.ask(&Ask::permit(BOUND).signed(&alice)).success();
    goes_to(&world.feed(&Ask::send(BOUND, b"x")), BOUND);
    assert_eq!(from(world.peer_sends(relay, BOUND, b"x")), Some(address(BOUND)));
    assert_eq!(world.feed(&Ask::send(NAMED, b"x")), Outcome::Drop(DropReason::NoPermission));
    // If a client uses both of a peer's addresses, relay ports are shown under the external one.
    world.ask(&Ask::bind(0x4000, BOUND).signed(&alice)).success();
    for (number, peer) in [(0x4000, NAMED), (0x4001, NAMED)] {
        assert_eq!(world.ask(&Ask::bind(number, peer).signed(&alice)).code(), Some(400), "{number:#x}");
    }
    world.ask(&Ask::permit(NAMED).signed(&alice)).success();
    assert_eq!(from(world.peer_sends(relay, "10.0.0.5:50102", b"x")), Some(address("203.0.114.5:50102")));
    assert_eq!(from(world.peer_sends(relay, "10.0.0.5:22", b"x")), Some(address("10.0.0.5:22")));
}

#[test]
fn a_reload_updates_the_addresses_behind_channels() {
    let mut world = World::with(streams());
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, PEER).signed(&alice)).success();
    goes_to(&world.feed(&channel_data(0x4000, b"x")), NAMED);
    let (expires_ms, number) = (world.now.ms + 600_000, ChannelNumber::MIN);
    let (allocation, peer) = (relay.allocation, address(NAMED));
    world.all_effects();
    for (config, reached) in [(behind_nat(&[]), BOUND), (behind_nat(&[]), BOUND), (streams(), NAMED)] {
        let is_new = world.feed(&channel_data(0x4000, b"x"))
            != Outcome::ToPeer {
                relay,
                peer: address(reached),
                payload: b"x".to_vec(),
                dont_fragment: false,
            };
        world.server.reconfigure(world.now, Arc::new(config));
        let at = address(reached);
        let told = [
            Effect::Unbound { allocation, number, peer },
            Effect::Bound { allocation, number, peer, at, expires_ms, renewed: false },
        ];
        assert_eq!(world.all_effects(), told[..if is_new { 2 } else { 0 }]);
        goes_to(&world.feed(&channel_data(0x4000, b"x")), reached);
        goes_to(&world.feed(&channel_data(0x4001, b"x")), PEER);
        assert_eq!(from(world.peer_sends(relay, reached, b"x")), None);
    }
}

/// The serialized form contains external addresses, which the receiver maps to its own bound ones.
#[test]
fn a_moved_allocation_uses_the_addresses_of_the_new_process() {
    let (mut here, mut there) = (World::with(streams()), world());
    let (alice, relay) = here.allocated();
    here.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
    let text = serde_json::to_string(&here.server.snapshot(here.now, relay.allocation).unwrap()).unwrap();
    let moved: Moved = serde_json::from_str(&text).unwrap();
    let allocation =
        there.server.restore(there.now, moved, Link(7)).unwrap_or_else(|_| panic!("not restored"));
    there.client = here.client;
    goes_to(&there.feed(&channel_data(0x4000, b"x")), BOUND);
    assert_eq!(from(there.peer_sends(RelayId { allocation, ..relay }, BOUND, b"x")), None);
    let moved = there.server.snapshot(there.now, allocation).unwrap();
    assert!(serde_json::to_string(&moved).unwrap().contains(NAMED));
}

#[test]
fn all_addresses_of_a_peer_on_a_shared_port_have_one_owner() {
    const PORT: SharedPort = SharedPort(0);
    let mut world = World::with(behind_nat(&["10.0.0.5"]));
    let relayed = address("203.0.114.5:50000");
    let (alice, first) = world.allocated_sharing(relayed, PORT);
    world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
    world.client = client(2);
    let (bob, second) = world.allocated_sharing(relayed, PORT);
    for name in [NAMED, BOUND] {
        assert_eq!(world.server.data.claimant(PORT, address(name).ip(), 1), Some(first));
        assert_eq!(world.ask(&Ask::permit(name).signed(&bob)).code(), Some(508));
        assert_eq!(world.ask(&Ask::bind(0x4000, name).signed(&bob)).code(), Some(508));
    }
    world.client = client(40_000);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert_eq!(world.server.data.claimant(PORT, address(BOUND).ip(), 1), None);
    world.client = client(2);
    world.ask(&Ask::permit(BOUND).signed(&bob)).success();
    assert_eq!(world.server.data.claimant(PORT, address(NAMED).ip(), 1), Some(second));
}

/// Before the NAT was known, the two addresses were different peers.
#[test]
fn a_new_nat_mapping_leaves_a_shared_peer_to_one_client() {
    const PORT: SharedPort = SharedPort(0);
    for bobs_name in [BOUND, "10.0.0.5:1"] {
        let mut config = streams();
        config.peers.allow = vec!["10.0.0.5".parse().unwrap()];
        let mut world = World::with(config);
        let relayed = address("203.0.114.5:50000");
        let (alice, first) = world.allocated_sharing(relayed, PORT);
        world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
        world.ask(&Ask::bind(0x4001, PEER).signed(&alice)).success();
        world.client = client(2);
        let (bob, second) = world.allocated_sharing(relayed, PORT);
        world.ask(&Ask::bind(0x4000, bobs_name).signed(&bob)).success();
        assert_eq!(world.server.data.claimant(PORT, address(NAMED).ip(), 1), Some(first));
        assert_eq!(world.server.data.claimant(PORT, address(BOUND).ip(), 1), Some(second));
        world.all_effects();

        world.server.reconfigure(world.now, Arc::new(behind_nat(&["10.0.0.5"])));
        // One of the two clients has lost the peer and its channel, but nothing else.
        let (allocation, number, peer) = (first.allocation, ChannelNumber::MIN, address(NAMED));
        let told = world.all_effects();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told.contains(&Effect::PermissionEnded { allocation, peer: peer.ip() }), "{told:?}");
        assert!(told.contains(&Effect::Unbound { allocation, number, peer }), "{told:?}");
        for name in [NAMED, BOUND] {
            assert_eq!(world.server.data.claimant(PORT, address(name).ip(), 1), Some(second));
        }
        goes_to(&world.feed(&channel_data(0x4000, b"x")), bobs_name);
        world.client = client(40_000);
        goes_to(&world.feed(&channel_data(0x4001, b"x")), PEER);
        assert_eq!(world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).code(), Some(508));
    }
}

#[test]
fn address_translation_does_not_allocate() {
    let mut world = world();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, NAMED).signed(&alice)).success();
    let message = channel_data(0x4000, &[7; 120]);
    let send = Ask::send("203.0.114.5:50102", &[7; 120]);
    let (now, client, server) = (world.now, world.client, &mut world.server);
    let counted = allocation_counter::measure(|| {
        for _ in 0..10 {
            assert!(matches!(server.from_client(now, &client.into(), &message), Verdict::ToPeer { .. }));
            assert!(matches!(server.from_client(now, &client.into(), &send), Verdict::ToPeer { .. }));
            for port in [50_101, 50_102] {
                let peer = SocketAddr::from(([10, 0, 0, 5], port));
                assert!(matches!(
                    server.data.from_peer(now, relay, peer, &message),
                    Verdict::ToClient { .. }
                ));
            }
        }
    });
    assert_eq!(counted.count_total, 0);
}
