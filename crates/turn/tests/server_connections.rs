//! TCP relaying (RFC 6062).

use crate::common::{turn::*, *};
use turnpike_turn::server::{ConnectionId, Server, WorkerId};

const OTHER_PEER: &str = "198.41.0.4:7001";

fn world() -> World {
    World::with(streams())
}

fn counted(world: &World, event: ConnectionEvent) -> u64 {
    world.server.stats().connection_events[event as usize]
}

fn refused(world: &World, reason: ConnectionRefusal) -> u64 {
    world.server.stats().connection_refusals[reason as usize]
}

fn bind(world: &mut World, who: &Credentials, port: u16, connection: ConnectionId) -> Outcome {
    let control = std::mem::replace(&mut world.client, stream(port));
    // A nonce is valid for one client address.
    let who = world.credentials(&who.user, Scheme::Md5);
    let outcome = world.feed(&Ask::connection_bind(connection).signed(&who).bytes());
    world.client = control;
    outcome
}

#[track_caller]
fn code(outcome: Outcome) -> Option<u16> {
    match outcome {
        Outcome::Reply(bytes) => Reply(bytes).code(),
        other => panic!("{other:?}"),
    }
}

fn closed(world: &mut World) -> Vec<ConnectionId> {
    let closed = |effect| match effect {
        Effect::ConnectionClosed { connection, .. } => Some(connection),
        _ => None,
    };
    world.effects().into_iter().filter_map(closed).collect()
}

#[test]
fn an_allocation_for_tcp_opens_listening_sockets() {
    for transport in 1..=2 {
        let mut world = world();
        world.client.listener = ListenerId(transport);
        let alice = world.credentials("alice", Scheme::Md5);
        let ask = Ask::allocate_tcp().with(&AdditionalAddressFamily::new(AddressFamily::IPV6)).signed(&alice);
        let request = world.feed(&ask.bytes()).opens();
        assert_eq!(request.first.transport, RelayTransport::Tcp);
        assert_eq!(request.second.unwrap().transport, RelayTransport::Tcp);
        let reply = world.open(&request).success();
        assert_eq!(reply.relayed().len(), 2);
        assert!(reply.is_signed(&alice) && reply.raw(0x0022).is_none(), "no RESERVATION-TOKEN");
    }
    let mut world = world();
    let request = world.feed_as("alice", Ask::allocate()).opens();
    assert_eq!(request.first.transport, RelayTransport::Udp);
}

#[test]
fn an_allocation_for_tcp_needs_a_stream_to_the_client() {
    for datagrams in [0, 3, 99] {
        let mut world = world();
        world.client.listener = ListenerId(datagrams);
        assert_eq!(world.ask_as("alice", Ask::allocate_tcp()).code(), Some(400));
        assert_eq!(world.server.policy_mut().held(), 0);
    }
}

#[test]
fn udp_only_attributes_with_tcp_are_400() {
    let mut world = world();
    world.client = stream(1);
    let alice = world.credentials("alice", Scheme::Md5);
    for (kind, value) in [(0x001A, &[][..]), (0x0018, &[0]), (0x0018, &[0x80]), (0x0022, &[1; 8])] {
        let ask = Ask::allocate_tcp().raw(kind, value).signed(&alice);
        assert_eq!(world.ask(&ask).code(), Some(400), "{kind:#06x}");
    }
}

#[test]
fn disabled_tcp_relaying_is_442() {
    let mut world = World::with(ServerConfig { tcp_relay: false, ..streams() });
    world.client = stream(1);
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate_tcp().signed(&alice)).code(), Some(442));
    world.ask(&Ask::allocate().signed(&alice)).success();
}

