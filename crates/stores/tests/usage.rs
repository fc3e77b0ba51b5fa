//! The usage ledger in SQLite, PostgreSQL and MariaDB.

use std::path::PathBuf;

use turnpike_stores::{
    DAY, HOUR, StoreAddress, UsageAccount, UsageAmount, UsageBatch, UsageBy, UsageHour, UsageQuery, UsageRun,
    UsageStore, UsageSum,
};

use crate::support::{Kind, World, on};

/// 2026-11-30, 18:00.
const NOW: u64 = 1_796_061_600;

struct Ledger {
    store: UsageStore,
    file: Option<PathBuf>,
}

fn each(test: impl Fn(&World, &Ledger)) {
    for kind in [Kind::Sqlite, Kind::Postgres, Kind::Mariadb] {
        on(kind, |world| {
            let file = world.file.as_ref().map(|file| file.with_extension("usage"));
            let address: StoreAddress = world.url.parse().expect("an address");
            let _inside = world.runtime.enter();
            let store = UsageStore::new(Some(&address), file.as_deref()).expect("a place");
            test(world, &Ledger { store, file });
        });
    }
}

fn run(id: &str, node: &str) -> UsageRun {
    UsageRun { id: id.to_owned(), node: node.to_owned(), started: NOW - 100 }
}

fn account(user: &str) -> UsageAccount {
    UsageAccount { realm: "example.org".into(), user: user.into(), ..UsageAccount::default() }
}

fn amount(bytes: u64) -> UsageAmount {
    UsageAmount {
        allocations: 1,
        lived_ms: 1500,
        to_peer: (bytes / 100, bytes),
        to_client: (1, 7),
        peak_bps: bytes,
    }
}

fn batch(number: u64, begins: u64, rows: Vec<(UsageAccount, UsageAmount)>) -> UsageBatch {
    UsageBatch { number, hours: vec![UsageHour { begins, rows }], at: NOW, is_idle: false, is_last: false }
}

fn query(by: UsageBy) -> UsageQuery {
    UsageQuery { by, since: NOW - 40 * DAY, until: NOW + HOUR, only: Default::default() }
}

fn by_user(world: &World, ledger: &Ledger) -> Vec<(String, u64)> {
    let sums = world.wait(ledger.store.sums(&query(UsageBy::User))).expect("an answer");
    sums.into_iter().map(|sum| (sum.account.user.into(), sum.amount.to_peer.1)).collect()
}

#[test]
fn a_batch_counts_once_even_if_it_is_sent_again() {
    each(|world, ledger| {
        assert_eq!(by_user(world, ledger), [], "an empty ledger");
        let run = run("one", "a");
        let first = batch(1, NOW, vec![(account("alice"), amount(1000)), (account("bob"), amount(300))]);
        let second = batch(2, NOW, vec![(account("alice"), amount(500))]);
        for batch in [&first, &first, &second, &first, &second] {
            world.wait(ledger.store.add(&run, batch)).expect("written");
        }
        assert_eq!(by_user(world, ledger), [("alice".to_owned(), 1500), ("bob".to_owned(), 300)]);
        let sums = world.wait(ledger.store.sums(&query(UsageBy::Hour))).expect("an answer");
        let expected = UsageSum {
            begins: Some(NOW),
            amount: UsageAmount {
                allocations: 3,
                lived_ms: 4500,
                to_peer: (18, 1800),
                to_client: (3, 21),
                peak_bps: 1000,
            },
            ..UsageSum::default()
        };
        assert_eq!(sums, [expected]);
    });
}

#[test]
fn nodes_and_processes_on_one_ledger_add_up() {
    each(|world, ledger| {
        for (id, node, bytes) in [("one", "a", 1), ("two", "a", 10), ("three", "b", 100)] {
            let batch = batch(1, NOW, vec![(account("alice"), amount(bytes))]);
            world.wait(ledger.store.add(&run(id, node), &batch)).expect("written");
        }
        assert_eq!(by_user(world, ledger), [("alice".to_owned(), 111)]);
        let sums = world.wait(ledger.store.sums(&query(UsageBy::Node))).expect("an answer");
        let nodes: Vec<_> = sums.iter().map(|sum| (sum.node.as_str(), sum.amount.to_peer.1)).collect();
        assert_eq!(nodes, [("b", 100), ("a", 11)]);
    });
}

