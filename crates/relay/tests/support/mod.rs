//! A relay in this process, and clients that write their bytes by hand.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy.toml excuses test functions, not their helpers"
)]

pub(crate) mod dtls;
pub(crate) mod witness;

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned,
    SupportedProtocolVersion,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use turnpike_net::Datapath;
use turnpike_relay::{
    CloseReason, Config, CredentialStore, DtlsConfig, HandshakeFailure, Identity, Relay, RelayAddress,
    SessionLog, StreamConfig, StreamStats, TlsContext, WorkerSnapshot,
};
use turnpike_turn::server::{Effect, Lookup, PeerRules, ServerConfig, User};
use turnpike_wire::{
    frame::{Framer, MAX_MESSAGE_LEN},
    integrity::{Key, KeyAlgorithm},
};

pub(crate) const SOON: Duration = Duration::from_secs(20);
pub(crate) const CHANNEL: u16 = 0x4001;

pub(crate) const BINDING: u16 = 0x0001;
pub(crate) const ALLOCATE: u16 = 0x0003;
pub(crate) const REFRESH: u16 = 0x0004;
pub(crate) const SEND: u16 = 0x0016;
pub(crate) const DATA: u16 = 0x0017;
pub(crate) const PERMIT: u16 = 0x0008;
pub(crate) const BIND: u16 = 0x0009;

/// Nobody is asked for credentials here.
struct Nobody;

impl CredentialStore for Nobody {
    fn check(
        &self,
        _: User<'_>,
        _: &str,
        _: KeyAlgorithm,
        _: u64,
        _: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup {
        Lookup::NoSuchUser
    }
}

struct Silent;

impl SessionLog for Silent {
    fn effect(&self, _: usize, _: &Effect) {}
}

pub(crate) struct World {
    pub(crate) relay: Relay,
}

/// One worker on loopback: UDP and TCP on one port, TLS on another if there is a context.
pub(crate) fn start(change: impl FnOnce(&mut StreamConfig)) -> World {
    start_with(|config| change(&mut config.streams))
}

/// The same with so many workers.
pub(crate) fn start_workers(workers: usize) -> World {
    start_with(|config| {
        config.workers = workers;
        config.streams.tls = Some(context(&[identity(&["turn.example.org"])]));
    })
}

/// The same; DTLS on a port of its own if there is a context and nothing else is said.
pub(crate) fn start_with(change: impl FnOnce(&mut Config)) -> World {
    start_with_store(Arc::new(Nobody), change)
}

/// The same with these users.
pub(crate) fn start_with_store(store: Arc<dyn CredentialStore>, change: impl FnOnce(&mut Config)) -> World {
    let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    let mut config = Config {
        busy_poll: Duration::ZERO,
        realm_limits: Vec::new(),
        listen: vec![any],
        streams: StreamConfig { listen: vec![any], ..StreamConfig::default() },
        dtls: DtlsConfig::default(),
        workers: 1,
        datapath: Datapath::best().0,
        relay: vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None }],
        ports: 20_000..=29_999,
        addresses: Vec::new(),
        listeners_beside: Vec::new(),
        listener_buffer: 1 << 20,
        relay_buffer: 8 << 20,
        max_allocations: 1000,
        max_allocations_per_user: 1000,
        server: ServerConfig {
            authenticate: false,
            relay_v6: false,
            peers: PeerRules { allow: vec!["127.0.0.0/8".parse().unwrap()], ..PeerRules::default() },
            ..ServerConfig::default()
        },
    };
    change(&mut config);
    if config.streams.tls.is_some() {
        config.streams.tls_listen = vec![any];
    }
    if config.dtls.context.is_some() && config.dtls.listen.is_empty() {
        config.dtls.listen = vec![(Ipv4Addr::new(127, 0, 0, 2), 0).into()];
    }
    World { relay: Relay::start(&config, store, Arc::new(Silent)).unwrap() }
}

impl World {
    pub(crate) fn tcp(&self) -> SocketAddr {
        self.relay.listeners().tcp[0]
    }

