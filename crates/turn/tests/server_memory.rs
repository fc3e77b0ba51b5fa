//! Memory use of the packet path and of idle allocations.

use crate::common;
use crate::common::*;
use std::hint::black_box;

fn allocations(work: impl FnOnce()) -> u64 {
    allocation_counter::measure(work).count_total
}

#[test]
fn relaying_does_not_allocate() {
    let mut world = World::new();
    let (alice, relay) = world.allocated();
    let count = 20;
    for n in 0..count {
        world.ask(&Ask::bind(0x4000 + n, &format!("198.41.0.4:{}", 7000 + n)).signed(&alice)).success();
    }
    world.ask(&Ask::permit("198.41.0.9:0").signed(&alice)).success();
    let messages: Vec<Vec<u8>> = (0..count).map(|n| channel_data(0x4000 + n, &[7; 120])).collect();
    let peers: Vec<_> = (0..count).map(|n| address(&format!("198.41.0.4:{}", 7000 + n))).collect();
    let send = Ask::send("198.41.0.9:7000", &[7; 120]);
    let stranger = address("198.41.0.9:7000");
    let (now, client) = (world.now, world.client);
    let server = &mut world.server;
    let counted = allocations(|| {
        for (message, peer) in messages.iter().zip(&peers) {
            black_box(server.from_client(now, &client.into(), message));
            black_box(server.data.from_peer(now, relay, *peer, message));
            black_box(server.from_client(now, &client.into(), &send));
            black_box(server.data.from_peer(now, relay, stranger, &send));
            black_box(server.from_client(now, &client.into(), &message[..60]));
            black_box(server.from_client(now, &common::client(1).into(), message));
            black_box(server.from_client(now, &common::client(1).into(), &send));
        }
    });
    assert_eq!(counted, 0);
    assert_eq!(server.stats().to_peer_datagrams, 40);
    assert_eq!(server.stats().to_client_datagrams, 40);
}

#[test]
fn a_flood_of_unauthenticated_requests_does_not_allocate() {
    flood_allocates_nothing(config());
}

#[test]
fn a_flood_with_a_long_realm_does_not_allocate() {
    flood_allocates_nothing(ServerConfig { realm: "r".repeat(100), ..config() });
}

fn flood_allocates_nothing(config: ServerConfig) {
    let mut world = World::with(config);
    // The first challenge to a bare header allocates the rate table.
    world.feed(&Ask::new(ALLOCATE).bytes());
    let floods = [
        Ask::allocate().bytes(),
        Ask::new(BINDING).fingerprint().bytes(),
        Ask::refresh(0).bytes(),
        Ask::new(REFRESH).bytes(),
        vec![0; 500],
    ];
    let now = world.now;
    let server = &mut world.server;
    let counted = allocations(|| {
        for port in 1..1000 {
            let mut client = common::client(port);
            client.address.set_ip(std::net::Ipv4Addr::from_bits(0xC612_0000 + u32::from(port)).into());
            for datagram in &floods {
                black_box(server.from_client(now, &client.into(), datagram));
            }
        }
    });
    assert_eq!(counted, 0);
}

#[test]
fn an_idle_allocation_costs_less_than_600_bytes() {
    const COUNT: usize = 10_000;
    let mut world =
        World::with_policy(config(), TestPolicy { per_user: COUNT, total: COUNT, ..TestPolicy::default() });
    let info = allocation_counter::measure(|| {
        for port in 1..=u16::try_from(COUNT).unwrap() {
            world.client = client(port);
            world.now.unix += 1;
            let reply = world.ask_as("alice", Ask::allocate());
            assert!(reply.is_success());
            world.effects();
        }
    });
    let each = info.bytes_current / i64::try_from(COUNT).unwrap();
    println!("{each} bytes per idle allocation");
    assert!(each < 600, "{each}");
}

#[test]
fn mobile_and_tcp_allocations_have_bounded_memory() {
    const COUNT: u16 = 5_000;
    for (ask, most) in [
        (Ask::allocate().raw(TICKET, &[]), 900),
        (Ask::allocate_tcp(), 600),
        (Ask::allocate_tcp().raw(TICKET, &[]), 900),
    ] {
        let policy = TestPolicy { per_user: COUNT.into(), total: COUNT.into(), ..TestPolicy::default() };
        let mut world = World::with_policy(streams(), policy);
        let info = allocation_counter::measure(|| {
            for port in 1..=COUNT {
                world.client = stream(port);
                // The allocations expire one by one, so that a peak of queued effects is not measured.
                world.now.unix += 1;
                world.now.ms += 100;
                assert!(world.ask_as("alice", ask.clone()).is_success());
                world.effects();
            }
        });
        let each = info.bytes_current / i64::from(COUNT);
        println!("{each} bytes");
        assert!(each < most, "{each}");
        let info = allocation_counter::measure(|| {
            for port in 1..=COUNT {
                world.server.disconnected(world.now, &stream(port));
                world.effects();
            }
            while let Some(due_ms) = world.server.poll_timeout() {
                world.now.ms = world.now.ms.max(due_ms);
                world.server.handle_timeout(world.now);
                world.effects();
            }
        });
        assert_eq!(world.server.allocations(), 0);
        println!("{} bytes released", -info.bytes_current / i64::from(COUNT));
        assert!(info.bytes_current < -200 * i64::from(COUNT), "{}", info.bytes_current);
    }
}
