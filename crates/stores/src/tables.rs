//! coturn's tables (its `schema.sql`), in any database that speaks SQL: one set of statements for all of them, whose values are text.

use std::collections::BTreeMap;

use zeroize::Zeroizing;

use crate::{
    Backend, Edit, Fault, RealmOptions, Rules, StoreError, UserKeys, UserRow,
    backend::PAGE,
    rules::{RulesReader, TokenKeyRow},
};

/// A row of columns that may be null.
pub(crate) type Row = Vec<Option<String>>;

/// A statement and what stands for its question marks.
pub(crate) type Bound<'a> = (&'static str, Vec<&'a str>);

/// A database that runs statements.
pub(crate) trait Sql: Send + Sync + 'static {
    /// Runs a query.
    fn rows(
        &self,
        statement: &'static str,
        values: &[&str],
    ) -> impl Future<Output = Result<Vec<Row>, StoreError>> + Send;

    /// Runs statements in one transaction; how many rows each has changed.
    fn change(&self, statements: Vec<Bound<'_>>)
    -> impl Future<Output = Result<Vec<u64>, StoreError>> + Send;

    /// Table and column, of all that there are.
    fn columns(&self) -> impl Future<Output = Result<Vec<Row>, StoreError>> + Send;

    /// As [`Backend::version`].
    fn version(&self) -> impl Future<Output = Option<u64>> + Send {
        async { None }
    }

    /// Whether all users can be looked at at each change.
    fn is_small(&self) -> bool {
        false
    }

    /// For errors.
    fn name(&self) -> &str;
}

/// coturn's schema in a database.
pub(crate) struct Tables<S>(pub(crate) S);

/// The tables and columns that are read.
const SCHEMA: &[(&str, &[&str])] = &[
    ("turnusers_lt", &["realm", "name", "hmackey"]),
    ("turn_secret", &["realm", "value"]),
    ("allowed_peer_ip", &["realm", "ip_range"]),
    ("denied_peer_ip", &["realm", "ip_range"]),
    ("turn_origin_to_realm", &["origin", "realm"]),
    ("turn_realm_option", &["realm", "opt", "value"]),
    ("oauth_key", &["kid", "ikm_key", "timestamp", "lifetime", "as_rs_alg", "realm"]),
];

const USER: &str = "select name, hmackey from turnusers_lt where realm = ? and name = ?";
const SECRETS_OF: &str = "select value from turn_secret where realm = ?";
const SECRETS: &str = "select realm, value from turn_secret";
const ALLOWED: &str = "select realm, ip_range from allowed_peer_ip";
const DENIED: &str = "select realm, ip_range from denied_peer_ip";
const ORIGINS: &str = "select origin, realm from turn_origin_to_realm";
const OPTIONS: &str = "select realm, opt, value from turn_realm_option";
// Numbers as text, in words that every database knows.
const TOKEN_KEYS: &str = "select kid, ikm_key, cast(oauth_key.timestamp as char(20)), cast(lifetime as char(20)), as_rs_alg, \
                          realm from oauth_key";
const ADMIN_USERS: &str = "select cast(count(*) as char(20)) from admin_user";
/// Keys of one algorithm have 32 digits (MD5) or 64.
const WITHOUT_SHA256: &str = "select distinct realm from turnusers_lt where length(trim(hmackey)) < 64";
const USERS: &str = "select realm, name, hmackey from turnusers_lt where (realm, name) > (?, ?) order by realm, name limit 1000";
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

impl<S: Sql> Backend for Tables<S> {
    async fn user(&self, realm: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        let rows = self.0.rows(USER, &[realm, name]).await?;
        // MySQL takes "ALICE" for "alice" too, who would be somebody else to quotas.
        let row = rows.into_iter().find(|row| field(row, 0) == Some(name));
        let Some(hmackey) = row.and_then(|mut row| row.pop()?) else { return Ok(None) };
        let hmackey = Zeroizing::new(hmackey);
        Ok(Some(UserKeys::from_hex(&hmackey).unwrap_or_else(|| {
            tracing::warn!("{}: {}", self.0.name(), bad_key(realm, name));
            UserKeys::default()
        })))
    }

