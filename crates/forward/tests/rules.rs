//! Rules of every protocol in one forwarder.

use crate::prelude::*;
use turnpike_forward::RuleStanding;

/// UDP server that responds to each datagram with its name and the datagram. Runs until the process exits.
fn udp_echo(name: &'static str) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((n, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&[name.as_bytes(), &buffer[..n]].concat(), from);
        }
    });
    address
}

fn of(protocol: Protocol, id: &str, target: SocketAddr) -> Rule {
    Rule { protocol, ..rule(id, target) }
}

fn udp_client(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(address).unwrap();
    socket.set_read_timeout(Some(support::PATIENCE)).unwrap();
    socket
}

fn ask(socket: &UdpSocket, question: &[u8]) -> Vec<u8> {
    socket.send(question).unwrap();
    let mut buffer = [0; 2048];
    let n = socket.recv(&mut buffer).unwrap();
    buffer[..n].to_vec()
}

#[test]
fn udp_is_forwarded_and_counted() {
    let running = Running::start(&[of(Protocol::Udp, "u", udp_echo("a"))]);
    let client = udp_client(running.address("u"));
    assert_eq!(ask(&client, b"one"), b"aone");
    assert_eq!(ask(&client, b"two!"), b"atwo!");
    assert_eq!(running.forwarder.active(), 1);
    let counted = eventually("both responses are counted", || {
        Some(running.snapshot("u")).filter(|seen| seen.to_client_datagrams == 2)
    });
    assert_eq!((counted.active, counted.to_target_bytes, counted.to_client_bytes), (1, 7, 9));
}

#[test]
fn tcp_and_udp_rules_share_a_port_number() {
    let first = of(Protocol::Udp, "u", udp_echo("u"));
    let running = eventually("a port that is free for both", || {
        let mut udp = first.clone();
        let port = listener().1.port();
        (udp.ports.first, udp.ports.last) = (port, port);
        let mut tcp = rule("t", greeter("t"));
        tcp.ports = udp.ports;
        let log = std::sync::Arc::new(support::Reports::default());
        turnpike_forward::Forwarder::start(&settings(), &[udp, tcp], log).ok()
    });
    let address = support::socket_address(&running.0.listeners()[0].1);
    assert_eq!(ask(&udp_client(address), b"x"), b"ux");
    assert_eq!(read_exactly(&mut support::client(address), 1), b"t");
}

#[test]
fn datagrams_to_a_target_may_carry_a_proxy_header() {
    for datapath in [Datapath::Basic, Datapath::Gso] {
        let target = UdpSocket::bind("127.0.0.1:0").unwrap();
        target.set_read_timeout(Some(support::PATIENCE)).unwrap();
        let rule = of(Protocol::Udp, "u", target.local_addr().unwrap());
        let rule = Rule { send_proxy: Some(ProxyVersion::V2), ..rule };
        let running = Running::start_with(&turnpike_forward::Settings { datapath, ..settings() }, &[rule]);
        let client = udp_client(running.address("u"));
        // PROXY version 2 (HAProxy's specification, section 2.2): signature, PROXY command, IPv4 and DGRAM,
        // 12 bytes of addresses.
        let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x12\0\x0c\x7f\0\0\x01\x7f\0\0\x01".to_vec();
        for address in [client.local_addr().unwrap(), running.address("u")] {
            header.extend_from_slice(&address.port().to_be_bytes());
        }
        let mut buffer = [0; 256];
        for payload in [&b"one"[..], b"", b"three"] {
            client.send(payload).unwrap();
            let (len, from) = target.recv_from(&mut buffer).unwrap();
            assert_eq!(buffer[..len], [&header, payload].concat());
            target.send_to(payload, from).unwrap();
            assert_eq!(client.recv(&mut buffer).unwrap(), payload.len());
        }
    }
}

#[test]
fn answers_from_another_port_need_the_any_port_option() {
    for any_port in [true, false] {
        let [target, other] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let stranger = UdpSocket::bind("127.0.0.2:0").unwrap();
        target.set_read_timeout(Some(support::PATIENCE)).unwrap();
        let rule = Rule { any_port, ..of(Protocol::Udp, "u", target.local_addr().unwrap()) };
        let running = Running::start(&[rule]);
        let client = udp_client(running.address("u"));
        let mut buffer = [0; 64];
        for _ in 0..2 {
            client.send(b"?").unwrap();
            let (_, from) = target.recv_from(&mut buffer).unwrap();
            stranger.send_to(b"stranger", from).unwrap();
            other.send_to(b"other", from).unwrap();
            target.send_to(b"target", from).unwrap();
            if any_port {
                assert_eq!(client.recv(&mut buffer).unwrap(), b"other".len());
            }
            let len = client.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], b"target");
        }
    }
}

fn is_waiting(forwarder: &turnpike_forward::Forwarder) -> bool {
    let standing = |(_, snapshot): &(_, turnpike_forward::RuleSnapshot)| snapshot.standing.clone();
    forwarder.snapshots().iter().map(standing).any(|one| matches!(one, RuleStanding::Waiting(_)))
}

