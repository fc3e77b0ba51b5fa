//! Binding (RFC 8489 section 12), FINGERPRINT, unknown attributes, and what is no request at all.

mod common;
use common::*;
use turnpike_turn::{
    server::DropReason,
    wire::stun_types::{
        attribute::{AttributeStaticType as _, AttributeType, Fingerprint, Software, UnknownAttributes},
        message::Method,
    },
};

#[test]
fn a_binding_request_learns_the_address_it_came_from() {
    let mut world = World::new();
    for from in ["192.0.2.7:40000", "[2001:db8::7]:40000"] {
        world.client.address = address(from);
        let reply = world.ask(&Ask::new(BINDING)).success();
        assert_eq!(reply.mapped(), address(from));
        assert!(!reply.has(Fingerprint::TYPE) && !reply.has(Software::TYPE));
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
    let reply = world.ask(&Ask::new(BINDING).raw(0x7FFF, b"x").raw(0x0003, &[0; 4]).raw(0xFFFF, b"optional"));
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

#[test]
fn a_list_of_unknown_attributes_is_no_larger_than_the_request() {
    let mut world = World::new();
    let ask = (0..500).fold(Ask::new(BINDING), |ask, n| ask.raw(0x7000 + n, b""));
    let reply = world.ask(&ask);
    assert_eq!(reply.code(), Some(420));
    assert!(reply.0.len() <= 20 + 8 + 4 + 64);
}

#[test]
fn what_is_no_request_is_dropped_with_its_reason() {
    let binding = Ask::new(BINDING).bytes();
    let altered = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = binding.clone();
        change(&mut bytes);
        bytes
    };
    let cases: [(Vec<u8>, DropReason); 17] = [
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
        (altered(&|bytes| bytes[4] = 0), DropReason::ClassicStun),
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
