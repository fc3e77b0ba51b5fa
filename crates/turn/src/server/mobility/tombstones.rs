//! Recent deletions, so that a retransmitted Refresh with LIFETIME 0 gets the same response again, not a 437.
//! Entries are bounded in number and lifetime, and only authenticated requests add any.

use std::{collections::VecDeque, net::IpAddr};

use foldhash::quality::RandomState;
use hashbrown::HashMap;

use crate::server::{Client, auth::keyed_hash::KeyedHash};

/// RFC 8489 section 6.3.1: servers that remember transactions do so for 40 s.
const LIFETIME_MS: u64 = 40_000;
/// Maximum number of entries, about half a MiB per worker.
const MOST: usize = 8192;

pub(crate) struct Tombstones {
    /// Hash and expiry time, oldest first. A hash collision yields a success response without any effect.
    queue: VecDeque<(u64, u64)>,
    /// Expiry times of the same entries by hash.
    expiries: HashMap<u64, u64, RandomState>,
    hash: KeyedHash,
}

impl Tombstones {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self {
            queue: VecDeque::new(),
            expiries: HashMap::with_hasher(RandomState::default()),
            hash: KeyedHash::new(key, b"turnpike tombstones"),
        }
    }

    /// Hashes with their remaining lifetime in milliseconds, oldest first, for [`Tombstones::import`].
    pub(crate) fn all(&self, now_ms: u64) -> Vec<(u64, u64)> {
        self.queue.iter().map(|(hash, expires_ms)| (*hash, expires_ms.saturating_sub(now_ms))).collect()
    }

    pub(crate) fn import(&mut self, now_ms: u64, all: &[(u64, u64)]) {
        self.sweep(now_ms);
        for (hash, left_ms) in all.iter().take(MOST) {
            if self.queue.len() >= MOST {
                self.forget_oldest();
            }
            self.remember(*hash, now_ms + (*left_ms).min(LIFETIME_MS));
        }
    }

    pub(crate) fn insert(
        &mut self,
        now_ms: u64,
        client: &Client,
        transaction: [u8; 12],
        username: &str,
    ) -> (u64, u64) {
        self.sweep(now_ms);
        if self.queue.len() >= MOST {
            self.forget_oldest();
        }
        let hash = self.hash(client, transaction, username);
        self.remember(hash, now_ms + LIFETIME_MS);
        (hash, LIFETIME_MS)
    }

    pub(crate) fn contains(
        &mut self,
        now_ms: u64,
        client: &Client,
        transaction: [u8; 12],
        username: &str,
    ) -> bool {
        self.sweep(now_ms);
        self.expiries.contains_key(&self.hash(client, transaction, username))
    }

    fn remember(&mut self, hash: u64, expires_ms: u64) {
        self.queue.push_back((hash, expires_ms));
        self.expiries.insert(hash, expires_ms);
    }

    /// The hash does not include the listener number, which differs between processes.
    fn hash(&self, client: &Client, transaction: [u8; 12], username: &str) -> u64 {
        let Client { address, local, .. } = client;
        let [address, local] = [address, local].map(|at| (mapped(at.ip()), at.port().to_be_bytes()));
        self.hash.of(&[&address.0, &address.1, &local.0, &local.1, &transaction, username.as_bytes()])
    }

    fn sweep(&mut self, now_ms: u64) {
        while self.queue.front().is_some_and(|(_, expires_ms)| *expires_ms <= now_ms) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let Some((hash, expires_ms)) = self.queue.pop_front() else { return };
        // The deletion may have been recorded again since then.
        if self.expiries.get(&hash) == Some(&expires_ms) {
            self.expiries.remove(&hash);
        }
    }
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::ListenerId;

    #[test]
    fn tombstones_are_bounded_in_number_and_time() {
        let address = "192.0.2.1:1".parse().unwrap();
        let client = Client { listener: ListenerId(0), address, local: address };
        let transaction = |n: u32| {
            let mut id = [0; 12];
            id[..4].copy_from_slice(&n.to_be_bytes());
            id
        };
        let mut tombstones = Tombstones::new(&[7; 32]);
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

    #[test]
    fn imported_tombstones_keep_their_remaining_lifetime() {
        let address = "192.0.2.1:1".parse().unwrap();
        let client = |listener| Client { listener: ListenerId(listener), address, local: address };
        let mut here = Tombstones::new(&[7; 32]);
        here.insert(1000, &client(0), [1; 12], "alice");
        let mut there = Tombstones::new(&[7; 32]);
        there.import(500, &here.all(11_000));
        assert!(there.contains(30_499, &client(3), [1; 12], "alice"));
        assert!(!there.contains(30_499, &client(3), [2; 12], "alice"));
        assert!(!there.contains(30_500, &client(3), [1; 12], "alice"));
    }
}
