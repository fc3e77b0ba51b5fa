//! Time and memory limits of a connection, and their enforcement.

use crate::prelude::*;
use crate::support::*;

fn slow_reader<S: std::io::Read + Write>(world: &World, client: &mut Client<S>) {
    let peer = peer();
    let relayed = client.allocated(&peer);
    // Send bursts small enough for UDP until the client's connection has dropped some.
    let mut number = 0_u32;
    eventually("some datagrams are dropped", || {
        for _ in 0..64 {
            let mut payload = vec![0; 1200];
            payload[..4].copy_from_slice(&number.to_be_bytes());
            peer.send_to(&payload, relayed).unwrap();
            number += 1;
        }
        world.streams().queue_drops >= 1000
    });
    // The client reads the oldest datagrams, which were in the kernel's buffers, and then, after a gap, the
    // newest ones with a reply among them.
    client.send(&refresh(9));
    let (mut numbers, mut replied) = (Vec::new(), false);
    while !replied || numbers.last() != Some(&(number - 1)) {
        let message = client.receive().expect("the connection is open");
        if message.kind() == REFRESH | 0x0100 {
            replied = true;
            continue;
        }
        assert_eq!(message.payload().len(), 1200, "a message in progress is completed");
        numbers.push(u32::from_be_bytes(message.payload()[..4].try_into().unwrap()));
    }
    assert!(numbers.is_sorted(), "the remaining datagrams stay in order");
    assert!(numbers.len() < number as usize, "some datagrams are dropped");
    assert_eq!(numbers[0], 0, "the oldest had already been sent");
    // The kernel may have dropped more datagrams before they reached the server.
    assert!(world.streams().queue_drops <= u64::from(number) - numbers.len() as u64);
    client.ask(&binding(3));
}

#[test]
fn slow_reader_loses_oldest_datagrams_but_gets_replies() {
    let world = start(|config| config.limits.stream_queue = 70_000);
    slow_reader(&world, &mut world.client());
}

#[test]
fn slow_reader_over_tls_loses_oldest_datagrams_but_gets_replies() {
    let world = start(|config| {
        config.limits.stream_queue = 70_000;
        config.tls = Some(context(&[identity(&["turn.example.org"])]));
    });
    let stream = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
    slow_reader(&world, &mut Client::new(stream));
}

#[test]
fn queued_icmp_errors_are_dropped_like_datagrams() {
    let world = start(|config| config.limits.stream_queue = 70_000);
    let mut client = world.client();
    let peer = peer();
    client.allocated(&peer);
    // The kernel now replies with ICMP errors.
    drop(peer);
    // The lengths increase, so that no two datagrams are sent or received as one super-packet.
    let burst: Vec<u8> = (1..=64).flat_map(|words| channel_data(&vec![0; words * 4])).collect();
    eventually("some datagrams are dropped", || {
        client.send(&burst);
        world.streams().queue_drops >= 1000
    });
    assert_eq!(world.streams().closed(CloseReason::RepliesUnread), 0);
    client.send(&refresh(9));
    while client.receive().expect("the connection is open").kind() != REFRESH | 0x0100 {}
}

#[test]
fn non_stun_data_closes_the_connection_with_a_reason() {
    let world = start(|_| {});
    let cases: [(&[u8], CloseReason); 6] = [
        (&[0x80; 20], CloseReason::NotStun),
        (b"\0\x01\0\x08no cookie and so on", CloseReason::NotStun),
        (&[0, 1, 0, 3, 0x21, 0x12, 0xA4, 0x42], CloseReason::Length),
        // HTTP looks like ChannelData of 21 kB.
        (b"GET / HTTP/1.1\r\n\r\n", CloseReason::TooLong),
        (&[0x16, 3, 1, 0, 5], CloseReason::NoCertificate),
        (&[0x16; 600], CloseReason::NoCertificate),
    ];
    let mut seen = std::collections::HashMap::new();
    for (bytes, reason) in cases {
        let mut client = world.client();
        client.send(bytes);
        client.ends();
        let count = seen.entry(reason).or_insert(0);
        *count += 1;
        world.wait_for_closed(reason, *count);
    }
    let mut client = world.client();
    client.ask(&binding(1));
    client.send(&[&binding(2)[..], b"\xFFgarbage behind a message"].concat());
    assert_eq!(client.receive().unwrap().kind(), BINDING | 0x0100, "the request still gets a reply");
    client.ends();
}

