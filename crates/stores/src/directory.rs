//! A store from the server's point of view. Cached answers are immediate; other answers take one query per
//! user, within the deadline. Only uncached users notice a slow or unavailable database.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep, sleep_until, timeout},
};
use turnpike_measure::units::span;
use turnpike_wire::secret::Secret;

use crate::{
    ApiKey, ApiKeys, Backend, Edit, Existing, Rules, Secrets, StoreError, StoreFault, StoredSecret, UserKeys,
    UserRow,
    breaker::{self, Breaker},
    cache::{self, Cache, Cached, Lifetimes},
    secrets::{self, signing, unix},
};

/// Maximum time to wait for the store if an older entry for the user is cached. It is shorter than the 500
/// ms after which clients retransmit.
const KNOWN_PATIENCE: Duration = Duration::from_millis(300);
/// Time for which an older cache entry for a user is accepted without another query, after the store was too
/// slow.
const BENEFIT_OF_DOUBT: Duration = Duration::from_secs(5);
/// Minimum interval between queries for a realm's secrets after a key did not match.
const SECRETS_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of requests that wait for a query for secrets. Additional ones use the known secrets.
const MOST_WAIT_FOR_SECRETS: usize = 1000;
/// Interval between version queries, if the backend has versions.
const VERSION_PAUSE: Duration = Duration::from_secs(1);
/// Deadline for reading all rules: in a large store, this takes longer than reading one user.
const RULES_DEADLINE: Duration = Duration::from_secs(30);
/// Deadline for a page of users or a change, for which a person waits.
const LIST_DEADLINE: Duration = Duration::from_secs(20);
/// Reading the rules may take at most this fraction (one in 20) of the time.
const RULES_SHARE: u32 = 20;
const REMOVAL_PAUSE: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryLimits {
    pub users: usize,
    pub lifetime: Duration,
    pub negative: Duration,
    /// Time for which a cached user stays valid while the store is unavailable.
    pub stale: Duration,
    pub deadline: Duration,
    pub refresh: Duration,
}

impl Default for DirectoryLimits {
    fn default() -> Self {
        Self {
            users: 100_000,
            lifetime: Duration::from_secs(60),
            negative: Duration::from_secs(10),
            stale: Duration::from_secs(86_400),
            deadline: Duration::from_secs(2),
            refresh: Duration::from_secs(10),
        }
    }
}

/// Result of looking up a user in the cache.
#[derive(Clone, Debug)]
pub enum CachedUser {
    User(Arc<UserKeys>),
    Absent,
    Unknown,
}

/// Result of looking up a user in the store.
#[derive(Clone, Debug)]
pub enum UserLookup {
    User(Arc<UserKeys>),
    Absent,
    Unavailable,
}

/// Called once, on a runtime thread or the caller's thread.
type OnLookup = Box<dyn FnOnce(UserLookup) + Send>;

/// A store behind a cache. Clones share their state.
pub struct Directory<B>(Arc<DirectoryState<B>>);

struct DirectoryState<B> {
    backend: B,
    name: String,
    limits: DirectoryLimits,
    runtime: Handle,
    cache: Cache<OnLookup>,
    breaker: Mutex<Breaker>,
    rules: RwLock<Option<Arc<Rules>>>,
    /// Secrets by realm, never older than those in `rules`.
    secrets: RwLock<HashMap<Box<str>, Secrets>>,
    /// Expired secrets that the store no longer has; allocations created with their credentials continue.
    ended_secrets: RwLock<HashMap<Box<str>, Secrets>>,
    api_keys: RwLock<Arc<ApiKeys>>,
    removes_after: Mutex<Option<Instant>>,
    /// Start of the last answered query that a key mismatch caused, by realm.
    secrets_asked: Mutex<HashMap<Box<str>, Instant>>,
    wait_for_secrets: AtomicUsize,
    /// Locked during a query for a realm's secrets.
    asks_for_secrets: tokio::sync::Mutex<()>,
    generation: AtomicU64,
    /// Sequence number of the last query for all rules or for a realm's secrets.
    asked: AtomicU64,
    /// Locked while an answer replaces an earlier one.
    read_at: Mutex<ReadAt>,
    version: AtomicU64,
    trouble: Mutex<Option<String>>,
    counts: DirectoryCounters,
}

