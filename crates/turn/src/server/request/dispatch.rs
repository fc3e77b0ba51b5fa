//! Answering requests: who asks, whose allocation it is about, and the responses that all methods share. Data never comes here.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::stun::kind;

use crate::{
    server::{
        Client, CredentialRefusal, Credentials, DropReason, Effect, LookupId, Policy, RelayTransport,
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

/// A client and its request, for [`Effect::RequestRefused`].
#[derive(Clone, Copy)]
pub(crate) struct Requester<'a> {
    pub(crate) client: &'a Client,
    pub(crate) realm: &'a Arc<str>,
    pub(crate) username: &'a str,
    /// The client has proved that it is that user.
    pub(crate) proved: bool,
    pub(crate) method: Method,
}

/// What became of a request.
pub(crate) enum Disposition {
    /// The reply buffer holds it.
    Reply,
    /// The same, to be sent to where and from where this says.
    ReplyFrom(Client),
    /// None now: an effect goes on with it.
    Later,
    /// None before the fleet's store has answered: the stream brings the request again, or it is kept.
    Wait,
    Drop(DropReason),
}

/// Milliseconds between two exchanges of a node with the fleet's store.
const EXCHANGE_MS: u64 = 100;
/// Pause of a stream whose client repeats a refused request, in milliseconds.
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
            Ok(request) => {
                self.data.stats.requests[request.method as usize] += 1;
                if request.method == Method::Binding {
                    return self.binding(now, source, request);
                }
                self.respond(now, source, delivery, request, None)
            }
            Err(DropReason::ClassicStun) => self.classic(now, source, datagram),
            Err(reason) => self.data.dropped(*reason),
        }
    }

    /// Says what the store has found out ([`Effect::LookUp`]); the verdict is on the request that has waited for it, if it still does.
    pub fn credentials(&mut self, now: Now, lookup: LookupId, credentials: Credentials) -> Verdict<'_> {
        let Some(waiting) = self.lookups.take(lookup) else {
            return self.data.dropped(DropReason::LookupOver);
        };
        match &Request::parse(&waiting.request) {
            Err(_) => self.data.dropped(DropReason::LookupOver),
            Ok(request) => {
                let late = Late { lookup, waiting: &waiting, credentials };
                self.respond(now, &waiting.source, waiting.delivery, request, Some(late))
            }
        }
    }

    /// An answer of the store that counts again by now, for [`Server::credentials`]: its request waits for the fleet's store.
    pub fn next_answered(&mut self, now: Now) -> Option<(LookupId, Credentials)> {
        self.lookups.next_answered(now.ms)
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
        if let (Disposition::Wait, Some(Late { lookup, waiting, credentials })) = (&answer, late) {
            self.lookups.put_back(lookup, waiting.clone(), (now.ms + EXCHANGE_MS, credentials));
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
                // Counted when it comes again.
                self.data.stats.requests[request.method as usize] -= 1;
                Verdict::Wait { until_ms: now.ms + EXCHANGE_MS, otherwise: DropReason::QuotaPending }
            }
            Disposition::Drop(reason) => self.unanswered(now, source, request, reason),
        }
    }

    /// Drops a request, and tells of it if that is for a bound on requests.
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
        // RFC 8489 section 6.3 has authentication first, and then what section 6.3.1 says of unknown attributes.
        if let Err(answer) = self.authenticate(&mut context) {
            return answer;
        }
        // ACCESS-TOKEN is known to whom it let in.
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
            // Already answered before authentication.
            Method::Binding => Disposition::Later,
        }
    }

    /// Whether a client that sits behind one of our own relayed transport addresses wants an allocation, or to move one there. Through
    /// such a one its datagrams would come back to us, and two of them can be made to feed each other until the TTL ends.
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

    /// RFC 8489 section 12: the address that the request came from. Needs no credentials, and so gets no signature, nor SOFTWARE over
    /// UDP: 32 bytes for 20, over IPv6 44.
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
        self.data.stats.successes[Method::Binding as usize] += 1;
        let mut response = envelope.success(&mut self.reply);
        response.xor_address(kind::XOR_MAPPED_ADDRESS, client.address);
        envelope.sign(response, self.config.software.as_deref());
        Verdict::Reply { client: *client, link: *link, bytes: &self.reply }
    }

    /// The index of the allocation that a request other than Allocate is about.
    pub(crate) fn owned(&mut self, context: &Context<'_>) -> Result<u32, Disposition> {
        let found = match self.data.forwarding.find(context.client()) {
            None => self.arriving(context)?,
            found => found,
        };
        let Some((index, session)) = found.and_then(|index| Some((index, self.sessions.get(index)?))) else {
            // RFC 8656 section 5: a request about a 5-tuple without an allocation is an Allocation Mismatch.
            return Err(self.fail(context, 437));
        };
        if session.pending.is_some() {
            return Err(self.fail(context, 437));
        }
        // RFC 8656 section 5: later requests have the user of the Allocate, or Wrong Credentials. The name of a token's key is no
        // user's, and keys are rotated while sessions live.
        let who = &context.who;
        let both_tokens = session.grant.is_some() && who.grant.is_some();
        if (session.username != who.username && !both_tokens) || !session.is_in(&who.realm) {
            return Err(self.wrong_user(context));
        }
        let at_home = self.data.forwarding.find(context.client()) == Some(index);
        let session = self.sessions.get(index);
        if let Some(mobility) = session.and_then(|session| session.mobility.as_deref_mut())
            && context.envelope.signer.is_some()
        {
            mobility.heard_from(context.client(), at_home);
        }
        Ok(index)
    }

    /// 403, for a peer that may not be relayed to: counted by what refuses it and, at a bounded rate, told of. A request gets all its
    /// permissions or none, so it says which of its peers is refused; `others` is the number of those beside it.
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

    /// 441, for a user who is not the one of the allocation.
    pub(crate) fn wrong_user(&mut self, context: &Context<'_>) -> Disposition {
        self.refused(context, User::Name(&context.who.username), CredentialRefusal::WrongUser);
        self.write_failure(&context.envelope, 441);
        Disposition::Reply
    }

    /// A success response with nothing in it.
    pub(crate) fn done(&mut self, context: &Context<'_>) -> Disposition {
        self.data.stats.successes[context.request.method as usize] += 1;
        let response = context.envelope.success(&mut self.reply);
        context.envelope.sign(response, self.config.software.as_deref());
        Disposition::Reply
    }

    /// An error response whose code says why.
    pub(crate) fn fail(&mut self, context: &Context<'_>, code: u16) -> Disposition {
        self.refuse(context, code, RequestRefusal::Code)
    }

    /// An error response, which is told of at a bounded rate.
    pub(crate) fn refuse(&mut self, context: &Context<'_>, code: u16, why: RequestRefusal) -> Disposition {
        self.tell_of(context, code, why);
        let reason =
            if context.envelope.has_texts() { phrase(code, why) } else { reason_phrase(code).into() };
        self.write_failure_because(&context.envelope, code, &reason);
        Disposition::Reply
    }

    /// An error response for what a check of the request has found.
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

    /// 400, for this attribute.
    pub(crate) fn bad(&mut self, context: &Context<'_>, attribute: u16, fault: Fault) -> Disposition {
        self.deny_request(context, Denied::bad(attribute, fault))
    }

    /// Tells of an error response.
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

    /// Tells of an error response to a client that has not proved who it is.
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

    /// At a bounded rate, and strangers keep nobody else out of the log.
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

    /// An error response with this reason phrase, if it has one.
    fn write_failure_because(&mut self, to: &Envelope, code: u16, reason: &str) {
        self.data.stats.error(code);
        let response = to.error_because(&mut self.reply, code, reason);
        to.sign(response, self.config.software.as_deref());
    }

    /// 420, with the comprehension-required attributes that are not known (RFC 8489 section 6.3.1).
    pub(crate) fn unknown_attributes(&mut self, to: &Envelope, unknown: &[u16]) -> Disposition {
        self.data.stats.error(420);
        let mut response = to.error(&mut self.reply, 420);
        response.unknown_attributes(unknown);
        to.sign(response, self.config.software.as_deref());
        Disposition::Reply
    }
}

/// Whether a client at an address of 6to4 or Teredo wants an allocation or a channel, or to move an allocation there (RFC 8656 section
/// 21.4). Others such an address may refresh and delete.
fn is_by_tunnel(context: &Context<'_>) -> bool {
    let concerns = match context.request.method {
        Method::Allocate | Method::ChannelBind => true,
        Method::Refresh => context.request.get(kind::MOBILITY_TICKET).is_some(),
        _ => false,
    };
    concerns && is_tunneled(context.client().address.ip())
}

/// The reason phrase of a 403 for a peer. It names the address as the client did.
fn forbidden_peer(peer: IpAddr, others: usize) -> String {
    match others {
        0 => format!("Forbidden: peer {peer}"),
        _ => format!("Forbidden: peer {peer}; the request's other peers get no permission either"),
    }
}
