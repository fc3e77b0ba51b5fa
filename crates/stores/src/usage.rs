//! Usage ledger in a SQL database: traffic of each account by hour and by day. A batch of increases is
//! added in one transaction together with its number, so that it counts once even if the answer to COMMIT is
//! lost and the batch is sent again.
//!
//! ```text
//!  turnpike_usage      (span, begins, account, node) → names and sums; span is 3600 or 86400 seconds
//!  turnpike_usage_run  run → number of its last batch, last write; shows gaps after a crash
//!  turnpike_usage_notice  announced notices of volume quotas
//! ```

mod statements;

use std::{
    ops::Range,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use sha2::{Digest as _, Sha256};

use crate::{
    SqliteUse, StoreAddress, StoreError, StoreFault,
    sql::{Mysql, Postgres},
    sqlite::Sqlite,
    tables::{Row, Sql},
};
use statements::{SQLITE_TABLES, Statements};

pub const HOUR: u64 = 3600;
pub const DAY: u64 = 86_400;
/// Seconds without a write after which a run counts as killed, if it had open allocations or the node has run
/// again since.
const SILENT: u64 = 15;
/// One connection writes; the other one answers queries.
const CONNECTIONS: usize = 2;

/// Owner of usage, as far as known; unknown parts are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UsageAccount {
    pub realm: Box<str>,
    pub user: Box<str>,
    /// Name of the API key that issued the credential.
    pub key: Box<str>,
    /// Identifier that the application chose for its customer.
    pub identifier: Box<str>,
}

