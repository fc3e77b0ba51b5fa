//! Mobility (RFC 8016): a client that has changed its address proves by a ticket which allocation is its own, and by its
//! credentials that it may have it.
//!
//! The new 5-tuple *arrives*: both are good, until the client sends data from the new one (section 3.2.2). Then the
//! allocation *moves*, and the old one is forgotten. The kernel may give the new 5-tuple to another worker than the one
//! that owns the allocation. A stream is handed over to the owner, connection and all. Of datagrams only the Refresh is
//! forwarded; the worker where the client now is expects it, and fetches the allocation when data comes:
//!
//! ```text
//!            worker 2, the client's new one                      worker 1, the owner
//!  Refresh ──▶ Effect::Forward ─────────────────────────────────▶ from_elsewhere ──▶ Effect::Answer
//!        ◀──── expect(Arrival), send the reply ◀───────────────────────┘
//!  data ─────▶ Effect::Fetch ───────────────────────────────────▶ export ──▶ Moved, with the relay sockets
//!              import(Moved) ◀─────────────────────────────────────────┘
//! ```

use serde::{Deserialize, Serialize};
use turnpike_wire::stun::kind;

use super::{
    AllocationId, Answer, Client, ClosedReason, DropReason, Effect, Gate, Link, Moved, Server, Source,
    Verdict,
    context::{Context, Delivery},
    request::Request,
    secret::Secret,
    stats::MobilityEvent,
    ticket::{self, Ticket},
};
use crate::time::Now;

/// For so long a Refresh with the ticket before the last one is known to be a retransmission. RFC 8016 asks for 30 s at the
/// least, RFC 8489 section 6.3.1 for 40.
const REMEMBERED_MS: u64 = 40_000;

/// What a mobile allocation has beyond the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Mobility {
    /// Names it in its tickets for as long as it lives.
    pub(super) key: Secret<u64>,
    /// Of the ticket that is good.
    counter: u32,
    /// The workers that it names.
    via: u16,
    owner: u16,
    /// The ticket before it.
    spent: Option<Spent>,
    /// The new 5-tuple, from which no data has come so far, and its worker. Once it is given away, it has arrived.
    #[serde(skip)]
    pub(super) arriving: Option<(Source, u16)>,
    /// The last Refresh with a ticket, to answer it again.
    last: Option<LastArrival>,
}

/// The ticket that was presented last. Section 3.2.2 has it good for retransmissions alone; but a client whose connection ended
/// before the answer came, or who gave up repeating itself, has no other. So it is good until there is a sign that the answer has
/// arrived: data from the new 5-tuple, or the next ticket. What keeps others out are the credentials, and that with it a nonce counts
/// only if it holds for the address that it comes from.
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
    pub(super) fn packed(&self, now: Now) -> Self {
        let last = self.last.map(|last| LastArrival { at_ms: now.ms.wrapping_sub(last.at_ms), ..last });
        Self { arriving: None, last, ..self.clone() }
    }

    fn ticket(&self, node: u16) -> Ticket {
        Ticket { key: self.key.0, node, counter: self.counter, via: self.via, owner: self.owner }
    }

    /// Whether a client that has sent so many datagrams may have nothing better than the ticket of this counter.
    fn is_held(&self, counter: u32, sent: u64) -> bool {
        let is_it = |spent: &Spent| spent.counter == counter && spent.sent.is_none_or(|then| then == sent);
        counter == self.counter || self.spent.as_ref().is_some_and(is_it)
    }

    /// Whether it is the ticket that was given out last.
    pub(super) fn is_good(&self, ticket: &Ticket) -> bool {
        ticket.counter == self.counter
    }

    /// Whether this is the last Refresh with a ticket again.
    pub(super) fn is_repeated(&self, context: &Context<'_>) -> bool {
        self.last.as_ref().is_some_and(|last| {
            (&last.client, last.transaction) == (context.client(), context.request.transaction())
                && context.now.ms.wrapping_sub(last.at_ms) < REMEMBERED_MS
        })
    }

    /// The allocation has moved: for data of its client, or, after so many datagrams, without any.
    fn moved(&mut self, without: Option<u64>) {
        match (&mut self.spent, without) {
            (Some(spent), Some(sent)) => spent.sent = Some(sent),
            (spent, _) => *spent = None,
        }
    }
}

