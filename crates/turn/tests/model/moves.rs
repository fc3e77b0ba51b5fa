//! Mobility (RFC 8016) in the model.

use super::prelude::*;
use super::{
    message::{Answer, Told},
    reference::{
        Delivery, Expectation, Expected, Goes, LastArrival, Mobility, Model, Notice, PendingMove, Place,
        Ticket,
    },
    requests::{Asking, Outcome},
};

const REMEMBERED_MS: u64 = 40_000;

impl Mobility {
    fn is_repeated(&self, asking: &Asking<'_>, now: u64) -> bool {
        self.last.is_some_and(|last| {
            (last.client, last.transaction) == (asking.client(), asking.request.transaction)
                && now - last.at < REMEMBERED_MS
        })
    }

    /// Returns true if a client that has sent `sent` datagrams may have no newer ticket.
    fn is_held(&self, counter: u32, sent: u64) -> bool {
        let is_spent =
            |(spent, then): (u32, Option<u64>)| spent == counter && then.is_none_or(|then| then == sent);
        counter == self.counter || self.spent.is_some_and(is_spent)
    }

    pub(super) fn heard_from(&mut self, client: &Client, at_home: bool) {
        if self.arriving.map_or(at_home, |(source, _)| source.client == *client) {
            self.spent = None;
        }
    }

    /// `without` is the number of datagrams before a move that was not caused by data.
    fn moved(&mut self, without: Option<u64>) {
        self.spent = match (self.spent, without) {
            (Some((counter, _)), Some(sent)) => Some((counter, Some(sent))),
            _ => None,
        };
    }
}

impl Model {
    pub(super) fn ticket(&self, number: usize) -> Option<Ticket> {
        let mobility = self.allocations[number].mobility.as_ref()?;
        Some(Ticket { number, counter: mobility.counter })
    }

    /// Returns true if an allocation has this 5-tuple on a worker, or will have it.
    pub(super) fn is_known(&mut self, at: usize, client: &Client) -> bool {
        self.home(at, client).is_some() || self.expected(at, client).is_some()
    }

    pub(super) fn arriving(&mut self, asking: &Asking<'_>) -> Result<Option<usize>, Expected> {
        let at = asking.at;
        let expected = self.expected(at, &asking.client()).map(|expected| *expected);
        if let Some(expected) = expected.filter(|expected| expected.owner == at) {
            return Ok(Some(expected.number));
        }
        if let Delivery::Forwarded { via, .. } = asking.delivery {
            return Err(Expected::Goes(Goes::Decline { via }));
        }
        let Some(Expectation { owner, asked, .. }) = expected else { return Ok(None) };
        if asked {
            return Err(Expected::Drop(DropReason::Moving));
        }
        self.mobility_event(at, MobilityEvent::Forwarded);
        let (worker, via) = (number_of(owner), number_of(at));
        Err(Expected::Goes(Goes::Forward { worker, via, occupied: false }))
    }

    /// Addresses for which the client's nonce may have been issued, if this ticket allows it.
    pub(super) fn learned_before_moving(&self, asking: &Asking<'_>, ticket: Ticket) -> Option<Vec<IpAddr>> {
        let it = &self.allocations[ticket.number];
        let mobility = it.mobility.as_ref()?;
        if ticket.counter != mobility.counter && !mobility.is_repeated(asking, self.ms) {
            return None;
        }
        let arriving = mobility.arriving.map(|(source, _)| source.client.address.ip());
        Some([Some(it.client.address.ip()), arriving].into_iter().flatten().collect())
    }

