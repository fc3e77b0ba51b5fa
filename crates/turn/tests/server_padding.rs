//! Padding (RFC 8489 section 14) and reserved bits of responses are zero, so that nothing leaks.

use std::collections::BTreeSet;

use crate::common::{turn::*, *};

const OTHER_PEER: &str = "198.41.0.4:7001";

const ERROR_CODE: u16 = 0x0009;
const UNKNOWN_ATTRIBUTES: u16 = 0x000A;
const DATA: u16 = 0x0013;
const REALM_KIND: u16 = 0x0014;
const NONCE: u16 = 0x0015;
const ADDRESS_ERROR_CODE: u16 = 0x8001;
const ICMP: u16 = 0x8004;
const SOFTWARE: u16 = 0x8022;
const ALTERNATE_DOMAIN: u16 = 0x8003;
const THIRD_PARTY: u16 = 0x802E;
const PADDING: u16 = 0x0026;

/// MAPPED-ADDRESS and similar attributes start with a zero byte (RFC 8489 section 14.1).
const ADDRESSES: [u16; 7] = [0x0001, 0x0012, 0x0016, 0x0020, 0x8023, 0x802B, 0x802C];

/// Record of everything covered, so that the test fails if coverage shrinks.
#[derive(Default)]
struct Seen {
    codes: BTreeSet<u16>,
    padded: BTreeMap<u16, BTreeSet<usize>>,
}

impl Seen {
    /// Iterates over the attributes itself, independent of the server's parser.
    #[track_caller]
    fn note(&mut self, message: &[u8]) {
        assert_eq!(message[0] & 0xC0, 0);
        assert_eq!(message[4..8], [0x21, 0x12, 0xA4, 0x42]);
        let mut rest = &message[20..];
        assert_eq!(usize::from(u16::from_be_bytes([message[2], message[3]])), rest.len());
        assert!(rest.len().is_multiple_of(4), "{message:02x?}");
        while let [k0, k1, l0, l1, behind @ ..] = rest {
            let kind = u16::from_be_bytes([*k0, *k1]);
            let length = usize::from(u16::from_be_bytes([*l0, *l1]));
            let padding = length.next_multiple_of(4) - length;
            let (value, behind) = behind.split_at(length);
            assert!(behind[..padding].iter().all(|byte| *byte == 0), "{kind:#06x}: {message:02x?}");
            self.padded.entry(kind).or_default().insert(padding);
            match kind {
                ERROR_CODE => {
                    assert_eq!((value[0], value[1], value[2] & !7), (0, 0, 0), "{value:02x?}");
                    self.codes.insert(u16::from(value[2]) * 100 + u16::from(value[3]));
                }
                ADDRESS_ERROR_CODE => assert_eq!((value[1], value[2] & !7), (0, 0), "{value:02x?}"),
                ICMP => assert_eq!(value[..2], [0, 0], "{value:02x?}"),
                PADDING => assert!(value.iter().all(|byte| *byte == 0)),
                _ if ADDRESSES.contains(&kind) => assert_eq!(value[0], 0, "{kind:#06x}: {value:02x?}"),
                _ => {}
            }
            rest = &behind[padding..];
        }
        assert!(rest.is_empty());
    }

    #[track_caller]
    fn ask(&mut self, world: &mut World, ask: &Ask) -> Reply {
        let reply = world.ask(ask);
        self.note(&reply.0);
        reply
    }

    /// Sends the request signed, unsigned, and with FINGERPRINT.
    #[track_caller]
    fn ask_each_way(&mut self, world: &mut World, ask: &Ask, who: &Credentials) {
        self.ask(world, &ask.clone().fingerprint());
        self.ask(world, &ask.clone().signed(who));
        self.ask(world, &ask.clone().signed(who).fingerprint());
    }
}

fn text(length: usize) -> String {
    "turn"[..length].to_owned()
}

fn with(length: usize) -> ServerConfig {
    ServerConfig {
        realm: format!("realm{}", text(length)),
        software: Some(text(length)),
        third_party: ThirdParty {
            server_name: format!("name{}", text(length)),
            skew: 5,
            keys: vec![IssuerKey {
                kid: "north".to_owned(),
                key: TokenKey::A128Gcm([1; 16]),
                realm: format!("realm{}", text(length)),
                max_lifetime: 60,
            }],
        },
        ..streams()
    }
}

