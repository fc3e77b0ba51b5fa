use std::cell::Cell;

use crate::{
    server::{
        Client, LookupId, LookupResult, PendingMove, Source, Transport,
        auth::{claim::Who, lookups::WaitingRequest, nonce::Standing},
        request::{Delivery, Request, response::Envelope},
    },
    time::Now,
};

pub(crate) struct Context<'a> {
    pub(crate) now: Now,
    pub(crate) source: Source,
    pub(crate) delivery: Delivery,
    pub(crate) request: &'a Request<'a>,
    pub(crate) envelope: Envelope,
    /// Validity of the nonce for the client's address.
    pub(crate) nonce: Standing,
    pub(crate) who: Who,
    pub(crate) lookup_result: Option<LookupResult>,
    /// The request may wait for the fleet's store: it came over a stream, or is kept with its lookup result.
    pub(crate) can_wait: bool,
    /// Set if the nonce was issued to this client, which rules out a forged source address.
    pub(crate) has_own_nonce: &'a Cell<bool>,
    pub(crate) asked_ms: u64,
    pub(crate) pending_move: &'a Cell<Option<PendingMove>>,
}

pub(crate) struct Late<'a> {
    pub(crate) lookup: LookupId,
    pub(crate) waiting: &'a WaitingRequest,
    pub(crate) result: LookupResult,
}

impl<'a> Context<'a> {
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
        let lookup_result = late.map(|late| late.result.clone());
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
            lookup_result,
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
