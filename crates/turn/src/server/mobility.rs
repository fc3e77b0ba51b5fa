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
//!  Refresh ──▶ Verdict::Forward ────────────────────────────────▶ from_elsewhere ──▶ Reply, Arrival
//!        ◀──── expect(Arrival), send the reply ◀───────────────────────┘
//!  data ─────▶ Verdict::Move(MoveRequest) ──────────────────────▶ export ──▶ Moved, with the relay sockets
//!              import(Moved) ◀─────────────────────────────────────────┘
//! ```

use super::{
    AllocationId, Answer, Client, ClosedReason, CredentialRefusal, DropReason, Effect, Gate, Server, User,
    Verdict,
    allocation::Allocation,
    attribute,
    auth::Who,
    request::Request,
    stats::MobilityEvent,
    ticket::{self, Ticket},
};
use crate::time::Now;

/// For so long a Refresh with the ticket before the last one is known to be a retransmission. RFC 8016 asks for 30 s at the
/// least, RFC 8489 section 6.3.1 for 40.
const REMEMBERED_MS: u64 = 40_000;

/// What a mobile allocation has beyond the others.
pub(super) struct Mobility {
    /// Names it in its tickets for as long as it lives.
    pub(super) key: u64,
    /// Of the ticket that is good.
    counter: u32,
    /// The workers that it names.
    via: u16,
    owner: u16,
    /// The ticket before it.
    spent: Option<Spent>,
    /// The new 5-tuple, from which no data has come so far, and its worker.
    pub(super) arriving: Option<(Client, u16)>,
    /// The last Refresh with a ticket, to answer it again.
    last: Option<LastArrival>,
}

/// The ticket that was presented last. Section 3.2.2 has it good for retransmissions alone; but a client whose connection ended
/// before the answer came, or who gave up repeating itself, has no other. So it is good until there is a sign that the answer has
/// arrived: data from the new 5-tuple, or the next ticket. What keeps others out are the credentials, and that with it a nonce counts
/// only if it holds for the address that it comes from.
struct Spent {
    counter: u32,
    /// Datagrams that the client had sent when the allocation moved, if it did without waiting for one.
    sent: Option<u64>,
}

struct LastArrival {
    client: Client,
    transaction: [u8; 12],
    at_ms: u64,
    granted: u32,
}

impl Mobility {
    /// Times of one worker's clock in another's.
    pub(super) fn rebase(&mut self, theirs: u64, ours: u64) {
        if let Some(last) = &mut self.last {
            last.at_ms = shift(last.at_ms, theirs, ours);
        }
    }

