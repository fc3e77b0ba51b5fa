//! UDP sockets, made with every option that the data path wants, and the table that [`crate::Tx`] sends through.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
};

/// How a socket is made. The default asks for nothing.
#[derive(Clone, Debug, Default)]
pub struct UdpOptions {
    /// SO_REUSEPORT: several workers, one port.
    pub reuse_port: bool,
    /// Receive buffer in bytes; SO_RCVBUFFORCE is tried first.
    pub recv_buffer: Option<usize>,
    /// Send buffer in bytes; SO_SNDBUFFORCE is tried first.
    pub send_buffer: Option<usize>,
    /// UDP_GRO: receive super-packets. Only for [`crate::Datapath::Gso`].
    pub gro: bool,
    /// Learn the destination address of each datagram (IP_PKTINFO); for wildcard sockets.
    pub packet_info: bool,
    /// Learn TOS and TTL (traffic class and hop limit) of each datagram.
    pub ip_header: bool,
    /// IP_RECVERR: ICMP errors can be read with [`crate::error_queue::read`].
    pub errors: bool,
}

/// A bound, non-blocking UDP socket. IPv6 sockets are IPV6_V6ONLY.
pub struct UdpSocket {}

impl UdpSocket {
    /// Binds. Port 0 lets the kernel choose.
    pub fn bind(_address: SocketAddr, _options: &UdpOptions) -> io::Result<Self> {
        todo!()
    }
    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        todo!()
    }
    /// connect(2): datagrams from elsewhere are refused by the kernel, [`crate::Route::to`] may be `None`.
    pub fn connect(&self, _peer: SocketAddr) -> io::Result<()> {
        todo!()
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}

/// Key of a socket in [`Sockets`]; dense and reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketId(pub u32);

/// The sockets of one worker.
#[derive(Default)]
pub struct Sockets {}

impl Sockets {
    /// Takes a socket.
    pub fn insert(&mut self, _socket: UdpSocket) -> SocketId {
        todo!()
    }
    /// Gives it back (dropping it closes it). Call [`crate::Tx::flush`] first: what is queued for it is dropped.
    pub fn remove(&mut self, _id: SocketId) -> Option<UdpSocket> {
        todo!()
    }
    /// Looks one up.
    #[must_use]
    pub fn get(&self, _id: SocketId) -> Option<&UdpSocket> {
        todo!()
    }
}