/// A client that another worker's allocation arrives at: for [`Server::expect`] of the client's worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    client: Client,
    key: u64,
    owner: u16,
    /// For so long, in milliseconds, the client's first data is waited for: until the allocation expires, unless it is
    /// refreshed over the old 5-tuple.
    patience_ms: u64,
}

impl Arrival {
    pub(super) fn new(client: Client, key: u64, owner: u16, patience_ms: u64) -> Self {
        Self { client, key, owner, patience_ms }
    }
}

/// Asks the owner of an allocation to give it to the worker where its client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveRequest {
    /// The worker whose [`Server::export`] shall be asked.
    pub owner: u16,
    /// The worker whose [`Server::import`] shall get it.
    pub to: u16,
    /// The client's new 5-tuple.
    pub client: Client,
    /// That worker's way to it.
    pub link: Link,
    key: u64,
}

impl<G: Gate> Server<G> {
    /// Feeds a request whose client's connection another worker has handed over ([`Effect::HandOver`]). From then on
    /// the client is this worker's, and [`Server::from_client`] gets what it sends.
    pub fn from_handed_over<'a>(&'a mut self, now: Now, source: &Source, request: &[u8]) -> Verdict<'a> {
        self.request(now, source, Delivery::HandedOver, request)
    }

    /// Feeds a request that worker `via` has forwarded ([`Effect::Forward`]), where the client remains. What becomes of it is an effect:
    /// [`Effect::Answer`], or [`Effect::Forward`] where a third worker has to be asked.
    pub fn from_elsewhere(&mut self, now: Now, via: u16, source: &Source, request: &[u8]) {
        self.request(now, source, Delivery::Forwarded(via), request);
    }

    /// Has this worker wait for the first data of a client whose allocation another worker owns. Of too many, the one that
    /// waits longest is forgotten.
    pub fn expect(&mut self, now: Now, arrival: Arrival) {
        let Arrival { client, key, owner, patience_ms } = arrival;
        // Since it asked, it has made an allocation of its own: a 5-tuple has one.
        if self.forwarding.find(&client).is_some() {
            return;
        }
        // Of two allocations that arrive at one 5-tuple, the later does.
        if self.moves.waiting(&client).is_some_and(|known| (known.key, known.owner) != (key, owner)) {
            self.give_up_arrival(&client);
        }
        self.moves.expect(client, key, owner, now.ms + patience_ms);
    }

    /// Gives an allocation away, if it is to go there. `None` if it has ended, or its client is expected elsewhere by now;
    /// the asking worker is told by [`Server::not_moved`]. The relay sockets of [`Moved::from`] go with it.
    #[must_use = "an allocation that is dropped is never released"]
    pub fn export(&mut self, now: Now, request: &MoveRequest) -> Option<Moved> {
        let index = *self.moves.owned.get(&request.key)?;
        let (allocation, entry, session) = self.allocation(index)?;
        let (away, sent) = (entry.away, entry.to_peer.0);
        let mobility = session.mobility.as_mut()?;
        let expected = mobility.arriving.map(|(source, worker)| (source.client, worker));
        if expected != Some((request.client, request.to)) || session.tcp.is_some() {
            return None;
        }
        mobility.moved(away.then_some(sent));
        let to = Source { client: request.client, link: request.link };
        let moved = Moved::new(now, allocation, to, entry, session);
        let session = self.sessions.remove(index)?;
        self.emit(now, Effect::Exported { allocation });
        self.forget_arrival(&session);
        self.stats.mobility(MobilityEvent::Exported);
        Some(moved)
    }

    /// Takes over an allocation whose client is here; what the relay sockets belong to from now on.
    ///
    /// # Errors
    /// Gives it back where the client has made another allocation by now: to be returned by [`Server::take_back`].
    pub fn import(&mut self, now: Now, moved: Moved) -> Result<AllocationId, Moved> {
        let client = moved.client();
        if self.forwarding.find(&client).is_some() {
            return Err(moved);
        }
        let (from, was, link) = (moved.from(), moved.was().map(|was| was.client), moved.to().link);
        let id = self.own(now, moved, true);
        self.stats.mobility(MobilityEvent::Imported);
        let padded = self.is_stream(&client);
        let from = Some(from);
        self.emit(now, Effect::Moved { allocation: id, was, client, link, padded, from });
        self.tell_bindings(id);
        self.conform(now, id.index);
        Ok(id)
    }

    /// Takes back what [`Server::import`] has refused. It lives on under its old 5-tuple; `None`, and [`Effect::Closed`],
    /// if that has another allocation by now.
    pub fn take_back(&mut self, now: Now, moved: Moved) -> Option<AllocationId> {
        let is_taken = moved.was().is_some_and(|was| self.forwarding.find(&was.client).is_some());
        // What it was called before may be another's name by now; a slot that was free is nobody's.
        let allocation = self.own(now, moved, false);
        self.effects.push_back(Effect::Returned { allocation });
        if is_taken {
            self.close(now, allocation.index, ClosedReason::Disconnected);
            return None;
        }
        self.tell_bindings(allocation);
        self.conform(now, allocation.index);
        Some(allocation)
    }

    /// The owner has not given the allocation that [`Effect::Fetch`] asked for. The client is a stranger again.
    pub fn not_moved(&mut self, client: &Client) {
        let own = self.seat.number();
        if self.moves.waiting(client).is_some_and(|expected| expected.owner != own) {
            self.moves.remove(client);
        }
    }

    /// The owner could not be asked for what [`Effect::Fetch`] wants. The next datagram wants it again.
    pub fn not_asked(&mut self, client: &Client) {
        if let Some(expected) = self.moves.waiting(client) {
            expected.asked = false;
        }
    }

    /// The client's connection is closed: its allocation ends, unless it is mobile. Then it lives on until it expires
    /// (a plain one ends with the connection, and RFC 8016 exists to keep it), and drops what peers send until
    /// its client has arrived elsewhere. False if it had no allocation.
    pub fn disconnected(&mut self, now: Now, client: &Client) -> bool {
        self.lookups.forget(|source| source.client == *client);
        if self.give_up_arrival(client) {
            return false;
        }
        let Some(index) = self.forwarding.find(client) else { return false };
        let own = self.seat.number();
        let Some((id, _, session)) = self.allocation(index) else { return false };
        let Some(mobility) = &session.mobility else {
            self.close(now, index, ClosedReason::Disconnected);
            return true;
        };
        let (key, arriving) = (mobility.key.0, mobility.arriving);
        self.emit(now, Effect::Away { allocation: id });
        match arriving {
            // The end of the old connection settles it as data from the new one does.
            Some((source, worker)) if worker == own => self.settle(now, index, source, false),
            elsewhere => {
                self.stats.mobility(MobilityEvent::Kept);
                if let Some((Source { client, link }, to)) = elsewhere {
                    self.effects.push_back(Effect::Move(MoveRequest { owner: own, to, client, link, key }));
                }
            }
        }
        true
    }

    /// Whoever is expected there never sent data from there, and will not: an allocation of ours keeps its old 5-tuple alone, or it
    /// would settle later where another one is by then. False if nobody was expected.
    fn give_up_arrival(&mut self, client: &Client) -> bool {
        let Some(expected) = self.moves.remove(client) else { return false };
        let index = self.moves.owned.get(&expected.key).copied();
        if let Some(session) = index.and_then(|index| self.sessions.get(index))
            && let Some(mobility) = &mut session.mobility
        {
            mobility.arriving = None;
        }
        true
    }

    /// What an Allocate says about mobility (section 3.1.2), or the error code.
    pub(super) fn wants_mobility(&self, request: &Request<'_>) -> Result<bool, u16> {
        match request.get(kind::MOBILITY_TICKET) {
            None => Ok(false),
            Some([]) if self.config.mobility => Ok(true),
            // Mobility Forbidden.
            Some([]) => Err(405),
            // An Allocate asks for a ticket, and has none to show.
            Some(_) => Err(400),
        }
    }

    /// Makes a new allocation mobile.
    pub(super) fn make_mobile(&mut self, index: u32) {
        let worker = self.seat.number();
        let Some(session) = self.sessions.get(index) else { return };
        let mut draw = || self.random.u64() >> (64 - ticket::KEY_BITS);
        let mut key = draw();
        while self.moves.owned.contains_key(&key) {
            key = draw();
        }
        self.moves.owned.insert(key, index);
        session.mobility = Some(Box::new(Mobility {
            key: Secret(key),
            counter: 0,
            via: worker,
            owner: worker,
            spent: None,
            arriving: None,
            last: None,
        }));
    }

    /// The good ticket of a mobile allocation.
    pub(super) fn ticket(&mut self, now: Now, index: u32) -> Option<[u8; ticket::LEN]> {
        let mobility = self.sessions.get(index)?.mobility.as_ref()?;
        Some(mobility.ticket(self.seat.node()).seal(&self.config.nonce_keys.at(now.unix).0))
    }

    /// What a request's ticket says, if it is one of ours.
    pub(super) fn ticket_of(&self, request: &Request<'_>) -> Option<Ticket> {
        let sealed = request.get(kind::MOBILITY_TICKET).filter(|_| self.config.mobility)?;
        self.config.nonce_keys.iter().find_map(|key| Ticket::open(sealed, &key.0))
    }

    /// The allocation that a Refresh with a ticket is about, and the ticket's counter; or the answer: the ticket names it, and the
    /// 5-tuple does not count (section 3.2.2). Nothing has changed by then: see [`Server::arrive`].
    pub(super) fn presented(&mut self, context: &Context<'_>) -> Result<(u32, u32), Answer> {
        if !self.config.mobility {
            return Err(self.fail(context, 405));
        }
        let Some(ticket) = self.ticket_of(context.request) else {
            self.stats.mobility(MobilityEvent::TicketInvalid);
            return Err(self.fail(context, 400));
        };
        if self.seat.is_another(ticket.node) {
            return Err(self.send_to_node(context, ticket.node, 437));
        }
        let Some(index) = self.moves.owned.get(&ticket.key).copied() else {
            return Err(self.ask_owner(context, ticket));
        };
        let Some((_, entry, session)) = self.allocation(index) else { return Err(self.fail(context, 437)) };
        // A ticket alone is no proof: whoever shows it must be the user of the allocation.
        if !session.is_of(&context.who) {
            return Err(self.wrong_user(context));
        }
        let Some(mobility) = &session.mobility else { return Err(self.fail(context, 437)) };
        // A ticket that was replaced is good for the same request again, and for nothing else.
        if mobility.is_repeated(context)
            && let Some(LastArrival { granted, .. }) = mobility.last
        {
            // What was said of it may have been lost together with the answer.
            let announced = mobility.arriving.is_some_and(|(source, worker)| {
                source.client == *context.client() && context.delivery == Delivery::Forwarded(worker)
            });
            if announced {
                self.announce(context, index);
            }
            self.stats.retransmits += 1;
            let ticket = self.ticket(context.now, index);
            return Err(self.refreshed(context, granted, ticket));
        }
        if !mobility.is_held(ticket.counter, entry.to_peer.0) {
            self.stats.mobility(MobilityEvent::TicketReplayed);
            return Err(self.fail(context, 400));
        }
        // Who has not moved needs no ticket (section 3.2.2).
        let client = context.client();
        let arrives = mobility.arriving.is_some_and(|(source, _)| source.client == *client);
        let at_home = entry.client == *client && !entry.away;
        // From one that arrives here the good ticket has no sense either; the one before it says that its answer was lost, and another
        // worker may have forgotten whom it expects.
        let senseless =
            ticket.counter == mobility.counter && !matches!(context.delivery, Delivery::Forwarded(_));
        let over_tcp = session.tcp.is_some();
        if at_home || (arrives && senseless) {
            return Err(self.fail(context, 400));
        }
        // RFC 6062 has no allocation for TCP without a stream to its client; where that is gone, it waits for one.
        if over_tcp && !self.is_stream(client) {
            return Err(self.fail(context, 400));
        }
        // One 5-tuple, one allocation (RFC 8656 section 3.2).
        if !arrives && self.is_known(context.now, client) {
            return Err(self.fail(context, 437));
        }
        Ok((index, ticket.counter))
    }

    /// A Refresh with a ticket, `presented`, has succeeded: the new 5-tuple arrives, and there is a new ticket.
    pub(super) fn arrive(&mut self, context: &Context<'_>, index: u32, granted: u32, presented: u32) {
        let own = self.seat.number();
        let worker = if let Delivery::Forwarded(via) = context.delivery { via } else { own };
        let (now, source) = (context.now, context.source);
        let Some((_, entry, session)) = self.allocation(index) else { return };
        let away = entry.away;
        let Some(mobility) = &mut session.mobility else { return };
        let key = mobility.key.0;
        mobility.counter = mobility.counter.wrapping_add(1);
        (mobility.via, mobility.owner) = (worker, own);
        mobility.spent = Some(Spent { counter: presented, sent: None });
        let transaction = context.request.transaction();
        mobility.last = Some(LastArrival { client: source.client, transaction, at_ms: now.ms, granted });
        // One that came before and never sent data is given up.
        if let Some((earlier, here)) = mobility.arriving.replace((source, worker))
            && here == own
        {
            self.moves.remove(&earlier.client);
        }
        self.stats.mobility(MobilityEvent::Arrived);
        if worker != own {
            self.announce(context, index);
            // There is no old 5-tuple to wait with.
            if away {
                let Source { client, link } = source;
                self.effects.push_back(Effect::Move(MoveRequest {
                    owner: own,
                    to: worker,
                    client,
                    link,
                    key,
                }));
            }
        } else if away {
            self.settle(now, index, source, false);
        } else {
            self.moves.expect_own(source.client, key, own);
        }
    }

    /// The worker that has forwarded a request shall expect its client.
    fn announce(&mut self, context: &Context<'_>, index: u32) {
        let owner = self.seat.number();
        let Some((_, entry, session)) = self.allocation(index) else { return };
        let Some(mobility) = &session.mobility else { return };
        let (key, patience_ms) = (mobility.key.0, entry.left_ms(context.now.ms));
        context.arrival.set(Some(Arrival { client: *context.client(), key, owner, patience_ms }));
    }

    /// Data from a 5-tuple without an allocation.
    #[inline]
    pub(super) fn stranger<'a>(&'a mut self, now: Now, source: &Source, datagram: &'a [u8]) -> Verdict<'a> {
        if self.moves.is_nobody_expected() {
            return self.dropped(DropReason::NoAllocation);
        }
        self.perhaps_expected(now, source, datagram)
    }

    /// The same, where some are expected. If it is one that arrived, the old 5-tuple is forgotten.
    #[cold]
    #[inline(never)]
    fn perhaps_expected<'a>(&'a mut self, now: Now, source: &Source, datagram: &'a [u8]) -> Verdict<'a> {
        match self.arrival(now, source, datagram) {
            Ok(None) => self.dropped(DropReason::NoAllocation),
            Ok(Some(index)) => {
                self.settle(now, index, *source, true);
                self.from_client(now, source, datagram)
            }
            Err(Some(reason)) => self.dropped(reason),
            Err(None) => Verdict::Drop(None),
        }
    }

    /// A request from a 5-tuple without an allocation: one that arrives at one of ours, or the answer. It does not end the
    /// old 5-tuple.
    pub(super) fn arriving(&mut self, context: &Context<'_>) -> Result<Option<u32>, Answer> {
        let found = self.arrival(context.now, &context.source, context.request.view.bytes());
        found.map_err(|dropped| dropped.map_or(Answer::Later, Answer::Drop))
    }

    /// Whether an allocation has this 5-tuple, or will.
    pub(super) fn is_known(&mut self, now: Now, client: &Client) -> bool {
        self.forwarding.find(client).is_some() || self.moves.get(now.ms, client).is_some()
    }

    /// Which of our allocations arrives there, if one does. That of another worker is fetched; then the error is why this datagram is
    /// dropped, or none if it will be fed again.
    fn arrival(
        &mut self,
        now: Now,
        source: &Source,
        datagram: &[u8],
    ) -> Result<Option<u32>, Option<DropReason>> {
        let to = self.seat.number();
        let Some(expected) = self.moves.get(now.ms, &source.client) else { return Ok(None) };
        let key = expected.key;
        if expected.owner == to {
            return Ok(self.moves.owned.get(&key).copied());
        }
        if std::mem::replace(&mut expected.asked, true) {
            return Err(Some(DropReason::Moving));
        }
        let Source { client, link } = *source;
        let request = MoveRequest { owner: expected.owner, to, client, link, key };
        self.effects.push_back(Effect::Fetch { request, datagram: datagram.into() });
        Err(None)
    }

    /// The allocation moves to the 5-tuple that arrived; whether because data came from there.
    fn settle(&mut self, now: Now, index: u32, source: Source, spoke: bool) {
        let Source { client, link } = source;
        self.moves.remove(&client);
        let padded = self.is_stream(&client);
        let Some((allocation, entry, session)) = self.allocation(index) else { return };
        let was = (!entry.away).then_some(entry.client);
        if let Some(mobility) = &mut session.mobility {
            mobility.arriving = None;
            mobility.moved((!spoke).then_some(entry.to_peer.0));
        }
        self.stats.mobility(MobilityEvent::Moved);
        self.emit(now, Effect::Moved { allocation, was, client, link, padded, from: None });
    }

    /// Makes an allocation that was given away this worker's, at its client's new 5-tuple or at the old one.
    pub(super) fn own(&mut self, now: Now, moved: Moved, arrived: bool) -> AllocationId {
        let at = if arrived { Some(moved.to()) } else { moved.was() };
        let padded = at.is_some_and(|at| self.is_stream(&at.client));
        let (entry, mut session) = moved.unpack(now, &self.config.peers.own, padded, arrived);
        if !entry.away {
            self.give_up_arrival(&entry.client);
        }
        let id = self.forwarding.install(now.ms, entry);
        if let Some(mobility) = &session.mobility {
            self.moves.forget_foreign(mobility.key.0);
            self.moves.owned.insert(mobility.key.0, id.index);
        }
        self.connections.adopt(self.seat, id.index, &mut session);
        self.sessions.insert(id, session);
        self.limit(now, id.index);
        self.arm_connections(now, id.index);
        id
    }

    /// A genuine ticket of an allocation that is not ours.
    fn ask_owner(&mut self, context: &Context<'_>, ticket: Ticket) -> Answer {
        // One of the two workers that a good ticket names has the allocation: first that one is asked where the client was last.
        // The other is the last step, so that a ticket whose allocation has ended does not travel for ever.
        let Ticket { via, owner, .. } = ticket;
        let own = self.seat.number();
        let next = match context.delivery {
            Delivery::Direct if own == via => owner,
            Delivery::Direct => via,
            Delivery::Forwarded(asked) if asked == owner => own,
            Delivery::Forwarded(_) | Delivery::HandedOver if own == via => owner,
            Delivery::Forwarded(_) | Delivery::HandedOver => own,
        };
        // The ticket is genuine, its allocation has ended.
        if next == own || !self.seat.has(next) {
            return self.fail(context, 437);
        }
        // A retransmission comes from a client that is expected here, for this very allocation.
        let client = context.client();
        let expected = self.moves.get(context.now.ms, client).map(|expected| expected.key);
        if self.forwarding.find(client).is_some() || expected.is_some_and(|key| key != ticket.key) {
            return self.fail(context, 437);
        }
        self.stats.mobility(MobilityEvent::Forwarded);
        let (worker, source, request) = (next, context.source, context.request.view.bytes().into());
        let via = if let Delivery::Forwarded(via) = context.delivery { via } else { own };
        self.effects.push_back(if self.is_stream(&source.client) {
            Effect::HandOver { worker, source, request }
        } else {
            Effect::Forward { worker, via, source, request }
        });
        Answer::Later
    }
}
