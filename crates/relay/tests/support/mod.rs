//! A relay in this process, and clients that build their own messages.

pub(crate) mod dtls;
pub(crate) mod witness;

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, StreamOwned, SupportedProtocolVersion,
    pki_types::{ServerName, UnixTime},
};
use turnpike_relay::{
    AllocationLog, CloseReason, Config, CredentialStore, HandshakeFailure, Identity, Relay, RelayAddress,
    StreamConfig, StreamStats, TlsContext, WorkerSnapshot,
};
pub(crate) use turnpike_testkit::{
    PATIENCE as SOON,
    alone::{in_network_namespace, run},
    eventually,
    stun::{Message, attribute::*, kind::*, message as stun},
};
use turnpike_testkit::{
    certificates::{Certificate, believing_client},
    stun,
};
use turnpike_turn::server::{PeerRules, ServerConfig};
use turnpike_wire::frame::{Framer, MAX_MESSAGE_LEN};

pub(crate) const CHANNEL: u16 = 0x4001;

pub(crate) struct World {
    pub(crate) relay: Relay,
}

/// One worker on loopback: UDP and TCP on one port, TLS on another if there is a TLS context.
pub(crate) fn start(change: impl FnOnce(&mut StreamConfig)) -> World {
    start_with(|config| change(&mut config.streams))
}

pub(crate) fn start_workers(workers: usize) -> World {
    start_with(|config| {
        config.workers = workers;
        config.streams.tls = Some(context(&[identity(&["turn.example.org"])]));
    })
}

/// Like [`start`]; DTLS gets its own port if there is a DTLS context, unless configured otherwise.
pub(crate) fn start_with(change: impl FnOnce(&mut Config)) -> World {
    start_with_store(Arc::new(()), change)
}

pub(crate) fn start_with_store(store: Arc<dyn CredentialStore>, change: impl FnOnce(&mut Config)) -> World {
    start_heard_by(Arc::new(()), store, change)
}

pub(crate) fn start_heard_by(
    log: Arc<dyn AllocationLog>,
    store: Arc<dyn CredentialStore>,
    change: impl FnOnce(&mut Config),
) -> World {
    World { relay: Relay::start(&configured(change), store, log).unwrap() }
}

pub(crate) fn configured(change: impl FnOnce(&mut Config)) -> Config {
    let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    let mut config = Config {
        listen: vec![any],
        streams: StreamConfig { listen: vec![any], ..StreamConfig::default() },
        relay: vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None }],
        ports: 20_000..=29_999,
        relay_buffer: 8 << 20,
        server: ServerConfig {
            // Tests need no credentials.
            authenticate: false,
            relay_v6: false,
            peers: PeerRules { allow: vec!["127.0.0.0/8".parse().unwrap()], ..PeerRules::default() },
            ..ServerConfig::default()
        },
        ..Config::default()
    };
    change(&mut config);
    if config.streams.tls.is_some() {
        config.streams.tls_listen = vec![any];
    }
    if config.dtls.context.is_some() && config.dtls.listen.is_empty() {
        config.dtls.listen = vec![(Ipv4Addr::new(127, 0, 0, 2), 0).into()];
    }
    config
}

impl World {
    pub(crate) fn tcp(&self) -> SocketAddr {
        self.relay.listeners().tcp[0]
    }

    pub(crate) fn udp(&self) -> SocketAddr {
        self.relay.listeners().udp[0]
    }

    pub(crate) fn counter(&self, family: &str, label: &str) -> u64 {
        let snapshots = self.relay.snapshots();
        let of = |snapshot: &WorkerSnapshot| -> u64 {
            let counters = snapshot.turn.counters();
            let wanted = counters
                .filter(|(name, with, _)| *name == family && with.is_some_and(|with| with.1 == label));
            wanted.map(|(_, _, value)| value).sum()
        };
        snapshots.iter().map(of).sum()
    }

    /// Waits until the counter is positive, or zero if `should` is false.
    pub(crate) fn wait_whether(&self, family: &str, label: &str, should: bool) {
        eventually(&format!("{family} {label}: {should}"), || (self.counter(family, label) > 0) == should);
    }

    pub(crate) fn wait_for_counter(&self, family: &str, label: &str, value: u64) {
        eventually(&format!("{family} {label} is {value}"), || self.counter(family, label) == value);
    }

    pub(crate) fn tls(&self) -> SocketAddr {
        self.relay.listeners().tls[0]
    }

    pub(crate) fn client(&self) -> Client<TcpStream> {
        Client::new(connect(self.tcp()))
    }

    pub(crate) fn streams(&self) -> StreamStats {
        self.relay.snapshots()[0].streams
    }

    pub(crate) fn allocations(&self) -> u64 {
        self.relay.snapshots()[0].allocations
    }

    pub(crate) fn wait_for(&self, what: &str, reached: impl Fn(&StreamStats) -> bool) {
        eventually(what, || reached(&self.streams()));
    }

    /// Waits until transfers between clients and peers have stalled `count` times.
    pub(crate) fn wait_for_stalls(&self, count: u64) {
        eventually("transfers stall", || self.relay.snapshots()[0].peers.stalls >= count);
    }

    pub(crate) fn wait_for_closed(&self, reason: CloseReason, count: u64) {
        eventually(&format!("{reason:?} {count} times"), || self.streams().closed(reason) == count);
    }

    pub(crate) fn wait_for_failed(&self, why: HandshakeFailure, count: u64) {
        eventually(&format!("{why:?} {count} times"), || self.streams().failed(why) == count);
    }
}

pub(crate) fn vector(bytes: &[u8]) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
}

