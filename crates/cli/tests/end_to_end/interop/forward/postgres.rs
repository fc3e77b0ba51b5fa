//! psql to a local PostgreSQL cluster: statements, large COPYs in both directions, TLS with channel binding.

use super::{Certificate, NAME, Workshop, all_installed, free_address, run};
use crate::prelude::*;

const PASSWORD: &str = "forwarded";
const ROWS: u32 = 200_000;

pub(super) struct Postgres {
    pub(super) address: SocketAddr,
    certificate: Certificate,
    program: Program,
    _workshop: Workshop,
}

impl Postgres {
    pub(super) fn start() -> Result<Self, String> {
        all_installed(&["psql"])?;
        let programs = programs().ok_or("initdb and postgres are not installed")?;
        let workshop = Workshop::new();
        let certificate = Certificate::new(&workshop);
        let password = workshop.file("password", PASSWORD);
        run(workshop
            .command(&programs.join("initdb"))
            .args(["-D", "data", "-U", "turnpike", "-A", "scram-sha-256", "--no-sync", "-E", "UTF8"])
            .arg("--locale=C")
            .arg(format!("--pwfile={}", password.display())));
        let address = free_address();
        let mut command = workshop.command(&programs.join("postgres"));
        command.args(["-D", "data"]);
        for setting in [
            format!("listen_addresses={}", address.ip()),
            format!("port={}", address.port()),
            format!("unix_socket_directories={}", workshop.path.display()),
            format!("ssl_cert_file={}", certificate.certificate.display()),
            format!("ssl_key_file={}", certificate.key.display()),
            "ssl=on".to_owned(),
            "fsync=off".to_owned(),
            // Keeps shared memory in the cluster's files instead of /dev/shm, where it would survive a crash.
            "dynamic_shared_memory_type=mmap".to_owned(),
            "shared_buffers=8MB".to_owned(),
            "log_destination=stderr".to_owned(),
        ] {
            command.args(["-c", &setting]);
        }
        let mut program = Program::start(&mut command);
        program.line_with("database system is ready to accept connections");
        Ok(Self { address, certificate, program, _workshop: workshop })
    }

    /// `prefix` separates the tables of several runs.
    pub(super) fn exercise(&self, through: SocketAddr, prefix: &str) {
        let dir = Dir::new();
        let table = format!("{prefix}_words");
        self.sql(through, &format!("create table {table} (number integer primary key, word text)"));
        let inserted = self.sql(
            through,
            &format!("insert into {table} select i, md5(i::text) from generate_series(1, {ROWS}) i"),
        );
        assert_eq!(inserted, format!("INSERT 0 {ROWS}"));
        let count = self.sql(through, &format!("select count(*), sum(number), min(word) from {table}"));
        let sum = u64::from(ROWS) * u64::from(ROWS + 1) / 2;
        assert!(count.starts_with(&format!("{ROWS}|{sum}|0000")), "{count}");

        let copy = |at: SocketAddr, name: &str| {
            let path = dir.path().join(name);
            let query = format!("\\copy (select * from {table} order by number) to '{}'", path.display());
            assert_eq!(self.sql(at, &query), format!("COPY {ROWS}"));
            fs::read(path).expect("psql has written the file")
        };
        let (forwarded, direct) = (copy(through, "forwarded"), copy(self.address, "direct"));
        assert!(forwarded == direct, "{} bytes, {} without a forwarder", forwarded.len(), direct.len());
        assert!(direct.len() > 33 * ROWS as usize, "{} bytes", direct.len());

        let again = format!("{prefix}_again");
        self.sql(through, &format!("create table {again} (like {table})"));
        let from = dir.path().join("forwarded");
        assert_eq!(
            self.sql(through, &format!("\\copy {again} from '{}'", from.display())),
            format!("COPY {ROWS}")
        );
        let differing = format!("select count(*) from (table {table} except table {again}) t");
        assert_eq!(self.sql(self.address, &differing), "0");
        let script: String = (0..500).map(|i| format!("select {i};")).collect();
        let wanted: Vec<String> = (0..500).map(|i| i.to_string()).collect();
        let file = dir.file("many.sql", &script);
        let ended = run(self.psql(through, "disable").arg("-f").arg(file));
        assert_eq!(ended.stdout.lines().collect::<Vec<_>>(), wanted);
    }

    /// The password exchange is bound to the server's certificate (RFC 5929, tls-server-end-point): an interceptor with
    /// another certificate would be detected.
    fn exercise_tls(&self, through: SocketAddr) {
        let query = "select ssl, version from pg_stat_ssl where pid = pg_backend_pid()";
        let ended = run(self.psql(through, "verify-full").args(["-c", query]));
        assert!(ended.stdout.starts_with("t|TLSv1."), "{}", ended.stdout);
    }

    fn sql(&self, at: SocketAddr, query: &str) -> String {
        run(self.psql(at, "disable").args(["-c", query])).stdout
    }

    fn psql(&self, at: SocketAddr, tls: &str) -> Command {
        let binding = if tls == "disable" { "disable" } else { "require" };
        let mut command = Command::new("psql");
        // Ignores the user's .psqlrc and .pgpass.
        command.env("PGPASSWORD", PASSWORD).env("PGPASSFILE", "/dev/null");
        command.args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1"]).arg(format!(
            "host={NAME} hostaddr={} port={} user=turnpike dbname=postgres sslmode={tls} sslrootcert={} \
             channel_binding={binding} gssencmode=disable connect_timeout=20",
            at.ip(),
            at.port(),
            self.certificate.certificate.display()
        ));
        command
    }
}

/// SIGINT is PostgreSQL's fast shutdown; SIGKILL would leave shared memory behind.
impl Drop for Postgres {
    fn drop(&mut self) {
        if self.program.has_ended() {
            return;
        }
        self.program.signal("INT");
        let deadline = Instant::now() + SOON;
        while !self.program.has_ended() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Directory of initdb and postgres: one on the PATH, or Debian's directory for a version.
fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut places: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    places.sort();
    places.extend(installed("initdb").ok().and_then(|initdb| Some(initdb.parent()?.to_owned())));
    let has_both = |place: &PathBuf| ["initdb", "postgres"].iter().all(|name| place.join(name).is_file());
    places.into_iter().rev().find(has_both)
}

#[test]
fn statements_and_large_copies_pass() {
    let server = need!(Postgres::start());
    for copy in copies() {
        let mut forward =
            Forward::start(&[&format!("tcp://127.0.0.1:0={}?name=sql&copy={copy}", server.address)]);
        server.exercise(forward.address("rule sql"), copy);
        server.exercise_tls(forward.address("rule sql"));
        forward.wait_for("turnpike_forward_connections", "rule=\"sql\"", 0);
    }
}
