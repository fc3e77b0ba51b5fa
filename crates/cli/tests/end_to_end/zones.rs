//! Link-local addresses with an interface name, in a network namespace.

use crate::prelude::*;
use std::net::{Ipv6Addr, SocketAddrV6, ToSocketAddrs as _};

use turnpike_testkit::alone;

const LISTENER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const TARGET: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
const BINDING: [u8; 20] = *b"\x00\x01\x00\x00\x21\x12\xa4\x42turnpiketest";

const PROBE: [&str; 5] = ["ip", "link", "add", "type", "veth"];

/// Creates the interface with both addresses; returns its index.
fn interface(name: &str) -> u32 {
    run("ip", &["link", "set", "lo", "up"]);
    let other_end = format!("{name}-peer");
    run("ip", &["link", "add", name, "type", "veth", "peer", "name", &other_end]);
    for address in [LISTENER, TARGET] {
        run("ip", &["address", "add", &format!("{address}/64"), "dev", name, "nodad"]);
    }
    for end in [name, &other_end] {
        run("ip", &["link", "set", end, "up"]);
    }
    let zoned = (format!("{LISTENER}%{name}"), 0).to_socket_addrs().expect("the interface exists").next();
    let Some(SocketAddr::V6(zoned)) = zoned else { panic!("not an IPv6 address") };
    let index = zoned.scope_id();
    // Addresses of a new link may be tentative.
    eventually("the addresses can be bound", || UdpSocket::bind(at(TARGET, 0, index)).ok());
    index
}

fn at(ip: Ipv6Addr, port: u16, index: u32) -> SocketAddr {
    SocketAddrV6::new(ip, port, 0, index).into()
}

fn echo(index: u32) -> u16 {
    let (streams, datagrams) = eventually("a port that is free for both", || {
        let streams = TcpListener::bind(at(TARGET, 0, index)).ok()?;
        let port = streams.local_addr().ok()?.port();
        Some((streams, UdpSocket::bind(at(TARGET, port, index)).ok()?))
    });
    let port = streams.local_addr().expect("the socket is bound").port();
    thread::spawn(move || {
        for stream in streams.incoming().flatten() {
            thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok((length, client)) = datagrams.recv_from(&mut bytes) {
            let _ = datagrams.send_to(&bytes[..length], client);
        }
    });
    port
}

fn ask(server: SocketAddr, question: &[u8]) -> Vec<u8> {
    let mut bytes = [0; 256];
    let length = eventually("an answer", || {
        let client = UdpSocket::bind("[::]:0").expect("IPv6");
        client.set_read_timeout(Some(std::time::Duration::from_millis(500))).expect("a timeout");
        client.send_to(question, server).expect("the target is reachable");
        client.recv(&mut bytes).ok()
    });
    bytes[..length].to_vec()
}

#[test]
fn forwarder_listens_and_reaches_targets_on_one_link() {
    let test = turnpike_testkit::this_test!();
    alone::in_namespaces(test, "n", &PROBE, || {
        let index = interface("d0");
        let target = format!("[{TARGET}%d0]:{}", echo(index));
        let rule = |scheme| format!("{scheme}://[{LISTENER}%d0]:8080={target}?name={scheme}");
        // The interface of the third rule appears later.
        let late = format!("tcp://[{LISTENER}%d1]:8081={target}?name=late");
        let mut forward =
            Forward::start(&[&rule("tcp"), &rule("udp"), &late, "--workers", "2", "--keep-going"]);
        let listener = at(LISTENER, 8080, index);
        forward.program.line_with("(udp, rule udp)");
        for _ in 0..8 {
            assert_eq!(say(&mut connect(listener), "by TCP"), "by TCP");
            assert_eq!(ask(listener, b"by UDP"), b"by UDP");
        }
        let index = interface("d1");
        forward.program.line_with("(tcp, rule late)");
        assert_eq!(say(&mut connect(at(LISTENER, 8081, index)), "later"), "later");
    });
}

#[test]
fn server_listens_on_one_link() {
    let test = turnpike_testkit::this_test!();
    alone::in_namespaces(test, "n", &PROBE, || {
        let index = interface("d0");
        let listen = format!("[{LISTENER}%d0]:3478");
        let _serve = Serve::start(&["--listen", &listen, "--workers", "2"]);
        let server = at(LISTENER, 3478, index);
        for _ in 0..8 {
            assert_eq!(ask(server, &BINDING)[..2], [1, 1]);
            let mut stream = TcpStream::connect(server).expect("the server accepts connections");
            stream.set_read_timeout(Some(SOON)).expect("a timeout");
            stream.write_all(&BINDING).expect("the connection is open");
            let mut head = [0; 2];
            stream.read_exact(&mut head).expect("the server responds");
            assert_eq!(head, [1, 1]);
        }
    });
}
