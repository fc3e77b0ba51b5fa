//! Requests of clients that are known, and refused all the same: what is told of them, and of whom nothing is told. And how many clients each
//! listener has.

use crate::common::*;
use turnpike_turn::server::{
    ClosedReason, Effect, ListenerId, OpenResult, RelayTransport, RequestRefusal, ServerConfig,
    request::Method,
};

/// What was told since the last time.
fn told(world: &mut World) -> Vec<(String, Method, u16, RequestRefusal)> {
    let told = world.all_effects().into_iter().filter_map(|effect| match effect {
        Effect::RequestRefused { client, realm, username, method, code, why, .. } => {
            assert_eq!((client, &*realm), (world.client, REALM));
            Some((username.into_string(), method, code, why))
        }
        _ => None,
    });
    told.collect()
}

fn of_alice(method: Method, code: u16, why: RequestRefusal) -> Vec<(String, Method, u16, RequestRefusal)> {
    vec![("alice".to_owned(), method, code, why)]
}

#[test]
fn each_reason_is_told_with_the_code_of_the_answer() {
    let gate = TestGate { per_user: 1, total: 2, ..TestGate::default() };
    let mut world = World::with_gate(ServerConfig { max_permissions: 1, max_channels: 1, ..config() }, gate);
    let (alice, _) = world.allocated();
    assert_eq!(told(&mut world), []);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    for (ask, method, code, why) in [
        (Ask::permit("198.41.0.9:0"), Method::CreatePermission, 508, RequestRefusal::Permissions),
        (Ask::bind(0x4001, PEER), Method::ChannelBind, 400, RequestRefusal::Code),
        (Ask::bind(0x4001, "198.41.0.9:9"), Method::ChannelBind, 508, RequestRefusal::Channels),
        (Ask::allocate(), Method::Allocate, 437, RequestRefusal::Code),
    ] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(code));
        assert_eq!(told(&mut world), of_alice(method, code, why));
    }
    world.client = client(2);
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(486));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 486, RequestRefusal::UserQuota));
    assert_eq!(world.ask(&Ask::refresh(600).signed(&alice)).code(), Some(437));
    assert_eq!(told(&mut world), of_alice(Method::Refresh, 437, RequestRefusal::Code));
    world.server.gate_mut().relayed = vec![(world.client.address, RelayTransport::Udp)];
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(403));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 403, RequestRefusal::Loop));
    world.server.gate_mut().relayed.clear();
    (world.server.gate_mut().per_user, world.server.gate_mut().total) = (2, 1);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(508));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 508, RequestRefusal::TotalQuota));
    world.server.set_draining(true);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(508));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 508, RequestRefusal::Draining));
}

#[test]
fn a_relayed_address_that_cannot_be_had_is_told_of_its_user() {
    for (result, code, why) in [
        (OpenResult::NoCapacity, 508, RequestRefusal::NoRelay),
        (OpenResult::UnsupportedFamily, 440, RequestRefusal::Code),
    ] {
        let mut world = World::new();
        let alice = world.credentials("alice", Scheme::Md5);
        let Outcome::Open(request) = world.feed(&Ask::allocate().signed(&alice).bytes()) else { panic!() };
        assert_eq!(world.opened(request.allocation, result, None).code(), Some(code));
        assert_eq!(told(&mut world), of_alice(Method::Allocate, code, why));
    }
}

#[test]
fn of_who_has_not_proved_who_he_is_nothing_is_told_nor_twice_of_a_peer_or_a_wrong_user() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.all_effects();
    assert_eq!(world.ask(&Ask::allocate()).code(), Some(401));
    assert_eq!(world.ask(&Ask::permit("127.0.0.1:0").signed(&alice)).code(), Some(403));
    let bob = world.credentials("bob", Scheme::Md5);
    assert_eq!(world.ask(&Ask::refresh(600).signed(&bob)).code(), Some(441));
    let effects = world.all_effects();
    assert!(
        matches!(effects[..], [Effect::PeerRefused { .. }, Effect::Refused { .. }]),
        "each as what it is: {effects:?}"
    );
}

#[test]
fn a_client_that_asks_again_and_again_is_told_of_at_a_bounded_rate() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let refresh = Ask::refresh(600).signed(&alice);
    for _ in 0..500 {
        assert_eq!(world.ask(&refresh).code(), Some(437));
    }
    assert_eq!(told(&mut world).len(), 20);
    world.sleep(1);
    world.ask(&refresh);
    let effects = world.all_effects();
    assert!(matches!(effects[..], [Effect::RequestRefused { suppressed: 480, .. }]), "{effects:?}");
}

#[test]
fn each_listener_knows_how_many_clients_it_has() {
    let mut world = World::with(ServerConfig { mobility: true, ..streams() });
    assert!(world.server.allocations_by_listener().is_empty());
    let (_, of_first) = world.allocated();
    world.client = client(2);
    let alice = world.credentials("alice", Scheme::Md5);
    let ticket = world.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success().ticket().unwrap();
    let relay = world.last_opened();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.server.allocations_by_listener(), [2]);
    // The second takes its allocation along to TCP.
    world.client = stream(3);
    assert_eq!(world.client.listener, ListenerId(1));
    world.ask(&Ask::present(&ticket).signed(&alice)).success();
    assert_eq!(world.server.allocations_by_listener(), [2], "it has not moved before data comes");
    assert!(matches!(world.feed(&channel_data(0x4000, b"data")), Outcome::ToPeer { .. }));
    assert_eq!(world.server.allocations_by_listener(), [1, 1]);
    for allocation in [of_first.allocation, relay.allocation] {
        assert!(world.server.close_one(world.now, allocation, ClosedReason::Shutdown));
    }
    assert_eq!(world.server.allocations_by_listener(), [0, 0]);
}
