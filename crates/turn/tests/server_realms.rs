//! Several realms on one server, selected by listener or by the REALM of a request.

use crate::common::*;
use stun_types::attribute::Realm as RealmAttribute;
use turnpike_turn::server::{Cidr, Realm, RealmId};

const TENANT: &str = "tenant.example";
const OTHER: &str = "other.example";

fn realm(name: &str) -> Realm {
    Realm { name: name.to_owned(), allow_sha256: true, username_anonymity: true }
}

/// Listener 0 serves all realms, listener 1 only `TENANT`, and listener 2 first `OTHER` and then `TENANT`.
fn tenants() -> ServerConfig {
    let profile = |realms: &[u16]| ListenerProfile {
        realms: realms.iter().copied().map(RealmId).collect(),
        ..ListenerProfile::default()
    };
    ServerConfig {
        tenants: vec![realm(TENANT), realm(OTHER)],
        listeners: vec![profile(&[]), profile(&[1]), profile(&[2, 1])],
        ..config()
    }
}

fn alice_in(world: &mut World, listener: u16, realm: &str) -> Credentials {
    world.client.listener = ListenerId(listener);
    let mut alice = world.credentials("alice", Scheme::Sha256);
    if alice.realm != realm {
        alice.realm = realm.to_owned();
        let stale = world.ask(&Ask::allocate().signed(&alice));
        assert_eq!(stale.code(), Some(438), "a nonce is valid for one realm");
        assert_eq!(stale.get::<RealmAttribute>().realm(), realm);
        alice.nonce = stale.get::<Nonce>().nonce().to_owned();
    }
    alice
}

#[test]
fn a_listener_challenges_with_its_first_realm() {
    let mut world = World::with(tenants());
    for (listener, realm) in [(0, REALM), (1, TENANT), (2, OTHER), (9, REALM)] {
        world.client.listener = ListenerId(listener);
        let challenge = world.ask(&Ask::allocate());
        assert_eq!(challenge.get::<RealmAttribute>().realm(), realm, "listener {listener}");
    }
}

#[test]
fn a_user_authenticates_in_any_realm_of_the_listener() {
    for (listener, realm) in [(0, REALM), (0, TENANT), (0, OTHER), (1, TENANT), (2, OTHER), (2, TENANT)] {
        let mut world = World::with(tenants());
        let alice = alice_in(&mut world, listener, realm);
        let reply = world.ask(&Ask::allocate().signed(&alice)).success();
        assert!(reply.is_signed(&alice));
        let effects = world.effects();
        assert!(matches!(&effects[..], [Effect::Opened { realm: of, .. }] if &**of == realm), "{effects:?}");
    }
}

#[test]
fn an_unserved_realm_is_challenged_with_a_served_one() {
    let mut world = World::with(tenants());
    for (listener, realm, first) in
        [(1, REALM, TENANT), (1, OTHER, TENANT), (2, REALM, OTHER), (0, "x", REALM)]
    {
        world.client.listener = ListenerId(listener);
        let mut alice = world.credentials("alice", Scheme::Md5);
        alice.realm = realm.to_owned();
        let reply = world.ask(&Ask::allocate().signed(&alice));
        assert_eq!(reply.code(), Some(401));
        assert_eq!(reply.get::<RealmAttribute>().realm(), first);
        assert!(matches!(&world.effects()[..], [Effect::Refused { why: CredentialRefusal::WrongRealm, .. }]));
    }
    assert_eq!(world.server.policy_mut().lookups.get(), 0, "no key lookup");
}

#[test]
fn a_nonce_of_one_realm_is_invalid_in_another() {
    let mut world = World::with(tenants());
    let tenant = alice_in(&mut world, 0, TENANT);
    let mut elsewhere = tenant;
    elsewhere.realm = OTHER.to_owned();
    assert_eq!(world.ask(&Ask::allocate().signed(&elsewhere)).code(), Some(438));
}

