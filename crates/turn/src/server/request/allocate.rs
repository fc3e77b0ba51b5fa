//! Allocate (RFC 8656 section 7). All checks come before the relay socket is opened.

use std::sync::Arc;

use turnpike_wire::stun::kind;

use crate::{
    random::Random,
    server::{
        AllocateAttempt, AllocationSlot, Client, ClientNetwork, Disposition, DropReason, Effect, Family,
        OpenRelay, OpenRequest, OpenResult, Policy, PortRequest, QuotaRefusal, RelayTransport,
        RequestRefusal, Server, ServerConfig, Source,
        allocation_state::AllocationId,
        allocation_state::{AllocationState, Pending},
        auth::{
            masked::Masked,
            replay::{Once, Recorded},
        },
        data::forwarding::ForwardingEntry,
        policy::{alternate::Occasion, duration_limit},
        request::{
            Method, Request,
            bad_request::{Denied, Fault},
            context::Context,
            dispatch::Requester,
            response::{Envelope, reason_phrase},
        },
    },
    time::Now,
};

/// Protocol numbers of REQUESTED-TRANSPORT (RFC 8656 section 18.7).
const UDP: u8 = 17;
const TCP: u8 = 6;

struct AllocateParams {
    first: OpenRelay,
    second: Option<Family>,
    address_error: Option<(Family, u16)>,
}

impl<P: Policy> Server<P> {
    pub(crate) fn allocate(&mut self, context: Context<'_>) -> Disposition {
        // A 5-tuple has one allocation; a retransmission gets the earlier response (section 5).
        if let Some(index) = self.data.forwarding.find(context.client()) {
            return self.allocate_again(&context, index);
        }
        // A mobile allocation that is moving to this 5-tuple also occupies it. If that allocation is on
        // another worker, the request is forwarded there, because the allocation may have ended in the
        // meantime.
        match self.arriving(&context) {
            Ok(None) => {}
            Ok(Some(_)) => return self.refuse(&context, 437, RequestRefusal::AllocationExists),
            Err(answer) => return answer,
        }
        if let Some(ago) = context.who.expired(context.now) {
            return self.refuse_expired(&context, ago);
        }
        let lifetime = match context.request.get(kind::LIFETIME).map(<[u8; 4]>::try_from) {
            None => None,
            Some(Ok(seconds)) => Some(u32::from_be_bytes(seconds)),
            Some(Err(_)) => return self.bad(&context, kind::LIFETIME, Fault::Malformed),
        };
        let params = self.params(&context).and_then(|params| self.may_set_df(&context, params));
        let (params, mobile) =
            match params.and_then(|params| Ok((params, self.wants_mobility(context.request)?))) {
                Ok(wanted) => wanted,
                Err(denied) => return self.deny_request(&context, denied),
            };
        let recorded = match self.admit_allocation(&context) {
            Ok(recorded) => recorded,
            Err(answer) => return answer,
        };
        let AllocateParams { mut first, second, address_error } = params;
        // A shared port cannot follow its client to another worker.
        let any = if mobile { PortRequest::Own } else { PortRequest::Any };
        if first.port == PortRequest::Any {
            first.port = any;
        }
        let transport = first.transport;
        let relays_tcp = transport == RelayTransport::Tcp;
        let reservation = match first.port {
            PortRequest::EvenAndReserveNext(token) => Some(Masked(token)),
            _ => None,
        };
        let granted = context.who.limit(context.now, self.granted(lifetime));
        let granted = self.config.max_allocation_duration.limit(&context.who.realm, granted);
        let granted = self.limit_to_credential(&context, granted);
        let Context { now, source: Source { client, link }, envelope, who, asked_ms, .. } = context;
        let entry = ForwardingEntry::new(client, link, self.is_stream(&client), relays_tcp);
        let id = self.data.forwarding.install(now.ms, entry);
        let transaction = envelope.transaction;
        let pending = Pending { envelope, first: first.family, second, mobile, recorded, asked_ms };
        let state = AllocationState {
            id: AllocationId::draw(&mut self.random),
            realm: who.realm,
            identity: (who.identity != who.username).then_some(who.identity),
            username: who.username,
            prefix: self.config.prefixes.of(client.address.ip()),
            grant: who.grant,
            until_unix: who.until_unix,
            opened_ms: now.ms,
            transaction,
            granted,
            reservation,
            address_error,
            reported: None,
            former: None,
            pending: Some(Box::new(pending)),
            tcp: relays_tcp.then(Box::default),
            mobility: None,
        };
        self.states.insert(id, state);
        let second = second.map(|family| OpenRelay { family, transport, port: any });
        self.data.effects.push_back(Effect::Open(OpenRequest { allocation: id, first, second }));
        Disposition::Later
    }

