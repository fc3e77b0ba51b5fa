//! SQLite: the embedded store, and files made by coturn. SQLite blocks, so one thread owns the connection.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use rusqlite::{
    Connection, ErrorCode, OpenFlags, TransactionBehavior,
    functions::FunctionFlags,
    params_from_iter,
    types::{FromSql as _, ValueRef},
};
use tokio::sync::oneshot;

use crate::{
    StoreError, StoreFault,
    tables::{OwnedChange, Row, Sql, TableChange, is_query},
};

/// Maximum time to wait for another writer.
const BUSY: Duration = Duration::from_secs(1);
/// Maximum memory in bytes of all SQLite connections together. A statement that needs more fails.
const MOST_MEMORY: i64 = 512 << 20;
/// `pragma user_version` of our own file.
const OUR_VERSION: i64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SqliteUse {
    /// Our own file: created by the first write, and empty until then.
    Own,
    /// A file of another program, which must exist.
    Foreign,
}

pub(crate) struct Sqlite {
    jobs: mpsc::Sender<SqliteJob>,
    name: String,
    kind: SqliteUse,
}

type SqliteJob = Box<dyn FnOnce(&mut File) + Send>;

impl Sqlite {
    pub(crate) fn new(path: &Path, kind: SqliteUse, name: String) -> Self {
        Self::with_tables(path, kind, TABLES, name)
    }

    /// `tables` are created in our own file.
    pub(crate) fn with_tables(path: &Path, kind: SqliteUse, tables: &'static str, name: String) -> Self {
        let (jobs, queue) = mpsc::channel::<SqliteJob>();
        let mut file = File { path: path.to_owned(), kind, tables, name: name.clone(), open: None };
        // The thread ends when the last sender is dropped.
        let started = thread::Builder::new().name("sqlite".to_owned()).spawn(move || {
            while let Ok(job) = queue.recv() {
                job(&mut file);
            }
        });
        if let Err(error) = started {
            tracing::error!("cannot start a thread for {name}: {error}");
        }
        Self { jobs, name, kind }
    }

    async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut File) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (sender, receiver) = oneshot::channel();
        let job: SqliteJob = Box::new(move |file| drop(sender.send(job(file))));
        let gone = |_| StoreError::new(&self.name, StoreFault::Other, "its thread has ended");
        self.jobs.send(job).map_err(|_| gone(()))?;
        receiver.await.map_err(|_| gone(()))?
    }
}

impl Sql for Sqlite {
    async fn rows(&self, statement: &'static str, values: &[&str]) -> Result<Vec<Row>, StoreError> {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        self.run(move |file| {
            let Some(open) = file.open(false)? else { return Ok(Vec::new()) };
            let read = read_rows(&open.connection, statement, &values);
            read.map_err(|error| file.error(&error))
        })
        .await
    }

    async fn change(&self, change: TableChange<'_>) -> Result<Vec<u64>, StoreError> {
        let change = change.to_owned();
        self.run(move |file| {
            // A change that only removes something does not create the file.
            let adds = |(statement, _): &(&str, _)| {
                statement.starts_with("insert") || statement.starts_with("create")
            };
            let adds = change.statements.iter().any(adds);
            let Some(open) = file.open(adds)? else { return Ok(vec![0; change.statements.len()]) };
            let changed = change_all(&mut open.connection, &change);
            changed.map_err(|error| file.error(&error))
        })
        .await
    }

    async fn columns(&self) -> Result<Vec<Row>, StoreError> {
        let is_own = self.kind == SqliteUse::Own;
        self.run(move |file| match file.open(false)? {
            Some(open) => read_rows(&open.connection, COLUMNS, &[]).map_err(|error| file.error(&error)),
            // The file does not exist yet; the first write creates it with all tables.
            None if is_own => {
                let empty = Connection::open_in_memory().map_err(|error| file.error(&error))?;
                empty.execute_batch(TABLES).map_err(|error| file.error(&error))?;
                read_rows(&empty, COLUMNS, &[]).map_err(|error| file.error(&error))
            }
            None => Ok(Vec::new()),
        })
        .await
    }

    /// Version of the file's content; 0 if there is no file. It also changes if the file is replaced.
    async fn version(&self) -> Option<u64> {
        let version = self.run(|file| {
            let Some(open) = file.open(false)? else { return Ok(0) };
            let counted = open.connection.query_row("pragma data_version", [], |row| row.get::<_, i64>(0));
            let counted = counted.map_err(|error| file.error(&error))?;
            let inode = file.open.as_ref().map_or(0, |open| open.inode);
            Ok(inode.rotate_left(32) ^ counted.unsigned_abs())
        });
        version.await.ok()
    }

    fn pages(&self) -> [&'static str; 2] {
        [USERS, USERS_OF]
    }

    fn is_small(&self) -> bool {
        true
    }

    fn name(&self) -> &str {
        &self.name
    }
}

struct File {
    path: PathBuf,
    kind: SqliteUse,
    tables: &'static str,
    name: String,
    open: Option<Open>,
}

