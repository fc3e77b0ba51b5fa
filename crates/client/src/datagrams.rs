//! UDP sockets of one thread. Sends and receives datagrams in batches over the selected data path.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use turnpike_net::{Buffer, Datapath, Poller, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket};

use crate::ErrorCounts;

/// UDP sockets by index: one per client, or one shared by clients that differ in their local addresses.
pub struct Datagrams {
    tx: Tx,
    rx: Rx,
    sockets: Sockets,
    ids: Vec<SocketId>,
    /// Local and server address per client of a shared socket; empty if each client has its own socket.
    ends: Vec<DatagramEnd>,
    options: UdpOptions,
    refused: [u64; 3],
}

#[derive(Clone, Copy)]
struct DatagramEnd {
    own: IpAddr,
    server: SocketAddr,
}

const ALL_BUFFERS: usize = 128 << 20;

impl Datagrams {
    pub const SHARED: u64 = 1 << 33;

    /// Creates an empty set. `clients` is the total number of clients in all threads, which share the buffer
    /// memory.
    pub fn new(datapath: Datapath, clients: usize) -> Self {
        let buffer = (ALL_BUFFERS / clients.max(1)).clamp(256 << 10, 8 << 20);
        Self {
            tx: Tx::new(datapath),
            rx: Rx::new(datapath),
            sockets: Sockets::default(),
            ids: Vec::new(),
            ends: Vec::new(),
            options: UdpOptions {
                recv_buffer: Some(buffer),
                send_buffer: Some(buffer.min(4 << 20)),
                gro: datapath == Datapath::Gso,
                ..UdpOptions::default()
            },
            refused: [0; 3],
        }
    }

    /// Opens a socket connected to this server; the index is also the poller token.
    pub fn add(&mut self, server: SocketAddr, poller: &Poller) -> io::Result<()> {
        let id = self.open(server, poller, self.ids.len(), 0)?;
        self.ids.push(id);
        Ok(())
    }

    /// Adds a client of the shared socket; the clients' local addresses must be consecutive.
    pub fn share(&mut self, own: IpAddr, server: SocketAddr, poller: &Poller) -> io::Result<()> {
        // Check the address now, because a send would later fail with nothing but EINVAL.
        drop(std::net::UdpSocket::bind((own, 0))?);
        let id = match self.ids.first() {
            Some(id) => *id,
            None => {
                let anywhere: IpAddr =
                    if own.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
                let buffer = Some(ALL_BUFFERS / 4);
                let options = UdpOptions { packet_info: true, recv_buffer: buffer, ..self.options.clone() };
                let socket = UdpSocket::bind((anywhere, 0).into(), &options)?;
                poller.add(&socket, Self::SHARED)?;
                self.sockets.insert(socket)
            }
        };
        self.ids.push(id);
        self.ends.push(DatagramEnd { own, server });
        Ok(())
    }

    pub fn listen(&mut self, address: SocketAddr, poller: &Poller, token: u64) -> io::Result<SocketAddr> {
        let socket = UdpSocket::bind(address, &self.options)?;
        poller.add(&socket, token)?;
        let address = socket.local_addr();
        self.ids.push(self.sockets.insert(socket));
        Ok(address)
    }

    /// Replaces a client's socket. No datagrams may be queued for it. A shared socket stays open, and its client switches to `server`.
    pub fn reopen(&mut self, index: usize, server: SocketAddr, poller: &Poller, port: u16) -> io::Result<()> {
        if let Some(end) = self.ends.get_mut(index) {
            end.server = server;
            return Ok(());
        }
        let new = self.open(server, poller, index, port)?;
        self.sockets.remove(std::mem::replace(&mut self.ids[index], new));
        Ok(())
    }

    /// Queues a datagram of `len` bytes, written by `fill`, on a connected socket.
    #[inline]
    pub fn push_with(&mut self, index: usize, len: usize, fill: impl FnMut(&mut [u8])) {
        self.push_run(index, None, (1, len), fill);
    }

    /// Queues `count` datagrams of `len` bytes, each written by `fill`, to `to` or the connected address.
    #[inline]
    pub fn push_run(
        &mut self,
        index: usize,
        to: Option<SocketAddr>,
        (count, len): (usize, usize),
        mut fill: impl FnMut(&mut [u8]),
    ) {
        let (to, from) = match self.ends.get(index) {
            Some(end) => (Some(to.unwrap_or(end.server)), Some(end.own)),
            None => (to, None),
        };
        let route = Route { socket: self.ids[index], to, from, tos: 0, ttl: 0, dont_fragment: false };
        self.tx.push_run(&route, count, len, |all| all.chunks_exact_mut(len.max(1)).for_each(&mut fill));
    }

