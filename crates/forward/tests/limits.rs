//! Access lists, limits on connections, and idle timeouts.

use crate::prelude::*;

fn denies(pattern: &str) -> Access {
    Access { allow: Vec::new(), deny: vec![Pattern::Wildcard(pattern.to_owned())] }
}

#[test]
fn denied_client_is_closed_immediately_and_counted() {
    let mut own = rule("own", greeter("a"));
    own.access = denies("127.0.0.?");
    let running = Running::start(&[own]);
    assert_eq!(read_all(&mut running.connect("own")), b"");
    assert_eq!(running.log.wait(1)[0].reason, EndReason::Denied);
    eventually("the refusal is counted", || running.snapshot("own").ended == [(EndReason::Denied, 1)]);
}

#[test]
fn global_lists_apply_to_every_rule_and_change_with_a_reload() {
    let rules = [rule("r", greeter("a"))];
    let mut settings = settings();
    settings.access = denies("127.*");
    let running = Running::start_with(&settings, &rules);
    assert_eq!(read_all(&mut running.connect("r")), b"");
    settings.access = Access { allow: vec![Pattern::Prefix([127, 0, 0, 0].into(), 8)], deny: Vec::new() };
    running.forwarder.reload(&settings, &rules).unwrap();
    assert_eq!(read_exactly(&mut running.connect("r"), 1), b"a");
}

#[test]
fn rule_refuses_connections_beyond_its_limit_until_one_ends() {
    let mut limited = rule("r", greeter("a"));
    limited.max_connections = 2;
    let running = Running::start(&[limited, rule("other", greeter("b"))]);
    let mut open: Vec<_> = (0..2).map(|_| running.connect("r")).collect();
    open.iter_mut().for_each(|client| assert_eq!(read_exactly(client, 1), b"a"));
    assert_eq!(read_all(&mut running.connect("r")), b"");
    assert_eq!(running.log.wait(1)[0].reason, EndReason::Limit);
    assert_eq!(read_exactly(&mut running.connect("other"), 1), b"b");
    open.pop();
    running.log.wait(3);
    assert_eq!(read_exactly(&mut running.connect("r"), 1), b"a");
}

fn refused(running: &Running, reason: EndReason) -> u64 {
    running.snapshot("r").ended.iter().filter(|(why, _)| *why == reason).map(|(_, count)| count).sum()
}

fn client_from(ip: [u8; 4], running: &Running) -> std::net::TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&std::net::SocketAddr::from((ip, 0)).into()).unwrap();
    socket.connect(&running.address("r").into()).unwrap();
    support::patient(socket.into())
}

#[test]
fn connections_per_client_are_limited_over_all_workers() {
    let mut limited = rule("r", greeter("a"));
    limited.limits = Limits { max_connections_per_client: Some(2), ..Limits::default() };
    let mut settings = settings();
    settings.workers = 3;
    let running = Running::start_with(&settings, &[limited]);
    let mut open: Vec<_> = (0..2).map(|_| client_from([127, 0, 0, 7], &running)).collect();
    open.iter_mut().for_each(|client| assert_eq!(read_exactly(client, 1), b"a"));
    for _ in 0..20 {
        assert_eq!(read_all(&mut client_from([127, 0, 0, 7], &running)), b"");
    }
    assert_eq!(read_exactly(&mut client_from([127, 0, 0, 8], &running), 1), b"a");
    eventually("the refusals are counted", || refused(&running, EndReason::ClientLimit) == 20);
    // Only the other client's connection is reported.
    assert_eq!(running.log.wait(1).len(), 1);
    open.pop();
    running.log.wait(2);
    assert_eq!(read_exactly(&mut client_from([127, 0, 0, 7], &running), 1), b"a");
}

#[test]
fn new_connections_per_client_are_limited() {
    let mut limited = rule("r", greeter("a"));
    limited.limits = Limits { new_connections_per_client: Some(1), ..Limits::default() };
    let running = Running::start(&[limited]);
    let comes = || !read_some(&mut client_from([127, 0, 0, 7], &running)).is_empty();
    assert!(comes());
    // The number of connections that fit into a second depends on the machine; unit tests cover the exact
    // rate.
    eventually("a second connection within a second is refused", || !comes());
    assert_eq!(read_exactly(&mut client_from([127, 0, 0, 8], &running), 1), b"a", "another client");
    eventually("the refusal is counted", || refused(&running, EndReason::ClientRate) > 0);
    eventually("the next token is available", comes);
}

fn read_some(stream: &mut std::net::TcpStream) -> Vec<u8> {
    let mut byte = [0];
    let len = stream.read(&mut byte).unwrap();
    byte[..len].to_vec()
}

#[test]
fn limit_behind_a_proxy_applies_to_the_client_in_its_header() {
    let mut limited = rule("r", greeter("a"));
    limited.proxy_protocol_from = vec![Proxy::Network(Pattern::Prefix([127, 0, 0, 1].into(), 32))];
    limited.limits = Limits { max_connections_per_client: Some(1), ..Limits::default() };
    let running = Running::start(&[limited]);
    let from = |client: &str| {
        let mut stream = running.connect("r");
        stream.write_all(format!("PROXY TCP4 {client} 10.0.0.1 1 2\r\n").as_bytes()).unwrap();
        stream
    };
    let (mut one, mut two) = (from("192.0.2.1"), from("192.0.2.2"));
    assert_eq!((read_exactly(&mut one, 1), read_exactly(&mut two, 1)), (b"a".to_vec(), b"a".to_vec()));
    assert_eq!(read_all(&mut from("192.0.2.1")), b"");
    let mut nobody: Vec<_> = (0..3).map(|_| running.connect("r")).collect();
    for stream in &mut nobody {
        stream.write_all(b"PROXY UNKNOWN\r\n").unwrap();
        assert_eq!(read_exactly(stream, 1), b"a", "a header that names no client");
    }
}

