//! coturn's tables (`schema.sql`) in any SQL database, and two tables of our own, which are created when
//! needed.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU8, Ordering},
};

use zeroize::Zeroizing;

use crate::{
    ApiKey, Backend, Edit, Existing, Rules, StoreError, StoreFault, StoredLimits, StoredSecret, UserKeys,
    UserRow,
    api_keys::ApiKeyRow,
    backend::PAGE,
    rules::{RulesReader, TokenKeyRow},
    secrets::latest_kept_end,
};

pub(crate) type Row = Vec<Option<String>>;

pub(crate) type BoundStatement<'a> = (&'static str, Vec<&'a str>);

#[derive(Clone, Debug)]
pub(crate) struct TableChange<'a> {
    pub(crate) statements: Vec<BoundStatement<'a>>,
    /// Stops without a change if the first statement finds rows.
    pub(crate) only_if_absent: bool,
}

impl<'a> From<Vec<BoundStatement<'a>>> for TableChange<'a> {
    fn from(statements: Vec<BoundStatement<'a>>) -> Self {
        Self { statements, only_if_absent: false }
    }
}

impl<'a> TableChange<'a> {
    pub(crate) fn to_owned(&self) -> OwnedChange {
        let owned = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let statements = self.statements.iter().map(|(statement, values)| (*statement, owned(values)));
        OwnedChange { statements: statements.collect(), only_if_absent: self.only_if_absent }
    }
}

pub(crate) struct OwnedChange {
    pub(crate) statements: Vec<(&'static str, Vec<String>)>,
    pub(crate) only_if_absent: bool,
}

impl OwnedChange {
    pub(crate) fn ends_after(&self, rows: &[u64]) -> bool {
        self.only_if_absent && rows.len() == 1 && rows[0] > 0
    }
}

pub(crate) fn is_query(statement: &str) -> bool {
    statement.starts_with("select")
}

pub(crate) trait Sql: Send + Sync + 'static {
    fn rows(
        &self,
        statement: &'static str,
        values: &[&str],
    ) -> impl Future<Output = Result<Vec<Row>, StoreError>> + Send;

