//! Dual-stack allocations (RFC 8656 sections 7.2, 7.3 and 8).

use crate::common::{turn::*, *};
use stun_types::attribute::AttributeStaticType as _;

fn ask(credentials: &Credentials) -> Ask {
    Ask::allocate().with(&AdditionalAddressFamily::new(AddressFamily::IPV6)).signed(credentials)
}

fn dual(world: &mut World) -> (Credentials, RelayId, RelayId) {
    let alice = world.credentials("alice", Scheme::Md5);
    world.ask(&ask(&alice)).success();
    let v4 = world.last_opened();
    (alice, v4, RelayId { family: Family::V6, ..v4 })
}

fn only(family: AddressFamily, seconds: u32) -> Ask {
    Ask::refresh(seconds).with(&RequestedAddressFamily::new(family))
}

#[test]
fn a_dual_stack_allocation_has_an_address_of_each_family() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let request = world.feed(&ask(&alice).bytes()).opens();
    assert_eq!((request.first.family, request.first.port), (Family::V4, PortRequest::Any));
    assert_eq!(
        request.second.map(|second| (second.family, second.port)),
        Some((Family::V6, PortRequest::Any))
    );
    let reply = world.open(&request).success();
    assert_eq!(reply.relayed(), [address("203.0.113.1:50002"), address("[2001:db8::1]:50004")]);
    assert!(!reply.has(AddressErrorCode::TYPE));
    let relay = world.last_opened();
    for (peer, family) in [(PEER, Family::V4), (PEER_V6, Family::V6)] {
        world.ask(&Ask::permit(peer).signed(&alice)).success();
        assert!(matches!(
            world.feed(&Ask::send(peer, b"x")),
            Outcome::ToPeer { relay, .. } if relay.family == family
        ));
        assert!(matches!(
            world.peer_sends(RelayId { family, ..relay }, peer, b"x"),
            Outcome::ToClient { .. }
        ));
    }
    assert_eq!(world.server.policy_mut().held(), 1, "both addresses count as one allocation");
}

/// coturn's client uses the attribute number of the drafts of RFC 8656.
#[test]
fn the_draft_attribute_number_has_the_same_meaning() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let drafted = |value: &[u8]| Ask::allocate().raw(0x8032, value).signed(&alice);
    for malformed in [&[2][..], &[1, 0, 0, 0]] {
        assert_eq!(world.ask(&drafted(malformed)).code(), Some(400));
    }
    let request = world.feed(&drafted(&[2, 0, 0, 0]).bytes()).opens();
    assert_eq!(request.second.map(|second| second.family), Some(Family::V6));
    assert_eq!(world.open(&request).success().relayed().len(), 2);
}

#[test]
fn if_only_the_second_address_fails_the_reply_has_an_address_error() {
    for (result, code) in [(OpenResult::NoCapacity, 508), (OpenResult::UnsupportedFamily, 440)] {
        let mut world = World::new();
        let alice = world.credentials("alice", Scheme::Md5);
        let ask = ask(&alice);
        let request = world.feed(&ask.bytes()).opens();
        let relayed = address("203.0.113.1:50000");
        let reply = world.opened(request.allocation, OpenResult::Opened { relayed }, Some(result)).success();
        assert_eq!(reply.relayed(), [relayed]);
        let error = reply.get::<AddressErrorCode>();
        assert_eq!((error.family(), error.error().code()), (AddressFamily::IPV6, code));
        assert!(!error.error().reason().is_empty());
        assert_eq!(world.ask(&ask), reply, "same response to the retransmission");
        assert_eq!(world.ask(&Ask::permit(PEER_V6).signed(&alice)).code(), Some(443));
    }
}

#[test]
fn a_family_that_is_not_configured_is_an_address_error() {
    for (relay_v4, relay_v6, missing) in
        [(true, false, AddressFamily::IPV6), (false, true, AddressFamily::IPV4)]
    {
        let mut world = World::with(ServerConfig { relay_v4, relay_v6, ..config() });
        let alice = world.credentials("alice", Scheme::Md5);
        let reply = world.ask(&ask(&alice)).success();
        assert_eq!(reply.relayed().len(), 1);
        let error = reply.get::<AddressErrorCode>();
        assert_eq!((error.family(), error.error().code()), (missing, 440));
    }
}

#[test]
fn if_only_the_first_address_fails_the_second_is_enough() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let request = world.feed(&ask(&alice).bytes()).opens();
    let relayed = address("[2001:db8::1]:50000");
    let second = Some(OpenResult::Opened { relayed });
    let reply = world.opened(request.allocation, OpenResult::NoCapacity, second).success();
    assert_eq!(reply.relayed(), [relayed]);
    let error = reply.get::<AddressErrorCode>();
    assert_eq!((error.family(), error.error().code()), (AddressFamily::IPV4, 508));
    assert!(
        matches!(world.effects()[..], [Effect::Opened { relayed: (first, None), .. }] if first == relayed)
    );
    assert_eq!(world.ask(&Ask::permit(PEER).signed(&alice)).code(), Some(443));
    world.ask(&Ask::permit(PEER_V6).signed(&alice)).success();
}