fn alice(world: &mut World, seen: &mut Seen) -> Credentials {
    seen.ask(world, &Ask::allocate());
    seen.ask(world, &Ask::allocate().fingerprint());
    world.credentials("alice", Scheme::Sha256)
}

#[test]
fn padding_and_reserved_bits_of_every_response_are_zero() {
    let mut seen = Seen::default();
    for length in 1..=4 {
        // The first response is long, so that the reused buffer contains old data.
        let mut world = World::with(ServerConfig { software: Some("\u{ff}".repeat(60)), ..with(length) });
        let long = world.credentials("alice", Scheme::Md5);
        seen.ask(&mut world, &Ask::allocate().signed(&long));
        world.server.reconfigure(world.now, Arc::new(with(length)));

        requests(&mut world, &mut seen);
        refusals(with(length), &mut seen);
        tcp(with(length), &mut seen);
        redirects(with(length), length, &mut seen);
        discovery(length, &mut seen);
    }
    let all = [300, 400, 401, 403, 405, 420, 437, 438, 440, 441, 442, 443, 446, 447, 486, 508];
    assert_eq!(seen.codes, BTreeSet::from(all));
    for kind in [SOFTWARE, REALM_KIND, ERROR_CODE, DATA, ALTERNATE_DOMAIN, THIRD_PARTY, PADDING] {
        assert_eq!(seen.padded.get(&kind), Some(&BTreeSet::from([0, 1, 2, 3])), "{kind:#06x}");
    }
    assert_eq!(seen.padded.get(&UNKNOWN_ATTRIBUTES), Some(&BTreeSet::from([0, 2])));
    for kind in [NONCE, ICMP, ADDRESS_ERROR_CODE].into_iter().chain(ADDRESSES) {
        assert!(seen.padded.contains_key(&kind), "{kind:#06x}");
    }
}

fn requests(world: &mut World, seen: &mut Seen) {
    world.client = client(1);
    let who = alice(world, seen);
    let dual = Ask::allocate().with(&AdditionalAddressFamily::new(AddressFamily::IPV6)).raw(TICKET, &[]);
    seen.ask(world, &dual.signed(&who)).success();
    let relay = world.last_opened();
    seen.ask(world, &Ask::permit(PEER).signed(&who)).success();
    for payload in 0..9 {
        let Outcome::ToClient { bytes, .. } = world.peer_sends(relay, PEER, &vec![0xEE; payload]) else {
            panic!()
        };
        seen.note(&bytes);
    }
    let unreachable = IcmpError { icmp_type: 3, code: 3, info: 0 };
    let icmp = world.server.data.from_icmp(world.now, relay, address(PEER), unreachable);
    let Outcome::Reply(bytes) = icmp.into() else { panic!() };
    seen.note(&bytes);
    seen.ask(world, &Ask::bind(0x4000, PEER).signed(&who)).success();
    seen.ask(world, &Ask::refresh(600).signed(&who)).success();
    seen.ask(world, &Ask::permit("10.0.0.1:1").signed(&who));
    let bob = world.credentials("bob", Scheme::Sha256);
    seen.ask(world, &Ask::refresh(600).signed(&bob));
    for unknown in 1..=3 {
        let odd = (0..unknown).fold(Ask::refresh(600), |ask, n| ask.raw(0x7F00 + n, b"odd"));
        seen.ask_each_way(world, &odd, &who);
        let odd = (0..unknown).fold(Ask::new(BINDING), |ask, n| ask.raw(0x7F00 + n, b"odd"));
        seen.ask_each_way(world, &odd, &who);
    }
    let stale = Credentials { nonce: "obMatJos2wAAAAAAAAAAAAAAAAAA".to_owned(), ..who.clone() };
    seen.ask_each_way(world, &Ask::refresh(600), &stale);
    seen.ask(world, &Ask::refresh(0).signed(&who)).success();
    for from in ["192.0.2.9:9", "[2001:db8::9]:9"] {
        world.client.address = address(from);
        seen.ask_each_way(world, &Ask::new(BINDING), &who);
    }
    world.client = client(1);
}