struct Open {
    connection: Connection,
    inode: u64,
}

impl File {
    /// Opens the connection; `None` if our own file does not exist and nothing will be written.
    fn open(&mut self, to_write: bool) -> Result<Option<&mut Open>, StoreError> {
        let inode = fs::metadata(&self.path).map(|found| found.ino()).ok();
        // Reopens a file that was removed or replaced.
        if self.open.as_ref().is_some_and(|open| Some(open.inode) != inode) {
            self.open = None;
        }
        if self.open.is_none() {
            match (self.kind, inode) {
                (SqliteUse::Own, None) if !to_write => return Ok(None),
                (SqliteUse::Own, _) => self.open = Some(self.open_own()?),
                (SqliteUse::Foreign, _) => self.open = Some(self.open_foreign()?),
            }
        }
        Ok(self.open.as_mut())
    }

    /// Creates the file readable only by the server's user.
    fn open_own(&self) -> Result<Open, StoreError> {
        let unusable = |why: io::Error| StoreError::new(&self.name, StoreFault::Permission, why);
        if let Some(dir) = self.path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(unusable)?;
        }
        let made = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.path)
            .map_err(unusable)?;
        let inode = made.metadata().map_err(unusable)?.ino();
        // Closed before SQLite opens the file: closing it later would release SQLite's locks (fcntl(2)), so
        // that another process would delete the WAL when it exits.
        drop(made);
        let connection = self.connect(OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let prepare = || -> rusqlite::Result<i64> {
            connection.pragma_update(None, "journal_mode", "wal")?;
            let version = connection.query_row("pragma user_version", [], |row| row.get(0))?;
            if version == 0 {
                connection.execute_batch(self.tables)?;
                connection.pragma_update(None, "user_version", OUR_VERSION)?;
            }
            Ok(version)
        };
        match prepare() {
            Ok(0 | OUR_VERSION) => Ok(Open { connection, inode }),
            Ok(later) => {
                let why = format!(
                    "was written by a newer turnpike (schema version {later}, this one supports {OUR_VERSION})"
                );
                Err(StoreError::new(&self.name, StoreFault::Schema, why))
            }
            Err(error) => Err(self.error(&error)),
        }
    }

    fn open_foreign(&self) -> Result<Open, StoreError> {
        let unusable = |error: io::Error| {
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            let fault = if is_missing { StoreFault::NoDatabase } else { StoreFault::Permission };
            StoreError::new(&self.name, fault, error)
        };
        let inode = fs::metadata(&self.path).map_err(unusable)?.ino();
        // Only `turnpike user` and similar commands write to this file.
        let connection = self.connect(OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        Ok(Open { connection, inode })
    }

    fn connect(&self, flags: OpenFlags) -> Result<Connection, StoreError> {
        let flags = flags | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection =
            Connection::open_with_flags(&self.path, flags).map_err(|error| self.error(&error))?;
        let prepare = || {
            connection.busy_timeout(BUSY)?;
            // The sandbox contains no directory for temporary files, which sorting may need.
            connection.pragma_update(None, "temp_store", "memory")?;
            connection.pragma_update(None, "hard_heap_limit", MOST_MEMORY)?;
            add_is_utf8(&connection)
        };
        prepare().map_err(|error| self.error(&error))?;
        Ok(connection)
    }

    fn error(&self, error: &rusqlite::Error) -> StoreError {
        let fault = match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => StoreFault::Schema,
            Some(ErrorCode::CannotOpen | ErrorCode::PermissionDenied | ErrorCode::ReadOnly) => {
                StoreFault::Permission
            }
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreFault::Slow,
            _ => StoreFault::Other,
        };
        match fault {
            StoreFault::Schema => {
                StoreError::new(&self.name, fault, format_args!("is not a SQLite database ({error})"))
            }
            _ => StoreError::new(&self.name, fault, error),
        }
    }
}

/// A page of users. Names that are not UTF-8 are skipped: clients cannot use them, and a cursor with
/// replacement characters would sort before the original.
const USERS: &str = "select realm, name, hmackey from turnusers_lt where (realm, name) > (?, ?) and name is not null \
                     and is_utf8(realm) and is_utf8(name) order by realm, name limit 1000";
const USERS_OF: &str = "select realm, name, hmackey from turnusers_lt where realm = ? and name > ? and is_utf8(name) \
                        order by name limit 1000";

fn add_is_utf8(connection: &Connection) -> rusqlite::Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC;
    connection.create_scalar_function("is_utf8", 1, flags, |context| {
        Ok(match context.get_raw(0) {
            ValueRef::Text(bytes) => std::str::from_utf8(bytes).is_ok(),
            value => value == ValueRef::Null,
        })
    })
}

pub(crate) const COLUMNS: &str =
    "select m.name, c.name from sqlite_master m join pragma_table_info(m.name) c";

