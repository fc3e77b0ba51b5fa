//! Clients behind relayed addresses of this server can neither allocate, move nor bind connections.

use crate::common::*;
use turnpike_turn::server::ConnectionId;

/// Client on a listener for datagrams (0) or streams (1), with a relayed address of `transport`.
fn behind(listener: u16, transport: RelayTransport) -> (World, Credentials) {
    let mut world = World::with(streams());
    world.client.listener = ListenerId(listener);
    let alice = world.credentials("alice", Scheme::Md5);
    world.server.policy_mut().relayed = vec![(world.client.address, transport)];
    (world, alice)
}

#[test]
fn a_client_behind_a_relayed_address_gets_no_allocation() {
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
        assert_eq!(world.ask(&Ask::allocate()).code(), Some(401), "unauthenticated requests get a challenge");
        world.ask(&Ask::new(BINDING)).success();
        // Requests that neither make nor move an allocation get the usual response.
        assert_eq!(world.ask(&Ask::refresh(600).signed(&alice)).code(), Some(437));
        assert_eq!(world.server.stats().loop_refusals, 4);
    }
}

#[test]
fn a_relayed_port_of_the_other_transport_is_not_a_loop() {
    for (listener, transport) in [(0, RelayTransport::Tcp), (1, RelayTransport::Udp)] {
        let (mut world, alice) = behind(listener, transport);
        world.ask(&Ask::allocate().signed(&alice)).success();
        assert_eq!(world.server.stats().loop_refusals, 0);
    }
}
