//! Shared keys for nonces, mobility tickets and DTLS cookies. A new key is distributed before its first use,
//! so that all nodes know it. An old key is kept for as long as clients may present anything made with it.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

/// Seconds between distribution and first use: several heartbeats even in the largest fleet.
const AHEAD_S: u64 = 60;
/// Seconds for which a key is kept after its last use, because mobility tickets of long allocations may still
/// need it.
const KEPT_S: u64 = 7 * 86_400;
const MOST: usize = 64;

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Unix seconds.
    pub from: u64,
    pub bytes: [u8; 32],
}

impl Drop for Key {
    fn drop(&mut self) {
        self.bytes.zeroize();
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}, ..)", self.from)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRing {
    /// Version of the key ring: 1 for the first, incremented with each change.
    pub version: u64,
    keys: Vec<Key>,
}

impl KeyRing {
    #[must_use]
    pub fn first(unix: u64, bytes: [u8; 32]) -> Self {
        Self { version: 1, keys: vec![Key { from: unix, bytes }] }
    }

    /// Ordered by time of first use.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// True if a new key is due; `rotation_s` is the lifetime of a key in seconds.
    #[must_use]
    pub fn is_due(&self, unix: u64, rotation_s: u64) -> bool {
        self.keys.last().is_none_or(|newest| newest.from + rotation_s <= unix + AHEAD_S)
    }

    #[must_use]
    pub fn rotated(&self, unix: u64, bytes: [u8; 32]) -> Self {
        let mut keys = self.keys.clone();
        keys.push(Key { from: unix + AHEAD_S, bytes });
        // A key is obsolete when its successor has been in use for long enough.
        let used_up = |next: &Key| next.from + KEPT_S <= unix;
        let over = keys.windows(2).take_while(|pair| used_up(&pair[1])).count();
        keys.drain(..over.max(keys.len().saturating_sub(MOST)));
        Self { version: self.version + 1, keys }
    }

    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Inverse of [`Self::to_bytes`]; `None` for invalid data or an empty key ring.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut ring: Self = serde_json::from_slice(bytes).ok()?;
        ring.keys.sort_by_key(|key| key.from);
        (!ring.keys.is_empty() && ring.version > 0).then_some(ring)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: u64 = 86_400;

    fn froms(ring: &KeyRing) -> Vec<u64> {
        ring.keys().iter().map(|key| key.from).collect()
    }

    #[test]
    fn new_key_is_distributed_before_its_use() {
        let ring = KeyRing::first(1000, [1; 32]);
        assert!(!ring.is_due(1000, DAY));
        assert!(!ring.is_due(1000 + DAY - AHEAD_S - 1, DAY));
        let now = 1000 + DAY - AHEAD_S;
        assert!(ring.is_due(now, DAY));
        let ring = ring.rotated(now, [2; 32]);
        assert_eq!((ring.version, froms(&ring)), (2, vec![1000, 1000 + DAY]));
        assert!(!ring.is_due(now, DAY));
    }

    #[test]
    fn old_key_is_kept_for_a_week_after_its_last_use() {
        let mut ring = KeyRing::first(0, [0; 32]);
        for day in 1..30 {
            let now = day * DAY - AHEAD_S;
            assert!(ring.is_due(now, DAY), "day {day}");
            ring = ring.rotated(now, [7; 32]);
        }
        // The newest key is used from day 29 on. The key of day 21 is kept, because it was used until day 22.
        assert_eq!(froms(&ring), (21..30).map(|day| day * DAY).collect::<Vec<_>>());
    }

    #[test]
    fn key_ring_is_bounded_and_keeps_the_newest_key() {
        let mut ring = KeyRing::first(0, [0; 32]);
        for turn in 1..1000 {
            ring = ring.rotated(turn * 60, [1; 32]);
            assert!((1..=MOST).contains(&ring.keys().len()));
            assert_eq!(ring.keys().last().map(|key| key.from), Some(turn * 60 + AHEAD_S));
        }
    }

    #[test]
    fn key_ring_round_trips_and_is_never_printed() {
        let ring = KeyRing::first(5, [213; 32]).rotated(6, [214; 32]);
        assert_eq!(KeyRing::from_bytes(&ring.to_bytes()), Some(ring.clone()));
        let shown = format!("{ring:?}");
        assert!(!shown.contains("213") && !shown.contains("214"), "{shown}");
        assert_eq!(KeyRing::from_bytes(br#"{"version":1,"keys":[]}"#), None);
    }

    proptest! {
        #[test]
        fn parser_rejects_invalid_bytes_without_panic(bytes: Vec<u8>) {
            let _ = KeyRing::from_bytes(&bytes);
        }
    }
}
