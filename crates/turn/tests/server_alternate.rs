//! Redirects with 300 (Try Alternate): conditions and targets (RFC 8489 section 10, RFC 8656 section 7.2).

use crate::common::*;
use stun_types::attribute::{AlternateDomain, AttributeStaticType as _};

fn alternate(at: &str, when: AlternateWhen) -> Alternate {
    Alternate { address: address(at), domain: None, transports: Vec::new(), when }
}

fn with(alternates: Vec<Alternate>) -> ServerConfig {
    let profile = |transport| ListenerProfile { transport, ..ListenerProfile::default() };
    ServerConfig {
        alternates,
        listeners: [Transport::Udp, Transport::Tcp, Transport::Tls, Transport::Dtls].map(profile).into(),
        ..config()
    }
}

const V4: &str = "198.51.100.1:3478";
const V6: &str = "[2001:db8::5]:3478";

fn ask(world: &mut World, scheme: Scheme) -> Reply {
    let alice = world.credentials("alice", scheme);
    let reply = world.ask(&Ask::allocate().signed(&alice));
    assert!(reply.is_signed(&alice));
    reply
}

#[test]
fn always_redirects_every_authenticated_allocate() {
    let mut world = World::with(with(vec![alternate(V4, AlternateWhen::Always)]));
    let challenge = world.ask(&Ask::allocate());
    assert_eq!(challenge.code(), Some(401), "an unauthenticated request is not redirected");
    assert!(challenge.alternates().is_empty());
    let reply = ask(&mut world, Scheme::Md5);
    assert_eq!((reply.code(), reply.alternates()), (Some(300), vec![address(V4)]));
    assert_eq!(world.server.allocations(), 0);
    assert_eq!(world.server.policy_mut().held(), 0);
    assert_eq!((world.server.stats().redirects, world.server.stats().errors_with(300)), (1, 1));
}

#[test]
fn a_wrong_password_is_not_redirected() {
    let mut world = World::with(with(vec![alternate(V4, AlternateWhen::Always)]));
    let mut guess = world.credentials("alice", Scheme::Md5);
    guess.password = "guess".to_owned();
    let reply = world.ask(&Ask::allocate().signed(&guess));
    assert_eq!((reply.code(), reply.alternates()), (Some(401), vec![]));
}

#[test]
fn without_authentication_no_client_is_redirected() {
    let mut world =
        World::with(ServerConfig { authenticate: false, ..with(vec![alternate(V4, AlternateWhen::Always)]) });
    world.ask(&Ask::allocate()).success();
}

#[test]
fn a_malformed_request_is_refused_instead_of_redirected() {
    let mut world = World::with(with(vec![alternate(V4, AlternateWhen::Always)]));
    assert_eq!(world.ask_as("alice", Ask::new(ALLOCATE)).code(), Some(400));
}

#[test]
fn a_draining_server_redirects_instead_of_508() {
    for (when, before) in
        [(AlternateWhen::Drain, None), (AlternateWhen::Full, None), (AlternateWhen::Always, Some(300))]
    {
        let mut world = World::with(with(vec![alternate(V4, when)]));
        assert_eq!(ask(&mut world, Scheme::Md5).code(), before, "{when:?}");
        world.client.address.set_port(1);
        world.server.set_draining(true);
        assert_eq!(ask(&mut world, Scheme::Md5).code(), Some(300), "{when:?}");
        assert_eq!(world.server.stats().drain_refusals, 0);
    }
    let mut alone = World::with(with(vec![]));
    alone.server.set_draining(true);
    assert_eq!(ask(&mut alone, Scheme::Md5).code(), Some(508));
}

#[test]
fn an_existing_allocation_is_not_redirected() {
    let mut world = World::with(with(vec![alternate(V4, AlternateWhen::Drain)]));
    let (alice, _) = world.allocated();
    world.server.set_draining(true);
    world.ask(&Ask::refresh(600).signed(&alice)).success();
    world.ask(&Ask::permit(PEER).signed(&alice)).success();
}

#[test]
fn a_full_server_redirects_clients_but_not_a_user_at_the_limit() {
    for (when, code) in [(AlternateWhen::Full, 300), (AlternateWhen::Drain, 508)] {
        let policy = TestPolicy { per_user: 2, total: 3, ..TestPolicy::default() };
        let mut world = World::with_policy(with(vec![alternate(V4, when)]), policy);
        for (port, user, expected) in [
            (1, "alice", None),
            (2, "alice", None),
            (3, "alice", Some(486)),
            (4, "bob", None),
            (5, "bob", Some(code)),
        ] {
            world.client = client(port);
            let reply = world.ask_as(user, Ask::allocate());
            assert_eq!(reply.code(), expected, "{when:?} {port}");
        }
        assert_eq!(world.server.stats().quota_refusals, [1, 1, 0]);
    }
}

