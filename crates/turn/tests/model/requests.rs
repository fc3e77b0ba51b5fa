//! Requests, with the checks in the RFC's order. Refresh with a ticket is in `moves.rs`.

use super::prelude::*;
use std::net::Ipv6Addr;

use turnpike_turn::server::stats::ALLOCATION_MS;

use super::{
    cast,
    message::{Answer, Request, Said, Told, Wanted, Wish as Asked},
    reference::{
        Allocation, Connection, Delivery, Expected, Goes, Model, Nonce, Notice, Once, Pending, Place, Port,
        Stage, Verdict, Waiting, Wish, family_of, nameless, number_of,
    },
    step::Setup,
};

const NONCE_LIFETIME: u64 = 3600;
const PERMISSION_MS: u64 = 300_000;
const CHANNEL_MS: u64 = 600_000;
const PATIENCE_MS: u64 = 30_000;
/// Maximum number of requests from one network that wait for the store.
const WAITING_EACH: usize = 32;
/// The limit per network applies only while at least this many requests wait on a worker.
const WAITING_FREELY: usize = 512;

pub(super) type Outcome = Result<Answer, Expected>;

pub(super) struct Asking<'a> {
    pub(super) at: usize,
    pub(super) source: Source,
    pub(super) delivery: Delivery,
    pub(super) request: &'a Request,
    pub(super) said: Said,
    /// Realm and user, once authenticated.
    pub(super) who: (&'static str, &'static str),
    /// The credential is correct but expired.
    expired: bool,
    issued: u64,
    asked: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Fresh,
    Stale,
    Foreign,
    /// Decided by the worker that owns the allocation.
    ForOwner,
}

impl Asking<'_> {
    pub(super) fn client(&self) -> Client {
        self.source.client
    }

    pub(super) fn answer(&self, told: Told) -> Answer {
        Answer { transaction: self.request.transaction, said: self.said.clone(), told }
    }
}

impl Model {
    pub(super) fn request(
        &mut self,
        at: usize,
        source: Source,
        delivery: Delivery,
        request: &Request,
    ) -> Expected {
        self.stats(at).requests[request.wanted.method()] += 1;
        if matches!(request.wanted, Wanted::Binding) {
            let told = if request.strange {
                self.error(at, 420);
                Told::Error(420)
            } else {
                self.stats(at).successes[0] += 1;
                Told::Mapped(source.client.address)
            };
            let answer = Answer { transaction: request.transaction, said: Said::ByNobody, told };
            return Expected::Reply { to: source, answer };
        }
        self.respond(at, source, delivery, request, None)
    }

    pub(super) fn looked_up(&mut self, at: usize, waited: Option<Waiting>, found: Verdict) -> Expected {
        let Some(Waiting { source, delivery, request, asked, .. }) = waited else {
            return self.dropped(at, DropReason::LookupOver);
        };
        self.respond(at, source, delivery, &request, Some((found, asked)))
    }

    fn respond(
        &mut self,
        at: usize,
        source: Source,
        delivery: Delivery,
        request: &Request,
        late: Option<(Verdict, u64)>,
    ) -> Expected {
        let (said, who) = (Said::ByNobody, (REALM, ""));
        let (found, asked) = late.unzip();
        let asked = asked.unwrap_or(self.ms);
        let mut asking =
            Asking { at, source, delivery, request, said, who, expired: false, issued: 0, asked };
        match (self.answer(&mut asking, found), delivery) {
            (Ok(answer), Delivery::Forwarded { via, .. }) => {
                let pending_move = self.take_announced();
                Expected::Answered { via, source, answer, pending_move }
            }
            (Ok(answer), _) => Expected::Reply { to: source, answer },
            (Err(Expected::Drop(reason)), _) => self.dropped(at, reason),
            (Err(goes), _) => goes,
        }
    }

    fn answer(&mut self, asking: &mut Asking<'_>, found: Option<Verdict>) -> Outcome {
        if let Err(outcome) = self.authenticate(asking, found) {
            return outcome;
        }
        if asking.request.strange {
            return Ok(self.fail(asking, 420));
        }
        let concerns = match &asking.request.wanted {
            Wanted::Allocate(_) | Wanted::ConnectionBind(_) => true,
            Wanted::Refresh { ticket, .. } => ticket.is_some(),
            _ => false,
        };
        if concerns && asking.client() == cast::client(cast::LOOP) {
            self.stats(asking.at).loop_refusals += 1;
            return Ok(self.fail(asking, 403));
        }
        match &asking.request.wanted {
            Wanted::Binding => Err(Expected::Drop(DropReason::UnknownMethod)),
            Wanted::Allocate(wish) => self.allocate(asking, wish),
            Wanted::Refresh { lifetime, family, ticket } => {
                self.refresh(asking, *lifetime, *family, ticket.as_deref())
            }
            Wanted::Permit(peers) => self.permit(asking, peers),
            Wanted::Bind { number, peer } => self.bind(asking, *number, *peer),
            Wanted::Connect(peer) => self.connect(asking, *peer),
            Wanted::ConnectionBind(id) => self.connection_bind(asking, *id),
        }
    }

