//! How much a stranger gets for a byte: anybody can send these with somebody else's address as their source. And which answers
//! carry SOFTWARE.

use crate::common::*;
use stun_types::{
    attribute::{AttributeStaticType as _, AttributeType, Nonce, PasswordAlgorithms, Software},
    message::Method,
};
use turnpike_turn::{
    access_token::TokenKey,
    server::{DiscoveryLimits, IssuerKey, ServerConfig, ThirdParty},
};

const METHODS: [Method; 6] = [ALLOCATE, REFRESH, CREATE_PERMISSION, CHANNEL_BIND, CONNECT, CONNECTION_BIND];

const THIRD_PARTY_AUTHORIZATION: u16 = 0x802E;

/// The usual settings, under the default realm.
fn usual() -> ServerConfig {
    ServerConfig { realm: ServerConfig::default().realm, ..config() }
}

fn world() -> World {
    World::with(usual())
}

/// The same where tokens count too.
fn with_tokens() -> ServerConfig {
    let (kid, key) = ("north".to_owned(), TokenKey::A128Gcm([1; 16]));
    let keys = vec![IssuerKey { kid, key, realm: usual().realm, max_lifetime: 60 }];
    let third_party = ThirdParty { server_name: "turn.example.org".to_owned(), skew: 5, keys };
    ServerConfig { third_party, ..usual() }
}

/// Bytes of the answer, and of STUN that was asked with.
fn sizes(world: &mut World, ask: &Ask) -> (usize, usize) {
    let question = ask.bytes();
    let Outcome::Reply(answer) = world.feed(&question) else { return (0, question.len()) };
    (answer.len(), question.len())
}

/// One of each kind of message that a stranger can send and is answered.
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
            ("with integrity alone", integrity(bare.clone())),
            ("with a wrong key", bare.clone().signed(&guess)),
            ("with a forged nonce", bare.clone().signed(&forged)),
            ("of another realm", bare.signed(&elsewhere)),
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
fn no_answer_to_a_stranger_is_longer_than_three_times_its_request() {
    // Where tokens count it is so beyond a rate; see below.
    for (mut world, before) in [(world(), 0), (World::with(with_tokens()), 1000)] {
        for _ in 0..before {
            sizes(&mut world, &Ask::allocate());
        }
        for (what, ask) in unauthenticated(&mut world) {
            let (answer, question) = sizes(&mut world, &ask);
            assert!(answer > 0, "{what} is answered");
            assert!(answer <= 3 * question, "{what}: {answer} bytes for {question}");
        }
    }
    let mut world = world();
    assert_eq!(sizes(&mut world, &Ask::allocate()), (84, 28), "a challenge with all that it needs");
    assert_eq!(sizes(&mut world, &Ask::new(ALLOCATE)), (48, 20));
    assert_eq!(sizes(&mut world, &Ask::new(BINDING)), (32, 20));
}

/// The name of the server, for which tokens are made, makes a challenge longer than that. Clients ask for it with a bare Allocate.
#[test]
fn challenges_that_the_name_for_tokens_makes_long_are_at_a_bounded_rate() {
    let mut world = World::with(with_tokens());
    let (whole, without) = ((104, 28), (84, 28));
    let count = |world: &mut World, ask: &Ask| {
        let sizes: Vec<_> = (0..1000).map(|_| sizes(world, ask)).collect();
        assert!(sizes.iter().all(|it| [whole, without].contains(it)), "{sizes:?}");
        sizes.iter().filter(|it| **it == whole).count()
    };
    assert_eq!(count(&mut world, &Ask::allocate()), 50);
    world.sleep(2);
    assert_eq!(count(&mut world, &Ask::allocate()), 20);
    let names = |world: &mut World, ask: &Ask| {
        world.ask(ask).message().raw_attribute(AttributeType::new(THIRD_PARTY_AUTHORIZATION)).is_some()
    };
    // A longer request has room for it.
    assert!(!names(&mut world, &Ask::allocate()));
    assert!(names(&mut world, &Ask::allocate().raw(0x8022, &[0; 8])));
    // So has a client elsewhere its own rate,
    world.client.address = address("198.51.100.77:4000");
    assert!(names(&mut world, &Ask::allocate()));
    // and one whose address is no forgery needs none.
    let mut world = World::with(ServerConfig { listeners: streams().listeners, ..with_tokens() });
    world.client = stream(40_000);
    assert!((0..1000).all(|_| names(&mut world, &Ask::allocate())));
}

