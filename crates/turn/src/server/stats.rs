//! Counters of one worker: plain integers, cheap enough for the packet path.

use super::{ClosedReason, CredentialRefusal, DropReason, QuotaRefusal, request::Method};

/// Error codes that the server answers with (RFC 8489 section 14.8, RFC 8656 section 19), in the order of
/// [`Stats::errors`].
pub const ERROR_CODES: [(u16, &str); 12] = [
    (400, "400"),
    (401, "401"),
    (403, "403"),
    (420, "420"),
    (437, "437"),
    (438, "438"),
    (440, "440"),
    (441, "441"),
    (442, "442"),
    (443, "443"),
    (486, "486"),
    (508, "508"),
];

/// Never reset; gauges such as the number of allocations live in [`super::Server`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Payload datagrams relayed client to peer.
    pub to_peer_datagrams: u64,
    /// Payload bytes relayed client to peer.
    pub to_peer_bytes: u64,
    /// Payload datagrams relayed peer to client.
    pub to_client_datagrams: u64,
    /// Payload bytes relayed peer to client.
    pub to_client_bytes: u64,
    /// ICMP errors passed on as Data indications.
    pub icmp_relayed: u64,
    /// Well-formed requests, by method, in the order of [`Method::ALL`].
    pub requests: [u64; Method::ALL.len()],
    /// Success responses, by method.
    pub successes: [u64; Method::ALL.len()],
    /// Error responses, by code, in the order of [`ERROR_CODES`].
    pub errors: [u64; ERROR_CODES.len()],
    /// Dropped datagrams, by reason, in the order of [`DropReason::ALL`].
    pub drops: [u64; DropReason::ALL.len()],
    /// Nonces given out with 401 and 438.
    pub nonces: u64,
    /// Requests answered again with the same answer.
    pub retransmits: u64,
    /// Allocations that came to be.
    pub allocations_opened: u64,
    /// Allocations that ended, by reason: deleted, expired, shutdown, administrator, disconnected.
    pub allocations_closed: [u64; 5],
    /// Credentials refused: no such user, expired, wrong key, wrong realm, wrong user.
    pub credentials_refused: [u64; 5],
    /// Allocations refused by quota: of the user, in total.
    pub quota_refusals: [u64; 2],
    /// Requests refused because the allocation had all the permissions it may have.
    pub permission_limit: u64,
    /// Requests refused because the allocation had all the channels it may have.
    pub channel_limit: u64,
    /// Allocations refused because the server drains.
    pub drain_refusals: u64,
}

const CLOSED: [(ClosedReason, &str); 5] = [
    (ClosedReason::Deleted, "deleted"),
    (ClosedReason::Expired, "expired"),
    (ClosedReason::Shutdown, "shutdown"),
    (ClosedReason::Administrator, "administrator"),
    (ClosedReason::Disconnected, "disconnected"),
];

const CREDENTIALS: [&str; 5] = ["no_such_user", "expired", "wrong_key", "wrong_realm", "wrong_user"];

impl Stats {
    /// How often datagrams were dropped for this reason.
    #[must_use]
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    /// How often this error code was answered; zero for a code that the server does not use.
    #[must_use]
    pub fn errors_with(&self, code: u16) -> u64 {
        ERROR_CODES
            .iter()
            .zip(&self.errors)
            .find(|((known, _), _)| *known == code)
            .map_or(0, |(_, count)| *count)
    }

