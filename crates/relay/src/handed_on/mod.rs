//! Connections handed on to a web server. [`crate::stream`] recognises them by their first bytes and passes them on
//! without replying; this module connects them to the web server and moves bytes.
//!
//! ```text
//!  Streams::next_handed_on ──▶ take: connect ──▶ Connected: PROXY header, bytes read so far, then both directions ──▶ HandOnEnd
//! ```
//!
//! Both sockets are polled edge-triggered from the start; until the web server has accepted the connection, the flows
//! only record which sockets are readable.

mod stats;

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use slab::Slab;
use turnpike_copy::{CopyDirection, Mover, Pumped};
use turnpike_net::{ConnectOptions, Event, Interest, Poller, TcpSocket, is_exhaustion};
use turnpike_rules::ProxyVersion;
use turnpike_turn::server::{ConnectionLimits, PrefixLengths};
use turnpike_wire::proxy_protocol;

use crate::{
    bounded::share,
    peers::{self, note},
};
pub use stats::{HandOnEnd, HandOnStats, HandedOnBy};

/// Timeout in milliseconds for connecting to the web server.
const CONNECT_MS: u64 = 10_000;
/// Maximum bytes per direction and turn. During a turn, datagrams of TURN clients wait. If a client stops
/// reading, at most this much of its data stays in user space: 256 MiB in total at the default limit.
const TURN: u64 = 64 << 10;

/// First poller token of these connections. The tokens lie between those of [`crate::peers`] and the poller's own.
///
/// ```text
/// │ 0111 │ generation (28) │ side (1) │ slot (31) │
/// ```
pub(crate) const FIRST_TOKEN: u64 = peers::FIRST_TOKEN | 3 << 60;
pub(crate) const LAST_TOKEN: u64 = FIRST_TOKEN | ((1 << 60) - 1);
const GENERATIONS: u32 = 1 << 28;
const SERVER_SIDE: u64 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandedOnSide {
    Client,
    Server,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HandedOnToken {
    side: HandedOnSide,
    slot: usize,
    generation: u32,
}

impl HandedOnSide {
    fn reset(self) -> HandOnEnd {
        match self {
            Self::Client => HandOnEnd::ClientReset,
            Self::Server => HandOnEnd::ServerReset,
        }
    }
}

impl HandedOnToken {
    fn of(token: u64) -> Self {
        let side = if token & SERVER_SIDE == 0 { HandedOnSide::Client } else { HandedOnSide::Server };
        let (slot, generation) =
            ((token & (SERVER_SIDE - 1)) as usize, (token >> 32) as u32 & (GENERATIONS - 1));
        Self { side, slot, generation }
    }

    fn get(self) -> u64 {
        let side = if self.side == HandedOnSide::Client { 0 } else { SERVER_SIDE };
        FIRST_TOKEN | u64::from(self.generation) << 32 | side | self.slot as u64
    }
}

/// A connection handed over by [`crate::stream`].
pub(crate) struct Leaving {
    pub(crate) socket: TcpSocket,
    /// Everything received so far, which is passed to the web server unchanged.
    pub(crate) received: Vec<u8>,
    pub(crate) by: HandedOnBy,
    pub(crate) client: SocketAddr,
    /// Address that the client connected to.
    pub(crate) local: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) proxy_protocol: Option<ProxyVersion>,
}

struct Connection {
    generation: u32,
    client: TcpSocket,
    server: TcpSocket,
    to: SocketAddr,
    /// Client network whose limit this connection counts towards.
    network: IpAddr,
    is_connected: bool,
    to_server: CopyDirection,
    to_client: CopyDirection,
    queued: bool,
    /// Time by which the web server must accept the connection or, once one side has closed, by which more bytes must
    /// have moved.
    deadline_ms: Option<u64>,
    /// Bytes that had been moved when the deadline was set.
    bytes_then: u64,
}

