//! What answering a request needs to know of it, in one place: it is handed through all that have a part in the answer.

use std::cell::Cell;

use crate::{
    server::{
        Client, Credentials, LookupId, PendingMove, Source, Transport,
        auth::{claim::Who, lookups::Waiting, nonce::Standing},
        request::{Delivery, Request, response::Envelope},
    },
    time::Now,
};

/// A request that is being answered.
pub(crate) struct Context<'a> {
    pub(crate) now: Now,
    pub(crate) source: Source,
    pub(crate) delivery: Delivery,
    pub(crate) request: &'a Request<'a>,
    /// What the response takes over from the request, and its signer once the client has proved who it is.
    pub(crate) envelope: Envelope,
    /// What the nonce of a signed request is worth at the client's own address.
    pub(crate) nonce: Standing,
    /// Nobody until then.
    pub(crate) who: Who,
    /// What the store has answered, if it had to be waited for.
    pub(crate) credentials: Option<Credentials>,
    /// A stream brought the request just now, and can bring it again; or it is kept with what the store has answered.
    pub(crate) can_wait: bool,
    /// Set once the request has shown a nonce that this client was given. A forger of the client's address has none.
    pub(crate) has_own_nonce: &'a Cell<bool>,
    /// When the request came, in milliseconds.
    pub(crate) asked_ms: u64,
    /// Tells the worker that has forwarded the request, with the answer, to expect the client.
    pub(crate) pending_move: &'a Cell<Option<PendingMove>>,
}

/// An answer of the store, and the request that has waited for it.
pub(crate) struct Late<'a> {
    pub(crate) lookup: LookupId,
    pub(crate) waiting: &'a Waiting,
    pub(crate) credentials: Credentials,
}

impl<'a> Context<'a> {
    /// `late` is what the store has answered to a request that came before.
    pub(crate) fn new(
        now: Now,
        source: Source,
        delivery: Delivery,
        request: &'a Request<'a>,
        late: Option<&Late<'_>>,
        transport: Transport,
        (pending_move, has_own_nonce): (&'a Cell<Option<PendingMove>>, &'a Cell<bool>),
    ) -> Self {
        let (envelope, who) = (Envelope::unsigned(request, transport), Who::default());
        let is_stream = matches!(transport, Transport::Tcp | Transport::Tls);
        let can_wait = is_stream && (late.is_some() || delivery == Delivery::Direct);
        let credentials = late.map(|late| late.credentials.clone());
        let asked_ms = late.map_or(now.ms, |late| late.waiting.asked_ms);
        let nonce = Standing::Foreign;
        Self {
            now,
            source,
            delivery,
            request,
            envelope,
            nonce,
            who,
            credentials,
            can_wait,
            has_own_nonce,
            asked_ms,
            pending_move,
        }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.source.client
    }
}
