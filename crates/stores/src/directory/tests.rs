use std::{collections::BTreeSet, sync::atomic::AtomicUsize};

use tokio::{
    sync::{Notify, oneshot},
    time::advance,
};
use turnpike_wire::secret::Secret;

use super::*;
use crate::{Edit, StoredSecret, UserRow};

const REALM: &str = "here";

#[derive(Default)]
struct Fake {
    users: Mutex<HashMap<String, UserKeys>>,
    secrets: Mutex<Vec<StoredSecret>>,
    api_keys: Mutex<ApiKeys>,
    removals: AtomicUsize,
    state: Mutex<State>,
    asked: AtomicUsize,
    secrets_asked: AtomicUsize,
    rules_asked: AtomicUsize,
    version: AtomicU64,
    released: Notify,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum State {
    #[default]
    Good,
    Hangs,
    /// The store answers only when the test releases it.
    Waits,
    Refuses,
    Tells,
    TakesNothing,
    AnswersLate,
    /// The store makes changes, but does not answer.
    LosesAnswers,
}

impl Fake {
    async fn answer<T>(&self, value: impl FnOnce() -> T) -> Result<T, StoreError> {
        let state = *lock(&self.state);
        match state {
            State::Good | State::Tells | State::TakesNothing | State::LosesAnswers => Ok(value()),
            State::AnswersLate => {
                let value = value();
                self.released.notified().await;
                Ok(value)
            }
            State::Hangs => std::future::pending().await,
            State::Waits => {
                self.released.notified().await;
                Ok(value())
            }
            State::Refuses => Err(StoreError::new("fake", StoreFault::Unreachable, "connection refused")),
        }
    }
}

impl Backend for Arc<Fake> {
    async fn user(&self, _: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.answer(|| lock(&self.users).get(name).cloned()).await
    }

    async fn secrets(&self, _: &str) -> Result<Vec<StoredSecret>, StoreError> {
        self.secrets_asked.fetch_add(1, Ordering::Relaxed);
        self.answer(|| lock(&self.secrets).clone()).await
    }

    async fn rules(&self) -> Result<Rules, StoreError> {
        self.rules_asked.fetch_add(1, Ordering::Relaxed);
        self.answer(|| {
            let (secrets, api_keys) = (lock(&self.secrets).clone(), lock(&self.api_keys).clone());
            Rules { secrets: [(REALM.into(), secrets.into())].into(), api_keys, ..Rules::default() }
        })
        .await
    }

    async fn version(&self) -> Option<u64> {
        (*lock(&self.state) == State::Tells).then(|| self.version.load(Ordering::Relaxed))
    }

    async fn users(&self, _: Option<&str>, _: Option<&UserRow>) -> Result<Vec<UserRow>, StoreError> {
        unreachable!("unexpected list query")
    }

    async fn apply(&self, edit: &Edit, _: Existing) -> Result<bool, StoreError> {
        if *lock(&self.state) == State::TakesNothing {
            self.removals.fetch_add(1, Ordering::Relaxed);
            return Err(StoreError::new("fake", StoreFault::Permission, "read only"));
        }
        let answer = self.answer(|| match edit {
            Edit::PutUser { name, keys, .. } => {
                lock(&self.users).insert(name.clone(), keys.clone()).is_some()
            }
            Edit::RemoveUser { name, .. } => lock(&self.users).remove(name).is_some(),
            Edit::AddSecret { secret, .. } => {
                lock(&self.secrets).push(StoredSecret::new(secret.clone()));
                false
            }
            Edit::RemoveSecret { secret, .. } => {
                self.removals.fetch_add(1, Ordering::Relaxed);
                let mut secrets = lock(&self.secrets);
                let before = secrets.len();
                secrets.retain(|held| held.value != *secret);
                secrets.len() < before
            }
            _ => unreachable!("unexpected call"),
        });
        let answer = answer.await;
        if *lock(&self.state) == State::LosesAnswers {
            std::future::pending::<()>().await;
        }
        answer
    }
}

fn secret(text: &str) -> StoredSecret {
    StoredSecret::new(Secret::new(text))
}

struct World {
    fake: Arc<Fake>,
    directory: Directory<Arc<Fake>>,
}

impl World {
    fn new() -> Self {
        Self::with(DirectoryLimits::default())
    }