    fn authenticate(&mut self, asking: &mut Asking<'_>, found: Option<Verdict>) -> Result<(), Outcome> {
        let at = asking.at;
        let Some(claim) = &asking.request.claim else { return Err(self.challenge(asking, 401, REALM)) };
        if !self.workers[at].rules.realms().contains(&claim.realm) {
            self.stats(at).credentials_refused[3] += 1;
            return Err(self.challenge(asking, 401, REALM));
        }
        let standing = self.standing(asking);
        let unix = self.unix;
        let verdict = found.unwrap_or(if self.prompt { truth(asking.request) } else { Verdict::Later });
        // If the credential has expired, a wrong key is reported as expired too.
        let has_expired = cast::until(claim.user).is_some_and(|until| until < unix);
        let verdict = if verdict == Verdict::WrongKey && has_expired && found.is_some() {
            Verdict::Expired
        } else {
            verdict
        };
        let refused = match verdict {
            Verdict::Good if matches!(standing, Standing::Stale | Standing::Foreign) => {
                return Err(self.challenge(asking, 438, claim.realm));
            }
            Verdict::Good => {
                asking.who = (claim.realm, claim.user);
                asking.expired = cast::until(claim.user).is_some_and(|until| until < unix);
                asking.said = Said::To { user: claim.user, realm: claim.realm, scheme: claim.scheme };
                asking.issued = self.nonces.get(&claim.nonce).map_or(0, |nonce| nonce.unix);
                return Ok(());
            }
            Verdict::Later if standing != Standing::Fresh => {
                return Err(self.challenge(asking, 438, claim.realm));
            }
            Verdict::Later => return Err(self.look_up(asking)),
            Verdict::Unavailable if self.workers[at].rules.store_drops => {
                return Err(Err(Expected::Drop(DropReason::LookupOver)));
            }
            Verdict::Unavailable => return Err(Ok(self.fail(asking, 500))),
            Verdict::NoSuchUser => 0,
            Verdict::Expired => 1,
            Verdict::WrongKey => 2,
        };
        if standing == Standing::ForOwner {
            return Err(self.challenge(asking, 438, claim.realm));
        }
        self.stats(at).credentials_refused[refused] += 1;
        Err(self.challenge(asking, 401, claim.realm))
    }

    fn challenge(&mut self, asking: &Asking<'_>, code: u16, realm: &'static str) -> Outcome {
        self.error(asking.at, code);
        let claim = asking.request.claim.as_ref().filter(|claim| code == 401 && claim.realm == realm);
        let repeats =
            claim.filter(|_| self.at_home(asking) == Standing::Fresh).map(|claim| claim.nonce.clone());
        self.stats(asking.at).nonces += u64::from(repeats.is_none());
        let told = Told::Challenge { code, realm, repeats };
        Ok(Answer { transaction: asking.request.transaction, said: Said::ByNobody, told })
    }

    fn look_up(&mut self, asking: &Asking<'_>) -> Outcome {
        let Asking { at, source, delivery, request, .. } = *asking;
        let is_same =
            |it: &Waiting| (it.source.client, it.request.transaction) == (source.client, request.transaction);
        let of_network = network(source.client.address.ip());
        let waiting = &mut self.workers[at].waiting;
        if waiting.iter().any(is_same) {
            return Err(Expected::Drop(DropReason::LookupPending));
        }
        let of_network = |it: &&Waiting| network(it.source.client.address.ip()) == of_network;
        let is_crowded = waiting.len() >= WAITING_FREELY;
        if is_crowded && waiting.iter().filter(of_network).count() >= WAITING_EACH {
            let is_told = Self::is_stream(&source.client) && !self.workers[at].rules.store_drops;
            return if is_told {
                Ok(self.fail(asking, 500))
            } else {
                Err(Expected::Drop(DropReason::LookupLimit))
            };
        }
        let (asked, until) = (self.ms, self.ms + 10_000);
        let waits = Waiting { source, delivery, request: request.clone(), asked, until, lookup: None };
        self.workers[at].waiting.push(waits);
        let claim = request.claim.as_ref().expect("a signed request");
        Err(Expected::Goes(Goes::LookUp { user: claim.user, realm: claim.realm }))
    }

