//! Captures in the pcapng format: one interface for the client's leg and one for the peers'. The packets have the addresses of the datagrams
//! but are made up: the client's leg is UDP even if the client uses TCP, TLS or DTLS.

use std::{
    net::{IpAddr, SocketAddr},
    time::{SystemTime, UNIX_EPOCH},
};

/// IP packets after their address family in four bytes. libpcap refuses files with several interfaces of LINKTYPE_RAW (101).
const LINKTYPE_NULL: u16 = 0;
const AF_INET: u32 = 2;
/// One of three values, all of which readers accept.
const AF_INET6: u32 = 30;
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

const IF_NAME: u16 = 2;
const IF_DESCRIPTION: u16 = 3;
const ISB_IFDROP: u16 = 5;
const SHB_USERAPPL: u16 = 4;

const UDP: u8 = 17;
const UDP_HEADER: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    Client,
    Peer,
}

/// A UDP datagram whose payload is `head` followed by `rest`, of which only `kept` bytes are captured.
pub(crate) struct CapturedDatagram<'a> {
    pub(crate) leg: Leg,
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) head: &'a [u8],
    pub(crate) rest: &'a [u8],
    pub(crate) kept: usize,
}

/// Beginning of a capture; `transport` is the client's.
pub(crate) fn begin(transport: &str) -> Vec<u8> {
    let mut capture = Vec::new();
    block(SECTION, &mut capture, |body| {
        body.extend(0x1a2b_3c4d_u32.to_le_bytes());
        // Version 1.0, and a section of unknown length.
        body.extend([1, 0, 0, 0]);
        body.extend([0xff; 8]);
        option(SHB_USERAPPL, concat!("turnpike ", env!("CARGO_PKG_VERSION")).as_bytes(), body);
        option(0, &[], body);
    });
    let client = match transport {
        "udp" => "client".to_owned(),
        stream => format!("client over {stream}, shown as UDP"),
    };
    for (name, description) in [("client", client.as_str()), ("peer", "peers")] {
        block(INTERFACE, &mut capture, |body| {
            body.extend(LINKTYPE_NULL.to_le_bytes());
            body.extend([0; 2 + 4]);
            option(IF_NAME, name.as_bytes(), body);
            option(IF_DESCRIPTION, description.as_bytes(), body);
            option(0, &[], body);
        });
    }
    capture
}

/// Appends a packet. Datagrams between addresses of different families are left out.
pub(crate) fn packet(at: SystemTime, datagram: &CapturedDatagram<'_>, to: &mut Vec<u8>) {
    let CapturedDatagram { leg, head, rest, kept, .. } = *datagram;
    let Some(headers) = headers(datagram) else { return };
    let original = headers.len() + head.len() + rest.len();
    let rest = &rest[..kept.min(rest.len())];
    let captured = headers.len() + head.len() + rest.len();
    block(PACKET, to, |body| {
        body.extend((leg as u32).to_le_bytes());
        time(at, body);
        body.extend(u32::try_from(captured).unwrap_or(u32::MAX).to_le_bytes());
        body.extend(u32::try_from(original).unwrap_or(u32::MAX).to_le_bytes());
        body.extend(headers);
        body.extend(head);
        body.extend(rest);
        pad(captured, body);
    });
}

/// End of a capture, with the number of datagrams that were not captured.
pub(crate) fn end(at: SystemTime, lost: u64) -> Vec<u8> {
    let mut capture = Vec::new();
    for leg in [Leg::Client, Leg::Peer] {
        block(STATISTICS, &mut capture, |body| {
            body.extend((leg as u32).to_le_bytes());
            time(at, body);
            option(ISB_IFDROP, &lost.to_le_bytes(), body);
            option(0, &[], body);
        });
    }
    capture
}

/// Type, length, body, and the length again.
fn block(kind: u32, to: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let begin = to.len();
    to.extend(kind.to_le_bytes());
    to.extend([0; 4]);
    body(to);
    let length = u32::try_from(to.len() - begin + 4).unwrap_or(u32::MAX).to_le_bytes();
    to[begin + 4..begin + 8].copy_from_slice(&length);
    to.extend(length);
}

fn option(code: u16, value: &[u8], to: &mut Vec<u8>) {
    to.extend(code.to_le_bytes());
    to.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_le_bytes());
    to.extend(value);
    pad(value.len(), to);
}

fn pad(length: usize, to: &mut Vec<u8>) {
    to.resize(to.len() + length.next_multiple_of(4) - length, 0);
}