    fn with(limits: DirectoryLimits) -> Self {
        let fake = Arc::new(Fake::default());
        lock(&fake.users).insert("alice".to_owned(), keys());
        let directory = Directory::new(Arc::clone(&fake), "fake".to_owned(), limits);
        Self { fake, directory }
    }

    fn set(&self, state: State) {
        *lock(&self.fake.state) = state;
    }

    fn ask(&self, name: &str) -> oneshot::Receiver<UserLookup> {
        let (sender, receiver) = oneshot::channel();
        self.directory.look_up(REALM, name, move |found| drop(sender.send(found)));
        receiver
    }

    async fn found(&self, name: &str) -> &'static str {
        said(&self.ask(name).await.expect("an answer"))
    }

    fn cached(&self, name: &str) -> &'static str {
        match self.directory.cached(REALM, name) {
            CachedUser::User(_) => "user",
            CachedUser::Absent => "absent",
            CachedUser::Unknown => "unknown",
        }
    }

    fn asked(&self) -> usize {
        self.fake.asked.load(Ordering::Relaxed)
    }

    async fn take_away(&self, state: State) {
        self.set(state);
        for number in 0..3 {
            self.found(&format!("stranger{number}")).await;
        }
        assert!(!self.directory.counts().is_up);
    }
}

fn said(found: &UserLookup) -> &'static str {
    match found {
        UserLookup::User(_) => "user",
        UserLookup::Absent => "absent",
        UserLookup::Unavailable => "unavailable",
    }
}

fn keys() -> UserKeys {
    UserKeys::new("alice", REALM, "wonderland")
}

