//! Mobility (RFC 8016): a client with a new address identifies its allocation with a ticket, and proves with
//! its credentials that it owns the allocation.
//!
//! The new 5-tuple first *arrives*: both 5-tuples are valid until the client sends data from the new one
//! (section 3.2.2). Then the allocation *moves*, and the old 5-tuple is dropped. `handoff.rs` handles
//! arrivals on other workers.

pub(crate) mod handoff;
pub(crate) mod moved;
pub(crate) mod owners;
pub(crate) mod pending_moves;
pub(crate) mod ticket;
pub(crate) mod tombstones;
pub(crate) mod worker_id;

use serde::{Deserialize, Serialize};
use turnpike_wire::{demux::Kind, stun::kind};

use super::{
    Client, ClosedReason, Disposition, DropReason, Effect, Fault, MoveRequest, Policy, RequestRefusal,
    Server, Source, Verdict,
    auth::masked::Masked,
    mobility::{handoff::PendingMove, pending_moves::Expected, ticket::Ticket},
    request::{Delivery, Request, bad_request::Denied, context::Context},
    stats::MobilityEvent,
};
use crate::time::Now;

/// Time to remember a transaction: RFC 8016 requires at least 30 s, RFC 8489 section 6.3.1 requires 40 s.
const REMEMBERED_MS: u64 = 40_000;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Mobility {
    pub(crate) key: Masked<u64>,
    counter: u32,
    spent: Option<Spent>,
    /// New 5-tuple from which the client has not sent data yet, and its worker.
    #[serde(skip)]
    pub(crate) arriving: Option<(Source, u16)>,
    last: Option<LastArrival>,
}

/// Previous ticket. Section 3.2.2 accepts it only for retransmissions, but a client that missed the response
/// (its connection ended, or it stopped retransmitting) has no other ticket. So the previous ticket stays
/// valid until the client has shown that it received the response, by sending data or another signed request
/// from the new 5-tuple, or by using the next ticket. Others cannot use it without the credentials, and the
/// replay guard refuses replays.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Spent {
    counter: u32,
    /// Number of datagrams that the client had sent when the allocation moved, if it moved without waiting
    /// for data.
    sent: Option<u64>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct LastArrival {
    client: Client,
    transaction: [u8; 12],
    at_ms: u64,
    granted: u32,
}

impl Mobility {
    /// Converts `at_ms` to an age, or an age back to a time, for use with another clock.
    pub(crate) fn packed(&self, now: Now) -> Self {
        let last = self.last.map(|last| LastArrival { at_ms: now.ms.wrapping_sub(last.at_ms), ..last });
        Self { arriving: None, last, ..self.clone() }
    }

    fn ticket(&self, node: u16) -> Ticket {
        Ticket { key: self.key.0, node, counter: self.counter }
    }

    fn is_held(&self, counter: u32, sent: u64) -> bool {
        let is_it = |spent: &Spent| spent.counter == counter && spent.sent.is_none_or(|then| then == sent);
        counter == self.counter || self.spent.as_ref().is_some_and(is_it)
    }

    pub(crate) fn is_good(&self, ticket: &Ticket) -> bool {
        ticket.counter == self.counter
    }

    /// True if this is a retransmission of the last Refresh with a ticket.
    pub(crate) fn is_repeated(&self, context: &Context<'_>) -> bool {
        self.last.as_ref().is_some_and(|last| {
            (&last.client, last.transaction) == (context.client(), context.request.transaction())
                && context.now.ms.wrapping_sub(last.at_ms) < REMEMBERED_MS
        })
    }

    /// Drops the previous ticket: a signed request from the new 5-tuple shows that the client has the current
    /// one.
    pub(crate) fn heard_from(&mut self, client: &Client, at_home: bool) {
        if self.arriving.map_or(at_home, |(source, _)| source.client == *client) {
            self.spent = None;
        }
    }

    /// Records a move. `without` is `None` if data from the client caused the move, otherwise the number of
    /// datagrams that the client had sent before.
    pub(crate) fn moved(&mut self, without: Option<u64>) {
        match (&mut self.spent, without) {
            (Some(spent), Some(sent)) => spent.sent = Some(sent),
            (spent, _) => *spent = None,
        }
    }
}

impl<P: Policy> Server<P> {
    /// Ends the allocation unless it is mobile. A mobile allocation waits for its client until it expires.
    /// Returns false if the client had no allocation.
    pub fn disconnected(&mut self, now: Now, client: &Client) -> bool {
        self.lookups.forget(|source| source.client == *client);
        if self.give_up_arrival(client) {
            return false;
        }
        let Some(index) = self.data.forwarding.find(client) else { return false };
        let own = self.worker_id.number();
        let Some((id, _, state)) = self.allocation(index) else { return false };
        let Some(mobility) = &state.mobility else {
            self.close(now, index, ClosedReason::Disconnected);
            return true;
        };
        let (key, arriving) = (mobility.key.0, mobility.arriving);
        self.data.emit(now, Effect::Away { allocation: id });
        match arriving {
            // The end of the old connection completes the move, just as data on the new one would.
            Some((source, worker)) if worker == own => self.settle(now, index, source, false),
            elsewhere => {
                self.data.stats.mobility(MobilityEvent::Kept);
                if let Some((Source { client, link }, to)) = elsewhere {
                    self.data.effects.push_back(Effect::Move(MoveRequest {
                        owner: own,
                        to,
                        client,
                        link,
                        key,
                    }));
                }
            }
        }
        true
    }

