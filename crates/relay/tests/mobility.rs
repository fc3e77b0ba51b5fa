//! Mobility (RFC 8016) over real sockets: a client that changes its port keeps its allocation over UDP and
//! TCP, whichever worker its new 5-tuple belongs to.

use crate::prelude::*;
use crate::support::CHANNEL;

/// Enough moves that, with two workers, all but one in 4,096 runs include a move to the other worker.
const MOVES: u8 = 12;

fn allocate_mobile() -> Vec<u8> {
    stun(support::ALLOCATE, 1, &[(0x0019, &[17, 0, 0, 0]), (MOBILITY_TICKET, &[])])
}

fn present(ticket: &[u8], id: u8) -> Vec<u8> {
    stun(support::REFRESH, id, &[(MOBILITY_TICKET, ticket)])
}

/// A UDP client that retransmits.
struct Mobile {
    server: SocketAddr,
    socket: UdpSocket,
}

impl Mobile {
    fn new(world: &World) -> Self {
        Self { server: world.udp(), socket: Self::socket() }
    }

    fn socket() -> UdpSocket {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    }

    fn ask(&self, request: &[u8]) -> Message {
        let answer = self.exchange(request);
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0100);
        answer
    }

    fn refused(&self, request: &[u8]) -> u16 {
        let answer = self.exchange(request);
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0110);
        answer.error().unwrap()
    }

    fn exchange(&self, request: &[u8]) -> Message {
        let deadline = Instant::now() + SOON;
        loop {
            self.socket.send_to(request, self.server).unwrap();
            let mut buffer = [0; 2048];
            while let Ok(len) = self.socket.recv(&mut buffer) {
                let message = Message(buffer[..len].to_vec());
                if message.0.len() >= 20 && message.0[8..20] == request[8..20] {
                    return message;
                }
            }
            assert!(Instant::now() < deadline, "no response");
        }
    }

    /// Exchanges a datagram with the peer and retransmits, because the first datagrams after a move may be
    /// lost.
    fn converse(&self, peer: &UdpSocket, word: &[u8]) -> SocketAddr {
        peer.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let deadline = Instant::now() + SOON;
        loop {
            self.socket.send_to(&channel_data(word), self.server).unwrap();
            let mut buffer = [0; 2048];
            if let Ok((len, relayed)) = peer.recv_from(&mut buffer)
                && buffer[..len] == *word
            {
                peer.send_to(word, relayed).unwrap();
                if let Ok(len) = self.socket.recv(&mut buffer) {
                    let message = Message(buffer[..len].to_vec());
                    assert_eq!(message.kind(), CHANNEL);
                    assert_eq!(message.payload(), word);
                    return relayed;
                }
            }
            assert!(Instant::now() < deadline, "{word:?} did not arrive");
        }
    }
}

#[test]
fn traffic_continues_after_a_change_of_port() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let peer = peer();
        let mut client = Mobile::new(&world);
        let answer = client.ask(&allocate_mobile());
        let relayed = plain(&answer.attribute(0x0016));
        let mut ticket = answer.attribute(MOBILITY_TICKET);
        client.ask(&bind(peer.local_addr().unwrap()));
        assert_eq!(client.converse(&peer, b"at home"), relayed);
        for step in 0..MOVES {
            let old = std::mem::replace(&mut client.socket, Mobile::socket());
            let next = client.ask(&present(&ticket, 100 + step)).attribute(MOBILITY_TICKET);
            assert_ne!(next, ticket);
            ticket = next;
            assert_eq!(client.converse(&peer, format!("stop {step}").as_bytes()), relayed);
            drop(old);
        }
        world.wait_for_counter("mobility", "arrived", MOVES.into());
        world.wait_whether("mobility", "exported", workers == 2);
        support::eventually("each exported allocation is imported and exists once", || {
            let allocations: u64 = world.relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum();
            let all = world.counter("mobility", "exported") == world.counter("mobility", "imported");
            all && allocations == 1
        });
        client.ask(&stun(support::REFRESH, 90, &[(0x000D, &[0; 4])]));
        support::eventually("the allocation is gone", || {
            world.relay.snapshots().iter().all(|snapshot| snapshot.allocations == 0)
        });
        assert!(world.relay.realms().is_empty(), "{:?}", world.relay.realms());
        UdpSocket::bind(relayed).unwrap();
    }
}

