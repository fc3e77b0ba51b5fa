//! Transfers in every copy mode between slow and fast endpoints: every byte, FIN and RST arrives.

use crate::prelude::*;
use crate::support::copy_modes;

/// A forwarder, a client and the server's end of its connection.
struct Pair {
    running: Running,
    client: TcpStream,
    server: TcpStream,
    /// Bytes sent in each direction before the test begins, so that the kernel forwards the rest.
    said: u64,
}

fn pair(copy: CopyMode) -> Pair {
    let (server, target) = listener();
    let mut rule = rule("r", target);
    rule.copy = copy;
    let running = Running::start(&[rule]);
    let mut client = running.connect("r");
    let mut server = accept(&server);
    let said = if copy == CopyMode::Kernel { chat(&running, "r", &mut client, &mut server) } else { 0 };
    Pair { running, client, server, said }
}

/// Sends `total` bytes of a pattern in pieces of varying size.
fn send(mut to: TcpStream, total: usize, seed: u64, slow: bool) {
    let mut at = 0;
    let mut piece = 1;
    while at < total {
        let len = piece.min(total - at);
        to.write_all(&pattern(at as u64, len, seed)).unwrap();
        at += len;
        piece = piece * 3 % 300_007 + 1;
        if slow {
            thread::sleep(Duration::from_micros(300));
        }
    }
    to.shutdown(Shutdown::Write).unwrap();
}

/// Receives until the end and checks each byte.
fn receive(mut from: TcpStream, total: usize, seed: u64, slow: bool) {
    let mut at = 0;
    let mut buffer = vec![0; if slow { 7001 } else { 1 << 17 }];
    loop {
        let got = from.read(&mut buffer).unwrap();
        if got == 0 {
            break;
        }
        assert!(buffer[..got] == pattern(at as u64, got, seed), "bytes differ after offset {at}");
        at += got;
        if slow {
            thread::sleep(Duration::from_micros(100));
        }
    }
    assert_eq!(at, total);
}

fn both_ways(copy: CopyMode, slow_send: bool, slow_receive: bool) {
    let total = 12 << 20;
    let Pair { running, client, server, said } = pair(copy);
    let ends = [(&client, 1), (&server, 2)].map(|(stream, seed)| {
        let stream = stream.try_clone().unwrap();
        thread::spawn(move || send(stream, total, seed, slow_send))
    });
    let reader = {
        let server = server.try_clone().unwrap();
        thread::spawn(move || receive(server, total, 1, slow_receive))
    };
    receive(client, total, 2, slow_receive);
    reader.join().unwrap();
    ends.into_iter().for_each(|end| end.join().unwrap());
    drop(server);
    let report = running.log.wait(1).remove(0);
    assert_eq!(report.reason, EndReason::Finished);
    let all = total as u64 + said;
    assert_eq!((report.to_target, report.to_client), (all, all), "{copy:?}");
    // The counters are published together with the end of the connection.
    eventually("it is closed", || running.snapshot("r").active == 0 && running.snapshot("r").accepted == 1);
    assert_eq!(running.snapshot("r").to_client_bytes, all);
    let spliced = running.snapshot("r").spliced_bytes;
    match copy {
        CopyMode::Buffer => assert_eq!(spliced, 0),
        CopyMode::Splice => assert_eq!(spliced, 2 * total as u64),
        CopyMode::Auto => {}
        CopyMode::Kernel => assert!(spliced > 0 && spliced < 2 * all, "{spliced} of {all}"),
    }
    assert_eq!(running.forwarder.active(), 0);
}

#[test]
fn every_byte_arrives_in_both_directions_at_full_speed() {
    copy_modes().into_iter().for_each(|mode| both_ways(mode, false, false));
}

#[test]
fn every_byte_arrives_at_a_slow_reader() {
    copy_modes().into_iter().for_each(|mode| both_ways(mode, false, true));
}

#[test]
fn every_byte_arrives_from_a_slow_writer() {
    copy_modes().into_iter().for_each(|mode| both_ways(mode, true, false));
}

#[test]
fn auto_splices_bulk_and_buffers_interactive_traffic() {
    let Pair { running, mut client, mut server, .. } = pair(CopyMode::Auto);
    for round in 0..200 {
        client.write_all(&pattern(round, 32, 0)).unwrap();
        assert_eq!(read_exactly(&mut server, 32), pattern(round, 32, 0));
        server.write_all(&pattern(round, 32, 7)).unwrap();
        assert_eq!(read_exactly(&mut client, 32), pattern(round, 32, 7));
    }
    eventually("all bytes are counted", || running.snapshot("r").to_client_bytes == 6400);
    assert_eq!(running.snapshot("r").spliced_bytes, 0);
    // The reader waits until all buffers are full, so that the forwarder's reads are large.
    let total = 64 << 20;
    let writer = {
        let client = client.try_clone().unwrap();
        thread::spawn(move || send(client, total, 3, false))
    };
    receive(server, total, 3, false);
    writer.join().unwrap();
    eventually("all bytes are counted", || running.snapshot("r").to_target_bytes == 6400 + total as u64);
    // The spliced share depends on the scheduler: if the reader keeps up, reads are small and use the buffer.
    assert!(running.snapshot("r").spliced_bytes > total as u64 / 64, "{:?}", running.snapshot("r"));
}

