//! Long-term credentials (RFC 8489 section 9.2).

use crate::common::*;
use stun_types::{
    attribute::{AttributeStaticType as _, Realm},
    message::Message,
};

const USERNAME: u16 = 0x0006;
const MESSAGE_INTEGRITY: u16 = 0x0008;
const MESSAGE_INTEGRITY_SHA256: u16 = 0x001C;
const USERHASH: u16 = 0x001E;

/// Asserts that the reply contains the attributes for the next attempt and reveals no user or key (section 9.2.4).
#[track_caller]
fn is_challenge(reply: &Reply, code: u16) {
    assert_eq!(reply.code(), Some(code));
    assert_eq!(reply.get::<Realm>().realm(), REALM);
    assert!(reply.has(Nonce::TYPE));
    assert_eq!(
        reply.get::<PasswordAlgorithms>().algorithms(),
        [PasswordAlgorithmValue::SHA256, PasswordAlgorithmValue::MD5]
    );
    lacks(reply, &[USERNAME, USERHASH, MESSAGE_INTEGRITY, MESSAGE_INTEGRITY_SHA256]);
}

#[track_caller]
fn lacks(reply: &Reply, kinds: &[u16]) {
    kinds.iter().for_each(|kind| assert_eq!(reply.raw(*kind), None, "{kind:#06x}"));
}

/// Asserts that the response is signed and does not repeat the client's credentials (section 9.2.4).
#[track_caller]
fn is_signed_answer(reply: &Reply, credentials: &Credentials) {
    assert!(reply.is_signed(credentials), "{:?}", credentials.scheme);
    lacks(reply, &[USERNAME, USERHASH, Realm::TYPE.value(), Nonce::TYPE.value()]);
}

#[test]
fn an_unauthenticated_request_gets_realm_nonce_and_algorithms() {
    let mut world = World::new();
    let challenge = world.ask(&Ask::allocate());
    is_challenge(&challenge, 401);
    assert!(challenge.get::<Nonce>().nonce().starts_with("obMatJos2wAAA"));
}

/// RFC 8489 section 9.2.4.
#[test]
fn no_two_addresses_or_ports_get_the_same_nonce() {
    let mut world = World::new();
    let mut seen = std::collections::HashSet::new();
    for from in ["192.0.2.7:1", "192.0.2.7:2", "192.0.2.8:1", "[2001:db8::7]:1", "[2001:db8::8]:1"] {
        world.client.address = address(from);
        assert!(seen.insert(world.ask(&Ask::allocate()).get::<Nonce>().nonce().to_owned()), "{from}");
    }
}

#[test]
fn every_scheme_is_accepted() {
    for scheme in [Scheme::Md5, Scheme::Md5Sha256, Scheme::Sha256, Scheme::Userhash] {
        let mut world = World::new();
        let alice = world.credentials("alice", scheme);
        let reply = world.ask(&Ask::allocate().signed(&alice)).success();
        is_signed_answer(&reply, &alice);
        let effects = world.effects();
        assert!(
            matches!(&effects[..], [Effect::Opened { username, .. }] if &**username == "alice"),
            "{effects:?}"
        );
    }
}

/// RFC 8489 section 9.2.4: the password algorithm decides, not the attribute in the request.
#[test]
fn responses_use_sha256_only_for_requests_with_a_password_algorithm() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let key = Key::long_term(KeyAlgorithm::Md5, &alice.user, REALM, alice.password.as_bytes());
    let named = |ask: Ask| ask.raw(0x8002, &[0, 2, 0, 0, 0, 1, 0, 0]).raw(0x001D, &[0, 1, 0, 0]);
    let md5 = |ask: &Ask, mac| {
        let ask = ask.clone().raw(0x0006, alice.user.as_bytes()).raw(0x0014, REALM.as_bytes());
        signed(&ask.raw(0x0015, alice.nonce.as_bytes()).bytes(), &key, mac, false)
    };
    for method in [ALLOCATE, REFRESH] {
        for (ask, asked, sha1, sha256) in [
            (Ask::new(method), Mac::Sha1, true, false),
            (Ask::new(method), Mac::Sha256, true, false),
            (named(Ask::new(method)), Mac::Sha1, true, true),
            (named(Ask::new(method)), Mac::Sha256, false, true),
        ] {
            let Outcome::Reply(reply) = world.feed(&md5(&ask, asked)) else { panic!("no response") };
            let reply = Reply(reply);
            assert!([Some(400), Some(437)].contains(&reply.code()), "past authentication");
            let verified = [Mac::Sha1, Mac::Sha256].map(|mac| reply.verifies(&key, mac));
            assert_eq!(verified, [sha1, sha256], "{asked:?}");
        }
    }
}

