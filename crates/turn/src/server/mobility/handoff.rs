//! Mobility (RFC 8016) across the workers of a server. The kernel may deliver packets from the client's new
//! 5-tuple to a worker other than the allocation's owner. Clients see no difference: the owner responds to
//! every request from the new 5-tuple, and only data from there moves the allocation.
//!
//! ```text
//!            worker 2, with the client                           worker 1, the owner
//!  Refresh with ticket ──▶ Effect::Forward ─────────────────────▶ from_elsewhere ──▶ Effect::Answer
//!        ◀──── expect(PendingMove), send the reply ◀───────────────────────┘
//!  other request ────────▶ Effect::Forward ─────────────────────▶ from_elsewhere ──▶ Effect::Answer, or
//!        ◀──── declined ◀──────────────────────────────────────── Effect::Decline: no pending move (any more)
//!  data ─────────────────▶ Effect::Fetch ───────────────────────▶ export ──▶ Moved, with the relay sockets
//!              import(Moved) ◀─────────────────────────────────────────┘
//!  connection closed ────▶ Effect::MoveOver ─────────────────▶ move_over
//! ```
//!
//! For a client on a stream, the connection itself is passed to the owner instead ([`Effect::HandOver`]).

use serde::{Deserialize, Serialize};

use crate::{
    server::{
        AllocationSlot, Client, ClosedReason, Disposition, DropReason, Effect, Link, Moved, Policy, Server,
        Source, Verdict,
        mobility::{pending_moves::Expected, ticket::Ticket},
        request::{Delivery, context::Context},
        stats::MobilityEvent,
    },
    time::Now,
};

/// A client's move to this worker, for [`Server::expect`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingMove {
    pub(crate) client: Client,
    pub(crate) key: u64,
    pub(crate) owner: u16,
}

/// Asks `owner` to call [`Server::export`], and `to` to call [`Server::import`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveRequest {
    pub owner: u16,
    pub to: u16,
    pub client: Client,
    /// Worker `to`'s link to the client.
    pub link: Link,
    pub(crate) key: u64,
}

