//! Relaying of ICMP errors to clients (RFC 8656 sections 11.5 and 18.13).

use crate::common::{turn::*, *};
use stun_types::{attribute::AttributeStaticType as _, message::MessageClass};

fn relayed(
    world: &mut World,
    relay: RelayId,
    peer: &str,
    icmp: (u8, u8, u32),
) -> Result<(u8, u8, u32), DropReason> {
    let (icmp_type, code, info) = icmp;
    let error = IcmpError { icmp_type, code, info };
    match world.server.data.from_icmp(world.now, relay, address(peer), error).into() {
        Outcome::Reply(bytes) => {
            let reply = Reply(bytes);
            let message = reply.message();
            assert!(
                message.has_class(MessageClass::Indication) && message.has_method(turn_types::message::DATA)
            );
            assert!(!message.has_attribute(Data::TYPE));
            assert_eq!(reply.get::<XorPeerAddress>().addr(message.transaction_id()), address(peer));
            let icmp = reply.get::<Icmp>();
            Ok((icmp.icmp_type(), icmp.code(), icmp.data()))
        }
        Outcome::Drop(reason) => Err(reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn icmp_errors_are_relayed_only_for_permitted_peers() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let also = AdditionalAddressFamily::new(AddressFamily::IPV6);
    world.ask(&Ask::allocate().with(&also).signed(&alice)).success();
    let v4 = world.last_opened();
    let v6 = RelayId { family: Family::V6, ..v4 };
    assert_eq!(relayed(&mut world, v4, PEER, (3, 3, 0)), Err(DropReason::NoPermission));
    world.ask(&Ask::permit(PEER).peer(PEER_V6).signed(&alice)).success();

    // Port unreachable, fragmentation needed, time exceeded; only the second carries data (the MTU).
    assert_eq!(relayed(&mut world, v4, PEER, (3, 3, 99)), Ok((3, 3, 0)));
    assert_eq!(relayed(&mut world, v4, PEER, (3, 4, 1400)), Ok((3, 4, 1400)));
    assert_eq!(relayed(&mut world, v4, PEER, (11, 0, 99)), Ok((11, 0, 0)));
    for kind in [0, 1, 2, 4, 5, 8, 12, 255] {
        assert_eq!(relayed(&mut world, v4, PEER, (kind, 0, 0)), Err(DropReason::IcmpType), "ICMPv4 {kind}");
    }
    // Unreachable, packet too big, time exceeded.
    assert_eq!(relayed(&mut world, v6, PEER_V6, (1, 4, 99)), Ok((1, 4, 0)));
    assert_eq!(relayed(&mut world, v6, PEER_V6, (2, 0, 1280)), Ok((2, 0, 1280)));
    assert_eq!(relayed(&mut world, v6, PEER_V6, (3, 1, 99)), Ok((3, 1, 0)));
    for kind in [0, 4, 11, 128] {
        assert_eq!(
            relayed(&mut world, v6, PEER_V6, (kind, 0, 0)),
            Err(DropReason::IcmpType),
            "ICMPv6 {kind}"
        );
    }
    assert_eq!(relayed(&mut world, v4, "198.41.0.5:1", (3, 3, 0)), Err(DropReason::NoPermission));
    world.sleep(300);
    assert_eq!(relayed(&mut world, v4, PEER, (3, 3, 0)), Err(DropReason::NoPermission));
    world.sleep(300);
    assert_eq!(relayed(&mut world, v4, PEER, (3, 3, 0)), Err(DropReason::StaleRelay));
    assert_eq!(world.server.stats().icmp_relayed, 6);
}
