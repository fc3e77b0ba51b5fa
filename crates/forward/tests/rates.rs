//! Bytes a second: how many arrive in a while, of a rule and of each connection, TCP and UDP. Bounds are generous, as the machine
//! may be busy; what must hold is that no more arrives than the rate allows, and not much less.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

mod support;

use std::{
    io::{Read, Write},
    net::{TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use support::{Running, accept, listener, read_exactly, rule, until};
use turnpike_forward::{CopyMode, Limits, Protocol, Rule};

const RATE: u64 = 400_000;
/// A tenth of a second's worth may come at once.
const BURST: u64 = RATE / 10;

fn limits(rule: Option<u64>, connection: Option<u64>) -> Limits {
    Limits { bytes_per_second: rule, bytes_per_second_per_connection: connection, ..Limits::default() }
}

/// Writes what the other side takes until `stop`.
fn flood(mut stream: TcpStream, stop: &Arc<AtomicBool>) {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        let bytes = [7; 1 << 16];
        while !stop.load(Ordering::SeqCst) && stream.write_all(&bytes).is_ok() {}
    });
}

/// Counts what comes.
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

/// What the counters gain from now until a second has passed, and how long that really was.
fn window(counters: &[Arc<AtomicU64>]) -> (Vec<u64>, Duration) {
    let (before, began) = (now(counters), Instant::now());
    until(|| (began.elapsed() >= Duration::from_secs(1)).then_some(()), "a second");
    let gained = now(counters).iter().zip(before).map(|(after, before)| after - before).collect();
    (gained, began.elapsed())
}

fn within(gained: u64, elapsed: Duration, what: &str) {
    let most = (RATE as f64 * elapsed.as_secs_f64()) as u64 + BURST;
    assert!((RATE / 2..=most).contains(&gained), "{what}: {gained} bytes in {elapsed:?}, at most {most}");
}

#[test]
fn a_connection_moves_its_bytes_a_second_each_way_whatever_moves_them() {
    for copy in [CopyMode::Auto, CopyMode::Splice, CopyMode::Buffer] {
        let (server, target) = listener();
        let running = Running::start(&[Rule { limits: limits(None, Some(RATE)), copy, ..rule("r", target) }]);
        let client = running.connect("r");
        let stop = Arc::new(AtomicBool::new(false));
        flood(client.try_clone().unwrap(), &stop);
        let server = accept(&server);
        flood(server.try_clone().unwrap(), &stop);
        let counters = [count(server), count(client)];
        until(|| now(&counters).iter().all(|bytes| *bytes > BURST).then_some(()), "both ways to begin");
        let (gained, elapsed) = window(&counters);
        within(gained[0], elapsed, "to the target");
        within(gained[1], elapsed, "to the client");
        until(|| (running.snapshot("r").pauses > 0).then_some(()), "the counter of pauses");
        stop.store(true, Ordering::SeqCst);
    }
}

#[test]
fn connections_of_a_rule_share_its_rate_evenly_over_all_workers() {
    let (server, target) = listener();
    let mut settings = support::settings();
    settings.workers = 2;
    let limited = Rule { limits: limits(Some(RATE), None), ..rule("r", target) };
    let running = Running::start_with(&settings, &[limited]);
    let stop = Arc::new(AtomicBool::new(false));
    let mut counters = Vec::new();
    for _ in 0..5 {
        flood(running.connect("r"), &stop);
        counters.push(count(accept(&server)));
    }
    until(|| now(&counters).iter().all(|bytes| *bytes > 0).then_some(()), "all to begin");
    let (gained, elapsed) = window(&counters);
    within(gained.iter().sum(), elapsed, "all together");
    let fair = gained.iter().sum::<u64>() / 5;
    assert!(gained.iter().all(|one| (fair / 4..=fair * 3).contains(one)), "{gained:?}");
    stop.store(true, Ordering::SeqCst);
}

/// All of it arrives, and the end after it, though far more than a burst.
#[test]
fn what_a_rate_slows_down_arrives_whole_and_ends() {
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
    assert!(support::read_all(&mut server) == sent, "every byte in order");
    server.write_all(b"done").unwrap();
    assert_eq!(read_exactly(&mut client, 4), b"done");
    writer.join().unwrap();
}

/// A hundred connections that come and go while they wait leave nobody waiting for ever.
#[test]
fn connections_that_are_reset_while_they_wait_do_not_hold_up_others() {
    let (server, target) = listener();
    let running = Running::start(&[Rule { limits: limits(Some(100_000), None), ..rule("r", target) }]);
    let mut kept = Vec::new();
    for _ in 0..30 {
        let mut client = running.connect("r");
        client.set_nonblocking(true).unwrap();
        let _ = client.write(&[1; 60_000]);
        kept.push((client, accept(&server)));
    }
    until(|| (running.snapshot("r").pauses >= 10).then_some(()), "connections that wait");
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
        let began = Instant::now();
        let mut sent = 0_u64;
        // Four times the rate, a little at a time.
        while began.elapsed() < Duration::from_secs(1) {
            let due = (began.elapsed().as_secs_f64() * 4.0 * RATE as f64) as u64;
            while sent < due {
                client.send(&[0; 1000]).unwrap();
                sent += 1000;
            }
            std::thread::yield_now();
        }
        let elapsed = began.elapsed();
        until(
            || {
                let snapshot = running.snapshot("r");
                let dropped = snapshot.limited_datagrams;
                (dropped > 0 && dropped + snapshot.to_target_datagrams == sent / 1000).then_some(())
            },
            "each datagram to be counted once",
        );
        within(arrived.load(Ordering::SeqCst), elapsed, "datagrams");
    }
}
