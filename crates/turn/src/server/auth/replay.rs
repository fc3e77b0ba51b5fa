//! Refuses a copy of a request that was granted: an Allocate whose copy would take one more place of the user's quota, and a Refresh with a
//! mobility ticket (RFC 8016) whose copy would move the allocation to its sender. Such a request is granted once, on whichever worker.
//!
//! The guard stores hash(transaction ID) and the time of the request's nonce; a copy has the same nonce. A full bucket forgets its oldest entry,
//! and from then on refuses every nonce that is as old: its client gets a fresh nonce by a 438 and sends a new transaction. Memory is therefore
//! fixed, no entry is forgotten too early, and a flood costs other clients one more round at worst.
//!
//! The guard lives as long as the server's own key: a process that takes over that key takes over the guard. Its hash is keyed by the same key.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use turnpike_wire::stun::kind;

use crate::server::{
    Disposition, Policy, RequestRefusal, Server,
    auth::{keyed_hash::KeyedHash, nonce},
    request::context::Context,
};

/// 544 KiB a server with what they hold. Of 10,000 allocations in one second, with nonces of that second, one in 20,000 is asked to
/// try again.
const BUCKETS: usize = 1 << 13;
const PLACES: usize = 7;

/// The requests granted by a server, all its workers together: a copy may reach another worker than the original.
#[derive(Clone, Default)]
pub struct ReplayGuard(Arc<Inner>);

#[derive(Default)]
struct Inner(OnceLock<Table>);

struct Table {
    /// Locked for a few compares by requests that are about to be granted.
    buckets: Box<[Mutex<Bucket>]>,
    hash: KeyedHash,
}

#[derive(Default)]
struct Bucket {
    /// The time of the newest that was forgotten; 0 is none.
    forgotten: u32,
    places: [Place; PLACES],
}

#[derive(Clone, Copy, Default)]
struct Place {
    /// Of a transaction, by its hash.
    tag: u32,
    /// Of its nonce; 0 is none.
    time: u32,
}

/// A kind of request that is granted once.
#[derive(Clone, Copy)]
pub(crate) enum Once {
    Allocate,
    /// A Refresh with a mobility ticket.
    Move,
}

impl Once {
    /// Tells the kinds apart in the hash. Earlier versions hand over Allocates alone, hashed without a suffix.
    const fn suffix(self) -> &'static [u8] {
        match self {
            Self::Allocate => b"",
            Self::Move => b"move",
        }
    }
}

/// An entry, to be withdrawn if the request comes to nothing after all.
#[derive(Clone, Copy)]
pub(crate) struct Recorded {
    bucket: usize,
    tag: u32,
    before: u32,
    after: u32,
}

impl ReplayGuard {
    /// Bytes of [`ReplayGuard::to_bytes`].
    const WRITTEN: usize = BUCKETS * (1 + 2 * PLACES) * size_of::<u32>();

    /// The same, with its memory. `key` is the server's own.
    pub(crate) fn ready(&self, key: &[u8; 32]) -> Self {
        self.0.0.get_or_init(|| Table::new(key));
        self.clone()
    }