    /// Every counter as (metric family, label, value). The exporter puts `turnpike_` before and `_total` after the
    /// family's name.
    pub fn counters(
        &self,
    ) -> impl Iterator<Item = (&'static str, Option<(&'static str, &'static str)>, u64)> + '_ {
        let plain = [
            ("icmp_relayed", self.icmp_relayed),
            ("nonces_issued", self.nonces),
            ("retransmits_answered", self.retransmits),
            ("allocations_opened", self.allocations_opened),
            ("drain_refusals", self.drain_refusals),
        ]
        .into_iter()
        .map(|(family, value)| (family, None, value));
        let directions = [
            ("relayed_datagrams", "to_peer", self.to_peer_datagrams),
            ("relayed_datagrams", "to_client", self.to_client_datagrams),
            ("relayed_bytes", "to_peer", self.to_peer_bytes),
            ("relayed_bytes", "to_client", self.to_client_bytes),
        ]
        .into_iter()
        .map(|(family, direction, value)| (family, Some(("direction", direction)), value));
        let limits = [
            ("user", self.quota_refusals[0]),
            ("total", self.quota_refusals[1]),
            ("permissions", self.permission_limit),
            ("channels", self.channel_limit),
        ]
        .into_iter()
        .map(|(limit, value)| ("limit_refusals", Some(("limit", limit)), value));
        plain
            .chain(directions)
            .chain(limits)
            .chain(labelled(
                "requests",
                "method",
                Method::ALL.iter().map(|method| method.name()),
                &self.requests,
            ))
            .chain(labelled(
                "successes",
                "method",
                Method::ALL.iter().map(|method| method.name()),
                &self.successes,
            ))
            .chain(labelled(
                "error_responses",
                "code",
                ERROR_CODES.iter().map(|(_, name)| *name),
                &self.errors,
            ))
            .chain(labelled(
                "dropped_datagrams",
                "reason",
                DropReason::ALL.iter().map(|r| r.name()),
                &self.drops,
            ))
            .chain(labelled(
                "allocations_closed",
                "reason",
                CLOSED.iter().map(|(_, name)| *name),
                &self.allocations_closed,
            ))
            .chain(labelled(
                "credentials_refused",
                "reason",
                CREDENTIALS.iter().copied(),
                &self.credentials_refused,
            ))
    }

    /// Adds another worker's counters.
    pub fn merge(&mut self, other: &Self) {
        // Without `..`: a counter that is added to the struct and forgotten here does not compile.
        let Self {
            to_peer_datagrams,
            to_peer_bytes,
            to_client_datagrams,
            to_client_bytes,
            icmp_relayed,
            requests,
            successes,
            errors,
            drops,
            nonces,
            retransmits,
            allocations_opened,
            allocations_closed,
            credentials_refused,
            quota_refusals,
            permission_limit,
            channel_limit,
            drain_refusals,
        } = other;
        self.to_peer_datagrams += to_peer_datagrams;
        self.to_peer_bytes += to_peer_bytes;
        self.to_client_datagrams += to_client_datagrams;
        self.to_client_bytes += to_client_bytes;
        self.icmp_relayed += icmp_relayed;
        self.nonces += nonces;
        self.retransmits += retransmits;
        self.allocations_opened += allocations_opened;
        self.permission_limit += permission_limit;
        self.channel_limit += channel_limit;
        self.drain_refusals += drain_refusals;
        add(&mut self.requests, requests);
        add(&mut self.successes, successes);
        add(&mut self.errors, errors);
        add(&mut self.drops, drops);
        add(&mut self.allocations_closed, allocations_closed);
        add(&mut self.credentials_refused, credentials_refused);
        add(&mut self.quota_refusals, quota_refusals);
    }

    #[inline]
    pub(super) fn drop(&mut self, reason: DropReason) {
        self.drops[reason as usize] += 1;
    }

    pub(super) fn error(&mut self, code: u16) {
        if let Some(index) = ERROR_CODES.iter().position(|(known, _)| *known == code) {
            self.errors[index] += 1;
        }
    }

    pub(super) fn closed(&mut self, reason: ClosedReason) {
        if let Some(index) = CLOSED.iter().position(|(known, _)| *known == reason) {
            self.allocations_closed[index] += 1;
        }
    }

    pub(super) fn refused(&mut self, why: CredentialRefusal) {
        let index = match why {
            CredentialRefusal::NoSuchUser => 0,
            CredentialRefusal::Expired { .. } => 1,
            CredentialRefusal::WrongKey => 2,
            CredentialRefusal::WrongRealm => 3,
            CredentialRefusal::WrongUser => 4,
        };
        self.credentials_refused[index] += 1;
    }

    pub(super) fn quota(&mut self, refusal: QuotaRefusal) {
        match refusal {
            QuotaRefusal::User => self.quota_refusals[0] += 1,
            QuotaRefusal::Total => self.quota_refusals[1] += 1,
        }
    }
}

fn labelled<'a>(
    family: &'static str,
    label: &'static str,
    names: impl Iterator<Item = &'static str> + 'a,
    values: &'a [u64],
) -> impl Iterator<Item = (&'static str, Option<(&'static str, &'static str)>, u64)> + 'a {
    names.zip(values).map(move |(name, value)| (family, Some((label, name)), *value))
}

fn add(to: &mut [u64], from: &[u64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_adds_what_counters_shows() {
        let mut one = Stats { to_peer_bytes: 7, nonces: 2, ..Stats::default() };
        one.drop(DropReason::NoPermission);
        one.error(437);
        one.closed(ClosedReason::Shutdown);
        one.refused(CredentialRefusal::Expired { ago: 1 });
        one.quota(QuotaRefusal::Total);
        let mut sum = one.clone();
        sum.merge(&one);
        for ((family, label, single), (_, _, double)) in one.counters().zip(sum.counters()) {
            assert_eq!(double, 2 * single, "{family} {label:?}");
        }
        assert_eq!(sum.counters().map(|(_, _, value)| value).sum::<u64>(), 2 * (7 + 2 + 5));
    }

    #[test]
    fn no_series_appears_twice() {
        let mut seen = std::collections::HashSet::new();
        for (family, label, _) in Stats::default().counters() {
            assert!(seen.insert((family, label)), "{family} {label:?}");
        }
    }
}
