//! ICMP errors from a socket's error queue (ip(7), IP_RECVERR).

use std::{io, net::SocketAddr};

use crate::UdpSocket;

/// One ICMP error about a datagram that this socket sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// Where the datagram was going, canonical.
    pub to: SocketAddr,
    /// ICMP or ICMPv6 type.
    pub icmp_type: u8,
    /// ICMP or ICMPv6 code.
    pub code: u8,
    /// Next-hop MTU for "packet too big" and "fragmentation needed", else 0.
    pub info: u32,
    /// Whether type and code are of ICMPv6.
    pub v6: bool,
}

/// Reads at most `limit` queued errors; locally generated ones are passed over.
pub fn read(_socket: &UdpSocket, _limit: usize, _each: impl FnMut(IcmpError)) -> io::Result<usize> {
    todo!()
}
