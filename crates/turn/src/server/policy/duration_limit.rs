//! Maximum duration of an allocation regardless of refreshes, by age and by the expiry of its credential.

use std::collections::HashMap;

use crate::{
    server::{
        ClosedReason, Effect, Family, Policy, Server, allocation_state::AllocationState,
        request::context::Context,
    },
    time::Now,
};

/// Maximum duration in seconds; `None` for unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaxAllocationDuration {
    pub seconds: Option<u32>,
    pub realms: HashMap<Box<str>, Option<u32>>,
}

impl MaxAllocationDuration {
    pub(crate) fn limit(&self, realm: &str, seconds: u32) -> u32 {
        self.of(realm).map_or(seconds, |most| most.min(seconds))
    }

    fn of(&self, realm: &str) -> Option<u32> {
        self.realms.get(realm).copied().unwrap_or(self.seconds)
    }

    fn left_ms(&self, now: Now, state: &AllocationState) -> Option<u64> {
        // The subtraction wraps, because the allocation may be older than this process's clock.
        let age_ms = now.ms.wrapping_sub(state.opened_ms);
        self.of(&state.realm).map(|most| (u64::from(most) * 1000).saturating_sub(age_ms))
    }
}

/// Shortest LIFETIME in a response, in seconds. 0 would mean deletion. libnice refreshes after half the
/// lifetime, in whole seconds: with a LIFETIME of 1, it sent 4,400 Refreshes in the last second.
const SHORTEST: u32 = 2;

/// LIFETIME for the response; 0 stays 0, because it deletes the allocation.
pub(crate) fn answered(granted: u32) -> u32 {
    if granted == 0 { 0 } else { granted.max(SHORTEST) }
}

/// Returns the limit in seconds and in milliseconds.
pub(crate) fn within(left_ms: Option<u64>, seconds: u32) -> (u32, u64) {
    let wanted_ms = u64::from(seconds) * 1000;
    match left_ms {
        Some(left_ms) if left_ms < wanted_ms => {
            (u32::try_from(left_ms / 1000).unwrap_or(seconds).max(1), left_ms)
        }
        _ => (seconds, wanted_ms),
    }
}

impl<P: Policy> Server<P> {
    /// Remaining lifetime of the credential if `end_with_credential` is set; at least one second.
    pub(crate) fn limit_to_credential(&self, context: &Context<'_>, seconds: u32) -> u32 {
        let until_unix = context.who.until_unix.filter(|_| self.config.limits.end_with_credential);
        let left = until_unix.map(|until_unix| until_unix.saturating_sub(context.now.unix).max(1));
        left.map_or(seconds, |left| u32::try_from(left).map_or(seconds, |left| left.min(seconds)))
    }

    /// `None` if unlimited.
    pub(crate) fn left_ms(&mut self, now: Now, index: u32) -> Option<u64> {
        let state = self.states.get(index)?;
        let of_age = self.config.max_allocation_duration.left_ms(now, state);
        let of_credential = self.left_to_credential_ms(now, index);
        of_age.into_iter().chain(of_credential).min()
    }

    fn left_to_credential_ms(&mut self, now: Now, index: u32) -> Option<u64> {
        let until_unix =
            self.states.get(index)?.until_unix.filter(|_| self.config.limits.end_with_credential)?;
        Some(until_unix.saturating_sub(now.unix).saturating_mul(1000))
    }

    pub(crate) fn why_over(&mut self, now: Now, index: u32) -> ClosedReason {
        let state = self.states.get(index);
        if state.is_some_and(|state| self.config.max_allocation_duration.left_ms(now, state) == Some(0)) {
            ClosedReason::MaxAge
        } else if self.left_to_credential_ms(now, index) == Some(0) {
            ClosedReason::Credential
        } else {
            ClosedReason::Expired
        }
    }

    pub(crate) fn shorten(&mut self, now: Now, index: u32) {
        let Some(left_ms) = self.left_ms(now, index) else { return };
        let latest_ms = now.ms.saturating_add(left_ms);
        let Some((allocation, entry)) = self.data.forwarding.at(index) else { return };
        let relays = entry.relays;
        for (relay, family) in relays.into_iter().zip([Family::V4, Family::V6]) {
            if relay.is_some_and(|relay| relay.expires_ms > latest_ms) {
                let family = Some(family);
                self.data.emit(now, Effect::Renewed { allocation, family, expires_ms: latest_ms });
            }
        }
    }
}