    /// Runs statements in one serialized transaction. Returns the number of rows that each statement has
    /// changed or found.
    fn change(&self, change: TableChange<'_>) -> impl Future<Output = Result<Vec<u64>, StoreError>> + Send;

    fn columns(&self) -> impl Future<Output = Result<Vec<Row>, StoreError>> + Send;

    fn version(&self) -> impl Future<Output = Option<u64>> + Send {
        async { None }
    }

    fn pages(&self) -> [&'static str; 2] {
        [USERS, USERS_OF]
    }

    /// Returns true if there are few enough users to read all of them after each change.
    fn is_small(&self) -> bool {
        false
    }

    fn name(&self) -> &str;
}

pub(crate) struct CoturnTables<S> {
    sql: S,
    /// Result of the last check for our own tables.
    own: AtomicU8,
}

const NOT_LOOKED: u8 = 0;
const NOT_THERE: u8 = 1;
const THERE: u8 = 2;

const SCHEMA: &[(&str, &[&str])] = &[
    ("turnusers_lt", &["realm", "name", "hmackey"]),
    ("turn_secret", &["realm", "value"]),
    ("allowed_peer_ip", &["realm", "ip_range"]),
    ("denied_peer_ip", &["realm", "ip_range"]),
    ("turn_origin_to_realm", &["origin", "realm"]),
    ("turn_realm_option", &["realm", "opt", "value"]),
    ("oauth_key", &["kid", "ikm_key", "timestamp", "lifetime", "as_rs_alg", "realm"]),
];

/// Tables for data that does not fit into coturn's tables. Numbers are text; unset values are empty.
pub(crate) const OWN_TABLES: [(&str, &str); 2] = [
    (
        "turnpike_secret",
        "create table if not exists turnpike_secret (realm varchar(127), value varchar(256), signs_since varchar(20), \
         counts_until varchar(20), primary key (realm, value))",
    ),
    (
        "turnpike_api_key",
        "create table if not exists turnpike_api_key (name varchar(64), sha256 char(64), realm varchar(127), max_ttl varchar(10), \
         rate varchar(10), primary key (name))",
    ),
];

const MARKS_OF: &str = "select value, signs_since, counts_until from turnpike_secret where realm = ?";
const MARKS: &str = "select realm, value, signs_since, counts_until from turnpike_secret";
const REMOVE_MARK: &str = "delete from turnpike_secret where realm = ? and value = ?";
const ADD_MARK: &str =
    "insert into turnpike_secret (realm, value, signs_since, counts_until) values (?, ?, ?, ?)";
/// Sets the expiry in marks (rows of `turnpike_secret`) that have none or a later one. Compares numbers as
/// text: they have no leading zeros, so the longer one is greater.
const END_MARKS: &str = "update turnpike_secret set counts_until = ? where realm = ? and (counts_until is null or counts_until = '' or \
                         length(counts_until) > length(?) or (length(counts_until) = length(?) and counts_until > ?))";
/// Inserts a mark with an expiry for each secret that has no mark.
const MARK_OTHERS: &str = "insert into turnpike_secret (realm, value, signs_since, counts_until) \
                           select s.realm, s.value, '0', ? from turn_secret s where s.realm = ? and not exists \
                           (select 1 from turnpike_secret m where m.realm = s.realm and m.value = s.value)";
const API_KEY: &str = "select name from turnpike_api_key where name = ?";
const API_KEYS: &str = "select name, sha256, realm, max_ttl, rate from turnpike_api_key";
const REMOVE_API_KEY: &str = "delete from turnpike_api_key where name = ?";
const ADD_API_KEY: &str =
    "insert into turnpike_api_key (name, sha256, realm, max_ttl, rate) values (?, ?, ?, ?, ?)";

const USER: &str = "select name, hmackey from turnusers_lt where realm = ? and name = ?";
const SECRETS_OF: &str = "select value from turn_secret where realm = ?";
const SECRET: &str = "select value from turn_secret where realm = ? and value = ?";
const SECRETS: &str = "select realm, value from turn_secret";
const ALLOWED: &str = "select realm, ip_range from allowed_peer_ip";
const DENIED: &str = "select realm, ip_range from denied_peer_ip";
const ORIGINS: &str = "select origin, realm from turn_origin_to_realm";
const OPTIONS_OF: &str = "select opt from turn_realm_option where realm = ?";
const OPTIONS: &str = "select realm, opt, value from turn_realm_option";
// Selects numbers as text, in syntax that every database accepts.
const TOKEN_KEYS: &str = "select kid, ikm_key, cast(oauth_key.timestamp as char(20)), cast(lifetime as char(20)), as_rs_alg, \
                          realm from oauth_key";
const ADMIN_USERS: &str = "select cast(count(*) as char(20)) from admin_user";
/// Keys for a single algorithm have 32 digits (MD5) or 64 (SHA-256).
const WITHOUT_SHA256: &str = "select distinct realm from turnusers_lt where length(trim(hmackey)) < 64";
const USERS: &str = "select realm, name, hmackey from turnusers_lt where (realm, name) > (?, ?) and name is not null order by realm, name limit 1000";
const USERS_OF: &str =
    "select realm, name, hmackey from turnusers_lt where realm = ? and name > ? order by name limit 1000";

const REMOVE_USER: &str = "delete from turnusers_lt where realm = ? and name = ?";
const ADD_USER: &str = "insert into turnusers_lt (realm, name, hmackey) values (?, ?, ?)";
const REMOVE_SECRET: &str = "delete from turn_secret where realm = ? and value = ?";
const ADD_SECRET: &str = "insert into turn_secret (realm, value) values (?, ?)";
const REMOVE_OPTION: &str = "delete from turn_realm_option where realm = ? and opt = ?";
const ADD_OPTION: &str = "insert into turn_realm_option (realm, opt, value) values (?, ?, ?)";
const REMOVE_OPTIONS: &str = "delete from turn_realm_option where realm = ?";
const REMOVE_ORIGINS: &str = "delete from turn_origin_to_realm where realm = ?";
const REMOVE_ALLOWED: &str = "delete from allowed_peer_ip where realm = ?";
const REMOVE_DENIED: &str = "delete from denied_peer_ip where realm = ?";

impl<S: Sql> Backend for CoturnTables<S> {
    async fn user(&self, realm: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        let rows = match self.sql.rows(USER, &[realm, name]).await {
            // The column's character set cannot represent the name, so no row can have it. Clients choose
            // these names and must not be able to make the store look broken.
            Err(error) if error.fault == StoreFault::Text => return Ok(None),
            rows => rows?,
        };
        // MySQL compares names case-insensitively, but TURN does not: "ALICE" is a different user.
        let row = rows.into_iter().find(|row| field(row, 0) == Some(name));
        let Some(hmackey) = row.and_then(|mut row| row.pop()?) else { return Ok(None) };
        let hmackey = Zeroizing::new(hmackey);
        Ok(Some(UserKeys::from_hex(&hmackey).unwrap_or_else(|| {
            tracing::warn!("{}: {}", self.sql.name(), bad_key(realm, name));
            UserKeys::default()
        })))
    }

