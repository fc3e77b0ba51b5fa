//! Names whose address changes: getaddrinfo(3) reads a hosts file that the test provides.

use crate::prelude::*;

use turnpike_testkit::alone;

const HOSTS: &str = "/etc/hosts";

/// Overwrites the file in place, because it is mounted with a bind mount.
fn hosts(path: &Path, lines: &str) {
    fs::write(path, format!("127.0.0.1 localhost\n{lines}")).unwrap();
}

fn named(id: &str, name: &str, port: u16) -> Rule {
    let mut rule = rule(id, SocketAddr::from(([127, 0, 0, 1], port)));
    rule.targets[0].host = Host::Name(name.to_owned());
    rule
}

/// Listeners on the same port of two addresses.
fn twins() -> (TcpListener, TcpListener, u16) {
    eventually("a port that is free on two addresses", || {
        let one = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = one.local_addr().unwrap().port();
        let two = TcpListener::bind(("127.0.0.2", port)).ok()?;
        Some((one, two, port))
    })
}

fn udp_greeter(address: &str, port: u16, name: &'static [u8]) -> bool {
    let Ok(socket) = UdpSocket::bind((address, port)) else { return false };
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, client)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(name, client);
        }
    });
    true
}

fn ask_udp(address: SocketAddr) -> Option<u8> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    socket.send_to(b"?", address).unwrap();
    let mut answer = [0; 8];
    socket.recv(&mut answer).ok().map(|_| answer[0])
}

#[test]
fn changed_address_of_a_name_is_used() {
    let probe = ["mount", "--bind", HOSTS, HOSTS];
    alone::in_namespaces(turnpike_testkit::this_test!(), "m", &probe, follow);
}

fn follow() {
    let dir = turnpike_testkit::Dir::new();
    let path = dir.at("hosts");
    hosts(&path, "");
    run("mount", &["--bind", path.to_str().unwrap(), HOSTS]);

    let (one, two, port) = twins();
    serve_greetings(one, "a");
    serve_greetings(two, "b");
    assert!(udp_greeter("127.0.0.1", port, b"a") && udp_greeter("127.0.0.2", port, b"b"));
    let mut settings = settings();
    settings.resolve_every = Duration::from_millis(50);
    let moving = |id| named(id, "moving.test", port);
    let datagrams = Rule { protocol: Protocol::Udp, ..moving("datagrams") };
    let datagrams = Rule { idle: Some(Duration::from_secs(60)), ..datagrams };
    let running =
        Running::start_with(&settings, &[moving("r"), datagrams, named("other", "other.test", port)]);
    let greeting = || support::first_byte(running.address("r")).ok();

    // Clients are reset until the name has an address.
    let error = support::first_byte(running.address("r")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    hosts(&path, "127.0.0.1 moving.test\n");
    eventually("the first address is used", || greeting().filter(|name| *name == b'a'));
    eventually("the first address is used (UDP)", || {
        ask_udp(running.address("datagrams")).filter(|name| *name == b'a')
    });
    let mut old = running.connect("r");
    assert_eq!(read_exactly(&mut old, 1), b"a");

    hosts(&path, "127.0.0.2 moving.test\n");
    eventually("the new address is used", || greeting().filter(|name| *name == b'b'));
    eventually("the new address is used (UDP)", || {
        ask_udp(running.address("datagrams")).filter(|name| *name == b'b')
    });
    for _ in 0..20 {
        assert_eq!(greeting(), Some(b'b'));
    }
    old.write_all(b"still here").unwrap();
    assert_eq!(read_exactly(&mut old, 10), b"still here");

    // If the name disappears, the old addresses stay in use. Failed lookups cannot be observed, but the other
    // name is looked up equally often, so a change of its address shows that some lookups have failed.
    for (line, name) in
        [("127.0.0.1 other.test\n", b'a'), ("127.0.0.2 other.test\n", b'b'), ("127.0.0.1 other.test\n", b'a')]
    {
        hosts(&path, line);
        eventually("the other name's address is used", || {
            support::first_byte(running.address("other")).is_ok_and(|heard| heard == name)
        });
    }
    assert_eq!(greeting(), Some(b'b'));

    // One of the two addresses does not accept connections, so every client gets the other one.
    hosts(&path, "127.0.0.3 moving.test\n127.0.0.1 moving.test\n");
    eventually("the second address is used", || greeting().filter(|name| *name == b'a'));
    let down = |snapshot: &turnpike_forward::RuleSnapshot| {
        let absent =
            snapshot.targets.iter().find(|target| target.address.ip().unwrap().to_string() == "127.0.0.3")?;
        (!absent.up && absent.counts.failed[0] > 0).then_some(())
    };
    // The first connection may not have tried the closed address.
    let tried = || greeting().and_then(|_| down(&running.snapshot("r")));
    eventually("the metrics show the closed address", tried);
    for _ in 0..20 {
        assert_eq!(greeting(), Some(b'a'));
    }

    // Both addresses are used: TCP and UDP alternate between them, and the old connection continues.
    hosts(&path, "127.0.0.1 moving.test\n127.0.0.2 moving.test\n");
    let both = |ask: &dyn Fn() -> Option<u8>| {
        let heard: Vec<_> = (0..10).map(|_| ask()).collect();
        (heard.iter().filter(|name| **name == Some(b'a')).count() == 5 && !heard.contains(&None))
            .then_some(())
    };
    eventually("both addresses take turns", || both(&greeting));
    eventually("both addresses take turns (UDP)", || both(&|| ask_udp(running.address("datagrams"))));
    old.write_all(b"still here").unwrap();
    assert_eq!(read_exactly(&mut old, 10), b"still here");
    // The worker's last snapshot may be older than the lookup.
    let addresses = || {
        let snapshot = running.snapshot("r");
        let shown = snapshot.targets.iter().map(|target| target.address.ip().unwrap().to_string());
        (shown.collect::<Vec<_>>() == ["127.0.0.1", "127.0.0.2"]).then_some(())
    };
    eventually("former addresses are gone from the metrics", addresses);
}

#[test]
fn udp_session_leaves_a_former_address_of_its_name() {
    let probe = ["mount", "--bind", HOSTS, HOSTS];
    let name = turnpike_testkit::this_test!();
    alone::in_namespaces(name, "m", &probe, leave);
}

/// UDP server that responds to every datagram while the flag is set.
fn moody(address: &str, port: u16, answers: &Arc<AtomicBool>) -> bool {
    let Ok(socket) = UdpSocket::bind((address, port)) else { return false };
    let answers = Arc::clone(answers);
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, client)) = socket.recv_from(&mut buffer) {
            if answers.load(Ordering::SeqCst) {
                let _ = socket.send_to(b"a", client);
            }
        }
    });
    true
}

