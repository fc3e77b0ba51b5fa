//! What strangers can make the server send to others. Over UDP a source address may be forged, and a refusal goes to whoever has it: so
//! there may be a bound on refusals to one prefix, in number and by the bytes that came from there.

use std::net::IpAddr;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use turnpike_wire::stun::View;

use super::{DropReason, Gate, Server, Transport};
use crate::{rates::Rate, time::Now};

/// How many refusals nobody has signed may go to one prefix over UDP ([`super::ServerConfig::prefixes`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusalLimit {
    /// So many a second, and of two seconds at once. Of each worker.
    pub per_second: u32,
}

/// Bytes of refusals for each byte of requests, beyond [`HEAD_START`]: three, as RFC 9000 section 8.1 has it for addresses that have
/// not been validated. Our usual challenge is just as long.
const FACTOR: i64 = 3;
/// Bytes that may be sent to a prefix beyond that, once in ten seconds: who has a long realm challenges short requests, too.
const HEAD_START: i64 = 2000;
/// So many of them come back in a second.
const REGAINED: i64 = 200;
/// Prefixes that are remembered. More than can have something in their accounts in the flood that a worker takes; for those beyond,
/// nothing is counted: who forges that many sends nobody much.
const MOST: usize = 16_384;
/// A full table is looked through once in so many milliseconds at most.
const SWEEP_MS: u64 = 1000;

/// The accounts of prefixes.
#[derive(Default)]
pub(super) struct Reflection {
    accounts: HashMap<IpAddr, Account, RandomState>,
    sweep_ms: u64,
}

#[derive(Clone, Copy)]
struct Account {
    /// When its bucket of refusals is full again, in microseconds.
    full_at_us: u64,
    /// Bytes that may be sent there.
    credit: i64,
    credited_ms: u64,
}

impl Account {
    const NEW: Self = Self { full_at_us: 0, credit: HEAD_START, credited_ms: 0 };

    fn regain(&mut self, now_ms: u64) {
        let seconds = i64::try_from(now_ms.saturating_sub(self.credited_ms) / 1000).unwrap_or(i64::MAX);
        if seconds > 0 {
            self.credited_ms = now_ms;
            self.credit = seconds.saturating_mul(REGAINED).saturating_add(self.credit).min(HEAD_START);
        }
    }

    fn is_new(mut self, now_ms: u64) -> bool {
        self.regain(now_ms);
        self.full_at_us <= now_ms.saturating_mul(1000) && self.credit >= HEAD_START
    }
}

impl Reflection {
    /// Whether a request of so many bytes may be answered by a refusal of so many.
    fn admit(
        &mut self,
        now_ms: u64,
        limit: RefusalLimit,
        prefix: IpAddr,
        request: usize,
        refusal: usize,
    ) -> Result<(), DropReason> {
        if self.accounts.len() >= MOST && !self.accounts.contains_key(&prefix) {
            if now_ms >= self.sweep_ms {
                self.sweep_ms = now_ms + SWEEP_MS;
                self.accounts.retain(|_, account| !account.is_new(now_ms));
            }
            if self.accounts.len() >= MOST {
                return Ok(());
            }
        }
        let account = self.accounts.entry(prefix).or_insert(Account { credited_ms: now_ms, ..Account::NEW });
        account.regain(now_ms);
        let bytes = |len: usize| i64::try_from(len).unwrap_or(i64::MAX);
        account.credit = account.credit.saturating_add(FACTOR.saturating_mul(bytes(request))).min(HEAD_START);
        let now_us = now_ms.saturating_mul(1000);
        let Some(full_at_us) = Rate::per_second(limit.per_second, 2).spend(account.full_at_us, now_us) else {
            return Err(DropReason::RefusalLimit);
        };
        if account.credit < bytes(refusal) {
            return Err(DropReason::RefusalRatio);
        }
        (account.full_at_us, account.credit) = (full_at_us, account.credit - bytes(refusal));
        Ok(())
    }
}

impl<G: Gate> Server<G> {
    /// Whether what the reply buffer holds may be sent to this client, in answer to so many bytes. Only refusals that nobody has signed,
    /// over UDP, are bounded: all others have shown that they are where they say.
    pub(super) fn may_answer(
        &mut self,
        now: Now,
        client: &super::Client,
        request: usize,
    ) -> Result<(), DropReason> {
        let Some(limit) = self.config.refusals else { return Ok(()) };
        let is_refusal = matches!(self.reply[..], [high, low, ..] if high & 1 != 0 && low & 0x10 != 0);
        if !is_refusal || self.config.listener(client.listener).transport != Transport::Udp {
            return Ok(());
        }
        if View::new_checked(&self.reply).is_ok_and(|reply| reply.mac().is_some()) {
            return Ok(());
        }
        let prefix = self.config.prefixes.of(client.address.ip());
        self.reflection.admit(now.ms, limit, prefix, request, self.reply.len())
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
    fn a_prefix_gets_its_rate_and_leaves_others_alone() {
        let mut reflection = Reflection::default();
        let mut admitted = |now_ms, of| {
            (0..1000).filter(|_| reflection.admit(now_ms, LIMIT, prefix(of), 28, 84).is_ok()).count()
        };
        assert_eq!([admitted(0, 1), admitted(0, 2)], [20, 20]);
        assert_eq!([admitted(1000, 1), admitted(60_000, 1)], [10, 20]);
    }

    #[test]
    fn no_prefix_is_sent_more_than_three_times_what_came_from_there_and_a_head_start() {
        let mut reflection = Reflection::default();
        let many = RefusalLimit { per_second: 1_000_000 };
        // A realm of 127 characters makes a challenge of 203 bytes.
        let (mut received, mut sent, mut refused) = (0, 0, 0);
        for now_ms in 0..10_000 {
            received += 28;
            match reflection.admit(now_ms, many, prefix(1), 28, 203) {
                Ok(()) => sent += 203,
                Err(reason) => {
                    assert_eq!(reason, DropReason::RefusalRatio);
                    refused += 1;
                }
            }
        }
        assert!(refused > 5000 && sent <= 3 * received + 2000 + 2000, "{sent} for {received}");
        // Ours is never refused for its length.
        assert!((0..10_000).all(|now_ms| reflection.admit(now_ms, many, prefix(2), 28, 84).is_ok()));
    }

    #[test]
    fn memory_is_bounded_and_whoever_finds_no_room_is_answered() {
        let mut reflection = Reflection::default();
        for n in 0..50_000 {
            assert_eq!(reflection.admit(0, LIMIT, prefix(n), 28, 84), Ok(()));
        }
        assert_eq!(reflection.accounts.len(), MOST);
        assert_eq!(reflection.admit(60_000, LIMIT, prefix(99_999), 28, 84), Ok(()));
        assert_eq!(reflection.accounts.len(), 1, "those that owe nothing are forgotten");
    }
}
