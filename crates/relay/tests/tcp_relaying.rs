//! TCP relaying (RFC 6062) over real sockets: TCP and TLS clients, outgoing and incoming peer connections,
//! one and two workers.

use crate::prelude::*;

use crate::support::{CONNECT, CONNECTION_ATTEMPT, CONNECTION_BIND, CONNECTION_ID, XOR_PEER_ADDRESS, permit};

fn allocate_tcp() -> Vec<u8> {
    stun(support::ALLOCATE, 1, &[(0x0019, &[6, 0, 0, 0])])
}

fn connect_to(peer: SocketAddr, id: u8) -> Vec<u8> {
    stun(CONNECT, id, &[(XOR_PEER_ADDRESS, &xored(peer))])
}

fn bind_to(connection: &[u8]) -> Vec<u8> {
    stun(CONNECTION_BIND, 7, &[(CONNECTION_ID, connection)])
}

fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

fn accepted(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    listener.set_nonblocking(true).unwrap();
    let (stream, from) = eventually("a connection arrives", || listener.accept().ok());
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.set_write_timeout(Some(SOON)).unwrap();
    (stream, from)
}

fn read(stream: &mut impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Reads to the end of the stream, because closing with unread bytes would cause a reset.
fn is_over(stream: &mut impl Read) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(len) => len == 0,
        Err(error) => matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof),
    }
}

fn control(world: &World) -> (Client<TcpStream>, SocketAddr) {
    let mut client = world.client();
    let relayed = plain(&client.ask(&allocate_tcp()).attribute(0x0016));
    (client, relayed)
}

fn connection_to(client: &mut Client<TcpStream>, peer: SocketAddr, id: u8) -> Vec<u8> {
    client.ask(&connect_to(peer, id)).attribute(CONNECTION_ID)
}

fn data(world: &World, connection: &[u8]) -> TcpStream {
    bound(connect(world.tcp()), connection)
}

fn bound<S: Read + Write>(mut stream: S, connection: &[u8]) -> S {
    stream.write_all(&bind_to(connection)).unwrap();
    stream.flush().unwrap();
    // Reads only the response, because data follows.
    let header = read(&mut stream, 20);
    assert_eq!(header[..2], [0x01, 0x0B], "{header:?}");
    read(&mut stream, usize::from(u16::from_be_bytes([header[2], header[3]])));
    stream
}

fn converse(mut client: impl Read + Write, mut peer: TcpStream) {
    client.write_all(b"ping").unwrap();
    client.flush().unwrap();
    assert_eq!(read(&mut peer, 4), b"ping");
    peer.write_all(b"pong").unwrap();
    assert_eq!(read(&mut client, 4), b"pong");
    drop(peer);
    assert!(is_over(&mut client));
}

#[test]
fn data_connections_work_on_any_worker() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let (mut client, relayed) = control(&world);
        for round in 0..16 {
            let listener = listener();
            let connection = connection_to(&mut client, listener.local_addr().unwrap(), 10 + round);
            let (mut peer, from) = accepted(&listener);
            assert_eq!(from, relayed, "the peer sees the relayed transport address");
            peer.write_all(b"early").unwrap();
            let mut stream = data(&world, &connection);
            assert_eq!(read(&mut stream, 5), b"early");
            converse(stream, peer);
        }
        world.wait_for_counter("peer_connections", "ended", 16);
        world.wait_for_counter("peer_connections", "bound", 16);
        world.wait_for_counter("connection_bytes", "to_peer", 16 * 4);
        world.wait_for_counter("connection_bytes", "to_client", 16 * 9);
        world.wait_whether("peer_connections", "handed_over", workers == 2);
    }
}

#[test]
fn data_connections_may_use_tls() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let (mut client, _) = control(&world);
        for round in 0..16 {
            let listener = listener();
            let connection = connection_to(&mut client, listener.local_addr().unwrap(), 10 + round);
            let (peer, _) = accepted(&listener);
            let tls = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
            converse(bound(tls, &connection), peer);
        }
        world.wait_for_counter("peer_connections", "ended", 16);
        world.wait_whether("peer_connections", "handed_over", workers == 2);
    }
}

#[test]
fn data_sent_by_peers_before_the_bind_is_not_lost() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let (mut client, relayed) = control(&world);
        client.ask(&permit((Ipv4Addr::LOCALHOST, 9).into()));
        for _ in 0..8 {
            let mut peer = connect(relayed);
            peer.write_all(b"early").unwrap();
            let attempt = client.receive().expect("a ConnectionAttempt");
            assert_eq!(attempt.kind(), CONNECTION_ATTEMPT);
            assert_eq!(plain(&attempt.attribute(XOR_PEER_ADDRESS)), peer.local_addr().unwrap());
            let mut stream = data(&world, &attempt.attribute(CONNECTION_ID));
            assert_eq!(read(&mut stream, 5), b"early");
            converse(stream, peer);
        }
        world.wait_for_counter("peer_connections", "ended", 8);
    }
}

