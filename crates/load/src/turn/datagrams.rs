//! The sockets of one thread, one per client: datagrams in batches, by the step of the ladder that was asked for.

use std::{io, net::SocketAddr};

use turnpike_net::{Datapath, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket, poll::Poller};

use super::Config;
use crate::run::Errors;

pub(super) struct Datagrams {
    tx: Tx,
    rx: Rx,
    sockets: Sockets,
    /// By client.
    ids: Vec<SocketId>,
    options: UdpOptions,
    /// Datagrams that the kernel has not taken, as last seen.
    refused: u64,
}

impl Datagrams {
    pub(super) fn new(config: &Config) -> Self {
        /// Receive buffers of all clients together, as far as the kernel allows.
        const ALL_BUFFERS: usize = 128 << 20;
        let buffer = (ALL_BUFFERS / config.clients).clamp(256 << 10, 8 << 20);
        Self {
            tx: Tx::new(config.datapath),
            rx: Rx::new(config.datapath),
            sockets: Sockets::default(),
            ids: Vec::new(),
            options: UdpOptions {
                recv_buffer: Some(buffer),
                send_buffer: Some(buffer.min(4 << 20)),
                gro: config.datapath == Datapath::Gso,
                ..UdpOptions::default()
            },
            refused: 0,
        }
    }

    /// Opens the socket of another client, connected to the server.
    pub(super) fn add(&mut self, server: SocketAddr, poller: &Poller) -> io::Result<()> {
        let id = self.open(server, poller, self.ids.len(), 0)?;
        self.ids.push(id);
        Ok(())
    }

    /// Gives a client another socket, connected to this server, from this source port. Nothing may be queued for the old one.
    pub(super) fn reopen(
        &mut self,
        index: usize,
        server: SocketAddr,
        poller: &Poller,
        port: u16,
    ) -> io::Result<()> {
        let new = self.open(server, poller, index, port)?;
        self.sockets.remove(std::mem::replace(&mut self.ids[index], new));
        Ok(())
    }

    #[inline]
    pub(super) fn push_with(&mut self, index: usize, len: usize, fill: impl FnOnce(&mut [u8])) {
        let route =
            Route { socket: self.ids[index], to: None, from: None, tos: 0, ttl: 0, dont_fragment: false };
        self.tx.push_with(&route, len, fill);
    }

    pub(super) fn queued(&self) -> usize {
        self.tx.queued()
    }

    /// Sends what is queued; returns how many datagrams the kernel did not take.
    pub(super) fn flush(&mut self, errors: &mut Errors) -> u64 {
        if self.tx.queued() == 0 {
            return 0;
        }
        self.tx.flush(&mut self.sockets, &self.rx);
        let stats = self.tx.stats();
        let refused = stats.would_block + stats.too_big + stats.refused;
        if refused == self.refused {
            return 0;
        }
        let dropped = refused - self.refused;
        self.refused = refused;
        for (name, count) in [
            ("send_would_block", stats.would_block),
            ("send_too_big", stats.too_big),
            ("send_refused", stats.refused),
        ] {
            if count > 0 {
                errors.insert(name, count);
            }
        }
        dropped
    }

    /// Receives from one socket, batch by batch: `batch` is called before each, `each` with each datagram. True when an ICMP
    /// "port unreachable" came from the server's address.
    pub(super) fn receive(
        &mut self,
        index: usize,
        errors: &mut Errors,
        mut each: impl FnMut(Option<&[u8]>),
    ) -> bool {
        /// Receive calls before the other sockets, and sending, have their turn.
        const CALLS: usize = 4;
        let mut unreachable = false;
        let Some(socket) = self.ids.get(index).and_then(|id| self.sockets.get(*id)) else { return false };
        for _ in 0..CALLS {
            // What is queued for sending lies in `tx`, never in this arena.
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
                    each(Some(datagram));
                }
            }
            if !received.more {
                break;
            }
        }
        unreachable
    }

    /// A socket connected to the server; port 0 lets the kernel choose.
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
