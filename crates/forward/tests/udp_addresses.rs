//! Source addresses of responses. The clients' sockets are connected, so they ignore other sources.

use crate::prelude::*;
use std::net::IpAddr;

use crate::udp_common::{self, PATIENCE, eventually, rule};

/// A client socket that uses several of our addresses has a session with each.
fn ask_each(bind: &str, addresses: &[&str], from: &str, datapath: Datapath) {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(datapath);
    let at = worker.add(KEY, &rule(Protocol::Udp, bind.parse().unwrap(), echo.address), datapath);
    let client = UdpSocket::bind(from).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..2 {
        for address in addresses {
            let asked = SocketAddr::new(address.parse().unwrap(), at.port());
            client.send_to(address.as_bytes(), asked).unwrap();
            let mut bytes = [0; 64];
            let (len, answered) = client.recv_from(&mut bytes).unwrap();
            assert_eq!((&bytes[..len], answered), (address.as_bytes(), asked), "on {datapath}");
        }
    }
    assert_eq!(worker.active(), addresses.len());
}

#[test]
fn answers_come_from_the_ipv4_address_that_the_client_used() {
    for datapath in DATAPATHS {
        ask_each("0.0.0.0:0", &["127.0.0.1", "127.0.0.2", "127.1.2.3"], "127.0.0.9:0", datapath);
    }
}

#[test]
fn answers_come_from_the_ipv6_address_that_the_client_used() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        for ip in ["fd00::1", "fd00::2"] {
            alone::run("ip", &["address", "add", &format!("{ip}/128"), "dev", "lo", "nodad"]);
            wait_until_reachable(ip.parse().unwrap());
        }
        for datapath in DATAPATHS {
            ask_each("[::]:0", &["fd00::1", "fd00::2", "::1"], "[fd00::1]:0", datapath);
        }
    });
}

#[test]
fn datagrams_use_the_source_address_of_the_rule() {
    let target = UdpSocket::bind(LOCALHOST).unwrap();
    target.set_read_timeout(Some(PATIENCE)).unwrap();
    let worker = Worker::start(Datapath::Gso);
    let to = target.local_addr().unwrap();
    let source: IpAddr = "127.0.0.77".parse().unwrap();
    let rule = Rule { source: Some(source.into()), ..rule(Protocol::Udp, LOCALHOST.parse().unwrap(), to) };
    let client = udp_common::client(worker.add(KEY, &rule, Datapath::Gso));
    client.send(b"?").unwrap();
    assert_eq!(target.recv_from(&mut [0; 8]).unwrap().1.ip(), source);
}

#[test]
fn client_and_target_may_have_different_families() {
    for (listen, target) in [("[::1]:0", LOCALHOST), (LOCALHOST, "[::1]:0")] {
        let echo = Echo::start(target);
        let worker = Worker::start(Datapath::Gso);
        let at = worker.add(KEY, &rule(Protocol::Udp, listen.parse().unwrap(), echo.address), Datapath::Gso);
        expect_echo(&udp_common::client(at), b"across");
    }
}

/// The kernel sets up routes to new addresses in the background.
fn wait_until_reachable(ip: IpAddr) {
    let socket = UdpSocket::bind((ip, 0)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    eventually("the address is reachable from itself", || {
        socket.send_to(b"?", address).is_ok() && socket.recv(&mut [0; 1]).is_ok()
    });
}
