//! Poller, timer and waker.

use crate::prelude::*;
use std::time::Instant;

use crate::common::PATIENCE;

const BELL: u64 = 3;

const LONG: Option<Duration> = Some(PATIENCE);
const NOW: Option<Duration> = Some(Duration::ZERO);

#[test]
fn readiness_lasts_until_everything_is_read() {
    let socket = bind(V4, &UdpOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add(&socket, 42).unwrap();
    assert!(poller.wait(NOW).unwrap().is_empty());
    let mut sender = Sender::new(Datapath::Basic, V4, &UdpOptions::default());
    let route = sender.route(socket.local_addr());
    sender.tx.push_bytes(&route, b"one");
    sender.flush();
    for _ in 0..2 {
        let events = poller.wait(LONG).unwrap();
        assert_eq!(events.len(), 1);
        assert_eq!((events[0].token, events[0].readable, events[0].error), (42, true, false));
        assert!(!events[0].writable, "not requested");
    }
    let mut rx = Rx::new(Datapath::Basic);
    assert_eq!(rx.recv(&socket).unwrap().count, 1);
    assert!(poller.wait(NOW).unwrap().is_empty());
}

#[test]
fn writability_is_reported_only_on_request() {
    let socket = bind(V4, &UdpOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add(&socket, 1).unwrap();
    poller.set(&socket, 1, Interest::Level { read: true, write: true }).unwrap();
    assert!(poller.wait(LONG).unwrap()[0].writable);
    poller.set(&socket, 1, Interest::Level { read: true, write: false }).unwrap();
    assert!(poller.wait(NOW).unwrap().is_empty());
}

#[test]
fn removed_socket_raises_no_events() {
    let socket = bind(V4, &UdpOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add(&socket, 1).unwrap();
    poller.set(&socket, 1, Interest::Level { read: true, write: true }).unwrap();
    poller.remove(&socket).unwrap();
    assert!(poller.wait(NOW).unwrap().is_empty());
}

#[test]
fn wait_lasts_at_least_its_timeout() {
    let mut poller = Poller::new().unwrap();
    for wait in [Duration::from_nanos(1), Duration::from_micros(1500), Duration::from_millis(5)] {
        let before = Instant::now();
        assert!(poller.wait(Some(wait)).unwrap().is_empty());
        assert!(before.elapsed() >= wait, "{wait:?}");
    }
}

struct Bell {
    poller: Poller,
    near: UnixStream,
    far: UnixStream,
}

impl Bell {
    fn new() -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&far, BELL).unwrap();
        Self { poller, near, far }
    }

    fn ring(&mut self) {
        self.near.write_all(b"!").unwrap();
    }

    fn silence(&mut self) {
        self.far.read_exact(&mut [0]).unwrap();
    }
}

/// Milliseconds since `started`, as on a worker's clock.
fn since(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_millis()).unwrap()
}

/// Waits like a worker's loop until an event or the deadline. Returns the number of wake-ups.
fn wait_like_a_worker(poller: &mut Poller, started: Instant, due: u64) -> usize {
    let mut wake_ups = 0;
    while since(started) < due {
        assert!(started.elapsed() < PATIENCE, "the deadline has been missed");
        wake_ups += 1;
        if !poller.wait_until(since(started), Some(due), None).unwrap().is_empty() {
            break;
        }
    }
    wake_ups
}

#[test]
fn moving_deadlines_are_met() {
    let started = Instant::now();
    let mut bell = Bell::new();
    // Waits for a near deadline after a far one.
    let far = since(started) + 60_000;
    bell.ring();
    assert_eq!(bell.poller.wait_until(since(started), Some(far), None).unwrap()[0].token, BELL);
    bell.silence();
    for _ in 0..3 {
        let due = since(started) + 20;
        let wake_ups = wait_like_a_worker(&mut bell.poller, started, due);
        assert!(wake_ups <= 3, "woke up {wake_ups} times for one deadline");
        assert!(since(started) >= due);
    }
    // A deadline in the past causes no wait, and a later deadline survives an earlier one.
    assert!(bell.poller.wait_until(since(started), Some(0), None).unwrap().is_empty());
    let (near, later) = (since(started) + 10, since(started) + 30);
    wait_like_a_worker(&mut bell.poller, started, near);
    wait_like_a_worker(&mut bell.poller, started, later);
}

#[test]
fn submillisecond_wait_ends_and_keeps_the_deadline() {
    let started = Instant::now();
    let mut bell = Bell::new();
    let due = since(started) + 60_000;
    for at_most in [Duration::ZERO, Duration::from_micros(70)] {
        assert!(bell.poller.wait_until(since(started), Some(due), Some(at_most)).unwrap().is_empty());
    }
    // An event ends the wait, and a nearer deadline is met.
    bell.ring();
    assert_eq!(bell.poller.wait_until(since(started), Some(due), LONG).unwrap()[0].token, BELL);
    bell.silence();
    let due = since(started) + 20;
    while since(started) < due {
        assert!(bell.poller.wait_until(since(started), Some(due), LONG).unwrap().is_empty());
    }
    assert!(started.elapsed() < PATIENCE, "the deadline has been missed");
}

#[test]
fn wait_of_a_few_milliseconds_is_ended_by_the_timer() {
    let started = Instant::now();
    let mut bell = Bell::new();
    let due = since(started) + 60_000;
    let at_most = Duration::from_millis(5);
    for round in 0..3 {
        let (began, mut wake_ups) = (Instant::now(), 0);
        while began.elapsed() < at_most {
            assert!(bell.poller.wait_until(since(started), Some(due), Some(at_most)).unwrap().is_empty());
            wake_ups += 1;
        }
        assert!(began.elapsed() < PATIENCE, "round {round} lasted until the deadline");
        assert!(wake_ups <= 3, "round {round}: woke up {wake_ups} times");
    }
    // An event ends the wait early.
    bell.ring();
    assert_eq!(bell.poller.wait_until(since(started), Some(due), LONG).unwrap()[0].token, BELL);
}

#[test]
fn busy_polling_returns_the_same_events_and_then_sleeps() {
    let socket = bind(V4, &UdpOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.busy_poll = Duration::from_micros(200);
    poller.add(&socket, 42).unwrap();
    let mut sender = Sender::new(Datapath::Basic, V4, &UdpOptions::default());
    let route = sender.route(socket.local_addr());
    let mut rx = Rx::new(Datapath::Basic);
    let started = Instant::now();
    for _ in 0..20 {
        sender.tx.push_bytes(&route, b"one");
        sender.flush();
        let events = poller.wait_until(since(started), Some(since(started) + 10_000), None).unwrap();
        assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [42]);
        assert_eq!(rx.recv(&socket).unwrap().count, 1);
    }
    let due = since(started) + 20;
    assert!(wait_like_a_worker(&mut poller, started, due) <= 3, "the poller did not sleep");
}
