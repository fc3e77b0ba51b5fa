//! Mobility (RFC 8016) within one worker.

use crate::common::*;

fn stream_elsewhere(n: u16) -> Client {
    Client { listener: ListenerId(1), ..elsewhere(n) }
}

fn counted(world: &World, event: MobilityEvent) -> u64 {
    world.server.stats().mobility[event as usize]
}

/// A world in which alice has a mobile allocation with channel 0x4000 to the peer; also returns its ticket.
fn mobile() -> (World, RelayId, Vec<u8>) {
    from(client(40_000))
}

fn from(client: Client) -> (World, RelayId, Vec<u8>) {
    let mut world = World::with(streams());
    world.client = client;
    let alice = world.credentials("alice", Scheme::Md5);
    let reply = world.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
    let relay = world.last_opened();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    let ticket = reply.ticket().expect("a requested ticket");
    (world, relay, ticket)
}

fn present(world: &mut World, from: Client, ticket: &[u8]) -> Reply {
    world.client = from;
    world.ask_as("alice", Ask::present(ticket))
}

fn speaks(world: &mut World, from: Client) -> Outcome {
    world.client = from;
    world.feed(&channel_data(0x4000, b"from the client"))
}

#[test]
fn only_a_client_that_asks_gets_a_ticket() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Sha256);
    let ask = Ask::allocate().raw(TICKET, &[]).signed(&alice);
    let reply = world.ask(&ask).success();
    assert!(reply.is_signed(&alice));
    assert_eq!(reply.ticket().unwrap().len(), 32);
    assert_eq!(world.ask(&ask), reply, "same response to the retransmission");
    world.client = client(2);
    let (_, other) = (world.allocated(), world.client);
    assert_eq!(other, client(2));
    world.client = client(3);
    assert_eq!(world.ask_as("alice", Ask::allocate()).success().ticket(), None);
    world.client = client(4);
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::allocate().raw(TICKET, &reply.ticket().unwrap()).signed(&alice);
    assert_eq!(world.ask(&ask).code(), Some(400), "an Allocate with a ticket is invalid");
    assert_eq!(world.server.policy_mut().held(), 3);
}

#[test]
fn disabled_mobility_is_405() {
    let (mut world, _, ticket) = mobile();
    let off = ServerConfig { mobility: false, ..streams() };
    world.server.reconfigure(world.now, Arc::new(off));
    assert_eq!(present(&mut world, elsewhere(1), &ticket).code(), Some(405));
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).code(), Some(405));
    world.ask(&Ask::allocate().signed(&alice)).success();
}

#[test]
fn the_old_address_is_valid_until_data_from_the_new_one() {
    let (mut world, relay, ticket) = mobile();
    let (old, new) = (world.client, elsewhere(1));
    let reply = present(&mut world, new, &ticket).success();
    assert_eq!(reply.lifetime(), 600);
    assert_ne!(reply.ticket().unwrap(), ticket);
    // Data flows in both directions, and requests work from either 5-tuple.
    assert_eq!(reaches(&mut world, relay), old);
    assert!(matches!(speaks(&mut world, old), Outcome::ToPeer { relay: from, .. } if from == relay));
    world.client = new;
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::permit("198.41.0.9:0").signed(&alice)).success();
    world.ask(&Ask::refresh(700).signed(&alice)).success();
    assert_eq!(reaches(&mut world, relay), old);
    assert_eq!(world.effects(), []);

    assert!(matches!(speaks(&mut world, new), Outcome::ToPeer { relay: from, .. } if from == relay));
    let moved = Effect::Moved {
        allocation: relay.allocation,
        was: Some(old),
        client: new,
        link: Link::default(),
        padded: false,
        from: None,
    };
    assert_eq!(world.effects(), [moved]);
    assert_eq!(reaches(&mut world, relay), new);
    assert_eq!(speaks(&mut world, old), Outcome::Drop(DropReason::NoAllocation));
    // The permission requested from the new address, the channel and the quota have moved too.
    world.client = new;
    assert!(world.feed(&Ask::send("198.41.0.9:5", b"x")).goes_to_peer());
    assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (1, 1));
}

#[test]
fn a_send_indication_is_data_too() {
    let (mut world, relay, ticket) = mobile();
    present(&mut world, elsewhere(1), &ticket).success();
    assert!(world.feed(&Ask::send(PEER, b"x")).goes_to_peer());
    assert_eq!(reaches(&mut world, relay), elsewhere(1));
}

