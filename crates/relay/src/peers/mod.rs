//! TCP relaying (RFC 6062): listening sockets of relayed transport addresses and connections to peers. The
//! state machine decides; this module opens and accepts connections and moves bytes.
//!
//! ```text
//!  connect ──▶ Connecting ──▶ PeerEvent::Connected ┐
//!  accept, hold ───────────────────────────────────┴▶ Waiting ── bind ──▶ Bound: moves bytes ──▶ PeerEvent::Ended
//! ```
//!
//! Connections are polled edge-triggered from the start. Data that a peer sends before the bind stays in the
//! kernel; until then, the flow only records that the socket is readable.

mod tls_end;
mod traffic;

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    net::SocketAddr,
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use slab::Slab;
use turnpike_copy::{CopyDirection, Mover};
use turnpike_net::{Event, Interest, Poller, TcpListener, TcpSocket, is_exhaustion};
use turnpike_turn::{
    server::{AllocationSlot, ConnectError, ConnectRequest, ConnectionId, RelayId, Server},
    time::Now,
};

use crate::{
    policy::WorkerPolicy,
    stream::{Detached, END_OF_TOKENS},
};
use tls_end::TlsEnd;

/// Milliseconds for which a listener pauses after descriptors have run out.
const PAUSE_MS: u64 = 1000;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerSide {
    Peer,
    Client,
}

/// Meaning of a poller token. Streams and UDP sockets use lower tokens.
///
/// ```text
/// │ 01 │ kind (2) │ generation (28) │ slot (32) │
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerToken {
    Listener(usize),
    /// The generation reveals events that belong to an earlier connection in the slot.
    Connection(PeerSide, usize, u32),
}

pub(crate) const FIRST_TOKEN: u64 = END_OF_TOKENS;
const KIND: u64 = 1 << 60;
const GENERATIONS: u32 = 1 << 28;

impl PeerToken {
    fn of(token: u64) -> Option<Self> {
        if token & FIRST_TOKEN == 0 {
            return None;
        }
        let slot = usize::try_from(token & u64::from(u32::MAX)).ok()?;
        let generation = (token >> 32) as u32 & (GENERATIONS - 1);
        match (token >> 60) & 3 {
            0 => Some(Self::Listener(slot)),
            1 => Some(Self::Connection(PeerSide::Peer, slot, generation)),
            2 => Some(Self::Connection(PeerSide::Client, slot, generation)),
            _ => None,
        }
    }

    fn get(self) -> u64 {
        match self {
            Self::Listener(slot) => FIRST_TOKEN | slot as u64,
            Self::Connection(side, slot, generation) => {
                let kind = if side == PeerSide::Peer { KIND } else { 2 * KIND };
                FIRST_TOKEN | kind | u64::from(generation) << 32 | slot as u64
            }
        }
    }
}

/// The state machine, whose limits grant bandwidth, and the current time.
pub(crate) struct Purse<'a> {
    pub(crate) now: Now,
    pub(crate) server: &'a mut Server<WorkerPolicy>,
}

#[derive(Debug)]
pub(crate) enum PeerEvent {
    Connected(AllocationSlot, ConnectionId, Result<(), ConnectError>),
    /// Arguments for `Server::connection_ended`: the connection, and the unreported bytes to the peer and to the
    /// client.
    Ended(ConnectionId, u64, u64),
}

/// Counters of peer connections, never reset except the gauge `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerStats {
    /// Current connections, including those being established.
    pub open: u64,
    pub spliced_bytes: u64,
    /// Turns that ended because one side accepted no more data.
    pub stalls: u64,
    /// Number of times accepting paused for lack of file descriptors or memory.
    pub accept_pauses: u64,
}

struct Listener {
    socket: TcpListener,
    relay: RelayId,
    paused: bool,
}

struct Connection {
    id: ConnectionId,
    allocation: AllocationSlot,
    generation: u32,
    peer: TcpSocket,
    stage: PeerStage,
    /// Flows of both directions. For TLS clients, the flows are used only for counting.
    to_peer: CopyDirection,
    to_client: CopyDirection,
    reported: (u64, u64),
    queued: bool,
    half_closed: bool,
    /// Time at which each direction's bandwidth pause ends: towards the peer, towards the client.
    held_until_ms: [u64; 2],
}

#[derive(Clone, Copy)]
struct HalfClosed {
    until_ms: u64,
    slot: usize,
    generation: u32,
    bytes: u64,
}

enum PeerStage {
    Connecting,
    Waiting,
    Bound(ClientEnd),
}

enum ClientEnd {
    Plain(TcpSocket),
    Tls(Box<TlsEnd>),
}

#[derive(Default)]
struct Owned {
    listeners: [Option<usize>; 2],
    connections: Vec<usize>,
}

