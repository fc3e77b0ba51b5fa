//! Answering requests: who asks, whose allocation it is about, and the responses that all methods share. Data never comes here.

use std::{net::SocketAddr, sync::Arc};

use smallvec::SmallVec;

use super::{
    Client, ConnectRequest, ConnectionId, CredentialRefusal, DropReason, Effect, Gate, MoveRequest,
    OpenRequest, RelayTransport, Server, User, Verdict, attribute,
    auth::{MAX_QUEUED, Who, printable},
    nat_discovery::unknown_in_plain_binding,
    request::{Method, Request},
    response::{Response, Signer, reason_phrase},
};
use crate::time::Now;

/// What became of a request.
pub(super) enum Answer {
    /// The reply buffer holds it.
    Reply,
    /// The same, to be sent to where and from where this says.
    ReplyFrom(Client),
    Open(OpenRequest),
    Connect(ConnectRequest),
    /// The reply buffer holds the reply.
    Bind(ConnectionId),
    HandOver(u16),
    Forward(u16),
    Move(MoveRequest),
    Drop(DropReason),
}

impl<G: Gate> Server<G> {
    pub(super) fn request<'a>(&'a mut self, now: Now, client: &Client, datagram: &[u8]) -> Verdict<'a> {
        let answer = self.answer_bytes(now, client, datagram);
        self.verdict(*client, answer)
    }

    pub(super) fn answer_bytes(&mut self, now: Now, client: &Client, datagram: &[u8]) -> Answer {
        match Request::parse(datagram) {
            Ok(request) => {
                self.stats.requests[request.method as usize] += 1;
                self.answer(now, client, &request)
            }
            Err(reason) => Answer::Drop(reason),
        }
    }

    pub(super) fn verdict<'a>(&'a mut self, client: Client, answer: Answer) -> Verdict<'a> {
        match answer {
            Answer::Reply => Verdict::Reply { client, bytes: &self.reply },
            Answer::ReplyFrom(client) => Verdict::Reply { client, bytes: &self.reply },
            Answer::Open(request) => Verdict::Open(request),
            Answer::Connect(request) => Verdict::Connect(request),
            Answer::Bind(connection) => Verdict::Bind { connection, client, bytes: &self.reply },
            Answer::HandOver(worker) => Verdict::HandOver { worker },
            Answer::Forward(worker) => Verdict::Forward { worker },
            Answer::Move(request) => Verdict::Move(request),
            Answer::Drop(reason) => self.dropped(reason),
        }
    }

    pub(super) fn answer(&mut self, now: Now, client: &Client, request: &Request<'_>) -> Answer {
        if request.method == Method::Binding {
            return self.binding(now, client, request);
        }
        // RFC 8489 section 6.3: first "any checks [...] that the authentication mechanism requires", then 6.3.1.
        let who = match self.authenticate(now, client, request) {
            Ok(who) => who,
            Err(answer) => return answer,
        };
        // ACCESS-TOKEN is known to whom it let in.
        let is_unknown = |kind: &u16| *kind != attribute::ACCESS_TOKEN || who.grant.is_none();
        let unknown: SmallVec<[u16; 4]> = request.unknown.iter().copied().filter(is_unknown).collect();
        if !unknown.is_empty() {
            return self.unknown_attributes_of(request, who.signer.as_ref(), &unknown);
        }
        if self.is_loop(client, request) {
            self.stats.loop_refusals += 1;
            return self.fail(request, who.signer.as_ref(), 403);
        }
        match request.method {
            Method::Allocate => self.allocate(now, client, request, who),
            Method::Refresh => self.refresh(now, client, request, &who),
            Method::CreatePermission => self.create_permission(now, client, request, &who),
            Method::ChannelBind => self.channel_bind(now, client, request, &who),
            Method::Connect => self.connect(now, client, request, who),
            Method::ConnectionBind => self.connection_bind(now, client, request, &who),
            Method::Binding => self.binding(now, client, request),
        }
    }

    /// Whether a client that sits behind one of our own relayed transport addresses wants an allocation, or to move one there. Through
    /// such a one its datagrams would come back to us, and two of them can be made to feed each other until the TTL ends.
    fn is_loop(&mut self, client: &Client, request: &Request<'_>) -> bool {
        let concerns = match request.method {
            Method::Allocate | Method::ConnectionBind => true,
            Method::Refresh => request.get(attribute::MOBILITY_TICKET).is_some(),
            _ => false,
        };
        if !concerns {
            return false;
        }
        let is_stream = self.config.listener(client.listener).transport.is_stream();
        let transport = if is_stream { RelayTransport::Tcp } else { RelayTransport::Udp };
        self.gate.is_relayed(client.address, transport)
    }

    /// RFC 8489 section 12: the address that the request came from. Needs no credentials, and so gets neither SOFTWARE
    /// nor a signature: 32 bytes for 20, over IPv6 44.
    pub(super) fn binding(&mut self, now: Now, client: &Client, request: &Request<'_>) -> Answer {
        if let Some(answer) = self.discover(now, client, request) {
            return answer;
        }
        // Nearly no request has any.
        if !request.unknown.is_empty() {
            let unknown = unknown_in_plain_binding(request);
            if !unknown.is_empty() {
                return self.unknown_attributes_of(request, None, &unknown);
            }
        }
        self.stats.successes[Method::Binding as usize] += 1;
        let mut response = Response::success(&mut self.reply, Method::Binding, request.transaction);
        response.xor_address(attribute::XOR_MAPPED_ADDRESS, client.address);
        response.finish(request.fingerprint);
        Answer::Reply
    }

    /// The allocation that a request other than Allocate is about.
    pub(super) fn owned(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
    ) -> Result<u32, Answer> {
        let found = match self.table.find(client) {
            None => self.arriving(now, client)?,
            found => found,
        };
        let Some((index, (_, allocation))) = found.and_then(|index| Some((index, self.table.at(index)?)))
        else {
            // RFC 8656 section 5: "For all TURN messages (including ChannelData) EXCEPT an Allocate request, if the 5-tuple
            // does not identify an existing allocation, then the message MUST either be rejected with a 437 Allocation
            // Mismatch error (if it is a request) or be silently ignored".
            return Err(self.fail(request, who.signer.as_ref(), 437));
        };
        if allocation.pending.is_some() {
            return Err(self.fail(request, who.signer.as_ref(), 437));
        }
        // RFC 8656 section 5: if "the request does not use the same username as used to create the allocation, then the
        // request MUST be rejected with a 441 (Wrong Credentials) error."
        let same_realm = allocation.is_in(&who.realm);
        // The name of a token's key is no user's, and keys are rotated while sessions live.
        let both_tokens = allocation.grant.is_some() && who.grant.is_some();
        if (allocation.username != who.username && !both_tokens) || !same_realm {
            self.refused(now, client, User::Name(&who.username), CredentialRefusal::WrongUser);
            return Err(self.fail(request, who.signer.as_ref(), 441));
        }
        Ok(index)
    }

    /// 403, for a peer that may not be relayed to: counted by what refuses it and, at a bounded rate, told of.
    pub(super) fn refuse_peer(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
        peer: SocketAddr,
    ) -> Answer {
        let by = self.config.peers.denial(peer);
        self.stats.peer_refusals[by.index()] += 1;
        if self.effects.len() < MAX_QUEUED
            && let Some(suppressed) = self.peer_refusals.admit(now.ms, client.address.ip())
        {
            self.effects.push_back(Effect::PeerRefused {
                client: *client,
                realm: Arc::clone(&who.realm),
                username: printable(&who.username),
                peer,
                by,
                suppressed,
            });
        }
        self.fail(request, who.signer.as_ref(), 403)
    }

    /// A success response with nothing in it.
    pub(super) fn done(&mut self, request: &Request<'_>, signer: Option<&Signer>) -> Answer {
        self.stats.successes[request.method as usize] += 1;
        let response = Response::success(&mut self.reply, request.method, request.transaction);
        response.sign(signer, self.config.software.as_deref(), request.fingerprint);
        Answer::Reply
    }

    /// An error response.
    pub(super) fn fail(&mut self, request: &Request<'_>, signer: Option<&Signer>, code: u16) -> Answer {
        self.write_failure(request.method, request.transaction, signer, request.fingerprint, code);
        Answer::Reply
    }

    pub(super) fn write_failure(
        &mut self,
        method: Method,
        transaction: [u8; 12],
        signer: Option<&Signer>,
        fingerprint: bool,
        code: u16,
    ) {
        self.stats.error(code);
        // Unauthenticated, it says no more than it must.
        let reason = if signer.is_some() { reason_phrase(code) } else { "" };
        let response = Response::error(&mut self.reply, method, transaction, code, reason);
        response.sign(signer, self.config.software.as_deref(), fingerprint);
    }

    /// RFC 8489 section 6.3.1: "an error response with an error code of 420 (Unknown Attribute) [...] and includes an
    /// UNKNOWN-ATTRIBUTES attribute in the response that lists the unknown comprehension-required attributes."
    pub(super) fn unknown_attributes_of(
        &mut self,
        request: &Request<'_>,
        signer: Option<&Signer>,
        unknown: &[u16],
    ) -> Answer {
        self.stats.error(420);
        let reason = if signer.is_some() { reason_phrase(420) } else { "" };
        let mut response = Response::error(&mut self.reply, request.method, request.transaction, 420, reason);
        let mut list = [0; 64];
        for (pair, kind) in list.chunks_exact_mut(2).zip(unknown) {
            pair.copy_from_slice(&kind.to_be_bytes());
        }
        response.attribute(attribute::UNKNOWN_ATTRIBUTES, &list[..2 * unknown.len()]);
        response.sign(signer, self.config.software.as_deref(), request.fingerprint);
        Answer::Reply
    }
}
