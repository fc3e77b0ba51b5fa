//! Hand-written STUN messages (RFC 8489 section 5) and a client: an independent oracle that shares no code with turnpike and can send
//! invalid messages.

mod client;
mod message;

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicU64, Ordering},
};

pub use client::Client;
pub use message::{Challenge, Message, allocate_request, forged_request, plain_message, signed_request};

pub const MAGIC_COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];

/// Request and indication types (RFC 8489 section 18.2, RFC 8656 section 17, RFC 6062 section 6.1).
pub mod kind {
    pub const BINDING: u16 = 0x0001;
    pub const ALLOCATE: u16 = 0x0003;
    pub const REFRESH: u16 = 0x0004;
    pub const CREATE_PERMISSION: u16 = 0x0008;
    pub const CHANNEL_BIND: u16 = 0x0009;
    pub const CONNECT: u16 = 0x000A;
    pub const CONNECTION_BIND: u16 = 0x000B;
    pub const SEND: u16 = 0x0016;
    pub const DATA: u16 = 0x0017;
    pub const CONNECTION_ATTEMPT: u16 = 0x001C;
}

/// Attribute types (RFC 8489 section 18.3, RFC 8656 section 18, RFC 5780 section 7, RFC 6062 section 6.2, RFC 8016 section 4.1).
pub mod attribute {
    pub const CHANGE_REQUEST: u16 = 0x0003;
    pub const USERNAME: u16 = 0x0006;
    pub const MESSAGE_INTEGRITY: u16 = 0x0008;
    pub const ERROR_CODE: u16 = 0x0009;
    pub const CHANNEL_NUMBER: u16 = 0x000C;
    pub const LIFETIME: u16 = 0x000D;
    pub const XOR_PEER_ADDRESS: u16 = 0x0012;
    /// Attribute DATA, under a different name because a message type is already called DATA.
    pub const PAYLOAD: u16 = 0x0013;
    pub const REALM: u16 = 0x0014;
    pub const NONCE: u16 = 0x0015;
    pub const XOR_RELAYED_ADDRESS: u16 = 0x0016;
    pub const REQUESTED_ADDRESS_FAMILY: u16 = 0x0017;
    pub const EVEN_PORT: u16 = 0x0018;
    pub const REQUESTED_TRANSPORT: u16 = 0x0019;
    pub const RESERVATION_TOKEN: u16 = 0x0022;
    pub const PADDING: u16 = 0x0026;
    pub const RESPONSE_PORT: u16 = 0x0027;
    pub const CONNECTION_ID: u16 = 0x002A;
    pub const ALTERNATE_SERVER: u16 = 0x8023;
    pub const MOBILITY_TICKET: u16 = 0x8030;
}

/// UDP in REQUESTED-TRANSPORT (RFC 8656 section 18.7).
pub const UDP: [u8; 4] = [17, 0, 0, 0];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transaction([u8; 12]);

impl Transaction {
    /// Creates an ID that is unique in this process. A server would treat a second request with the same ID as a retransmission.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut bytes = [7; 12];
        bytes[4..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        Self(bytes)
    }
}

impl From<u8> for Transaction {
    fn from(byte: u8) -> Self {
        Self([byte; 12])
    }
}

pub fn message(kind: u16, id: impl Into<Transaction>, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, value) in attributes {
        body.extend(kind.to_be_bytes());
        body.extend(length(value).to_be_bytes());
        body.extend_from_slice(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    [&kind.to_be_bytes(), &length(&body).to_be_bytes()[..], &MAGIC_COOKIE, &id.into().0, &body].concat()
}

pub fn attributes(message: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut found = Vec::new();
    let mut rest = &message[20..];
    while let [a, b, c, d, tail @ ..] = rest {
        let len = usize::from(u16::from_be_bytes([*c, *d]));
        found.push((u16::from_be_bytes([*a, *b]), tail[..len].to_vec()));
        rest = &tail[len.next_multiple_of(4)..];
    }
    assert!(rest.is_empty(), "{} bytes after the last attribute", rest.len());
    found
}

/// Value of an XOR-…-ADDRESS attribute (RFC 8489 section 14.2); the transaction ID matters only for IPv6.
pub fn xor_address(address: SocketAddr, id: impl Into<Transaction>) -> Vec<u8> {
    let (family, mut ip) = match address.ip() {
        IpAddr::V4(ip) => (1, ip.octets().to_vec()),
        IpAddr::V6(ip) => (2, ip.octets().to_vec()),
    };
    ip.iter_mut().zip(mask(id)).for_each(|(byte, mask)| *byte ^= mask);
    let port = address.port() ^ 0x2112;
    [&[0, family][..], &port.to_be_bytes(), &ip].concat()
}

pub fn address(value: &[u8], id: impl Into<Transaction>) -> SocketAddr {
    let port = u16::from_be_bytes([value[2], value[3]]) ^ 0x2112;
    let bytes: Vec<u8> = value[4..].iter().zip(mask(id)).map(|(byte, mask)| byte ^ mask).collect();
    let ip = match *bytes.as_slice() {
        [a, b, c, d] => IpAddr::from([a, b, c, d]),
        ref other => IpAddr::from(<[u8; 16]>::try_from(other).unwrap_or_else(|_| panic!("{value:?}"))),
    };
    SocketAddr::new(ip, port)
}

fn mask(id: impl Into<Transaction>) -> impl Iterator<Item = u8> {
    MAGIC_COOKIE.into_iter().chain(id.into().0)
}

fn length(bytes: &[u8]) -> u16 {
    u16::try_from(bytes.len()).unwrap_or_else(|_| panic!("{} bytes are too many", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses the vector in RFC 5769 section 2.3 with a different transaction ID, so only the port and the first four bytes of the address
    /// are the same.
    #[test]
    fn xor_address_matches_the_test_vector() {
        let value = [0, 1, 0xA1, 0x47, 0xE1, 0x12, 0xA6, 0x43];
        let there: SocketAddr = "192.0.2.1:32853".parse().unwrap();
        assert_eq!((xor_address(there, 9), address(&value, 9)), (value.to_vec(), there));
        let v6: SocketAddr = "[2001:db8::7]:3478".parse().unwrap();
        assert_eq!(address(&xor_address(v6, 200), 200), v6);
    }

    #[test]
    fn attributes_are_padded_and_parsed_back() {
        let written = message(1, 7, &[(0x8022, b"hello"), (0x0025, b"")]);
        assert_eq!(written[..8], [0, 1, 0, 16, 0x21, 0x12, 0xA4, 0x42]);
        assert_eq!(attributes(&written), [(0x8022, b"hello".to_vec()), (0x0025, Vec::new())]);
    }
}
