//! Limits shared by all nodes. Sharded, so that workers rarely wait for each other; they never wait for the
//! store.

use std::sync::{
    Mutex, MutexGuard, PoisonError, RwLock,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use turnpike_fleet::{
    Ask, Books, Denial, LeaseTerms, Ledger, Levels, QuotaBucket, QuotaGrant, QuotaLevel, Told,
};
use turnpike_relay::SharedQuota;
use turnpike_turn::server::QuotaRefusal;

const SHARDS: usize = 16;

pub(super) struct Buckets {
    pub(super) total: QuotaBucket,
    pub(super) realm: QuotaBucket,
    pub(super) user: QuotaBucket,
}

/// Usage of this node, and the levels of the whole fleet.
#[derive(Default)]
pub(super) struct FleetQuotas {
    shards: [Mutex<Ledger>; SHARDS],
    levels: RwLock<Levels>,
    /// Shard with which the next exchange begins, different each time so that all shards get their turn.
    turn: AtomicUsize,
    /// Refusals due to the limit of a user, of a realm, and of the fleet.
    refused: [AtomicU64; 3],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuotaCounts {
    pub(crate) buckets: u64,
    /// Number of allocations that this node may accept without asking the store, including current ones.
    pub(crate) held: u64,
    pub(crate) waiting: u64,
    pub(crate) refused: [u64; 3],
}

impl FleetQuotas {
    /// Counts an allocation in all of its buckets, or in none if a limit is reached. `total` is the fleet's
    /// limit.
    pub(super) fn acquire(
        &self,
        buckets: &Buckets,
        asked: &SharedQuota<'_>,
        total: u32,
        terms: LeaseTerms,
    ) -> Result<(), QuotaRefusal> {
        let limit = |limit: usize| u32::try_from(limit).unwrap_or(u32::MAX);
        // Counts allocations even if there is no limit, because a reload may set one.
        let of_realm = asked.of_realm.map_or(u32::MAX, limit);
        let all = [
            (buckets.user, limit(asked.of_user), QuotaRefusal::User),
            (buckets.realm, of_realm, QuotaRefusal::Everywhere),
            (buckets.total, total, QuotaRefusal::Everywhere),
        ];
        for (at, (bucket, limit, refusal)) in all.into_iter().enumerate() {
            let level = self.levels.read().unwrap_or_else(PoisonError::into_inner).get(&bucket);
            if let Err(denial) = self.shard(&bucket).acquire(bucket, limit, level, terms) {
                all[..at].iter().for_each(|(taken, ..)| self.shard(taken).release(*taken));
                return Err(match denial {
                    Denial::Undecided => QuotaRefusal::Undecided { is_user: refusal == QuotaRefusal::User },
                    Denial::Full => {
                        self.refused[at].fetch_add(1, Ordering::Relaxed);
                        refusal
                    }
                });
            }
        }
        Ok(())
    }

    pub(super) fn release(&self, buckets: &Buckets) {
        for bucket in [buckets.user, buckets.realm, buckets.total] {
            self.shard(&bucket).release(bucket);
        }
    }

    pub(super) fn asks(&self, most: usize, terms: LeaseTerms) -> Vec<Ask> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let levels = self.levels.read().unwrap_or_else(PoisonError::into_inner);
        let mut asks = Vec::new();
        for at in 0..SHARDS {
            let left = most - asks.len();
            // Each shard gets its part of the remaining room, plus what earlier shards left over.
            let part = left.div_ceil(SHARDS - at);
            asks.extend(lock(&self.shards[(first + at) % SHARDS]).asks(part, &levels, terms));
        }
        asks
    }

    pub(super) fn granted(&self, grants: &[QuotaGrant], terms: LeaseTerms) {
        let levels = self.levels.read().unwrap_or_else(PoisonError::into_inner);
        for grant in grants {
            self.shard(&grant.bucket).granted(*grant, &levels, terms);
        }
    }

    pub(super) fn unheard(&self, asks: &[Ask]) {
        for ask in asks {
            self.shard(&ask.bucket).unheard(std::slice::from_ref(ask));
        }
    }

    pub(super) fn put_levels(&self, changed: &[(QuotaBucket, QuotaLevel)], books: Books) {
        if changed.is_empty() {
            return;
        }
        let mut levels = self.levels.write().unwrap_or_else(PoisonError::into_inner);
        for (bucket, level) in changed {
            match books {
                Books::Whole => levels.put(*bucket, *level),
                Books::Recovering | Books::Unknown => levels.raise(*bucket, *level),
            }
        }
        drop(levels);
        for (bucket, level) in changed {
            self.shard(bucket).level_changed(*bucket, *level);
        }
    }

    /// Replaces all levels if the store knows the quotas of all nodes.
    pub(super) fn set_levels(&self, all: &[(QuotaBucket, QuotaLevel)], books: Books) {
        if books == Books::Whole {
            self.levels.write().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.put_levels(all, books);
    }

    /// Marks all usage to be reported to the store again.
    pub(super) fn tell_all(&self, terms: LeaseTerms) {
        self.shards.iter().for_each(|shard| lock(shard).tell_all(terms));
    }

    pub(super) fn lost(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).lost()).sum()
    }

    /// Resumes normal grants after a recovery.
    pub(super) fn settle(&self) {
        self.shards.iter().for_each(|shard| lock(shard).settle());
    }

    pub(super) fn told(&self) -> Vec<Told> {
        self.shards.iter().flat_map(|shard| lock(shard).told().collect::<Vec<_>>()).collect()
    }

    pub(super) fn take_over(&self, all: &[Told]) {
        all.iter().for_each(|told| self.shard(&told.bucket).take_over(*told));
    }

    pub(super) fn used(&self, bucket: &QuotaBucket) -> u32 {
        self.shard(bucket).used(bucket)
    }

    pub(super) fn counts(&self) -> QuotaCounts {
        let mut counts = QuotaCounts {
            refused: std::array::from_fn(|at| self.refused[at].load(Ordering::Relaxed)),
            ..QuotaCounts::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            let (buckets, _, held) = shard.totals();
            counts.buckets += buckets;
            counts.held += held;
            counts.waiting += shard.waiting() as u64;
        }
        counts
    }

    fn shard(&self, bucket: &QuotaBucket) -> MutexGuard<'_, Ledger> {
        lock(&self.shards[usize::from(bucket.0[0]) % SHARDS])
    }
}

