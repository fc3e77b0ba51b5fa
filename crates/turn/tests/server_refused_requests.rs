//! Effects that report refused requests with their causes, and the number of clients per listener.

use crate::common::*;
use turnpike_turn::{
    server::{BadRequest, Fault, Method},
    wire::{channel_data::ChannelNumber, stun::kind},
};

fn told(world: &mut World) -> Vec<(String, Method, u16, RequestRefusal)> {
    let told = world.all_effects().into_iter().filter_map(|effect| match effect {
        Effect::RequestRefused { client, realm, username, method, code, why, .. } => {
            assert_eq!((client, &*realm), (world.client, REALM));
            Some((username.into_string(), method, code, why))
        }
        _ => None,
    });
    told.collect()
}

fn bad(attribute: u16, fault: Fault) -> RequestRefusal {
    RequestRefusal::BadRequest(BadRequest { attribute, fault })
}

fn channel(number: u16) -> ChannelNumber {
    ChannelNumber::new(number).unwrap()
}

fn other_family(peer: &str) -> RequestRefusal {
    RequestRefusal::PeerFamily(peer.parse().unwrap())
}

fn ip_of(peer: &str) -> &str {
    peer.rsplit_once(':').unwrap().0
}

fn of_alice(method: Method, code: u16, why: RequestRefusal) -> Vec<(String, Method, u16, RequestRefusal)> {
    vec![("alice".to_owned(), method, code, why)]
}

#[test]
fn each_refusal_is_reported_with_its_code_and_reason() {
    let policy = TestPolicy { per_user: 1, total: 2, ..TestPolicy::default() };
    let mut world = World::with_policy(
        ServerConfig {
            limits: ServerLimits { permissions: 1, channels: 1, ..ServerLimits::default() },
            ..config()
        },
        policy,
    );
    let (alice, _) = world.allocated();
    assert_eq!(told(&mut world), []);
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    for (ask, method, code, why) in [
        (Ask::permit("198.41.0.9:0"), Method::CreatePermission, 508, RequestRefusal::Permissions),
        (
            Ask::bind(0x4001, PEER),
            Method::ChannelBind,
            400,
            bad(kind::CHANNEL_NUMBER, Fault::PeerHasChannel(channel(0x4000))),
        ),
        (
            Ask::bind(0x4000, "198.41.0.9:9"),
            Method::ChannelBind,
            400,
            bad(kind::CHANNEL_NUMBER, Fault::ChannelTaken(channel(0x4000))),
        ),
        (Ask::permit(PEER_V6), Method::CreatePermission, 443, other_family(&format!("{}:0", ip_of(PEER_V6)))),
        (Ask::bind(0x4002, PEER_V6), Method::ChannelBind, 443, other_family(PEER_V6)),
        (Ask::bind(0x4001, "198.41.0.9:9"), Method::ChannelBind, 508, RequestRefusal::Channels),
        (Ask::allocate(), Method::Allocate, 437, RequestRefusal::AllocationExists),
    ] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(code));
        assert_eq!(told(&mut world), of_alice(method, code, why));
    }
    world.client = client(2);
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(486));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 486, RequestRefusal::UserQuota));
    assert_eq!(world.ask(&Ask::refresh(600).signed(&alice)).code(), Some(437));
    assert_eq!(told(&mut world), of_alice(Method::Refresh, 437, RequestRefusal::Code));
    world.server.policy_mut().relayed = vec![(world.client.address, RelayTransport::Udp)];
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(403));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 403, RequestRefusal::Loop));
    world.server.policy_mut().relayed.clear();
    (world.server.policy_mut().per_user, world.server.policy_mut().total) = (2, 1);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(508));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 508, RequestRefusal::TotalQuota));
    world.server.set_draining(true);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(508));
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 508, RequestRefusal::Draining));
}

#[test]
fn a_failed_relay_socket_is_reported_with_its_user() {
    for (result, code, why) in [
        (OpenResult::NoCapacity, 508, RequestRefusal::NoRelay),
        (OpenResult::AddressAbsent, 508, RequestRefusal::AddressAbsent),
        (OpenResult::PortsHeld, 508, RequestRefusal::PortsHeld),
        (OpenResult::UnsupportedFamily, 440, RequestRefusal::Code),
    ] {
        let mut world = World::new();
        let request = world.feed_as("alice", Ask::allocate()).opens();
        assert_eq!(world.opened(request.allocation, result, None).code(), Some(code));
        assert_eq!(told(&mut world), of_alice(Method::Allocate, code, why));
    }
}

