//! A slow, silent or absent server: cached users are unaffected, other users are refused within the
//! deadline.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use turnpike_stores::{CachedUser, Database, Directory, DirectoryLimits, Edit, UserKeys, UserLookup};
use turnpike_testkit::databases::Proxy;

use crate::support::*;

const REALM: &str = "north.example";

fn behind_a_proxy(world: &World) -> (Proxy, Directory<Database>) {
    for name in ["alice", "bob"] {
        let (realm, name) = (REALM.to_owned(), name.to_owned());
        let keys = UserKeys::new(&name, &realm, "pw");
        world.edit(&Edit::PutUser { realm, name, keys });
    }
    let proxy = Proxy::new(world.address());
    let limits = DirectoryLimits {
        deadline: Duration::from_secs(1),
        lifetime: Duration::from_millis(200),
        ..impatient()
    };
    let directory = world.directory_at(&world.url_at(proxy.address), limits);
    world.wait(async { directory.read().await.expect("an answer") });
    assert!(matches!(found(world, &directory, "alice"), UserLookup::User(_)));
    (proxy, directory)
}

fn found(world: &World, directory: &Directory<Database>, name: &str) -> UserLookup {
    let (sender, receiver) = oneshot::channel();
    directory.look_up(REALM, name, move |found| drop(sender.send(found)));
    world.wait(async { receiver.await.expect("an answer") })
}

fn gets_in(world: &World, directory: &Directory<Database>, name: &str) -> bool {
    match directory.cached(REALM, name) {
        CachedUser::User(_) => true,
        CachedUser::Absent => false,
        CachedUser::Unknown => matches!(found(world, directory, name), UserLookup::User(_)),
    }
}

fn comes_back(world: &World, directory: &Directory<Database>) {
    let deadline = Instant::now() + turnpike_testkit::PATIENCE;
    while !directory.counts().is_up {
        assert!(Instant::now() < deadline, "no recovery");
        world.wait(async { tokio::time::sleep(Duration::from_millis(20)).await });
    }
    let (bob, stranger) = (found(world, directory, "bob"), found(world, directory, "nobody"));
    assert!(matches!(bob, UserLookup::User(_)), "{:?}: {bob:?}", world.kind);
    assert!(matches!(stranger, UserLookup::Absent), "{:?}: {stranger:?}", world.kind);
}

/// While the store is unavailable, users that are not cached are refused; alice is always accepted.
fn is_away(world: &World, directory: &Directory<Database>) {
    for number in 0..6 {
        assert!(gets_in(world, directory, "alice"), "{:?}: alice is cached", world.kind);
        let stranger = found(world, directory, &format!("stranger{number}"));
        assert!(matches!(stranger, UserLookup::Unavailable), "{:?}: {stranger:?}", world.kind);
    }
    assert!(!directory.counts().is_up);
    for _ in 0..100 {
        assert!(gets_in(world, directory, "alice"));
    }
}

const SERVERS: [Kind; 4] = [Kind::Postgres, Kind::Mariadb, Kind::Redis, Kind::Http];

#[test]
fn silent_server_keeps_cached_users_working() {
    for kind in SERVERS {
        on(kind, |world| {
            let (proxy, directory) = behind_a_proxy(world);
            proxy.hold(true);
            is_away(world, &directory);
            proxy.hold(false);
            comes_back(world, &directory);
        });
    }
}

#[test]
fn unreachable_server_keeps_cached_users_working() {
    for kind in SERVERS {
        on(kind, |world| {
            let (proxy, directory) = behind_a_proxy(world);
            proxy.refuse(true);
            is_away(world, &directory);
            proxy.refuse(false);
            comes_back(world, &directory);
        });
    }
}

#[test]
fn slow_server_within_the_deadline_works() {
    for kind in SERVERS {
        on(kind, |world| {
            let (proxy, directory) = behind_a_proxy(world);
            proxy.delay(Duration::from_millis(30));
            for name in ["bob", "alice"] {
                assert!(matches!(found(world, &directory, name), UserLookup::User(_)), "{kind:?}");
            }
            assert!(matches!(found(world, &directory, "nobody"), UserLookup::Absent));
            assert!(directory.counts().is_up);
        });
    }
}

#[test]
fn restarted_server_is_used_again() {
    for kind in SERVERS {
        on(kind, |world| {
            let (_proxy, directory) = behind_a_proxy(world);
            world.stop();
            is_away(world, &directory);
            world.start();
            comes_back(world, &directory);
        });
    }
}

#[test]
fn closed_idle_connections_are_reopened() {
    for kind in SERVERS {
        on(kind, |world| {
            let (proxy, directory) = behind_a_proxy(world);
            for number in 0..5 {
                let before = proxy.accepted();
                proxy.refuse(true);
                proxy.refuse(false);
                let stranger = found(world, &directory, &format!("new{number}"));
                assert!(matches!(stranger, UserLookup::Absent), "{kind:?}: {stranger:?}");
                assert!(proxy.accepted() > before);
            }
            assert!(directory.counts().is_up);
        });
    }
}