pub(crate) struct Peers {
    listeners: Slab<Listener>,
    connections: Slab<Connection>,
    by_id: HashMap<ConnectionId, usize, RandomState>,
    owners: HashMap<AllocationSlot, Owned, RandomState>,
    generation: u32,
    /// Created by the first bind, because its buffer takes 256 KiB and most servers relay no TCP.
    mover: Option<Mover>,
    /// Connections with more to move than one turn allows.
    again: Vec<usize>,
    resumed: Vec<usize>,
    /// Connections paused by their bandwidth limit: end of the pause, slot, generation.
    paused: BTreeSet<(u64, usize, u32)>,
    /// Half-closed connections by deadline. At its deadline, a connection ends unless it has moved more
    /// bytes.
    half_closed: VecDeque<HalfClosed>,
    half_closed_ms: u64,
    events: VecDeque<PeerEvent>,
    resume_ms: Option<u64>,
    stats: PeerStats,
}

impl Peers {
    pub(crate) fn new(half_closed: Duration) -> Self {
        Self {
            listeners: Slab::new(),
            connections: Slab::new(),
            by_id: HashMap::default(),
            owners: HashMap::default(),
            generation: 0,
            mover: None,
            again: Vec::new(),
            resumed: Vec::new(),
            paused: BTreeSet::new(),
            half_closed: VecDeque::new(),
            half_closed_ms: u64::try_from(half_closed.as_millis()).unwrap_or(u64::MAX),
            events: VecDeque::new(),
            resume_ms: None,
            stats: PeerStats::default(),
        }
    }

    pub(crate) fn listen(&mut self, relay: RelayId, socket: TcpListener, poller: &Poller) -> io::Result<()> {
        let entry = self.listeners.vacant_entry();
        let slot = entry.key();
        poller.add(&socket, PeerToken::Listener(slot).get())?;
        entry.insert(Listener { socket, relay, paused: false });
        self.owners.entry(relay.allocation).or_default().listeners[relay.family as usize] = Some(slot);
        Ok(())
    }

    pub(crate) fn bound(&self, relay: RelayId) -> Option<SocketAddr> {
        let slot = self.owners.get(&relay.allocation)?.listeners[relay.family as usize]?;
        Some(self.listeners.get(slot)?.socket.local_addr())
    }

    pub(crate) fn close_listener(&mut self, relay: RelayId) -> Option<SocketAddr> {
        let owned = self.owners.get_mut(&relay.allocation)?;
        let slot = owned.listeners[relay.family as usize].take()?;
        self.forget_owner_if_empty(relay.allocation);
        Some(self.listeners.remove(slot).socket.local_addr())
    }

    pub(crate) fn close_connections(&mut self, allocation: AllocationSlot) {
        let Some(owned) = self.owners.get(&allocation) else { return };
        for slot in owned.connections.clone() {
            self.remove(slot);
        }
    }

    /// Starts a connection to a peer; [`PeerEvent::Connected`] follows.
    pub(crate) fn connect(&mut self, request: &ConnectRequest, poller: &Poller) -> Result<(), ConnectError> {
        let allocation = request.relay.allocation;
        let owned = self.owners.get(&allocation).ok_or(ConnectError::Failed)?;
        let listener = owned.listeners[request.relay.family as usize].ok_or(ConnectError::Failed)?;
        let local = self.listeners[listener].socket.local_addr();
        let socket = TcpSocket::connect_from(local, request.peer).map_err(|error| reason(&error))?;
        self.insert(allocation, request.connection, socket, PeerStage::Connecting, poller)
            .map_err(|error| reason(&error))
    }

    pub(crate) fn accept(
        &mut self,
        place: usize,
        now_ms: u64,
        poller: &Poller,
    ) -> Option<(RelayId, TcpSocket, SocketAddr)> {
        let listener = self.listeners.get_mut(place)?;
        match listener.socket.accept() {
            Ok(accepted) => accepted.map(|(socket, peer)| (listener.relay, socket, peer)),
            Err(error) => {
                // A listener that is still watched would be reported again immediately.
                if is_exhaustion(&error) && poller.remove(&listener.socket).is_ok() {
                    listener.paused = true;
                    self.resume_ms.get_or_insert(now_ms + PAUSE_MS);
                    self.stats.accept_pauses += 1;
                }
                None
            }
        }
    }

    pub(crate) fn hold(
        &mut self,
        allocation: AllocationSlot,
        connection: ConnectionId,
        socket: TcpSocket,
        poller: &Poller,
    ) -> io::Result<()> {
        self.insert(allocation, connection, socket, PeerStage::Waiting, poller)
    }

