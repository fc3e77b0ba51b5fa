//! Thousands of idle connections cost little memory, and none of them is forgotten. One test alone: it counts the memory of
//! the whole process.

mod support;

use std::io::Write;

use support::{Running, accept, listener, read_exactly, rule};

/// Resident set in bytes, anonymous part.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn five_thousand_idle_connections_cost_less_than_a_kilobyte_each() {
    // A client's, a server's and two of the forwarder's for each.
    let limit = turnpike_net::limits::raise_open_files(4 * 5000 + 200).unwrap();
    let count = 5000.min(usize::try_from(limit - 200).unwrap() / 4);
    let (server, target) = listener();
    let running = Running::start(&[rule("r", target)]);
    let mut ends = Vec::with_capacity(count);
    let before = resident();
    for _ in 0..count {
        let client = running.connect("r");
        ends.push((client, accept(&server)));
    }
    // A first byte each way, as real ones have.
    for (client, server) in &mut ends {
        client.write_all(b"a").unwrap();
        assert_eq!(read_exactly(server, 1), b"a");
        server.write_all(b"b").unwrap();
        assert_eq!(read_exactly(client, 1), b"b");
    }
    let each = resident().saturating_sub(before) / count as u64;
    println!("{count} connections, {each} bytes of user memory each");
    assert!(each < 1024, "{each} bytes each");
    assert_eq!(running.forwarder.active(), count as u64);
    for (client, server) in ends.iter_mut().step_by(97) {
        client.write_all(b"again").unwrap();
        assert_eq!(read_exactly(server, 5), b"again");
    }
    drop(ends);
    running.log.wait(count);
    assert_eq!(running.forwarder.active(), 0);
}