    /// Checks for refused networks, draining, exceeded quotas and replays of requests already granted.
    fn admit_allocation(&mut self, context: &Context<'_>) -> Result<Option<Recorded>, Disposition> {
        let client = context.client();
        let (ip, networks) = (client.address.ip(), &self.config.networks);
        let network =
            || networks.as_ref().map_or_else(ClientNetwork::default, |networks| networks.network(ip));
        if !self.config.clients.admits_allocation(ip, network) {
            self.data.stats.network_refusals += 1;
            return Err(self.refuse(context, 403, RequestRefusal::ClientNetwork));
        }
        let closing = self.config.listener(client.listener).closing;
        let returned =
            self.draining && !closing && self.policy.comes_back(&attempt(context, Occasion::Draining));
        let draining = (self.draining || closing) && !returned;
        let occasion = if draining { Occasion::Draining } else { Occasion::None };
        if !returned && self.write_redirect(&attempt(context, occasion), &context.envelope) {
            self.tell_of(context, 300, RequestRefusal::Code);
            return Err(Disposition::Reply);
        }
        if draining {
            self.data.stats.drain_refusals += 1;
            return Err(self.refuse(context, 508, RequestRefusal::Draining));
        }
        let who = &context.who;
        if self.policy.volume_limits(who.user(), &who.username).refuse {
            self.data.stats.volume_refusals += 1;
            return Err(self.refuse(context, 486, RequestRefusal::VolumeQuota));
        }
        // Section 19: 486 means that the user is over quota; 508 means that this server is, so another server
        // may have room.
        let prefix = self.config.prefixes.of(client.address.ip());
        if let Err(refusal) = self.policy.acquire(who.user(), prefix) {
            if matches!(refusal, QuotaRefusal::Undecided { .. }) {
                if context.can_wait {
                    return Err(Disposition::Wait);
                }
                if !self.is_stream(client) {
                    return Err(Disposition::Drop(DropReason::QuotaPending));
                }
            }
            self.data.stats.quota(refusal);
            return Err(match refusal {
                QuotaRefusal::User | QuotaRefusal::Undecided { is_user: true } => {
                    self.refuse(context, 486, RequestRefusal::UserQuota)
                }
                QuotaRefusal::Prefix => self.refuse(context, 486, RequestRefusal::PrefixQuota),
                QuotaRefusal::Total
                    if self.write_redirect(&attempt(context, Occasion::Full), &context.envelope) =>
                {
                    self.tell_of(context, 300, RequestRefusal::Code);
                    Disposition::Reply
                }
                QuotaRefusal::Total
                | QuotaRefusal::Everywhere
                | QuotaRefusal::Undecided { is_user: false } => {
                    self.refuse(context, 508, RequestRefusal::TotalQuota)
                }
            });
        }
        // Must be the last check, so that a request refused for another reason may be resent unchanged.
        self.grant_once(context, Once::Allocate).inspect_err(|_| self.policy.release(who.user(), prefix))
    }

