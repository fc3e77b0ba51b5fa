//! A TURN client by hand, for a server that asks nobody for credentials; and its peer.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::super::harness::{SOON, eventually};

const COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];
const ALLOCATE: u16 = 0x003;
const REFRESH: u16 = 0x004;
const SEND: u16 = 0x016;
const PERMIT: u16 = 0x008;
const BIND: u16 = 0x009;
const CHANNEL_NUMBER: u16 = 0x00C;
const LIFETIME: u16 = 0x00D;
const PEER_ADDRESS: u16 = 0x012;
const DATA: u16 = 0x013;
const RELAYED: u16 = 0x016;
const FAMILY: u16 = 0x017;
const TRANSPORT: u16 = 0x019;

pub(crate) struct Client {
    pub(crate) socket: UdpSocket,
    pub(crate) relayed: SocketAddr,
}

impl Client {
    /// One with an allocation; its relayed address is of this family.
    pub(crate) fn allocate(own: IpAddr, server: SocketAddr, relay_v6: bool) -> Self {
        let socket = bound(own);
        socket.connect(server).expect("there is a route");
        let mut client = Self { socket, relayed: server };
        let family = [if relay_v6 { 2 } else { 1 }, 0, 0, 0];
        let answer = client.ask(ALLOCATE, &[(TRANSPORT, &[17, 0, 0, 0]), (FAMILY, &family)]);
        client.relayed = address_of(&answer, RELAYED);
        client
    }

    pub(crate) fn bind(&self, channel: u16, peer: SocketAddr) {
        let [high, low] = channel.to_be_bytes();
        self.ask(BIND, &[(CHANNEL_NUMBER, &[high, low, 0, 0]), (PEER_ADDRESS, &xored(peer))]);
    }

    pub(crate) fn permit(&self, peer: SocketAddr) {
        self.ask(PERMIT, &[(PEER_ADDRESS, &xored(peer))]);
    }

    pub(crate) fn refresh(&self, seconds: u32) {
        self.ask(REFRESH, &[(LIFETIME, &seconds.to_be_bytes())]);
    }

    /// On a channel.
    pub(crate) fn send(&self, channel: u16, payload: &[u8]) {
        let mut message = channel.to_be_bytes().to_vec();
        message.extend(u16::try_from(payload.len()).expect("short").to_be_bytes());
        message.extend(payload);
        self.socket.send(&message).expect("it leaves");
    }

    /// As a Send indication.
    pub(crate) fn indicate(&self, peer: SocketAddr, payload: &[u8]) {
        self.socket
            .send(&message(SEND, &[(PEER_ADDRESS, &xored(peer)), (DATA, payload)]))
            .expect("it leaves");
    }

    /// What comes on a channel.
    pub(crate) fn receive(&self) -> Option<(u16, Vec<u8>)> {
        let message = self.receive_message()?;
        let number = u16::from_be_bytes([message[0], message[1]]);
        assert!((0x4000..0x8000).contains(&number), "no ChannelData: {message:02x?}");
        assert_eq!(
            usize::from(u16::from_be_bytes([message[2], message[3]])),
            message.len() - 4,
            "its length"
        );
        Some((number, message[4..].to_vec()))
    }

    /// What comes, but for a second answer to a request that was sent again.
    pub(crate) fn receive_message(&self) -> Option<Vec<u8>> {
        let mut buffer = [0; 4096];
        loop {
            let len = self.socket.recv(&mut buffer).ok()?;
            if buffer[0] != 0x01 {
                return Some(buffer[..len].to_vec());
            }
        }
    }

    fn ask(&self, method: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let request = message(method, attributes);
        self.socket.set_read_timeout(Some(Duration::from_millis(500))).expect("not zero");
        let mut answer = [0; 2048];
        let len = eventually("an answer", || {
            self.socket.send(&request).ok()?;
            let len = self.socket.recv(&mut answer).ok()?;
            // What was on its way on a channel is not it.
            (answer[..2] != request[..2] && answer[8..20] == request[8..20]).then_some(len)
        });
        self.socket.set_read_timeout(Some(SOON)).expect("not zero");
        assert_eq!(u16::from_be_bytes([answer[0], answer[1]]), method | 0x100, "{:02x?}", &answer[..len]);
        answer[..len].to_vec()
    }
}

/// A socket with patience.
pub(crate) fn bound(address: IpAddr) -> UdpSocket {
    let socket = UdpSocket::bind((address, 0)).expect("a free port");
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    socket
}

/// What a peer receives, and from whom.
pub(crate) fn received(peer: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = [0; 4096];
    let (len, from) = peer.recv_from(&mut buffer).expect("a datagram");
    (buffer[..len].to_vec(), from)
}

/// Whether nothing comes for a while.
pub(crate) fn is_silent(socket: &UdpSocket) -> bool {
    socket.set_read_timeout(Some(Duration::from_millis(300))).expect("not zero");
    let silent = socket.recv_from(&mut [0; 4096]).is_err();
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    silent
}

fn message(kind: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut body = Vec::new();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let transaction = [&[7; 4][..], &number.to_be_bytes()].concat();
    for (kind, value) in attributes {
        body.extend(kind.to_be_bytes());
        body.extend(u16::try_from(value.len()).expect("short").to_be_bytes());
        if *kind == PEER_ADDRESS && value.len() == 20 {
            // All of it, by cookie and transaction ID (RFC 8489 section 14.2).
            let key = COOKIE.iter().chain(&transaction);
            body.extend(&value[..4]);
            body.extend(value[4..].iter().zip(key).map(|(a, b)| a ^ b));
        } else {
            body.extend(*value);
        }
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let mut message = kind.to_be_bytes().to_vec();
    message.extend(u16::try_from(body.len()).expect("short").to_be_bytes());
    message.extend(COOKIE);
    message.extend(transaction);
    message.extend(body);
    message
}

/// As XOR-PEER-ADDRESS has it; of IPv6 `message` does the rest, which has the transaction ID.
fn xored(address: SocketAddr) -> Vec<u8> {
    let port = address.port() ^ 0x2112;
    let mut value = vec![0, if address.is_ipv4() { 1 } else { 2 }];
    value.extend(port.to_be_bytes());
    match address.ip() {
        IpAddr::V4(ip) => value.extend(ip.octets().iter().zip(COOKIE).map(|(a, b)| a ^ b)),
        IpAddr::V6(ip) => value.extend(ip.octets()),
    }
    value
}

fn address_of(answer: &[u8], kind: u16) -> SocketAddr {
    let mut at = 20;
    loop {
        let number = |at: usize| u16::from_be_bytes([answer[at], answer[at + 1]]);
        let len = usize::from(number(at + 2));
        if number(at) == kind {
            let value = &answer[at + 4..at + 4 + len];
            let port = number(at + 6) ^ 0x2112;
            let key: Vec<u8> = COOKIE.iter().copied().chain(answer[8..20].iter().copied()).collect();
            let octets: Vec<u8> = value[4..].iter().zip(key).map(|(a, b)| a ^ b).collect();
            let ip: IpAddr = match <[u8; 4]>::try_from(&octets[..]) {
                Ok(v4) => v4.into(),
                Err(_) => <[u8; 16]>::try_from(&octets[..]).expect("an address").into(),
            };
            return SocketAddr::new(ip, port);
        }
        at += 4 + len.next_multiple_of(4);
    }
}
