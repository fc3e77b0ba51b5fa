//! A bare STUN client that writes its bytes by hand: an oracle that shares no code with what is tested, and can send what
//! no honest client would.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use hmac::{Hmac, Mac};
use md5::{Digest, Md5};
use sha1::Sha1;
use turnpike_testkit::stun;

use super::{SOON, V4, V6};

/// Initial retransmission timeout (RFC 8489 section 6.2.1).
const RTO: Duration = Duration::from_millis(500);

const BINDING: u16 = 0x0001;
const ALLOCATE: u16 = 0x0003;
const USERNAME: u16 = 0x0006;
const MESSAGE_INTEGRITY: u16 = 0x0008;
const ERROR_CODE: u16 = 0x0009;
const REALM: u16 = 0x0014;
const NONCE: u16 = 0x0015;
const REQUESTED_TRANSPORT: u16 = 0x0019;
const ALTERNATE_SERVER: u16 = 0x8023;
/// UDP, as REQUESTED-TRANSPORT has it (RFC 8656 section 18.7).
const UDP: [u8; 4] = [17, 0, 0, 0];

pub(crate) struct Stun {
    socket: UdpSocket,
    requests: u8,
}

/// An answer, taken apart.
pub(crate) struct Answer {
    /// Length of the whole message in bytes.
    pub(crate) len: usize,
    message_type: u16,
    attributes: Vec<(u16, Vec<u8>)>,
}

/// What a 401 tells a client to use.
pub(crate) struct Challenge {
    pub(crate) realm: Vec<u8>,
    pub(crate) nonce: Vec<u8>,
}

impl Stun {
    pub(crate) fn new(server: SocketAddr) -> Self {
        Self::from(if server.is_ipv4() { V4 } else { V6 }, server)
    }

    /// From this address of ours.
    pub(crate) fn from(local: IpAddr, server: SocketAddr) -> Self {
        let socket = UdpSocket::bind((local, 0)).expect("loopback has a free port");
        socket.connect(server).expect("loopback has a route");
        socket.set_read_timeout(Some(SOON)).expect("not zero");
        Self { socket, requests: 0 }
    }

    /// Whether there is a server that answers Binding; for waiting until there is.
    pub(crate) fn is_answered(&mut self) -> bool {
        self.send(BINDING, &[]);
        self.socket.set_read_timeout(Some(SOON / 100)).expect("not zero");
        let answered = self.receive().is_some();
        self.socket.set_read_timeout(Some(SOON)).expect("not zero");
        answered
    }

    /// Length of an Allocate request without credentials, and its 401.
    pub(crate) fn challenge(&mut self) -> (usize, Answer, Challenge) {
        let len = self.send(ALLOCATE, &[(REQUESTED_TRANSPORT, &UDP)]);
        let answer = self.receive().expect("an Allocate is answered");
        assert_eq!(answer.error(), Some(401));
        let challenge = answer.challenge();
        (len, answer, challenge)
    }

    /// Asks for an allocation as `username` with a MESSAGE-INTEGRITY that no key makes; the error code of the answer.
    pub(crate) fn forge(&mut self, username: &str, realm: &[u8], nonce: &[u8]) -> Option<u16> {
        self.forge_bytes(username.as_bytes(), realm, nonce)
    }

    /// The same for a USERNAME that may be no text.
    pub(crate) fn forge_bytes(&mut self, username: &[u8], realm: &[u8], nonce: &[u8]) -> Option<u16> {
        self.requests = self.requests.wrapping_add(1);
        self.send_raw(&forged_request(self.requests, username, realm, nonce));
        self.receive().expect("a request is answered").error()
    }

    /// Asks for an allocation with a password, once more where the nonce is stale; the error code of the answer, or `None` if it
    /// is granted.
    pub(crate) fn allocate(&mut self, username: &str, password: &str, challenge: &Challenge) -> Option<u16> {
        let answer = self.allocate_once(username, password, challenge);
        if answer.error() != Some(438) {
            return answer.error();
        }
        let again = answer.challenge();
        assert_eq!(again.realm, challenge.realm, "a nonce for the realm that was asked for");
        self.allocate_once(username, password, &again).error()
    }

    fn allocate_once(&mut self, username: &str, password: &str, challenge: &Challenge) -> Answer {
        self.requests = self.requests.wrapping_add(1);
        let request = allocate_request(self.requests, Some((username, password, challenge)));
        let began = Instant::now();
        self.socket.set_read_timeout(Some(RTO)).expect("not zero");
        let answer = loop {
            self.send_raw(&request);
            if let Some(answer) = self.answer_to(&request) {
                break answer;
            }
            assert!(began.elapsed() < SOON, "a request is answered");
        };
        self.socket.set_read_timeout(Some(SOON)).expect("not zero");
        answer
    }

    /// The answer to a request. Those to earlier requests, which were repeated, are passed over.
    fn answer_to(&self, request: &[u8]) -> Option<Answer> {
        let mut buffer = [0; 2048];
        loop {
            let len = self.socket.recv(&mut buffer).ok()?;
            if buffer[8..20] == request[8..20] {
                return Some(Answer::parse(&buffer[..len]));
            }
        }
    }

