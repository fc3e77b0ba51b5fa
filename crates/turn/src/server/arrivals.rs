//! What a worker keeps of mobile clients (RFC 8016): which of its allocations are mobile, and from which new 5-tuples data is
//! waited for. Bounded: the former by the allocations, the latter by them and, where they are another worker's, by number.

use std::collections::BTreeMap;

use foldhash::quality::RandomState;
use hashbrown::HashMap;

use super::{Arrival, Client, mobility::Mobility};

/// Clients that a worker expects from others, at most: about a MiB. Whoever comes to a full house takes the place of the one that
/// waits longest, who then has to show its ticket again: a user who makes the table full keeps nobody out.
const MOST_EXPECTED: usize = 8192;

/// Which 5-tuples arrive at this worker, and which of its allocations are mobile.
pub(super) struct Moves {
    /// Slots of this worker's mobile allocations.
    pub(super) owned: HashMap<u64, u32, RandomState>,
    arrivals: HashMap<Client, Expected, RandomState>,
    /// Who is expected with another worker's allocation of this key: one 5-tuple each.
    foreign: HashMap<u64, Client, RandomState>,
    /// The keys of those, by [`Expected::place`]: the oldest first.
    queue: BTreeMap<u64, u64>,
    last_place: u64,
}

/// A 5-tuple that arrives.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    pub(super) key: u64,
    pub(super) owner: u16,
    /// Whether the owner has been asked for it.
    pub(super) asked: bool,
    /// `u64::MAX` for those of this worker's own allocations, which end with them.
    expires_ms: u64,
    /// In the queue; none for those of this worker's own allocations.
    place: Option<u64>,
}

impl Moves {
    pub(super) fn new() -> Self {
        Self {
            owned: HashMap::with_hasher(RandomState::default()),
            arrivals: HashMap::with_hasher(RandomState::default()),
            foreign: HashMap::with_hasher(RandomState::default()),
            queue: BTreeMap::new(),
            last_place: 0,
        }
    }

    /// Forgets an allocation that is gone or has moved away.
    pub(super) fn forget(&mut self, mobility: &Mobility, own: u16) {
        self.owned.remove(&mobility.key.0);
        if let Some((source, worker)) = mobility.arriving
            && worker == own
        {
            self.remove(&source.client);
        }
    }

    /// One of this worker's own allocations arrives there.
    pub(super) fn expect_own(&mut self, client: Client, key: u64, own: u16) {
        self.remove(&client);
        let expected = Expected { key, owner: own, asked: false, expires_ms: u64::MAX, place: None };
        self.arrivals.insert(client, expected);
    }

    /// One of another worker's allocations arrives there, and nowhere else. Saying so again prolongs it.
    pub(super) fn expect(&mut self, client: Client, key: u64, owner: u16, expires_ms: u64) {
        if let Some(known) = self.arrivals.get_mut(&client)
            && (known.key, known.owner) == (key, owner)
        {
            known.expires_ms = expires_ms;
            return;
        }
        self.forget_foreign(key);
        self.remove(&client);
        if self.foreign.len() >= MOST_EXPECTED
            && let Some(oldest) = self.queue.first_key_value().map(|(_, key)| *key)
        {
            self.forget_foreign(oldest);
        }
        self.last_place += 1;
        let place = Some(self.last_place);
        self.queue.insert(self.last_place, key);
        self.foreign.insert(key, client);
        self.arrivals.insert(client, Expected { key, owner, asked: false, expires_ms, place });
    }

    /// Whoever is expected with another worker's allocation.
    pub(super) fn expected(&self, now_ms: u64) -> Vec<Arrival> {
        let foreign = self.arrivals.iter().filter(|(_, expected)| expected.place.is_some());
        foreign
            .map(|(client, Expected { key, owner, expires_ms, .. })| {
                Arrival::new(*client, *key, *owner, expires_ms.saturating_sub(now_ms))
            })
            .collect()
    }

    #[inline]
    pub(super) fn is_nobody_expected(&self) -> bool {
        self.arrivals.is_empty()
    }

    pub(super) fn get(&mut self, now_ms: u64, client: &Client) -> Option<&mut Expected> {
        if self.is_nobody_expected() {
            return None;
        }
        if self.arrivals.get(client)?.expires_ms <= now_ms {
            self.remove(client);
            return None;
        }
        self.arrivals.get_mut(client)
    }

    /// Whoever was expected there, whether or not that is over.
    pub(super) fn waiting(&mut self, client: &Client) -> Option<&mut Expected> {
        self.arrivals.get_mut(client)
    }

    /// Nobody is expected there any more.
    pub(super) fn remove(&mut self, client: &Client) -> Option<Expected> {
        let expected = self.arrivals.remove(client)?;
        if let Some(place) = expected.place {
            self.queue.remove(&place);
            self.foreign.remove(&expected.key);
        }
        Some(expected)
    }

    /// The allocation of this key is ours now, or its client is expected anew.
    pub(super) fn forget_foreign(&mut self, key: u64) {
        if let Some(client) = self.foreign.get(&key).copied() {
            self.remove(&client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::ListenerId;

    fn client(port: u16) -> Client {
        let address = ([192, 0, 2, 1], port).into();
        Client { listener: ListenerId(0), address, local: address }
    }

    #[test]
    fn the_books_agree_whatever_is_expected_and_removed() {
        let mut moves = Moves::new();
        let mut step = 1_u64;
        for round in 0..20_000 {
            // A sequence without a pattern (Knuth's generator).
            step = step.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let port = u16::try_from((step >> 40) % 50).unwrap();
            let key = (step >> 33) % 40;
            match (step >> 60) % 4 {
                0 => _ = moves.remove(&client(port)),
                1 => moves.expect_own(client(port), key + 1000, 1),
                _ => moves.expect(client(port), key, 0, round),
            }
            let foreign = moves.arrivals.values().filter(|expected| expected.place.is_some()).count();
            assert_eq!((moves.foreign.len(), moves.queue.len()), (foreign, foreign));
            for (key, client) in &moves.foreign {
                assert_eq!(moves.arrivals[client].key, *key);
            }
        }
    }

    #[test]
    fn the_oldest_gives_way_and_nobody_is_refused() {
        let mut moves = Moves::new();
        for port in 0..=u16::MAX {
            moves.expect(client(port), port.into(), 0, 100);
            assert!(moves.get(0, &client(port)).is_some());
            assert!(moves.arrivals.len() <= MOST_EXPECTED);
        }
        assert!(moves.get(0, &client(u16::MAX - 8191)).is_some());
        assert!(moves.get(0, &client(u16::MAX - 8192)).is_none());
        // An owner of our own is no matter of that bound, nor are those that have been taken away.
        assert!(moves.get(100, &client(u16::MAX)).is_none(), "its time is over");
        moves.expect(client(1), 1, 0, 100);
        assert!(moves.get(0, &client(u16::MAX - 8191)).is_some());
    }
}