#[test]
fn only_data_moves_an_allocation() {
    let (mut world, relay, ticket) = mobile();
    let old = world.client;
    present(&mut world, elsewhere(1), &ticket).success();
    for noise in [&[0x40][..], &[0x40, 0, 0, 9, 1], &[0; 20], &[0xFF; 40]] {
        assert!(matches!(world.feed(noise), Outcome::Drop(_)));
    }
    world.ask(&Ask::new(BINDING)).success();
    assert_eq!(reaches(&mut world, relay), old);
}

#[test]
fn a_refresh_with_a_ticket_sets_the_lifetime() {
    let (mut world, _, ticket) = mobile();
    world.sleep(500);
    world.client = elsewhere(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::refresh(1000).raw(TICKET, &ticket).signed(&alice);
    assert_eq!(world.ask(&ask).success().lifetime(), 1000);
    world.sleep(999);
    assert_eq!(world.server.allocations(), 1);
    world.sleep(1);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(speaks(&mut world, elsewhere(1)), Outcome::Drop(DropReason::NoAllocation));
}

#[test]
fn a_retransmitted_refresh_gets_the_same_response_for_40_s() {
    let (mut world, relay, ticket) = mobile();
    let old = world.client;
    world.client = elsewhere(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::present(&ticket).signed(&alice).fingerprint();
    let reply = world.ask(&ask).success();
    world.sleep(30);
    assert_eq!(world.ask(&ask), reply);
    assert_eq!(reaches(&mut world, relay), old);
    speaks(&mut world, elsewhere(1));
    world.sleep(9);
    assert_eq!(world.ask(&ask), reply, "same response after the move");
    world.sleep(1);
    assert_eq!(world.ask(&ask).code(), Some(400));
    assert_eq!(world.server.stats().retransmits, 2);
}

/// A neighbour behind the client's NAT can send a copy, because nonces are valid on every port.
#[test]
fn a_copy_of_a_refresh_is_always_refused() {
    let (mut world, relay, ticket) = mobile();
    let (old, new) = (world.client, elsewhere(1));
    world.client = new;
    let alice = world.credentials("alice", Scheme::Md5);
    let copy = Ask::present(&ticket).signed(&alice);
    let first = world.ask(&copy).success();
    let refused = |world: &mut World, code| {
        for from in [elsewhere(2), stream_elsewhere(3), Client { listener: ListenerId(3), ..elsewhere(1) }] {
            world.client = from;
            assert_eq!(world.ask(&copy).code(), Some(code), "{from:?}");
            assert_eq!(speaks(world, from), Outcome::Drop(DropReason::NoAllocation));
        }
        world.client = new;
    };
    refused(&mut world, 438);
    assert_eq!(world.ask(&copy), first, "retransmission by the client itself");
    assert_eq!(reaches(&mut world, relay), old);
    world.sleep(41);
    refused(&mut world, 438);
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    refused(&mut world, 400);
    assert!(speaks(&mut world, new).goes_to_peer());
    refused(&mut world, 400);
    assert_eq!(reaches(&mut world, relay), new);
    assert_eq!(counted(&world, MobilityEvent::Arrived), 1);
}

/// The client regains the allocation with its next request; the signed response is useless to the sender of
/// the copy.
#[test]
fn the_client_regains_an_allocation_moved_by_an_earlier_copy() {
    let (mut world, relay, ticket) = mobile();
    world.client = elsewhere(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let request = Ask::present(&ticket).signed(&alice);
    world.client = elsewhere(66);
    world.ask(&request).success();
    world.client = elsewhere(1);
    assert_eq!(world.ask(&request).code(), Some(438));
    present(&mut world, elsewhere(1), &ticket).success();
    assert_eq!(speaks(&mut world, elsewhere(66)), Outcome::Drop(DropReason::NoAllocation));
    assert!(speaks(&mut world, elsewhere(1)).goes_to_peer());
    assert_eq!(reaches(&mut world, relay), elsewhere(1));
}

#[test]
fn a_signed_request_from_the_new_address_spends_the_old_ticket() {
    for ask in [Ask::permit(PEER), Ask::refresh(600), Ask::bind(0x4000, PEER)] {
        let (mut world, relay, ticket) = mobile();
        let old = world.client;
        let next = present(&mut world, elsewhere(1), &ticket).success().ticket().unwrap();
        world.client = old;
        world.ask_as("alice", Ask::permit(PEER)).success();
        let again = present(&mut world, elsewhere(1), &ticket).success().ticket().unwrap();
        assert_ne!(again, next);
        world.ask_as("alice", ask).success();
        assert_eq!(present(&mut world, elsewhere(2), &ticket).code(), Some(400));
        assert_eq!(reaches(&mut world, relay), old, "the old 5-tuple stays current");
        present(&mut world, elsewhere(2), &again).success();
    }
    let (mut world, _, ticket) = mobile();
    present(&mut world, elsewhere(1), &ticket).success();
    assert_eq!(world.ask(&Ask::permit(PEER)).code(), Some(401));
    present(&mut world, elsewhere(2), &ticket).success();
    // A spent ticket is refused even if the allocation moved immediately because its old connection had
    // closed.
    let (mut world, _, ticket) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    present(&mut world, elsewhere(1), &ticket).success();
    world.ask_as("alice", Ask::permit(PEER)).success();
    assert_eq!(present(&mut world, elsewhere(2), &ticket).code(), Some(400));
}

#[test]
fn each_ticket_is_valid_once() {
    let (mut world, relay, first) = mobile();
    let second = present(&mut world, elsewhere(1), &first).success().ticket().unwrap();
    // The second network is dropped, because no data came from there; the first stays current.
    let third = present(&mut world, elsewhere(3), &second).success().ticket().unwrap();
    assert_eq!(reaches(&mut world, relay), client(40_000));
    assert_eq!(speaks(&mut world, elsewhere(1)), Outcome::Drop(DropReason::NoAllocation));
    assert!(speaks(&mut world, elsewhere(3)).goes_to_peer());
    present(&mut world, client(40_000), &third).success();
    assert!(speaks(&mut world, client(40_000)).goes_to_peer());
    assert_eq!(reaches(&mut world, relay), client(40_000));
    // The tickets are presented again, by the client or from anywhere else.
    for spent in [first, second, third] {
        for from in [elsewhere(3), elsewhere(9), client(40_000)] {
            assert_eq!(present(&mut world, from, &spent).code(), Some(400));
        }
    }
    assert_eq!(counted(&world, MobilityEvent::TicketReplayed), 9);
}

#[test]
fn a_ticket_with_a_lost_response_is_valid_until_data_arrives() {
    let (mut world, relay, first) = mobile();
    let lost = [elsewhere(1), elsewhere(1), elsewhere(2)]
        .map(|from| present(&mut world, from, &first).success().ticket().unwrap());
    assert!(lost.iter().enumerate().all(|(n, ticket)| !lost[..n].contains(ticket) && *ticket != first));
    assert_eq!(speaks(&mut world, elsewhere(1)), Outcome::Drop(DropReason::NoAllocation));
    // Late data from the old 5-tuple proves nothing about the new one.
    assert!(speaks(&mut world, client(40_000)).goes_to_peer());
    let last = present(&mut world, elsewhere(3), &first).success().ticket().unwrap();
    for superseded in &lost {
        assert_eq!(present(&mut world, elsewhere(4), superseded).code(), Some(400));
    }
    assert!(speaks(&mut world, elsewhere(3)).goes_to_peer());
    assert_eq!(reaches(&mut world, relay), elsewhere(3));
    assert_eq!(present(&mut world, elsewhere(4), &first).code(), Some(400));
    present(&mut world, elsewhere(4), &last).success();
}

#[test]
fn a_ticket_lost_with_its_stream_is_valid_until_data_arrives() {
    let (mut world, relay, first) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    for port in [41_001, 41_002, 41_003] {
        present(&mut world, stream(port), &first).success();
        assert_eq!(reaches(&mut world, relay), stream(port), "moved immediately");
        world.server.disconnected(world.now, &stream(port));
    }
    // The server might not yet have noticed the end of the stream.
    present(&mut world, stream(41_004), &first).success();
    let last = present(&mut world, stream(41_005), &first).success().ticket().unwrap();
    assert!(speaks(&mut world, stream(41_005)).goes_to_peer());
    world.server.disconnected(world.now, &stream(41_005));
    assert_eq!(present(&mut world, stream(41_006), &first).code(), Some(400));
    present(&mut world, stream(41_006), &last).success();
    // If data arrives after the move, the next ticket is spent too.
    assert!(speaks(&mut world, stream(41_006)).goes_to_peer());
    assert_eq!(present(&mut world, stream(41_007), &last).code(), Some(400));
}

#[test]
fn a_ticket_of_a_removed_realm_is_useless_in_another() {
    let (mut world, _, ticket) = mobile();
    let renamed = ServerConfig { realm: "renamed.example".to_owned(), ..streams() };
    world.server.reconfigure(world.now, Arc::new(renamed));
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(present(&mut world, elsewhere(1), &ticket).code(), Some(437));
}

#[test]
fn a_ticket_is_useless_to_a_namesake_in_another_realm() {
    let (mut world, _, ticket) = mobile();
    let old =
        turnpike_turn::server::Realm { name: REALM.to_owned(), allow_sha256: true, username_anonymity: true };
    let both = ServerConfig { realm: "other.example".to_owned(), tenants: vec![old], ..streams() };
    world.server.reconfigure(world.now, Arc::new(both));
    assert_eq!(present(&mut world, elsewhere(2), &ticket).code(), Some(441));
    assert_eq!(world.server.allocations(), 1);
}

#[test]
fn a_retransmitted_family_deletion_repeats_the_next_ticket() {
    let mut world = World::with(streams());
    let alice = world.credentials("alice", Scheme::Md5);
    let dual =
        Ask::allocate().raw(TICKET, &[]).with(&turn::AdditionalAddressFamily::new(AddressFamily::IPV6));
    let ticket = world.ask(&dual.signed(&alice)).success().ticket().unwrap();
    world.client = elsewhere(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let end =
        Ask::refresh(0).with(&turn::RequestedAddressFamily::new(AddressFamily::IPV4)).raw(TICKET, &ticket);
    let end = end.signed(&alice);
    let reply = world.ask(&end).success();
    let next = reply.ticket().expect("a ticket for the remaining family");
    assert_eq!(world.ask(&end), reply);
    present(&mut world, elsewhere(2), &next).success();
}

#[test]
fn effects_of_an_absent_client_omit_its_address() {
    let (mut world, _, ticket) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    present(&mut world, elsewhere(1), &ticket).success();
    let effects = world.effects();
    assert!(
        matches!(effects[..], [Effect::Moved { was: None, client, .. }] if client == elsewhere(1)),
        "{effects:?}"
    );
    let (mut world, _, ticket) = from(stream(41_000));
    present(&mut world, elsewhere(1), &ticket).success();
    world.server.disconnected(world.now, &stream(41_000));
    assert!(matches!(world.effects()[..], [Effect::Moved { was: None, .. }]));
    // The effect of the expiry omits the client's address too, unless the client is present.
    let (mut world, ..) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    world.sleep(600);
    assert!(matches!(world.effects()[..], [Effect::Closed { away: true, .. }]));
    let (mut world, ..) = from(stream(41_000));
    world.sleep(600);
    assert!(matches!(world.effects()[..], [Effect::Closed { away: false, .. }]));
}

#[test]
fn a_ticket_from_the_current_address_is_400() {
    let (mut world, _, ticket) = mobile();
    let here = world.client;
    assert_eq!(present(&mut world, here, &ticket).code(), Some(400));
    let next = present(&mut world, elsewhere(1), &ticket).success().ticket().unwrap();
    assert_eq!(present(&mut world, elsewhere(1), &next).code(), Some(400));
    assert_eq!(present(&mut world, here, &next).code(), Some(400));
    present(&mut world, elsewhere(2), &next).success();
}

#[test]
fn only_its_user_can_move_an_allocation() {
    let (mut world, relay, ticket) = mobile();
    let old = world.client;
    world.client = elsewhere(1);
    assert_eq!(world.ask(&Ask::present(&ticket)).code(), Some(401));
    assert_eq!(world.ask_as("bob", Ask::present(&ticket)).code(), Some(441));
    assert_eq!(world.server.stats().credentials_refused[4], 1);
    assert_eq!(speaks(&mut world, elsewhere(1)), Outcome::Drop(DropReason::NoAllocation));
    assert_eq!(reaches(&mut world, relay), old);
    present(&mut world, elsewhere(1), &ticket).success();
}

#[test]
fn forged_tickets_are_refused() {
    let (mut world, _, ticket) = mobile();
    world.client = elsewhere(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let mut forgeries: Vec<Vec<u8>> = (0..ticket.len()).map(|length| ticket[..length].to_vec()).collect();
    forgeries.push([&ticket[..], &[0]].concat());
    forgeries.extend((0..ticket.len()).map(|at| {
        let mut forged = ticket.clone();
        forged[at] ^= 0x10;
        forged
    }));
    forgeries.push(vec![0; 700]);
    for forged in &forgeries {
        assert_eq!(world.ask(&Ask::present(forged).signed(&alice)).code(), Some(400));
    }
    assert_eq!(counted(&world, MobilityEvent::TicketInvalid), forgeries.len() as u64);
    let bytes = Ask::present(&ticket).signed(&alice).bytes();
    for length in 0..bytes.len() {
        assert!(matches!(world.feed(&bytes[..length]), Outcome::Drop(_)), "{length}");
    }
    world.ask(&Ask::present(&ticket).signed(&alice)).success();
}

#[test]
fn a_ticket_of_an_ended_allocation_is_437() {
    let (mut world, _, ticket) = mobile();
    world.sleep(600);
    assert_eq!(present(&mut world, elsewhere(1), &ticket).code(), Some(437));
}

#[test]
fn a_5_tuple_has_at_most_one_allocation() {
    let (mut world, _, ticket) = mobile();
    world.client = elsewhere(1);
    let (alice, _) = world.allocated();
    assert_eq!(world.ask(&Ask::present(&ticket).signed(&alice)).code(), Some(437));
    present(&mut world, elsewhere(2), &ticket).success();
    assert_eq!(world.ask_as("alice", Ask::allocate()).code(), Some(437));
    assert_eq!(world.server.policy_mut().held(), 2);
}

#[test]
fn lifetime_zero_from_a_new_address_ends_the_allocation() {
    let (mut world, _, ticket) = mobile();
    world.client = elsewhere(1);
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::refresh(0).raw(TICKET, &ticket).signed(&alice);
    let reply = world.ask(&ask).success();
    assert_eq!((reply.lifetime(), reply.ticket()), (0, None));
    assert_eq!(world.server.policy_mut().held(), 0);
    assert!(matches!(&world.effects()[..], [Effect::Closed { reason: ClosedReason::Deleted, .. }]));
    assert_eq!(world.ask(&ask), reply);
}

#[test]
fn a_mobile_allocation_outlives_its_stream_until_it_expires() {
    let (mut world, relay, _) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!(world.effects(), []);
    assert_eq!(counted(&world, MobilityEvent::Kept), 1);
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::ClientAway));
    let unreachable = IcmpError { icmp_type: 3, code: 1, info: 0 };
    let icmp = world.server.data.from_icmp(world.now, relay, address(PEER), unreachable);
    assert_eq!(Outcome::from(icmp), Outcome::Drop(DropReason::ClientAway));
    world.sleep(599);
    assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (1, 1));
    world.sleep(1);
    assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (0, 0));
    assert!(matches!(&world.effects()[..], [Effect::Closed { reason: ClosedReason::Expired, .. }]));
}

#[test]
fn a_non_mobile_allocation_ends_with_its_stream() {
    let mut world = World::with(streams());
    world.client = stream(41_000);
    world.allocated();
    world.server.disconnected(world.now, &stream(41_001));
    assert_eq!(world.server.allocations(), 1);
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (0, 0));
    assert!(matches!(&world.effects()[..], [Effect::Closed { reason: ClosedReason::Disconnected, .. }]));
}

