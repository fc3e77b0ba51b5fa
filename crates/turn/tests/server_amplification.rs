//! Limit on refusals per prefix: forged source addresses cause only a bounded number of responses.

use crate::common::*;
use turnpike_turn::server::RefusalLimit;

fn bounded() -> ServerConfig {
    ServerConfig {
        refusals: Some(RefusalLimit { per_second: 10 }),
        prefixes: PrefixLengths { v4: 24, v6: 64 },
        ..streams()
    }
}

/// Number of responses to bare requests from ports of one address.
fn answered(world: &mut World, listener: u16, last: u8, requests: u16) -> usize {
    let asked = (1..=requests).filter(|port| {
        let address = ([198, 51, 100, last], *port).into();
        world.client = Client { listener: ListenerId(listener), address, ..client(*port) };
        matches!(world.feed(&Ask::allocate().bytes()), Outcome::Reply(_))
    });
    asked.count()
}

#[test]
fn a_prefix_gets_limited_refusals_without_affecting_others() {
    let mut world = World::with(bounded());
    assert_eq!(answered(&mut world, 0, 1, 100), 20, "two seconds' worth");
    assert_eq!(answered(&mut world, 0, 200, 100), 0, "neighbouring addresses share the limit");
    assert_eq!(world.dropped(DropReason::RefusalLimit), 180);
    world.client = client(1);
    assert!(matches!(world.feed(&Ask::allocate().bytes()), Outcome::Reply(_)), "another prefix");
    world.sleep(1);
    assert_eq!(answered(&mut world, 0, 1, 100), 10);
}

#[test]
fn streams_and_authenticated_clients_are_not_limited() {
    let mut world = World::with(bounded());
    assert_eq!(answered(&mut world, 1, 1, 100), 100, "over TCP");
    world.client = Client { address: address("198.51.100.1:5000"), ..client(1) };
    let alice = world.credentials("alice", Scheme::Md5);
    assert_eq!(answered(&mut world, 0, 1, 100), 19);
    world.client = Client { address: address("198.51.100.1:5000"), ..client(1) };
    for _ in 0..100 {
        assert_eq!(world.ask(&Ask::refresh(600).signed(&alice)).code(), Some(437));
        world.ask(&Ask::new(BINDING)).success();
    }
    world.ask(&Ask::allocate().signed(&alice)).success();
}