    /// The allocation keeps only its old 5-tuple, because the new one may later belong to another client.
    /// Returns false if no arrival was pending.
    pub(crate) fn give_up_arrival(&mut self, client: &Client) -> bool {
        let Some(expected) = self.pending_moves.remove(client) else { return false };
        let Expected { key, owner, .. } = expected;
        if owner != self.worker_id.number() {
            let pending_move = PendingMove { client: *client, key, owner };
            self.data.effects.push_back(Effect::MoveOver { worker: owner, pending_move });
            return true;
        }
        let index = self.pending_moves.owned.get(&key).copied();
        if let Some(state) = index.and_then(|index| self.states.get(index))
            && let Some(mobility) = &mut state.mobility
        {
            mobility.arriving = None;
        }
        true
    }

    pub(crate) fn wants_mobility(&self, request: &Request<'_>) -> Result<bool, Denied> {
        match request.get(kind::MOBILITY_TICKET) {
            None => Ok(false),
            Some([]) if self.config.mobility => Ok(true),
            // Mobility Forbidden.
            Some([]) => Err(Denied::code(405)),
            Some(_) => Err(Denied::bad(kind::MOBILITY_TICKET, Fault::NotEmpty)),
        }
    }

    pub(crate) fn make_mobile(&mut self, index: u32) {
        let worker = self.worker_id.number();
        let Some(state) = self.states.get(index) else { return };
        let mut draw = || self.random.u64() >> (64 - ticket::KEY_BITS);
        let mut key = draw();
        while !self.owners.add(key, worker) {
            key = draw();
        }
        self.pending_moves.owned.insert(key, index);
        state.mobility = Some(Box::new(Mobility {
            key: Masked(key),
            counter: 0,
            spent: None,
            arriving: None,
            last: None,
        }));
    }

    pub(crate) fn ticket(&mut self, now: Now, index: u32) -> Option<[u8; ticket::LEN]> {
        let mobility = self.states.get(index)?.mobility.as_ref()?;
        Some(mobility.ticket(self.worker_id.node()).seal(&self.config.nonce_keys.at(now.unix).0))
    }

    pub(crate) fn ticket_of(&self, request: &Request<'_>) -> Option<Ticket> {
        let sealed = request.get(kind::MOBILITY_TICKET).filter(|_| self.config.mobility)?;
        self.config.nonce_keys.iter().find_map(|key| Ticket::open(sealed, &key.0))
    }

