//! Clients over TCP and TLS, whose framers sit in front of the worker's state machine.
//!
//! ```text
//! Poller ─▶ Streams::accept                     sockets, limits
//!        ─▶ Streams::receive ─▶ arena           PROXY header, first byte, TLS; behind a held partial message
//!             └─ Streams::next ─▶ Server::from_client   one message each, in place
//! Verdict::ToClient, Reply ─▶ Streams::relay, reply     a piece: header bytes + a span of the arena
//!                                               or, for a web server, Streams::next_handed_on ─▶ HandedOn
//! Streams::flush                                per connection: all pieces of the tick in few writes; data that the kernel
//!                                               does not accept is copied into the outbox
//! ```
//!
//! Polling is level-triggered with one read per connection and wake-up. A busy client cannot delay others,
//! and the poller reports deferred work (handshakes and messages beyond a tick's share) again.

pub(crate) mod channel;
mod client_certificates;
pub mod config;
mod connection;
mod hand_on;
mod listener;
mod outbox;
mod pause;
mod receive;
mod send;
pub mod stats;
mod tickets;
pub mod tls;
mod transfer;

use std::{
    collections::{BTreeSet, VecDeque},
    mem,
    sync::Arc,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use slab::Slab;
use turnpike_net::{Event, Poller};
use turnpike_turn::server::{Client, Effect, PrefixLengths, Transport};

use crate::{
    Layout,
    bounded::{Bounded, idle_limits},
    link::{Generations, LinkSlot},
    turned_away::{Noted, TurnedAway},
};

pub use config::StreamConfig;
pub(crate) use listener::listen_options;
pub(crate) use receive::Incoming;
pub use stats::{CloseReason, HandshakeFailure, StreamStats};
pub use tickets::TicketKeys;
pub use tls::{CertificateError, ChainFault, Identity, TlsContext};
pub(crate) use transfer::Detached;

use connection::{Connection, ConnectionStage};
use hand_on::Chosen;
use listener::Listener;
use send::Pieces;

/// First poller token of streams: listeners, then connections. UDP sockets use lower tokens.
const FIRST_TOKEN: u64 = 1 << 32;
const FIRST_CONNECTION: u64 = 2 << 32;
pub(crate) const END_OF_TOKENS: u64 = 1 << 62;
/// Maximum handshake steps per tick. Each takes up to a millisecond, during which datagrams wait.
const HANDSHAKES: u32 = 4;
/// Messages per tick before datagrams get their turn. A higher value would let a TCP flood delay UDP clients;
/// a lower value would send less data per write.
const SHARE: usize = 2048;
/// Bytes of TLS overhead that cost as much as a message. A KeyUpdate is 27 bytes, all of them overhead.
const OVERHEAD: usize = 32;
const SWEEP_MS: u64 = 250;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamToken {
    Listener(usize),
    Connection(usize),
}

impl StreamToken {
    pub(crate) fn of(token: u64) -> Option<Self> {
        let place = |first: u64| usize::try_from(token - first).ok();
        match token {
            FIRST_TOKEN..FIRST_CONNECTION => place(FIRST_TOKEN).map(Self::Listener),
            FIRST_CONNECTION..END_OF_TOKENS => place(FIRST_CONNECTION).map(Self::Connection),
            _ => None,
        }
    }

    fn get(self) -> u64 {
        match self {
            Self::Listener(place) => FIRST_TOKEN + place as u64,
            Self::Connection(slot) => FIRST_CONNECTION + slot as u64,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone {
    pub(crate) client: Client,
    pub(crate) closed: Option<(Transport, CloseReason)>,
}

pub(crate) struct Streams {
    layout: Arc<Layout>,
    config: Arc<StreamConfig>,
    workers: usize,
    listeners: Vec<Listener>,
    connections: Slab<Connection>,
    idle: Bounded,
    /// Connections that were accepted but are not read until their address is below its limit again.
    waiting: Bounded,
    accepted: VecDeque<usize>,
    by_client: HashMap<Client, usize, RandomState>,
    generations: Generations,
    pieces: Pieces,
    touched: Vec<usize>,
    gone: Vec<Gone>,
    scratch: Vec<u8>,
    /// ClientHello joined from several records.
    hello: Vec<u8>,
    /// Connections that will be handed on to a web server.
    chosen: Vec<Chosen>,
    handshakes_left: u32,
    share_left: usize,
    first_put_off: Option<usize>,
    next_sweep_ms: Option<u64>,
    resume_ms: Option<u64>,
    /// Paused connections, ordered by the end of their pause, with their generations.
    paused: BTreeSet<(u64, usize, u32)>,
    stats: StreamStats,
    noted: Noted,
}

impl Streams {
    pub(crate) fn new(layout: Arc<Layout>, config: Arc<StreamConfig>, workers: usize) -> Self {
        let limits = idle_limits(&config.limits, workers);
        Self {
            layout,
            workers,
            idle: Bounded::new(limits),
            waiting: Bounded::new(limits),
            config,
            listeners: Vec::new(),
            connections: Slab::new(),
            accepted: VecDeque::new(),
            by_client: HashMap::default(),
            generations: Generations::default(),
            pieces: Pieces::default(),
            touched: Vec::new(),
            gone: Vec::new(),
            scratch: Vec::new(),
            hello: Vec::new(),
            chosen: Vec::new(),
            handshakes_left: HANDSHAKES,
            share_left: SHARE,
            first_put_off: None,
            next_sweep_ms: None,
            resume_ms: None,
            paused: BTreeSet::new(),
            stats: StreamStats::default(),
            noted: Noted::default(),
        }
    }

    pub(crate) fn reconfigure(&mut self, layout: Arc<Layout>, config: Arc<StreamConfig>) {
        let limits = idle_limits(&config.limits, self.workers);
        self.idle.limit(limits);
        self.waiting.limit(limits);
        (self.layout, self.config) = (layout, config);
        self.set_tls_only();
    }

    pub(crate) fn stats(&self) -> StreamStats {
        StreamStats { open: self.connections.len() as u64, ..self.stats }
    }

    pub(crate) fn turned_away(&mut self) -> impl Iterator<Item = TurnedAway> + '_ {
        self.noted.drain()
    }

    /// Starts a tick; returns the index of the event to start with. The poller always reports sockets in the
    /// same order, so a tick continues with the first connection that the previous one deferred.
    pub(crate) fn begin_tick(&mut self, events: &[Event]) -> usize {
        self.share_left = SHARE;
        let Some(slot) = self.first_put_off.take() else { return 0 };
        let token = StreamToken::Connection(slot).get();
        events.iter().position(|event| event.token == token).unwrap_or(0)
    }

    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        let paused = self.paused.first().map(|(until_ms, ..)| *until_ms);
        [self.next_sweep_ms, self.resume_ms, paused].into_iter().flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, now_ms: u64, poller: &Poller) {
        if self.resume_ms.is_some_and(|due| due <= now_ms) {
            self.resume_ms = None;
            for (place, listener) in self.listeners.iter_mut().enumerate().filter(|(_, l)| l.paused) {
                let Some(socket) = &listener.socket else { continue };
                listener.paused = poller.add(socket, StreamToken::Listener(place).get()).is_err();
                if listener.paused {
                    self.resume_ms = Some(now_ms + listener::PAUSE_MS);
                }
            }
            self.admit(now_ms, poller);
        }
        if self.next_sweep_ms.is_some_and(|due| due <= now_ms) {
            let connections = &self.connections;
            let overdue = |slot: usize| {
                let connection = connections.get(slot)?;
                (connection.deadline_ms <= now_ms).then(|| (slot, connection.overdue()))
            };
            let overdue: Vec<(usize, CloseReason)> = self.idle.slots().filter_map(overdue).collect();
            for (slot, reason) in overdue {
                self.close(slot, reason);
            }
            self.next_sweep_ms = (!self.idle.is_empty()).then_some(now_ms + SWEEP_MS);
        }
    }

    pub(crate) fn next_gone(&mut self) -> Option<Gone> {
        self.gone.pop()
    }

    pub(crate) fn note_closed(
        &mut self,
        client: &Client,
        (transport, reason): (Transport, CloseReason),
        user: Option<(Arc<str>, Box<str>)>,
    ) {
        self.noted.note(client.address, transport, user, ("connection", reason.into()));
    }

    pub(crate) fn effect(&mut self, now_ms: u64, effect: &Effect) {
        let [released, allocated] = effect.clients();
        released.iter().for_each(|client| self.released(now_ms, client));
        allocated.iter().for_each(|client| self.allocated(client));
    }

    pub(crate) fn serves(&self, place: LinkSlot) -> bool {
        self.slot_at(place).is_some()
    }

    /// Round trip to the client; `None` if the connection has ended.
    pub(crate) fn round_trip_us(&self, place: LinkSlot) -> Option<u32> {
        let slot = self.slot_at(place)?;
        self.connections.get(slot)?.socket.round_trip_us().ok()
    }

    /// Exempts the connection from the idle limits while it has an allocation.
    pub(crate) fn allocated(&mut self, client: &Client) {
        let Some(slot) = self.slot_of(client) else { return };
        let connection = &mut self.connections[slot];
        // The connection was chosen for eviction in this tick, but now has an allocation.
        if matches!(connection.closing, Some(CloseReason::Evicted | CloseReason::LimitAddress)) {
            connection.closing = None;
        }
        connection.allocated = true;
        connection.trusted = true;
        connection.deadline_ms = u64::MAX;
        self.uncount(slot);
    }

    /// Makes a connection without an allocation subject to the idle limits again.
    pub(crate) fn released(&mut self, now_ms: u64, client: &Client) {
        let Some(slot) = self.slot_of(client) else { return };
        let connection = &mut self.connections[slot];
        if !mem::take(&mut connection.allocated) {
            return;
        }
        connection.deadline_ms = now_ms + self.config.limits.idle_ms();
        let network = PrefixLengths::HOST.of(connection.address().ip());
        connection.place = Some(self.idle.enter(slot, Some(network), now_ms));
        self.next_sweep_ms.get_or_insert(now_ms + SWEEP_MS);
    }

    fn uncount(&mut self, slot: usize) {
        let connection = &mut self.connections[slot];
        if let Some(number) = connection.place.take() {
            let bounded = if connection.waiting { &mut self.waiting } else { &mut self.idle };
            bounded.leave(number);
        }
    }

    #[inline]
    fn slot_at(&self, LinkSlot { slot, generation }: LinkSlot) -> Option<usize> {
        let connection = self.connections.get(slot)?;
        (connection.generation == generation).then_some(slot)
    }

    fn slot_of(&self, client: &Client) -> Option<usize> {
        self.by_client.get(client).copied()
    }

    fn close(&mut self, slot: usize, reason: CloseReason) {
        let Some(connection) = self.connections.get_mut(slot) else { return };
        connection.closing.get_or_insert(reason);
        self.touch(slot);
    }

    /// Closes a connection that has the same 5-tuple as a newer one, and notifies the state machine before
    /// the newer connection's first message.
    fn supersede(&mut self, older: usize) {
        let connection = &mut self.connections[older];
        connection.superseded = true;
        self.by_client.remove(&connection.client);
        self.gone.push(Gone { client: connection.client, closed: None });
        self.close(older, CloseReason::Broken);
    }

    #[inline]
    fn touch(&mut self, slot: usize) {
        let connection = &mut self.connections[slot];
        if !connection.touched {
            connection.touched = true;
            self.touched.push(slot);
        }
    }

    fn remove(&mut self, slot: usize, reason: CloseReason) {
        self.uncount(slot);
        let connection = self.connections.remove(slot);
        self.stats.closed[reason as usize] += 1;
        let mut failure = connection.failure;
        if connection.stage == ConnectionStage::Handshake {
            let why = match reason {
                CloseReason::NoMessage => Some(HandshakeFailure::Timeout),
                CloseReason::Evicted | CloseReason::LimitAddress => Some(HandshakeFailure::Evicted),
                CloseReason::Client | CloseReason::Broken => Some(HandshakeFailure::Closed),
                _ => None,
            };
            if let Some(why) = why {
                self.stats.handshakes_failed[why as usize] += 1;
                failure = Some(why);
            }
        }
        let address = connection.address();
        match failure {
            Some(why) => self.noted.note(address, Transport::Tls, None, ("tls_handshake", why.into())),
            None if reason.turns_away() && connection.stage != ConnectionStage::Open => {
                let transport = connection.transport();
                self.noted.note(address, transport, None, ("connection", reason.into()));
            }
            None => {}
        }
        if connection.stage == ConnectionStage::Open && !connection.superseded {
            self.by_client.remove(&connection.client);
            let closed = reason.turns_away().then(|| (connection.transport(), reason));
            self.gone.push(Gone { client: connection.client, closed });
        }
        // The kernel still delivers data that the client has not read, unless the client keeps sending, which
        // causes an RST.
        drop(connection.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_tokens_never_collide_with_others() {
        for token in [
            StreamToken::Listener(0),
            StreamToken::Listener(7),
            StreamToken::Connection(0),
            StreamToken::Connection(1 << 20),
        ] {
            assert_eq!(StreamToken::of(token.get()), Some(token));
        }
        assert_eq!([0, u64::from(u32::MAX), u64::MAX].map(StreamToken::of), [None; 3]);
    }
}
