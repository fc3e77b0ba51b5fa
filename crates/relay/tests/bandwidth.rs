//! Bandwidth limits over real sockets, compared with the bytes allowed in the elapsed time.

use crate::prelude::*;

use crate::support::*;

/// Bits per second: one megabyte per second.
const RATE: u64 = 8_000_000;
const PAYLOAD: usize = 1000;

fn per_allocation(burst_ms: u32) -> Bandwidth {
    let rates = Rates { per_allocation: Some(RATE), ..Rates::default() };
    Bandwidth { rates, burst_ms, ..Bandwidth::default() }
}

/// Number of bytes that a bucket allows from `since` until now, plus 5 % because the server reads its clock
/// only once per batch.
fn allowed(since: Instant, burst_ms: u32) -> u64 {
    let elapsed_ms = u64::try_from(since.elapsed().as_millis()).unwrap() + 1;
    let at_once = RATE / 8000 * u64::from(burst_ms);
    (at_once + RATE / 8000 * elapsed_ms) * 21 / 20 + PAYLOAD as u64
}

struct Datagrams {
    socket: UdpSocket,
    server: SocketAddr,
}

impl Datagrams {
    fn allocated(world: &World, peer: &UdpSocket) -> (Self, SocketAddr) {
        let client = Self { socket: crate::support::peer(), server: world.udp() };
        let relayed = plain(&client.ask(&allocate()).attribute(0x0016));
        client.ask(&bind(peer.local_addr().unwrap()));
        (client, relayed)
    }

    fn ask(&self, request: &[u8]) -> Message {
        self.socket.send_to(request, self.server).unwrap();
        let answer = Message(heard(&self.socket));
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0100, "{answer:?}");
        answer
    }
}

/// Calls `send` at twice the limit for 1.5 s. Overdue calls are made a few at a time, so that socket buffers
/// do not overflow.
fn offer(mut send: impl FnMut()) {
    let started = Instant::now();
    let per_second = 2 * RATE / 8 / PAYLOAD as u64;
    let mut sent = 0;
    while started.elapsed() < Duration::from_millis(1500) {
        let due = u64::try_from(started.elapsed().as_micros()).unwrap() * per_second / 1_000_000;
        let now = due.saturating_sub(sent).min(32);
        (0..now).for_each(|_| send());
        sent += now;
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn datagrams_over_the_limit_are_dropped_in_both_directions() {
    let burst_ms = 250;
    let world = start_with(|config| config.server.bandwidth = per_allocation(burst_ms));
    let peer = peer();
    let started = Instant::now();
    let (client, relayed) = Datagrams::allocated(&world, &peer);
    let (up, down) = (channel_data(&[7; PAYLOAD]), [8; PAYLOAD]);
    for way in ["to_peer", "to_client"] {
        let began = Instant::now();
        offer(|| {
            let sent = if way == "to_peer" {
                client.socket.send_to(&up, client.server)
            } else {
                peer.send_to(&down, relayed)
            };
            sent.unwrap();
        });
        let offered_for = u64::try_from(began.elapsed().as_millis()).unwrap();
        // Twice the limit was offered, so at least half of the limit must pass.
        let least = RATE / 8000 * offered_for / 2;
        let passed = eventually(&format!("{way}: {least} bytes"), || {
            let passed = world.counter("relayed_bytes", way);
            (passed >= least).then_some(passed)
        });
        let most = allowed(started, burst_ms);
        assert!(passed <= most, "{way}: {passed} bytes passed, at most {most} allowed");
        world.wait_whether("dropped_datagrams", "allocation_bandwidth", true);
    }
    assert!(world.counter("dropped_datagrams", "total_bandwidth") == 0);
}

/// The client's bytes wait until they may pass. In the meantime, other clients are served.
#[test]
fn stream_over_its_limit_waits_and_loses_nothing() {
    let burst_ms = 20;
    let world = start_with(|config| {
        config.streams.tls = Some(context(&[identity(&["turn.example.org"])]));
        config.server.bandwidth = per_allocation(burst_ms);
    });
    let tls = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
    waits(&world, burst_ms, world.client());
    waits(&world, burst_ms, Client::new(tls));
    assert_eq!(world.counter("dropped_datagrams", "allocation_bandwidth"), 0);
}

fn waits<S: Read + Write + Send>(world: &World, burst_ms: u32, mut client: Client<S>) {
    const DATAGRAMS: usize = 600;
    let peer = peer();
    let pauses = || world.counter("bandwidth_pauses", "allocation");
    let before = pauses();
    let started = Instant::now();
    client.allocated(&peer);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..DATAGRAMS {
                let mut payload = [0; PAYLOAD];
                payload[..2].copy_from_slice(&u16::try_from(number).unwrap().to_be_bytes());
                client.send(&padded(channel_data(&payload)));
            }
            client.ask(&refresh(9));
        });
        // Read continuously, because the peer's buffer is small.
        let reading = scope.spawn(|| {
            for number in 0..DATAGRAMS {
                let payload = heard(&peer);
                assert_eq!(payload.len(), PAYLOAD);
                assert_eq!(usize::from(u16::from_be_bytes([payload[0], payload[1]])), number);
            }
        });
        eventually("the stream is paused", || pauses() > before);
        world.client().ask(&binding(1));
        reading.join().unwrap();
        let (passed, most) = ((DATAGRAMS * PAYLOAD) as u64, allowed(started, burst_ms));
        assert!(passed <= most, "{passed} bytes passed, at most {most} allowed");
    });
}