    async fn secrets(&self, realm: &str) -> Result<Vec<StoredSecret>, StoreError> {
        let mut reader = RulesReader::new(self.sql.name());
        for row in self.sql.rows(SECRETS_OF, &[realm]).await? {
            reader.secret(Some(realm), field(&row, 0));
        }
        if self.has_own_tables().await? {
            for row in self.sql.rows(MARKS_OF, &[realm]).await? {
                reader.mark(Some(realm), field(&row, 0), field(&row, 1), field(&row, 2))?;
            }
        }
        Ok(reader.finish().secrets.into_values().flat_map(|secrets| secrets.to_vec()).collect())
    }

    async fn rules(&self) -> Result<Rules, StoreError> {
        let name = self.sql.name();
        let all = self.check_schema().await?;
        let mut reader = RulesReader::new(name);
        for row in self.sql.rows(OPTIONS, &[]).await? {
            reader.option(field(&row, 0), field(&row, 1).unwrap_or_default().trim(), field(&row, 2))?;
        }
        for row in self.sql.rows(ORIGINS, &[]).await? {
            reader.origin(field(&row, 0), field(&row, 1));
        }
        for (denied, table, statement) in
            [(false, "allowed_peer_ip", ALLOWED), (true, "denied_peer_ip", DENIED)]
        {
            for row in self.sql.rows(statement, &[]).await? {
                reader.peer(denied, table, field(&row, 0), field(&row, 1))?;
            }
        }
        for row in self.sql.rows(SECRETS, &[]).await? {
            reader.secret(field(&row, 0), field(&row, 1));
        }
        for row in self.sql.rows(TOKEN_KEYS, &[]).await? {
            reader.token_key(TokenKeyRow {
                kid: field(&row, 0).unwrap_or_default(),
                key: field(&row, 1),
                timestamp: field(&row, 2),
                lifetime: field(&row, 3),
                algorithm: field(&row, 4),
                realm: field(&row, 5),
            })?;
        }
        if has_own(&all) {
            for row in self.sql.rows(MARKS, &[]).await? {
                reader.mark(field(&row, 0), field(&row, 1), field(&row, 2), field(&row, 3))?;
            }
            for row in self.sql.rows(API_KEYS, &[]).await? {
                let [name, hash, realm, max_ttl, rate] =
                    [0, 1, 2, 3, 4].map(|index| field(&row, index).unwrap_or_default());
                reader.api_key(&ApiKeyRow { name, hash, realm, max_ttl, rate });
            }
        }
        if all.contains_key("admin_user") {
            let rows = self.sql.rows(ADMIN_USERS, &[]).await?;
            let count = rows.first().and_then(|row| field(row, 0)).map_or("0", str::trim);
            if count != "0" {
                reader.ignore(format!(
                    "admin_user has users of coturn's web interface ({count}), which turnpike ignores"
                ));
            }
        }
        if self.sql.is_small() {
            let realms = self.sql.rows(WITHOUT_SHA256, &[]).await?.into_iter().flatten().flatten();
            reader.rules.md5_only = Some(realms.map(String::into_boxed_str).collect());
        }
        Ok(reader.finish())
    }

    async fn version(&self) -> Option<u64> {
        self.sql.version().await
    }

    async fn users(&self, realm: Option<&str>, after: Option<&UserRow>) -> Result<Vec<UserRow>, StoreError> {
        let [of_all, of_one] = self.sql.pages();
        let (last_realm, last_name) =
            after.map_or(("", ""), |user| (user.realm.as_str(), user.name.as_str()));
        let rows = match realm {
            Some(realm) => self.sql.rows(of_one, &[realm, last_name]).await?,
            None => self.sql.rows(of_all, &[last_realm, last_name]).await?,
        };
        debug_assert!(rows.len() <= PAGE);
        let user = |row: &Row| UserRow {
            realm: field(row, 0).unwrap_or_default().to_owned(),
            name: field(row, 1).unwrap_or_default().to_owned(),
            keys: field(row, 2).and_then(UserKeys::from_hex).unwrap_or_default().kinds(),
        };
        Ok(rows.iter().map(user).collect())
    }