#[test]
fn long_messages_require_an_allocation() {
    let world = start(|_| {});
    let mut stranger = world.client();
    stranger.send(&channel_data(&[1; 4096])[..4]);
    stranger.ends();
    world.wait_for_closed(CloseReason::TooLong, 1);
    let mut client = world.client();
    let peer = peer();
    client.allocated(&peer);
    client.send(&padded(channel_data(&[1; 60_000])));
    assert_eq!(heard(&peer).len(), 60_000);
}

#[test]
fn client_without_a_complete_message_in_time_is_disconnected() {
    let world = start(|config| {
        config.tls = Some(context(&[identity(&["turn.example.org"])]));
        config.limits.first_message = Duration::from_millis(700);
    });
    let mut silent = world.client();
    // One client sends a request byte by byte, another the first half of an endless ClientHello.
    let mut dripping = connect(world.tcp());
    let mut hello = connect(world.tls());
    hello.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3]).unwrap();
    let drip = thread::spawn(move || {
        for byte in binding(1).iter().take(19) {
            // The server closes the connection early, as it should.
            if dripping.write_all(&[*byte]).and_then(|()| hello.write_all(&[0])).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        (dripping, hello)
    });
    silent.ends();
    world.wait_for_closed(CloseReason::NoMessage, 3);
    world.wait_for_failed(HandshakeFailure::Timeout, 1);
    drop(drip.join().unwrap());
    assert_eq!(world.streams().open, 0);
}

#[test]
fn only_idle_clients_without_an_allocation_are_disconnected() {
    let world = start(|config| config.limits.idle = Duration::from_millis(2000));
    let mut allocated = world.client();
    allocated.ask(&allocate());
    let mut idle = world.client();
    let mut busy = world.client();
    idle.ask(&binding(1));
    eventually("the idle connection is closed", || {
        busy.ask(&binding(1));
        world.streams().closed(CloseReason::Idle) > 0
    });
    idle.ends();
    world.wait_for_closed(CloseReason::Idle, 1);
    drop(busy);
    world.wait_for_closed(CloseReason::Client, 1);
    allocated.ask(&stun(REFRESH, 9, &[(0x000D, &[0; 4])]));
    allocated.ends();
    world.wait_for_closed(CloseReason::Idle, 2);
}

#[test]
fn only_connections_without_an_allocation_are_limited() {
    let world = start(|config| config.limits.idle_connections_per_address = 3);
    let mut clients: Vec<Client<TcpStream>> = Vec::new();
    for _ in 0..5 {
        let mut client = world.client();
        client.ask(&allocate());
        clients.push(client);
    }
    let mut waiting: Vec<_> = (0..3).map(|_| world.client()).collect();
    waiting.iter_mut().for_each(|client| drop(client.ask(&binding(1))));
    let mut newcomer = world.client();
    newcomer.ask(&allocate());
    waiting[0].ends();
    world.wait_for_closed(CloseReason::LimitAddress, 1);
    waiting[1].ask(&binding(1));
    clients[0].ask(&refresh(1));
    drop(waiting);
    world.wait_for_closed(CloseReason::Client, 2);
    assert_eq!(world.streams().closed(CloseReason::LimitAddress), 1);
}

/// While one client finishes its handshake, more clients arrive than the limit allows.
#[test]
fn slow_new_clients_do_not_evict_each_other() {
    for (max_idle, max_idle_per_address) in [(6, 512), (512, 6)] {
        let world = start(|config| {
            config.tls = Some(context(&[identity(&["turn.example.org"])]));
            (config.limits.idle_connections, config.limits.idle_connections_per_address) =
                (max_idle, max_idle_per_address);
        });
        let (at, round_trip) = (world.tls(), Duration::from_millis(60));
        let newcomers: Vec<_> = (0..12)
            .map(|_| {
                thread::sleep(Duration::from_millis(20));
                thread::spawn(move || {
                    let stream = tls_connect_slowly(at, round_trip);
                    let mut client = Client::new(stream);
                    thread::sleep(round_trip);
                    client.ask(&allocate());
                    client
                })
            })
            .collect();
        let finished: Vec<_> = newcomers.into_iter().filter_map(|newcomer| newcomer.join().ok()).collect();
        let streams = world.streams();
        assert_eq!(finished.len(), 12, "limit of {max_idle} in total: {streams:?}");
    }
}

