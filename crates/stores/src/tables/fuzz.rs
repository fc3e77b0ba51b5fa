//! Fuzz target: arbitrary rows in coturn's tables and our own, in an in-memory SQLite.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
};

use rusqlite::{Connection, params_from_iter};
use turnpike_testkit::fuzz::{self, Input};
use turnpike_turn::ip_range::IpRange;

use super::*;
use crate::{
    PeerRanges,
    fuzz::{MOST_ROWS, Word, edits, is_told, runtime, says_nothing_private, seeds},
    sqlite,
};

/// Tables with their columns and the kind of text in each.
const COLUMNS: [(&str, &[(&str, Word)]); 10] = [
    ("turnusers_lt", &[("realm", Word::Realm), ("name", Word::User), ("hmackey", Word::Keys)]),
    ("turn_secret", &[("realm", Word::Realm), ("value", Word::Secret)]),
    ("allowed_peer_ip", &[("realm", Word::Realm), ("ip_range", Word::Range)]),
    ("denied_peer_ip", &[("realm", Word::Realm), ("ip_range", Word::Range)]),
    ("turn_origin_to_realm", &[("origin", Word::Origin), ("realm", Word::Realm)]),
    ("turn_realm_option", &[("realm", Word::Realm), ("opt", Word::Limit), ("value", Word::Number)]),
    (
        "oauth_key",
        &[
            ("kid", Word::Kid),
            ("ikm_key", Word::TokenKey),
            ("timestamp", Word::Number),
            ("lifetime", Word::Number),
            ("as_rs_alg", Word::Algorithm),
            ("realm", Word::Realm),
        ],
    ),
    ("admin_user", &[("name", Word::User), ("realm", Word::Realm), ("password", Word::Keys)]),
    (
        "turnpike_secret",
        &[
            ("realm", Word::Realm),
            ("value", Word::Secret),
            ("signs_since", Word::Number),
            ("counts_until", Word::Number),
        ],
    ),
    (
        "turnpike_api_key",
        &[
            ("name", Word::ApiKey),
            ("sha256", Word::Hash),
            ("realm", Word::Realm),
            ("max_ttl", Word::Number),
            ("rate", Word::Number),
        ],
    ),
];
/// Number of coturn's tables in [`COLUMNS`].
const COTURNS: usize = 8;

struct Memory(Mutex<Connection>);

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.0.lock().expect("the lock is not poisoned")
    }
}

impl Sql for Memory {
    async fn rows(&self, statement: &'static str, values: &[&str]) -> Result<Vec<Row>, StoreError> {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        sqlite::read_rows(&self.lock(), statement, &values).map_err(told)
    }

    async fn change(&self, change: TableChange<'_>) -> Result<Vec<u64>, StoreError> {
        sqlite::change_all(&mut self.lock(), &change.to_owned()).map_err(told)
    }

    async fn columns(&self) -> Result<Vec<Row>, StoreError> {
        sqlite::read_rows(&self.lock(), sqlite::COLUMNS, &[]).map_err(told)
    }

    fn is_small(&self) -> bool {
        true
    }

    fn name(&self) -> &str {
        "memory"
    }
}

fn told(error: rusqlite::Error) -> StoreError {
    StoreError::new("memory", StoreFault::Other, error)
}

type Stored = (usize, Row);

#[test]
fn sql_rows() {
    let runtime = runtime();
    fuzz::target("sql_rows", seeds, |bytes| _ = runtime.block_on(check(bytes)));
}

#[test]
fn row_seeds_include_valid_and_invalid_ones() {
    let runtime = runtime();
    let read: Vec<bool> = seeds().iter().map(|seed| runtime.block_on(check(seed))).collect();
    let good = read.iter().filter(|is_read| **is_read).count();
    assert!((5..read.len() - 5).contains(&good), "{good} of {}", read.len());
}

async fn check(bytes: &[u8]) -> bool {
    let mut input = Input::new(bytes);
    let how = input.byte();
    let (has_own, well) = (how & 1 == 0, how & 2 == 0);
    let drawn: Vec<Stored> = (0..input.below(MOST_ROWS)).map(|_| row(&mut input, has_own, well)).collect();
    let (tables, rows) = filled(has_own, drawn);
    let texts: Vec<(Word, String)> = rows.iter().flat_map(texts).collect();
    // Leading and trailing spaces are ignored when the rows are read.
    let exact = texts.iter().all(|(_, text)| text.trim() == text);

    let read = tables.rules().await;
    // The order of rows must not matter, unless two rows differ only in leading or trailing spaces.
    let (turned, _) = filled(has_own, rows.iter().rev().cloned());
    match (&read, turned.rules().await) {
        (Ok(rules), Ok(other)) => assert!(!exact || *rules == other, "{rules:?}, {other:?}"),
        (Err(error), Err(_)) => is_told(error, &[StoreFault::Row], &texts),
        (_, other) => panic!("{read:?}, {other:?}"),
    }
    if let Ok(rules) = &read {
        has_all(rules, &rows);
        says_nothing_private(&format!("{rules:?}"), &texts);
        if exact {
            secrets_are_those_of_their_realms(&tables, rules, &rows).await;
        }
    }
    users_are_found(&tables, &rows).await;
    edits(&tables, &mut input, exact).await;
    read.is_ok()
}

