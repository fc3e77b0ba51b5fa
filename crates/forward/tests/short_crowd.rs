//! Ten thousand short connections: each byte arrives, none is lost, and memory and descriptors come back. One test alone: it
//! counts those of the whole process.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

mod support;

use std::{
    io::Write,
    net::{SocketAddr, TcpListener},
    thread,
};

use support::{Running, accept, pattern, read_all, read_exactly, rule, until};
use turnpike_forward::{CopyMode, EndReason};

const CLIENTS: usize = 4;

/// Answers each connection with what it sent, sixteen times over, and closes.
fn serve(listener: &TcpListener, count: usize) {
    for _ in 0..count {
        let mut stream = accept(listener);
        let len = usize::from(read_exactly(&mut stream, 1)[0]) + 1;
        let asked = read_exactly(&mut stream, len);
        stream.write_all(&asked.repeat(16)).unwrap();
    }
}

fn connect_and_check(address: SocketAddr, number: u64) {
    let len = number as usize % 200 + 1;
    let asked = pattern(number * 1000, len, 77);
    let mut client = support::client(address);
    client.write_all(&[&[len as u8 - 1][..], &asked].concat()).unwrap();
    assert!(read_all(&mut client) == asked.repeat(16), "connection {number}");
}

fn run(running: &Running, listener: &TcpListener, address: SocketAddr, count: usize) {
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(move || serve(listener, count / CLIENTS));
        }
        for client in 0..CLIENTS {
            scope.spawn(move || {
                (0..count / CLIENTS)
                    .for_each(|number| connect_and_check(address, (number * CLIENTS + client) as u64));
            });
        }
    });
    until(|| (running.forwarder.active() == 0).then_some(()), "the last connection to end");
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident set in KiB, anonymous part.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn ten_thousand_short_connections_are_whole_and_leave_nothing_behind() {
    let (listener, target) = support::listener();
    let rules = [CopyMode::Auto, CopyMode::Splice].map(|copy| {
        let mut rule = rule(&format!("{copy:?}"), target);
        rule.copy = copy;
        rule
    });
    let running = Running::start(&rules);
    let (auto, splice) = (running.address("Auto"), running.address("Splice"));
    // Pipes are pooled and tables grow: what the first ones need is no leak.
    run(&running, &listener, auto, 400);
    run(&running, &listener, splice, 400);
    let (descriptors_before, resident_before) = (descriptors(), resident());

    run(&running, &listener, auto, 8000);
    run(&running, &listener, splice, 2000);

    let grown = resident().saturating_sub(resident_before);
    let reports = running.log.wait(10_800);
    assert_eq!(reports.len(), 10_800);
    for report in &reports {
        assert_eq!(report.reason, EndReason::Finished, "{report:?}");
        assert_eq!(report.to_client, (report.to_target - 1) * 16, "{report:?}");
    }
    println!("{grown} KiB more, {descriptors_before} descriptors before, {} after", descriptors());
    assert!(descriptors() <= descriptors_before, "{} after {descriptors_before}", descriptors());
    // The reports that this test keeps are some 200 bytes each.
    assert!(grown < 3 << 10, "{grown} KiB");
}
