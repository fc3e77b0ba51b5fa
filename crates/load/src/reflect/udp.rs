//! UDP side of the reflector: returns each datagram to its sender.
//!
//! Each worker has its own `SO_REUSEPORT` socket per address. The datagrams of a received super-packet are adjacent in
//! the arena, so they are sent as one super-packet.

use std::{io, net::SocketAddr, time::Instant};

use turnpike_net::{BindError, Datapath, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket};
use turnpike_worker::INBOX;

use super::{BUFFER, ReflectFrame, ReflectStats, ReflectWorker};
use crate::LoadError;

/// Binds a UDP socket; `shared` sets SO_REUSEPORT.
pub(super) fn bind(address: SocketAddr, step: Datapath, shared: bool) -> Result<UdpSocket, LoadError> {
    let options = UdpOptions {
        reuse_port: shared,
        recv_buffer: Some(BUFFER),
        send_buffer: Some(BUFFER),
        gro: step == Datapath::Gso,
        // Replies must come from the destination address of the request.
        packet_info: address.ip().is_unspecified(),
        ..UdpOptions::default()
    };
    let failed = |source| BindError::ip(format_args!("udp {address}"), source, "with --listen").into();
    UdpSocket::bind(address, &options).map_err(failed)
}

pub(super) struct UdpReflectWorker {
    sockets: Sockets,
    frame: ReflectFrame,
    rx: Rx,
    tx: Tx,
    ready: Vec<SocketId>,
}

impl UdpReflectWorker {
    pub(super) fn new(sockets: Vec<UdpSocket>, datapath: Datapath) -> io::Result<Self> {
        let (frame, mut table) = (ReflectFrame::new(0, Instant::now())?, Sockets::default());
        for socket in sockets {
            let id = table.insert(socket);
            if let Some(socket) = table.get(id) {
                frame.poller.add(socket, id.0.into())?;
            }
        }
        Ok(Self { sockets: table, frame, rx: Rx::new(datapath), tx: Tx::new(datapath), ready: Vec::new() })
    }

    fn reflect(&mut self, id: SocketId) {
        /// Maximum number of receive calls before other sockets get a turn.
        const CALLS: usize = 8;
        let Some(socket) = self.sockets.get(id) else { return };
        for _ in 0..CALLS {
            // An error here is an ICMP reply to an earlier send; the next call can receive data again.
            let Ok(received) = self.rx.recv(socket) else { continue };
            for buffer in self.rx.buffers(received) {
                let route = Route {
                    socket: id,
                    to: Some(buffer.from),
                    from: buffer.local,
                    tos: 0,
                    ttl: 0,
                    dont_fragment: false,
                };
                for datagram in buffer.datagrams() {
                    self.tx.push(&route, &[], self.rx.span(datagram), 0);
                }
            }
            if !received.more {
                return;
            }
            if !self.rx.has_room() {
                self.tx.flush(&mut self.sockets, &self.rx);
                return self.rx.reset();
            }
        }
    }

    fn send(&mut self) {
        self.tx.flush(&mut self.sockets, &self.rx);
        self.rx.reset();
    }
}

impl ReflectWorker for UdpReflectWorker {
    fn frame(&mut self) -> &mut ReflectFrame {
        &mut self.frame
    }

    fn wake_up(&mut self) -> io::Result<()> {
        self.ready.clear();
        let events = self.frame.poller.wait(None)?;
        let has_command = events.iter().any(|event| event.token == INBOX);
        let ids = events.iter().filter_map(|event| u32::try_from(event.token).ok().map(SocketId));
        self.ready.extend(ids);
        for index in 0..self.ready.len() {
            self.reflect(self.ready[index]);
        }
        if has_command {
            let _ = self.frame.command();
        }
        self.send();
        Ok(())
    }

    fn stats(&self) -> ReflectStats {
        let (rx, tx) = (self.rx.stats(), self.tx.stats());
        ReflectStats {
            received: rx.datagrams,
            received_bytes: rx.bytes,
            kernel_drops: rx.kernel_drops,
            sent: tx.datagrams,
            refused: tx.would_block + tx.too_big + tx.refused,
            ..ReflectStats::default()
        }
    }
}