    pub(super) fn presented(&mut self, asking: &Asking<'_>, ticket: &[u8]) -> Result<(usize, u32), Outcome> {
        let (at, client, now) = (asking.at, asking.client(), self.ms);
        if !self.workers[at].rules.mobility {
            return Err(Ok(self.fail(asking, 405)));
        }
        let Some(ticket) = self.tickets.get(ticket).copied() else {
            self.mobility_event(at, MobilityEvent::TicketInvalid);
            return Err(Ok(self.fail(asking, 400)));
        };
        let number = ticket.number;
        if !self.owns(at, number) {
            return Err(self.ask_owner(asking, ticket));
        }
        let it = &self.allocations[number];
        if (it.realm, it.user) != asking.who {
            return Err(Ok(self.wrong_user(asking)));
        }
        let Some(mobility) = it.mobility.clone() else { return Err(Ok(self.fail(asking, 437))) };
        let arriving = mobility.arriving.filter(|(source, _)| source.client == client);
        if let Some(last) = mobility.last.filter(|_| mobility.is_repeated(asking, now)) {
            // The announcement may have been lost together with the response.
            self.announce_arrival(asking, number);
            self.stats(at).retransmits += 1;
            let told = Told::Refreshed { lifetime: last.granted, ticket: Some(number) };
            return Err(Ok(self.succeed(asking, told)));
        }
        if !mobility.is_held(ticket.counter, it.to_peer.0) {
            self.mobility_event(at, MobilityEvent::TicketReplayed);
            return Err(Ok(self.fail(asking, 400)));
        }
        let at_home = it.client == client && !it.away;
        let is_newest = ticket.counter == mobility.counter;
        let arrives = arriving.is_some();
        if at_home || (arrives && is_newest) {
            self.announce_arrival(asking, number);
            return Err(Ok(self.fail(asking, 400)));
        }
        if self.allocations[number].transport == RelayTransport::Tcp && !Self::is_stream(&client) {
            return Err(Ok(self.fail(asking, 400)));
        }
        let occupied = matches!(asking.delivery, Delivery::Forwarded { occupied: true, .. });
        if occupied || (!arrives && self.is_known(at, &client)) {
            return Err(Ok(self.fail(asking, 437)));
        }
        Ok((number, ticket.counter))
    }

    fn ask_owner(&mut self, asking: &Asking<'_>, ticket: Ticket) -> Outcome {
        let (at, client) = (asking.at, asking.client());
        let it = &self.allocations[ticket.number];
        let next = match it.mobility.as_ref().filter(|_| it.place != Place::Gone) {
            Some(mobility) if mobility.owner == at && !Self::is_stream(&client) => {
                return Err(Expected::Drop(DropReason::Moving));
            }
            Some(mobility) if mobility.owner != at => mobility.owner,
            _ => return Ok(self.fail(asking, 437)),
        };
        let (via, occupied) = match asking.delivery {
            Delivery::Forwarded { via, occupied } => (via, occupied),
            _ => {
                let other =
                    self.expected(at, &client).is_some_and(|expected| expected.number != ticket.number);
                (number_of(at), other || self.home(at, &client).is_some())
            }
        };
        self.mobility_event(at, MobilityEvent::Forwarded);
        let worker = number_of(next);
        Err(Expected::Goes(if Self::is_stream(&client) && !occupied {
            Goes::HandOver { worker }
        } else {
            Goes::Forward { worker, via, occupied }
        }))
    }

    pub(super) fn arrive(&mut self, asking: &Asking<'_>, number: usize, granted: u32, presented: u32) {
        let (at, source, now) = (asking.at, asking.source, self.ms);
        let worker = match asking.delivery {
            Delivery::Forwarded { via, .. } => usize::from(via),
            _ => at,
        };
        let (client, transaction) = (asking.client(), asking.request.transaction);
        let it = &mut self.allocations[number];
        let away = it.away;
        let mobility = it.mobility.as_mut().expect("the allocation has a ticket");
        mobility.counter += 1;
        mobility.spent = Some((presented, None));
        mobility.last = Some(LastArrival { client, transaction, at: now, granted });
        let earlier = mobility.arriving.replace((source, worker));
        self.forget(at, number);
        if let Some((Source { client: earlier, .. }, there)) = earlier
            && (earlier, there) != (client, worker)
        {
            self.arrives_no_more(at, there, earlier, number);
        }
        self.mobility_event(at, MobilityEvent::Arrived);
        self.displace(at, &client);
        self.workers[at].expected.push(Expectation { client, number, owner: at, asked: false });
        self.announce_arrival(asking, number);
        if away && worker == at {
            self.settle(at, number, source, false);
        } else if away {
            self.moving.push_back(number);
        }
    }

    pub(super) fn arriving_at(&self, number: usize) -> Option<(Source, usize)> {
        self.allocations[number].mobility.as_ref()?.arriving
    }

