//! Checks that bandwidth limits per rule and per connection are not exceeded over the measured time, for TCP
//! and UDP. On a busy machine the tests take longer, and more bytes are allowed accordingly. Unit tests cover
//! the lower bound.

use crate::prelude::*;

const RATE: u64 = 400_000;
/// A tenth of a second's bytes may pass at once.
const BURST: u64 = RATE / 10;

fn limits(rule: Option<u64>, connection: Option<u64>) -> Limits {
    Limits {
        max_bytes_per_second: rule,
        max_bytes_per_second_per_connection: connection,
        ..Limits::default()
    }
}

fn flood(mut stream: TcpStream, stop: &Arc<AtomicBool>) {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        let bytes = [7; 1 << 16];
        while !stop.load(Ordering::SeqCst) && stream.write_all(&bytes).is_ok() {}
    });
}

fn count(mut stream: TcpStream) -> Arc<AtomicU64> {
    let counter = Arc::new(AtomicU64::new(0));
    let own = Arc::clone(&counter);
    std::thread::spawn(move || {
        let mut bytes = [0; 1 << 16];
        while let Ok(n @ 1..) = stream.read(&mut bytes) {
            own.fetch_add(n as u64, Ordering::SeqCst);
        }
    });
    counter
}

fn now(counters: &[Arc<AtomicU64>]) -> Vec<u64> {
    counters.iter().map(|counter| counter.load(Ordering::SeqCst)).collect()
}

/// Waits until each counter has reached three bursts; returns the counters and the time since `began`.
fn moved(counters: &[Arc<AtomicU64>], began: Instant) -> (Vec<u64>, Duration) {
    let all = eventually("three bursts have passed", || {
        Some(now(counters)).filter(|all| all.iter().all(|one| *one >= 3 * BURST))
    });
    (all, began.elapsed())
}

fn within(gained: u64, elapsed: Duration, what: &str) {
    // The forwarder's clock counts whole milliseconds, so it can be up to a millisecond ahead.
    let most = (RATE as f64 * (elapsed.as_secs_f64() + 0.001)) as u64 + BURST;
    assert!(gained <= most, "{what}: {gained} bytes in {elapsed:?}, at most {most}");
}

#[test]
fn connection_rate_applies_per_direction_in_every_copy_mode() {
    for copy in [CopyMode::Auto, CopyMode::Splice, CopyMode::Buffer] {
        let (server, target) = listener();
        let running = Running::start(&[Rule { limits: limits(None, Some(RATE)), copy, ..rule("r", target) }]);
        let began = Instant::now();
        let client = running.connect("r");
        let stop = Arc::new(AtomicBool::new(false));
        flood(client.try_clone().unwrap(), &stop);
        let server = accept(&server);
        flood(server.try_clone().unwrap(), &stop);
        let counters = [count(server), count(client)];
        let (gained, elapsed) = moved(&counters, began);
        within(gained[0], elapsed, "to the target");
        within(gained[1], elapsed, "to the client");
        eventually("pauses are counted", || running.snapshot("r").pauses > 0);
        stop.store(true, Ordering::SeqCst);
    }
}

#[test]
fn connections_share_the_rate_of_a_rule_evenly_over_all_workers() {
    let (server, target) = listener();
    let mut settings = support::settings();
    settings.workers = 2;
    let limited = Rule { limits: limits(Some(RATE), None), ..rule("r", target) };
    let running = Running::start_with(&settings, &[limited]);
    let stop = Arc::new(AtomicBool::new(false));
    let mut counters = Vec::new();
    let began = Instant::now();
    for _ in 0..5 {
        flood(running.connect("r"), &stop);
        counters.push(count(accept(&server)));
    }
    let (gained, elapsed) = moved(&counters, began);
    within(gained.iter().sum(), elapsed, "all together");
    assert!(gained.iter().all(|one| *one <= 12 * BURST), "shares are uneven: {gained:?}");
    stop.store(true, Ordering::SeqCst);
}

/// All data and the end of stream arrive, even if the transfer is many times larger than a burst.
#[test]
fn rate_limited_transfer_arrives_complete() {
    let (server, target) = listener();
    let running =
        Running::start(&[Rule { limits: limits(Some(2_000_000), Some(1_000_000)), ..rule("r", target) }]);
    let mut client = running.connect("r");
    let sent = support::pattern(0, 700_000, 5);
    let writer = {
        let (mut client, sent) = (client.try_clone().unwrap(), sent.clone());
        std::thread::spawn(move || {
            client.write_all(&sent).unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
        })
    };
    let mut server = accept(&server);
    assert!(support::read_all(&mut server) == sent, "not all bytes arrived in order");
    server.write_all(b"done").unwrap();
    assert_eq!(read_exactly(&mut client, 4), b"done");
    writer.join().unwrap();
}

#[test]
fn reset_of_waiting_connections_does_not_block_others() {
    let (server, target) = listener();
    let running = Running::start(&[Rule { limits: limits(Some(100_000), None), ..rule("r", target) }]);
    let mut kept = Vec::new();
    for _ in 0..30 {
        let mut client = running.connect("r");
        client.set_nonblocking(true).unwrap();
        let _ = client.write(&[1; 60_000]);
        kept.push((client, accept(&server)));
    }
    eventually("ten pauses are counted", || running.snapshot("r").pauses >= 10);
    for (client, _server) in kept {
        support::reset(client);
    }
    let mut client = running.connect("r");
    client.write_all(b"hello").unwrap();
    let mut server = accept(&server);
    assert_eq!(read_exactly(&mut server, 5), b"hello");
}

#[test]
fn datagrams_beyond_the_rate_are_dropped_and_counted() {
    for limits in [limits(Some(RATE), None), limits(None, Some(RATE))] {
        let sink = UdpSocket::bind("127.0.0.1:0").unwrap();
        let limited = Rule { protocol: Protocol::Udp, limits, ..rule("r", sink.local_addr().unwrap()) };
        let running = Running::start(&[limited]);
        let arrived = Arc::new(AtomicU64::new(0));
        let own = Arc::clone(&arrived);
        std::thread::spawn(move || {
            let mut bytes = [0; 2000];
            while let Ok(n) = sink.recv(&mut bytes) {
                own.fetch_add(n as u64, Ordering::SeqCst);
            }
        });
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(running.address("r")).unwrap();
        let (began, sent) = (Instant::now(), 10 * BURST / 1000);
        for number in 1..=sent {
            client.send(&[0; 1000]).unwrap();
            // Wait for the counters, so that no datagram is lost before it is counted.
            eventually("each datagram is counted once", || {
                let snapshot = running.snapshot("r");
                number % 100 != 0 || snapshot.limited_datagrams + snapshot.to_target_datagrams == number
            });
        }
        let elapsed = began.elapsed();
        assert!(running.snapshot("r").limited_datagrams > 0);
        eventually("the admitted datagrams arrive", || {
            arrived.load(Ordering::SeqCst) == running.snapshot("r").to_target_datagrams * 1000
        });
        within(arrived.load(Ordering::SeqCst), elapsed, "datagrams");
    }
}