    /// Validity of the nonce for the client's own address.
    fn at_home(&self, asking: &Asking<'_>) -> Standing {
        let claim = asking.request.claim.as_ref().expect("a signed request");
        let nonce = self.nonces.get(&claim.nonce).copied();
        let ip = asking.client().address.ip();
        nonce.map_or(Standing::Foreign, |nonce| judge(nonce, claim.realm, ip, self.unix))
    }

    fn standing(&mut self, asking: &Asking<'_>) -> Standing {
        let claim = asking.request.claim.as_ref().expect("a signed request");
        let (nonce, unix) = (self.nonces.get(&claim.nonce).copied(), self.unix);
        let judge = |ip: IpAddr| nonce.map_or(Standing::Foreign, |nonce| judge(nonce, claim.realm, ip, unix));
        let own = self.at_home(asking);
        if own != Standing::Foreign {
            return own;
        }
        let learned = match &asking.request.wanted {
            Wanted::ConnectionBind(id) if self.may_bind_to(asking) => {
                if self.is_elsewhere(asking.at, *id) {
                    return Standing::ForOwner;
                }
                let found = self.connection(asking.at, *id);
                found.map(|(number, _)| vec![self.allocations[number].client.address.ip()])
            }
            Wanted::Refresh { ticket: Some(ticket), .. } if self.workers[asking.at].rules.mobility => {
                match self.tickets.get(ticket).copied() {
                    None => None,
                    Some(ticket) if !self.owns(asking.at, ticket.number) => return Standing::ForOwner,
                    Some(ticket) => self.learned_before_moving(asking, ticket),
                }
            }
            _ => None,
        };
        let standings = learned.into_iter().flatten().map(judge);
        standings.into_iter().find(|it| *it != Standing::Foreign).unwrap_or(Standing::Foreign)
    }

    pub(super) fn fail(&mut self, asking: &Asking<'_>, code: u16) -> Answer {
        self.error(asking.at, code);
        asking.answer(Told::Error(code))
    }

    pub(super) fn succeed(&mut self, asking: &Asking<'_>, told: Told) -> Answer {
        self.stats(asking.at).successes[asking.request.wanted.method()] += 1;
        asking.answer(told)
    }

    pub(super) fn wrong_user(&mut self, asking: &Asking<'_>) -> Answer {
        self.stats(asking.at).credentials_refused[4] += 1;
        self.fail(asking, 441)
    }

    fn refuse_peer(&mut self, asking: &Asking<'_>, ip: IpAddr) -> Answer {
        let by = self.workers[asking.at].rules.refused_by(asking.who.0, ip);
        self.stats(asking.at).peer_refusals[by] += 1;
        self.fail(asking, 403)
    }

    pub(super) fn owned(&mut self, asking: &Asking<'_>) -> Result<usize, Outcome> {
        let home = self.home(asking.at, &asking.client());
        let found = match home {
            None => self.arriving(asking).map_err(Err)?,
            found => found,
        };
        let Some(number) = found.filter(|number| self.allocations[*number].pending.is_none()) else {
            return Err(Ok(self.fail(asking, 437)));
        };
        let it = &self.allocations[number];
        if (it.realm, it.user) != asking.who {
            return Err(Ok(self.wrong_user(asking)));
        }
        if let Some(mobility) = &mut self.allocations[number].mobility {
            mobility.heard_from(&asking.client(), home.is_some());
        }
        Ok(number)
    }

