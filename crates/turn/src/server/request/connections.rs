//! TCP relaying (RFC 6062): decisions about connections between a relayed transport address and peers. The
//! runtime connects, accepts and copies bytes.
//!
//! ```text
//!  Connect ──▶ Effect::Connect ──▶ connected ──▶ waiting ──▶ ConnectionBind: Effect::Bind ──▶ connection_ended
//!  a peer connects ──▶ peer_connected ───────────────┘  │
//!                                                       └──▶ 30 s: Effect::ConnectionClosed
//! ```

use std::{net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use turnpike_wire::stun::{Class, Header, Writer, kind, method};

use crate::{
    server::{
        AllocationSlot, Client, Disposition, DropReason, Effect, Family, Fault, Link, Policy, RelayId,
        RequestRefusal, Server, Source, Verdict,
        data::data_path::known_as,
        request::{
            bad_request::Denied,
            bindings::peer_endpoint,
            connection_table::{ConnectionHolder, ConnectionId},
            context::Context,
            dispatch::Requester,
            response::Envelope,
        },
        stats::{ConnectionEvent, ConnectionRefusal},
    },
    time::Now,
};

/// Time to wait for a ConnectionBind: 30 s (RFC 6062 sections 5.2 and 5.3).
const PATIENCE_MS: u64 = 30_000;

/// Deadline of an attempt that the runtime was asked to abort. The runtime reports the end, so no timer is
/// needed.
const OVERDUE: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    pub connection: ConnectionId,
    pub relay: RelayId,
    pub peer: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// Error 447: the peer refused or reset the connection, or is unreachable.
    Failed,
    /// Error 447: [`Effect::ConnectTimedOut`] ended the attempt.
    TimedOut,
    /// Error 508: no file descriptor was left.
    NoCapacity,
}