#[test]
fn sha256_takes_precedence_over_sha1_integrity() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let key = |password: &str| Key::long_term(KeyAlgorithm::Md5, "alice", REALM, password.as_bytes());
    let (right, wrong) = (key(&alice.password), key("guess"));
    let ask = Ask::refresh(600).raw(USERNAME, b"alice").raw(0x0014, REALM.as_bytes());
    let ask = ask.raw(0x0015, alice.nonce.as_bytes()).bytes();
    for (sha1, sha256, code) in [(&right, &wrong, 401), (&wrong, &right, 437)] {
        let both = signed(&signed(&ask, sha1, Mac::Sha1, false), sha256, Mac::Sha256, false);
        assert_eq!(world.feed(&both).reply().code(), Some(code));
    }
}

#[test]
fn a_signed_request_gets_a_signed_error() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Sha256);
    let reply = world.ask(&Ask::permit(PEER).signed(&alice));
    assert_eq!(reply.code(), Some(437));
    is_signed_answer(&reply, &alice);
    assert!(reply.has(Software::TYPE));
}

#[test]
fn refused_credentials_are_401_and_logged_with_a_reason() {
    let mut world = World::new();
    let mut wrong_key = world.credentials("alice", Scheme::Md5);
    wrong_key.password = "guess".to_owned();
    let absent = world.credentials("absent", Scheme::Sha256);
    let nobody_hashed = world.credentials("absent", Scheme::Userhash);
    let expired = world.credentials("old", Scheme::Md5);
    let mut elsewhere = world.credentials("alice", Scheme::Md5);
    elsewhere.realm = "example.com".to_owned();
    for (credentials, why) in [
        (wrong_key, CredentialRefusal::WrongKey),
        (absent, CredentialRefusal::NoSuchUser),
        (nobody_hashed, CredentialRefusal::NoSuchUser),
        (expired, CredentialRefusal::Expired { ago: 42 }),
        (elsewhere, CredentialRefusal::WrongRealm),
    ] {
        let reply = world.ask(&Ask::allocate().signed(&credentials));
        is_challenge(&reply, 401);
        assert_eq!(world.refusals(), [why]);
    }
    assert_eq!(world.server.stats().credentials_refused, [2, 1, 1, 1, 0, 0, 0]);
    assert_eq!(world.server.allocations(), 0);
}

