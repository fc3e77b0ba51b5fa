//! NAT behaviour discovery (RFC 5780 section 4). The server needs two addresses.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use turnpike_wire::stun::{Writer, kind, method};

use crate::{
    connection::{any, left},
    report::NatFacts,
    session::{ServerAnswer, read, write},
};

/// Times of transmission. A request still unanswered after the third transmission counts as filtered.
const SENT_AT_MS: [u64; 3] = [0, 250, 750];
const GIVE_UP_MS: u64 = 1_500;
/// Flag in CHANGE-REQUEST (RFC 5780 section 7.2).
const CHANGE_PORT: u8 = 2;
const CHANGE_IP_AND_PORT: u8 = 6;

/// Runs the discovery; returns `None` if the server sends no OTHER-ADDRESS.
pub(crate) fn discover(server: SocketAddr, deadline: Instant) -> io::Result<Option<NatFacts>> {
    let socket = UdpSocket::bind(any(server))?;
    let ask = |to: SocketAddr, change: u8| binding(&socket, to, change, deadline);
    let Some(first) = ask(server, 0)? else { return Ok(None) };
    let Some(other) = first.address(kind::OTHER_ADDRESS).filter(|other| other.ip() != server.ip()) else {
        return Ok(None);
    };
    let mapped = first.address(kind::XOR_MAPPED_ADDRESS);
    // Determine the source address of packets to the server, because a socket bound to the wildcard address
    // does not show it.
    let local = crate::connection::udp(server)
        .and_then(|probe| probe.local_addr())
        .and_then(|own| Ok(SocketAddr::new(own.ip(), socket.local_addr()?.port())));
    let mapping = if mapped.is_some() && mapped == local.ok() {
        "none"
    } else {
        let second = ask(SocketAddr::new(other.ip(), server.port()), 0)?;
        match second.and_then(|answer| answer.address(kind::XOR_MAPPED_ADDRESS)) {
            None => "unknown",
            second if second == mapped => "endpoint-independent",
            second => match ask(other, 0)?.and_then(|answer| answer.address(kind::XOR_MAPPED_ADDRESS)) {
                None => "unknown",
                third if third == second => "address-dependent",
                Some(_) => "address-and-port-dependent",
            },
        }
    };
    let fresh = UdpSocket::bind(any(server))?;
    let ask = |change: u8| binding(&fresh, server, change, deadline);
    let filtering = if ask(0)?.is_none() {
        "unknown"
    } else if ask(CHANGE_IP_AND_PORT)?.is_some_and(|answer| answer.is_success()) {
        "endpoint-independent"
    } else if ask(CHANGE_PORT)?.is_some_and(|answer| answer.is_success()) {
        "address-dependent"
    } else {
        "address-and-port-dependent"
    };
    Ok(Some(NatFacts {
        mapping: mapping.to_owned(),
        filtering: filtering.to_owned(),
        other_address: other.to_string(),
    }))
}

fn binding(
    socket: &UdpSocket,
    to: SocketAddr,
    change: u8,
    deadline: Instant,
) -> io::Result<Option<ServerAnswer>> {
    let id: [u8; 12] = rand::random();
    let attributes = |message: &mut Writer<'_>| {
        if change != 0 {
            message.attribute(kind::CHANGE_REQUEST, &[0, 0, 0, change]);
        }
    };
    let message = write(method::BINDING, id, &attributes, None, None);
    let began = Instant::now();
    let mut buffer = [0; 2_048];
    for (index, at) in SENT_AT_MS.iter().enumerate() {
        socket.send_to(&message, to)?;
        let until = SENT_AT_MS.get(index + 1).copied().unwrap_or(GIVE_UP_MS);
        debug_assert!(until > *at);
        let until = (began + Duration::from_millis(until)).min(deadline);
        while let Ok(left) = left(until) {
            socket.set_read_timeout(Some(left))?;
            let Ok((length, _)) = socket.recv_from(&mut buffer) else { continue };
            let bytes = buffer[..length].to_vec();
            if let Some(answer) = read(bytes, method::BINDING, id, None, began.elapsed(), 1) {
                return Ok(Some(answer));
            }
        }
    }
    Ok(None)
}