#[test]
fn unbound_rule_is_served_once_its_address_is_free() {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let taken = free_address();
        let target = if protocol == Protocol::Tcp { greeter("a") } else { udp_echo("a") };
        let mut late = of(protocol, "late", target);
        (late.ports.first, late.ports.last) = (taken.port(), taken.port());
        let holder = (std::net::TcpListener::bind(taken).unwrap(), UdpSocket::bind(taken).unwrap());
        let settings = turnpike_forward::Settings { keep_going: true, ..settings() };
        let log = std::sync::Arc::new(support::Reports::default());
        let rules = [late, rule("other", greeter("o"))];
        let (forwarder, failed) = turnpike_forward::Forwarder::start(&settings, &rules, log).unwrap();
        assert_eq!(failed.len(), 1);
        assert!(is_waiting(&forwarder) && forwarder.retry(&settings).is_empty());
        drop(holder);
        let come =
            eventually("the rule", || Some(forwarder.retry(&settings)).filter(|come| !come.is_empty()));
        assert_eq!(come[0].0, "late");
        assert!(!is_waiting(&forwarder));
        if protocol == Protocol::Tcp {
            assert_eq!(read_exactly(&mut support::client(taken), 1), b"a");
        } else {
            assert_eq!(ask(&udp_client(taken), b"x"), b"ax");
        }
        // A reload leaves the bound rule alone.
        assert!(forwarder.reload(&settings, &rules).unwrap().is_empty());
        assert_eq!(forwarder.listeners().len(), 2);
    }
}

#[test]
fn freebind_listens_on_an_address_that_appears_later() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::TcpToUdp { framed: false }] {
        // RFC 5737: no machine has this address.
        let mut early =
            Rule { bind: std::net::Ipv4Addr::new(192, 0, 2, 1).into(), ..of(protocol, "r", free_address()) };
        let start = |rule: &Rule| {
            let log = std::sync::Arc::new(support::Reports::default());
            turnpike_forward::Forwarder::start(&settings(), std::slice::from_ref(rule), log)
        };
        let told = start(&early).err().expect("an unknown address").to_string();
        assert!(told.contains("set keep_going or freebind if the address appears later"), "{told}");
        early.freebind = true;
        assert_eq!(start(&early).unwrap().0.listeners().len(), 1);
    }
}

#[test]
fn datagrams_are_forwarded_over_tcp_and_back() {
    let (server, target) = listener();
    let running = Running::start(&[of(Protocol::UdpToTcp { framed: true }, "x", target)]);
    let client = udp_client(running.address("x"));
    client.send(b"over").unwrap();
    let mut stream = accept(&server);
    assert_eq!(read_exactly(&mut stream, 6), b"\0\x04over");
    stream.write_all(b"\0\x03and\0\x03out").unwrap();
    let mut buffer = [0; 64];
    for expected in [b"and", b"out"] {
        let n = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..n], expected);
    }
}

#[test]
fn stream_is_forwarded_over_udp_and_back() {
    let running = Running::start(&[of(Protocol::TcpToUdp { framed: true }, "x", udp_echo("e"))]);
    let mut client = running.connect("x");
    client.write_all(b"\0\x02hi").unwrap();
    assert_eq!(read_exactly(&mut client, 5), b"\0\x03ehi");
}

/// Like [`udp_echo`], but responds only while the flag is set.
fn moody_echo(name: &'static str) -> (SocketAddr, Arc<AtomicBool>) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (address, answers) = (socket.local_addr().unwrap(), Arc::new(AtomicBool::new(true)));
    let flag = Arc::clone(&answers);
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((n, from)) = socket.recv_from(&mut buffer) {
            if flag.load(Ordering::SeqCst) {
                let _ = socket.send_to(&[name.as_bytes(), &buffer[..n]].concat(), from);
            }
        }
    });
    (address, answers)
}