#[test]
fn if_both_addresses_fail_the_error_is_that_of_the_first() {
    for second in [Some(OpenResult::UnsupportedFamily), None] {
        let mut world = World::new();
        let alice = world.credentials("alice", Scheme::Md5);
        let request = world.feed(&ask(&alice).bytes()).opens();
        let reply = world.opened(request.allocation, OpenResult::NoCapacity, second);
        assert_eq!(reply.code(), Some(508));
        assert_eq!(world.server.allocations(), 0);
        assert_eq!(world.server.policy_mut().held(), 0);
    }
}

#[test]
fn one_family_can_be_deleted_separately() {
    let mut world = World::new();
    let (alice, v4, v6) = dual(&mut world);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    world.ask(&Ask::bind(0x4001, PEER_V6).signed(&alice)).success();
    let delete = only(AddressFamily::IPV4, 0).signed(&alice);
    let reply = world.ask(&delete).success();
    assert_eq!(reply.lifetime(), 0);
    assert_eq!(world.effects(), [Effect::RelayClosed { relay: v4 }]);
    assert_eq!(world.ask(&delete), reply, "same response to the retransmission");

    assert_eq!(world.feed(&channel_data(0x4000, b"x")), Outcome::Drop(DropReason::UnboundChannel));
    assert_eq!(world.peer_sends(v4, PEER, b"x"), Outcome::Drop(DropReason::NoPermission));
    assert_eq!(world.ask(&Ask::permit(PEER).signed(&alice)).code(), Some(443));
    assert_eq!(world.ask(&only(AddressFamily::IPV4, 600).signed(&alice)).code(), Some(443));
    assert!(world.feed(&channel_data(0x4001, b"x")).goes_to_peer());
    assert!(world.peer_sends(v6, PEER_V6, b"x").goes_to_client());

    world.ask(&only(AddressFamily::IPV6, 0).signed(&alice)).success();
    let effects = world.effects();
    let [Effect::Closed { reason: ClosedReason::Deleted, relayed, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert!(
        relayed[0].is_some_and(|v4| v4.is_ipv4()),
        "the address that was deleted first is missing: {relayed:?}"
    );
    assert!(relayed[1].is_some_and(|v6| v6.is_ipv6()), "{relayed:?}");
    assert_eq!(world.server.allocations(), 0);
}

#[test]
fn a_lost_relay_address_ends_its_family_and_then_the_allocation() {
    let mut world = World::new();
    let (_, v4, v6) = dual(&mut world);
    assert_eq!(world.server.relays(), [v4, v6]);
    let now = world.now;
    for _ in 0..2 {
        world.server.end_relay(now, v6, ClosedReason::AddressGone);
    }
    assert_eq!(world.effects(), [Effect::RelayClosed { relay: v6 }]);
    assert_eq!(world.server.relays(), [v4]);
    world.server.end_relay(now, v4, ClosedReason::AddressGone);
    let effects = world.effects();
    assert!(
        matches!(&effects[..], [Effect::Closed { reason: ClosedReason::AddressGone, .. }]),
        "{effects:?}"
    );
    assert_eq!((world.server.allocations(), world.server.relays()), (0, vec![]));
}

#[test]
fn each_family_expires_separately() {
    let mut world = World::new();
    let (alice, v4, _) = dual(&mut world);
    world.ask(&only(AddressFamily::IPV6, 1000).signed(&alice)).success();
    world.sleep(600);
    assert_eq!(world.effects(), [Effect::RelayClosed { relay: v4 }]);
    assert_eq!(world.server.allocations(), 1);
    world.sleep(400);
    assert!(matches!(&world.effects()[..], [Effect::Closed { reason: ClosedReason::Expired, .. }]));
    assert_eq!(world.server.poll_timeout(), None);
}

#[test]
fn a_refresh_without_a_family_applies_to_both_families() {
    let mut world = World::new();
    let (alice, ..) = dual(&mut world);
    world.ask(&Ask::refresh(1000).signed(&alice)).success();
    world.sleep(999);
    assert!(world.effects().is_empty());
    world.sleep(1);
    assert_eq!(world.server.allocations(), 0);
}

#[test]
fn a_refresh_of_a_missing_family_is_443() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    assert_eq!(world.ask(&only(AddressFamily::IPV6, 600).signed(&alice)).code(), Some(443));
    assert_eq!(world.ask(&only(AddressFamily::IPV6, 0).signed(&alice)).code(), Some(443));
    assert_eq!(world.ask(&Ask::refresh(600).raw(0x0017, &[1]).signed(&alice)).code(), Some(400));
    assert_eq!(world.ask(&Ask::refresh(600).raw(0x0017, &[9, 0, 0, 0]).signed(&alice)).code(), Some(443));
    world.ask(&only(AddressFamily::IPV4, 600).signed(&alice)).success();
}