/// Not even the first request is lost: its response arrives without a retransmission.
#[test]
fn first_data_from_a_new_port_reaches_any_worker() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let peer = peer();
        let mut client = Mobile::new(&world);
        let answer = client.ask(&allocate_mobile());
        let mut ticket = answer.attribute(MOBILITY_TICKET);
        client.ask(&bind(peer.local_addr().unwrap()));
        for step in 0..MOVES {
            let old = std::mem::replace(&mut client.socket, Mobile::socket());
            ticket = client.ask(&present(&ticket, 100 + step)).attribute(MOBILITY_TICKET);
            let word = format!("stop {step}");
            if step % 2 == 0 {
                client.socket.send_to(&channel_data(word.as_bytes()), client.server).unwrap();
                assert_eq!(heard(&peer), word.as_bytes(), "{workers} workers");
            } else {
                client.socket.set_read_timeout(Some(SOON)).unwrap();
                client.socket.send_to(&support::refresh(200 + step), client.server).unwrap();
                assert_eq!(Message(heard(&client.socket)).kind(), support::REFRESH | 0x0100);
                // Only data completes a move, so after these requests the old port remains valid.
                client.converse(&peer, word.as_bytes());
            }
            drop(old);
        }
        world.wait_whether("mobility", "exported", workers == 2);
        assert_eq!(world.relay.snapshots().iter().map(|snapshot| snapshot.handoffs_lost).sum::<u64>(), 0);
    }
}

/// Creates a client on this worker by trying ports until the kernel chooses the worker.
fn on_worker(world: &World, worker: usize) -> Mobile {
    let requests = || {
        let snapshots = world.relay.snapshots();
        snapshots.iter().map(|one| one.turn.requests.iter().sum::<u64>()).collect::<Vec<_>>()
    };
    loop {
        let before = requests();
        let client = Mobile::new(world);
        client.ask(&binding(7));
        let at = support::eventually("the request is counted", || {
            requests().iter().zip(&before).position(|(now, then)| now > then)
        });
        if at == worker {
            return client;
        }
    }
}

/// RFC 8016 section 3.2.2, with the old and the new address on different workers.
#[test]
fn responses_are_independent_of_the_number_of_workers() {
    for (workers, home, away) in [(1, 0, 0), (2, 0, 0), (2, 0, 1), (4, 3, 0), (4, 1, 2), (4, 2, 2)] {
        let world = support::start_workers(workers);
        let peer = peer();
        let bind = bind(peer.local_addr().unwrap());
        let case = format!("{workers} workers, from {home} to {away}");
        let (old, new) = (on_worker(&world, home), on_worker(&world, away));
        let ticket = old.ask(&allocate_mobile()).attribute(MOBILITY_TICKET);
        old.ask(&bind);
        old.converse(&peer, b"at home");
        let next = new.ask(&present(&ticket, 50)).attribute(MOBILITY_TICKET);
        // Requests never end the use of the old address; only data does.
        for request in [&bind, &refresh(51), &stun(support::REFRESH, 52, &[(0x000D, &[0, 0, 2, 88])])] {
            new.ask(request);
            old.converse(&peer, b"still here");
        }
        assert_eq!(new.refused(&present(&next, 53)), 400, "{case}");
        assert_eq!(new.refused(&stun(support::ALLOCATE, 54, &[(0x0019, &[17, 0, 0, 0])])), 437);
        assert_eq!(old.refused(&present(&next, 55)), 400, "{case}");
        old.converse(&peer, b"still here");
        new.converse(&peer, b"there now");
        assert_eq!(old.refused(&refresh(56)), 437, "{case}");
        assert_eq!(new.refused(&present(&next, 57)), 400, "{case}");
        old.ask(&present(&next, 58));
        old.converse(&peer, b"at home again");
        world.wait_whether("mobility", "exported", home != away);
    }
}

