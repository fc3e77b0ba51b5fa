//! Request handling that all methods have in common. Data packets are not handled here.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::stun::kind;

use crate::{
    server::{
        Client, CredentialRefusal, DropReason, Effect, LookupId, LookupResult, Policy, RelayTransport,
        RequestRefusal, Server, Source, User, Verdict,
        auth::claim::{Who, claimed, user_of},
        data::MAX_QUEUED,
        policy::peer_rules::is_tunneled,
        request::{
            Delivery, Method, Request,
            bad_request::{Denied, Fault},
            context::{Context, Late},
            nat_discovery::unknown_in_plain_binding,
            response::{Envelope, phrase, reason_phrase},
        },
    },
    time::Now,
};

#[derive(Clone, Copy)]
pub(crate) struct Requester<'a> {
    pub(crate) client: &'a Client,
    pub(crate) realm: &'a Arc<str>,
    pub(crate) username: &'a str,
    pub(crate) proved: bool,
    pub(crate) method: Method,
}

pub(crate) enum Disposition {
    Reply,
    /// The reply buffer holds the response, to be sent between these addresses instead of the request's.
    ReplyFrom(Client),
    /// An effect continues the request.
    Later,
    /// The request waits for the fleet's store. Either the stream delivers it again later, or it is kept
    /// here.
    Wait,
    Drop(DropReason),
}

/// Interval at which a node exchanges data with the fleet's store, in milliseconds.
const EXCHANGE_MS: u64 = 100;
/// Pause before reading from a stream whose client repeats a refused request, in milliseconds.
const SLOW_MS: u64 = 100;

