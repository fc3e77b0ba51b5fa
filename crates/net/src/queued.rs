//! Routes and queued datagrams of [`crate::Tx`].

use std::net::{IpAddr, SocketAddr};

use crate::{ArenaSpan, SocketId};

/// Destination and send options. Datagrams with equal routes keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    pub socket: SocketId,
    /// `None` on a connected socket.
    pub to: Option<SocketAddr>,
    /// Source address on a wildcard socket (IP_PKTINFO).
    pub from: Option<IpAddr>,
    /// TOS or traffic class byte; 0 keeps the socket's default.
    pub tos: u8,
    /// TTL or hop limit; 0 keeps the socket's default.
    pub ttl: u8,
    /// Sets DF; otherwise the kernel may fragment.
    pub dont_fragment: bool,
}

/// Counters; never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxStats {
    pub calls: u64,
    /// Messages accepted by the kernel; a super-packet is one message.
    pub messages: u64,
    /// Messages with two or more segments.
    pub super_packets: u64,
    /// Datagrams accepted by the kernel.
    pub datagrams: u64,
    pub bytes: u64,
    /// Datagrams dropped because of a full send buffer or device queue (EAGAIN, ENOBUFS).
    pub would_block: u64,
    /// Datagrams dropped because they exceed the path MTU and must not be fragmented (EMSGSIZE).
    pub too_big: u64,
    /// Datagrams that the kernel refused for another reason, or that had no socket.
    pub refused: u64,
    /// Number of times that a socket stopped using GSO for a while, for all segments or for those above some
    /// size.
    pub step_downs: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload {
    Arena(ArenaSpan),
    /// The payload is in `Tx::own`, directly after its header.
    Own(u32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    /// Offset in `Tx::own`.
    pub(crate) header: u32,
    pub(crate) header_len: u16,
    pub(crate) padding: u8,
    pub(crate) payload: Payload,
    pub(crate) len: u32,
    /// Number of contiguous datagrams of this length starting at `payload`.
    pub(crate) run: u32,
    /// Next datagram of the route, or `NONE`.
    pub(crate) next: u32,
}

/// End of a chain.
pub(crate) const NONE: u32 = u32::MAX;