fn leave() {
    let dir = turnpike_testkit::Dir::new();
    let path = dir.at("hosts");
    hosts(&path, "127.0.0.1 moving.test\n");
    run("mount", &["--bind", path.to_str().unwrap(), HOSTS]);

    let answers = Arc::new(AtomicBool::new(false));
    let port = eventually("a port that is free on two addresses", || {
        let port = turnpike_testkit::free_address().port();
        (udp_greeter("127.0.0.2", port, b"b") && moody("127.0.0.1", port, &answers)).then_some(port)
    });
    let rule = Rule { protocol: Protocol::Udp, ..named("r", "moving.test", port) };
    let rule = Rule { idle: Some(Duration::from_secs(600)), ..rule };
    let mut settings = settings();
    settings.resolve_every = Duration::from_millis(50);
    let running = Running::start_with(&settings, &[rule]);
    let client = || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(running.address("r")).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        socket
    };
    // The clients never pause, so no idle timeout ends their sessions.
    let hears = |client: &UdpSocket| {
        client.send(b"?").unwrap();
        let mut answer = [0];
        client.recv(&mut answer).ok().map(|_| answer[0])
    };

    let unanswered = client();
    eventually("the session exists", || {
        assert_eq!(hears(&unanswered), None);
        running.snapshot("r").active == 1
    });
    hosts(&path, "127.0.0.2 moving.test\n");
    eventually("the new address is used", || hears(&unanswered).filter(|name| *name == b'b'));

    answers.store(true, Ordering::SeqCst);
    hosts(&path, "127.0.0.1 moving.test\n");
    let answered = eventually("a session uses the old address", || {
        let client = client();
        hears(&client).filter(|name| *name == b'a').map(|_| client)
    });
    hosts(&path, "127.0.0.2 moving.test\n");
    eventually("new clients use the new address", || hears(&client()).filter(|name| *name == b'b'));
    // On a slow machine, a response may arrive too late, but none comes from another target.
    let heard: Vec<_> = (0..100)
        .filter_map(|_| {
            thread::sleep(Duration::from_millis(20));
            hears(&answered)
        })
        .collect();
    assert!(
        heard.len() > 50 && heard.iter().all(|name| *name == b'a'),
        "a session left a target that answers: {heard:?}"
    );
    answers.store(false, Ordering::SeqCst);
    eventually("the silent session has moved", || hears(&answered).filter(|name| *name == b'b'));
    let gone = running.log.all().into_iter().filter(|report| report.reason == EndReason::TargetGone);
    assert!(gone.count() >= 2);
}

#[test]
fn silent_name_server_delays_neither_counters_nor_a_start_with_keep_going() {
    let name = turnpike_testkit::this_test!();
    let probe = ["mount", "--bind", HOSTS, HOSTS];
    alone::in_namespaces(name, "mn", &probe, hold_up);
}

/// Shorter than any timeout for the name server, longer than a busy machine needs.
const SOON: Duration = Duration::from_secs(5);

fn hold_up() {
    run("ip", &["link", "set", "lo", "up"]);
    let _silent = UdpSocket::bind("127.0.0.1:53").unwrap();
    let dir = turnpike_testkit::Dir::new();
    let path = dir.at("resolv.conf");
    fs::write(&path, "nameserver 127.0.0.1\noptions timeout:20 attempts:1\n").unwrap();
    run("mount", &["--bind", path.to_str().unwrap(), "/etc/resolv.conf"]);

    let served = rule("served", SocketAddr::from(([127, 0, 0, 1], 9)));
    let slow = Rule { bind: Bind::Name("slow.test".to_owned()), ..rule("slow", ([127, 0, 0, 1], 9).into()) };
    let rules = [served.clone(), slow];
    let began = Instant::now();
    let keeps_going = Settings { keep_going: true, ..settings() };
    let (forwarder, failed) = Forwarder::start(&keeps_going, &rules, Arc::new(Reports::default())).unwrap();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    drop(forwarder);

    let running = Running::start(&[served]);
    thread::scope(|scope| {
        let reload = scope.spawn(|| running.forwarder.reload(&settings(), &rules).map(drop));
        thread::sleep(Duration::from_millis(300));
        let asked = Instant::now();
        running.snapshot("served");
        assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
        assert!(reload.join().unwrap().is_err(), "the name has no address");
    });
}
