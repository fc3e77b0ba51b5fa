//! Server in a fleet: redirects to other nodes, routing of requests to their node, and shared keys.

use crate::common::*;
use turnpike_turn::server::{Destination, NonceKey, NonceKeys, Occasion};

const OTHER: &str = "198.51.100.7:3478";
const OTHER_V6: &str = "[2001:db8::7]:3478";

fn node(number: u16) -> ServerConfig {
    ServerConfig { node: Some(number), ..streams() }
}

fn policy() -> TestPolicy {
    TestPolicy { per_user: 10, total: 10, ..TestPolicy::default() }
}

fn at(text: &str) -> Destination {
    Destination { address: address(text), second: None, domain: None }
}

fn knows(number: u16, text: &str) -> TestPolicy {
    TestPolicy { nodes: vec![(number, at(text))], ..policy() }
}

fn allocate(world: &mut World, user: &str) -> Reply {
    let credentials = world.credentials(user, Scheme::Sha256);
    let reply = world.ask(&Ask::allocate().signed(&credentials));
    assert!(reply.is_signed(&credentials));
    reply
}

#[test]
fn the_fleets_redirect_precedes_configured_alternates() {
    let elsewhere =
        Destination { second: Some(address(OTHER_V6)), domain: Some("b.example".into()), ..at(OTHER) };
    let alternate = Alternate {
        address: address("203.0.113.99:1"),
        domain: None,
        transports: Vec::new(),
        when: AlternateWhen::Always,
    };
    let config = ServerConfig { alternates: vec![alternate], ..node(1) };
    let mut world = World::with_policy(config, TestPolicy { redirect_target: Some(elsewhere), ..policy() });
    let reply = allocate(&mut world, "alice");
    assert_eq!((reply.code(), reply.alternates()), (Some(300), vec![address(OTHER), address(OTHER_V6)]));
    assert_eq!(*world.server.policy_mut().attempts.borrow(), [("alice".to_owned(), Occasion::None)]);
    world.server.policy_mut().redirect_target = None;
    assert_eq!(allocate(&mut world, "alice").alternates(), [address("203.0.113.99:1")]);
    assert_eq!((world.server.allocations(), world.server.stats().redirects), (0, 2));
}

#[test]
fn the_fleets_policy_gets_the_occasion_and_may_decline_to_redirect() {
    let mut world = World::with_policy(node(1), TestPolicy { total: 1, ..policy() });
    allocate(&mut world, "alice").success();
    world.client = client(2);
    assert_eq!(allocate(&mut world, "bob").code(), Some(508));
    world.server.set_draining(true);
    assert_eq!(allocate(&mut world, "bob").code(), Some(508));
    world.server.set_draining(false);
    let occasions: Vec<_> =
        world.server.policy_mut().attempts.borrow().iter().map(|(_, occasion)| *occasion).collect();
    assert_eq!(occasions, [Occasion::None, Occasion::None, Occasion::Full, Occasion::Draining]);
    world.client = client(40_000);
    world.ask_as("alice", Ask::refresh(0)).success();
    world.client = client(3);
    allocate(&mut world, "bob").success();
}

#[test]
fn a_client_returning_from_a_redirect_is_served_while_draining() {
    let mut world = World::with_policy(node(1), TestPolicy { redirect_target: Some(at(OTHER)), ..policy() });
    world.server.set_draining(true);
    assert_eq!(allocate(&mut world, "alice").code(), Some(300));
    let port = world.client.address.port();
    world.server.policy_mut().returned.push(port);
    allocate(&mut world, "alice").success();
    world.client = client(2);
    assert_eq!(allocate(&mut world, "bob").code(), Some(300), "bob was not redirected before");
}

#[test]
fn a_fleet_wide_limit_causes_no_redirect() {
    let mut world = World::with_policy(node(1), TestPolicy { total: 0, shared: true, ..policy() });
    assert_eq!(allocate(&mut world, "alice").code(), Some(508));
    assert_eq!(
        world.server.policy_mut().attempts.borrow().len(),
        1,
        "the fleet is queried once, before the quota check"
    );
    assert_eq!(world.server.stats().quota_refusals, [0, 1, 0]);
}

#[test]
fn an_allocate_beyond_the_nodes_share_waits_for_the_fleet() {
    for (quota, code) in
        [(TestPolicy { per_user: 1, ..policy() }, 486), (TestPolicy { total: 1, ..policy() }, 508)]
    {
        let mut world = World::with_policy(node(1), TestPolicy { undecided: true, ..quota });
        assert_eq!(allocate(&mut world, "alice").code(), None);

        world.client = client(2);
        let credentials = world.credentials("alice", Scheme::Sha256);
        let request = Ask::allocate().signed(&credentials).bytes();
        for _ in 0..2 {
            assert_eq!(world.feed(&request), Outcome::Drop(DropReason::QuotaPending));
        }
        let is_told = |effect: &Effect| {
            let wanted = RequestRefusal::Unanswered(DropReason::QuotaPending);
            matches!(effect, Effect::RequestRefused { code: 0, why, .. } if *why == wanted)
        };
        assert_eq!(world.all_effects().iter().filter(|effect| is_told(effect)).count(), 2);
        // Clients on streams do not retransmit, so the stream delivers the request again.
        world.client = stream(3);
        let over_stream = Ask::allocate().signed(&credentials).bytes();
        let requests = world.server.stats().requests;
        let (until_ms, otherwise) = (world.now.ms + 100, DropReason::QuotaPending);
        assert_eq!(world.feed(&over_stream), Outcome::Wait { until_ms, otherwise });
        assert_eq!(world.server.stats().requests, requests, "counted when delivered again");
        world.server.policy_mut().undecided = false;
        assert_eq!(allocate(&mut world, "alice").code(), Some(code), "the fleet has no room");
        world.server.policy_mut().undecided = true;

        let policy = world.server.policy_mut();
        (policy.per_user, policy.total) = (10, 10);
        for (waiting, request) in [(stream(3), over_stream), (client(2), request)] {
            world.client = waiting;
            assert!(matches!(world.feed(&request), Outcome::Open(_)), "the fleet has granted more");
        }
    }
}

