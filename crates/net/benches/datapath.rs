//! Benefit of GSO, GRO and batched calls over loopback, with sender and receiver alternating on one core:
//! `cargo bench -p turnpike-net`. Loopback has no device, so only differences are meaningful.

use std::{
    hint::black_box,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use turnpike_net::{Datapath, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket};

const SIZE: usize = 120;
/// Datagrams in flight: few enough to fit in a default receive buffer even without GRO.
const BURST: usize = 64;

fn bind(gro: bool) -> UdpSocket {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    UdpSocket::bind(here, &UdpOptions { gro, ..UdpOptions::default() }).expect("loopback")
}

fn route(socket: SocketId, to: &UdpSocket) -> Route {
    Route { socket, to: Some(to.local_addr()), from: None, tos: 0, ttl: 0, dont_fragment: false }
}

/// Receives until all datagrams have arrived; loopback may deliver some late.
fn take(rx: &mut Rx, socket: &UdpSocket, mut want: usize) {
    while want > 0 {
        if !rx.has_room() {
            rx.reset();
        }
        let received = rx.recv(socket).expect("receive");
        for buffer in rx.buffers(received) {
            for datagram in buffer.datagrams() {
                black_box(datagram);
                want -= 1;
            }
        }
    }
    rx.reset();
}

fn burst(c: &mut Criterion) {
    let mut group = c.benchmark_group("burst of 64");
    group.throughput(Throughput::Elements(BURST as u64));
    for (send, gso) in [(Datapath::Basic, "send one"), (Datapath::Mmsg, "sendmmsg"), (Datapath::Gso, "GSO")] {
        for (receive, gro, name) in [
            (Datapath::Basic, false, "recvmsg"),
            (Datapath::Mmsg, false, "recvmmsg"),
            (Datapath::Basic, true, "GRO by recvmsg"),
            (Datapath::Gso, true, "GRO by recvmmsg"),
        ] {
            let to = bind(gro);
            let mut sockets = Sockets::default();
            let route = route(sockets.insert(bind(false)), &to);
            let (mut tx, mut rx) = (Tx::new(send), Rx::new(receive));
            group.bench_function(format!("{gso}, {name}"), |b| {
                b.iter(|| {
                    for _ in 0..BURST {
                        tx.push_run(&route, 1, SIZE, |bytes| bytes[0] = 1);
                    }
                    tx.flush(&mut sockets, &rx);
                    take(&mut rx, &to, BURST);
                });
            });
        }
    }
}

/// Many flows with one datagram and one socket each.
fn thin(c: &mut Criterion) {
    let mut group = c.benchmark_group("256 flows, one datagram each");
    group.throughput(Throughput::Elements(256));
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
        let to: Vec<UdpSocket> = (0..256).map(|_| bind(datapath == Datapath::Gso)).collect();
        let mut sockets = Sockets::default();
        let id = sockets.insert(bind(false));
        let (mut tx, mut rx) = (Tx::new(datapath), Rx::new(datapath));
        group.bench_function(datapath.to_string(), |b| {
            b.iter(|| {
                for socket in &to {
                    tx.push_run(&route(id, socket), 1, SIZE, |bytes| bytes[0] = 1);
                }
                tx.flush(&mut sockets, &rx);
                for socket in &to {
                    take(&mut rx, socket, 1);
                }
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = burst, thin
}
criterion_main!(benches);
