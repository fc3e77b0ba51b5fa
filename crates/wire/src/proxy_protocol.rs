//! PROXY protocol versions 1 and 2 (haproxy.org, proxy-protocol.txt).

use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyVersion {
    V1,
    V2,
}

/// Maximum length of a header in bytes. Version 1 needs at most 107; version 2 may contain TLVs, a few
/// hundred bytes in practice.
pub const MAX_HEADER: usize = 4096;

/// Start of a version 2 header (section 2.2).
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Length of the longest line, including CRLF (section 2.1).
const MAX_LINE: usize = 107;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    Incomplete,
    /// Header length, and source and destination address (none for UNKNOWN, LOCAL and UNIX).
    Header(usize, Option<(SocketAddr, SocketAddr)>),
    Malformed,
}

#[must_use]
pub fn parse(bytes: &[u8]) -> Parsed {
    let common = bytes.len().min(SIGNATURE.len());
    if bytes[..common] == SIGNATURE[..common] {
        return parse_v2(bytes);
    }
    let common = bytes.len().min(6);
    if bytes[..common] == b"PROXY "[..common] { parse_v1(bytes) } else { Parsed::Malformed }
}

/// Number of bytes after which [`is_begun`] can always decide.
pub const ENOUGH_TO_TELL: usize = SIGNATURE.len();

/// `None` if there are too few bytes to decide.
#[must_use]
pub fn is_begun(bytes: &[u8]) -> Option<bool> {
    for beginning in [&b"PROXY "[..], SIGNATURE] {
        let common = bytes.len().min(beginning.len());
        if bytes[..common] == beginning[..common] {
            return (common == beginning.len()).then_some(true);
        }
    }
    Some(false)
}

/// Both addresses must be canonical.
#[must_use]
pub fn encode(version: ProxyVersion, client: SocketAddr, local: SocketAddr) -> Vec<u8> {
    match version {
        ProxyVersion::V1 => encode_v1(client, local),
        ProxyVersion::V2 => encode_v2(client, local),
    }
}

/// Version 2 header (DGRAM) to put before each datagram from a client.
#[must_use]
pub fn encode_for_datagrams(client: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let mut header = encode_v2(client, local);
    // The lower half of the byte after the command is the transport: 1 STREAM, 2 DGRAM.
    header[SIGNATURE.len() + 1] += 1;
    header
}

/// Header for a client without a TCP or UDP address.
#[must_use]
pub fn encode_unknown(version: ProxyVersion) -> Vec<u8> {
    match version {
        ProxyVersion::V1 => b"PROXY UNKNOWN\r\n".to_vec(),
        ProxyVersion::V2 => [&SIGNATURE[..], &[0x21, 0x00, 0, 0]].concat(),
    }
}

fn encode_v1(client: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let family = match (client, local) {
        (SocketAddr::V4(_), SocketAddr::V4(_)) => "TCP4",
        _ => "TCP6",
    };
    let (source, destination) = same_family(client, local);
    let mut line = Vec::with_capacity(MAX_LINE);
    let _ = write!(
        line,
        "PROXY {family} {} {} {} {}\r\n",
        source.ip(),
        destination.ip(),
        source.port(),
        destination.port()
    );
    line
}

/// ```text
/// signature (12) │ 0x21: version 2, PROXY │ family, STREAM │ length (2) │ source, destination, source port, destination port
/// ```
fn encode_v2(client: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let mut header = Vec::with_capacity(52);
    header.extend_from_slice(SIGNATURE);
    header.push(0x21);
    match same_family(client, local) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            header.extend_from_slice(&[0x11, 0, 12]);
            header.extend_from_slice(&source.ip().octets());
            header.extend_from_slice(&destination.ip().octets());
        }
        (source, destination) => {
            header.extend_from_slice(&[0x21, 0, 36]);
            header.extend_from_slice(&as_v6(source.ip()).octets());
            header.extend_from_slice(&as_v6(destination.ip()).octets());
        }
    }
    header.extend_from_slice(&client.port().to_be_bytes());
    header.extend_from_slice(&local.port().to_be_bytes());
    header
}