#[test]
fn udp_sessions_per_client_are_limited() {
    let echo = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut limited = rule("r", echo.local_addr().unwrap());
    limited.protocol = turnpike_forward::Protocol::Udp;
    limited.limits = Limits { max_connections_per_client: Some(2), ..Limits::default() };
    let running = Running::start(&[limited]);
    echo.set_read_timeout(Some(support::PATIENCE)).unwrap();
    let send = |ip: [u8; 4]| {
        let client = std::net::UdpSocket::bind((std::net::Ipv4Addr::from(ip), 0)).unwrap();
        client.send_to(&[ip[3]], running.address("r")).unwrap();
        client
    };
    let _clients: Vec<_> = (0..6).map(|_| send([127, 0, 0, 7])).collect();
    eventually("the refusals are counted", || refused(&running, EndReason::ClientLimit) == 4);
    let _other = send([127, 0, 0, 8]);
    let mut byte = [0];
    let heard: Vec<u8> = (0..3).map(|_| echo.recv(&mut byte).map(|_| byte[0]).unwrap()).collect();
    assert_eq!(heard, [7, 7, 8]);
    eventually("the dropped datagrams are counted", || running.snapshot("r").dropped_datagrams == 4);
}

#[test]
fn connections_of_all_rules_are_limited() {
    let mut settings = settings();
    settings.max_connections = 1;
    let running = Running::start_with(&settings, &[rule("a", greeter("a")), rule("b", greeter("b"))]);
    let mut one = running.connect("a");
    assert_eq!(read_exactly(&mut one, 1), b"a");
    assert_eq!(running.forwarder.active(), 1);
    assert_eq!(read_all(&mut running.connect("b")), b"");
    drop(one);
    running.log.wait(2);
    assert_eq!(read_exactly(&mut running.connect("b"), 1), b"b");
}

#[test]
fn idle_timeout_ends_only_silent_connections() {
    let mut idle = rule("r", greeter("a"));
    idle.idle = Some(Duration::from_secs(3));
    let running = Running::start(&[idle]);
    let (mut silent, mut speaking) = (running.connect("r"), running.connect("r"));
    assert_eq!(read_exactly(&mut silent, 1), b"a");
    assert_eq!(read_exactly(&mut speaking, 1), b"a");
    let reports = eventually("the silent connection ends", || {
        speaking.write_all(b"x").unwrap();
        assert_eq!(read_exactly(&mut speaking, 1), b"x");
        Some(running.log.all()).filter(|reports| !reports.is_empty())
    });
    assert_eq!((reports.len(), reports[0].reason), (1, EndReason::Idle));
    assert!(reports[0].lived >= Duration::from_secs(3), "{:?}", reports[0]);
    assert_eq!(reports[0].client, silent.local_addr().unwrap().into());
    assert_eq!(silent.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    speaking.write_all(b"y").unwrap();
    assert_eq!(read_exactly(&mut speaking, 1), b"y");
}

#[test]
fn idle_timeout_ends_a_connection_with_a_stalled_reader() {
    let (server, target) = listener();
    let mut idle = rule("r", target);
    idle.idle = Some(Duration::from_millis(400));
    let running = Running::start(&[idle]);
    let mut client = running.connect("r");
    let _server = support::accept(&server);
    let error = loop {
        if let Err(error) = client.write_all(&[0; 1 << 16]) {
            break error;
        }
    };
    assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    assert_eq!(running.log.wait(1)[0].reason, EndReason::Idle);
}

#[test]
fn idle_timeout_without_an_event_is_counted() {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let (_server, target) = listener();
        let idle = Some(Duration::from_millis(400));
        let running = Running::start(&[Rule { protocol, idle, ..rule("r", target) }]);
        let address = running.address("r");
        let (_stream, _datagrams) = if protocol == Protocol::Tcp {
            (Some(running.connect("r")), None)
        } else {
            // The target receives the datagram and does not respond.
            let target = UdpSocket::bind(target).unwrap();
            UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"once", address).unwrap();
            (None, Some(target))
        };
        eventually("the end is counted", || running.snapshot("r").ended == [(EndReason::Idle, 1)]);
        assert_eq!(running.snapshot("r").active, 0);
    }
}

#[test]
fn half_close_timeout_ends_only_silent_half_closed_connections() {
    let (server, target) = listener();
    let mut rule = rule("r", target);
    rule.half_close_timeout = Some(Duration::from_secs(2));
    let running = Running::start(&[rule]);
    let pair = || {
        let client = running.connect("r");
        let served = support::accept(&server);
        (client, served)
    };
    let (mut open_client, mut open_server) = pair();
    let (talking_client, mut talking_server) = pair();
    talking_client.shutdown(Shutdown::Write).unwrap();
    let (quiet_client, mut ended_server) = pair();
    quiet_client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut ended_server), b"");
    let (mut ended_client, quiet_server) = pair();
    quiet_server.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut ended_client), b"");
    let reports = eventually("both half-closed connections time out", || {
        talking_server.write_all(b"x").unwrap();
        (running.log.all().len() >= 2).then(|| running.log.all())
    });
    let clients = [quiet_client, ended_client].map(|client| client.local_addr().unwrap().into());
    assert!(reports.iter().all(|report| report.reason == EndReason::HalfClosed), "{reports:?}");
    assert!(reports.iter().all(|report| clients.contains(&report.client)), "{reports:?}");
    eventually("the connection is reset", || ended_server.write_all(b"late").err());
    // A silent connection without a FIN stays open.
    open_client.write_all(b"still open").unwrap();
    assert_eq!(read_exactly(&mut open_server, 10), b"still open");
    drop(talking_client);
}
