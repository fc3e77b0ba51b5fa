//! What a server sends for what anybody can send with somebody else's address as its source.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use turnpike_client::{Transport, dtls};
use turnpike_wire::stun::{kind, method};

use super::{Reply, unsigned};
use crate::connection::{Trust, udp};

/// How long answers are waited for, repetitions included: RFC 6347 section 4.2.4 begins with one second.
const WAIT: Duration = Duration::from_millis(2500);
/// Messages at once, lest some get lost on the way.
const AT_ONCE: usize = 16;
/// How many messages there are over UDP, about.
pub(super) const COUNT: usize = 70;

/// Sends each kind of message once, from a socket of its own.
pub(super) fn ask(
    transport: Transport,
    server: SocketAddr,
    trust: Option<&Trust>,
    found: &mut Vec<Reply>,
) -> io::Result<()> {
    let messages = match (transport, trust) {
        (Transport::Dtls, Some(trust)) => hellos(trust)?,
        (Transport::Dtls, None) => return Ok(()),
        _ => datagrams(),
    };
    let mut waiting = Vec::new();
    for (index, (message, bytes)) in messages.into_iter().enumerate() {
        let socket = udp(server)?;
        socket.set_nonblocking(true)?;
        // A refused one is the answer to one before.
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
    found.extend(waiting.into_iter().zip(counted).map(|((_, message, sent), (received, datagrams))| Reply {
        transport: transport.to_string(),
        message,
        sent,
        received,
        datagrams,
        ratio: received as f64 / sent.max(1) as f64,
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

/// STUN in each state of wrongness, and what is none.
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
            "with a wrong integrity",
            unsigned(method, &|it| _ = it.attribute(kind::MESSAGE_INTEGRITY, &[0; 20])),
        );
        add(
            "of a user, unsigned",
            unsigned(method, &|it| {
                it.attribute(kind::USERNAME, b"u").attribute(kind::REALM, b"r").attribute(kind::NONCE, b"n");
            }),
        );
        add(
            "of a user, with a forged nonce",
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
        add("that says that it is longer", long);
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
        ("ChannelData of nobody", &[0x40, 0, 0, 4, 1, 2, 3, 4]),
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

/// A ClientHello as it is, and what becomes of it on a bad way.
fn hellos(trust: &Trust) -> io::Result<Vec<(String, Vec<u8>)>> {
    let settings = dtls::Settings::new(trust.security.clone(), WAIT).map_err(io::Error::other)?;
    let mut association =
        dtls::Association::new(&settings, None, Instant::now()).map_err(io::Error::other)?;
    let mut flight: Vec<Vec<u8>> = Vec::new();
    association.drain(|packet| flight.push(packet.to_vec()), |_| {}).map_err(io::Error::other)?;
    let Some(hello) = flight.first() else { return Ok(Vec::new()) };
    let half = hello[..hello.len() / 2].to_vec();
    let twice = [&hello[..], hello].concat();
    let mut again = hello.clone();
    // The number of the record: as if it were a later one.
    if let Some(byte) = again.get_mut(10) {
        *byte = 7;
    }
    let all = [
        ("a ClientHello", hello.clone()),
        ("half a ClientHello", half),
        ("two ClientHellos", twice),
        ("a late ClientHello", again),
    ];
    Ok(all.map(|(name, bytes)| (name.to_owned(), bytes)).to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_many_as_is_said_and_each_has_a_name_of_its_own() {
        let all = datagrams();
        assert!(all.len().abs_diff(COUNT) <= 5, "{}", all.len());
        let mut names: Vec<&String> = all.iter().map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len());
    }
}