fn row(input: &mut Input<'_>, has_own: bool, well: bool) -> Stored {
    let tables = if has_own { COLUMNS.len() } else { COTURNS };
    let table = usize::from(input.byte()) % tables;
    (table, COLUMNS[table].1.iter().map(|(_, word)| word.draw(input, well)).collect())
}

/// A database with these rows, and the rows that it kept: if two have the same key, only the first.
fn filled(has_own: bool, rows: impl IntoIterator<Item = Stored>) -> (CoturnTables<Memory>, Vec<Stored>) {
    let connection = Connection::open_in_memory().expect("memory");
    connection.execute_batch(sqlite::TABLES).expect("coturn's tables");
    for (_, create) in OWN_TABLES.iter().filter(|_| has_own) {
        connection.execute(create, []).expect("our table");
    }
    let is_kept = |(table, row): &Stored| {
        let (table, columns) = COLUMNS[*table];
        let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
        let marks = vec!["?"; names.len()].join(", ");
        let insert = format!("insert or ignore into {table} ({}) values ({marks})", names.join(", "));
        connection.execute(&insert, params_from_iter(row)).expect("every column accepts text") == 1
    };
    let kept = rows.into_iter().filter(is_kept).collect();
    (CoturnTables::new(Memory(Mutex::new(connection))), kept)
}

fn texts((table, row): &Stored) -> impl Iterator<Item = (Word, String)> {
    let words = COLUMNS[*table].1.iter().map(|(_, word)| *word);
    words.zip(row).filter_map(|(word, text)| Some((word, text.clone()?)))
}

fn of<'r>(rows: &'r [Stored], wanted: &str) -> impl Iterator<Item = &'r Row> {
    let table = COLUMNS.iter().position(|(table, _)| *table == wanted).expect("a table");
    rows.iter().filter(move |(of, _)| *of == table).map(|(_, row)| row)
}

fn has_all(rules: &Rules, rows: &[Stored]) {
    let ranges = |of: fn(&PeerRanges) -> &Vec<IpRange>| -> usize {
        let realms = rules.realms.values().map(|realm| &realm.peers);
        realms.chain([&rules.peers]).map(|peers| of(peers).len()).sum()
    };
    assert_eq!(ranges(|peers| &peers.deny), of(rows, "denied_peer_ip").count());
    assert_eq!(ranges(|peers| &peers.allow), of(rows, "allowed_peer_ip").count());
    let is_some = |row: &&Row| field(row, 1).is_some_and(|secret| !secret.trim().is_empty());
    let secrets: usize = rules.secrets.values().map(|secrets| secrets.len()).sum();
    assert_eq!(secrets, of(rows, "turn_secret").filter(is_some).count());
    assert!(rules.ignored.len() <= rows.len() + 1, "{:?}", rules.ignored);
    for row in of(rows, "turn_realm_option") {
        let realm = field(row, 0).unwrap_or_default().trim();
        assert!(rules.realms.get(realm).is_some_and(|realm| realm.named), "{realm:?} has an option");
    }
}

async fn secrets_are_those_of_their_realms(tables: &CoturnTables<Memory>, rules: &Rules, rows: &[Stored]) {
    for realm in of(rows, "turn_secret").filter_map(|row| field(row, 0)) {
        // Secrets of the null realm and the empty realm are merged under an empty name.
        let is_both = realm.is_empty() && of(rows, "turn_secret").any(|row| field(row, 0).is_none());
        let found = tables.secrets(realm).await.expect("all rows are readable");
        let expected = rules.secrets.get(realm).map(|secrets| secrets.to_vec()).unwrap_or_default();
        assert!(is_both || found == expected, "{realm:?}: {found:?}, {expected:?}");
    }
}

async fn users_are_found(tables: &CoturnTables<Memory>, rows: &[Stored]) {
    let mut expected = BTreeSet::new();
    for row in of(rows, "turnusers_lt") {
        let (Some(realm), Some(name)) = (field(row, 0), field(row, 1)) else { continue };
        let keys = field(row, 2).map(|digits| UserKeys::from_hex(digits).unwrap_or_default());
        assert_eq!(tables.user(realm, name).await.expect("an answer"), keys);
        assert_eq!(tables.user(realm, &format!("{name} nobody")).await.expect("an answer"), None);
        if (realm, name) > ("", "") {
            expected.insert((realm.to_owned(), name.to_owned()));
        }
    }
    let listed = tables.users(None, None).await.expect("an answer");
    let listed: Vec<_> = listed.into_iter().map(|user| (user.realm, user.name)).collect();
    assert!(listed.iter().eq(&expected), "{listed:?}, {expected:?}");
    if let [.., before, last] = &listed[..] {
        let after = UserRow { realm: before.0.clone(), name: before.1.clone(), keys: "" };
        let rest = tables.users(None, Some(&after)).await.expect("an answer");
        assert!(matches!(&rest[..], [user] if (&user.realm, &user.name) == (&last.0, &last.1)));
    }
}
