//! NAT behaviour discovery (RFC 5780): sources, destinations, content and rate of responses.

use crate::common::*;
use proptest::prelude::*;
use stun_types::attribute::{AttributeStaticType as _, XorMappedAddress};
use turnpike_turn::server::{MAX_PADDING, NatDiscovery};

const CHANGE_REQUEST: u16 = 0x0003;
const PADDING: u16 = 0x0026;
const RESPONSE_PORT: u16 = 0x0027;
const MAPPED_ADDRESS: u16 = 0x0001;
const RESPONSE_ORIGIN: u16 = 0x802B;
const OTHER_ADDRESS: u16 = 0x802C;

const A1P1: &str = "192.0.2.1:3478";
const A1P2: &str = "192.0.2.1:3479";
const A2P1: &str = "192.0.2.2:3478";
const A2P2: &str = "192.0.2.2:3479";

/// Two addresses and ports per family; listeners 0 to 3 are IPv4, ordered by address and port, and 4 to 7
/// IPv6.
fn discovery() -> ServerConfig {
    let of = |addresses: [&str; 2], first: u16| NatDiscovery {
        addresses: addresses.map(|ip| ip.parse().unwrap()),
        external: [None; 2],
        ports: [3478, 3479],
        listeners: [[first, first + 1], [first + 2, first + 3]].map(|pair| pair.map(ListenerId)),
    };
    ServerConfig {
        nat_discovery: vec![of(["192.0.2.1", "192.0.2.2"], 0), of(["2001:db8::a1", "2001:db8::a2"], 4)],
        discovery_limits: DiscoveryLimits { per_source: 1000, total: 1000 },
        ..config()
    }
}

fn asks(world: &mut World, listener: u16, local: &str, ask: &Ask) -> (Client, Reply) {
    world.client.listener = ListenerId(listener);
    world.client.local = address(local);
    match world.server.from_client(world.now, &world.client.into(), &ask.bytes()) {
        Verdict::Reply { client, bytes, .. } => (client, Reply(bytes.to_vec())),
        other => panic!("{:?}", Outcome::from(other)),
    }
}

fn binding() -> Ask {
    Ask::new(BINDING)
}

fn change(flags: u8) -> Ask {
    binding().raw(CHANGE_REQUEST, &[0, 0, 0, flags])
}

fn plain_address(reply: &Reply, kind: u16) -> SocketAddr {
    let message = reply.message();
    let raw = message.raw_attribute(AttributeType::new(kind)).expect("the attribute");
    let port = u16::from_be_bytes(raw.value[2..4].try_into().unwrap());
    match raw.value[1] {
        1 => SocketAddr::new(<[u8; 4]>::try_from(&raw.value[4..]).unwrap().into(), port),
        2 => SocketAddr::new(<[u8; 16]>::try_from(&raw.value[4..]).unwrap().into(), port),
        other => panic!("unknown family {other}"),
    }
}

/// Checks table 1 of section 6.1 on each of the four listeners.
#[test]
fn change_flags_select_the_source_of_the_response() {
    let mut world = World::with(discovery());
    let all = [A1P1, A1P2, A2P1, A2P2];
    for (here, local) in all.iter().enumerate() {
        for flags in [0, 2, 4, 6] {
            // Changing the address flips the higher bit of the listener number; changing the port, the
            // lower bit.
            let expected = here ^ usize::from(flags >> 1);
            let listener = u16::try_from(here).unwrap();
            let (client, reply) = asks(&mut world, listener, local, &change(flags));
            let reply = reply.success();
            assert_eq!(usize::from(client.listener.0), expected, "{local} {flags}");
            assert_eq!(client.local, address(all[expected]));
            assert_eq!(client.address, world.client.address);
            assert_eq!(plain_address(&reply, RESPONSE_ORIGIN), address(all[expected]));
            assert_eq!(
                plain_address(&reply, OTHER_ADDRESS),
                address(all[here ^ 3]),
                "regardless of the flags"
            );
            assert_eq!(reply.mapped(), world.client.address);
        }
    }
    assert_eq!(world.server.stats().nat_discovery, [12, 0, 0]);
}

#[test]
fn discovery_ignores_ice_attributes() {
    let mut world = World::with(discovery());
    let check = binding().raw(0x0024, &[0; 4]).raw(0x0025, &[]);
    let (_, reply) = asks(&mut world, 0, A1P1, &check);
    assert_eq!(plain_address(&reply.success(), OTHER_ADDRESS), address(A2P2));
    let (_, reply) = asks(&mut world, 0, A1P1, &check.raw(0x7FFF, b"x"));
    assert_eq!(reply.code(), Some(420));
}

#[test]
fn a_plain_binding_request_gets_other_address() {
    let mut world = World::with(discovery());
    for ask in [binding(), binding().fingerprint(), binding().raw(0x8022, b"a client")] {
        let (client, reply) = asks(&mut world, 1, A1P2, &ask);
        assert_eq!(client, world.client);
        assert_eq!(plain_address(&reply, OTHER_ADDRESS), address(A2P1));
        assert!(reply.has(XorMappedAddress::TYPE));
    }
    assert_eq!(world.server.stats().nat_discovery, [0; 3]);
}

