//! Refuses replays of granted requests. A replayed Allocate would count against the user's quota again, and a
//! replayed Refresh with a mobility ticket (RFC 8016) would move the allocation to the attacker. So each of
//! these requests is granted only once across all workers.
//!
//! The guard stores hash(transaction ID) and the time of the request's nonce; a replay has the same nonce. A
//! full bucket drops its oldest entry and then refuses all nonces of that age or older: the client gets a
//! fresh nonce with 438 and sends a new transaction. Memory is therefore fixed, no entry is dropped too
//! early, and a flood costs other clients at most one round trip.
//!
//! A process that takes over the server's own key in an upgrade takes over the guard too; its hash uses the
//! same key.

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

/// Buckets of [`PLACES`] entries, 544 KiB per server. If 10,000 clients allocate in the second in which they
/// got their nonces, one in 20,000 has to retry.
const BUCKETS: usize = 1 << 13;
const PLACES: usize = 7;

#[derive(Clone, Default)]
pub struct ReplayGuard(Arc<ReplayState>);

#[derive(Default)]
struct ReplayState(OnceLock<ReplayTable>);

struct ReplayTable {
    /// A bucket is locked for a few comparisons when a request is about to be granted.
    buckets: Box<[Mutex<ReplayBucket>]>,
    hash: KeyedHash,
}

#[derive(Default)]
struct ReplayBucket {
    /// Time of the newest dropped entry; 0 if none has been dropped.
    forgotten: u32,
    places: [ReplayEntry; PLACES],
}

#[derive(Clone, Copy, Default)]
struct ReplayEntry {
    tag: u32,
    /// Time of the nonce; 0 if this entry is free.
    time: u32,
}

#[derive(Clone, Copy)]
pub(crate) enum Once {
    Allocate,
    Move,
}

impl Once {
    /// Suffix that the hash includes for this kind of request. Earlier versions record only Allocates,
    /// without a suffix.
    const fn suffix(self) -> &'static [u8] {
        match self {
            Self::Allocate => b"",
            Self::Move => b"move",
        }
    }
}

/// Entry that can be withdrawn if the request still fails later.
#[derive(Clone, Copy)]
pub(crate) struct Recorded {
    bucket: usize,
    tag: u32,
    before: u32,
    after: u32,
}

impl ReplayGuard {
    const WRITTEN: usize = BUCKETS * (1 + 2 * PLACES) * size_of::<u32>();

    pub(crate) fn ready(&self, key: &[u8; 32]) -> Self {
        self.0.0.get_or_init(|| ReplayTable::new(key));
        self.clone()
    }

    /// Serializes all entries for [`ReplayGuard::take_over`] in another process.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::WRITTEN);
        for index in 0..BUCKETS {
            let ReplayBucket { forgotten, places } = &*self.bucket(index);
            bytes.extend(forgotten.to_le_bytes());
            for ReplayEntry { tag, time } in places {
                bytes.extend([tag.to_le_bytes(), time.to_le_bytes()].as_flattened());
            }
        }
        bytes
    }

    /// If the table size differs, returns false and changes nothing.
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
            bucket.places = std::array::from_fn(|_| ReplayEntry { tag: next(), time: next() });
        }
        true
    }

    /// Times are Unix seconds. `None` if the request may be a replay.
    pub(crate) fn record(&self, request: (Once, [u8; 12]), issued: u32, unix: u32) -> Option<Recorded> {
        let (index, tag) = self.table().place_of(request);
        let after = issued.max(1);
        let mut bucket = self.bucket(index);
        // If the clock was set back, entries may lie in the future; their nonces are stale.
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
        let age =
            |place: &ReplayEntry| if counts(place.time) { unix.wrapping_sub(place.time) } else { u32::MAX };
        let oldest = bucket.places.iter_mut().max_by_key(|place| age(place))?;
        let before = oldest.time;
        if counts(before) && is_since(before, issued) {
            return None;
        }
        *oldest = ReplayEntry { tag, time: after };
        if counts(before) {
            // `before` is newer than all entries dropped earlier, because only newer ones are stored.
            bucket.forgotten = before;
        }
        Some(Recorded { bucket: index, tag, before: 0, after })
    }

    /// Withdraws the entry of a request that failed, so that the client may resend it unchanged.
    pub(crate) fn withdraw(&self, recorded: Recorded) {
        let Recorded { bucket, tag, before, after } = recorded;
        let mut bucket = self.bucket(bucket);
        if let Some(place) = bucket.places.iter_mut().find(|place| (place.tag, place.time) == (tag, after)) {
            place.time = before;
        }
    }

    fn bucket(&self, index: usize) -> MutexGuard<'_, ReplayBucket> {
        self.table().buckets[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> &ReplayTable {
        self.0.0.get_or_init(|| ReplayTable::new(&[0; 32]))
    }
}

impl ReplayTable {
    fn new(key: &[u8; 32]) -> Self {
        let buckets = (0..BUCKETS).map(|_| Mutex::default()).collect();
        Self { buckets, hash: KeyedHash::new(key, b"turnpike granted allocates") }
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "reduced to the number of buckets; 32 bits are enough"
    )]
    fn place_of(&self, (once, transaction): (Once, [u8; 12])) -> (usize, u32) {
        let hash = self.hash.of(&[&transaction, once.suffix()]);
        (hash as usize % BUCKETS, (hash >> 32) as u32)
    }
}

