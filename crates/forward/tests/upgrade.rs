//! Handover to another forwarder in the same process, with the same sockets and messages as between
//! processes.

use crate::prelude::*;

use turnpike_forward::upgrade::{ForwarderHandover, ForwarderOffer};

use crate::{
    circles::{chain, circles},
    support::client as tcp_client,
};

/// Hands `old` over to a new forwarder. On error the old one continues.
fn upgraded(old: &Running, settings: &Settings, rules: &[Rule]) -> Result<Running, String> {
    let (offer, descriptors, channels) = old.forwarder.offer().map_err(|error| error.to_string())?;
    let offer: ForwarderOffer = serde_json::from_str(&serde_json::to_string(&offer).unwrap()).unwrap();
    let log = Arc::new(Reports::default());
    let handover = ForwarderHandover::new(offer, descriptors);
    let new = Forwarder::start_from_handover(settings, rules, log.clone(), handover);
    let (forwarder, failed) = new.map_err(|error| error.to_string())?;
    assert!(failed.is_empty(), "{failed:?}");
    let exported = old.forwarder.pause().and_then(|()| old.forwarder.export(channels, PATIENCE));
    let done = match (exported, forwarder.received()) {
        (Ok(exported), Ok(taken)) => {
            assert_eq!(exported, taken);
            Ok(())
        }
        (_, Err(error)) | (Err(error), _) => Err(error.to_string()),
    };
    if let Err(why) = done {
        drop(forwarder);
        old.forwarder.resume();
        return Err(why);
    }
    forwarder.serve();
    old.forwarder.forget();
    Ok(Running { forwarder, log })
}

fn udp(id: &str, target: SocketAddr) -> Rule {
    Rule { protocol: Protocol::Udp, ..rule(id, target) }
}

fn with(workers: usize, datapath: Datapath) -> Settings {
    Settings { workers, datapath, ..settings() }
}

/// Waits until the old forwarder is empty, and checks that it has reported no session as ended.
fn ended(old: Running) {
    eventually("the old forwarder is empty", || old.forwarder.active() == 0);
    assert!(old.log.all().is_empty(), "{:?}", old.log.all());
}

/// Target that echoes datagrams and records their sources.
fn remembering() -> (SocketAddr, Arc<Mutex<HashSet<SocketAddr>>>) {
    let socket = UdpSocket::bind(LOCALHOST).unwrap();
    let address = socket.local_addr().unwrap();
    let seen = Arc::<Mutex<HashSet<SocketAddr>>>::default();
    let sources = Arc::clone(&seen);
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            sources.lock().unwrap().insert(from);
            let _ = socket.send_to(&buffer[..len], from);
        }
    });
    (address, seen)
}

/// Datagrams in flight per client. Together, they fit into the smallest default receive buffer, so a slow
/// machine loses nothing.
const WINDOW: u64 = 16;

/// Client that numbers its datagrams and checks that the responses arrive in order.
struct Talk {
    stop: Arc<AtomicBool>,
    sender: thread::JoinHandle<u64>,
    receiver: thread::JoinHandle<u64>,
}

impl Talk {
    fn start(server: SocketAddr) -> Self {
        let socket = client(server);
        let receiving = socket.try_clone().unwrap();
        let heard_of = Arc::<AtomicU64>::default();
        let hears = Arc::clone(&heard_of);
        let receiver = thread::spawn(move || {
            let mut expected = 0_u64;
            loop {
                hears.store(expected, Ordering::Relaxed);
                let payload = receive(&receiving);
                if payload.is_empty() {
                    return expected;
                }
                let number = u64::from_be_bytes(payload.try_into().unwrap());
                assert_eq!(number, expected, "lost or reordered");
                expected += 1;
            }
        });
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let sender = thread::spawn(move || {
            let mut number = 0_u64;
            while !stopped.load(Ordering::Relaxed) {
                if number < heard_of.load(Ordering::Relaxed) + WINDOW {
                    socket.send(&number.to_be_bytes()).unwrap();
                    number += 1;
                }
                thread::sleep(Duration::from_micros(500));
            }
            socket.send(&[]).unwrap();
            number
        });
        Self { stop, sender, receiver }
    }

    fn ends(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sender.join().unwrap();
        assert_eq!(self.receiver.join().unwrap(), sent);
        sent
    }
}