    async fn secrets(&self, realm: &str) -> Result<Vec<Zeroizing<String>>, StoreError> {
        let rows = self.0.rows(SECRETS_OF, &[realm]).await?;
        let secrets = rows.into_iter().flatten().flatten().map(Zeroizing::new);
        Ok(secrets.filter(|secret| !secret.is_empty()).collect())
    }

    async fn rules(&self) -> Result<Rules, StoreError> {
        let name = self.0.name();
        let all = self.check_schema().await?;
        let mut reader = RulesReader::new(name);
        for row in self.0.rows(OPTIONS, &[]).await? {
            reader.option(field(&row, 0), field(&row, 1).unwrap_or_default().trim(), field(&row, 2))?;
        }
        for row in self.0.rows(ORIGINS, &[]).await? {
            reader.origin(field(&row, 0), field(&row, 1));
        }
        for (denied, table, statement) in
            [(false, "allowed_peer_ip", ALLOWED), (true, "denied_peer_ip", DENIED)]
        {
            for row in self.0.rows(statement, &[]).await? {
                reader.peer(denied, table, field(&row, 0), field(&row, 1))?;
            }
        }
        for row in self.0.rows(SECRETS, &[]).await? {
            reader.secret(field(&row, 0), field(&row, 1));
        }
        for row in self.0.rows(TOKEN_KEYS, &[]).await? {
            reader.token_key(TokenKeyRow {
                kid: field(&row, 0).unwrap_or_default(),
                key: field(&row, 1),
                timestamp: field(&row, 2),
                lifetime: field(&row, 3),
                algorithm: field(&row, 4),
                realm: field(&row, 5),
            })?;
        }
        if all.contains_key("admin_user") {
            let rows = self.0.rows(ADMIN_USERS, &[]).await?;
            let count = rows.first().and_then(|row| field(row, 0)).map_or("0", str::trim);
            if count != "0" {
                reader.ignore(format!(
                    "admin_user has {count} rows, users of coturn's web page, which there is none of here"
                ));
            }
        }
        if self.0.is_small() {
            let realms = self.0.rows(WITHOUT_SHA256, &[]).await?.into_iter().flatten().flatten();
            reader.rules.md5_only = Some(realms.map(String::into_boxed_str).collect());
        }
        Ok(reader.finish())
    }

    async fn version(&self) -> Option<u64> {
        self.0.version().await
    }

    async fn users(&self, realm: Option<&str>, after: Option<&UserRow>) -> Result<Vec<UserRow>, StoreError> {
        let (last_realm, last_name) =
            after.map_or(("", ""), |user| (user.realm.as_str(), user.name.as_str()));
        let rows = match realm {
            Some(realm) => self.0.rows(USERS_OF, &[realm, last_name]).await?,
            None => self.0.rows(USERS, &[last_realm, last_name]).await?,
        };
        debug_assert!(rows.len() <= PAGE);
        let user = |row: &Row| UserRow {
            realm: field(row, 0).unwrap_or_default().to_owned(),
            name: field(row, 1).unwrap_or_default().to_owned(),
            keys: field(row, 2).and_then(UserKeys::from_hex).unwrap_or_default().kinds(),
        };
        Ok(rows.iter().map(user).collect())
    }

