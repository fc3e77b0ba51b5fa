//! Load generators for forwarders, checked by exit code and JSON: bulk, requests, connections and datagrams to one reflector.

use crate::prelude::*;
use std::collections::HashMap;

/// Returns datagrams except those for which `drops` is true; its arguments are the sender's number and the datagram's.
fn lossy_reflector(drops: impl Fn(usize, usize) -> bool + Send + 'static) -> SocketAddr {
    let socket = UdpSocket::bind((V4, 0)).expect("a socket");
    let address = socket.local_addr().expect("an address");
    thread::spawn(move || {
        let mut senders = HashMap::new();
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let number = senders.len();
            let (sender, count) = senders.entry(from).or_insert((number, 0));
            *count += 1;
            if !drops(*sender, *count) {
                _ = socket.send_to(&buffer[..length], from);
            }
        }
    });
    address
}

fn reflector() -> (Reflect, SocketAddr) {
    let mut reflect = Reflect::start(V4, &["--tcp", "127.0.0.1:0"]);
    let line = reflect.program.line_with(" on tcp ");
    let address = line.rsplit_once(' ').and_then(|(_, address)| address.parse().ok());
    let address = address.unwrap_or_else(|| panic!("no address in {line:?}"));
    (reflect, address)
}

fn load(kind: &str, server: SocketAddr, more: &[&str]) -> Finished {
    let server = server.to_string();
    let mut arguments = vec!["load", kind, &server, "--duration", "1", "--warmup", "0.2", "--json", "-"];
    arguments.extend(more);
    Program::start(&mut turnpike(&arguments)).wait(SOON)
}

fn complete(result: &Value) {
    let count =
        |key: &str| result[key].as_u64().unwrap_or_else(|| panic!("{key} is not a count in {result}"));
    assert!(count("sent") > 0, "{result}");
    assert_eq!((count("received"), count("lost")), (count("sent"), 0), "{result}");
    assert!(result["recv_bps"].as_f64() > Some(0.0), "{result}");
    assert!(result["generator_cpu_s"].as_f64() > Some(0.0), "{result}");
    assert_eq!(result["errors"].as_object().map(serde_json::Map::len), Some(0), "{result}");
}

#[test]
fn every_workload_runs_against_one_reflector() {
    let (reflect, tcp) = reflector();
    for (kind, server, flags, figure) in [
        ("tcp", tcp, &["-P", "2", "--verify"][..], "to_server_bps"),
        ("tcp", tcp, &["--reverse", "--skip-rx-copy"], "to_client_bps"),
        ("tcp", tcp, &["--bidir"], "to_client_bps"),
        ("rr", tcp, &["--clients", "4"], "transactions_per_s"),
        // On a busy machine a response may be delayed, and requests without a free connection are not sent.
        (
            "rr",
            tcp,
            &["--clients", "8", "--rate", "40", "--response", "1000", "--max-loss", "0"],
            "transactions_per_s",
        ),
        ("connect", tcp, &["--clients", "4", "--close", "reset"], "connections_per_s"),
        ("udp", reflect.address, &["--clients", "4", "--max-loss", "0"], "recv_pps"),
    ] {
        let run = load(kind, server, flags);
        assert_eq!(run.code, Some(0), "{kind} {flags:?}: {}", run.output());
        complete(&run.result());
        assert!(run.result()[figure].as_f64() > Some(0.0), "{figure} in {}", run.output());
    }
}

/// Figures of the progress lines after the warm-up: sent and received per second, percent lost, and outstanding.
fn progress(stderr: &str) -> Vec<[f64; 4]> {
    let lines = stderr.lines().filter(|line| line.contains(" p99 ") && !line.contains("warm-up"));
    let figure = |line: &str, name: &str| {
        let (_, behind) = line.split_once(name).unwrap_or_else(|| panic!("no {name:?} in {line:?}"));
        let digits = behind.split(['/', ' ']).next().unwrap_or_default().replace(',', "");
        digits.parse().unwrap_or_else(|error| panic!("{digits:?} in {line:?}: {error}"))
    };
    let names = ["sent ", "received ", "loss ", "outstanding "];
    lines.map(|line| names.map(|name| figure(line, name))).collect()
}

#[test]
fn progress_counts_missing_datagrams_as_lost_or_outstanding() {
    let load = |server: SocketAddr| {
        let flags = ["--clients", "10", "--rate", "1000", "--duration", "3", "--json", "-"];
        Program::start(&mut turnpike(&[&["load", "udp", &server.to_string()][..], &flags].concat()))
            .wait(SOON)
    };
    // Drops every tenth datagram, so the next one shows the gap. The first datagram is the greeting.
    let run = load(lossy_reflector(|_, count| count % 10 == 2));
    let found = progress(&run.stderr);
    assert!(found.len() >= 2, "{}", run.stderr);
    for [_, _, loss, outstanding] in found {
        assert!((5.0..15.0).contains(&loss) && outstanding < 100.0, "{}", run.stderr);
    }
    let result = run.result();
    let [sent, lost] = ["sent", "lost"].map(|key| result[key].as_u64().expect("a count"));
    assert!(lost.abs_diff(sent / 10) <= 10, "{result}");

    // Drops all datagrams of one client in ten, so no later reply shows the gap.
    let run = load(lossy_reflector(|sender, count| sender == 0 && count > 1));
    let found = progress(&run.stderr);
    assert!(found.len() >= 2, "{}", run.stderr);
    for pair in found.windows(2) {
        let more = pair[1][3] - pair[0][3];
        assert!(more > 50.0 && pair[1][2] < 1.0, "outstanding grows by 100/s: {}", run.stderr);
        assert!((pair[1][0] - pair[1][1]).abs() - more < 50.0, "{}", run.stderr);
    }
    let result = run.result();
    let [sent, lost] = ["sent", "lost"].map(|key| result[key].as_u64().expect("a count"));
    assert!(lost.abs_diff(sent / 10) <= 1, "final figures are exact: {result}");
}

#[test]
fn exceeded_limit_exits_with_3() {
    let (reflect, tcp) = reflector();
    for (kind, server) in [("rr", tcp), ("connect", tcp), ("udp", reflect.address)] {
        let run = load(kind, server, &["--max-p99", "1"]);
        assert_eq!(run.code, Some(3), "{kind}: {}", run.output());
        assert!(run.stderr.contains("above the limit of 1 us"), "{kind}: {}", run.output());
    }
}

#[test]
fn unreachable_target_exits_with_1_and_names_its_address() {
    let server = SocketAddr::new(V4, free_port(V4));
    for kind in ["tcp", "rr", "connect", "udp"] {
        let run = load(kind, server, &[]);
        assert_eq!(run.code, Some(1), "{kind}: {}", run.output());
        assert!(run.stderr.contains(&server.to_string()), "{kind}: {}", run.output());
    }
}

#[test]
fn bad_usage_exits_with_2_and_names_the_flag() {
    let server = SocketAddr::new(V4, 3480);
    for (kind, flags, named) in [
        ("tcp", &["-P", "0"][..], "--parallel"),
        ("tcp", &["--reverse", "--bidir"], "--bidir"),
        ("tcp", &["--verify", "--skip-rx-copy"], "--verify"),
        ("rr", &["--size", "0"], "--size"),
        ("connect", &["--close", "door"], "--close"),
        ("udp", &["--size", "23"], "--size"),
    ] {
        let run = load(kind, server, flags);
        assert_eq!(run.code, Some(2), "{kind} {flags:?}: {}", run.output());
        assert!(run.stderr.contains(named), "{kind} {flags:?}: {}", run.output());
    }
}
