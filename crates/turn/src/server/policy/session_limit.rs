//! How long an allocation may last, whatever its client refreshes: by its age, and by the credential that made it.

use std::collections::HashMap;

use crate::{
    server::{ClosedReason, Effect, Family, Policy, Server, request::context::Context, session::Session},
    time::Now,
};

/// The longest sessions, in seconds; `None` is as long as they are refreshed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaxSessionDuration {
    /// In realms that `realms` does not have.
    pub seconds: Option<u32>,
    /// Realms where it is otherwise.
    pub realms: HashMap<Box<str>, Option<u32>>,
}

impl MaxSessionDuration {
    /// So many seconds, but no more than a new allocation of this realm may live.
    pub(crate) fn limit(&self, realm: &str, seconds: u32) -> u32 {
        self.of(realm).map_or(seconds, |most| most.min(seconds))
    }

    fn of(&self, realm: &str) -> Option<u32> {
        self.realms.get(realm).copied().unwrap_or(self.seconds)
    }

    /// Milliseconds that are left to this one; `None` for no such limit.
    fn left_ms(&self, now: Now, session: &Session) -> Option<u64> {
        // In a process that took it over it may have begun before the clock did.
        let age_ms = now.ms.wrapping_sub(session.opened_ms);
        self.of(&session.realm).map(|most| (u64::from(most) * 1000).saturating_sub(age_ms))
    }
}

/// Shortest LIFETIME in an answer, in seconds. 0 would mean that the allocation is deleted. libnice waits for half of it in whole
/// seconds: after a LIFETIME of 1 it sent 4,400 Refreshes in the last second.
const SHORTEST: u32 = 2;

/// LIFETIME in the answer to a request that was granted so many seconds; 0 deletes.
pub(crate) fn answered(granted: u32) -> u32 {
    if granted == 0 { 0 } else { granted.max(SHORTEST) }
}

/// Seconds and milliseconds that a Refresh gets of so many seconds, where so many milliseconds are left.
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
    /// Seconds of a new allocation, but no more than its credential has left where sessions end with theirs. One second is left to
    /// a credential in its last one.
    pub(crate) fn limit_to_credential(&self, context: &Context<'_>, seconds: u32) -> u32 {
        let until_unix = context.who.until_unix.filter(|_| self.config.limits.end_with_credential);
        let left = until_unix.map(|until_unix| until_unix.saturating_sub(context.now.unix).max(1));
        left.map_or(seconds, |left| u32::try_from(left).map_or(seconds, |left| left.min(seconds)))
    }

    /// Milliseconds that are left to an allocation; `None` where nothing but its client ends it.
    pub(crate) fn left_ms(&mut self, now: Now, index: u32) -> Option<u64> {
        let session = self.sessions.get(index)?;
        let of_age = self.config.max_session_duration.left_ms(now, session);
        let of_credential = self.left_to_credential_ms(now, index);
        of_age.into_iter().chain(of_credential).min()
    }

    fn left_to_credential_ms(&mut self, now: Now, index: u32) -> Option<u64> {
        let until_unix =
            self.sessions.get(index)?.until_unix.filter(|_| self.config.limits.end_with_credential)?;
        Some(until_unix.saturating_sub(now.unix).saturating_mul(1000))
    }

    /// Why an allocation ends whose time is over.
    pub(crate) fn why_over(&mut self, now: Now, index: u32) -> ClosedReason {
        let session = self.sessions.get(index);
        if session.is_some_and(|session| self.config.max_session_duration.left_ms(now, session) == Some(0)) {
            ClosedReason::MaxAge
        } else if self.left_to_credential_ms(now, index) == Some(0) {
            ClosedReason::Credential
        } else {
            ClosedReason::Expired
        }
    }

    /// Has an allocation end no later than it may by now.
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
