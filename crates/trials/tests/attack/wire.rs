//! Transports for attackers that read responses (UDP, TCP, TLS, DTLS), and requests that users with an allocation may not send.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    mem,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::{ClientConnection, StreamOwned, pki_types::ServerName};
use turnpike_client::{Security, TlsOptions, dtls};
use turnpike_testkit::{
    certificates,
    stun::{self, attribute::*, kind::*},
};

use turnpike_trials::SOON;

pub(super) enum Wire {
    Datagrams(UdpSocket),
    Stream(Box<dyn StreamOfBytes>),
    Dtls(Box<Association>),
}

pub(super) trait StreamOfBytes: Read + Write + Send {}

impl<S: Read + Write + Send> StreamOfBytes for S {}

impl Wire {
    pub(super) fn new(transport: &str, server: SocketAddr) -> Self {
        match transport {
            "udp" => Self::udp(server),
            "tcp" => Self::tcp(server),
            "tls" => Self::tls(server),
            _ => Self::Dtls(Box::new(Association::new(server))),
        }
    }

    pub(super) fn udp(server: SocketAddr) -> Self {
        Self::Datagrams(socket(server))
    }

    pub(super) fn tcp(server: SocketAddr) -> Self {
        Self::Stream(Box::new(connect(server)))
    }

    pub(super) fn tls(server: SocketAddr) -> Self {
        Self::Stream(Box::new(handshake(server)))
    }

    pub(super) fn send(&mut self, message: &[u8]) {
        match self {
            Self::Datagrams(socket) => _ = socket.send(message).expect("loopback accepts the packet"),
            Self::Stream(stream) => {
                stream.write_all(message).expect("the connection is open");
                stream.flush().expect("the connection is open");
            }
            Self::Dtls(association) => association.send(message),
        }
    }

    pub(super) fn receive(&mut self) -> stun::Message {
        stun::Message::stun(&self.hear())
    }

    pub(super) fn arrived(&mut self) -> Vec<stun::Message> {
        let Self::Datagrams(socket) = self else { panic!("not a datagram socket") };
        let mut buffer = [0; 4096];
        socket.set_nonblocking(true).expect("a socket");
        let answers = std::iter::from_fn(|| {
            socket.recv(&mut buffer).ok().map(|len| stun::Message::stun(&buffer[..len]))
        });
        let answers = answers.collect();
        socket.set_nonblocking(false).expect("a socket");
        answers
    }

    pub(super) fn read(&mut self, len: usize) -> Vec<u8> {
        let Self::Stream(stream) = self else { panic!("not a byte stream") };
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes).expect("data arrives");
        bytes
    }

    pub(super) fn hear(&mut self) -> Vec<u8> {
        match self {
            Self::Datagrams(socket) => {
                let mut buffer = [0; 4096];
                let len = socket.recv(&mut buffer).expect("data arrives");
                buffer[..len].to_vec()
            }
            Self::Stream(stream) => {
                let mut message = vec![0; 4];
                stream.read_exact(&mut message).expect("data arrives");
                let len = usize::from(u16::from_be_bytes([message[2], message[3]]));
                // ChannelData is padded over streams (RFC 8656 section 12.5); the length of a STUN message excludes its header.
                let rest = if message[0] & 0xC0 == 0x40 { len.next_multiple_of(4) } else { 16 + len };
                message.resize(4 + rest, 0);
                stream.read_exact(&mut message[4..]).expect("the message is complete");
                message
            }
            Self::Dtls(association) => association.hear(),
        }
    }
}

/// UDP socket connected to the server; on loopback, it is bound to an address that no witness uses, so that penalties apply only to the
/// attacker.
fn socket(server: SocketAddr) -> UdpSocket {
    let own = if server.ip().is_loopback() { Ipv4Addr::new(127, 3, 3, 3) } else { Ipv4Addr::UNSPECIFIED };
    let socket = UdpSocket::bind((IpAddr::V4(own), 0)).expect("loopback addresses are local");
    socket.connect(server).expect("the destination is reachable");
    socket.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    socket
}

pub(super) struct Association {
    socket: UdpSocket,
    client: dtls::ClientAssociation,
    heard: VecDeque<Vec<u8>>,
}

