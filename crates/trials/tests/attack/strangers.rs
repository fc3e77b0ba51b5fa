//! Unauthenticated packets, each from a source address of its own; all of 127.0.0.0/8 is local.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};
use turnpike_testkit::stun;

use procfs::process::Process;

use turnpike_trials::eventually;

#[derive(Clone, Copy, Debug)]
pub(super) enum Packet {
    Allocate,
    Forged,
    Garbage,
    ClientHello,
}

impl Packet {
    pub(super) const ALL: [Self; 4] = [Self::Allocate, Self::Forged, Self::Garbage, Self::ClientHello];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Allocate => "Allocates without a credential",
            Self::Forged => "Allocates with a forged credential",
            Self::Garbage => "datagrams that are not STUN",
            Self::ClientHello => "ClientHellos without a cookie",
        }
    }

    fn bytes(self, number: u32) -> Vec<u8> {
        match self {
            Self::Allocate => stun::allocate_request(None),
            Self::Forged => {
                stun::forged_request(format!("u{number}").as_bytes(), b"r", b"obMatJos2gAAAAAAAAAAAAAAAAAAA")
            }
            Self::Garbage => number.to_be_bytes().repeat(8),
            Self::ClientHello => client_hello(number, None),
        }
    }
}

/// Sends `count` packets, each from an address of its own; `first` is the number of the first one.
fn pour_in(packet: Packet, server: SocketAddr, first: u32, count: u32) {
    for number in first..first + count {
        let socket = UdpSocket::bind((source(number), 0)).expect("loopback addresses are local");
        socket.send_to(&packet.bytes(number), server).expect("loopback accepts the packet");
    }
}

/// Source address in a range above 127.1.0.0 that no other test uses; the last byte is never 0 or 255.
fn source(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x7F01_0001 + ((number / 250) << 8) + number % 250)
}

/// Like `pour_in`, but waits until the server has read the packets, because the default socket buffer holds only one or two hundred.
pub(super) fn pour_in_as_read(packet: Packet, server: SocketAddr, first: u32, count: u32) {
    const AT_ONCE: u32 = 50;
    for from in (first..first + count).step_by(AT_ONCE as usize) {
        pour_in(packet, server, from, AT_ONCE.min(first + count - from));
        are_read(server);
    }
}

pub(super) fn are_read(server: SocketAddr) {
    are_read_by(std::process::id(), server);
}

/// Waits until a socket in the network namespace of this process is empty.
pub(super) fn are_read_by(pid: u32, server: SocketAddr) {
    eventually("the packets have been read", || !is_waiting(pid, server));
}

/// A DTLS client that has returned its cookie (RFC 6347 section 4.2.1) and stays silent after the server's first packet.
pub(super) fn half_open(server: SocketAddr, number: u32) -> UdpSocket {
    let socket = UdpSocket::bind((source(number), 0)).expect("loopback addresses are local");
    socket.connect(server).expect("loopback has a route");
    // Repeats the ClientHello until the server is allowed to drop its oldest handshake.
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("the timeout is not zero");
    let mut buffer = [0; 2048];
    let mut ask = |hello: &[u8]| {
        eventually("a ClientHello is answered", || {
            socket.send(hello).expect("loopback accepts the packet");
            socket.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec())
        })
    };
    let answer = ask(&client_hello(number, None));
    // HelloVerifyRequest, after 13 bytes of record header and 12 of message header: version, cookie length, cookie.
    assert_eq!((answer[0], answer[13]), (22, 3), "not a cookie: {answer:?}");
    let cookie = &answer[28..][..usize::from(answer[27])];
    let answer = ask(&client_hello(number, Some(cookie)));
    assert_eq!((answer[0], answer[13]), (22, 2), "a ServerHello: {answer:?}");
    socket
}

/// Returns true if the socket has data to read (proc(5), `/proc/PID/net/udp`).
fn is_waiting(pid: u32, server: SocketAddr) -> bool {
    let pid = i32::try_from(pid).expect("a process ID fits");
    let process = Process::new(pid).expect("the process is running");
    let sockets = process.udp().expect("every Linux has this table");
    sockets.iter().any(|socket| socket.local_address == server && socket.rx_queue > 0)
}

/// ClientHello of DTLS 1.2 (RFC 6347 section 4.2.2, RFC 5246 section 7.4.1.2) with one cipher suite, with or without a cookie.
fn client_hello(number: u32, cookie: Option<&[u8]>) -> Vec<u8> {
    let mut body = vec![0xFE, 0xFD];
    body.extend(number.to_be_bytes().repeat(8));
    body.push(0);
    let sequence = u8::from(cookie.is_some());
    let cookie = cookie.unwrap_or_default();
    body.push(u8::try_from(cookie.len()).expect("the length fits into a byte"));
    body.extend(cookie);
    body.extend([0, 2, 0xC0, 0x2B, 1, 0]);
    let extensions: &[&[u8]] = &[
        // supported_groups: P-256; ec_point_formats: uncompressed; signature_algorithms: ECDSA with SHA-256; extended_master_secret.
        &[0, 10, 0, 4, 0, 2, 0, 23],
        &[0, 11, 0, 2, 1, 0],
        &[0, 13, 0, 4, 0, 2, 4, 3],
        &[0, 23, 0, 0],
    ];
    let extensions = extensions.concat();
    body.extend(u16::try_from(extensions.len()).expect("short").to_be_bytes());
    body.extend(extensions);
    let len = u16::try_from(body.len()).expect("short").to_be_bytes();
    // Message header: type, 24-bit length, sequence number, fragment offset 0, fragment length.
    let head = [1, 0, len[0], len[1], 0, sequence, 0, 0, 0, 0, len[0], len[1]];
    let handshake = [&head[..], &body].concat();
    let len = u16::try_from(handshake.len()).expect("short").to_be_bytes();
    [&[22, 0xFE, 0xFD, 0, 0, 0, 0, 0, 0, 0, sequence, len[0], len[1]][..], &handshake].concat()
}