    /// The same once, with the whole answer.
    pub(crate) fn ask(&mut self, username: &str, password: &str, challenge: &Challenge) -> Answer {
        self.allocate_once(username, password, challenge)
    }

    /// Sends bytes as they are.
    pub(crate) fn send_raw(&self, bytes: &[u8]) {
        self.socket.send(bytes).expect("loopback takes a datagram");
    }

    /// The next message that the server sends.
    pub(crate) fn receive(&self) -> Option<Answer> {
        let mut buffer = [0; 2048];
        let len = self.socket.recv(&mut buffer).ok()?;
        Some(Answer::parse(&buffer[..len]))
    }

    fn send(&mut self, message_type: u16, attributes: &[(u16, &[u8])]) -> usize {
        self.requests = self.requests.wrapping_add(1);
        let message = write(message_type, self.requests, attributes);
        // An unconnected port answers with ICMP, which shows up here: nobody listens there yet.
        let _ = self.socket.send(&message);
        message.len()
    }
}

/// An Allocate request with a MESSAGE-INTEGRITY that no key makes.
pub(crate) fn forged_request(id: u8, username: &[u8], realm: &[u8], nonce: &[u8]) -> Vec<u8> {
    write(
        ALLOCATE,
        id,
        &[
            (REQUESTED_TRANSPORT, &UDP),
            (USERNAME, username),
            (REALM, realm),
            (NONCE, nonce),
            (MESSAGE_INTEGRITY, &[0x5A; 20]),
        ],
    )
}

/// An Allocate request; with credentials, signed.
pub(crate) fn allocate_request(id: u8, credentials: Option<(&str, &str, &Challenge)>) -> Vec<u8> {
    let attributes = [(REQUESTED_TRANSPORT, &UDP[..])];
    match credentials {
        Some(credentials) => signed_request(ALLOCATE, id, &attributes, credentials),
        None => write(ALLOCATE, id, &attributes),
    }
}

/// A request without credentials, or an indication.
pub(crate) fn plain_message(message_type: u16, id: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    write(message_type, id, attributes)
}

/// A request that is signed as RFC 8489 section 9.2.2 has it with an MD5 key.
pub(crate) fn signed_request(
    message_type: u16,
    id: u8,
    attributes: &[(u16, &[u8])],
    (username, password, Challenge { realm, nonce }): (&str, &str, &Challenge),
) -> Vec<u8> {
    let user = username.as_bytes();
    let credentials = [(USERNAME, user), (REALM, &realm[..]), (NONCE, &nonce[..])];
    let mut message = write(message_type, id, &[attributes, &credentials[..]].concat());
    // The length already counts the MAC.
    let length = short(message.len() - 20 + 24);
    message[2..4].copy_from_slice(&length.to_be_bytes());
    let key = Md5::digest([user, b":", realm, b":", password.as_bytes()].concat());
    let mut mac = Hmac::<Sha1>::new_from_slice(&key).expect("HMAC takes keys of any length");
    mac.update(&message);
    message.extend(MESSAGE_INTEGRITY.to_be_bytes());
    message.extend([0, 20]);
    message.extend(mac.finalize().into_bytes());
    message
}

fn write(message_type: u16, id: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut message = stun::message(message_type, id, attributes);
    // No two requests of this process share a transaction ID: to a server they would be copies.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    message[12..20].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    message
}

impl Answer {
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        assert!(bytes.len() >= 20 && bytes[4..8] == stun::MAGIC_COOKIE, "no STUN message: {bytes:?}");
        let number = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        assert_eq!(usize::from(number(2)), bytes.len() - 20, "the length of a STUN message");
        Self { len: bytes.len(), message_type: number(0), attributes: stun::attributes(bytes) }
    }

    /// The error code of an error response (class bits 11, RFC 8489 section 5).
    pub(crate) fn error(&self) -> Option<u16> {
        (self.message_type & 0x0110 == 0x0110).then(|| {
            let value = self.value(ERROR_CODE);
            u16::from(value[2]) * 100 + u16::from(value[3])
        })
    }

    /// Realm and nonce of a 401 or 438.
    pub(crate) fn challenge(&self) -> Challenge {
        Challenge { realm: self.value(REALM), nonce: self.value(NONCE) }
    }

    /// Where a 300 sends clients over IPv4 (RFC 8489 section 14.15).
    pub(crate) fn alternate(&self) -> SocketAddr {
        let value = self.value(ALTERNATE_SERVER);
        assert_eq!((value.len(), value[1]), (8, 1), "an IPv4 address: {value:?}");
        let ip: [u8; 4] = value[4..].try_into().expect("four bytes");
        SocketAddr::from((ip, u16::from_be_bytes([value[2], value[3]])))
    }

    /// The value of an attribute that it must have.
    pub(crate) fn value(&self, kind: u16) -> Vec<u8> {
        let found = self.attributes.iter().find(|(attribute, _)| *attribute == kind);
        found.unwrap_or_else(|| panic!("no attribute {kind:#06x}")).1.clone()
    }
}

fn short(len: usize) -> u16 {
    u16::try_from(len).expect("tests write short messages")
}