#[test]
fn a_wrong_key_with_userhash_is_logged_with_the_username() {
    let mut world = World::new();
    let mut guess = world.credentials("alice", Scheme::Userhash);
    guess.password = "guess".to_owned();
    assert_eq!(world.ask(&Ask::allocate().signed(&guess)).code(), Some(401));
    let effects = world.effects();
    let [Effect::Refused { username, why: CredentialRefusal::WrongKey, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(&**username, "alice");
}

#[test]
fn a_flood_of_refusals_emits_few_effects_and_counts_the_rest() {
    let mut world = World::new();
    let mut guess = world.credentials("alice", Scheme::Md5);
    guess.password = "guess".to_owned();
    guess.user = format!("al\u{7}ice\n{}", "x".repeat(499));
    let bytes = Ask::allocate().signed(&guess).bytes();
    for _ in 0..500 {
        world.feed(&bytes);
    }
    let effects = world.effects();
    assert_eq!(effects.len(), 20);
    let Effect::Refused { username, .. } = &effects[0] else { panic!() };
    assert_eq!(**username, *guess.user, "complete and as sent");
    world.sleep(1);
    world.feed(&bytes);
    assert!(matches!(&world.effects()[..], [Effect::Refused { suppressed: 480, .. }]));
}

#[test]
fn a_flood_from_one_address_does_not_suppress_others() {
    let mut world = World::new();
    let mut guess = world.credentials("alice", Scheme::Md5);
    guess.password = "guess".to_owned();
    let bytes = Ask::allocate().signed(&guess).bytes();
    (0..5000).for_each(|_| drop(world.feed(&bytes)));
    assert_eq!(world.effects().len(), 20);
    world.client.address = address("198.51.100.9:5000");
    let mut other = world.credentials("alice", Scheme::Md5);
    other.password = "guess".to_owned();
    assert_eq!(world.ask(&Ask::allocate().signed(&other)).code(), Some(401));
    assert!(matches!(&world.effects()[..], [Effect::Refused { suppressed: 4980, .. }]));
}

/// The source address may be forged, so the refusal is counted but not logged.
#[test]
fn a_wrong_realm_without_a_valid_nonce_is_counted_not_logged() {
    let mut world = World::new();
    let mut elsewhere = world.credentials("alice", Scheme::Md5);
    elsewhere.realm = "elsewhere.example".to_owned();
    let anothers = elsewhere.nonce.clone();
    world.client.address = address("198.51.100.9:5000");
    for nonce in ["", "f//499k954d6OL34oL9FSTvy64sA", &anothers] {
        elsewhere.nonce = nonce.to_owned();
        assert_eq!(world.ask(&Ask::allocate().signed(&elsewhere)).code(), Some(401), "{nonce:?}");
        assert_eq!(world.refusals(), [], "{nonce:?}");
    }
    assert_eq!(world.server.stats().credentials_refused, [0, 0, 0, 3, 0, 0, 0]);
}

#[test]
fn a_wrong_realm_over_tcp_tls_or_dtls_is_logged_with_any_nonce() {
    for listener in 1..4 {
        let mut world = World::with(streams());
        world.client.listener = ListenerId(listener);
        let mut elsewhere = world.credentials("alice", Scheme::Md5);
        elsewhere.realm = "elsewhere.example".to_owned();
        elsewhere.nonce = "f//499k954d6OL34oL9FSTvy64sA".to_owned();
        assert_eq!(world.ask(&Ask::allocate().signed(&elsewhere)).code(), Some(401));
        assert_eq!(world.refusals(), [CredentialRefusal::WrongRealm]);
    }
}

#[test]
fn integrity_without_username_realm_or_nonce_is_an_unlogged_400() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    for missing in [0x0006_u16, 0x0014, 0x0015] {
        // Writes unsigned attributes by hand, then an arbitrary integrity attribute.
        let mut ask = Ask::allocate();
        for (kind, value) in [(0x0006, &alice.user), (0x0014, &alice.realm), (0x0015, &alice.nonce)] {
            if kind != missing {
                ask = ask.raw(kind, value.as_bytes());
            }
        }
        let reply = world.ask(&ask.raw(0x0008, &[0; 20]));
        assert_eq!(reply.code(), Some(400));
        assert!(!reply.has(Nonce::TYPE) && !reply.has(Realm::TYPE) && !reply.has(Software::TYPE));
        lacks(&reply, &[USERNAME, USERHASH]);
    }
    // USERHASH is a SHA-256 hash (section 14.4).
    for length in [0, 31, 33] {
        let ask = Ask::allocate().raw(USERHASH, &vec![7; length]).raw(0x0014, alice.realm.as_bytes());
        let ask = ask.raw(0x0015, alice.nonce.as_bytes()).raw(MESSAGE_INTEGRITY, &[0; 20]);
        assert_eq!(world.ask(&ask).code(), Some(400), "{length}");
    }
    assert_eq!(world.server.policy_mut().lookups.get(), 0);
}

#[test]
fn a_username_longer_than_763_bytes_is_a_bad_request() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    for (len, code) in [(508, 401), (509, 401), (763, 401), (764, 400)] {
        let ask = Ask::allocate()
            .raw(0x0006, &vec![b'a'; len])
            .raw(0x0014, alice.realm.as_bytes())
            .raw(0x0015, alice.nonce.as_bytes())
            .raw(0x0008, &[0; 20]);
        assert_eq!(world.ask(&ask).code(), Some(code), "{len} bytes");
    }
}

#[test]
fn a_downgrade_of_the_algorithm_list_is_detected() {
    // Challenge as altered by a man in the middle, and the client's response to it: MD5 as the only
    // algorithm.
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    for (algorithms, algorithm) in [
        (Some(&[0, 1, 0, 0][..]), Some(&[0, 1, 0, 0][..])),
        (Some(&[0, 1, 0, 0, 0, 2, 0, 0][..]), Some(&[0, 1, 0, 0][..])),
        (None, Some(&[0, 1, 0, 0][..])),
        (Some(&[0, 2, 0, 0, 0, 1, 0, 0][..]), None),
        (Some(&[0, 2, 0, 0, 0, 1, 0, 0][..]), Some(&[0, 3, 0, 0][..])),
    ] {
        let mut ask = Ask::allocate();
        if let Some(list) = algorithms {
            ask = ask.raw(0x8002, list);
        }
        if let Some(one) = algorithm {
            ask = ask.raw(0x001D, one);
        }
        let reply = world.ask(&ask.signed(&alice));
        assert_eq!(reply.code(), Some(400), "{algorithms:?} {algorithm:?}");
        assert!(!reply.has(Nonce::TYPE) && !reply.has(Realm::TYPE));
    }
    let honest = Ask::allocate().raw(0x8002, &[0, 2, 0, 0, 0, 1, 0, 0]).raw(0x001D, &[0, 1, 0, 0]);
    world.ask(&honest.signed(&alice)).success();
}