    async fn apply(&self, edit: &Edit, existing: Existing) -> Result<bool, StoreError> {
        let changed = match edit {
            Edit::PutUser { realm, name, keys } => {
                let (user, hmackey) = (vec![realm.as_str(), name], keys.to_hex());
                let put = vec![(REMOVE_USER, user.clone()), (ADD_USER, vec![realm, name, &hmackey])];
                self.put((USER, user), put, existing).await?
            }
            Edit::RemoveUser { realm, name } => {
                match self.sql.change(vec![(REMOVE_USER, vec![realm.as_str(), name])].into()).await {
                    Err(error) if error.fault == StoreFault::Text => return Ok(false),
                    removed => removed?,
                }
            }
            Edit::AddSecret { realm, secret } => {
                let row = vec![realm.as_str(), secret.reveal()];
                let mut statements = self.without_secret(realm, secret.reveal()).await?;
                statements.push((ADD_SECRET, row.clone()));
                self.put((SECRET, row), statements, existing).await?
            }
            Edit::RemoveSecret { realm, secret } => {
                let statements = self.without_secret(realm, secret.reveal()).await?;
                self.sql.change(statements.into()).await?
            }
            Edit::RotateSecret { realm, secret, since, until } => {
                return self.rotate(realm, secret.reveal(), *since, *until).await;
            }
            Edit::PutApiKey(key) => self.put_api_key(key, existing).await?,
            Edit::RemoveApiKey { name } => {
                if !self.has_own_tables().await? {
                    return Ok(false);
                }
                self.sql.change(vec![(REMOVE_API_KEY, vec![name.as_str()])].into()).await?
            }
            Edit::PutRealm { realm, limits } => return self.put_realm(realm, *limits, existing).await,
            Edit::RemoveRealm { realm } => {
                let tables = [REMOVE_OPTIONS, REMOVE_ORIGINS, REMOVE_ALLOWED, REMOVE_DENIED];
                let statements = tables.map(|table| (table, vec![realm.as_str()])).to_vec();
                let removed = self.sql.change(statements.into()).await?;
                return Ok(removed.iter().sum::<u64>() > 0);
            }
        };
        Ok(changed.first().is_some_and(|removed| *removed > 0))
    }
}

impl<S: Sql> CoturnTables<S> {
    pub(crate) fn new(sql: S) -> Self {
        Self { sql, own: AtomicU8::new(NOT_LOOKED) }
    }

    /// Returns true if our own tables exist. If another program creates them, this is noticed when the
    /// rules are next read.
    async fn has_own_tables(&self) -> Result<bool, StoreError> {
        if self.own.load(Ordering::Relaxed) == NOT_LOOKED {
            self.check_schema().await?;
        }
        Ok(self.own.load(Ordering::Relaxed) == THERE)
    }

    /// Creates missing tables. Once they exist, the privilege to create tables is no longer needed.
    async fn make_own_tables(&self) -> Result<(), StoreError> {
        if has_own(&self.check_schema().await?) {
            return Ok(());
        }
        for (_, create) in OWN_TABLES {
            self.sql.change(vec![(create, Vec::new())].into()).await?;
        }
        self.own.store(THERE, Ordering::Relaxed);
        Ok(())
    }

