//! Every kind of message split at each byte, over TCP and TLS: split messages have the same effect, and
//! truncated ones have none.

use crate::prelude::*;
use crate::support::*;

const NAME: &str = "turn.example.org";

fn world() -> World {
    start(|config| config.tls = Some(context(&[identity(&[NAME])])))
}

fn tls(world: &World, config: &Arc<ClientConfig>) -> TlsStream {
    tls_connect(world.tls(), NAME, config).unwrap()
}

/// Waits until the worker has read everything sent so far; the worker reads in order of arrival.
struct Fence(Client<TcpStream>);

impl Fence {
    fn new(world: &World) -> Self {
        Self(world.client())
    }

    fn pass(&mut self) {
        self.0.ask(&binding(0));
    }
}

trait Cut: Read + Write {
    fn write_halves(&mut self, bytes: &[u8], at: usize, fence: &mut Fence);

    const MORE: usize = 0;
}

impl Cut for TcpStream {
    fn write_halves(&mut self, bytes: &[u8], at: usize, fence: &mut Fence) {
        self.write_all(&bytes[..at]).unwrap();
        fence.pass();
        self.write_all(&bytes[at..]).unwrap();
    }
}

impl Cut for TlsStream {
    fn write_halves(&mut self, bytes: &[u8], at: usize, fence: &mut Fence) {
        self.write_all(&bytes[..at]).unwrap();
        self.flush().unwrap();
        fence.pass();
        self.write_all(&bytes[at..]).unwrap();
        self.flush().unwrap();
    }
}

struct CutRecord(TlsStream);

impl Read for CutRecord {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for CutRecord {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl Cut for CutRecord {
    /// Overhead of a record: header, content type and tag (RFC 8446 section 5.2).
    const MORE: usize = 5 + 1 + 16;

