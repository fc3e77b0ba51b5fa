//! The part of a worker that TCP and TLS clients need.

use turnpike_net::{Buffer, poll::Event};
use turnpike_turn::time::Now;

use super::Worker;
use crate::stream::{Incoming, Streams, Token};

impl Worker {
    /// A TCP listener or a client's connection is ready.
    pub(super) fn serve_stream(&mut self, now: Now, event: &Event) {
        match Token::of(event.token) {
            Some(Token::Listener(place)) => {
                self.out.streams.accept(place, now.ms, &self.poller);
            }
            Some(Token::Connection(slot)) => {
                if event.writable {
                    self.out.streams.resume(slot, &self.poller);
                }
                if event.readable || event.error {
                    self.receive_from_stream(now, slot);
                }
            }
            None => {}
        }
    }

    /// What clients that came in this tick have said. They get what those who were there before have left of it.
    pub(super) fn greet(&mut self, now: Now) {
        while let Some(slot) = self.out.streams.next_accepted() {
            self.receive_from_stream(now, slot);
        }
    }

    pub(super) fn receive_from_stream(&mut self, now: Now, slot: usize) {
        if self.rx.room() < Streams::ROOM {
            self.flush();
        }
        if let Some(incoming) = self.out.streams.receive(slot, &mut self.rx) {
            self.route_stream(now, incoming);
        }
    }

    /// Routes the whole messages of what a stream has brought. False if the stream is not one of ours any more.
    pub(super) fn route_stream(&mut self, now: Now, mut incoming: Incoming) -> bool {
        let client = incoming.client;
        while let Some(message) = self.out.streams.next(&mut incoming, now.ms, &self.rx) {
            let bytes = self.rx.bytes(message);
            // A stream has no TOS and no TTL of its own: relayed datagrams get the defaults (RFC 8656 section 15.2).
            let buffer = Buffer {
                from: client.address,
                local: None,
                tos: 0,
                ttl: 0,
                segment_size: bytes.len(),
                bytes,
            };
            let verdict = self.server.from_client(now, client, bytes);
            let Some(errand) = self.out.carry_out(&self.rx, &buffer, verdict) else { continue };
            let (mut request, mut rest) = (Vec::new(), Vec::new());
            if errand.wants_bytes() {
                request.extend_from_slice(bytes);
                rest.extend_from_slice(self.rx.bytes(incoming.rest));
            }
            if !self.run_errand(now, &client, errand, request, rest) {
                return false;
            }
        }
        true
    }
}