#[derive(Default)]
struct ReadAt {
    rules: u64,
    /// Sequence number of the last separate query for secrets, by realm.
    secrets: HashMap<Box<str>, u64>,
}

impl<B> Clone for Directory<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Backend> Directory<B> {
    /// Does not send a query yet. Must be called on the runtime that will run the queries.
    #[must_use]
    pub fn new(backend: B, name: String, limits: DirectoryLimits) -> Self {
        let lifetimes = Lifetimes { user: limits.lifetime, absent: limits.negative, stale: limits.stale };
        let inner = Arc::new(DirectoryState {
            backend,
            name,
            limits,
            runtime: Handle::current(),
            cache: Cache::new(limits.users, lifetimes),
            breaker: Mutex::default(),
            rules: RwLock::default(),
            secrets: RwLock::default(),
            ended_secrets: RwLock::default(),
            api_keys: RwLock::default(),
            removes_after: Mutex::default(),
            secrets_asked: Mutex::default(),
            wait_for_secrets: AtomicUsize::new(0),
            asks_for_secrets: tokio::sync::Mutex::default(),
            generation: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            read_at: Mutex::default(),
            version: AtomicU64::new(u64::MAX),
            trouble: Mutex::default(),
            counts: DirectoryCounters::default(),
        });
        inner.runtime.spawn(keep_current(Arc::downgrade(&inner)));
        Self(inner)
    }

    /// Reads rules and secrets immediately. After an error that [may pass](StoreError::may_pass), the caller
    /// can [wait for the store](Self::wait_for_it).
    pub async fn read(&self) -> Result<(), StoreError> {
        let version = self.0.backend.version().await;
        self.0.read_rules().await?;
        // Without this, the first refresh would see a changed version and clear the cache.
        if let Some(version) = version
            && self.0.version.swap(version, Ordering::Relaxed) != version
        {
            self.0.cache.clear();
        }
        Ok(())
    }

    /// Marks the store as unavailable until a probe succeeds.
    pub fn wait_for_it(&self, error: &StoreError) {
        self.0.give_up(error);
    }