/// A request without attributes can be nobody's, so that its challenge may leave out what makes it long. But whoever sits between
/// must not be able to have a client's credentials made weaker by it.
#[test]
fn the_short_challenge_is_good_for_nothing_but_the_whole_one() {
    let mut world = world();
    let short = world.ask(&Ask::new(ALLOCATE));
    assert_eq!(short.code(), Some(401));
    assert!(!short.has(PasswordAlgorithms::TYPE));
    let alice = world.credentials("alice", Scheme::Md5);
    let alice = Credentials { nonce: short.get::<Nonce>().nonce().to_owned(), ..alice };
    let whole = world.ask(&Ask::allocate().signed(&alice));
    assert_eq!(whole.code(), Some(438));
    assert!(whole.has(PasswordAlgorithms::TYPE));
    let alice = Credentials { nonce: whole.get::<Nonce>().nonce().to_owned(), ..alice };
    world.ask(&Ask::allocate().signed(&alice)).success();
}

/// A realm, whose length is its operator's, makes a challenge longer than three times its request.
#[test]
fn challenges_that_a_realm_makes_long_are_whole_at_a_bounded_rate_and_then_short_or_none() {
    for (len, whole, short) in
        [(1, 80, 44), (8, 84, 48), (9, 88, 52), (16, 92, 56), (44, 120, 84), (45, 124, 88), (127, 204, 168)]
    {
        let mut world = World::with(ServerConfig { realm: "r".repeat(len), ..usual() });
        let mut sent = |ask: &Ask| {
            let mut answers: Vec<_> = (0..1000).map(|_| sizes(&mut world, ask).0).collect();
            answers.dedup();
            world.sleep(60);
            answers
        };
        let beyond = if short > 84 { 0 } else { short };
        let shown = if whole > 84 { vec![whole, beyond] } else { vec![whole] };
        assert_eq!(sent(&Ask::allocate()), shown, "realm of {len} bytes");
        let bare = if short > 60 { vec![short, 0] } else { vec![short] };
        assert_eq!(sent(&Ask::new(ALLOCATE)), bare, "realm of {len} bytes");
    }
    // The first of all lacks nothing, and neither does one that answers a request with credentials.
    let mut world = World::with(ServerConfig { realm: "r".repeat(127), ..config() });
    let alice = world.credentials("alice", Scheme::Md5);
    for count in 0..1000 {
        let answer = world.feed(&Ask::allocate().bytes());
        assert_eq!(matches!(answer, Outcome::Reply(_)), count < 49, "{count}");
    }
    let forged = Credentials { nonce: "none".to_owned(), ..alice };
    let challenge = world.ask(&Ask::allocate().signed(&forged));
    assert!(challenge.code() == Some(438) && challenge.has(PasswordAlgorithms::TYPE));
    // Over a stream no address is forged.
    let mut world =
        World::with(ServerConfig { listeners: streams().listeners, realm: "r".repeat(127), ..config() });
    world.client = stream(40_000);
    assert!((0..1000).all(|_| world.ask(&Ask::allocate()).has(PasswordAlgorithms::TYPE)));
}

/// Where NAT behaviour can be discovered, over IPv4. What asks for discovery is limited in number besides.
#[test]
fn an_answer_of_nat_discovery_is_no_longer_than_twice_its_request() {
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
        assert!(answer > 0 && answer <= 2 * question, "{kind:#06x}: {answer} bytes for {question}");
        assert!(answer <= room);
    }
    // A plain request has no room for OTHER-ADDRESS, by which clients find out that there is something to discover.
    let mut world = World::with(ServerConfig {
        discovery_limits: DiscoveryLimits { per_source: 1, total: 1000 },
        ..everything()
    });
    assert_eq!(sizes(&mut world, &Ask::new(BINDING)), (44, 20));
    for ask in [Ask::new(BINDING), Ask::new(BINDING).fingerprint()] {
        let (mut answered, mut asked) = (0, 0);
        for _ in 0..1000 {
            let (answer, question) = sizes(&mut world, &ask);
            assert!(answer > 0, "nobody goes unanswered");
            (answered, asked) = (answered + answer, asked + question);
        }
        assert!(answered <= 2 * asked, "a flood gets {answered} bytes for {asked}");
    }
    assert_eq!(sizes(&mut world, &Ask::new(BINDING)), (32, 20));
}

#[test]
fn answers_that_are_signed_carry_software_and_no_others_do() {
    let mut world = world();
    for (what, ask) in unauthenticated(&mut world) {
        assert!(!world.ask(&ask).has(Software::TYPE), "{what}");
    }
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
    let alice = silent.credentials("alice", Scheme::Md5);
    assert!(!silent.ask(&Ask::allocate().signed(&alice)).success().has(Software::TYPE));
    let mut open = World::with(ServerConfig { authenticate: false, ..config() });
    assert!(!open.ask(&Ask::allocate()).success().has(Software::TYPE), "nothing is signed there");
}
