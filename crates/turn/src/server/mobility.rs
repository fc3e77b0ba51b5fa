//! Mobility (RFC 8016): a client that has changed its address proves by a ticket which allocation is its own, and by its
//! credentials that it may have it.
//!
//! The new 5-tuple *arrives*: both are good, until the client sends data from the new one (section 3.2.2). Then the allocation *moves*, and the
//! old one is forgotten. `handoff.rs` has the part of other workers in this.

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
    auth::secret::Secret,
    mobility::{handoff::PendingMove, pending_moves::Expected, ticket::Ticket},
    request::{Delivery, Request, bad_request::Denied, context::Context},
    stats::MobilityEvent,
};
use crate::time::Now;

/// For so long a Refresh with the ticket before the last one is known to be a retransmission. RFC 8016 asks for 30 s at the
/// least, RFC 8489 section 6.3.1 for 40.
const REMEMBERED_MS: u64 = 40_000;

/// What a mobile allocation has beyond the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Mobility {
    /// Names it in its tickets for as long as it lives.
    pub(crate) key: Secret<u64>,
    /// Of the ticket that is good.
    counter: u32,
    /// The ticket before it.
    spent: Option<Spent>,
    /// The new 5-tuple, from which no data has come so far, and its worker. Once it is given away, it has arrived.
    #[serde(skip)]
    pub(crate) arriving: Option<(Source, u16)>,
    /// The last Refresh with a ticket, to answer it again.
    last: Option<LastArrival>,
}

/// The ticket that was presented last. Section 3.2.2 accepts it for retransmissions alone; but a client whose connection ended before the
/// answer came, or that gave up repeating itself, has no other. So it is good until there is a sign that the answer has arrived: data or
/// another signed request from the new 5-tuple, or the next ticket. The credentials keep others out, and the replay guard keeps copies out.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Spent {
    counter: u32,
    /// Datagrams that the client had sent when the allocation moved, if it did without waiting for one.
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
    /// With the age of what has a time, in place of the time; and the other way round, on whichever clock.
    pub(crate) fn packed(&self, now: Now) -> Self {
        let last = self.last.map(|last| LastArrival { at_ms: now.ms.wrapping_sub(last.at_ms), ..last });
        Self { arriving: None, last, ..self.clone() }
    }

    fn ticket(&self, node: u16) -> Ticket {
        Ticket { key: self.key.0, node, counter: self.counter }
    }

    /// Whether a client that has sent so many datagrams may have nothing better than the ticket of this counter.
    fn is_held(&self, counter: u32, sent: u64) -> bool {
        let is_it = |spent: &Spent| spent.counter == counter && spent.sent.is_none_or(|then| then == sent);
        counter == self.counter || self.spent.as_ref().is_some_and(is_it)
    }

    /// Whether it is the ticket that was given out last.
    pub(crate) fn is_good(&self, ticket: &Ticket) -> bool {
        ticket.counter == self.counter
    }

    /// Whether this is the last Refresh with a ticket again.
    pub(crate) fn is_repeated(&self, context: &Context<'_>) -> bool {
        self.last.as_ref().is_some_and(|last| {
            (&last.client, last.transaction) == (context.client(), context.request.transaction())
                && context.now.ms.wrapping_sub(last.at_ms) < REMEMBERED_MS
        })
    }

    /// A signed request from the new 5-tuple shows that the client has got the ticket that was given out last. Late requests from the old one show
    /// nothing.
    pub(crate) fn heard_from(&mut self, client: &Client, at_home: bool) {
        if self.arriving.map_or(at_home, |(source, _)| source.client == *client) {
            self.spent = None;
        }
    }

    /// The allocation has moved: for data of its client, or, after so many datagrams, without any.
    pub(crate) fn moved(&mut self, without: Option<u64>) {
        match (&mut self.spent, without) {
            (Some(spent), Some(sent)) => spent.sent = Some(sent),
            (spent, _) => *spent = None,
        }
    }
}

