//! A database of any supported kind.

use crate::{
    Backend, Edit, Existing, Rules, SqliteUse, StoreAddress, StoreError, StoredSecret, UserKeys, UserRow,
    directory::DirectoryLimits,
    http::HttpStore,
    redis::Redis,
    sql::{Mysql, Postgres},
    sqlite::Sqlite,
    tables::CoturnTables,
};

pub struct Database(Kind);

enum Kind {
    Sqlite(CoturnTables<Sqlite>),
    Postgres(CoturnTables<Postgres>),
    Mysql(CoturnTables<Mysql>),
    Redis(Box<Redis>),
    Http(HttpStore),
}

impl Database {
    /// `connections` applies to PostgreSQL, MySQL and HTTP, `file` only to SQLite. Must be called on the
    /// runtime that does the work.
    #[must_use]
    pub fn new(
        address: &StoreAddress,
        connections: usize,
        file: SqliteUse,
        limits: &DirectoryLimits,
    ) -> Self {
        let name = address.to_string();
        Self(match address {
            StoreAddress::Sqlite(path) => Kind::Sqlite(CoturnTables::new(Sqlite::new(path, file, name))),
            StoreAddress::Postgres(server) => {
                Kind::Postgres(CoturnTables::new(Postgres::new(server, connections, name)))
            }
            StoreAddress::Mysql(server) => {
                Kind::Mysql(CoturnTables::new(Mysql::new(server, connections, name)))
            }
            StoreAddress::Redis(server) => {
                Kind::Redis(Box::new(Redis::new(server, limits.deadline.mul_f32(0.75), name)))
            }
            StoreAddress::Http(address) => Kind::Http(HttpStore::new(address, connections, name)),
        })
    }
}

macro_rules! each {
    ($self:ident, $backend:ident => $question:expr) => {
        match &$self.0 {
            Kind::Sqlite($backend) => $question,
            Kind::Postgres($backend) => $question,
            Kind::Mysql($backend) => $question,
            Kind::Redis($backend) => $question,
            Kind::Http($backend) => $question,
        }
    };
}

impl Backend for Database {
    async fn user(&self, realm: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        each!(self, backend => backend.user(realm, name).await)
    }

    async fn secrets(&self, realm: &str) -> Result<Vec<StoredSecret>, StoreError> {
        each!(self, backend => backend.secrets(realm).await)
    }

    async fn rules(&self) -> Result<Rules, StoreError> {
        each!(self, backend => backend.rules().await)
    }

    async fn version(&self) -> Option<u64> {
        each!(self, backend => backend.version().await)
    }

    async fn users(&self, realm: Option<&str>, after: Option<&UserRow>) -> Result<Vec<UserRow>, StoreError> {
        each!(self, backend => backend.users(realm, after).await)
    }

    async fn apply(&self, edit: &Edit, existing: Existing) -> Result<bool, StoreError> {
        each!(self, backend => backend.apply(edit, existing).await)
    }
}