    fn allocate(&mut self, asking: &Asking<'_>, asked: &Asked) -> Outcome {
        let (at, client) = (asking.at, asking.client());
        if let Some(number) = self.home(at, &client) {
            let it = &self.allocations[number];
            let same = it.transaction == asking.request.transaction && (it.realm, it.user) == asking.who;
            if !same {
                return Ok(self.fail(asking, 437));
            }
            if it.pending.is_some() {
                return Err(Expected::Drop(DropReason::OpenPending));
            }
            self.stats(at).retransmits += 1;
            let told = self.allocated(number);
            return Ok(self.succeed(asking, told));
        }
        if self.arriving(asking)?.is_some() {
            return Ok(self.fail(asking, 437));
        }
        if asking.expired {
            self.stats(at).credentials_refused[1] += 1;
            return self.challenge(asking, 401, asking.who.0);
        }
        let (first, second, address_error) = match self.wish(asking, asked) {
            Ok(wish) => wish,
            Err(code) => return Ok(self.fail(asking, code)),
        };
        if self.workers[at].draining {
            self.stats(at).drain_refusals += 1;
            return Ok(self.fail(asking, 508));
        }
        let (realm, user) = asking.who;
        let prefix = network(client.address.ip());
        let Setup { per_user, per_prefix, total, .. } = self.limits;
        if self.held(realm, user) >= per_user {
            self.stats(at).quota_refusals[0] += 1;
            return Ok(self.fail(asking, 486));
        }
        if per_prefix > 0 && self.held_at(prefix) >= per_prefix {
            self.stats(at).quota_refusals[2] += 1;
            return Ok(self.fail(asking, 486));
        }
        if self.held_by_all() >= total {
            self.stats(at).quota_refusals[1] += 1;
            return Ok(self.fail(asking, 508));
        }
        let transaction = asking.request.transaction;
        // A replay of a granted request, from another port or too late.
        let Some(before) = self.record((Once::Allocate, transaction), asking.issued) else {
            return self.challenge(asking, 438, realm);
        };
        let pending = Pending {
            said: asking.said.clone(),
            mobile: asked.ticket.is_some(),
            recorded: (asking.issued, before),
            asked: asking.asked,
        };
        let number = self.allocations.len();
        self.allocations.push(Allocation {
            place: Place::Gone,
            name: nameless(),
            client,
            link: asking.source.link,
            away: false,
            realm,
            user,
            prefix,
            transport: first.transport,
            transaction,
            granted: self.within_credential(at, user, granted(asked.lifetime), 1),
            reservation: None,
            address_error,
            pending: Some(pending),
            relays: [None; 2],
            former: [None; 2],
            permissions: Default::default(),
            channels: Default::default(),
            connections: Vec::new(),
            mobility: None,
            to_peer: (0, 0),
            to_client: (0, 0),
            opened: self.ms,
            since: self.ms,
        });
        Err(Expected::Goes(Goes::Open { number, first, second }))
    }