#[test]
fn a_key_of_one_realm_is_wrong_in_another() {
    let mut world = World::with(tenants());
    let alice = alice_in(&mut world, 0, TENANT);
    // The request is signed with the key of OTHER, and its REALM is replaced by TENANT.
    let forger = Credentials { realm: OTHER.to_owned(), ..alice };
    let mut forged = Ask::allocate().signed(&forger).bytes();
    let at = forged.windows(OTHER.len()).position(|window| window == OTHER.as_bytes()).unwrap();
    assert_eq!(OTHER.len().next_multiple_of(4), TENANT.len().next_multiple_of(4));
    forged[at - 1] = u8::try_from(TENANT.len()).unwrap();
    forged[at..at + TENANT.len()].copy_from_slice(TENANT.as_bytes());
    assert_eq!(world.feed(&forged).reply().code(), Some(401));
    assert!(matches!(&world.effects()[..], [Effect::Refused { why: CredentialRefusal::WrongKey, .. }]));
}

#[test]
fn a_username_in_another_realm_is_a_different_user() {
    let mut world = World::with(tenants());
    let alice = alice_in(&mut world, 0, TENANT);
    world.ask(&Ask::allocate().signed(&alice)).success();
    let namesake = alice_in(&mut world, 0, OTHER);
    assert_eq!(world.ask(&Ask::permit(PEER).signed(&namesake)).code(), Some(441));
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
}

#[test]
fn quotas_count_each_realm_separately() {
    let policy = TestPolicy { per_user: 1, total: 10, ..TestPolicy::default() };
    let mut world = World::with_policy(tenants(), policy);
    for (port, realm, code) in [(1, TENANT, None), (2, OTHER, None), (3, TENANT, Some(486))] {
        world.client = client(port);
        let alice = alice_in(&mut world, 0, realm);
        assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), code, "{realm}");
    }
    assert_eq!(world.server.policy_mut().held.borrow().len(), 2);
    world.sleep(3600);
    assert_eq!(world.server.policy_mut().held(), 0, "released in the realm where it was acquired");
}

#[test]
fn each_realm_offers_its_own_algorithms() {
    let mut config = tenants();
    config.tenants[0].allow_sha256 = false;
    let mut world = World::with(config);
    for (listener, algorithms) in [
        (1, &[PasswordAlgorithmValue::MD5][..]),
        (2, &[PasswordAlgorithmValue::SHA256, PasswordAlgorithmValue::MD5]),
    ] {
        world.client.listener = ListenerId(listener);
        let challenge = world.ask(&Ask::allocate());
        assert_eq!(challenge.get::<PasswordAlgorithms>().algorithms(), algorithms);
    }
}

#[test]
fn a_reload_that_removes_a_realm_ends_only_its_allocations() {
    let mut world = World::with(tenants());
    let tenant = alice_in(&mut world, 1, TENANT);
    world.ask(&Ask::allocate().signed(&tenant)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&tenant)).success();
    let theirs = world.client;
    world.client = client(2);
    let namesake = alice_in(&mut world, 0, REALM);
    world.ask(&Ask::allocate().signed(&namesake)).success();
    world.ask(&Ask::bind(0x4000, PEER).signed(&namesake)).success();
    world.effects();

    world.server.reconfigure(world.now, Arc::new(config()));
    let effects = world.effects();
    let [Effect::Closed { client, realm, reason: ClosedReason::Administrator, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((*client, &**realm), (theirs, TENANT));
    assert_eq!(world.server.allocations(), 1);
    assert_eq!(world.server.policy_mut().held(), 1, "returned to the realm's quota");
    assert!(world.feed(&channel_data(0x4000, b"x")).goes_to_peer());
    world.client = theirs;
    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::NoAllocation));
}

#[test]
fn a_namesake_gets_no_allocation_of_a_removed_realm() {
    let mut world = World::with(tenants());
    let tenant = alice_in(&mut world, 1, TENANT);
    world.ask(&Ask::allocate().signed(&tenant)).success();
    world.server.reconfigure(world.now, Arc::new(config()));
    world.client.listener = ListenerId(1);
    let namesake = world.credentials("alice", Scheme::Sha256);
    assert_eq!(namesake.realm, REALM);
    for ask in [Ask::refresh(600), Ask::permit(PEER), Ask::bind(0x4000, PEER)] {
        assert_eq!(world.ask(&ask.signed(&namesake)).code(), Some(437));
    }
}

