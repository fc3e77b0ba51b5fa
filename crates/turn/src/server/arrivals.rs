//! What a worker keeps of mobile clients (RFC 8016): which of its allocations are mobile, from which new 5-tuples data is
//! waited for, and where other workers' allocations are. Bounded: the first two by the allocations, the last by number and
//! time.

use foldhash::quality::RandomState;
use hashbrown::HashMap;

use super::{Client, allocation::Allocation};

/// Clients that a worker expects from others, at most: about a MiB.
const MOST_EXPECTED: usize = 8192;

/// Which 5-tuples arrive at this worker, and which of its allocations are mobile.
pub(super) struct Moves {
    /// Slots of this worker's mobile allocations.
    pub(super) owned: HashMap<u64, u32, RandomState>,
    pub(super) arrivals: HashMap<Client, Expected, RandomState>,
    /// Other workers' allocations whose tickets name this worker: a ticket outlives the client's stay.
    foreign: HashMap<u64, Foreign, RandomState>,
    swept_ms: u64,
}

#[derive(Clone, Copy)]
struct Foreign {
    owner: u16,
    client: Client,
    expires_ms: u64,
}

/// A 5-tuple that arrives.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    pub(super) key: u64,
    pub(super) owner: u16,
    /// `u64::MAX` for those of this worker's own allocations, which end with them.
    pub(super) expires_ms: u64,
    /// Whether the owner has been asked for it.
    pub(super) asked: bool,
}

impl Moves {
    pub(super) fn new() -> Self {
        Self {
            owned: HashMap::with_hasher(RandomState::default()),
            arrivals: HashMap::with_hasher(RandomState::default()),
            foreign: HashMap::with_hasher(RandomState::default()),
            swept_ms: 0,
        }
    }

    /// Forgets an allocation that is gone or has moved away.
    pub(super) fn forget(&mut self, allocation: &Allocation, own: u16) {
        let Some(mobility) = &allocation.mobility else { return };
        self.owned.remove(&mobility.key);
        if let Some((client, worker)) = mobility.arriving
            && worker == own
        {
            self.arrivals.remove(&client);
        }
    }

    /// One of another worker's allocations. False if there are too many; what has expired is swept out at most once a
    /// second, for a full table is long.
    pub(super) fn expect(&mut self, now_ms: u64, client: Client, expected: Expected) -> bool {
        if self.foreign.len() >= MOST_EXPECTED && now_ms >= self.swept_ms + 1000 {
            self.swept_ms = now_ms;
            self.arrivals.retain(|_, expected| expected.expires_ms > now_ms);
            self.foreign.retain(|_, foreign| foreign.expires_ms > now_ms);
        }
        if self.foreign.len() >= MOST_EXPECTED {
            return false;
        }
        let Expected { key, owner, expires_ms, .. } = expected;
        self.forget_foreign(key);
        self.arrivals.insert(client, expected);
        self.foreign.insert(key, Foreign { owner, client, expires_ms });
        true
    }

    pub(super) fn get(&mut self, now_ms: u64, client: &Client) -> Option<&mut Expected> {
        if self.arrivals.is_empty() {
            return None;
        }
        if self.arrivals.get(client)?.expires_ms <= now_ms {
            self.arrivals.remove(client);
            return None;
        }
        self.arrivals.get_mut(client)
    }

    /// The allocation of this key is ours now, or its client is expected anew.
    pub(super) fn forget_foreign(&mut self, key: u64) {
        if let Some(Foreign { client, .. }) = self.foreign.remove(&key)
            && self.arrivals.get(&client).is_some_and(|expected| expected.key == key)
        {
            self.arrivals.remove(&client);
        }
    }

    /// Who has the allocation of this key, as far as is known here.
    pub(super) fn owner_of(&self, now_ms: u64, key: u64) -> Option<u16> {
        let foreign = self.foreign.get(&key)?;
        (foreign.expires_ms > now_ms).then_some(foreign.owner)
    }
}
