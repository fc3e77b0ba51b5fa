//! Connections that have to wait because the client exceeds its bandwidth limit or repeats refused requests,
//! or because its new worker has no room. The server stops reading, so that TCP slows the client down.
//! Nothing is dropped, and at most one read's data is waiting.

use turnpike_net::{ArenaSpan, Interest, Poller, Rx};
use turnpike_turn::server::Client;

use super::{CloseReason, StreamToken, Streams, receive::Incoming};

impl Streams {
    pub(crate) fn pause(
        &mut self,
        incoming: &Incoming,
        message: ArenaSpan,
        until_ms: u64,
        rx: &Rx,
        poller: &Poller,
    ) {
        let slot = incoming.slot;
        let Some(connection) = self.connections.get_mut(slot) else { return };
        if connection.closing.is_some() {
            return;
        }
        let behind = incoming.rest.offset + incoming.rest.len;
        let whole = ArenaSpan { offset: message.offset, len: behind - message.offset };
        connection.framer.hold(rx.bytes(whole), 0);
        // The message is counted again when the connection is resumed.
        self.stats.received -= 1;
        self.pause_until(slot, until_ms, poller);
    }

    pub(crate) fn put_back(
        &mut self,
        client: &Client,
        [request, behind]: [&[u8]; 2],
        until_ms: u64,
        poller: &Poller,
    ) {
        let Some(slot) = self.slot_of(client) else { return };
        let Some(connection) = self.connections.get_mut(slot).filter(|it| it.closing.is_none()) else {
            return;
        };
        connection.framer.hold(&[request, behind].concat(), 0);
        self.pause_until(slot, until_ms, poller);
    }

    /// Stops reading from a client until `until_ms`; `behind` is data that has already been read.
    pub(crate) fn slow_down(&mut self, client: &Client, behind: &[u8], until_ms: u64, poller: &Poller) {
        let Some(slot) = self.slot_of(client) else { return };
        let Some(connection) = self.connections.get_mut(slot).filter(|it| it.closing.is_none()) else {
            return;
        };
        if !behind.is_empty() {
            connection.framer.hold(behind, 0);
        }
        self.pause_until(slot, until_ms, poller);
    }

    pub(crate) fn held(&self, client: &Client) -> &[u8] {
        self.slot_of(client).map_or(&[], |slot| self.connections[slot].framer.held())
    }

    fn pause_until(&mut self, slot: usize, until_ms: u64, poller: &Poller) {
        let connection = &mut self.connections[slot];
        connection.paused = true;
        self.paused.insert((until_ms, slot, connection.generation));
        self.watch(slot, false, poller);
    }

    pub(crate) fn next_resumed(&mut self, now_ms: u64) -> Option<usize> {
        while let Some(&(until_ms, slot, generation)) = self.paused.first()
            && until_ms <= now_ms
        {
            self.paused.pop_first();
            // Another connection may now have the slot.
            let connection = self.connections.get_mut(slot);
            if let Some(connection) = connection.filter(|it| it.generation == generation && it.paused) {
                connection.paused = false;
                return Some(slot);
            }
        }
        None
    }

    /// Copies the held bytes to the arena, which needs [`Streams::ROOM`].
    pub(crate) fn go_on(&mut self, slot: usize, rx: &mut Rx) -> Option<Incoming> {
        let connection = self.connections.get_mut(slot).filter(|connection| connection.closing.is_none())?;
        let behind = rx.fill(connection.framer.held().len(), |_| Ok(0)).ok()?;
        let rest = rx.join(connection.framer.held(), behind);
        Some(Incoming { slot, source: connection.source(slot), rest })
    }

    pub(crate) fn read_on(&mut self, slot: usize, poller: &Poller) {
        if self.connections.get(slot).is_some_and(|connection| !connection.paused) {
            self.watch(slot, true, poller);
        }
    }

    pub(crate) fn is_paused(&self, slot: usize) -> bool {
        self.connections.get(slot).is_some_and(|connection| connection.paused)
    }

    pub(crate) fn abandon(&mut self, slot: usize) {
        self.close(slot, CloseReason::Broken);
    }

    fn watch(&mut self, slot: usize, readable: bool, poller: &Poller) {
        let connection = &mut self.connections[slot];
        if connection.watches_readable == readable {
            return;
        }
        connection.watches_readable = readable;
        let token = StreamToken::Connection(slot).get();
        let watched = poller.set(
            &connection.socket,
            token,
            Interest::Level { read: readable, write: connection.watches_writable },
        );
        if watched.is_err() {
            self.close(slot, CloseReason::Broken);
        }
    }
}
