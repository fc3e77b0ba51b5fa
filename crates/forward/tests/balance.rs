//! Weights, source affinity and counters per target, with real sockets and several workers.

use crate::prelude::*;
use std::os::fd::OwnedFd;

use turnpike_forward::TargetSnapshot;

fn weighted(targets: &[(SocketAddr, u16)], balance: Balance) -> Rule {
    let mut rule = rule("r", targets[0].0);
    let endpoint = |(target, weight): &(SocketAddr, u16)| {
        let mut endpoint = Endpoint::from(*target);
        endpoint.weight = *weight;
        endpoint
    };
    rule.targets = targets.iter().map(endpoint).collect();
    rule.balance = balance;
    rule
}

fn workers(workers: usize) -> Settings {
    Settings { workers, ..settings() }
}

fn source(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 9, number)
}

fn connect_from(source: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    patient(OwnedFd::from(socket).into())
}

fn heard_from(source: Ipv4Addr, to: SocketAddr) -> u8 {
    read_exactly(&mut connect_from(source, to), 1)[0]
}

/// UDP server that responds to every datagram with its name.
fn udp_greeter(name: u8) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok((_, client)) = socket.recv_from(&mut bytes) {
            let _ = socket.send_to(&[name], client);
        }
    });
    address
}

fn ask_udp(source: Ipv4Addr, to: SocketAddr) -> u8 {
    let socket = UdpSocket::bind((source, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.send_to(b"?", to).unwrap();
    let mut name = [0];
    socket.recv(&mut name).unwrap();
    name[0]
}

fn target(running: &Running, address: SocketAddr) -> TargetSnapshot {
    running.snapshot("r").targets.into_iter().find(|target| target.address == address.into()).unwrap()
}

#[test]
fn round_robin_gives_each_target_its_weight_over_all_workers() {
    let targets = [(greeter("a"), 3), (greeter("b"), 1), (greeter("c"), 0)];
    let running = Running::start_with(&workers(2), &[weighted(&targets, Balance::RoundRobin)]);
    let address = running.address("r");
    let heard: Vec<u8> = (0..80).map(|number| heard_from(source(number + 1), address)).collect();
    let count = |name| heard.iter().filter(|heard| **heard == name).count();
    assert_eq!([count(b'a'), count(b'b'), count(b'c')], [60, 20, 0]);
}

#[test]
fn least_connections_respects_the_weights() {
    let targets = [(greeter("a"), 1), (greeter("b"), 4)];
    let running = Running::start_with(&workers(2), &[weighted(&targets, Balance::LeastConnections)]);
    let mut open = Vec::new();
    for _ in 0..20 {
        let mut client = running.connect("r");
        let name = read_exactly(&mut client, 1)[0];
        open.push((client, name));
    }
    assert_eq!(open.iter().filter(|(_, name)| *name == b'a').count(), 4);
}

#[test]
fn drained_target_keeps_its_connections_and_gets_no_new_ones() {
    let (a, b) = (greeter("a"), greeter("b"));
    let mut before = weighted(&[(a, 1), (b, 1)], Balance::RoundRobin);
    let port = free_address().port();
    before.ports = turnpike_forward::PortRange { first: port, last: port };
    let running = Running::start(std::slice::from_ref(&before));
    let mut old = [running.connect("r"), running.connect("r")];
    let names: Vec<u8> = old.iter_mut().map(|client| read_exactly(client, 1)[0]).collect();
    assert!(names.contains(&b'a'));

    for balance in [Balance::RoundRobin, Balance::LeastConnections, Balance::Failover, Balance::Source] {
        let mut after = Rule { balance, ..before.clone() };
        after.targets[0].weight = 0;
        running.forwarder.reload(&settings(), &[after]).unwrap();
        for _ in 0..10 {
            assert_eq!(read_exactly(&mut running.connect("r"), 1), b"b", "{balance:?}");
        }
    }
    for client in &mut old {
        client.write_all(b"still here").unwrap();
        assert_eq!(read_exactly(client, 10), b"still here");
    }
}

#[test]
fn client_keeps_its_target_across_workers_ports_and_restarts() {
    let targets = [(greeter("a"), 1), (greeter("b"), 1), (greeter("c"), 1)];
    let rule = weighted(&targets, Balance::Source);
    let ask = |running: &Running| -> Vec<u8> {
        let address = running.address("r");
        // Each call uses a different client port, and therefore possibly a different worker.
        (1..40).map(|number| heard_from(source(number), address)).collect()
    };
    let running = Running::start_with(&workers(4), std::slice::from_ref(&rule));
    let first = ask(&running);
    assert!([b'a', b'b', b'c'].iter().all(|name| first.contains(name)), "{first:?}");
    for _ in 0..3 {
        assert_eq!(ask(&running), first);
    }
    let again = Running::start_with(&workers(2), &[rule]);
    assert_eq!(ask(&again), first);
}

#[test]
fn udp_clients_keep_their_target_until_it_is_removed() {
    let names = [b'a', b'b', b'c'];
    let targets = names.map(|name| (udp_greeter(name), 1));
    let port = free_address().port();
    let mut rule = Rule { protocol: Protocol::Udp, ..weighted(&targets, Balance::Source) };
    rule.ports = turnpike_forward::PortRange { first: port, last: port };
    let running = Running::start_with(&workers(2), std::slice::from_ref(&rule));
    let ask = || -> Vec<u8> { (1..40).map(|number| ask_udp(source(number), running.address("r"))).collect() };
    let first = ask();
    assert!(names.iter().all(|name| first.contains(name)), "{first:?}");
    assert_eq!(ask(), first);

    rule.targets.remove(1);
    running.forwarder.reload(&workers(2), &[rule]).unwrap();
    for (before, after) in first.iter().zip(ask()) {
        assert_ne!(after, b'b');
        assert!(*before == b'b' || *before == after);
    }
}

#[test]
fn source_affinity_uses_the_client_address_in_the_proxy_header() {
    let targets = [(greeter("a"), 1), (greeter("b"), 1)];
    let mut rule = weighted(&targets, Balance::Source);
    rule.proxy_protocol_from = vec![Proxy::Network(Pattern::Prefix([127, 0, 0, 1].into(), 32))];
    let running = Running::start(&[rule]);
    let ask = |client: u8| {
        let mut proxy = running.connect("r");
        proxy.write_all(format!("PROXY TCP4 192.0.2.{client} 192.0.2.1 5000 80\r\n").as_bytes()).unwrap();
        read_exactly(&mut proxy, 1)[0]
    };
    let first: Vec<u8> = (1..30).map(ask).collect();
    assert!(
        first.contains(&b'a') && first.contains(&b'b'),
        "clients behind one proxy are not distinguished: {first:?}"
    );
    assert_eq!((1..30).map(ask).collect::<Vec<_>>(), first);
}

#[test]
fn clients_return_to_a_recovered_target_and_no_others_move() {
    let down = free_address();
    let rule = weighted(&[(down, 1), (greeter("b"), 1), (greeter("c"), 1)], Balance::Source);
    let running = Running::start(&[rule]);
    let address = running.address("r");
    let ask = || -> Vec<u8> { (1..40).map(|number| heard_from(source(number), address)).collect() };
    let without = ask();
    assert!(without.contains(&b'b') && without.contains(&b'c'), "{without:?}");
    support::serve_greetings(TcpListener::bind(down).unwrap(), "a");
    // Other targets are preferred for a second after a failure.
    let with = eventually("a target recovers", || Some(ask()).filter(|heard| heard.contains(&b'a')));
    for (without, with) in without.iter().zip(with) {
        assert!(with == b'a' || with == *without);
    }
}

#[test]
fn traffic_is_counted_per_target() {
    let (a, absent) = (greeter("a"), free_address());
    let running = Running::start(&[weighted(&[(absent, 1), (a, 1)], Balance::Failover)]);
    // Both targets are considered up before the first client connects.
    assert!(target(&running, a).up && target(&running, absent).up);

    let mut client = running.connect("r");
    assert_eq!(read_exactly(&mut client, 1), b"a");
    client.write_all(&[7; 1000]).unwrap();
    read_exactly(&mut client, 1000);
    let of_a = eventually("bytes", || Some(target(&running, a)).filter(|a| a.counts.to_client_bytes == 1001));
    assert!(of_a.up);
    assert_eq!((of_a.counts.open, of_a.counts.connected), (1, 1));
    assert_eq!(of_a.counts.to_target_bytes, 1000);
    assert_eq!(of_a.counts.connect_times.iter().sum::<u64>(), 1);
    assert!(of_a.counts.connect_time > Duration::ZERO && of_a.counts.connect_time < PATIENCE);

    let of_nobody = target(&running, absent);
    let refused = TargetFailure::Refused as usize;
    assert_eq!((of_nobody.up, of_nobody.counts.failed[refused]), (false, 1));
    assert_eq!((of_nobody.counts.open, of_nobody.counts.connected), (0, 0));

    client.shutdown(std::net::Shutdown::Both).unwrap();
    eventually("the end of the connection", || target(&running, a).counts.open == 0);

    // A single connection is enough to detect that the target is up again.
    support::serve_greetings(TcpListener::bind(absent).unwrap(), "n");
    eventually("the recovered target is up", || {
        let _ = running.connect("r").read(&mut [0]);
        target(&running, absent).up
    });
}

#[test]
fn traffic_is_counted_per_udp_target() {
    let (a, absent) = (udp_greeter(b'a'), free_address());
    let rule = Rule { protocol: Protocol::Udp, ..weighted(&[(a, 1), (absent, 1)], Balance::Source) };
    let running = Running::start(&[rule]);
    let to = running.address("r");
    // Each of the two targets gets some of these clients.
    for number in 1..40 {
        UdpSocket::bind((source(number), 0)).unwrap().send_to(b"???", to).unwrap();
    }
    let counted = |running: &Running| {
        let (a, absent) = (target(running, a), target(running, absent));
        (a.up
            && a.counts.connected > 0
            && a.counts.to_client_bytes > 0
            && !absent.up
            && absent.counts.failed[0] > 0)
            .then_some((a, absent))
    };
    let (of_a, of_nobody) = eventually("both targets are counted", || counted(&running));
    assert_eq!(of_a.counts.to_target_bytes % 3, 0);
    assert_eq!((of_nobody.counts.to_client_bytes, of_nobody.counts.open), (0, 0));
    assert_eq!(of_a.counts.connect_times.iter().sum::<u64>(), 0, "a UDP session does not connect");
}

#[test]
fn udp_to_tcp_sessions_count_their_connect_time() {
    let (server, address) = listener();
    let absent = free_address();
    let protocol = Protocol::UdpToTcp { framed: false };
    let targets = [(absent, 1), (address, 1)];
    let running = Running::start(&[Rule { protocol, ..weighted(&targets, Balance::Failover) }]);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"four", running.address("r")).unwrap();
    let mut accepted = support::accept(&server);
    assert_eq!(read_exactly(&mut accepted, 4), b"four");
    let seen = |running: &Running| {
        let (one, two) = (target(running, absent), target(running, address));
        let done = two.counts.to_target_bytes == 4 && two.counts.connected == 1 && one.counts.failed[0] == 1;
        done.then_some((one, two))
    };
    let (of_nobody, of_server) = eventually("both targets are counted", || seen(&running));
    assert_eq!((of_nobody.up, of_nobody.counts.open), (false, 0));
    assert_eq!((of_server.up, of_server.counts.open), (true, 1));
    assert_eq!(of_server.counts.connect_times.iter().sum::<u64>(), 1);
}