    /// Binds the client's connection to the peer's. `first` is the data that followed the request.
    pub(crate) fn bind(
        &mut self,
        connection: ConnectionId,
        taken: Detached,
        first: Vec<u8>,
        poller: &Poller,
        purse: &mut Purse<'_>,
    ) {
        let Some(&slot) = self.by_id.get(&connection) else { return };
        let found = &mut self.connections[slot];
        let token = PeerToken::Connection(PeerSide::Client, slot, found.generation).get();
        let Detached { socket, tls, unsent, ended, .. } = taken;
        if poller.add_with(&socket, token, Interest::Edge).is_err() {
            return self.end(slot);
        }
        found.to_peer.bytes += first.len() as u64;
        found.stage = PeerStage::Bound(match tls {
            None => {
                found.to_peer.lead_with(first);
                found.to_client.lead_with(unsent);
                ClientEnd::Plain(socket)
            }
            Some(tls) => ClientEnd::Tls(Box::new(TlsEnd::new(socket, tls, first, ended))),
        });
        self.turn(slot, purse);
    }

    pub(crate) fn drop_connection(&mut self, connection: ConnectionId) {
        if let Some(&slot) = self.by_id.get(&connection) {
            self.remove(slot);
        }
    }

    /// Handles an event; if it belongs to a listener, returns the listener to accept from.
    pub(crate) fn on_event(&mut self, event: &Event, purse: &mut Purse<'_>) -> Option<usize> {
        let (side, slot, generation) = match PeerToken::of(event.token)? {
            PeerToken::Listener(place) => return Some(place),
            PeerToken::Connection(side, slot, generation) => (side, slot, generation),
        };
        let connection = self.connections.get_mut(slot).filter(|found| found.generation == generation)?;
        match &connection.stage {
            PeerStage::Connecting => {
                if event.writable || event.error || event.closed {
                    self.connected(slot, event);
                }
            }
            // No more data could be passed to the client.
            PeerStage::Waiting if event.error => self.end(slot),
            PeerStage::Waiting => note(&mut connection.to_client, &connection.peer, event),
            PeerStage::Bound(_) => self.on_traffic(slot, side, event, purse),
        }
        None
    }

    /// Continues paused connections that are due, and gives one turn to those with more to move.
    pub(crate) fn resume(&mut self, purse: &mut Purse<'_>) {
        while let Some(&(until_ms, slot, generation)) = self.paused.first()
            && until_ms <= purse.now.ms
        {
            self.paused.pop_first();
            if self.connections.get(slot).is_some_and(|found| found.generation == generation) {
                self.turn(slot, purse);
            }
        }
        let mut due = std::mem::take(&mut self.resumed);
        std::mem::swap(&mut due, &mut self.again);
        for slot in due.drain(..) {
            if let Some(connection) = self.connections.get_mut(slot).filter(|connection| connection.queued) {
                connection.queued = false;
                self.turn(slot, purse);
            }
        }
        self.resumed = due;
    }

    pub(crate) fn next_event(&mut self) -> Option<PeerEvent> {
        self.events.pop_front()
    }