    /// Returns the allocation and the ticket's counter, regardless of the 5-tuple (section 3.2.2), or
    /// responds to the request. Changes nothing: see [`Server::arrive`].
    pub(crate) fn presented(&mut self, context: &Context<'_>) -> Result<(u32, u32), Disposition> {
        if !self.config.mobility {
            return Err(self.fail(context, 405));
        }
        let Some(ticket) = self.ticket_of(context.request) else {
            self.data.stats.mobility(MobilityEvent::TicketInvalid);
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::Malformed));
        };
        if self.worker_id.is_another(ticket.node) {
            return Err(self.send_to_node(context, ticket.node, Denied::code(437)));
        }
        let Some(index) = self.pending_moves.owned.get(&ticket.key).copied() else {
            return Err(self.ask_owner(context, ticket));
        };
        let Some((_, entry, state)) = self.allocation(index) else { return Err(self.fail(context, 437)) };
        // A ticket alone is not enough: the sender must also be the allocation's user.
        if !state.is_of(&context.who) {
            return Err(self.wrong_user(context));
        }
        let Some(mobility) = &state.mobility else { return Err(self.fail(context, 437)) };
        // Retransmission after the response was lost.
        if mobility.is_repeated(context)
            && let Some(LastArrival { granted, .. }) = mobility.last
        {
            // The announcement to the client's worker may have been lost too.
            self.announce(context, index);
            self.data.stats.retransmits += 1;
            let ticket = self.ticket(context.now, index);
            return Err(self.refreshed(context, granted, ticket));
        }
        if !mobility.is_held(ticket.counter, entry.to_peer.0) {
            self.data.stats.mobility(MobilityEvent::TicketReplayed);
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::Replaced));
        }
        // A client that has not moved needs no ticket (section 3.2.2).
        let client = context.client();
        let arrives = mobility.arriving.is_some_and(|(source, _)| source.client == *client);
        let at_home = entry.client == *client && !entry.away;
        let over_tcp = state.tcp.is_some();
        if at_home || (arrives && ticket.counter == mobility.counter) {
            // The client's worker may have dropped the pending move.
            self.announce(context, index);
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::AtHome));
        }
        // RFC 6062 needs a stream to the client; an allocation that lost its stream waits for a new one.
        if over_tcp && !self.is_stream(client) {
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::OverDatagrams));
        }
        // One allocation per 5-tuple (RFC 8656 section 3.2).
        let occupied = matches!(context.delivery, Delivery::Forwarded { occupied: true, .. });
        if occupied || (!arrives && self.is_known(client)) {
            return Err(self.refuse(context, 437, RequestRefusal::AllocationExists));
        }
        Ok((index, ticket.counter))
    }

    /// The new 5-tuple arrives, and a new ticket is issued.
    pub(crate) fn arrive(&mut self, context: &Context<'_>, index: u32, granted: u32, presented: u32) {
        let own = self.worker_id.number();
        let worker = if let Delivery::Forwarded { via, .. } = context.delivery { via } else { own };
        let (now, source) = (context.now, context.source);
        let Some((_, entry, state)) = self.allocation(index) else { return };
        let away = entry.away;
        let Some(mobility) = &mut state.mobility else { return };
        let key = mobility.key.0;
        mobility.counter = mobility.counter.wrapping_add(1);
        mobility.spent = Some(Spent { counter: presented, sent: None });
        let transaction = context.request.transaction();
        mobility.last = Some(LastArrival { client: source.client, transaction, at_ms: now.ms, granted });
        // An earlier arrival is cancelled if no data has come from it.
        if let Some((Source { client, .. }, at)) = mobility.arriving.replace((source, worker))
            && (client, at) != (source.client, worker)
        {
            self.pending_moves.remove(&client);
            self.arrives_no_more(at, client, key);
        }
        self.data.stats.mobility(MobilityEvent::Arrived);
        self.pending_moves.expect_own(source.client, key, own);
        self.announce(context, index);
        if !away {
            return;
        }
        // The old 5-tuple is already gone, so the allocation moves immediately.
        if worker == own {
            self.settle(now, index, source, false);
        } else {
            let Source { client, link } = source;
            let request = MoveRequest { owner: own, to: worker, client, link, key };
            self.data.effects.push_back(Effect::Move(request));
        }
    }

    pub(crate) fn arrives_no_more(&mut self, worker: u16, client: Client, key: u64) {
        let owner = self.worker_id.number();
        if worker != owner {
            self.data
                .effects
                .push_back(Effect::MoveOver { worker, pending_move: PendingMove { client, key, owner } });
        }
    }

    #[inline]
    pub(crate) fn unknown_client<'a>(
        &'a mut self,
        now: Now,
        source: &Source,
        kind: Kind,
        datagram: &'a [u8],
    ) -> Verdict<'a> {
        match self.data.check(kind, datagram) {
            Err(reason) => self.data.dropped(reason),
            Ok(()) if self.pending_moves.is_nobody_expected() => self.data.dropped(DropReason::NoAllocation),
            Ok(()) => self.perhaps_expected(now, source, datagram),
        }
    }

    /// Data from an arriving 5-tuple moves the allocation, or fetches it from another worker.
    #[cold]
    #[inline(never)]
    fn perhaps_expected<'a>(&'a mut self, now: Now, source: &Source, datagram: &'a [u8]) -> Verdict<'a> {
        if !self.config.clients.admits(source.client.address.ip()) {
            return self.data.dropped(DropReason::ClientRefused);
        }
        let to = self.worker_id.number();
        let Some(expected) = self.pending_moves.get(&source.client) else {
            return self.data.dropped(DropReason::NoAllocation);
        };
        let Expected { key, owner, .. } = *expected;
        if owner == to {
            let Some(index) = self.pending_moves.owned.get(&key).copied() else {
                return self.data.dropped(DropReason::NoAllocation);
            };
            self.settle(now, index, *source, true);
            return self.from_client(now, source, datagram);
        }
        if std::mem::replace(&mut expected.asked, true) {
            return self.data.dropped(DropReason::Moving);
        }
        let Source { client, link } = *source;
        let request = MoveRequest { owner, to, client, link, key };
        self.data.effects.push_back(Effect::Fetch { request, datagram: datagram.into() });
        Verdict::Drop(None)
    }

    pub(crate) fn is_known(&mut self, client: &Client) -> bool {
        self.data.forwarding.find(client).is_some() || self.pending_moves.get(client).is_some()
    }

    /// Completes a move. `spoke` is true if the client has sent data from the new 5-tuple.
    fn settle(&mut self, now: Now, index: u32, source: Source, spoke: bool) {
        let Source { client, link } = source;
        self.pending_moves.remove(&client);
        let padded = self.is_stream(&client);
        let Some((allocation, entry, state)) = self.allocation(index) else { return };
        let was = (!entry.away).then_some(entry.client);
        if let Some(mobility) = &mut state.mobility {
            mobility.arriving = None;
            mobility.moved((!spoke).then_some(entry.to_peer.0));
        }
        self.data.stats.mobility(MobilityEvent::Moved);
        self.data.emit(now, Effect::Moved { allocation, was, client, link, padded, from: None });
    }
}