    /// All of it, for [`ReplayGuard::take_over`] of another process.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::WRITTEN);
        for index in 0..BUCKETS {
            let Bucket { forgotten, places } = &*self.bucket(index);
            bytes.extend(forgotten.to_le_bytes());
            for Place { tag, time } in places {
                bytes.extend([tag.to_le_bytes(), time.to_le_bytes()].as_flattened());
            }
        }
        bytes
    }

    /// Takes over the entries of a process with the same key. False if they do not fit: then nothing has changed.
    #[must_use]
    pub fn take_over(&self, bytes: &[u8]) -> bool {
        if bytes.len() != Self::WRITTEN {
            return false;
        }
        let (words, _) = bytes.as_chunks::<4>();
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let mut next = || words.next().unwrap_or_default();
        for index in 0..BUCKETS {
            let mut bucket = self.bucket(index);
            bucket.forgotten = next();
            bucket.places = std::array::from_fn(|_| Place { tag: next(), time: next() });
        }
        true
    }

    /// Records a request with a nonce of `issued`, at `unix`, both in seconds. `None` if it may be a copy.
    pub(crate) fn record(&self, request: (Once, [u8; 12]), issued: u32, unix: u32) -> Option<Recorded> {
        let (index, tag) = self.table().place_of(request);
        let after = issued.max(1);
        let mut bucket = self.bucket(index);
        // After the clock was set back, entries lie in the future, and their nonces are stale.
        let counts = |time: u32| time != 0 && is_since(unix, time);
        if counts(bucket.forgotten) && is_since(bucket.forgotten, issued) {
            return None;
        }
        if let Some(same) = bucket.places.iter_mut().find(|place| place.tag == tag && counts(place.time)) {
            let before = same.time;
            if is_since(before, issued) {
                return None;
            }
            same.time = after;
            return Some(Recorded { bucket: index, tag, before, after });
        }
        // One that is free, or else the oldest.
        let age = |place: &Place| if counts(place.time) { unix.wrapping_sub(place.time) } else { u32::MAX };
        let oldest = bucket.places.iter_mut().max_by_key(|place| age(place))?;
        let before = oldest.time;
        if counts(before) && is_since(before, issued) {
            return None;
        }
        *oldest = Place { tag, time: after };
        if counts(before) {
            // Newer than all that were forgotten, for a place is only taken by what is.
            bucket.forgotten = before;
        }
        Some(Recorded { bucket: index, tag, before: 0, after })
    }

    /// The request has come to nothing: it may be sent again as it is.
    pub(crate) fn withdraw(&self, recorded: Recorded) {
        let Recorded { bucket, tag, before, after } = recorded;
        // A newer entry stays.
        let mut bucket = self.bucket(bucket);
        if let Some(place) = bucket.places.iter_mut().find(|place| (place.tag, place.time) == (tag, after)) {
            place.time = before;
        }
    }

    fn bucket(&self, index: usize) -> MutexGuard<'_, Bucket> {
        self.table().buckets[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> &Table {
        self.0.0.get_or_init(|| Table::new(&[0; 32]))
    }
}

impl Table {
    fn new(key: &[u8; 32]) -> Self {
        let buckets = (0..BUCKETS).map(|_| Mutex::default()).collect();
        Self { buckets, hash: KeyedHash::new(key, b"turnpike granted allocates") }
    }

    /// Which bucket, and the tag in there.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "reduced to the number of buckets; 32 bits are meant"
    )]
    fn place_of(&self, (once, transaction): (Once, [u8; 12])) -> (usize, u32) {
        let hash = self.hash.of(&[&transaction, once.suffix()]);
        (hash as usize % BUCKETS, (hash >> 32) as u32)
    }
}

impl<P: Policy> Server<P> {
    /// Records that a request is about to be granted. A copy of one that was granted gets 438: its nonce is used up.
    pub(crate) fn grant_once(
        &mut self,
        context: &Context<'_>,
        once: Once,
    ) -> Result<Option<Recorded>, Disposition> {
        let Context { now, request, envelope, .. } = context;
        // Without authentication there is no nonce, and a copy needs no original.
        let nonce = request.get(kind::NONCE).filter(|_| envelope.signer.is_some());
        let issued = nonce.and_then(|nonce| nonce::issued(nonce, now.unix));
        let Some(issued) = issued else { return Ok(None) };
        let recorded = self.replays.record((once, request.transaction()), issued, nonce::truncate(now.unix));
        if recorded.is_some() {
            return Ok(recorded);
        }
        self.tell_of(context, 438, RequestRefusal::Code);
        Err(self.challenge_again(context, 438))
    }
}

impl fmt::Debug for ReplayGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplayGuard(..)")
    }
}

