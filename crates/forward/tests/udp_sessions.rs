//! Sessions that end because they are idle, evicted, refused, denied or removed.

use crate::prelude::*;

use crate::udp_common::{eventually, free_address, rule};

fn udp(target: SocketAddr) -> Rule {
    rule(Protocol::Udp, LOCALHOST.parse().unwrap(), target)
}

fn ended(snapshot: &RuleSnapshot, reason: EndReason) -> u64 {
    snapshot.ended.iter().find(|(other, _)| *other == reason).map_or(0, |(_, count)| *count)
}

#[test]
fn session_ends_exactly_after_its_idle_timeout() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    // The default is 72 seconds, as in rinetd.
    for (key, timeout) in [(1, None), (2, Some(Duration::from_secs(5)))] {
        let at = worker.add(RuleKey(key), &Rule { idle: timeout, ..udp(echo.address) }, Datapath::Gso);
        let timeout = timeout.unwrap_or(Duration::from_secs(72));
        let (quiet, busy) = (client(at), client(at));
        expect_echo(&quiet, b"q");
        expect_echo(&busy, b"b");
        worker.advance(timeout - Duration::from_millis(1000));
        expect_echo(&busy, b"b");
        assert_eq!(worker.active(), 2, "a session ended too soon");
        worker.advance(Duration::from_millis(1001));
        assert_eq!(worker.active(), 1);
        let report = worker.world.lock().unwrap().reports.pop().unwrap();
        assert_eq!((report.reason, report.client), (EndReason::Idle, quiet.local_addr().unwrap().into()));
        assert_eq!((report.target, report.to_target, report.to_client), (Some(echo.address.into()), 1, 1));
        assert!(report.lived >= timeout);
        worker.advance(timeout);
        assert_eq!(worker.active(), 0);
        expect_echo(&quiet, b"again");
        worker.advance(timeout);
        assert_eq!(worker.active(), 0);
    }
}

#[test]
fn full_rule_evicts_its_longest_idle_session() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let at = worker.add(KEY, &udp(echo.address), Datapath::Gso);
    worker.world.lock().unwrap().most = Some(3);
    let clients: Vec<UdpSocket> = (0..4).map(|_| client(at)).collect();
    for client in &clients[..3] {
        expect_echo(client, b"hello");
        worker.advance(Duration::from_millis(10));
    }
    expect_echo(&clients[0], b"the oldest, but not the longest idle");
    expect_echo(&clients[3], b"one more");
    assert_eq!(worker.active(), 3);
    let report = worker.world.lock().unwrap().reports.pop().unwrap();
    assert_eq!((report.reason, report.client), (EndReason::Evicted, clients[1].local_addr().unwrap().into()));
    assert_eq!((report.to_target, report.to_client, report.target), (5, 5, Some(echo.address.into())));
    for client in [&clients[0], &clients[2], &clients[3]] {
        expect_echo(client, b"still here");
    }
    assert_eq!(ended(&worker.snapshot(), EndReason::Evicted), 1);
}

#[test]
fn total_limit_evicts_sessions_across_rules() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let first = worker.add(RuleKey(1), &udp(echo.address), Datapath::Gso);
    let second = worker.add(RuleKey(2), &udp(echo.address), Datapath::Gso);
    worker.world.lock().unwrap().most_in_total = Some(2);
    let [old, older, new] = [second, first, first].map(client);
    // Either rule may lose its session.
    for [first, last] in [[&older, &old], [&old, &older]] {
        expect_echo(first, b"1");
        worker.advance(Duration::from_millis(10));
        expect_echo(last, b"2");
        worker.advance(Duration::from_millis(10));
        expect_echo(&new, b"3");
        assert_eq!(worker.active(), 2);
        let report = worker.world.lock().unwrap().reports.pop().unwrap();
        assert_eq!((report.reason, report.client), (EndReason::Evicted, first.local_addr().unwrap().into()));
        worker.advance(Duration::from_secs(72));
        assert_eq!(worker.active(), 0);
    }
    worker.world.lock().unwrap().most_in_total = Some(0);
    older.send(b"nowhere").unwrap();
    eventually("the datagram is dropped", || worker.snapshot().dropped_datagrams == 1);
}

#[test]
fn flood_of_new_clients_respects_the_limit_and_gets_separate_sockets() {
    const CLIENTS: usize = 120;
    let target = UdpSocket::bind(LOCALHOST).unwrap();
    target.set_read_timeout(Some(udp_common::PATIENCE)).unwrap();
    let worker = Worker::start(Datapath::Gso);
    let at = worker.add(KEY, &udp(target.local_addr().unwrap()), Datapath::Gso);
    worker.world.lock().unwrap().most = Some(8);
    let clients: Vec<UdpSocket> = (0..CLIENTS).map(|_| client(at)).collect();
    worker.stall(|| {
        for client in &clients {
            client.send(b"x").unwrap();
        }
    });
    let sources: HashSet<SocketAddr> =
        (0..CLIENTS).map(|_| target.recv_from(&mut [0; 8]).unwrap().1).collect();
    // The kernel may reuse a port once its first socket is closed, but it does so for few ports.
    assert!(sources.len() > CLIENTS * 3 / 4, "{} sources", sources.len());
    assert_eq!((worker.active(), worker.tx_stats().refused), (8, 0));
    assert_eq!(worker.reasons(), vec![EndReason::Evicted; CLIENTS - 8]);
    let counted = worker.snapshot();
    assert_eq!((counted.accepted, counted.to_target_datagrams), (120, 120));
}