#[test]
fn each_cause_of_400_names_its_attribute() {
    let allocate = || Ask::new(ALLOCATE);
    let transport = |ask: Ask| ask.raw(kind::REQUESTED_TRANSPORT, &[17, 0, 0, 0]);
    for (ask, attribute, fault) in [
        (allocate(), kind::REQUESTED_TRANSPORT, Fault::Missing),
        (allocate().raw(kind::REQUESTED_TRANSPORT, &[17]), kind::REQUESTED_TRANSPORT, Fault::Malformed),
        (transport(allocate()).raw(kind::LIFETIME, &[1]), kind::LIFETIME, Fault::Malformed),
        (transport(allocate()).raw(kind::DONT_FRAGMENT, &[1]), kind::DONT_FRAGMENT, Fault::Malformed),
        (transport(allocate()).raw(kind::EVEN_PORT, &[]), kind::EVEN_PORT, Fault::Malformed),
        (transport(allocate()).raw(kind::RESERVATION_TOKEN, &[1]), kind::RESERVATION_TOKEN, Fault::Malformed),
        (
            transport(allocate()).raw(kind::RESERVATION_TOKEN, &[1; 8]).raw(kind::EVEN_PORT, &[0]),
            kind::RESERVATION_TOKEN,
            Fault::Beside(kind::EVEN_PORT),
        ),
        (
            transport(allocate()).raw(kind::REQUESTED_ADDRESS_FAMILY, &[1]),
            kind::REQUESTED_ADDRESS_FAMILY,
            Fault::Malformed,
        ),
        (
            transport(allocate())
                .raw(kind::REQUESTED_ADDRESS_FAMILY, &[1, 0, 0, 0])
                .raw(kind::ADDITIONAL_ADDRESS_FAMILY, &[2, 0, 0, 0]),
            kind::ADDITIONAL_ADDRESS_FAMILY,
            Fault::Beside(kind::REQUESTED_ADDRESS_FAMILY),
        ),
    ] {
        let mut world = World::new();
        let response = world.ask_as("alice", ask);
        let text = BadRequest { attribute, fault }.to_string();
        assert_eq!(response.code(), Some(400), "{text}");
        assert_eq!(response.reason(), format!("Bad Request: {text}"));
        assert_eq!(told(&mut world), of_alice(Method::Allocate, 400, bad(attribute, fault)));
    }
    let mut world = World::new();
    let (alice, _) = world.allocated();
    let number = |number: u16| [&number.to_be_bytes()[..], &[0, 0]].concat();
    world.all_effects();
    for (ask, method, attribute, fault) in [
        (Ask::new(CREATE_PERMISSION), Method::CreatePermission, kind::XOR_PEER_ADDRESS, Fault::Missing),
        (
            Ask::permit(PEER).raw(kind::XOR_PEER_ADDRESS, &[1]),
            Method::CreatePermission,
            kind::XOR_PEER_ADDRESS,
            Fault::Malformed,
        ),
        (Ask::new(CHANNEL_BIND), Method::ChannelBind, kind::CHANNEL_NUMBER, Fault::Missing),
        (Ask::bind(0x7FFF, PEER), Method::ChannelBind, kind::CHANNEL_NUMBER, Fault::OutOfRange),
        (Ask::bind(0x4000, "198.41.0.4:0"), Method::ChannelBind, kind::XOR_PEER_ADDRESS, Fault::PortZero),
        (
            Ask::new(CHANNEL_BIND).raw(kind::CHANNEL_NUMBER, &number(0x4000)),
            Method::ChannelBind,
            kind::XOR_PEER_ADDRESS,
            Fault::Missing,
        ),
        (Ask::new(REFRESH).raw(kind::LIFETIME, &[0]), Method::Refresh, kind::LIFETIME, Fault::Malformed),
        (Ask::new(CONNECTION_BIND), Method::ConnectionBind, kind::CONNECTION_ID, Fault::Missing),
    ] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(400), "{attribute:#x} {fault:?}");
        assert_eq!(told(&mut world), of_alice(method, 400, bad(attribute, fault)));
    }
}

