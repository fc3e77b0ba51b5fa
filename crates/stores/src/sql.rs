//! PostgreSQL, MySQL and MariaDB: a few connections, each of which does one job at a time. sqlx's own pool
//! checks the connection after each query, which halves the throughput.

use std::{io, marker::PhantomData, sync::Arc, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, MySqlConnection, PgConnection, Row as _,
    mysql::{MySqlConnectOptions, MySqlDatabaseError, MySqlSslMode},
    postgres::{PgConnectOptions, PgSslMode},
};
use tokio::{
    sync::{Mutex, mpsc, oneshot},
    time::Instant,
};

use crate::{
    ServerAddress, StoreError, StoreFault, TlsMode,
    tables::{OwnedChange, Row, Sql, TableChange, is_query},
};

/// After this time, an idle connection may have been dropped by a firewall or the server.
const IDLE: Duration = Duration::from_secs(60);
const QUEUE: usize = 65_536;

/// Maximum number of retries after conflicts with other programs' transactions.
const MOST_COLLISIONS: usize = 5;

pub(crate) struct SqlServer<D> {
    jobs: mpsc::Sender<SqlJob>,
    name: String,
    driver: PhantomData<fn() -> D>,
}

pub(crate) type Postgres = SqlServer<PgConnection>;
pub(crate) type Mysql = SqlServer<MySqlConnection>;

struct SqlJob {
    work: Work,
    answer: oneshot::Sender<Result<Output, StoreError>>,
}

pub(crate) enum Work {
    Read(&'static str, Vec<String>),
    Change(OwnedChange),
}

#[derive(Default)]
pub(crate) struct Output {
    rows: Vec<Row>,
    changed: Vec<u64>,
    /// The connection may still hold the lock and must be closed.
    keeps_lock: bool,
}

pub(crate) trait Driver: Send + Sized + 'static {
    type Options: Send + Sync + 'static;
    const COLUMNS: &'static str;
    /// Waits for the lock that serializes our changes; the statement returns 1. In PostgreSQL, the end of the
    /// transaction releases it.
    const LOCK: &'static str;
    /// Releases the lock, if ending the transaction does not.
    const UNLOCK: Option<&'static str>;

    fn options(address: &ServerAddress) -> Self::Options;
    fn connect(options: &Self::Options) -> impl Future<Output = sqlx::Result<Self>> + Send;
    /// `commits` becomes true when COMMIT is sent: after that, the change may take effect even if no answer
    /// arrives.
    fn run(&mut self, work: &Work, commits: &mut bool) -> impl Future<Output = sqlx::Result<Output>> + Send;
}

impl<D: Driver> SqlServer<D> {
    /// Opens at most `connections` connections, each on first use. `name` is for error messages. Must be
    /// called on a runtime.
    pub(crate) fn new(address: &ServerAddress, connections: usize, name: String) -> Self {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let (queue, options) = (Arc::new(Mutex::new(queue)), Arc::new(D::options(address)));
        for _ in 0..connections.max(1) {
            tokio::spawn(serve::<D>(Arc::clone(&queue), Arc::clone(&options), name.clone()));
        }
        Self { jobs, name, driver: PhantomData }
    }

    async fn run(&self, work: Work) -> Result<Output, StoreError> {
        let (answer, result) = oneshot::channel();
        let slow = |why| StoreError::new(&self.name, StoreFault::Slow, why);
        self.jobs.try_send(SqlJob { work, answer }).map_err(|_| slow("too many queries are waiting"))?;
        result.await.map_err(|_| slow("the connection was closed"))?
    }
}

impl<D: Driver> Sql for SqlServer<D> {
    async fn rows(&self, statement: &'static str, values: &[&str]) -> Result<Vec<Row>, StoreError> {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        Ok(self.run(Work::Read(statement, values)).await?.rows)
    }

    async fn change(&self, change: TableChange<'_>) -> Result<Vec<u64>, StoreError> {
        Ok(self.run(Work::Change(change.to_owned())).await?.changed)
    }

    async fn columns(&self) -> Result<Vec<Row>, StoreError> {
        self.rows(D::COLUMNS, &[]).await
    }

    fn name(&self) -> &str {
        &self.name
    }
}

