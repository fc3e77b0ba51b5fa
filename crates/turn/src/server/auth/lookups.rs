//! Requests that wait for the credential store. A store that has to ask a database says so, the request is kept here, and the worker goes
//! on; [`crate::server::Server::credentials`] takes it up again.
//!
//! Over a stream it may then have to wait for the fleet's quota too, with what the store has answered.
//!
//! A place is given only to who has shown a nonce that was made for its address and is still good, so that nobody fills the table from
//! forged addresses; and no network gets more than its share.

use std::{collections::BTreeMap, hash::BuildHasher as _, net::IpAddr, sync::Arc};

use foldhash::quality::RandomState;
use hashbrown::HashMap;
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::server::{Client, DropReason, PrefixLengths, Source, User, request::Delivery};

/// Requests that wait at the same time in one worker.
const MOST: usize = 1024;
/// Those of one IPv4 address or IPv6 /64, once half of the places are taken. Until then one address may have all: it can be that of a
/// carrier's NAT.
const MOST_EACH: usize = 32;

/// A client has repeated its request four times by then (RFC 8489 section 6.2.1), and asks for itself once more.
const PATIENCE_MS: u64 = 10_000;

/// A question to the credential store. Never the same twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LookupId(u64);

/// What the store is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialQuery {
    /// For [`crate::server::Server::credentials`].
    pub lookup: LookupId,
    /// Who says to be asking.
    pub user: Asked,
    /// Where that user is known.
    pub realm: Arc<str>,
    /// Of which keys.
    pub algorithm: KeyAlgorithm,
}

/// A [`User`] that outlives its request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// USERNAME.
    Name(Box<str>),
    /// USERHASH.
    Hash([u8; 32]),
}

/// What the store answers.
#[derive(Clone, Debug)]
pub enum Credentials {
    /// There is such a user.
    Keys {
        /// The username as it stands in the keys.
        username: Box<str>,
        /// Whom quotas count.
        identity: Box<str>,
        /// Any of them may be the right one. Each has the last Unix second of the credential that it makes, if that is time-limited.
        keys: Vec<(Key, Option<u64>)>,
    },
    /// No such user.
    NoSuchUser,
    /// A time-limited username with an expiry that lies too far ahead to be meant.
    TooFarAhead {
        /// Seconds from now.
        ahead: u64,
    },
    /// The store cannot tell: see [`crate::server::config::StoreFailure`].
    Unavailable,
}

impl Asked {
    /// The same, borrowed.
    #[must_use]
    pub fn user(&self) -> User<'_> {
        match self {
            Self::Name(name) => User::Name(name),
            Self::Hash(hash) => User::Hash(hash),
        }
    }
}

impl From<User<'_>> for Asked {
    fn from(user: User<'_>) -> Self {
        match user {
            User::Name(name) => Self::Name(name.into()),
            User::Hash(hash) => Self::Hash(*hash),
        }
    }
}

/// A request that waits.
#[derive(Clone)]
pub(crate) struct Waiting {
    pub(crate) source: Source,
    pub(crate) delivery: Delivery,
    pub(crate) request: Box<[u8]>,
    /// Since when.
    pub(crate) asked_ms: u64,
    /// Of client and transaction.
    hash: u64,
}

impl Waiting {
    fn deadline_ms(&self) -> u64 {
        self.asked_ms + PATIENCE_MS
    }
}

#[derive(Default)]
pub(crate) struct Lookups {
    /// The oldest first.
    waiting: BTreeMap<u64, Waiting>,
    /// By the hash of client and transaction.
    requests: HashMap<u64, u64, RandomState>,
    networks: HashMap<IpAddr, usize, RandomState>,
    /// Answers to requests that wait for something else now, by the time at which they count again.
    answered: BTreeMap<(u64, u64), Credentials>,
    last: u64,
    hasher: RandomState,
}

impl Lookups {
    /// Keeps a request until the store has answered. The reason why it is dropped, if it is.
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
        let waiting = Waiting { source, delivery, request: request.into(), asked_ms: now_ms, hash };
        self.waiting.insert(self.last, waiting);
        Ok(LookupId(self.last))
    }

    /// The request that waits for this answer, which from now on waits no more.
    pub(crate) fn take(&mut self, LookupId(id): LookupId) -> Option<Waiting> {
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

    /// Keeps a request for longer, with what the store has answered to it.
    pub(crate) fn put_back(
        &mut self,
        LookupId(id): LookupId,
        waiting: Waiting,
        (until_ms, answer): (u64, Credentials),
    ) {
        *self.networks.entry(host(&waiting.source.client)).or_default() += 1;
        self.requests.insert(waiting.hash, id);
        self.waiting.insert(id, waiting);
        self.answered.insert((until_ms, id), answer);
    }

    /// The next answer whose request has been kept for long enough.
    pub(crate) fn next_answered(&mut self, now_ms: u64) -> Option<(LookupId, Credentials)> {
        loop {
            let due = self.answered.first_entry().filter(|entry| entry.key().0 <= now_ms)?;
            let ((_, id), answer) = due.remove_entry();
            // Its client may have gone.
            if self.waiting.contains_key(&id) {
                return Some((LookupId(id), answer));
            }
        }
    }

    /// Forgets what clients have asked that are gone.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(&Source) -> bool) {
        let is_its = |(id, waiting): (&u64, &Waiting)| is_gone(&waiting.source).then_some(LookupId(*id));
        let forgotten: Vec<_> = self.waiting.iter().filter_map(is_its).collect();
        for lookup in forgotten {
            self.take(lookup);
        }
    }

    /// Forgets one request whose time is over, until there is none.
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

/// The host of a client, however many ports and addresses it makes up.
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
    fn the_books_are_empty_when_nothing_waits() {
        let mut lookups = Lookups::default();
        let keep = |lookups: &mut Lookups, host, port| {
            lookups.keep(0, source(host, port), Delivery::Direct, [0; 12], b"request")
        };
        let mut kept = Vec::new();
        for port in 1..=1000 {
            kept.extend(keep(&mut lookups, 0, port));
        }
        assert_eq!(kept.len(), MOST / 2);
        // Everybody else finds room.
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