impl<P: Policy> Server<P> {
    pub(crate) fn request<'a>(
        &'a mut self,
        now: Now,
        source: &Source,
        delivery: Delivery,
        datagram: &[u8],
    ) -> Verdict<'a> {
        match &Request::parse(datagram) {
            Ok(_) | Err(DropReason::ClassicStun)
                if !self.config.clients.admits(source.client.address.ip()) =>
            {
                self.data.dropped(DropReason::ClientRefused)
            }
            Ok(request) => {
                self.data.stats.requests[request.method as usize] += 1;
                if request.method == Method::Binding && !self.config.authenticate_binding {
                    return self.binding(now, source, request);
                }
                self.respond(now, source, delivery, request, None)
            }
            Err(DropReason::ClassicStun) if !self.config.authenticate_binding => {
                self.classic(now, source, datagram)
            }
            Err(reason) => self.data.dropped(*reason),
        }
    }

    /// Reports the result of an [`Effect::LookUp`]; the verdict is for the waiting request.
    pub fn finish_lookup(&mut self, now: Now, lookup: LookupId, result: LookupResult) -> Verdict<'_> {
        let Some(waiting) = self.lookups.take(lookup) else {
            return self.data.dropped(DropReason::LookupOver);
        };
        match &Request::parse(&waiting.request) {
            Err(_) => self.data.dropped(DropReason::LookupOver),
            Ok(request) => {
                let late = Late { lookup, waiting: &waiting, result };
                self.respond(now, &waiting.source, waiting.delivery, request, Some(late))
            }
        }
    }

    /// Returns the next lookup result to pass to [`Server::finish_lookup`] again, after its request has
    /// waited for the fleet's store.
    pub fn next_finished_lookup(&mut self, now: Now) -> Option<(LookupId, LookupResult)> {
        self.lookups.next_finished(now.ms)
    }

    fn respond(
        &mut self,
        now: Now,
        source: &Source,
        delivery: Delivery,
        request: &Request<'_>,
        late: Option<Late<'_>>,
    ) -> Verdict<'_> {
        let (pending_move, has_own_nonce) = (Cell::new(None), Cell::new(false));
        let told = (&pending_move, &has_own_nonce);
        let transport = self.config.listener(source.client.listener).transport;
        let answer =
            self.answer(Context::new(now, *source, delivery, request, late.as_ref(), transport, told));
        if let (Disposition::Wait, Some(Late { lookup, waiting, result })) = (&answer, late) {
            self.lookups.put_back(lookup, waiting.clone(), (now.ms + EXCHANGE_MS, result));
            return Verdict::Drop(None);
        }
        if matches!(answer, Disposition::Reply)
            && !self.may_refuse_again(now, (&source.client, has_own_nonce.get()), request)
        {
            if !self.is_stream(&source.client) {
                return self.unanswered(now, source, request, DropReason::RefusalRepeated);
            }
            self.data.effects.push_back(Effect::Slow { client: source.client, until_ms: now.ms + SLOW_MS });
        }
        if let (Delivery::Forwarded { via, .. }, Disposition::Reply) = (delivery, &answer) {
            let (pending_move, reply) = (pending_move.take(), self.reply.as_slice().into());
            self.data.effects.push_back(Effect::Answer { via, source: *source, pending_move, reply });
            return Verdict::Drop(None);
        }
        self.verdict(now, source, request, answer)
    }

    fn verdict(
        &mut self,
        now: Now,
        source: &Source,
        request: &Request<'_>,
        answer: Disposition,
    ) -> Verdict<'_> {
        let Source { client, link } = *source;
        match answer {
            Disposition::Reply => match self.may_answer(now, &client) {
                Ok(()) => Verdict::Reply { client, link, bytes: &self.reply },
                Err(reason) => self.unanswered(now, source, request, reason),
            },
            Disposition::ReplyFrom(client) => Verdict::Reply { client, link, bytes: &self.reply },
            Disposition::Later => Verdict::Drop(None),
            Disposition::Wait => {
                // The request is counted when it is delivered again.
                self.data.stats.requests[request.method as usize] -= 1;
                Verdict::Wait { until_ms: now.ms + EXCHANGE_MS, otherwise: DropReason::QuotaPending }
            }
            Disposition::Drop(reason) => self.unanswered(now, source, request, reason),
        }
    }

    pub(crate) fn unanswered(
        &mut self,
        now: Now,
        source: &Source,
        request: &Request<'_>,
        reason: DropReason,
    ) -> Verdict<'_> {
        if reason.is_bound_on_requests() {
            let username = user_of(request).map_or("", claimed);
            let why = RequestRefusal::Unanswered(reason);
            self.tell_stranger_refused(now, &source.client, (username, request.method), 0, why);
        }
        self.data.dropped(reason)
    }

    fn answer(&mut self, mut context: Context<'_>) -> Disposition {
        if self.config.stun_only && context.request.method != Method::Binding {
            return self.refuse(&context, 403, RequestRefusal::StunOnly);
        }
        // Authentication comes first (RFC 8489 section 6.3), then unknown attributes (section 6.3.1).
        if let Err(answer) = self.authenticate(&mut context) {
            return answer;
        }
        // ACCESS-TOKEN is a known attribute for clients that authenticated with it.
        let is_known = |kind: u16| kind == kind::ACCESS_TOKEN && context.who.grant.is_some();
        let unknown = context.request.unknown(is_known);
        if !unknown.is_empty() {
            self.tell_of(&context, 420, RequestRefusal::UnknownAttribute(unknown[0]));
            return self.unknown_attributes(&context.envelope, &unknown);
        }
        let (client, who) = (context.client().address.ip(), &context.who);
        if self.policy.is_banned(context.now.unix, who.user(), &who.username, client) {
            self.data.stats.ban_refusals += 1;
            return self.refuse(&context, 403, RequestRefusal::Banned);
        }
        if self.is_loop(&context) {
            self.data.stats.loop_refusals += 1;
            return self.refuse(&context, 403, RequestRefusal::Loop);
        }
        if is_by_tunnel(&context) {
            return self.refuse(&context, 403, RequestRefusal::Tunnel);
        }
        match context.request.method {
            Method::Allocate => self.allocate(context),
            Method::Refresh => self.refresh(&context),
            Method::CreatePermission => self.create_permission(&context),
            Method::ChannelBind => self.channel_bind(&context),
            Method::Connect => self.connect(context),
            Method::ConnectionBind => self.connection_bind(&context),
            Method::Binding => self.authenticated_binding(&context),
        }
    }

    /// Detects a client that requests or moves an allocation from behind one of this server's relayed
    /// transport addresses. Its datagrams would return to this server, and two such allocations can feed each
    /// other until the TTL runs out.
    fn is_loop(&mut self, context: &Context<'_>) -> bool {
        let concerns = match context.request.method {
            Method::Allocate | Method::ConnectionBind => true,
            Method::Refresh => context.request.get(kind::MOBILITY_TICKET).is_some(),
            _ => false,
        };
        if !concerns {
            return false;
        }
        let client = context.client();
        let transport = if self.is_stream(client) { RelayTransport::Tcp } else { RelayTransport::Udp };
        self.policy.is_relayed(client.address, transport)
    }

    /// The request is unauthenticated, so responses over UDP omit SOFTWARE: a 20-byte request gets 32 bytes
    /// over IPv4 and 44 over IPv6.
    fn binding(&mut self, now: Now, source: &Source, request: &Request<'_>) -> Verdict<'_> {
        let Source { client, link } = source;
        let envelope = Envelope::unsigned(request, self.config.listener(client.listener).transport);
        if let Some(answer) = self.discover(now, client, request, &envelope) {
            return self.verdict(now, source, request, answer);
        }
        let unknown = unknown_in_plain_binding(request);
        if !unknown.is_empty() {
            let why = RequestRefusal::UnknownAttribute(unknown[0]);
            self.tell_stranger_refused(now, client, ("", request.method), 420, why);
            let answer = self.unknown_attributes(&envelope, &unknown);
            return self.verdict(now, source, request, answer);
        }
        self.write_binding(&envelope, client.address);
        Verdict::Reply { client: *client, link: *link, bytes: &self.reply }
    }

    /// Rarely used; out of line, so that [`Server::write_binding`] is inlined into [`Server::binding`].
    #[cold]
    fn authenticated_binding(&mut self, context: &Context<'_>) -> Disposition {
        self.write_binding(&context.envelope, context.client().address);
        Disposition::Reply
    }

    #[inline]
    fn write_binding(&mut self, envelope: &Envelope, client: SocketAddr) {
        self.data.stats.successes[Method::Binding as usize] += 1;
        let mut response = envelope.success(&mut self.reply);
        response.xor_address(kind::XOR_MAPPED_ADDRESS, client);
        envelope.sign(response, self.config.software.as_deref());
    }

    pub(crate) fn owned(&mut self, context: &Context<'_>) -> Result<u32, Disposition> {
        let found = match self.data.forwarding.find(context.client()) {
            None => self.arriving(context)?,
            found => found,
        };
        let Some((index, state)) = found.and_then(|index| Some((index, self.states.get(index)?))) else {
            // RFC 8656 section 5: without an allocation on the 5-tuple, the error is Allocation Mismatch.
            return Err(self.fail(context, 437));
        };
        if state.pending.is_some() {
            return Err(self.fail(context, 437));
        }
        // RFC 8656 section 5: later requests must come from the user of the Allocate. With tokens, USERNAME
        // only names a key, and keys are rotated during an allocation.
        let who = &context.who;
        let both_tokens = state.grant.is_some() && who.grant.is_some();
        if (state.username != who.username && !both_tokens) || !state.is_in(&who.realm) {
            return Err(self.wrong_user(context));
        }
        let at_home = self.data.forwarding.find(context.client()) == Some(index);
        let state = self.states.get(index);
        if let Some(mobility) = state.and_then(|state| state.mobility.as_deref_mut())
            && context.envelope.signer.is_some()
        {
            mobility.heard_from(context.client(), at_home);
        }
        Ok(index)
    }

    /// A request gets all its permissions or none, so the log entry names the refused peer.
    pub(crate) fn refuse_peer(
        &mut self,
        context: &Context<'_>,
        peer: SocketAddr,
        others: usize,
    ) -> Disposition {
        let by = self.config.peers_in(&context.who.realm).denial(peer);
        self.data.stats.peer_refusals[by.index()] += 1;
        let client = *context.client();
        if self.data.effects.len() < MAX_QUEUED
            && let Some(suppressed) = self.peer_refusals.admit(context.now.ms, client.address.ip())
        {
            let realm = Arc::clone(&context.who.realm);
            let username = (&*context.who.username).into();
            let refused = Effect::PeerRefused { client, realm, username, peer, others, by, suppressed };
            self.data.effects.push_back(refused);
        }
        if context.envelope.has_texts() {
            self.write_failure_because(&context.envelope, 403, &forbidden_peer(peer.ip(), others));
        } else {
            self.write_failure(&context.envelope, 403);
        }
        Disposition::Reply
    }

    pub(crate) fn wrong_user(&mut self, context: &Context<'_>) -> Disposition {
        self.refused(context, User::Name(&context.who.username), CredentialRefusal::WrongUser);
        self.write_failure(&context.envelope, 441);
        Disposition::Reply
    }

    pub(crate) fn done(&mut self, context: &Context<'_>) -> Disposition {
        self.data.stats.successes[context.request.method as usize] += 1;
        let response = context.envelope.success(&mut self.reply);
        context.envelope.sign(response, self.config.software.as_deref());
        Disposition::Reply
    }

    pub(crate) fn fail(&mut self, context: &Context<'_>, code: u16) -> Disposition {
        self.refuse(context, code, RequestRefusal::Code)
    }

    pub(crate) fn refuse(&mut self, context: &Context<'_>, code: u16, why: RequestRefusal) -> Disposition {
        self.tell_of(context, code, why);
        let reason =
            if context.envelope.has_texts() { phrase(code, why) } else { reason_phrase(code).into() };
        self.write_failure_because(&context.envelope, code, &reason);
        Disposition::Reply
    }

    pub(crate) fn deny_request(
        &mut self,
        context: &Context<'_>,
        Denied { code, why }: Denied,
    ) -> Disposition {
        if let RequestRefusal::UnknownAttribute(kind) = why {
            self.tell_of(context, code, why);
            return self.unknown_attributes(&context.envelope, &[kind]);
        }
        self.refuse(context, code, why)
    }

    pub(crate) fn bad(&mut self, context: &Context<'_>, attribute: u16, fault: Fault) -> Disposition {
        self.deny_request(context, Denied::bad(attribute, fault))
    }

    pub(crate) fn tell_of(&mut self, context: &Context<'_>, code: u16, why: RequestRefusal) {
        let (client, method) = (context.client(), context.envelope.method);
        if context.envelope.signer.is_some() || !self.config.authenticate {
            let Who { realm, username, .. } = &context.who;
            self.tell_refused(
                context.now,
                &Requester { client, realm, username, proved: true, method },
                code,
                why,
            );
        } else {
            let username = user_of(context.request).map_or("", claimed);
            self.tell_stranger_refused(context.now, client, (username, method), code, why);
        }
    }

    pub(crate) fn tell_stranger_refused(
        &mut self,
        now: Now,
        client: &Client,
        (username, method): (&str, Method),
        code: u16,
        why: RequestRefusal,
    ) {
        let realm = &Arc::<str>::default();
        self.tell_refused(now, &Requester { client, realm, username, proved: false, method }, code, why);
    }

    /// Log entries about unauthenticated clients have a separate budget, so that these clients cannot
    /// suppress other entries.
    pub(crate) fn tell_refused(&mut self, now: Now, asker: &Requester<'_>, code: u16, why: RequestRefusal) {
        let Requester { client, realm, username, proved, method } = *asker;
        let refusals = if proved { &mut self.request_refusals } else { &mut self.stranger_refusals };
        if self.data.effects.len() < MAX_QUEUED
            && let Some(suppressed) = refusals.admit(now.ms, client.address.ip())
        {
            let (client, realm, username) = (*client, Arc::clone(realm), username.into());
            let refused =
                Effect::RequestRefused { client, realm, username, proved, method, code, why, suppressed };
            self.data.effects.push_back(refused);
        }
    }

    pub(crate) fn write_failure(&mut self, to: &Envelope, code: u16) {
        self.write_failure_because(to, code, reason_phrase(code));
    }

    fn write_failure_because(&mut self, to: &Envelope, code: u16, reason: &str) {
        self.data.stats.error(code);
        let response = to.error_because(&mut self.reply, code, reason);
        to.sign(response, self.config.software.as_deref());
    }

    pub(crate) fn unknown_attributes(&mut self, to: &Envelope, unknown: &[u16]) -> Disposition {
        self.data.stats.error(420);
        let mut response = to.error(&mut self.reply, 420);
        response.unknown_attributes(unknown);
        to.sign(response, self.config.software.as_deref());
        Disposition::Reply
    }
}

/// Detects an Allocate, ChannelBind or move from a 6to4 or Teredo address (RFC 8656 section 21.4). A client
/// with an address of this kind may still refresh or delete its allocation.
fn is_by_tunnel(context: &Context<'_>) -> bool {
    let concerns = match context.request.method {
        Method::Allocate | Method::ChannelBind => true,
        Method::Refresh => context.request.get(kind::MOBILITY_TICKET).is_some(),
        _ => false,
    };
    concerns && is_tunneled(context.client().address.ip())
}

/// Contains the address in the form that the client sent.
fn forbidden_peer(peer: IpAddr, others: usize) -> String {
    match others {
        0 => format!("Forbidden: peer {peer}"),
        _ => format!("Forbidden: peer {peer}; the request's other peers get no permission either"),
    }
}
