//! TCP generators against the reflector: byte-exact transfer, exact counts and clear errors.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use crate::common::{eventually, free_address, loopback};
use turnpike_load::{
    LoadError, RunOutcome, StopHandle,
    options::parse,
    reflect::{self, Reflector},
    stream::{Close, StreamLoadConfig, Workload, run},
};
use turnpike_testkit::process::Thread;

fn reflector(workers: u16) -> Reflector {
    let config = reflect::ReflectConfig {
        tcp: vec![loopback(0)],
        workers: Some(workers),
        ..reflect::ReflectConfig::default()
    };
    Reflector::start(&config).unwrap()
}

/// A short run, since tests share the machine. `flags` are the workload's flags, then optionally `|` and
/// flags of the run, which override the defaults below.
fn load(server: SocketAddr, (kind, flags): (Work, &str)) -> StreamLoadConfig {
    let (own, run) = flags.split_once('|').unwrap_or((flags, ""));
    let target = parse(&format!("{server} --warmup 0.2 --duration 0.8 {run}")).unwrap();
    StreamLoadConfig::new(target, kind(own))
}

type Work = fn(&str) -> Workload;

const BULK: Work = |flags| Workload::Bulk(parse(flags).unwrap());
const RR: Work = |flags| Workload::Exchange(parse(flags).unwrap());
const CONNECT: Work = |flags| Workload::Connect(parse(flags).unwrap());

fn quiet(config: &StreamLoadConfig) -> Result<RunOutcome, LoadError> {
    run(config, &StopHandle::default(), |_| {})
}

/// Faults of a proxy in the direction from client to server: it closes both sides after some bytes, flips a
/// bit, or stops forwarding.
#[derive(Clone, Copy)]
enum Harm {
    CloseAfter(usize),
    FlipByteAt(usize),
    SilentAfter(usize),
}

fn proxy(target: SocketAddr, harm: Harm) -> SocketAddr {
    let listener = TcpListener::bind(loopback(0)).unwrap();
    let address = listener.local_addr().unwrap();
    // Runs until the process exits; each connection ends when its endpoints close it.
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
            let (from_server, to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || pump(client, server, harm));
            thread::spawn(move || pump(from_server, to_client, Harm::SilentAfter(usize::MAX)));
        }
    });
    address
}