#[test]
fn handover_neither_loses_nor_reorders_datagrams() {
    for (workers, datapath) in [(1, Datapath::Basic), (3, Datapath::Gso)] {
        let (target, sources) = remembering();
        let rules = [udp("u", target)];
        let settings = with(workers, datapath);
        let mut running = Running::start_with(&settings, &rules);
        let at = running.address("u");
        let talks: Vec<Talk> = (0..8).map(|_| Talk::start(at)).collect();
        eventually("all sessions exist", || running.forwarder.active() == 8);
        for _ in 0..3 {
            let next = upgraded(&running, &settings, &rules).unwrap();
            assert_eq!(next.address("u"), at);
            ended(std::mem::replace(&mut running, next));
            assert_eq!(running.forwarder.active(), 8);
            let before = running.snapshot("u").to_client_datagrams;
            eventually("traffic continues", || running.snapshot("u").to_client_datagrams > before + 100);
        }
        assert!(talks.into_iter().map(Talk::ends).sum::<u64>() > 300);
        assert_eq!(sources.lock().unwrap().len(), 8, "a session got another socket");
        let seen = running.snapshot("u");
        assert_eq!((seen.active, seen.accepted), (8, 0));
        assert_eq!(seen.targets[0].counts.open, 8);
    }
}

#[test]
fn connections_stay_and_new_clients_reach_the_new_process() {
    let dir = Dir::new();
    let name = dir.at("in.sock").to_str().unwrap().parse::<UnixName>().unwrap();
    let echo = Echo::start(LOCALHOST);
    let rules = [
        rule("t", greeter("hello")),
        Rule { bind: Bind::Unix(name), ..rule("x", greeter("unix")) },
        Rule { protocol: Protocol::TcpToUdp { framed: true }, ..rule("c", echo.address) },
    ];
    let old = Running::start(&rules);
    let mut connection = old.connect("t");
    assert_eq!(read_exactly(&mut connection, 5), b"hello");
    let mut by_path = UnixStream::connect(dir.at("in.sock")).unwrap();
    let mut greeting = [0; 4];
    by_path.read_exact(&mut greeting).unwrap();
    let mut crossing = old.connect("c");
    let frame = [0, 3, b'o', b'n', b'e'];
    crossing.write_all(&frame).unwrap();
    assert_eq!(read_exactly(&mut crossing, 5), frame);

    let new = upgraded(&old, &settings(), &rules).unwrap();
    let (at, crossing_at) = (new.address("t"), new.address("c"));
    for address in [at, crossing_at, at, crossing_at] {
        let mut newcomer = tcp_client(address);
        newcomer.write_all(&frame).unwrap();
        let said = if address == at { [b"hello", &frame[..]].concat() } else { frame.to_vec() };
        assert_eq!(read_exactly(&mut newcomer, said.len()), said);
    }
    let mut newcomer = UnixStream::connect(dir.at("in.sock")).unwrap();
    newcomer.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"unix");
    eventually("the new forwarder has counted its connections", || {
        new.snapshot("t").accepted == 2 && new.snapshot("c").accepted == 2
    });
    assert_eq!((old.snapshot("t").accepted, old.snapshot("x").accepted), (1, 1));

    // The old process still serves its connections.
    connection.write_all(b"again").unwrap();
    assert_eq!(read_exactly(&mut connection, 5), b"again");
    by_path.write_all(b"path").unwrap();
    by_path.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"path");
    crossing.write_all(&frame).unwrap();
    assert_eq!(read_exactly(&mut crossing, 5), frame);
    drop((connection, by_path, crossing));
    eventually("the old forwarder is empty", || old.forwarder.active() == 0);
    drop(old);
    assert!(dir.at("in.sock").exists(), "the old forwarder has removed the new one's socket");
    let mut newcomer = UnixStream::connect(dir.at("in.sock")).unwrap();
    newcomer.read_exact(&mut greeting).unwrap();
    drop(new);
    assert!(!dir.at("in.sock").exists(), "the socket file was not removed");
}

#[test]
fn partial_frames_and_queued_data_are_handed_over() {
    let (server, target) = listener();
    let rules = [Rule { protocol: Protocol::UdpToTcp { framed: true }, ..rule("u", target) }];
    let old = Running::start(&rules);
    let asking = client(old.address("u"));
    asking.send(b"first").unwrap();
    let mut far = accept(&server);
    assert_eq!(read_exactly(&mut far, 7), b"\0\x05first");
    // The target has sent half a response and stops reading for a while.
    far.write_all(b"\0\x06ans").unwrap();
    let full = [7; 40_000];
    let mut sent = 0;
    while old.snapshot("u").dropped_datagrams == 0 {
        asking.send(&full).unwrap();
        sent += 1;
        thread::sleep(Duration::from_millis(1));
        assert!(sent < 10_000, "the target never blocks");
    }
    eventually("everything has been counted", || {
        let seen = old.snapshot("u");
        seen.to_target_datagrams + seen.dropped_datagrams == sent + 1
    });
    let taken = old.snapshot("u").to_target_datagrams - 1;

    let new = upgraded(&old, &settings(), &rules).unwrap();
    ended(old);
    far.write_all(b"wer").unwrap();
    assert_eq!(receive(&asking), b"answer");
    for _ in 0..taken {
        assert_eq!(read_exactly(&mut far, 2), 40_000_u16.to_be_bytes());
        assert_eq!(read_exactly(&mut far, full.len()), full);
    }
    asking.send(b"last").unwrap();
    assert_eq!(read_exactly(&mut far, 6), b"\0\x04last");
    assert_eq!(new.forwarder.active(), 1);
    drop(new);
    assert_eq!(read_all(&mut far), b"");
}