#[test]
fn a_client_connects_to_a_peer_and_binds_the_connection() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let ask = Ask::connect(PEER).signed(&alice).fingerprint();
    let request = world.connecting(&ask);
    assert_eq!((request.relay, request.peer), (relay, address(PEER)));
    world.sleep(20);
    let reply = world.connect_result(&request, Ok(())).success();
    assert!(reply.is_signed(&alice));
    assert!(reply.has(stun_types::attribute::AttributeType::new(0x8028)));
    assert_eq!(reply.message().transaction_id(), ask.transaction);
    assert_eq!(reply.connection(), request.connection);
    assert_eq!(world.server.connections(), 1);

    let Outcome::Bind { connection, client, bytes } = bind(&mut world, &alice, 42_000, request.connection)
    else {
        panic!()
    };
    assert_eq!((connection, client), (request.connection, stream(42_000)));
    assert!(Reply(bytes).is_success());
    world.sleep(500);
    assert_eq!(world.server.connections(), 1);
    world.server.connection_carried(connection, 10, 20);
    world.server.connection_ended(world.now, connection, 1, 2);
    assert_eq!(world.server.connections(), 0);
    assert_eq!(world.server.stats().connection_bytes, [11, 22]);
    world.effects();
    world.client = stream(41_000);
    world.ask_as("alice", Ask::refresh(0)).success();
    assert!(matches!(&world.effects()[..], [Effect::Closed { to_peer: (0, 11), to_client: (0, 22), .. }]));
}

#[test]
fn a_failed_connection_is_447_and_may_be_retried() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    for (error, code) in
        [(ConnectError::Failed, 447), (ConnectError::TimedOut, 447), (ConnectError::NoCapacity, 508)]
    {
        let request = world.connecting(&Ask::connect(PEER).signed(&alice));
        let reply = world.connect_result(&request, Err(error));
        assert_eq!(reply.code(), Some(code));
        assert!(reply.is_signed(&alice));
        assert_eq!(world.server.connections(), 0);
    }
    assert_eq!(counted(&world, ConnectionEvent::ConnectFailed), 3);
    world.connected(&alice, PEER);
}

#[test]
fn an_attempt_ends_after_thirty_seconds() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let request = world.connecting(&Ask::connect(PEER).signed(&alice));
    world.sleep(29);
    assert_eq!(world.effects(), []);
    world.sleep(1);
    let timed_out = Effect::ConnectTimedOut { allocation: relay.allocation, connection: request.connection };
    assert_eq!(world.effects(), [timed_out]);
    world.sleep(30);
    assert_eq!(world.effects(), [], "reported once");
    assert_eq!(world.connect_result(&request, Err(ConnectError::TimedOut)).code(), Some(447));
}

#[test]
fn a_connection_unbound_for_thirty_seconds_is_closed() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let ours = world.connected(&alice, PEER);
    world.sleep(10);
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    let [theirs, ignored] =
        [OTHER_PEER, "198.41.0.4:7002"].map(|peer| match world.peer_connects(relay, peer) {
            FromPeer::Accepted { connection, .. } => connection,
            refused => panic!("{refused:?}"),
        });
    world.sleep(19);
    assert_eq!(closed(&mut world), []);
    world.sleep(1);
    assert_eq!(closed(&mut world), [ours]);
    assert_eq!(code(bind(&mut world, &alice, 42_000, ours)), Some(400));
    assert!(matches!(bind(&mut world, &alice, 42_001, theirs), Outcome::Bind { .. }));
    world.sleep(9);
    assert_eq!(closed(&mut world), []);
    world.sleep(1);
    assert_eq!(closed(&mut world), [ignored]);
    world.sleep(10);
    assert_eq!(closed(&mut world), []);
    assert_eq!(counted(&world, ConnectionEvent::Unbound), 2);
}

#[test]
fn a_second_connect_to_the_same_peer_is_446() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let first = Ask::connect(PEER).signed(&alice);
    let request = world.connecting(&first);
    assert_eq!(world.feed(&first.bytes()), Outcome::Drop(DropReason::OpenPending));
    assert_eq!(world.ask(&Ask::connect(PEER).signed(&alice)).code(), Some(446));
    let reply = world.connect_result(&request, Ok(())).success();
    assert_eq!(world.ask(&first), reply);
    assert_eq!(world.ask(&Ask::connect(PEER).signed(&alice)).code(), Some(446));
    bind(&mut world, &alice, 42_000, request.connection);
    assert_eq!(world.ask(&first).code(), Some(446));
    // Connections made by the peer count too; a different port of the address is a different peer.
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.peer_connects(relay, OTHER_PEER);
    assert_eq!(world.ask(&Ask::connect(OTHER_PEER).signed(&alice)).code(), Some(446));
    world.connected(&alice, "198.41.0.4:7002");
    world.server.connection_ended(world.now, request.connection, 0, 0);
    world.connected(&alice, PEER);
}

