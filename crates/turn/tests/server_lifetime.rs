//! Lifetimes, Refresh, expiry and retransmission (RFC 8656 sections 7.2 and 8).

use crate::common::{turn::*, *};

#[test]
fn the_granted_lifetime_is_between_default_and_maximum() {
    for (asked, granted) in
        [(0, 600), (1, 600), (600, 600), (601, 601), (3600, 3600), (3601, 3600), (u32::MAX, 3600)]
    {
        let mut world = World::new();
        let alice = world.credentials("alice", Scheme::Md5);
        let reply = world.ask(&Ask::allocate().with(&Lifetime::new(asked)).signed(&alice)).success();
        assert_eq!(reply.lifetime(), granted, "Allocate {asked}");
        if asked > 0 {
            assert_eq!(
                world.ask(&Ask::refresh(asked).signed(&alice)).success().lifetime(),
                granted,
                "Refresh {asked}"
            );
        }
    }
}

#[test]
fn an_allocation_expires_without_a_refresh() {
    let mut world = World::new();
    let (_, relay) = world.allocated();
    assert_eq!(world.server.poll_timeout(), Some(world.now.ms + 600_000));
    world.sleep(599);
    assert_eq!(world.server.allocations(), 1);
    world.sleep(1);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(closed(&mut world), [(ClosedReason::Expired, 600_000)]);
    assert_eq!(world.server.policy_mut().held(), 0);
    assert_eq!(world.server.poll_timeout(), None);
    assert_eq!(world.peer_sends(relay, PEER, b"x"), Outcome::Drop(DropReason::StaleRelay));
}

#[test]
fn a_refresh_sets_the_lifetime_from_now_and_may_shorten_it() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.sleep(500);
    world.ask(&Ask::refresh(3600).signed(&alice)).success();
    world.sleep(3000);
    assert_eq!(world.server.allocations(), 1);
    world.ask_as("alice", Ask::refresh(600)).success();
    world.sleep(599);
    assert_eq!(world.server.allocations(), 1);
    world.sleep(1);
    assert_eq!(world.server.allocations(), 0);
}

#[test]
fn refresh_without_lifetime_grants_the_default() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    assert_eq!(world.ask(&Ask::new(REFRESH).signed(&alice)).success().lifetime(), 600);
    assert_eq!(world.ask(&Ask::new(REFRESH).raw(0x000D, &[1]).signed(&alice)).code(), Some(400));
}

#[test]
fn a_retransmitted_deletion_gets_the_same_response() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.sleep(7);
    let ask = Ask::refresh(0).signed(&alice);
    let reply = world.ask(&ask).success();
    assert_eq!(reply.lifetime(), 0);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(closed(&mut world), [(ClosedReason::Deleted, 7000)]);
    assert_eq!(world.server.policy_mut().held(), 0);
    world.sleep(39);
    assert_eq!(world.ask(&ask), reply);
    assert_eq!(world.server.stats().retransmits, 1);
    // A different transaction, or a retransmission that arrives too late, finds no allocation.
    assert_eq!(world.ask(&Ask::refresh(0).signed(&alice)).code(), Some(437));
    world.sleep(1);
    assert_eq!(world.ask(&ask).code(), Some(437));
}

#[test]
fn a_retransmitted_allocate_gets_the_same_response() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Sha256);
    let ask =
        Ask::allocate().with(&EvenPort::new(true)).with(&Lifetime::new(1000)).signed(&alice).fingerprint();
    let reply = world.ask(&ask).success();
    for _ in 0..7 {
        world.sleep(5);
        assert_eq!(world.ask(&ask), reply);
    }
    assert_eq!(world.server.stats().retransmits, 7);
    assert_eq!(world.server.stats().allocations_opened, 1);
    assert_eq!(world.server.allocations(), 1);
    // Another user's request with the same transaction ID is not a retransmission.
    assert_eq!(world.ask_as("bob", ask).code(), Some(437));
}

#[test]
fn requests_without_an_allocation_are_437() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    for ask in [Ask::refresh(600), Ask::refresh(0), Ask::permit(PEER), Ask::bind(0x4000, PEER)] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(437));
    }
}