impl<P: Policy> Server<P> {
    /// A replay gets 438, which makes the client use a new nonce.
    pub(crate) fn grant_once(
        &mut self,
        context: &Context<'_>,
        once: Once,
    ) -> Result<Option<Recorded>, Disposition> {
        let Context { now, request, envelope, .. } = context;
        // Without authentication there is no nonce, and an attacker has no need to replay a request.
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

/// True if `time` is not before `than`. The clock wraps every 136 years.
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
    fn replays_are_refused_on_every_worker_and_newer_nonces_accepted() {
        let granted = ReplayGuard::default();
        let other_worker = granted.clone();
        assert!(granted.record(transaction(1), 1000, 1001).is_some());
        assert!(other_worker.record(transaction(1), 1000, 1002).is_none());
        assert!(granted.record(transaction(1), 999, 1002).is_none(), "older than the one that was granted");
        assert!(other_worker.record(transaction(1), 1002, 1002).is_some());
        assert!(granted.record(transaction(1), 1000, 1003).is_none(), "the first request is still recorded");
    }

    #[test]
    fn a_withdrawn_request_may_be_resent_but_a_granted_one_may_not() {
        let granted = ReplayGuard::default();
        granted.record(transaction(1), 1000, 1001);
        let recorded = granted.record(transaction(1), 1002, 1002).expect("a newer nonce");
        granted.withdraw(recorded);
        assert!(granted.record(transaction(1), 1000, 1003).is_none());
        assert!(granted.record(transaction(1), 1002, 1003).is_some());
        granted.withdraw(Recorded { after: 1001, ..recorded });
        assert!(granted.record(transaction(1), 1002, 1003).is_none(), "another request's entry stays");
    }

    #[test]
    fn setting_the_clock_back_blocks_no_request() {
        let granted = ReplayGuard::default();
        assert!(granted.record(transaction(1), 5000, 5000).is_some());
        assert!(granted.record(transaction(1), 1000, 1000).is_some());
        assert!(granted.record(transaction(1), 1000, 1000).is_none());
    }

    #[test]
    fn records_survive_clock_wraparound() {
        let granted = ReplayGuard::default();
        assert!(granted.record(transaction(1), u32::MAX - 1, u32::MAX).is_some());
        assert!(granted.record(transaction(1), u32::MAX - 1, 5).is_none());
        assert!(granted.record(transaction(1), 3, 5).is_some());
    }

    #[test]
    fn ten_thousand_requests_per_second_pass_and_a_flood_admits_no_replay() {
        let granted = ReplayGuard::default();
        let refused = (0..10_000).filter(|n| granted.record(transaction(*n), 1000, 1000).is_none()).count();
        // About 0.5 refusals are expected; a table of 65,536 places without buckets would refuse 720.
        assert!(refused < 20, "{refused}");
        for n in 10_000..300_000 {
            granted.record(transaction(n), 1000, 1000);
        }
        assert!((0..10_000).all(|n| granted.record(transaction(n), 1000, 1000).is_none()));
        assert!(granted.record(transaction(1), 1001, 1001).is_some());
    }

    #[test]
    fn a_full_bucket_admits_no_replay_of_a_forgotten_request() {
        let granted = ReplayGuard::default();
        for second in 1000..1004 {
            for n in 0..100_000 {
                granted.record(transaction(second * 1_000_000 + n), second, second);
            }
        }
        for second in 1000..1004 {
            let copies = (0..100_000)
                .filter_map(|n| granted.record(transaction(second * 1_000_000 + n), second, 1004));
            assert_eq!(copies.count(), 0, "second {second}");
        }
    }

    #[test]
    fn a_withdrawn_place_admits_no_replay_of_its_previous_entry() {
        let granted = ReplayGuard::default();
        let admitted: Vec<u32> =
            (0..100_000).filter(|n| granted.record(transaction(*n), 1000, 1000).is_some()).collect();
        let newer: Vec<Recorded> =
            (100_000..200_000).filter_map(|n| granted.record(transaction(n), 1001, 1001)).collect();
        newer.into_iter().for_each(|recorded| granted.withdraw(recorded));
        assert!(admitted.iter().all(|n| granted.record(transaction(*n), 1000, 1001).is_none()));
    }

    #[test]
    fn a_process_with_the_same_key_takes_over_the_records() {
        let ready = |key| ReplayGuard::default().ready(&[key; 32]);
        let here = ready(7);
        for n in 0..60_000 {
            here.record(transaction(n), 1000 + n / 1000, 2000);
        }
        let (same, stranger) = (ready(7), ready(8));
        assert!(same.take_over(&here.to_bytes()) && stranger.take_over(&here.to_bytes()));
        assert!((0..60_000).all(|n| same.record(transaction(n), 1000 + n / 1000, 2000).is_none()));
        let strange = (0..20_000).filter(|n| stranger.record(transaction(*n), 2000, 2000).is_some()).count();
        assert!(strange > 19_000, "under another key the entries are noise: {strange}");
        assert_eq!(here.to_bytes().len(), ReplayGuard::WRITTEN);
        assert!(!same.take_over(&here.to_bytes()[1..]));
    }

    #[test]
    fn memory_matches_the_documentation() {
        assert_eq!(BUCKETS * size_of::<Mutex<ReplayBucket>>(), 68 * 8192);
    }
}
