//! `copy = "kernel"`: the kernel forwards interactive connections, user space takes them back for bulk data,
//! and no byte is lost, however they end. The module `transfers` covers behaviour common to all copy modes.

use crate::prelude::*;

fn start(workers: usize, change: impl FnOnce(&mut Rule)) -> (Running, TcpListener) {
    let (server, target) = listener();
    let mut rule = Rule { copy: CopyMode::Kernel, ..rule("r", target) };
    change(&mut rule);
    (Running::start_with(&Settings { workers, ..settings() }, &[rule]), server)
}

fn open(running: &Running, server: &TcpListener) -> (TcpStream, TcpStream) {
    let client = running.connect("r");
    client.set_nodelay(true).unwrap();
    let server = accept(server);
    server.set_nodelay(true).unwrap();
    (client, server)
}

/// Exchanges a few short messages quickly, which is enough to count as interactive.
fn greet(client: &mut TcpStream, server: &mut TcpStream) -> u64 {
    for round in 0..20 {
        client.write_all(&pattern(round, 10, 1)).unwrap();
        assert_eq!(read_exactly(server, 10), pattern(round, 10, 1));
        server.write_all(&pattern(round, 10, 2)).unwrap();
        assert_eq!(read_exactly(client, 10), pattern(round, 10, 2));
    }
    200
}

fn transfer(mut from: TcpStream, to: &mut TcpStream, total: usize, seed: u64) {
    let writer = thread::spawn(move || {
        let mut at = 0;
        while at < total {
            let len = (at * 7 % 90_001 + 1).min(total - at);
            from.write_all(&pattern(at as u64, len, seed)).unwrap();
            at += len;
        }
    });
    let mut at = 0;
    let mut buffer = vec![0; 1 << 16];
    while at < total {
        let most = buffer.len().min(total - at);
        let got = to.read(&mut buffer[..most]).unwrap();
        assert!(got > 0, "the stream ended after {at} of {total} bytes");
        assert!(buffer[..got] == pattern(at as u64, got, seed), "bytes differ after offset {at}");
        at += got;
    }
    writer.join().unwrap();
}

fn booked(running: &Running) -> RuleSnapshot {
    running.snapshot("r")
}

/// Waits until this many bytes are counted, to the target and to the client.
fn counted(running: &Running, said: [u64; 2]) {
    eventually(&format!("{said:?} are counted"), || {
        [booked(running).to_target_bytes, booked(running).to_client_bytes] == said
    });
}

#[test]
fn kernel_forwards_interactive_traffic_with_exact_totals() {
    if !kernel_passes_on() {
        return;
    }
    let (running, server) = start(1, |_| {});
    let (mut client, mut server) = open(&running, &server);
    let said = chat(&running, "r", &mut client, &mut server);
    eventually("the first part is counted", || booked(&running).to_client_bytes == said);
    let before = booked(&running);
    for round in 0..500 {
        let len = 1 + round % 3000;
        client.write_all(&pattern(round as u64, len, 3)).unwrap();
        assert_eq!(read_exactly(&mut server, len), pattern(round as u64, len, 3));
        server.write_all(&pattern(round as u64, 2 * len, 4)).unwrap();
        assert_eq!(read_exactly(&mut client, 2 * len), pattern(round as u64, 2 * len, 4));
    }
    let more: u64 = (0..500).map(|round| 1 + round % 3000).sum();
    eventually("everything is counted", || booked(&running).to_client_bytes == said + 2 * more);
    let now = booked(&running);
    assert_eq!(now.to_target_bytes, said + more);
    let across = [0, 1].map(|way| now.kernel.bytes[way] - before.kernel.bytes[way]);
    assert_eq!(across, [more, 2 * more], "the kernel forwarded all messages");
    assert_eq!(now.spliced_bytes, now.kernel.bytes.iter().sum::<u64>());
    drop(client);
    assert_eq!(read_all(&mut server), b"");
    drop(server);
    let report = running.log.wait(1).remove(0);
    assert_eq!(report.reason, EndReason::Finished);
    assert_eq!((report.to_target, report.to_client), (said + more, said + 2 * more));
}

