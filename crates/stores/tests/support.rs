//! Each kind of store, with a way to write to it that is independent of this crate.

use std::{net::SocketAddr, path::PathBuf};

use sqlx::{Connection as _, MySqlConnection, PgConnection};
use tokio::runtime::Runtime;
use turnpike_stores::{Backend as _, Database, Directory, DirectoryLimits, Edit, SqliteUse, StoreAddress};
use turnpike_testkit::{
    HttpStub,
    alone::skip,
    databases::{PASSWORD, Server},
};

const DOCUMENT: &str = include_str!("../../../docs/stores.md");

pub(crate) struct World {
    pub(crate) runtime: Runtime,
    pub(crate) kind: Kind,
    /// Address in a form that [`StoreAddress`] parses.
    pub(crate) url: String,
    pub(crate) server: Option<Server>,
    pub(crate) stub: Option<HttpStub>,
    pub(crate) file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
    Mariadb,
    Redis,
    /// An application's endpoint: users, and nothing else.
    Http,
}

pub(crate) fn each(test: impl Fn(&mut World)) {
    for kind in [Kind::Sqlite, Kind::Postgres, Kind::Mariadb, Kind::Redis] {
        on(kind, &test);
    }
}

pub(crate) fn on(kind: Kind, test: impl Fn(&mut World)) {
    match World::new(kind) {
        Ok(mut world) => test(&mut world),
        Err(why) => skip(&why),
    }
}

impl World {
    fn new(kind: Kind) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let server = match kind {
            Kind::Sqlite | Kind::Http => None,
            Kind::Postgres => Some(Server::postgres()?),
            Kind::Mariadb => Some(Server::mariadb()?),
            Kind::Redis => Some(Server::redis()?),
        };
        let file = (kind == Kind::Sqlite).then(file_of_a_test);
        let stub = (kind == Kind::Http).then(HttpStub::new);
        let url = match (&server, &file, &stub) {
            (Some(server), ..) => server.url(server.address, ""),
            (None, Some(file), _) => format!("sqlite://{}", file.display()),
            (None, None, Some(stub)) => url_of_stub(stub.address),
            (None, None, None) => unreachable!("neither a server nor a file"),
        };
        let world = Self { runtime, kind, url, server, stub, file };
        if let Some(file) = &world.file {
            drop(rusqlite::Connection::open(file).expect("a file can be created"));
        }
        if !matches!(kind, Kind::Redis | Kind::Http) {
            world.sql(&schema());
        }
        Ok(world)
    }

    pub(crate) fn database(&self) -> Database {
        self.database_at(&self.url)
    }

    pub(crate) fn database_at(&self, url: &str) -> Database {
        let _inside = self.runtime.enter();
        let address: StoreAddress = url.parse().expect("an address");
        Database::new(&address, 8, SqliteUse::Foreign, &DirectoryLimits::default())
    }

    pub(crate) fn directory_at(&self, url: &str, limits: DirectoryLimits) -> Directory<Database> {
        let _inside = self.runtime.enter();
        Directory::new(self.database_at(url), "the store of a test".to_owned(), limits)
    }

    pub(crate) fn wait<T>(&self, question: impl Future<Output = T>) -> T {
        self.runtime.block_on(question)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.stub
            .as_ref()
            .map_or_else(|| self.server.as_ref().expect("a server").address, |stub| stub.address)
    }

    /// Address of the same server behind a proxy.
    pub(crate) fn url_at(&self, address: SocketAddr) -> String {
        match &self.server {
            Some(server) => server.url(address, ""),
            None => url_of_stub(address),
        }
    }

    pub(crate) fn stop(&mut self) {
        match &mut self.stub {
            Some(stub) => stub.stop(),
            None => self.server.as_mut().expect("a server").stop(),
        }
    }

    pub(crate) fn start(&mut self) {
        match &mut self.stub {
            Some(stub) => stub.start(),
            None => self.server.as_mut().expect("a server").start(),
        }
    }

    pub(crate) fn edit(&self, edit: &Edit) -> bool {
        if let (Some(stub), Edit::PutUser { realm, name, keys }) = (&self.stub, edit) {
            let request = format!("{{\"realm\":\"{realm}\",\"user\":\"{name}\"}}");
            stub.answer(&request, &format!("{{\"key\":\"{}\"}}", *keys.to_hex()));
            return false;
        }
        self.wait(self.database().edit(edit)).expect("writable")
    }

    pub(crate) fn sql(&self, statements: &str) {
        let text = sqlx::AssertSqlSafe(statements.to_owned());
        self.wait(async {
            match self.kind {
                Kind::Sqlite => {
                    let file = self.file.as_ref().expect("a file");
                    let connection = rusqlite::Connection::open(file).expect("the file exists");
                    connection
                        .execute_batch(statements)
                        .unwrap_or_else(|error| panic!("{error}: {statements}"));
                }
                Kind::Postgres => {
                    let mut connection = PgConnection::connect(&self.url).await.expect("an answer");
                    sqlx::raw_sql(text).execute(&mut connection).await.expect("statements");
                }
                Kind::Mariadb => {
                    let mut connection = MySqlConnection::connect(&self.url).await.expect("an answer");
                    sqlx::raw_sql(text).execute(&mut connection).await.expect("statements");
                }
                Kind::Redis | Kind::Http => panic!("no SQL"),
            }
        });
    }

    /// Runs Redis commands, one per line; words must not contain spaces.
    pub(crate) fn redis(&self, commands: &str) {
        self.wait(async {
            let client = redis::Client::open(self.url.as_str()).expect("an address");
            let mut connection = client.get_multiplexed_async_connection().await.expect("an answer");
            for line in commands.lines().map(str::trim).filter(|line| !line.is_empty()) {
                let mut words = line.split(' ');
                let mut command = redis::cmd(words.next().expect("a word"));
                for word in words {
                    command.arg(word);
                }
                let () = command
                    .query_async(&mut connection)
                    .await
                    .unwrap_or_else(|error| panic!("{line}: {error}"));
            }
        });
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn url_of_stub(address: SocketAddr) -> String {
    format!("http://{}@{address}/users", PASSWORD.replace('%', "%25"))
}

fn schema() -> String {
    let (_, rest) = DOCUMENT.split_once("```sql\n").expect("the document contains the schema");
    rest.split_once("```").expect("a closing fence").0.to_owned()
}

pub(crate) fn file_of_a_test() -> PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    dir.join(format!("store-{}-{number}.sqlite", std::process::id()))
}

pub(crate) fn impatient() -> DirectoryLimits {
    DirectoryLimits { deadline: std::time::Duration::from_secs(2), ..DirectoryLimits::default() }
}
