//! A STUN client over UDP.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use super::{
    Challenge, Message, UDP, allocate_request,
    attribute::REQUESTED_TRANSPORT,
    forged_request,
    kind::{ALLOCATE, BINDING},
    plain_message, signed_request,
};
use crate::PATIENCE;

/// Initial retransmission timeout (RFC 8489 section 6.2.1).
const RTO: Duration = Duration::from_millis(500);

/// A client that keeps no state about its requests.
#[derive(Debug)]
pub struct Client {
    socket: UdpSocket,
}

impl Client {
    pub fn new(server: SocketAddr) -> Self {
        let v4 = server.is_ipv4();
        Self::from(if v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() }, server)
    }

    pub fn from(local: IpAddr, server: SocketAddr) -> Self {
        let socket = UdpSocket::bind((local, 0)).expect("a port is free");
        socket.connect(server).expect("the server is reachable");
        socket.set_read_timeout(Some(PATIENCE)).expect("not zero");
        Self { socket }
    }

    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    pub fn is_answered(&self) -> bool {
        // Errors are ignored, because send() may report the ICMP error of a closed port.
        let _ = self.socket.send(&plain_message(BINDING, &[]));
        self.waiting(PATIENCE / 100, || self.receive().is_some())
    }

    /// Sends an Allocate request without credentials. Returns its length, and the 401 response with its challenge.
    pub fn challenge(&self) -> (usize, Message, Challenge) {
        let request = plain_message(ALLOCATE, &[(REQUESTED_TRANSPORT, &UDP)]);
        self.send_raw(&request);
        let answer = self.receive().expect("an Allocate is answered");
        assert_eq!(answer.error(), Some(401));
        let challenge = answer.challenge();
        (request.len(), answer, challenge)
    }

    /// Sends an Allocate as `username` with an invalid MESSAGE-INTEGRITY; returns the error code.
    pub fn forge(&self, username: impl AsRef<[u8]>, realm: &[u8], nonce: &[u8]) -> Option<u16> {
        self.send_raw(&forged_request(username.as_ref(), realm, nonce));
        self.receive().expect("a request is answered").error()
    }

    /// Allocates with a password, and retries once if the nonce is stale; returns the error code, or `None`
    /// on success.
    pub fn allocate(&self, username: &str, password: &str, challenge: &Challenge) -> Option<u16> {
        let answer = self.allocate_once(username, password, challenge);
        if answer.error() != Some(438) {
            return answer.error();
        }
        let again = answer.challenge();
        assert_eq!(again.realm, challenge.realm, "the nonce is for the requested realm");
        self.allocate_once(username, password, &again).error()
    }

    pub fn allocate_once(&self, username: &str, password: &str, challenge: &Challenge) -> Message {
        self.ask(&allocate_request(Some((username, password, challenge))))
    }

    pub fn ask_as(
        &self,
        (username, password): (&str, &str),
        kind: u16,
        attributes: &[(u16, &[u8])],
    ) -> Message {
        let (_, _, challenge) = self.challenge();
        self.ask(&signed_request(kind, attributes, (username, password, &challenge)))
    }

    /// Sends a request, repeats it until a response arrives, and returns the response. Skips other messages.
    pub fn ask(&self, request: &[u8]) -> Message {
        let began = Instant::now();
        self.waiting(RTO, || {
            loop {
                self.send_raw(request);
                if let Some(answer) = self.answer_to(request) {
                    return answer;
                }
                assert!(began.elapsed() < PATIENCE, "a request got no answer");
            }
        })
    }

    fn answer_to(&self, request: &[u8]) -> Option<Message> {
        let mut buffer = [0; 4096];
        loop {
            let len = self.socket.recv(&mut buffer).ok()?;
            if len >= 20 && buffer[..2] != request[..2] && buffer[8..20] == request[8..20] {
                return Some(Message::stun(&buffer[..len]));
            }
        }
    }

    pub fn send_raw(&self, bytes: &[u8]) {
        self.socket.send(bytes).expect("a datagram leaves");
    }

    pub fn receive(&self) -> Option<Message> {
        let mut buffer = [0; 4096];
        let len = self.socket.recv(&mut buffer).ok()?;
        Some(Message::stun(&buffer[..len]))
    }

    fn waiting<T>(&self, patience: Duration, body: impl FnOnce() -> T) -> T {
        self.socket.set_read_timeout(Some(patience)).expect("not zero");
        let found = body();
        self.socket.set_read_timeout(Some(PATIENCE)).expect("not zero");
        found
    }
}
