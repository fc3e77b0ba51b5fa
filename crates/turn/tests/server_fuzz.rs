//! Fuzz target: any datagrams from a client, an ICMP error and a peer, at a server that asks for no credentials and so
//! lets them deep in. Bounded under `cargo test`, unbounded under `cargo bolero`.

use crate::common::*;
use stun_types::message::Message;
use turnpike_turn::server::{ConnectError, Family, OpenResult, RelayId, ServerConfig};

#[test]
fn server() {
    bolero::check!().with_type::<Vec<Vec<u8>>>().for_each(|datagrams| {
        let mut world = World::with(ServerConfig {
            authenticate: false,
            max_permissions: 4,
            max_channels: 4,
            max_connections: 2,
            listeners: streams().listeners,
            ..everything()
        });
        let mut open = None;
        for datagram in datagrams {
            // Over UDP, on a control connection, or on one that may become a data connection.
            world.client = [client(40_000), stream(41_000), stream(41_001)][datagram.len() / 4 % 3];
            match world.feed(datagram) {
                Outcome::Reply(bytes) => assert!(Message::from_bytes(&bytes).is_ok(), "{bytes:02x?}"),
                Outcome::Open(request) => {
                    open = Some(request.allocation);
                    let relayed = address("203.0.113.1:50000");
                    world.opened(request.allocation, OpenResult::Opened { relayed }, None);
                }
                Outcome::ToPeer { payload, .. } => assert!(payload.len() < datagram.len()),
                Outcome::ToClient { .. } => panic!("a client's datagram went to a client"),
                Outcome::Connect(request) => {
                    let result =
                        if datagram.len().is_multiple_of(8) { Ok(()) } else { Err(ConnectError::Failed) };
                    world.connect_result(&request, result);
                }
                Outcome::Bind { connection, .. } => {
                    world.server.connection_ended(world.now, connection, 1, 2);
                }
                Outcome::HandOver { .. } | Outcome::Forward { .. } | Outcome::Move(_) => {
                    panic!("there is one worker")
                }
                Outcome::LookUp(_) | Outcome::Later => panic!("the gate knows"),
                Outcome::Wait(_) => panic!("nothing is limited"),
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
                world.peer_connects(relay, PEER);
            }
        }
        assert!(world.server.allocations() <= 3);
        assert!(world.server.connections() <= 6);
        world.sleep(3601);
        assert_eq!(world.server.connections(), 0);
        assert_eq!(world.server.allocations(), 0);
        assert_eq!(world.server.gate_mut().held(), 0);
    });
}