#[test]
fn bulk_returns_to_user_space_and_interactive_traffic_to_the_kernel() {
    if !kernel_passes_on() {
        return;
    }
    let (running, server) = start(1, |_| {});
    let (mut client, mut server) = open(&running, &server);
    let mut said = [0; 2];
    for round in 0..4 {
        let chatted = chat(&running, "r", &mut client, &mut server);
        said = said.map(|side| side + chatted);
        let total = 3 << 20;
        // On a busy machine, bulk data may arrive in small, late pieces that look interactive.
        let is_back = (0..10).any(|_| {
            let in_kernel = || booked(&running).kernel.bytes.iter().sum::<u64>();
            counted(&running, said);
            let before = in_kernel();
            if round % 2 == 0 {
                transfer(client.try_clone().unwrap(), &mut server, total, round);
                said[0] += total as u64;
            } else {
                transfer(server.try_clone().unwrap(), &mut client, total, round);
                said[1] += total as u64;
            }
            counted(&running, said);
            in_kernel() - before < total as u64 / 2
        });
        assert!(is_back, "bulk data stays in the kernel");
    }
}

/// The stalled side sends but does not read; a plain sockmap would accept any amount of data for it.
#[test]
fn data_for_a_stalled_reader_is_bounded_and_arrives_later() {
    if !kernel_passes_on() {
        return;
    }
    const MOST: usize = 256 << 20;
    let (running, server) = start(1, |_| {});
    let (mut client, mut server) = open(&running, &server);
    chat(&running, "r", &mut client, &mut server);
    client.set_nonblocking(true).unwrap();
    let (mut sent, mut refused, mut pings) = (0, 0, 0_u64);
    while refused < 200 && sent < MOST {
        match client.write(&pattern(sent as u64, 1400, 5)) {
            Ok(len) => (sent, refused) = (sent + len, 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                refused += 1;
                thread::sleep(Duration::from_millis(2));
            }
            Err(error) => panic!("{error}"),
        }
        // The server responds without reading, which makes the traffic look interactive.
        if sent % (1400 * 64) == 0 || refused > 0 {
            server.write_all(b"!").unwrap();
            pings += 1;
        }
    }
    assert!(sent < MOST, "the sender never blocked");
    client.set_nonblocking(false).unwrap();
    assert_eq!(read_exactly(&mut client, pings as usize), vec![b'!'; pings as usize]);
    client.shutdown(Shutdown::Write).unwrap();
    let heard = read_all(&mut server);
    assert_eq!(heard.len(), sent);
    assert!(heard == pattern(0, sent, 5));
}

#[test]
fn data_immediately_before_the_end_of_stream_arrives() {
    if !kernel_passes_on() {
        return;
    }
    let (running, listening) = start(2, |_| {});
    for number in 0..300_usize {
        let (mut client, mut server) = open(&running, &listening);
        greet(&mut client, &mut server);
        let (asks, answers) = (1 + number * 911 % 60_000, 1 + number * 577 % 60_000);
        client.write_all(&pattern(0, asks, 6)).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        if number % 3 == 0 {
            // The server responds without reading the request.
            server.write_all(&pattern(0, answers, 7)).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
            assert!(read_all(&mut server) == pattern(0, asks, 6), "{number}");
        } else {
            assert!(read_all(&mut server) == pattern(0, asks, 6), "{number}");
            server.write_all(&pattern(0, answers, 7)).unwrap();
            drop(server);
        }
        assert!(read_all(&mut client) == pattern(0, answers, 7), "{number}");
    }
    let reports = running.log.wait(300);
    assert!(reports.iter().all(|report| report.reason == EndReason::Finished), "{reports:?}");
    eventually("the last byte is counted", || booked(&running).active == 0);
    assert!(booked(&running).kernel.bytes.iter().all(|bytes| *bytes > 300 * 10), "{:?}", booked(&running));
}

