//! Amplification test: sends messages that need no credential and could have a forged source address, and
//! measures the replies.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use turnpike_client::{ClientTransport, dtls};
use turnpike_wire::stun::{kind, method};

use super::{AttackReply, unsigned};
use crate::connection::{Trust, udp};

/// Time to wait for replies and retransmissions, which start after one second (RFC 6347 section 4.2.4).
const WAIT: Duration = Duration::from_millis(2500);
const AT_ONCE: usize = 16;
pub(super) const COUNT: usize = 70;

pub(super) fn ask(
    transport: ClientTransport,
    server: SocketAddr,
    trust: Option<&Trust>,
    found: &mut Vec<AttackReply>,
) -> io::Result<()> {
    let messages = match (transport, trust) {
        (ClientTransport::Dtls, Some(trust)) => hellos(trust)?,
        (ClientTransport::Dtls, None) => return Ok(()),
        _ => datagrams(),
    };
    let mut waiting = Vec::new();
    for (index, (message, bytes)) in messages.into_iter().enumerate() {
        let socket = udp(server)?;
        socket.set_nonblocking(true)?;
        // Errors are ignored, because an error here was caused by an earlier datagram.
        let _ = socket.send(&bytes);
        waiting.push((socket, message, bytes.len()));
        if index % AT_ONCE == AT_ONCE - 1 {
            thread::sleep(Duration::from_millis(20));
        }
    }
    let until = Instant::now() + WAIT;
    let mut counted = vec![(0, 0); waiting.len()];
    while Instant::now() < until {
        for ((socket, ..), count) in waiting.iter().zip(&mut counted) {
            take(socket, count);
        }
        thread::sleep(Duration::from_millis(10));
    }
    found.extend(waiting.into_iter().zip(counted).map(|((_, message, sent), (received, datagrams))| {
        AttackReply {
            transport: transport.to_string(),
            message,
            sent,
            received,
            datagrams,
            ratio: received as f64 / sent.max(1) as f64,
        }
    }));
    Ok(())
}

fn take(socket: &UdpSocket, (bytes, datagrams): &mut (usize, usize)) {
    let mut buffer = [0; 2048];
    while let Ok(len) = socket.recv(&mut buffer) {
        *bytes += len;
        *datagrams += 1;
    }
}

fn datagrams() -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    let methods = [
        ("Binding", method::BINDING),
        ("Allocate", method::ALLOCATE),
        ("Refresh", method::REFRESH),
        ("CreatePermission", method::CREATE_PERMISSION),
        ("ChannelBind", method::CHANNEL_BIND),
        ("Connect", method::CONNECT),
        ("ConnectionBind", method::CONNECTION_BIND),
    ];
    for (name, method) in methods {
        let mut add = |what: &str, bytes: Vec<u8>| all.push((format!("{name} {what}"), bytes));
        add("alone", unsigned(method, &|_| ()));
        add(
            "with a transport",
            unsigned(method, &|it| _ = it.attribute(kind::REQUESTED_TRANSPORT, &[17, 0, 0, 0])),
        );
        add("with an unknown attribute", unsigned(method, &|it| _ = it.attribute(0x7FFF, &[])));
        add(
            "with a wrong integrity value",
            unsigned(method, &|it| _ = it.attribute(kind::MESSAGE_INTEGRITY, &[0; 20])),
        );
        add(
            "with a username, unsigned",
            unsigned(method, &|it| {
                it.attribute(kind::USERNAME, b"u").attribute(kind::REALM, b"r").attribute(kind::NONCE, b"n");
            }),
        );
        add(
            "with a username and a forged nonce",
            unsigned(method, &|it| {
                it.attribute(kind::USERNAME, b"u")
                    .attribute(kind::REALM, b"r")
                    .attribute(kind::NONCE, b"n")
                    .attribute(kind::MESSAGE_INTEGRITY, &[0; 20]);
            }),
        );
        let mut indication = unsigned(method, &|_| ());
        indication[1] |= 0x10;
        add("as an indication", indication);
        let mut success = unsigned(method, &|_| ());
        success[0] |= 0x01;
        add("as an answer", success);
        let mut long = unsigned(method, &|_| ());
        long[3] = 0xFC;
        add("with a length beyond its end", long);
    }
    let many = unsigned(method::BINDING, &|it| {
        for number in 0..40 {
            it.attribute(0x7F00 + number, &[]);
        }
    });
    all.push(("Binding with 40 unknown attributes".to_owned(), many));
    for (name, kind, value) in [
        ("CHANGE-REQUEST", 0x0003, &[0, 0, 0, 6][..]),
        ("RESPONSE-PORT", 0x0027, &[0x9C, 0x40, 0, 0]),
        ("PADDING of 64 bytes", 0x0026, &[0; 64]),
    ] {
        let message = unsigned(method::BINDING, &|it| _ = it.attribute(kind, value));
        all.push((format!("Binding with {name}"), message));
    }
    for (name, bytes) in [
        ("an empty datagram", &b""[..]),
        ("one byte", &[0]),
        ("ChannelData on an unbound channel", &[0x40, 0, 0, 4, 1, 2, 3, 4]),
        ("zeros", &[0; 64]),
        ("a DTLS alert", &[21, 0xFE, 0xFD, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 40]),
        ("a TLS alert", &[21, 3, 3, 0, 2, 2, 40]),
        ("a PROXY header", b"PROXY UDP4 192.0.2.1 192.0.2.2 1 2\r\n"),
        ("HTTP", b"GET / HTTP/1.0\r\n\r\n"),
    ] {
        all.push((name.to_owned(), bytes.to_vec()));
    }
    all
}

