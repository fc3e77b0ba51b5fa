//! What answering a request needs to know of it, in one place: it is handed through all that have a part in the answer.

use std::cell::Cell;

use super::{
    Arrival, Client, Credentials, LookupId, Source, Transport, auth::Who, lookups::Waiting, nonce::Standing,
    request::Request, response::Envelope,
};
use crate::time::Now;

/// A request that is being answered.
pub(super) struct Context<'a> {
    pub(super) now: Now,
    pub(super) source: Source,
    pub(super) delivery: Delivery,
    pub(super) request: &'a Request<'a>,
    /// What the response takes over from the request, and its signer once the client has proved who it is.
    pub(super) envelope: Envelope,
    /// What the nonce of a signed request is worth at the client's own address.
    pub(super) nonce: Standing,
    /// Nobody until then.
    pub(super) who: Who,
    /// What the store has answered, if it had to be waited for.
    pub(super) credentials: Option<Credentials>,
    /// A stream brought the request just now, and can bring it again; or it is kept with what the store has answered.
    pub(super) can_wait: bool,
    /// Set once the request has shown a nonce that this client was given. A forger of the client's address has none.
    pub(super) has_own_nonce: &'a Cell<bool>,
    /// When the request came, in milliseconds.
    pub(super) asked_ms: u64,
    /// Tells the worker that has forwarded the request, with the answer, to expect the client.
    pub(super) arrival: &'a Cell<Option<Arrival>>,
}

/// How a request reached this worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// From the client.
    Direct,
    /// With its stream, which is this worker's from now on.
    HandedOver,
    /// From worker `via`, with which the client remains.
    Forwarded {
        via: u16,
        /// Another allocation has the client's 5-tuple there, or arrives at it.
        occupied: bool,
    },
}

/// An answer of the store, and the request that has waited for it.
pub(super) struct Late<'a> {
    pub(super) lookup: LookupId,
    pub(super) waiting: &'a Waiting,
    pub(super) credentials: Credentials,
}

impl<'a> Context<'a> {
    /// `late` is what the store has answered to a request that came before.
    pub(super) fn new(
        now: Now,
        source: Source,
        delivery: Delivery,
        request: &'a Request<'a>,
        late: Option<&Late<'_>>,
        transport: Transport,
        (arrival, has_own_nonce): (&'a Cell<Option<Arrival>>, &'a Cell<bool>),
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
            arrival,
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.source.client
    }
}