#[test]
fn connect_is_refused_with_the_right_code() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    let no_peer = Ask::new(CONNECT);
    let bad_peer = Ask::new(CONNECT).raw(0x0012, &[0, 9, 1, 2]);
    for (ask, code) in [
        (no_peer, 400),
        (bad_peer, 400),
        (Ask::connect("198.41.0.4:0"), 400),
        (Ask::connect("10.0.0.1:80"), 403),
        (Ask::connect("127.0.0.1:80"), 403),
        (Ask::connect("169.254.169.254:80"), 403),
        (Ask::connect("[::ffff:127.0.0.1]:80"), 443),
        (Ask::connect("[::ffff:198.41.0.4]:80"), 443),
        (Ask::connect(PEER_V6), 443),
    ] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(code));
    }
    assert_eq!(world.ask(&Ask::connect(PEER)).code(), Some(401));
    assert_eq!(world.ask_as("bob", Ask::connect(PEER)).code(), Some(441));
    assert_eq!(world.server.connections(), 0);
    // Tries without an allocation, and with one for UDP.
    world.client = stream(2);
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::connect(PEER).signed(&alice)).code(), Some(437));
    world.ask(&Ask::allocate().signed(&alice)).success();
    assert_eq!(world.ask(&Ask::connect(PEER).signed(&alice)).code(), Some(400));
}

#[test]
fn an_allocation_for_tcp_refuses_datagrams() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    assert_eq!(world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).code(), Some(400));
    assert_eq!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(DropReason::TcpAllocation));
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
}

#[test]
fn a_peer_with_permission_is_announced() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    let FromPeer::Accepted { connection, client, indication } = world.peer_connects(relay, OTHER_PEER) else {
        panic!()
    };
    assert_eq!(client, world.client);
    let message = indication.message();
    assert_eq!(message.method(), CONNECTION_ATTEMPT);
    assert!(message.has_class(stun_types::message::MessageClass::Indication));
    assert_eq!(indication.connection(), connection);
    assert_eq!(indication.get::<XorPeerAddress>().addr(message.transaction_id()), address(OTHER_PEER));
    assert!(matches!(bind(&mut world, &alice, 42_000, connection), Outcome::Bind { .. }));
}

#[test]
fn a_peer_without_permission_is_disconnected_immediately() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    assert_eq!(world.peer_connects(relay, PEER), FromPeer::Refused(ConnectionRefusal::NoPermission));
    // A Connect does not permit other peers at the same address.
    world.connected(&alice, PEER);
    assert_eq!(world.peer_connects(relay, OTHER_PEER), FromPeer::Refused(ConnectionRefusal::NoPermission));
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.sleep(300);
    assert_eq!(world.peer_connects(relay, PEER), FromPeer::Refused(ConnectionRefusal::NoPermission));
    assert_eq!(refused(&world, ConnectionRefusal::NoPermission), 3);
    let stale = RelayId { allocation: AllocationSlot { generation: 9, ..relay.allocation }, ..relay };
    assert_eq!(world.peer_connects(stale, PEER), FromPeer::Refused(ConnectionRefusal::Stale));
    let v6 = RelayId { family: Family::V6, ..relay };
    assert_eq!(world.peer_connects(v6, PEER_V6), FromPeer::Refused(ConnectionRefusal::Stale));
}

#[test]
fn connections_are_limited_per_allocation_and_in_total() {
    let mut world = World::with(ServerConfig {
        limits: ServerLimits {
            peer_connections_per_allocation: 3,
            peer_connections: 4,
            ..ServerLimits::default()
        },
        ..streams()
    });
    let (alice, relay) = world.allocated_tcp();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.connected(&alice, "198.41.0.4:1");
    world.connecting(&Ask::connect("198.41.0.4:2").signed(&alice));
    let FromPeer::Accepted { connection, .. } = world.peer_connects(relay, "198.41.0.4:3") else { panic!() };
    assert_eq!(world.ask(&Ask::connect("198.41.0.4:4").signed(&alice)).code(), Some(508));
    assert_eq!(world.peer_connects(relay, "198.41.0.4:4"), FromPeer::Refused(ConnectionRefusal::Limit));
    assert_eq!(world.server.stats().connection_limit, [2, 0, 0]);

    world.client = stream(2);
    let bob = world.credentials("bob", Scheme::Md5);
    world.ask(&Ask::allocate_tcp().signed(&bob)).success();
    world.connected(&bob, "198.41.0.4:1");
    assert_eq!(world.ask(&Ask::connect("198.41.0.4:2").signed(&bob)).code(), Some(508));
    assert_eq!(world.server.stats().connection_limit, [2, 1, 0]);
    world.server.connection_ended(world.now, connection, 0, 0);
    world.connected(&bob, "198.41.0.4:2");
}