    fn ticket(&self) -> Ticket {
        Ticket { key: self.key, counter: self.counter, via: self.via, owner: self.owner }
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
    pub(super) fn is_repeated(&self, now: Now, client: &Client, transaction: [u8; 12]) -> bool {
        self.last.as_ref().is_some_and(|last| {
            (last.client, last.transaction) == (*client, transaction) && now.ms < last.at_ms + REMEMBERED_MS
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

/// How a datagram reached this worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// From the client.
    Directly,
    /// With its connection, which is ours from now on.
    HandedOver,
    /// From the worker of this number, where the client remains.
    From(u16),
}

/// A client that another worker's allocation arrives at: for [`Server::expect`] of the client's worker.
#[derive(Clone, Debug)]
pub struct Arrival {
    client: Client,
    key: u64,
    owner: u16,
    /// For so long, in milliseconds, the client's first data is waited for: until the allocation expires, unless it is
    /// refreshed over the old 5-tuple.
    patience_ms: u64,
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
    key: u64,
}

/// An allocation between two workers: whoever holds it owns it, quota included. To be given to [`Server::import`], or
/// back by [`Server::take_back`].
#[must_use = "an allocation that is dropped is never released"]
pub struct Moved {
    from: AllocationId,
    client: Client,
    exported_ms: u64,
    allocation: Box<Allocation>,
}

impl Moved {
    /// What it was called by the worker that gave it away: its relay sockets go with it.
    #[must_use]
    pub fn from(&self) -> AllocationId {
        self.from
    }

    /// The client's old 5-tuple, where a stream that is still open has no allocation any more. `None` where the client had gone
    /// from there, so that it may be somebody else's by now.
    #[must_use]
    pub fn was(&self) -> Option<Client> {
        (!self.allocation.away).then_some(self.allocation.client)
    }

    /// The client's new 5-tuple.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client
    }
}

impl<G: Gate> Server<G> {
    /// Feeds a request whose client's connection another worker has handed over ([`Verdict::HandOver`]). From then on
    /// the client is this worker's, and [`Server::from_client`] gets what it sends.
    pub fn from_handed_over<'a>(&'a mut self, now: Now, client: Client, request: &'a [u8]) -> Verdict<'a> {
        self.came = Came::HandedOver;
        let answer = self.answer_bytes(now, &client, request);
        self.came = Came::Directly;
        self.verdict(client, answer)
    }

    /// Feeds a request that worker `via` has forwarded ([`Verdict::Forward`]), where the client remains. The reply goes
    /// back there to be sent, after the arrival has been given to that worker's [`Server::expect`]. A verdict of
    /// [`Verdict::Forward`] means that a third worker has to be asked, in the name of `via`.
    pub fn from_elsewhere<'a>(
        &'a mut self,
        now: Now,
        via: u16,
        client: Client,
        request: &'a [u8],
    ) -> (Verdict<'a>, Option<Arrival>) {
        self.came = Came::From(via);
        let answer = self.answer_bytes(now, &client, request);
        self.came = Came::Directly;
        let arrival = self.announced.take();
        (self.verdict(client, answer), arrival)
    }

    /// Has this worker wait for the first data of a client whose allocation another worker owns. Of too many, the one that
    /// waits longest is forgotten.
    pub fn expect(&mut self, now: Now, arrival: Arrival) {
        let Arrival { client, key, owner, patience_ms } = arrival;
        // Since it asked, it has made an allocation of its own: a 5-tuple has one.
        if self.table.find(&client).is_some() {
            return;
        }
        self.moves.expect(client, key, owner, now.ms + patience_ms);
    }

    /// Gives an allocation away, if it is to go there. `None` if it has ended, or its client is expected elsewhere by now;
    /// the asking worker is told by [`Server::not_moved`]. The relay sockets of [`Moved::from`] go with it, and no effect
    /// tells of its end.
    #[must_use = "an allocation that is dropped is never released"]
    pub fn export(&mut self, now: Now, request: &MoveRequest) -> Option<Moved> {
        let index = *self.moves.owned.get(&request.key)?;
        let (_, allocation) = self.table.at(index)?;
        let expected = allocation.mobility.as_ref()?.arriving;
        if expected != Some((request.client, request.to)) || allocation.tcp.is_some() {
            return None;
        }
        let (from, mut allocation) = self.table.remove(index)?;
        self.timers.cancel(index);
        let without = allocation.away.then_some(allocation.to_peer.0);
        if let Some(mobility) = &mut allocation.mobility {
            mobility.moved(without);
        }
        self.moves.forget(&allocation, self.seat.number());
        self.stats.mobility(MobilityEvent::Exported);
        Some(Moved { from, client: request.client, exported_ms: now.ms, allocation })
    }

    /// Takes over an allocation whose client is here; what the relay sockets belong to from now on. The times in it are
    /// those of the other worker's clock, and are counted on from this one's.
    ///
    /// # Errors
    /// Gives it back where the client has made another allocation by now: to be returned by [`Server::take_back`].
    pub fn import(&mut self, now: Now, moved: Moved) -> Result<AllocationId, Moved> {
        if self.table.find(&moved.client).is_some() {
            return Err(moved);
        }
        let Moved { from, client, exported_ms, mut allocation } = moved;
        let was = (!allocation.away).then_some(allocation.client);
        allocation.client = client;
        allocation.away = false;
        allocation.rebase(exported_ms, now.ms);
        self.moves.remove(&client);
        let id = self.own(now, allocation);
        self.stats.mobility(MobilityEvent::Imported);
        self.effects.push_back(Effect::Moved { allocation: id, was, client, from: Some(from) });
        Ok(id)
    }

    /// Takes back what [`Server::import`] has refused. It lives on under its old 5-tuple; `None`, and [`Effect::Closed`],
    /// if that has another allocation by now.
    pub fn take_back(&mut self, now: Now, moved: Moved) -> Option<AllocationId> {
        let Moved { exported_ms, mut allocation, .. } = moved;
        allocation.rebase(exported_ms, now.ms);
        if !allocation.away && self.table.find(&allocation.client).is_some() {
            // What it was called before may be another's name by now; a slot that was free is nobody's.
            let id = self.table.insert(*allocation);
            if let Some((id, allocation)) = self.table.remove(id.index) {
                self.bury(now, id, *allocation, ClosedReason::Disconnected);
            }
            return None;
        }
        let away = allocation.away;
        let id = self.own(now, allocation);
        if away {
            self.table.detach(id.index);
        }
        Some(id)
    }

    /// The owner has not given the allocation that [`Verdict::Move`] asked for. The client is a stranger again.
    pub fn not_moved(&mut self, client: &Client) {
        let own = self.seat.number();
        if self.moves.waiting(client).is_some_and(|expected| expected.owner != own) {
            self.moves.remove(client);
        }
    }

    /// The owner could not be asked for what [`Verdict::Move`] wants. The next datagram wants it again.
    pub fn not_asked(&mut self, client: &Client) {
        if let Some(expected) = self.moves.waiting(client) {
            expected.asked = false;
        }
    }

    /// The client's connection is closed: its allocation ends, unless it is mobile. Then it lives on until it expires
    /// (a plain one ends with the connection, and RFC 8016 exists to keep it), and drops what peers send until
    /// its client has arrived elsewhere. False if it had no allocation.
    pub fn disconnected(&mut self, now: Now, client: &Client) -> bool {
        if let Some(expected) = self.moves.remove(client) {
            // It never sent data from there; the old 5-tuple remains.
            let index = self.moves.owned.get(&expected.key).copied();
            if let Some((_, allocation)) = index.and_then(|index| self.table.at(index))
                && let Some(mobility) = &mut allocation.mobility
            {
                mobility.arriving = None;
            }
            return false;
        }
        let Some(index) = self.table.find(client) else { return false };
        let own = self.seat.number();
        let Some((_, allocation)) = self.table.at(index) else { return false };
        let Some(mobility) = &allocation.mobility else {
            self.close(now, index, ClosedReason::Disconnected);
            return true;
        };
        match mobility.arriving {
            // The end of the old connection settles it as data from the new one does.
            Some((client, worker)) if worker == own => {
                allocation.away = true;
                self.settle(index, client, false);
            }
            elsewhere => {
                let key = mobility.key;
                allocation.away = true;
                self.table.detach(index);
                self.stats.mobility(MobilityEvent::Kept);
                if let Some((client, to)) = elsewhere {
                    self.effects.push_back(Effect::Move(MoveRequest { owner: own, to, client, key }));
                }
            }
        }
        true
    }

    /// What an Allocate says about mobility (section 3.1.2), or the error code.
    pub(super) fn wants_mobility(&self, request: &Request<'_>) -> Result<bool, u16> {
        match request.get(attribute::MOBILITY_TICKET) {
            None => Ok(false),
            Some([]) if self.config.mobility => Ok(true),
            // Mobility Forbidden.
            Some([]) => Err(405),
            // An Allocate asks for a ticket, and has none to show.
            Some(_) => Err(400),
        }
    }

    /// Makes a new allocation mobile.
    pub(super) fn enrol(&mut self, index: u32) {
        let worker = self.seat.number();
        let Some((_, allocation)) = self.table.at(index) else { return };
        let mut key = rand::random();
        while self.moves.owned.contains_key(&key) {
            key = rand::random();
        }
        self.moves.owned.insert(key, index);
        allocation.mobility = Some(Box::new(Mobility {
            key,
            counter: 0,
            via: worker,
            owner: worker,
            spent: None,
            arriving: None,
            last: None,
        }));
    }

    /// The good ticket of a mobile allocation.
    pub(super) fn ticket(&mut self, index: u32) -> Option<[u8; ticket::LEN]> {
        let (_, allocation) = self.table.at(index)?;
        Some(allocation.mobility.as_ref()?.ticket().seal(&self.config.nonce_key.0))
    }

    /// What a request's ticket says, if it is one of ours.
    pub(super) fn ticket_of(&self, request: &Request<'_>) -> Option<Ticket> {
        let sealed = request.get(attribute::MOBILITY_TICKET).filter(|_| self.config.mobility)?;
        Ticket::open(sealed, &self.config.nonce_key.0)
    }

    /// The allocation that a Refresh with a ticket is about, and the ticket's counter; or the answer: the ticket names it, and the
    /// 5-tuple does not count (section 3.2.2). Nothing has changed by then: see [`Server::arrive`].
    pub(super) fn presented(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
    ) -> Result<(u32, u32), Answer> {
        let signer = who.signer.as_ref();
        if !self.config.mobility {
            return Err(self.fail(request, signer, 405));
        }
        let Some(ticket) = self.ticket_of(request) else {
            self.stats.mobility(MobilityEvent::TicketInvalid);
            return Err(self.fail(request, signer, 400));
        };
        let Some(index) = self.moves.owned.get(&ticket.key).copied() else {
            return Err(self.ask_owner(now, client, request, who, ticket));
        };
        let Some((_, allocation)) = self.table.at(index) else { return Err(self.fail(request, signer, 437)) };
        // A ticket alone is no proof: whoever shows it must be the user of the allocation.
        if !allocation.is_of(who) {
            self.refused(now, client, User::Name(&who.username), CredentialRefusal::WrongUser);
            return Err(self.fail(request, signer, 441));
        }
        let (current, away, sent) = (allocation.client, allocation.away, allocation.to_peer.0);
        let over_udp = allocation.tcp.is_none();
        let patience_ms = allocation.patience_ms(now.ms);
        let Some(mobility) = &allocation.mobility else { return Err(self.fail(request, signer, 437)) };
        // A ticket that was replaced is good for the same request again, and for nothing else.
        if mobility.is_repeated(now, client, request.transaction)
            && let Some(last) = &mobility.last
        {
            let granted = last.granted;
            // What was said of it may have been lost together with the answer.
            if let Came::From(via) = self.came
                && mobility.arriving == Some((*client, via))
            {
                let (key, owner) = (mobility.key, self.seat.number());
                self.announced = Some(Arrival { client: *client, key, owner, patience_ms });
            }
            self.stats.retransmits += 1;
            let ticket = self.ticket(index);
            return Err(self.refreshed(request, who, granted, ticket));
        }
        if !mobility.is_held(ticket.counter, sent) {
            self.stats.mobility(MobilityEvent::TicketReplayed);
            return Err(self.fail(request, signer, 400));
        }
        // Who has not moved needs no ticket (section 3.2.2).
        let arrives = mobility.arriving.is_some_and(|(arriving, _)| arriving == *client);
        // From one that arrives here the good ticket has no sense either; the one before it says that its answer was lost, and another
        // worker may have forgotten whom it expects.
        let senseless = ticket.counter == mobility.counter && !matches!(self.came, Came::From(_));
        if (*client == current && !away) || (arrives && senseless) {
            return Err(self.fail(request, signer, 400));
        }
        // RFC 6062 has no allocation for TCP without a stream to its client; where that is gone, it waits for one.
        let stream = self.config.listener(client.listener).transport.is_stream();
        if !(over_udp || stream) {
            return Err(self.fail(request, signer, 400));
        }
        // One 5-tuple, one allocation (RFC 8656 section 3.2).
        if !arrives && self.is_known(now, client) {
            return Err(self.fail(request, signer, 437));
        }
        Ok((index, ticket.counter))
    }

    /// A Refresh with a ticket, `presented`, has succeeded: the new 5-tuple arrives, and there is a new ticket.
    pub(super) fn arrive(
        &mut self,
        index: u32,
        client: &Client,
        transaction: [u8; 12],
        now: Now,
        granted: u32,
        presented: u32,
    ) {
        let own = self.seat.number();
        let worker = if let Came::From(via) = self.came { via } else { own };
        let Some((_, allocation)) = self.table.at(index) else { return };
        let away = allocation.away;
        let patience_ms = allocation.patience_ms(now.ms);
        let Some(mobility) = &mut allocation.mobility else { return };
        let key = mobility.key;
        mobility.counter = mobility.counter.wrapping_add(1);
        (mobility.via, mobility.owner) = (worker, own);
        mobility.spent = Some(Spent { counter: presented, sent: None });
        mobility.last = Some(LastArrival { client: *client, transaction, at_ms: now.ms, granted });
        // One that came before and never sent data is given up.
        if let Some((earlier, here)) = mobility.arriving.replace((*client, worker))
            && here == own
        {
            self.moves.remove(&earlier);
        }
        self.stats.mobility(MobilityEvent::Arrived);
        if worker != own {
            self.announced = Some(Arrival { client: *client, key, owner: own, patience_ms });
            // There is no old 5-tuple to wait with.
            if away {
                let request = MoveRequest { owner: own, to: worker, client: *client, key };
                self.effects.push_back(Effect::Move(request));
            }
        } else if away {
            self.settle(index, *client, false);
        } else {
            self.moves.expect_own(*client, key, own);
        }
    }

    /// Data from a 5-tuple without an allocation. If it is one that arrived, the old 5-tuple is forgotten.
    #[cold]
    pub(super) fn stranger<'a>(&'a mut self, now: Now, client: &Client, datagram: &'a [u8]) -> Verdict<'a> {
        match self.fetch(now, client) {
            None => self.dropped(DropReason::NoAllocation),
            Some(Fetch::Own(index)) => {
                self.settle(index, *client, true);
                self.from_client(now, *client, datagram)
            }
            Some(Fetch::Asked) => self.dropped(DropReason::Moving),
            Some(Fetch::Ask(request)) => Verdict::Move(request),
        }
    }

    /// A request from a 5-tuple without an allocation: one that arrives at one of ours, or the answer. It does not end the
    /// old 5-tuple.
    pub(super) fn arriving(&mut self, now: Now, client: &Client) -> Result<Option<u32>, Answer> {
        match self.fetch(now, client) {
            None => Ok(None),
            Some(Fetch::Own(index)) => Ok(Some(index)),
            Some(Fetch::Asked) => Err(Answer::Drop(DropReason::Moving)),
            Some(Fetch::Ask(request)) => Err(Answer::Move(request)),
        }
    }

    /// Whether an allocation has this 5-tuple, or will.
    pub(super) fn is_known(&mut self, now: Now, client: &Client) -> bool {
        self.table.find(client).is_some() || self.moves.get(now.ms, client).is_some()
    }

    pub(super) fn fetch(&mut self, now: Now, client: &Client) -> Option<Fetch> {
        let to = self.seat.number();
        let expected = self.moves.get(now.ms, client)?;
        if expected.owner == to {
            let key = expected.key;
            return self.moves.owned.get(&key).copied().map(Fetch::Own);
        }
        if std::mem::replace(&mut expected.asked, true) {
            return Some(Fetch::Asked);
        }
        let request = MoveRequest { owner: expected.owner, to, client: *client, key: expected.key };
        Some(Fetch::Ask(request))
    }

    /// The allocation moves to the 5-tuple that arrived; whether because data came from there.
    fn settle(&mut self, index: u32, client: Client, spoke: bool) {
        self.moves.remove(&client);
        let Some((allocation, found)) = self.table.at(index) else { return };
        let was = (!found.away).then_some(found.client);
        if let Some(mobility) = &mut found.mobility {
            mobility.arriving = None;
            mobility.moved((!spoke).then_some(found.to_peer.0));
        }
        found.away = false;
        self.table.rekey(index, client);
        self.stats.mobility(MobilityEvent::Moved);
        self.effects.push_back(Effect::Moved { allocation, was, client, from: None });
    }

    /// Makes an allocation that another worker exported this one's.
    fn own(&mut self, now: Now, mut allocation: Box<Allocation>) -> AllocationId {
        let mut key = None;
        if let Some(mobility) = &mut allocation.mobility {
            mobility.arriving = None;
            key = Some(mobility.key);
        }
        let id = self.table.insert(*allocation);
        // Only mobile ones are exported: there is a key.
        if let Some(key) = key {
            self.moves.forget_foreign(key);
            self.moves.owned.insert(key, id.index);
        }
        self.rearm(now, id.index);
        id
    }

    /// A genuine ticket of an allocation that is not ours.
    fn ask_owner(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
        ticket: Ticket,
    ) -> Answer {
        let signer = who.signer.as_ref();
        // One of the two workers that a good ticket names has the allocation: first that one is asked where the client was last.
        // The other is the last step, so that a ticket whose allocation has ended does not travel for ever.
        let Ticket { via, owner, .. } = ticket;
        let own = self.seat.number();
        let next = match self.came {
            Came::Directly if own == via => owner,
            Came::Directly => via,
            Came::From(asked) if asked == owner => own,
            Came::From(_) | Came::HandedOver if own == via => owner,
            Came::From(_) | Came::HandedOver => own,
        };
        let owner = (next != own && self.seat.has(next)).then_some(next);
        // The ticket is genuine, its allocation has ended.
        let Some(owner) = owner else { return self.fail(request, signer, 437) };
        // A retransmission comes from a client that is expected here, for this very allocation.
        let expected = self.moves.get(now.ms, client).map(|expected| expected.key);
        if self.table.find(client).is_some() || expected.is_some_and(|key| key != ticket.key) {
            return self.fail(request, signer, 437);
        }
        self.stats.mobility(MobilityEvent::Forwarded);
        if self.config.listener(client.listener).transport.is_stream() {
            Answer::HandOver(owner)
        } else {
            Answer::Forward(owner)
        }
    }
}

pub(super) enum Fetch {
    Own(u32),
    Ask(MoveRequest),
    Asked,
}

/// A time of one worker's clock in another's.
pub(super) fn shift(ms: u64, theirs: u64, ours: u64) -> u64 {
    if ms >= theirs { ours.saturating_add(ms - theirs) } else { ours.saturating_sub(theirs - ms) }
}
