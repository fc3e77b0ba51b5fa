//! Capture of the datagrams that an allocation relays.
//!
//! A tap sits next to the bandwidth limits of its allocation, whose presence the packet path checks anyway. Allocations without limits and
//! without a tap are therefore relayed exactly as before, and a tapped allocation, like a limited one, is not relayed by the kernel.

use std::{fmt::Debug, net::SocketAddr};

use crate::server::{Client, Way};

/// Receives the relayed datagrams of one allocation, on the worker's thread. Must not block.
pub trait Tap: Debug + Send {
    fn relayed(&mut self, datagram: &TappedDatagram<'_>);
}

/// A relayed datagram: payload on the peer's leg, header and payload on the client's leg.
#[derive(Clone, Copy, Debug)]
pub struct TappedDatagram<'a> {
    pub way: Way,
    pub client: &'a Client,
    pub relayed: SocketAddr,
    pub peer: SocketAddr,
    /// ChannelData header, or indication up to its data.
    pub header: &'a [u8],
    pub payload: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapRefusal {
    /// The allocation has ended or moved.
    Gone,
    /// The allocation relays TCP.
    RelaysTcp,
    /// The allocation already has a tap.
    Tapped,
}
