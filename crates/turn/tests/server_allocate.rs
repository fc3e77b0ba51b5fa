//! Allocate (RFC 8656 section 7): grants and all refusals.

use crate::common::{turn::*, *};
use stun_types::attribute::AttributeStaticType as _;
use turnpike_turn::server::{OpenRelay, OpenRequest};

#[test]
fn an_allocate_returns_relayed_and_mapped_address_and_lifetime() {
    let mut world = World::new();
    let reply = world.ask_as("alice", Ask::allocate()).success();
    assert_eq!(reply.relayed(), [address("203.0.113.1:50002")]);
    assert_eq!(reply.mapped(), world.client.address);
    assert_eq!(reply.lifetime(), 600);
    assert_eq!(reply.get::<Software>().software(), "turnpike");
    assert_eq!(world.server.allocations(), 1);
    assert!(matches!(
        &world.effects()[..],
        [Effect::Opened { client, relayed: (first, None), .. }]
            if *client == world.client && *first == address("203.0.113.1:50002")
    ));
}

#[test]
fn malformed_and_contradictory_requests_are_refused() {
    let token = || ReservationToken::new(1);
    let v4 = || RequestedAddressFamily::new(AddressFamily::IPV4);
    let v6 = || RequestedAddressFamily::new(AddressFamily::IPV6);
    let also_v6 = || AdditionalAddressFamily::new(AddressFamily::IPV6);
    let cases: Vec<(&str, Ask, u16)> = vec![
        ("no REQUESTED-TRANSPORT", Ask::new(ALLOCATE), 400),
        ("REQUESTED-TRANSPORT of one byte", Ask::new(ALLOCATE).raw(0x0019, &[17]), 400),
        ("TCP over UDP", Ask::allocate_tcp(), 400),
        ("SCTP", Ask::new(ALLOCATE).with(&RequestedTransport::new(132)), 442),
        ("transport 255", Ask::new(ALLOCATE).with(&RequestedTransport::new(255)), 442),
        ("LIFETIME of two bytes", Ask::allocate().raw(0x000D, &[0, 1]), 400),
        ("EVEN-PORT of two bytes", Ask::allocate().raw(0x0018, &[0, 0]), 400),
        ("DONT-FRAGMENT with a value", Ask::allocate().raw(0x001A, &[1]), 400),
        ("RESERVATION-TOKEN of four bytes", Ask::allocate().raw(0x0022, &[0; 4]), 400),
        ("token and EVEN-PORT", Ask::allocate().with(&token()).with(&EvenPort::new(false)), 400),
        ("token and family", Ask::allocate().with(&token()).with(&v4()), 400),
        ("token and additional family", Ask::allocate().with(&token()).with(&also_v6()), 400),
        ("both family attributes", Ask::allocate().with(&v4()).with(&also_v6()), 400),
        ("both family attributes, IPv6", Ask::allocate().with(&v6()).with(&also_v6()), 400),
        ("additional IPv4", Ask::allocate().raw(0x8000, &[1, 0, 0, 0]), 400),
        ("additional family of one byte", Ask::allocate().raw(0x8000, &[2]), 400),
        (
            "additional family and a reserved port",
            Ask::allocate().with(&also_v6()).with(&EvenPort::new(true)),
            400,
        ),
        ("family of one byte", Ask::allocate().raw(0x0017, &[1]), 400),
        ("family 3", Ask::allocate().raw(0x0017, &[3, 0, 0, 0]), 440),
    ];
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    for (what, ask, code) in cases {
        let reply = world.ask(&ask.signed(&alice));
        assert_eq!(reply.code(), Some(code), "{what}");
        assert!(reply.is_signed(&alice), "{what}");
    }
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.policy_mut().held(), 0);
}