    pub(crate) fn udp(&self) -> SocketAddr {
        self.relay.listeners().udp[0]
    }

    /// A counter of the state machine, over all workers.
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

    /// Waits until such a counter has counted something, if it should; else it must not have by now.
    pub(crate) fn wait_whether(&self, family: &str, label: &str, should: bool) {
        eventually(&format!("{family} {label}: {should}"), || {
            ((self.counter(family, label) > 0) == should).then_some(())
        });
    }

    /// Waits until such a counter has this value.
    pub(crate) fn wait_for_counter(&self, family: &str, label: &str, value: u64) {
        eventually(&format!("{family} {label} is {value}"), || {
            (self.counter(family, label) == value).then_some(())
        });
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
        eventually(what, || reached(&self.streams()).then_some(()));
    }

    /// Waits until moving bytes between clients and peers has stood still so often.
    pub(crate) fn wait_for_stalls(&self, count: u64) {
        eventually("bytes stand still", || (self.relay.snapshots()[0].peers.stalls >= count).then_some(()));
    }

    pub(crate) fn wait_for_closed(&self, reason: CloseReason, count: u64) {
        let deadline = Instant::now() + SOON;
        while self.streams().closed(reason) != count {
            assert!(Instant::now() < deadline, "{reason:?} {count} times: {:?}", self.streams());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn wait_for_failed(&self, why: HandshakeFailure, count: u64) {
        let deadline = Instant::now() + SOON;
        while self.streams().failed(why) != count {
            assert!(Instant::now() < deadline, "{why:?} {count} times: {:?}", self.streams());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Resident memory of this process in KiB.
pub(crate) fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Polls until `probe` finds something.
pub(crate) fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&to, SOON).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.set_write_timeout(Some(SOON)).unwrap();
    stream
}

/// A connection that the server resets, which may happen before it is known here to exist.
pub(crate) fn is_refused(to: SocketAddr) {
    let Ok(stream) = TcpStream::connect_timeout(&to, SOON) else { return };
    // Fails where the reset has arrived.
    let _ = stream.set_read_timeout(Some(SOON));
    Client::new(stream).ends();
}

/// A STUN message with these attributes.
pub(crate) fn stun(kind: u16, id: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, value) in attributes {
        body.extend(kind.to_be_bytes());
        body.extend(u16::try_from(value.len()).unwrap().to_be_bytes());
        body.extend_from_slice(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    [&kind.to_be_bytes(), &length[..], &[0x21, 0x12, 0xA4, 0x42], &[id; 12], &body].concat()
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

/// XOR-PEER-ADDRESS of an IPv4 address (RFC 8489 section 14.2).
pub(crate) fn xored(address: SocketAddr) -> Vec<u8> {
    let SocketAddr::V4(address) = address else { panic!("IPv4 here") };
    let ip = address.ip().to_bits() ^ 0x2112_A442;
    [&[0, 1], &(address.port() ^ 0x2112).to_be_bytes()[..], &ip.to_be_bytes()].concat()
}

/// The opposite of [`xored`].
pub(crate) fn plain(value: &[u8]) -> SocketAddr {
    let port = u16::from_be_bytes([value[2], value[3]]) ^ 0x2112;
    let ip = u32::from_be_bytes([value[4], value[5], value[6], value[7]]) ^ 0x2112_A442;
    (Ipv4Addr::from_bits(ip), port).into()
}

pub(crate) fn permit(peer: SocketAddr) -> Vec<u8> {
    stun(PERMIT, 3, &[(0x0012, &xored(peer))])
}

pub(crate) fn bind(peer: SocketAddr) -> Vec<u8> {
    let number = [&CHANNEL.to_be_bytes()[..], &[0, 0]].concat();
    stun(BIND, 2, &[(0x000C, &number), (0x0012, &xored(peer))])
}

/// Without padding.
pub(crate) fn channel_data(payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
    [&CHANNEL.to_be_bytes(), &length[..], payload].concat()
}

pub(crate) fn padded(mut message: Vec<u8>) -> Vec<u8> {
    message.resize(message.len().next_multiple_of(4), 0);
    message
}

/// A message, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message(pub(crate) Vec<u8>);

impl Message {
    pub(crate) fn kind(&self) -> u16 {
        u16::from_be_bytes([self.0[0], self.0[1]])
    }

    pub(crate) fn attribute(&self, wanted: u16) -> Vec<u8> {
        let mut rest = &self.0[20..];
        while let [a, b, c, d, tail @ ..] = rest {
            let len = usize::from(u16::from_be_bytes([*c, *d]));
            if u16::from_be_bytes([*a, *b]) == wanted {
                return tail[..len].to_vec();
            }
            rest = &tail[len.next_multiple_of(4)..];
        }
        panic!("no attribute {wanted:#06x} in {self:?}");
    }

    /// What ChannelData carries.
    pub(crate) fn payload(&self) -> &[u8] {
        assert_eq!(self.kind(), CHANNEL);
        &self.0[4..]
    }
}

/// A client over whatever moves bytes.
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

    /// The next message, without padding; `None` at the end of the stream.
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

    /// Asks, and returns what a success says.
    pub(crate) fn ask(&mut self, request: &[u8]) -> Message {
        self.send(request);
        let answer = self.receive().expect("an answer");
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0100, "{answer:?}");
        answer
    }

    /// An allocation with a channel to `peer`; the relayed transport address.
    pub(crate) fn allocated(&mut self, peer: &UdpSocket) -> SocketAddr {
        let relayed = plain(&self.ask(&allocate()).attribute(0x0016));
        self.ask(&bind(peer.local_addr().unwrap()));
        relayed
    }

    /// Reads until the server closes.
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

/// A self-signed certificate for these names.
pub(crate) fn identity(names: &[&str]) -> Identity {
    let (cert, key) = pem(names);
    Identity::from_pem(cert.as_bytes(), key.as_bytes(), now()).unwrap()
}

pub(crate) fn pem(names: &[&str]) -> (String, String) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

pub(crate) fn now() -> u64 {
    UnixTime::now().as_secs()
}

pub(crate) fn context(identities: &[Identity]) -> Arc<TlsContext> {
    Arc::new(TlsContext::new(identities).unwrap())
}

/// Believes whatever it is shown: these tests ask which certificate that is, not whether it is trusted.
#[derive(Debug)]
struct Believer;

impl ServerCertVerifier for Believer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// A client that speaks one version only.
pub(crate) fn tls_config_of(version: &'static SupportedProtocolVersion) -> Arc<ClientConfig> {
    Arc::new(client_config(&[version]))
}

fn client_config(versions: &[&'static SupportedProtocolVersion]) -> ClientConfig {
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Believer))
        .with_no_client_auth()
}

pub(crate) fn tls_config(protocols: &[&str]) -> Arc<ClientConfig> {
    let mut config = client_config(rustls::ALL_VERSIONS);
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    Arc::new(config)
}

pub(crate) type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// Shakes hands, as a client of this server name.
pub(crate) fn tls_connect(to: SocketAddr, name: &str, config: &Arc<ClientConfig>) -> io::Result<TlsStream> {
    tls_connect_behind(to, &[], name, config)
}

/// The same behind other bytes.
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

/// Runs `body` in a network namespace of its own with loopback up: this test starts itself again inside. Says why not where the machine
/// does not let it.
pub(crate) fn in_namespace(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "TURNPIKE_RELAY_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        run("ip", &["link", "set", "lo", "up"]);
        return body();
    }
    let allowed = |flags: &&str| {
        let probe = Command::new("unshare").args([flags, "ip", "link", "set", "lo", "up"]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    // A user namespace needs no privilege, but is often forbidden in containers, where root may do without.
    let Some(flags) = ["-n", "-rn"].into_iter().find(allowed) else {
        return println!("SKIPPED: {test}: unshare(1) and ip(8) cannot make a network namespace here");
    };
    let output = Command::new("unshare")
        .arg(flags)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{test} failed inside its namespace");
}

/// Runs a program that must succeed.
pub(crate) fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