#[test]
fn handed_over_sessions_keep_their_age_and_count_towards_limits() {
    let echo = Echo::start(LOCALHOST);
    let limits = Limits { max_connections_per_client: Some(3), ..Limits::default() };
    let rules = [Rule { max_connections: 3, limits, ..udp("u", echo.address) }];
    let old = Running::start(&rules);
    let at = old.address("u");
    let clients: Vec<UdpSocket> = (0..3).map(|_| client(at)).collect();
    for (number, client) in clients.iter().enumerate() {
        expect_echo(client, &[7; 10][..=number]);
        thread::sleep(Duration::from_millis(5));
    }
    // The first session is the oldest, but the second has been idle for longest.
    expect_echo(&clients[0], b"more");

    let new = upgraded(&old, &settings(), &rules).unwrap();
    ended(old);
    let fourth = client(at);
    fourth.send(b"too many of one client").unwrap();
    let limited = |new: &Running, reason| {
        new.snapshot("u").ended.iter().find(|(other, _)| *other == reason).map_or(0, |(_, count)| *count)
    };
    eventually("the client's limit applies", || limited(&new, EndReason::ClientLimit) == 1);

    let rules = [udp("u", echo.address)];
    let rules = [Rule { max_connections: 3, ..rules[0].clone() }];
    let newer = upgraded(&new, &settings(), &rules).unwrap();
    ended(new);
    expect_echo(&fourth, b"one more of the rule");
    let reports = newer.log.wait(1);
    let evicted = &reports[0];
    assert_eq!(evicted.client, clients[1].local_addr().unwrap().into());
    assert_eq!((evicted.reason, evicted.to_target, evicted.to_client), (EndReason::Evicted, 2, 2));
    assert!(evicted.lived >= Duration::from_millis(5), "{:?}", evicted.lived);
    for client in [&clients[0], &clients[2], &fourth] {
        expect_echo(client, b"still here");
    }
}

#[test]
fn failed_handover_changes_nothing() {
    let echo = Echo::start(LOCALHOST);
    let rules = [udp("u", echo.address), rule("t", greeter("hello"))];
    let old = Running::start_with(&with(2, Datapath::Gso), &rules);
    let talk = Talk::start(old.address("u"));
    let error = upgraded(&old, &with(2, Datapath::Gso), &rules[..1]).err().unwrap();
    assert!(error.contains("rule t ") && error.contains("SIGHUP"), "{error}");
    assert!(upgraded(&old, &with(3, Datapath::Gso), &rules).is_err(), "a different number of workers");

    // A new process that fails while the sessions are being sent.
    let (_, descriptors, channels) = old.forwarder.offer().unwrap();
    old.forwarder.pause().unwrap();
    drop(descriptors);
    assert!(old.forwarder.export(channels, PATIENCE).is_err());
    old.forwarder.resume();

    let before = old.snapshot("u").to_client_datagrams;
    eventually("traffic continues", || old.snapshot("u").to_client_datagrams > before + 100);
    assert_eq!(read_exactly(&mut old.connect("t"), 5), b"hello");
    talk.ends();
    eventually("one session remains", || old.forwarder.active() == 1);
}

#[test]
fn hops_of_a_client_are_handed_over() {
    let echo = Echo::start(LOCALHOST);
    let (rules, first) = chain(Protocol::Udp, 9, echo.address);
    let old = Running::start_with(&with(1, Datapath::Gso), &rules);
    let client = client(first);
    client.send(b"?").unwrap();
    eventually("the ninth rule refuses the client", || circles(&old, "8") == 1);
    let new = upgraded(&old, &with(1, Datapath::Gso), &rules).unwrap();
    client.send(b"?").unwrap();
    eventually("the ninth rule still refuses the client", || circles(&new, "8") == 1);
    assert_eq!(new.snapshot("8").accepted, 0);
    drop(new);
}

#[test]
fn unanswered_session_finds_another_target_after_a_handover() {
    let silent = UdpSocket::bind(LOCALHOST).unwrap();
    let echo = Echo::start(LOCALHOST);
    let targets = [silent.local_addr().unwrap(), echo.address];
    let rule = Rule {
        balance: Balance::Failover,
        targets: targets.map(Into::into).to_vec(),
        idle: Some(Duration::from_secs(60)),
        ..udp("u", echo.address)
    };
    let rules = [rule];
    let old = Running::start_with(&with(1, Datapath::Gso), &rules);
    let client = client(old.address("u"));
    client.send(b"?").unwrap();
    eventually("the client has a session", || old.snapshot("u").accepted == 1);
    let new = upgraded(&old, &with(1, Datapath::Gso), &rules).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    eventually("an answer arrives", || {
        client.send(b"?").unwrap();
        client.recv(&mut [0; 8]).ok()
    });
    drop(new);
}
