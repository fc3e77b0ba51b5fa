//! The user database is slow, silent or down, or returns garbage or wrong data.

use std::{
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use turnpike_testkit::databases::{self, Proxy};

use super::{Crowd, Row, Server, Wanted, allocations_under, visitor::Visitor, within};
use turnpike_trials::coturn_store;
use turnpike_trials::{Finished, PASSWORD, Program, REALM, SOON, USER, need, turnpike};

const AT_ONCE: Duration = Duration::from_millis(200);

const DEADLINE: Duration = Duration::from_secs(2);

struct World {
    proxy: Proxy,
    database: databases::Server,
}

impl World {
    /// Adds these users, all with the password `pw`.
    fn new(users: &[&str]) -> Result<Self, String> {
        let (database, proxy) = coturn_store()?;
        let world = Self { proxy, database };
        users.iter().for_each(|user| world.has(user, "pw"));
        Ok(world)
    }

    fn url(&self) -> String {
        self.database.url(self.proxy.address, "")
    }

    fn has(&self, user: &str, password: &str) {
        let url = self.database.url(self.database.address, "");
        let arguments = ["user", "add", user, "--realm", REALM, "--password", password, "--store", &url];
        Program::start(&mut turnpike(&arguments)).wait(SOON).ended(0);
    }

    fn sql(&self, statement: &str) {
        let psql = databases::installed("psql").expect("the program was found before");
        let done: Finished = Program::run(Command::new(psql).env("PGPASSWORD", databases::PASSWORD).args([
            "-X",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            &self.database.coturn_words(),
            "-c",
            statement,
        ]));
        assert_eq!(done.code, Some(0), "{}", done.output());
    }
}

/// Makes the store fail repeatedly; compares the allocation latency of the user `known` with and without the fault.
fn outage(name: &'static str, what: &'static str, fault: impl Fn(&World, bool)) {
    let world = need!(World::new(&["known", "stranger"]));
    let mut server = Server::start(Wanted::flags(&["--workers", "2", "--store", &world.url()]));
    let crowd = Crowd::of_user(&server, "known:pw");
    let seen = Row::new(name, what).run(&mut server, crowd, |server, row| {
        let turns = allocations_under(server, "known:pw", settled, |server, on| {
            fault(&world, on);
            if on {
                unknown_users_are_refused(server);
            }
        });
        turns.tell(row, "cached users", "in an outage");
        // A user from the configuration never needs the store.
        super::allocation_p99(server, &format!("{USER}:{PASSWORD}"), "0.5");
        thread::sleep(Duration::from_millis(200));
    });
    within(SOON, "an uncached user gets an allocation", || server.answers("stranger", "pw").is_none());
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Looks up eight unknown users in parallel, each with a new name; returns their results and latencies.
fn eight_strangers(server: &Server) -> Vec<(Option<u16>, Duration)> {
    thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|_| scope.spawn(|| look_up(server))).collect();
        asking.into_iter().map(|one| one.join().expect("the request is answered")).collect()
    })
}

/// Unknown users connect while the store is down; the server then only probes the store.
fn unknown_users_are_refused(server: &Server) {
    let answers = eight_strangers(server);
    assert!(answers.iter().all(|(answer, _)| *answer == Some(500)), "the store answers: {answers:?}");
    within(SOON, "the store is marked as down", || server.metrics().sum("turnpike_store_up", "") == 0);
}

/// Waits until the store is queried again and three unknown names are looked up, one query each.
fn settled(server: &Server) {
    within(SOON, "the store is queried", || server.metrics().sum("turnpike_store_up", "") == 1);
    within(SOON, "the store answers", || {
        (0..3).all(|_| {
            let (answer, took) = look_up(server);
            answer == Some(401) && took < AT_ONCE
        })
    });
}

/// Result and latency of a request with a new, unknown name.
fn look_up(server: &Server) -> (Option<u16>, Duration) {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    ask(server, &format!("nobody{}", NAMES.fetch_add(1, Ordering::Relaxed)))
}

fn ask(server: &Server, user: &str) -> (Option<u16>, Duration) {
    let mut visitor = Visitor::of(server);
    let begun = Instant::now();
    let answer = visitor.asks(user, "pw");
    (answer, begun.elapsed())
}