    fn write_halves(&mut self, bytes: &[u8], at: usize, fence: &mut Fence) {
        self.0.conn.writer().write_all(bytes).unwrap();
        let mut record = Vec::new();
        while self.0.conn.wants_write() {
            self.0.conn.write_tls(&mut record).unwrap();
        }
        assert_eq!(record.len(), bytes.len() + Self::MORE);
        self.0.sock.write_halves(&record, at, fence);
    }
}

fn every_cut_is_none<S: Cut>(stream: S, fence: &mut Fence) {
    let mut client = Client::new(stream);
    let (bound, permitted) = (peer(), peer());
    client.allocated(&bound);
    let (bound_at, permitted_at) = (bound.local_addr().unwrap(), permitted.local_addr().unwrap());
    let address = xored(permitted_at);
    let sequence = [
        padded(channel_data(b"")),
        padded(channel_data(b"1")),
        permit(permitted_at),
        stun(SEND, 7, &[(XOR_PEER_ADDRESS, &address), (PAYLOAD, b"indicated")]),
        padded(channel_data(b"12345")),
        stun(SEND, 8, &[(XOR_PEER_ADDRESS, &address), (PAYLOAD, b"")]),
        bind(bound_at),
        padded(channel_data(b"123456")),
        refresh(9),
        padded(channel_data(b"1234567")),
        binding(10),
        padded(channel_data(b"last")),
    ];
    let bytes = sequence.concat();
    for at in 0..bytes.len() + S::MORE {
        client.stream.write_halves(&bytes, at, fence);
        let answers: Vec<u16> = (0..4).map(|_| client.receive().unwrap().kind() & !0x0100).collect();
        assert_eq!(answers, [CREATE_PERMISSION, CHANNEL_BIND, REFRESH, BINDING], "cut at {at}");
        for expected in [&b""[..], b"1", b"12345", b"123456", b"1234567", b"last"] {
            assert_eq!(heard(&bound), expected, "cut at {at}");
        }
        for expected in [&b"indicated"[..], b""] {
            assert_eq!(heard(&permitted), expected, "cut at {at}");
        }
    }
}

#[test]
fn split_messages_work_over_tcp() {
    let world = world();
    every_cut_is_none(connect(world.tcp()), &mut Fence::new(&world));
}

#[test]
fn split_messages_work_over_tls_between_records() {
    let world = world();
    every_cut_is_none(tls(&world, &tls_config(&[])), &mut Fence::new(&world));
}

#[test]
fn split_messages_work_over_tls_within_a_record() {
    let world = world();
    every_cut_is_none(CutRecord(tls(&world, &tls_config(&[]))), &mut Fence::new(&world));
}

fn every_truncation_is_nothing<S: Read + Write>(
    world: &World,
    connect: impl Fn() -> S,
    end: impl Fn(&mut S),
) {
    let (bound, permitted) = (peer(), peer());
    let address = xored(permitted.local_addr().unwrap());
    let messages = [
        padded(channel_data(b"12345")),
        stun(SEND, 7, &[(XOR_PEER_ADDRESS, &address), (PAYLOAD, b"indicated")]),
        permit(permitted.local_addr().unwrap()),
        bind(bound.local_addr().unwrap()),
        refresh(9),
        allocate(),
        stun(CONNECTION_BIND, 5, &[(CONNECTION_ID, &[0; 4])]),
        binding(10),
    ];
    let before = world.streams().closed(CloseReason::Client);
    let mut count = 0;
    for message in &messages {
        for len in 1..message.len() {
            let mut client = Client::new(connect());
            allocated(&mut client, &bound, &permitted);
            client.send(&message[..len]);
            end(&mut client.stream);
            assert_eq!(client.receive(), None, "{len} bytes of {message:?}");
            count += 1;
        }
    }
    world.wait_for_closed(CloseReason::Client, before + count);
    eventually("no allocation is left", || world.allocations() == 0);
    for peer in [bound, permitted] {
        peer.set_nonblocking(true).unwrap();
        assert!(peer.recv(&mut [0; 64]).is_err(), "data was relayed");
    }
}

fn allocated<S: Read + Write>(client: &mut Client<S>, bound: &UdpSocket, permitted: &UdpSocket) {
    client.allocated(bound);
    client.ask(&permit(permitted.local_addr().unwrap()));
}

#[test]
fn truncated_messages_have_no_effect_over_tcp() {
    let world = world();
    let end = |stream: &mut TcpStream| stream.shutdown(Shutdown::Write).unwrap();
    every_truncation_is_nothing(&world, || connect(world.tcp()), end);
}

#[test]
fn truncated_messages_have_no_effect_over_tls() {
    let world = world();
    let config = tls_config(&[]);
    let end = |stream: &mut TlsStream| {
        stream.conn.send_close_notify();
        stream.flush().unwrap();
    };
    every_truncation_is_nothing(&world, || tls(&world, &config), end);
}

/// RFC 6062 section 5.4: bytes that follow a ConnectionBind are for the peer, even if they look like a
/// message.
fn data_follows_every_cut<S: Cut>(world: &World, connect: impl Fn() -> S) {
    let mut fence = Fence::new(world);
    let mut control = world.client();
    control.ask(&stun(ALLOCATE, 1, &[(0x0019, &[6, 0, 0, 0])]));
    let data = [&binding(3)[..], &channel_data(b"odd")].concat();
    let mut at = 0;
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let there: SocketAddr = listener.local_addr().unwrap();
        let id = u8::try_from(at % 200).unwrap() + 20;
        let connection =
            control.ask(&stun(CONNECT, id, &[(XOR_PEER_ADDRESS, &xored(there))])).attribute(CONNECTION_ID);
        let (mut far, _) = listener.accept().unwrap();
        far.set_read_timeout(Some(SOON)).unwrap();
        let request = stun(CONNECTION_BIND, 5, &[(CONNECTION_ID, &connection)]);
        let bytes = [&request[..], &data].concat();
        if at == bytes.len() + S::MORE {
            return;
        }
        let mut stream = connect();
        stream.write_halves(&bytes, at, &mut fence);
        let mut arrived = vec![0; data.len()];
        far.read_exact(&mut arrived).unwrap();
        assert_eq!(arrived, data, "cut at {at}");
        far.write_all(b"back").unwrap();
        let mut answer = [0; 20];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..2], [0x01, 0x0B]);
        let mut rest = vec![0; usize::from(u16::from_be_bytes([answer[2], answer[3]])) + 4];
        stream.read_exact(&mut rest).unwrap();
        assert!(rest.ends_with(b"back"), "cut at {at}");
        at += 1;
    }
}

#[test]
fn split_connection_bind_and_data_work_over_tcp() {
    let world = world();
    data_follows_every_cut(&world, || connect(world.tcp()));
}

#[test]
fn split_connection_bind_and_data_work_over_tls() {
    let world = world();
    let config = tls_config(&[]);
    data_follows_every_cut(&world, || tls(&world, &config));
    data_follows_every_cut(&world, || CutRecord(tls(&world, &config)));
}
