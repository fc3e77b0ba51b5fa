//! Nonces issued to another address: ports and requests for which they are valid (RFC 6062, RFC 8016).

use crate::common::*;
use turnpike_turn::server::ConnectionId;

fn stream_elsewhere(port: u16) -> Client {
    Client { address: address(&format!("198.18.0.1:{port}")), ..stream(port) }
}

fn elsewhere(port: u16) -> Client {
    Client { address: address(&format!("198.18.0.1:{port}")), ..client(port) }
}

fn code(outcome: &Outcome) -> Option<u16> {
    let (Outcome::Reply(bytes) | Outcome::Bind { bytes, .. }) = outcome else { panic!("{outcome:?}") };
    Reply(bytes.clone()).code()
}

/// Alice has a control connection to worker 0, and an unbound connection to a peer.
fn waiting(workers: u16) -> (Vec<World>, Credentials, ConnectionId) {
    let mut workers = World::workers(&streams(), workers);
    let (alice, _) = workers[0].allocated_tcp();
    let connection = workers[0].connected(&alice, PEER);
    (workers, alice, connection)
}

fn bind_at(world: &mut World, who: &Credentials, from: Client, connection: ConnectionId) -> Outcome {
    world.client = from;
    world.feed(&Ask::connection_bind(connection).signed(who).bytes())
}

#[test]
fn a_nonce_is_valid_on_every_port_of_its_address() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    world.client = client(40_001);
    world.ask(&Ask::allocate().signed(&alice)).success();
    let v6 = |ip: &str| Client { address: address(ip), ..client(1) };
    world.client = v6("[2001:db8::7]:1000");
    let alice = world.credentials("alice", Scheme::Md5);
    world.client = v6("[2001:db8::7:8:9]:2000");
    world.ask(&Ask::allocate().signed(&alice)).success();
    world.client = v6("[2001:db8:0:1::7]:1000");
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(438), "another /64");
}

#[test]
fn the_nonce_of_the_control_connection_binds_a_data_connection() {
    for from in [stream(42_000), stream_elsewhere(42_000)] {
        let (mut workers, alice, connection) = waiting(1);
        let outcome = bind_at(&mut workers[0], &alice, from, connection);
        assert!(matches!(outcome, Outcome::Bind { client, .. } if client == from), "{outcome:?}");
    }
}

#[test]
fn a_data_connection_from_elsewhere_is_bound_by_its_worker() {
    let (mut workers, alice, connection) = waiting(2);
    let from = stream_elsewhere(42_000);
    let outcome = bind_at(&mut workers[1], &alice, from, connection);
    assert_eq!(outcome, Outcome::HandOver { worker: 0 });
    let bytes = Ask::connection_bind(connection).signed(&alice).bytes();
    let owner = &mut workers[0];
    let outcome = owner.handed_over(from, &bytes);
    assert!(matches!(outcome, Outcome::Bind { client, .. } if client == from), "{outcome:?}");
}

/// A request that only the owner can judge is passed to the owner, but has no effect without valid
/// credentials.
#[test]
fn a_guessed_password_or_nonce_does_not_bind_a_stream() {
    let (mut workers, alice, connection) = waiting(2);
    let guess = Credentials { password: "guess".to_owned(), ..alice.clone() };
    let refused = bind_at(&mut workers[1], &guess, stream_elsewhere(42_000), connection);
    assert_eq!(code(&refused), Some(438));
    assert!(workers[1].effects().is_empty(), "nothing to log");
    assert_eq!(workers[1].server.stats().credentials_refused.iter().sum::<u64>(), 0);
    let forged = Credentials { nonce: "obMatJos2wAAAAAAAAAAAAAAAAAA".to_owned(), ..alice.clone() };
    let from = stream_elsewhere(42_001);
    assert_eq!(bind_at(&mut workers[1], &forged, from, connection), Outcome::HandOver { worker: 0 });
    assert_eq!(code(&bind_at(&mut workers[0], &forged, from, connection)), Some(438));
    // A nonce issued to another address is not valid for an unknown connection or over datagrams either.
    let none = ConnectionId(connection.0 ^ 1);
    assert_eq!(code(&bind_at(&mut workers[0], &alice, from, none)), Some(438));
    assert_eq!(code(&bind_at(&mut workers[0], &alice, elsewhere(1), connection)), Some(438));
    assert_eq!(code(&bind_at(&mut workers[1], &alice, elsewhere(1), connection)), Some(438));
}

