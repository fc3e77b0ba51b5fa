//! STUN messages written and read by hand (RFC 8489 section 5): an oracle that shares no code with what is tested, and that can write
//! what no honest client would.

use std::net::{IpAddr, SocketAddr};

/// RFC 8489 section 5.
pub const MAGIC_COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];

/// A message of this type with these attributes; `id` is every byte of its transaction ID.
///
/// # Panics
/// When it is longer than a message can be.
pub fn message(kind: u16, id: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, value) in attributes {
        body.extend(kind.to_be_bytes());
        body.extend(length(value).to_be_bytes());
        body.extend_from_slice(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    [&kind.to_be_bytes(), &length(&body).to_be_bytes()[..], &MAGIC_COOKIE, &[id; 12], &body].concat()
}

/// The attributes of a message, in their order.
///
/// # Panics
/// When they are cut short.
pub fn attributes(message: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut found = Vec::new();
    let mut rest = &message[20..];
    while let [a, b, c, d, tail @ ..] = rest {
        let len = usize::from(u16::from_be_bytes([*c, *d]));
        found.push((u16::from_be_bytes([*a, *b]), tail[..len].to_vec()));
        rest = &tail[len.next_multiple_of(4)..];
    }
    assert!(rest.is_empty(), "{} bytes behind the last attribute", rest.len());
    found
}

/// The value of an XOR-…-ADDRESS attribute (RFC 8489 section 14.2) in a message whose transaction ID has only bytes `id`.
pub fn xor_address(address: SocketAddr, id: u8) -> Vec<u8> {
    let (family, mut ip) = match address.ip() {
        IpAddr::V4(ip) => (1, ip.octets().to_vec()),
        IpAddr::V6(ip) => (2, ip.octets().to_vec()),
    };
    ip.iter_mut().zip(mask(id)).for_each(|(byte, mask)| *byte ^= mask);
    let port = address.port() ^ 0x2112;
    [&[0, family][..], &port.to_be_bytes(), &ip].concat()
}

/// The opposite of [`xor_address`].
///
/// # Panics
/// When the value is none.
pub fn address(value: &[u8], id: u8) -> SocketAddr {
    let port = u16::from_be_bytes([value[2], value[3]]) ^ 0x2112;
    let bytes: Vec<u8> = value[4..].iter().zip(mask(id)).map(|(byte, mask)| byte ^ mask).collect();
    let ip = match *bytes.as_slice() {
        [a, b, c, d] => IpAddr::from([a, b, c, d]),
        ref other => IpAddr::from(<[u8; 16]>::try_from(other).unwrap_or_else(|_| panic!("{value:?}"))),
    };
    SocketAddr::new(ip, port)
}

fn mask(id: u8) -> impl Iterator<Item = u8> {
    MAGIC_COOKIE.into_iter().chain([id; 12])
}

fn length(bytes: &[u8]) -> u16 {
    u16::try_from(bytes.len()).unwrap_or_else(|_| panic!("{} bytes are too many", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5769 section 2.3, whose transaction ID is another one: only the port and the first four bytes of the mask are the same.
    #[test]
    fn an_address_is_as_in_the_test_vector() {
        let value = [0, 1, 0xA1, 0x47, 0xE1, 0x12, 0xA6, 0x43];
        let there: SocketAddr = "192.0.2.1:32853".parse().unwrap();
        assert_eq!((xor_address(there, 9), address(&value, 9)), (value.to_vec(), there));
        let v6: SocketAddr = "[2001:db8::7]:3478".parse().unwrap();
        assert_eq!(address(&xor_address(v6, 200), 200), v6);
    }

    #[test]
    fn attributes_are_padded_and_found_again() {
        let written = message(1, 7, &[(0x8022, b"hello"), (0x0025, b"")]);
        assert_eq!(written[..8], [0, 1, 0, 16, 0x21, 0x12, 0xA4, 0x42]);
        assert_eq!(attributes(&written), [(0x8022, b"hello".to_vec()), (0x0025, Vec::new())]);
    }
}
