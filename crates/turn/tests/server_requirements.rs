//! Requirements of RFC 8489 and RFC 8656 common to all methods, listed in tests/requirements.tsv.

use crate::common::{turn::*, *};
use stun_types::{
    attribute::{AttributeStaticType as _, ErrorCode},
    message::{MessageClass, Method},
};

const METHODS: [Method; 7] =
    [BINDING, ALLOCATE, REFRESH, CREATE_PERMISSION, CHANNEL_BIND, CONNECT, CONNECTION_BIND];

/// Section 6.3.1.1 of RFC 8489.
#[test]
fn a_response_has_method_and_transaction_of_its_request() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let (mut successes, mut errors) = (0, 0);
    for ask in METHODS.iter().flat_map(|method| [Ask::new(*method), Ask::new(*method).signed(&alice)]) {
        let bytes = ask.bytes();
        let reply = world.ask(&ask);
        let message = reply.message();
        assert_eq!(message.transaction_id(), ask.transaction);
        // Checks the first two bits, the method bits and the cookie by hand: figure 3 of section 5.
        assert_eq!(reply.0[0] & 0xC0, 0);
        assert_eq!((reply.0[0] & 0x3E, reply.0[1] & 0xEF), (bytes[0] & 0x3E, bytes[1] & 0xEF));
        assert_eq!(reply.0[4..8], [0x21, 0x12, 0xA4, 0x42]);
        assert_eq!(usize::from(u16::from_be_bytes([reply.0[2], reply.0[3]])), reply.0.len() - 20);
        if reply.is_success() {
            successes += 1;
        } else {
            assert!(message.has_class(MessageClass::Error) && message.has_attribute(ErrorCode::TYPE));
            errors += 1;
        }
    }
    assert_eq!((successes, errors), (2, 12));
}

/// Section 14.8 of RFC 8489: fewer than 128 characters, even if the phrase includes data from the request.
#[test]
fn reason_phrases_and_software_are_short() {
    let longest = "2606:4700:1234:5678:9abc:def0:1234:5678";
    let mut world = World::with(ServerConfig {
        peers: PeerRules { deny: vec!["2606:4700::/32".parse().unwrap()], ..Default::default() },
        ..config()
    });
    let alice = world.credentials("alice", Scheme::Md5);
    let v6 = RequestedAddressFamily::new(AddressFamily::IPV6);
    world.ask(&Ask::allocate().with(&v6).signed(&alice)).success();
    let denied = Ask::permit(&format!("[{longest}]:65535")).peer("[2a00::1]:1");
    for ask in [denied, Ask::new(CHANNEL_BIND), Ask::allocate(), Ask::permit(PEER)] {
        let reply = world.ask(&ask.signed(&alice));
        let reason = reply.reason();
        assert!(!reason.is_empty() && reason.chars().count() < 128, "{reason}");
        let software = String::from_utf8(reply.raw(0x8022).expect("a signed response")).expect("UTF-8");
        assert!(software.chars().count() < 128);
    }
}

/// Sections 6.3 and 14 of RFC 8489.
#[test]
fn optional_attributes_are_ignored_and_order_does_not_matter() {
    let transport = RequestedTransport::new(RequestedTransport::UDP);
    let lifetime = turn::Lifetime::new(700);
    let orders = [
        Ask::new(ALLOCATE).with(&transport).with(&lifetime),
        Ask::new(ALLOCATE).with(&lifetime).with(&transport),
        // Comprehension-optional attributes, and known attributes that mean nothing in an Allocate.
        Ask::new(ALLOCATE)
            .raw(0xFFFE, b"whatever")
            .with(&lifetime)
            .raw(0x000C, &[0x40, 0, 0, 0])
            .peer(PEER)
            .raw(0x8FFF, b"")
            .with(&transport),
        // The first of duplicate attributes is used.
        Ask::new(ALLOCATE)
            .with(&lifetime)
            .with(&transport)
            .with(&turn::Lifetime::new(900))
            .with(&RequestedTransport::new(132)),
    ];
    for ask in orders {
        let mut world = World::new();
        assert_eq!(world.ask_as("alice", ask).success().lifetime(), 700);
        assert_eq!(
            world.feed(&Ask::send(PEER, b"x")),
            Outcome::Drop(DropReason::NoPermission),
            "XOR-PEER-ADDRESS in an Allocate permits nothing"
        );
    }
}

/// Section 14 of RFC 8489; sections 18.1, 18.6, 18.7 and 18.8 of RFC 8656.
#[test]
fn padding_and_reserved_bits_of_requests_are_ignored() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let allocate = Ask::new(ALLOCATE)
        .raw(0x0019, &[17, 0xFF, 0xFF, 0xFF])
        .raw(0x0017, &[1, 0xFF, 0xFF, 0xFF])
        .raw(0x0018, &[0x7F]);
    let reply = world.ask(&allocate.signed(&alice)).success();
    assert!(reply.relayed()[0].is_ipv4() && reply.relayed()[0].port().is_multiple_of(2));
    let bind = Ask::new(CHANNEL_BIND).raw(0x000C, &[0x40, 0, 0xFF, 0xFF]);
    // The first byte of an address is reserved.
    let mut peer = Ask::bind(0x4000, PEER).bytes()[32..40].to_vec();
    assert_eq!(peer[..2], [0, 1]);
    peer[0] = 0xFF;
    world.ask(&bind.raw(0x0012, &peer).signed(&alice)).success();
    assert!(matches!(
        world.feed(&channel_data(0x4000, b"x")),
        Outcome::ToPeer { peer, .. } if peer == address(PEER)
    ));
    let mut bytes = Ask::new(BINDING).raw(0x8022, b"x").bytes();
    let len = bytes.len();
    bytes[len - 3..].fill(0xFF);
    assert!(world.feed(&bytes).reply().success().has(AttributeType::new(0x0020)));
}