    fn announce_arrival(&mut self, asking: &Asking<'_>, number: usize) {
        let (client, owner) = (asking.client(), asking.at);
        let arrives = self.arriving_at(number).is_some_and(|(source, _)| source.client == client);
        if arrives && matches!(asking.delivery, Delivery::Forwarded { .. }) {
            self.announce(PendingMove { client, number, owner });
        }
    }

    /// Moves the allocation within its worker, because its client sent data or has no other 5-tuple.
    pub(super) fn settle(&mut self, at: usize, number: usize, source: Source, spoke: bool) {
        let Source { client, link } = source;
        self.workers[at].expected.retain(|it| it.client != client);
        let it = &mut self.allocations[number];
        let was = (!it.away).then_some(it.client);
        (it.client, it.link, it.away) = (client, link, false);
        let sent = it.to_peer.0;
        if let Some(mobility) = &mut it.mobility {
            mobility.arriving = None;
            mobility.moved((!spoke).then_some(sent));
        }
        let (allocation, padded) = (it.id(), Self::is_stream(&client));
        self.mobility_event(at, MobilityEvent::Moved);
        self.told.push_back(Effect::Moved { allocation, was, client, link, padded, from: None });
    }

    /// Cancels the pending move to this client; if another worker owns the allocation, that worker is
    /// notified.
    fn displace(&mut self, at: usize, client: &Client) {
        let expected = &mut self.workers[at].expected;
        let Some(place) = expected.iter().position(|it| it.client == *client) else { return };
        let Expectation { number, owner, .. } = expected.remove(place);
        if owner != at {
            let pending_move = PendingMove { client: *client, number, owner };
            self.notices.push_back(Notice::MoveOver { to: owner, pending_move });
        } else if let Some(mobility) = &mut self.allocations[number].mobility
            && mobility.arriving.is_some_and(|(source, _)| source.client == *client)
        {
            mobility.arriving = None;
        }
    }

    pub(super) fn arrives_no_more(&mut self, at: usize, worker: usize, client: Client, number: usize) {
        if worker != at {
            let pending_move = PendingMove { client, number, owner: at };
            self.notices.push_back(Notice::MoveOver { to: worker, pending_move });
        }
    }

    pub(super) fn move_over(&mut self, at: usize, via: usize, pending_move: PendingMove) {
        let PendingMove { client, number, owner } = pending_move;
        if owner != at {
            let expected = &mut self.workers[at].expected;
            expected.retain(|it| (it.client, it.number, it.owner) != (client, number, owner));
            return;
        }
        let arriving = self.arriving_at(number).map(|(source, worker)| (source.client, worker));
        if !self.owns(at, number) || arriving != Some((client, via)) {
            return;
        }
        self.forget(at, number);
        if let Some(mobility) = &mut self.allocations[number].mobility {
            mobility.arriving = None;
        }
    }

    pub(super) fn declined(&mut self, at: usize, owner: usize, client: &Client) {
        self.workers[at].expected.retain(|it| it.client != *client || it.owner != owner);
    }

    pub(super) fn expect(&mut self, at: usize, pending_move: PendingMove) {
        let PendingMove { client, number, owner } = pending_move;
        if self.home(at, &client).is_some() {
            return;
        }
        let is_same = |it: &Expectation| (it.client, it.number, it.owner) == (client, number, owner);
        if self.workers[at].expected.iter().any(is_same) {
            return;
        }
        self.displace(at, &client);
        let expected = &mut self.workers[at].expected;
        expected.retain(|it| it.owner == at || it.number != number);
        expected.push(Expectation { client, number, owner, asked: false });
    }

    pub(super) fn export(&mut self, at: usize, number: usize, client: Client, to: usize) -> bool {
        let now = self.ms;
        let it = &mut self.allocations[number];
        let arriving = it.mobility.as_ref().and_then(|mobility| mobility.arriving);
        let is_its = arriving.is_some_and(|(source, worker)| (source.client, worker) == (client, to));
        if !it.is_at(at) || !is_its || it.transport == RelayTransport::Tcp {
            return false;
        }
        let without = it.away.then_some(it.to_peer.0);
        if let Some(mobility) = &mut it.mobility {
            mobility.moved(without);
        }
        let allocation = it.id();
        it.place = Place::Travels(allocation);
        it.mobility.as_mut().expect("the allocation is mobile").owner = to;
        it.pack(now);
        self.forget(at, number);
        self.mobility_event(at, MobilityEvent::Exported);
        self.told.push_back(Effect::Exported { allocation });
        true
    }

