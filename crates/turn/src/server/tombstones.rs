//! Deletions of the last seconds, so that a Refresh with LIFETIME 0 whose answer was lost is answered again instead of
//! with 437. Bounded in number and time; only authenticated requests get here.

use std::{collections::VecDeque, hash::BuildHasher as _};

use foldhash::quality::RandomState;
use hashbrown::HashMap;

use super::Client;

/// RFC 8489 section 6.3.1: a server that remembers transactions does so for 40 seconds.
const LIFETIME_MS: u64 = 40_000;
/// Half a MiB a worker.
const MOST: usize = 8192;

pub(super) struct Tombstones {
    /// Hash and time of expiry, oldest first. Two requests that share a seeded 64-bit hash would have one of them
    /// answered with a success that it did not need.
    queue: VecDeque<(u64, u64)>,
    /// The same, from hash to time: every Refresh with LIFETIME 0 asks.
    expiries: HashMap<u64, u64, RandomState>,
    hasher: RandomState,
}

impl Tombstones {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            expiries: HashMap::with_hasher(RandomState::default()),
            hasher: RandomState::default(),
        }
    }

    pub(super) fn insert(&mut self, now_ms: u64, client: &Client, transaction: [u8; 12], username: &str) {
        self.sweep(now_ms);
        if self.queue.len() >= MOST {
            self.forget_oldest();
        }
        let (hash, expires_ms) = (self.hash(client, transaction, username), now_ms + LIFETIME_MS);
        self.queue.push_back((hash, expires_ms));
        self.expiries.insert(hash, expires_ms);
    }

    pub(super) fn contains(
        &mut self,
        now_ms: u64,
        client: &Client,
        transaction: [u8; 12],
        username: &str,
    ) -> bool {
        self.sweep(now_ms);
        self.expiries.contains_key(&self.hash(client, transaction, username))
    }

    fn hash(&self, client: &Client, transaction: [u8; 12], username: &str) -> u64 {
        self.hasher.hash_one((client, transaction, username))
    }

    fn sweep(&mut self, now_ms: u64) {
        while self.queue.front().is_some_and(|(_, expires_ms)| *expires_ms <= now_ms) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let Some((hash, expires_ms)) = self.queue.pop_front() else { return };
        // The same deletion may have been remembered again since.
        if self.expiries.get(&hash) == Some(&expires_ms) {
            self.expiries.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::ListenerId;

    #[test]
    fn a_flood_of_deletions_and_the_time_bound_what_is_remembered() {
        let address = "192.0.2.1:1".parse().unwrap();
        let client = Client { listener: ListenerId(0), address, local: address };
        let transaction = |n: u32| {
            let mut id = [0; 12];
            id[..4].copy_from_slice(&n.to_be_bytes());
            id
        };
        let mut tombstones = Tombstones::new();
        for n in 0..20_000 {
            tombstones.insert(0, &client, transaction(n), "alice");
        }
        assert_eq!((tombstones.queue.len(), tombstones.expiries.len()), (MOST, MOST));
        assert!(tombstones.contains(39_999, &client, transaction(19_999), "alice"));
        assert!(!tombstones.contains(39_999, &client, transaction(19_999), "bob"));
        assert!(!tombstones.contains(39_999, &client, transaction(0), "alice"));
        assert!(!tombstones.contains(40_000, &client, transaction(19_999), "alice"));
        assert!(tombstones.queue.is_empty() && tombstones.expiries.is_empty());
    }
}
