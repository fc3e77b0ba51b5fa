//! Quotas of allocations (RFC 8656 sections 7.2 and 19: 486 of a user, 508 in total).

use crate::common::*;

#[test]
fn a_user_has_no_more_allocations_than_the_gate_gives() {
    let gate = TestGate { per_user: 2, total: 3, ..TestGate::default() };
    let mut world = World::with_gate(config(), gate);
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
    assert_eq!(world.server.stats().quota_refusals, [1, 1], "of the user, in total");

    world.client = client(4);
    world.ask(&Ask::refresh(0).signed(&bob)).success();
    world.client = client(3);
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(world.ask(&Ask::allocate().signed(&alice)).code(), Some(486));
    assert_eq!(world.server.stats().quota_refusals, [2, 1]);
    assert_eq!(world.server.allocations(), 2);
    assert_eq!(world.server.stats().errors_with(486), 2);
    assert_eq!(world.server.stats().errors_with(508), 1);
}
