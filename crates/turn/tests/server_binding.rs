//! Binding (RFC 8489 section 12), FINGERPRINT, unknown attributes, and messages that are not requests.

use crate::common::*;
use stun_types::{
    attribute::{AttributeStaticType as _, Fingerprint},
    message::Method,
};

#[test]
fn a_binding_request_returns_its_source_address() {
    let mut world = World::with(streams());
    for listener in 0..4 {
        for from in ["192.0.2.7:40000", "[2001:db8::7]:40000"] {
            (world.client.listener.0, world.client.address) = (listener, address(from));
            let reply = world.ask(&Ask::new(BINDING)).success();
            assert_eq!(reply.mapped(), address(from));
            assert!(!reply.has(Fingerprint::TYPE));
        }
    }
}

#[test]
fn a_fingerprint_is_answered_with_a_fingerprint() {
    let mut world = World::new();
    assert!(world.ask(&Ask::new(BINDING).fingerprint()).success().has(Fingerprint::TYPE));
    assert!(world.ask(&Ask::allocate().fingerprint()).has(Fingerprint::TYPE));
    for scheme in [Scheme::Md5, Scheme::Md5Sha256, Scheme::Sha256] {
        let alice = world.credentials("alice", scheme);
        let reply = world.ask(&Ask::refresh(1).signed(&alice).fingerprint());
        assert!(reply.has(Fingerprint::TYPE) && reply.is_signed(&alice));
    }
}

#[test]
fn a_wrong_fingerprint_is_dropped_and_counted() {
    let mut world = World::new();
    let mut bytes = Ask::new(BINDING).fingerprint().bytes();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(world.feed(&bytes), Outcome::Drop(DropReason::Fingerprint));
    assert_eq!(world.dropped(DropReason::Fingerprint), 1);
}

#[test]
fn unknown_comprehension_required_attributes_are_420_and_listed() {
    let mut world = World::new();
    let ask = Ask::new(BINDING).raw(0x7FFF, b"x").raw(0x0003, &[0, 0, 0, 6]).raw(0xFFFF, b"optional");
    let reply = world.ask(&ask);
    assert_eq!(reply.code(), Some(420));
    let unknown = reply.get::<UnknownAttributes>();
    assert!(unknown.has_attribute(AttributeType::new(0x7FFF)));
    assert!(unknown.has_attribute(AttributeType::new(0x0003)));
    assert!(!unknown.has_attribute(AttributeType::new(0xFFFF)));

    let alice = world.credentials("alice", Scheme::Sha256);
    let reply = world.ask(&Ask::allocate().raw(0x7FFF, b"x").signed(&alice));
    assert_eq!(reply.code(), Some(420));
    assert!(reply.is_signed(&alice));
    // Authentication comes first.
    assert_eq!(world.ask(&Ask::allocate().raw(0x7FFF, b"x")).code(), Some(401));
}

/// stuntman's client and others add CHANGE-REQUEST to every request, because some servers respond only to
/// such requests.
#[test]
fn a_change_request_without_flags_is_ignored() {
    // Request of stuntman's `stunclient` in basic mode.
    let stuntman = [
        &[0, 1, 0, 8, 0x21, 0x12, 0xA4, 0x42, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2][..],
        &[0, 3, 0, 4, 0, 0, 0, 0],
    ]
    .concat();
    for transport in [Transport::Udp, Transport::Tcp] {
        let listeners = vec![ListenerProfile { transport, ..ListenerProfile::default() }];
        let mut world = World::with(ServerConfig { listeners, ..config() });
        assert_eq!(world.feed(&stuntman).reply().success().mapped(), world.client.address);
        // Undefined bits are ignored.
        world.ask(&Ask::new(BINDING).raw(0x0003, &[0xFF, 0xFF, 0xFF, 0xF9])).success();
        for asks in [&[0, 0, 0, 2][..], &[0, 0, 0, 4], &[0, 0, 0, 6], &[0, 0, 0], &[]] {
            let reply = world.ask(&Ask::new(BINDING).raw(0x0003, asks));
            assert_eq!(reply.code(), Some(420), "{asks:?}");
            assert!(reply.get::<UnknownAttributes>().has_attribute(AttributeType::new(0x0003)));
        }
    }
}

