//! Counters of one worker: plain integers, cheap enough for the packet path.

use strum::{IntoStaticStr, VariantArray};

use super::{
    ClosedReason, CredentialRefusal, DropReason, PeerDenial, QuotaRefusal, RateLevel, request::Method,
};

/// Error codes, in the order of [`Stats::errors`].
pub const ERROR_CODES: [(u16, &str); 17] = [
    (300, "300"),
    (400, "400"),
    (401, "401"),
    (403, "403"),
    (405, "405"),
    (420, "420"),
    (437, "437"),
    (438, "438"),
    (440, "440"),
    (441, "441"),
    (442, "442"),
    (443, "443"),
    (446, "446"),
    (447, "447"),
    (486, "486"),
    (500, "500"),
    (508, "508"),
];

/// Histogram bounds in milliseconds. Only time spent waiting is measured, because a worker's clock advances
/// once per wake-up.
pub const ALLOCATION_MS: [u64; 9] = [1, 5, 10, 20, 50, 100, 500, 1000, 2000];

pub type Counter = (&'static str, Option<(&'static str, &'static str)>, u64);

/// A counter, or several that are indexed by a reason.
trait Counts {
    const ZERO: Self;

    fn add(&mut self, more: &Self);
}

impl Counts for u64 {
    const ZERO: Self = 0;

    fn add(&mut self, more: &Self) {
        *self += more;
    }
}

impl<const N: usize> Counts for [u64; N] {
    const ZERO: Self = [0; N];

    fn add(&mut self, more: &Self) {
        self.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
}

/// Defines counters that can be added up.
macro_rules! counters {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: Counts::ZERO,)+ }
            }
        }

        impl $name {
            pub fn merge(&mut self, other: &Self) {
                $(self.$field.add(&other.$field);)+
            }
        }
    };
}