fn lock(shard: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::UserRef;

    use super::*;

    const TERMS: LeaseTerms = LeaseTerms { nodes: 1, enforced: true, books: Books::Whole };

    fn buckets(user: u8) -> Buckets {
        Buckets { total: QuotaBucket([0; 16]), realm: QuotaBucket([1; 16]), user: QuotaBucket([user; 16]) }
    }

    fn asked(of_realm: Option<usize>, of_user: usize) -> SharedQuota<'static> {
        SharedQuota { user: UserRef::new("here", "alice"), of_realm, of_user }
    }

    fn exchange(quotas: &FleetQuotas) {
        let asks = quotas.asks(1000, TERMS);
        let grants: Vec<QuotaGrant> = asks
            .iter()
            .map(|ask| {
                let (held, sum, level) =
                    turnpike_fleet::grant(ask.limit, 1, ask.used, ask.used, ask.used, ask.want);
                quotas.put_levels(&[(ask.bucket, level)], Books::Whole);
                QuotaGrant { bucket: ask.bucket, told: ask.used, held, sum }
            })
            .collect();
        quotas.granted(&grants, TERMS);
    }

    #[test]
    fn a_refusal_by_one_limit_leaves_nothing_counted_in_the_others() {
        for (of_realm, of_user, total, refusal, place) in [
            (None, 3, u32::MAX, QuotaRefusal::User, 0),
            (Some(3), 100, u32::MAX, QuotaRefusal::Everywhere, 1),
            (Some(100), 100, 3, QuotaRefusal::Everywhere, 2),
        ] {
            let quotas = FleetQuotas::default();
            let mut taken = 0;
            let refused = loop {
                match quotas.acquire(&buckets(7), &asked(of_realm, of_user), total, TERMS) {
                    Ok(()) => taken += 1,
                    Err(refused) => break refused,
                }
                exchange(&quotas);
            };
            assert_eq!((taken, refused), (3, refusal));
            let counts = quotas.counts();
            assert_eq!((counts.buckets, counts.refused[place]), (3, 1));
            (0..taken).for_each(|_| quotas.release(&buckets(7)));
            exchange(&quotas);
            exchange(&quotas);
            assert_eq!(quotas.counts().buckets, 0, "all buckets are released");
        }
    }

    #[test]
    fn every_shard_takes_part_in_exchanges() {
        let quotas = FleetQuotas::default();
        for user in 0..=255 {
            let buckets = Buckets {
                total: QuotaBucket([user; 16]),
                realm: QuotaBucket([user; 16]),
                user: QuotaBucket([user; 16]),
            };
            quotas.acquire(&buckets, &asked(Some(30), 30), 30, TERMS).expect("there is room");
        }
        let mut told = 0;
        for _ in 0..8 {
            let asks = quotas.asks(64, TERMS);
            assert!(asks.len() <= 64);
            told += asks.len();
        }
        assert_eq!((told, quotas.counts().waiting), (256, 0));
        quotas.unheard(&[Ask { bucket: QuotaBucket([9; 16]), limit: 30, used: 3, want: 3 }]);
        assert_eq!(quotas.counts().waiting, 1);
        quotas.tell_all(TERMS);
        assert_eq!((quotas.counts().waiting, quotas.lost()), (256, 256));
    }

    #[test]
    fn a_recovering_store_does_not_lower_levels() {
        let quotas = FleetQuotas::default();
        let bucket = QuotaBucket([1; 16]);
        let level = || quotas.levels.read().expect("the lock is not poisoned").get(&bucket);
        quotas.put_levels(&[(bucket, QuotaLevel::Heavy)], Books::Whole);
        quotas.set_levels(&[], Books::Recovering);
        assert_eq!(level(), QuotaLevel::Heavy);
        quotas.put_levels(&[(bucket, QuotaLevel::Calm)], Books::Recovering);
        assert_eq!(level(), QuotaLevel::Heavy);
        quotas.put_levels(&[(bucket, QuotaLevel::Full)], Books::Recovering);
        assert_eq!(level(), QuotaLevel::Full);
        quotas.set_levels(&[(bucket, QuotaLevel::Heavy)], Books::Whole);
        assert_eq!(level(), QuotaLevel::Heavy);
        quotas.set_levels(&[], Books::Whole);
        assert_eq!(level(), QuotaLevel::Calm);
    }
}