    pub(super) fn import(
        &mut self,
        at: usize,
        number: usize,
        to: Source,
        id: Option<AllocationSlot>,
    ) -> bool {
        let (client, link) = (to.client, to.link);
        let Some(id) = id else { return self.home(at, &client).is_none() };
        let it = &mut self.allocations[number];
        let (from, was) = (it.id(), (!it.away).then_some(it.client));
        (it.client, it.link, it.away) = (client, link, false);
        self.settles_at(at, number, id);
        self.mobility_event(at, MobilityEvent::Imported);
        let padded = Self::is_stream(&client);
        let from = Some(from);
        self.told.push_back(Effect::Moved { allocation: id, was, client, link, padded, from });
        self.tell_bindings(at, number);
        // Ends the bindings that a reload has refused in the meantime.
        self.end_refused(at, number);
        self.shorten(at, number);
        true
    }

    /// Takes back an allocation that another worker refused. The allocation ends if its 5-tuple is already
    /// taken.
    pub(super) fn take_back(&mut self, at: usize, number: usize, id: AllocationSlot) {
        let it = &self.allocations[number];
        let is_taken = !it.away && self.home(at, &it.client).is_some();
        self.settles_at(at, number, id);
        self.told.push_back(Effect::Returned { allocation: id });
        if is_taken {
            self.close(at, number, ClosedReason::Disconnected);
        } else {
            self.tell_bindings(at, number);
            self.end_refused(at, number);
            self.shorten(at, number);
        }
    }

    pub(super) fn settles_at(&mut self, at: usize, number: usize, id: AllocationSlot) {
        let now = self.ms;
        let it = &mut self.allocations[number];
        it.unpack(now);
        it.place = Place::At(at, id);
        if let Some(mobility) = &mut it.mobility {
            mobility.owner = at;
        }
        let (client, away) = (it.client, it.away);
        self.permit_by_channels(at, number, false);
        self.workers[at].expected.retain(|it| it.owner == at || it.number != number);
        if !away {
            self.displace(at, &client);
        }
    }

    pub(super) fn not_moved(&mut self, at: usize, client: &Client) {
        self.workers[at].expected.retain(|it| it.client != *client || it.owner == at);
    }

    pub(super) fn not_asked(&mut self, at: usize, client: &Client) {
        for expected in self.workers[at].expected.iter_mut().filter(|it| it.client == *client) {
            expected.asked = false;
        }
    }

    pub(super) fn disconnected(&mut self, at: usize, client: &Client) -> bool {
        self.workers[at].waiting.retain(|it| it.source.client != *client);
        if self.workers[at].expected.iter().any(|it| it.client == *client) {
            self.displace(at, client);
            return false;
        }
        let Some(number) = self.home(at, client) else { return false };
        let it = &mut self.allocations[number];
        let Some(mobility) = &it.mobility else {
            self.close(at, number, ClosedReason::Disconnected);
            return true;
        };
        let arriving = mobility.arriving;
        it.away = true;
        let allocation = it.id();
        self.told.push_back(Effect::Away { allocation });
        match arriving {
            Some((source, worker)) if worker == at => self.settle(at, number, source, false),
            elsewhere => {
                self.mobility_event(at, MobilityEvent::Kept);
                if elsewhere.is_some() {
                    self.moving.push_back(number);
                }
            }
        }
        true
    }

    pub(super) fn remember_ticket(&mut self, answer: &Answer, bytes: Option<Vec<u8>>) {
        let number = match answer.told {
            Told::Allocated { ticket, .. } | Told::Refreshed { ticket, .. } => ticket,
            _ => None,
        };
        if let (Some(number), Some(bytes)) = (number, bytes)
            && let Some(ticket) = self.ticket(number)
        {
            let before = self.tickets.insert(bytes, ticket);
            assert!(
                before.is_none_or(|before| before == ticket),
                "one ticket for both {before:?} and {ticket:?}"
            );
        }
    }
}

fn number_of(worker: usize) -> u16 {
    u16::try_from(worker).expect("few enough workers")
}