/// If a lot of data arrives at once, the last part is moved in a turn without an event.
#[test]
fn last_bytes_are_counted_without_another_event() {
    for copy in copy_modes() {
        let Pair { running, client, mut server, said } = pair(copy);
        let total = 3 << 20;
        for round in 1..=20 {
            // After this much time without counting, the first part is counted immediately and the rest
            // later.
            thread::sleep(Duration::from_millis(110));
            let mut to = client.try_clone().unwrap();
            let sender = thread::spawn(move || to.write_all(&pattern(0, total, round)).unwrap());
            assert!(read_exactly(&mut server, total) == pattern(0, total, round), "{copy:?}");
            sender.join().unwrap();
            eventually("everything is counted", || {
                running.snapshot("r").to_target_bytes == said + round * total as u64
            });
        }
    }
}

#[test]
fn half_closed_client_receives_the_answer() {
    for mode in copy_modes() {
        let Pair { running, mut client, mut server, .. } = pair(mode);
        client.write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&mut server), b"question");
        server.write_all(&pattern(0, 3 << 20, 5)).unwrap();
        drop(server);
        assert!(read_all(&mut client) == pattern(0, 3 << 20, 5));
        assert_eq!(running.log.wait(1)[0].reason, EndReason::Finished);
    }
}

#[test]
fn half_closed_server_receives_more_data() {
    for mode in copy_modes() {
        let Pair { running, mut client, mut server, .. } = pair(mode);
        server.write_all(b"go on").unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&mut client), b"go on");
        client.write_all(&pattern(0, 3 << 20, 6)).unwrap_or_default();
        drop(client);
        assert!(read_all(&mut server) == pattern(0, 3 << 20, 6));
        drop(server);
        assert_eq!(running.log.wait(1)[0].reason, EndReason::Finished);
    }
}

#[test]
fn end_of_stream_without_data_is_passed_on() {
    let Pair { running, client, mut server, .. } = pair(CopyMode::Auto);
    drop(client);
    assert_eq!(read_all(&mut server), b"");
    drop(server);
    let report = running.log.wait(1).remove(0);
    assert_eq!((report.reason, report.to_target, report.to_client), (EndReason::Finished, 0, 0));
}

#[test]
fn reset_by_the_client_resets_the_server() {
    for mode in copy_modes() {
        let Pair { running, mut client, mut server, .. } = pair(mode);
        client.write_all(b"x").unwrap();
        read_exactly(&mut server, 1);
        reset(client);
        assert_eq!(server.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(running.log.wait(1)[0].reason, EndReason::ClientReset);
    }
}

#[test]
fn reset_by_the_server_resets_the_client() {
    for mode in copy_modes() {
        let Pair { running, mut client, mut server, .. } = pair(mode);
        client.write_all(b"x").unwrap();
        read_exactly(&mut server, 1);
        reset(server);
        assert_eq!(client.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(running.log.wait(1)[0].reason, EndReason::TargetReset);
    }
}

#[test]
fn data_before_a_reset_by_the_server_arrives() {
    for mode in copy_modes() {
        let Pair { running, mut client, mut server, .. } = pair(mode);
        server.write_all(b"too large").unwrap();
        assert_eq!(read_exactly(&mut client, 9), b"too large");
        server.write_all(b", sorry").unwrap();
        reset(server);
        assert_eq!(read_exactly(&mut client, 7), b", sorry");
        assert_eq!(client.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(running.log.wait(1)[0].reason, EndReason::TargetReset);
    }
}

#[test]
fn reset_ends_both_sides_while_buffers_are_full() {
    for mode in copy_modes() {
        for by_reader in [false, true] {
            let Pair { running, client, server, .. } = pair(mode);
            // Without a reader all buffers fill up.
            client.set_nonblocking(true).unwrap();
            let mut writer = &client;
            let chunk = pattern(0, 1 << 16, 0);
            let mut quiet = 0;
            while quiet < 20 {
                match writer.write(&chunk) {
                    Ok(1..) => quiet = 0,
                    _ => {
                        quiet += 1;
                        thread::sleep(Duration::from_millis(5));
                    }
                }
            }
            client.set_nonblocking(false).unwrap();
            let (gone, mut stays, reason) = if by_reader {
                (server, client, EndReason::TargetReset)
            } else {
                (client, server, EndReason::ClientReset)
            };
            reset(gone);
            assert_eq!(running.log.wait(1)[0].reason, reason, "{mode:?}");
            let mut rest = vec![0; 1 << 16];
            let error = loop {
                match stays.read(&mut rest) {
                    Ok(0) => panic!("the stream ended without a reset"),
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{mode:?}");
        }
    }
}

#[test]
fn reset_after_fin_is_detected() {
    // FIN, then RST: when the RST arrives, that side has nothing left to read.
    let Pair { running, client, mut server, .. } = pair(CopyMode::Auto);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut server), b"");
    reset(client);
    assert_eq!(running.log.wait(1)[0].reason, EndReason::ClientReset);
    let gone = eventually("the reset arrives", || server.write(b"x").err());
    assert!(matches!(gone.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{gone}");
}

#[test]
fn urgent_byte_stays_in_the_stream() {
    for mode in copy_modes() {
        let Pair { running: _running, mut client, mut server, .. } = pair(mode);
        client.write_all(b"abc").unwrap();
        socket2::SockRef::from(&client).send_out_of_band(b"!").unwrap();
        client.write_all(b"def").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&mut server), b"abc!def", "{mode:?}");
    }
}