pub(crate) struct HandedOn {
    connections: Slab<Connection>,
    by_network: HashMap<IpAddr, usize, RandomState>,
    most: usize,
    most_per_network: usize,
    generation: u32,
    /// Created for the first connection, because its buffer takes 256 KiB.
    mover: Option<Mover>,
    /// Connections with more to move than one turn allows.
    again: Vec<usize>,
    resumed: Vec<usize>,
    /// Deadlines with the slots of their connections.
    deadlines: BTreeSet<(u64, usize)>,
    half_closed_ms: u64,
    /// Web servers to which the last connection failed; these failures have been logged.
    down: Vec<SocketAddr>,
    stats: HandOnStats,
}

impl HandedOn {
    pub(crate) fn new(limits: &ConnectionLimits, workers: usize, half_closed: Duration) -> Self {
        let mut this = Self {
            connections: Slab::new(),
            by_network: HashMap::default(),
            most: 0,
            most_per_network: 0,
            generation: 0,
            mover: None,
            again: Vec::new(),
            resumed: Vec::new(),
            deadlines: BTreeSet::new(),
            half_closed_ms: u64::try_from(half_closed.as_millis()).unwrap_or(u64::MAX),
            down: Vec::new(),
            stats: HandOnStats::default(),
        };
        this.limit(limits, workers);
        this
    }

    pub(crate) fn limit(&mut self, limits: &ConnectionLimits, workers: usize) {
        self.most = share(limits.handed_on, workers);
        self.most_per_network = share(limits.handed_on_per_address, workers);
    }

    pub(crate) fn stats(&self) -> HandOnStats {
        HandOnStats { open: self.connections.len() as u64, ..self.stats }
    }

    pub(crate) fn take(&mut self, leaving: Leaving, now_ms: u64, poller: &Poller) {
        self.stats.taken[leaving.by as usize] += 1;
        self.stats.from_clients += leaving.received.len() as u64;
        let to = leaving.to;
        if let Err(reason) = self.connect(leaving, now_ms, poller) {
            self.stats.ended[reason as usize] += 1;
            if reason == HandOnEnd::Unreachable {
                self.report_down(to);
            }
        }
    }

    fn connect(&mut self, leaving: Leaving, now_ms: u64, poller: &Poller) -> Result<(), HandOnEnd> {
        let Leaving { socket: client, received, client: address, local, to, proxy_protocol, .. } = leaving;
        let network = PrefixLengths::HOST.of(address.ip());
        if self.connections.len() >= self.most {
            return Err(HandOnEnd::Limit);
        }
        if self.by_network.get(&network).is_some_and(|count| *count >= self.most_per_network) {
            return Err(HandOnEnd::LimitAddress);
        }
        let failed = |error: io::Error| {
            if is_exhaustion(&error) { HandOnEnd::Exhausted } else { HandOnEnd::Unreachable }
        };
        let server = TcpSocket::connect(to, &ConnectOptions::default()).map_err(failed)?;
        let entry = self.connections.vacant_entry();
        let slot = entry.key();
        self.generation = (self.generation + 1) % GENERATIONS;
        let generation = self.generation;
        for (side, socket) in [(HandedOnSide::Client, &client), (HandedOnSide::Server, &server)] {
            let token = HandedOnToken { side, slot, generation }.get();
            poller.add_with(socket, token, Interest::Edge).map_err(|_| HandOnEnd::Exhausted)?;
        }
        let mut to_server = CopyDirection::new(true);
        to_server.bytes = received.len() as u64;
        to_server.lead_with(match proxy_protocol {
            Some(version) => [proxy_protocol::encode(version, address, local), received].concat(),
            None => received,
        });
        entry.insert(Connection {
            generation,
            client,
            server,
            to,
            network,
            is_connected: false,
            to_server,
            to_client: CopyDirection::default(),
            queued: false,
            deadline_ms: None,
            bytes_then: 0,
        });
        *self.by_network.entry(network).or_default() += 1;
        self.set_deadline(slot, Some(now_ms + CONNECT_MS));
        Ok(())
    }