#[test]
fn mobile_allocation_outlives_its_tcp_connection() {
    for workers in [1, 2] {
        let world = support::start_workers(workers);
        let peer = peer();
        let mut client = world.client();
        let answer = client.ask(&allocate_mobile());
        let relayed = plain(&answer.attribute(0x0016));
        let mut ticket = answer.attribute(MOBILITY_TICKET);
        client.ask(&bind(peer.local_addr().unwrap()));
        for step in 0..MOVES {
            drop(client);
            world.wait_for_counter("mobility", "kept", u64::from(step) + 1);
            client = Client::new(connect(world.tcp()));
            ticket = client.ask(&present(&ticket, 100 + step)).attribute(MOBILITY_TICKET);
            let word = format!("stop {step}");
            client.send(&padded(channel_data(word.as_bytes())));
            assert_eq!(heard(&peer), word.as_bytes());
            peer.send_to(word.as_bytes(), relayed).unwrap();
            assert_eq!(client.receive().expect("the datagram comes back").payload(), word.as_bytes());
        }
        assert_eq!(world.relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum::<u64>(), 1);
        assert_eq!(
            world.relay.snapshots().iter().map(|one| one.streams.adopted).sum::<u64>() > 0,
            workers == 2
        );
    }
}

fn from_port(world: &World, port: u16) -> Client<std::net::TcpStream> {
    let source = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 7).into(), port);
    let mut client = world.client();
    client.send(&encode(ProxyVersion::V1, source, "198.51.100.1:3478".parse().unwrap()));
    client
}

#[test]
fn client_at_the_address_of_an_absent_client_keeps_its_connection() {
    let world = support::start(|config| {
        config.limits.idle = Duration::from_millis(700);
        config.proxies = vec!["127.0.0.0/8".parse().unwrap()];
    });
    let end: [fn(&Mobile, &[u8]); 2] = [
        |elsewhere, ticket| _ = elsewhere.ask(&present(ticket, 50)),
        |elsewhere, ticket| {
            _ = elsewhere.ask(&stun(support::REFRESH, 51, &[(MOBILITY_TICKET, ticket), (0x000D, &[0; 4])]));
        },
    ];
    let mut others = Vec::new();
    for (port, end) in (4000..).zip(end) {
        let mut gone = from_port(&world, port);
        let ticket = gone.ask(&allocate_mobile()).attribute(MOBILITY_TICKET);
        drop(gone);
        world.wait_for_counter("mobility", "kept", u64::from(port) - 3999);
        let mut other = from_port(&world, port);
        other.ask(&allocate());
        end(&Mobile::new(&world), &ticket);
        others.push(other);
    }
    // A client that never had an allocation, however, is disconnected once it has been idle for too long.
    let mut idle = from_port(&world, 5000);
    idle.ask(&binding(1));
    idle.ends();
    world.wait_for_closed(CloseReason::Idle, 1);
    for other in &mut others {
        other.ask(&refresh(9));
    }
}

#[test]
fn connection_is_idle_after_its_allocation_moved_away() {
    let world = support::start_with(|config| {
        config.workers = 2;
        config.streams.limits.idle = Duration::from_millis(700);
    });
    let peer = peer();
    for _ in 0..MOVES {
        let mut left = world.client();
        let ticket = left.ask(&allocate_mobile()).attribute(MOBILITY_TICKET);
        left.ask(&bind(peer.local_addr().unwrap()));
        let elsewhere = Mobile::new(&world);
        elsewhere.ask(&present(&ticket, 50));
        elsewhere.converse(&peer, b"there now");
        left.ends();
        elsewhere.converse(&peer, b"and still");
        if world.counter("mobility", "exported") > 1 {
            break;
        }
    }
    world.wait_whether("mobility", "exported", true);
}

#[test]
fn client_at_the_address_of_an_absent_client_keeps_its_association() {
    let world = support::dtls::world_with(|config| config.limits.idle = Duration::from_millis(500));
    let mut gone = DtlsClient::connect(world.dtls(), Kind::V13);
    let ticket = gone.ask(&allocate_mobile()).attribute(MOBILITY_TICKET);
    gone.close();
    world.wait_for_counter("mobility", "kept", 1);
    let mut other = DtlsClient::on(gone.socket.try_clone().unwrap(), Kind::V13);
    other.finish().unwrap();
    other.ask(&allocate());
    Mobile::new(&world).ask(&present(&ticket, 50));
    // A client that never had an allocation, however, gets a close_notify once it has been idle for too
    // long.
    let mut idle = DtlsClient::connect(world.dtls(), Kind::V13);
    idle.hears_farewell();
    world.wait_for_dtls("the idle association has ended", |stats| stats.ended(DtlsEnd::Idle) == 1);
    other.ask(&refresh(9));
}
