//! A datagram on its way out, from the queue of a tick to the kernel's messages.

use std::net::{IpAddr, SocketAddr};

use crate::{SocketId, Span};

/// Where a datagram goes and how. Datagrams of one route keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// The socket to send on.
    pub socket: SocketId,
    /// Destination; `None` on a connected socket.
    pub to: Option<SocketAddr>,
    /// Source address on a wildcard socket (IP_PKTINFO).
    pub from: Option<IpAddr>,
    /// TOS or traffic class byte; 0 leaves the socket's default.
    pub tos: u8,
    /// TTL or hop limit; 0 leaves the socket's default.
    pub ttl: u8,
    /// Send with DF set; otherwise the kernel may fragment.
    pub dont_fragment: bool,
}

/// Cheap per-worker integers; never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxStats {
    /// Send calls.
    pub calls: u64,
    /// Messages handed to the kernel (a super-packet is one).
    pub messages: u64,
    /// Of these, super-packets of two or more segments.
    pub super_packets: u64,
    /// Datagrams that the kernel took.
    pub datagrams: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Datagrams dropped because the socket's send buffer or the device queue was full (EAGAIN, ENOBUFS).
    pub would_block: u64,
    /// Datagrams dropped because they exceed the path MTU and must not be fragmented (EMSGSIZE).
    pub too_big: u64,
    /// Datagrams dropped because the kernel refused them for another reason, or because their socket is gone.
    pub refused: u64,
    /// Times that a socket stepped down from GSO for a while: for all segments, or for those of that size and above.
    pub step_downs: u64,
}

/// Where a datagram's payload lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload {
    /// In the receiver's arena.
    Arena(Span),
    /// In `Tx::own`, right after its header.
    Own(u32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    /// Offset of the header in `Tx::own`.
    pub(crate) header: u32,
    pub(crate) header_len: u16,
    pub(crate) padding: u8,
    pub(crate) payload: Payload,
    /// The whole datagram's length.
    pub(crate) len: u32,
    /// Datagrams of this length that lie one behind the other, from `payload` on.
    pub(crate) run: u32,
    /// The next of the same route, or `NONE`.
    pub(crate) next: u32,
}

/// The end of a chain of queued datagrams.
pub(crate) const NONE: u32 = u32::MAX;