pub(crate) fn read_rows(
    connection: &Connection,
    statement: &str,
    values: &[String],
) -> rusqlite::Result<Vec<Row>> {
    let mut statement = connection.prepare(statement)?;
    let columns = statement.column_count();
    let rows = statement.query_map(params_from_iter(values), |row| {
        (0..columns).map(|index| text(row.get_ref(index)?)).collect::<rusqlite::Result<Row>>()
    })?;
    rows.collect()
}

/// A value as text. SQLite does not check encodings, and `turnadmin` may write names that are not UTF-8;
/// such a row must not hide the others.
fn text(value: ValueRef<'_>) -> rusqlite::Result<Option<String>> {
    match value {
        ValueRef::Text(bytes) => Ok(Some(String::from_utf8_lossy(bytes).into_owned())),
        other => Option::<String>::column_result(other).map_err(Into::into),
    }
}

pub(crate) fn change_all(connection: &mut Connection, change: &OwnedChange) -> rusqlite::Result<Vec<u64>> {
    // Takes the write lock at the beginning: a transaction that reads first cannot wait for another writer
    // later.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut changed = Vec::with_capacity(change.statements.len());
    for (statement, values) in &change.statements {
        let rows = if is_query(statement) {
            read_rows(&transaction, statement, values)?.len()
        } else {
            transaction.execute(statement, params_from_iter(values))?
        };
        changed.push(rows as u64);
        if change.ends_after(&changed) {
            break;
        }
    }
    transaction.commit()?;
    Ok(changed)
}

/// coturn's schema, so that `turnadmin -b FILE` works with our file.
pub(crate) const TABLES: &str = "
create table turnusers_lt (realm varchar(127) default '', name varchar(512), hmackey char(128), primary key (realm, name));
create table turn_secret (realm varchar(127) default '', value varchar(256), primary key (realm, value));
create table allowed_peer_ip (realm varchar(127) default '', ip_range varchar(256), primary key (realm, ip_range));
create table denied_peer_ip (realm varchar(127) default '', ip_range varchar(256), primary key (realm, ip_range));
create table turn_origin_to_realm (origin varchar(127), realm varchar(127), primary key (origin));
create table turn_realm_option (realm varchar(127) default '', opt varchar(32), value varchar(128), primary key (realm, opt));
create table oauth_key (kid varchar(128), ikm_key varchar(256), timestamp bigint default 0, lifetime integer default 0,
                        as_rs_alg varchar(64) default '', realm varchar(127), primary key (kid));
create table admin_user (name varchar(32), realm varchar(127), password varchar(127), primary key (name));
";

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;
    use crate::{Backend as _, UserRow, tables::CoturnTables};

    #[test]
    fn embedded_file_is_locked_while_open() {
        let dir = Dir::new();
        let (path, name) = (dir.at("own.sqlite"), "a file".to_owned());
        let mut file = File { path: path.clone(), kind: SqliteUse::Own, tables: TABLES, name, open: None };
        file.open(true).expect("created");
        let inode = fs::metadata(&path).expect("the file exists").ino();
        let (own, of_file) = (format!(" {} ", std::process::id()), format!(":{inode} "));
        let locks = fs::read_to_string("/proc/locks").expect("proc(5)");
        let is_its = |line: &str| line.contains("POSIX") && line.contains(&own) && line.contains(&of_file);
        assert!(locks.lines().any(is_its), "{inode}: {locks}");
    }

    #[test]
    fn sorting_needs_no_temporary_file() {
        let dir = Dir::new();
        let (path, name) = (dir.at("own.sqlite"), "a file".to_owned());
        let mut file = File { path, kind: SqliteUse::Own, tables: TABLES, name, open: None };
        let open = file.open(true).expect("created").expect("a connection");
        let value = |pragma: &str| {
            open.connection.query_row(pragma, [], |row| row.get::<_, i64>(0)).expect("a pragma")
        };
        assert_eq!((value("pragma temp_store"), value("pragma hard_heap_limit")), (2, MOST_MEMORY));
    }

    #[tokio::test]
    async fn user_names_that_are_not_utf8_are_skipped() {
        let dir = Dir::new();
        let path = dir.at("coturn.sqlite");
        let made = Connection::open(&path).expect("a file");
        made.execute_batch(TABLES).expect("tables");
        made.execute_batch(
            "insert into turnusers_lt values ('r', 'a', ''), ('r', cast(x'61fc' as text), ''), ('r', 'b', ''), \
             (cast(x'72fc' as text), 'a', ''), ('s', 'a', '')",
        )
        .expect("users");
        let tables = CoturnTables::new(Sqlite::new(&path, SqliteUse::Foreign, "a file".to_owned()));
        for (realm, expected) in [(None, vec!["r a", "r b", "s a"]), (Some("r"), vec!["r a", "r b"])] {
            let (mut found, mut last): (Vec<String>, Option<UserRow>) = (Vec::new(), None);
            // Pages of one user.
            while let Some(next) = tables.users(realm, last.as_ref()).await.expect("users").into_iter().next()
            {
                assert!(found.len() < 5, "{found:?}");
                found.push(format!("{} {}", next.realm, next.name));
                last = Some(next);
            }
            assert_eq!(found, expected);
        }
    }
}
