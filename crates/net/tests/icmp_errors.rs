//! ICMP errors can be read from the error queue, and no datagrams are lost because of them.

use crate::common::wait_for_error;
use crate::prelude::*;
use socket2::{Domain, Protocol, Type};
use turnpike_net::{self, QueuedError};
use turnpike_testkit::free_port;

fn nobody(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, free_port(ip))
}

fn with_errors() -> UdpOptions {
    UdpOptions { errors: true, ..UdpOptions::default() }
}

#[test]
fn port_unreachable_is_read_from_the_error_queue() {
    // Port unreachable: type 3, code 3 in ICMP; type 1, code 4 in ICMPv6.
    for (ip, icmp_type, code) in [(V4, 3, 3), (V6, 1, 4)] {
        for datapath in DATAPATHS {
            let mut sender = Sender::new(datapath, ip, &with_errors());
            let closed = nobody(ip);
            let route = sender.route(closed);
            sender.tx.push_bytes(&route, b"anybody there?");
            sender.flush();
            wait_for_error(sender.socket());
            let mut errors = Vec::new();
            assert_eq!(sender.socket().read_errors(16, |e| errors.push(e)).unwrap(), 1);
            let expected = QueuedError { to: closed, icmp_type, code, info: 0, v6: ip == V6 };
            assert_eq!(errors, [expected]);
            assert_eq!(sender.socket().read_errors(16, |_| panic!("read twice")).unwrap(), 0);
        }
    }
}

/// An ICMP error may come from any router: RFC 8656 section 11.5 uses the destination of the quoted datagram.
#[test]
fn icmp_error_from_a_router_names_the_peer_of_the_datagram() {
    in_namespace(turnpike_testkit::this_test!(), &[], || {
        let Ok(router) = socket2::Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4)) else {
            return turnpike_testkit::alone::skip("raw sockets are not permitted");
        };
        router.bind(&SocketAddr::from(([127, 0, 0, 9], 0)).into()).unwrap();
        let sender = Sender::new(Datapath::Mmsg, V4, &with_errors());
        let (own, peer) = (sender.socket().local_addr(), SocketAddr::from(([198, 41, 0, 4], 7000)));
        // Time exceeded (11) in transit, about a datagram from `own` to `peer`: its IP and UDP headers (RFC
        // 792).
        let ip = [&[0x45, 0, 0, 28, 0, 0, 0, 0, 1, 17, 0, 0, 127, 0, 0, 1][..], &[198, 41, 0, 4]].concat();
        let udp = [own.port().to_be_bytes(), peer.port().to_be_bytes(), [0, 8], [0, 0]].concat();
        let mut message = [&[11, 0, 0, 0, 0, 0, 0, 0][..], &ip, &udp].concat();
        let sum: u32 = message.chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
        let folded = !(((sum & 0xFFFF) + (sum >> 16)) as u16);
        message[2..4].copy_from_slice(&folded.to_be_bytes());
        router.send_to(&message, &SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        wait_for_error(sender.socket());
        let mut errors = Vec::new();
        sender.socket().read_errors(16, |error| errors.push(error)).unwrap();
        assert_eq!(errors, [QueuedError { to: peer, icmp_type: 11, code: 0, info: 0, v6: false }]);
    });
}

#[test]
fn reading_stops_at_the_limit() {
    let mut sender = Sender::new(Datapath::Mmsg, V4, &with_errors());
    let closed = nobody(V4);
    for _ in 0..5 {
        let route = sender.route(closed);
        sender.tx.push_bytes(&route, b"x");
        sender.flush();
    }
    wait_for_error(sender.socket());
    let mut seen = 0;
    assert_eq!(sender.socket().read_errors(2, |_| seen += 1).unwrap(), 2);
    assert_eq!(seen, 2);
    assert!(sender.socket().read_errors(100, |_| {}).unwrap() <= 3);
}

/// If the queue is not read, the next send fails with the error instead of sending.
#[test]
fn pending_icmp_error_costs_no_datagram() {
    for ip in [V4, V6] {
        for datapath in DATAPATHS {
            let mut sender = Sender::new(datapath, ip, &with_errors());
            let to = bind(ip, &UdpOptions::default());
            let closed = nobody(ip);
            let mut rx = Rx::new(datapath);
            for round in 0..5_u8 {
                let bad = sender.route(closed);
                sender.tx.push_bytes(&bad, b"x");
                sender.flush();
                wait_for_error(sender.socket());
                let good = sender.route(to.local_addr());
                for n in 0..10 {
                    sender.tx.push_bytes(&good, &[round * 10 + n; 80]);
                }
                sender.flush();
                let got = receive(&mut rx, &[&to], 10);
                assert!(got.iter().enumerate().all(|(n, d)| d.bytes == [round * 10 + n as u8; 80]));
            }
            let stats = sender.tx.stats();
            assert_eq!((stats.datagrams, stats.refused, stats.step_downs), (55, 0, 0), "{ip} {datapath}");
            assert_eq!(stats.super_packets, if datapath == Datapath::Gso { 5 } else { 0 });
        }
    }
}

/// Loopback delivers the error while the batch is still being sent.
#[test]
fn icmp_errors_within_a_batch_cost_no_datagram() {
    for datapath in DATAPATHS {
        let mut sender = Sender::new(datapath, V4, &with_errors());
        let to = bind(V4, &UdpOptions { recv_buffer: Some(1 << 20), ..UdpOptions::default() });
        let (good, bad) = (sender.route(to.local_addr()), sender.route(nobody(V4)));
        for n in 0..50_u8 {
            // Each pair has its own TOS and therefore its own routes, so good and bad destinations alternate in
            // the batch.
            let tos = (n + 1) << 2;
            sender.tx.push_bytes(&turnpike_net::Route { tos, ..bad }, &[n; 20]);
            sender.tx.push_bytes(&turnpike_net::Route { tos, ..good }, &[n; 20]);
        }
        sender.flush();
        let got = receive(&mut Rx::new(datapath), &[&to], 50);
        assert!(got.iter().enumerate().all(|(n, d)| d.bytes == [n as u8; 20]));
        assert_eq!(sender.tx.stats().refused, 0);
    }
}

#[test]
fn receive_returns_a_pending_icmp_error_once() {
    let mut sender = Sender::new(Datapath::Gso, V4, &with_errors());
    let route = sender.route(nobody(V4));
    sender.tx.push_bytes(&route, b"x");
    sender.flush();
    wait_for_error(sender.socket());
    let mut rx = Rx::new(Datapath::Gso);
    assert_eq!(rx.recv(sender.socket()).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(rx.recv(sender.socket()).unwrap().count, 0);
}