impl<P: Policy> Server<P> {
    /// Handles a request passed on together with its client's connection ([`Effect::HandOver`]). The client's
    /// later packets go to [`Server::from_client`].
    pub fn from_handed_over<'a>(&'a mut self, now: Now, source: &Source, request: &[u8]) -> Verdict<'a> {
        self.request(now, source, Delivery::HandedOver, request)
    }

    /// Handles a request forwarded by worker `via`, which keeps the client. Results in [`Effect::Answer`],
    /// [`Effect::Decline`], or [`Effect::Forward`] to a third worker.
    pub fn from_elsewhere(&mut self, now: Now, via: u16, occupied: bool, source: &Source, request: &[u8]) {
        self.request(now, source, Delivery::Forwarded { via, occupied }, request);
    }

    /// Reports that no allocation of `owner` is moving to the client.
    pub fn declined<'a>(
        &'a mut self,
        now: Now,
        owner: u16,
        source: &Source,
        request: &'a [u8],
    ) -> Verdict<'a> {
        let client = &source.client;
        if self.pending_moves.get(client).is_some_and(|expected| expected.owner == owner) {
            self.pending_moves.remove(client);
        }
        self.from_client(now, source, request)
    }

    /// Drops the oldest pending move if the limit is reached.
    pub fn expect(&mut self, pending_move: PendingMove) {
        let PendingMove { client, key, owner } = pending_move;
        // The client may have made a new allocation in the meantime, and a 5-tuple can have only one.
        if self.data.forwarding.find(&client).is_some() {
            return;
        }
        // The later of two allocations that move to one 5-tuple wins.
        if self.pending_moves.get(&client).is_some_and(|known| (known.key, known.owner) != (key, owner)) {
            self.give_up_arrival(&client);
        }
        self.pending_moves.expect(client, key, owner);
    }

    pub fn move_over(&mut self, from: u16, pending_move: &PendingMove) {
        let PendingMove { client, key, owner } = pending_move;
        if *owner != self.worker_id.number() {
            let is_it = |expected: &mut Expected| (expected.key, expected.owner) == (*key, *owner);
            if self.pending_moves.get(client).is_some_and(is_it) {
                self.pending_moves.remove(client);
            }
            return;
        }
        let Some(index) = self.pending_moves.owned.get(key).copied() else { return };
        let state = self.states.get(index);
        if let Some(mobility) = state.and_then(|state| state.mobility.as_deref_mut())
            && mobility.arriving.is_some_and(|(source, worker)| (source.client, worker) == (*client, from))
        {
            mobility.arriving = None;
            self.pending_moves.remove(client);
        }
    }

    /// `None` if the allocation has already ended or is moving elsewhere; the requesting worker must then
    /// call [`Server::not_moved`].
    #[must_use = "dropping this leaks the allocation: import it or take it back"]
    pub fn export(&mut self, now: Now, request: &MoveRequest) -> Option<Moved> {
        let index = *self.pending_moves.owned.get(&request.key)?;
        let (allocation, entry, state) = self.allocation(index)?;
        let (away, sent) = (entry.away, entry.to_peer.0);
        let mobility = state.mobility.as_mut()?;
        let expected = mobility.arriving.map(|(source, worker)| (source.client, worker));
        if expected != Some((request.client, request.to)) || state.tcp.is_some() {
            return None;
        }
        mobility.moved(away.then_some(sent));
        let to = Source { client: request.client, link: request.link };
        let moved = Moved::new(now, allocation, to, entry, state);
        let state = self.states.remove(index)?;
        self.data.emit(now, Effect::Exported { allocation });
        self.forget_arrival(&state);
        self.owners.set(request.key, request.to);
        self.data.stats.mobility(MobilityEvent::Exported);
        Some(moved)
    }

    /// Returns the new ID, to which the relay sockets now belong. If the client has made another allocation
    /// in the meantime, returns this one for [`Server::take_back`].
    pub fn import(&mut self, now: Now, moved: Moved) -> Result<AllocationSlot, Moved> {
        let client = moved.client();
        if self.data.forwarding.find(&client).is_some() {
            return Err(moved);
        }
        let (from, was, link) = (moved.from(), moved.was().map(|was| was.client), moved.to().link);
        let id = self.own(now, moved, true);
        self.data.stats.mobility(MobilityEvent::Imported);
        let padded = self.is_stream(&client);
        let from = Some(from);
        self.data.emit(now, Effect::Moved { allocation: id, was, client, link, padded, from });
        self.tell_bindings(id);
        self.conform(now, id.index);
        Ok(id)
    }

    /// Restores the old 5-tuple. Returns `None`, with [`Effect::Closed`], if that 5-tuple already has another
    /// allocation.
    pub fn take_back(&mut self, now: Now, moved: Moved) -> Option<AllocationSlot> {
        let is_taken = moved.was().is_some_and(|was| self.data.forwarding.find(&was.client).is_some());
        // The old ID may have been reused, so the allocation gets a new one.
        let allocation = self.own(now, moved, false);
        self.data.effects.push_back(Effect::Returned { allocation });
        if is_taken {
            self.close(now, allocation.index, ClosedReason::Disconnected);
            return None;
        }
        self.tell_bindings(allocation);
        self.conform(now, allocation.index);
        Some(allocation)
    }

    /// The owner refused to export: the client has no pending move any more.
    pub fn not_moved(&mut self, client: &Client) {
        let own = self.worker_id.number();
        if self.pending_moves.get(client).is_some_and(|expected| expected.owner != own) {
            self.pending_moves.remove(client);
        }
    }

    /// The owner could not be reached; the next datagram triggers another attempt.
    pub fn not_asked(&mut self, client: &Client) {
        if let Some(expected) = self.pending_moves.get(client) {
            expected.asked = false;
        }
    }

    /// Tells the worker that forwarded the request to expect its client.
    pub(crate) fn announce(&mut self, context: &Context<'_>, index: u32) {
        let owner = self.worker_id.number();
        let Some(state) = self.states.get(index) else { return };
        if let Some(mobility) = &state.mobility
            && matches!(context.delivery, Delivery::Forwarded { .. })
            && mobility.arriving.is_some_and(|(source, _)| source.client == *context.client())
        {
            context.pending_move.set(Some(PendingMove {
                client: *context.client(),
                key: mobility.key.0,
                owner,
            }));
        }
    }

    /// Finds this worker's allocation that is moving to the request's 5-tuple. Requests never end the old
    /// 5-tuple (section 3.2.2).
    pub(crate) fn arriving(&mut self, context: &Context<'_>) -> Result<Option<u32>, Disposition> {
        let own = self.worker_id.number();
        let (source, request) = (context.source, context.request.view.bytes());
        let expected = self.pending_moves.get(&source.client).map(|expected| *expected);
        if let Some(expected) = expected
            && expected.owner == own
        {
            return Ok(self.pending_moves.owned.get(&expected.key).copied());
        }
        if let Delivery::Forwarded { via, .. } = context.delivery {
            self.data.effects.push_back(Effect::Decline { via, source, request: request.into() });
            return Err(Disposition::Later);
        }
        let Some(expected) = expected else { return Ok(None) };
        // The allocation is in transit to this worker.
        if expected.asked {
            return Err(Disposition::Drop(DropReason::Moving));
        }
        self.forward(expected.owner, own, false, context);
        Err(Disposition::Later)
    }

    pub(crate) fn own(&mut self, now: Now, moved: Moved, arrived: bool) -> AllocationSlot {
        let at = if arrived { Some(moved.to()) } else { moved.was() };
        let padded = at.is_some_and(|at| self.is_stream(&at.client));
        let (mut entry, mut state) = moved.unpack(now, &self.config.peers.own, padded, arrived);
        // A process with another version or configuration may have installed shorter permissions.
        if self.config.channels_permit {
            for (peer, expires_ms) in entry.outlasted_permissions() {
                entry.permit(peer, expires_ms);
            }
        }
        let key = state.mobility.as_ref().map(|mobility| mobility.key.0);
        key.into_iter().for_each(|key| self.pending_moves.forget_foreign(key));
        if !entry.away {
            self.give_up_arrival(&entry.client);
        }
        let id = self.data.forwarding.install(now.ms, entry);
        if let Some(key) = key {
            self.pending_moves.owned.insert(key, id.index);
            self.owners.set(key, self.worker_id.number());
        }
        self.connections.adopt(self.worker_id, id.index, &mut state);
        self.states.insert(id, state);
        self.apply_rates(now, id.index);
        self.arm_connections(now, id.index);
        id
    }

    /// Forwards a request with a genuine ticket.
    pub(crate) fn ask_owner(&mut self, context: &Context<'_>, ticket: Ticket) -> Disposition {
        let own = self.worker_id.number();
        let next = match self.owners.get(ticket.key) {
            // The allocation is in transit to this worker. A client on a stream would not retransmit.
            Some(owner) if owner == own && !self.is_stream(context.client()) => {
                return Disposition::Drop(DropReason::Moving);
            }
            Some(owner) if owner != own => owner,
            // The ticket is genuine but its allocation has ended.
            _ => return self.fail(context, 437),
        };
        let client = context.client();
        let is_another = |key: u64| key != ticket.key;
        let (via, occupied) = match context.delivery {
            Delivery::Forwarded { via, occupied } => (via, occupied),
            Delivery::Direct | Delivery::HandedOver => {
                let expected = self.pending_moves.get(client).map(|expected| expected.key);
                (own, self.data.forwarding.find(client).is_some() || expected.is_some_and(is_another))
            }
        };
        // A stream that has another allocation keeps it.
        if self.is_stream(client) && !occupied {
            self.data.stats.mobility(MobilityEvent::Forwarded);
            let (source, request) = (context.source, context.request.view.bytes().into());
            self.data.effects.push_back(Effect::HandOver { worker: next, source, request });
        } else {
            self.forward(next, via, occupied, context);
        }
        Disposition::Later
    }

    fn forward(&mut self, worker: u16, via: u16, occupied: bool, context: &Context<'_>) {
        self.data.stats.mobility(MobilityEvent::Forwarded);
        let (source, request) = (context.source, context.request.view.bytes().into());
        self.data.effects.push_back(Effect::Forward { worker, via, occupied, source, request });
    }
}
