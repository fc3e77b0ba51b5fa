//! What attackers speak by who wait for answers: a socket, a connection, a connection with TLS. And users of a server, who have an
//! allocation and ask for what they must not get.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::Arc,
};

use rustls::{ClientConnection, StreamOwned, pki_types::ServerName};
use turnpike_testkit::certificates;

use crate::harness::{Answer, Challenge, SOON, plain_message, signed_request};

/// An Allocate request (RFC 8656 section 18).
pub(super) const ALLOCATE: u16 = 0x0003;
pub(super) const REQUESTED_TRANSPORT: u16 = 0x0019;

/// One way to a server, and back.
pub(super) enum Wire {
    Datagrams(UdpSocket),
    Stream(Box<dyn StreamOfBytes>),
}

/// See [`Wire`].
pub(super) trait StreamOfBytes: Read + Write + Send {}

impl<S: Read + Write + Send> StreamOfBytes for S {}

impl Wire {
    /// From an address that no witness has: whatever is held against it is held against nobody else.
    pub(super) fn udp(server: SocketAddr) -> Self {
        let own = IpAddr::V4(Ipv4Addr::new(127, 3, 3, 3));
        let socket = UdpSocket::bind((own, 0)).expect("each address of loopback is ours");
        socket.connect(server).expect("loopback has a route");
        socket.set_read_timeout(Some(SOON)).expect("not zero");
        Self::Datagrams(socket)
    }

    pub(super) fn tcp(server: SocketAddr) -> Self {
        Self::Stream(Box::new(connect(server)))
    }

    pub(super) fn tls(server: SocketAddr) -> Self {
        Self::Stream(Box::new(handshake(server)))
    }

    pub(super) fn send(&mut self, message: &[u8]) {
        match self {
            Self::Datagrams(socket) => _ = socket.send(message).expect("loopback takes it"),
            Self::Stream(stream) => {
                stream.write_all(message).expect("it is open");
                stream.flush().expect("it is open");
            }
        }
    }

    pub(super) fn receive(&mut self) -> Answer {
        let mut buffer = [0; 4096];
        let len = match self {
            Self::Datagrams(socket) => socket.recv(&mut buffer).expect("a request is answered"),
            Self::Stream(stream) => {
                stream.read_exact(&mut buffer[..20]).expect("a request is answered");
                let len = 20 + usize::from(u16::from_be_bytes([buffer[2], buffer[3]]));
                stream.read_exact(&mut buffer[20..len]).expect("an answer is whole");
                len
            }
        };
        Answer::parse(&buffer[..len])
    }
}

fn connect(server: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&server, SOON).expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("not zero");
    stream
}

/// A connection with TLS, whose handshake is done.
pub(super) fn handshake(server: SocketAddr) -> StreamOwned<ClientConnection, TcpStream> {
    let mut stream = StreamOwned::new(hello(), connect(server));
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).expect("the handshake succeeds");
    }
    stream
}

/// The client's side of a connection with TLS.
fn hello() -> ClientConnection {
    let config = certificates::believing_client(rustls::ALL_VERSIONS);
    let name = ServerName::try_from("turn.example.org").expect("it is a name");
    ClientConnection::new(Arc::new(config), name).expect("a valid configuration")
}

/// A whole ClientHello of TLS.
pub(super) fn client_hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    hello().write_tls(&mut bytes).expect("a vector takes it");
    bytes
}

/// A user, whose requests are signed.
pub(super) struct User {
    pub(super) wire: Wire,
    name: &'static str,
    password: &'static str,
    challenge: Challenge,
    requests: u8,
}

impl User {
    /// Who has asked once, and knows realm and nonce.
    pub(super) fn new(mut wire: Wire, name: &'static str, password: &'static str) -> Self {
        wire.send(&plain_message(ALLOCATE, 0, &[(REQUESTED_TRANSPORT, &[17, 0, 0, 0])]));
        let challenge = wire.receive().challenge();
        Self { wire, name, password, challenge, requests: 0 }
    }

    /// Says it, and waits for nothing.
    pub(super) fn say(&mut self, message_type: u16, attributes: &[(u16, &[u8])]) {
        self.requests = self.requests.wrapping_add(1);
        let credentials = (self.name, self.password, &self.challenge);
        let request = signed_request(message_type, self.requests, attributes, credentials);
        self.wire.send(&request);
    }

    pub(super) fn ask(&mut self, message_type: u16, attributes: &[(u16, &[u8])]) -> Answer {
        self.say(message_type, attributes);
        self.wire.receive()
    }

    /// An allocation for UDP (17) or TCP (6), with more attributes.
    pub(super) fn allocate(&mut self, protocol: u8, more: &[(u16, &[u8])]) -> Answer {
        let transport: (u16, &[u8]) = (REQUESTED_TRANSPORT, &[protocol, 0, 0, 0]);
        let answer = self.ask(ALLOCATE, &[&[transport], more].concat());
        assert_eq!(answer.error(), None, "an allocation is granted");
        answer
    }
}