/// Section 6.3 of RFC 8489: a message that starts like another protocol is dropped (RFC 7983, RFC 9443).
#[test]
fn messages_of_other_protocols_are_dropped() {
    let mut world = World::new();
    let binding = Ask::new(BINDING).bytes();
    for first in 1..=u8::MAX {
        let mut bytes = binding.clone();
        bytes[0] = first;
        assert!(matches!(world.feed(&bytes), Outcome::Drop(_)), "{first}");
    }
}

/// Section 5 of RFC 8656: the transport is part of the 5-tuple.
#[test]
fn each_transport_has_its_own_5_tuple() {
    let mut world = World::with(streams());
    for listener in 0..4 {
        world.client.listener.0 = listener;
        world.ask_as("alice", Ask::allocate()).success();
    }
    assert_eq!(world.server.allocations(), 4);
}

/// Section 6.1 of RFC 8489, with the longest possible responses.
#[test]
fn responses_fit_into_a_datagram_of_576_bytes() {
    // Names of the maximum configurable length.
    let mut config = everything();
    (config.realm, config.software) = ("r".repeat(127), Some("s".repeat(127)));
    (config.third_party.server_name, config.third_party.keys[0].realm) =
        ("n".repeat(255), config.realm.clone());
    config.listeners = streams().listeners;
    let mut world = World::with(config.clone());
    let unsigned = world.ask(&Ask::allocate());
    assert!(unsigned.has(AttributeType::new(0x802E)), "THIRD-PARTY-AUTHORIZATION");
    let alice = world.credentials("alice", Scheme::Sha256);
    let both = Ask::allocate().with(&AdditionalAddressFamily::new(AddressFamily::IPV6)).raw(TICKET, &[]);
    let allocated = world.ask(&both.fingerprint().signed(&alice)).success();
    let denied = Ask::permit("[fe80:1234:5678:9abc:def0:1234:5678:9abc]:1").peer("10.0.0.1:1");
    let denied = world.ask(&denied.signed(&alice).fingerprint());
    let v6 = address("[2001:db8::5]:3478");
    config.alternates[0].domain = Some("d".repeat(253));
    config.alternates.push(Alternate { address: v6, ..config.alternates[0].clone() });
    config.alternates.iter_mut().for_each(|it| it.when = AlternateWhen::Always);
    let mut world = World::with(config);
    world.client.listener.0 = 3;
    let alice = world.credentials("alice", Scheme::Sha256);
    let redirected = world.ask(&Ask::allocate().fingerprint().signed(&alice));
    assert!(
        redirected.alternates().len() == 2 && redirected.has(AttributeType::new(0x8003)),
        "ALTERNATE-DOMAIN"
    );
    for reply in [unsigned, allocated, denied, redirected] {
        assert!(reply.0.len() <= 576 - 28, "{} bytes", reply.0.len());
    }
}

/// Sections 14.9 and 14.10 of RFC 8489: values of up to 763 bytes are readable, but this server's are
/// shorter.
#[test]
fn a_long_realm_is_unknown_and_a_long_nonce_is_stale() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    assert!(alice.nonce.len() < 128 && alice.realm.len() < 128);
    let long = "x".repeat(763);
    let key = Key::long_term(KeyAlgorithm::Md5, "alice", REALM, alice.password.as_bytes());
    for (realm, nonce, code) in [(&long[..], &alice.nonce[..], 401), (REALM, &long, 438)] {
        let ask = Ask::allocate().raw(0x0006, b"alice").raw(0x0014, realm.as_bytes());
        let ask = ask.raw(0x0015, nonce.as_bytes()).bytes();
        let mac = Mac::Sha1;
        assert_eq!(world.feed(&signed(&ask, &key, mac, false)).reply().code(), Some(code));
    }
}

/// Section 12 of RFC 8489.
#[test]
fn a_binding_request_is_never_redirected() {
    let mut config = everything();
    config.alternates[0].when = AlternateWhen::Always;
    let mut world = World::with(config);
    // Requests with CHANGE-REQUEST, PADDING or RESPONSE-PORT are not redirected either (RFC 5780 section
    // 6.1).
    let binding = || Ask::new(BINDING);
    for ask in [
        binding(),
        binding().raw(0x0003, &[0, 0, 0, 6]),
        binding().raw(0x0026, &[0; 100]),
        binding().raw(0x0027, &[0x9C, 0x41, 0, 0]),
    ] {
        assert!(world.ask(&ask).success().alternates().is_empty());
    }
}

/// Section 12.5 of RFC 8656.
#[test]
fn icmp_errors_use_data_indications_despite_a_channel() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    let error = IcmpError { icmp_type: 3, code: 3, info: 0 };
    let verdict = world.server.data.from_icmp(world.now, relay, address(PEER), error).into();
    let Outcome::Reply(bytes) = verdict else { panic!("{verdict:?}") };
    assert_eq!(bytes[..2], [0, 0x17], "a Data indication");
}

/// Section 3.1.2 of RFC 8016.
#[test]
fn an_allocate_with_a_non_empty_ticket_is_400() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().raw(TICKET, &[7; 32]).signed(&alice)).code(), Some(400));
    assert!(
        world.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success().ticket().unwrap().len() < 64
    );
}