#[test]
fn a_stream_that_ends_while_its_relay_opens_leaves_nothing() {
    let mut world = World::with(streams());
    world.client = stream(41_000);
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::allocate().raw(TICKET, &[]).signed(&alice);
    world.feed(&ask.bytes()).opens();
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (0, 0));
}

#[test]
fn an_allocation_without_a_stream_moves_immediately() {
    let (mut world, relay, ticket) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    present(&mut world, elsewhere(1), &ticket).success();
    assert_eq!(reaches(&mut world, relay), elsewhere(1));
    assert!(matches!(&world.effects()[..], [Effect::Moved { .. }]));
}

#[test]
fn the_end_of_the_old_stream_completes_a_pending_move() {
    let (mut world, relay, ticket) = from(stream(41_000));
    present(&mut world, elsewhere(1), &ticket).success();
    assert_eq!(reaches(&mut world, relay), stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!(reaches(&mut world, relay), elsewhere(1));
}

#[test]
fn the_end_of_the_new_stream_cancels_a_pending_move() {
    let (mut world, relay, ticket) = mobile();
    let next = present(&mut world, stream(41_000), &ticket).success().ticket().unwrap();
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!(reaches(&mut world, relay), client(40_000));
    assert_eq!(speaks(&mut world, stream(41_000)), Outcome::Drop(DropReason::NoAllocation));
    present(&mut world, elsewhere(1), &next).success();
    assert!(speaks(&mut world, elsewhere(1)).goes_to_peer());
}

#[test]
fn a_new_client_on_an_old_address_does_not_get_the_old_allocation() {
    let (mut world, relay, ticket) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!(speaks(&mut world, stream(41_000)), Outcome::Drop(DropReason::NoAllocation));
    let bob = world.credentials("bob", Scheme::Md5);
    assert_eq!(world.ask(&Ask::permit(PEER).signed(&bob)).code(), Some(437));
    world.ask(&Ask::allocate().signed(&bob)).success();
    let other = world.last_opened();
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::ClientAway));
    present(&mut world, elsewhere(1), &ticket).success();
    assert_eq!(reaches(&mut world, relay), elsewhere(1));
    world.server.close_one(world.now, relay.allocation, ClosedReason::Administrator);
    world.client = stream(41_000);
    let bob = world.credentials("bob", Scheme::Md5);
    world.ask(&Ask::permit(PEER).signed(&bob)).success();
    assert!(world.peer_sends(other, PEER, b"x").goes_to_client());
    world.ask(&Ask::refresh(0).signed(&bob)).success();
    assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (0, 0));
}

