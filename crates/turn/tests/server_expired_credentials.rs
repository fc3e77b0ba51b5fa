//! Time-limited credentials that expire during an allocation, and the limit on refusals to one allocation.

use crate::{common::*, server_mobility_workers::Workers};
use turnpike_turn::server::LookupResult;

fn world(config: ServerConfig) -> World {
    let mut world = World::with(config);
    world.server.policy_mut().timed_until = world.now.unix + 60;
    world
}

fn timed(world: &mut World) -> Credentials {
    world.credentials("timed", Scheme::Md5)
}

fn allocated(world: &mut World) -> Credentials {
    let timed = timed(world);
    world.ask(&Ask::allocate().signed(&timed)).success();
    timed
}

#[test]
fn an_allocation_outlives_its_expired_credential() {
    let mut world = world(ServerConfig { nonce_lifetime: 60, ..config() });
    let mut timed = allocated(&mut world);
    for round in 0..12 {
        world.sleep(61);
        // The nonce is stale each time, and the client gets a new one.
        let stale = world.ask(&Ask::refresh(600).signed(&timed));
        assert_eq!(stale.code(), Some(438), "round {round}");
        timed.nonce = world.credentials("timed", Scheme::Md5).nonce;
        assert_eq!(world.ask(&Ask::refresh(600).signed(&timed)).success().lifetime(), 600);
        world.ask(&Ask::permit(PEER).signed(&timed)).success();
        world.ask(&Ask::bind(0x4000, PEER).signed(&timed)).success();
    }
    assert_eq!(world.refusals(), []);
    let deletion = Ask::refresh(0).signed(&timed);
    assert_eq!(world.ask(&deletion).success().lifetime(), 0);
    assert_eq!(world.ask(&deletion).success().lifetime(), 0, "same response to the retransmission");
    assert_eq!(closed(&mut world), [(ClosedReason::Deleted, 61_000 * 12)]);
}

#[test]
fn an_expired_credential_cannot_allocate() {
    let mut world = world(config());
    let timed = timed(&mut world);
    let allocate = Ask::allocate().signed(&timed);
    world.ask(&allocate).success();
    world.sleep(63);
    world.ask(&allocate).success();
    assert_eq!(world.ask(&Ask::allocate().signed(&timed)).code(), Some(437), "the 5-tuple has an allocation");
    world.client = client(40_001);
    let refused = world.ask(&Ask::allocate().signed(&timed));
    assert_eq!(refused.code(), Some(401));
    assert_eq!(world.refusals(), [CredentialRefusal::Expired { ago: 3 }]);
    assert_eq!(world.ask(&Ask::refresh(600).signed(&timed)).code(), Some(437));
    // An expired credential does not give access to another user's allocation either.
    world.allocated();
    assert_eq!(world.ask_as("timed", Ask::refresh(0)).code(), Some(441));
    assert_eq!(world.server.allocations(), 2);
}

#[test]
fn a_wrong_key_is_refused_despite_an_existing_allocation() {
    let mut world = world(config());
    let mut timed = allocated(&mut world);
    timed.password = "of another secret".to_owned();
    assert_eq!(world.ask(&Ask::refresh(0).signed(&timed)).code(), Some(401));
    assert_eq!(world.server.allocations(), 1);
}

#[test]
fn an_asynchronous_store_gives_the_same_results() {
    let mut world = world(config());
    world.server.policy_mut().later = true;
    let timed = timed(&mut world);
    let until = world.now.unix + 60;
    let answer = |world: &mut World, ask: &Ask| {
        let Outcome::LookUp(asked) = world.feed(&ask.bytes()) else { panic!() };
        let key = Key::long_term(KeyAlgorithm::Md5, "timed", REALM, password("timed").as_bytes());
        let (username, identity) = ("timed".into(), "timed".into());
        world.found(asked.lookup, LookupResult::Keys { username, identity, keys: vec![(key, Some(until))] })
    };
    let request = answer(&mut world, &Ask::allocate().signed(&timed)).opens();
    world.open(&request).success();
    world.sleep(100);
    answer(&mut world, &Ask::permit(PEER).signed(&timed)).reply().success();
    world.client = client(40_001);
    assert_eq!(answer(&mut world, &Ask::allocate().signed(&timed)).reply().code(), Some(401));
    assert_eq!(world.refusals(), [CredentialRefusal::Expired { ago: 40 }]);
}