/// A header has one family: in a mixed pair, the IPv4 address becomes an IPv4-mapped one.
fn same_family(a: SocketAddr, b: SocketAddr) -> (SocketAddr, SocketAddr) {
    if a.is_ipv4() == b.is_ipv4() {
        return (a, b);
    }
    let v6 = |address: SocketAddr| SocketAddr::new(IpAddr::V6(as_v6(address.ip())), address.port());
    (v6(a), v6(b))
}

fn as_v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

fn parse_v1(bytes: &[u8]) -> Parsed {
    let window = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(end) = window.windows(2).position(|pair| pair == b"\r\n") else {
        return if bytes.len() < MAX_LINE { Parsed::Incomplete } else { Parsed::Malformed };
    };
    let Ok(line) = std::str::from_utf8(&bytes[..end]) else { return Parsed::Malformed };
    let mut words = line.split(' ').skip(1);
    let family = match words.next() {
        // Section 2.1: ignore the rest of the line.
        Some("UNKNOWN") => return Parsed::Header(end + 2, None),
        Some(family @ ("TCP4" | "TCP6")) => family,
        _ => return Parsed::Malformed,
    };
    let mut ip = || -> Option<IpAddr> {
        let word = words.next()?;
        if family == "TCP4" {
            word.parse::<Ipv4Addr>().ok().map(IpAddr::V4)
        } else {
            word.parse::<Ipv6Addr>().ok().map(IpAddr::V6)
        }
    };
    let (Some(source), Some(destination)) = (ip(), ip()) else { return Parsed::Malformed };
    let mut port = || -> Option<u16> {
        let word = words.next()?;
        // `parse` would accept a plus sign.
        word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok())?
    };
    match (port(), port(), words.next()) {
        (Some(from), Some(to), None) => {
            let pair = (canonical(source, from), canonical(destination, to));
            Parsed::Header(end + 2, Some(pair))
        }
        _ => Parsed::Malformed,
    }
}

fn parse_v2(bytes: &[u8]) -> Parsed {
    let Some(head) = bytes.first_chunk::<16>() else { return Parsed::Incomplete };
    let (version_command, family) = (head[12], head[13]);
    let body = usize::from(u16::from_be_bytes([head[14], head[15]]));
    let len = 16 + body;
    if version_command >> 4 != 2 || version_command & 0xF > 1 || len > MAX_HEADER {
        return Parsed::Malformed;
    }
    let Some(body) = bytes.get(16..len) else { return Parsed::Incomplete };
    // LOCAL: the proxy's own connection (health checks); use the addresses of the connection.
    if version_command & 0xF == 0 {
        return Parsed::Header(len, None);
    }
    let port = |at: usize| body.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    match family >> 4 {
        1 => {
            let ip =
                |at: usize| body.get(at..at + 4)?.first_chunk::<4>().map(|b| IpAddr::V4(Ipv4Addr::from(*b)));
            pair(len, ip(0), ip(4), port(8), port(10))
        }
        2 => {
            let ip = |at: usize| {
                body.get(at..at + 16)?.first_chunk::<16>().map(|b| IpAddr::V6(Ipv6Addr::from(*b)))
            };
            pair(len, ip(0), ip(16), port(32), port(34))
        }
        // UNSPEC and UNIX: receivers ignore unsupported families (section 2.2).
        0 | 3 => Parsed::Header(len, None),
        _ => Parsed::Malformed,
    }
}

fn pair(
    len: usize,
    source: Option<IpAddr>,
    to: Option<IpAddr>,
    from_port: Option<u16>,
    to_port: Option<u16>,
) -> Parsed {
    match (source, to, from_port, to_port) {
        (Some(source), Some(to), Some(from_port), Some(to_port)) => {
            Parsed::Header(len, Some((canonical(source, from_port), canonical(to, to_port))))
        }
        _ => Parsed::Malformed,
    }
}