    /// `None` if the allocation is not waiting for its sockets.
    pub(crate) fn finish_allocate(
        &mut self,
        now: Now,
        id: AllocationSlot,
        first: OpenResult,
        second: Option<OpenResult>,
    ) -> Option<Source> {
        self.data.forwarding.get(id)?;
        let (_, entry, state) = self.allocation(id.index)?;
        let pending = *state.pending.take()?;
        let ForwardingEntry { client, link, .. } = *entry;
        let second = pending.second.map(|family| (family, second.unwrap_or(OpenResult::NoCapacity)));
        let mut relayed = [None; 2];
        for (slot, (family, result)) in
            relayed.iter_mut().zip([Some((pending.first, first)), second].into_iter().flatten())
        {
            match result {
                OpenResult::Opened { relayed } => *slot = Some(relayed),
                OpenResult::Shared { relayed, port } => {
                    *slot = Some(relayed);
                    entry.shared[family as usize] = Some(port);
                }
                failed => state.address_error = Some((family, code_of(failed))),
            }
        }
        let relayed = match relayed {
            [Some(first), second] => (first, second),
            [None, Some(second)] => (second, None),
            [None, None] => {
                self.undo_allocate(now, id, client, pending, first);
                return Some(Source { client, link });
            }
        };
        state.opened_ms = now.ms;
        let expires_ms = now.ms + u64::from(state.granted) * 1000;
        let opened = Effect::Opened {
            allocation: id,
            id: state.id,
            client,
            link,
            expires_ms,
            realm: Arc::clone(&state.realm),
            username: state.username.clone(),
            relayed,
        };
        self.data.stats.allocated_after(now.ms.saturating_sub(pending.asked_ms));
        // Set the limits first, so that they are in place when the effect is handled.
        self.apply_rates(now, id.index);
        self.data.emit(now, opened);
        if pending.mobile {
            self.make_mobile(id.index);
        }
        self.write_allocated(now, id.index, &pending.envelope);
        Some(Source { client, link })
    }

    fn undo_allocate(
        &mut self,
        now: Now,
        id: AllocationSlot,
        client: Client,
        pending: Pending,
        why: OpenResult,
    ) {
        self.data.forwarding.remove(id.index);
        let state = self.states.remove(id.index);
        if let Some(state) = &state {
            self.policy.release(state.user(), state.prefix);
        }
        if let Some(recorded) = pending.recorded {
            self.replays.withdraw(recorded);
        }
        let full = matches!(why, OpenResult::NoCapacity | OpenResult::AddressAbsent | OpenResult::PortsHeld);
        let goes_on = state.as_ref().filter(|_| full).is_some_and(|state| {
            let attempt = AllocateAttempt {
                now,
                client,
                user: state.user(),
                transaction: pending.envelope.transaction,
                occasion: Occasion::Full,
            };
            self.write_redirect(&attempt, &pending.envelope)
        });
        let (code, reason) = match why {
            _ if goes_on => (300, RequestRefusal::Code),
            OpenResult::NoCapacity => (508, RequestRefusal::NoRelay),
            OpenResult::AddressAbsent => (508, RequestRefusal::AddressAbsent),
            OpenResult::PortsHeld => (508, RequestRefusal::PortsHeld),
            _ => (code_of(why), RequestRefusal::Code),
        };
        if let Some(state) = state {
            let (realm, username, method) = (&state.realm, &*state.username, pending.envelope.method);
            let asker = Requester { client: &client, realm, username, proved: true, method };
            self.tell_refused(now, &asker, code, reason);
        }
        if !goes_on {
            self.write_failure(&pending.envelope, code);
        }
    }

    /// Limits a requested lifetime to the range from the default to the maximum (section 7.2).
    pub(crate) fn granted(&self, proposed: Option<u32>) -> u32 {
        let default = self.config.limits.default_lifetime;
        proposed.map_or(default, |seconds| seconds.min(self.config.limits.max_lifetime).max(default))
    }

    fn allocate_again(&mut self, context: &Context<'_>, index: u32) -> Disposition {
        let Some(state) = self.states.get(index) else { return self.fail(context, 437) };
        let who = &context.who;
        if state.transaction != context.request.transaction()
            || state.username != who.username
            || state.realm != who.realm
        {
            return self.refuse(context, 437, RequestRefusal::AllocationExists);
        }
        if state.pending.is_some() {
            return Disposition::Drop(DropReason::OpenPending);
        }
        self.data.stats.retransmits += 1;
        self.write_allocated(context.now, index, &context.envelope);
        Disposition::Reply
    }