#[test]
fn connection_bind_without_a_pending_connection_is_400() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    let request = world.connecting(&Ask::connect(PEER).signed(&alice));
    // Cases: the connection is still being established, unknown or already bound, or the attribute is missing
    // or has the wrong length.
    assert_eq!(code(bind(&mut world, &alice, 42_000, request.connection)), Some(400));
    assert_eq!(code(bind(&mut world, &alice, 42_001, ConnectionId(request.connection.0 ^ 1))), Some(400));
    world.connect_result(&request, Ok(())).success();
    // A ConnectionBind is refused over datagrams and on a control connection.
    assert_eq!(world.ask(&Ask::connection_bind(request.connection).signed(&alice)).code(), Some(400));
    for listener in [0, 3] {
        world.client = Client { listener: ListenerId(listener), ..stream(42_002) };
        assert_eq!(world.ask_as("alice", Ask::connection_bind(request.connection)).code(), Some(400));
    }
    assert!(matches!(bind(&mut world, &alice, 42_003, request.connection), Outcome::Bind { .. }));
    assert_eq!(code(bind(&mut world, &alice, 42_004, request.connection)), Some(400));
    assert_eq!(refused(&world, ConnectionRefusal::UnknownId), 3);
    world.client = stream(42_005);
    let alice = world.credentials("alice", Scheme::Md5);
    for value in [&[][..], &[0; 3], &[0; 5]] {
        let ask = Ask::new(CONNECTION_BIND).raw(0x002A, value).signed(&alice);
        assert_eq!(world.ask(&ask).code(), Some(400));
    }
    assert_eq!(world.ask(&Ask::new(CONNECTION_BIND).signed(&alice)).code(), Some(400));
}

#[test]
fn only_its_user_can_bind_a_connection() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    let connection = world.connected(&alice, PEER);
    let control = world.client;
    world.client = stream(42_000);
    assert_eq!(world.ask(&Ask::connection_bind(connection)).code(), Some(401));
    world.client = control;
    let bob = Credentials { user: "bob".to_owned(), ..alice.clone() };
    assert_eq!(code(bind(&mut world, &bob, 42_001, connection)), Some(441));
    assert_eq!(refused(&world, ConnectionRefusal::WrongUser), 1);
    assert_eq!(world.server.stats().credentials_refused[4], 1);
    assert!(matches!(bind(&mut world, &alice, 42_002, connection), Outcome::Bind { .. }));
}

#[test]
fn one_user_cannot_use_up_all_connections() {
    let config = ServerConfig {
        limits: ServerLimits {
            peer_connections_per_allocation: 4,
            peer_connections: 10,
            peer_connections_per_user: 6,
            ..ServerLimits::default()
        },
        ..streams()
    };
    let mut world = World::with(config);
    let (alice, first) = world.allocated_tcp();
    let peers = |n: u16| format!("198.41.0.4:{n}");
    let ours: Vec<_> = (1..=4).map(|n| world.connected(&alice, &peers(n))).collect();
    assert_eq!(world.ask(&Ask::connect(&peers(5)).signed(&alice)).code(), Some(508));
    // Alice's second allocation gets the rest of her limit, whichever side connects.
    world.client = stream(41_001);
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::allocate_tcp().signed(&alice)).success();
    let second = world.last_opened();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    world.connected(&alice, &peers(1));
    assert!(matches!(world.peer_connects(second, &peers(2)), FromPeer::Accepted { .. }));
    assert_eq!(world.ask(&Ask::connect(&peers(3)).signed(&alice)).code(), Some(508));
    assert_eq!(world.peer_connects(second, &peers(3)), FromPeer::Refused(ConnectionRefusal::Limit));
    assert_eq!(world.server.stats().connection_limit, [1, 0, 2]);
    world.client = stream(41_002);
    let bob = world.credentials("bob", Scheme::Md5);
    world.ask(&Ask::allocate_tcp().signed(&bob)).success();
    (1..=4).for_each(|n| _ = world.connected(&bob, &peers(n)));
    // Ended connections no longer count, however they ended.
    world.client = stream(41_001);
    world.server.connection_ended(world.now, ours[0], 0, 0);
    world.connected(&alice, &peers(3));
    assert_eq!(world.ask(&Ask::connect(&peers(4)).signed(&alice)).code(), Some(508));
    world.server.close_one(world.now, first.allocation, ClosedReason::Administrator);
    world.connected(&alice, &peers(4));
}