#[test]
fn connections_are_made_and_bound_after_credential_expiry() {
    let mut world = world(streams());
    world.client = stream(41_000);
    let timed = timed(&mut world);
    world.ask(&Ask::allocate_tcp().signed(&timed)).success();
    world.sleep(100);
    let connection = world.connected(&timed, PEER);
    world.client = stream(41_001);
    let bound = world.feed_as("timed", Ask::connection_bind(connection));
    assert!(matches!(bound, Outcome::Bind { .. }), "{bound:?}");
}

#[test]
fn an_allocation_moves_after_its_credential_has_expired() {
    let mut workers = Workers::new(2);
    for world in &mut workers.0 {
        world.server.policy_mut().timed_until = world.now.unix + 60;
    }
    let home = &mut workers.0[0];
    let reply = home.ask_as("timed", Ask::allocate().raw(TICKET, &[])).success();
    let ticket = reply.ticket().expect("a requested ticket");
    workers.sleep(100);
    for (worker, port) in [(0, 40_500), (1, 40_501)] {
        let world = &mut workers.0[worker];
        world.client = client(port);
        let presented = world.feed_as("timed", Ask::present(&ticket));
        match worker {
            0 => assert!(matches!(presented, Outcome::Reply(reply) if Reply(reply.clone()).is_success())),
            _ => assert!(matches!(presented, Outcome::Forward { worker: 0, .. })),
        }
    }
}

#[test]
fn an_allocation_ends_with_its_credential_if_configured() {
    let ending = ServerConfig {
        limits: ServerLimits { end_with_credential: true, ..ServerLimits::default() },
        ..config()
    };
    let mut world = world(ending.clone());
    let timed = timed(&mut world);
    assert_eq!(world.ask(&Ask::allocate().signed(&timed)).success().lifetime(), 60);
    world.sleep(20);
    assert_eq!(world.ask(&Ask::refresh(600).signed(&timed)).success().lifetime(), 40);
    world.ask(&Ask::bind(0x4000, PEER).signed(&timed)).success();
    // The limit also applies in a process that takes over.
    let mut there = World::with(ending);
    there.now.unix = world.now.unix;
    there.server.policy_mut().timed_until = world.server.policy_mut().timed_until;
    let id = world.last_opened().allocation;
    let moved = world.server.snapshot(world.now, id).expect("an open allocation");
    there.server.restore(there.now, moved, Link::default()).expect("below all quotas");
    for world in [&mut world, &mut there] {
        world.effects();
        world.sleep(39);
        assert_eq!(world.ask(&Ask::refresh(600).signed(&timed)).success().lifetime(), 2);
        world.ask(&Ask::permit(PEER).signed(&timed)).success();
        assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
        world.sleep(1);
        assert_eq!(closed(world), [(ClosedReason::Credential, 60_000)]);
    }
    // Credentials without expiry are not limited.
    let (alice, _) = world.allocated();
    assert_eq!(world.ask(&Ask::refresh(3600).signed(&alice)).success().lifetime(), 3600);
}

#[test]
fn a_reload_ends_allocations_at_the_expiry_of_their_credential() {
    // A timer whose deadline has already passed fires one second later.
    for (slept, lived) in [(20, 60_000), (100, 101_000)] {
        let mut world = world(config());
        let timed = allocated(&mut world);
        world.ask(&Ask::refresh(600).signed(&timed)).success();
        world.sleep(slept);
        let ending = ServerConfig {
            limits: ServerLimits { end_with_credential: true, ..ServerLimits::default() },
            ..config()
        };
        world.server.reconfigure(world.now, Arc::new(ending));
        world.sleep(lived / 1000 - slept);
        assert_eq!(closed(&mut world), [(ClosedReason::Credential, lived)]);
    }
}

