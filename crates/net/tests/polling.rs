//! epoll and the waker.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may fail, and says what it skips")]

mod common;

use std::time::{Duration, Instant};

use common::{Sender, V4, bind};
use turnpike_net::{
    Datapath, Rx, UdpOptions,
    poll::{Poller, Waker},
};

const LONG: Option<Duration> = Some(Duration::from_secs(10));
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
        assert!(!events[0].writable, "not asked for");
    }
    let mut rx = Rx::new(Datapath::Basic);
    assert_eq!(rx.recv(&socket).unwrap().count, 1);
    assert!(poller.wait(NOW).unwrap().is_empty());
}

#[test]
fn writability_is_told_where_asked_for() {
    let socket = bind(V4, &UdpOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add(&socket, 1).unwrap();
    poller.set_writable(&socket, 1, true).unwrap();
    assert!(poller.wait(LONG).unwrap()[0].writable);
    poller.set_writable(&socket, 1, false).unwrap();
    assert!(poller.wait(NOW).unwrap().is_empty());
}

#[test]
fn a_removed_socket_is_silent() {
    let socket = bind(V4, &UdpOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add(&socket, 1).unwrap();
    poller.set_writable(&socket, 1, true).unwrap();
    poller.remove(&socket).unwrap();
    assert!(poller.wait(NOW).unwrap().is_empty());
}

#[test]
fn a_wait_lasts_at_least_as_long_as_asked() {
    let mut poller = Poller::new().unwrap();
    for wait in [Duration::from_nanos(1), Duration::from_micros(1500), Duration::from_millis(5)] {
        let before = Instant::now();
        assert!(poller.wait(Some(wait)).unwrap().is_empty());
        assert!(before.elapsed() >= wait, "{wait:?}");
    }
}

#[test]
fn a_waker_wakes_from_another_thread_until_acknowledged() {
    let mut poller = Poller::new().unwrap();
    let waker = Waker::new(&poller, 7).unwrap();
    assert!(poller.wait(NOW).unwrap().is_empty());
    let remote = waker.clone();
    let thread = std::thread::spawn(move || {
        for _ in 0..1000 {
            remote.wake();
        }
    });
    let events = poller.wait(LONG).unwrap();
    assert_eq!((events.len(), events[0].token, events[0].readable), (1, 7, true));
    thread.join().unwrap();
    assert_eq!(poller.wait(LONG).unwrap().len(), 1, "level-triggered");
    waker.acknowledge();
    assert!(poller.wait(NOW).unwrap().is_empty());
    // Nothing to acknowledge must not block.
    waker.acknowledge();
    waker.wake();
    assert_eq!(poller.wait(LONG).unwrap().len(), 1);
}
