//! Rate limit for refusals to one 5-tuple: some clients react to a refusal by immediately sending the next
//! request.
//!
//! Over UDP and DTLS, where clients retransmit, requests above the limit get no response. Over streams every
//! request gets a response, but reading from the stream pauses ([`crate::server::Effect::Slow`]).

use turnpike_rates::{Rate, Rates};
use turnpike_wire::stun::{View, kind};

use crate::{
    server::{
        Client, Policy, Server,
        request::{Method, Request},
    },
    time::Now,
};

/// Maximum number of buckets tracked at the same time; additional 5-tuples are not limited.
const MOST: usize = 4096;

/// Allows 100 refusals at once, then ten per second. Without this limit, libnice sent 9,900 ChannelBinds per
/// second.
const REPEATED: Rate = Rate::new(100, 100);
const NO_LIMIT: Rate = Rate::new(1, 0);

pub(crate) fn repeated_refusals() -> Rates {
    Rates::new(REPEATED, NO_LIMIT, MOST)
}

impl<P: Policy> Server<P> {
    /// Returns false if the reply buffer holds a refusal that this 5-tuple has received too often. Applies to
    /// requests about an allocation, even after it has ended. Requests with a nonce issued to this client
    /// have separate buckets, which an attacker who forges its address cannot use up.
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
        // Reserve the memory now, so that a flood causes no allocations.
        self.repeated_refusals.make_room_for_all();
        let now_us = now.ms.saturating_mul(1000);
        let peer = request.peers().next();
        let cause = (client, has_own_nonce, request.method.number(), peer, class, number);
        self.repeated_refusals.admit(now_us, cause)
    }
}
