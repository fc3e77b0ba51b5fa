//! Bound on refusals to one 5-tuple: some clients answer a refusal at once with the next request.
//!
//! Over UDP and DTLS, whose clients repeat a request, those beyond the bound are not answered. Over streams no client repeats: all requests are
//! answered, and the stream is read on later ([`crate::server::Effect::Slow`]).

use turnpike_wire::stun::{View, kind};

use crate::{
    rates::{Rate, Rates},
    server::{
        Client, Policy, Server,
        request::{Method, Request},
    },
    time::Now,
};

/// More than can have something in their buckets at the same time.
const MOST: usize = 4096;

/// Refusals of one method and peer with one code to a 5-tuple: a hundred at once, and then ten a second. libnice sent 9,900 ChannelBinds
/// a second.
const REPEATED: Rate = Rate::new(100, 100);
/// All 5-tuples together have no limit.
const NO_LIMIT: Rate = Rate::new(1, 0);

/// Buckets of repeated refusals.
pub(crate) fn repeated_refusals() -> Rates {
    Rates::new(REPEATED, NO_LIMIT, MOST)
}

impl<P: Policy> Server<P> {
    /// Checks that the reply buffer holds no refusal that the 5-tuple was sent too often. Concerns requests about an allocation, and goes on
    /// after that has ended.
    /// Requests with a nonce of the client's own have buckets of their own, which no forger of its address can fill.
    pub(crate) fn may_refuse_again(
        &mut self,
        now: Now,
        (client, has_own_nonce): (&Client, bool),
        request: &Request<'_>,
    ) -> bool {
        let is_about_allocation = match request.method {
            Method::Refresh | Method::CreatePermission | Method::ChannelBind | Method::Connect => true,
            Method::Allocate | Method::ConnectionBind | Method::Binding => false,
        };
        let is_refusal = matches!(self.reply[..], [high, low, ..] if high & 1 != 0 && low & 0x10 != 0);
        if !is_about_allocation || !is_refusal || request.view.mac().is_none() {
            return true;
        }
        let Ok(reply) = View::new_checked(&self.reply) else { return true };
        let Some([_, _, class, number, ..]) = reply.get(kind::ERROR_CODE) else { return true };
        // Allocated once, so that a flood allocates nothing.
        self.repeated_refusals.make_room_for_all();
        let now_us = now.ms.saturating_mul(1000);
        let peer = request.peers().next();
        let cause = (client, has_own_nonce, request.method.number(), peer, class, number);
        self.repeated_refusals.admit(now_us, cause)
    }
}