/// Request of RFC 5769 section 2.1: PRIORITY, ICE-CONTROLLED, USERNAME, MESSAGE-INTEGRITY and FINGERPRINT.
const ICE_CHECK: &[u8] = b"\x00\x01\x00\x58\x21\x12\xa4\x42\xb7\xe7\xa7\x01\xbc\x34\xd6\x86\xfa\x87\xdf\xae\
    \x80\x22\x00\x10STUN test client\x00\x24\x00\x04\x6e\x00\x01\xff\
    \x80\x29\x00\x08\x93\x2f\xf9\xb1\x51\x26\x3b\x36\x00\x06\x00\x09evtj:h6vY\x20\x20\x20\
    \x00\x08\x00\x14\x9a\xea\xa7\x0c\xbf\xd8\xcb\x56\x78\x1e\xf2\xb5\xb2\xd3\xf2\x49\xc1\xb5\x71\xa2\
    \x80\x28\x00\x04\xe5\x7a\x3b\xcf";

#[test]
fn ice_attributes_in_a_binding_request_are_ignored() {
    let mut world = World::new();
    let reply = world.feed(ICE_CHECK).reply().success();
    assert_eq!(reply.mapped(), world.client.address);
    assert!(reply.has(Fingerprint::TYPE), "the request has a FINGERPRINT");
    // The check in either role, with a nomination before MESSAGE-INTEGRITY (RFC 8445 section 7.1).
    for role in [0x8029, 0x802A] {
        let check = Ask::new(BINDING).raw(0x0024, &[0x6E, 0, 1, 0xFF]).raw(0x0025, &[]).raw(role, &[7; 8]);
        world.ask(&check.fingerprint()).success();
    }
    let reply = world.ask(&Ask::new(BINDING).raw(0x0024, &[0; 4]).raw(0x7FFF, b"x"));
    assert_eq!(reply.code(), Some(420), "other attributes are still unknown");
    assert!(!reply.get::<UnknownAttributes>().has_attribute(AttributeType::new(0x0024)));
}

#[test]
fn unknown_attributes_are_listed_once_in_a_bounded_reply() {
    let mut world = World::new();
    let ask = (0..900).fold(Ask::new(BINDING), |ask, n| ask.raw(0x7000 + n % 800, b""));
    let reply = world.ask(&ask);
    assert_eq!(reply.code(), Some(420));
    let listed: Vec<u8> = (0x7000_u16..0x7000 + 800).flat_map(u16::to_be_bytes).collect();
    assert_eq!(reply.raw(0x000A), Some(listed));
    assert!(reply.0.len() <= ask.bytes().len());
}

#[test]
fn non_requests_are_dropped_with_a_reason() {
    let binding = Ask::new(BINDING).bytes();
    let altered = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = binding.clone();
        change(&mut bytes);
        bytes
    };
    let cases: [(Vec<u8>, DropReason); 16] = [
        (vec![], DropReason::NotStun),
        (vec![0x80; 100], DropReason::NotStun),
        (vec![0xFF], DropReason::NotStun),
        (vec![0], DropReason::Truncated),
        (binding[..19].to_vec(), DropReason::Truncated),
        (altered(&|bytes| bytes[3] = 4), DropReason::Truncated),
        (altered(&|bytes| bytes.push(0)), DropReason::Malformed),
        (
            altered(&|bytes| {
                bytes[3] = 2;
                bytes.extend([0, 0]);
            }),
            DropReason::Malformed,
        ),
        (
            altered(&|bytes| {
                bytes[3] = 4;
                bytes.extend([0, 6, 0, 1]);
            }),
            DropReason::Malformed,
        ),
        (altered(&|bytes| bytes[0..2].copy_from_slice(&[0x01, 0x01])), DropReason::UnexpectedClass),
        (altered(&|bytes| bytes[0..2].copy_from_slice(&[0x01, 0x13])), DropReason::UnexpectedClass),
        (Ask::indication(BINDING).bytes(), DropReason::Keepalive),
        (Ask::indication(ALLOCATE).bytes(), DropReason::UnexpectedClass),
        (Ask::new(Method::new(0x0D)).bytes(), DropReason::UnknownMethod),
        (Ask::new(BINDING).raw(0x8022, &[0; 4200]).bytes(), DropReason::Oversized),
        (channel_data(0x5000, b"x"), DropReason::ChannelNumber),
    ];
    for (bytes, reason) in cases {
        let mut world = World::new();
        assert_eq!(world.feed(&bytes), Outcome::Drop(reason), "{:02x?}", &bytes[..bytes.len().min(24)]);
        assert_eq!(world.dropped(reason), 1);
    }
}