#[test]
fn denied_client_gets_no_session_and_is_counted() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let at = worker.add(KEY, &udp(echo.address), Datapath::Gso);
    let client = client(at);
    worker.world.lock().unwrap().denied = vec![client.local_addr().unwrap().ip()];
    client.send(b"let me in").unwrap();
    eventually("the refusal is counted", || ended(&worker.snapshot(), EndReason::Denied) == 1);
    assert_eq!((worker.active(), worker.snapshot().dropped_datagrams), (0, 1));
    worker.world.lock().unwrap().denied.clear();
    expect_echo(&client, b"now");
}

#[test]
fn closed_target_ends_each_session_until_it_recovers() {
    for address in [LOCALHOST, "[::1]:0"] {
        let mut echo = Echo::start(address);
        let worker = Worker::start(Datapath::Gso);
        let listen = address.parse().unwrap();
        let at = worker.add(KEY, &rule(Protocol::Udp, listen, echo.address), Datapath::Gso);
        let client = client(at);
        expect_echo(&client, b"up");
        let (address, echo_address) = (echo.address.to_string(), echo.address);
        drop(echo);
        client.send(b"down").unwrap();
        eventually("the session has ended", || worker.active() == 0);
        assert_eq!(worker.reasons(), [EndReason::TargetReset], "an answered session");
        client.send(b"down").unwrap();
        eventually("the second session has ended", || worker.reasons().len() == 2 && worker.active() == 0);
        assert_eq!(worker.reasons()[1], EndReason::ConnectFailed, "an unanswered session");
        assert_eq!(worker.world.lock().unwrap().failures.len(), 1);
        assert_eq!(worker.world.lock().unwrap().reports[1].target, Some(echo_address.into()), "the target");
        echo = Echo::start(&address);
        expect_echo(&client, b"up again");
        assert_eq!(echo.address.to_string(), address);
    }
}

#[test]
fn next_target_is_tried_after_a_refusal() {
    let echo = Echo::start(LOCALHOST);
    let absent = free_address();
    let mut rule = udp(absent);
    let ports = PortRange { first: echo.address.port(), last: echo.address.port() };
    rule.targets.push(Endpoint { host: Host::Ip(echo.address.ip()), ports, weight: 1 });
    let worker = Worker::start(Datapath::Gso);
    let client = client(worker.add(KEY, &rule, Datapath::Gso));
    client.send(b"to absent").unwrap();
    eventually("the session is refused", || worker.reasons() == [EndReason::ConnectFailed]);
    expect_echo(&client, b"to somebody");
}

#[test]
fn removed_rule_ends_only_its_sessions_and_returns_its_socket() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let going = worker.add(RuleKey(1), &udp(echo.address), Datapath::Gso);
    let staying = worker.add(RuleKey(2), &udp(echo.address), Datapath::Gso);
    let (first, second) = (client(going), client(staying));
    expect_echo(&first, b"1");
    expect_echo(&second, b"2");
    let listeners = worker.ask(|engine, tick| engine.remove_rule(RuleKey(1), tick));
    assert_eq!(listeners.addresses(), [going]);
    assert_eq!((worker.active(), worker.reasons()), (1, vec![EndReason::Shutdown]));
    expect_echo(&second, b"2");
    // A datagram between the two rules waits in the socket.
    first.send(b"meanwhile").unwrap();
    let changed = udp(echo.address);
    worker.world.lock().unwrap().targets.insert(RuleKey(3), vec![echo.address]);
    worker.ask(move |engine, tick| engine.add_rule(RuleKey(3), &changed, listeners, tick.poller).unwrap());
    assert_eq!(receive(&first), b"meanwhile");
    drop(worker.ask(|engine, tick| engine.remove_rule(RuleKey(3), tick)));
    assert!(UdpSocket::bind(going).is_ok(), "the port is still taken");
}

#[test]
fn drain_serves_old_sessions_and_accepts_no_new_ones() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let at = worker.add_shared(KEY, &udp(echo.address), Datapath::Gso);
    let (old, new) = (client(at), client(at));
    expect_echo(&old, b"old");
    worker.ask(|engine, tick| engine.drain(tick));
    expect_echo(&old, b"old");
    new.send(b"new").unwrap();
    eventually("the datagram is dropped", || worker.snapshot().dropped_datagrams == 1);
    assert_eq!(worker.active(), 1);
    worker.ask(|engine, tick| engine.unlisten(tick));
    expect_echo(&old, b"still here");
    assert_eq!((worker.active(), worker.reasons()), (1, vec![]));
}