#[test]
fn usage_is_grouped_by_key_identifier_realm_and_day() {
    each(|world, ledger| {
        let of = |realm: &str, key: &str, identifier: &str| UsageAccount {
            realm: realm.into(),
            user: "u".into(),
            key: key.into(),
            identifier: identifier.into(),
        };
        let rows = vec![
            (of("r", "shop", "x"), amount(1)),
            (of("r", "shop", "y"), amount(2)),
            (of("s", "", "x"), amount(4)),
        ];
        world.wait(ledger.store.add(&run("one", "a"), &batch(1, NOW, rows))).expect("written");
        let yesterday = batch(2, NOW - DAY, vec![(of("s", "", ""), amount(8))]);
        world.wait(ledger.store.add(&run("one", "a"), &yesterday)).expect("written");
        let sums = |by, label: fn(&UsageSum) -> String| -> Vec<(String, u64)> {
            let sums = world.wait(ledger.store.sums(&query(by))).expect("an answer");
            sums.iter().map(|sum| (label(sum), sum.amount.to_peer.1)).collect()
        };
        let pair = |name: &str, bytes| (name.to_owned(), bytes);
        assert_eq!(sums(UsageBy::Key, |sum| sum.account.key.to_string()), [pair("", 12), pair("shop", 3)]);
        assert_eq!(
            sums(UsageBy::Identifier, |sum| sum.account.identifier.to_string()),
            [pair("x", 5), pair("", 8), pair("y", 2)],
            "ordered by both directions"
        );
        assert_eq!(sums(UsageBy::Realm, |sum| sum.account.realm.to_string()), [pair("s", 12), pair("r", 3)]);
        let midnight = NOW - NOW % DAY;
        assert_eq!(
            sums(UsageBy::Day, |sum| sum.begins.unwrap_or_default().to_string()),
            [pair(&(midnight - DAY).to_string(), 8), pair(&midnight.to_string(), 7)]
        );
        let only = ["", "", "shop", "", ""].map(str::to_owned);
        let wanted = UsageQuery { only, ..query(UsageBy::Identifier) };
        assert_eq!(world.wait(ledger.store.sums(&wanted)).expect("an answer").len(), 2);
        // A period that begins and ends within a day adds hours; whole days come from the sums of days.
        let wanted = UsageQuery { since: NOW - DAY, until: NOW, ..query(UsageBy::Realm) };
        assert_eq!(world.wait(ledger.store.sums(&wanted)).expect("an answer")[0].amount.to_peer.1, 8);
    });
}

#[test]
fn hostile_names_are_stored_as_they_are() {
    let long = "ü".repeat(250);
    let names =
        ["a'b", "a\"b", "a,b;c", "=1+1", "a\tb\r\nc\u{1}", "A", "a", "a ", "\u{1f600}", "\\", long.as_str()];
    each(|world, ledger| {
        let rows = names.iter().map(|name| (account(name), amount(100))).collect();
        world.wait(ledger.store.add(&run("one", "a"), &batch(1, NOW, rows))).expect("written");
        let mut found: Vec<String> = by_user(world, ledger).into_iter().map(|(name, _)| name).collect();
        found.sort_unstable();
        let mut expected = names.map(str::to_owned);
        expected.sort_unstable();
        // MariaDB compares without trailing spaces, so that "a" and "a " are one group.
        if world.kind == Kind::Mariadb {
            assert_eq!(found.len(), expected.len() - 1);
        } else {
            assert_eq!(found, expected);
        }
    });
}

#[test]
fn a_killed_run_is_a_gap_and_a_stopped_or_idle_one_is_not() {
    each(|world, ledger| {
        let rows = || vec![(account("alice"), amount(1))];
        let write = |run: &UsageRun, number, is_idle, is_last| {
            let batch = UsageBatch { is_idle, is_last, ..batch(number, NOW, rows()) };
            world.wait(ledger.store.add(run, &batch)).expect("written");
        };
        let gaps = |now| {
            let gaps = world.wait(ledger.store.gaps(NOW - DAY, NOW + DAY, now)).expect("an answer");
            gaps.into_iter().map(|gap| (gap.node, gap.started, gap.last)).collect::<Vec<_>>()
        };
        write(&run("stopped", "a"), 1, false, false);
        write(&run("stopped", "a"), 2, true, true);
        write(&run("idle", "b"), 1, true, false);
        write(&run("killed", "c"), 1, false, false);
        assert_eq!(gaps(NOW + 5), [], "it may still be running");
        assert_eq!(gaps(NOW + 60), [("c".to_owned(), NOW - 100, NOW)]);
        let again = UsageRun { started: NOW + 40, ..run("again", "b") };
        write(&again, 1, true, true);
        assert_eq!(gaps(NOW + 60).len(), 2, "the idle run of b was replaced without a stop");
        write(&run("killed", "c"), 2, false, true);
        assert_eq!(gaps(NOW + 60).len(), 1, "it was only late");
    });
}

#[test]
fn old_hours_and_days_are_removed() {
    each(|world, ledger| {
        for (number, begins) in (1..).zip([NOW - 30 * DAY, NOW - 2 * DAY, NOW]) {
            let batch = batch(number, begins, vec![(account("alice"), amount(1))]);
            world.wait(ledger.store.add(&run("one", "a"), &batch)).expect("written");
        }
        world.wait(ledger.store.forget(NOW - DAY, NOW - 10 * DAY)).expect("written");
        let count = |by| world.wait(ledger.store.sums(&query(by))).expect("an answer").len();
        assert_eq!((count(UsageBy::Hour), count(UsageBy::Day)), (1, 2));
    });
}