fn count(counts: &[(&'static str, u64)], name: &str) -> u64 {
    counts.iter().find(|(found, _)| *found == name).expect("a counter").1
}

#[tokio::test(start_paused = true)]
async fn user_or_absence_is_queried_once_per_lifetime() {
    let world = World::new();
    assert_eq!([world.cached("alice"), world.cached("bob")], ["unknown", "unknown"]);
    assert_eq!((world.found("alice").await, world.found("bob").await), ("user", "absent"));
    assert_eq!([world.cached("alice"), world.cached("bob")], ["user", "absent"]);
    advance(Duration::from_secs(10)).await;
    assert_eq!(
        [world.cached("alice"), world.cached("bob")],
        ["user", "unknown"],
        "bob may have been added in the meantime"
    );
    advance(Duration::from_secs(50)).await;
    assert_eq!(world.cached("alice"), "unknown");
    lock(&world.fake.users).clear();
    assert_eq!((world.found("alice").await, world.cached("alice")), ("absent", "absent"), "removed");
    assert_eq!(world.asked(), 3);
}

#[tokio::test(start_paused = true)]
async fn hundred_lookups_of_one_user_share_one_query() {
    let world = World::new();
    world.set(State::Waits);
    let asking: Vec<_> = (0..100).map(|_| world.ask("alice")).collect();
    let other = world.ask("bob");
    tokio::task::yield_now().await;
    assert_eq!(world.asked(), 2);
    world.fake.released.notify_waiters();
    for one in asking {
        assert_eq!(said(&one.await.expect("an answer")), "user");
    }
    assert_eq!(said(&other.await.expect("an answer")), "absent");
    let counts = world.directory.counts();
    assert_eq!((count(&counts.answers, "joined"), count(&counts.queries, "found")), (99, 1));
    world.set(State::Good);
    advance(Duration::from_secs(61)).await;
    assert_eq!((world.found("alice").await, world.asked()), ("user", 3));
}

#[tokio::test(start_paused = true)]
async fn uncached_user_waits_until_the_deadline_then_fails_fast() {
    let world = World::new();
    world.set(State::Hangs);
    for number in 0..3 {
        let begun = Instant::now();
        assert_eq!(world.found(&format!("new{number}")).await, "unavailable");
        assert_eq!(begun.elapsed().as_secs(), 2);
    }
    let (begun, asked) = (Instant::now(), world.asked());
    for number in 0..100 {
        assert_eq!(world.found(&format!("newer{number}")).await, "unavailable");
    }
    assert_eq!((begun.elapsed(), world.asked()), (Duration::ZERO, asked), "no query");
    let counts = world.directory.counts();
    assert_eq!((count(&counts.queries, "timeout"), count(&counts.answers, "unavailable")), (3, 103));
}

#[tokio::test(start_paused = true)]
async fn cached_user_keeps_working_during_an_outage() {
    let world = World::new();
    world.found("alice").await;
    for state in [State::Hangs, State::Refuses] {
        world.take_away(state).await;
        for hours in [0, 1, 20] {
            advance(Duration::from_secs(3600 * hours)).await;
            assert_eq!(world.cached("alice"), "user", "after {hours} h");
            assert_eq!(world.cached("bob"), "unknown");
            assert_eq!(world.found("bob").await, "unavailable");
        }
        world.set(State::Good);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(world.directory.counts().is_up);
        assert_eq!((world.found("alice").await, world.found("bob").await), ("user", "absent"));
        advance(Duration::from_secs(11)).await;
    }
    world.take_away(State::Hangs).await;
    advance(Duration::from_secs(86_400)).await;
    assert_eq!(world.cached("alice"), "unknown", "no longer accepted after a day");
    assert_eq!(world.found("alice").await, "unavailable");
}

#[tokio::test(start_paused = true)]
async fn cached_user_does_not_wait_for_a_slow_store() {
    let world = World::new();
    world.found("alice").await;
    advance(Duration::from_secs(60)).await;
    world.set(State::Hangs);
    let begun = Instant::now();
    assert_eq!((world.cached("alice"), world.found("alice").await), ("unknown", "user"));
    assert_eq!(begun.elapsed(), KNOWN_PATIENCE);
    assert_eq!((world.cached("alice"), world.asked()), ("user", 2), "no immediate second query");
    advance(BENEFIT_OF_DOUBT).await;
    assert_eq!(world.cached("alice"), "unknown");
}

#[tokio::test(start_paused = true)]
async fn store_recovery_is_noticed_without_requests() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    world.take_away(State::Refuses).await;
    lock(&world.fake.secrets).push(secret("north"));
    advance(Duration::from_secs(30)).await;
    assert!(!world.directory.counts().is_up);
    world.set(State::Good);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(world.directory.counts().is_up);
    assert_eq!(
        world.directory.secrets(REALM).map(|secrets| secrets.len()),
        Some(1),
        "the secrets were read again"
    );
    assert_eq!(world.found("alice").await, "user");
}

#[tokio::test(start_paused = true)]
async fn single_failure_does_not_affect_other_lookups() {
    let world = World::new();
    for number in 0..10 {
        world.set(State::Refuses);
        assert_eq!(world.found(&format!("a{number}")).await, "unavailable");
        world.set(State::Good);
        assert_eq!(world.found(&format!("b{number}")).await, "absent");
    }
    assert!(world.directory.counts().is_up);
}

#[tokio::test(start_paused = true)]
async fn store_absent_at_startup_is_used_when_it_appears() {
    let world = World::new();
    world.set(State::Refuses);
    let error = world.directory.read().await.expect_err("missing");
    assert!(error.may_pass());
    world.directory.wait_for_it(&error);
    assert!(world.directory.rules().is_none() && world.directory.secrets(REALM).is_none());
    assert_eq!(world.found("alice").await, "unavailable");
    world.set(State::Good);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(world.directory.rules().is_some() && world.directory.secrets(REALM).is_some());
    assert_eq!((world.found("alice").await, world.directory.generation()), ("user", 1));
}

#[tokio::test(start_paused = true)]
async fn rules_are_reread_and_changes_bump_the_generation() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    assert_eq!(world.directory.generation(), 1);
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert!(world.fake.rules_asked.load(Ordering::Relaxed) >= 3);
    assert_eq!(world.directory.generation(), 1, "nothing has changed");
    lock(&world.fake.secrets).push(secret("north"));
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(world.directory.generation(), 1, "secrets are not part of the rules");
    assert_eq!(world.directory.secrets(REALM).map(|secrets| secrets.len()), Some(1));
}

