//! Requests waiting for the credential store while the worker continues;
//! [`crate::server::Server::finish_lookup`] resumes them. Only requests with a valid nonce for their address
//! are kept, so forged addresses cannot fill the table. A request over a stream may also wait for the fleet's
//! quota.

use std::{collections::BTreeMap, hash::BuildHasher as _, net::IpAddr, sync::Arc};

use foldhash::quality::RandomState;
use hashbrown::HashMap;
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::server::{Client, DropReason, PrefixLengths, Source, User, request::Delivery};

/// Maximum number of waiting requests per worker.
const MOST: usize = 1024;
/// Maximum number of waiting requests per IPv4 address or IPv6 /64, once half of the table is taken.
const MOST_EACH: usize = 32;

/// Time for which a request is kept. By then, a client has retransmitted four times (RFC 8489 section 6.2.1)
/// and will try again on its own.
const PATIENCE_MS: u64 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LookupId(u64);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialQuery {
    pub lookup: LookupId,
    pub user: OwnedUser,
    pub realm: Arc<str>,
    pub algorithm: KeyAlgorithm,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnedUser {
    Name(Box<str>),
    Hash([u8; 32]),
}

#[derive(Clone, Debug)]
pub enum LookupResult {
    Keys {
        username: Box<str>,
        identity: Box<str>,
        /// Candidate keys, each with the Unix second of expiry if time-limited.
        keys: Vec<(Key, Option<u64>)>,
    },
    NoSuchUser,
    /// The credential's expiry is implausibly far in the future.
    TooFarAhead {
        /// Seconds from now.
        ahead: u64,
    },
    /// The store failed: see [`crate::server::config::StoreFailure`].
    Unavailable,
}

impl OwnedUser {
    #[must_use]
    pub fn user(&self) -> User<'_> {
        match self {
            Self::Name(name) => User::Name(name),
            Self::Hash(hash) => User::Hash(hash),
        }
    }
}

impl From<User<'_>> for OwnedUser {
    fn from(user: User<'_>) -> Self {
        match user {
            User::Name(name) => Self::Name(name.into()),
            User::Hash(hash) => Self::Hash(*hash),
        }
    }
}

#[derive(Clone)]
pub(crate) struct WaitingRequest {
    pub(crate) source: Source,
    pub(crate) delivery: Delivery,
    pub(crate) request: Box<[u8]>,
    pub(crate) asked_ms: u64,
    hash: u64,
}

impl WaitingRequest {
    fn deadline_ms(&self) -> u64 {
        self.asked_ms + PATIENCE_MS
    }
}

#[derive(Default)]
pub(crate) struct Lookups {
    /// Waiting requests, oldest first.
    waiting: BTreeMap<u64, WaitingRequest>,
    /// Lookups by hash of client and transaction ID.
    requests: HashMap<u64, u64, RandomState>,
    networks: HashMap<IpAddr, usize, RandomState>,
    answered: BTreeMap<(u64, u64), LookupResult>,
    last: u64,
    hasher: RandomState,
}

impl Lookups {
    /// Returns the reason if the request has to be dropped.
    pub(crate) fn keep(
        &mut self,
        now_ms: u64,
        source: Source,
        delivery: Delivery,
        transaction: [u8; 12],
        request: &[u8],
    ) -> Result<LookupId, DropReason> {
        let hash = self.hasher.hash_one((source.client, transaction));
        if self.requests.contains_key(&hash) {
            return Err(DropReason::LookupPending);
        }
        let held = self.networks.entry(host(&source.client)).or_default();
        if self.waiting.len() >= MOST || (*held >= MOST_EACH && self.waiting.len() >= MOST / 2) {
            if *held == 0 {
                self.networks.remove(&host(&source.client));
            }
            return Err(DropReason::LookupLimit);
        }
        *held += 1;
        self.last += 1;
        self.requests.insert(hash, self.last);
        let waiting = WaitingRequest { source, delivery, request: request.into(), asked_ms: now_ms, hash };
        self.waiting.insert(self.last, waiting);
        Ok(LookupId(self.last))
    }