    pub(crate) fn on_event(&mut self, event: &Event, now_ms: u64) {
        let HandedOnToken { side, slot, generation } = HandedOnToken::of(event.token);
        let found = self.connections.get_mut(slot).filter(|found| found.generation == generation);
        let Some(connection) = found else { return };
        let (flow, socket) = match side {
            HandedOnSide::Client => (&mut connection.to_server, &connection.client),
            HandedOnSide::Server => (&mut connection.to_client, &connection.server),
        };
        note(flow, socket, event);
        if side == HandedOnSide::Server && !connection.is_connected {
            if !(event.writable || event.error || event.closed) {
                return;
            }
            let to = connection.to;
            if let Err(error) = connection.server.take_error() {
                let reason =
                    if is_exhaustion(&error) { HandOnEnd::Exhausted } else { HandOnEnd::Unreachable };
                return self.end(slot, reason);
            }
            connection.is_connected = true;
            self.down.retain(|down| *down != to);
            self.set_deadline(slot, None);
        } else if event.error {
            // Nothing can be read now, so a reset ends the connection immediately.
            if flow.has_ended() || flow.is_blocked() {
                return self.end(slot, side.reset());
            }
            flow.on_error();
        }
        self.turn(slot, now_ms);
    }

    /// Ends overdue connections and continues those with more to move.
    pub(crate) fn handle_timeout(&mut self, now_ms: u64) {
        while let Some((due_ms, slot)) = self.deadlines.first().copied()
            && due_ms <= now_ms
        {
            let Some(connection) = self.connections.get(slot) else {
                self.deadlines.pop_first();
                continue;
            };
            if !connection.is_connected {
                self.end(slot, HandOnEnd::ConnectTimeout);
            } else if connection.bytes() == connection.bytes_then {
                self.end(slot, HandOnEnd::HalfClosed);
            } else {
                self.set_deadline(slot, Some(now_ms.saturating_add(self.half_closed_ms)));
            }
        }
        let mut due = std::mem::take(&mut self.resumed);
        std::mem::swap(&mut due, &mut self.again);
        for slot in due.drain(..) {
            if let Some(connection) = self.connections.get_mut(slot).filter(|connection| connection.queued) {
                connection.queued = false;
                self.turn(slot, now_ms);
            }
        }
        self.resumed = due;
    }

