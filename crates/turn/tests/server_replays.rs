//! A copied Allocate gets the original response on its 5-tuple, and is refused everywhere else.

use crate::common::*;

const EVEN_PORT: u16 = 0x0018;
const RESERVATION_TOKEN: u16 = 0x0022;

fn granted(world: &mut World) -> (Credentials, Ask) {
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::allocate().signed(&alice);
    world.ask(&ask).success();
    (alice, ask)
}

#[test]
fn a_copy_gets_the_same_response_while_the_allocation_exists() {
    let mut world = World::new();
    let (_, ask) = granted(&mut world);
    let reply = world.ask(&ask).success();
    world.sleep(599);
    assert_eq!(world.ask(&ask), reply);
    assert_eq!(world.server.allocations(), 1);
}

#[test]
fn a_copied_allocate_is_refused_after_its_allocation_ended() {
    for expire in [false, true] {
        let mut world = World::new();
        let (alice, ask) = granted(&mut world);
        if expire {
            world.sleep(601);
        } else {
            world.ask(&Ask::refresh(0).signed(&alice)).success();
        }
        for _ in 0..2 {
            assert_eq!(world.ask(&ask).code(), Some(438));
        }
        world.sleep(2000);
        assert_eq!(world.ask(&ask).code(), Some(438), "the copy's nonce is still valid");
        assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (0, 0));
    }
}

#[test]
fn a_client_may_allocate_again_with_its_nonce() {
    let mut world = World::new();
    let (alice, _) = granted(&mut world);
    for _ in 0..20 {
        world.ask(&Ask::refresh(0).signed(&alice)).success();
        world.ask(&Ask::allocate().signed(&alice)).success();
    }
}

/// Nonces are valid on every port of an address, and a port may belong to another worker.
#[test]
fn a_copy_from_another_port_is_refused_on_every_worker() {
    let mut workers = World::workers(&config(), 3);
    let (_, ask) = granted(&mut workers[0]);
    for (port, world) in (41_000..).zip(&mut workers) {
        world.client = client(port);
        assert_eq!(world.ask(&ask).code(), Some(438));
        assert_eq!(world.server.allocations(), usize::from(port == 41_000));
    }
    assert_eq!(workers[0].server.policy_mut().held(), 1);
}

#[test]
fn a_copy_from_a_mobile_clients_old_address_is_refused() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let ask = Ask::allocate().raw(TICKET, &[]).signed(&alice);
    let ticket = world.ask(&ask).success().ticket().unwrap();
    let old = world.client;
    world.client = Client { address: address("192.0.2.7:41000"), ..old };
    world.ask(&Ask::present(&ticket).signed(&alice)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert!(world.feed(&channel_data(0x4000, b"moves")).goes_to_peer());
    world.client = old;
    assert_eq!(world.ask(&ask).code(), Some(438));
    assert_eq!(world.server.allocations(), 1);
}

#[test]
fn a_copy_over_another_transport_is_refused() {
    let over = |listener, port| Client { listener: ListenerId(listener), ..client(port) };
    for listener in 0..4 {
        let mut workers = World::workers(&streams(), 2);
        workers[0].client = over(listener, 40_000);
        let (_, ask) = granted(&mut workers[0]);
        for (other, port) in (0..4).zip(41_000..) {
            for world in &mut workers {
                world.client = over(other, port);
                assert_eq!(world.ask(&ask).code(), Some(438), "{listener}, then {other}");
            }
        }
        assert_eq!(workers[0].server.policy_mut().held(), 1);
    }
}

#[test]
fn a_copy_cannot_take_a_reserved_port() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let pair = Ask::allocate().raw(EVEN_PORT, &[0x80]).signed(&alice);
    let token = world.ask(&pair).success().raw(RESERVATION_TOKEN).expect("a requested token");
    world.client = client(41_000);
    let ask = Ask::allocate().raw(RESERVATION_TOKEN, &token).signed(&alice);
    let request = world.feed(&ask.bytes()).opens();
    // The copy arrives while the port is being opened, and again afterwards.
    world.client = client(42_000);
    assert_eq!(world.ask(&ask).code(), Some(438));
    world.client = client(41_000);
    world.open(&request).success();
    world.client = client(42_000);
    assert_eq!(world.ask(&ask).code(), Some(438));
    assert_eq!(world.server.allocations(), 2);
}

#[test]
fn a_copy_of_a_connection_bind_is_refused() {
    let mut workers = World::workers(&streams(), 2);
    let (alice, _) = workers[0].allocated_tcp();
    let connection = workers[0].connected(&alice, PEER);
    let bytes = Ask::connection_bind(connection).signed(&alice).bytes();
    workers[0].client = stream(42_000);
    assert!(matches!(workers[0].feed(&bytes), Outcome::Bind { .. }));
    let refused =
        |outcome| matches!(outcome, Outcome::Reply(bytes) if Reply(bytes.clone()).code() == Some(400));
    workers[0].client = stream(42_001);
    assert!(refused(workers[0].feed(&bytes)));
    workers[1].client = stream(42_002);
    assert_eq!(workers[1].feed(&bytes), Outcome::HandOver { worker: 0 });
    assert!(refused(workers[0].handed_over(stream(42_002), &bytes)));
    // A new connection to that peer has a different ID.
    let now = workers[0].now;
    workers[0].server.connection_ended(now, connection, 0, 0);
    workers[0].client = stream(41_000);
    assert_ne!(workers[0].connected(&alice, PEER), connection);
    workers[0].client = stream(42_003);
    assert!(refused(workers[0].feed(&bytes)));
}

#[test]
fn granted_requests_are_remembered_across_a_reload() {
    let mut world = World::new();
    let (alice, ask) = granted(&mut world);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    world.server.reconfigure(
        world.now,
        Arc::new(ServerConfig {
            limits: ServerLimits { max_lifetime: 4000, ..ServerLimits::default() },
            ..config()
        }),
    );
    assert_eq!(world.ask(&ask).code(), Some(438));
}

#[test]
fn a_refused_request_may_be_resent_unchanged() {
    let policy = TestPolicy { per_user: 1, total: 1000, ..TestPolicy::default() };
    let mut world = World::with_policy(config(), policy);
    let (alice, _) = granted(&mut world);
    world.client = client(41_000);
    let ask = Ask::allocate().signed(&alice);
    assert_eq!(world.ask(&ask).code(), Some(486));
    assert_eq!(world.ask(&ask).code(), Some(486));
    world.client = client(40_000);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    world.client = client(41_000);
    world.ask(&ask).success();
}