#[test]
fn reload_adds_and_removes_the_limit() {
    let world = start(|_| {});
    let peer = peer();
    let mut client = world.client();
    client.allocated(&peer);
    let pauses = || world.counter("bandwidth_pauses", "allocation");
    let mut relays = || {
        for _ in 0..200 {
            client.send(&padded(channel_data(&[7; PAYLOAD])));
            heard(&peer);
        }
        let bindings = world.counter("requests", "binding");
        client.ask(&binding(1));
        eventually("the request is counted", || world.counter("requests", "binding") > bindings);
        pauses()
    };
    let reload = |bandwidth: Bandwidth| {
        let config = configured(|config: &mut Config| config.server.bandwidth = bandwidth);
        let store: Arc<dyn turnpike_relay::CredentialStore> = Arc::new(());
        world.relay.reconfigure(&config, &world.relay.layout(), &store).unwrap();
    };
    assert_eq!(relays(), 0);
    // A request-reply exchange on loopback is faster than the limit.
    let slow = Rates { per_allocation: Some(RATE / 4), ..Rates::default() };
    reload(Bandwidth { rates: slow, burst_ms: 10, ..Bandwidth::default() });
    let paused = eventually("a pause", || Some(relays()).filter(|pauses| *pauses > 0));
    reload(Bandwidth::default());
    let paused = eventually("no more pauses", || {
        let before = pauses();
        Some(relays()).filter(|pauses| *pauses == before && before >= paused)
    });
    assert_eq!(relays(), paused);
}

#[test]
fn total_limit_spans_workers_and_is_shared_fairly() {
    let burst_ms = 250;
    let world = start_with(|config| {
        config.workers = 2;
        config.server.bandwidth = Bandwidth { total: Some(RATE), burst_ms, ..Bandwidth::default() };
    });
    let peers = [peer(), peer()];
    let started = Instant::now();
    let clients = [0, 1].map(|number: usize| Datagrams::allocated(&world, &peers[number]).0);
    let datagram = channel_data(&[7; PAYLOAD]);
    let over = AtomicBool::new(false);
    let heard: Vec<usize> = thread::scope(|scope| {
        let count = |peer: &UdpSocket| {
            peer.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            let mut count = 0;
            loop {
                match peer.recv(&mut [0; 2048]) {
                    Ok(_) => count += 1,
                    Err(_) if over.load(Ordering::Relaxed) => return count,
                    Err(_) => {}
                }
            }
        };
        let counting: Vec<_> = peers.iter().map(|peer| scope.spawn(move || count(peer))).collect();
        offer(|| {
            for client in &clients {
                client.socket.send_to(&datagram, client.server).unwrap();
            }
        });
        over.store(true, Ordering::Relaxed);
        counting.into_iter().map(|counting| counting.join().unwrap()).collect()
    });
    let (passed, most) = (((heard[0] + heard[1]) * PAYLOAD) as u64, allowed(started, burst_ms));
    assert!(passed <= most, "{passed} bytes passed, at most {most} allowed");
    assert!(heard[0] >= heard[1] / 2 && heard[1] >= heard[0] / 2, "{heard:?}");
    world.wait_whether("dropped_datagrams", "total_bandwidth", true);
}
