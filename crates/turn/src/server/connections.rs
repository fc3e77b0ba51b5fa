//! TCP relaying (RFC 6062): connections between a relayed transport address and peers. The runtime connects, accepts and
//! copies bytes; which connection may be, and to whom it belongs, is decided here.
//!
//! ```text
//!  Connect ──▶ Verdict::Connect ──▶ connected ──▶ waiting ──▶ ConnectionBind: Verdict::Bind ──▶ connection_ended
//!  a peer connects ──▶ peer_connected ────────────────┘  │
//!                                                        └──▶ 30 s: Effect::ConnectionClosed
//! ```

use std::net::SocketAddr;

use super::{
    AllocationId, Answer, Client, CredentialRefusal, DropReason, Effect, Family, Gate, RelayId, Seat, Server,
    User, Verdict, attribute,
    auth::Who,
    connection_table::Holder,
    next_transaction,
    request::{Method, Request},
    response::{Response, Signer},
    stats::{ConnectionEvent, ConnectionRefusal},
};
use crate::time::Now;

/// Section 5.2 asks for at least 30 s for an attempt to connect, sections 5.2 and 5.3 for 30 s until a connection that
/// nobody binds is closed.
const PATIENCE_MS: u64 = 30_000;

/// CONNECTION-ID (RFC 6062 section 6.2.1): the worker's number in the upper 10 bits, so that a ConnectionBind finds its
/// way, and 22 bits that nobody foresees. What keeps a stranger out is that he must authenticate as the same user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub u32);

const RANDOM_BITS: u32 = 22;

impl ConnectionId {
    pub(super) fn draw(seat: Seat) -> Self {
        Self(u32::from(seat.number()) << RANDOM_BITS | rand::random::<u32>() >> (32 - RANDOM_BITS))
    }

    /// The number of the worker that owns it.
    #[must_use]
    pub const fn worker(self) -> u16 {
        (self.0 >> RANDOM_BITS) as u16
    }
}

/// A connection that the runtime shall open, from the relayed transport address to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// What it will be called.
    pub connection: ConnectionId,
    /// From where: the relayed transport address itself (section 5.2).
    pub relay: RelayId,
    /// Whither.
    pub peer: SocketAddr,
}

/// Why a connection to a peer did not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// Refused, unreachable, reset: 447.
    Failed,
    /// [`Effect::ConnectTimedOut`] ended it: 447.
    TimedOut,
    /// No file descriptor for it: 508.
    NoCapacity,
}

/// What becomes of a connection that a peer made to a relayed transport address.
pub enum PeerConnection<'a> {
    /// Keep it, read nothing from it until it is bound, and send these bytes to `client`.
    Accept {
        /// What it is called.
        connection: ConnectionId,
        /// Whose control connection gets the indication.
        client: Client,
        /// A ConnectionAttempt indication, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// Close it; the reason has been counted.
    Refuse(ConnectionRefusal),
}

/// The connections of one allocation. Few, and looked at by control messages only.
#[derive(Default)]
pub(super) struct TcpRelay {
    list: Vec<Connection>,
}

struct Connection {
    id: ConnectionId,
    peer: SocketAddr,
    stage: Stage,
    /// Of the Connect request; none where the peer connected.
    transaction: Option<[u8; 12]>,
}

enum Stage {
    /// The runtime connects. What the answer needs waits with it; the deadline is that of the attempt.
    Connecting { deadline_ms: u64, answer: Box<(Option<Signer>, bool)> },
    /// Connected, and not bound yet.
    Waiting { deadline_ms: u64 },
    /// Spliced to a client data connection.
    Bound,
}

impl TcpRelay {
    /// When the next of them has to be looked at.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = u64> + '_ {
        self.list.iter().filter_map(|connection| match connection.stage {
            Stage::Connecting { deadline_ms, .. } | Stage::Waiting { deadline_ms } => Some(deadline_ms),
            Stage::Bound => None,
        })
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.list.iter().map(|connection| connection.id)
    }

    fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.list.iter_mut().find(|connection| connection.id == id)
    }

    fn remove(&mut self, id: ConnectionId) {
        self.list.retain(|connection| connection.id != id);
        if self.list.is_empty() {
            self.list = Vec::new();
        }
    }
}

