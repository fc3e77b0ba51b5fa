//! Sending: datagrams are queued during a tick and leave in super-packets.

use std::net::{IpAddr, SocketAddr};

use crate::{Datapath, Rx, SocketId, Sockets, Span};

/// Where a datagram goes and how. Datagrams of one route keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Datagrams dropped because the kernel refused them for another reason.
    pub refused: u64,
    /// Times that a socket or route stepped down from GSO.
    pub step_downs: u64,
}

/// The sending half of a worker.
pub struct Tx {}

impl Tx {
    /// An empty queue.
    #[must_use]
    pub fn new(_datapath: Datapath) -> Self {
        todo!()
    }
    /// Queues `header ++ payload ++ padding zero bytes` (padding 0 to 3). The payload stays in the arena.
    pub fn push(&mut self, _route: &Route, _header: &[u8], _payload: Span, _padding: u8) {
        todo!()
    }
    /// Queues a copy of `bytes`.
    pub fn push_bytes(&mut self, _route: &Route, _bytes: &[u8]) {
        todo!()
    }
    /// Queues `len` bytes that `fill` writes in place (their content before is arbitrary); for generators.
    pub fn push_with(&mut self, _route: &Route, _len: usize, _fill: impl FnOnce(&mut [u8])) {
        todo!()
    }
    /// Datagrams queued since the last flush.
    #[must_use]
    pub fn queued(&self) -> usize {
        todo!()
    }
    /// Sends all that is queued. What the kernel does not take is dropped and counted; nothing is kept.
    pub fn flush(&mut self, _sockets: &mut Sockets, _rx: &Rx) {
        todo!()
    }
    /// Occupancy so far.
    #[must_use]
    pub fn stats(&self) -> &TxStats {
        todo!()
    }
}
