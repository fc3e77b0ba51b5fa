//! Whatever arrives, the server neither panics nor grows beyond its bounds, and its books agree.

use crate::common::{turn::*, *};
use proptest::prelude::*;
use turnpike_turn::server::{
    ClosedReason, Effect, Family, IcmpError, ListenerId, OpenResult, RelayId, ServerConfig,
};

/// Bytes that look like something: a header of ours with anything after it, or anything at all.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let anything = prop::collection::vec(any::<u8>(), 0..200);
    let stun = (
        0..0x120_u16,
        prop::collection::vec((any::<u16>(), prop::collection::vec(any::<u8>(), 0..24)), 0..8),
    )
        .prop_map(|(kind, attributes)| {
            let mut bytes = [&kind.to_be_bytes()[..], &[0, 0, 0x21, 0x12, 0xA4, 0x42], &[9; 12]].concat();
            for (kind, value) in attributes {
                // Half of them attributes that mean something.
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

#[derive(Clone, Debug)]
enum Step {
    Bytes(Vec<u8>),
    Allocate { user: bool, dual: bool, opens: bool, lifetime: u32 },
    Refresh { seconds: u32, family: u8 },
    Permit(u8),
    Bind(u8, u8),
    ChannelData(u8),
    Send(u8),
    FromPeer(u8),
    Icmp(u8),
    Client(u8),
    Sleep(u16),
    CloseAll,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => bytes().prop_map(Step::Bytes),
        4 => (any::<bool>(), any::<bool>(), prop::bool::weighted(0.8), 0..5000_u32)
            .prop_map(|(user, dual, opens, lifetime)| Step::Allocate { user, dual, opens, lifetime }),
        2 => (prop_oneof![Just(0), 1..5000_u32], 0..3_u8).prop_map(|(seconds, family)| Step::Refresh { seconds, family }),
        3 => any::<u8>().prop_map(Step::Permit),
        3 => (0..20_u8, any::<u8>()).prop_map(|(number, peer)| Step::Bind(number, peer)),
        3 => (0..20_u8).prop_map(Step::ChannelData),
        2 => any::<u8>().prop_map(Step::Send),
        3 => any::<u8>().prop_map(Step::FromPeer),
        1 => any::<u8>().prop_map(Step::Icmp),
        3 => (0..6_u8).prop_map(Step::Client),
        2 => (0..700_u16).prop_map(Step::Sleep),
        1 => prop::bool::weighted(0.1).prop_map(|all| if all { Step::CloseAll } else { Step::Sleep(1) }),
    ]
}

fn peer(n: u8) -> String {
    match n % 4 {
        0 => format!("[2606:4700::{:x}]:{}", n % 32, 7000 + u16::from(n)),
        1 => format!("10.0.0.{n}:7000"),
        _ => format!("198.41.0.{}:{}", n % 32, 7000 + u16::from(n)),
    }
}

proptest! {
    #![proptest_config(crate::kept_seeds())]

    #[test]
    fn any_bytes_are_answered_dropped_or_relayed_and_leave_nothing(datagrams in prop::collection::vec(bytes(), 1..50)) {
        let mut world = World::new();
        for datagram in &datagrams {
            if let Outcome::Reply(reply) = world.feed(datagram) {
                // The oracle reads whatever we answer, and it is never much larger than the question.
                let reply = Reply(reply);
                reply.message();
                prop_assert!(reply.0.len() <= datagram.len() + 80);
            }
        }
        prop_assert_eq!(world.server.allocations(), 0);
        prop_assert_eq!(world.server.gate_mut().lookups, 0);
        prop_assert!(world.effects().len() <= 50);
    }

    #[test]
    fn any_bytes_to_an_open_server_do_not_panic_it(datagrams in prop::collection::vec(bytes(), 1..50)) {
        let mut world = World::with(ServerConfig { authenticate: false, ..config() });
        for datagram in &datagrams {
            if let Outcome::Open(request) = world.feed(datagram) {
                world.open(&request);
            }
        }
        prop_assert!(world.server.allocations() <= 1);
    }

    /// Sequences of sensible and senseless requests from several clients: what the effects say is what exists, the gate
    /// holds one count per allocation, and nothing outgrows its limit.
    #[test]
    fn books_agree_after_any_sequence(steps in prop::collection::vec(step(), 1..120)) {
        let gate = TestGate { per_user: 3, total: 5, ..TestGate::default() };
        let mut world = World::with_gate(ServerConfig { max_permissions: 6, max_channels: 12, ..everything() }, gate);
        let mut open = std::collections::BTreeMap::new();
        let mut last = None;
        for step in steps {
            // Nonces expire in long sequences.
            let user = if world.client.address.port().is_multiple_of(2) { "alice" } else { "bob" };
            match step {
                Step::Bytes(bytes) => { world.feed(&bytes); }
                Step::Allocate { user: right, dual, opens, lifetime } => {
                    let who = credentials(&mut world, if right { user } else { "alice" });
                    let mut ask = Ask::allocate().with(&Lifetime::new(lifetime));
                    if dual {
                        ask = ask.with(&AdditionalAddressFamily::new(AddressFamily::IPV6));
                    }
                    if let Outcome::Open(request) = world.feed(&ask.signed(&who).bytes()) {
                        if opens {
                            last = Some(request.allocation);
                            world.open(&request).success();
                        } else {
                            let second = request.second.map(|_| OpenResult::NoCapacity);
                            world.opened(request.allocation, OpenResult::NoCapacity, second);
                        }
                    }
                }
                Step::Refresh { seconds, family } => {
                    let who = credentials(&mut world, user);
                    let mut ask = Ask::refresh(seconds);
                    if family > 0 {
                        ask = ask.raw(0x0017, &[family, 0, 0, 0]);
                    }
                    world.ask(&ask.signed(&who));
                }
                Step::Permit(n) => {
                    let who = credentials(&mut world, user);
                    world.ask(&Ask::permit(&peer(n)).signed(&who));
                }
                Step::Bind(number, n) => {
                    let who = credentials(&mut world, user);
                    world.ask(&Ask::bind(0x4000 + u16::from(number), &peer(n)).signed(&who));
                }
                Step::ChannelData(number) => { world.feed(&channel_data(0x4000 + u16::from(number), b"payload")); }
                Step::Send(n) => { world.feed(&Ask::send(&peer(n), b"payload")); }
                Step::FromPeer(n) | Step::Icmp(n) => {
                    let Some(allocation) = last else { continue };
                    let to = address(&peer(n));
                    let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
                    let relay = RelayId { allocation, family };
                    if matches!(step, Step::FromPeer(_)) {
                        world.peer_sends(relay, &peer(n), b"payload");
                    } else {
                        let error = IcmpError { icmp_type: 3, code: 4, info: 1400 };
                        let _ = Outcome::from(world.server.from_icmp(world.now, relay, to, error));
                    }
                }
                Step::Client(n) => {
                    world.client = client(40_000 + u16::from(n));
                    world.client.listener = ListenerId(u16::from(n / 4));
                }
                Step::Sleep(seconds) => world.sleep(u64::from(seconds)),
                Step::CloseAll => world.server.close_all(world.now, ClosedReason::Shutdown),
            }
            for effect in world.effects() {
                match effect {
                    Effect::Opened { allocation, client, relayed, .. } => {
                        let relays = 1 + usize::from(relayed.1.is_some());
                        prop_assert!(open.insert(allocation.index, (allocation, client, relays)).is_none());
                    }
                    Effect::RelayClosed { relay } => {
                        let (_, _, relays) = open.get_mut(&relay.allocation.index).expect("it is open");
                        prop_assert_eq!(*relays, 2);
                        *relays = 1;
                    }
                    Effect::Closed { allocation, client, .. } => {
                        let (known, owner, _) = open.remove(&allocation.index).expect("it was open");
                        prop_assert_eq!((known, owner), (allocation, client));
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(world.server.allocations(), open.len());
            prop_assert_eq!(world.server.gate_mut().held(), open.len());
            prop_assert!(open.len() <= 5);
            prop_assert_eq!(world.server.poll_timeout().is_some(), !open.is_empty());
        }
        world.sleep(4000);
        prop_assert_eq!(world.server.allocations(), 0);
        prop_assert_eq!(world.server.gate_mut().held(), 0);
    }
}

fn credentials(world: &mut World, user: &str) -> Credentials {
    // An allocation may be there already; the challenge comes first all the same.
    world.credentials(user, Scheme::Md5)
}