/// The addresses are added one by one, as long as the response stays within twice the request's length.
#[test]
fn a_longer_request_gets_more_addresses() {
    let mut world = World::with(discovery());
    for (length, origin, mapped) in [(0, false, false), (4, true, false), (8, true, false), (12, true, true)]
    {
        let (_, reply) = asks(&mut world, 1, A1P2, &binding().raw(0x8022, &b"a client of 12"[..length]));
        let told = |kind| reply.has(AttributeType::new(kind)).then(|| plain_address(&reply, kind));
        assert_eq!(told(OTHER_ADDRESS), Some(address(A2P1)));
        assert_eq!(told(RESPONSE_ORIGIN), origin.then(|| address(A1P2)), "{length}");
        assert_eq!(told(MAPPED_ADDRESS), mapped.then_some(world.client.address), "{length}");
    }
}

#[test]
fn ipv6_has_its_own_four_listeners() {
    let mut world = World::with(discovery());
    world.client.address = address("[2001:db8::7]:40000");
    let (client, reply) = asks(&mut world, 4, "[2001:db8::a1]:3478", &change(6));
    assert_eq!((client.listener, client.local), (ListenerId(7), address("[2001:db8::a2]:3479")));
    assert_eq!(plain_address(&reply, OTHER_ADDRESS), address("[2001:db8::a2]:3479"));
    assert_eq!(reply.mapped(), world.client.address);
}

#[test]
fn behind_a_nat_responses_contain_external_addresses() {
    let mut config = discovery();
    config.nat_discovery[0].external = ["198.51.100.1", "198.51.100.2"].map(|ip| ip.parse().ok());
    let mut world = World::with(config);
    let (client, reply) = asks(&mut world, 0, A1P1, &change(6));
    assert_eq!(client.local, address(A2P2), "sent from the local address");
    assert_eq!(plain_address(&reply, RESPONSE_ORIGIN), address("198.51.100.2:3479"));
    assert_eq!(plain_address(&reply, OTHER_ADDRESS), address("198.51.100.2:3479"));
}

#[test]
fn without_discovery_its_attributes_are_unknown() {
    let mut elsewhere = World::with(discovery());
    let mut off = World::new();
    for (listener, local) in [(0, "192.0.2.9:3478"), (0, "192.0.2.1:3480"), (9, A1P1)] {
        for (kind, value) in
            [(CHANGE_REQUEST, &[0, 0, 0, 6][..]), (PADDING, &[0; 100]), (RESPONSE_PORT, &[8, 0, 0, 0])]
        {
            for world in [&mut elsewhere, &mut off] {
                let (client, reply) = asks(world, listener, local, &binding().raw(kind, value));
                assert_eq!(reply.code(), Some(420));
                assert!(reply.get::<UnknownAttributes>().has_attribute(AttributeType::new(kind)));
                assert_eq!(client, world.client);
                let (_, plain) = asks(world, listener, local, &binding());
                assert!(!plain.has(AttributeType::new(OTHER_ADDRESS)));
                assert!(!plain.has(AttributeType::new(RESPONSE_ORIGIN)));
            }
        }
    }
}

#[test]
fn discovery_attributes_are_not_listed_as_unknown() {
    let mut world = World::with(discovery());
    let (client, reply) = asks(&mut world, 0, A1P1, &change(6).raw(0x7FFF, b"x"));
    assert_eq!(reply.code(), Some(420));
    let unknown = reply.get::<UnknownAttributes>();
    assert!(unknown.has_attribute(AttributeType::new(0x7FFF)));
    assert!(!unknown.has_attribute(AttributeType::new(CHANGE_REQUEST)));
    assert_eq!(client, world.client, "an error comes from the request's address");
}

#[test]
fn discovery_attributes_are_unknown_in_other_requests() {
    let mut world = World::with(discovery());
    let alice = world.credentials("alice", Scheme::Md5);
    let (_, reply) = asks(&mut world, 0, A1P1, &Ask::allocate().raw(CHANGE_REQUEST, &[0; 4]).signed(&alice));
    assert_eq!(reply.code(), Some(420));
}

#[test]
fn padding_is_no_longer_than_the_requests_or_an_mtu() {
    let mut world = World::with(discovery());
    for (asked, answered) in [(0, 0), (1, 1), (100, 100), (MAX_PADDING, MAX_PADDING), (4000, MAX_PADDING)] {
        let ask = binding().raw(PADDING, &vec![7; asked]);
        let (_, reply) = asks(&mut world, 0, A1P1, &ask);
        let length =
            reply.message().raw_attribute(AttributeType::new(PADDING)).expect("MUST be included").value.len();
        assert_eq!(length, answered, "{asked}");
        assert!(reply.0.len() <= ask.bytes().len() + 48, "at most four more addresses");
    }
    assert_eq!(world.server.stats().nat_discovery, [0, 5, 0]);
}

