//! Administrator's view of an allocation, and allocation IDs.

use crate::common::*;

#[test]
fn a_view_shows_bindings_and_their_remaining_time() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::permit("198.41.0.9:0").signed(&alice)).success();
    world.feed(&channel_data(0x4000, b"seven b"));
    world.peer_sends(relay, PEER, b"x");
    world.sleep(100);
    assert_eq!(world.server.slots(), 1);
    let client = world.client;
    let view = world.server.view(world.now, 0).expect("an open allocation");
    assert_eq!((view.allocation(), view.client(), &**view.realm()), (relay.allocation, client, REALM));
    assert_eq!((view.username(), view.identity()), ("alice", "alice"));
    assert_eq!((view.transport(), view.relay_transport()), (Transport::Udp, RelayTransport::Udp));
    assert_eq!((view.is_mobile(), view.is_away(), view.connections()), (false, false, 0));
    assert_eq!(view.age_ms(), 100_000);
    let relayed: Vec<_> = view.relayed().collect();
    assert_eq!(relayed, [(address("203.0.113.1:50002"), 500_000)]);
    let mut permissions: Vec<_> = view.permissions().collect();
    permissions.sort_unstable();
    assert_eq!(permissions, [(address(PEER).ip(), 500_000), (address("198.41.0.9:0").ip(), 200_000)]);
    let channels: Vec<_> = view.channels().collect();
    assert_eq!(channels, [(0x4000, address(PEER), 500_000)]);
    assert_eq!((view.to_peer(), view.to_client()), ((1, 7), (1, 1)));
}

#[test]
fn an_allocation_is_visible_while_its_sockets_are_open() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.server.slots(), 0);
    assert!(matches!(world.feed(&Ask::allocate().signed(&alice).bytes()), Outcome::Open(_)));
    assert!(world.server.view(world.now, 0).is_none(), "the allocation's sockets are still opening");
    let (alice, _) = {
        world.client = client(40_001);
        world.allocated()
    };
    assert!(world.server.view(world.now, 1).is_some());
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert!(world.server.view(world.now, 1).is_none());
    assert!(world.server.view(world.now, 2).is_none(), "no such slot");
}

#[test]
fn the_allocation_id_is_in_the_first_and_last_effect() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&Ask::allocate().signed(&alice)).success();
    let seen = world.server.view(world.now, 0).expect("an open allocation").id();
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    let effects = world.effects();
    let [Effect::Opened { id: opened, .. }, Effect::Closed { id: closed, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!([*opened, *closed], [seen; 2]);
    let (_, next) = world.allocated();
    let next = world.server.view(world.now, next.allocation.index).expect("an open allocation").id();
    assert_ne!(next, seen, "a new allocation in the same slot");
}

/// Tests moves within this process; `server_moved` tests moves to other processes.
#[test]
fn the_allocation_id_moves_to_another_worker() {
    let mut workers = World::workers(&streams(), 2);
    let (from, to) = workers.split_at_mut(1);
    let (here, there) = (&mut from[0], &mut to[0]);
    let ticket = here.ask_as("alice", Ask::allocate().raw(TICKET, &[])).success().ticket().unwrap();
    let relay = here.last_opened();
    let name = here.server.view(here.now, relay.allocation.index).expect("an open allocation").id();
    let moved_to = client(40_009);
    there.client = moved_to;
    let alice = there.credentials("alice", Scheme::Md5);
    let refresh = Ask::present(&ticket).signed(&alice).bytes();
    assert_eq!(there.feed(&refresh), Outcome::Forward { worker: 0, occupied: false });
    let (_, pending_move) = here.forwarded(1, moved_to, &refresh);
    there.server.expect(pending_move.expect("a pending move"));
    let Outcome::Move(request) = there.feed(&channel_data(0x4000, b"x")) else { panic!("no move") };
    let moved = here.server.export(here.now, &request).expect("a pending move");
    assert!(here.server.view(here.now, relay.allocation.index).is_none());
    let allocation = there.server.import(there.now, moved).expect("a free 5-tuple");
    let view = there.server.view(there.now, allocation.index).expect("an open allocation");
    assert_eq!((view.id(), view.is_mobile()), (name, true));
    assert_eq!(there.server.stats().mobility[MobilityEvent::Imported as usize], 1);
}