/// Whether `time` is `than` or later, on a clock that wraps every 136 years.
const fn is_since(time: u32, than: u32) -> bool {
    time.wrapping_sub(than) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transaction(n: u32) -> (Once, [u8; 12]) {
        let mut id = [0; 12];
        id[..4].copy_from_slice(&n.to_be_bytes());
        (Once::Allocate, id)
    }

    #[test]
    fn a_copy_is_refused_on_every_worker_and_a_newer_nonce_is_not() {
        let granted = ReplayGuard::default();
        let other_worker = granted.clone();
        assert!(granted.record(transaction(1), 1000, 1001).is_some());
        assert!(other_worker.record(transaction(1), 1000, 1002).is_none());
        assert!(granted.record(transaction(1), 999, 1002).is_none(), "older than the one that was granted");
        assert!(other_worker.record(transaction(1), 1002, 1002).is_some());
        assert!(granted.record(transaction(1), 1000, 1003).is_none(), "nor is the first one good again");
    }

    #[test]
    fn what_came_to_nothing_may_be_sent_again_and_what_was_granted_before_may_not() {
        let granted = ReplayGuard::default();
        granted.record(transaction(1), 1000, 1001);
        let recorded = granted.record(transaction(1), 1002, 1002).expect("a newer nonce");
        granted.withdraw(recorded);
        assert!(granted.record(transaction(1), 1000, 1003).is_none());
        assert!(granted.record(transaction(1), 1002, 1003).is_some());
        granted.withdraw(Recorded { after: 1001, ..recorded });
        assert!(granted.record(transaction(1), 1002, 1003).is_none(), "another's note stays");
    }

    #[test]
    fn a_clock_set_back_keeps_nobody_out() {
        let granted = ReplayGuard::default();
        assert!(granted.record(transaction(1), 5000, 5000).is_some());
        assert!(granted.record(transaction(1), 1000, 1000).is_some());
        assert!(granted.record(transaction(1), 1000, 1000).is_none());
    }

    #[test]
    fn it_goes_on_when_the_time_wraps() {
        let granted = ReplayGuard::default();
        assert!(granted.record(transaction(1), u32::MAX - 1, u32::MAX).is_some());
        assert!(granted.record(transaction(1), u32::MAX - 1, 5).is_none());
        assert!(granted.record(transaction(1), 3, 5).is_some());
    }

    #[test]
    fn ten_thousand_in_a_second_get_in_at_once_and_a_flood_lets_no_copy_in() {
        let granted = ReplayGuard::default();
        let refused = (0..10_000).filter(|n| granted.record(transaction(*n), 1000, 1000).is_none()).count();
        // Half a one on average; one of 65,536 places without buckets would refuse 720.
        assert!(refused < 20, "{refused}");
        for n in 10_000..300_000 {
            granted.record(transaction(n), 1000, 1000);
        }
        assert!((0..10_000).all(|n| granted.record(transaction(n), 1000, 1000).is_none()));
        assert!(granted.record(transaction(1), 1001, 1001).is_some());
    }

    #[test]
    fn what_a_full_bucket_forgets_is_no_way_in_for_its_copy() {
        let granted = ReplayGuard::default();
        // Each second's nonces come with more than all buckets hold.
        for second in 1000..1004 {
            for n in 0..100_000 {
                granted.record(transaction(second * 1_000_000 + n), second, second);
            }
        }
        for second in 1000..1004 {
            let copies = (0..100_000)
                .filter_map(|n| granted.record(transaction(second * 1_000_000 + n), second, 1004));
            assert_eq!(copies.count(), 0, "of {second}");
        }
    }

    #[test]
    fn a_place_that_is_given_back_is_no_way_in_for_what_it_held_before() {
        let granted = ReplayGuard::default();
        let admitted: Vec<u32> =
            (0..100_000).filter(|n| granted.record(transaction(*n), 1000, 1000).is_some()).collect();
        let newer: Vec<Recorded> =
            (100_000..200_000).filter_map(|n| granted.record(transaction(n), 1001, 1001)).collect();
        newer.into_iter().for_each(|recorded| granted.withdraw(recorded));
        assert!(admitted.iter().all(|n| granted.record(transaction(*n), 1000, 1001).is_none()));
    }

    #[test]
    fn another_process_with_the_same_key_knows_what_was_granted() {
        let ready = |key| ReplayGuard::default().ready(&[key; 32]);
        let here = ready(7);
        for n in 0..60_000 {
            here.record(transaction(n), 1000 + n / 1000, 2000);
        }
        let (same, stranger) = (ready(7), ready(8));
        assert!(same.take_over(&here.to_bytes()) && stranger.take_over(&here.to_bytes()));
        assert!((0..60_000).all(|n| same.record(transaction(n), 1000 + n / 1000, 2000).is_none()));
        let strange = (0..20_000).filter(|n| stranger.record(transaction(*n), 2000, 2000).is_some()).count();
        assert!(strange > 19_000, "under another key it is noise: {strange}");
        assert_eq!(here.to_bytes().len(), ReplayGuard::WRITTEN);
        assert!(!same.take_over(&here.to_bytes()[1..]));
    }

    #[test]
    fn memory_is_what_the_documentation_says() {
        assert_eq!(BUCKETS * size_of::<Mutex<Bucket>>(), 68 * 8192);
    }
}