fn refusals(config: ServerConfig, seen: &mut Seen) {
    let mut world = World::with(ServerConfig { mobility: false, ..config.clone() });
    let who = alice(&mut world, seen);
    for ask in [
        Ask::new(ALLOCATE),
        Ask::new(ALLOCATE).with(&RequestedTransport::new(99)),
        Ask::allocate().raw(0x0017, &[3, 0, 0, 0]),
        Ask::allocate().raw(TICKET, &[]),
        Ask::refresh(600),
        Ask::permit(PEER),
    ] {
        seen.ask_each_way(&mut world, &ask, &who);
    }
    let even = Ask::allocate().with(&EvenPort::new(true)).signed(&who);
    for result in [OpenResult::NoCapacity, OpenResult::UnsupportedFamily] {
        let request = world.feed(&even.bytes()).opens();
        seen.note(&world.opened(request.allocation, result, None).0);
    }
    seen.ask(&mut world, &even).success();
    seen.ask(&mut world, &even).success();
    seen.ask(&mut world, &Ask::permit(PEER_V6).signed(&who));
    world.client = client(2);
    let who = world.credentials("alice", Scheme::Md5);
    world.server.policy_mut().per_user = 1;
    seen.ask(&mut world, &Ask::allocate().signed(&who));

    // Only one family of a dual-stack request is granted.
    let mut world = World::with(ServerConfig { relay_v6: false, ..config });
    let who = alice(&mut world, seen);
    let dual = Ask::allocate().with(&AdditionalAddressFamily::new(AddressFamily::IPV6)).signed(&who);
    seen.ask(&mut world, &dual).success();
    world.server.close_all(world.now, ClosedReason::Administrator);
}

/// RFC 6062.
fn tcp(config: ServerConfig, seen: &mut Seen) {
    let mut world = World::with(config);
    let (who, relay) = world.allocated_tcp();
    let first = world.connecting(&Ask::connect(PEER).signed(&who));
    seen.note(&world.connect_result(&first, Ok(())).0);
    seen.ask(&mut world, &Ask::connect(PEER).signed(&who));
    let failing = world.connecting(&Ask::connect(OTHER_PEER).signed(&who));
    seen.note(&world.connect_result(&failing, Err(ConnectError::TimedOut)).0);
    seen.ask(&mut world, &Ask::permit(OTHER_PEER).signed(&who)).success();
    let FromPeer::Accepted { indication, .. } = world.peer_connects(relay, OTHER_PEER) else { panic!() };
    seen.note(&indication.0);
    world.client = stream(42_000);
    let who = world.credentials("alice", Scheme::Md5);
    let Outcome::Bind { bytes, .. } =
        world.feed(&Ask::connection_bind(first.connection).signed(&who).bytes())
    else {
        panic!()
    };
    seen.note(&bytes);
}

fn redirects(config: ServerConfig, length: usize, seen: &mut Seen) {
    let alternate = |at: &str| Alternate {
        address: address(at),
        domain: Some(format!("host{}", text(length))),
        transports: Vec::new(),
        when: AlternateWhen::Always,
    };
    for at in ["198.51.100.1:3478", "[2001:db8::5]:3478"] {
        let mut world = World::with(ServerConfig { alternates: vec![alternate(at)], ..config.clone() });
        // Only clients that check a certificate get the name.
        world.client = Client { listener: ListenerId(2), ..client(1) };
        let who = alice(&mut world, seen);
        seen.ask_each_way(&mut world, &Ask::allocate(), &who);
    }
}

/// RFC 5780.
fn discovery(length: usize, seen: &mut Seen) {
    let mut world = World::with(everything());
    seen.ask(&mut world, &Ask::new(BINDING).raw(0x0003, &[0; 4])).success();
    // A request long enough for a response with all four addresses.
    seen.ask(&mut world, &Ask::new(BINDING).raw(0x8022, b"a long client name")).success();
    // A request long enough for a response with everything: short requests get short responses.
    let long = Ask::new(BINDING).raw(0x0003, &[0; 4]).raw(0xFF00, &[0xEE; 100]);
    seen.ask(&mut world, &long).success();
    for padding in 0..9 {
        seen.ask(&mut world, &Ask::new(BINDING).raw(PADDING, &vec![0xEE; padding + length])).success();
    }
}
