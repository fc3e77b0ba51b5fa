//! The keys of nonces, mobility tickets and DTLS cookies that all nodes share. A new one is told a while before it is used, so that no node
//! meets what it does not know; an old one is kept for as long as somebody may come with what it has made.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

/// Seconds between telling of a key and using it: some beats of the largest fleet.
const AHEAD_S: u64 = 60;
/// Seconds for which a key is kept after the next one is used: a mobility ticket is as old as its allocation's last move.
const KEPT_S: u64 = 7 * 86_400;
/// Keys at most, however often they are rotated.
const MOST: usize = 64;

/// A key, and from when on it is used.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Unix seconds.
    pub from: u64,
    /// By chance.
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

/// All keys that count, and a number that is larger whenever they are others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRing {
    /// 1 for the first.
    pub version: u64,
    /// The newest last.
    keys: Vec<Key>,
}

impl KeyRing {
    /// Of a fleet that has none: its key is used at once.
    #[must_use]
    pub fn first(unix: u64, bytes: [u8; 32]) -> Self {
        Self { version: 1, keys: vec![Key { from: unix, bytes }] }
    }

    /// The keys, the newest last.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Whether it is time for another key, one being used for so many seconds.
    #[must_use]
    pub fn is_due(&self, unix: u64, rotation_s: u64) -> bool {
        self.keys.last().is_none_or(|newest| newest.from + rotation_s <= unix + AHEAD_S)
    }

    /// With another key, and without those that nobody can come with any more.
    #[must_use]
    pub fn rotated(&self, unix: u64, bytes: [u8; 32]) -> Self {
        let mut keys = self.keys.clone();
        keys.push(Key { from: unix + AHEAD_S, bytes });
        // A key is of no use once its successor has been used for long enough.
        let used_up = |next: &Key| next.from + KEPT_S <= unix;
        let over = keys.windows(2).take_while(|pair| used_up(&pair[1])).count();
        keys.drain(..over.max(keys.len().saturating_sub(MOST)));
        Self { version: self.version + 1, keys }
    }

    /// To be sealed.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The opposite. `None` for what is no ring, or one without a key.
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
    fn a_new_key_is_known_before_it_is_used() {
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
    fn an_old_key_is_kept_for_a_week_after_its_last_use() {
        let mut ring = KeyRing::first(0, [0; 32]);
        for day in 1..30 {
            let now = day * DAY - AHEAD_S;
            assert!(ring.is_due(now, DAY), "day {day}");
            ring = ring.rotated(now, [7; 32]);
        }
        // Used from the 29th day on; the 21st key was used until the 22nd, which is a week and a bit ago.
        assert_eq!(froms(&ring), (21..30).map(|day| day * DAY).collect::<Vec<_>>());
    }

    #[test]
    fn whatever_the_rotation_the_ring_is_bounded_and_the_newest_stays() {
        let mut ring = KeyRing::first(0, [0; 32]);
        for turn in 1..1000 {
            ring = ring.rotated(turn * 60, [1; 32]);
            assert!((1..=MOST).contains(&ring.keys().len()));
            assert_eq!(ring.keys().last().map(|key| key.from), Some(turn * 60 + AHEAD_S));
        }
    }

    #[test]
    fn a_ring_is_read_as_it_is_written_and_never_printed() {
        let ring = KeyRing::first(5, [213; 32]).rotated(6, [214; 32]);
        assert_eq!(KeyRing::from_bytes(&ring.to_bytes()), Some(ring.clone()));
        let shown = format!("{ring:?}");
        assert!(!shown.contains("213") && !shown.contains("214"), "{shown}");
        assert_eq!(KeyRing::from_bytes(br#"{"version":1,"keys":[]}"#), None);
    }

    proptest! {
        #[test]
        fn no_bytes_are_more_than_refused(bytes: Vec<u8>) {
            let _ = KeyRing::from_bytes(&bytes);
        }
    }
}
