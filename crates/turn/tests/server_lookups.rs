//! Asynchronous credential lookups: the store's result resumes the request.

use crate::common::*;
use turnpike_turn::server::{CredentialQuery, OwnedUser, StoreFailure};
use turnpike_turn::wire::integrity::userhash;

use turnpike_turn::server::LookupResult;

fn world() -> World {
    later(streams())
}

fn later(config: ServerConfig) -> World {
    let policy = TestPolicy { per_user: 1000, total: 1000, later: true, ..TestPolicy::default() };
    World::with_policy(config, policy)
}

#[track_caller]
fn query(outcome: Outcome) -> CredentialQuery {
    let Outcome::LookUp(query) = outcome else { panic!("{outcome:?}") };
    query
}

fn found(query: &CredentialQuery) -> LookupResult {
    let name = match &query.user {
        OwnedUser::Name(name) => name.clone(),
        OwnedUser::Hash(hash) => {
            assert_eq!(*hash, userhash("alice", &query.realm));
            "alice".into()
        }
    };
    let key = Key::long_term(query.algorithm, &name, &query.realm, password(&name).as_bytes());
    let wrong = Key::from_bytes(b"of last year");
    LookupResult::Keys { username: name.clone(), identity: name, keys: vec![(wrong, None), (key, None)] }
}

