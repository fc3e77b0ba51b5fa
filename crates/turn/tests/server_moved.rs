//! Serialized allocations: a restored one continues where it left off, and its secrets are never printed.

use crate::common::*;
use proptest::prelude::*;
use turn::{AdditionalAddressFamily, EvenPort};

fn another(config: ServerConfig) -> World {
    let mut world = World::with(config);
    world.now.ms = 5_000;
    world.ports = 60_000;
    world
}

fn written(moved: &Moved) -> String {
    serde_json::to_string(moved).unwrap()
}

fn carried(from: &mut World, allocation: AllocationSlot, to: &mut World) -> AllocationSlot {
    let moved = from.server.snapshot(from.now, allocation).expect("an open allocation");
    let text = written(&moved);
    let read: Moved = serde_json::from_str(&text).unwrap();
    assert_eq!(written(&read), text, "serialization must round-trip");
    drop(moved);
    to.client = from.client;
    to.now.unix = from.now.unix;
    to.server.restore(to.now, read, Link(7)).unwrap_or_else(|_| panic!("not restored"))
}

#[test]
fn channels_permissions_and_counters_move_with_the_allocation() {
    let mut here = World::new();
    let (alice, relay) = here.allocated();
    for n in 0..20 {
        here.ask(&Ask::bind(0x4000 + n, &format!("198.41.0.4:{}", 7000 + n)).signed(&alice)).success();
    }
    here.ask(&Ask::permit("198.41.0.9:0").signed(&alice)).success();
    here.ask(&Ask::refresh(3600).signed(&alice)).success();
    here.feed(&channel_data(0x4000, b"four"));
    here.sleep(100);
    let name = here.server.view(here.now, relay.allocation.index).unwrap().id();
    let mut there = another(config());
    let allocation = carried(&mut here, relay.allocation, &mut there);
    let told = there.all_effects();
    assert!(matches!(&told[0], Effect::Opened { username, link: Link(7), .. } if &**username == "alice"));
    assert!(matches!(told[0], Effect::Opened { id, .. } if id == name));
    let (permitted, bound): (Vec<_>, Vec<_>) =
        told[1..].iter().partition(|effect| matches!(effect, Effect::Permitted { .. }));
    assert_eq!((permitted.len(), bound.len()), (2, 20));
    assert_eq!(there.server.policy_mut().held(), 1);

    let relay = RelayId { allocation, ..relay };
    assert!(
        matches!(there.feed(&channel_data(0x4013, b"x")), Outcome::ToPeer { relay: of, .. } if of == relay)
    );
    let to_client = there.server.data.from_peer(there.now, relay, address("198.41.0.9:1"), b"x");
    assert!(matches!(to_client, Verdict::ToClient { link: Link(7), .. }));
    // 100 s of the permission's 300 s and of the channel's 600 s have passed.
    there.sleep(199);
    assert!(there.peer_sends(relay, "198.41.0.9:1", b"x").goes_to_client());
    there.sleep(1);
    let refused = Outcome::Drop(DropReason::NoPermission);
    assert_eq!(there.peer_sends(relay, "198.41.0.9:1", b"x"), refused);
    there.sleep(299);
    assert!(there.peer_sends(relay, "198.41.0.4:7019", b"x").goes_to_client());
    there.sleep(1);
    assert_eq!(there.peer_sends(relay, "198.41.0.4:7019", b"x"), refused);
    there.ask_as("alice", Ask::refresh(0)).success();
    let effects = there.effects();
    let [Effect::Closed { id, lived_ms, to_peer, to_client, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((*id, *lived_ms, *to_peer, to_client.0), (name, 600_000, (2, 5), 3));
    assert_eq!(there.server.policy_mut().held(), 0);
}

/// The permission ends before the channel in an older process, or in one configured this way.
#[test]
fn channels_permit_their_peers_in_the_new_process() {
    for gone in [100, 400] {
        let mut here = World::with(ServerConfig { channels_permit: false, ..config() });
        let (alice, relay) = here.allocated();
        here.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
        here.sleep(gone);
        let mut there = another(config());
        let relay = RelayId { allocation: carried(&mut here, relay.allocation, &mut there), ..relay };
        there.sleep(599 - gone);
        assert!(there.peer_sends(relay, PEER, b"x").goes_to_client(), "after {gone} s");
        assert!(there.feed(&Ask::send(PEER, b"x")).goes_to_peer(), "after {gone} s");
    }
}

#[test]
fn both_families_and_their_expiry_move_with_the_allocation() {
    let mut here = World::new();
    let alice = here.credentials("alice", Scheme::Md5);
    here.ask(&Ask::allocate().with(&AdditionalAddressFamily::new(AddressFamily::IPV6)).signed(&alice))
        .success();
    let relay = here.last_opened();
    here.ask(&Ask::refresh(1000).raw(0x0017, &[2, 0, 0, 0]).signed(&alice)).success();
    here.ask(&Ask::permit(PEER_V6).signed(&alice)).success();
    let mut there = another(config());
    let allocation = carried(&mut here, relay.allocation, &mut there);
    assert!(
        matches!(there.effects()[..], [Effect::Opened { relayed: (v4, Some(v6)), .. }] if v4.is_ipv4() && v6.is_ipv6())
    );
    there.sleep(600);
    assert_eq!(there.effects(), [Effect::RelayClosed { relay: RelayId { allocation, ..relay } }]);
    there.sleep(400);
    assert!(matches!(there.effects()[..], [Effect::Closed { .. }]));
}

#[test]
fn a_mobile_allocation_moves_with_its_clients_ticket() {
    let mut here = World::new();
    let alice = here.credentials("alice", Scheme::Md5);
    let first = here.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success().ticket().unwrap();
    let relay = here.last_opened();
    here.client = client(50_001);
    let ticket = here.ask(&Ask::present(&first).signed(&alice)).success().ticket().unwrap();
    here.feed(&channel_data(0x4000, b"x"));
    let mut there = another(config());
    carried(&mut here, relay.allocation, &mut there);
    there.client = client(50_002);
    assert_eq!(there.ask(&Ask::present(&first).signed(&alice)).code(), Some(400), "spent");
    let reply = there.ask(&Ask::present(&ticket).signed(&alice)).success();
    assert_ne!(reply.ticket().unwrap(), ticket);
}

#[test]
fn connections_in_any_stage_move_with_the_allocation() {
    let mut here = World::with(streams());
    let (alice, relay) = here.allocated_tcp();
    let waiting = here.connected(&alice, "198.41.0.4:1");
    let bound = here.connected(&alice, "198.41.0.4:2");
    here.client = stream(42_000);
    let bind = Ask::connection_bind(bound).signed(&alice).bytes();
    assert!(matches!(here.feed(&bind), Outcome::Bind { .. }));
    here.client = stream(41_000);
    let connecting = here.connecting(&Ask::connect("198.41.0.4:3").signed(&alice));
    here.sleep(10);

    let mut there = another(streams());
    let allocation = carried(&mut here, relay.allocation, &mut there);
    assert_eq!(there.server.connections(), 3);
    let request = turnpike_turn::server::ConnectRequest {
        relay: RelayId { allocation, ..connecting.relay },
        ..connecting
    };
    let reply = there.connect_result(&request, Ok(()));
    assert!(reply.success().is_signed(&alice), "the request's key must move with the connection");
    // 10 of the 30 s for a ConnectionBind have passed.
    there.sleep(19);
    there.effects();
    there.sleep(1);
    let closed = Effect::ConnectionClosed { allocation, connection: waiting };
    assert_eq!(there.effects(), [closed]);
    there.server.connection_ended(there.now, bound, 5, 6);
    assert_eq!(there.server.stats().connection_events[ConnectionEvent::Ended as usize], 1);
    assert_eq!(there.server.connections(), 1);
    // Connections whose numbers are taken in the new process, or belong to another worker, stay behind.
    let mut another_worker = World::workers(&streams(), 2).pop().unwrap();
    another_worker.now.ms = 77;
    carried(&mut here, relay.allocation, &mut another_worker);
    assert_eq!(another_worker.server.connections(), 0);
}

#[test]
fn a_refused_restore_returns_the_allocation() {
    let mut here = World::new();
    let (_, relay) = here.allocated();
    let moved = here.server.snapshot(here.now, relay.allocation).unwrap();
    let moved = here.server.restore(here.now, moved, Link(0)).expect_err("the 5-tuple is taken");
    let policy = TestPolicy { per_user: 0, total: 10, ..TestPolicy::default() };
    let mut full = World::with_policy(config(), policy);
    let moved = full.server.restore(full.now, moved, Link(0)).expect_err("alice is at her limit");
    assert_eq!(full.server.allocations(), 0);
    let mut elsewhere = World::with(ServerConfig { realm: "other.example".to_owned(), ..config() });
    let moved = elsewhere.server.restore(elsewhere.now, moved, Link(0)).expect_err("alice is unknown there");
    assert_eq!(moved.from(), relay.allocation);
}

#[test]
fn an_allocation_still_opening_has_no_snapshot() {
    let mut world = World::new();
    let request = world.feed_as("alice", Ask::allocate()).opens();
    assert!(world.server.snapshot(world.now, request.allocation).is_none());
}

#[test]
fn unknown_versions_and_invalid_data_are_refused() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    let text = written(&world.server.snapshot(world.now, relay.allocation).unwrap());
    assert!(text.starts_with("{\"1\":"), "{text}");
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["1"]["relays"] = serde_json::json!([null, null]);
    let none = value.to_string();
    for (changed, why) in [
        (text.replacen("\"1\"", "\"2\"", 1), "unknown variant `2`"),
        (text.replacen("{\"1\":", "", 1).trim_end_matches('}').to_owned() + "}", "unknown variant"),
        (text.replacen("[16384,", "[1,", 1), "channel number"),
        (text.replacen("203.0.113.1:", "[2001:db8::1]:", 1), "wrong family"),
        (none, "no relayed transport address"),
        (text.replacen("\"username\"", "\"name\"", 1), "missing field"),
    ] {
        let error = serde_json::from_str::<Moved>(&changed).expect_err("refused").to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn secrets_are_serialized_and_never_printed() {
    let key = TokenKey::A128Gcm([1; 16]);
    let mut world = World::with(everything());
    let mac_key = [0xAB; 20];
    let token =
        AccessToken::new(&mac_key, world.now.unix, 60).unwrap().seal(&key, "turn.example.org", [9; 12]);
    let nonce = world.ask(&Ask::allocate()).get::<stun_types::attribute::Nonce>().nonce().to_owned();
    let ask = Ask::allocate().with(&EvenPort::new(true)).raw(TICKET, &[]).raw(0x001B, &token);
    let ask = ask
        .with(&stun_types::attribute::Username::new("north").unwrap())
        .with(&stun_types::attribute::Realm::new(REALM).unwrap());
    let ask = ask.with(&stun_types::attribute::Nonce::new(&nonce).unwrap()).bytes();
    let ask = signed(&ask, &Key::from_bytes(&mac_key), Mac::Sha1, false);
    let request = world.feed(&ask).opens();
    world.open(&request).success();
    let moved = world.server.snapshot(world.now, request.allocation).unwrap();
    let (shown, text) = (format!("{moved:?}"), written(&moved));
    let in_decimal = |bytes: &[u8]| serde_json::to_string(bytes).unwrap();
    assert!(text.contains(&in_decimal(&mac_key)), "{text}");
    assert!(shown.contains("north"), "the key name is not secret: {shown}");
    let digits: String = shown.chars().filter(|c| !c.is_whitespace()).collect();
    assert!(!digits.contains("171,171,171"), "{shown}");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let record = &value["1"];
    for secret in [&record["mobility"]["key"], &record["reservation"]] {
        let secret = secret.to_string();
        assert!(secret.len() > 8 && !digits.contains(&secret), "{secret} in {shown}");
    }
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    /// Altered data must be refused or yield an allocation that ends normally.
    #[test]
    fn altered_data_is_refused_or_harmless(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut here = World::new();
        let alice = here.credentials("alice", Scheme::Md5);
        here.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
        let relay = here.last_opened();
        here.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
        let mut bytes = written(&here.server.snapshot(here.now, relay.allocation).unwrap()).into_bytes();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(moved) = serde_json::from_slice::<Moved>(&bytes) {
            let mut there = another(config());
            if let Ok(allocation) = there.server.restore(there.now, moved, Link(1)) {
                there.feed(&channel_data(0x4000, b"x"));
                there.peer_sends(RelayId { allocation, ..relay }, PEER, b"x");
                prop_assert!(there.server.poll_timeout().is_some());
                there.server.close_all(there.now, ClosedReason::Shutdown);
            }
            prop_assert_eq!((there.server.allocations(), there.server.policy_mut().held()), (0, 0));
        }
    }
}
