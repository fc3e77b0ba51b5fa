//! DTLS clients of a worker.

use turnpike_net::ArenaSpan;
use turnpike_turn::{server::Client, time::Now};

use super::{NO_TRAILING, SHARE, Worker, datagrams, offload::FlowSide};
use crate::dtls::Associations;

impl Worker {
    /// Receives from the socket of a DTLS listener; `plain` is the place of the plain UDP listener that
    /// shares it.
    pub(super) fn receive_by_dtls(&mut self, now: Now, place: usize, plain: Option<usize>) {
        if self.rx.room() < Associations::ROOM {
            self.flush();
        }
        let mut share = SHARE;
        while self.rx.room() >= Associations::ROOM {
            let listening = self.out.dtls.listening(place);
            let Some((id, _)) = listening else { return };
            let Some(socket) = self.sockets.get(id) else { return };
            let Ok(received) = self.rx.recv(socket) else { return };
            if let Some(offload) = &mut self.offload {
                offload.received((id, FlowSide::Clients), received, received.emptied, &self.rx);
            }
            for index in received.first..received.first + received.count {
                let Some(buffer) = self.rx.buffer(index) else { return };
                match plain {
                    // A buffer comes from a single client, which uses either DTLS or plain TURN.
                    Some(plain) if !matches!(buffer.bytes.first(), Some(20..=63)) => {
                        self.route_client_buffer(now, plain, index);
                    }
                    _ => self.route_dtls_buffer(now, place, index),
                }
            }
            share = share.saturating_sub(received.count);
            if !received.more || share == 0 {
                return;
            }
        }
    }

    fn route_dtls_buffer(&mut self, now: Now, place: usize, index: usize) {
        let Some(buffer) = self.rx.buffer(index) else { return };
        let from = self.out.dtls.client(place, buffer.from, buffer.local);
        let marks = (buffer.tos, buffer.ttl);
        if self.tunnels.leads_away(&from) {
            for datagram in buffer.datagrams() {
                if !self.tunnels.pass_on(&from, marks, datagram) {
                    self.out.dtls.count_lost();
                }
            }
            return;
        }
        for datagram in datagrams(&self.rx, &buffer) {
            self.route_dtls_datagram(now, from, datagram, marks);
        }
    }

    /// Routes the messages in a client's datagram; `marks` are its TOS and TTL.
    pub(super) fn route_dtls_datagram(
        &mut self,
        now: Now,
        from: Client,
        datagram: ArenaSpan,
        marks: (u8, u8),
    ) {
        let source = self.out.dtls.receive(now.ms, from, datagram, &mut self.rx, &mut self.out.tx);
        let Some(source) = source else { return };
        let mut arrived = 0;
        while let Some(message) = self.out.dtls.arrived(arrived) {
            arrived += 1;
            let verdict = self.server.from_client(now, &source, self.rx.bytes(message));
            if self.out.carry_out(&self.rx, marks, verdict) {
                self.carry_out_effects(now, NO_TRAILING);
            }
        }
    }
}
