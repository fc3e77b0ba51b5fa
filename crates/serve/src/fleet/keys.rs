//! Keys for nonces, tickets and cookies: the fleet's key ring once it is known, a key of this node until
//! then.

use turnpike_fleet::{KeyRing, Sealer};
use turnpike_turn::server::{NonceKey, NonceKeys};

/// Purpose of a sealed key ring: data sealed for another purpose cannot be opened as a key ring.
const RING: &str = "ring";

#[derive(Clone, Debug)]
pub(crate) struct NodeKeys {
    /// Key of this server, also used by the process that replaces it.
    pub(crate) own: NonceKey,
    pub(crate) keys: NonceKeys,
    pub(crate) node: Option<u16>,
}

impl NodeKeys {
    pub(crate) fn alone(own: NonceKey) -> Self {
        Self { own, keys: own.into(), node: None }
    }
}

pub(super) struct Custody {
    /// Random key of this node.
    own: NonceKey,
    /// True if clients may have nonces, tickets or cookies made with `own`.
    own_is_used: bool,
    ring: Option<KeyRing>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KeyStep {
    Nothing,
    Read,
    /// Replace the ring whose version is `before` (0 if the store has no ring).
    Put {
        before: u64,
        ring: KeyRing,
    },
}

impl Custody {
    /// `own_is_used`: clients of the previous process may have nonces, tickets or cookies made with
    /// `own`.
    pub(super) fn new(own: NonceKey, own_is_used: bool) -> Self {
        Self { own, own_is_used, ring: None }
    }

    pub(super) fn own(&self) -> (NonceKey, bool) {
        (self.own, self.own_is_used)
    }

    pub(super) fn ring(&self) -> Option<&KeyRing> {
        self.ring.as_ref()
    }

    /// Compares the version with the one in the store. An empty store, or one with an older ring after a
    /// failover, gets this node's ring. `bytes` are random.
    pub(super) fn step(&self, stored: u64, unix: u64, rotation_s: u64, bytes: [u8; 32]) -> KeyStep {
        match &self.ring {
            None if stored == 0 => KeyStep::Put { before: 0, ring: KeyRing::first(unix, bytes) },
            None => KeyStep::Read,
            Some(ring) if ring.version < stored => KeyStep::Read,
            Some(ring) if ring.version > stored => KeyStep::Put { before: stored, ring: ring.clone() },
            Some(ring) if ring.is_due(unix, rotation_s) => {
                KeyStep::Put { before: stored, ring: ring.rotated(unix, bytes) }
            }
            Some(_) => KeyStep::Nothing,
        }
    }

    pub(super) fn take(&mut self, ring: KeyRing) {
        self.ring = Some(ring);
    }

    pub(super) fn version(&self) -> u64 {
        self.ring.as_ref().map_or(0, |ring| ring.version)
    }

    pub(super) fn keys(&mut self) -> NonceKeys {
        let all = self.ring.iter().flat_map(|ring| ring.keys());
        let mut all = all.map(|key| (key.from, NonceKey(key.bytes)));
        let Some((_, oldest)) = all.next() else {
            self.own_is_used = true;
            return self.own.into();
        };
        // Anything made with the node's own key while the node was alone is still accepted, but nothing new
        // is made with that key.
        let own = self.own_is_used.then_some((u64::MAX, self.own));
        NonceKeys::new(oldest, all.chain(own))
    }
}

pub(super) fn open_ring(sealer: &Sealer, sealed: &[u8]) -> Option<KeyRing> {
    KeyRing::from_bytes(&sealer.open(RING, sealed)?)
}

pub(super) fn seal_ring(sealer: &Sealer, ring: &KeyRing) -> Vec<u8> {
    sealer.seal(RING, &ring.to_bytes(), rand::random())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400;

    fn ring(version: u64) -> KeyRing {
        (1..version).fold(KeyRing::first(0, [1; 32]), |ring, _| ring.rotated(0, [2; 32]))
    }

    #[test]
    fn the_first_node_creates_a_ring_and_the_others_read_it() {
        let custody = Custody::new(NonceKey([9; 32]), false);
        let first = KeyRing::first(1000, [7; 32]);
        assert_eq!(custody.step(0, 1000, DAY, [7; 32]), KeyStep::Put { before: 0, ring: first });
        assert_eq!(custody.step(1, 1000, DAY, [7; 32]), KeyStep::Read);
    }

    #[test]
    fn a_newer_ring_is_read_and_an_older_or_missing_one_is_replaced() {
        let mut custody = Custody::new(NonceKey([9; 32]), false);
        custody.take(ring(3));
        let ours = |before| KeyStep::Put { before, ring: ring(3) };
        for (stored, step) in [(4, KeyStep::Read), (3, KeyStep::Nothing), (2, ours(2)), (0, ours(0))] {
            assert_eq!(custody.step(stored, 0, DAY, [7; 32]), step, "{stored}");
        }
        assert_eq!(custody.version(), 3);
        let due = custody.step(3, 2 * DAY, DAY, [7; 32]);
        assert_eq!(due, KeyStep::Put { before: 3, ring: ring(3).rotated(2 * DAY, [7; 32]) });
    }

    #[test]
    fn the_nodes_own_key_stays_valid_after_joining_but_is_no_longer_used() {
        let mut custody = Custody::new(NonceKey([9; 32]), false);
        assert_eq!(custody.keys().at(5).0, [9; 32]);
        custody.take(KeyRing::first(100, [1; 32]).rotated(100, [2; 32]));
        let keys = custody.keys();
        for (unix, byte) in [(0, 1), (100, 1), (160, 2), (u64::MAX - 1, 2)] {
            assert_eq!(keys.at(unix).0, [byte; 32], "{unix}");
        }
        assert!(keys.iter().any(|key| key.0 == [9; 32]));
        let mut joined = Custody::new(NonceKey([9; 32]), false);
        joined.take(KeyRing::first(100, [1; 32]));
        assert_eq!(joined.keys().iter().count(), 1, "no client has a nonce made with the node's own key");
        let mut heir = Custody::new(NonceKey([9; 32]), true);
        heir.take(KeyRing::first(100, [1; 32]));
        assert_eq!(
            heir.keys().iter().count(),
            2,
            "clients of the previous process may have nonces made with that key"
        );
    }
}