#[test]
fn clearing_the_feature_bits_invalidates_a_nonce() {
    let mut world = World::new();
    let mut alice = world.credentials("alice", Scheme::Md5);
    alice.nonce = alice.nonce.replace("obMatJos2wAAA", "obMatJos2AAAA");
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(438));
}

#[test]
fn md5_can_be_refused() {
    let mut world = World::with(ServerConfig { allow_md5: false, ..config() });
    let mut alice = world.credentials("alice", Scheme::Md5);
    let reply = world.ask(&Ask::allocate().signed(&alice));
    assert_eq!(reply.code(), Some(401));
    assert_eq!(reply.get::<PasswordAlgorithms>().algorithms(), [PasswordAlgorithmValue::SHA256]);
    alice.scheme = Scheme::Md5Sha256;
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(401));
    assert_eq!(world.server.policy_mut().lookups.get(), 0);
}

/// If only MD5 keys are stored, a client offered SHA-256 would use it and always fail.
#[test]
fn sha256_is_not_offered_without_stored_sha256_keys() {
    let mut world = World::with(ServerConfig { allow_sha256: false, ..config() });
    let challenge = world.ask(&Ask::allocate());
    assert_eq!(challenge.code(), Some(401));
    let offered =
        Message::from_bytes(&challenge.0).unwrap().raw_attribute(0x8002.into()).unwrap().value.to_vec();
    assert_eq!(offered, [0, 1, 0, 0]);
    // A client that echoes a longer list received an altered challenge.
    let sha256 = world.credentials("alice", Scheme::Sha256);
    assert_eq!(world.ask(&Ask::allocate().signed(&sha256)).code(), Some(400));
    world.ask_as("alice", Ask::allocate()).success();
}

#[test]
fn a_nonce_turns_stale_and_the_fresh_one_works() {
    // The default is at most an hour (RFC 8656 section 5).
    let default = ServerConfig::default().nonce_lifetime;
    assert!(default <= 3600);
    for nonce_lifetime in [default, 100] {
        let mut world = World::with(ServerConfig { nonce_lifetime, ..config() });
        let mut alice = world.credentials("alice", Scheme::Md5);
        world.sleep(nonce_lifetime.into());
        world.ask(&Ask::allocate().signed(&alice)).success();
        world.sleep(1);
        let stale = world.ask(&Ask::refresh(600).signed(&alice));
        is_challenge(&stale, 438);
        alice.nonce = stale.get::<Nonce>().nonce().to_owned();
        world.ask(&Ask::refresh(600).signed(&alice)).success();
    }
}

#[test]
fn a_stale_nonce_with_a_wrong_key_is_401() {
    // A wrong key takes precedence over an old nonce (RFC 8489 section 9.2.4).
    let mut world = World::with(ServerConfig { nonce_lifetime: 100, ..config() });
    let mut alice = world.credentials("alice", Scheme::Md5);
    alice.password = "guess".to_owned();
    world.sleep(101);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(401));
}

/// RFC 8489 section 9.2.4 checks the nonce last.
#[test]
fn an_invalid_nonce_is_438_after_user_and_key_checks() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    world.client.address = address("192.0.2.8:40000");
    for nonce in [alice.nonce.clone(), "0123456789abcdef".to_owned()] {
        let of = |user: &str, password: &str| Credentials {
            user: user.to_owned(),
            password: password.to_owned(),
            nonce: nonce.clone(),
            ..alice.clone()
        };
        let code = |world: &mut World, of: &Credentials| world.ask(&Ask::allocate().signed(of)).code();
        assert_eq!(code(&mut world, &of("absent", "guess")), Some(401));
        assert_eq!(code(&mut world, &of("alice", "guess")), Some(401));
        assert_eq!(code(&mut world, &of("alice", &alice.password)), Some(438));
        assert_eq!(world.refusals(), []);
        // A list from another configuration comes with a nonce from that configuration.
        let listed = Ask::allocate().raw(0x8002, &[0, 1, 0, 0]).raw(0x001D, &[0, 1, 0, 0]);
        let reply = world.ask(&listed.signed(&of("alice", &alice.password)));
        assert_eq!(reply.code(), Some(438));
    }
    world.server.policy_mut().later = true;
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(438), "the store is not queried");
    assert!(!world.effects().iter().any(|effect| matches!(effect, Effect::LookUp(_))));
}