#[test]
fn a_server_without_ports_redirects_and_releases_the_quota() {
    let mut world = World::with(with(vec![alternate(V4, AlternateWhen::Full)]));
    for (result, code) in [(OpenResult::NoCapacity, 300), (OpenResult::UnsupportedFamily, 440)] {
        let alice = world.credentials("alice", Scheme::Sha256);
        let Outcome::Open(request) = world.feed(&Ask::allocate().fingerprint().signed(&alice).bytes()) else {
            panic!("expected an open request")
        };
        let reply = world.opened(request.allocation, result, None);
        assert_eq!(reply.code(), Some(code));
        assert!(reply.is_signed(&alice));
        assert_eq!(world.server.policy_mut().held(), 0);
    }
}

#[test]
fn the_first_alternate_has_the_clients_family() {
    let both = vec![alternate(V6, AlternateWhen::Always), alternate(V4, AlternateWhen::Always)];
    let mut world = World::with(with(both));
    assert_eq!(ask(&mut world, Scheme::Md5).alternates(), [address(V4), address(V6)]);
    world.client.address = address("[2001:db8::7]:5000");
    assert_eq!(ask(&mut world, Scheme::Md5).alternates(), [address(V6), address(V4)]);

    let mut only_v6 = World::with(with(vec![alternate(V6, AlternateWhen::Always)]));
    assert_eq!(
        ask(&mut only_v6, Scheme::Md5).code(),
        None,
        "no alternate of the client's family: served here"
    );
    only_v6.client.address.set_port(1);
    only_v6.server.set_draining(true);
    assert_eq!(ask(&mut only_v6, Scheme::Md5).code(), Some(508));
}

#[test]
fn several_alternates_take_turns() {
    let other = "198.51.100.2:3478";
    let mut world = World::with(with(vec![
        alternate(V4, AlternateWhen::Always),
        alternate(other, AlternateWhen::Always),
        alternate("198.51.100.3:3478", AlternateWhen::Full),
    ]));
    let told: Vec<_> = (0..4).flat_map(|_| ask(&mut world, Scheme::Md5).alternates()).collect();
    assert_eq!(told, [V4, other, V4, other].map(address));
}

#[test]
fn a_domain_is_sent_over_secure_transports_to_rfc_8489_clients() {
    let named =
        Alternate { domain: Some("turn2.example.org".to_owned()), ..alternate(V4, AlternateWhen::Always) };
    let mut world = World::with(with(vec![named]));
    for (listener, scheme, told) in [
        (0, Scheme::Sha256, false),
        (1, Scheme::Sha256, false),
        (2, Scheme::Sha256, true),
        (2, Scheme::Md5, false),
        (3, Scheme::Sha256, true),
        (3, Scheme::Md5Sha256, true),
    ] {
        world.client.listener = ListenerId(listener);
        let reply = ask(&mut world, scheme);
        assert_eq!(reply.code(), Some(300));
        assert_eq!(reply.has(AlternateDomain::TYPE), told, "{listener} {scheme:?}");
        if told {
            assert_eq!(reply.get::<AlternateDomain>().domain(), "turn2.example.org");
        }
    }
}

#[test]
fn both_alternate_addresses_share_one_domain() {
    let named = |at, domain: &str| Alternate {
        domain: Some(domain.to_owned()),
        ..alternate(at, AlternateWhen::Always)
    };
    let mut world = World::with(with(vec![
        named(V4, "a.example"),
        named("[2001:db8::9]:1", "b.example"),
        named(V6, "a.example"),
    ]));
    world.client.listener = ListenerId(2);
    assert_eq!(ask(&mut world, Scheme::Sha256).alternates(), [address(V4), address(V6)]);
}

#[test]
fn each_transport_may_have_its_own_alternate() {
    let tls = "198.51.100.2:5349";
    let mut world = World::with(with(vec![
        Alternate {
            transports: vec![Transport::Udp, Transport::Tcp],
            ..alternate(V4, AlternateWhen::Always)
        },
        Alternate { transports: vec![Transport::Tls], ..alternate(tls, AlternateWhen::Always) },
    ]));
    for (listener, told) in [(0, Some(V4)), (1, Some(V4)), (2, Some(tls)), (3, None)] {
        world.client.listener = ListenerId(listener);
        let reply = ask(&mut world, Scheme::Md5);
        assert_eq!(reply.alternates(), told.map(address).into_iter().collect::<Vec<_>>(), "{listener}");
    }
}