    fn params(&mut self, context: &Context<'_>) -> Result<AllocateParams, Denied> {
        let request = context.request;
        let transport = match request.get(kind::REQUESTED_TRANSPORT) {
            Some([UDP, _, _, _]) => RelayTransport::Udp,
            Some([TCP, _, _, _]) => {
                self.may_relay_tcp(context)?;
                RelayTransport::Tcp
            }
            Some([_, _, _, _]) => return Err(Denied::code(442)),
            Some(_) => return Err(Denied::bad(kind::REQUESTED_TRANSPORT, Fault::Malformed)),
            None => return Err(Denied::bad(kind::REQUESTED_TRANSPORT, Fault::Missing)),
        };
        if request.get(kind::DONT_FRAGMENT).is_some_and(|value| !value.is_empty()) {
            return Err(Denied::bad(kind::DONT_FRAGMENT, Fault::Malformed));
        }
        let even_port = match request.get(kind::EVEN_PORT) {
            None => None,
            Some([flags]) => Some(flags & 0x80 != 0),
            Some(_) => return Err(Denied::bad(kind::EVEN_PORT, Fault::Malformed)),
        };
        let families = Families::read(request)?;
        if let Some(token) = request.get(kind::RESERVATION_TOKEN) {
            // A token implies port and family, so neither may be given with it (step 5).
            let malformed = Denied::bad(kind::RESERVATION_TOKEN, Fault::Malformed);
            let token: [u8; 8] = token.try_into().map_err(|_| malformed)?;
            let other = even_port.map(|_| kind::EVEN_PORT).or(families.first_named());
            if let Some(other) = other {
                return Err(Denied::bad(kind::RESERVATION_TOKEN, Fault::Beside(other)));
            }
            let first =
                OpenRelay { family: family_of_token(token), transport, port: PortRequest::Reserved(token) };
            return Ok(AllocateParams { first, second: None, address_error: None });
        }
        let reserve_next = even_port == Some(true);
        let (family, second, address_error) = families.choose(&self.config, reserve_next)?;
        let port = match even_port {
            None => PortRequest::Any,
            Some(false) => PortRequest::Even,
            Some(true) => PortRequest::EvenAndReserveNext(new_token(&mut self.random, family)),
        };
        Ok(AllocateParams { first: OpenRelay { family, transport, port }, second, address_error })
    }

    /// Refuses DONT-FRAGMENT for IPv4-to-IPv6 relaying (section 3.7), which would need the DF bit of the
    /// client's datagrams; sockets do not report that bit.
    fn may_set_df(&self, context: &Context<'_>, params: AllocateParams) -> Result<AllocateParams, Denied> {
        let client = context.client();
        let relays_v6 = params.first.family == Family::V6 || params.second == Some(Family::V6);
        let is_translated = client.address.is_ipv4() && relays_v6 && !self.is_stream(client);
        if is_translated && context.request.get(kind::DONT_FRAGMENT).is_some() {
            return Err(Denied { code: 420, why: RequestRefusal::UnknownAttribute(kind::DONT_FRAGMENT) });
        }
        Ok(params)
    }

    /// Success response (section 7.2), with an error code if the second address could not be allocated.
    fn write_allocated(&mut self, now: Now, index: u32, to: &Envelope) {
        let ticket = self.ticket(now, index);
        let Some((_, entry)) = self.data.forwarding.at(index) else { return };
        let Some(state) = self.states.get(index) else { return };
        self.data.stats.successes[Method::Allocate as usize] += 1;
        let mut response = to.success(&mut self.reply);
        for relay in entry.relays.iter().flatten() {
            response.xor_address(kind::XOR_RELAYED_ADDRESS, relay.address);
        }
        response.number(kind::LIFETIME, duration_limit::answered(state.granted));
        if let Some(Masked(token)) = state.reservation {
            response.attribute(kind::RESERVATION_TOKEN, &token);
        }
        if let Some(ticket) = ticket {
            response.attribute(kind::MOBILITY_TICKET, &ticket);
        }
        response.xor_address(kind::XOR_MAPPED_ADDRESS, entry.client.address);
        if let Some((family, code)) = state.address_error {
            response.address_error(family.number(), code, reason_phrase(code));
        }
        to.sign(response, self.config.software.as_deref());
    }
}

