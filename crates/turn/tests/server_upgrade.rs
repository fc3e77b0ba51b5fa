//! Cases of an in-place upgrade that the scenarios of `model` do not cover.

use crate::common::*;

#[test]
fn a_pending_move_completes_in_the_new_process() {
    for workers in [1, 2] {
        let mut here = World::workers(&config(), workers);
        let last = here.len() - 1;
        let alice = here[0].credentials("alice", Scheme::Md5);
        let reply = here[0].ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
        let relay = here[0].last_opened();
        here[0].ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
        // The client presents its ticket to the worker of its new address; then another process takes over.
        let present = Ask::present(&reply.ticket().unwrap()).signed(&alice).bytes();
        let new = client(50_001);
        if workers == 1 {
            here[0].client = new;
            assert!(matches!(here[0].feed(&present), Outcome::Reply(_)));
        } else {
            let (outcome, pending_move) = here[0].forwarded(1, new, &present);
            assert!(matches!(outcome, Outcome::Reply(_)), "{outcome:?}");
            here[1].server.expect(pending_move.expect("a pending move"));
        }
        let mut there = World::workers(&config(), workers);
        for (here, there) in here.iter_mut().zip(&mut there) {
            there.now.ms = 77_000;
            for pending_move in here.server.expected() {
                let text = serde_json::to_string(&pending_move).unwrap();
                there.server.expect(serde_json::from_str(&text).unwrap());
            }
        }
        let (before, now) = (here[0].now, there[0].now);
        let moved = here[0].server.snapshot(before, relay.allocation).expect("an open allocation");
        let restored = there[0].server.restore(now, moved, Link(0)).unwrap_or_else(|_| panic!());
        there[last].client = new;
        let outcome = there[last].feed(&channel_data(0x4000, b"here I am"));
        if workers == 1 {
            assert!(matches!(outcome, Outcome::ToPeer { relay, .. } if relay.allocation == restored));
            assert_eq!(there[0].server.stats().mobility[MobilityEvent::Moved as usize], 1);
        } else {
            let Outcome::Move(request) = outcome else { panic!("{outcome:?}") };
            let now = there[0].now;
            let moved = there[0].server.export(now, &request).expect("a pending move");
            assert!(there[1].server.import(now, moved).is_ok());
        }
    }
}

#[test]
fn a_bandwidth_limit_continues_in_the_new_process() {
    let config = || {
        let rates = Rates { per_allocation: Some(8_000_000), ..Rates::default() };
        ServerConfig { bandwidth: Bandwidth { rates, burst_ms: 100, ..Bandwidth::default() }, ..config() }
    };
    let passing = |world: &mut World| {
        let datagram = channel_data(0x4000, &[7; 1000]);
        (0..1000).take_while(|_| matches!(world.feed(&datagram), Outcome::ToPeer { .. })).count()
    };
    let mut here = World::with(config());
    let (alice, relay) = here.allocated();
    here.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(passing(&mut here), 100);
    here.now.ms += 30;
    let moved = here.server.snapshot(here.now, relay.allocation).expect("an open allocation");
    let text = serde_json::to_string(&moved).unwrap();
    let mut there = World::with(config());
    there.now.ms = 123_456;
    there.client = here.client;
    let moved: Moved = serde_json::from_str(&text).unwrap();
    there.server.restore(there.now, moved, Link(0)).unwrap_or_else(|_| panic!("not restored"));
    there.all_effects();
    there.now.ms += 5;
    assert_eq!(passing(&mut there), 35);
}

#[test]
fn allocations_tied_to_their_process_are_not_portable() {
    let mut here = World::with(streams());
    let is_datagrams = |link: Link| link == Link(0);
    let (_, udp) = here.allocated();
    here.client = stream(41_500);
    let bob = here.credentials("bob", Scheme::Md5);
    let allocate = Ask::allocate().raw(TICKET, &[]).signed(&bob).bytes();
    let source = turnpike_turn::server::Source { client: here.client, link: Link(9) };
    here.server.from_client(here.now, &source, &allocate);
    let Some(Effect::Open(request)) = here.server.poll_effect() else { panic!() };
    assert_eq!(here.server.portable(|_| true).len(), 1, "an allocation still opening is not portable");
    here.open(&request).success();
    here.allocated_tcp();
    assert_eq!(here.server.portable(is_datagrams), [udp.allocation]);
    // A mobile allocation whose connection is closed does not depend on its process.
    here.server.disconnected(here.now, &source.client);
    assert_eq!(here.server.portable(is_datagrams), [udp.allocation, request.allocation]);
    let moved = here.server.snapshot(here.now, request.allocation).expect("an open allocation");
    let mut there = World::with(streams());
    assert!(moved.was().is_none());
    let allocation = there.server.restore(there.now, moved, Link(0)).expect("below all quotas");
    assert_eq!(
        there.peer_sends(RelayId { allocation, ..udp }, PEER, b"x"),
        Outcome::Drop(DropReason::ClientAway)
    );
}

#[test]
fn the_old_process_drops_requests_waiting_for_credentials() {
    let mut here = World::with_policy(
        config(),
        TestPolicy { per_user: 10, total: 10, later: true, ..TestPolicy::default() },
    );
    let Outcome::LookUp(query) = here.feed_as("alice", Ask::allocate()) else { panic!() };
    here.server.forget_lookups(|link| link != Link(0));
    assert!(here.server.poll_timeout().is_some(), "a waiting lookup");
    here.server.forget_lookups(|link| link == Link(0));
    assert!(here.server.poll_timeout().is_none());
    let found = here.found(query.lookup, turnpike_turn::server::LookupResult::NoSuchUser);
    assert!(matches!(found, Outcome::Drop(_) | Outcome::Later), "{found:?}");
}

/// The previous version serialized two worker numbers, and a time for the pending move.
#[test]
fn a_mobile_allocation_from_the_previous_version_continues() {
    let mut here = World::with(config());
    let alice = here.credentials("alice", Scheme::Md5);
    let reply = here.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
    let relay = here.last_opened();
    let moved = here.server.snapshot(here.now, relay.allocation).expect("an open allocation");
    let mut written = serde_json::to_value(&moved).unwrap();
    let mobility = written["1"]["mobility"].as_object_mut().expect("a mobile allocation");
    mobility.extend([("via".to_owned(), 1.into()), ("owner".to_owned(), 0.into())]);
    let moved: Moved = serde_json::from_value(written).unwrap();
    let mut there = World::with(config());
    let restored = there.server.restore(there.now, moved, Link(0)).unwrap_or_else(|_| panic!("not restored"));
    there.client = client(50_001);
    there.ask(&Ask::present(&reply.ticket().unwrap()).signed(&alice)).success();
    assert!(there.server.close_one(there.now, restored, ClosedReason::Administrator));

    let mut workers = World::workers(&config(), 2);
    let ticket = { workers[0].ask_as("alice", Ask::allocate().raw(TICKET, &[])).success().ticket().unwrap() };
    let present = Ask::present(&ticket).signed(&workers[0].credentials("alice", Scheme::Md5)).bytes();
    let (_, pending_move) = workers[0].forwarded(1, client(50_001), &present);
    let mut written = serde_json::to_value(pending_move.expect("a pending move")).unwrap();
    written["patience_ms"] = 600_000.into();
    workers[1].server.expect(serde_json::from_value(written).unwrap());
    assert_eq!(workers[1].server.expected().len(), 1);
}