#[test]
fn a_client_may_return_to_the_address_of_its_stream() {
    let (mut world, relay, ticket) = from(stream(41_000));
    world.server.disconnected(world.now, &stream(41_000));
    present(&mut world, stream(41_000), &ticket).success();
    assert_eq!(reaches(&mut world, relay), stream(41_000));
    assert!(speaks(&mut world, stream(41_000)).goes_to_peer());
}

#[test]
fn connections_to_peers_outlive_the_control_connection() {
    let mut world = World::with(streams());
    world.client = stream(41_000);
    let alice = world.credentials("alice", Scheme::Md5);
    let reply = world.ask(&Ask::allocate_tcp().raw(TICKET, &[]).signed(&alice)).success();
    let relay = world.last_opened();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    let connection = world.connected(&alice, PEER);
    world.server.disconnected(world.now, &stream(41_000));
    assert_eq!(
        world.peer_connects(relay, "198.41.0.4:9"),
        FromPeer::Refused(ConnectionRefusal::ClientAway),
        "no client to notify"
    );
    let ticket = reply.ticket().unwrap();
    assert_eq!(present(&mut world, elsewhere(1), &ticket).code(), Some(400));
    let there = Client { listener: ListenerId(2), ..elsewhere(2) };
    present(&mut world, there, &ticket).success();
    assert_eq!(world.server.connections(), 1);
    let FromPeer::Accepted { client, .. } = world.peer_connects(relay, "198.41.0.4:9") else { panic!() };
    assert_eq!(client, there);
    world.client = stream(5);
    let alice = world.credentials("alice", Scheme::Md5);
    let bind = Ask::connection_bind(connection).signed(&alice).bytes();
    assert!(matches!(world.feed(&bind), Outcome::Bind { .. }));
}

