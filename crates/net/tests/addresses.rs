//! Source addresses of replies from wildcard sockets.

use crate::prelude::*;
use std::net::Ipv6Addr;

const WILDCARD4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
const WILDCARD6: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Sends from `client` to a wildcard server at each address in `asked`. Every reply must come from the address
/// that the request was sent to.
fn replies_leave_from_the_requested_address(wildcard: IpAddr, client: IpAddr, asked: &[IpAddr]) {
    for datapath in DATAPATHS {
        let gro = datapath == Datapath::Gso;
        let options = UdpOptions { packet_info: true, gro, ..UdpOptions::default() };
        let dual_stack = wildcard.is_ipv6() != client.is_ipv6();
        let mut server = Sender::new(datapath, wildcard, &UdpOptions { dual_stack, ..options.clone() });
        let mut client = Sender::new(datapath, client, &options);
        let port = server.socket().local_addr().port();
        for ip in asked {
            let route = client.route(SocketAddr::new(*ip, port));
            for n in 0..20_u8 {
                client.tx.push_bytes(&route, &[n; 50]);
            }
        }
        client.flush();
        let mut rx = Rx::new(datapath);
        for question in receive(&mut rx, &[server.socket()], 20 * asked.len()) {
            assert_eq!(question.from, client.socket().local_addr());
            let route = Route { from: question.local, ..server.route(question.from) };
            server.tx.push_bytes(&route, format!("{}", question.local.unwrap()).as_bytes());
        }
        server.flush();
        assert_eq!(server.tx.stats().datagrams, 20 * asked.len() as u64);
        assert_eq!(server.tx.stats().super_packets > 0, gro);
        let mut seen: Vec<IpAddr> = Vec::new();
        for answer in receive(&mut rx, &[client.socket()], 20 * asked.len()) {
            assert_eq!(answer.from.ip().to_string().as_bytes(), answer.bytes);
            assert_eq!(answer.from.port(), port);
            seen.push(answer.from.ip());
        }
        seen.dedup();
        assert_eq!(seen, asked, "{datapath}");
    }
}

#[test]
fn ipv4_replies_leave_from_the_requested_address() {
    let asked = [1, 2, 77].map(|n| IpAddr::from([127, 0, 0, n]));
    replies_leave_from_the_requested_address(WILDCARD4, IpAddr::from([127, 0, 0, 9]), &asked);
}

#[test]
fn dual_stack_replies_leave_from_the_requested_ipv4_address() {
    let asked = [1, 2, 77].map(|n| IpAddr::from([127, 0, 0, n]));
    replies_leave_from_the_requested_address(WILDCARD6, IpAddr::from([127, 0, 0, 9]), &asked);
}

#[test]
fn ipv6_replies_leave_from_the_requested_address() {
    let setup = ["link set lo up", "addr add fd00::1/64 dev lo nodad", "addr add fd00::2/64 dev lo nodad"];
    in_namespace(turnpike_testkit::this_test!(), &setup, || {
        let asked = ["::1", "fd00::1", "fd00::2"].map(|ip| ip.parse().unwrap());
        asked.iter().for_each(|ip| common::wait_until_reachable(*ip));
        replies_leave_from_the_requested_address(WILDCARD6, asked[1], &asked);
    });
}

#[test]
fn without_packet_info_there_is_no_local_address() {
    let to = common::bind(WILDCARD4, &UdpOptions::default());
    let mut sender = Sender::new(Datapath::Gso, common::V4, &UdpOptions::default());
    let route = sender.route(SocketAddr::new(common::V4, to.local_addr().port()));
    sender.tx.push_bytes(&route, b"x");
    sender.flush();
    assert_eq!(receive(&mut Rx::new(Datapath::Gso), &[&to], 1)[0].local, None);
}

#[test]
fn ipv6_wildcard_leaves_the_ipv4_port_free() {
    let v6 = common::bind(WILDCARD6, &UdpOptions::default());
    let port = v6.local_addr().port();
    // Fails with EADDRINUSE unless the IPv6 socket is IPV6_V6ONLY.
    turnpike_net::UdpSocket::bind(SocketAddr::new(WILDCARD4, port), &UdpOptions::default()).unwrap();
}

#[test]
fn connected_socket_needs_no_destination() {
    for datapath in DATAPATHS {
        let to = common::bind(common::V4, &UdpOptions::default());
        let mut sender = Sender::new(datapath, common::V4, &UdpOptions::default());
        sender.socket().connect(to.local_addr()).unwrap();
        let route = Route { to: None, ..sender.route(to.local_addr()) };
        for n in 0..10_u8 {
            sender.tx.push_bytes(&route, &[n; 30]);
        }
        sender.flush();
        let got = receive(&mut Rx::new(datapath), &[&to], 10);
        assert!(got.iter().enumerate().all(|(n, d)| d.bytes == [n as u8; 30]));
    }
}