    #[expect(
        clippy::type_complexity,
        reason = "one family, perhaps a second, and the error code for a missing one"
    )]
    fn wish(
        &self,
        asking: &Asking<'_>,
        asked: &Asked,
    ) -> Result<(Wish, Option<Family>, Option<(Family, u16)>), u16> {
        let rules = &self.workers[asking.at].rules;
        let transport = match asked.transport {
            17 => RelayTransport::Udp,
            6 if !rules.tcp => return Err(442),
            6 if !Self::is_stream(&asking.client()) || asked.port != Port::Any => return Err(400),
            6 => RelayTransport::Tcp,
            _ => return Err(442),
        };
        let wish = |family| Wish { family, transport, port: asked.port };
        let one = match (asked.port, asked.family, asked.additional) {
            (Port::Reserved(token), None, None) => {
                Ok((wish(if token[7] & 1 == 0 { Family::V4 } else { Family::V6 }), None, None))
            }
            (Port::Reserved(_), ..) => Err(400_u16),
            (_, None | Some(1), None) => Ok((wish(Family::V4), None, None)),
            (_, Some(2), None) if rules.v6 => Ok((wish(Family::V6), None, None)),
            (_, Some(_), None) => Err(440),
            (port, None, Some(2)) if port != Port::Pair => {
                if rules.v6 {
                    Ok((wish(Family::V4), Some(Family::V6), None))
                } else {
                    Ok((wish(Family::V4), None, Some((Family::V6, 440))))
                }
            }
            (_, _, Some(_)) => Err(400),
        }?;
        match &asked.ticket {
            Some(ticket) if !ticket.is_empty() => Err(400),
            Some(_) if !rules.mobility => Err(405),
            _ => Ok(one),
        }
    }

    pub(super) fn allocated(&self, number: usize) -> Told {
        let it = &self.allocations[number];
        Told::Allocated {
            relayed: it.relays.iter().flatten().map(|(address, _)| *address).collect(),
            lifetime: it.granted,
            reservation: it.reservation,
            ticket: it.mobility.as_ref().map(|_| number),
            mapped: it.client.address,
            address_error: it.address_error,
        }
    }

    pub(super) fn opened(
        &mut self,
        at: usize,
        id: AllocationSlot,
        families: [Family; 2],
        first: OpenResult,
        second: Option<OpenResult>,
    ) -> Expected {
        let results = [Some(first), second];
        let Some(number) = self.named(at, id) else {
            for result in results.into_iter().flatten() {
                if let OpenResult::Opened { relayed } = result {
                    self.tell_unused(RelayId { allocation: id, family: family_of(relayed.ip()) });
                }
            }
            return self.dropped(at, DropReason::StaleRelay);
        };
        let now = self.ms;
        let it = &mut self.allocations[number];
        let Some(pending) = it.pending.take() else { return self.dropped(at, DropReason::StaleRelay) };
        let until = now + u64::from(it.granted) * 1000;
        let to = Source { client: it.client, link: it.link };
        let transaction = it.transaction;
        let code = |result| if result == OpenResult::UnsupportedFamily { 440 } else { 508 };
        let mut relayed = Vec::new();
        for (family, result) in families.into_iter().zip(results) {
            match result {
                Some(OpenResult::Opened { relayed: address }) => {
                    it.relays[family as usize] = Some((address, until));
                    relayed.push(address);
                }
                Some(failed) => it.address_error = Some((family, code(failed))),
                None => {}
            }
        }
        let answer = |told| Answer { transaction, said: pending.said.clone(), told };
        let Some(one) = relayed.first().copied() else {
            it.place = Place::Gone;
            self.withdraw(transaction, pending.recorded);
            let code = code(first);
            self.error(at, code);
            return Expected::Reply { to, answer: answer(Told::Error(code)) };
        };
        it.opened = now;
        let (realm, username) = (Arc::from(it.realm), it.user.into());
        if pending.mobile {
            it.mobility = Some(super::reference::Mobility {
                counter: 0,
                owner: at,
                spent: None,
                arriving: None,
                last: None,
            });
        }
        let name = it.name;
        let after = now - pending.asked;
        let stats = self.stats(at);
        stats.allocations_opened += 1;
        stats.allocation_ms += after;
        stats.allocation_times[ALLOCATION_MS.iter().filter(|most| after > **most).count()] += 1;
        stats.successes[1] += 1;
        self.told.push_back(Effect::Opened {
            allocation: id,
            id: name,
            client: to.client,
            link: to.link,
            expires_ms: Self::clock(at, until),
            realm,
            username,
            relayed: (one, relayed.get(1).copied()),
        });
        Expected::Reply { to, answer: answer(self.allocated(number)) }
    }

    fn refresh(
        &mut self,
        asking: &Asking<'_>,
        proposed: Option<u32>,
        family: Option<u8>,
        ticket: Option<&[u8]>,
    ) -> Outcome {
        let (at, client, now) = (asking.at, asking.client(), self.ms);
        let (transaction, (_, user)) = (asking.request.transaction, asking.who);
        if proposed == Some(0) && self.was_deleted(at, client, transaction, user) {
            self.stats(at).retransmits += 1;
            return Ok(self.succeed(asking, Told::Refreshed { lifetime: 0, ticket: None }));
        }
        let found = match ticket {
            Some(ticket) => self.presented(asking, ticket).map(|(number, spent)| (number, Some(spent))),
            None => self.owned(asking).map(|number| (number, None)),
        };
        let (number, spent) = match found {
            Ok(found) => found,
            Err(outcome) => return outcome,
        };
        let family = match family {
            None => None,
            Some(1) => Some(Family::V4),
            Some(2) => Some(Family::V6),
            Some(_) => return Ok(self.fail(asking, 443)),
        };
        if family.is_some_and(|family| !self.allocations[number].has(family)) {
            return Ok(self.fail(asking, 443));
        }
        // A replay of a request that has moved the allocation.
        if spent.is_some() && self.record((Once::Move, transaction), asking.issued).is_none() {
            return self.challenge(asking, 438, asking.who.0);
        }
        let lifetime = match proposed {
            Some(0) => 0,
            proposed => self.within_credential(at, self.allocations[number].user, granted(proposed), 2),
        };
        let left = self.credential_left(at, self.allocations[number].user);
        let it = &mut self.allocations[number];
        let is_one_of_two = it.relays.iter().flatten().count() == 2;
        match family {
            Some(family) if lifetime == 0 && is_one_of_two => {
                if spent.is_none() {
                    self.remember_deletion(asking);
                }
                self.close_relay(at, number, family);
            }
            _ if lifetime == 0 => {
                self.remember_deletion(asking);
                self.close(at, number, ClosedReason::Deleted);
                return Ok(self.succeed(asking, Told::Refreshed { lifetime: 0, ticket: None }));
            }
            family => {
                // During an allocation's last two seconds, the response grants more time than is left.
                let lifetime_ms = u64::from(lifetime) * 1000;
                let until = now + left.map_or(lifetime_ms, |left| lifetime_ms.min(left * 1000));
                for of in [Family::V4, Family::V6] {
                    if let Some((_, expires)) = &mut it.relays[of as usize]
                        && family.is_none_or(|family| family == of)
                    {
                        *expires = until;
                    }
                }
                let allocation = it.id();
                let expires_ms = Self::clock(at, until);
                self.told.push_back(Effect::Renewed { allocation, family, expires_ms });
            }
        }
        if let Some(spent) = spent {
            self.arrive(asking, number, lifetime, spent);
        }
        let ticket = spent.map(|_| number);
        Ok(self.succeed(asking, Told::Refreshed { lifetime, ticket }))
    }

    fn remember_deletion(&mut self, asking: &Asking<'_>) {
        let (client, transaction, user) = (asking.client(), asking.request.transaction, asking.who.1);
        self.deleted(asking.at, client, transaction, user);
        if let Delivery::Forwarded { via, .. } = asking.delivery {
            self.notices.push_back(Notice::Deleted { to: via.into(), client, transaction, user });
        }
    }

    fn permit(&mut self, asking: &Asking<'_>, peers: &[SocketAddr]) -> Outcome {
        let (at, now) = (asking.at, self.ms);
        let number = match self.owned(asking) {
            Ok(number) => number,
            Err(outcome) => return outcome,
        };
        let peers: BTreeSet<IpAddr> = peers.iter().map(SocketAddr::ip).collect();
        if peers.is_empty() {
            return Ok(self.fail(asking, 400));
        }
        self.sweep(number);
        let rules = self.workers[at].rules.clone();
        let it = &self.allocations[number];
        if peers.iter().any(|ip| !it.has(family_of(*ip))) {
            return Ok(self.fail(asking, 443));
        }
        if let Some(refused) = peers.iter().find(|ip| rules.refuses_in(asking.who.0, **ip)) {
            return Ok(self.refuse_peer(asking, *refused));
        }
        if !has_room(it, &peers, now, rules.max_permissions) {
            self.stats(at).permission_limit += 1;
            return Ok(self.fail(asking, 508));
        }
        for peer in peers {
            self.install(at, number, peer, 0);
        }
        Ok(self.succeed(asking, Told::Done))
    }

    pub(super) fn credential_left(&self, at: usize, user: &str) -> Option<u64> {
        let until = cast::until(user).filter(|_| self.workers[at].rules.end_with_credential)?;
        Some(until.saturating_sub(self.unix))
    }

    fn within_credential(&self, at: usize, user: &str, seconds: u32, least: u64) -> u32 {
        let left = self
            .credential_left(at, user)
            .map(|left| u32::try_from(left.max(least)).expect("less than 2^32 seconds"));
        left.map_or(seconds, |left| left.min(seconds))
    }

    /// Permits a peer for five minutes, or for as long as a channel to it lasts.
    fn install(&mut self, at: usize, number: usize, peer: IpAddr, bound: u64) {
        let mut until = self.ms + PERMISSION_MS;
        let now = self.ms;
        if self.workers[at].rules.channels_permit {
            let channels = self.allocations[number].channels.values();
            let to_it = channels.filter(|(to, _)| to.ip() == peer).map(|(_, until)| *until);
            until = to_it.chain([until, bound]).max().expect("at least one expiry");
        }
        let it = &mut self.allocations[number];
        let (allocation, renewed) = (it.id(), it.permits(peer, now));
        it.permissions.insert(peer, until);
        let expires_ms = Self::clock(at, until);
        self.told.push_back(Effect::Permitted { allocation, peer, expires_ms, renewed });
    }

    fn bind(&mut self, asking: &Asking<'_>, channel: u16, peer: SocketAddr) -> Outcome {
        let (at, now) = (asking.at, self.ms);
        let number = match self.owned(asking) {
            Ok(number) => number,
            Err(outcome) => return outcome,
        };
        let rules = self.workers[at].rules.clone();
        let it = &self.allocations[number];
        if it.transport == RelayTransport::Tcp || !(0x4000..=0x4FFF).contains(&channel) || peer.port() == 0 {
            return Ok(self.fail(asking, 400));
        }
        self.sweep(number);
        let it = &self.allocations[number];
        if !it.has(family_of(peer.ip())) {
            return Ok(self.fail(asking, 443));
        }
        if rules.refuses_in(asking.who.0, peer.ip()) {
            return Ok(self.refuse_peer(asking, peer.ip()));
        }
        let (bound_to, bound_as) = (it.peer_of(channel, now), it.channel_to(peer, now));
        let renewed = bound_to.is_some();
        match (bound_to, bound_as) {
            (Some(to), Some(number)) if to == peer && number == channel => {}
            (None, None) => {
                if it.channels.values().filter(|(_, until)| *until > now).count() >= rules.max_channels {
                    self.stats(at).channel_limit += 1;
                    return Ok(self.fail(asking, 508));
                }
            }
            _ => return Ok(self.fail(asking, 400)),
        }
        if !has_room(it, &BTreeSet::from([peer.ip()]), now, rules.max_permissions) {
            self.stats(at).permission_limit += 1;
            return Ok(self.fail(asking, 508));
        }
        let until = now + CHANNEL_MS;
        self.install(at, number, peer.ip(), until);
        let it = &mut self.allocations[number];
        it.channels.insert(channel, (peer, until));
        let (allocation, expires_ms) = (it.id(), Self::clock(at, until));
        let number = number_of(channel);
        let at = rules.reached(peer);
        self.told.push_back(Effect::Bound { allocation, number, peer, at, expires_ms, renewed });
        Ok(self.succeed(asking, Told::Done))
    }

    fn connect(&mut self, asking: &Asking<'_>, peer: SocketAddr) -> Outcome {
        let at = asking.at;
        let number = match self.owned(asking) {
            Ok(number) => number,
            Err(outcome) => return outcome,
        };
        let it = &self.allocations[number];
        if peer.port() == 0 || it.transport == RelayTransport::Udp {
            return Ok(self.fail(asking, 400));
        }
        if !it.has(family_of(peer.ip())) {
            return Ok(self.fail(asking, 443));
        }
        if self.workers[at].rules.refuses_in(asking.who.0, peer.ip()) {
            return Ok(self.refuse_peer(asking, peer.ip()));
        }
        if let Some(same) = it.connections.iter().find(|connection| connection.peer == peer) {
            let again = same.transaction == Some(asking.request.transaction);
            return match same.stage {
                Stage::Connecting(..) if again => Err(Expected::Drop(DropReason::OpenPending)),
                Stage::Waiting(_) if again => {
                    let told = Told::Connected(same.id);
                    self.stats(at).retransmits += 1;
                    Ok(self.succeed(asking, told))
                }
                _ => Ok(self.fail(asking, 446)),
            };
        }
        if let Some(limit) = self.is_full(at, number) {
            self.stats(at).connection_limit[limit] += 1;
            return Ok(self.fail(asking, 508));
        }
        let stage = Stage::Connecting(Some(self.ms + PATIENCE_MS), asking.said.clone());
        let transaction = Some(asking.request.transaction);
        self.allocations[number].connections.push(Connection { id: u32::MAX, peer, stage, transaction });
        let peer = self.workers[at].rules.reached(peer);
        Err(Expected::Goes(Goes::Connect { number, family: family_of(peer.ip()), peer }))
    }

    fn is_full(&self, at: usize, number: usize) -> Option<usize> {
        let (rules, it) = (&self.workers[at].rules, &self.allocations[number]);
        let reached = [
            it.connections.len() >= rules.max_connections,
            self.connections(None) >= rules.max_total_connections,
            self.connections(Some((it.realm, it.user))) >= rules.max_user_connections,
        ];
        reached.iter().position(|reached| *reached)
    }

    pub(super) fn connected(
        &mut self,
        at: usize,
        allocation: AllocationSlot,
        id: u32,
        result: Result<(), ConnectError>,
    ) -> Expected {
        let until = self.ms + PATIENCE_MS;
        let found =
            self.connection(at, id).filter(|(number, _)| self.allocations[*number].id() == allocation);
        let Some((number, place)) = found else {
            if result.is_ok() {
                self.tell_connection_closed(allocation, id);
            }
            return self.dropped(at, DropReason::StaleRelay);
        };
        let it = &mut self.allocations[number];
        let (to, away) = (Source { client: it.client, link: it.link }, it.away);
        let Stage::Connecting(_, said) = it.connections[place].stage.clone() else {
            return self.dropped(at, DropReason::StaleRelay);
        };
        let transaction = it.connections[place].transaction.expect("a connection made by Connect");
        let told = match result {
            Ok(()) => {
                it.connections[place].stage = Stage::Waiting(until);
                self.connection_event(at, ConnectionEvent::Connected);
                self.stats(at).successes[5] += 1;
                Told::Connected(id)
            }
            Err(error) => {
                it.connections.remove(place);
                self.connection_event(at, ConnectionEvent::ConnectFailed);
                let code = if error == ConnectError::NoCapacity { 508 } else { 447 };
                self.error(at, code);
                Told::Error(code)
            }
        };
        if away {
            return self.dropped(at, DropReason::ClientAway);
        }
        Expected::Reply { to, answer: Answer { transaction, said, told } }
    }

    pub(super) fn peer_connected(
        &mut self,
        at: usize,
        relay: RelayId,
        peer: SocketAddr,
    ) -> Result<(usize, Source), ConnectionRefusal> {
        let now = self.ms;
        let peer = self.known_as(at, relay, peer);
        let found =
            self.named(at, relay.allocation).filter(|number| self.allocations[*number].has(relay.family));
        let refused = match found {
            None => Some(ConnectionRefusal::Stale),
            Some(number) => {
                let it = &self.allocations[number];
                if it.away {
                    Some(ConnectionRefusal::ClientAway)
                } else if !it.permits(peer.ip(), now) {
                    Some(ConnectionRefusal::NoPermission)
                } else if self.workers[at].rules.refuses(peer.ip()) {
                    Some(ConnectionRefusal::PeerRefused)
                } else if it.transport == RelayTransport::Udp {
                    Some(ConnectionRefusal::Stale)
                } else if let Some(limit) = self.is_full(at, number) {
                    self.stats(at).connection_limit[limit] += 1;
                    Some(ConnectionRefusal::Limit)
                } else {
                    None
                }
            }
        };
        match (refused, found) {
            (Some(reason), _) => {
                self.refuse_connection(at, reason);
                Err(reason)
            }
            (None, None) => Err(ConnectionRefusal::Stale),
            (None, Some(number)) => {
                self.connection_event(at, ConnectionEvent::Accepted);
                let it = &mut self.allocations[number];
                let stage = Stage::Waiting(now + PATIENCE_MS);
                it.connections.push(Connection { id: u32::MAX, peer, stage, transaction: None });
                Ok((number, Source { client: it.client, link: it.link }))
            }
        }
    }

    pub(super) fn name_connection(&mut self, number: usize, id: u32) {
        let last = self.allocations[number].connections.last_mut();
        last.expect("a new connection").id = id;
    }

    fn is_elsewhere(&self, at: usize, id: u32) -> bool {
        let owner = usize::from(worker_of_connection(id));
        owner != at && owner < self.workers.len()
    }

    /// Returns true if the stream of a ConnectionBind may become a data connection.
    fn may_bind_to(&mut self, asking: &Asking<'_>) -> bool {
        let client = asking.client();
        Self::is_stream(&client) && !self.is_known(asking.at, &client)
    }

    fn connection_bind(&mut self, asking: &Asking<'_>, id: u32) -> Outcome {
        let at = asking.at;
        if !self.may_bind_to(asking) {
            return Ok(self.fail(asking, 400));
        }
        if self.is_elsewhere(at, id) {
            self.connection_event(at, ConnectionEvent::HandedOver);
            let worker = worker_of_connection(id);
            return Err(Expected::Goes(Goes::HandOver { worker }));
        }
        let Some((number, place)) = self.connection(at, id) else {
            self.refuse_connection(at, ConnectionRefusal::UnknownId);
            return Ok(self.fail(asking, 400));
        };
        let it = &mut self.allocations[number];
        if (it.realm, it.user) != asking.who {
            self.refuse_connection(at, ConnectionRefusal::WrongUser);
            return Ok(self.wrong_user(asking));
        }
        if !matches!(it.connections[place].stage, Stage::Waiting(_)) {
            self.refuse_connection(at, ConnectionRefusal::UnknownId);
            return Ok(self.fail(asking, 400));
        }
        it.connections[place].stage = Stage::Bound;
        self.connection_event(at, ConnectionEvent::Bound);
        self.told.push_back(Effect::Bind { connection: ConnectionId(id), source: asking.source });
        Ok(self.succeed(asking, Told::Done))
    }

    pub(super) fn connection_ended(&mut self, at: usize, id: u32, to_peer: u64, to_client: u64) {
        let stats = self.stats(at);
        stats.connection_bytes[0] += to_peer;
        stats.connection_bytes[1] += to_client;
        if let Some((number, place)) = self.connection(at, id) {
            let it = &mut self.allocations[number];
            it.to_peer.1 += to_peer;
            it.to_client.1 += to_client;
            it.connections.remove(place);
            self.connection_event(at, ConnectionEvent::Ended);
        }
    }
}

