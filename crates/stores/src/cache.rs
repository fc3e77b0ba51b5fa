//! Bounded LRU cache of users and of absent names. Concurrent lookups of a user share one query.

use std::{
    collections::HashMap,
    hash::BuildHasher as _,
    sync::{Arc, PoisonError},
    time::Duration,
};

use foldhash::quality::RandomState;
use hashlink::LruCache;
use tokio::time::Instant;

use crate::{
    SHARDS, UserKeys,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// Absent names are cached separately, with a quarter of the users' capacity, so that made-up names do not
/// evict users.
const ABSENT_SHARE: usize = 4;

pub(crate) enum Cached {
    /// A user whose lifetime in the cache has not expired.
    Fresh(Arc<UserKeys>),
    /// A user whose lifetime in the cache has expired; accepted only while the store is unavailable.
    Stale(Arc<UserKeys>),
    /// A name that was absent recently.
    Absent,
    Unknown,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetimes {
    pub(crate) user: Duration,
    pub(crate) absent: Duration,
    /// Lifetime of users while the store is unavailable, counted from the lookup.
    pub(crate) stale: Duration,
}

pub(crate) struct Cache<W> {
    shards: [Mutex<CacheShard<W>>; SHARDS],
    lifetimes: Lifetimes,
    hasher: RandomState,
    /// Incremented when entries are forgotten. The result of a lookup that began in an earlier epoch is
    /// not stored.
    epoch: AtomicU64,
}

struct CacheShard<W> {
    users: LruCache<Box<str>, UserEntry, RandomState>,
    absent: LruCache<Box<str>, Instant, RandomState>,
    /// Waiters for each user being looked up.
    queries: HashMap<Box<str>, Vec<W>>,
}

struct UserEntry {
    keys: Arc<UserKeys>,
    looked_up: Instant,
    fresh_until: Instant,
}

/// Cache key in the form `realm NUL name`, which is unambiguous, because realms have no control characters.
pub(crate) fn key(realm: &str, name: &str) -> Box<str> {
    [realm, "\0", name].concat().into_boxed_str()
}

impl<W> Cache<W> {
    pub(crate) fn new(users: usize, lifetimes: Lifetimes) -> Self {
        let room = users.div_ceil(SHARDS).max(1);
        // hashlink allocates on insertion, unlike std's table.
        let shard = || CacheShard {
            users: LruCache::with_hasher(room, RandomState::default()),
            absent: LruCache::with_hasher((room / ABSENT_SHARE).max(1), RandomState::default()),
            queries: HashMap::new(),
        };
        Self {
            shards: std::array::from_fn(|_| Mutex::new(shard())),
            lifetimes,
            hasher: RandomState::default(),
            epoch: AtomicU64::new(0),
        }
    }

    pub(crate) fn get(&self, key: &str) -> Cached {
        let now = Instant::now();
        let shard = &mut *self.shard(key);
        if let Some(user) = shard.users.get(key) {
            if now < user.fresh_until {
                return Cached::Fresh(Arc::clone(&user.keys));
            }
            if now < user.looked_up + self.lifetimes.stale {
                return Cached::Stale(Arc::clone(&user.keys));
            }
            shard.users.remove(key);
        }
        match shard.absent.get(key) {
            Some(looked_up) if now < *looked_up + self.lifetimes.absent => Cached::Absent,
            Some(_) => {
                shard.absent.remove(key);
                Cached::Unknown
            }
            None => Cached::Unknown,
        }
    }

    /// Stores the result of a lookup that began in `epoch`.
    pub(crate) fn put(&self, epoch: u64, key: &str, found: Option<Arc<UserKeys>>) {
        let now = Instant::now();
        let shard = &mut *self.shard(key);
        if epoch != self.epoch() {
            return;
        }
        match found {
            Some(keys) => {
                shard.absent.remove(key);
                let user = UserEntry { keys, looked_up: now, fresh_until: now + self.lifetimes.user };
                shard.users.insert(key.into(), user);
            }
            None => {
                shard.users.remove(key);
                shard.absent.insert(key.into(), now);
            }
        }
    }

    pub(crate) fn prolong(&self, key: &str, by: Duration) {
        if let Some(user) = self.shard(key).users.get_mut(key) {
            user.fresh_until = Instant::now() + by;
        }
    }

    /// Joins the lookup of this user. Returns true for the first caller, which must do the lookup and then
    /// call [`Cache::leave`].
    pub(crate) fn join(&self, key: &str, who: W) -> bool {
        let shard = &mut *self.shard(key);
        if let Some(waiting) = shard.queries.get_mut(key) {
            waiting.push(who);
            return false;
        }
        shard.queries.insert(key.into(), vec![who]);
        true
    }

    pub(crate) fn waiting(&self, key: &str) -> Vec<W> {
        self.shard(key).queries.get_mut(key).map(std::mem::take).unwrap_or_default()
    }

    /// Takes all waiters and ends the lookup.
    pub(crate) fn leave(&self, key: &str) -> Vec<W> {
        self.shard(key).queries.remove(key).unwrap_or_default()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Forgets one name. The results of all lookups in progress are discarded, even for other names.
    pub(crate) fn forget(&self, key: &str) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let shard = &mut *self.shard(key);
        shard.users.remove(key);
        shard.absent.remove(key);
    }

    pub(crate) fn clear(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        for shard in &self.shards {
            let shard = &mut *shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.users.clear();
            shard.absent.clear();
        }
    }

    pub(crate) fn users(&self) -> usize {
        let held =
            |shard: &Mutex<CacheShard<W>>| shard.lock().unwrap_or_else(PoisonError::into_inner).users.len();
        self.shards.iter().map(held).sum()
    }

    fn shard(&self, key: &str) -> MutexGuard<'_, CacheShard<W>> {
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let index = self.hasher.hash_one(key) as usize % SHARDS;
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const LIFETIMES: Lifetimes = Lifetimes {
        user: Duration::from_secs(60),
        absent: Duration::from_secs(10),
        stale: Duration::from_secs(3600),
    };

    fn cache(users: usize) -> Cache<()> {
        Cache::new(users, LIFETIMES)
    }

    fn keys() -> Option<Arc<UserKeys>> {
        UserKeys::from_hex(&"ab".repeat(16)).map(Arc::new)
    }

    fn told(cache: &Cache<()>, key: &str) -> &'static str {
        match cache.get(key) {
            Cached::Fresh(_) => "fresh",
            Cached::Stale(_) => "stale",
            Cached::Absent => "absent",
            Cached::Unknown => "unknown",
        }
    }

    #[tokio::test(start_paused = true)]
    async fn cached_user_is_fresh_then_stale_then_forgotten() {
        let cache = cache(100);
        cache.put(0, "a", keys());
        cache.put(0, "n", None);
        assert_eq!([told(&cache, "a"), told(&cache, "n"), told(&cache, "x")], ["fresh", "absent", "unknown"]);
        advance(Duration::from_secs(10)).await;
        assert_eq!([told(&cache, "a"), told(&cache, "n")], ["fresh", "unknown"]);
        advance(Duration::from_secs(50)).await;
        assert_eq!(told(&cache, "a"), "stale");
        cache.prolong("a", Duration::from_secs(5));
        assert_eq!(told(&cache, "a"), "fresh");
        advance(Duration::from_secs(5)).await;
        assert_eq!(told(&cache, "a"), "stale", "the age is counted from the lookup");
        advance(Duration::from_secs(3600)).await;
        assert_eq!((told(&cache, "a"), cache.users()), ("unknown", 0));
    }

    #[test]
    fn absent_names_evict_no_users_and_both_are_bounded() {
        let cache = cache(1600);
        for number in 0..100 {
            cache.put(0, &format!("user{number}"), keys());
        }
        for number in 0..100_000 {
            cache.put(0, &format!("absent{number}"), None);
        }
        assert_eq!(cache.users(), 100);
        let held: usize = cache.shards.iter().map(|shard| shard.lock().unwrap().absent.len()).sum();
        assert_eq!(held, 400);
        for number in 0..100_000 {
            cache.put(0, &format!("user{number}"), keys());
        }
        assert_eq!(cache.users(), 1600);
        assert_eq!(told(&cache, "user99999"), "fresh");
    }

    #[test]
    fn name_is_either_present_or_absent() {
        let cache = cache(10);
        cache.put(0, "a", None);
        cache.put(0, "a", keys());
        assert_eq!(told(&cache, "a"), "fresh");
        cache.put(0, "a", None);
        assert_eq!((told(&cache, "a"), cache.users()), ("absent", 0));
    }

    #[test]
    fn lookup_from_before_a_clear_is_not_stored() {
        let cache = cache(10);
        let before = cache.epoch();
        cache.put(before, "a", keys());
        cache.clear();
        assert_eq!(told(&cache, "a"), "unknown");
        cache.put(before, "a", keys());
        assert_eq!(told(&cache, "a"), "unknown");
        cache.put(cache.epoch(), "a", keys());
        assert_eq!(told(&cache, "a"), "fresh");
    }

    #[test]
    fn forgotten_user_is_not_restored_by_an_older_answer() {
        let cache = cache(10);
        let before = cache.epoch();
        for (name, found) in [("a", keys()), ("b", keys()), ("n", None)] {
            cache.put(before, name, found);
        }
        cache.forget("a");
        cache.forget("n");
        cache.put(before, "a", keys());
        assert_eq!(["a", "b", "n"].map(|name| told(&cache, name)), ["unknown", "fresh", "unknown"]);
        cache.put(cache.epoch(), "a", keys());
        assert_eq!(told(&cache, "a"), "fresh");
    }

    #[test]
    fn concurrent_lookups_of_one_user_share_a_query() {
        let cache: Cache<u8> = Cache::new(10, LIFETIMES);
        assert_eq!([cache.join("a", 1), cache.join("a", 2), cache.join("b", 3)], [true, false, true]);
        assert_eq!(cache.waiting("a"), [1, 2]);
        assert!(!cache.join("a", 4), "the lookup is in progress");
        assert_eq!((cache.leave("a"), cache.leave("a"), cache.leave("b")), (vec![4], vec![], vec![3]));
        assert!(cache.join("a", 5));
    }
}