impl<G: Gate> Server<G> {
    /// Says how a [`ConnectRequest`] went; the verdict is the reply to the client. A connection reported as open stays
    /// open until an effect closes it. To be called once for each request, unless [`Effect::ConnectionClosed`] or
    /// [`Effect::Closed`] has ended the attempt.
    pub fn connected(
        &mut self,
        now: Now,
        allocation: AllocationId,
        connection: ConnectionId,
        result: Result<(), ConnectError>,
    ) -> Verdict<'_> {
        let found = self.table.get(allocation).and_then(|allocation| {
            let client = allocation.client;
            let away = allocation.away;
            Some((client, away, allocation.tcp.as_deref_mut()?.get(connection)?))
        });
        let Some((client, away, found)) = found else {
            return self.stale_connection(allocation, connection, result);
        };
        let Stage::Connecting { answer, .. } = &mut found.stage else {
            return self.stale_connection(allocation, connection, Err(ConnectError::Failed));
        };
        let (signer, fingerprint) = (answer.0.take(), answer.1);
        let transaction = found.transaction.unwrap_or_default();
        match result {
            Ok(()) => {
                found.stage = Stage::Waiting { deadline_ms: now.ms + PATIENCE_MS };
                self.stats.connection(ConnectionEvent::Connected);
                self.write_connected(transaction, signer.as_ref(), fingerprint, connection);
            }
            Err(error) => {
                self.drop_connection(allocation.index, connection);
                self.stats.connection(ConnectionEvent::ConnectFailed);
                // 447 is for what the peer or the way to it does; want of descriptors is our own.
                let code = if error == ConnectError::NoCapacity { 508 } else { 447 };
                self.write_failure(Method::Connect, transaction, signer.as_ref(), fingerprint, code);
            }
        }
        self.rearm(now, allocation.index);
        if away {
            return self.dropped(DropReason::ClientAway);
        }
        Verdict::Reply { client, bytes: &self.reply }
    }

    /// A peer has connected to the relayed transport address `relay` (section 5.3). `peer` is canonical.
    pub fn peer_connected(&mut self, now: Now, relay: RelayId, peer: SocketAddr) -> PeerConnection<'_> {
        let (client, connection) = match self.admit(now, relay, peer) {
            Ok(admitted) => admitted,
            Err(reason) => {
                self.stats.connection_refused(reason);
                return PeerConnection::Refuse(reason);
            }
        };
        self.stats.connection(ConnectionEvent::Accepted);
        self.rearm(now, relay.allocation.index);
        let transaction = next_transaction(&mut self.indication, self.salt);
        let mut response = Response::connection_attempt(&mut self.reply, transaction);
        response.xor_address(attribute::XOR_PEER_ADDRESS, peer);
        response.number(attribute::CONNECTION_ID, connection.0);
        response.finish(false);
        PeerConnection::Accept { connection, client, bytes: &self.reply }
    }

    /// Payload that a bound connection has carried since the last report, in bytes. For counters of connections that
    /// live long; the last report is [`Server::connection_ended`].
    pub fn connection_carried(&mut self, connection: ConnectionId, to_peer: u64, to_client: u64) {
        self.stats.connection_bytes[0] += to_peer;
        self.stats.connection_bytes[1] += to_client;
        let index = self.connections.owner(connection);
        if let Some((_, allocation)) = index.and_then(|index| self.table.at(index)) {
            allocation.to_peer.1 += to_peer;
            allocation.to_client.1 += to_client;
        }
    }

    /// A connection is over: either end has closed it, before or after it was bound. Both halves are closed by the runtime, each
    /// with the other (section 5.5). `to_peer` and `to_client` as in [`Server::connection_carried`].
    pub fn connection_ended(&mut self, now: Now, connection: ConnectionId, to_peer: u64, to_client: u64) {
        self.connection_carried(connection, to_peer, to_client);
        if let Some(index) = self.connections.owner(connection) {
            self.drop_connection(index, connection);
            self.stats.connection(ConnectionEvent::Ended);
            self.rearm(now, index);
        }
    }

    /// Connections to peers that exist or are being made.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// What section 5.1 asks of a request for TCP, beyond what holds for all; else the error code.
    pub(super) fn may_relay_tcp(&self, client: &Client, request: &Request<'_>) -> Result<(), u16> {
        if !self.config.tcp_relay {
            return Err(442);
        }
        // Only who comes by TCP or TLS can make further connections of the kind.
        if !self.config.listener(client.listener).transport.is_stream() {
            return Err(400);
        }
        // These mean something for UDP only.
        let refused = [attribute::DONT_FRAGMENT, attribute::EVEN_PORT, attribute::RESERVATION_TOKEN];
        if refused.into_iter().any(|kind| request.get(kind).is_some()) { Err(400) } else { Ok(()) }
    }

    /// Section 5.2.
    pub(super) fn connect(&mut self, now: Now, client: &Client, request: &Request<'_>, who: Who) -> Answer {
        let index = match self.owned(now, client, request, &who) {
            Ok(index) => index,
            Err(answer) => return answer,
        };
        let signer = who.signer.as_ref();
        // Port 0 is nobody's.
        let Some(Some(peer)) = request.peers().next().filter(|peer| peer.is_none_or(|peer| peer.port() != 0))
        else {
            return self.fail(request, signer, 400);
        };
        let family = Family::of(peer.ip());
        let Some((id, allocation)) = self.table.at(index) else { return self.fail(request, signer, 437) };
        let (has_family, holder) = (allocation.has(family), Holder::of(allocation));
        // An allocation that relays UDP has no connections.
        let Some(tcp) = allocation.tcp.as_deref_mut() else { return self.fail(request, signer, 400) };
        if !has_family {
            return self.fail(request, signer, 443);
        }
        // A permission is not asked for: like CreatePermission, the request names the peer and is authenticated.
        if !self.config.peers.permits_endpoint(peer) {
            return self.refuse_peer(now, client, request, &who, peer);
        }
        if let Some(same) = tcp.list.iter().find(|connection| connection.peer == peer) {
            // The very request again is none of its own (RFC 8656 section 5).
            let again = same.transaction == Some(request.transaction);
            let connection = same.id;
            return match same.stage {
                Stage::Connecting { .. } if again => Answer::Drop(DropReason::OpenPending),
                Stage::Waiting { .. } if again => {
                    self.stats.retransmits += 1;
                    self.write_connected(request.transaction, signer, request.fingerprint, connection);
                    Answer::Reply
                }
                // One connection to a peer, whether it is being made, waits to be bound, or is.
                _ => self.fail(request, signer, 446),
            };
        }
        if let Some(full) = self.connections.full(&self.config, tcp.list.len(), &holder) {
            self.stats.connection_limit[full as usize] += 1;
            return self.fail(request, signer, 508);
        }
        let connection = self.connections.draw(self.seat, index, holder);
        let answer = Box::new((who.signer, request.fingerprint));
        let stage = Stage::Connecting { deadline_ms: now.ms + PATIENCE_MS, answer };
        tcp.list.push(Connection { id: connection, peer, stage, transaction: Some(request.transaction) });
        self.rearm(now, index);
        Answer::Connect(ConnectRequest { connection, relay: RelayId { allocation: id, family }, peer })
    }

    /// Section 5.4: the connection on which the request came becomes a client data connection.
    pub(super) fn connection_bind(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
    ) -> Answer {
        let signer = who.signer.as_ref();
        // By TCP or TLS, with a CONNECTION-ID, on a connection that is not a control connection: that stays one.
        let Some(id) = self.connection_to_bind(now, client, request) else {
            return self.fail(request, signer, 400);
        };
        if let Some(answer) = self.hand_over(id) {
            return answer;
        }
        let index = self.connections.owner(id);
        let Some((index, (_, allocation))) = index.and_then(|index| Some((index, self.table.at(index)?)))
        else {
            self.stats.connection_refused(ConnectionRefusal::UnknownId);
            return self.fail(request, signer, 400);
        };
        // The credentials are those of the control connection. Where nobody authenticates, the address has to do.
        let elsewhere = !self.config.authenticate && allocation.client.address.ip() != client.address.ip();
        if !allocation.is_of(who) || elsewhere {
            self.stats.connection_refused(ConnectionRefusal::WrongUser);
            self.refused(now, client, User::Name(&who.username), CredentialRefusal::WrongUser);
            return self.fail(request, signer, 441);
        }
        let found = allocation.tcp.as_deref_mut().and_then(|tcp| tcp.get(id));
        let Some(found) = found.filter(|found| matches!(found.stage, Stage::Waiting { .. })) else {
            self.stats.connection_refused(ConnectionRefusal::UnknownId);
            return self.fail(request, signer, 400);
        };
        found.stage = Stage::Bound;
        self.stats.connection(ConnectionEvent::Bound);
        self.rearm(now, index);
        self.done(request, signer);
        Answer::Bind(id)
    }

    /// What a ConnectionBind names, if it may become a data connection at all: it came over a stream that is no control connection.
    pub(super) fn connection_to_bind(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
    ) -> Option<ConnectionId> {
        let id = request.get(attribute::CONNECTION_ID)?.try_into().ok()?;
        let is_stream = self.config.listener(client.listener).transport.is_stream();
        (is_stream && !self.is_known(now, client)).then(|| ConnectionId(u32::from_be_bytes(id)))
    }

    /// Closes what nobody has bound in time, and asks for an end to attempts that take too long.
    pub(super) fn expire_connections(&mut self, now: Now, index: u32) {
        let Some((allocation, found)) = self.table.at(index) else { return };
        let Some(tcp) = found.tcp.as_deref_mut() else { return };
        let mut overdue = Vec::new();
        for connection in &mut tcp.list {
            match &mut connection.stage {
                Stage::Connecting { deadline_ms, .. } if *deadline_ms <= now.ms => {
                    // The runtime's report comes next, and is not waited for by a timer.
                    *deadline_ms = u64::MAX;
                    let connection = connection.id;
                    self.effects.push_back(Effect::ConnectTimedOut { allocation, connection });
                }
                Stage::Waiting { deadline_ms } if *deadline_ms <= now.ms => overdue.push(connection.id),
                _ => {}
            }
        }
        for connection in overdue {
            self.drop_connection(index, connection);
            self.stats.connection(ConnectionEvent::Unbound);
            self.effects.push_back(Effect::ConnectionClosed { allocation, connection });
        }
    }

    /// Closes the connections of an allocation to these peers.
    pub(super) fn close_connections(&mut self, index: u32, to: impl Fn(SocketAddr) -> bool) {
        let Some((allocation, found)) = self.table.at(index) else { return };
        let Some(tcp) = found.tcp.as_deref_mut() else { return };
        let closed: Vec<ConnectionId> = tcp
            .list
            .iter()
            .filter(|connection| to(connection.peer))
            .map(|connection| connection.id)
            .collect();
        for connection in closed {
            self.drop_connection(index, connection);
            self.stats.connection(ConnectionEvent::Ended);
            self.effects.push_back(Effect::ConnectionClosed { allocation, connection });
        }
    }

    /// The owner of a connection gets the stream that shall be bound to it.
    pub(super) fn hand_over(&mut self, connection: ConnectionId) -> Option<Answer> {
        let worker = self.elsewhere(connection)?;
        self.stats.connection(ConnectionEvent::HandedOver);
        Some(Answer::HandOver(worker))
    }

    /// The worker that owns a connection, unless it is this one.
    pub(super) fn elsewhere(&self, connection: ConnectionId) -> Option<u16> {
        let worker = connection.worker();
        (worker != self.seat.number() && self.seat.has(worker)).then_some(worker)
    }

    fn admit(
        &mut self,
        now: Now,
        relay: RelayId,
        peer: SocketAddr,
    ) -> Result<(Client, ConnectionId), ConnectionRefusal> {
        let allocation = self.table.get(relay.allocation).filter(|found| found.has(relay.family));
        let Some(allocation) = allocation else { return Err(ConnectionRefusal::Stale) };
        let client = allocation.client;
        if allocation.away {
            return Err(ConnectionRefusal::ClientAway);
        }
        // Section 5.3: without a permission the connection is closed as soon as it is accepted.
        if !allocation.permissions.allow(peer.ip(), now.ms) {
            return Err(ConnectionRefusal::NoPermission);
        }
        if !self.config.peers.permits_endpoint(peer) {
            return Err(ConnectionRefusal::PeerRefused);
        }
        let holder = Holder::of(allocation);
        let Some(tcp) = allocation.tcp.as_deref_mut() else { return Err(ConnectionRefusal::Stale) };
        if let Some(full) = self.connections.full(&self.config, tcp.list.len(), &holder) {
            self.stats.connection_limit[full as usize] += 1;
            return Err(ConnectionRefusal::Limit);
        }
        let id = self.connections.draw(self.seat, relay.allocation.index, holder);
        let stage = Stage::Waiting { deadline_ms: now.ms + PATIENCE_MS };
        tcp.list.push(Connection { id, peer, stage, transaction: None });
        Ok((client, id))
    }

    fn write_connected(
        &mut self,
        transaction: [u8; 12],
        signer: Option<&Signer>,
        fingerprint: bool,
        connection: ConnectionId,
    ) {
        self.stats.successes[Method::Connect as usize] += 1;
        let mut response = Response::success(&mut self.reply, Method::Connect, transaction);
        response.number(attribute::CONNECTION_ID, connection.0);
        response.sign(signer, self.config.software.as_deref(), fingerprint);
    }

    fn drop_connection(&mut self, index: u32, connection: ConnectionId) {
        let Some((_, allocation)) = self.table.at(index) else { return };
        self.connections.remove(connection, &Holder::of(allocation));
        if let Some(tcp) = allocation.tcp.as_deref_mut() {
            tcp.remove(connection);
        }
    }

    /// A report about a connection that is not waited for any more: what has opened is given back.
    fn stale_connection(
        &mut self,
        allocation: AllocationId,
        connection: ConnectionId,
        result: Result<(), ConnectError>,
    ) -> Verdict<'_> {
        if result.is_ok() {
            self.effects.push_back(Effect::ConnectionClosed { allocation, connection });
        }
        self.dropped(DropReason::StaleRelay)
    }
}