impl UsageAccount {
    /// Key of the account in the tables. Names are too long for an index of MySQL, and its comparisons ignore
    /// trailing spaces.
    fn id(&self) -> String {
        let mut hash = Sha256::new();
        for part in [&self.realm, &self.user, &self.key, &self.identifier] {
            hash.update(part.len().to_be_bytes());
            hash.update(part.as_bytes());
        }
        hex::encode(&hash.finalize()[..16])
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageAmount {
    /// Allocations that began.
    pub allocations: u64,
    /// Total duration of allocations.
    pub lived_ms: u64,
    /// Datagrams and their payload bytes.
    pub to_peer: (u64, u64),
    pub to_client: (u64, u64),
    /// Highest rate between two reports, both directions together, in bits per second.
    pub peak_bps: u64,
}

impl UsageAmount {
    pub fn add(&mut self, more: &Self) {
        self.allocations += more.allocations;
        self.lived_ms += more.lived_ms;
        for (sum, more) in [(&mut self.to_peer, more.to_peer), (&mut self.to_client, more.to_client)] {
            sum.0 += more.0;
            sum.1 += more.1;
        }
        self.peak_bps = self.peak_bps.max(more.peak_bps);
    }

    /// Values in the order of the columns.
    fn values(&self) -> [u64; 7] {
        let Self { allocations, lived_ms, to_peer, to_client, peak_bps } = *self;
        [allocations, lived_ms, to_peer.0, to_peer.1, to_client.0, to_client.1, peak_bps]
    }
}

/// Part of a batch that falls into one hour.
#[derive(Clone, Debug, Default)]
pub struct UsageHour {
    /// Unix time at which the hour begins.
    pub begins: u64,
    /// No account appears twice.
    pub rows: Vec<(UsageAccount, UsageAmount)>,
}

/// Increases that are added together or not at all.
#[derive(Clone, Debug, Default)]
pub struct UsageBatch {
    /// 1 for the first batch of a run, then one more for each batch.
    pub number: u64,
    pub hours: Vec<UsageHour>,
    /// Unix time.
    pub at: u64,
    /// The run has no open allocations, so that nothing is lost if it ends without another batch.
    pub is_idle: bool,
    /// The run ends with this batch.
    pub is_last: bool,
}

/// A running process, as the writer of batches.
#[derive(Clone, Debug)]
pub struct UsageRun {
    /// Random; a restarted process is another run.
    pub id: String,
    pub node: String,
    /// Unix time.
    pub started: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageBy {
    User,
    Key,
    Identifier,
    Realm,
    Node,
    Hour,
    Day,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageQuery {
    pub by: UsageBy,
    /// Unix times; rounded to hours.
    pub since: u64,
    pub until: u64,
    /// Realm, user, key, identifier and node; an empty text matches everything.
    pub only: [String; 5],
}

/// Sum of a group; labels that are not part of the group are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSum {
    pub account: UsageAccount,
    pub node: String,
    /// Beginning of the hour or day, in Unix time.
    pub begins: Option<u64>,
    pub amount: UsageAmount,
}

/// A run that ended without its last batch; up to ten seconds of usage are missing after `last`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageGap {
    pub node: String,
    /// Unix times of the run's start and its last write.
    pub started: u64,
    pub last: u64,
}

pub struct UsageStore(Kind);

enum Kind {
    Sqlite(Ledger<Sqlite>),
    Postgres(Ledger<Postgres>),
    Mysql(Ledger<Mysql>),
}

macro_rules! each {
    ($self:ident, $ledger:ident => $question:expr) => {
        match &$self.0 {
            Kind::Sqlite($ledger) => $question,
            Kind::Postgres($ledger) => $question,
            Kind::Mysql($ledger) => $question,
        }
    };
}

impl UsageStore {
    /// The ledger in the users' database, or in `file` if that is not a SQL server: each write to a
    /// SQLite file would make the server read all users' rules again. `None` without a place. Does not connect
    /// yet; must be called on the runtime that does the work.
    #[must_use]
    pub fn new(store: Option<&StoreAddress>, file: Option<&Path>) -> Option<Self> {
        Some(Self(match store {
            Some(address @ StoreAddress::Postgres(server)) => {
                Kind::Postgres(Ledger::new(Postgres::new(server, CONNECTIONS, address.to_string())))
            }
            Some(address @ StoreAddress::Mysql(server)) => {
                Kind::Mysql(Ledger::new(Mysql::new(server, CONNECTIONS, address.to_string())))
            }
            Some(StoreAddress::Sqlite(_) | StoreAddress::Redis(_) | StoreAddress::Http(_)) | None => {
                let file = file?;
                let name = StoreAddress::Sqlite(file.to_owned()).to_string();
                Kind::Sqlite(Ledger::new(Sqlite::with_tables(file, SqliteUse::Own, SQLITE_TABLES, name)))
            }
        }))
    }

    /// Address of the database, without a password.
    #[must_use]
    pub fn name(&self) -> &str {
        each!(self, ledger => ledger.sql.name())
    }

    /// Adds a batch, unless it or a later one of the run has been added already.
    pub async fn add(&self, run: &UsageRun, batch: &UsageBatch) -> Result<(), StoreError> {
        each!(self, ledger => ledger.add(run, batch).await)
    }

    /// Sums of at most 100,000 groups, the largest first; hours and days in their order.
    pub async fn sums(&self, query: &UsageQuery) -> Result<Vec<UsageSum>, StoreError> {
        each!(self, ledger => ledger.sums(query).await)
    }

    /// Runs that have ended without their last batch between two Unix times, the latest first.
    pub async fn gaps(&self, since: u64, until: u64, now: u64) -> Result<Vec<UsageGap>, StoreError> {
        each!(self, ledger => ledger.gaps(since, until.min(now.saturating_sub(SILENT))).await)
    }

    /// Bytes in whole days of a period by user, API key or realm: of the 20,000 subjects with the highest sums
    /// among those with at least `least` bytes and those `listed`.
    pub async fn volumes(
        &self,
        by: UsageBy,
        period: &Range<u64>,
        least: u64,
        listed: &[UsageAccount],
    ) -> Result<Vec<(UsageAccount, u64)>, StoreError> {
        each!(self, ledger => ledger.volumes(by, period, least, listed).await)
    }

    /// Stores notices, each a text and the beginning of its period. Returns true for each that was not stored yet,
    /// by this node or another.
    pub async fn announce(&self, notices: &[(String, u64)]) -> Result<Vec<bool>, StoreError> {
        each!(self, ledger => ledger.announce(notices).await)
    }

    /// Removes hours and days that begin before these Unix times.
    pub async fn forget(&self, hours: u64, days: u64) -> Result<(), StoreError> {
        each!(self, ledger => ledger.forget(hours, days).await)
    }
}

struct Ledger<S> {
    sql: S,
    /// The tables exist.
    is_ready: AtomicBool,
}

impl<S: Sql + Statements> Ledger<S> {
    fn new(sql: S) -> Self {
        Self { sql, is_ready: AtomicBool::new(false) }
    }

    async fn make_tables(&self) -> Result<(), StoreError> {
        if self.is_ready.load(Ordering::Relaxed) {
            return Ok(());
        }
        for create in S::TABLES {
            self.sql.change(vec![(*create, Vec::new())].into()).await?;
        }
        self.is_ready.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn add(&self, run: &UsageRun, batch: &UsageBatch) -> Result<(), StoreError> {
        self.make_tables().await?;
        let flag = |flag| if flag { "1" } else { "0" };
        let [started, at, number] = [run.started, batch.at, batch.number].map(|number| number.to_string());
        let mut parts = Vec::with_capacity(2 * batch.hours.len());
        for UsageHour { begins, rows } in &batch.hours {
            let rows = json(rows);
            for span in [HOUR, DAY] {
                parts.push((span.to_string(), (begins - begins % span).to_string(), rows.clone()));
            }
        }
        let mut statements = vec![(S::BEGIN_RUN, vec![&*run.id, &*run.node, &*started, &*at])];
        statements.extend(parts.iter().map(|(span, begins, rows)| {
            (S::ADD, vec![&**span, &**begins, &*run.node, &**rows, &*run.id, &*number])
        }));
        let [is_idle, is_last] = [batch.is_idle, batch.is_last].map(flag);
        statements.push((S::ADDED, vec![&*number, &*at, is_idle, is_last, &*run.id, &*number]));
        let added = self.sql.change(statements.into()).await;
        if added.as_ref().is_err_and(|error| error.fault == StoreFault::Schema) {
            // The tables may have been removed.
            self.is_ready.store(false, Ordering::Relaxed);
        }
        added.map(drop)
    }

    async fn sums(&self, query: &UsageQuery) -> Result<Vec<UsageSum>, StoreError> {
        let ranges = ranges(query).map(|time| time.to_string());
        let mut values: Vec<&str> = ranges.iter().map(String::as_str).collect();
        values.extend(query.only.iter().flat_map(|only| [only.as_str(); 2]));
        let rows = self.rows(S::SUMS[query.by as usize], &values).await?;
        Ok(rows.iter().map(sum).collect())
    }

    async fn gaps(&self, since: u64, until: u64) -> Result<Vec<UsageGap>, StoreError> {
        let (since, until) = (since.to_string(), until.to_string());
        let rows = self.rows(S::GAPS, &[&since, &until]).await?;
        let gap = |row: &Row| UsageGap {
            node: text(row, 0).to_owned(),
            started: number(row, 1),
            last: number(row, 2),
        };
        Ok(rows.iter().map(gap).collect())
    }

    async fn volumes(
        &self,
        by: UsageBy,
        period: &Range<u64>,
        least: u64,
        listed: &[UsageAccount],
    ) -> Result<Vec<(UsageAccount, u64)>, StoreError> {
        let name = |account: &UsageAccount| match by {
            UsageBy::Key => serde_json::json!([account.key]),
            UsageBy::Realm => serde_json::json!([account.realm]),
            _ => serde_json::json!([account.realm, account.user]),
        };
        let listed = serde_json::Value::Array(listed.iter().map(name).collect()).to_string();
        let [since, until, least] = [period.start, period.end, least].map(|number| number.to_string());
        let statement = S::VOLUMES[match by {
            UsageBy::Key => 1,
            UsageBy::Realm => 2,
            _ => 0,
        }];
        let rows = self.rows(statement, &[&since, &until, &least, &listed]).await?;
        let volume = |row: &Row| {
            let of = |index| text(row, index).into();
            let account = UsageAccount { realm: of(0), user: of(1), key: of(2), ..UsageAccount::default() };
            (account, number(row, 3))
        };
        Ok(rows.iter().map(volume).collect())
    }

    async fn announce(&self, notices: &[(String, u64)]) -> Result<Vec<bool>, StoreError> {
        self.make_tables().await?;
        let hash = |text: &str| hex::encode(&Sha256::digest(text)[..16]);
        let notices: Vec<_> = notices.iter().map(|(text, begins)| (hash(text), begins.to_string())).collect();
        let statements: Vec<_> =
            notices.iter().map(|(hash, begins)| (S::NOTICE, vec![&**hash, &**begins])).collect();
        let stored = self.sql.change(statements.into()).await?;
        Ok(stored.into_iter().map(|rows| rows > 0).collect())
    }

    async fn forget(&self, hours: u64, days: u64) -> Result<(), StoreError> {
        self.make_tables().await?;
        let (hours, days) = (hours.to_string(), days.to_string());
        let statements = vec![
            (S::FORGET, vec!["3600", hours.as_str()]),
            (S::FORGET, vec!["86400", days.as_str()]),
            (S::FORGET_RUNS, vec![days.as_str()]),
            (S::FORGET_NOTICES, vec![days.as_str()]),
        ];
        self.sql.change(statements.into()).await.map(drop)
    }

    /// A ledger without tables is empty.
    async fn rows(&self, statement: &'static str, values: &[&str]) -> Result<Vec<Row>, StoreError> {
        match self.sql.rows(statement, values).await {
            Err(error) if error.fault == StoreFault::Schema => Ok(Vec::new()),
            rows => rows,
        }
    }
}

/// Splits the time of a query into whole days, whose sums are already in the table, and hours before and after
/// them: the bounds of three ranges.
fn ranges(query: &UsageQuery) -> [u64; 6] {
    let UsageQuery { by, since, until, .. } = query;
    let (since, until) = (since - since % HOUR, until.next_multiple_of(HOUR));
    let (first, last) = (since.next_multiple_of(DAY), until - until % DAY);
    match by {
        UsageBy::Day => [since - since % DAY, until.next_multiple_of(DAY), 0, 0, 0, 0],
        UsageBy::Hour => [0, 0, since, until, 0, 0],
        _ if first < last => [first, last, since, first, last, until],
        _ => [0, 0, since, until, 0, 0],
    }
}

fn json(rows: &[(UsageAccount, UsageAmount)]) -> String {
    let row = |(account, amount): &(UsageAccount, UsageAmount)| {
        let UsageAccount { realm, user, key, identifier } = account;
        let [a, b, c, d, e, f, g] = amount.values();
        serde_json::json!([account.id(), realm, user, key, identifier, a, b, c, d, e, f, g])
    };
    serde_json::Value::Array(rows.iter().map(row).collect()).to_string()
}

fn text(row: &Row, index: usize) -> &str {
    row.get(index).and_then(Option::as_deref).unwrap_or_default()
}

fn number(row: &Row, index: usize) -> u64 {
    text(row, index).trim().parse().unwrap_or_default()
}

fn sum(row: &Row) -> UsageSum {
    let of = |index| text(row, index).into();
    UsageSum {
        account: UsageAccount { realm: of(0), user: of(1), key: of(2), identifier: of(3) },
        node: text(row, 4).to_owned(),
        begins: text(row, 5).trim().parse().ok(),
        amount: UsageAmount {
            allocations: number(row, 6),
            lived_ms: number(row, 7),
            to_peer: (number(row, 8), number(row, 9)),
            to_client: (number(row, 10), number(row, 11)),
            peak_bps: number(row, 12),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_days_of_a_query_are_read_as_days() {
        let of = |by, since, until| ranges(&UsageQuery { by, since, until, only: Default::default() });
        let (day, hour) = (DAY, HOUR);
        let expected = [day, 3 * day, 22 * hour, day, 3 * day, 3 * day + 2 * hour];
        assert_eq!(of(UsageBy::User, 22 * hour + 9, 3 * day + hour + 1), expected);
        assert_eq!(of(UsageBy::User, day + 1, day + 2), [0, 0, day, day + hour, 0, 0]);
        assert_eq!(of(UsageBy::Hour, 5, 3 * day), [0, 0, 0, 3 * day, 0, 0]);
        assert_eq!(of(UsageBy::Day, day + 5, 2 * day + 1), [day, 3 * day, 0, 0, 0, 0]);
    }

    #[test]
    fn accounts_with_shifted_names_differ() {
        let account = |user: &str, key: &str| UsageAccount {
            user: user.into(),
            key: key.into(),
            ..UsageAccount::default()
        };
        assert_ne!(account("ab", "c").id(), account("a", "bc").id());
        assert_eq!(account("ab", "c").id(), account("ab", "c").id());
    }
}