fn canonical(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip.to_canonical(), port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_version_1_line_matches_the_specification() {
        let line = b"PROXY TCP4 192.168.0.1 192.168.0.11 56324 443\r\nGET / HTTP/1.1\r\n";
        assert_eq!(parse(line), Parsed::Header(47, Some((at("192.168.0.1:56324"), at("192.168.0.11:443")))));
        assert_eq!(encode(ProxyVersion::V1, at("192.168.0.1:56324"), at("192.168.0.11:443")), &line[..47]);
        assert_eq!(parse(b"PROXY UNKNOWN\r\n"), Parsed::Header(15, None));
        assert_eq!(parse(b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n"), Parsed::Header(35, None));
    }

    #[test]
    fn a_version_2_header_matches_the_specification() {
        let header = encode(ProxyVersion::V2, at("10.1.2.3:4660"), at("10.0.0.1:22136"));
        let expected =
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c\x0a\x01\x02\x03\x0a\x00\x00\x01\x12\x34\x56\x78";
        assert_eq!(header, expected);
        assert_eq!(parse(&header), Parsed::Header(28, Some((at("10.1.2.3:4660"), at("10.0.0.1:22136")))));
    }

    #[test]
    fn headers_round_trip_and_every_prefix_is_incomplete() {
        let pairs = [
            ("10.1.2.3:4", "10.0.0.1:5"),
            ("[2001:db8::1]:4", "[2001:db8::2]:65535"),
            ("10.1.2.3:4", "[2001:db8::2]:5"),
        ];
        for version in [ProxyVersion::V1, ProxyVersion::V2] {
            for (client, local) in pairs.map(|(a, b)| (at(a), at(b))) {
                let header = encode(version, client, local);
                for end in 0..header.len() {
                    assert_eq!(parse(&header[..end]), Parsed::Incomplete, "{version:?} {end}");
                }
                assert_eq!(
                    parse(&header),
                    Parsed::Header(header.len(), Some((client, local))),
                    "{version:?}"
                );
            }
        }
    }

    #[test]
    fn a_header_for_an_unknown_client_has_no_addresses() {
        assert_eq!(encode_unknown(ProxyVersion::V1), b"PROXY UNKNOWN\r\n");
        let v2 = encode_unknown(ProxyVersion::V2);
        assert_eq!(v2[12..], [0x21, 0, 0, 0]);
        assert_eq!(parse(&v2), Parsed::Header(16, None));
        assert_eq!(parse(b"PROXY UNKNOWN\r\n"), Parsed::Header(15, None));
    }

    #[test]
    fn local_and_unix_headers_have_no_addresses() {
        let mut local = SIGNATURE.to_vec();
        local.extend_from_slice(&[0x20, 0, 0, 0]);
        assert_eq!(parse(&local), Parsed::Header(16, None));
        let mut unix = SIGNATURE.to_vec();
        unix.extend_from_slice(&[0x21, 0x31, 0, 216]);
        unix.extend_from_slice(&[0; 216]);
        assert_eq!(parse(&unix), Parsed::Header(232, None));
    }

    #[test]
    fn other_input_is_malformed() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"PROXY TCP5 1.2.3.4 1.2.3.4 1 2\r\n",
            b"PROXY TCP4 1.2.3.4 ::1 1 2\r\n",
            b"PROXY TCP4 1.2.3.4 1.2.3.4 1 65536\r\n",
            b"PROXY TCP4 1.2.3.4 1.2.3.4 +1 2\r\n",
            b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2 3\r\n",
            b"PROXY TCP4 1.2.3.4 1.2.3.4 1\r\n",
            b"\r\n\r\n\0\r\nQUIT\n\x11\x11\x00\x0c",
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff",
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x01\x00",
            &[b'x'; 1],
        ] {
            assert_eq!(parse(bytes), Parsed::Malformed, "{}", bytes.escape_ascii());
        }
        let mut endless = b"PROXY TCP4 ".to_vec();
        endless.resize(MAX_LINE, b'1');
        assert_eq!(parse(&endless), Parsed::Malformed);
    }

    #[test]
    fn parsing_any_bytes_does_not_panic() {
        let mut state = 1_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let mut bytes = SIGNATURE.to_vec();
            bytes.extend_from_slice(&state.to_be_bytes());
            bytes.extend_from_slice(&state.rotate_left(17).to_le_bytes());
            let _ = parse(&bytes);
            let _ = parse(&bytes[12..]);
            let mut line = b"PROXY ".to_vec();
            line.extend_from_slice(&state.to_be_bytes());
            line.extend_from_slice(b"\r\n");
            let _ = parse(&line);
        }
    }
}