/// RFC 8656 section 3.7: sockets do not report the DF bit of a translated IPv4 datagram.
#[test]
fn dont_fragment_is_unknown_for_ipv4_to_ipv6_relaying() {
    let v6 = || Ask::allocate().with(&RequestedAddressFamily::new(AddressFamily::IPV6));
    let both = || Ask::allocate().with(&AdditionalAddressFamily::new(AddressFamily::IPV6));
    let (udp, tcp, dtls) = (0, 1, 3);
    for (listener, from, ask, refused) in [
        (udp, "192.0.2.7:40000", v6(), true),
        (udp, "192.0.2.7:40000", both(), true),
        (dtls, "192.0.2.7:40000", v6(), true),
        (udp, "192.0.2.7:40000", Ask::allocate(), false),
        (tcp, "192.0.2.7:40000", v6(), false),
        (udp, "[2001:db8::7]:40000", v6(), false),
        (udp, "[2001:db8::7]:40000", both(), false),
    ] {
        let mut world = World::with(streams());
        (world.client.listener.0, world.client.address) = (listener, address(from));
        let alice = world.credentials("alice", Scheme::Md5);
        let reply = world.ask(&ask.with(&DontFragment::new()).signed(&alice));
        assert!(reply.is_signed(&alice));
        assert_eq!(reply.code(), refused.then_some(420), "listener {listener}, {from}");
        assert_eq!(reply.raw(0x000A), refused.then(|| vec![0, 0x1A]));
        assert_eq!(world.server.allocations(), usize::from(!refused));
    }
}

#[test]
fn a_family_without_a_relay_address_is_440() {
    let mut world = World::with(ServerConfig { relay_v6: false, ..config() });
    let alice = world.credentials("alice", Scheme::Md5);
    let v6 = RequestedAddressFamily::new(AddressFamily::IPV6);
    assert_eq!(world.ask(&Ask::allocate().with(&v6).signed(&alice)).code(), Some(440));

    let mut world = World::with(ServerConfig { relay_v4: false, ..config() });
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(440), "IPv4 is the default");
    let reply = world.ask(&Ask::allocate().with(&v6).signed(&alice)).success();
    assert_eq!(reply.relayed(), [address("[2001:db8::1]:50002")]);

    let mut both = World::new();
    let reply = both.ask_as("alice", Ask::allocate().with(&v6)).success();
    assert_eq!(reply.relayed(), [address("[2001:db8::1]:50002")]);
}

#[test]
fn another_allocate_on_the_same_5_tuple_is_437() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(437));
    // Listener and local address are part of the 5-tuple; the nonce depends on neither.
    world.client.local = address("192.0.2.2:3478");
    world.ask(&Ask::allocate().signed(&alice)).success();
    world.client.listener.0 = 1;
    world.ask(&Ask::allocate().signed(&alice)).success();
    assert_eq!(world.server.allocations(), 3);
}

#[test]
fn a_failed_relay_socket_is_508_and_leaves_no_state() {
    for (result, code) in [(OpenResult::NoCapacity, 508), (OpenResult::UnsupportedFamily, 440)] {
        let mut world = World::new();
        let alice = world.credentials("alice", Scheme::Sha256);
        let ask = Ask::allocate().signed(&alice);
        let request = world.feed(&ask.bytes()).opens();
        assert_eq!(world.server.policy_mut().held(), 1);
        let reply = world.opened(request.allocation, result, None);
        assert_eq!(reply.code(), Some(code));
        assert!(reply.is_signed(&alice));
        assert_eq!(world.server.allocations(), 0);
        assert_eq!(world.server.policy_mut().held(), 0);
        assert_eq!(world.server.poll_timeout(), None);
        assert!(world.effects().is_empty());
        world.ask(&ask).success();
    }
}