pub enum PeerConnection<'a> {
    /// Keep the connection, read nothing from it until it is bound, and send `bytes` to `client`.
    Accept {
        connection: ConnectionId,
        client: Client,
        link: Link,
        /// ConnectionAttempt indication, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// Close the connection; the refusal has been counted.
    Refuse(ConnectionRefusal),
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TcpRelay {
    list: Vec<Connection>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Connection {
    id: ConnectionId,
    peer: SocketAddr,
    stage: PeerConnectionStage,
    /// Transaction ID of the Connect request; `None` if the peer connected.
    transaction: Option<[u8; 12]>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum PeerConnectionStage {
    /// The connection attempt is in progress; the reply will be built from `envelope`.
    Connecting {
        deadline_ms: u64,
        envelope: Box<Envelope>,
    },
    /// Connected but not bound.
    Waiting {
        deadline_ms: u64,
    },
    Bound,
}

/// Meaning of a Connect for a peer that already has a connection.
enum Again {
    /// Retransmission while the attempt is in progress.
    Connecting,
    /// Retransmission after the response was lost.
    Waiting(ConnectionId),
    Another,
}

impl TcpRelay {
    pub(crate) fn connections(&self) -> usize {
        self.list.len()
    }

    fn next_deadline(&self) -> Option<u64> {
        let deadlines = self.list.iter().filter_map(|connection| match connection.stage {
            PeerConnectionStage::Connecting { deadline_ms, .. }
            | PeerConnectionStage::Waiting { deadline_ms } => Some(deadline_ms),
            PeerConnectionStage::Bound => None,
        });
        deadlines.min().filter(|deadline_ms| *deadline_ms != OVERDUE)
    }

    pub(crate) fn shifted(&self, shift: impl Fn(u64) -> u64) -> Self {
        let mut shifted = self.clone();
        for connection in &mut shifted.list {
            if let PeerConnectionStage::Connecting { deadline_ms, .. }
            | PeerConnectionStage::Waiting { deadline_ms } = &mut connection.stage
                && *deadline_ms != OVERDUE
            {
                *deadline_ms = shift(*deadline_ms);
            }
        }
        shifted
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.list.iter().map(|connection| connection.id)
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(ConnectionId) -> bool) {
        self.list.retain(|connection| keep(connection.id));
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

impl<P: Policy> Server<P> {
    /// Reports the result of an [`Effect::Connect`]. Must be called once for each, unless
    /// [`Effect::ConnectionClosed`] or [`Effect::Closed`] has ended the attempt. An open connection stays
    /// open until an effect closes it.
    pub fn connected(
        &mut self,
        now: Now,
        allocation: AllocationSlot,
        connection: ConnectionId,
        result: Result<(), ConnectError>,
    ) -> Verdict<'_> {
        let Some(entry) = self.data.forwarding.get(allocation) else {
            return self.stale_connection(allocation, connection, result);
        };
        let (client, link, away) = (entry.client, entry.link, entry.away);
        let tcp = self.states.get(allocation.index).and_then(|state| state.tcp.as_deref_mut());
        let Some(found) = tcp.and_then(|tcp| tcp.get(connection)) else {
            return self.stale_connection(allocation, connection, result);
        };
        let waiting = PeerConnectionStage::Waiting { deadline_ms: now.ms + PATIENCE_MS };
        let envelope = match std::mem::replace(&mut found.stage, waiting) {
            PeerConnectionStage::Connecting { envelope, .. } => *envelope,
            other => {
                found.stage = other;
                return self.stale_connection(allocation, connection, Err(ConnectError::Failed));
            }
        };
        match result {
            Ok(()) => {
                self.data.stats.connection(ConnectionEvent::Connected);
                self.write_connected(&envelope, connection);
            }
            Err(error) => {
                self.drop_connection(allocation.index, connection);
                self.data.stats.connection(ConnectionEvent::ConnectFailed);
                // 447 is for failures of the peer or the network; a lack of descriptors is the server's own
                // failure.
                let code = if error == ConnectError::NoCapacity { 508 } else { 447 };
                if let Some(state) = self.states.get(allocation.index) {
                    let (realm, username) = (Arc::clone(&state.realm), state.username.clone());
                    let (realm, username, method) = (&realm, &*username, envelope.method);
                    let asker = Requester { client: &client, realm, username, proved: true, method };
                    self.tell_refused(now, &asker, code, RequestRefusal::Code);
                }
                self.write_failure(&envelope, code);
            }
        }
        self.arm_connections(now, allocation.index);
        if away {
            return self.data.dropped(DropReason::ClientAway);
        }
        Verdict::Reply { client, link, bytes: &self.reply }
    }

    /// `peer` must be canonical (section 5.3).
    pub fn peer_connected(&mut self, now: Now, relay: RelayId, peer: SocketAddr) -> PeerConnection<'_> {
        let (Source { client, link }, peer, connection) = match self.admit(now, relay, peer) {
            Ok(admitted) => admitted,
            Err(reason) => {
                self.data.stats.connection_refused(reason);
                return PeerConnection::Refuse(reason);
            }
        };
        self.data.stats.connection(ConnectionEvent::Accepted);
        self.arm_connections(now, relay.allocation.index);
        let transaction = self.data.indications.next();
        let header = Header { class: Class::Indication, method: method::CONNECTION_ATTEMPT, transaction };
        let mut attempt = Writer::begin(&mut self.reply, header);
        attempt.xor_address(kind::XOR_PEER_ADDRESS, peer).number(kind::CONNECTION_ID, connection.0);
        attempt.finish(false);
        PeerConnection::Accept { connection, client, link, bytes: &self.reply }
    }

    /// Adds the payload bytes copied since the last report. [`Server::connection_ended`] makes the last
    /// report.
    pub fn connection_carried(&mut self, connection: ConnectionId, to_peer: u64, to_client: u64) {
        self.data.stats.connection_bytes[0] += to_peer;
        self.data.stats.connection_bytes[1] += to_client;
        let index = self.connections.owner(connection);
        if let Some((_, entry)) = index.and_then(|index| self.data.forwarding.at(index)) {
            entry.to_peer.1 += to_peer;
            entry.to_client.1 += to_client;
        }
    }

    /// The runtime must close both halves together (section 5.5). Bytes are counted as in
    /// [`Server::connection_carried`].
    pub fn connection_ended(&mut self, now: Now, connection: ConnectionId, to_peer: u64, to_client: u64) {
        self.connection_carried(connection, to_peer, to_client);
        if let Some(index) = self.connections.owner(connection) {
            self.drop_connection(index, connection);
            self.data.stats.connection(ConnectionEvent::Ended);
            self.arm_connections(now, index);
        }
    }

    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    pub(crate) fn may_relay_tcp(&self, context: &Context<'_>) -> Result<(), Denied> {
        if !self.config.tcp_relay {
            return Err(Denied::code(442));
        }
        // Only clients over TCP or TLS can open data connections.
        if !self.is_stream(context.client()) {
            return Err(Denied::bad(kind::REQUESTED_TRANSPORT, Fault::OverDatagrams));
        }
        // The following attributes apply to UDP only.
        let refused = [kind::DONT_FRAGMENT, kind::EVEN_PORT, kind::RESERVATION_TOKEN];
        match refused.into_iter().find(|kind| context.request.get(*kind).is_some()) {
            Some(kind) => Err(Denied::bad(kind, Fault::RelaysTcp)),
            None => Ok(()),
        }
    }

    pub(crate) fn connect(&mut self, context: Context<'_>) -> Disposition {
        let index = match self.owned(&context) {
            Ok(index) => index,
            Err(answer) => return answer,
        };
        let peer = match peer_endpoint(context.request) {
            Ok(peer) => peer,
            Err(fault) => return self.bad(&context, kind::XOR_PEER_ADDRESS, fault),
        };
        let family = Family::of(peer.ip());
        let Some((id, entry, state)) = self.allocation(index) else { return self.fail(&context, 437) };
        let (has_family, holder) = (entry.has(family), ConnectionHolder::of(state));
        let Some(tcp) = state.tcp.as_deref_mut() else {
            return self.bad(&context, kind::XOR_PEER_ADDRESS, Fault::RelaysUdp);
        };
        if !has_family {
            return self.refuse(&context, 443, RequestRefusal::PeerFamily(peer));
        }
        let of_allocation = tcp.list.len();
        let same = tcp.list.iter().find(|connection| connection.peer == peer);
        let same = same.map(|same| {
            // RFC 8656 section 5: a retransmission is not a new request.
            let again = same.transaction == Some(context.request.transaction());
            match same.stage {
                PeerConnectionStage::Connecting { .. } if again => Again::Connecting,
                PeerConnectionStage::Waiting { .. } if again => Again::Waiting(same.id),
                _ => Again::Another,
            }
        });
        // No permission is needed: like CreatePermission, the request names the peer and is authenticated.
        if !self.config.peers_in(&context.who.realm).permits_endpoint(peer) {
            return self.refuse_peer(&context, peer, 0);
        }
        match same {
            None => {}
            Some(Again::Connecting) => return Disposition::Drop(DropReason::OpenPending),
            Some(Again::Waiting(connection)) => {
                self.data.stats.retransmits += 1;
                self.write_connected(&context.envelope, connection);
                return Disposition::Reply;
            }
            // An allocation may have only one connection per peer, established or not.
            Some(Again::Another) => return self.fail(&context, 446),
        }
        let place = (index, of_allocation);
        let drawn = self.connections.draw(&self.config, &mut self.random, self.worker_id, place, &holder);
        let connection = match drawn {
            Ok(connection) => connection,
            Err(full) => {
                self.data.stats.connection_limit[full as usize] += 1;
                return self.refuse(&context, 508, RequestRefusal::Connections);
            }
        };
        let (now, transaction) = (context.now, Some(context.request.transaction()));
        let deadline_ms = now.ms + PATIENCE_MS;
        let stage = PeerConnectionStage::Connecting { deadline_ms, envelope: Box::new(context.envelope) };
        self.add_connection(now, index, Connection { id: connection, peer, stage, transaction });
        let relay = RelayId { allocation: id, family };
        let peer = self.config.peers.own.internal(peer);
        self.data.effects.push_back(Effect::Connect(ConnectRequest { connection, relay, peer }));
        Disposition::Later
    }

    /// Section 5.4: turns the connection that carried the request into a client data connection.
    pub(crate) fn connection_bind(&mut self, context: &Context<'_>) -> Disposition {
        let connection = match self.connection_to_bind(context) {
            Ok(connection) => connection,
            Err(fault) => return self.bad(context, kind::CONNECTION_ID, fault),
        };
        if let Some(node) = self.on_another_node(connection) {
            return self.send_to_node(context, node, Denied::bad(kind::CONNECTION_ID, Fault::Unknown));
        }
        if let Some(answer) = self.hand_over(context, connection) {
            return answer;
        }
        let index = self.connections.owner(connection);
        let authenticate = self.config.authenticate;
        let found = index.and_then(|index| self.allocation(index));
        let Some((id, entry, state)) = found else {
            self.data.stats.connection_refused(ConnectionRefusal::UnknownId);
            return self.bad(context, kind::CONNECTION_ID, Fault::Unknown);
        };
        // Without authentication, the IP address must be that of the allocation's client.
        let elsewhere = !authenticate && entry.client.address.ip() != context.client().address.ip();
        if !state.is_of(&context.who) || elsewhere {
            self.data.stats.connection_refused(ConnectionRefusal::WrongUser);
            return self.wrong_user(context);
        }
        let found = state.tcp.as_deref_mut().and_then(|tcp| tcp.get(connection));
        let Some(found) = found.filter(|found| matches!(found.stage, PeerConnectionStage::Waiting { .. }))
        else {
            self.data.stats.connection_refused(ConnectionRefusal::UnknownId);
            return self.bad(context, kind::CONNECTION_ID, Fault::Unknown);
        };
        found.stage = PeerConnectionStage::Bound;
        self.data.stats.connection(ConnectionEvent::Bound);
        self.arm_connections(context.now, id.index);
        self.data.effects.push_back(Effect::Bind { connection, source: context.source });
        self.done(context)
    }

    pub(crate) fn connection_to_bind(&mut self, context: &Context<'_>) -> Result<ConnectionId, Fault> {
        let id = context.request.get(kind::CONNECTION_ID).ok_or(Fault::Missing)?;
        let id = id.try_into().map_err(|_| Fault::Malformed)?;
        let client = context.client();
        if !self.is_stream(client) {
            return Err(Fault::OverDatagrams);
        }
        if self.is_known(client) {
            return Err(Fault::ControlConnection);
        }
        Ok(ConnectionId(u32::from_be_bytes(id)))
    }

    pub(crate) fn expire_connections(&mut self, now: Now, index: u32) {
        let Some((allocation, _, state)) = self.allocation(index) else { return };
        let Some(tcp) = state.tcp.as_deref_mut() else { return };
        let mut late = Vec::new();
        let mut overdue = Vec::new();
        for connection in &mut tcp.list {
            match &mut connection.stage {
                PeerConnectionStage::Connecting { deadline_ms, .. } if *deadline_ms <= now.ms => {
                    *deadline_ms = OVERDUE;
                    late.push(connection.id);
                }
                PeerConnectionStage::Waiting { deadline_ms } if *deadline_ms <= now.ms => {
                    overdue.push(connection.id);
                }
                _ => {}
            }
        }
        for connection in late {
            self.data.effects.push_back(Effect::ConnectTimedOut { allocation, connection });
        }
        for connection in overdue {
            self.drop_connection(index, connection);
            self.data.stats.connection(ConnectionEvent::Unbound);
            self.data.effects.push_back(Effect::ConnectionClosed { allocation, connection });
        }
        self.arm_connections(now, index);
    }

    pub(crate) fn close_connections(&mut self, index: u32, to: impl Fn(SocketAddr) -> bool) {
        let Some((allocation, _, state)) = self.allocation(index) else { return };
        let Some(tcp) = state.tcp.as_deref_mut() else { return };
        let closed: Vec<ConnectionId> = tcp
            .list
            .iter()
            .filter(|connection| to(connection.peer))
            .map(|connection| connection.id)
            .collect();
        for connection in closed {
            self.drop_connection(index, connection);
            self.data.stats.connection(ConnectionEvent::Ended);
            self.data.effects.push_back(Effect::ConnectionClosed { allocation, connection });
        }
    }

    pub(crate) fn hand_over(
        &mut self,
        context: &Context<'_>,
        connection: ConnectionId,
    ) -> Option<Disposition> {
        let worker = self.on_another_worker(connection)?;
        self.data.stats.connection(ConnectionEvent::HandedOver);
        let (source, request) = (context.source, context.request.view.bytes().into());
        self.data.effects.push_back(Effect::HandOver { worker, source, request });
        Some(Disposition::Later)
    }

    pub(crate) fn on_another_worker(&self, connection: ConnectionId) -> Option<u16> {
        let (_, worker) = self.worker_id.of_connection(connection.0);
        (worker != self.worker_id.number() && self.worker_id.has(worker)).then_some(worker)
    }

    pub(crate) fn on_another_node(&self, connection: ConnectionId) -> Option<u16> {
        let (node, _) = self.worker_id.of_connection(connection.0);
        self.worker_id.is_another(node).then_some(node)
    }

    /// Returns the client to notify, the peer address it knows, and the new CONNECTION-ID.
    fn admit(
        &mut self,
        now: Now,
        relay: RelayId,
        peer: SocketAddr,
    ) -> Result<(Source, SocketAddr, ConnectionId), ConnectionRefusal> {
        let index = relay.allocation.index;
        let entry = self.data.forwarding.get(relay.allocation).filter(|found| found.has(relay.family));
        let Some(entry) = entry else { return Err(ConnectionRefusal::Stale) };
        let source = Source { client: entry.client, link: entry.link };
        if entry.away {
            return Err(ConnectionRefusal::ClientAway);
        }
        // Section 5.3: without a permission the connection is closed immediately.
        let peer = known_as(&self.config.peers, &entry.permissions, peer, now);
        if !entry.permissions.allow(peer.ip(), now.ms) {
            return Err(ConnectionRefusal::NoPermission);
        }
        if !self.config.peers.permits_endpoint(peer) {
            return Err(ConnectionRefusal::PeerRefused);
        }
        let Some(state) = self.states.get(index) else { return Err(ConnectionRefusal::Stale) };
        let holder = ConnectionHolder::of(state);
        let Some(tcp) = state.tcp.as_deref_mut() else { return Err(ConnectionRefusal::Stale) };
        let place = (index, tcp.list.len());
        let drawn = self.connections.draw(&self.config, &mut self.random, self.worker_id, place, &holder);
        let id = drawn.map_err(|full| {
            self.data.stats.connection_limit[full as usize] += 1;
            ConnectionRefusal::Limit
        })?;
        let stage = PeerConnectionStage::Waiting { deadline_ms: now.ms + PATIENCE_MS };
        self.add_connection(now, index, Connection { id, peer, stage, transaction: None });
        Ok((source, peer, id))
    }

    fn add_connection(&mut self, now: Now, index: u32, connection: Connection) {
        if let Some(tcp) = self.states.get(index).and_then(|state| state.tcp.as_deref_mut()) {
            tcp.list.push(connection);
            self.arm_connections(now, index);
        }
    }

    pub(crate) fn arm_connections(&mut self, now: Now, index: u32) {
        let tcp = self.states.get(index).and_then(|state| state.tcp.as_deref());
        match tcp.and_then(TcpRelay::next_deadline) {
            Some(deadline_ms) => self.connection_timers.set(now.ms, index, deadline_ms),
            None => self.connection_timers.cancel(index),
        }
    }

    fn write_connected(&mut self, to: &Envelope, connection: ConnectionId) {
        self.data.stats.successes[to.method as usize] += 1;
        let mut response = to.success(&mut self.reply);
        response.number(kind::CONNECTION_ID, connection.0);
        to.sign(response, self.config.software.as_deref());
    }

    fn drop_connection(&mut self, index: u32, connection: ConnectionId) {
        let Some(state) = self.states.get(index) else { return };
        self.connections.remove(connection, &ConnectionHolder::of(state));
        if let Some(tcp) = state.tcp.as_deref_mut() {
            tcp.remove(connection);
        }
    }

    fn stale_connection(
        &mut self,
        allocation: AllocationSlot,
        connection: ConnectionId,
        result: Result<(), ConnectError>,
    ) -> Verdict<'_> {
        if result.is_ok() {
            self.data.effects.push_back(Effect::ConnectionClosed { allocation, connection });
        }
        self.data.dropped(DropReason::StaleRelay)
    }
}