    pub fn queued(&self) -> usize {
        self.tx.queued()
    }

    pub fn flush(&mut self, errors: &mut ErrorCounts) -> u64 {
        if self.tx.queued() == 0 {
            return 0;
        }
        self.tx.flush(&mut self.sockets, &self.rx);
        let stats = self.tx.stats();
        let refused = [stats.would_block, stats.too_big, stats.refused];
        if refused == self.refused {
            return 0;
        }
        let mut dropped = 0;
        let names = ["send_would_block", "send_too_big", "send_refused"];
        for ((name, now), before) in names.into_iter().zip(refused).zip(self.refused) {
            if now > before {
                *errors.entry(name).or_default() += now - before;
                dropped += now - before;
            }
        }
        self.refused = refused;
        dropped
    }

    /// Receives datagrams. Calls `each` with `None` before each batch, then with each datagram. Returns true if an ICMP port unreachable
    /// was received.
    pub fn receive(
        &mut self,
        index: usize,
        errors: &mut ErrorCounts,
        mut each: impl FnMut(Option<(&[u8], SocketAddr)>),
    ) -> bool {
        self.receive_with(index, errors, |received| {
            each(received.map(|(datagram, buffer)| (datagram, buffer.from)));
        })
    }

    pub fn receive_shared(
        &mut self,
        errors: &mut ErrorCounts,
        mut each: impl FnMut(Option<(&[u8], Option<usize>)>),
    ) {
        let ends = std::mem::take(&mut self.ends);
        self.receive_with(0, errors, |received| {
            each(received.map(|(datagram, buffer)| (datagram, buffer.local.and_then(|own| of(&ends, own)))));
        });
        self.ends = ends;
    }

    fn receive_with(
        &mut self,
        index: usize,
        errors: &mut ErrorCounts,
        mut each: impl FnMut(Option<(&[u8], &Buffer<'_>)>),
    ) -> bool {
        /// Maximum number of receive calls before other sockets, and sending, get a turn.
        const CALLS: usize = 4;
        let mut unreachable = false;
        let Some(socket) = self.ids.get(index).and_then(|id| self.sockets.get(*id)) else { return false };
        for _ in 0..CALLS {
            self.rx.reset();
            let received = match self.rx.recv(socket) {
                Ok(received) => received,
                Err(error) => {
                    let refused = error.kind() == io::ErrorKind::ConnectionRefused;
                    unreachable |= refused;
                    *errors.entry(if refused { "port_unreachable" } else { "receive" }).or_default() += 1;
                    continue;
                }
            };
            each(None);
            for buffer in self.rx.buffers(received) {
                for datagram in buffer.datagrams() {
                    each(Some((datagram, &buffer)));
                }
            }
            if !received.more {
                break;
            }
        }
        unreachable
    }

    fn open(&mut self, server: SocketAddr, poller: &Poller, index: usize, port: u16) -> io::Result<SocketId> {
        let any: SocketAddr = match server {
            SocketAddr::V4(_) => ([0; 4], port).into(),
            SocketAddr::V6(_) => ([0_u16; 8], port).into(),
        };
        let socket = UdpSocket::bind(any, &self.options)?;
        socket.connect(server)?;
        poller.add(&socket, index as u64)?;
        Ok(self.sockets.insert(socket))
    }
}

fn of(ends: &[DatagramEnd], own: IpAddr) -> Option<usize> {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let offset = bits(own).checked_sub(bits(ends.first()?.own))?;
    let index = usize::try_from(offset).ok()?;
    (ends.get(index)?.own == own).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_socket_finds_clients_by_address() {
        let server = SocketAddr::from(([192, 0, 2, 1], 3478));
        let end = |last: u8| DatagramEnd { own: [10, 79, 0, last].into(), server };
        let ends: Vec<DatagramEnd> = (5..9).map(end).collect();
        let whose = |last: u8| of(&ends, [10, 79, 0, last].into());
        assert_eq!([4, 5, 8, 9].map(whose), [None, Some(0), Some(3), None]);
        assert_eq!(of(&ends, Ipv6Addr::LOCALHOST.into()), None);
        assert_eq!(of(&[], [10, 79, 0, 5].into()), None);
    }
}