    #[must_use]
    pub fn cached(&self, realm: &str, name: &str) -> CachedUser {
        let DirectoryState { cache, counts, .. } = &*self.0;
        let (user, counter) = match cache.get(&cache::key(realm, name)) {
            Cached::Fresh(keys) => (CachedUser::User(keys), &counts.cached),
            Cached::Stale(keys) if self.0.is_away() => (CachedUser::User(keys), &counts.stale),
            Cached::Absent => (CachedUser::Absent, &counts.absent),
            Cached::Stale(_) | Cached::Unknown => return CachedUser::Unknown,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        user
    }

    /// Looks up a user and calls `answer` within the deadline. Never blocks; can be called on any thread.
    pub fn look_up(&self, realm: &str, name: &str, answer: impl FnOnce(UserLookup) + Send + 'static) {
        let inner = &self.0;
        let key = cache::key(realm, name);
        if inner.is_away() {
            return answer(inner.without_store(&key));
        }
        if inner.cache.join(&key, Box::new(answer)) {
            let query = PendingQuery { inner: Arc::clone(inner), key, is_answered: false };
            let (realm, name) = (realm.to_owned(), name.to_owned());
            inner.runtime.spawn(async move { query.run(&realm, &name).await });
        } else {
            inner.counts.joined.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Secrets of a realm, possibly an empty list; `None` if the store has never answered.
    #[must_use]
    pub fn secrets(&self, realm: &str) -> Option<Secrets> {
        let found = read(&self.0.secrets).get(realm).cloned();
        found.or_else(|| self.rules().map(|_| Secrets::default()))
    }

    #[must_use]
    pub fn ended_secrets(&self, realm: &str) -> Secrets {
        read(&self.0.ended_secrets).get(realm).cloned().unwrap_or_default()
    }

    #[must_use]
    pub fn all_ended_secrets(&self) -> Vec<(Box<str>, Secrets)> {
        read(&self.0.ended_secrets).iter().map(|(realm, ended)| (realm.clone(), Arc::clone(ended))).collect()
    }

    pub fn remember_ended_secrets(&self, ended: impl IntoIterator<Item = (Box<str>, Secrets)>) {
        write(&self.0.ended_secrets).extend(ended);
    }

    /// Takes over the secrets that have expired since another directory of the same store was last read.
    pub fn take_ended_secrets(&self, before: &Self) {
        for (realm, held) in before.all_secrets().into_iter().chain(before.all_ended_secrets()) {
            self.0.remember_ended(&realm, &held, &self.secrets(&realm).unwrap_or_default());
        }
    }

    /// Secret that signs a realm's credentials; the same on all servers that have read the store.
    #[must_use]
    pub fn signing_secret(&self, realm: &str) -> Option<Secret> {
        let secrets = read(&self.0.secrets).get(realm).cloned()?;
        signing(&secrets).map(|secret| secret.value.clone())
    }

    #[must_use]
    pub fn api_key(&self, name: &str) -> Option<ApiKey> {
        read(&self.0.api_keys).get(name).cloned()
    }

    #[must_use]
    pub fn api_keys(&self) -> Arc<ApiKeys> {
        Arc::clone(&read(&self.0.api_keys))
    }

    /// Returns true if another server that uses the store may just have rotated the secrets.
    #[must_use]
    pub fn may_have_new_secrets(&self) -> bool {
        !self.0.is_away() && self.0.wait_for_secrets.load(Ordering::Relaxed) < MOST_WAIT_FOR_SECRETS
    }

    /// Queries the secrets of a realm again and calls `answer` within the deadline, with `None` if they are
    /// unknown. Limited to ten queries per second; additional callers wait. Never blocks; can be called on
    /// any thread.
    pub fn refresh_secrets(&self, realm: &str, answer: impl FnOnce(Option<Secrets>) + Send + 'static) {
        let (directory, realm) = (self.clone(), Box::<str>::from(realm));
        self.0.wait_for_secrets.fetch_add(1, Ordering::Relaxed);
        self.0.runtime.spawn(async move {
            let deadline = directory.0.limits.deadline;
            if !directory.0.is_away() && timeout(deadline, directory.0.read_secrets(&realm)).await.is_err() {
                directory.0.fail(&directory.0.slow(deadline));
            }
            directory.0.wait_for_secrets.fetch_sub(1, Ordering::Relaxed);
            answer(directory.secrets(&realm));
        });
    }

    pub fn forget(&self, realm: &str, name: &str) {
        self.0.cache.forget(&cache::key(realm, name));
    }

    /// Everything except users and secrets, as last read; `None` if it has never been read.
    #[must_use]
    pub fn rules(&self) -> Option<Arc<Rules>> {
        read(&self.0.rules).clone()
    }

    /// Changes whenever [`Directory::rules`] has changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation.load(Ordering::Acquire)
    }

    pub fn all_secrets(&self) -> Vec<(Box<str>, Secrets)> {
        read(&self.0.secrets).iter().map(|(realm, secrets)| (realm.clone(), Arc::clone(secrets))).collect()
    }

    pub async fn users(
        &self,
        realm: Option<&str>,
        after: Option<&UserRow>,
    ) -> Result<Vec<UserRow>, StoreError> {
        self.0.within(LIST_DEADLINE, self.0.backend.users(realm, after)).await
    }

    /// See [`Backend::edit`]; takes effect in this process immediately. If no answer arrives, the change may
    /// still have been made.
    pub async fn edit(&self, edit: &Edit) -> Result<bool, StoreError> {
        self.apply(edit, Existing::Replace).await
    }

    /// See [`Backend::apply`].
    pub async fn apply(&self, edit: &Edit, existing: Existing) -> Result<bool, StoreError> {
        let inner = &*self.0;
        let edited = inner.within(LIST_DEADLINE, inner.backend.apply(edit, existing)).await;
        let is_user = match edit {
            Edit::PutUser { realm, name, .. } | Edit::RemoveUser { realm, name } => {
                // Done even after an error, because the change may have been made.
                inner.cache.forget(&cache::key(realm, name));
                true
            }
            _ => false,
        };
        let existed = match edited {
            Ok(existed) => existed,
            Err(error) => {
                // Reads the rules here too, but without waiting for the result, because the store has just been slow.
                if !is_user {
                    let inner = Arc::clone(&self.0);
                    self.0.runtime.spawn(async move { inner.read_rules().await });
                }
                return Err(error);
            }
        };
        // SQLite must be read again after each change to a user. Only SQLite reports which realms have users
        // without a SHA-256 key, and our own writes do not change its version.
        if (!is_user || inner.version.load(Ordering::Relaxed) != u64::MAX)
            && let Err(error) = inner.read_rules().await
        {
            tracing::warn!("{error}; the change will take effect when the rules can be read again");
        }
        Ok(existed)
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    #[must_use]
    pub fn counts(&self) -> DirectoryCounts {
        let DirectoryState { counts, cache, .. } = &*self.0;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DirectoryCounts {
            is_up: !self.0.is_away(),
            users: cache.users() as u64,
            answers: [
                ("cache", get(&counts.cached)),
                ("negative", get(&counts.absent)),
                ("stale", get(&counts.stale)),
                ("joined", get(&counts.joined)),
                ("unavailable", get(&counts.unavailable)),
            ],
            queries: [
                ("found", get(&counts.found)),
                ("none", get(&counts.none)),
                ("failed", get(&counts.failed)),
                ("timeout", get(&counts.timed_out)),
            ],
            query_times: std::array::from_fn(|index| {
                (QUERY_TIMES.get(index).copied().unwrap_or(f64::INFINITY), get(&counts.times[index]))
            }),
            query_seconds: Duration::from_micros(get(&counts.microseconds)).as_secs_f64(),
        }
    }
}

impl<B: Backend> DirectoryState<B> {
    fn is_away(&self) -> bool {
        lock(&self.breaker).is_open()
    }

    fn without_store(&self, key: &str) -> UserLookup {
        let (found, counter) = match self.cache.get(key) {
            Cached::Fresh(keys) | Cached::Stale(keys) => (UserLookup::User(keys), &self.counts.stale),
            Cached::Absent => (UserLookup::Absent, &self.counts.absent),
            Cached::Unknown => (UserLookup::Unavailable, &self.counts.unavailable),
        };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    fn slow(&self, deadline: Duration) -> StoreError {
        StoreError::new(&self.name, StoreFault::Slow, format_args!("not within {} s", deadline.as_secs_f32()))
    }

    async fn ask(&self, realm: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        self.within(self.limits.deadline, self.backend.user(realm, name)).await
    }

    async fn within<T>(
        &self,
        deadline: Duration,
        question: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        timeout(deadline, question).await.unwrap_or_else(|_| Err(self.slow(deadline)))
    }

    fn succeed(&self) {
        lock(&self.breaker).succeed();
    }

    fn fail(self: &Arc<Self>, error: &StoreError) {
        let counter =
            if error.fault == StoreFault::Slow { &self.counts.timed_out } else { &self.counts.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        if lock(&self.breaker).fail() {
            self.probe(error);
        }
    }

    fn give_up(self: &Arc<Self>, error: &StoreError) {
        let mut breaker = lock(&self.breaker);
        while !breaker.is_open() {
            if breaker.fail() {
                drop(breaker);
                return self.probe(error);
            }
        }
    }

    fn probe(self: &Arc<Self>, error: &StoreError) {
        tracing::error!("{error}; cached users keep working; retrying");
        self.runtime.spawn(probe_until_it_answers(Arc::downgrade(self), error.fault));
    }

    async fn read_rules(&self) -> Result<(), StoreError> {
        let turn = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let mut rules = self.within(RULES_DEADLINE, self.backend.rules()).await?;
        // Skipped if the answer to a later query arrived first.
        let mut read_at = lock(&self.read_at);
        if read_at.rules > turn {
            return Ok(());
        }
        read_at.rules = turn;
        let mut secrets: HashMap<Box<str>, Secrets> =
            std::mem::take(&mut rules.secrets).into_iter().collect();
        let mut held = write(&self.secrets);
        read_at.secrets.retain(|_, at| *at > turn);
        for realm in read_at.secrets.keys() {
            secrets.insert(realm.clone(), held.get(realm).cloned().unwrap_or_default());
        }
        for (realm, held) in &*held {
            self.remember_ended(realm, held, secrets.get(realm).map_or(&[], |secrets| secrets));
        }
        *held = secrets;
        drop(held);
        *write(&self.api_keys) = Arc::new(std::mem::take(&mut rules.api_keys));
        let mut held = write(&self.rules);
        if held.as_deref() != Some(&rules) {
            *held = Some(Arc::new(rules));
            self.generation.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Runs one query at a time, which answers all callers that were waiting when it started.
    async fn read_secrets(self: &Arc<Self>, realm: &str) {
        let begun = Instant::now();
        let asked = || lock(&self.secrets_asked).get(realm).copied();
        loop {
            if let Some(last) = asked() {
                sleep_until(last + SECRETS_PAUSE).await;
            }
            let _turn = self.asks_for_secrets.lock().await;
            match asked() {
                Some(last) if last >= begun => return,
                Some(last) if last.elapsed() < SECRETS_PAUSE => {}
                _ => break self.ask_for_secrets(realm).await,
            }
        }
    }

    async fn ask_for_secrets(self: &Arc<Self>, realm: &str) {
        let begun = Instant::now();
        let turn = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        match self.backend.secrets(realm).await {
            Ok(secrets) => {
                self.succeed();
                let mut read_at = lock(&self.read_at);
                let is_latest =
                    turn > read_at.rules && read_at.secrets.get(realm).is_none_or(|at| turn > *at);
                if is_latest {
                    read_at.secrets.insert(realm.into(), turn);
                    let secrets: Secrets = secrets.into();
                    let held = write(&self.secrets).insert(realm.into(), Arc::clone(&secrets));
                    self.remember_ended(realm, &held.unwrap_or_default(), &secrets);
                }
                drop(read_at);
                lock(&self.secrets_asked).insert(realm.into(), begun);
            }
            Err(error) => self.fail(&error),
        }
    }

    /// Remembers secrets that have expired and left the store; called after a realm's secrets have been read
    /// again.
    fn remember_ended(&self, realm: &str, held: &[StoredSecret], read: &[StoredSecret]) {
        let mut all = write(&self.ended_secrets);
        let known = all.get(realm).map_or(&[][..], |ended| ended);
        let ended = secrets::ended(&[held, known].concat(), read, unix());
        if ended.is_empty() {
            all.remove(realm);
        } else {
            all.insert(realm.into(), ended.into());
        }
    }

    async fn remove_ended(&self) {
        let may = lock(&self.removes_after).is_none_or(|after| Instant::now() >= after);
        // Reads the store first, because a secret may have been added again after it expired.
        if !may || self.ended().is_empty() || self.read_rules().await.is_err() {
            return;
        }
        for (realm, secret) in self.ended() {
            let expired = format!("an expired secret of realm {realm:?}");
            let removal = Edit::RemoveSecret { realm, secret };
            match self.within(LIST_DEADLINE, self.backend.edit(&removal)).await {
                Ok(true) => tracing::info!("{expired} was removed from {}", self.name),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!("{expired} cannot be removed: {error}; this server no longer accepts it");
                    *lock(&self.removes_after) = Some(Instant::now() + REMOVAL_PAUSE);
                    return;
                }
            }
        }
        if let Err(error) = self.read_rules().await {
            tracing::warn!("{error}; the previous rules stay in effect");
        }
    }

    fn ended(&self) -> Vec<(String, Secret)> {
        let (secrets, unix) = (read(&self.secrets), unix());
        let ended = secrets.iter().flat_map(|(realm, secrets)| {
            let ended = secrets.iter().filter(|secret| !secret.counts(unix));
            ended.map(|secret| (realm.to_string(), secret.value.clone()))
        });
        ended.collect()
    }

    async fn refresh(&self) {
        let version = self.backend.version().await;
        if let Some(version) = version
            && self.version.swap(version, Ordering::Relaxed) == version
        {
            return;
        }
        let result = self.read_rules().await;
        if version.is_some() {
            self.cache.clear();
        }
        let mut logged = lock(&self.trouble);
        match (result, &*logged) {
            (Ok(()), None) => {}
            (Ok(()), Some(_)) => {
                *logged = None;
                tracing::info!("the rules of {} can be read again", self.name);
            }
            (Err(error), logged_before) => {
                let text = error.to_string();
                if logged_before.as_ref() != Some(&text) {
                    tracing::error!("{text}; the previous rules stay in effect");
                    *logged = Some(text);
                }
                // The change was not applied, so the version is reset to try again.
                self.version.store(u64::MAX, Ordering::Relaxed);
            }
        }
    }
}

struct PendingQuery<B: Backend> {
    inner: Arc<DirectoryState<B>>,
    key: Box<str>,
    is_answered: bool,
}

impl<B: Backend> PendingQuery<B> {
    async fn run(mut self, realm: &str, name: &str) {
        let (inner, key) = (&self.inner, &self.key);
        let (epoch, begun) = (inner.cache.epoch(), Instant::now());
        let query = inner.ask(realm, name);
        tokio::pin!(query);
        let known = match inner.cache.get(key) {
            Cached::Fresh(keys) | Cached::Stale(keys) => Some(keys),
            Cached::Absent | Cached::Unknown => None,
        };
        let result = match known {
            None => query.await,
            Some(keys) => match timeout(KNOWN_PATIENCE, &mut query).await {
                Ok(result) => result,
                Err(_) => {
                    inner.cache.prolong(key, BENEFIT_OF_DOUBT);
                    for answer in inner.cache.waiting(key) {
                        inner.counts.stale.fetch_add(1, Ordering::Relaxed);
                        answer(UserLookup::User(Arc::clone(&keys)));
                    }
                    query.await
                }
            },
        };
        inner.counts.took(begun.elapsed());
        let found = match result {
            Ok(user) => {
                inner.succeed();
                let counter = if user.is_some() { &inner.counts.found } else { &inner.counts.none };
                counter.fetch_add(1, Ordering::Relaxed);
                let user = user.map(Arc::new);
                inner.cache.put(epoch, key, user.clone());
                user.map_or(UserLookup::Absent, UserLookup::User)
            }
            Err(error) => {
                inner.fail(&error);
                inner.without_store(key)
            }
        };
        let waiting = inner.cache.leave(key);
        self.is_answered = true;
        for answer in waiting {
            answer(found.clone());
        }
    }
}

/// Waiters that are dropped send their own answers; see
/// [`turnpike_turn::server::LookupResult::Unavailable`].
impl<B: Backend> Drop for PendingQuery<B> {
    fn drop(&mut self) {
        if !self.is_answered {
            drop(self.inner.cache.leave(&self.key));
        }
    }
}

async fn keep_current<B: Backend>(weak: Weak<DirectoryState<B>>) {
    let Some(first) = weak.upgrade().map(|inner| inner.limits.refresh) else { return };
    let mut pause = first.min(VERSION_PAUSE);
    loop {
        sleep(pause).await;
        let Some(inner) = weak.upgrade() else { return };
        if inner.is_away() {
            continue;
        }
        let begun = Instant::now();
        inner.refresh().await;
        inner.remove_ended().await;
        let tells = inner.version.load(Ordering::Relaxed) != u64::MAX;
        let wanted = if tells { VERSION_PAUSE.min(inner.limits.refresh) } else { inner.limits.refresh };
        pause = wanted.max(begun.elapsed() * RULES_SHARE);
    }
}

/// Logs each new kind of fault; `fault` has already been logged.
async fn probe_until_it_answers<B: Backend>(weak: Weak<DirectoryState<B>>, mut fault: StoreFault) {
    let since = Instant::now();
    for pause in breaker::pauses() {
        sleep(pause).await;
        let Some(inner) = weak.upgrade() else { return };
        // No user has an empty name, but looking it up takes the same path as looking up a user.
        match inner.ask("", "").await {
            Ok(_) => {
                lock(&inner.breaker).close();
                tracing::info!("{} answers again, after {}", inner.name, span(since.elapsed().as_secs()));
                inner.refresh().await;
                return;
            }
            Err(error) if error.fault != fault => {
                tracing::error!("{error}");
                fault = error.fault;
            }
            Err(_) => {}
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct DirectoryCounts {
    pub is_up: bool,
    pub users: u64,
    pub answers: [(&'static str, u64); 5],
    pub queries: [(&'static str, u64); 4],
    /// Histogram of query times: upper bound of each bucket in seconds, and its count.
    pub query_times: [(f64, u64); QUERY_TIMES.len() + 1],
    pub query_seconds: f64,
}

/// Upper bounds of the histogram in seconds.
const QUERY_TIMES: [f64; 11] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];

#[derive(Debug, Default)]
struct DirectoryCounters {
    cached: AtomicU64,
    absent: AtomicU64,
    stale: AtomicU64,
    joined: AtomicU64,
    unavailable: AtomicU64,
    found: AtomicU64,
    none: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
    times: [AtomicU64; QUERY_TIMES.len() + 1],
    microseconds: AtomicU64,
}

impl DirectoryCounters {
    fn took(&self, time: Duration) {
        let bucket = QUERY_TIMES.iter().position(|bound| time.as_secs_f64() <= *bound);
        self.times[bucket.unwrap_or(QUERY_TIMES.len())].fetch_add(1, Ordering::Relaxed);
        let microseconds = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
