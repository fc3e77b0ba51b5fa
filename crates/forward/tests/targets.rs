//! Several targets, health checks, names, and connect timeouts.

use crate::prelude::*;
use turnpike_forward::Question;

fn between(targets: &[SocketAddr], balance: Balance) -> Rule {
    let mut rule = rule("r", targets[0]);
    rule.targets = targets.iter().map(|target| (*target).into()).collect();
    rule.balance = balance;
    rule
}

pub(crate) fn greeting(running: &Running) -> String {
    String::from_utf8(read_exactly(&mut running.connect("r"), 1)).unwrap()
}

/// Address where connects time out, because the listener's queue is full.
fn mute() -> (Vec<std::net::TcpStream>, TcpListener, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let listener: TcpListener = socket.into();
    let address = listener.local_addr().unwrap();
    let connect = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200));
    let queue = std::iter::from_fn(|| connect().ok()).take(8).collect();
    (queue, listener, address)
}

#[test]
fn round_robin_serves_all_targets_in_turn() {
    let running =
        Running::start(&[between(&[greeter("a"), greeter("b"), greeter("c")], Balance::RoundRobin)]);
    let heard: String = (0..6).map(|_| greeting(&running)).collect();
    assert_eq!(heard, "abcabc");
}

#[test]
fn next_target_is_tried_after_a_refused_connect() {
    let running =
        Running::start(&[between(&[free_address(), free_address(), greeter("c")], Balance::Failover)]);
    assert_eq!(greeting(&running), "c");
    assert_eq!(running.log.wait(1)[0].reason, EndReason::Finished);
}

#[test]
fn next_target_is_tried_after_an_unanswered_connect() {
    let (_queue, _listener, mute) = mute();
    let mut rule = between(&[mute, greeter("b")], Balance::Failover);
    rule.connect_timeout = Duration::from_millis(300);
    let running = Running::start(&[rule]);
    assert_eq!(greeting(&running), "b");
    eventually("the timeout is counted", || failures(&running, mute, TargetFailure::Timeout) == 1);
}

pub(crate) fn failures(running: &Running, target: SocketAddr, why: TargetFailure) -> u64 {
    let targets = running.snapshot("r").targets;
    let found = targets.iter().find(|known| known.address == target.into()).expect("a known target");
    found.counts.failed[why as usize]
}

#[test]
fn client_is_reset_if_no_target_is_left() {
    let (_queue, _listener, mute) = mute();
    let mut rule = between(&[free_address(), mute], Balance::RoundRobin);
    rule.connect_timeout = Duration::from_millis(200);
    let running = Running::start(&[rule]);
    let mut client = running.connect("r");
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let report = running.log.wait(1).remove(0);
    assert_eq!((report.reason, report.target), (EndReason::ConnectFailed, None));
    assert_eq!(running.forwarder.active(), 0);
}

#[test]
fn recovered_target_is_used_again() {
    let first = free_address();
    let running = Running::start(&[between(&[first, greeter("b")], Balance::Failover)]);
    assert_eq!(greeting(&running), "b");
    serve_greetings(TcpListener::bind(first).unwrap(), "a");
    eventually("the first target answers", || greeting(&running) == "a");
}

#[test]
fn health_checks_divert_clients_from_a_dead_target_and_back() {
    let (queue, dead, first) = mute();
    let mut rule = between(&[first, greeter("b")], Balance::Failover);
    rule.health = Some(Duration::from_millis(200));
    let running = Running::start(&[rule]);
    // No client has connected yet, so the health check must detect it. After that, no client is sent to the
    // target that is down.
    let is_up =
        || running.snapshot("r").targets.iter().any(|target| target.address == first.into() && target.up);
    eventually("the first target is unhealthy", || !is_up());
    for _ in 0..10 {
        assert_eq!(greeting(&running), "b");
    }
    assert_eq!(failures(&running, first, TargetFailure::Timeout), 0);
    drop(queue);
    serve_greetings(dead, "a");
    eventually("the first target answers", || greeting(&running) == "a");
}

/// UDP target that responds to `ping` with its name while `lives` is set, and ignores everything else.
fn named(name: &'static str, lives: Arc<AtomicBool>) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok((len, from)) = socket.recv_from(&mut bytes) {
            if lives.load(Ordering::SeqCst) && &bytes[..len] == b"ping" {
                let _ = socket.send_to(name.as_bytes(), from);
            }
        }
    });
    address
}

/// Name of the target that promptly responds to a new client, if any.
fn who_answers(running: &Running) -> Option<String> {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(running.address("r")).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    client.send(b"ping").unwrap();
    let mut bytes = [0; 64];
    let len = client.recv(&mut bytes).ok()?;
    Some(String::from_utf8(bytes[..len].to_vec()).unwrap())
}