async fn serve<D: Driver>(queue: Arc<Mutex<mpsc::Receiver<SqlJob>>>, options: Arc<D::Options>, name: String) {
    let mut held: Option<(D, Instant)> = None;
    loop {
        let job = queue.lock().await.recv().await;
        let Some(SqlJob { work, mut answer }) = job else { return };
        let kept = held.take().filter(|(_, used)| used.elapsed() < IDLE).map(|(connection, _)| connection);
        // If the caller gives up, the connection is dropped, since it may be in the middle of an answer.
        let done = tokio::select! {
            done = run(kept, &options, &work) => done,
            () = answer.closed() => continue,
        };
        let result = done.map(|(connection, output)| {
            held = (!output.keeps_lock).then(|| (connection, Instant::now()));
            output
        });
        let _ = answer.send(result.map_err(|error| told(&name, &error)));
    }
}

/// Runs the work, on a new connection if the existing one was stale. Retries after a conflict, but not once
/// COMMIT has been sent: the change may have been made, and a second attempt would conflict with it.
async fn run<D: Driver>(mut kept: Option<D>, options: &D::Options, work: &Work) -> sqlx::Result<(D, Output)> {
    let mut collisions = 0;
    loop {
        let is_kept = kept.is_some();
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => D::connect(options).await?,
        };
        let mut commits = false;
        match connection.run(work, &mut commits).await {
            Ok(output) => return Ok((connection, output)),
            Err(error) if is_kept && is_broken(&error) && !commits => {}
            Err(error) if is_collision(&error) && collisions < MOST_COLLISIONS => collisions += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Implements [`Driver`]; `$text` converts statements to this database's syntax.
macro_rules! driver {
    ($database:ty, $connection:ty, $options:ty, $columns:literal, $lock:literal, $unlock:expr, $address:path, $text:path) => {
        impl Driver for $connection {
            type Options = $options;
            const COLUMNS: &'static str = $columns;
            const LOCK: &'static str = $lock;
            const UNLOCK: Option<&'static str> = $unlock;

            fn options(address: &ServerAddress) -> $options {
                $address(address).disable_statement_logging()
            }

            async fn connect(options: &$options) -> sqlx::Result<Self> {
                Self::connect_with(options).await
            }

            async fn run(&mut self, work: &Work, commits: &mut bool) -> sqlx::Result<Output> {
                match work {
                    Work::Read(statement, values) => {
                        let mut query = sqlx::query::<$database>($text(statement));
                        for value in values {
                            query = query.bind(value.clone());
                        }
                        let rows = query.fetch_all(&mut *self).await?;
                        let columns = rows.iter().map(|row| {
                            (0..row.len()).map(|index| row.try_get::<Option<String>, usize>(index)).collect()
                        });
                        Ok(Output { rows: columns.collect::<sqlx::Result<_>>()?, ..Output::default() })
                    }
                    Work::Change(change) => {
                        let mut transaction = self.begin().await?;
                        let locked =
                            sqlx::query::<$database>(Self::LOCK).fetch_one(&mut *transaction).await?;
                        if locked.try_get::<Option<i32>, usize>(0)? != Some(1) {
                            let why =
                                "another change has been holding the lock of this database for too long";
                            return Err(io::Error::new(io::ErrorKind::TimedOut, why).into());
                        }
                        let mut changed = Vec::with_capacity(change.statements.len());
                        for (statement, values) in &change.statements {
                            let mut query = sqlx::query::<$database>($text(statement));
                            for value in values {
                                query = query.bind(value.clone());
                            }
                            changed.push(if is_query(statement) {
                                query.fetch_all(&mut *transaction).await?.len() as u64
                            } else {
                                query.execute(&mut *transaction).await?.rows_affected()
                            });
                            if change.ends_after(&changed) {
                                break;
                            }
                        }
                        *commits = true;
                        transaction.commit().await?;
                        // The change has been made, even if releasing the lock fails.
                        let keeps_lock = match Self::UNLOCK {
                            Some(unlock) => {
                                sqlx::query::<$database>(unlock).execute(&mut *self).await.is_err()
                            }
                            None => false,
                        };
                        Ok(Output { changed, keeps_lock, ..Output::default() })
                    }
                }
            }
        }
    };
}

driver!(
    sqlx::Postgres,
    PgConnection,
    PgConnectOptions,
    "select table_name::text, column_name::text from information_schema.columns where table_schema = any(current_schemas(false))",
    "select 1 from pg_advisory_xact_lock(hashtext('turnpike.changes'))",
    None,
    postgres_options,
    numbered
);

driver!(
    sqlx::MySql,
    MySqlConnection,
    MySqlConnectOptions,
    "select cast(table_name as char(128)), cast(column_name as char(128)) from information_schema.columns \
     where table_schema = database()",
    "select cast(get_lock(concat('turnpike.', left(md5(database()), 32)), 10) as signed integer)",
    Some("do release_lock(concat('turnpike.', left(md5(database()), 32)))"),
    mysql_options,
    verbatim
);

fn postgres_options(address: &ServerAddress) -> PgConnectOptions {
    let mut options = PgConnectOptions::new_without_pgpass().host(&address.host).application_name("turnpike");
    options = options.port(address.port.unwrap_or(5432)).ssl_mode(match address.tls.mode {
        TlsMode::Off => PgSslMode::Disable,
        TlsMode::IfOffered => PgSslMode::Prefer,
        TlsMode::Unverified => PgSslMode::Require,
        TlsMode::Authority => PgSslMode::VerifyCa,
        TlsMode::Full => PgSslMode::VerifyFull,
    });
    if let Some(dir) = &address.socket {
        options = options.socket(dir);
    }
    if let Some(user) = &address.user {
        options = options.username(user);
    }
    if let Some(password) = &address.password {
        options = options.password(password.reveal());
    }
    if let Some(database) = &address.database {
        options = options.database(database);
    }
    if let Some(file) = &address.tls.authority {
        options = options.ssl_root_cert(file);
    }
    if let Some((certificate, key)) = &address.tls.identity {
        options = options.ssl_client_cert(certificate).ssl_client_key(key);
    }
    options
}

fn mysql_options(address: &ServerAddress) -> MySqlConnectOptions {
    let mut options = MySqlConnectOptions::new().host(&address.host).port(address.port.unwrap_or(3306));
    options = options.ssl_mode(match address.tls.mode {
        TlsMode::Off => MySqlSslMode::Disabled,
        TlsMode::IfOffered => MySqlSslMode::Preferred,
        TlsMode::Unverified => MySqlSslMode::Required,
        TlsMode::Authority => MySqlSslMode::VerifyCa,
        TlsMode::Full => MySqlSslMode::VerifyIdentity,
    });
    if let Some(path) = &address.socket {
        options = options.socket(path);
    }
    if let Some(user) = &address.user {
        options = options.username(user);
    }
    if let Some(password) = &address.password {
        options = options.password(password.reveal());
    }
    if let Some(database) = &address.database {
        options = options.database(database);
    }
    if let Some(file) = &address.tls.authority {
        options = options.ssl_ca(file);
    }
    if let Some((certificate, key)) = &address.tls.identity {
        options = options.ssl_client_cert(certificate).ssl_client_key(key);
    }
    options
}

fn verbatim(statement: &'static str) -> &'static str {
    statement
}

/// Replaces question marks with `$1`, `$2`. Statements are constants; user data is always passed as
/// parameters.
fn numbered(statement: &str) -> AssertSqlSafe<String> {
    let mut text = String::with_capacity(statement.len() + 8);
    for (index, part) in statement.split('?').enumerate() {
        if index > 0 {
            text.push('$');
            text.push_str(&index.to_string());
        }
        text.push_str(part);
    }
    AssertSqlSafe(text)
}

/// Returns true if the transaction was aborted because of another one, such as a change by `turnadmin`.
fn is_collision(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    match error.try_downcast_ref::<MySqlDatabaseError>() {
        // Duplicate key, lock wait timeout, deadlock.
        Some(error) => matches!(error.number(), 1062 | 1205 | 1213),
        // unique_violation, serialization_failure, deadlock_detected.
        None => matches!(error.code().as_deref(), Some("23505" | "40001" | "40P01")),
    }
}

/// Returns true if the query may succeed on another connection.
fn is_broken(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            // PostgreSQL: admin_shutdown, crash_shutdown, idle_session_timeout; and "cached plan must not
            // change result type".
            matches!(error.code().as_deref(), Some("57P01" | "57P02" | "57P05" | "0A000"))
        }
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::Tls(_) | sqlx::Error::WorkerCrashed => {
            true
        }
        _ => false,
    }
}

fn told(name: &str, error: &sqlx::Error) -> StoreError {
    let fault = match error {
        sqlx::Error::Database(error) => {
            let number = error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number);
            match (number, error.code().as_deref()) {
                (Some(1045 | 1698), _) | (None, Some("28P01" | "28000")) => StoreFault::Login,
                (Some(1049), _) | (None, Some("3D000")) => StoreFault::NoDatabase,
                (Some(1044 | 1142 | 1143), _) | (None, Some("42501")) => StoreFault::Permission,
                // MySQL: illegal mix of collations, no such character. PostgreSQL: untranslatable_character,
                // character_not_in_repertoire.
                (Some(1267 | 1366 | 3854 | 3988), _) | (None, Some("22P05" | "22021")) => StoreFault::Text,
                (Some(1054 | 1146), _) | (None, Some("42P01" | "42703")) => StoreFault::Schema,
                // Too many connections, or the server is starting or stopping.
                (Some(1040 | 1053), _) | (None, Some("53300" | "57P01" | "57P02" | "57P03")) => {
                    StoreFault::Unreachable
                }
                _ => StoreFault::Other,
            }
        }
        // rustls reports certificate errors as InvalidData while reading.
        sqlx::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => StoreFault::Tls,
        sqlx::Error::Io(_) => StoreFault::Unreachable,
        sqlx::Error::Tls(_) => StoreFault::Tls,
        _ => StoreFault::Other,
    };
    match error {
        sqlx::Error::Database(error) if fault == StoreFault::Schema => {
            StoreError::new(name, fault, format_args!("does not match coturn's schema: {}", error.message()))
        }
        sqlx::Error::Database(error) => StoreError::new(name, fault, error.message()),
        sqlx::Error::Io(error) => StoreError::new(name, fault, error),
        sqlx::Error::Tls(error) => StoreError::new(name, fault, error),
        other => StoreError::new(name, fault, other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;

    /// Fields: whether the first connection breaks after COMMIT, the number of runs, and the number of
    /// connections.
    struct Breaks(bool, AtomicU8, AtomicU8);

    impl Driver for &'static Breaks {
        type Options = &'static Breaks;
        const COLUMNS: &'static str = "";
        const LOCK: &'static str = "";
        const UNLOCK: Option<&'static str> = None;

        fn options(_: &ServerAddress) -> Self::Options {
            unreachable!("there is no server")
        }

        async fn connect(options: &Self::Options) -> sqlx::Result<Self> {
            options.2.fetch_add(1, Ordering::Relaxed);
            Ok(options)
        }

        async fn run(&mut self, _: &Work, commits: &mut bool) -> sqlx::Result<Output> {
            *commits = self.0;
            match self.1.fetch_add(1, Ordering::Relaxed) {
                0 => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
                _ => Ok(Output::default()),
            }
        }
    }

    #[tokio::test]
    async fn change_is_not_retried_after_commit_was_sent() {
        static BEFORE: Breaks = Breaks(false, AtomicU8::new(0), AtomicU8::new(0));
        static BEHIND: Breaks = Breaks(true, AtomicU8::new(0), AtomicU8::new(0));
        for (breaks, expected) in [(&BEFORE, (true, 2, 1)), (&BEHIND, (false, 1, 0))] {
            let work = Work::Read("", Vec::new());
            let is_done = run::<&'static Breaks>(Some(breaks), &breaks, &work).await.is_ok();
            let count = |counter: &AtomicU8| counter.load(Ordering::Relaxed);
            assert_eq!((is_done, count(&breaks.1), count(&breaks.2)), expected);
        }
    }

    #[test]
    fn question_marks_become_numbers() {
        assert_eq!(
            numbered("select a from b where c = ? and (d, e) > (?, ?)").0,
            "select a from b where c = $1 and (d, e) > ($2, $3)"
        );
        assert_eq!(numbered("select 1").0, "select 1");
    }
}
