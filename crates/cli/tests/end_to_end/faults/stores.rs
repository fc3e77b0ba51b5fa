//! The store of users becomes slow, silent, is gone, or says what makes no sense.

use std::{
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use turnpike_testkit::databases::{self, Proxy};

use super::{Crowd, Row, Server, Wanted, allocations_under};
use crate::{
    harness::{Finished, PASSWORD, Program, REALM, SOON, Stun, USER, need, turnpike},
    stores::coturn_store,
};

/// PostgreSQL behind a proxy, with a user `known`.
struct World {
    proxy: Proxy,
    database: databases::Server,
}

impl World {
    fn new() -> Result<Self, String> {
        let (database, proxy) = coturn_store()?;
        let world = Self { proxy, database };
        let url = world.database.url(world.database.address, "");
        for user in ["known", "stranger"] {
            let arguments = ["user", "add", user, "--realm", REALM, "--password", "pw", "--store", &url];
            let added = Program::start(&mut turnpike(&arguments)).wait(SOON);
            assert_eq!(added.code, Some(0), "{}", added.output());
        }
        Ok(world)
    }

    fn sql(&self, statement: &str) -> Finished {
        let psql = databases::installed("psql").expect("it was there before");
        Program::run(Command::new(psql).env("PGPASSWORD", databases::PASSWORD).args([
            "-X",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            &self.database.coturn_words(),
            "-c",
            statement,
        ]))
    }
}

/// Has the store fail in turns, and holds what `known` waits for an allocation then against what it waits for otherwise.
fn outage(name: &'static str, what: &'static str, fault: impl Fn(&World, bool)) {
    let world = need!(World::new());
    let url = world.database.url(world.proxy.address, "");
    let mut server = Server::start(Wanted::flags(&["--workers", "2", "--store", &url]));
    let crowd = Crowd::of_user(&server, "known:pw");
    let seen = Row::new(name, what).run(&mut server, crowd, |server, row| {
        let turns = allocations_under(server, "known:pw", settled, |server, on| {
            fault(&world, on);
            if on {
                nobody_finds_it(server);
            }
        });
        turns.tell(row, "users that are known", "in an outage");
        // Who is in the configuration never asks a store.
        super::allocation_p99(server, &format!("{USER}:{PASSWORD}"), "0.5");
        thread::sleep(Duration::from_millis(200));
    });
    // And whoever was not known finds it again.
    super::within(SOON, "a stranger is let in", || {
        let run = crate::harness::Load::as_user(server.address, "stranger:pw")
            .with(&["--mode", "allocate", "--rate", "20", "--duration", "0.5"])
            .run();
        run.code == Some(0) && run.result()["lost"] == 0
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Eight strangers come, and the store has no answer: then the server asks it no more, but for whether it is back.
fn nobody_finds_it(server: &Server) {
    const STRANGERS: usize = 8;
    let answers = thread::scope(|scope| {
        let asking: Vec<_> = (0..STRANGERS).map(|_| scope.spawn(|| look_up(server))).collect();
        asking.into_iter().map(|one| one.join().expect("it is answered")).collect::<Vec<_>>()
    });
    assert_eq!(answers, [Some(500); STRANGERS], "the store answers");
    super::within(SOON, "the store is away", || server.metrics().sum("turnpike_store_up", "") == 0);
}

/// Waits until the store is asked again, and three names that nobody has are looked up one after the other: each of them is a query.
fn settled(server: &Server) {
    /// Less than what anybody waits for a store that does not answer.
    const AT_ONCE: Duration = Duration::from_millis(200);
    super::within(SOON, "the store is asked", || server.metrics().sum("turnpike_store_up", "") == 1);
    super::within(SOON, "the store answers", || {
        (0..3).all(|_| {
            let begun = Instant::now();
            look_up(server) == Some(401) && begun.elapsed() < AT_ONCE
        })
    });
}

/// What is said to somebody with a name that nobody has, and that was never asked for.
fn look_up(server: &Server) -> Option<u16> {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    let mut client = Stun::new(server.address);
    let (_, _, challenge) = client.challenge();
    client.allocate(&format!("nobody{}", NAMES.fetch_add(1, Ordering::Relaxed)), "pw", &challenge)
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_store_is_slow() {
    outage("the_store_is_slow", "the store takes 2 s longer for each answer", |world, on| {
        world.proxy.delay(Duration::from_millis(if on { 2_000 } else { 0 }));
    });
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_store_is_silent() {
    outage("the_store_is_silent", "the store takes questions and does not answer", |world, on| {
        world.proxy.hold(on);
    });
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_store_is_gone() {
    outage("the_store_is_gone", "the store refuses and cuts connections", |world, on| world.proxy.refuse(on));
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn the_store_talks_nonsense() {
    outage(
        "the_store_talks_nonsense",
        "the store's answers are garbled, and its rows make no sense",
        |world, on| {
            world.proxy.garble(on);
            // Keys without digits, quotas that are none, addresses that are none.
            let done = world.sql(&if on {
            format!(
                "INSERT INTO turnusers_lt VALUES ('{REALM}', 'odd', repeat('z', 128)); \
                 INSERT INTO turn_realm_option VALUES ('{REALM}', 'max-bps', '-7'), ('{REALM}', 'user-quota', 'many'); \
                 INSERT INTO denied_peer_ip VALUES ('{REALM}', '300.1.2.3-nowhere')"
            )
        } else {
            "DELETE FROM turnusers_lt WHERE name = 'odd'; DELETE FROM turn_realm_option; DELETE FROM denied_peer_ip".to_owned()
        });
            assert_eq!(done.code, Some(0), "{}", done.output());
        },
    );
}