#[test]
fn a_ticket_redirects_to_its_node() {
    let mut home = World::with_policy(node(1), policy());
    let reply = home.ask_as("alice", Ask::allocate().raw(TICKET, &[])).success();
    let ticket = reply.ticket().expect("a requested ticket");
    for (mut world, code, alternates) in [
        (World::with_policy(node(2), knows(1, OTHER)), 300, vec![address(OTHER)]),
        (World::with_policy(node(2), policy()), 437, vec![]),
        (World::with_policy(node(2), knows(1, OTHER_V6)), 437, vec![]),
    ] {
        world.client = client(5);
        let alice = world.credentials("alice", Scheme::Md5);
        let reply = world.ask(&Ask::present(&ticket).signed(&alice));
        assert_eq!((reply.code(), reply.alternates()), (Some(code), alternates));
        assert!(reply.is_signed(&alice));
    }
    // The ticket's node accepts it with a nonce from any node, since all nodes share the keys.
    home.client = client(5);
    let mut other = World::with_policy(node(2), policy());
    other.client = client(5);
    let alice = other.credentials("alice", Scheme::Md5);
    home.ask(&Ask::present(&ticket).signed(&alice)).success();
}

#[test]
fn a_ticket_issued_before_the_node_was_numbered_belongs_to_it() {
    let mut world = World::with_policy(node(0), policy());
    let reply = world.ask_as("alice", Ask::allocate().raw(TICKET, &[])).success();
    let now = world.now;
    world.server.reconfigure(now, Arc::new(node(9)));
    world.client = client(5);
    let next = world.ask_as("alice", Ask::present(&reply.ticket().unwrap())).success();
    let mut other = World::with_policy(node(2), knows(9, OTHER));
    other.client = client(6);
    let reply = other.ask_as("alice", Ask::present(&next.ticket().unwrap()));
    assert_eq!(reply.alternates(), [address(OTHER)], "the next ticket has the node number");
}

#[test]
fn a_connection_id_redirects_to_its_node() {
    let mut home = World::with_policy(node(4095), policy());
    let (alice, _) = home.allocated_tcp();
    let connection = home.connected(&alice, PEER);
    for (mut world, code, alternates) in [
        (World::with_policy(node(2), knows(4095, OTHER)), 300, vec![address(OTHER)]),
        (World::with_policy(node(2), policy()), 400, vec![]),
    ] {
        world.client = stream(42_000);
        let reply = world.ask_as("alice", Ask::connection_bind(connection));
        if code == 400 {
            assert_eq!(reply.reason(), "Bad Request: CONNECTION-ID is unknown or has expired");
        }
        assert_eq!((reply.code(), reply.alternates()), (Some(code), alternates));
    }
    home.client = stream(42_000);
    let bound = home.feed_as("alice", Ask::connection_bind(connection));
    assert!(matches!(bound, Outcome::Bind { .. }), "{bound:?}");
}

#[test]
fn nonces_are_valid_on_every_node_with_the_same_keys() {
    let key = |byte| NonceKey([byte; 32]);
    let now = World::new().now.unix;
    let keys = NonceKeys::new(key(1), [(now - 10, key(2)), (now + 60, key(3))]);
    let with = |number, nonce_keys: &NonceKeys| {
        World::with_policy(ServerConfig { nonce_keys: nonce_keys.clone(), ..node(number) }, policy())
    };
    let (mut one, mut other) = (with(1, &keys), with(2, &keys));
    for wait in [0, 59, 61] {
        let alice = one.credentials("alice", Scheme::Sha256);
        other.now.unix = one.now.unix + wait;
        other.client = client(50_000 + u16::try_from(wait).unwrap());
        other.ask(&Ask::allocate().signed(&alice)).success();
    }
    // A node without the new key accepts only nonces made with the old one.
    let mut late = with(3, &NonceKeys::new(key(1), [(now - 10, key(2))]));
    let alice = one.credentials("alice", Scheme::Sha256);
    late.ask(&Ask::allocate().signed(&alice)).success();
    one.now.unix = now + 60;
    late.now.unix = now + 60;
    late.client = client(9);
    let alice = one.credentials("alice", Scheme::Sha256);
    assert_eq!(late.ask(&Ask::allocate().signed(&alice)).code(), Some(438));
}

#[test]
fn a_banned_user_gets_403_after_authentication() {
    for banned in ["alice", "192.0.2.7"] {
        let policy = TestPolicy { banned: vec![banned.to_owned()], ..policy() };
        let mut world = World::with_policy(node(1), policy);
        let alice = world.credentials("alice", Scheme::Sha256);
        let mut guess = alice.clone();
        guess.password = "guess".to_owned();
        assert_eq!(
            world.ask(&Ask::allocate().signed(&guess)).code(),
            Some(401),
            "a ban is not revealed before authentication"
        );
        assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(403));
        assert_eq!(world.server.stats().ban_refusals, 1);
        world.server.policy_mut().banned.clear();
        world.ask(&Ask::allocate().signed(&alice)).success();
    }
}