fn queries(server: &Server, result: &str) -> u64 {
    server.metrics().sum("turnpike_store_queries_total", &format!("result=\"{result}\""))
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_store_is_slow() {
    /// Each chunk is delayed by half of this towards the store and by half on the way back.
    const SLOWER: Duration = Duration::from_secs(1);
    /// Connections for unknown users, plus one for the rules. Opening another one would take several round trips.
    const CONNECTIONS: usize = 16;
    const STRANGERS: [&str; 5] = ["one", "two", "three", "four", "five"];
    let world = need!(World::new(&[&["known"], &STRANGERS[..]].concat()));
    let mut wanted = Wanted::flags(&["--workers", "2", "--store", &world.url()]);
    wanted.environment.push(("TURNPIKE_STORE_CONNECTIONS", CONNECTIONS.to_string()));
    let mut server = Server::start(wanted);
    let crowd = Crowd::of_user(&server, "known:pw");
    let seen = Row::new("the_store_is_slow", "the store answers 1 s late (timeout 2 s)").run(
        &mut server,
        crowd,
        |server, row| {
            let failed = |server: &Server| queries(server, "timeout") + queries(server, "failed");
            let before = failed(server);
            let mut strangers = STRANGERS.iter();
            let (mut soonest, mut latest) = (Duration::MAX, Duration::ZERO);
            let turns = allocations_under(server, "known:pw", settled, |server, on| {
                if on {
                    // Connections are used in turn, so this opens all of them and prepares the statement on each.
                    (0..2 * CONNECTIONS).for_each(|_| assert_eq!(look_up(server).0, Some(401)));
                }
                world.proxy.delay(if on { SLOWER / 2 } else { Duration::ZERO });
                if on {
                    let mut answers = eight_strangers(server);
                    assert!(answers.iter().all(|(answer, _)| *answer == Some(401)), "{answers:?}");
                    let stranger = ask(server, strangers.next().expect("one per round"));
                    assert_eq!(stranger.0, None, "an uncached user gets an allocation");
                    answers.push(stranger);
                    for (_, took) in answers {
                        (soonest, latest) = (soonest.min(took), latest.max(took));
                    }
                }
                assert_eq!(server.metrics().sum("turnpike_store_up", ""), 1);
            });
            assert!(soonest >= SLOWER && latest < DEADLINE, "uncached users waited for {soonest:?} to {latest:?}");
            assert_eq!(failed(server), before, "no query failed");
            row.note(format!(
                "uncached users got a response after {:.2} to {:.2} s, unknown ones a 401; the store stayed in use",
                soonest.as_secs_f64(),
                latest.as_secs_f64()
            ));
            turns.tell(row, "cached users", "while it is slow");
        },
    );
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_store_is_silent() {
    outage("the_store_is_silent", "the store accepts queries and does not answer", |world, on| {
        world.proxy.hold(on);
    });
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_store_is_gone() {
    outage("the_store_is_gone", "the store resets all connections", |world, on| world.proxy.refuse(on));
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_store_returns_garbage() {
    outage(
        "the_store_returns_garbage",
        "every other byte of the store's answers is corrupted",
        |world, on| {
            world.proxy.garble(on);
        },
    );
}

/// Statements that add an invalid rule and remove it again, and the server's log line.
const ODD_RULES: [[&str; 3]; 4] = [
    [
        "INSERT INTO turn_realm_option VALUES ('example.org', 'max-bps', '-7')",
        "DELETE FROM turn_realm_option WHERE opt = 'max-bps'",
        "max-bps of realm \"example.org\" is \"-7\", not a number",
    ],
    [
        "INSERT INTO turn_realm_option VALUES ('example.org', 'user-quota', 'many')",
        "DELETE FROM turn_realm_option WHERE opt = 'user-quota'",
        "user-quota of realm \"example.org\" is \"many\", not a number",
    ],
    [
        "INSERT INTO denied_peer_ip VALUES ('example.org', '300.1.2.3-nowhere')",
        "DELETE FROM denied_peer_ip",
        "in denied_peer_ip, ",
    ],
    [
        "INSERT INTO oauth_key VALUES ('west', 'no base64!', 0, 0, 'A256GCM', 'example.org')",
        "DELETE FROM oauth_key",
        "oauth_key \"west\" is not base64",
    ],
];

/// A valid rule that refuses every new client. Rules are only applied as a complete set.
const NOBODY_NEW: [&str; 2] = [
    "INSERT INTO turn_realm_option VALUES ('example.org', 'total-quota', '1')",
    "DELETE FROM turn_realm_option WHERE opt = 'total-quota'",
];

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_store_returns_wrong_rows() {
    let strangers = ["one", "two", "three", "four"];
    let world = need!(World::new(&[&["known", "changed", "gone"], &strangers[..]].concat()));
    let mut wanted = Wanted::flags(&["--workers", "2", "--store", &world.url()]);
    for variable in
        ["TURNPIKE_STORE_REFRESH", "TURNPIKE_STORE_CACHE_LIFETIME", "TURNPIKE_STORE_CACHE_NEGATIVE"]
    {
        wanted.environment.push((variable, "1".to_owned()));
    }
    let mut server = Server::start(wanted);
    let crowd = Crowd::of_user(&server, "known:pw");
    let what = "the store returns invalid rows, a changed key and a missing user";
    let seen = Row::new("the_store_returns_wrong_rows", what).run(&mut server, crowd, |server, row| {
        let failed = || queries(server, "failed") + queries(server, "timeout");
        let before = failed();
        let is_let_in = |user: &str| {
            // A cached refusal lasts for a second.
            within(SOON, &format!("{user} is served"), || server.answers(user, "pw").is_none());
        };
        ["changed", "gone"].into_iter().for_each(is_let_in);
        changed_users_take_effect(&world, server);
        for (odd, stranger) in ODD_RULES.into_iter().zip(strangers) {
            odd_rule(&world, server, odd, stranger);
        }
        world.sql(NOBODY_NEW[0]);
        within(SOON, "new clients are refused", || server.answers("one", "pw") == Some(508));
        world.sql(NOBODY_NEW[1]);
        ["odd", "changed", "gone"].into_iter().for_each(|user| world.has(user, "pw"));
        ["odd", "changed", "gone", "one", "two", "three", "four"].into_iter().for_each(is_let_in);
        assert_eq!((failed(), server.metrics().sum("turnpike_store_up", "")), (before, 1));
        row.note(
            "invalid rows logged; a malformed key opened nothing; an invalid rule left all rules unchanged; new users served; users \
             with a changed or missing key refused at their next lookup (after 1 s)",
        );
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// One user has an invalid key, one has another user's key, and one is deleted.
fn changed_users_take_effect(world: &World, server: &Server) {
    world.sql(&format!("INSERT INTO turnusers_lt VALUES ('{REALM}', 'odd', repeat('z', 128))"));
    let (since, found) = (server.lines().len(), queries(server, "found"));
    assert_eq!(server.answers("odd", "pw"), Some(401));
    assert!(queries(server, "found") > found, "the row has been read");
    let told = format!(
        "the key of user \"odd\" in realm \"{REALM}\" does not have 32, 64 or 96 hex digits; the user cannot authenticate"
    );
    within(SOON, "the log names the key", || says(server, since, &told));
    world.has("changed", "another");
    world.sql("DELETE FROM turnusers_lt WHERE name = 'gone'");
    for user in ["changed", "gone"] {
        within(SOON, &format!("{user} is refused"), || server.answers(user, "pw") == Some(401));
    }
    assert_eq!(server.answers("changed", "another"), None);
}

/// Adds an invalid rule for a while: it is logged, and other new rules are not applied.
fn odd_rule(world: &World, server: &Server, [comes, goes, told]: [&str; 3], stranger: &str) {
    const LONG_ENOUGH: Duration = Duration::from_millis(2_500);
    let since = server.lines().len();
    world.sql(comes);
    within(SOON, told, || {
        let lines = &server.lines()[since..];
        lines.iter().any(|line| line.contains(told) && line.contains("the previous rules stay in effect"))
    });
    world.sql(NOBODY_NEW[0]);
    let begun = Instant::now();
    while begun.elapsed() < LONG_ENOUGH {
        assert_eq!(server.answers(stranger, "pw"), None, "{stranger}, under the previous rules");
        thread::sleep(Duration::from_millis(50));
    }
    world.sql(NOBODY_NEW[1]);
    world.sql(goes);
    within(SOON, "the rules are read again", || says(server, since, "can be read again"));
}

fn says(server: &Server, since: usize, words: &str) -> bool {
    server.lines()[since..].iter().any(|line| line.contains(words))
}
