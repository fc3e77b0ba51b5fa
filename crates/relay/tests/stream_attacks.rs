//! Malicious TCP and TLS clients: each attack is counted under its reason, and in the meantime a well-behaved
//! client on the same worker loses nothing.

use crate::prelude::*;
use crate::support::*;
use aes_gcm::{
    Aes128Gcm,
    aead::{AeadInOut, KeyInit},
};
use rustls::ConnectionTrafficSecrets;
use turnpike_relay::StreamConfig;

const NAME: &str = "turn.example.org";

fn tls_world(change: impl FnOnce(&mut StreamConfig)) -> World {
    start(|config| {
        config.tls = Some(context(&[identity(&[NAME])]));
        change(config);
    })
}

fn record(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind, 3, 3], &u16::try_from(body.len()).unwrap().to_be_bytes()[..], body].concat()
}

fn hello() -> Vec<u8> {
    let name = ServerName::try_from(NAME).unwrap();
    let mut client = ClientConnection::new(tls_config(&[]), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

/// Records with the first `len` bytes of a ClientHello of 60,000 bytes.
fn endless_hello(len: usize) -> Vec<u8> {
    let mut body = vec![0; len];
    body[..4].copy_from_slice(&[1, 0, 0xEA, 0x60]);
    body.chunks(1 << 14).flat_map(|part| record(0x16, part)).collect()
}

fn noise(first: u8, len: usize) -> Vec<u8> {
    let mut noise: Vec<u8> = (0..)
        .map(|n: u32| (n ^ u32::from(first)).wrapping_mul(2_654_435_761).to_be_bytes()[1])
        .take(len)
        .collect();
    noise[0] = first;
    noise
}

fn closed(world: &World) -> u64 {
    world.streams().closed.iter().sum()
}

fn drip(streams: Vec<TcpStream>, byte: impl Fn(usize) -> u8) {
    let deadline = Instant::now() + SOON;
    let mut streams = streams;
    for round in 0.. {
        streams.retain_mut(|stream| stream.write_all(&[byte(round)]).is_ok());
        if streams.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{} still open", streams.len());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn tls_without_a_certificate_is_refused_and_counted() {
    let world = start(|_| {});
    let witness = Witness::start(&world);
    for round in 0..40 {
        let mut client = world.client();
        client.send(&if round % 2 == 0 { hello() } else { noise(0x16, 500) });
        client.ends();
    }
    world.wait_for_closed(CloseReason::NoCertificate, 40);
    witness.lost_nothing();
}

#[test]
fn connection_with_any_first_byte_ends_with_a_counted_reason() {
    let plain = start(|_| {});
    let mixed = tls_world(|_| {});
    let strict = tls_world(|config| config.tls_only = true);
    for (world, port) in [(&plain, plain.tcp()), (&mixed, mixed.tls()), (&strict, strict.tls())] {
        let witness = Witness::start(world);
        for first in 0..=255 {
            let mut client = Client::new(connect(port));
            client.send(&noise(first, 64));
            let _ = client.stream.shutdown(Shutdown::Write);
            client.ends();
        }
        eventually("all connections are closed", || closed(world) == 256);
        let streams = world.streams();
        let of = |reason| streams.closed(reason);
        if port == strict.tls() {
            assert_eq!((of(CloseReason::PlainRefused), of(CloseReason::Handshake)), (255, 1), "{streams:?}");
        } else {
            // The server waits for ChannelData of a permitted length until the client closes the connection.
            let all = [CloseReason::NotStun, CloseReason::Length, CloseReason::TooLong, CloseReason::Client];
            let not_tls: u64 = all.map(of).iter().sum();
            assert_eq!(not_tls, 255, "{streams:?}");
            assert!(of(CloseReason::NotStun) >= 128, "{streams:?}");
            let tls = if port == plain.tcp() { CloseReason::NoCertificate } else { CloseReason::Handshake };
            assert_eq!(of(tls), 1, "{streams:?}");
        }
        witness.lost_nothing();
    }
    mixed.wait_for_failed(HandshakeFailure::Garbage, 1);
    strict.wait_for_failed(HandshakeFailure::Garbage, 1);
}

#[test]
fn plain_requests_on_a_tls_only_port_are_refused() {
    let world = tls_world(|config| config.tls_only = true);
    let witness = Witness::start(&world);
    for _ in 0..40 {
        let mut client = Client::new(connect(world.tls()));
        client.send(&binding(1));
        assert_eq!(client.receive(), None);
    }
    world.wait_for_closed(CloseReason::PlainStun, 40);
    witness.lost_nothing();
}

#[test]
fn slow_and_fast_endless_hellos_are_cut_off() {
    let world = tls_world(|config| config.limits.first_message = Duration::from_millis(3000));
    let witness = Witness::start(&world);
    let slow: Vec<TcpStream> = (0..200)
        .map(|number| {
            let mut stream = connect(if number % 2 == 0 { world.tls() } else { world.tcp() });
            stream.write_all(&endless_hello(4000)[..3000]).unwrap();
            stream
        })
        .collect();
    for _ in 0..100 {
        let mut stream = connect(world.tls());
        // Fails if the server has closed the connection.
        let _ = stream.write_all(&endless_hello(59_000));
        Client::new(stream).ends();
    }
    world.wait_for_failed(HandshakeFailure::TooLong, 100);
    world.wait_for_closed(CloseReason::Handshake, 100);
    witness.goes_on();
    // Slow attackers do not block new clients either.
    let dripping = thread::spawn(move || drip(slow, |_| 0));
    let mut newcomers = 0;
    while newcomers == 0 || !dripping.is_finished() {
        let mut newcomer = Client::new(tls_connect(world.tls(), NAME, &tls_config(&[])).unwrap());
        newcomer.ask(&binding(1));
        newcomers += 1;
    }
    dripping.join().unwrap();
    println!("{newcomers} new clients were served in the meantime");
    world.wait_for_failed(HandshakeFailure::Timeout, 200);
    world.wait_for_closed(CloseReason::NoMessage, 200);
    witness.lost_nothing();
}

#[test]
fn invalid_records_after_the_handshake_close_the_connection() {
    let world = tls_world(|_| {});
    let witness = Witness::start(&world);
    let config = tls_config(&[]);
    let cases = [
        record(0x17, &[0xEE; 32]),
        record(0x17, &[0xEE; 1 << 14]),
        record(0x17, &[]),
        // A plaintext handshake record.
        hello(),
        record(0x99, &[0; 20]),
        // A record longer than the maximum.
        [0x17, 3, 3, 0xFF, 0xFF].to_vec(),
        // A plaintext fatal alert.
        record(0x15, &[2, 40]),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ];
    for (count, bytes) in (1..).zip(&cases) {
        for allocated in [true, false] {
            let mut client = Client::new(tls_connect(world.tls(), NAME, &config).unwrap());
            client.ask(&if allocated { allocate() } else { binding(1) });
            client.stream.sock.write_all(bytes).unwrap();
            client.stream.sock.shutdown(Shutdown::Write).unwrap();
            let mut rest = Vec::new();
            // Possibly an alert, then the end of the stream, or a reset if the server left data unread.
            let _ = client.stream.sock.read_to_end(&mut rest);
        }
        world.wait_for_closed(CloseReason::Tls, 2 * count);
    }
    eventually("the attackers' allocations have ended", || world.allocations() == 2);
    // A partial record followed by the end of the stream counts as a normal end.
    let mut client = Client::new(tls_connect(world.tls(), NAME, &config).unwrap());
    client.ask(&allocate());
    client.stream.sock.write_all(&record(0x17, &[0xEE; 32])[..20]).unwrap();
    drop(client);
    world.wait_for_closed(CloseReason::Client, 1);
    eventually("the closed connection's allocation has ended too", || world.allocations() == 2);
    witness.lost_nothing();
}

/// A key update is more work for the server than for the client.
#[test]
fn endless_key_updates_do_not_starve_others() {
    let world = tls_world(|_| {});
    let witness = Witness::start(&world);
    let mut client = Client::new(tls_connect(world.tls(), NAME, &tls_config(&[])).unwrap());
    client.ask(&allocate());
    let deadline = Instant::now() + SOON;
    while world.streams().closed(CloseReason::Tls) == 0 {
        assert!(Instant::now() < deadline, "{:?}", world.streams());
        // Fails once the server has closed the connection, as the test expects.
        let _ = client.stream.conn.refresh_traffic_keys();
        let _ = client.stream.flush();
    }
    witness.lost_nothing();
}

/// Sends records that no TLS library would produce, encrypted with the keys of a session.
struct Forger {
    sock: TcpStream,
    key: Aes128Gcm,
    iv: [u8; 12],
    sequence: u64,
}

impl Forger {
    fn new(world: &World) -> Self {
        let mut config = (*tls_config_of(&rustls::version::TLS13)).clone();
        config.enable_secret_extraction = true;
        let mut stream = tls_connect(world.tls(), NAME, &Arc::new(config)).unwrap();
        stream.flush().unwrap();
        let (sequence, secrets) = stream.conn.dangerous_extract_secrets().unwrap().tx;
        let ConnectionTrafficSecrets::Aes128Gcm { key, iv } = secrets else { panic!("another cipher") };
        let key = Aes128Gcm::new_from_slice(key.as_ref()).unwrap();
        Self { sock: stream.sock, key, iv: iv.as_ref().try_into().unwrap(), sequence }
    }

    /// RFC 8446 section 5.2: the content type follows the content.
    fn send(&mut self, kind: u8, content: &[u8]) -> std::io::Result<()> {
        let mut inner = [content, &[kind]].concat();
        let header = record(0x17, &vec![0; inner.len() + 16])[..5].to_vec();
        let mut nonce = self.iv;
        for (byte, of_sequence) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= of_sequence;
        }
        self.sequence += 1;
        let tag =
            self.key.encrypt_inout_detached(&nonce.into(), &header, inner.as_mut_slice().into()).unwrap();
        self.sock.write_all(&[&header[..], &inner, &tag].concat())
    }
}

/// rustls also buffers 64 KiB of handshake messages after the handshake.
#[test]
fn endless_handshake_messages_after_the_handshake_are_cut_off() {
    let world = tls_world(|_| {});
    let witness = Witness::start(&world);
    let mut fence = world.client();
    let mut forgers = [(); 20].map(|()| Forger::new(&world));
    for forger in &mut forgers {
        // Start of a NewSessionTicket of 60,000 bytes, valid so far.
        forger.send(0x16, &[4, 0, 0xEA, 0x60]).unwrap();
        for _ in 0..15 {
            forger.send(0x16, &[0; 1000]).unwrap();
        }
    }
    fence.ask(&binding(1));
    world.wait_for("everything is read", |streams| streams.read_bytes > 20 * 15_000);
    assert_eq!(world.streams().closed(CloseReason::Tls), 0);
    for forger in &mut forgers {
        for _ in 0..15 {
            // Fails if the server has closed the connection.
            let _ = forger.send(0x16, &[0; 1000]);
        }
    }
    world.wait_for_closed(CloseReason::Tls, 20);
    // A connection that is used properly may stay open forever.
    let mut honest = Client::new(tls_connect(world.tls(), NAME, &tls_config(&[])).unwrap());
    for round in 0..200 {
        honest.ask(&stun(BINDING, round, &[(0x8022, &[b'x'; 3000])]));
    }
    witness.lost_nothing();
}

#[test]
fn flood_of_connections_does_not_starve_others() {
    let world = tls_world(|config| {
        config.limits.idle_connections = 120;
        config.limits.idle_connections_per_address = 50;
    });
    let witness = Witness::start(&world);
    // Each address opens ten connections more than its maximum, which evicts the oldest connections from that
    // address. The third and the fourth address evict the oldest connections of all addresses.
    let mut held = Vec::new();
    for last in 10..14 {
        for _ in 0..60 {
            let stream = connect_from(Ipv4Addr::new(127, 0, 0, last), world.tcp());
            // Makes the kernel report the connection immediately; fails if it was refused.
            let _ = stream.write(&[0]);
            held.push(stream);
        }
        witness.goes_on();
    }
    world.wait_for("all connections are counted", |streams| streams.accepted == 1 + 240);
    let streams = world.streams();
    assert_eq!(streams.closed(CloseReason::LimitAddress), 4 * 10, "{streams:?}");
    assert_eq!(streams.closed(CloseReason::Evicted), 4 * 50 - 120, "{streams:?}");
    assert_eq!(streams.open, 1 + 120);
    assert_eq!(world.client().ask(&binding(1)).kind(), BINDING | 0x0100);
    for round in 1..=10 {
        for _ in 0..100 {
            // Fails if the reset arrives first.
            let _ = TcpStream::connect_timeout(&world.tls(), SOON);
        }
        world.wait_for("all connections are accepted", |streams| streams.accepted == 242 + round * 100);
        assert!(world.streams().open <= 1 + 120);
    }
    drop(held);
    world.wait_for("all other connections are closed", |streams| streams.open == 1);
    assert_eq!(world.client().ask(&binding(1)).kind(), BINDING | 0x0100);
    witness.lost_nothing();
}

fn connect_from(from: Ipv4Addr, to: SocketAddr) -> TcpSocket {
    let options = ConnectOptions { source: Some((from, 0).into()), ..ConnectOptions::default() };
    TcpSocket::connect(to, &options).unwrap()
}

#[test]
fn clients_that_never_read_relayed_data_lose_only_datagrams() {
    let world = tls_world(|config| config.limits.stream_queue = 70_000);
    let witness = Witness::start(&world);
    let far = peer();
    let (mut plain, mut relayed) = (Vec::new(), Vec::new());
    let mut secure = Vec::new();
    for _ in 0..2 {
        let mut client = world.client();
        relayed.push(client.allocated(&far));
        plain.push(client);
        let mut client = Client::new(tls_connect(world.tls(), NAME, &tls_config(&[])).unwrap());
        relayed.push(client.allocated(&far));
        secure.push(client);
    }
    for (count, address) in (1..).zip(&relayed) {
        let deadline = Instant::now() + SOON;
        while world.streams().queue_drops < count * 300 {
            assert!(Instant::now() < deadline, "{:?}", world.streams());
            for _ in 0..64 {
                far.send_to(&[7; 1200], address).unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
        witness.goes_on();
    }
    assert_eq!(world.streams().open, 1 + 4, "slow readers lose datagrams, but not their connection");
    witness.lost_nothing();
}

#[test]
fn clients_that_never_read_responses_are_disconnected() {
    let world = tls_world(|_| {});
    let witness = Witness::start(&world);
    let requests: Vec<u8> = (0..=255).flat_map(binding).collect();
    let mut plain = world.client().stream;
    plain.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    ask_on(&mut plain, &requests, || world.streams().closed(CloseReason::RepliesUnread) == 1);
    let mut secure = tls_connect(world.tls(), NAME, &tls_config(&[])).unwrap();
    secure.sock.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    ask_on(&mut secure, &requests, || world.streams().closed(CloseReason::RepliesUnread) == 2);
    witness.lost_nothing();
}

fn ask_on(stream: &mut impl Write, requests: &[u8], is_over: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_over() {
        assert!(Instant::now() < deadline, "the connection is still served");
        match stream.write(requests) {
            Ok(_) => {}
            // The server stops reading requests once it cannot send replies.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    eventually("the close is counted", is_over);
}