fn pump(mut from: TcpStream, mut to: TcpStream, harm: Harm) {
    let (mut buffer, mut done) = (vec![0; 16 << 10], 0);
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        match harm {
            Harm::FlipByteAt(at) if (done..done + len).contains(&at) => buffer[at - done] ^= 1,
            Harm::CloseAfter(after) if done + len > after => break,
            Harm::SilentAfter(after) if done >= after => {
                // Neither read nor close until the peer has given up.
                while !matches!(from.peek(&mut [0]), Ok(0) | Err(_)) && done < usize::MAX {
                    thread::sleep(Duration::from_millis(20));
                    if to.write(&[]).is_err() {
                        break;
                    }
                }
            }
            _ => {}
        }
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
        done += len;
    }
    for stream in [&from, &to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

#[test]
fn bulk_data_arrives_byte_exact_in_every_direction() {
    let reflector = reflector(2);
    let server = reflector.tcp_listeners()[0];
    for (direction, connections, ways) in [
        ("", 3, &["to_server_bps"][..]),
        ("--reverse", 3, &["to_client_bps"]),
        ("--bidir", 6, &["to_server_bps", "to_client_bps"]),
    ] {
        for how in ["--verify --size 10007", "--skip-rx-copy"] {
            let config = load(server, (BULK, &format!("-P 3 {direction} {how} | --threads 2")));
            let report = quiet(&config).unwrap().report;
            assert!(report.sent > 0, "{report:?}");
            assert_eq!((report.sent, report.lost), (report.received, 0), "{report:?}");
            assert_eq!(report.clients, connections, "{report:?}");
            let named: f64 = ways.iter().map(|way| report.extra[*way]).sum();
            assert!(named > 0.0 && (named - report.recv_bps).abs() < 1.0, "{report:?}");
            // Both sides measure time independently and must agree.
            let by_count = report.received as f64 * 8.0 / config.target.run.duration.as_secs_f64();
            assert!((0.3..3.0).contains(&(report.recv_bps / by_count)), "{report:?}");
        }
    }
}

#[test]
fn the_reflector_counts_the_bytes_that_the_generator_sent() {
    let reflector = reflector(1);
    let config = load(reflector.tcp_listeners()[0], (BULK, "--verify | --warmup 0"));
    let report = quiet(&config).unwrap().report;
    let greeting = 16;
    eventually("all bytes have arrived", || reflector.stats().tcp_received_bytes >= report.sent + greeting);
    assert_eq!(reflector.stats().tcp_received_bytes, report.sent + greeting);
}

#[test]
fn requests_are_counted_one_by_one() {
    let reflector = reflector(1);
    let server = reflector.tcp_listeners()[0];
    for (clients, request, response) in [(1, 1, 1), (8, 32, 32), (4, 100_000, 7), (3, 5, 1 << 20)] {
        let own = format!("--clients {clients} --size {request} --response {response}");
        let flags = format!("{own} | --threads {} --warmup 0 --duration 0.5", clients.min(2));
        let config = load(server, (RR, &flags));
        let before = reflector.stats();
        let report = quiet(&config).unwrap().report;
        assert!(report.sent > 0, "{report:?}");
        assert_eq!((report.sent, report.lost), (report.received, 0), "{report:?}");
        assert!(report.errors.is_empty() && report.rtt_us.p50 > 0, "{report:?}");
        assert_eq!(report.extra["transactions_per_s"], report.recv_pps);
        // The reflector counts the same requests and responses, plus greetings and acknowledgements.
        let clients = clients as u64;
        let wanted =
            (report.sent * request as u64 + clients * 16, report.sent * response as u64 + clients * 8);
        let moved = || {
            let now = reflector.stats();
            (now.tcp_received_bytes - before.tcp_received_bytes, now.tcp_sent_bytes - before.tcp_sent_bytes)
        };
        eventually(&format!("{wanted:?} bytes"), || moved() == wanted);
    }
}

#[test]
fn an_open_loop_keeps_its_rate() {
    let reflector = reflector(1);
    let server = reflector.tcp_listeners()[0];
    for workload in [RR, CONNECT] {
        let config = load(server, (workload, "--clients 4 --rate 500"));
        let report = quiet(&config).unwrap().report;
        // 500 per second for 0.8 s make 400, plus a small tolerance.
        assert!((1..=402).contains(&report.sent), "{report:?}");
        assert_eq!(report.lost, 0, "{report:?}");
    }
}

#[test]
fn connections_are_counted_one_by_one() {
    let reflector = reflector(1);
    let server = reflector.tcp_listeners()[0];
    for close in [Close::Server, Close::Client, Close::Reset] {
        let before = reflector.stats().connections;
        let flags = format!("--clients 4 --close {close} | --threads 1 --warmup 0 --duration 0.4");
        let config = load(server, (CONNECT, &flags));
        let report = quiet(&config).unwrap().report;
        assert!(report.sent > 0 && report.errors.is_empty(), "{close}: {report:?}");
        assert_eq!((report.sent, report.lost), (report.received, 0), "{close}: {report:?}");
        // One additional connection was used to check that there is a reflector.
        eventually("all connections are counted", || reflector.stats().connections - before > report.sent);
        assert_eq!(reflector.stats().connections - before, report.sent + 1, "{close}");
    }
}

#[test]
fn exceeded_limits_are_reported() {
    let reflector = reflector(1);
    for (flags, exceeded) in [("--max-p99 0 --max-loss 0", 1), ("--max-p99 60000000 --max-loss 0", 0)] {
        let outcome = quiet(&load(reflector.tcp_listeners()[0], (RR, flags))).unwrap();
        assert_eq!(outcome.exceeded.len(), exceeded, "{flags}");
    }
}

#[test]
fn a_server_that_vanishes_causes_a_clear_error() {
    for (kind, flags) in
        [(BULK, "--verify -P 2"), (BULK, "-R -P 2"), (RR, "--clients 2"), (CONNECT, "--clients 2")]
    {
        let mut reflector = Some(reflector(1));
        let server = reflector.as_ref().unwrap().tcp_listeners()[0];
        let config = load(server, (kind, &format!("{flags} | --duration 3600")));
        // Stop the reflector at the first report of traffic.
        let result = run(&config, &StopHandle::default(), |interval| {
            if interval.received > 0 {
                drop(reflector.take());
            }
        });
        let error = result.unwrap_err();
        assert!(matches!(error, LoadError::Lost { .. } | LoadError::Gone { .. }), "{config:?}: {error:?}");
        assert!(error.to_string().contains(&server.to_string()), "{error}");
    }
}

#[test]
fn a_faulty_proxy_is_detected() {
    let reflector = reflector(1);
    let target = reflector.tcp_listeners()[0];
    let through = |harm| {
        let timeout = Duration::from_secs(1);
        quiet(&StreamLoadConfig { timeout, ..load(proxy(target, harm), (BULK, "--verify")) }).unwrap_err()
    };
    match through(Harm::FlipByteAt(1_000_003)) {
        LoadError::Inexact { sent, received, wrong: 1, .. } => assert_eq!(sent, received),
        other => panic!("{other:?}"),
    }
    assert!(matches!(through(Harm::CloseAfter(1 << 20)), LoadError::Lost { .. }));
    assert!(matches!(through(Harm::SilentAfter(1 << 20)), LoadError::Stalled { .. }));
}

#[test]
fn a_missing_reflector_is_reported_with_its_address() {
    // A port on which nothing listens.
    let closed = free_address();
    for workload in [BULK, RR, CONNECT] {
        let error = quiet(&load(closed, (workload, ""))).unwrap_err();
        assert!(matches!(error, LoadError::Connect { .. }), "{error:?}");
        assert!(error.to_string().contains(&closed.to_string()), "{error}");
    }
    // A forwarder without a target accepts connections and closes them.
    let listener = TcpListener::bind(loopback(0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || listener.incoming().for_each(drop));
    for workload in [(BULK, "-R"), (RR, ""), (CONNECT, "")] {
        let error = quiet(&load(address, workload)).unwrap_err();
        assert!(matches!(error, LoadError::NotReflector { .. }), "{error:?}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
    // A silent server: the backlog accepts connections that are never served.
    let silent = TcpListener::bind(loopback(0)).unwrap();
    let config = StreamLoadConfig {
        timeout: Duration::from_millis(300),
        ..load(silent.local_addr().unwrap(), (RR, ""))
    };
    assert!(matches!(quiet(&config), Err(LoadError::NotReflector { .. })));
}

#[test]
fn unknown_clients_get_an_echo() {
    let reflector = reflector(1);
    let mut stream = TcpStream::connect(reflector.tcp_listeners()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // More than fits into the socket buffers, so that the reflector must wait for its reader.
    let sent: Vec<u8> = (0..24_u32 << 20).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let mut writer = stream.try_clone().unwrap();
    let received = thread::scope(|scope| {
        let writing = thread::Builder::new().name("writer".to_owned());
        writing.spawn_scoped(scope, || writer.write_all(&sent).unwrap()).unwrap();
        // The writer stops when all buffers are full.
        Thread::named("writer").comes_to_rest();
        let mut received = vec![0; sent.len()];
        stream.read_exact(&mut received).unwrap();
        received
    });
    assert!(received == sent);
}
