//! Pending moves of mobile allocations (RFC 8016), from and to this worker.

use std::collections::BTreeMap;

use foldhash::quality::RandomState;
use hashbrown::HashMap;

use crate::server::{Client, PendingMove};

/// Maximum number of pending moves, about 1 MiB. At the limit, a new move displaces the oldest, whose client
/// has to present its ticket again.
const MOST_EXPECTED: usize = 8192;

pub(crate) struct PendingMoves {
    pub(crate) owned: HashMap<u64, u32, RandomState>,
    arrivals: HashMap<Client, Expected, RandomState>,
    /// Clients to which other workers' allocations will move, by the allocation's key. An allocation can move
    /// to only one 5-tuple.
    foreign: HashMap<u64, Client, RandomState>,
    /// Keys of `foreign` by [`Expected::place`], oldest first.
    queue: BTreeMap<u64, u64>,
    last_place: u64,
}

#[derive(Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) key: u64,
    pub(crate) owner: u16,
    pub(crate) asked: bool,
    /// Position in the queue; `None` for this worker's own allocations, whose pending moves end with them.
    place: Option<u64>,
}

impl PendingMoves {
    pub(crate) fn new() -> Self {
        Self {
            owned: HashMap::with_hasher(RandomState::default()),
            arrivals: HashMap::with_hasher(RandomState::default()),
            foreign: HashMap::with_hasher(RandomState::default()),
            queue: BTreeMap::new(),
            last_place: 0,
        }
    }

    pub(crate) fn forget(&mut self, key: u64, arriving: Option<&Client>) {
        self.owned.remove(&key);
        if let Some(client) = arriving {
            self.remove(client);
        }
    }

    /// `client` may be on any worker.
    pub(crate) fn expect_own(&mut self, client: Client, key: u64, own: u16) {
        self.remove(&client);
        self.arrivals.insert(client, Expected { key, owner: own, asked: false, place: None });
    }

    /// The pending move lasts until the allocation moves, its owner declines, or a newer one displaces it.
    pub(crate) fn expect(&mut self, client: Client, key: u64, owner: u16) {
        if self.arrivals.get(&client).is_some_and(|known| (known.key, known.owner) == (key, owner)) {
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
        self.arrivals.insert(client, Expected { key, owner, asked: false, place });
    }

    pub(crate) fn expected(&self) -> Vec<PendingMove> {
        let foreign = self.arrivals.iter().filter(|(_, expected)| expected.place.is_some());
        foreign
            .map(|(client, Expected { key, owner, .. })| PendingMove {
                client: *client,
                key: *key,
                owner: *owner,
            })
            .collect()
    }

    #[inline]
    pub(crate) fn is_nobody_expected(&self) -> bool {
        self.arrivals.is_empty()
    }

    pub(crate) fn get(&mut self, client: &Client) -> Option<&mut Expected> {
        self.arrivals.get_mut(client)
    }

    pub(crate) fn remove(&mut self, client: &Client) -> Option<Expected> {
        let expected = self.arrivals.remove(client)?;
        if let Some(place) = expected.place {
            self.queue.remove(&place);
            self.foreign.remove(&expected.key);
        }
        Some(expected)
    }

    pub(crate) fn forget_foreign(&mut self, key: u64) {
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
    fn tables_agree_after_random_insertions_and_removals() {
        let mut moves = PendingMoves::new();
        let mut step = 1_u64;
        for _ in 0..20_000 {
            step = step.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let port = u16::try_from((step >> 40) % 50).unwrap();
            let key = (step >> 33) % 40;
            match (step >> 60) % 4 {
                0 => _ = moves.remove(&client(port)),
                1 => moves.expect_own(client(port), key + 1000, 1),
                _ => moves.expect(client(port), key, 0),
            }
            let foreign = moves.arrivals.values().filter(|expected| expected.place.is_some()).count();
            assert_eq!((moves.foreign.len(), moves.queue.len()), (foreign, foreign));
            for (key, client) in &moves.foreign {
                assert_eq!(moves.arrivals[client].key, *key);
            }
        }
    }

    #[test]
    fn a_full_table_drops_the_oldest_pending_move() {
        let mut moves = PendingMoves::new();
        for port in 0..=u16::MAX {
            moves.expect(client(port), port.into(), 0);
            assert!(moves.get(&client(port)).is_some());
            assert!(moves.arrivals.len() <= MOST_EXPECTED);
        }
        assert!(moves.get(&client(u16::MAX - 8191)).is_some());
        assert!(moves.get(&client(u16::MAX - 8192)).is_none());
        moves.remove(&client(u16::MAX));
        moves.expect(client(1), 1, 0);
        assert!(moves.get(&client(u16::MAX - 8191)).is_some(), "there was room");
    }
}
