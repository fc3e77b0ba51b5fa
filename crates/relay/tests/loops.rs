//! Nested allocations: clients whose address is one of our relayed transport addresses cannot create or move
//! an allocation, even if the peer rules let them reach us. Runs in a network namespace where a route
//! delivers packets for an address to the listeners although no interface has that address.

use crate::prelude::*;
use crate::support::{in_network_namespace, run, start_with};

const RELAY: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
/// Address that reaches the listeners through a `local` route and that the peer rules allow.
const DOOR: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);

fn allocate_of(transport: u8, more: &[(u16, &[u8])]) -> Vec<u8> {
    stun(support::ALLOCATE, 1, &[&[(0x0019, &[transport, 0, 0, 0][..])], more].concat())
}

fn present(ticket: &[u8]) -> Vec<u8> {
    stun(support::REFRESH, 5, &[(MOBILITY_TICKET, ticket)])
}

fn world() -> World {
    run("ip", &["address", "add", &format!("{RELAY}/32"), "dev", "lo"]);
    run("ip", &["route", "add", "local", "10.99.0.0/16", "dev", "lo"]);
    start_with(|config| {
        let everywhere = (Ipv4Addr::UNSPECIFIED, 0).into();
        config.listen = vec![everywhere];
        config.streams.listen = vec![everywhere];
        config.workers = 2;
        config.relay = vec![RelayAddress { bind: RELAY.into(), external: None }];
        config.addresses = vec![RELAY.into()];
        config.server.peers.allow = vec!["10.0.0.0/8".parse().unwrap()];
    })
}

fn refused(world: &World) -> u64 {
    world.relay.snapshots().iter().map(|snapshot| snapshot.turn.loop_refusals).sum()
}

struct Outer(UdpSocket);

impl Outer {
    fn new(world: &World) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.connect((Ipv4Addr::LOCALHOST, world.udp().port())).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        Self(socket)
    }

    fn exchange(&self, bytes: &[u8]) -> Message {
        self.0.send(bytes).unwrap();
        let mut buffer = [0; 2048];
        let len = self.0.recv(&mut buffer).unwrap();
        Message(buffer[..len].to_vec())
    }

    fn ask(&self, request: &[u8]) -> Message {
        let answer = self.exchange(request);
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0100, "{answer:?}");
        answer
    }

    fn exchange_through(&self, request: &[u8]) -> Message {
        Message(self.exchange(&channel_data(request)).payload().to_vec())
    }
}

#[test]
fn client_behind_a_relayed_address_gets_no_allocation_and_no_loop() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let world = world();
        let door = SocketAddr::from((DOOR, world.udp().port()));
        let outer = Outer::new(&world);
        let relayed = plain(&outer.ask(&allocate()).attribute(0x0016));
        assert_eq!(relayed.ip(), RELAY);
        outer.ask(&bind(door));
        // The path works: the mapped address is the relayed address.
        assert_eq!(plain(&outer.exchange_through(&binding(9)).attribute(0x0020)), relayed);

        for request in [allocate(), allocate_of(17, &[(MOBILITY_TICKET, &[])])] {
            assert_eq!(outer.exchange_through(&request).error(), Some(403));
        }
        // The ticket of a direct allocation is refused on this path but valid elsewhere.
        let mobile = Outer::new(&world);
        let ticket = mobile.ask(&allocate_of(17, &[(MOBILITY_TICKET, &[])])).attribute(MOBILITY_TICKET);
        assert_eq!(outer.exchange_through(&present(&ticket)).error(), Some(403));
        Outer::new(&world).ask(&present(&ticket));
        eventually("three refusals are counted", || refused(&world) == 3);

        let relayed = || world.relay.snapshots().iter().map(|s| s.turn.to_peer_datagrams).sum::<u64>();
        let passed = || world.counter("dropped_datagrams", "no_allocation");
        let (before, _) = (
            eventually("the first four datagrams are relayed", || (relayed() == 4).then(&relayed)),
            passed(),
        );
        for round in 1..=6 {
            for _ in 0..50 {
                outer.0.send(&channel_data(&channel_data(b"round and round"))).unwrap();
            }
            eventually("each datagram has arrived once", || passed() == 50 * round);
        }
        eventually("each datagram has been relayed once", || relayed() == before + 300);
    });
}

#[test]
fn client_behind_a_relayed_tcp_address_gets_no_allocation() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let world = world();
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, world.tcp().port()));
        let mut control = Client::new(connect(server));
        let relayed = plain(&control.ask(&allocate_of(6, &[])).attribute(0x0016));
        let door = SocketAddr::from((DOOR, world.tcp().port()));
        let connection = control.ask(&stun(0x000A, 2, &[(0x0012, &xored(door))])).attribute(0x002A);
        let mut data = connect(server);
        data.write_all(&stun(0x000B, 3, &[(0x002A, &connection)])).unwrap();
        let mut header = [0; 20];
        data.read_exact(&mut header).unwrap();
        assert_eq!(header[..2], [0x01, 0x0B]);
        data.read_exact(&mut vec![0; usize::from(u16::from_be_bytes([header[2], header[3]]))]).unwrap();

        let mut inner = Client::new(data);
        assert_eq!(plain(&inner.ask(&binding(9)).attribute(0x0020)), relayed);
        for request in [allocate(), allocate_of(6, &[]), stun(0x000B, 4, &[(0x002A, &[7; 4])])] {
            inner.send(&request);
            assert_eq!(inner.receive().unwrap().error(), Some(403));
        }
        eventually("three refusals are counted", || refused(&world) == 3);
        let namesake = UdpSocket::bind(relayed).unwrap();
        namesake.connect(server).unwrap();
        assert_eq!(Outer(namesake).ask(&allocate()).kind(), 0x0103);
    });
}