#[test]
fn udp_session_leaves_a_removed_target_that_is_silent() {
    for weight in [None, Some(0)] {
        let (old, answers) = moody_echo("a");
        let new = udp_echo("b");
        let before = Rule { idle: Some(Duration::from_secs(600)), ..of(Protocol::Udp, "u", old) };
        let running = Running::start(&[before.clone(), of(Protocol::Udp, "other", udp_echo("o"))]);
        let address = running.address("u");
        let (answered, unanswered) = (udp_client(address), udp_client(address));
        assert_eq!(ask(&answered, b"1"), b"a1");
        answers.store(false, Ordering::SeqCst);
        unanswered.send(b"1").unwrap();
        eventually("both sessions exist", || running.snapshot("u").active == 2);
        answers.store(true, Ordering::SeqCst);

        let kept = weight.map(|weight| Endpoint { weight, ..before.targets[0].clone() });
        let targets = kept.into_iter().chain([new.into()]).collect();
        let after = Rule { targets, ..before };
        let rules = [after, of(Protocol::Udp, "other", udp_echo("p"))];
        running.forwarder.reload(&settings(), &rules).unwrap();
        assert_eq!(running.address("u"), address, "the listener stays");
        assert_eq!(ask(&udp_client(address), b"2"), b"b2");
        eventually("the unanswered session ends", || running.log.all().len() == 1);
        assert_eq!(ask(&unanswered, b"2"), b"b2");
        // Longer than the time after which a session leaves a silent former target.
        for _ in 0..70 {
            assert_eq!(ask(&answered, b"3"), b"a3", "an answered session stays");
            thread::sleep(Duration::from_millis(100));
        }
        answers.store(false, Ordering::SeqCst);
        answered.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut buffer = [0; 8];
        eventually("the new target is used after some silence", || {
            answered.send(b"4").unwrap();
            answered.recv(&mut buffer).is_ok_and(|n| &buffer[..n] == b"b4")
        });
        assert!(running.log.all().iter().all(|report| report.reason == EndReason::TargetGone));
    }
}

#[test]
fn changed_weight_applies_immediately_and_ends_no_session() {
    let (one, two) = (udp_echo("a"), udp_echo("b"));
    let weighted = |weight| {
        let targets = vec![Endpoint { weight, ..one.into() }, two.into()];
        Rule { targets, ..of(Protocol::Udp, "u", one) }
    };
    let running = Running::start(&[weighted(1)]);
    let address = running.address("u");
    let shares = || {
        let clients: Vec<UdpSocket> = (0..20).map(|_| udp_client(address)).collect();
        let first = clients.iter().filter(|client| ask(client, b"1") == b"a1").count();
        (clients, first)
    };
    let (before, first) = shares();
    assert_eq!(first, 10);
    running.forwarder.reload(&settings(), &[weighted(3)]).unwrap();
    assert_eq!(shares().1, 15);
    let stayed = before.iter().filter(|client| ask(client, b"2") == b"a2").count();
    assert_eq!((stayed, running.log.all().len()), (10, 0));
}

#[test]
fn changed_udp_rule_restarts_its_sessions() {
    let old = of(Protocol::Udp, "u", udp_echo("a"));
    let running = Running::start(std::slice::from_ref(&old));
    let address = running.address("u");
    let client = udp_client(address);
    assert_eq!(ask(&client, b"1"), b"a1");
    let mut new = Rule { any_port: true, ..old };
    (new.ports.first, new.ports.last) = (address.port(), address.port());
    running.forwarder.reload(&settings(), &[new.clone()]).unwrap();
    assert_eq!(ask(&client, b"2"), b"a2");
    let changed = running.log.wait(1).len();
    running.forwarder.reload(&settings(), &[new]).unwrap();
    assert_eq!(ask(&client, b"3"), b"a3");
    assert_eq!(running.log.all().len(), changed, "an unchanged rule keeps its sessions");
}

#[test]
fn reload_changes_the_protocol_of_a_port() {
    let running = Running::start(&[rule("r", greeter("t"))]);
    let address = running.address("r");
    let mut open = running.connect("r");
    assert_eq!(read_exactly(&mut open, 1), b"t");
    let mut crossing = of(Protocol::TcpToUdp { framed: false }, "r", udp_echo("c"));
    (crossing.ports.first, crossing.ports.last) = (address.port(), address.port());
    running.forwarder.reload(&settings(), &[crossing]).unwrap();
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(b"!").unwrap();
    client.set_read_timeout(Some(support::PATIENCE)).unwrap();
    assert_eq!(read_exactly(&mut client, 2), b"c!");
    open.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut open, 1), b"x");
}

#[test]
fn refused_session_makes_the_next_one_try_another_target() {
    let absent = free_address();
    let mut rule = of(Protocol::Udp, "u", absent);
    rule.balance = Balance::Failover;
    rule.targets.push(udp_echo("b").into());
    let running = Running::start(&[rule]);
    eventually("the second target answers", || {
        let client = udp_client(running.address("u"));
        client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        client.send(b"x").unwrap();
        let mut buffer = [0; 16];
        client.recv(&mut buffer).is_ok_and(|n| buffer[..n] == *b"bx")
    });
}

#[test]
fn transparent_rule_uses_the_address_of_the_client() {
    let (server, target) = listener();
    let options = turnpike_net::ConnectOptions { transparent: true, ..Default::default() };
    if turnpike_net::TcpSocket::connect(target, &options).is_err() {
        return turnpike_testkit::alone::skip("a transparent rule needs CAP_NET_ADMIN");
    }
    drop(accept(&server));
    let mut rule = rule("r", target);
    rule.transparent = true;
    let running = Running::start(&[rule]);
    let client = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    client.bind(&SocketAddr::from(([127, 0, 0, 77], 0)).into()).unwrap();
    client.connect(&running.address("r").into()).unwrap();
    assert_eq!(accept(&server).peer_addr().unwrap().ip().to_string(), "127.0.0.77");
}
