//! Arbitrary bytes neither cause a panic nor leave state; `model` checks whole sequences.

use crate::common::*;
use proptest::prelude::*;

/// Plausible bytes: a valid header with anything after it, or anything at all.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let anything = prop::collection::vec(any::<u8>(), 0..200);
    let stun = (
        0..0x120_u16,
        prop::collection::vec((any::<u16>(), prop::collection::vec(any::<u8>(), 0..24)), 0..8),
    )
        .prop_map(|(kind, attributes)| {
            let mut bytes = [&kind.to_be_bytes()[..], &[0, 0, 0x21, 0x12, 0xA4, 0x42], &[9; 12]].concat();
            for (kind, value) in attributes {
                // Half of the types are meaningful attributes.
                let kind = if kind & 1 == 0 { kind & 0x002F } else { kind };
                bytes.extend(kind.to_be_bytes());
                bytes.extend(u16::try_from(value.len()).expect("a short value").to_be_bytes());
                bytes.extend(&value);
                bytes.resize(bytes.len().next_multiple_of(4), 0);
            }
            let length = u16::try_from(bytes.len() - 20).expect("a short message");
            bytes[2..4].copy_from_slice(&length.to_be_bytes());
            bytes
        });
    prop_oneof![anything, stun]
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    #[test]
    fn arbitrary_bytes_leave_no_state(datagrams in prop::collection::vec(bytes(), 1..50)) {
        let mut world = World::new();
        for datagram in &datagrams {
            if let Outcome::Reply(reply) = world.feed(datagram) {
                // The oracle can read every response, and none is much larger than its request.
                let reply = Reply(reply);
                reply.message();
                prop_assert!(reply.0.len() <= datagram.len() + 80);
            }
        }
        prop_assert_eq!(world.server.allocations(), 0);
        prop_assert_eq!(world.server.policy_mut().lookups.get(), 0);
        prop_assert!(world.effects().len() <= 50);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic_an_open_server(datagrams in prop::collection::vec(bytes(), 1..50)) {
        let mut world = World::with(ServerConfig { authenticate: false, ..config() });
        for datagram in &datagrams {
            if let Outcome::Open(request) = world.feed(datagram) {
                world.open(&request);
            }
        }
        prop_assert!(world.server.allocations() <= 1);
    }
}