/// Verdict of a store that has all users.
pub(super) fn truth(request: &Request) -> Verdict {
    match &request.claim {
        Some(claim) if claim.user == "nobody" => Verdict::NoSuchUser,
        Some(claim) if claim.user == "old" => Verdict::Expired,
        Some(claim) if claim.right => Verdict::Good,
        _ => Verdict::WrongKey,
    }
}

/// Granted lifetime: the client's proposal, between ten minutes and an hour.
fn granted(proposed: Option<u32>) -> u32 {
    proposed.map_or(600, |seconds| seconds.clamp(600, 3600))
}

fn has_room(it: &Allocation, peers: &BTreeSet<IpAddr>, now: u64, most: usize) -> bool {
    let installed = it.permissions.iter().filter(|(_, until)| **until > now).map(|(ip, _)| *ip);
    installed.chain(peers.iter().copied()).collect::<BTreeSet<_>>().len() <= most
}

/// Network of a client: an IPv4 address or an IPv6 /64.
pub(super) fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}

const fn worker_of_connection(id: u32) -> u16 {
    (id >> 22) as u16
}

fn judge(nonce: Nonce, realm: &str, ip: IpAddr, unix: u64) -> Standing {
    if nonce.network != network(ip) || nonce.realm != realm {
        return Standing::Foreign;
    }
    if unix - nonce.unix <= NONCE_LIFETIME { Standing::Fresh } else { Standing::Stale }
}
