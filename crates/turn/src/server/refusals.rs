//! Bounds on refusals: on their log lines, by source, so that no client keeps another's out of the log; and on the answers to one
//! 5-tuple, since some clients answer a refusal at once with the next request.

use std::net::IpAddr;

use turnpike_wire::stun::{View, kind};

use super::{
    Client, Gate, Server,
    request::{Method, Request},
};
use crate::{
    rates::{Rate, Rates},
    time::Now,
};

/// Twenty of one address at once, and then one a second.
const EACH: Rate = Rate::new(20, 1000);
/// Of all of them: what a log can be asked to take from one worker.
const TOTAL: Rate = Rate::new(200, 10);
/// More than can have something in their buckets at the same time.
const MOST: usize = 4096;

/// Refusals of one method and peer with one code to a 5-tuple: a hundred at once, and then ten a second. libnice sent 9,900 ChannelBinds
/// a second.
const REPEATED: Rate = Rate::new(100, 100);
/// All 5-tuples together have no limit.
const NO_LIMIT: Rate = Rate::new(1, 0);

/// Buckets of repeated refusals.
pub(super) fn repeated_refusals() -> Rates {
    Rates::new(REPEATED, NO_LIMIT, MOST)
}

impl<G: Gate> Server<G> {
    /// Checks that the reply buffer holds no refusal that the 5-tuple was sent too often. Concerns requests about an allocation, and goes on
    /// after that has ended. The client repeats its request and is answered then; over streams, where no client repeats, all are answered.
    pub(super) fn may_refuse_again(&mut self, now: Now, client: &Client, request: &Request<'_>) -> bool {
        let is_about_allocation = match request.method {
            Method::Refresh | Method::CreatePermission | Method::ChannelBind | Method::Connect => true,
            Method::Allocate | Method::ConnectionBind | Method::Binding => false,
        };
        let is_refusal = matches!(self.reply[..], [high, low, ..] if high & 1 != 0 && low & 0x10 != 0);
        if !is_about_allocation || !is_refusal || request.view.mac().is_none() || self.is_stream(client) {
            return true;
        }
        let Ok(reply) = View::new_checked(&self.reply) else { return true };
        let Some([_, _, class, number, ..]) = reply.get(kind::ERROR_CODE) else { return true };
        // Allocated once, so that a flood allocates nothing.
        self.repeated_refusals.make_room_for_all();
        let now_us = now.ms.saturating_mul(1000);
        let peer = request.peers().next();
        self.repeated_refusals.admit(now_us, (client, request.method.number(), peer, class, number))
    }
}

/// Bounds log lines of refusals.
pub(super) struct Refusals {
    rates: Rates,
    suppressed: u64,
}

impl Default for Refusals {
    fn default() -> Self {
        Self { rates: Rates::new(EACH, TOTAL, MOST), suppressed: 0 }
    }
}

impl Refusals {
    /// `Some(how many were suppressed since the last, whoever's they were)` if this one may become an effect.
    pub(super) fn admit(&mut self, now_ms: u64, source: IpAddr) -> Option<u64> {
        if self.rates.admit_address(now_ms.saturating_mul(1000), source) {
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_cannot_silence_another_and_what_is_suppressed_is_counted() {
        let mut refusals = Refusals::default();
        let mut admitted = |now_ms, source: &str, tries| {
            let source = source.parse().unwrap();
            (0..tries).filter_map(|_| refusals.admit(now_ms, source)).collect::<Vec<_>>()
        };
        assert_eq!(admitted(5000, "192.0.2.1", 100_000), vec![0; 20]);
        assert_eq!(admitted(5000, "198.51.100.1", 2), [99_980, 0]);
        assert_eq!(admitted(6000, "192.0.2.1", 1000), [0]);
        assert_eq!(admitted(7000, "192.0.2.1", 1), [999]);
    }
}