/// Microseconds since 1970 as two halves, the higher one first.
fn time(at: SystemTime, to: &mut Vec<u8>) {
    let micros = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let micros = u64::try_from(micros).unwrap_or(u64::MAX).to_be_bytes();
    let [a, b, c, d, e, f, g, h] = micros;
    to.extend([d, c, b, a, h, g, f, e]);
}

/// Address family, and IP and UDP headers of the whole datagram.
fn headers(datagram: &CapturedDatagram<'_>) -> Option<Vec<u8>> {
    let CapturedDatagram { from, to, head, rest, .. } = datagram;
    let length = u16::try_from(UDP_HEADER + head.len() + rest.len()).unwrap_or(u16::MAX);
    let mut udp = [from.port(), to.port(), length, 0].map(u16::to_be_bytes).concat();
    let (family, ip, addresses) = match (from.ip().to_canonical(), to.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut ip = vec![0x45, 0];
            ip.extend(length.saturating_add(20).to_be_bytes());
            // No fragments; TTL 64.
            ip.extend([0, 0, 0x40, 0, 64, UDP, 0, 0]);
            let addresses = [from.octets(), to.octets()].concat();
            ip.extend(&addresses);
            let sum = checksum(&[&ip]);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            (AF_INET, ip, addresses)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut ip = vec![0x60, 0, 0, 0];
            ip.extend(length.to_be_bytes());
            ip.extend([UDP, 64]);
            let addresses = [from.octets(), to.octets()].concat();
            ip.extend(&addresses);
            (AF_INET6, ip, addresses)
        }
        _ => return None,
    };
    let pseudo = [&addresses[..], &[0, UDP], &length.to_be_bytes()].concat();
    // `head` has an even length, because its parts have multiples of four bytes.
    let sum = match checksum(&[&pseudo, &udp, head, rest]) {
        0 => u16::MAX,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    Some([&family.to_le_bytes()[..], &ip, &udp].concat())
}

/// Internet checksum (RFC 1071) of parts of which only the last one may have an odd length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let word =
        |word: &[u8]| u64::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or_default()]));
    let mut sum: u64 = words.map(word).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn datagram<'a>(from: &str, to: &str, rest: &'a [u8], kept: usize) -> CapturedDatagram<'a> {
        let address = |text: &str| text.parse().expect("an address");
        CapturedDatagram { leg: Leg::Peer, from: address(from), to: address(to), head: &[], rest, kept }
    }

    #[test]
    fn blocks_have_their_length_at_both_ends() {
        let at = UNIX_EPOCH + Duration::from_micros((7 << 32) + 5);
        let mut capture = begin("tls");
        packet(at, &datagram("192.0.2.1:1", "192.0.2.2:2", b"abcde", 3), &mut capture);
        packet(at, &datagram("[2001:db8::1]:1", "[2001:db8::2]:2", b"abcde", 9), &mut capture);
        packet(at, &datagram("[2001:db8::1]:1", "192.0.2.2:2", b"abcde", 9), &mut capture);
        capture.extend(end(at, 4));
        let mut kinds = Vec::new();
        let mut left = &capture[..];
        while let [a, b, c, d, e, f, g, h, ..] = *left {
            kinds.push(u32::from_le_bytes([a, b, c, d]));
            let length = u32::from_le_bytes([e, f, g, h]) as usize;
            assert_eq!((length % 4, &left[length - 4..length]), (0, &[e, f, g, h][..]));
            left = &left[length..];
        }
        assert_eq!(kinds, [SECTION, INTERFACE, INTERFACE, PACKET, PACKET, STATISTICS, STATISTICS]);
        assert!(left.is_empty());
    }

    #[test]
    fn packet_has_the_length_and_checksums_of_the_whole_datagram() {
        let at = UNIX_EPOCH + Duration::from_micros((7 << 32) + 5);
        let mut block = Vec::new();
        packet(at, &datagram("192.0.2.1:1000", "192.0.2.2:2000", b"abcde", 2), &mut block);
        let number = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("4 bytes"));
        assert_eq!([8, 12, 16, 20, 24].map(number), [1, 7, 5, 34, 37], "interface, time, lengths");
        let ip = &block[32..62];
        assert_eq!((&ip[2..4], &ip[24..26], &ip[28..]), (&[0, 33][..], &[0, 13][..], &b"ab"[..]));
        assert_eq!(checksum(&[&ip[..20]]), 0);
        let pseudo = [&ip[12..20], &[0, UDP], &ip[24..26]].concat();
        assert_eq!(checksum(&[&pseudo, &ip[20..28], b"abcde"]), 0);
    }
}