#[test]
fn a_refused_peer_is_reported_with_the_number_of_others() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.all_effects();
    let ask = Ask::permit(PEER).peer("127.0.0.1:0").peer("198.41.0.9:0").signed(&alice);
    let response = world.ask(&ask);
    assert_eq!(response.code(), Some(403));
    assert_eq!(
        response.reason(),
        "Forbidden: peer 127.0.0.1; the request's other peers get no permission either"
    );
    let effects = world.all_effects();
    let [Effect::PeerRefused { peer, others: 2, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(peer.to_string(), "127.0.0.1:0");
    assert!(matches!(world.feed(&Ask::send(PEER, b"x")), Outcome::Drop(_)));
}

#[test]
fn errors_before_authentication_report_the_claimed_user() {
    let mut world = World::new();
    let strangers = |world: &mut World| -> Vec<_> {
        let told = world.all_effects().into_iter().filter_map(|effect| match effect {
            Effect::RequestRefused { username, proved: false, method, code, why, .. } => {
                Some((username.into_string(), method, code, why))
            }
            _ => None,
        });
        told.collect()
    };
    let alice = world.credentials("alice", Scheme::Md5);
    world.all_effects();
    assert_eq!(world.ask(&Ask::allocate()).code(), Some(401));
    assert_eq!(strangers(&mut world), []);
    let unknown = Ask::new(BINDING).raw(0x0031, &[]);
    assert_eq!(world.ask(&unknown).code(), Some(420));
    let why = RequestRefusal::UnknownAttribute(0x0031);
    assert_eq!(strangers(&mut world), [(String::new(), Method::Binding, 420, why)]);
    let nameless = Ask::allocate().raw(kind::MESSAGE_INTEGRITY, &[0; 20]);
    assert_eq!(world.ask(&nameless).code(), Some(400));
    let why = bad(kind::USERNAME, Fault::Missing);
    assert_eq!(strangers(&mut world), [(String::new(), Method::Allocate, 400, why)]);
    assert_eq!(world.ask(&Ask::allocate().raw(0x0031, &[]).signed(&alice)).code(), Some(420));
    let why = RequestRefusal::UnknownAttribute(0x0031);
    assert_eq!(told(&mut world), of_alice(Method::Allocate, 420, why));
    let foreign = Credentials { nonce: "anotherserversnonce".to_owned(), ..alice };
    assert_eq!(world.ask(&Ask::allocate().signed(&foreign)).code(), Some(438));
    assert_eq!(strangers(&mut world), [("alice".to_owned(), Method::Allocate, 438, RequestRefusal::Code)]);
}

#[test]
fn challenges_are_not_reported_and_other_refusals_only_once() {
    let mut world = World::new();
    let (alice, _) = world.allocated();
    world.all_effects();
    assert_eq!(world.ask(&Ask::allocate()).code(), Some(401));
    assert_eq!(world.ask(&Ask::permit("127.0.0.1:0").signed(&alice)).code(), Some(403));
    assert_eq!(world.ask_as("bob", Ask::refresh(600)).code(), Some(441));
    let effects = world.all_effects();
    assert!(
        matches!(effects[..], [Effect::PeerRefused { .. }, Effect::Refused { .. }]),
        "expected one effect per refusal, except the challenge: {effects:?}"
    );
}

#[test]
fn refusals_are_reported_at_a_bounded_rate() {
    let mut world = World::new();
    let alice = world.credentials("alice", Scheme::Md5);
    let refresh = Ask::refresh(600).signed(&alice);
    assert_eq!(world.ask(&refresh).code(), Some(437));
    for _ in 1..500 {
        world.feed(&refresh.bytes());
    }
    assert_eq!(told(&mut world).len(), 20);
    world.sleep(1);
    world.ask(&refresh);
    let effects = world.all_effects();
    assert!(matches!(effects[..], [Effect::RequestRefused { suppressed: 480, .. }]), "{effects:?}");
}

#[test]
fn clients_are_counted_per_listener() {
    let mut world = World::with(ServerConfig { mobility: true, ..streams() });
    assert!(world.server.allocations_by_listener().is_empty());
    let (_, of_first) = world.allocated();
    world.client = client(2);
    let alice = world.credentials("alice", Scheme::Md5);
    let ticket = world.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success().ticket().unwrap();
    let relay = world.last_opened();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(world.server.allocations_by_listener(), [2]);
    // The second client moves its allocation to TCP.
    world.client = stream(3);
    assert_eq!(world.client.listener, ListenerId(1));
    world.ask(&Ask::present(&ticket).signed(&alice)).success();
    assert_eq!(
        world.server.allocations_by_listener(),
        [2],
        "the allocation does not move before data arrives"
    );
    assert!(world.feed(&channel_data(0x4000, b"data")).goes_to_peer());
    assert_eq!(world.server.allocations_by_listener(), [1, 1]);
    for allocation in [of_first.allocation, relay.allocation] {
        assert!(world.server.close_one(world.now, allocation, ClosedReason::Shutdown));
    }
    assert_eq!(world.server.allocations_by_listener(), [0, 0]);
}