#[test]
fn a_401_repeats_a_valid_nonce() {
    let mut world = World::with(ServerConfig { nonce_lifetime: 100, ..config() });
    let mut guess = world.credentials("alice", Scheme::Md5);
    guess.password = "guess".to_owned();
    let nonce_of_401 = |world: &mut World, ask: Ask| {
        let reply = world.ask(&ask);
        assert_eq!(reply.code(), Some(401));
        reply.get::<Nonce>().nonce().to_owned()
    };
    world.sleep(100);
    let asks = || Ask::allocate().signed(&guess);
    assert_eq!(nonce_of_401(&mut world, asks()), guess.nonce);
    let absent = Credentials { user: "absent".to_owned(), ..guess.clone() };
    assert_eq!(nonce_of_401(&mut world, Ask::allocate().signed(&absent)), guess.nonce);
    assert_ne!(nonce_of_401(&mut world, Ask::allocate()), guess.nonce, "no nonce to repeat");
    world.sleep(1);
    assert_ne!(nonce_of_401(&mut world, asks()), guess.nonce, "the nonce is stale");
}

#[test]
fn attributes_after_message_integrity_are_ignored() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let with_lifetime_appended = |ask: Ask, credentials: &Credentials| {
        let mut bytes = ask.signed(credentials).bytes();
        bytes.extend_from_slice(&[0, 0x0D, 0, 4, 0, 0, 0x0E, 0x10]);
        let length = u16::try_from(bytes.len() - 20).unwrap();
        bytes[2..4].copy_from_slice(&length.to_be_bytes());
        bytes
    };
    let request = world.feed(&with_lifetime_appended(Ask::allocate(), &alice)).opens();
    assert_eq!(world.open(&request).lifetime(), 600);
    // An unknown attribute after MESSAGE-INTEGRITY does not cause 420 either.
    let mut bytes = Ask::refresh(700).signed(&alice).bytes();
    bytes.extend_from_slice(&[0x7F, 0xFF, 0, 0]);
    let length = u16::try_from(bytes.len() - 20).unwrap();
    bytes[2..4].copy_from_slice(&length.to_be_bytes());
    assert_eq!(world.feed(&bytes).reply().success().lifetime(), 700);
}

#[test]
fn an_altered_request_is_401() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Sha256);
    let mut bytes = Ask::allocate().signed(&alice).bytes();
    // Protocol number of REQUESTED-TRANSPORT.
    bytes[24] = 6;
    assert_eq!(world.feed(&bytes).reply().code(), Some(401));
}

#[test]
fn unauthenticated_requests_leave_no_state() {
    let mut world = World::new();
    let mut guess = world.credentials("alice", Scheme::Md5);
    guess.password = "guess".to_owned();
    for port in 1..=2000 {
        world.client.address = address(&format!("198.18.0.1:{port}"));
        world.feed(&Ask::allocate().bytes());
        world.feed(&Ask::allocate().signed(&guess).bytes());
        world.feed(&Ask::refresh(0).signed(&guess).bytes());
        world.feed(&Ask::new(BINDING).bytes());
        world.feed(&Ask::send(PEER, b"x"));
        world.feed(&channel_data(0x4000, b"x"));
    }
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.poll_timeout(), None);
    assert_eq!(world.server.policy_mut().held(), 0);
    assert_eq!(world.effects().len(), 0, "nothing reached the user store");
    assert_eq!(world.dropped(DropReason::NoAllocation), 4000);
}

#[test]
fn an_open_server_requires_no_credentials() {
    let mut world = World::with(ServerConfig { authenticate: false, ..config() });
    let reply = world.ask(&Ask::allocate()).success();
    assert!(Message::from_bytes(&reply.0).unwrap().raw_attribute(0x0008.into()).is_none());
    world.ask(&Ask::permit(PEER)).success();
    assert_eq!(world.server.policy_mut().held.borrow().get("192.0.2.7"), Some(&1));
}