#[test]
fn connections_end_with_their_realm() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    world.connected(&alice, PEER);
    let renamed = ServerConfig { realm: "renamed.example".to_owned(), ..streams() };
    world.server.reconfigure(world.now, Arc::new(renamed));
    assert_eq!(world.server.connections(), 0);
    assert!(matches!(&world.effects()[..], [Effect::Closed { reason: ClosedReason::Administrator, .. }]));
}

#[test]
fn without_authentication_connection_bind_needs_the_same_address() {
    let mut world = World::with(ServerConfig { authenticate: false, ..streams() });
    world.client = stream(1);
    world.ask(&Ask::allocate_tcp()).success();
    let request = world.connecting(&Ask::connect(PEER));
    world.connect_result(&request, Ok(())).success();
    let ask = Ask::connection_bind(request.connection).bytes();
    world.client = Client { address: address("192.0.2.8:9"), ..stream(2) };
    assert_eq!(code(world.feed(&ask)), Some(441));
    world.client = stream(2);
    assert!(matches!(world.feed(&ask), Outcome::Bind { .. }));
}

#[test]
fn connections_end_with_their_allocation() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let bound = world.connected(&alice, PEER);
    bind(&mut world, &alice, 42_000, bound);
    let connecting = world.connecting(&Ask::connect(OTHER_PEER).signed(&alice));
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert_eq!(world.server.connections(), 0);
    assert!(matches!(&world.effects()[..], [Effect::Closed { .. }]));
    let late = world.server.connected(world.now, relay.allocation, connecting.connection, Ok(()));
    assert_eq!(Outcome::from(late), Outcome::Drop(DropReason::StaleRelay));
    assert_eq!(closed(&mut world), [connecting.connection]);
    world.server.connection_ended(world.now, bound, 5, 6);
    assert_eq!(world.server.stats().connection_bytes, [5, 6]);
    assert_eq!(world.server.poll_timeout(), None);
}

#[test]
fn the_end_of_one_family_closes_only_its_connections() {
    let mut world = world();
    world.client = stream(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let dual = Ask::allocate_tcp().with(&AdditionalAddressFamily::new(AddressFamily::IPV6));
    world.ask(&dual.signed(&alice)).success();
    let (v4, v6) = (world.connected(&alice, PEER), world.connected(&alice, PEER_V6));
    world.effects();
    let end = Ask::refresh(0).with(&RequestedAddressFamily::new(AddressFamily::IPV4));
    world.ask(&end.signed(&alice)).success();
    assert_eq!(closed(&mut world), [v4]);
    assert!(matches!(bind(&mut world, &alice, 2, v6), Outcome::Bind { .. }));
}

#[test]
fn a_reload_closes_connections_to_refused_peers() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    let (gone, stays) = (world.connected(&alice, PEER), world.connected(&alice, "192.5.5.241:7000"));
    bind(&mut world, &alice, 42_000, gone);
    let peers = PeerRules { deny: vec!["198.41.0.0/24".parse().unwrap()], ..PeerRules::default() };
    world.server.reconfigure(world.now, Arc::new(ServerConfig { peers, ..streams() }));
    assert_eq!(closed(&mut world), [gone]);
    assert_eq!(world.server.connections(), 1);
    assert!(matches!(bind(&mut world, &alice, 42_001, stays), Outcome::Bind { .. }));
}

#[test]
fn the_end_of_the_control_connection_ends_the_allocation() {
    let mut world = world();
    let (alice, relay) = world.allocated_tcp();
    let bound = world.connected(&alice, PEER);
    bind(&mut world, &alice, 42_000, bound);
    world.server.disconnected(world.now, &stream(42_000));
    assert_eq!(world.server.allocations(), 1, "a data connection is not a control connection");
    world.server.disconnected(world.now, &world.client);
    assert_eq!((world.server.allocations(), world.server.connections()), (0, 0));
    assert!(matches!(
        &world.effects()[..],
        [Effect::Closed { allocation, reason: ClosedReason::Disconnected, .. }] if *allocation == relay.allocation
    ));
    assert_eq!(world.server.policy_mut().held(), 0);
    assert_eq!(world.server.stats().allocations_closed[4], 1);
}

