//! Listeners on [::], with and without IPv4 clients.

use crate::prelude::*;
use std::net::Ipv6Addr;

fn dual_stack(target: SocketAddr) -> Rule {
    Rule { bind: Ipv6Addr::UNSPECIFIED.into(), ipv6_only: false, ..rule("r", target) }
}

#[test]
fn both_families_are_served_and_ipv4_clients_appear_as_ipv4() {
    let mut rule = dual_stack(greeter("a"));
    rule.access = Access { allow: Vec::new(), deny: vec![Pattern::Wildcard("127.0.0.9".to_owned())] };
    let running = Running::start(&[rule]);
    let port = running.address("r").port();
    let ask = |ip: std::net::IpAddr| {
        let mut client = support::client((ip, port).into());
        assert_eq!(read_exactly(&mut client, 1), b"a");
        client.local_addr().unwrap().to_string()
    };
    let mut asked = vec![ask(Ipv4Addr::LOCALHOST.into()), ask(Ipv6Addr::LOCALHOST.into())];
    let mut seen: Vec<String> = running.log.wait(2).iter().map(|report| report.client.to_string()).collect();
    asked.sort();
    seen.sort();
    assert_eq!(seen, asked);
    let denied = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    denied.bind(&SocketAddr::from(([127, 0, 0, 9], 0)).into()).unwrap();
    denied.connect(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into()).unwrap();
    assert_eq!(read_all(&mut support::patient(denied.into())), b"");
    assert_eq!(running.log.wait(3)[2].reason, EndReason::Denied);
}

#[test]
fn ipv6_only_listener_leaves_the_ipv4_port_free() {
    let rule = Rule { ipv6_only: true, ..dual_stack(greeter("a")) };
    let running = Running::start(&[rule]);
    let port = running.address("r").port();
    assert_eq!(read_exactly(&mut support::client((Ipv6Addr::LOCALHOST, port).into()), 1), b"a");
    assert!(std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok(), "the IPv4 port is taken");
}

#[test]
fn proxy_header_shows_ipv4_clients_as_ipv4() {
    let (server, target) = support::listener();
    let mut rule = dual_stack(target);
    rule.send_proxy = Some(ProxyVersion::V1);
    let running = Running::start(&[rule]);
    let port = running.address("r").port();
    let client = support::client((Ipv4Addr::LOCALHOST, port).into());
    let own = client.local_addr().unwrap().port();
    let expected = format!("PROXY TCP4 127.0.0.1 127.0.0.1 {own} {port}\r\n");
    assert_eq!(read_exactly(&mut support::accept(&server), expected.len()), expected.as_bytes());
}

#[test]
fn udp_answers_come_from_the_address_that_the_client_used_in_each_family() {
    let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
    let target = echo.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut bytes = [0; 100];
        while let Ok((len, from)) = echo.recv_from(&mut bytes) {
            let _ = echo.send_to(&bytes[..len], from);
        }
    });
    for datapath in [turnpike_net::Datapath::Basic, turnpike_net::Datapath::Gso] {
        let mut settings = support::settings();
        settings.datapath = datapath;
        let rule = Rule { protocol: Protocol::Udp, ..dual_stack(target) };
        let running = Running::start_with(&settings, &[rule]);
        let port = running.address("r").port();
        for asked in ["127.0.0.1", "127.0.0.77", "::1"] {
            let asked = SocketAddr::new(asked.parse().unwrap(), port);
            let client = UdpSocket::bind(if asked.is_ipv4() { "127.0.0.3:0" } else { "[::1]:0" }).unwrap();
            client.set_read_timeout(Some(support::PATIENCE)).unwrap();
            client.send_to(b"question", asked).unwrap();
            let mut bytes = [0; 100];
            assert_eq!(client.recv_from(&mut bytes).unwrap(), (8, asked), "{datapath}");
        }
    }
}

#[test]
fn busy_ipv4_port_is_reported_with_a_remedy() {
    let (_taken, target) = support::listener();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let other = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let _other_udp = UdpSocket::bind(("0.0.0.0", port)).unwrap();
        let mut rule = Rule { protocol, ..dual_stack(target) };
        rule.ports = turnpike_forward::PortRange { first: port, last: port };
        let error =
            Forwarder::start(&support::settings(), &[rule], std::sync::Arc::new(support::Reports::default()))
                .err()
                .expect("the port is taken");
        let told = error.to_string();
        assert!(told.starts_with(&format!("rule r: cannot listen on [::]:{port}: ")), "{told}");
        assert!(told.ends_with("or set ipv6_only to leave IPv4 to it"), "{told}");
    }
}