#[test]
fn the_lowest_lifetime_in_a_response_is_two_seconds() {
    let mut world = world(ServerConfig {
        limits: ServerLimits { end_with_credential: true, ..ServerLimits::default() },
        ..config()
    });
    let timed = timed(&mut world);
    world.sleep(59);
    assert_eq!(world.ask(&Ask::allocate().signed(&timed)).success().lifetime(), 2);
    world.effects();
    world.sleep(1);
    assert_eq!(closed(&mut world), [(ClosedReason::Credential, 1000)], "the allocation lasted one second");
}

/// An attacker with a forged address never sees the client's nonce.
#[test]
fn a_forged_address_does_not_use_up_a_clients_refusals() {
    let mut world = World::with(ServerConfig { nonce_lifetime: 60, ..config() });
    let (alice, _) = world.allocated();
    let forged = Credentials { nonce: "guess".to_owned(), password: "guess".to_owned(), ..alice.clone() };
    let forged = Ask::refresh(600).signed(&forged).bytes();
    world.sleep(61);
    let last = (0..200).map(|_| world.feed(&forged)).last();
    assert_eq!(last, Some(Outcome::Drop(DropReason::RefusalRepeated)));
    assert_eq!(world.ask(&Ask::refresh(600).signed(&alice)).code(), Some(438));
}

/// When a ChannelBind is refused, libnice immediately sends the next one.
#[test]
fn repeated_refusals_are_bounded_per_allocation_and_cause() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    let denied = Ask::bind(0x4000, "10.0.0.1:7000").signed(&alice).bytes();
    let answered = |world: &mut World| {
        let outcomes: Vec<Outcome> = (0..20_000).map(|_| world.feed(&denied)).collect();
        let (replies, dropped): (Vec<_>, Vec<_>) =
            outcomes.into_iter().partition(|outcome| matches!(outcome, Outcome::Reply(_)));
        assert!(dropped.iter().all(|outcome| *outcome == Outcome::Drop(DropReason::RefusalRepeated)));
        replies.len()
    };
    assert_eq!(answered(&mut world), 100);
    assert_eq!(world.dropped(DropReason::RefusalRepeated), 19_900);
    // Requests for another peer, with another error, with another method, and a successful one.
    assert_eq!(world.ask(&Ask::bind(0x4000, "10.0.0.2:7000").signed(&alice)).code(), Some(403));
    let mut wrong = alice.clone();
    wrong.password = "guess".to_owned();
    assert_eq!(world.ask(&Ask::bind(0x4000, PEER).signed(&wrong)).code(), Some(401));
    assert_eq!(world.ask(&Ask::permit("10.0.0.1:7000").signed(&alice)).code(), Some(403));
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.client = client(40_001);
    assert_eq!(world.ask(&Ask::bind(0x4000, "10.0.0.1:7000").signed(&alice)).code(), Some(437));
    let (bob, _) = world.allocated();
    assert_eq!(world.ask(&Ask::bind(0x4000, "10.0.0.1:7000").signed(&bob)).code(), Some(403));
    world.client = client(40_000);
    world.sleep(1);
    assert_eq!(answered(&mut world), 10);
    // The client keeps asking after its allocation has ended.
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert_eq!(answered(&mut world), 100, "437 is a different refusal");
}

#[test]
fn repeated_refusals_over_a_stream_slow_it_down() {
    let mut world = World::with(streams());
    let (alice, _) = world.allocated_tcp();
    world.effects();
    let denied = Ask::connect("10.0.0.1:7000").signed(&alice);
    for number in 0..110 {
        assert_eq!(world.ask(&denied).code(), Some(403));
        let until_ms = world.now.ms + 100;
        let slowed = world.effects().iter().any(
            |effect| matches!(effect, Effect::Slow { client, until_ms: until } if *client == world.client && *until == until_ms),
        );
        assert_eq!(slowed, number >= 100, "refusal {number}");
    }
    assert_eq!(world.ask(&Ask::connect("10.0.0.2:7000").signed(&alice)).code(), Some(403));
    assert!(
        !world.effects().iter().any(|effect| matches!(effect, Effect::Slow { .. })),
        "a different refusal"
    );
}