#[test]
fn a_renamed_realm_is_a_different_realm() {
    let mut world = World::with(tenants());
    let tenant = alice_in(&mut world, 1, TENANT);
    world.ask(&Ask::allocate().signed(&tenant)).success();
    let mut renamed = tenants();
    renamed.tenants[0].name = "renamed.example".to_owned();
    world.server.reconfigure(world.now, Arc::new(renamed));
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.policy_mut().held(), 0);
}

#[test]
fn an_origin_selects_the_challenges_realm_if_the_listener_serves_it() {
    const ORIGIN: u16 = 0x802F;
    let origins = [("https://tenant.example:443", 1), ("http://other.example:8080", 2)];
    let origins = origins.map(|(origin, realm)| (origin.into(), RealmId(realm)));
    let mut world = World::with(ServerConfig { origins: origins.into(), ..tenants() });
    for (listener, origin, realm) in [
        (0, &b"https://tenant.example"[..], TENANT),
        (0, b"HTTPS://Tenant.example:443", TENANT),
        (0, b"http://other.example:8080", OTHER),
        (0, b"http://other.example", REALM),
        (0, b"\xff", REALM),
        (0, b"", REALM),
        (1, b"http://other.example:8080", TENANT),
    ] {
        world.client.listener = ListenerId(listener);
        let challenge = world.ask(&Ask::allocate().raw(ORIGIN, origin));
        assert_eq!(challenge.get::<RealmAttribute>().realm(), realm, "{listener} {origin:?}");
    }
    world.client.listener = ListenerId(0);
    let tenant = alice_in(&mut world, 0, TENANT);
    let reply = world.ask(&Ask::allocate().raw(ORIGIN, b"http://other.example:8080").signed(&tenant));
    assert!(reply.success().is_signed(&tenant));
}

#[test]
fn a_realm_may_have_its_own_peer_rules() {
    let prefix = |text: &str| text.parse().unwrap();
    let denied: Cidr = "198.41.0.4/32".parse().unwrap();
    let strict = PeerRules { deny: vec![denied], ..PeerRules::default() };
    let open = PeerRules { allow: vec![prefix("10.0.0.0/8")], ..PeerRules::default() };
    let rules = ServerConfig {
        peers: open.clone(),
        realm_peers: [
            (REALM.into(), PeerRules::default()),
            (TENANT.into(), strict.clone()),
            (OTHER.into(), open),
        ]
        .into(),
        ..tenants()
    };
    let mut world = World::with(rules.clone());
    let (private, public) = ("10.1.2.3:7000", PEER);
    for (port, realm, refused, granted) in [
        (1, REALM, private, public),
        (2, TENANT, public, "198.41.0.5:7000"),
        (3, OTHER, "192.168.1.1:1", private),
    ] {
        world.client = client(port);
        let alice = alice_in(&mut world, 0, realm);
        world.ask(&Ask::allocate().signed(&alice)).success();
        for ask in [Ask::permit(refused), Ask::bind(0x4001, refused)] {
            assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(403), "{realm} {refused}");
        }
        for ask in [Ask::permit(granted), Ask::bind(0x4000, granted)] {
            world.ask(&ask.signed(&alice)).success();
        }
        let sent = world.feed(&channel_data(0x4000, b"x"));
        assert!(sent.goes_to_peer(), "{realm}: {sent:?}");
    }
    world.effects();
    let mut stricter = rules;
    stricter.realm_peers.insert(OTHER.into(), strict);
    world.server.reconfigure(world.now, Arc::new(stricter));
    for (port, relays) in [(1, true), (2, true), (3, false)] {
        world.client = client(port);
        let sent = world.feed(&channel_data(0x4000, b"x"));
        assert_eq!(matches!(sent, Outcome::ToPeer { .. }), relays, "client {port}: {sent:?}");
    }
}
