//! Allocates that were granted, so that a copy of one gets no second allocation: who sees a request on its way can send it again,
//! once the allocation has ended or from another port, and each copy would count against the user's quota.
//!
//! Remembered is, for the hash of each transaction ID, the time of the nonce that it came with. A copy has the same nonce. Another
//! Allocate that shares the place gets a fresh nonce by a 438 if its own is no newer, and sends a new transaction: so memory is
//! fixed, nothing is ever forgotten too early, and whoever fills the places costs others one more round at worst.

use std::{
    fmt,
    hash::BuildHasher as _,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use foldhash::quality::RandomState;

/// Places: 256 KiB a server. At 1,000 allocations a second, one of 65 is asked to try again.
const PLACES: usize = 1 << 16;

/// The Allocates granted by a server, all its workers together: a copy may reach another worker than the original.
#[derive(Clone, Default)]
pub struct GrantedAllocates(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Times of nonces; 0 is none.
    places: OnceLock<Box<[AtomicU32]>>,
    hasher: RandomState,
}

/// What has been noted, in case it comes to nothing.
#[derive(Clone, Copy)]
pub(super) struct Noted {
    place: usize,
    before: u32,
    after: u32,
}

impl GrantedAllocates {
    /// The same, with its memory.
    pub(super) fn ready(&self) -> Self {
        self.places();
        self.clone()
    }

    /// Notes an Allocate with a nonce of `issued`, at `unix`, both in seconds. `None` if it may be a copy.
    pub(super) fn note(&self, transaction: [u8; 12], issued: u32, unix: u32) -> Option<Noted> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of places")]
        let place = self.0.hasher.hash_one(transaction) as usize % PLACES;
        let after = issued.max(1);
        // Relaxed: nothing else hangs on it, and each place is changed in one step.
        let noted = self.places()[place].fetch_update(Ordering::Relaxed, Ordering::Relaxed, |noted| {
            // After the clock was set back, what was noted lies in the future, and nonces of then are stale.
            let may_be_copy = noted != 0 && is_since(noted, issued) && is_since(unix, noted);
            (!may_be_copy).then_some(after)
        });
        noted.ok().map(|before| Noted { place, before, after })
    }

    /// Its allocation has not come about: it may be sent again as it is.
    pub(super) fn withdraw(&self, noted: Noted) {
        let Noted { place, before, after } = noted;
        // Whoever has noted something newer there knows better.
        let _ = self.places()[place].compare_exchange(after, before, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn places(&self) -> &[AtomicU32] {
        self.0.places.get_or_init(|| (0..PLACES).map(|_| AtomicU32::new(0)).collect())
    }
}

impl fmt::Debug for GrantedAllocates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantedAllocates(..)")
    }
}

/// Whether `time` is `than` or later, on a clock that wraps every 136 years.
const fn is_since(time: u32, than: u32) -> bool {
    time.wrapping_sub(than) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transaction(n: u32) -> [u8; 12] {
        let mut id = [0; 12];
        id[..4].copy_from_slice(&n.to_be_bytes());
        id
    }

    #[test]
    fn a_copy_is_refused_on_every_worker_and_a_newer_nonce_is_not() {
        let granted = GrantedAllocates::default();
        let other_worker = granted.clone();
        assert!(granted.note(transaction(1), 1000, 1001).is_some());
        assert!(other_worker.note(transaction(1), 1000, 1002).is_none());
        assert!(granted.note(transaction(1), 999, 1002).is_none(), "older than the one that was granted");
        assert!(other_worker.note(transaction(1), 1002, 1002).is_some());
        assert!(granted.note(transaction(1), 1000, 1003).is_none(), "nor is the first one good again");
    }

    #[test]
    fn what_came_to_nothing_may_be_sent_again_and_what_was_granted_before_may_not() {
        let granted = GrantedAllocates::default();
        granted.note(transaction(1), 1000, 1001);
        let noted = granted.note(transaction(1), 1002, 1002).expect("a newer nonce");
        granted.withdraw(noted);
        assert!(granted.note(transaction(1), 1000, 1003).is_none());
        assert!(granted.note(transaction(1), 1002, 1003).is_some());
        granted.withdraw(Noted { after: 1001, ..noted });
        assert!(granted.note(transaction(1), 1002, 1003).is_none(), "another's note stays");
    }

    #[test]
    fn a_clock_set_back_keeps_nobody_out() {
        let granted = GrantedAllocates::default();
        assert!(granted.note(transaction(1), 5000, 5000).is_some());
        assert!(granted.note(transaction(1), 1000, 1000).is_some());
        assert!(granted.note(transaction(1), 1000, 1000).is_none());
    }

    #[test]
    fn it_goes_on_when_the_time_wraps() {
        let granted = GrantedAllocates::default();
        assert!(granted.note(transaction(1), u32::MAX - 1, u32::MAX).is_some());
        assert!(granted.note(transaction(1), u32::MAX - 1, 5).is_none());
        assert!(granted.note(transaction(1), 3, 5).is_some());
    }

    #[test]
    fn a_thousand_a_second_ask_few_to_try_again_and_a_flood_lets_no_copy_in() {
        let granted = GrantedAllocates::default();
        let refused = (0..1000).filter(|n| granted.note(transaction(*n), 1000, 1000).is_none()).count();
        // 8 on average.
        assert!(refused < 100, "{refused}");
        for n in 1000..200_000 {
            granted.note(transaction(n), 1000, 1000);
        }
        assert!((0..1000).all(|n| granted.note(transaction(n), 1000, 1000).is_none()));
        assert!(granted.note(transaction(1), 1001, 1001).is_some());
        assert_eq!(granted.places().len(), PLACES);
    }
}
