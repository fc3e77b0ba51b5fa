//! Datagrams without TURN: losses are counted exactly.

use std::{
    collections::VecDeque,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use crate::common::{free_address, loopback, reflector};
use turnpike_load::{
    HEADER_LEN, LoadError, StopHandle,
    options::parse,
    udp::{UdpLoadConfig, run},
};

fn load(server: SocketAddr, flags: &str) -> UdpLoadConfig {
    parse(&format!("{server} --rate 2000 --warmup 0.2 --duration 1 {flags}")).unwrap()
}

#[test]
fn every_datagram_comes_back() {
    let reflector = reflector();
    for (clients, burst, size) in [(1, 1, 120), (8, 4, HEADER_LEN), (3, 16, 1_200)] {
        let config =
            load(reflector.listeners()[0], &format!("--clients {clients} --burst {burst} --size {size}"));
        let report = run(&config, &StopHandle::default(), |_| {}).unwrap().report;
        assert!((1..=2_100).contains(&report.sent), "{report:?}");
        assert_eq!((report.lost, report.duplicated, report.received), (0, 0, report.sent), "{report:?}");
        assert!(report.errors.is_empty() && report.rtt_us.p50 > 0, "{report:?}");
    }
}

#[test]
fn dropped_and_duplicated_datagrams_are_counted_exactly() {
    let socket = UdpSocket::bind(loopback(0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let server = socket.local_addr().unwrap();
    let (stop, swallowed, doubled) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let report = thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 2_048];
            let mut count = 0_u64;
            while !stop.load(SeqCst) {
                let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
                // The first datagram is the setup probe.
                count += 1;
                if count > 1 && count.is_multiple_of(10) {
                    swallowed.fetch_add(1, SeqCst);
                    continue;
                }
                socket.send_to(&buffer[..len], from).unwrap();
                if count > 1 && count % 10 == 5 {
                    doubled.fetch_add(1, SeqCst);
                    socket.send_to(&buffer[..len], from).unwrap();
                }
            }
        });
        let config = load(server, "--warmup 0 --max-loss 5");
        let outcome = run(&config, &StopHandle::default(), |_| {}).unwrap();
        stop.store(true, SeqCst);
        assert_eq!(outcome.exceeded.len(), 1, "{outcome:?}");
        outcome.report
    });
    assert!(report.sent > 0, "{report:?}");
    assert_eq!(report.lost, swallowed.load(SeqCst), "{report:?}");
    // The last copy may be in flight when the run ends.
    let doubled = doubled.load(SeqCst);
    assert!((doubled - 1..=doubled).contains(&report.duplicated), "{doubled}: {report:?}");
    assert_eq!(report.sent, report.received + report.lost);
}

/// The delay is longer than the publishing interval, so packets are in flight in each interval.
#[test]
fn progress_does_not_count_replies_in_flight_as_lost() {
    const DELAY: Duration = Duration::from_millis(500);
    let socket = UdpSocket::bind(loopback(0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let server = socket.local_addr().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut buffer, mut held) = ([0; 2_048], VecDeque::new());
            while !stop.load(SeqCst) {
                if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    held.push_back((Instant::now() + DELAY, buffer[..len].to_vec(), from));
                }
                while held.front().is_some_and(|(at, ..)| *at <= Instant::now()) {
                    let (_, datagram, from) = held.pop_front().unwrap();
                    socket.send_to(&datagram, from).unwrap();
                }
            }
        });
        let config = load(server, "--rate 200 --duration 3");
        let mut intervals = Vec::new();
        let report =
            run(&config, &StopHandle::default(), |interval| intervals.push(interval.clone())).unwrap().report;
        stop.store(true, SeqCst);
        assert!(intervals.iter().any(|interval| interval.received > 0), "{intervals:?}");
        assert!(intervals.iter().all(|interval| interval.lost == 0), "{intervals:?}");
        assert_eq!(report.lost, 0, "{report:?}");
    });
}

#[test]
fn a_missing_reflector_is_reported_with_its_address() {
    let closed = free_address();
    let error = run(&load(closed, ""), &StopHandle::default(), |_| {}).unwrap_err();
    assert!(matches!(error, LoadError::NoReflector { .. }), "{error:?}");
    assert!(error.to_string().contains(&closed.to_string()), "{error}");

    let silent = UdpSocket::bind(loopback(0)).unwrap();
    let server = silent.local_addr().unwrap();
    let config = UdpLoadConfig { setup_timeout: Duration::from_millis(300), ..load(server, "") };
    let error = run(&config, &StopHandle::default(), |_| {}).unwrap_err();
    assert!(matches!(error, LoadError::NoReflection { ready: 0, .. }), "{error:?}");
    assert!(error.to_string().contains(&server.to_string()), "{error}");
}

#[test]
fn a_vanished_reflector_counts_as_loss_and_port_unreachable() {
    let mut reflector = Some(reflector());
    let config = load(reflector.as_ref().unwrap().listeners()[0], "--duration 3");
    let outcome = run(&config, &StopHandle::default(), |interval| {
        if interval.received > 0 {
            drop(reflector.take());
        }
    });
    let report = outcome.unwrap().report;
    assert!(report.lost > 1_000 && report.received > 0, "{report:?}");
    assert!(report.errors["port_unreachable"] > 0, "{report:?}");
}