    async fn edit(&self, edit: &Edit) -> Result<bool, StoreError> {
        let changed = match edit {
            Edit::PutUser { realm, name, keys } => {
                let hmackey = keys.to_hex();
                let remove = (REMOVE_USER, vec![realm.as_str(), name]);
                self.0.change(vec![remove, (ADD_USER, vec![realm, name, &hmackey])]).await?
            }
            Edit::RemoveUser { realm, name } => self.0.change(vec![(REMOVE_USER, vec![realm, name])]).await?,
            Edit::AddSecret { realm, secret } => {
                let remove = (REMOVE_SECRET, vec![realm.as_str(), secret]);
                self.0.change(vec![remove, (ADD_SECRET, vec![realm, secret])]).await?
            }
            Edit::RemoveSecret { realm, secret } => {
                self.0.change(vec![(REMOVE_SECRET, vec![realm, secret])]).await?
            }
            Edit::PutRealm { realm, options } => self.put_realm(realm, *options).await?,
            Edit::RemoveRealm { realm } => {
                let tables = [REMOVE_OPTIONS, REMOVE_ORIGINS, REMOVE_ALLOWED, REMOVE_DENIED];
                let removed =
                    self.0.change(tables.map(|table| (table, vec![realm.as_str()])).to_vec()).await?;
                return Ok(removed.iter().sum::<u64>() > 0);
            }
        };
        Ok(changed.first().is_some_and(|removed| *removed > 0))
    }
}

impl<S: Sql> Tables<S> {
    /// What tables there are, if all are that are needed.
    async fn check_schema(&self) -> Result<BTreeMap<String, Vec<String>>, StoreError> {
        let mut found = BTreeMap::<String, Vec<String>>::new();
        for row in self.0.columns().await? {
            if let (Some(table), Some(column)) = (field(&row, 0), field(&row, 1)) {
                let columns = found.entry(table.trim().to_ascii_lowercase()).or_default();
                columns.push(column.trim().to_ascii_lowercase());
            }
        }
        match missing(&found) {
            None => Ok(found),
            Some(what) => Err(StoreError::new(self.0.name(), Fault::Schema, what)),
        }
    }

    async fn put_realm(&self, realm: &str, options: RealmOptions) -> Result<Vec<u64>, StoreError> {
        // Both have a row, so that the realm is there though it has no limit: coturn takes 0 for none.
        let named = [("total-quota", options.total_quota), ("user-quota", options.user_quota)];
        let values = named.map(|(name, value)| (name, value.to_string()));
        let remove = values.iter().map(|(name, _)| (REMOVE_OPTION, vec![realm, *name]));
        let add = values.iter().map(|(name, value)| (ADD_OPTION, vec![realm, *name, value.as_str()]));
        self.0.change(remove.chain(add).collect()).await
    }
}

/// What keeps tables from being coturn's.
fn missing(found: &BTreeMap<String, Vec<String>>) -> Option<String> {
    let (there, not_there): (Vec<_>, Vec<_>) =
        SCHEMA.iter().partition(|(table, _)| found.contains_key(*table));
    if there.is_empty() {
        return Some("has none of coturn's tables, or this user may not see them".to_owned());
    }
    if let [(table, _), ..] = &not_there[..] {
        return Some(format!("has no table {table}, though it has {}", there[0].0));
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

/// What is said of a user whose key is none.
pub(crate) fn bad_key(realm: &str, name: &str) -> String {
    format!(
        "the key of user {name:?} in realm {realm:?} is none of 32, 64 or 96 hex digits, and opens nothing"
    )
}

fn field(row: &Row, index: usize) -> Option<&str> {
    row.get(index)?.as_deref()
}

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
    fn a_schema_that_is_not_coturns_is_told_by_what_it_lacks() {
        assert_eq!(missing(&tables(&[])), None);
        let told = |but: &[(&str, &str)]| missing(&tables(but)).unwrap_or_default();
        assert!(
            told(&[("turn_secret", "")]).starts_with("has no table turn_secret, though it has turnusers_lt")
        );
        assert!(
            told(&[("oauth_key", "realm")]).starts_with("has a table oauth_key without the column realm")
        );
        let all: Vec<_> = SCHEMA.iter().map(|(table, _)| (*table, "")).collect();
        assert!(told(&all).starts_with("has none of coturn's tables"));
    }
}
