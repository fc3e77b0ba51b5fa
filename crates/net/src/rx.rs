//! Receiving: batches into the tick's arena.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use crate::{Datapath, UdpSocket};

/// Bytes in the arena, valid until [`Rx::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset from the arena's start.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

/// What one receive call brought: one datagram, or a GRO super-packet of several.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    /// Source, canonical.
    pub from: SocketAddr,
    /// Destination address, where the socket was made with `packet_info`.
    pub local: Option<IpAddr>,
    /// TOS or traffic class byte (DSCP and ECN), 0 without `ip_header`.
    pub tos: u8,
    /// TTL or hop limit, 0 without `ip_header`.
    pub ttl: u8,
    /// Every datagram in it but the last has this length.
    pub segment_size: usize,
    /// All datagrams, one after the other.
    pub bytes: &'a [u8],
}

impl<'a> Buffer<'a> {
    /// The datagrams. An empty datagram counts as one.
    pub fn datagrams(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        std::iter::empty()
    }
}

/// Which buffers one [`Rx::recv`] brought; for [`Rx::buffers`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Index of the first.
    pub first: usize,
    /// How many; 0 means would-block.
    pub count: usize,
    /// Whether the call was filled to the brim, so that there may be more.
    pub more: bool,
}

/// Cheap per-worker integers; never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxStats {
    /// Receive calls.
    pub calls: u64,
    /// Calls that had nothing.
    pub would_block: u64,
    /// Buffers (a super-packet is one).
    pub buffers: u64,
    /// Datagrams.
    pub datagrams: u64,
    /// Bytes.
    pub bytes: u64,
    /// Datagrams that the kernel dropped because a receive buffer was full (SO_RXQ_OVFL).
    pub kernel_drops: u64,
    /// Buffers longer than the arena's slot, dropped.
    pub truncated: u64,
    /// Histogram of datagrams per buffer-batch call: bucket i counts calls with 2^i..2^(i+1) datagrams.
    pub batch: [u64; 12],
}

/// The receiving half of a worker.
pub struct Rx {}

impl Rx {
    /// An arena for this data path.
    #[must_use]
    pub fn new(_datapath: Datapath) -> Self {
        todo!()
    }
    /// Forgets everything received. All spans are void.
    pub fn reset(&mut self) {
        todo!()
    }
    /// Whether another [`Rx::recv`] fits. When not: flush, then reset.
    #[must_use]
    pub fn has_room(&self) -> bool {
        todo!()
    }
    /// One receive call.
    pub fn recv(&mut self, _socket: &UdpSocket) -> io::Result<Received> {
        todo!()
    }
    /// What it brought.
    pub fn buffers(&self, _received: Received) -> impl Iterator<Item = Buffer<'_>> {
        std::iter::empty()
    }
    /// Where in the arena these bytes lie; they must be part of a buffer's `bytes`.
    ///
    /// # Panics
    /// When they are not in the arena.
    #[must_use]
    pub fn span(&self, _bytes: &[u8]) -> Span {
        todo!()
    }
    /// Occupancy so far.
    #[must_use]
    pub fn stats(&self) -> &RxStats {
        todo!()
    }
}
