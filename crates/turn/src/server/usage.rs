//! Usage of an allocation for the usage ledger. The state contains the reported totals and moves with the
//! allocation to other workers and processes, so that each byte is reported exactly once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Effect, Policy, Server};
use crate::time::Now;

/// Totals since an allocation began, or their increase since the previous report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationUsage {
    pub lived_ms: u64,
    /// Datagrams and their payload bytes, as in `to_client`.
    pub to_peer: (u64, u64),
    pub to_client: (u64, u64),
}

impl AllocationUsage {
    fn since(&self, before: &Self) -> Self {
        let less =
            |now: (u64, u64), then: (u64, u64)| (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1));
        Self {
            lived_ms: self.lived_ms.saturating_sub(before.lived_ms),
            to_peer: less(self.to_peer, before.to_peer),
            to_client: less(self.to_client, before.to_client),
        }
    }
}

/// Usage of an allocation since its previous report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageReport<'s> {
    pub realm: &'s Arc<str>,
    pub username: &'s str,
    /// Name that quotas use.
    pub identity: &'s str,
    /// True in the first report of an allocation.
    pub is_first: bool,
    pub usage: AllocationUsage,
}

impl<'s> UsageReport<'s> {
    fn new(
        (realm, username, identity): (&'s Arc<str>, &'s str, &'s str),
        before: Option<&AllocationUsage>,
        total: AllocationUsage,
    ) -> Self {
        let usage = before.map_or(total, |before| total.since(before));
        Self { realm, username, identity, is_first: before.is_none(), usage }
    }

    /// The last report of an allocation that has ended; `None` for other effects, and if the allocation ended
    /// before its sockets opened.
    #[must_use]
    pub fn of_ended(effect: &'s Effect) -> Option<Self> {
        let Effect::Closed {
            realm, username, identity, relayed, lived_ms, to_peer, to_client, reported, ..
        } = effect
        else {
            return None;
        };
        let total = AllocationUsage { lived_ms: *lived_ms, to_peer: *to_peer, to_client: *to_client };
        let owner = (realm, &**username, identity.as_deref().unwrap_or(username));
        let has_opened = relayed.iter().any(Option::is_some);
        has_opened.then(|| Self::new(owner, reported.as_deref(), total))
    }
}

impl<P: Policy> Server<P> {
    /// Reports the usage of the allocation in a slot, and applies volume quotas to it; `None` if the slot is free
    /// or its relay sockets are still opening.
    pub fn report_usage(&mut self, now: Now, slot: u32) -> Option<UsageReport<'_>> {
        if self.allocation(slot)?.2.pending.is_some() {
            return None;
        }
        self.follow_volume(now, slot);
        let (_, entry, state) = self.allocation(slot)?;
        let total = AllocationUsage {
            lived_ms: now.ms.wrapping_sub(state.opened_ms),
            to_peer: entry.to_peer,
            to_client: entry.to_client,
        };
        let before = match &mut state.reported {
            Some(reported) => Some(std::mem::replace(&mut **reported, total)),
            none => none.replace(Box::new(total)).map(|before| *before),
        };
        let identity = state.identity.as_deref().unwrap_or(&state.username);
        Some(UsageReport::new((&state.realm, &state.username, identity), before.as_ref(), total))
    }
}
