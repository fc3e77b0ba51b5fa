//! Concurrent changes over separate connections: exactly one of them adds a new item, and no change is
//! lost.

use std::{collections::BTreeSet, sync::Arc};

use turnpike_stores::{
    ApiKey, Backend as _, Database, DirectoryLimits, Edit, Existing, SqliteUse, StoreAddress, StoredLimits,
    UserKeys, signing,
};
use turnpike_wire::secret::Secret;

use crate::support::*;

const WRITERS: u8 = 8;

/// `TURNPIKE_RACE_ROUNDS=100` takes minutes on slow disks.
fn rounds() -> usize {
    let rounds = std::env::var("TURNPIKE_RACE_ROUNDS").ok();
    rounds.map_or(20, |rounds| rounds.parse().expect("a number"))
}

fn writers(world: &World) -> Vec<Arc<Database>> {
    let _inside = world.runtime.enter();
    let address: StoreAddress = world.url.parse().expect("an address");
    let writer = |_| Arc::new(Database::new(&address, 1, SqliteUse::Foreign, &DirectoryLimits::default()));
    (0..WRITERS).map(writer).collect()
}

/// Returns the result of each writer: true if the item existed.
fn race(
    world: &World,
    writers: &[Arc<Database>],
    existing: Existing,
    edit: impl Fn(u8) -> Edit,
) -> Vec<bool> {
    let begin = |(writer, number): (&Arc<Database>, u8)| {
        let (writer, edit) = (Arc::clone(writer), edit(number));
        world.runtime.spawn(async move { writer.apply(&edit, existing).await })
    };
    let begun: Vec<_> = writers.iter().zip(0..).map(begin).collect();
    let done = begun.into_iter().map(|change| world.wait(change).expect("no panic"));
    done.map(|done| done.unwrap_or_else(|error| panic!("{:?}: {error}", world.kind))).collect()
}

#[track_caller]
fn assert_one_was_first(found: &[bool], world: &World) {
    let first = found.iter().filter(|existed| !**existed).count();
    assert_eq!(first, 1, "{:?}: {found:?}", world.kind);
}

#[test]
fn exactly_one_of_concurrent_writers_adds_a_name() {
    each(|world| {
        let writers = writers(world);
        for round in 0..rounds() {
            let name = format!("one-{round}");
            let keys = |writer: u8| UserKeys::new(&name, "a", &writer.to_string());
            let user =
                |writer| Edit::PutUser { realm: "a".to_owned(), name: name.clone(), keys: keys(writer) };
            let found = race(world, &writers, Existing::Keep, user);
            assert_one_was_first(&found, world);
            let winner = (0..WRITERS).find(|writer| !found[usize::from(*writer)]).expect("one");
            let stored =
                world.wait(writers[0].user("a", &name)).expect("an answer").expect("the user exists");
            assert_eq!(stored, keys(winner), "{:?}: the first writer's keys", world.kind);

            let name = format!("key-{round}");
            let key = |writer| ApiKey {
                name: name.clone(),
                hash: [writer; 32],
                realm: None,
                max_ttl: None,
                rate: None,
            };
            let found = race(world, &writers, Existing::Keep, |writer| Edit::PutApiKey(key(writer)));
            assert_one_was_first(&found, world);

            let name = format!("secret-{round}");
            let secret = |_| Edit::AddSecret { realm: "a".to_owned(), secret: Secret::new(name.clone()) };
            assert_one_was_first(&race(world, &writers, Existing::Keep, secret), world);

            let name = format!("realm-{round}");
            let realm = |writer: u8| {
                let limits = StoredLimits { total_quota: Some(writer.into()), ..StoredLimits::default() };
                Edit::PutRealm { realm: name.clone(), limits }
            };
            assert_one_was_first(&race(world, &writers, Existing::Keep, realm), world);
        }
    });
}

#[test]
fn concurrent_replacements_leave_one_consistent_result() {
    each(|world| {
        let writers = writers(world);
        for round in 0..rounds() / 4 {
            let name = format!("one-{round}");
            let keys = |writer: u8| UserKeys::new(&name, "a", &writer.to_string());
            let user =
                |writer| Edit::PutUser { realm: "a".to_owned(), name: name.clone(), keys: keys(writer) };
            assert_one_was_first(&race(world, &writers, Existing::Replace, user), world);
            let stored =
                world.wait(writers[0].user("a", &name)).expect("an answer").expect("the user exists");
            assert!((0..WRITERS).any(|writer| stored == keys(writer)), "{:?}", world.kind);

            let name = format!("realm-{round}");
            let realm = |writer: u8| {
                let number = Some(usize::from(writer) + 1);
                let max_bps = Some(u64::from(writer) + 1);
                let limits = StoredLimits { total_quota: number, user_quota: number, max_bps };
                Edit::PutRealm { realm: name.clone(), limits }
            };
            assert_one_was_first(&race(world, &writers, Existing::Replace, realm), world);
            let rules = world.wait(writers[0].rules()).expect("an answer");
            let found = rules.realms[name.as_str()].limits;
            let limits = [
                found.total_quota,
                found.user_quota,
                found.max_bps.and_then(|rate| usize::try_from(rate).ok()),
            ];
            assert_eq!(
                BTreeSet::from(limits).len(),
                1,
                "{:?}: limits set by one writer: {limits:?}",
                world.kind
            );
        }
    });
}

#[test]
fn concurrent_rotations_leave_one_secret_without_an_expiry() {
    each(|world| {
        let writers = writers(world);
        for round in 0..rounds() {
            let (since, until) = (1000 + round as u64, 2_000_000_000 + round as u64);
            let rotation = |writer: u8| {
                let secret = Secret::new(format!("secret-{round}-{writer}"));
                Edit::RotateSecret { realm: "a".to_owned(), secret, since, until }
            };
            let found = race(world, &writers, Existing::Replace, rotation);
            assert_eq!(found.iter().filter(|existed| !**existed).count(), usize::from(round == 0));
            let secrets = world.wait(writers[0].secrets("a")).expect("an answer");
            let lasting: Vec<_> = secrets.iter().filter(|secret| secret.until.is_none()).collect();
            assert_eq!(lasting.len(), 1, "{:?}, round {round}: {secrets:?}", world.kind);
            assert!(signing(&secrets).expect("one").value.reveal().starts_with(&format!("secret-{round}-")));
            // Earlier expiry times are unchanged.
            let soonest = secrets.iter().filter_map(|secret| secret.until).min();
            assert_eq!(soonest, Some(2_000_000_000));
            if round % 10 == 9 {
                for secret in secrets.iter().filter(|secret| secret.until > Some(2_000_000_000)) {
                    let (realm, secret) = ("a".to_owned(), secret.value.clone());
                    let removal = Edit::RemoveSecret { realm, secret };
                    world.wait(writers[0].edit(&removal)).expect("writable");
                }
            }
        }
    });
}