#[derive(Default, PartialEq, Eq)]
struct Families {
    requested: Option<Result<Family, u8>>,
    additional: Option<Result<Family, u8>>,
}

impl Families {
    fn read(request: &Request<'_>) -> Result<Self, Denied> {
        let read = |kind| match request.get(kind) {
            None => Ok(None),
            Some(value) => Family::read(value).map(Some).ok_or(Denied::bad(kind, Fault::Malformed)),
        };
        let requested = read(kind::REQUESTED_ADDRESS_FAMILY)?;
        let additional = match read(kind::ADDITIONAL_ADDRESS_FAMILY)? {
            None => read(kind::DRAFT_ADDITIONAL_ADDRESS_FAMILY)?,
            found => found,
        };
        Ok(Self { requested, additional })
    }

    #[expect(clippy::type_complexity, reason = "the parts of an AllocateParams")]
    fn choose(
        self,
        config: &ServerConfig,
        reserve_next: bool,
    ) -> Result<(Family, Option<Family>, Option<(Family, u16)>), Denied> {
        let has = |family| match family {
            Family::V4 => config.relay_v4,
            Family::V6 => config.relay_v6,
        };
        let additional = |fault| Denied::bad(kind::ADDITIONAL_ADDRESS_FAMILY, fault);
        match (self.requested, self.additional) {
            // The default is IPv4; an unsupported family gets 440.
            (requested, None) => {
                let family = requested.unwrap_or(Ok(Family::V4)).map_err(|_| Denied::code(440))?;
                if has(family) { Ok((family, None, None)) } else { Err(Denied::code(440)) }
            }
            // The two attributes are mutually exclusive; the additional family must be IPv6, and a dual-stack
            // allocation cannot reserve the next port.
            (None, Some(Ok(Family::V6))) if !reserve_next => match (has(Family::V4), has(Family::V6)) {
                (true, true) => Ok((Family::V4, Some(Family::V6), None)),
                (true, false) => Ok((Family::V4, None, Some((Family::V6, 440)))),
                (false, true) => Ok((Family::V6, None, Some((Family::V4, 440)))),
                (false, false) => Err(Denied::code(440)),
            },
            (Some(_), Some(_)) => Err(additional(Fault::Beside(kind::REQUESTED_ADDRESS_FAMILY))),
            (None, Some(Ok(Family::V6))) => Err(additional(Fault::Beside(kind::EVEN_PORT))),
            (None, Some(_)) => Err(additional(Fault::OutOfRange)),
        }
    }

    fn first_named(&self) -> Option<u16> {
        let requested = self.requested.map(|_| kind::REQUESTED_ADDRESS_FAMILY);
        requested.or(self.additional.map(|_| kind::ADDITIONAL_ADDRESS_FAMILY))
    }
}

fn attempt<'a>(context: &'a Context<'_>, occasion: Occasion) -> AllocateAttempt<'a> {
    AllocateAttempt {
        now: context.now,
        client: *context.client(),
        user: context.who.user(),
        transaction: context.envelope.transaction,
        occasion,
    }
}

const fn code_of(result: OpenResult) -> u16 {
    match result {
        OpenResult::UnsupportedFamily => 440,
        OpenResult::NoCapacity
        | OpenResult::AddressAbsent
        | OpenResult::PortsHeld
        | OpenResult::Opened { .. }
        | OpenResult::Shared { .. } => 508,
    }
}

/// Creates an unguessable token. Its last bit encodes the family of the reserved port, because a request with
/// a token must not name the family and may reach another worker.
fn new_token(random: &mut Random, family: Family) -> [u8; 8] {
    let mut token: [u8; 8] = random.bytes();
    token[7] = token[7] & !1 | (family as u8);
    token
}

const fn family_of_token(token: [u8; 8]) -> Family {
    if token[7] & 1 == 0 { Family::V4 } else { Family::V6 }
}