    pub(crate) fn take(&mut self, LookupId(id): LookupId) -> Option<WaitingRequest> {
        let waiting = self.waiting.remove(&id)?;
        self.requests.remove(&waiting.hash);
        let network = host(&waiting.source.client);
        if let Some(held) = self.networks.get_mut(&network) {
            *held -= 1;
            if *held == 0 {
                self.networks.remove(&network);
            }
        }
        Some(waiting)
    }

    pub(crate) fn put_back(
        &mut self,
        LookupId(id): LookupId,
        waiting: WaitingRequest,
        (until_ms, answer): (u64, LookupResult),
    ) {
        *self.networks.entry(host(&waiting.source.client)).or_default() += 1;
        self.requests.insert(waiting.hash, id);
        self.waiting.insert(id, waiting);
        self.answered.insert((until_ms, id), answer);
    }

    /// Next lookup result whose request is due for another attempt.
    pub(crate) fn next_finished(&mut self, now_ms: u64) -> Option<(LookupId, LookupResult)> {
        loop {
            let due = self.answered.first_entry().filter(|entry| entry.key().0 <= now_ms)?;
            let ((_, id), answer) = due.remove_entry();
            if self.waiting.contains_key(&id) {
                return Some((LookupId(id), answer));
            }
        }
    }

    pub(crate) fn forget(&mut self, is_gone: impl Fn(&Source) -> bool) {
        let is_its =
            |(id, waiting): (&u64, &WaitingRequest)| is_gone(&waiting.source).then_some(LookupId(*id));
        let forgotten: Vec<_> = self.waiting.iter().filter_map(is_its).collect();
        for lookup in forgotten {
            self.take(lookup);
        }
    }

    /// Drops one overdue request; returns false if there is none.
    pub(crate) fn expire(&mut self, now_ms: u64) -> bool {
        let due = self.waiting.first_key_value().filter(|(_, waiting)| waiting.deadline_ms() <= now_ms);
        due.map(|(id, _)| LookupId(*id)).is_some_and(|id| self.take(id).is_some())
    }

    pub(crate) fn next_due(&self) -> Option<u64> {
        let deadline = self.waiting.first_key_value().map(|(_, waiting)| waiting.deadline_ms());
        let answered = self.answered.first_key_value().map(|((until_ms, _), _)| *until_ms);
        [deadline, answered].into_iter().flatten().min()
    }
}

fn host(client: &Client) -> IpAddr {
    PrefixLengths::HOST.of(client.address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::ListenerId;

    fn source(host: u32, port: u16) -> Source {
        let address = (std::net::Ipv4Addr::from_bits(0xC633_0000 + host), port).into();
        Client { listener: ListenerId(0), address, local: address }.into()
    }

    #[test]
    fn tables_are_empty_after_all_lookups_end() {
        let mut lookups = Lookups::default();
        let keep = |lookups: &mut Lookups, host, port| {
            lookups.keep(0, source(host, port), Delivery::Direct, [0; 12], b"request")
        };
        let mut kept = Vec::new();
        for port in 1..=1000 {
            kept.extend(keep(&mut lookups, 0, port));
        }
        assert_eq!(kept.len(), MOST / 2);
        for host in 1..=2000 {
            kept.extend(keep(&mut lookups, host, 1));
        }
        assert_eq!((kept.len(), lookups.waiting.len()), (MOST, MOST));
        assert_eq!(keep(&mut lookups, 1, 1), Err(DropReason::LookupPending));
        assert_eq!(keep(&mut lookups, 3000, 1), Err(DropReason::LookupLimit));
        for id in kept.iter().step_by(2) {
            assert_eq!(&*lookups.take(*id).unwrap().request, b"request");
            assert!(lookups.take(*id).is_none(), "once");
        }
        assert!(!lookups.expire(PATIENCE_MS - 1));
        while lookups.expire(PATIENCE_MS) {}
        assert!(lookups.waiting.is_empty() && lookups.requests.is_empty() && lookups.networks.is_empty());
        assert_eq!(lookups.next_due(), None);
    }
}