/// RFC 3489 message: a transaction ID of 16 bytes without the magic cookie.
fn classic(message_type: u16, attributes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(attributes.len()).unwrap();
    [&message_type.to_be_bytes()[..], &length.to_be_bytes(), b"sixteen bytes ID", attributes].concat()
}

/// RFC 5389 section 12.2, with the requests of Debian's `stun`, pystun3 and jstun.
#[test]
fn an_rfc_3489_client_gets_mapped_address() {
    let mut world = World::new();
    let asks_for_nothing: &[u8] = &[0, 3, 0, 4, 0, 0, 0, 0];
    for (attributes, from, mapped) in [
        (&[][..], "192.0.2.7:40000", &[0, 1, 0, 8, 0, 1, 0x9C, 0x40, 192, 0, 2, 7][..]),
        (asks_for_nothing, "192.0.2.7:40000", &[0, 1, 0, 8, 0, 1, 0x9C, 0x40, 192, 0, 2, 7]),
        (
            &[],
            "[2001:db8::7]:40000",
            &[0, 1, 0, 20, 0, 2, 0x9C, 0x40, 0x20, 1, 0xD, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7],
        ),
    ] {
        world.client.address = address(from);
        let reply = world.feed(&classic(0x0001, attributes));
        assert_eq!(reply, Outcome::Reply(classic(0x0101, mapped)), "{from}");
    }
}

#[test]
fn an_rfc_3489_response_address_is_420_and_a_change_is_dropped() {
    let mut world = World::new();
    let to_elsewhere: &[u8] = &[0, 2, 0, 8, 0, 1, 0, 80, 192, 0, 2, 1];
    let error = [0, 9, 0, 4, 0, 0, 4, 20, 0, 10, 0, 4, 0, 2, 0, 2];
    let reply = world.feed(&classic(0x0001, to_elsewhere));
    assert_eq!(reply, Outcome::Reply(classic(0x0111, &error)), "the attribute is listed twice");
    for flags in [2, 4, 6] {
        let from_elsewhere = [&[0, 3, 0, 4, 0, 0, 0, flags], to_elsewhere].concat();
        for attributes in [&from_elsewhere[..8], &from_elsewhere] {
            let outcome = world.feed(&classic(0x0001, attributes));
            assert_eq!(outcome, Outcome::Drop(DropReason::ClassicStun), "{attributes:?}");
        }
    }
}

/// RFC 8489 section 11.
#[test]
fn a_request_without_magic_cookie_over_dtls_is_500() {
    let listeners = vec![ListenerProfile { transport: Transport::Dtls, ..ListenerProfile::default() }];
    let mut world = World::with(ServerConfig { listeners, ..config() });
    for message_type in [0x0001, 0x0003] {
        let Outcome::Reply(bytes) = world.feed(&classic(message_type, &[])) else { panic!("no response") };
        let error = [&[0, 9, 0, 16, 0, 0, 5, 0][..], b"Server Error"].concat();
        assert_eq!(bytes, classic(message_type | 0x0110, &error));
    }
    assert_eq!(world.feed(&classic(0x0011, &[])), Outcome::Drop(DropReason::ClassicStun), "an indication");
}

#[test]
fn other_rfc_3489_messages_are_dropped() {
    let mut world = World::new();
    for message_type in [0x0002, 0x0003, 0x0011, 0x0101, 0x0111] {
        assert_eq!(world.feed(&classic(message_type, &[])), Outcome::Drop(DropReason::ClassicStun));
    }
    let long = [&[0x80, 0x22, 0x10, 0][..], &[0; 4096]].concat();
    assert_eq!(world.feed(&classic(0x0001, &long)), Outcome::Drop(DropReason::Oversized));
    assert_eq!(world.feed(&classic(0x0001, &[0, 6, 0, 200])), Outcome::Drop(DropReason::Malformed));
}