#[test]
fn udp_target_with_a_wrong_answer_gets_no_new_sessions() {
    let lives = Arc::new(AtomicBool::new(false));
    let targets = [named("a", Arc::clone(&lives)), named("b", Arc::new(AtomicBool::new(true)))];
    let mut rule = between(&targets, Balance::Failover);
    rule.protocol = Protocol::Udp;
    rule.health = Some(Duration::from_secs(1));
    rule.health_question = Some(Question { send: b"ping".to_vec(), expect: Vec::new() });
    let running = Running::start(&[rule]);
    eventually("the second target answers", || who_answers(&running).is_some_and(|name| name == "b"));
    lives.store(true, Ordering::SeqCst);
    eventually("the first target answers again", || who_answers(&running).is_some_and(|name| name == "a"));
}

/// The client never pauses, so no idle timeout ends the session.
#[test]
fn udp_session_leaves_a_target_that_fails_its_checks() {
    let lives = [Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true))];
    let targets = [named("a", Arc::clone(&lives[0])), named("b", Arc::clone(&lives[1]))];
    let mut rule = between(&targets, Balance::Failover);
    rule.protocol = Protocol::Udp;
    rule.health = Some(Duration::from_secs(1));
    rule.health_question = Some(Question { send: b"ping".to_vec(), expect: Vec::new() });
    let running = Running::start(&[rule]);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(running.address("r")).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let answers = |name: &str| {
        client.send(b"ping").unwrap();
        let mut bytes = [0; 64];
        let len = client.recv(&mut bytes).ok()?;
        (&bytes[..len] == name.as_bytes()).then_some(())
    };
    eventually("the first target answers", || answers("a"));
    lives[0].store(false, Ordering::SeqCst);
    eventually("the second target answers", || answers("b"));
    let reasons: Vec<_> = running.log.all().iter().map(|report| report.reason).collect();
    assert_eq!(reasons, [EndReason::TargetDown]);
}

/// Without checks, a target is retried a second after each failure, and each retry costs a client a datagram.
#[test]
fn health_check_detects_a_closed_udp_port() {
    let dead = free_address();
    let mut unchecked = between(&[dead, named("b", Arc::new(AtomicBool::new(true)))], Balance::Failover);
    unchecked.protocol = Protocol::Udp;
    let mut checked = unchecked.clone();
    checked.health = Some(Duration::from_secs(1));
    let [checked, unchecked] = [checked, unchecked].map(|rule| Running::start(&[rule]));
    eventually("the second target answers", || who_answers(&checked).is_some_and(|name| name == "b"));
    let failed = |running: &Running| failures(running, dead, TargetFailure::Refused);
    let before = failed(&checked);
    eventually("the other rule has lost three datagrams", || {
        who_answers(&checked);
        who_answers(&unchecked);
        failed(&unchecked) >= 3
    });
    assert_eq!(failed(&checked), before, "a client was sent to the target that is down");
}

/// Sends the greeting to each client that has sent `question`, or immediately if `question` is empty.
fn asked(question: &'static [u8], greeting: &Arc<std::sync::Mutex<&'static [u8]>>) -> SocketAddr {
    let (listener, address) = listener();
    let greeting = Arc::clone(greeting);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut heard = vec![0; question.len()];
            if stream.read_exact(&mut heard).is_ok() && heard == question {
                let greeting = *greeting.lock().unwrap();
                let _ = std::io::Write::write_all(&mut stream, greeting);
            }
        }
    });
    address
}

#[test]
fn tcp_target_is_healthy_while_it_answers_as_expected() {
    for (question, proxy) in
        [(&b""[..], None), (b"PING\r\n", None), (b"PROXY UNKNOWN\r\nPING\r\n", Some(ProxyVersion::V1))]
    {
        let greeting = Arc::new(std::sync::Mutex::new(&b"500 no"[..]));
        let mut rule = between(&[asked(question, &greeting), greeter("b")], Balance::Failover);
        rule.health = Some(Duration::from_secs(1));
        rule.send_proxy = proxy;
        let send = question.strip_prefix(b"PROXY UNKNOWN\r\n").unwrap_or(question).to_vec();
        rule.health_question = Some(Question { send, expect: b"220".to_vec() });
        let running = Running::start(&[rule]);
        let is_up = |at: usize| running.snapshot("r").targets.get(at).is_some_and(|target| target.up);
        eventually("the check fails for a wrong answer", || !is_up(0));
        *greeting.lock().unwrap() = b"220 welcome";
        eventually("the target answers as expected", || is_up(0));
    }
}

/// Sends datagrams until a response arrives.
fn served(running: &Running) -> String {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(running.address("r")).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut bytes = [0; 64];
    let len = eventually("an answer arrives", || {
        client.send(b"ping").unwrap();
        client.recv(&mut bytes).ok()
    });
    String::from_utf8(bytes[..len].to_vec()).unwrap()
}

#[test]
fn unanswered_udp_session_gets_another_target() {
    for balance in [Balance::RoundRobin, Balance::Source, Balance::Failover] {
        let silent = || Arc::new(AtomicBool::new(false));
        let targets =
            [named("b", silent()), named("c", silent()), named("a", Arc::new(AtomicBool::new(true)))];
        let mut rule = between(&targets, balance);
        rule.protocol = Protocol::Udp;
        rule.idle = Some(Duration::from_secs(60));
        let running = Running::start(&[rule]);
        for _ in 0..4 {
            assert_eq!(served(&running), "a");
        }
        let moved = |target| failures(&running, target, TargetFailure::Timeout);
        if balance != Balance::Source {
            eventually("the datagrams are counted", || moved(targets[0]) + moved(targets[1]) > 0);
        }
        assert_eq!(moved(targets[2]), 0);
    }
}