#[test]
fn connections_that_alternate_interactive_and_bulk_lose_nothing() {
    if !kernel_passes_on() {
        return;
    }
    const CONNECTIONS: u64 = 24;
    let (running, listening) = start(2, |_| {});
    let pairs: Vec<_> = (0..CONNECTIONS).map(|_| open(&running, &listening)).collect();
    thread::scope(|scope| {
        for (number, (mut client, mut server)) in (0..CONNECTIONS).zip(pairs) {
            scope.spawn(move || {
                let mut random = 1 + number;
                let mut draw = move |below: u64| {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (random >> 33) % below
                };
                for step in 0..30 {
                    match draw(6) {
                        0 => transfer(
                            client.try_clone().unwrap(),
                            &mut server,
                            draw(700_000) as usize + 1,
                            step,
                        ),
                        1 => transfer(
                            server.try_clone().unwrap(),
                            &mut client,
                            draw(700_000) as usize + 1,
                            step,
                        ),
                        _ => _ = greet(&mut client, &mut server),
                    }
                }
                let last = pattern(0, draw(100_000) as usize, number);
                client.write_all(&last).unwrap();
                drop((number % 2 == 0).then(|| client.shutdown(Shutdown::Write)));
                if number % 2 == 0 {
                    assert!(read_all(&mut server) == last);
                } else {
                    assert!(read_exactly(&mut server, last.len()) == last);
                }
            });
        }
    });
    let reports = running.log.wait(CONNECTIONS as usize);
    assert!(reports.iter().all(|report| report.reason == EndReason::Finished), "{reports:?}");
    assert_eq!(running.forwarder.active(), 0);
}

#[test]
fn kernel_forwarded_connection_is_not_idle() {
    if !kernel_passes_on() {
        return;
    }
    let (running, server) = start(1, |rule| rule.idle = Some(Duration::from_secs(2)));
    let (mut client, mut server) = open(&running, &server);
    let said = chat(&running, "r", &mut client, &mut server);
    eventually("the first part is counted", || booked(&running).to_client_bytes == said);
    let before = booked(&running).kernel.bytes[0];
    for _ in 0..8 {
        thread::sleep(Duration::from_millis(500));
        client.write_all(b"?").unwrap();
        assert_eq!(read_exactly(&mut server, 1), b"?");
    }
    eventually("the kernel has forwarded the bytes", || booked(&running).kernel.bytes[0] == before + 8);
    assert!(running.log.all().is_empty());
    // Then the connection becomes idle, and both sides are reset.
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(server.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(running.log.wait(1)[0].reason, EndReason::Idle);
}

#[test]
fn one_side_may_end_while_the_other_continues() {
    if !kernel_passes_on() {
        return;
    }
    for client_first in [true, false] {
        let (running, server) = start(1, |_| {});
        let (mut client, mut server) = open(&running, &server);
        chat(&running, "r", &mut client, &mut server);
        let (mut ends, mut goes_on) = if client_first { (client, server) } else { (server, client) };
        ends.write_all(b"that is all").unwrap();
        ends.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&mut goes_on), b"that is all");
        transfer(goes_on.try_clone().unwrap(), &mut ends, 1 << 20, 8);
        drop(goes_on);
        assert_eq!(read_all(&mut ends), b"");
        assert_eq!(running.log.wait(1)[0].reason, EndReason::Finished);
    }
}

#[test]
fn reset_is_passed_on_immediately_to_a_stalled_side() {
    if !kernel_passes_on() {
        return;
    }
    let (running, server) = start(1, |_| {});
    let (mut client, mut server) = open(&running, &server);
    chat(&running, "r", &mut client, &mut server);
    client.set_nonblocking(true).unwrap();
    let (mut taken, mut refused) = (0, 0);
    while refused < 50 {
        match client.write(&[7; 1 << 14]) {
            Ok(more) => (taken, refused) = (taken + more, 0),
            Err(_) => {
                refused += 1;
                thread::sleep(Duration::from_millis(2));
            }
        }
    }
    reset(client);
    assert_eq!(running.log.wait(1)[0].reason, EndReason::ClientReset);
    assert!(taken > 0, "the first write failed");
    let error = loop {
        match server.read(&mut [0; 1 << 14]) {
            Ok(0) => panic!("the stream ended without a reset"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn rule_added_by_a_reload_uses_the_kernel_and_a_stop_resets_clients() {
    if !kernel_passes_on() {
        return;
    }
    let (server, target) = listener();
    let plain = rule("plain", target);
    let running = Running::start(std::slice::from_ref(&plain));
    let mut old = running.connect("plain");
    let mut of_old = accept(&server);
    greet(&mut old, &mut of_old);
    let new = Rule { copy: CopyMode::Kernel, ..rule("r", target) };
    running.forwarder.reload(&settings(), &[plain, new]).expect("the kernel supports this copy mode");
    let (mut client, mut server) = open(&running, &server);
    chat(&running, "r", &mut client, &mut server);
    greet(&mut old, &mut of_old);
    assert_eq!(running.snapshot("plain").kernel.bytes, [0, 0]);
    running.forwarder.stop();
    for stream in [&mut client, &mut server, &mut old, &mut of_old] {
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
