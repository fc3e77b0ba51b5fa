//! What a server keeps of strangers: of packets whose source may be forged nothing, of connections what its limits say, and no log lines.

use std::{
    fs,
    io::Write as _,
    net::{SocketAddr, TcpStream},
};

use super::{
    is_thorough, row,
    strangers::{Packet, pour_in_as_read},
};
use crate::harness::{Certificate, Serve, V4, eventually};

/// What a running server has.
#[derive(Clone, Copy, Debug)]
struct Kept {
    memory: u64,
    descriptors: usize,
    log: usize,
}

impl Kept {
    fn by(serve: &Serve) -> Self {
        let fds = fs::read_dir(format!("/proc/{}/fd", serve.program.pid())).expect("it runs").count();
        let log = serve.program.lines().iter().map(|line| line.len() + 1).sum();
        Self { memory: serve.memory(), descriptors: fds, log }
    }

    /// By what it has grown since then.
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

fn arrived(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_rx_datagrams_total", "")
}

/// The first so many fill tables and arenas whose size does not depend on how many come; after that there is no growth.
#[test]
fn packets_with_forged_sources_leave_nothing_behind() {
    let count = if is_thorough() { 60_000 } else { 16_000 };
    let (_certificate, serve) = secured();
    for packet in Packet::ALL {
        let server = match packet {
            Packet::ClientHello => serve.address_of("dtls", V4),
            _ => serve.address(V4),
        };
        let flood = |first| {
            let before = arrived(&serve);
            pour_in_as_read(packet, server, first, count);
            // What the kernel had no room for has left nothing either, but proves nothing.
            eventually("most have arrived", || {
                (arrived(&serve) - before > u64::from(count) * 9 / 10).then_some(())
            });
        };
        flood(0);
        let before = Kept::by(&serve);
        flood(count);
        // The connection that asked for the metrics is closed a moment later.
        let kept = eventually("no descriptor stays", || {
            let kept = Kept::by(&serve).since(before);
            (kept.descriptors == 0).then_some(kept)
        });
        assert_eq!(kept.log, 0, "{packet:?}: {kept:?}");
        let each = kept.memory as f64 / f64::from(count);
        // A table of their addresses would take more than twice as much; the allocator has its ups and downs.
        assert!(kept.memory <= u64::from(count) * 8, "{packet:?}: {kept:?}");
        row("kept", &[&packet.name(), &count, &format_args!("{each:.1}"), &0, &0, &"nothing is kept"]);
    }
    assert_eq!(serve.allocations(), 0);
}

/// Connections of strangers: each costs a descriptor and its buffers until it is closed, and there is a limit to them.
#[test]
fn connections_of_strangers_cost_what_is_said_and_have_a_limit() {
    const LIMIT: usize = 300;
    let certificate = Certificate::new(&["turn.example.org"]);
    let limits = crate::harness::Dir::new();
    let file = limits.file("turnpike.toml", format!("[limits]\nidle_connections = {LIMIT}\n"));
    let path = file.to_str().expect("our own path is UTF-8");
    let serve = Serve::start_secured(&certificate, &["--workers", "1", "-c", path]);
    let server = serve.address_of("tls", V4);
    for (name, bytes, most) in [
        ("TCP connections that say nothing", &b""[..], 4096.0),
        ("TCP connections with half a message", &[0, 3, 0, 8, 0x21, 0x12, 0xA4, 0x42], 8192.0),
        ("TLS connections with half a ClientHello", &[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3], 32768.0),
    ] {
        // The first crowd makes what all later ones use.
        drop(crowd(&serve, server, bytes, LIMIT));
        all_gone(&serve);
        let before = Kept::by(&serve);
        let crowd = crowd(&serve, server, bytes, LIMIT);
        let kept = Kept::by(&serve).since(before);
        let each = kept.memory as f64 / LIMIT as f64;
        assert!(each <= most, "{name}: {kept:?}");
        assert!(kept.descriptors <= LIMIT + 8, "{name}: {kept:?}");
        assert_eq!(kept.log, 0, "{name}: {:?}", serve.program.lines().last());
        // One more takes the place of one that was there.
        let more: Vec<TcpStream> = (0..20).map(|_| connect(server, bytes)).collect();
        eventually("no more than the limit", || {
            let closed = serve.metrics().sum("turnpike_connections_closed_total", "");
            (closed >= LIMIT as u64 + 20).then_some(())
        });
        assert!(serve.metrics().sum("turnpike_connections", "") <= LIMIT as u64);
        drop((crowd, more));
        all_gone(&serve);
        let left = Kept::by(&serve).since(before);
        assert!(left.descriptors <= 8, "{name}: {left:?}");
        let bound = format!("limits.idle_connections ({LIMIT} here), limits.idle_connections_per_address");
        row("kept", &[&name, &LIMIT, &format_args!("{each:.0}"), &1, &0, &bound]);
    }
}

fn connect(server: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server).expect("it listens");
    stream.write_all(bytes).expect("it is open");
    stream
}

fn crowd(serve: &Serve, server: SocketAddr, bytes: &[u8], count: usize) -> Vec<TcpStream> {
    let crowd = (0..count).map(|_| connect(server, bytes)).collect();
    eventually("all are accepted", || {
        (serve.metrics().sum("turnpike_connections", "") >= count as u64).then_some(())
    });
    crowd
}

fn all_gone(serve: &Serve) {
    eventually("all are gone", || (serve.metrics().sum("turnpike_connections", "") == 0).then_some(()));
}