counters! {
    /// Counters, never reset. Gauges such as the number of allocations are methods of [`super::Server`].
    Stats {
        to_peer_datagrams: u64,
        /// Payload only.
        to_peer_bytes: u64,
        to_client_datagrams: u64,
        /// Payload only.
        to_client_bytes: u64,
        /// ICMP errors relayed as Data indications.
        icmp_relayed: u64,
        /// Indexed like [`Method::VARIANTS`], as are `successes`.
        requests: [u64; Method::VARIANTS.len()],
        successes: [u64; Method::VARIANTS.len()],
        /// Indexed like [`ERROR_CODES`].
        errors: [u64; ERROR_CODES.len()],
        drops: [u64; DropReason::VARIANTS.len()],
        nonces: u64,
        retransmits: u64,
        /// Binding requests with CHANGE-REQUEST, with PADDING, and with RESPONSE-PORT.
        nat_discovery: [u64; 3],
        allocations_opened: u64,
        /// One bucket per [`ALLOCATION_MS`] bound, and one for longer times.
        allocation_times: [u64; ALLOCATION_MS.len() + 1],
        allocation_ms: u64,
        /// Indexed like [`ClosedReason::VARIANTS`].
        allocations_closed: [u64; ClosedReason::VARIANTS.len()],
        /// Indexed like `CREDENTIALS`.
        credentials_refused: [u64; 7],
        /// Indexed like [`PeerDenial::NAMES`].
        peer_refusals: [u64; PeerDenial::NAMES.len()],
        /// Refusals because of the quota of the user, of the server or fleet, and of the client's prefix.
        quota_refusals: [u64; 3],
        volume_refusals: u64,
        permission_limit: u64,
        channel_limit: u64,
        shared_peer_limit: u64,
        drain_refusals: u64,
        loop_refusals: u64,
        ban_refusals: u64,
        network_refusals: u64,
        /// Indexed like [`ConnectionEvent::VARIANTS`].
        connection_events: [u64; ConnectionEvent::VARIANTS.len()],
        /// Indexed like [`ConnectionRefusal::VARIANTS`].
        connection_refusals: [u64; ConnectionRefusal::VARIANTS.len()],
        /// Refusals because of the limit per allocation, in total, and per user.
        connection_limit: [u64; 3],
        /// Bytes copied to peers, and to clients.
        connection_bytes: [u64; 2],
        /// Indexed like [`MobilityEvent::VARIANTS`].
        mobility: [u64; MobilityEvent::VARIANTS.len()],
        /// Redirected new allocations, and redirected requests that belong to another node.
        redirects: u64,
        /// Indexed like [`RateLevel::NAMES`].
        bandwidth_pauses: [u64; RateLevel::NAMES.len()],
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum ConnectionEvent {
    Connected,
    ConnectFailed,
    Accepted,
    Bound,
    /// Closed because it was not bound within 30 s.
    Unbound,
    /// Closed by either side, or refused by new peer rules.
    Ended,
    /// A ConnectionBind was passed to the worker of the connection.
    HandedOver,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum ConnectionRefusal {
    Stale,
    /// The client has disconnected and not returned yet.
    ClientAway,
    NoPermission,
    PeerRefused,
    Limit,
    /// The CONNECTION-ID is not pending.
    UnknownId,
    WrongUser,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum MobilityEvent {
    /// A Refresh with a valid ticket.
    Arrived,
    /// Data came from the new address, or the old connection closed.
    Moved,
    Exported,
    Imported,
    Kept,
    Forwarded,
    /// The ticket was not issued by this server or fleet.
    TicketInvalid,
    /// A newer ticket has been issued.
    TicketReplayed,
}

const CREDENTIALS: [&str; 7] =
    ["no_such_user", "expired", "wrong_key", "wrong_realm", "wrong_user", "access_token", "too_far_ahead"];

const DISCOVERY: [&str; 3] = ["change_request", "padding", "response_port"];

impl Stats {
    #[must_use]
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    /// Returns 0 for codes that the server does not use.
    #[must_use]
    pub fn errors_with(&self, code: u16) -> u64 {
        ERROR_CODES
            .iter()
            .zip(&self.errors)
            .find(|((known, _), _)| *known == code)
            .map_or(0, |(_, count)| *count)
    }

    /// The exporter adds the prefix `turnpike_` and the suffix `_total`.
    pub fn counters(&self) -> impl Iterator<Item = Counter> + '_ {
        let plain = [
            ("icmp_relayed", self.icmp_relayed),
            ("nonces_issued", self.nonces),
            ("retransmits_answered", self.retransmits),
            ("allocations_opened", self.allocations_opened),
            ("drain_refusals", self.drain_refusals),
            ("loop_refusals", self.loop_refusals),
            ("ban_refusals", self.ban_refusals),
            ("network_refusals", self.network_refusals),
            ("redirects", self.redirects),
        ];
        let plain = plain.into_iter().map(|(family, value)| (family, None, value));
        plain.chain(self.relayed()).chain(self.limits()).chain(self.by_event())
    }

    fn relayed(&self) -> impl Iterator<Item = Counter> + use<> {
        let directions = [
            ("relayed_datagrams", "to_peer", self.to_peer_datagrams),
            ("relayed_datagrams", "to_client", self.to_client_datagrams),
            ("relayed_bytes", "to_peer", self.to_peer_bytes),
            ("relayed_bytes", "to_client", self.to_client_bytes),
            ("connection_bytes", "to_peer", self.connection_bytes[0]),
            ("connection_bytes", "to_client", self.connection_bytes[1]),
        ];
        directions
            .into_iter()
            .map(|(family, direction, value)| (family, Some(("direction", direction)), value))
    }

    fn limits(&self) -> impl Iterator<Item = Counter> + use<> {
        let limits = [
            ("user", self.quota_refusals[0]),
            ("total", self.quota_refusals[1]),
            ("prefix", self.quota_refusals[2]),
            ("volume", self.volume_refusals),
            ("permissions", self.permission_limit),
            ("channels", self.channel_limit),
            ("shared_peer", self.shared_peer_limit),
            ("connections", self.connection_limit[0]),
            ("connections_total", self.connection_limit[1]),
            ("connections_user", self.connection_limit[2]),
        ];
        limits.into_iter().map(|(limit, value)| ("limit_refusals", Some(("limit", limit)), value))
    }

    fn by_event(&self) -> impl Iterator<Item = Counter> + '_ {
        let methods = || Method::VARIANTS.iter().map(Into::into);
        let codes = ERROR_CODES.iter().map(|(_, name)| *name);
        let drops = DropReason::VARIANTS.iter().map(Into::into);
        let closed = ClosedReason::VARIANTS.iter().map(Into::into);
        let (discovery, credentials) = (DISCOVERY.iter().copied(), CREDENTIALS.iter().copied());
        let connections = ConnectionEvent::VARIANTS.iter().map(Into::into);
        let refusals = ConnectionRefusal::VARIANTS.iter().map(Into::into);
        let mobility = MobilityEvent::VARIANTS.iter().map(Into::into);
        labelled("requests", "method", methods(), &self.requests)
            .chain(labelled("successes", "method", methods(), &self.successes))
            .chain(labelled("error_responses", "code", codes, &self.errors))
            .chain(labelled("dropped_datagrams", "reason", drops, &self.drops))
            .chain(labelled("allocations_closed", "reason", closed, &self.allocations_closed))
            .chain(labelled("nat_discovery_requests", "attribute", discovery, &self.nat_discovery))
            .chain(labelled("credentials_refused", "reason", credentials, &self.credentials_refused))
            .chain(labelled("peer_refusals", "by", PeerDenial::NAMES.iter().copied(), &self.peer_refusals))
            .chain(labelled("peer_connections", "event", connections, &self.connection_events))
            .chain(labelled("peer_connection_refusals", "reason", refusals, &self.connection_refusals))
            .chain(labelled("mobility", "event", mobility, &self.mobility))
            .chain(labelled(
                "bandwidth_pauses",
                "limit",
                RateLevel::NAMES.into_iter(),
                &self.bandwidth_pauses,
            ))
    }

    pub(crate) fn connection(&mut self, event: ConnectionEvent) {
        self.connection_events[event as usize] += 1;
    }

    pub(crate) fn connection_refused(&mut self, reason: ConnectionRefusal) {
        self.connection_refusals[reason as usize] += 1;
    }

    pub(crate) fn mobility(&mut self, event: MobilityEvent) {
        self.mobility[event as usize] += 1;
    }

    #[inline]
    pub(crate) fn drop(&mut self, reason: DropReason) {
        self.drops[reason as usize] += 1;
    }

    pub(crate) fn allocated_after(&mut self, ms: u64) {
        self.allocations_opened += 1;
        self.allocation_ms += ms;
        let bucket = ALLOCATION_MS.iter().position(|bound| ms <= *bound);
        self.allocation_times[bucket.unwrap_or(ALLOCATION_MS.len())] += 1;
    }

    pub(crate) fn error(&mut self, code: u16) {
        if let Some(index) = ERROR_CODES.iter().position(|(known, _)| *known == code) {
            self.errors[index] += 1;
        }
    }

    pub(crate) fn closed(&mut self, reason: ClosedReason) {
        self.allocations_closed[reason as usize] += 1;
    }

    pub(crate) fn refused(&mut self, why: CredentialRefusal) {
        let index = match why {
            CredentialRefusal::NoSuchUser => 0,
            CredentialRefusal::Expired { .. } => 1,
            CredentialRefusal::WrongKey => 2,
            CredentialRefusal::WrongRealm => 3,
            CredentialRefusal::WrongUser => 4,
            CredentialRefusal::Token(_) => 5,
            CredentialRefusal::TooFarAhead { .. } => 6,
        };
        self.credentials_refused[index] += 1;
    }

    pub(crate) fn discovery(&mut self, change: bool, padding: bool, port: bool) {
        for (count, asked) in self.nat_discovery.iter_mut().zip([change, padding, port]) {
            *count += u64::from(asked);
        }
    }

    pub(crate) fn quota(&mut self, refusal: QuotaRefusal) {
        match refusal {
            QuotaRefusal::User | QuotaRefusal::Undecided { is_user: true } => self.quota_refusals[0] += 1,
            QuotaRefusal::Total | QuotaRefusal::Everywhere | QuotaRefusal::Undecided { is_user: false } => {
                self.quota_refusals[1] += 1;
            }
            QuotaRefusal::Prefix => self.quota_refusals[2] += 1,
        }
    }
}

fn labelled<'a>(
    family: &'static str,
    label: &'static str,
    names: impl Iterator<Item = &'static str> + 'a,
    values: &'a [u64],
) -> impl Iterator<Item = Counter> + 'a {
    names.zip(values).map(move |(name, value)| (family, Some((label, name)), *value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_adds_every_counter() {
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