#[test]
fn volumes_add_up_nodes_and_days_of_a_period() {
    each(|world, ledger| {
        let midnight = NOW - NOW % DAY;
        let of = |realm: &str, user: &str, key: &str, identifier: &str| UsageAccount {
            realm: realm.into(),
            user: user.into(),
            key: key.into(),
            identifier: identifier.into(),
        };
        let period = midnight - DAY..midnight + DAY;
        let volumes = |by, least, listed: &[UsageAccount]| {
            let sums = world.wait(ledger.store.volumes(by, &period, least, listed)).expect("an answer");
            sums
        };
        assert_eq!(volumes(UsageBy::User, 0, &[of("r", "alice", "", "")]), [], "an empty ledger");
        let add = |run: &UsageRun, number, begins, account, bytes| {
            let rows = vec![(account, amount(bytes))];
            world.wait(ledger.store.add(run, &batch(number, begins, rows))).expect("written");
        };
        let (a, b) = (run("one", "a"), run("two", "b"));
        add(&a, 1, NOW, of("r", "alice", "", ""), 993);
        add(&b, 1, NOW - DAY, of("r", "alice", "shop", "x"), 2993);
        add(&b, 2, NOW - 2 * DAY, of("r", "alice", "shop", "x"), 5000);
        add(&b, 3, NOW, of("s", "alice", "shop", ""), 93);
        add(&b, 4, NOW, of("s", "d'arc\"", "", ""), 193);
        let (alice, arc) = (of("r", "alice", "", ""), of("s", "d'arc\"", "", ""));
        assert_eq!(volumes(UsageBy::User, 1000, &[]), [(alice.clone(), 4000)]);
        assert_eq!(
            volumes(UsageBy::User, 1000, &[arc.clone(), of("s", "eve", "", "")]),
            [(alice, 4000), (arc, 200)]
        );
        assert_eq!(volumes(UsageBy::Key, 1, &[]), [(of("", "", "shop", ""), 3100)]);
        assert_eq!(volumes(UsageBy::Key, 9999, &[of("", "", "shop", "")]).len(), 1);
        let (r, s) = (of("r", "", "", ""), of("s", "", "", ""));
        assert_eq!(volumes(UsageBy::Realm, 9999, &[s.clone()]), [(s, 300)]);
        assert_eq!(volumes(UsageBy::Realm, 1000, &[]), [(r, 4000)]);
    });
}

#[test]
fn a_notice_is_announced_once() {
    each(|world, ledger| {
        let announce = |texts: &[&str]| {
            let notices: Vec<_> = texts.iter().map(|text| ((*text).to_owned(), NOW)).collect();
            world.wait(ledger.store.announce(&notices)).expect("written")
        };
        assert_eq!(announce(&["a", "b"]), [true, true]);
        assert_eq!(announce(&["b", "c", "a"]), [false, true, false]);
        world.wait(ledger.store.forget(0, NOW + 1)).expect("written");
        assert_eq!(announce(&["a"]), [true]);
    });
}

/// Measures queries of a ledger with a million rows; run with `--ignored --nocapture` in a release build.
#[test]
#[ignore = "a measurement"]
fn queries_of_a_million_rows() {
    const ACCOUNTS: u64 = 1_200;
    each(|world, ledger| {
        let names: Vec<UsageAccount> =
            (0..ACCOUNTS).map(|n| account(&format!("user-{n}@example.org"))).collect();
        let first = NOW - 35 * DAY;
        for hour in 0..(35 * 24) {
            let rows = names.iter().map(|name| (name.clone(), amount(1000))).collect();
            world
                .wait(ledger.store.add(&run("one", "a"), &batch(hour + 1, first + hour * HOUR, rows)))
                .expect("written");
        }
        println!(
            "{:?}, {:?}",
            world.kind,
            ledger.file.as_ref().and_then(|file| file.metadata().ok()).map(|file| file.len())
        );
        for (name, by, days) in [
            ("users of 30 days", UsageBy::User, 30),
            ("users of a day", UsageBy::User, 1),
            ("realms of 30 days", UsageBy::Realm, 30),
            ("hours of a day", UsageBy::Hour, 1),
            ("hours of 7 days", UsageBy::Hour, 7),
            ("days of 30 days", UsageBy::Day, 30),
        ] {
            let wanted = UsageQuery { since: NOW - days * DAY, ..query(by) };
            let begun = std::time::Instant::now();
            let groups = world.wait(ledger.store.sums(&wanted)).expect("an answer").len();
            println!("{name}: {groups} groups in {:?}", begun.elapsed());
        }
        let (month, begun) = (first..NOW, std::time::Instant::now());
        let volumes = ledger.store.volumes(UsageBy::User, &month, u64::MAX >> 1, &names);
        let volumes = world.wait(volumes).expect("an answer").len();
        println!("volumes of a month: {volumes} users in {:?}", begun.elapsed());
    });
}