    /// Time in milliseconds at which [`Peers::handle_timeout`] is next due; 0 if there is more data to move.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        if !self.again.is_empty() {
            return Some(0);
        }
        let paused = self.paused.first().map(|(until_ms, ..)| *until_ms);
        let half_closed = self.half_closed.front().map(|it| it.until_ms);
        [self.resume_ms, paused, half_closed].into_iter().flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, now_ms: u64, poller: &Poller) {
        self.end_half_closed(now_ms);
        if self.resume_ms.is_none_or(|due| due > now_ms) {
            return;
        }
        self.resume_ms = None;
        for (slot, listener) in self.listeners.iter_mut().filter(|(_, listener)| listener.paused) {
            listener.paused = poller.add(&listener.socket, PeerToken::Listener(slot).get()).is_err();
            if listener.paused {
                self.resume_ms = Some(now_ms + PAUSE_MS);
            }
        }
    }

    pub(crate) fn carried(&mut self) -> impl Iterator<Item = (ConnectionId, u64, u64)> {
        self.connections.iter_mut().filter_map(|(_, connection)| {
            let (to_peer, to_client) = connection.unreported();
            (to_peer + to_client > 0).then_some((connection.id, to_peer, to_client))
        })
    }

    fn end_half_closed(&mut self, now_ms: u64) {
        while let Some(due) = self.half_closed.pop_front_if(|it| it.until_ms <= now_ms) {
            match self.connections.get(due.slot).filter(|found| found.generation == due.generation) {
                None => {}
                Some(found) if found.bytes() == due.bytes => self.end(due.slot),
                Some(found) => {
                    let (bytes, until_ms) = (found.bytes(), now_ms + self.half_closed_ms);
                    self.half_closed.push_back(HalfClosed { until_ms, bytes, ..due });
                }
            }
        }
    }

    pub(crate) fn stats(&self) -> PeerStats {
        PeerStats { open: self.connections.len() as u64, ..self.stats }
    }

    fn insert(
        &mut self,
        allocation: AllocationSlot,
        id: ConnectionId,
        peer: TcpSocket,
        stage: PeerStage,
        poller: &Poller,
    ) -> io::Result<()> {
        let entry = self.connections.vacant_entry();
        let slot = entry.key();
        self.generation = (self.generation + 1) % GENERATIONS;
        poller.add_with(
            &peer,
            PeerToken::Connection(PeerSide::Peer, slot, self.generation).get(),
            Interest::Edge,
        )?;
        entry.insert(Connection {
            id,
            allocation,
            generation: self.generation,
            peer,
            stage,
            to_peer: CopyDirection::default(),
            to_client: CopyDirection::default(),
            reported: (0, 0),
            queued: false,
            half_closed: false,
            held_until_ms: [0; 2],
        });
        self.by_id.insert(id, slot);
        self.owners.entry(allocation).or_default().connections.push(slot);
        Ok(())
    }

    fn connected(&mut self, slot: usize, event: &Event) {
        let connection = &mut self.connections[slot];
        let (allocation, id) = (connection.allocation, connection.id);
        let result = connection.peer.take_error().map_err(|error| reason(&error));
        if result.is_ok() {
            connection.stage = PeerStage::Waiting;
            note(&mut connection.to_client, &connection.peer, event);
        } else {
            self.remove(slot);
        }
        self.events.push_back(PeerEvent::Connected(allocation, id, result));
    }

    fn end(&mut self, slot: usize) {
        if let Some(mut connection) = self.remove(slot) {
            let (to_peer, to_client) = connection.unreported();
            self.events.push_back(PeerEvent::Ended(connection.id, to_peer, to_client));
        }
    }

    fn remove(&mut self, slot: usize) -> Option<Connection> {
        let mut connection = self.connections.try_remove(slot)?;
        self.by_id.remove(&connection.id);
        if let Some(mover) = &mut self.mover {
            mover.reclaim(&mut connection.to_peer);
            mover.reclaim(&mut connection.to_client);
        }
        if let Some(owned) = self.owners.get_mut(&connection.allocation) {
            owned.connections.retain(|other| *other != slot);
            self.forget_owner_if_empty(connection.allocation);
        }
        Some(connection)
    }

    fn forget_owner_if_empty(&mut self, allocation: AllocationSlot) {
        let is_empty = |owned: &Owned| owned.listeners == [None; 2] && owned.connections.is_empty();
        if self.owners.get(&allocation).is_some_and(is_empty) {
            self.owners.remove(&allocation);
        }
    }
}

impl Connection {
    fn bytes(&self) -> u64 {
        self.to_peer.bytes + self.to_client.bytes
    }

    fn unreported(&mut self) -> (u64, u64) {
        let now = (self.to_peer.bytes, self.to_client.bytes);
        let before = std::mem::replace(&mut self.reported, now);
        (now.0 - before.0, now.1 - before.1)
    }
}

pub(crate) fn note(flow: &mut CopyDirection, source: &TcpSocket, event: &Event) {
    flow.readable |= event.readable;
    flow.fin |= event.closed;
    if event.priority {
        flow.on_urgent(source);
    }
}

fn reason(error: &io::Error) -> ConnectError {
    if is_exhaustion(error) { ConnectError::NoCapacity } else { ConnectError::Failed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip_and_never_collide_with_other_kinds() {
        for token in [
            PeerToken::Listener(0),
            PeerToken::Listener(1 << 20),
            PeerToken::Connection(PeerSide::Peer, 7, 1),
            PeerToken::Connection(PeerSide::Client, u32::MAX as usize, GENERATIONS - 1),
        ] {
            assert_eq!(PeerToken::of(token.get()), Some(token));
        }
        let others = [0, u64::from(u32::MAX), 1 << 32, (3 << 32) - 1, u64::MAX, u64::MAX - 1];
        assert_eq!(others.map(PeerToken::of), [None; 6]);
    }

    #[test]
    fn only_new_bytes_are_reported() {
        let poller = Poller::new().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peers = Peers::new(Duration::ZERO);
        let allocation = AllocationSlot { index: 1, generation: 1 };
        let socket = TcpSocket::connect(listener.local_addr().unwrap(), &Default::default()).unwrap();
        peers.hold(allocation, ConnectionId(5), socket, &poller).unwrap();
        peers.connections[0].to_peer.bytes = 7;
        assert_eq!(peers.carried().collect::<Vec<_>>(), [(ConnectionId(5), 7, 0)]);
        assert_eq!(peers.carried().count(), 0);
        peers.connections[0].to_client.bytes = 9;
        peers.end(0);
        assert!(matches!(peers.next_event(), Some(PeerEvent::Ended(ConnectionId(5), 0, 9))));
        assert!(peers.owners.is_empty() && peers.by_id.is_empty());
    }
}