/// ClientHellos: intact, damaged and short. The ratio is highest for the shortest ClientHello that gets a
/// response.
fn hellos(trust: &Trust) -> io::Result<Vec<(String, Vec<u8>)>> {
    let settings = dtls::DtlsSettings::new(trust.security.clone(), WAIT).map_err(io::Error::other)?;
    let mut association =
        dtls::ClientAssociation::new(&settings, None, Instant::now()).map_err(io::Error::other)?;
    let mut flight: Vec<Vec<u8>> = Vec::new();
    association.drain(|packet| flight.push(packet.to_vec()), |_| {}).map_err(io::Error::other)?;
    let Some(hello) = flight.first() else { return Ok(Vec::new()) };
    let half = hello[..hello.len() / 2].to_vec();
    let twice = [&hello[..], hello].concat();
    let mut again = hello.clone();
    // Changes the record sequence number, so that the copy looks like a later record.
    if let Some(byte) = again.get_mut(10) {
        *byte = 7;
    }
    let all = [
        ("a ClientHello", hello.clone()),
        ("half a ClientHello", half),
        ("two ClientHellos", twice),
        ("a late ClientHello", again),
        ("a DTLS 1.2 ClientHello without suites", record(&body([0xFE, 0xFD], &[], &[], &[]))),
        ("a DTLS 1.2 ClientHello without extensions", record(&body([0xFE, 0xFD], &[], &SUITE, &[]))),
        ("a short DTLS 1.2 ClientHello", record(&body([0xFE, 0xFD], &[], &SUITE, &OLD))),
        ("a ClientHello with a forged cookie", record(&body([0xFE, 0xFD], &[7; 32], &SUITE, &OLD))),
        ("a DTLS 1.0 ClientHello", record(&body([0xFE, 0xFF], &[], &SUITE, &OLD))),
        ("a fragment of a ClientHello", fragment(&body([0xFE, 0xFD], &[], &SUITE, &OLD))),
    ];
    let mut all = all.map(|(name, bytes)| (name.to_owned(), bytes)).to_vec();
    // A DTLS 1.3 response is longer than the shortest message that gets one, so try all lengths by adding
    // padding.
    for (share, what) in [(1, "with a key share of one byte"), (32, "with a complete key share")] {
        all.extend([0].into_iter().chain(4..48).map(|padding| {
            let bytes = record(&body([0xFE, 0xFD], &[], &NEW_SUITE, &extensions_of_13(share, padding)));
            (format!("a DTLS 1.3 ClientHello {what}, {} bytes", bytes.len()), bytes)
        }));
    }
    Ok(all)
}

