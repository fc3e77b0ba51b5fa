//! Fuzz target: any datagrams from a client, an ICMP error and a peer, at a server that asks for no credentials and so
//! lets them deep in. Bounded under `cargo test`, unbounded under `cargo bolero`.

mod common;
use common::*;
use turnpike_turn::{
    server::{Family, OpenResult, RelayId, ServerConfig},
    wire::stun_types::message::Message,
};

#[test]
fn server() {
    bolero::check!().with_type::<Vec<Vec<u8>>>().for_each(|datagrams| {
        let mut world = World::with(ServerConfig {
            authenticate: false,
            max_permissions: 4,
            max_channels: 4,
            ..everything()
        });
        let mut open = None;
        for datagram in datagrams {
            match world.feed(datagram) {
                Outcome::Reply(bytes) => assert!(Message::from_bytes(&bytes).is_ok(), "{bytes:02x?}"),
                Outcome::Open(request) => {
                    open = Some(request.allocation);
                    let relayed = address("203.0.113.1:50000");
                    world.opened(request.allocation, OpenResult::Opened { relayed }, None);
                }
                Outcome::ToPeer { payload, .. } => assert!(payload.len() < datagram.len()),
                Outcome::ToClient { .. } => panic!("a client's datagram went to a client"),
                Outcome::Drop(_) => {}
            }
            if let (Some(allocation), [first, second, ..]) = (open, &datagram[..]) {
                let relay = RelayId { allocation, family: Family::V4 };
                let _ = Outcome::from(world.server.from_icmp(
                    world.now,
                    relay,
                    address(PEER),
                    *first,
                    *second,
                    0,
                ));
                world.peer_sends(relay, PEER, datagram);
            }
        }
        assert!(world.server.allocations() <= 1);
        world.sleep(3601);
        assert_eq!(world.server.allocations(), 0);
        assert_eq!(world.server.gate_mut().held(), 0);
    });
}
