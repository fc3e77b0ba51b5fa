//! Sizes of responses to requests whose source address may be forged.

use crate::common::*;
use stun_types::{attribute::AttributeStaticType as _, message::Method};

const METHODS: [Method; 6] = [ALLOCATE, REFRESH, CREATE_PERMISSION, CHANNEL_BIND, CONNECT, CONNECTION_BIND];

fn usual() -> ServerConfig {
    ServerConfig { realm: ServerConfig::default().realm, ..config() }
}

fn world() -> World {
    World::with(usual())
}

fn with_tokens() -> ServerConfig {
    let (kid, key) = ("north".to_owned(), TokenKey::A128Gcm([1; 16]));
    let keys = vec![IssuerKey { kid, key, realm: usual().realm, max_lifetime: 60 }];
    let third_party = ThirdParty { server_name: "turn.example.org".to_owned(), skew: 5, keys };
    ServerConfig { third_party, ..usual() }
}

fn sizes(world: &mut World, ask: &Ask) -> (usize, usize) {
    let question = ask.bytes();
    let Outcome::Reply(answer) = world.feed(&question) else { return (0, question.len()) };
    (answer.len(), question.len())
}

fn unauthenticated(world: &mut World) -> Vec<(String, Ask)> {
    let alice = world.credentials("alice", Scheme::Md5);
    let guess = Credentials { password: "guess".to_owned(), ..alice.clone() };
    let forged = Credentials { nonce: "x".to_owned(), ..alice.clone() };
    let elsewhere = Credentials { realm: "r".to_owned(), ..alice };
    let integrity = |ask: Ask| ask.raw(0x0008, &[0; 20]);
    let mut asks = Vec::new();
    for method in METHODS {
        let bare = Ask::new(method);
        for (what, ask) in [
            ("bare", bare.clone()),
            ("with an empty attribute", bare.clone().raw(0x001A, &[])),
            ("with an attribute of four bytes", bare.clone().raw(0x0019, &[17, 0, 0, 0])),
            ("with an unknown attribute", bare.clone().raw(0x7FFF, &[])),
            ("with only MESSAGE-INTEGRITY", integrity(bare.clone())),
            ("with a wrong key", bare.clone().signed(&guess)),
            ("with a forged nonce", bare.clone().signed(&forged)),
            ("with another realm", bare.signed(&elsewhere)),
        ] {
            asks.push((format!("{method:?} {what}"), ask));
        }
    }
    let bare = Ask::new(BINDING);
    let mut unknown = bare.clone();
    for count in 0..40 {
        asks.push((format!("Binding with {count} unknown attributes"), unknown.clone()));
        unknown = unknown.raw(0x7F00 + count, &[]);
    }
    asks.push(("Binding with integrity".to_owned(), integrity(bare)));
    let fingerprinted: Vec<_> = asks
        .iter()
        .map(|(what, ask)| (format!("{what}, with FINGERPRINT"), ask.clone().fingerprint()))
        .collect();
    asks.into_iter().chain(fingerprinted).collect()
}

#[test]
fn unauthenticated_responses_are_at_most_four_times_the_request() {
    for config in [usual(), with_tokens(), ServerConfig { realm: "r".repeat(40), ..usual() }] {
        let mut world = World::with(config.clone());
        let name = if config.third_party.keys.is_empty() { 0 } else { 20 };
        // Exhausts the rate for requests too short to be granted; see below.
        for _ in 0..100 {
            world.feed(&Ask::new(ALLOCATE).bytes());
        }
        for (what, ask) in unauthenticated(&mut world) {
            let (answer, question) = sizes(&mut world, &ask);
            let fingerprint = if what.contains("FINGERPRINT") { 8 } else { 0 };
            assert!(answer > 0 || question - fingerprint < 28, "{what} must be answered");
            assert!(answer <= 4 * question + name, "{what}: {answer} bytes in response to {question}");
        }
    }
    let mut world = world();
    assert_eq!(sizes(&mut world, &Ask::allocate()), (80, 28));
    assert_eq!(sizes(&mut world, &Ask::new(ALLOCATE)), (80, 20));
    assert_eq!(sizes(&mut world, &Ask::new(BINDING)), (32, 20));
}

/// Browsers and pion give up after a 438 on Allocate, so every new client needs a usable nonce.
#[test]
fn every_challenge_is_complete_for_any_number_of_clients() {
    for (len, tokens) in [(1, 0), (8, 0), (9, 0), (20, 0), (40, 0), (41, 0), (127, 0), (127, 20)] {
        let realm = "r".repeat(len);
        let mut config =
            ServerConfig { realm: realm.clone(), ..if tokens == 0 { usual() } else { with_tokens() } };
        config.third_party.keys.iter_mut().for_each(|key| key.realm.clone_from(&realm));
        let mut world = World::with(config);
        let whole = 72 + len.next_multiple_of(4) + tokens;
        for newcomer in 0..6000 {
            world.client =
                Client { address: address(&format!("198.51.100.1:{}", 1024 + newcomer)), ..client(1) };
            let (answer, _) = sizes(&mut world, &Ask::allocate());
            assert_eq!(answer, whole, "client {newcomer} with a realm of {len} bytes");
        }
        let alice = world.credentials("alice", Scheme::Sha256);
        world.ask(&Ask::allocate().signed(&alice)).success();
        assert_eq!(world.dropped(DropReason::RefusalRatio), 0);
    }
}

