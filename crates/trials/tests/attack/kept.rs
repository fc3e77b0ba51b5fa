//! State that a server keeps for unauthenticated clients: none for packets whose source may be forged, and bounded state for connections,
//! both without log lines.

use std::{
    fs,
    io::Write as _,
    net::{SocketAddr, TcpStream},
};

use super::{
    is_thorough, row,
    strangers::{Packet, half_open, pour_in_as_read},
    wire::client_hello,
};
use turnpike_trials::{Certificate, Dir, Serve, V4, eventually};

#[derive(Clone, Copy, Debug)]
struct Kept {
    memory: u64,
    descriptors: usize,
    log: usize,
}

impl Kept {
    fn by(serve: &Serve) -> Self {
        let fds = fs::read_dir(format!("/proc/{}/fd", serve.program.pid()))
            .expect("the process is running")
            .count();
        let log = serve.program.lines().iter().map(|line| line.len() + 1).sum();
        Self { memory: serve.memory(), descriptors: fds, log }
    }

    fn since(self, before: Self) -> Self {
        Self {
            memory: self.memory.saturating_sub(before.memory),
            descriptors: self.descriptors.saturating_sub(before.descriptors),
            log: self.log - before.log,
        }
    }
}

fn secured() -> (Certificate, Serve) {
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = Serve::start_secured(&certificate, &["--workers", "1"]);
    (certificate, serve)
}

fn limited(limits: &str) -> (Certificate, Serve) {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", format!("[limits]\n{limits}\n"));
    let path = file.to_str().expect("the test's path is UTF-8");
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = Serve::start_secured(&certificate, &["--workers", "1", "-c", path]);
    (certificate, serve)
}

fn arrived(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_rx_datagrams_total", "")
}

/// The first packets fill tables and arenas of fixed size; later packets must not add to them.
#[test]
fn packets_with_forged_sources_leave_nothing_behind() {
    let count = if is_thorough() { 60_000 } else { 16_000 };
    let (_certificate, serve) = secured();
    for packet in Packet::ALL {
        let server = match packet {
            Packet::ClientHello => serve.address_of("dtls", V4),
            _ => serve.address(V4),
        };
        let flood = |first, count| {
            let before = arrived(&serve);
            pour_in_as_read(packet, server, first, count);
            // Packets that the kernel drops leave no state, but prove nothing about the server.
            eventually("most packets have arrived", || arrived(&serve) - before > u64::from(count) * 9 / 10);
        };
        flood(0, count);
        // Each round sends as many packets as all earlier rounds together, so that a table of them would have to grow; taking the minimum
        // of three rounds excludes occasional allocator growth.
        let mut each = f64::INFINITY;
        for first in [count, count * 2, count * 4] {
            let before = Kept::by(&serve);
            flood(first, first);
            // The connection that read the metrics closes a moment later.
            let kept = eventually("all descriptors are closed", || {
                let kept = Kept::by(&serve).since(before);
                (kept.descriptors == 0).then_some(kept)
            });
            assert_eq!(kept.log, 0, "{packet:?}: {kept:?}");
            each = each.min(kept.memory as f64 / f64::from(first));
            if each == 0.0 {
                break;
            }
        }
        // A table of addresses would take twenty times as much memory.
        assert!(each < 1.0, "{packet:?}: {each} bytes per packet");
        row("kept", &[&packet.name(), &count, &format_args!("{each:.1}"), &0, &0, &"no state"]);
    }
    assert_eq!(serve.allocations(), 0);
}

