//! Allocation quotas (RFC 8656 sections 7.2 and 19: 486 for a user, 508 for the total).

use crate::common::*;

fn at(ip: &str, port: u16) -> Client {
    let ip: IpAddr = ip.parse().unwrap();
    Client { address: SocketAddr::new(ip, port), ..client(port) }
}

#[test]
fn a_user_has_no_more_allocations_than_the_quota() {
    let policy = TestPolicy { per_user: 2, total: 3, ..TestPolicy::default() };
    let mut world = World::with_policy(config(), policy);
    let mut allocate = |port, user| {
        world.client = client(port);
        let credentials = world.credentials(user, Scheme::Md5);
        let reply = world.ask(&Ask::allocate().signed(&credentials));
        (reply.code(), credentials)
    };
    assert_eq!(allocate(1, "alice").0, None);
    assert_eq!(allocate(2, "alice").0, None);
    assert_eq!(allocate(3, "alice").0, Some(486));
    let (code, bob) = allocate(4, "bob");
    assert_eq!(code, None);
    assert_eq!(allocate(5, "bob").0, Some(508));
    assert_eq!(world.server.stats().quota_refusals, [1, 1, 0], "user, total");

    world.client = client(4);
    world.ask(&Ask::refresh(0).signed(&bob)).success();
    world.client = client(3);
    assert_eq!(world.ask_as("alice", Ask::allocate()).code(), Some(486));
    assert_eq!(world.server.stats().quota_refusals, [2, 1, 0]);
    assert_eq!(world.server.allocations(), 2);
    assert_eq!(world.server.stats().errors_with(486), 2);
    assert_eq!(world.server.stats().errors_with(508), 1);
}

#[test]
fn a_prefix_has_no_more_allocations_than_the_quota() {
    let policy = TestPolicy { per_user: 10, total: 10, per_prefix: 2, ..TestPolicy::default() };
    let config = ServerConfig { prefixes: PrefixLengths { v4: 24, v6: 56 }, ..config() };
    let mut world = World::with_policy(config, policy);
    let mut allocate = |ip: &str, port, user| {
        world.client = at(ip, port);
        let credentials = world.credentials(user, Scheme::Md5);
        let code = world.ask(&Ask::allocate().signed(&credentials)).code();
        (code, credentials)
    };
    let (code, alice) = allocate("198.51.100.1", 1, "alice");
    assert_eq!(code, None);
    assert_eq!(allocate("198.51.100.200", 2, "bob").0, None);
    assert_eq!(allocate("198.51.100.3", 3, "bob").0, Some(486));
    assert_eq!(allocate("198.51.101.3", 4, "bob").0, None);
    assert_eq!(allocate("2001:db8:0:1::1", 5, "alice").0, None);
    assert_eq!(allocate("2001:db8:0:ff::1", 6, "alice").0, None);
    assert_eq!(allocate("2001:db8:0:2::1", 7, "bob").0, Some(486));
    assert_eq!(allocate("2001:db8:0:100::1", 8, "bob").0, None);
    assert_eq!(world.server.stats().quota_refusals, [0, 0, 2]);

    // The allocation is counted under its original address, so deleting it makes room for that prefix.
    world.client = at("198.51.100.1", 1);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    world.client = at("198.51.100.9", 9);
    world.ask_as("bob", Ask::allocate()).success();
}

#[test]
fn a_closing_listener_refuses_only_new_allocations() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert!(world.server.serves(ListenerId(0)));
    let listeners = vec![ListenerProfile { closing: true, ..ListenerProfile::default() }];
    world.server.reconfigure(world.now, ServerConfig { listeners, ..config() }.into());
    world.ask(&Ask::refresh(600).signed(&alice)).success();
    assert!(world.feed(&channel_data(0x4000, b"on")).goes_to_peer());
    assert!(world.peer_sends(relay, PEER, b"back").goes_to_client());

    let mut newcomer = |listener| {
        world.client = Client { listener, ..client(2) };
        world.ask_as("bob", Ask::allocate()).code()
    };
    assert_eq!(newcomer(ListenerId(0)), Some(508));
    assert_eq!(newcomer(ListenerId(1)), None, "another listener");
    world.client = client(40_000);
    world.ask(&Ask::refresh(0).signed(&alice)).success();
    assert!(!world.server.serves(ListenerId(0)) && world.server.serves(ListenerId(1)));
}