/// TCP out-of-band data, sent before or after the client's bind and immediately followed by the end of the
/// stream.
#[test]
fn urgent_byte_of_a_peer_stays_in_the_stream() {
    let world = support::start_workers(1);
    let (mut client, relayed) = control(&world);
    client.ask(&permit((Ipv4Addr::LOCALHOST, 9).into()));
    for round in 0..16 {
        let mut peer = connect(relayed);
        let attempt = client.receive().expect("a ConnectionAttempt");
        let mut say = || {
            peer.write_all(b"abc").unwrap();
            socket2::SockRef::from(&peer).send_out_of_band(b"!").unwrap();
            peer.write_all(b"def").unwrap();
            peer.shutdown(Shutdown::Write).unwrap();
        };
        let is_early = round % 2 == 0;
        if is_early {
            say();
            // The response proves that the worker has handled the event.
            client.ask(&support::refresh(20 + round));
        }
        let mut stream = data(&world, &attempt.attribute(CONNECTION_ID));
        if !is_early {
            say();
        }
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, b"abc!def", "early: {is_early}");
    }
}

/// Each client uses the other's external relayed address as its peer; that address is unassigned here.
#[test]
fn two_clients_of_a_relay_behind_a_nat_are_connected() {
    for workers in [1, 2] {
        let world = support::start_with(|config| {
            crate::hairpinning::behind_nat(config);
            config.workers = workers;
        });
        for round in 0..8 {
            let ((mut caller, from), (mut called, to)) = (control(&world), control(&world));
            called.ask(&permit(from));
            let connection = connection_to(&mut caller, to, 10 + round);
            let attempt = called.receive().expect("a ConnectionAttempt");
            assert_eq!(
                (attempt.kind(), plain(&attempt.attribute(XOR_PEER_ADDRESS))),
                (CONNECTION_ATTEMPT, from)
            );
            let far = data(&world, &attempt.attribute(CONNECTION_ID));
            converse(data(&world, &connection), far);
        }
        world.wait_for_counter("peer_connections", "bound", 16);
    }
}

#[test]
fn peer_without_permission_is_closed_immediately() {
    let world = support::start_workers(1);
    let (mut client, relayed) = control(&world);
    assert!(is_over(&mut connect(relayed)));
    world.wait_for_counter("peer_connection_refusals", "no_permission", 1);
    client.ask(&support::refresh(3));
}

#[test]
fn bytes_after_a_connection_bind_are_data() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let (mut client, _) = control(&world);
        for round in 0..8 {
            let listener = listener();
            let connection = connection_to(&mut client, listener.local_addr().unwrap(), 10 + round);
            let (mut peer, _) = accepted(&listener);
            let mut data = Client::new(connect(world.tcp()));
            let behind = support::binding(9);
            let length = data.ask(&[bind_to(&connection), behind.clone()].concat()).0.len();
            assert!(length > 0);
            assert_eq!(read(&mut peer, behind.len()), behind);
        }
    }
}

#[test]
fn refused_connection_gets_447_and_duplicate_peer_gets_446() {
    let world = support::start_workers(1);
    let (mut client, _) = control(&world);
    let gone = listener().local_addr().unwrap();
    client.send(&connect_to(gone, 2));
    assert_eq!(client.receive().unwrap().error(), Some(447));
    let listener = listener();
    let there = listener.local_addr().unwrap();
    connection_to(&mut client, there, 3);
    client.send(&connect_to(there, 4));
    assert_eq!(client.receive().unwrap().error(), Some(446));
}

#[test]
fn connections_and_listener_end_with_the_allocation() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let (mut client, relayed) = control(&world);
        let listener = listener();
        let connection = connection_to(&mut client, listener.local_addr().unwrap(), 2);
        let (mut peer, _) = accepted(&listener);
        let mut stream = data(&world, &connection);
        stream.write_all(b"x").unwrap();
        assert_eq!(read(&mut peer, 1), b"x");
        drop(client);
        assert!(is_over(&mut peer) && is_over(&mut stream));
        eventually("the relayed address is closed", || TcpStream::connect(relayed).err());
        eventually("no connection is left", || {
            world.relay.snapshots().iter().all(|snapshot| snapshot.peers.open == 0)
        });
    }
}

