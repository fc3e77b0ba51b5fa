//! Cost of one decision: `cargo bench -p turnpike-turn --bench route`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;

use common::*;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use turnpike_turn::server::{Client, RelayId};

/// Clients with one allocation and one channel each.
fn world(clients: u16) -> (World, Vec<(Client, RelayId)>) {
    let mut world = World::with_policy(
        config(),
        TestPolicy { per_user: 100_000, total: 100_000, ..TestPolicy::default() },
    );
    let relays = (1..=clients)
        .map(|port| {
            world.client = client(port);
            let (alice, relay) = world.allocated();
            world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
            world.ask(&Ask::permit("198.41.0.5:0").signed(&alice)).success();
            (world.client, relay)
        })
        .collect();
    (world, relays)
}

fn relaying(criterion: &mut Criterion) {
    let message = channel_data(0x4000, &[7; 120]);
    let send = Ask::send(PEER, &[7; 120]);
    let payload = [7; 120];
    let (bound, permitted) = (address(PEER), address("198.41.0.5:7000"));
    let mut group = criterion.benchmark_group("route");
    group.throughput(Throughput::Elements(1));
    for clients in [1, 1000] {
        let (mut world, relays) = world(clients);
        let now = world.now;
        // Stride that defeats the prefetcher.
        let mut at = 0;
        let mut next = || {
            at = (at + 617) % relays.len();
            relays[at]
        };
        let server = &mut world.server;
        group.bench_function(format!("channel_data/{clients}"), |bencher| {
            bencher.iter(|| {
                let (client, _) = next();
                black_box(server.from_client(now, &client.into(), black_box(&message)));
            });
        });
        group.bench_function(format!("from_peer_channel/{clients}"), |bencher| {
            bencher.iter(|| {
                let (_, relay) = next();
                black_box(server.data.from_peer(now, relay, bound, black_box(&payload)));
            });
        });
        group.bench_function(format!("from_peer_data/{clients}"), |bencher| {
            bencher.iter(|| {
                let (_, relay) = next();
                black_box(server.data.from_peer(now, relay, permitted, black_box(&payload)));
            });
        });
        group.bench_function(format!("send/{clients}"), |bencher| {
            bencher.iter(|| {
                let (client, _) = next();
                black_box(server.from_client(now, &client.into(), black_box(&send)));
            });
        });
    }
    group.finish();
}

fn requests(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("request");
    group.throughput(Throughput::Elements(1));
    let mut world = World::new();
    let (now, from) = (world.now, world.client);
    let (binding, challenge) = (Ask::new(BINDING).bytes(), Ask::allocate().bytes());
    group.bench_function("binding", |bencher| {
        bencher.iter(|| {
            black_box(world.server.from_client(now, &from.into(), black_box(&binding)));
        });
    });
    group.bench_function("challenge", |bencher| {
        bencher.iter(|| {
            black_box(world.server.from_client(now, &from.into(), black_box(&challenge)));
        });
    });
    for scheme in [Scheme::Md5, Scheme::Sha256] {
        let alice = world.credentials("alice", scheme);
        let (allocate, delete) =
            (Ask::allocate().signed(&alice).bytes(), Ask::refresh(0).signed(&alice).bytes());
        // An authenticated Allocate and a deletion, including the test policy's key derivation.
        group.bench_function(format!("allocate_and_delete/{scheme:?}"), |bencher| {
            bencher.iter(|| {
                let Outcome::Open(request) = world.feed(&allocate) else { panic!() };
                world.open(&request);
                black_box(world.feed(&delete));
                while world.server.poll_effect().is_some() {}
                // Moves past the retransmission window.
                world.now.ms += 41_000;
            });
        });
    }
    group.finish();
}

criterion_group!(benches, relaying, requests);
criterion_main!(benches);
