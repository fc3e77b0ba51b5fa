//! Clients that come from one of our own relayed transport addresses: no allocation, none moved, no connection bound.

use crate::common::*;
use turnpike_turn::server::ConnectionId;

/// A client on a listener for datagrams (0) or streams (1), whose address is one that we relay on by `transport`.
fn behind(listener: u16, transport: RelayTransport) -> (World, Credentials) {
    let mut world = World::with(streams());
    world.client.listener = ListenerId(listener);
    let alice = world.credentials("alice", Scheme::Md5);
    world.server.policy_mut().relayed = vec![(world.client.address, transport)];
    (world, alice)
}

#[test]
fn a_client_behind_a_relayed_address_gets_nothing_but_its_own_address() {
    for (listener, transport) in [(0, RelayTransport::Udp), (1, RelayTransport::Tcp)] {
        let (mut world, alice) = behind(listener, transport);
        for ask in [
            Ask::allocate(),
            Ask::allocate().raw(TICKET, &[]),
            Ask::present(&[7; 32]),
            Ask::connection_bind(ConnectionId(7)),
        ] {
            let reply = world.ask(&ask.signed(&alice));
            assert_eq!(reply.code(), Some(403));
            assert!(reply.is_signed(&alice));
        }
        assert_eq!(world.server.stats().loop_refusals, 4);
        assert_eq!((world.server.allocations(), world.server.policy_mut().held()), (0, 0));
        assert_eq!(
            world.ask(&Ask::allocate()).code(),
            Some(401),
            "who does not authenticate is told nothing"
        );
        world.ask(&Ask::new(BINDING)).success();
        // What makes no allocation and moves none is answered as ever.
        assert_eq!(world.ask(&Ask::refresh(600).signed(&alice)).code(), Some(437));
        assert_eq!(world.server.stats().loop_refusals, 4);
    }
}

#[test]
fn the_same_number_of_the_other_transport_is_a_client_like_any() {
    for (listener, transport) in [(0, RelayTransport::Tcp), (1, RelayTransport::Udp)] {
        let (mut world, alice) = behind(listener, transport);
        world.ask(&Ask::allocate().signed(&alice)).success();
        assert_eq!(world.server.stats().loop_refusals, 0);
    }
}