#[track_caller]
fn answered(world: &mut World, ask: &Ask) -> Reply {
    let query = query(world.feed(&ask.bytes()));
    let credentials = found(&query);
    match world.found(query.lookup, credentials) {
        Outcome::Reply(bytes) => Reply(bytes),
        Outcome::Open(request) => world.open(&request),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_is_answered_after_the_stores_result() {
    for scheme in [Scheme::Md5, Scheme::Sha256, Scheme::Userhash] {
        let mut world = world();
        let alice = world.credentials("alice", scheme);
        let asked = query(world.feed(&Ask::allocate().signed(&alice).bytes()));
        let algorithm = if scheme == Scheme::Md5 { KeyAlgorithm::Md5 } else { KeyAlgorithm::Sha256 };
        assert_eq!((&*asked.realm, asked.algorithm), (REALM, algorithm));
        assert_eq!(world.server.allocations(), 0, "no allocation yet");
        world.sleep(9);
        let request = world.found(asked.lookup, found(&asked)).opens();
        let reply = world.open(&request).success();
        assert!(reply.is_signed(&alice));
        answered(&mut world, &Ask::permit(PEER).signed(&alice)).success();
        answered(&mut world, &Ask::bind(0x4000, PEER).signed(&alice)).success();
        assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
        assert_eq!(world.server.poll_timeout(), Some(world.now.ms + 300_000), "no lookup is pending");
    }
}

#[test]
fn refusals_by_the_store_get_the_usual_response() {
    let another = |until_unix| LookupResult::Keys {
        username: "alice".into(),
        identity: "alice".into(),
        keys: vec![(Key::from_bytes(b"another"), until_unix)],
    };
    let (expired, wrong) = (another(Some(world().now.unix - 7)), another(None));
    for (credentials, refusal) in [
        (LookupResult::NoSuchUser, CredentialRefusal::NoSuchUser),
        (expired, CredentialRefusal::Expired { ago: 7 }),
        (wrong, CredentialRefusal::WrongKey),
    ] {
        let mut world = world();
        let asked = query(world.feed_as("alice", Ask::allocate()));
        assert_eq!(world.found(asked.lookup, credentials).reply().code(), Some(401));
        let effects = world.effects();
        assert!(matches!(effects[..], [Effect::Refused { why, .. }] if why == refusal), "{effects:?}");
    }
}

#[test]
fn a_retransmission_causes_one_lookup_and_one_response() {
    let mut world = world();
    let alice = world.credentials("alice", Scheme::Md5);
    let allocate = Ask::allocate().signed(&alice).bytes();
    let asked = query(world.feed(&allocate));
    for _ in 0..5 {
        assert_eq!(world.feed(&allocate), Outcome::Drop(DropReason::LookupPending));
    }
    assert_eq!(world.server.policy_mut().lookups.get(), 6, "the policy returned NeedsLookup each time");
    let other = query(world.feed(&Ask::allocate().signed(&alice).bytes()));
    assert_ne!(asked.lookup, other.lookup);
    let request = world.found(asked.lookup, found(&asked)).opens();
    world.open(&request).success();
    assert_eq!(
        world.found(other.lookup, found(&other)).reply().code(),
        Some(437),
        "the 5-tuple has an allocation by now"
    );
    assert_eq!(world.server.allocations(), 1);
    assert_eq!(world.found(asked.lookup, found(&asked)), Outcome::Drop(DropReason::LookupOver), "once");
}

#[test]
fn an_allocate_over_a_stream_waits_for_store_and_fleet() {
    let policy = || TestPolicy { total: 0, undecided: true, later: true, ..TestPolicy::default() };
    let again = |world: &mut World| {
        assert_eq!(world.server.poll_timeout(), Some(world.now.ms + 100));
        world.now.ms += 100;
        let (lookup, credentials) = world.server.next_finished_lookup(world.now).expect("a due result");
        world.found(lookup, credentials)
    };
    let begun = |client: Client| {
        let mut world = World::with_policy(streams(), TestPolicy { per_user: 10, ..policy() });
        world.client = client;
        let alice = world.credentials("alice", Scheme::Sha256);
        let asked = query(world.feed(&Ask::allocate().signed(&alice).bytes()));
        let outcome = world.found(asked.lookup, found(&asked));
        (world, outcome)
    };
    for (granted, shared) in [(true, false), (false, true)] {
        let (mut world, outcome) = begun(stream(3));
        let requests = world.server.stats().requests;
        assert_eq!([outcome, again(&mut world), again(&mut world)], [const { Outcome::Later }; 3]);
        assert_eq!(world.server.policy_mut().lookups.get(), 1, "the store is queried once");
        world.server.policy_mut().undecided = false;
        (world.server.policy_mut().total, world.server.policy_mut().shared) = (usize::from(granted), shared);
        match again(&mut world) {
            Outcome::Open(request) => _ = world.open(&request).success(),
            Outcome::Reply(bytes) => assert_eq!((Reply(bytes).code(), granted), (Some(508), false)),
            other => panic!("{other:?}"),
        }
        assert_eq!(world.server.stats().requests, requests);
        assert!(world.server.next_finished_lookup(world.now).is_none());
    }
    let (mut world, _) = begun(stream(3));
    for _ in 0..99 {
        assert_eq!(again(&mut world), Outcome::Later);
    }
    world.sleep(1);
    assert!(world.server.next_finished_lookup(world.now).is_none() && world.server.poll_timeout().is_none());
    assert_eq!(world.dropped(DropReason::LookupOver), 1);
    assert_eq!(begun(client(3)).1, Outcome::Drop(DropReason::QuotaPending));
}

#[test]
fn an_unanswered_lookup_expires_after_ten_seconds() {
    let mut world = world();
    let alice = world.credentials("alice", Scheme::Md5);
    let allocate = Ask::allocate().signed(&alice).bytes();
    let asked = query(world.feed(&allocate));
    assert_eq!(world.server.poll_timeout(), Some(world.now.ms + 10_000));
    world.sleep(10);
    assert_eq!((world.dropped(DropReason::LookupOver), world.server.poll_timeout()), (1, None));
    let again = query(world.feed(&allocate));
    assert_eq!(world.found(asked.lookup, found(&asked)), Outcome::Drop(DropReason::LookupOver));
    assert!(matches!(world.found(again.lookup, found(&again)), Outcome::Open(_)));
}

#[test]
fn allocation_time_is_measured_from_the_request() {
    let mut world = world();
    let asked = query(world.feed_as("alice", Ask::allocate()));
    world.now.ms += 40;
    let request = world.found(asked.lookup, found(&asked)).opens();
    world.open(&request).success();
    let stats = world.server.stats();
    assert_eq!((stats.allocation_times[4], stats.allocation_ms), (1, 40), "within 50 ms");
    assert_eq!(stats.allocation_times.iter().sum::<u64>(), stats.allocations_opened);
}

#[test]
fn a_failed_lookup_gets_500_or_no_response() {
    for (store_failure, transport) in [
        (StoreFailure::Answer, client(2)),
        (StoreFailure::Answer, stream(41_000)),
        (StoreFailure::Drop, client(2)),
    ] {
        let mut world = later(ServerConfig { store_failure, ..streams() });
        world.client = transport;
        let bob = world.credentials("bob", Scheme::Md5);
        let asked = query(world.feed(&Ask::allocate().signed(&bob).bytes()));
        match (store_failure, world.found(asked.lookup, LookupResult::Unavailable)) {
            (StoreFailure::Answer, Outcome::Reply(bytes)) => {
                let reply = Reply(bytes);
                assert_eq!(reply.code(), Some(500));
                assert!(!reply.is_signed(&bob), "the key is unknown");
                let told = world.all_effects();
                assert!(
                    matches!(
                        &told[..],
                        [Effect::RequestRefused { username, code: 500, why: RequestRefusal::Store, .. }] if &**username == "bob"
                    ),
                    "{told:?}"
                );
            }
            (StoreFailure::Drop, outcome) => assert_eq!(outcome, Outcome::Drop(DropReason::LookupOver)),
            (_, outcome) => panic!("{outcome:?}"),
        }
        assert_eq!((world.server.allocations(), world.server.poll_timeout()), (0, None));
        answered(&mut world, &Ask::allocate().signed(&bob)).success();
    }
}

#[test]
fn a_full_lookup_table_means_500_over_streams_and_no_response_over_udp() {
    for (at, store_failure, is_told) in [
        (stream as fn(u16) -> Client, StoreFailure::Answer, true),
        (stream, StoreFailure::Drop, false),
        (client, StoreFailure::Answer, false),
    ] {
        let mut world = later(ServerConfig { store_failure, ..streams() });
        world.client = at(1);
        let alice = world.credentials("alice", Scheme::Md5);
        let mut asked = Vec::new();
        for port in 1..=512 {
            world.client = at(port);
            asked.push(query(world.feed(&Ask::allocate().signed(&alice).bytes())));
        }
        world.client = at(513);
        match world.feed(&Ask::allocate().signed(&alice).bytes()) {
            Outcome::Reply(bytes) => assert_eq!((Reply(bytes).code(), is_told), (Some(500), true)),
            outcome => assert_eq!((outcome, is_told), (Outcome::Drop(DropReason::LookupLimit), false)),
        }
        let first = asked.remove(0);
        world.client = at(1);
        assert!(matches!(world.found(first.lookup, found(&first)), Outcome::Open(_)));
        world.client = at(513);
        query(world.feed(&Ask::allocate().signed(&alice).bytes()));
    }
}

#[test]
fn a_nonce_may_turn_stale_during_the_lookup() {
    let mut world = later(ServerConfig { nonce_lifetime: 5, ..config() });
    let asked = query(world.feed_as("alice", Ask::allocate()));
    world.sleep(6);
    assert_eq!(world.found(asked.lookup, found(&asked)).reply().code(), Some(438));
}

#[test]
fn a_request_without_a_valid_nonce_causes_no_lookup() {
    let mut world = world();
    let alice = world.credentials("alice", Scheme::Md5);
    let stolen = Ask::allocate().signed(&alice).bytes();
    let code = |outcome: Outcome| match outcome {
        Outcome::Reply(bytes) => Reply(bytes).code(),
        other => panic!("{other:?}"),
    };
    for port in 1..=2000 {
        world.client.address = address(&format!("198.18.{}.1:{port}", port % 250));
        assert_eq!(code(world.feed(&stolen)), Some(438), "nonce of another address");
        let mut forged = alice.clone();
        forged.nonce = format!("obMatJos2gAAA{:015}", port);
        assert_eq!(code(world.feed(&Ask::allocate().signed(&forged).bytes())), Some(438));
        let ticket = [7; 32];
        assert_eq!(code(world.feed(&Ask::present(&ticket).signed(&alice).bytes())), Some(438));
    }
    assert!(!world.effects().iter().any(|effect| matches!(effect, Effect::LookUp(_))));
    assert_eq!(world.server.poll_timeout(), None);
    // A stale nonce causes no lookup either.
    world.client = client(40_000);
    world.sleep(3601);
    assert_eq!(code(world.feed(&stolen)), Some(438));
    assert_eq!(world.server.poll_timeout(), None);
}

#[test]
fn lookups_are_limited_per_address_and_in_total() {
    let mut world = world();
    let mut waiting = Vec::new();
    let ask = |world: &mut World, waiting: &mut Vec<_>, ip: String, times: u16| {
        let mut dropped = 0;
        for port in 1..=times {
            world.client.address = address(&format!("{ip}:{port}"));
            match world.feed_as("alice", Ask::allocate()) {
                Outcome::LookUp(query) => waiting.push(query.lookup),
                Outcome::Drop(DropReason::LookupLimit) => dropped += 1,
                other => panic!("{other:?}"),
            }
        }
        dropped
    };
    assert_eq!(ask(&mut world, &mut waiting, "198.18.0.1".to_owned(), 600), 88, "half of the table");
    assert_eq!(ask(&mut world, &mut waiting, "198.18.0.2".to_owned(), 1), 0, "another address finds room");
    for host in 3..=40 {
        ask(&mut world, &mut waiting, format!("198.18.0.{host}"), 32);
    }
    assert_eq!(waiting.len(), 1024);
    assert_eq!(ask(&mut world, &mut waiting, "198.18.1.1".to_owned(), 1), 1);
    let lookup = waiting[0];
    world.found(lookup, LookupResult::NoSuchUser);
    world.client.address = address("198.18.1.1:9");
    query(world.feed_as("alice", Ask::allocate()));
    world.sleep(10);
    assert_eq!(world.dropped(DropReason::LookupOver), 1024);
    assert_eq!(world.server.poll_timeout(), None);
}

#[test]
fn a_response_returns_through_the_forwarding_worker() {
    let policy = TestPolicy { per_user: 10, total: 10, ..TestPolicy::default() };
    let mut workers: Vec<World> = World::workers_with(&streams(), 2, &policy);
    let alice = workers[0].credentials("alice", Scheme::Md5);
    let ticket = workers[0].ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success().ticket().unwrap();
    workers.iter_mut().for_each(|world| world.server.policy_mut().later = true);
    let there = client(50_000);
    workers[1].client = there;
    let bytes = Ask::present(&ticket).signed(&alice).bytes();
    let asked = query(workers[1].feed(&bytes));
    assert_eq!(
        workers[1].found(asked.lookup, found(&asked)),
        Outcome::Forward { worker: 0, occupied: false }
    );
    let (outcome, pending_move) = workers[0].forwarded(1, there, &bytes);
    assert_eq!(pending_move, None);
    let asked = query(outcome);
    assert_eq!(workers[0].found(asked.lookup, found(&asked)), Outcome::Later);
    let effects = workers[0].effects();
    let [Effect::Opened { .. }, Effect::Answer { via: 1, source, pending_move: Some(_), reply }] =
        &effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!(source.client, there);
    Reply(reply.to_vec()).success();
}

#[test]
fn a_client_that_disconnects_while_waiting_gets_no_response() {
    let mut world = world();
    world.client = stream(41_000);
    assert_eq!(streams().listeners[1].transport, Transport::Tcp);
    let asked = query(world.feed_as("alice", Ask::allocate_tcp()));
    world.server.disconnected(world.now, &stream(41_000));
    let late = world.found(asked.lookup, found(&asked));
    assert_eq!(late, Outcome::Drop(DropReason::LookupOver));
    assert_eq!(world.server.allocations(), 0);
    world.server.close_all(world.now, ClosedReason::Shutdown);
}