    /// Statements that remove a secret; the first one shows whether the secret existed.
    async fn without_secret<'a>(
        &self,
        realm: &'a str,
        secret: &'a str,
    ) -> Result<Vec<BoundStatement<'a>>, StoreError> {
        let mut statements = vec![(REMOVE_SECRET, vec![realm, secret])];
        if self.has_own_tables().await? {
            statements.push((REMOVE_MARK, vec![realm, secret]));
        }
        Ok(statements)
    }

    /// Rotates the secrets of a realm. Returns true if there already was a different secret.
    async fn rotate(&self, realm: &str, secret: &str, since: u64, until: u64) -> Result<bool, StoreError> {
        self.make_own_tables().await?;
        let kept = latest_kept_end(since, until).to_string();
        let (since, until) = (since.to_string(), until.to_string());
        let found = self.sql.change(
            vec![
                (SECRETS_OF, vec![realm]),
                (REMOVE_MARK, vec![realm, secret]),
                (REMOVE_SECRET, vec![realm, secret]),
                // All other secrets expire at `until`, unless they expire sooner.
                (END_MARKS, vec![&until, realm, &kept, &kept, &kept]),
                (MARK_OTHERS, vec![&until, realm]),
                (ADD_SECRET, vec![realm, secret]),
                (ADD_MARK, vec![realm, secret, &since, ""]),
            ]
            .into(),
        );
        Ok(found.await?.first().is_some_and(|held| *held > 0))
    }

    async fn put_api_key(&self, key: &ApiKey, existing: Existing) -> Result<Vec<u64>, StoreError> {
        self.make_own_tables().await?;
        let [hash, realm, max_ttl, rate] = key.written();
        let name = key.name.as_str();
        let add = (ADD_API_KEY, vec![name, &hash, &realm, &max_ttl, &rate]);
        self.put((API_KEY, vec![name]), vec![(REMOVE_API_KEY, vec![name]), add], existing).await
    }

    /// Runs statements that replace an item. With [`Existing::Keep`], runs them only if `find` finds
    /// nothing.
    async fn put<'a>(
        &self,
        find: BoundStatement<'a>,
        mut statements: Vec<BoundStatement<'a>>,
        existing: Existing,
    ) -> Result<Vec<u64>, StoreError> {
        let only_if_absent = existing == Existing::Keep;
        if only_if_absent {
            statements.insert(0, find);
        }
        self.sql.change(TableChange { statements, only_if_absent }).await
    }

    async fn check_schema(&self) -> Result<BTreeMap<String, Vec<String>>, StoreError> {
        let mut found = BTreeMap::<String, Vec<String>>::new();
        for row in self.sql.columns().await? {
            if let (Some(table), Some(column)) = (field(&row, 0), field(&row, 1)) {
                let columns = found.entry(table.trim().to_ascii_lowercase()).or_default();
                columns.push(column.trim().to_ascii_lowercase());
            }
        }
        self.own.store(if has_own(&found) { THERE } else { NOT_THERE }, Ordering::Relaxed);
        match missing(&found) {
            None => Ok(found),
            Some(what) => Err(StoreError::new(self.sql.name(), StoreFault::Schema, what)),
        }
    }

    /// Returns true if the realm already had limits.
    async fn put_realm(
        &self,
        realm: &str,
        limits: StoredLimits,
        existing: Existing,
    ) -> Result<bool, StoreError> {
        // Writes a row for each limit, so that even a realm without limits exists; coturn treats 0 as no
        // limit.
        let values = limits.written();
        let remove = values.iter().map(|(name, _)| (REMOVE_OPTION, vec![realm, *name]));
        let add = values.iter().map(|(name, value)| (ADD_OPTION, vec![realm, *name, value.as_str()]));
        let find = (OPTIONS_OF, vec![realm]);
        let changed = self.put(find, remove.chain(add).collect(), existing).await?;
        let tells = if existing == Existing::Keep { 1 } else { values.len() };
        Ok(changed.iter().take(tells).any(|rows| *rows > 0))
    }
}

fn has_own(found: &BTreeMap<String, Vec<String>>) -> bool {
    OWN_TABLES.iter().all(|(table, _)| found.contains_key(*table))
}

fn missing(found: &BTreeMap<String, Vec<String>>) -> Option<String> {
    let (there, not_there): (Vec<_>, Vec<_>) =
        SCHEMA.iter().partition(|(table, _)| found.contains_key(*table));
    if there.is_empty() {
        return Some("has none of coturn's tables, or this user is not allowed to see them".to_owned());
    }
    if let [(table, _), ..] = &not_there[..] {
        return Some(format!("has no table {table}, but it has {}", there[0].0));
    }
    let lacking = SCHEMA.iter().find_map(|(table, columns)| {
        let column = columns.iter().find(|column| !found[*table].iter().any(|found| found == *column))?;
        Some((table, column))
    });
    lacking.map(|(table, column)| {
        format!(
            "has a table {table} without the column {column}, which coturn's schema has had since version 4.5"
        )
    })
}

pub(crate) fn bad_key(realm: &str, name: &str) -> String {
    format!(
        "the key of user {name:?} in realm {realm:?} does not have 32, 64 or 96 hex digits; the user cannot authenticate"
    )
}

fn field(row: &Row, index: usize) -> Option<&str> {
    row.get(index)?.as_deref()
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(but: &[(&str, &str)]) -> BTreeMap<String, Vec<String>> {
        let kept =
            |table: &str, column: &&&str| !but.contains(&(table, "")) && !but.contains(&(table, **column));
        SCHEMA
            .iter()
            .map(|(table, columns)| {
                let columns = columns.iter().filter(|column| kept(table, column));
                ((*table).to_owned(), columns.map(|column| (*column).to_owned()).collect::<Vec<_>>())
            })
            .filter(|(_, columns)| !columns.is_empty())
            .collect()
    }

    #[test]
    fn schema_errors_name_the_missing_part() {
        assert_eq!(missing(&tables(&[])), None);
        let told = |but: &[(&str, &str)]| missing(&tables(but)).unwrap_or_default();
        assert!(
            told(&[("turn_secret", "")]).starts_with("has no table turn_secret, but it has turnusers_lt")
        );
        assert!(
            told(&[("oauth_key", "realm")]).starts_with("has a table oauth_key without the column realm")
        );
        let all: Vec<_> = SCHEMA.iter().map(|(table, _)| (*table, "")).collect();
        assert!(told(&all).starts_with("has none of coturn's tables"));
    }
}
