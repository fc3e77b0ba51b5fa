//! Memory that a connection takes. A program of its own: other tests would be seen in what it measures.
#![allow(clippy::unwrap_used, reason = "clippy.toml excuses test functions, not their helpers")]

mod support;

use std::{
    io::{ErrorKind, Write},
    time::{Duration, Instant},
};

use support::*;
use turnpike_relay::CloseReason;

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_client_that_never_reads_its_replies_is_closed_and_costs_no_memory() {
    let world = start(|_| {});
    let mut others = world.client();
    others.ask(&allocate());
    let before = resident_kib();
    let mut client = world.client();
    let requests: Vec<u8> = (0..=255).flat_map(binding).collect();
    client.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let deadline = Instant::now() + SOON;
    while world.streams().closed(CloseReason::RepliesUnread) == 0 {
        assert!(Instant::now() < deadline, "{:?}", world.streams());
        match client.stream.write(&requests) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => break,
            Err(error) => panic!("{error}"),
        }
    }
    world.wait_for_closed(CloseReason::RepliesUnread, 1);
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB for one client that does not read");
    others.ask(&refresh(1));
}