#[test]
fn a_connection_bind_is_passed_to_the_connections_worker() {
    let mut workers = World::workers(&streams(), 3);
    let [first, owner, _] = &mut workers[..] else { panic!() };
    let (alice, _) = owner.allocated_tcp();
    let connection = owner.connected(&alice, PEER);
    assert_eq!(connection.0 >> 22, 1);

    first.client = stream(42_000);
    let alice = first.credentials("alice", Scheme::Md5);
    let ask = Ask::connection_bind(connection).signed(&alice).bytes();
    assert_eq!(first.feed(&ask), Outcome::HandOver { worker: 1 });
    let verdict = owner.handed_over(stream(42_000), &ask);
    assert!(matches!(verdict, Outcome::Bind { connection: bound, .. } if bound == connection));
    // Only authenticated requests are passed on, and only to existing workers.
    assert_eq!(first.ask(&Ask::connection_bind(connection)).code(), Some(401));
    let nowhere = ConnectionId(connection.0 | 3 << 22);
    assert_eq!(first.ask(&Ask::connection_bind(nowhere).signed(&alice)).code(), Some(400));
}

#[test]
fn connection_ids_are_unpredictable_and_encode_the_worker() {
    let mut seen = std::collections::HashSet::new();
    let (mut ones, mut zeros) = (0, u32::MAX);
    let config = ServerConfig {
        limits: ServerLimits {
            peer_connections_per_allocation: 2000,
            peer_connections_per_user: 2000,
            ..ServerLimits::default()
        },
        ..streams()
    };
    let mut world = World::with(config.clone());
    let worker_id = WorkerId::new(1023, 1024).unwrap();
    world.server = Server::for_worker(Arc::new(config), policy(), worker_id, seed(worker_id));
    let (alice, relay) = world.allocated_tcp();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    for port in 1..=2000 {
        let FromPeer::Accepted { connection, .. } = world.peer_connects(relay, &format!("198.41.0.4:{port}"))
        else {
            panic!()
        };
        assert_eq!(connection.0 >> 22, 1023);
        assert!(seen.insert(connection));
        ones |= connection.0;
        zeros &= connection.0;
    }
    assert_eq!((ones, zeros), (u32::MAX, 0xFFC0_0000), "every lower bit varies");
    let mut steps: Vec<u32> = seen.iter().map(|id| id.0).collect();
    steps.sort_unstable();
    assert!(steps.windows(2).filter(|pair| pair[1] - pair[0] < 8).count() < 100, "IDs are not sequential");
}

fn policy() -> TestPolicy {
    TestPolicy { per_user: 10, total: 10, ..TestPolicy::default() }
}

#[test]
fn every_truncation_of_a_request_is_dropped() {
    let mut world = world();
    let (alice, _) = world.allocated_tcp();
    let connection = world.connected(&alice, OTHER_PEER);
    for ask in [Ask::connect(PEER), Ask::connection_bind(connection), Ask::allocate_tcp()] {
        let bytes = ask.signed(&alice).bytes();
        for length in 0..bytes.len() {
            assert!(matches!(world.feed(&bytes[..length]), Outcome::Drop(_)), "{length}");
        }
        // Truncated with a matching length field: without integrity, or with half an attribute.
        for length in (20..bytes.len()).step_by(4) {
            let mut cut = bytes[..length].to_vec();
            cut[2..4].copy_from_slice(&u16::try_from(length - 20).unwrap().to_be_bytes());
            let outcome = world.feed(&cut);
            assert!(
                matches!(&outcome, Outcome::Drop(_)) || matches!(code(outcome.clone()), Some(400 | 401)),
                "{length}: {outcome:?}"
            );
        }
    }
    assert_eq!(world.server.connections(), 1);
    // Servers accept neither indications nor responses of these methods.
    for kind in [0x001A_u16, 0x001B, 0x010A, 0x011B] {
        let mut bytes = Ask::connect(PEER).bytes();
        bytes[..2].copy_from_slice(&kind.to_be_bytes());

        assert_eq!(world.feed(&bytes), Outcome::Drop(DropReason::UnexpectedClass), "{kind:#06x}");
    }
}
