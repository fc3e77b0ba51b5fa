//! TCP and TLS clients of a worker.

use turnpike_net::Event;
use turnpike_turn::{server::Verdict, time::Now};

use super::{NO_TRAILING, TrailingBytes, UNMARKED, Worker};
use crate::stream::{Gone, Incoming, StreamToken, Streams};

impl Worker {
    pub(super) fn serve_stream(&mut self, now: Now, event: &Event) {
        match StreamToken::of(event.token) {
            Some(StreamToken::Listener(place)) => {
                self.out.streams.accept(place, now.ms, &self.frame.poller);
            }
            Some(StreamToken::Connection(slot)) => {
                if event.writable {
                    self.out.streams.resume(slot, &self.frame.poller);
                }
                if event.readable || event.error {
                    if self.out.streams.is_paused(slot) {
                        // Reading is paused, so an event can only mean that the connection is broken.
                        self.out.streams.abandon(slot);
                    } else {
                        self.receive_from_stream(now, slot);
                    }
                }
            }
            None => {}
        }
    }

    pub(super) fn serve_accepted(&mut self, now: Now) {
        while let Some(slot) = self.out.streams.next_accepted() {
            self.receive_from_stream(now, slot);
        }
    }

    pub(super) fn receive_from_stream(&mut self, now: Now, slot: usize) {
        if self.rx.room() < Streams::ROOM {
            self.flush();
        }
        if let Some(incoming) = self.out.streams.receive(slot, now.ms, &mut self.rx) {
            self.route_stream(now, incoming);
        }
        while let Some(leaving) = self.out.streams.next_handed_on(&self.frame.poller) {
            self.handed_on.take(leaving, now.ms, &self.frame.poller);
        }
    }

    pub(super) fn tell_gone(&mut self, now: Now) {
        while let Some(Gone { client, closed }) = self.out.streams.next_gone() {
            if let Some(closed) = closed {
                let user = self.server.user_at(&client);
                self.out.streams.note_closed(&client, closed, user);
            }
            self.server.disconnected(now, &client);
        }
        while let Some(client) = self.out.dtls.next_gone() {
            self.server.disconnected(now, &client);
        }
        self.tell_ended_associations();
        self.carry_out_effects(now, NO_TRAILING);
    }

    /// Resumes connections that had to wait because of their bandwidth limit, or until an older connection
    /// with the same 5-tuple had ended.
    pub(super) fn resume_streams(&mut self, now: Now) {
        self.tell_gone(now);
        while let Some(slot) = self.out.streams.next_resumed(now.ms) {
            if self.rx.room() < Streams::ROOM {
                self.flush();
            }
            if let Some(incoming) = self.out.streams.go_on(slot, &mut self.rx) {
                self.route_stream(now, incoming);
            }
            self.out.streams.read_on(slot, &self.frame.poller);
            self.frame.dirty = true;
        }
    }

    pub(super) fn route_stream(&mut self, now: Now, mut incoming: Incoming) {
        let source = incoming.source;
        while let Some(message) = self.out.streams.next(&mut incoming, now.ms, &self.rx) {
            let bytes = self.rx.bytes(message);
            let verdict = self.server.from_client(now, &source, bytes);
            if let Verdict::Wait { until_ms, .. } = verdict {
                let until_ms = until_ms.max(now.ms + 1);
                return self.out.streams.pause(&incoming, message, until_ms, &self.rx, &self.frame.poller);
            }
            if self.out.carry_out(&self.rx, UNMARKED, verdict) {
                self.carry_out_effects(now, TrailingBytes::Received(incoming.rest));
                if self.out.streams.is_paused(incoming.slot) {
                    return;
                }
            }
        }
    }
}