/// Each unauthenticated connection costs a descriptor and buffers until it is closed, and their number is limited.
#[test]
fn unauthenticated_connections_have_bounded_cost_and_number() {
    const LIMIT: usize = 300;
    // The longest incomplete message that an unauthenticated client may send (4,096 bytes), and an incomplete TLS record.
    let most_of_a_message = [&[0, 3, 0x0F, 0xEC, 0x21, 0x12, 0xA4, 0x42][..], &[0; 4087]].concat();
    let most_of_a_record = [&[0x16, 3, 1, 0x40, 0, 1, 0, 0x3F, 0xFC, 3, 3][..], &[0; 16_377]].concat();
    for (name, bytes, most) in [
        ("silent TCP connections", &b""[..], 2048.0),
        ("TCP connections with half a message", &[0, 3, 0, 8, 0x21, 0x12, 0xA4, 0x42], 2048.0),
        ("TCP connections with the longest message minus one byte", &most_of_a_message, 8192.0),
        ("TLS connections with half a ClientHello", &[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3], 12_288.0),
        ("TLS connections with the longest record minus one byte", &most_of_a_record, 40_960.0),
        ("TLS connections with only a ClientHello", &client_hello(), 16_384.0),
    ] {
        // A new server for each row: memory freed by an earlier row would hide the cost.
        let (_certificate, serve) = limited(&format!("idle_connections = {LIMIT}"));
        let server = serve.address_of("tls", V4);
        let evicted = || serve.metrics().sum("turnpike_connections_closed_total", "reason=\"evicted\"");
        // The first connection allocates everything that later ones share.
        drop(crowd(&serve, server, bytes, 1));
        all_gone(&serve);
        let (before, given_way) = (Kept::by(&serve), evicted());
        let first = crowd(&serve, server, bytes, LIMIT);
        let kept = Kept::by(&serve).since(before);
        let each = kept.memory as f64 / LIMIT as f64;
        assert!(each <= most, "{name}: {kept:?}");
        assert!(kept.descriptors.abs_diff(LIMIT) <= 8, "{name}: {kept:?}");
        assert_eq!(kept.log, 0, "{name}: {:?}", serve.program.lines().last());
        assert_eq!(evicted(), given_way, "{name}: no connection was closed");
        let more: Vec<TcpStream> = (0..20).map(|_| connect(server, bytes)).collect();
        eventually("each new connection replaces an old one", || evicted() == given_way + 20);
        assert!(serve.metrics().sum("turnpike_connections", "") <= LIMIT as u64);
        drop((first, more));
        all_gone(&serve);
        let crowds = if is_thorough() { 10 } else { 3 };
        for _ in 0..crowds {
            let later = crowd(&serve, server, bytes, LIMIT);
            let grown = Kept::by(&serve).since(before);
            let most = kept.memory + kept.memory / 4 + 64 * 1024;
            assert!(grown.memory <= most, "{name}: {grown:?} after {kept:?}");
            drop(later);
            all_gone(&serve);
        }
        // The connection that read the metrics closes a moment later.
        let left = eventually("all descriptors are closed", || {
            let left = Kept::by(&serve).since(before);
            (left.descriptors == 0).then_some(left)
        });
        assert_eq!(left.log, 0, "{name}: {:?}", serve.program.lines().last());
        let descriptors = (kept.descriptors as f64 / LIMIT as f64).round();
        let bound = format!("limits.idle_connections ({LIMIT} here), limits.idle_connections_per_address");
        row("kept", &[&name, &LIMIT, &format_args!("{each:.0}"), &descriptors, &kept.log, &bound]);
    }
}

/// A DTLS client with a verified address costs only its handshake state, until the handshake completes or a newer client replaces it, and
/// never a descriptor.
#[test]
#[ignore = "thorough: cargo xtask attack"]
fn silent_dtls_clients_have_bounded_cost_and_number() {
    const LIMIT: u32 = 200;
    const MOST_EACH: f64 = 32_768.0;
    let (_certificate, serve) = limited(&format!("half_open = {LIMIT}\nhalf_open_per_network = {LIMIT}"));
    let server = serve.address_of("dtls", V4);
    let under_way = || serve.metrics().sum("turnpike_dtls_associations", "stage=\"half_open\"");
    let ended = || serve.metrics().sum("turnpike_dtls_ended_total", "");
    // The first client allocates shared state. Its socket stays open, because a closed one would cause ICMP errors.
    let mut silent = vec![half_open(server, 0)];
    let before = Kept::by(&serve);
    silent.extend((1..LIMIT).map(|number| half_open(server, number)));
    assert!(under_way() <= u64::from(LIMIT));
    let kept = Kept::by(&serve).since(before);
    let each = kept.memory as f64 / f64::from(LIMIT - 1);
    assert!(each <= MOST_EACH, "{kept:?}");
    let given_way = ended();
    let more = if is_thorough() { 20 } else { 3 } * LIMIT;
    silent.extend((LIMIT..LIMIT + more).map(|number| half_open(server, number)));
    eventually("the oldest clients were replaced", || ended() - given_way >= u64::from(more));
    assert!(under_way() <= u64::from(LIMIT));
    // The connection that read the metrics closes a moment later.
    let all = eventually("no client uses a descriptor", || {
        let kept = Kept::by(&serve).since(before);
        (kept.descriptors == 0).then_some(kept)
    });
    let most = kept.memory + kept.memory / 4 + u64::from(LIMIT) * 1024;
    assert!(all.memory <= most, "{all:?} after {kept:?}");
    assert_eq!(all.log, 0, "{:?}", serve.program.lines().last());
    assert_eq!(serve.allocations(), 0);
    let bound = format!("limits.half_open ({LIMIT} here), limits.half_open_per_network");
    let count = LIMIT + more;
    row(
        "kept",
        &[&"DTLS clients silent after a valid cookie", &count, &format_args!("{each:.0}"), &0, &0, &bound],
    );
}

fn connect(server: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server).expect("the listener accepts connections");
    stream.write_all(bytes).expect("the connection is open");
    stream
}

fn crowd(serve: &Serve, server: SocketAddr, bytes: &[u8], count: usize) -> Vec<TcpStream> {
    let read = || serve.metrics().sum("turnpike_stream_read_bytes_total", "");
    let wanted = read() + (count * bytes.len()) as u64;
    let crowd = (0..count).map(|_| connect(server, bytes)).collect();
    eventually("all connections are accepted and read", || {
        serve.metrics().sum("turnpike_connections", "") >= count as u64 && read() >= wanted
    });
    crowd
}

fn all_gone(serve: &Serve) {
    eventually("all connections are gone", || serve.metrics().sum("turnpike_connections", "") == 0);
}