#[test]
fn a_response_goes_to_the_response_port() {
    let mut world = World::with(discovery());
    for value in [&[0x9C, 0x41, 0, 0][..], &[0x9C, 0x41]] {
        let (client, reply) = asks(&mut world, 0, A1P1, &binding().raw(RESPONSE_PORT, value));
        assert_eq!(client.address, SocketAddr::new(world.client.address.ip(), 40_001));
        assert_eq!(reply.success().mapped(), world.client.address, "the client's own mapping");
    }
}

#[test]
fn malformed_or_conflicting_discovery_attributes_are_400() {
    let mut world = World::with(discovery());
    for ask in [
        binding().raw(CHANGE_REQUEST, &[]),
        binding().raw(CHANGE_REQUEST, &[6]),
        binding().raw(CHANGE_REQUEST, &[0, 0, 0, 6, 0]),
        binding().raw(RESPONSE_PORT, &[]),
        binding().raw(RESPONSE_PORT, &[9]),
        binding().raw(RESPONSE_PORT, &[0x9C, 0x41, 0]),
        binding().raw(RESPONSE_PORT, &[0x9C, 0x41, 0, 0, 0]),
        binding().raw(RESPONSE_PORT, &[0, 0, 0, 0]),
        binding().raw(RESPONSE_PORT, &[0, 53, 0, 0]),
        binding().raw(RESPONSE_PORT, &[3, 255, 0, 0]),
        binding().raw(RESPONSE_PORT, &[0x9C, 0x41, 0, 0]).raw(PADDING, &[]),
    ] {
        let (client, reply) = asks(&mut world, 0, A1P1, &ask);
        assert_eq!(reply.code(), Some(400));
        assert_eq!(client, world.client);
    }
}

#[test]
fn only_requests_from_a_network_above_its_rate_are_dropped() {
    let limits = DiscoveryLimits { per_source: 2, total: 12 };
    let mut world = World::with(ServerConfig { discovery_limits: limits, ..discovery() });
    world.client.local = address(A1P1);
    let ask = |world: &mut World, from: &str, ask: Ask| {
        world.client.address = address(from);
        world.feed(&ask.bytes())
    };
    for port in 1..=10 {
        let outcome = ask(&mut world, &format!("198.51.100.{port}:5000"), change(6));
        assert!(matches!(outcome, Outcome::Reply(_)), "{outcome:?}");
    }
    let drop = Outcome::Drop(DropReason::DiscoverySourceLimit);
    for refused in [change(6), binding().raw(PADDING, &[0; 8]), binding().raw(RESPONSE_PORT, &[9, 9, 0, 0])] {
        assert_eq!(ask(&mut world, "198.51.100.77:1", refused), drop);
    }
    assert!(matches!(ask(&mut world, "198.51.100.77:1", binding()), Outcome::Reply(_)), "a plain request");
    assert!(matches!(ask(&mut world, "203.0.113.1:1", change(2)), Outcome::Reply(_)));
    assert!(matches!(ask(&mut world, "203.0.113.1:1", change(2)), Outcome::Reply(_)));
    assert_eq!(ask(&mut world, "203.0.113.1:1", change(2)), Outcome::Drop(DropReason::DiscoveryTotalLimit));
    world.sleep(1);
    assert!(matches!(ask(&mut world, "198.51.100.77:1", change(6)), Outcome::Reply(_)));
    assert_eq!(world.dropped(DropReason::DiscoverySourceLimit), 3);
    assert_eq!(world.dropped(DropReason::DiscoveryTotalLimit), 1);
}

proptest! {
    /// Any response goes to the client's address, from one of the server's addresses.
    #[test]
    fn responses_go_to_the_client_and_stay_small(
        attributes in prop::collection::vec(
            (
                prop::sample::select(vec![CHANGE_REQUEST, PADDING, RESPONSE_PORT, RESPONSE_ORIGIN, OTHER_ADDRESS]),
                prop::collection::vec(any::<u8>(), 0..40),
            ),
            0..5,
        ),
        cut in 0..400_usize,
    ) {
        let mut world = World::with(discovery());
        world.client.local = address(A1P1);
        let ask = attributes.iter().fold(binding(), |ask, (kind, value)| ask.raw(*kind, value));
        let bytes = ask.bytes();
        for datagram in [&bytes[..], &bytes[..cut.min(bytes.len())]] {
            let source = world.client.into();
            if let Verdict::Reply { client, bytes, .. } = world.server.from_client(world.now, &source, datagram) {
                prop_assert_eq!(client.address.ip(), world.client.address.ip());
                prop_assert!(client.address.port() >= 1024);
                prop_assert!(client.listener.0 < 4);
                prop_assert!(bytes.len() <= datagram.len() + 48);
            }
        }
    }
}