    /// Time in milliseconds at which [`HandedOn::handle_timeout`] is next due; 0 if there is more data to move.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        if !self.again.is_empty() {
            return Some(0);
        }
        self.deadlines.first().map(|(due_ms, _)| *due_ms)
    }

    pub(crate) fn shutdown(&mut self) {
        let slots: Vec<usize> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.end(slot, HandOnEnd::Shutdown);
        }
    }

    fn set_deadline(&mut self, slot: usize, due_ms: Option<u64>) {
        let connection = &mut self.connections[slot];
        if let Some(due_ms) = std::mem::replace(&mut connection.deadline_ms, due_ms) {
            self.deadlines.remove(&(due_ms, slot));
        }
        connection.bytes_then = connection.bytes();
        self.deadlines.extend(due_ms.map(|due_ms| (due_ms, slot)));
    }

    fn turn(&mut self, slot: usize, now_ms: u64) {
        let Some(connection) = self.connections.get_mut(slot).filter(|it| it.is_connected) else { return };
        let mover = self.mover.get_or_insert_with(Mover::default);
        let before = (connection.to_server.bytes, connection.to_client.bytes);
        let outcome = connection.turn(mover);
        self.stats.spliced_bytes += mover.take_moved().spliced;
        self.stats.from_clients += connection.to_server.bytes - before.0;
        self.stats.from_servers += connection.to_client.bytes - before.1;
        let again = match outcome {
            Err(side) => return self.end(slot, side.reset()),
            Ok(_) if connection.to_server.is_done() && connection.to_client.is_done() => {
                return self.end(slot, HandOnEnd::Closed);
            }
            Ok(again) => again && !connection.queued,
        };
        if again {
            connection.queued = true;
            self.again.push(slot);
        }
        if connection.deadline_ms.is_none() && connection.is_half_closed() {
            self.set_deadline(slot, Some(now_ms.saturating_add(self.half_closed_ms)));
        }
    }

    fn end(&mut self, slot: usize, reason: HandOnEnd) {
        let Some(mut connection) = self.connections.try_remove(slot) else { return };
        self.stats.ended[reason as usize] += 1;
        if let Some(due_ms) = connection.deadline_ms {
            self.deadlines.remove(&(due_ms, slot));
        }
        if let Some(mover) = &mut self.mover {
            mover.reclaim(&mut connection.to_server);
            mover.reclaim(&mut connection.to_client);
        }
        if let Some(count) = self.by_network.get_mut(&connection.network) {
            *count -= 1;
            if *count == 0 {
                self.by_network.remove(&connection.network);
            }
        }
        if matches!(reason, HandOnEnd::Unreachable | HandOnEnd::ConnectTimeout) {
            self.report_down(connection.to);
        }
        match reason {
            HandOnEnd::Closed => {}
            HandOnEnd::ClientReset => connection.server.reset(),
            // Reset the client's connection, so that a truncated stream does not look complete.
            _ => connection.client.reset(),
        }
    }

    /// Logs that a web server is unreachable, but not again until a connection to it has succeeded.
    fn report_down(&mut self, to: SocketAddr) {
        if !self.down.contains(&to) {
            tracing::warn!(%to, "server.hand_on: the web server does not accept connections; closing its clients' connections");
            self.down.push(to);
        }
    }
}

impl Connection {
    fn bytes(&self) -> u64 {
        self.to_server.bytes + self.to_client.bytes
    }

    fn is_half_closed(&self) -> bool {
        self.to_server.has_ended() || self.to_client.has_ended()
    }

    /// Moves bytes in both directions. Returns true if there is more to move; the error is the side that failed.
    fn turn(&mut self, mover: &mut Mover) -> Result<bool, HandedOnSide> {
        let Self { client, server, to_server, to_client, .. } = self;
        let (client, server) = ((HandedOnSide::Client, &*client), (HandedOnSide::Server, &*server));
        let more = one_way(mover, to_server, client, server, to_client.is_done())?;
        Ok(one_way(mover, to_client, server, client, to_server.is_done())? || more)
    }
}

fn one_way(
    mover: &mut Mover,
    flow: &mut CopyDirection,
    (source, from): (HandedOnSide, &TcpSocket),
    (sink, to): (HandedOnSide, &TcpSocket),
    last: bool,
) -> Result<bool, HandedOnSide> {
    if flow.is_done() {
        return Ok(false);
    }
    flow.budget = Some(TURN);
    match mover.pump(flow, from, to, None, last) {
        Pumped::Again | Pumped::Spent => Ok(true),
        Pumped::Idle | Pumped::Blocked | Pumped::Done => Ok(false),
        Pumped::SourceFailed => Err(source),
        Pumped::SinkFailed => Err(sink),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip_and_never_collide_with_others() {
        let all = [
            (HandedOnSide::Client, 0, 0),
            (HandedOnSide::Server, 7, 1),
            (HandedOnSide::Client, (1 << 31) - 1, GENERATIONS - 1),
        ];
        for (side, slot, generation) in all {
            let token = HandedOnToken { side, slot, generation };
            assert_eq!(HandedOnToken::of(token.get()), token);
            assert!((FIRST_TOKEN..=LAST_TOKEN).contains(&token.get()));
        }
        const { assert!(LAST_TOKEN < 1 << 63) };
    }
}
