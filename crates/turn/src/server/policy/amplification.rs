//! Optional limit on refusals per prefix: a UDP source address may be forged, and the refusal goes to the
//! owner of that address.

use std::net::IpAddr;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_rates::Rate;
use turnpike_wire::stun::View;

use crate::{
    server::{DropReason, Policy, Server, Transport},
    time::Now,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusalLimit {
    /// Refusals per second on each worker, with a burst of two seconds' worth.
    pub per_second: u32,
}

/// Maximum number of tracked prefixes, which bounds the memory of a worker during a flood. Refusals to
/// additional prefixes are not limited.
const MOST: usize = 16_384;
/// Milliseconds between two sweeps of a full table.
const SWEEP_MS: u64 = 1000;

/// Time at which each prefix's bucket is full again, in microseconds.
#[derive(Default)]
pub(crate) struct AmplificationGuard {
    buckets: HashMap<IpAddr, u64, RandomState>,
    sweep_ms: u64,
}

impl AmplificationGuard {
    fn admit(&mut self, now_ms: u64, limit: RefusalLimit, prefix: IpAddr) -> bool {
        let now_us = now_ms.saturating_mul(1000);
        if self.buckets.len() >= MOST && !self.buckets.contains_key(&prefix) {
            if now_ms >= self.sweep_ms {
                self.sweep_ms = now_ms + SWEEP_MS;
                self.buckets.retain(|_, full_at| *full_at > now_us);
            }
            if self.buckets.len() >= MOST {
                return true;
            }
        }
        let full_at = self.buckets.entry(prefix).or_insert(0);
        let spent = Rate::per_second(limit.per_second, 2).spend(*full_at, now_us);
        *full_at = spent.unwrap_or(*full_at);
        spent.is_some()
    }
}

impl<P: Policy> Server<P> {
    /// Signed replies and other transports are exempt: their clients' addresses are verified.
    pub(crate) fn may_answer(&mut self, now: Now, client: &crate::server::Client) -> Result<(), DropReason> {
        let Some(limit) = self.config.refusals else { return Ok(()) };
        let is_refusal = matches!(self.reply[..], [high, low, ..] if high & 1 != 0 && low & 0x10 != 0);
        if !is_refusal || self.config.listener(client.listener).transport != Transport::Udp {
            return Ok(());
        }
        if View::new_checked(&self.reply).is_ok_and(|reply| reply.mac().is_some()) {
            return Ok(());
        }
        let prefix = self.config.prefixes.of(client.address.ip());
        if self.amplification.admit(now.ms, limit, prefix) { Ok(()) } else { Err(DropReason::RefusalLimit) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: RefusalLimit = RefusalLimit { per_second: 10 };

    fn prefix(n: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(n).into()
    }

    #[test]
    fn each_prefix_has_its_own_rate() {
        let mut guard = AmplificationGuard::default();
        let mut admitted = |now_ms, of| (0..1000).filter(|_| guard.admit(now_ms, LIMIT, prefix(of))).count();
        assert_eq!([admitted(0, 1), admitted(0, 2)], [20, 20]);
        assert_eq!([admitted(1000, 1), admitted(60_000, 1)], [10, 20]);
    }

    #[test]
    fn memory_is_bounded_and_additional_prefixes_are_not_limited() {
        let mut guard = AmplificationGuard::default();
        for n in 0..50_000 {
            assert!(guard.admit(0, LIMIT, prefix(n)));
        }
        assert_eq!(guard.buckets.len(), MOST);
        assert!(guard.admit(60_000, LIMIT, prefix(99_999)));
        assert_eq!(guard.buckets.len(), 1, "full buckets are removed");
    }
}