/// A bare header cannot be granted anything, so its longer response may be rate-limited.
#[test]
fn long_challenges_to_bare_headers_are_rate_limited() {
    let mut world = World::with(ServerConfig { realm: "r".repeat(20), ..usual() });
    let answered = |world: &mut World, ask: &Ask| {
        let challenge = |answer: Outcome| matches!(answer, Outcome::Reply(reply) if reply.len() >= 92);
        (0..1000).filter(|_| challenge(world.feed(&ask.bytes()))).count()
    };
    assert_eq!(answered(&mut world, &Ask::new(ALLOCATE)), 50);
    world.sleep(2);
    assert_eq!(answered(&mut world, &Ask::new(REFRESH)), 20);
    assert_eq!(world.dropped(DropReason::RefusalRatio), 1930);
    // Requests that could be granted, other addresses and other transports have separate rates.
    assert_eq!(answered(&mut world, &Ask::allocate()), 1000);
    world.client.address = address("198.51.100.77:4000");
    assert_eq!(answered(&mut world, &Ask::new(ALLOCATE)), 50);
    let mut world =
        World::with(ServerConfig { listeners: streams().listeners, realm: "r".repeat(20), ..config() });
    world.client = stream(40_000);
    assert_eq!(answered(&mut world, &Ask::new(ALLOCATE)), 1000);
}

/// NAT discovery over IPv4; its requests are rate-limited too.
#[test]
fn a_discovery_response_is_at_most_twice_its_request() {
    let mut world = World::with(ServerConfig {
        discovery_limits: DiscoveryLimits { per_source: 1, total: 1000 },
        ..everything()
    });
    for (kind, value, room) in [
        (0x0003, &[0, 0, 0, 6][..], 56),
        (0x0027, &[0x9C, 0x40], 56),
        (0x0026, &[0; 4], 56),
        (0x0026, &[0; 64], 176),
        (0x8022, &[0; 8], 64),
    ] {
        let (answer, question) = sizes(&mut world, &Ask::new(BINDING).raw(kind, value));
        assert!(
            answer > 0 && answer <= 2 * question,
            "{kind:#06x}: {answer} bytes in response to {question}"
        );
        assert!(answer <= room);
    }
    // A plain request has no room for OTHER-ADDRESS, which announces discovery.
    let mut world = World::with(ServerConfig {
        discovery_limits: DiscoveryLimits { per_source: 1, total: 1000 },
        ..everything()
    });
    assert_eq!(sizes(&mut world, &Ask::new(BINDING)), (44, 20));
    for ask in [Ask::new(BINDING), Ask::new(BINDING).fingerprint()] {
        let (mut answered, mut asked) = (0, 0);
        for _ in 0..1000 {
            let (answer, question) = sizes(&mut world, &ask);
            assert!(answer > 0, "every request must be answered");
            (answered, asked) = (answered + answer, asked + question);
        }
        assert!(answered <= 2 * asked, "a flood of {asked} bytes gets {answered} bytes");
    }
    assert_eq!(sizes(&mut world, &Ask::new(BINDING)), (32, 20));
}

#[test]
fn responses_contain_optional_text_only_for_verified_addresses() {
    for (listener, what) in [(0, "UDP"), (1, "TCP"), (2, "TLS"), (3, "DTLS")] {
        let mut world = World::with(ServerConfig { listeners: streams().listeners, ..usual() });
        world.client.listener = ListenerId(listener);
        for (asked, ask) in unauthenticated(&mut world) {
            let reply = world.ask(&ask);
            // Only this request has a nonce issued to its address.
            let proved = listener > 0 || asked.contains("with a wrong key");
            assert_eq!(reply.has(Software::TYPE), proved, "{asked} over {what}");
            if !reply.is_success() {
                assert_eq!(!reply.reason().is_empty(), proved, "{asked} over {what}");
            }
        }
    }
    let mut world = world();
    let alice = world.credentials("alice", Scheme::Sha256);
    for (ask, code) in [
        (Ask::permit(PEER), Some(437)),
        (Ask::refresh(600).raw(0x7FFF, &[]), Some(420)),
        (Ask::new(ALLOCATE), Some(400)),
        (Ask::allocate(), None),
        (Ask::permit(PEER), None),
        (Ask::permit("10.0.0.1:1"), Some(403)),
        (Ask::bind(0x4000, PEER), None),
        (Ask::refresh(600), None),
        (Ask::refresh(0), None),
    ] {
        let reply = world.ask(&ask.signed(&alice));
        assert_eq!(reply.code(), code);
        assert!(reply.has(Software::TYPE) && reply.is_signed(&alice), "{code:?}");
    }
    let mut silent = World::with(ServerConfig { software: None, ..config() });
    assert!(!silent.ask_as("alice", Ask::allocate()).success().has(Software::TYPE));
    let mut open = World::with(ServerConfig { authenticate: false, ..config() });
    assert!(
        !open.ask(&Ask::allocate()).success().has(Software::TYPE),
        "responses are unsigned without authentication"
    );
}
