//! Connections that leave a worker: they become data connections (RFC 6062), or another worker adopts them.

use rustls::ServerConnection;
use turnpike_net::{Poller, Rx, TcpSocket};
use turnpike_turn::server::{Client, PrefixLengths, Source};
use turnpike_wire::frame::Framer;

use super::{
    CloseReason, Connection, ConnectionStage, SWEEP_MS, StreamToken, Streams,
    channel::{Channel, RecordBatch},
    connection::NONE,
    outbox::Outbox,
    receive::Incoming,
};
use crate::link::LinkSlot;
use std::io::IoSlice;

pub(crate) struct Detached {
    pub(crate) client: Client,
    pub(crate) socket: TcpSocket,
    pub(crate) tls: Option<Box<ServerConnection>>,
    /// Queued bytes to send first. For a TLS client, they are in the buffer of `tls` instead.
    pub(crate) unsent: Vec<u8>,
    pub(crate) ended: bool,
    trusted: bool,
    proxied: bool,
    listener: usize,
}

impl Streams {
    pub(crate) const FEED: usize = 32 << 10;

    pub(crate) fn detach(
        &mut self,
        client: &Client,
        rx: &Rx,
        poller: &Poller,
        reason: CloseReason,
    ) -> Option<Detached> {
        let slot = self.slot_of(client)?;
        let connection = self.connections.get(slot).filter(|connection| connection.closing.is_none())?;
        if connection.first != NONE
            && let Err(reason) = self.send(slot, rx)
        {
            self.close(slot, reason);
            return None;
        }
        if poller.remove(&self.connections[slot].socket).is_err() {
            self.close(slot, CloseReason::Broken);
            return None;
        }
        self.uncount(slot);
        self.by_client.remove(client);
        self.stats.closed[reason as usize] += 1;
        let Connection { socket, channel, mut outbox, ended, trusted, proxied, listener, .. } =
            self.connections.remove(slot);
        let (tls, unsent) = match channel {
            Channel::Plain => (None, outbox.rest()),
            Channel::Tls(mut tls) => {
                let mut batch = RecordBatch::default();
                while let Some(parts) = outbox.next() {
                    // Fails only after close_notify, when the client no longer reads.
                    let _ = batch.encrypt(&mut tls, &parts.map(IoSlice::new));
                    let len = parts.iter().map(|part| part.len()).sum();
                    outbox.consume(len);
                }
                (Some(tls), Vec::new())
            }
        };
        Some(Detached { client: *client, socket, tls, unsent, ended, trusted, proxied, listener })
    }

    /// Adopts another worker's connection. Returns `None` if it cannot be polled, or if it is proxied and its
    /// 5-tuple is already in use.
    pub(crate) fn adopt(&mut self, taken: Detached, now_ms: u64, poller: &Poller) -> Option<Source> {
        let Detached { client, socket, tls, unsent, ended, trusted, proxied, listener } = taken;
        if let Some(older) = self.slot_of(&client) {
            if proxied && !self.connections[older].has_ended() {
                return None;
            }
            self.supersede(older);
        }
        let mut outbox = Outbox::new(self.config.limits.stream_queue);
        outbox.begin([&unsent, b"", b""], 0);
        let network = PrefixLengths::HOST.of(client.address.ip());
        let entry = self.connections.vacant_entry();
        let slot = entry.key();
        entry.insert(Connection {
            socket,
            channel: tls.map_or(Channel::Plain, Channel::Tls),
            generation: self.generations.draw(),
            stage: ConnectionStage::Open,
            client,
            proxied,
            superseded: false,
            framer: Framer::new(),
            outbox,
            first: NONE,
            last: NONE,
            touched: false,
            watches_readable: true,
            watches_writable: false,
            paused: false,
            deadline_ms: now_ms + self.config.limits.idle_ms(),
            barren: 0,
            ended,
            spoke: true,
            allocated: false,
            trusted,
            place: Some(self.idle.enter(slot, Some(network), now_ms)),
            waiting: false,
            failure: None,
            closing: None,
            listener,
        });
        self.by_client.insert(client, slot);
        self.stats.adopted += 1;
        self.next_sweep_ms.get_or_insert(now_ms + SWEEP_MS);
        if poller.add(&self.connections[slot].socket, StreamToken::Connection(slot).get()).is_err() {
            self.remove(slot, CloseReason::Broken);
            return None;
        }
        self.touch(slot);
        Some(self.connections[slot].source(slot))
    }

    /// Handles bytes that another worker has read from an adopted connection, at most [`Streams::FEED`] at a
    /// time; the arena needs [`Streams::ROOM`]. Returns `None` if there is no complete message.
    pub(crate) fn feed(&mut self, place: LinkSlot, bytes: &[u8], rx: &mut Rx) -> Option<Incoming> {
        let slot = self.slot_at(place)?;
        let connection = self.connections.get_mut(slot).filter(|connection| connection.closing.is_none())?;
        let filled = rx.fill(connection.framer.held().len(), |room| {
            let len = bytes.len().min(room.len());
            room[..len].copy_from_slice(&bytes[..len]);
            Ok(len)
        });
        let rest = connection.together(filled.ok()?, rx)?;
        Some(Incoming { slot, source: connection.source(slot), rest })
    }
}