#[test]
fn a_stale_control_connection_nonce_is_438_elsewhere_too() {
    let (mut workers, alice, _) = waiting(1);
    let world = &mut workers[0];
    world.now.unix += 3590;
    let connection = world.connected(&alice, "198.41.0.4:7001");
    world.now.unix += 11;
    assert_eq!(code(&bind_at(world, &alice, stream_elsewhere(42_000), connection)), Some(438));
}

fn mobile(world: &mut World) -> (Credentials, Vec<u8>) {
    let alice = world.credentials("alice", Scheme::Md5);
    let reply = world.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
    (alice, reply.ticket().expect("a requested ticket"))
}

#[test]
fn a_ticket_is_accepted_with_the_nonce_of_the_old_address() {
    let mut world = World::new();
    let (alice, ticket) = mobile(&mut world);
    world.client = elsewhere(1);
    let next = world.ask(&Ask::present(&ticket).signed(&alice)).success().ticket().unwrap();
    // The next tickets are presented before any data arrives from the new address, with the nonce of either
    // address.
    world.client = client(50_000);
    let next = world.ask(&Ask::present(&next).signed(&alice)).success().ticket().unwrap();
    world.client = elsewhere(2);
    let there = world.credentials("alice", Scheme::Md5);
    let next = {
        world.client = elsewhere(3);
        world.ask(&Ask::present(&next).signed(&there)).success().ticket().unwrap()
    };
    world.client = Client { address: address("198.19.0.1:1"), ..client(1) };
    world.ask(&Ask::present(&next).signed(&there)).success();
}

#[test]
fn a_retransmitted_refresh_from_a_new_address_is_answered() {
    let mut world = World::new();
    let (alice, ticket) = mobile(&mut world);
    world.client = elsewhere(1);
    let ask = Ask::present(&ticket).signed(&alice);
    let first = world.ask(&ask).success();
    assert_eq!(world.ask(&ask), first);
}

/// An eavesdropper's copy comes too late.
#[test]
fn a_copy_of_a_refresh_from_a_third_address_is_438() {
    let mut world = World::new();
    let (alice, ticket) = mobile(&mut world);
    let copy = Ask::present(&ticket).signed(&alice);
    world.client = elsewhere(1);
    world.ask(&copy).success();
    world.client = Client { address: address("203.0.113.66:1"), ..client(1) };
    assert_eq!(world.ask(&copy).code(), Some(438));
}

#[test]
fn a_nonce_of_another_address_is_invalid_for_other_requests() {
    let mut world = World::new();
    let (alice, ticket) = mobile(&mut world);
    world.client = elsewhere(1);
    for ask in [
        Ask::allocate(),
        Ask::refresh(600),
        Ask::permit(PEER),
        Ask::bind(0x4000, PEER),
        Ask::connect(PEER),
        Ask::present(&[7; 32]),
        Ask::allocate().raw(TICKET, &ticket),
    ] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(438));
    }
}

#[test]
fn a_ticket_reaches_its_owner_with_the_nonce_of_the_old_address() {
    let mut workers = World::workers(&config(), 2);
    let (alice, ticket) = mobile(&mut workers[0]);
    let new = elsewhere(1);
    let [owner, here] = &mut workers[..] else { panic!() };
    here.client = new;
    let guess = Credentials { password: "guess".to_owned(), ..alice.clone() };
    assert_eq!(here.ask(&Ask::present(&ticket).signed(&guess)).code(), Some(438));
    assert!(here.effects().is_empty(), "nothing to log");
    let bytes = Ask::present(&ticket).signed(&alice).bytes();
    assert_eq!(here.feed(&bytes), Outcome::Forward { worker: 0, occupied: false });
    let (verdict, pending_move) = owner.forwarded(1, new, &bytes);
    assert!(verdict.reply().success().ticket().is_some());
    assert!(pending_move.is_some());
    let next = elsewhere(2);
    let forged = Credentials { nonce: "obMatJos2wAAAAAAAAAAAAAAAAAA".to_owned(), ..alice };
    let bytes = Ask::present(&ticket).signed(&forged).bytes();
    let (verdict, pending_move) = owner.forwarded(1, next, &bytes);
    assert_eq!(code(&verdict), Some(438));
    assert!(pending_move.is_none());
}