/// For each protocol and address family, on one address and on all: the next listener gets new clients, and
/// the old one keeps serving its own.
#[test]
fn drained_port_keeps_old_clients_and_frees_the_listener() {
    for (listen, ask) in [
        (LOCALHOST, "127.0.0.1"),
        ("0.0.0.0:0", "127.0.0.2"),
        ("[::1]:0", "::1"),
        ("[::]:0", "::1"),
        ("[::]:0", "127.0.0.3"),
    ] {
        let echo = Echo::start(if ask.contains(':') { "[::1]:0" } else { LOCALHOST });
        let worker = Worker::start(Datapath::Gso);
        let rule = Rule {
            ipv6_only: ask.contains(':') || !listen.contains("::"),
            ..rule(Protocol::Udp, listen.parse().unwrap(), echo.address)
        };
        let bound = worker.add_shared(KEY, &rule, Datapath::Gso);
        let at = SocketAddr::new(ask.parse().unwrap(), bound.port());
        let (old, quiet) = (client(at), client(at));
        expect_echo(&quiet, b"quiet");
        worker.advance(Duration::from_secs(2));
        expect_echo(&old, b"old");
        worker.ask(|engine, tick| engine.drain(tick));
        assert_eq!((worker.active(), worker.reasons()), (1, vec![EndReason::Shutdown]), "{listen}");
        worker.stall(|| {
            // The datagram waits in the session's own socket instead of the listener.
            old.send(b"meanwhile").unwrap();
        });
        assert_eq!(receive(&old), b"meanwhile");
        worker.ask(|engine, tick| engine.unlisten(tick));

        let next = Worker::start(Datapath::Gso);
        let port = PortRange { first: bound.port(), last: bound.port() };
        next.add_shared(KEY, &Rule { ports: port, ..rule }, Datapath::Gso);
        let new = client(at);
        expect_echo(&new, b"new");
        expect_echo(&quiet, b"quiet again");
        assert_eq!(next.active(), 2, "{listen}");
        for _ in 0..20 {
            expect_echo(&old, b"still old");
        }
        assert_eq!((worker.active(), next.active()), (1, 2), "{listen}");
        let counted = worker.snapshot();
        assert_eq!((counted.to_target_datagrams, counted.dropped_datagrams), (23, 0), "{listen}");
        worker.advance(Duration::from_secs(2));
        assert_eq!((worker.active(), worker.reasons()), (0, vec![EndReason::Shutdown; 2]));
        expect_echo(&old, b"now with the other");
        assert_eq!(next.active(), 3);
    }
}

#[test]
fn udp_to_tcp_session_continues_during_a_drain() {
    let target = std::net::TcpListener::bind(LOCALHOST).unwrap();
    let worker = Worker::start(Datapath::Gso);
    let crossing =
        rule(Protocol::UdpToTcp { framed: false }, LOCALHOST.parse().unwrap(), target.local_addr().unwrap());
    let at = worker.add_shared(KEY, &crossing, Datapath::Gso);
    let client = client(at);
    client.send(b"to TCP").unwrap();
    let (mut stream, _) = target.accept().unwrap();
    let mut heard = [0; 6];
    std::io::Read::read_exact(&mut stream, &mut heard).unwrap();
    worker.ask(|engine, tick| engine.drain(tick));
    worker.ask(|engine, tick| engine.unlisten(tick));
    std::io::Write::write_all(&mut stream, b"answer").unwrap();
    assert_eq!(receive(&client), b"answer");
    client.send(b"more").unwrap();
    let mut heard = [0; 4];
    std::io::Read::read_exact(&mut stream, &mut heard).unwrap();
    assert_eq!(&heard, b"more");
    assert_eq!(worker.active(), 1);
}

#[test]
fn port_ranges_map_one_to_one() {
    // Three consecutive free ports for the targets, and three for the rule.
    let neighbours = |count: u16| {
        (0..100).find_map(|_| {
            let first = UdpSocket::bind(LOCALHOST).unwrap();
            let port = first.local_addr().unwrap().port();
            let rest: Result<Vec<_>, _> = (1..count)
                .map(|i| UdpSocket::bind(("127.0.0.1", port.checked_add(i).unwrap_or(1))))
                .collect();
            rest.ok().map(|rest| (port, std::iter::once(first).chain(rest).collect::<Vec<_>>()))
        })
    };
    let (target, targets) = neighbours(3).unwrap();
    let (listen, free) = neighbours(3).unwrap();
    drop(free);
    let mut rule = udp(SocketAddr::from(([127, 0, 0, 1], target)));
    rule.ports = PortRange { first: listen, last: listen + 2 };
    rule.targets[0].ports = PortRange { first: target, last: target + 2 };
    let worker = Worker::start(Datapath::Gso);
    worker.add(KEY, &rule, Datapath::Gso);
    for (i, socket) in targets.iter().enumerate() {
        socket.set_read_timeout(Some(udp_common::PATIENCE)).unwrap();
        let client = client(SocketAddr::from(([127, 0, 0, 1], listen + u16::try_from(i).unwrap())));
        client.send(&payload(i, 0, 50)).unwrap();
        assert_eq!(receive(socket), payload(i, 0, 50));
    }
}