#[test]
fn a_relay_socket_of_an_ended_allocation_is_returned() {
    let mut world = World::new();
    let request = world.feed_as("alice", Ask::allocate()).opens();
    world.server.close_all(world.now, ClosedReason::Shutdown);
    assert!(
        matches!(&world.effects()[..], [Effect::Closed { allocation, .. }] if *allocation == request.allocation)
    );
    let relayed = address("203.0.113.1:50000");
    let verdict = world.server.opened(world.now, request.allocation, OpenResult::Opened { relayed }, None);
    assert_eq!(Outcome::from(verdict), Outcome::Drop(DropReason::StaleRelay));
    let relay = RelayId { allocation: request.allocation, family: Family::V4 };
    assert_eq!(world.effects(), [Effect::RelayClosed { relay }]);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.policy_mut().held(), 0);
}

#[test]
fn even_port_requests_an_even_port() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::allocate().with(&EvenPort::new(false)).signed(&alice);
    let request = world.feed(&ask.bytes()).opens();
    assert_eq!(
        request.first,
        OpenRelay { family: Family::V4, transport: RelayTransport::Udp, port: PortRequest::Even }
    );
    assert!(!world.open(&request).success().has(ReservationToken::TYPE));
}

#[test]
fn a_reserved_port_is_requested_by_its_token_and_family() {
    for (family, asked) in [(Family::V4, AddressFamily::IPV4), (Family::V6, AddressFamily::IPV6)] {
        let mut world = World::with(streams());
        let alice = world.credentials("alice", Scheme::Md5);
        let ask = Ask::allocate().with(&EvenPort::new(true)).with(&RequestedAddressFamily::new(asked));
        let request = world.feed(&ask.signed(&alice).bytes()).opens();
        let PortRequest::EvenAndReserveNext(token) = request.first.port else { panic!("{request:?}") };
        let reply = world.open(&request).success();
        assert_eq!(reply.get::<ReservationToken>().token().to_be_bytes(), token);

        // Allocates from another 5-tuple, as for RTCP, and over another transport.
        for from in [client(40_001), stream(40_001)] {
            world.client = from;
            let alice = world.credentials("alice", Scheme::Md5);
            let ask = Ask::allocate().with(&reply.get::<ReservationToken>()).signed(&alice);
            let Outcome::Open(OpenRequest { allocation, first, second }) = world.feed(&ask.bytes()) else {
                panic!()
            };
            assert_eq!(
                first,
                OpenRelay { family, transport: RelayTransport::Udp, port: PortRequest::Reserved(token) }
            );
            assert_eq!(second, None);
            // The runtime decides whether the token is expired or unknown.
            assert_eq!(world.opened(allocation, OpenResult::NoCapacity, None).code(), Some(508));
        }
    }
}

#[test]
fn reservation_tokens_do_not_repeat() {
    let mut world = World::new();
    let mut seen = std::collections::HashSet::new();
    for port in 1..100 {
        world.client = client(port);
        let alice = world.credentials("alice", Scheme::Md5);
        let ask = Ask::allocate().with(&EvenPort::new(true)).signed(&alice);
        assert!(seen.insert(world.ask(&ask).success().get::<ReservationToken>().token()));
    }
}

#[test]
fn no_request_works_before_the_relay_socket_is_open() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::allocate().signed(&alice);
    let request = world.feed(&ask.bytes()).opens();
    assert_eq!(world.feed(&ask.bytes()), Outcome::Drop(DropReason::OpenPending));
    for ask in [Ask::refresh(0), Ask::permit(PEER), Ask::bind(0x4000, PEER)] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(437));
    }
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::PeerFamily));
    world.open(&request).success();
}

#[test]
fn draining_refuses_new_allocations_and_keeps_existing_ones() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.server.set_draining(true);
    world.ask(&Ask::refresh(600).signed(&alice)).success();
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    assert!(world.peer_sends(relay, PEER, b"x").goes_to_client());
    world.client = client(40_001);
    assert_eq!(world.ask_as("bob", Ask::allocate()).code(), Some(508));
    assert_eq!(world.server.stats().drain_refusals, 1);
    assert_eq!(world.server.allocations(), 1);
}