#[tokio::test(start_paused = true)]
async fn new_version_causes_a_read_and_clears_the_cache() {
    let world = World::new();
    world.set(State::Tells);
    world.directory.read().await.expect("an answer");
    world.found("alice").await;
    let read = world.fake.rules_asked.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.cached("alice"), "user", "the first refresh sees no change");
    world.found("bob").await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(world.fake.rules_asked.load(Ordering::Relaxed), read);
    assert_eq!(world.cached("alice"), "user");
    lock(&world.fake.users).insert("bob".to_owned(), keys());
    world.fake.version.fetch_add(1, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!([world.cached("alice"), world.cached("bob")], ["unknown", "unknown"]);
    assert_eq!(world.found("bob").await, "user");
}

#[tokio::test(start_paused = true)]
async fn new_secret_is_found_with_at_most_ten_queries_a_second() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    lock(&world.fake.secrets).push(secret("new"));
    assert!(world.directory.may_have_new_secrets());
    let ask = || {
        let (sender, receiver) = oneshot::channel();
        world.directory.refresh_secrets(REALM, move |secrets| drop(sender.send(secrets)));
        receiver
    };
    let many: Vec<_> = (0..50).map(|_| ask()).collect();
    for one in many {
        assert_eq!(one.await.expect("an answer").map(|secrets| secrets.len()), Some(1));
    }
    assert_eq!(world.fake.secrets_asked.load(Ordering::Relaxed), 1, "the callers share one query");
    // Another server that uses the store has rotated the secret since the last query.
    lock(&world.fake.secrets).push(secret("newer"));
    assert!(world.directory.may_have_new_secrets());
    let begun = Instant::now();
    let many: Vec<_> = (0..50).map(|_| ask()).collect();
    for one in many {
        assert_eq!(one.await.expect("an answer").map(|secrets| secrets.len()), Some(2));
    }
    assert_eq!(world.fake.secrets_asked.load(Ordering::Relaxed), 2);
    assert!(begun.elapsed() >= SECRETS_PAUSE, "the clock is virtual");
    world.take_away(State::Hangs).await;
    advance(SECRETS_PAUSE).await;
    assert!(!world.directory.may_have_new_secrets(), "the store is unavailable");
    assert_eq!(ask().await.expect("an answer").map(|secrets| secrets.len()), Some(2), "the previous secrets");
}

#[tokio::test(start_paused = true)]
async fn secret_query_does_not_answer_later_callers() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    let ask = || {
        let (sender, receiver) = oneshot::channel();
        world.directory.refresh_secrets(REALM, move |secrets| drop(sender.send(secrets)));
        receiver
    };
    world.set(State::Waits);
    let first = ask();
    tokio::time::sleep(SECRETS_PAUSE / 10).await;
    let second = ask();
    tokio::time::sleep(SECRETS_PAUSE / 10).await;
    world.set(State::Good);
    world.fake.released.notify_waiters();
    assert_eq!(first.await.expect("an answer").map(|secrets| secrets.len()), Some(0));
    lock(&world.fake.secrets).push(secret("new"));
    assert_eq!(second.await.expect("an answer").map(|secrets| secrets.len()), Some(1));
    assert_eq!(world.fake.secrets_asked.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn waiters_for_secrets_are_limited() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    world.set(State::Waits);
    for _ in 0..MOST_WAIT_FOR_SECRETS {
        assert!(world.directory.may_have_new_secrets());
        world.directory.refresh_secrets(REALM, drop);
    }
    assert!(!world.directory.may_have_new_secrets());
    tokio::time::sleep(SECRETS_PAUSE / 10).await;
    world.set(State::Good);
    world.fake.released.notify_waiters();
    tokio::time::sleep(2 * SECRETS_PAUSE).await;
    assert!(world.directory.may_have_new_secrets(), "all waiters were answered");
}