fn tls_connect_slowly(at: std::net::SocketAddr, pause: Duration) -> TlsStream {
    let name = "turn.example.org".try_into().unwrap();
    let connection = rustls::ClientConnection::new(tls_config(&[]), name).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, connect(at));
    while stream.conn.is_handshaking() {
        thread::sleep(pause);
        while stream.conn.wants_write() {
            stream.conn.write_tls(&mut stream.sock).unwrap();
        }
        if stream.conn.is_handshaking() {
            assert!(stream.conn.read_tls(&mut stream.sock).unwrap() > 0, "closed");
            stream.conn.process_new_packets().unwrap();
        }
    }
    stream
}

/// New clients beyond the limit of their address have to wait. The number of waiting clients has the same
/// limit, beyond which clients are refused.
#[test]
fn waiting_clients_are_bounded_and_eventually_served() {
    let world =
        start(|config| (config.limits.idle_connections, config.limits.idle_connections_per_address) = (6, 2));
    let mut clients: Vec<_> = (0..5).map(|_| world.client()).collect();
    clients.iter_mut().for_each(|client| client.send(&binding(1)));
    // Two clients are admitted, two wait until they can evict the first two, and one is refused.
    let served = clients.iter_mut().filter_map(Client::receive).count();
    assert_eq!(served, 4);
    world.wait_for_closed(CloseReason::LimitAddress, 3);
}

/// Idle connections at the limit never block new clients on any worker, however the kernel distributes them.
#[test]
fn new_client_is_served_by_any_worker_at_the_limit() {
    for (max_idle, max_idle_per_address) in [(8, 512), (512, 8)] {
        let world = start_with(|config| {
            config.workers = 4;
            config.streams.limits.idle_connections = max_idle;
            config.streams.limits.idle_connections_per_address = max_idle_per_address;
        });
        let _idle: Vec<_> = (0..32)
            .map(|_| {
                let mut client = world.client();
                client.ask(&binding(1));
                client
            })
            .collect();
        for _ in 0..32 {
            world.client().ask(&allocate());
        }
    }
}

#[test]
fn oldest_connection_without_an_allocation_is_evicted() {
    let world = start(|config| config.limits.idle_connections = 2);
    let mut allocated = world.client();
    allocated.ask(&allocate());
    let mut oldest = world.client();
    oldest.ask(&binding(1));
    let mut second = world.client();
    second.ask(&binding(1));
    // Activity without an allocation does not protect a connection.
    oldest.ask(&binding(2));
    let mut newcomer = world.client();
    newcomer.ask(&binding(1));
    oldest.ends();
    world.wait_for_closed(CloseReason::Evicted, 1);
    second.ask(&binding(2));
    allocated.ask(&refresh(1));
    // Connections that close normally free their slots.
    drop(second);
    world.wait_for_closed(CloseReason::Client, 1);
    world.client().ask(&binding(1));
    newcomer.ask(&binding(2));
    assert_eq!(world.streams().closed(CloseReason::Evicted), 1);
}

#[test]
fn unauthenticated_clients_are_read_in_small_portions() {
    let world = start(|_| {});
    let mut client = world.client();
    let requests: Vec<u8> = (0..=255).cycle().take(4000).flat_map(binding).collect();
    client.send(&requests);
    for _ in 0..4000 {
        assert_eq!(client.receive().expect("a reply").kind(), BINDING | 0x0100);
    }
    world.wait_for("everything is read", |streams| streams.read_bytes == requests.len() as u64);
    let reads = world.streams().reads;
    assert!(reads >= requests.len() as u64 / 4096, "{reads} reads of {} bytes", requests.len());
}

#[test]
fn stopping_the_relay_closes_every_connection() {
    let world = start(|config| config.tls = Some(context(&[identity(&["turn.example.org"])])));
    let mut plain = world.client();
    plain.ask(&allocate());
    let mut tls = Client::new(tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap());
    tls.ask(&allocate());
    world.relay.stop();
    plain.ends();
    assert_eq!(tls.receive(), None, "close_notify");
}
