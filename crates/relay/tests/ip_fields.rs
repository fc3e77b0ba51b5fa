//! IP header fields of relayed datagrams (RFC 8656 sections 14 to 16), and the source address of replies.

use crate::prelude::*;
use std::os::fd::AsFd as _;

use turnpike_net::{Rx, UdpOptions, UdpSocket as Reading};

use crate::support::*;

/// TOS values: ECT(1), ECT(0), CE, expedited forwarding with ECT(0), and zero.
const TOS: [u8; 5] = [1, 2, 3, 0xBA, 0];

fn socket() -> Reading {
    let options = UdpOptions { ip_header: true, ..UdpOptions::default() };
    Reading::bind((Ipv4Addr::LOCALHOST, 0).into(), &options).unwrap()
}

fn next(socket: &Reading) -> (u8, Vec<u8>) {
    let mut rx = Rx::new(Datapath::Basic);
    let until = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < until, "no datagram in time");
        let Ok(received) = rx.recv(socket) else { continue };
        if let Some(buffer) = rx.buffers(received).next() {
            return (buffer.tos, buffer.bytes.to_vec());
        }
    }
}

fn with_tos(socket: &UdpSocket, tos: u8) {
    socket2::SockRef::from(socket).set_tos_v4(tos.into()).unwrap();
}

#[test]
fn dscp_and_ecn_are_copied_between_datagrams_in_both_directions() {
    let world = start_with(|_| {});
    let (client, peer) = (self::peer(), socket());
    client.connect(world.udp()).unwrap();
    client.send(&allocate()).unwrap();
    heard(&client);
    client.send(&bind(peer.local_addr())).unwrap();
    heard(&client);
    for tos in TOS {
        with_tos(&client, tos);
        client.send(&channel_data(b"there")).unwrap();
        assert_eq!(next(&peer), (tos, b"there".to_vec()));
    }
    let (client, peer) = (socket(), self::peer());
    let asks = UdpSocket::from(client.as_fd().try_clone_to_owned().unwrap());
    asks.send_to(&allocate(), world.udp()).unwrap();
    let relayed = plain(&Message(next(&client).1).attribute(0x0016));
    asks.send_to(&bind(peer.local_addr().unwrap()), world.udp()).unwrap();
    next(&client);
    for tos in TOS {
        with_tos(&peer, tos);
        peer.send_to(b"back", relayed).unwrap();
        assert_eq!(next(&client), (tos, channel_data(b"back")));
    }
}

/// RFC 8656 sections 15 and 16.
#[test]
fn datagrams_of_tcp_clients_are_best_effort_and_not_ect() {
    let world = start_with(|_| {});
    let peer = socket();
    let mut client = Client::new(connect(world.tcp()));
    let relayed = plain(&client.ask(&allocate()).attribute(0x0016));
    client.ask(&bind(peer.local_addr()));
    let says = UdpSocket::from(peer.as_fd().try_clone_to_owned().unwrap());
    for tos in TOS {
        // DSCP and ECN of the peer's datagrams are not forwarded.
        with_tos(&says, tos);
        says.send_to(b"back", relayed).unwrap();
        assert_eq!(client.receive().unwrap().payload(), b"back");
        client.send(&padded(channel_data(b"there")));
        assert_eq!(next(&peer), (0, b"there".to_vec()));
    }
}

/// RFC 8656 section 14, on a loopback interface with the MTU of Ethernet.
#[test]
fn send_with_dont_fragment_is_never_fragmented() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        run("ip", &["link", "set", "lo", "mtu", "1500"]);
        let world = start_with(|_| {});
        let (client, peer) = (self::peer(), self::peer());
        client.connect(world.udp()).unwrap();
        client.send(&allocate()).unwrap();
        heard(&client);
        let address = peer.local_addr().unwrap();
        client.send(&permit(address)).unwrap();
        heard(&client);
        let to = xored(address);
        for (size, arrives_with_df) in [(1000, true), (3000, false)] {
            let [with, without] = [1, 2].map(|byte| vec![byte; size]);
            client.send(&stun(SEND, 7, &[(0x0012, &to), (0x001A, &[]), (0x0013, &with)])).unwrap();
            client.send(&stun(SEND, 8, &[(0x0012, &to), (0x0013, &without)])).unwrap();
            let first = heard(&peer);
            assert_eq!(first == with, arrives_with_df, "{size} bytes");
            assert_eq!(if arrives_with_df { heard(&peer) } else { first }, without);
        }
    });
}

/// RFC 8489 section 6.3.1.2.
#[test]
fn wildcard_listener_replies_from_the_destination_address() {
    let world = start_with(|config| config.listen = vec![(Ipv4Addr::UNSPECIFIED, 0).into()]);
    let port = world.udp().port();
    for last in 1..5 {
        let asked = SocketAddr::new(IpAddr::from([127, 0, 0, last]), port);
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.set_read_timeout(Some(SOON)).unwrap();
        client.send_to(&binding(7), asked).unwrap();
        let mut buffer = [0; 100];
        assert_eq!(client.recv_from(&mut buffer).unwrap().1, asked);
    }
}

/// RFC 8656 section 7.2.
#[test]
fn default_relay_ports_are_the_dynamic_range() {
    let world = start_with(|config| config.ports = turnpike_relay::Config::default().ports);
    for _ in 0..50 {
        let client = self::peer();
        client.connect(world.udp()).unwrap();
        client.send(&allocate()).unwrap();
        let relayed = plain(&Message(heard(&client)).attribute(0x0016));
        assert!(relayed.port() >= 49_152, "{relayed}");
    }
}