#[tokio::test(start_paused = true)]
async fn own_changes_take_effect_immediately() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    let put = |name: &str| Edit::PutUser { realm: REALM.to_owned(), name: name.to_owned(), keys: keys() };
    let remove = |name: &str| Edit::RemoveUser { realm: REALM.to_owned(), name: name.to_owned() };
    assert_eq!([world.found("alice").await, world.found("bob").await], ["user", "absent"]);
    let edit = async |change: Edit| world.directory.edit(&change).await.expect("an answer");
    assert_eq!([edit(put("bob")).await, edit(remove("alice")).await], [false, true]);
    assert_eq!([world.cached("alice"), world.cached("bob")], ["unknown", "unknown"]);
    assert_eq!([world.found("alice").await, world.found("bob").await], ["absent", "user"]);
    assert_eq!(world.fake.rules_asked.load(Ordering::Relaxed), 1, "users are not part of the rules");

    let secret = Secret::new("north");
    edit(Edit::AddSecret { realm: REALM.to_owned(), secret }).await;
    assert_eq!(world.directory.secrets(REALM).map(|secrets| secrets.len()), Some(1));
    assert_eq!(world.directory.all_secrets().len(), 1);

    world.set(State::Waits);
    let late = world.ask("carol");
    tokio::task::yield_now().await;
    world.set(State::Good);
    edit(put("carol")).await;
    lock(&world.fake.users).remove("carol");
    world.fake.released.notify_one();
    assert_eq!((said(&late.await.expect("an answer")), world.cached("carol")), ("absent", "unknown"));

    world.set(State::Hangs);
    let error = world.directory.edit(&put("dora")).await.expect_err("no answer").to_string();
    assert!(error.contains("not within 20 s"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn latest_secret_signs_and_expired_ones_are_removed() {
    let world = World::new();
    assert!(world.directory.signing_secret(REALM).is_none());
    let old = StoredSecret { until: Some(unix() + 1_000_000), ..secret("old") };
    let over = StoredSecret { until: Some(unix() - 1), ..secret("over") };
    let new = StoredSecret { since: unix(), ..secret("new") };
    *lock(&world.fake.secrets) = vec![old, over, new];
    world.directory.read().await.expect("an answer");
    let signs = || world.directory.signing_secret(REALM).map(|secret| secret.reveal().to_owned());
    assert_eq!(signs().as_deref(), Some("new"));
    let held = || world.directory.secrets(REALM).expect("secrets were read").len();
    assert_eq!(held(), 3);
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert_eq!((held(), lock(&world.fake.secrets).len()), (2, 2));
    assert_eq!(world.fake.removals.load(Ordering::Relaxed), 1);
    // Allocations created with the secret's credentials continue, even in another process.
    let ended = |directory: &Directory<Arc<Fake>>| {
        let ended = directory.ended_secrets(REALM);
        ended.iter().map(|secret| secret.value.reveal().to_owned()).collect::<BTreeSet<_>>()
    };
    assert_eq!(ended(&world.directory), ["over".to_owned()].into());
    let another = World::new();
    another.directory.remember_ended_secrets(world.directory.all_ended_secrets());
    another.directory.read().await.expect("an answer");
    assert_eq!(ended(&another.directory), ["over".to_owned()].into());
    // The secret is also remembered by another directory of the same store that did not read it between its
    // expiry and its removal.
    lock(&world.fake.secrets).push(StoredSecret { until: Some(unix() - 1), ..secret("just over") });
    world.directory.read().await.expect("an answer");
    let next = World::new();
    next.directory.read().await.expect("an answer");
    next.directory.take_ended_secrets(&world.directory);
    assert_eq!(ended(&next.directory), ["just over", "over"].map(str::to_owned).into());
    lock(&world.fake.secrets).pop();
    world.directory.read().await.expect("an answer");

    // If the store is read-only, removal is not retried constantly.
    let over = StoredSecret { until: Some(unix() - 1), ..secret("over") };
    lock(&world.fake.secrets).push(over);
    world.set(State::TakesNothing);
    tokio::time::sleep(Duration::from_secs(1800)).await;
    assert_eq!(world.fake.removals.load(Ordering::Relaxed), 2);
    assert_eq!(signs().as_deref(), Some("new"));
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(world.fake.removals.load(Ordering::Relaxed), 3);
}

#[tokio::test(start_paused = true)]
async fn change_with_a_lost_answer_takes_effect() {
    let world =
        World::with(DirectoryLimits { refresh: Duration::from_secs(3600), ..DirectoryLimits::default() });
    world.directory.read().await.expect("an answer");
    tokio::time::sleep(Duration::from_secs(5)).await;
    world.set(State::LosesAnswers);
    let edit = Edit::AddSecret { realm: REALM.to_owned(), secret: Secret::new("late") };
    world.directory.edit(&edit).await.expect_err("no answer");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.directory.secrets(REALM).expect("secrets were read").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn older_answer_about_secrets_does_not_replace_a_newer_one() {
    let world = World::new();
    let put = |text: &str| *lock(&world.fake.secrets) = vec![secret(text)];
    let held = || world.directory.secrets(REALM).expect("secrets were read")[0].value.reveal().to_owned();
    let refreshed = || {
        let (sender, answer) = oneshot::channel();
        world.directory.refresh_secrets(REALM, move |_| _ = sender.send(()));
        answer
    };
    put("first");
    world.set(State::AnswersLate);
    let late = refreshed();
    tokio::task::yield_now().await;
    world.set(State::Good);
    put("second");
    world.directory.read().await.expect("an answer");
    world.fake.released.notify_one();
    late.await.expect("an answer");
    assert_eq!(held(), "second");
    // Runs the two queries in the opposite order.
    advance(Duration::from_millis(200)).await;
    world.set(State::AnswersLate);
    let directory = world.directory.clone();
    let late = tokio::spawn(async move { directory.read().await });
    tokio::task::yield_now().await;
    world.set(State::Good);
    put("third");
    refreshed().await.expect("an answer");
    assert_eq!(held(), "third");
    world.fake.released.notify_one();
    late.await.expect("the query ends").expect("an answer");
    assert_eq!(held(), "third");
}

#[tokio::test(start_paused = true)]
async fn api_key_changes_do_not_bump_the_generation() {
    let world = World::new();
    world.directory.read().await.expect("an answer");
    let generation = world.directory.generation();
    let key = ApiKey { name: "shop".to_owned(), hash: [1; 32], realm: None, max_ttl: Some(60), rate: None };
    lock(&world.fake.api_keys).insert("shop".into(), key.clone());
    assert_eq!(world.directory.api_key("shop"), None);
    world.directory.read().await.expect("an answer");
    assert_eq!((world.directory.api_key("shop"), world.directory.api_keys().len()), (Some(key), 1));
    assert_eq!(world.directory.generation(), generation);
    world.take_away(State::Refuses).await;
    assert!(world.directory.api_key("shop").is_some(), "the previous keys stay");
}

#[tokio::test(start_paused = true)]
async fn tasks_end_with_their_directory() {
    let world = World::new();
    let weak = Arc::downgrade(&world.directory.0);
    let fake = Arc::clone(&world.fake);
    drop(world);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(weak.upgrade().is_none());
    assert_eq!(Arc::strong_count(&fake), 1);
    assert_eq!(fake.rules_asked.load(Ordering::Relaxed), 0);
}