/// Body of a ClientHello with these suites and signature schemes, as written by OpenSSL 3.0; `session` is
/// inserted between random and suites.
pub(crate) fn hello_body(version: [u8; 2], session: &[u8], suites: &[u16], schemes: &[u16]) -> Vec<u8> {
    let list = |items: &[u16]| -> Vec<u8> { items.iter().flat_map(|item| item.to_be_bytes()).collect() };
    let extension = |kind: u16, value: &[u8]| [&kind.to_be_bytes()[..], &vector(value)].concat();
    let extensions = [
        extension(11, &[3, 0, 1, 2]),
        extension(10, &vector(&list(&[0x1D, 0x17, 0x1E, 0x19, 0x18]))),
        extension(35, &[]),
        extension(22, &[]),
        extension(23, &[]),
        extension(13, &vector(&list(schemes))),
    ];
    let (suites, extensions) = (vector(&list(suites)), vector(&extensions.concat()));
    [&version[..], &[7; 32], session, &suites, &[1, 0], &extensions].concat()
}

pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&to, SOON).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.set_write_timeout(Some(SOON)).unwrap();
    stream
}

pub(crate) fn binding(id: u8) -> Vec<u8> {
    stun(BINDING, id, &[])
}

pub(crate) fn allocate() -> Vec<u8> {
    stun(ALLOCATE, 1, &[(0x0019, &[17, 0, 0, 0])])
}

pub(crate) fn refresh(id: u8) -> Vec<u8> {
    stun(REFRESH, id, &[(0x000D, &600_u32.to_be_bytes())])
}

/// Value of XOR-PEER-ADDRESS for an IPv4 address, which does not depend on the transaction ID.
pub(crate) fn xored(address: SocketAddr) -> Vec<u8> {
    assert!(address.is_ipv4());
    stun::xor_address(address, 0)
}

pub(crate) fn plain(value: &[u8]) -> SocketAddr {
    stun::address(value, 0)
}

pub(crate) fn permit(peer: SocketAddr) -> Vec<u8> {
    stun(CREATE_PERMISSION, 3, &[(0x0012, &xored(peer))])
}

pub(crate) fn bind(peer: SocketAddr) -> Vec<u8> {
    let number = [&CHANNEL.to_be_bytes()[..], &[0, 0]].concat();
    stun(CHANNEL_BIND, 2, &[(0x000C, &number), (0x0012, &xored(peer))])
}

pub(crate) fn channel_data(payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
    [&CHANNEL.to_be_bytes(), &length[..], payload].concat()
}

pub(crate) fn padded(mut message: Vec<u8>) -> Vec<u8> {
    message.resize(message.len().next_multiple_of(4), 0);
    message
}

pub(crate) struct Client<S> {
    pub(crate) stream: S,
    framer: Framer,
    messages: Vec<Message>,
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, framer: Framer::new(), messages: Vec::new() }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
        self.stream.flush().unwrap();
    }

    /// Next message, without its padding; `None` at the end of the stream.
    pub(crate) fn receive(&mut self) -> Option<Message> {
        while self.messages.is_empty() {
            let mut buffer = [0; 4096];
            let len = match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(len) => len,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
                    ) =>
                {
                    return None;
                }
                Err(error) => panic!("{error}"),
            };
            let messages = &mut self.messages;
            let keep = |message: &[u8]| messages.push(Message(message.to_vec()));
            self.framer.feed(&buffer[..len], MAX_MESSAGE_LEN, keep).unwrap();
        }
        Some(self.messages.remove(0))
    }

    pub(crate) fn ask(&mut self, request: &[u8]) -> Message {
        self.send(request);
        let answer = self.receive().expect("an answer");
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0100, "{answer:?}");
        answer
    }

    pub(crate) fn allocated(&mut self, peer: &UdpSocket) -> SocketAddr {
        let relayed = plain(&self.ask(&allocate()).attribute(0x0016));
        self.ask(&bind(peer.local_addr().unwrap()));
        relayed
    }

    pub(crate) fn ends(&mut self) {
        while self.receive().is_some() {}
    }
}

pub(crate) fn peer() -> UdpSocket {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

pub(crate) fn heard(peer: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65_536];
    let (len, _) = peer.recv_from(&mut buffer).unwrap();
    buffer.truncate(len);
    buffer
}

pub(crate) fn identity(names: &[&str]) -> Identity {
    identity_of(&Certificate::new(names))
}

pub(crate) fn identity_of(certificate: &Certificate) -> Identity {
    Identity::from_pem(certificate.pem.as_bytes(), certificate.key.as_bytes()).unwrap()
}

pub(crate) fn now() -> u64 {
    UnixTime::now().as_secs()
}

pub(crate) fn context(identities: &[Identity]) -> Arc<TlsContext> {
    Arc::new(TlsContext::new(identities).unwrap())
}

pub(crate) fn tls_config_of(version: &'static SupportedProtocolVersion) -> Arc<ClientConfig> {
    Arc::new(believing_client(&[version]))
}

pub(crate) fn tls_config(protocols: &[&str]) -> Arc<ClientConfig> {
    let mut config = believing_client(rustls::ALL_VERSIONS);
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    Arc::new(config)
}

pub(crate) type TlsStream = StreamOwned<ClientConnection, TcpStream>;

pub(crate) fn tls_connect(to: SocketAddr, name: &str, config: &Arc<ClientConfig>) -> io::Result<TlsStream> {
    tls_connect_behind(to, &[], name, config)
}

pub(crate) fn tls_connect_behind(
    to: SocketAddr,
    lead: &[u8],
    name: &str,
    config: &Arc<ClientConfig>,
) -> io::Result<TlsStream> {
    let connection =
        ClientConnection::new(Arc::clone(config), ServerName::try_from(name.to_owned()).unwrap()).unwrap();
    let mut stream = StreamOwned::new(connection, connect(to));
    stream.sock.write_all(lead)?;
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    Ok(stream)
}