/// Transfers megabytes in both directions at the same time, for both kinds of client, with a reader that
/// waits until all buffers are full.
#[test]
fn bulk_data_arrives_unchanged() {
    const LEN: usize = 12 << 20;
    let bytes = |seed: usize| -> Vec<u8> {
        (0..LEN).map(|at| (at * 31 + at / 251 + seed).to_le_bytes()[0]).collect()
    };
    let world = support::start_workers(2);
    let (mut client, _) = control(&world);
    for (round, tls) in [false, true].into_iter().enumerate() {
        let listener = listener();
        let id = u8::try_from(round).unwrap() + 2;
        let connection = connection_to(&mut client, listener.local_addr().unwrap(), id);
        let (mut peer, _) = accepted(&listener);
        let mut upstream = peer.try_clone().unwrap();
        let (up, down) = (&bytes(1), &bytes(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                upstream.write_all(down).unwrap();
                upstream.shutdown(Shutdown::Write).unwrap();
            });
            if tls {
                let stream = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
                let mut stream = bound(stream, &connection);
                // One thread handles the TLS client: it reads everything, then writes.
                let mut heard = Vec::new();
                stream.read_to_end(&mut heard).unwrap();
                assert!(&heard == down, "{} bytes", heard.len());
                let reader = scope.spawn(|| read(&mut peer, LEN));
                stream.write_all(up).unwrap();
                stream.flush().unwrap();
                assert!(&reader.join().unwrap() == up);
            } else {
                let mut stream = data(&world, &connection);
                let mut writer = stream.try_clone().unwrap();
                let sent = scope.spawn(move || {
                    writer.write_all(up).unwrap();
                    writer.shutdown(Shutdown::Write).unwrap();
                });
                assert!(&read(&mut peer, LEN) == up);
                assert!(&read(&mut stream, LEN) == down);
                sent.join().unwrap();
                assert!(is_over(&mut stream) && is_over(&mut peer));
            }
        });
    }
}

/// Bytes that exceed the limit have to wait, in both directions and for both kinds of client.
#[test]
fn limit_slows_connections_and_loses_nothing() {
    const LEN: usize = 3 << 20;
    /// Limit in bytes per millisecond, followed by the burst.
    const RATE: u128 = 8_000;
    const BURST: u128 = 80_000;
    for workers in [1, 2] {
        let world = support::start_with(|config| {
            config.workers = workers;
            config.streams.tls = Some(support::context(&[support::identity(&["turn.example.org"])]));
            let rates = Rates { per_allocation: Some(64_000_000), ..Rates::default() };
            config.server.bandwidth = Bandwidth { rates, burst_ms: 10, ..Bandwidth::default() };
        });
        for tls in [false, true] {
            let started = Instant::now();
            let (mut client, _) = control(&world);
            let listener = listener();
            let connection = connection_to(&mut client, listener.local_addr().unwrap(), 2);
            let (mut peer, _) = accepted(&listener);
            let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 251).to_le_bytes()[0]).collect();
            if tls {
                let stream = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
                passes(bound(stream, &connection), &mut peer, &bytes);
            } else {
                passes(data(&world, &connection), &mut peer, &bytes);
            }
            let most = (BURST + RATE * (started.elapsed().as_millis() + 1)) * 21 / 20 + (1 << 16);
            assert!(LEN as u128 <= most, "{LEN} bytes passed, at most {most} allowed");
        }
        world.wait_whether("bandwidth_pauses", "allocation", true);
        world.wait_for_counter("connection_bytes", "to_peer", 2 * LEN as u64);
        world.wait_for_counter("connection_bytes", "to_client", 2 * LEN as u64);
        assert_eq!(world.counter("dropped_datagrams", "allocation_bandwidth"), 0);
    }
}

/// Sends the bytes first to the peer, then to the client.
fn passes(mut client: impl Read + Write + Send, peer: &mut TcpStream, bytes: &[u8]) {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(peer, bytes.len()));
        client.write_all(bytes).unwrap();
        client.flush().unwrap();
        assert!(reader.join().unwrap() == bytes);
    });
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&mut client, bytes.len()));
        peer.write_all(bytes).unwrap();
        assert!(reader.join().unwrap() == bytes);
    });
}

#[test]
fn flood_of_connects_stays_within_the_allocation_limit() {
    let world = support::start_workers(1);
    let (mut client, relayed) = control(&world);
    client.ask(&permit((Ipv4Addr::LOCALHOST, 9).into()));
    let peers: Vec<TcpStream> = (0..40).map(|_| connect(relayed)).collect();
    for _ in 0..32 {
        assert_eq!(client.receive().unwrap().kind(), CONNECTION_ATTEMPT);
    }
    world.wait_for_counter("peer_connection_refusals", "limit", 8);
    assert_eq!(world.relay.snapshots()[0].peers.open, 32);
    drop(peers);
}