impl Association {
    fn new(server: SocketAddr) -> Self {
        let options = TlsOptions { insecure: true, ..TlsOptions::default() };
        let security = Security::new(&options, Some("turn.example.org"), server).expect("a valid name");
        let settings = dtls::DtlsSettings::new(security, SOON).expect("a valid configuration");
        let client =
            dtls::ClientAssociation::new(&settings, None, Instant::now()).expect("the handshake starts");
        let mut association = Self { socket: socket(server), client, heard: VecDeque::new() };
        association.pass();
        while !association.client.is_connected() {
            association.read();
        }
        association
    }

    fn send(&mut self, message: &[u8]) {
        self.client.send(message).expect("the handshake is over");
        self.pass();
    }

    fn hear(&mut self) -> Vec<u8> {
        let until = Instant::now() + SOON;
        loop {
            if let Some(message) = self.heard.pop_front() {
                return message;
            }
            assert!(Instant::now() < until, "no data arrived");
            self.read();
        }
    }

    fn read(&mut self) {
        let now = Instant::now();
        let until = self.client.timeout().map_or(SOON, |at| at.saturating_duration_since(now));
        let wait = until.clamp(Duration::from_millis(1), SOON);
        self.socket.set_read_timeout(Some(wait)).expect("the timeout is not zero");
        let mut buffer = [0; 4096];
        match self.socket.recv(&mut buffer) {
            Ok(len) => self.client.handle_datagram(&buffer[..len]).expect("the record is valid"),
            Err(_) => self.client.handle_timeout(Instant::now()).expect("the handshake has not timed out"),
        }
        self.pass();
    }

    fn pass(&mut self) {
        let Self { socket, client, heard } = self;
        let send = |packet: &[u8]| _ = socket.send(packet).expect("the link accepts the packet");
        client.drain(send, |message| heard.push_back(message.to_vec())).expect("the association continues");
    }
}

fn connect(server: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&server, SOON).expect("the listener accepts connections");
    stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    stream
}

pub(super) fn handshake(server: SocketAddr) -> StreamOwned<ClientConnection, TcpStream> {
    let mut stream = StreamOwned::new(hello(), connect(server));
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).expect("the handshake succeeds");
    }
    stream
}

fn hello() -> ClientConnection {
    let config = certificates::believing_client(rustls::ALL_VERSIONS);
    let name = ServerName::try_from("turn.example.org").expect("a valid name");
    ClientConnection::new(Arc::new(config), name).expect("a valid configuration")
}

pub(super) fn client_hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    hello().write_tls(&mut bytes).expect("writing to a vector succeeds");
    bytes
}

pub(super) struct User {
    pub(super) wire: Wire,
    name: &'static str,
    password: &'static str,
    challenge: stun::Challenge,
}

impl User {
    /// Sends one request to learn realm and nonce.
    pub(super) fn new(mut wire: Wire, name: &'static str, password: &'static str) -> Self {
        wire.send(&stun::plain_message(ALLOCATE, &[(REQUESTED_TRANSPORT, &stun::UDP)]));
        let challenge = wire.receive().challenge();
        Self { wire, name, password, challenge }
    }

    pub(super) fn say(&mut self, message_type: u16, attributes: &[(u16, &[u8])]) {
        let credentials = (self.name, self.password, &self.challenge);
        let request = stun::signed_request(message_type, attributes, credentials);
        self.wire.send(&request);
    }

    pub(super) fn ask(&mut self, message_type: u16, attributes: &[(u16, &[u8])]) -> stun::Message {
        self.say(message_type, attributes);
        self.wire.receive()
    }

    /// Sends one request as another user over the same connection.
    pub(super) fn ask_as(
        &mut self,
        (name, password): (&'static str, &'static str),
        message_type: u16,
        attributes: &[(u16, &[u8])],
    ) -> stun::Message {
        let own = (mem::replace(&mut self.name, name), mem::replace(&mut self.password, password));
        let answer = self.ask(message_type, attributes);
        (self.name, self.password) = own;
        answer
    }

    /// Allocates with the protocol UDP (17) or TCP (6) and additional attributes.
    pub(super) fn allocate(&mut self, protocol: u8, more: &[(u16, &[u8])]) -> stun::Message {
        let transport: (u16, &[u8]) = (REQUESTED_TRANSPORT, &[protocol, 0, 0, 0]);
        let answer = self.ask(ALLOCATE, &[&[transport], more].concat());
        assert_eq!(answer.error(), None, "the allocation is granted");
        answer
    }
}