#[test]
fn another_user_cannot_change_the_allocation() {
    let mut world = World::new();
    world.allocated();
    let bob = world.credentials("bob", Scheme::Md5);
    for ask in [Ask::refresh(0), Ask::refresh(600), Ask::permit(PEER), Ask::bind(0x4000, PEER)] {
        let reply = world.ask(&ask.signed(&bob));
        assert_eq!(reply.code(), Some(441));
        assert!(reply.is_signed(&bob));
    }
    assert_eq!(world.server.allocations(), 1);
    assert_eq!(world.server.stats().credentials_refused[4], 4);
}

#[test]
fn an_index_is_reused_with_a_new_generation() {
    let mut world = World::new();
    let (alice, first) = world.allocated();
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    let (alice, second) = world.allocated();
    assert_eq!(first.allocation.index, second.allocation.index);
    assert_ne!(first.allocation.generation, second.allocation.generation);
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
    assert_eq!(world.peer_sends(first, PEER, b"x"), Outcome::Drop(DropReason::StaleRelay));
    assert!(world.peer_sends(second, PEER, b"x").goes_to_client());
}

#[test]
fn an_administrator_ends_one_allocation_and_a_shutdown_ends_all() {
    let mut world = World::new();
    let (_, first) = world.allocated();
    for port in 1..=3 {
        world.client = client(port);
        world.allocated();
    }
    assert!(world.server.close_one(world.now, first.allocation, ClosedReason::Administrator));
    assert!(!world.server.close_one(world.now, first.allocation, ClosedReason::Administrator));
    assert_eq!(closed(&mut world), [(ClosedReason::Administrator, 0)]);
    world.server.close_all(world.now, ClosedReason::Shutdown);
    assert_eq!(closed(&mut world), [(ClosedReason::Shutdown, 0); 3]);
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.policy_mut().held(), 0);
    assert_eq!(world.server.poll_timeout(), None);
    assert_eq!(world.server.stats().allocations_closed, [0, 0, 3, 1, 0, 0, 0, 0, 0]);
}

#[test]
fn a_closed_allocation_reports_its_relayed_address_and_transports() {
    for (listener, transport) in
        [Transport::Udp, Transport::Tcp, Transport::Tls, Transport::Dtls].into_iter().enumerate()
    {
        let mut world = World::with(streams());
        world.client.listener = ListenerId(u16::try_from(listener).unwrap());
        let alice = world.credentials("alice", Scheme::Md5);
        let told = world.ask(&Ask::allocate().signed(&alice)).success().relayed();
        world.effects();
        world.ask(&Ask::refresh(0).signed(&alice)).success();
        let effects = world.effects();
        let [Effect::Closed { relayed, transport: of, relay_transport, .. }] = &effects[..] else {
            panic!("{effects:?}")
        };
        assert_eq!(
            (relayed, *of, *relay_transport),
            (&[Some(told[0]), None], transport, RelayTransport::Udp)
        );
    }
    let mut world = World::with(streams());
    let (alice, _) = world.allocated_tcp();
    world.effects();
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    let effects = world.effects();
    assert!(
        matches!(&effects[..], [Effect::Closed { relay_transport: RelayTransport::Tcp, .. }]),
        "{effects:?}"
    );
}

#[test]
fn a_closed_allocation_reports_its_traffic() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.feed(&channel_data(0x4000, b"four"));
    world.feed(&Ask::send(PEER, b"seven77"));
    world.peer_sends(relay, PEER, b"three");
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert!(matches!(
        &world.effects()[..],
        [Effect::Closed { username, to_peer: (2, 11), to_client: (1, 5), .. }] if &**username == "alice"
    ));
    let stats = world.server.stats();
    assert_eq!((stats.to_peer_datagrams, stats.to_peer_bytes), (2, 11));
    assert_eq!((stats.to_client_datagrams, stats.to_client_bytes), (1, 5));
}

#[test]
fn lifetimes_follow_the_configuration() {
    let mut world = World::with(ServerConfig {
        limits: ServerLimits { default_lifetime: 60, max_lifetime: 120, ..ServerLimits::default() },
        ..config()
    });
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).success().lifetime(), 60);
    assert_eq!(world.ask(&Ask::refresh(3600).signed(&alice)).success().lifetime(), 120);
}