/// Cipher suite: ECDHE-ECDSA with AES-128-GCM.
const SUITE: [u8; 2] = [0xC0, 0x2B];
/// TLS 1.3 cipher suite: AES-128-GCM with SHA-256.
const NEW_SUITE: [u8; 2] = [0x13, 0x01];
/// Extensions: P-256, uncompressed points, ECDSA with SHA-256, extended_master_secret.
const OLD: [u8; 26] = [0, 10, 0, 4, 0, 2, 0, 23, 0, 11, 0, 2, 1, 0, 0, 13, 0, 4, 0, 2, 4, 3, 0, 23, 0, 0];

/// Extensions of a TLS 1.3 ClientHello. `padding` is the total length of a padding extension (RFC 7685), which is left out if its header
/// does not fit.
fn extensions_of_13(share: u8, padding: u8) -> Vec<u8> {
    let mut all = match padding.checked_sub(4) {
        Some(rest) => [&[0, 21, 0, rest][..], &vec![0; rest.into()]].concat(),
        None => Vec::new(),
    };
    all.extend([0, 43, 0, 3, 2, 0xFE, 0xFC]);
    all.extend([0, 10, 0, 4, 0, 2, 0, 29]);
    all.extend(&OLD[14..22]);
    all.extend([0, 51, 0, share + 6, 0, share + 4, 0, 29, 0, share]);
    all.resize(all.len() + usize::from(share), 9);
    all
}

fn body(version: [u8; 2], cookie: &[u8], suites: &[u8], extensions: &[u8]) -> Vec<u8> {
    let mut body = version.to_vec();
    body.extend([7; 32]);
    body.extend([0, short(cookie.len())]);
    body.extend(cookie);
    body.extend([0, short(suites.len())]);
    body.extend(suites);
    body.extend(if suites.is_empty() { &[0][..] } else { &[1, 0] });
    if !extensions.is_empty() {
        body.extend([0, short(extensions.len())]);
        body.extend(extensions);
    }
    body
}

fn record(body: &[u8]) -> Vec<u8> {
    of_message(body, body.len())
}

fn fragment(body: &[u8]) -> Vec<u8> {
    of_message(&body[..body.len() / 2], body.len())
}

fn short(len: usize) -> u8 {
    u8::try_from(len).expect("all of these are shorter than 256 bytes")
}

fn of_message(here: &[u8], len: usize) -> Vec<u8> {
    let head = [1, 0, 0, short(len), 0, 0, 0, 0, 0, 0, 0, short(here.len())];
    let message = [&head[..], here].concat();
    [&[22, 0xFE, 0xFD, 0, 0, 0, 0, 0, 0, 0, 0, 0, short(message.len())][..], &message].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_are_unique_and_the_count_matches() {
        let all = datagrams();
        assert!(all.len().abs_diff(COUNT) <= 5, "{}", all.len());
        let mut names: Vec<&String> = all.iter().map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn short_hellos_have_consistent_lengths_without_gaps() {
        let shortest = record(&body([0xFE, 0xFD], &[], &[], &[]));
        // After both headers: version, random, session, cookie, suites and compression, the last four of them
        // empty.
        assert_eq!(shortest.len(), 13 + 12 + 2 + 32 + 1 + 1 + 2 + 1);
        for share in [1, 32] {
            let of =
                |padding| record(&body([0xFE, 0xFD], &[], &NEW_SUITE, &extensions_of_13(share, padding)));
            for padding in 4..48 {
                let (bytes, next) = (of(padding), of(padding + 1));
                assert_eq!(next.len(), bytes.len() + 1);
                assert_eq!(usize::from(bytes[12]), bytes.len() - 13, "the record");
                assert_eq!(usize::from(bytes[16]), bytes.len() - 25, "the message");
            }
        }
        let cut = fragment(&body([0xFE, 0xFD], &[], &SUITE, &OLD));
        assert!(cut[24] < cut[16] && usize::from(cut[24]) == cut.len() - 25, "{cut:?}");
    }
}