#[test]
fn udp_sessions_keep_their_target_if_no_target_ever_answers() {
    let [first, second] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let mut rule = between(&[&first, &second].map(|socket| socket.local_addr().unwrap()), Balance::Failover);
    rule.protocol = Protocol::Udp;
    rule.idle = Some(Duration::from_secs(60));
    let running = Running::start(&[rule]);
    let clients: Vec<UdpSocket> = (0..5).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    second.set_nonblocking(true).unwrap();
    let (mut sources, mut bytes) = (std::collections::HashSet::new(), [0; 8]);
    for _ in 0..60 {
        for client in &clients {
            client.send_to(b"log", running.address("r")).unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
        while let Ok((_, from)) = second.recv_from(&mut bytes) {
            sources.insert(from);
        }
    }
    assert!(sources.len() <= 2, "sessions that do not explore have changed their target: {sources:?}");
}

#[test]
fn unanswered_client_does_not_block_others() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let choosy = UdpSocket::bind("127.0.0.1:0").unwrap();
    let targets = [&silent, &choosy].map(|socket| socket.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut bytes = [0; 8];
        while let Ok((len, from)) = choosy.recv_from(&mut bytes) {
            if bytes[..len] == *b"ping" {
                choosy.send_to(b"pong", from).unwrap();
            }
        }
    });
    let mut rule = between(&targets, Balance::Failover);
    rule.protocol = Protocol::Udp;
    rule.idle = Some(Duration::from_secs(60));
    let running = Running::start(&[rule]);
    let client = || {
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(running.address("r")).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        client
    };
    let junk = client();
    eventually("the first session detects that the target is silent", || {
        junk.send(b"junk").unwrap();
        failures(&running, targets[0], TargetFailure::Timeout) > 0
    });
    let client = client();
    eventually("another client gets an answer", || {
        client.send(b"ping").unwrap();
        client.recv(&mut [0; 8]).ok()
    });
}

#[test]
fn all_addresses_of_a_name_are_tried() {
    // localhost is ::1 and 127.0.0.1 on most machines, in either order; the server has only one of them.
    let mut rule = between(&[greeter("a")], Balance::RoundRobin);
    rule.targets[0].host = Host::Name("localhost".to_owned());
    let running = Running::start(&[rule]);
    assert_eq!(greeting(&running), "a");
}

#[test]
fn unknown_name_is_skipped_for_the_next_target() {
    let mut rule = between(&[greeter("a"), greeter("b")], Balance::Failover);
    rule.targets[0].host = Host::Name("no-such-host.invalid".to_owned());
    let running = Running::start(&[rule]);
    assert_eq!(greeting(&running), "b");
}

#[test]
fn port_ranges_map_one_to_one() {
    let servers = three_in_a_row();
    let first = servers[0].local_addr().unwrap().port();
    for (server, name) in servers.into_iter().zip(["x", "y", "z"]) {
        serve_greetings(server, name);
    }
    let running = eventually("three ports are free", || {
        let base = three_in_a_row()[0].local_addr().unwrap().port();
        let mut rule = rule("r", SocketAddr::from(([127, 0, 0, 1], first)));
        rule.ports = PortRange { first: base, last: base + 2 };
        rule.targets = vec![Endpoint {
            host: Host::Ip([127, 0, 0, 1].into()),
            ports: PortRange { first, last: first + 2 },
            weight: 1,
        }];
        let log = std::sync::Arc::new(support::Reports::default());
        turnpike_forward::Forwarder::start(&support::settings(), &[rule], log).ok()
    });
    let greeting = |at| read_exactly(&mut support::client(support::socket_address(at)), 1)[0];
    let heard: Vec<u8> = running.0.listeners().iter().map(|(_, at)| greeting(at)).collect();
    assert_eq!(heard, b"xyz");
}

/// Listeners on three consecutive ports, below the range for outgoing connections, where many ports are in
/// TIME_WAIT.
fn three_in_a_row() -> Vec<TcpListener> {
    let mut base = 10_000 + std::process::id() as u16 % 10_000;
    eventually("three ports are free", || {
        base += 3;
        (base..base + 3).map(|port| TcpListener::bind(("127.0.0.1", port)).ok()).collect::<Option<_>>()
    })
}

#[test]
fn connections_use_the_source_address_of_the_rule() {
    let (server, target) = listener();
    let mut rule = rule("r", target);
    rule.source = Some([127, 0, 0, 9].into());
    let running = Running::start(&[rule]);
    let _client = running.connect("r");
    let peer = support::accept(&server).peer_addr().unwrap();
    assert_eq!(peer.ip().to_string(), "127.0.0.9");
}