impl<P: Policy> Server<P> {
    /// The client's connection is closed: its allocation ends, unless it is mobile. Then it lives on until it expires
    /// (a plain one ends with the connection, and RFC 8016 exists to keep it), and drops what peers send until
    /// its client has arrived elsewhere. False if it had no allocation.
    pub fn disconnected(&mut self, now: Now, client: &Client) -> bool {
        self.lookups.forget(|source| source.client == *client);
        if self.give_up_arrival(client) {
            return false;
        }
        let Some(index) = self.data.forwarding.find(client) else { return false };
        let own = self.worker_id.number();
        let Some((id, _, session)) = self.allocation(index) else { return false };
        let Some(mobility) = &session.mobility else {
            self.close(now, index, ClosedReason::Disconnected);
            return true;
        };
        let (key, arriving) = (mobility.key.0, mobility.arriving);
        self.data.emit(now, Effect::Away { allocation: id });
        match arriving {
            // The end of the old connection settles it as data from the new one does.
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

    /// The client that was expected there has not sent data, and will not. Its allocation keeps the old 5-tuple alone: otherwise it could settle
    /// later at a 5-tuple that is another client's by then. False if no client was expected there.
    pub(crate) fn give_up_arrival(&mut self, client: &Client) -> bool {
        let Some(expected) = self.pending_moves.remove(client) else { return false };
        let Expected { key, owner, .. } = expected;
        if owner != self.worker_id.number() {
            let pending_move = PendingMove { client: *client, key, owner };
            self.data.effects.push_back(Effect::MoveOver { worker: owner, pending_move });
            return true;
        }
        let index = self.pending_moves.owned.get(&key).copied();
        if let Some(session) = index.and_then(|index| self.sessions.get(index))
            && let Some(mobility) = &mut session.mobility
        {
            mobility.arriving = None;
        }
        true
    }

    /// What an Allocate says about mobility (section 3.1.2), or the error code.
    pub(crate) fn wants_mobility(&self, request: &Request<'_>) -> Result<bool, Denied> {
        match request.get(kind::MOBILITY_TICKET) {
            None => Ok(false),
            Some([]) if self.config.mobility => Ok(true),
            // Mobility Forbidden.
            Some([]) => Err(Denied::code(405)),
            // An Allocate asks for a ticket, and has none to show.
            Some(_) => Err(Denied::bad(kind::MOBILITY_TICKET, Fault::NotEmpty)),
        }
    }

    /// Makes a new allocation mobile.
    pub(crate) fn make_mobile(&mut self, index: u32) {
        let worker = self.worker_id.number();
        let Some(session) = self.sessions.get(index) else { return };
        let mut draw = || self.random.u64() >> (64 - ticket::KEY_BITS);
        let mut key = draw();
        while !self.owners.add(key, worker) {
            key = draw();
        }
        self.pending_moves.owned.insert(key, index);
        session.mobility = Some(Box::new(Mobility {
            key: Secret(key),
            counter: 0,
            spent: None,
            arriving: None,
            last: None,
        }));
    }

    /// The good ticket of a mobile allocation.
    pub(crate) fn ticket(&mut self, now: Now, index: u32) -> Option<[u8; ticket::LEN]> {
        let mobility = self.sessions.get(index)?.mobility.as_ref()?;
        Some(mobility.ticket(self.worker_id.node()).seal(&self.config.nonce_keys.at(now.unix).0))
    }

    /// What a request's ticket says, if it is one of ours.
    pub(crate) fn ticket_of(&self, request: &Request<'_>) -> Option<Ticket> {
        let sealed = request.get(kind::MOBILITY_TICKET).filter(|_| self.config.mobility)?;
        self.config.nonce_keys.iter().find_map(|key| Ticket::open(sealed, &key.0))
    }

    /// The allocation that a Refresh with a ticket is about, and the ticket's counter; or the answer: the ticket names it, and the
    /// 5-tuple does not count (section 3.2.2). Nothing has changed by then: see [`Server::arrive`].
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
        let Some((_, entry, session)) = self.allocation(index) else { return Err(self.fail(context, 437)) };
        // A ticket alone is no proof: whoever shows it must be the user of the allocation.
        if !session.is_of(&context.who) {
            return Err(self.wrong_user(context));
        }
        let Some(mobility) = &session.mobility else { return Err(self.fail(context, 437)) };
        // The same request again, whose answer was lost.
        if mobility.is_repeated(context)
            && let Some(LastArrival { granted, .. }) = mobility.last
        {
            // The announcement may have been lost together with the answer.
            self.announce(context, index);
            self.data.stats.retransmits += 1;
            let ticket = self.ticket(context.now, index);
            return Err(self.refreshed(context, granted, ticket));
        }
        if !mobility.is_held(ticket.counter, entry.to_peer.0) {
            self.data.stats.mobility(MobilityEvent::TicketReplayed);
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::Replaced));
        }
        // A client that has not moved needs no ticket (section 3.2.2). The ticket before the last is no mistake where the client arrives: it
        // has not got the answer.
        let client = context.client();
        let arrives = mobility.arriving.is_some_and(|(source, _)| source.client == *client);
        let at_home = entry.client == *client && !entry.away;
        let over_tcp = session.tcp.is_some();
        if at_home || (arrives && ticket.counter == mobility.counter) {
            // The client's worker may have forgotten it.
            self.announce(context, index);
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::AtHome));
        }
        // RFC 6062 has no allocation for TCP without a stream to its client; where that is gone, it waits for one.
        if over_tcp && !self.is_stream(client) {
            return Err(self.bad(context, kind::MOBILITY_TICKET, Fault::OverDatagrams));
        }
        // One 5-tuple, one allocation (RFC 8656 section 3.2).
        let occupied = matches!(context.delivery, Delivery::Forwarded { occupied: true, .. });
        if occupied || (!arrives && self.is_known(client)) {
            return Err(self.refuse(context, 437, RequestRefusal::AllocationExists));
        }
        Ok((index, ticket.counter))
    }

    /// A Refresh with a ticket, `presented`, has succeeded: the new 5-tuple arrives, and there is a new ticket.
    pub(crate) fn arrive(&mut self, context: &Context<'_>, index: u32, granted: u32, presented: u32) {
        let own = self.worker_id.number();
        let worker = if let Delivery::Forwarded { via, .. } = context.delivery { via } else { own };
        let (now, source) = (context.now, context.source);
        let Some((_, entry, session)) = self.allocation(index) else { return };
        let away = entry.away;
        let Some(mobility) = &mut session.mobility else { return };
        let key = mobility.key.0;
        mobility.counter = mobility.counter.wrapping_add(1);
        mobility.spent = Some(Spent { counter: presented, sent: None });
        let transaction = context.request.transaction();
        mobility.last = Some(LastArrival { client: source.client, transaction, at_ms: now.ms, granted });
        // An earlier one that has not sent data is given up.
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
        // There is no old 5-tuple to wait with.
        if worker == own {
            self.settle(now, index, source, false);
        } else {
            let Source { client, link } = source;
            let request = MoveRequest { owner: own, to: worker, client, link, key };
            self.data.effects.push_back(Effect::Move(request));
        }
    }

    /// Tells a worker that a client does not arrive there any more with the allocation of this key, which is ours.
    pub(crate) fn arrives_no_more(&mut self, worker: u16, client: Client, key: u64) {
        let owner = self.worker_id.number();
        if worker != owner {
            self.data
                .effects
                .push_back(Effect::MoveOver { worker, pending_move: PendingMove { client, key, owner } });
        }
    }

    /// Data from a 5-tuple without an allocation.
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

    /// The same, where some are expected. Data from a 5-tuple that arrived ends the old one. The allocation of another worker is fetched, and the
    /// datagram is fed again.
    #[cold]
    #[inline(never)]
    fn perhaps_expected<'a>(&'a mut self, now: Now, source: &Source, datagram: &'a [u8]) -> Verdict<'a> {
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

    /// Whether an allocation has this 5-tuple, or will.
    pub(crate) fn is_known(&mut self, client: &Client) -> bool {
        self.data.forwarding.find(client).is_some() || self.pending_moves.get(client).is_some()
    }

    /// The allocation moves to the 5-tuple that arrived. `spoke`: because data came from there.
    fn settle(&mut self, now: Now, index: u32, source: Source, spoke: bool) {
        let Source { client, link } = source;
        self.pending_moves.remove(&client);
        let padded = self.is_stream(&client);
        let Some((allocation, entry, session)) = self.allocation(index) else { return };
        let was = (!entry.away).then_some(entry.client);
        if let Some(mobility) = &mut session.mobility {
            mobility.arriving = None;
            mobility.moved((!spoke).then_some(entry.to_peer.0));
        }
        self.data.stats.mobility(MobilityEvent::Moved);
        self.data.emit(now, Effect::Moved { allocation, was, client, link, padded, from: None });
    }
}