fn reset(stream: TcpStream) {
    TcpSocket::from(OwnedFd::from(stream)).reset();
}

#[test]
fn flood_of_peers_cannot_close_a_stalled_control_connection() {
    let world = support::start(|config| config.limits.stream_queue = 4096);
    let (mut client, relayed) = control(&world);
    client.ask(&permit((Ipv4Addr::LOCALHOST, 9).into()));
    eventually("the client's queue has dropped datagrams", || {
        assert_eq!(world.streams().closed(CloseReason::RepliesUnread), 0);
        for _ in 0..16 {
            // Does not wait for the connect: if the backlog is full, the kernel retries only after a second.
            TcpSocket::connect(relayed, &ConnectOptions::default()).unwrap().reset();
        }
        world.streams().queue_drops >= 300
    });
    client.send(&support::refresh(9));
    while client.receive().expect("the connection is open").kind() != support::REFRESH | 0x0100 {}
}

/// Writes to a non-blocking socket until it accepts no more; a full receive buffer sometimes still accepts a
/// few bytes.
fn fill(mut write: impl FnMut(&[u8]) -> std::io::Result<usize>) {
    let mut refused = 0;
    eventually("the buffer is full", || {
        refused = if write(&[7; 1 << 16]).is_ok() { 0 } else { refused + 1 };
        refused == 100
    });
}

#[test]
fn reset_ends_a_stalled_tls_data_connection() {
    let world = support::start_workers(1);
    let (mut client, _) = control(&world);
    let mut bound_pair = |id: u8| {
        let listener = listener();
        let connection = connection_to(&mut client, listener.local_addr().unwrap(), id);
        let (peer, _) = accepted(&listener);
        let tls = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
        (bound(tls, &connection), peer)
    };
    let open = |count: u64| {
        eventually(&format!("{count} connections"), || world.relay.snapshots()[0].peers.open == count);
    };

    let (mut data, peer) = bound_pair(2);
    open(1);
    data.sock.set_nonblocking(true).unwrap();
    fill(|bytes| {
        let taken = data.write(bytes)?;
        data.flush().map(|()| taken)
    });
    reset(data.sock);
    open(0);
    drop(peer);

    // The client has ended its direction, and the peer sends nothing.
    let (mut data, mut peer) = bound_pair(3);
    data.conn.send_close_notify();
    data.flush().unwrap();
    assert!(is_over(&mut peer));
    reset(data.sock);
    open(0);
    drop(peer);

    let (data, mut peer) = bound_pair(4);
    peer.set_nonblocking(true).unwrap();
    fill(|bytes| peer.write(bytes));
    reset(peer);
    open(0);
    drop(data);
}

/// After one side has closed (RFC 6062 section 5.5), the other side may still send for a while.
#[test]
fn half_closed_connection_ends_when_idle() {
    let world = support::start_with(|config| {
        config.half_closed = Duration::from_millis(600);
        config.streams.tls = Some(support::context(&[support::identity(&["turn.example.org"])]));
    });
    let (mut client, _) = control(&world);
    for round in 0..4 {
        let listener = listener();
        let address = listener.local_addr().unwrap();
        let connection = connection_to(&mut client, address, 10 + round);
        let (mut peer, _) = accepted(&listener);
        let is_tls = round >= 2;
        let (mut plain, mut tls) = if is_tls {
            let tls = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
            (None, Some(bound(tls, &connection)))
        } else {
            (Some(data(&world, &connection)), None)
        };
        if round % 2 == 0 {
            peer.shutdown(Shutdown::Write).unwrap();
            for _ in 0..4 {
                std::thread::sleep(Duration::from_millis(300));
                let said = match (&mut plain, &mut tls) {
                    (Some(plain), _) => plain.write_all(b"x"),
                    (_, Some(tls)) => tls.write_all(b"x").and_then(|()| tls.flush()),
                    _ => unreachable!(),
                };
                said.unwrap();
                assert_eq!(read(&mut peer, 1), b"x");
            }
        } else {
            // The client's program has ended. The kernel keeps that side open, and the peer keeps its side
            // open.
            match (plain.take(), tls.take()) {
                (Some(plain), _) => plain.shutdown(Shutdown::Write).unwrap(),
                (_, Some(mut tls)) => {
                    tls.conn.send_close_notify();
                    tls.flush().unwrap();
                    std::mem::forget(tls);
                }
                _ => unreachable!(),
            }
        }
        assert!(is_over(&mut peer), "round {round}");
        world.wait_for_counter("peer_connections", "ended", u64::from(round) + 1);
        // A new connection to the peer succeeds; RFC 6062 section 5.2 requires 446 for a peer that is still
        // connected.
        connection_to(&mut client, address, 40 + round);
        accepted(&listener);
    }
}