#[test]
fn unknown_clients_cost_no_memory_despite_pending_moves() {
    let (mut world, _, ticket) = mobile();
    present(&mut world, elsewhere(1), &ticket).success();
    let message = channel_data(0x4000, &[7; 120]);
    let now = world.now;
    let server = &mut world.server;
    let counted = allocation_counter::measure(|| {
        for port in 1..1000 {
            std::hint::black_box(server.from_client(now, &client(port).into(), &message));
        }
    });
    assert_eq!(counted.count_total, 0);
}

/// The nonce from the client's old address lets a ticket pass but does not verify the new address.
#[test]
fn a_wrong_password_with_a_ticket_is_not_logged_for_the_address() {
    let (mut world, _, ticket) = mobile();
    let mut alice = world.credentials("alice", Scheme::Md5);
    alice.password = "guess".to_owned();
    let guess = Ask::present(&ticket).signed(&alice);
    world.effects();
    world.client.address = address("198.51.100.9:5000");
    assert_eq!(world.ask(&guess).code(), Some(401));
    assert_eq!(world.effects(), [], "the address may be forged");
    assert_eq!(world.server.stats().credentials_refused[2], 1);
    world.client = client(40_000);
    assert_eq!(world.ask(&guess).code(), Some(401));
    assert!(matches!(world.effects()[..], [Effect::Refused { why: CredentialRefusal::WrongKey, .. }]));
}
