//! Database servers for tests. Each has a directory and port of its own, and is stopped when dropped. A proxy in front of a server can make
//! it appear slow, silent or unreachable.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use self::{
    files::{command_in, file_in, make_dir, run},
    template::Template,
};
use crate::{PATIENCE, certificates::Certificate, eventually, free_address};

mod files;
mod template;

pub const USER: &str = "turn";
/// The user's password; one of its characters needs escaping in a URL.
pub const PASSWORD: &str = "good%horse";
/// Database name; Redis uses a number.
pub const DATABASE: &str = "coturn";

/// Log size of MariaDB; the default takes 96 MB in each data directory.
const MARIADB_LOG: &str = "--innodb-log-file-size=4M";

pub struct Server {
    pub address: SocketAddr,
    /// Address for connections with TLS; for PostgreSQL and MariaDB the same as `address`.
    pub tls_address: SocketAddr,
    /// PEM file with the CA certificate that signed the server's certificate, which is for `localhost`.
    pub authority: PathBuf,
    pub dir: PathBuf,
    kind: Kind,
    arguments: Vec<String>,
    child: Option<Child>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Postgres,
    Mariadb,
    Redis,
    Sentinel,
}

impl Kind {
    fn says_when_ready(self) -> &'static str {
        match self {
            Self::Postgres => "database system is ready to accept connections",
            Self::Mariadb => "ready for connections",
            Self::Redis => "eady to accept connections",
            Self::Sentinel => "+monitor",
        }
    }
}

impl Server {
    pub fn postgres() -> Result<Self, String> {
        let programs = postgres_programs().ok_or("initdb and postgres are not installed")?;
        static DATA: OnceLock<Template> = OnceLock::new();
        let mut server = Self::new(Kind::Postgres);
        DATA.get_or_init(|| postgres_data(&programs)).copy_to(&server.dir);
        server.start();
        Ok(server)
    }

    pub fn mariadb() -> Result<Self, String> {
        let missing = |name: &str| format!("{name} is not installed");
        let install = installed("mariadb-install-db").ok_or_else(|| missing("mariadb-install-db"))?;
        installed("mariadbd").ok_or_else(|| missing("mariadbd"))?;
        static DATA: OnceLock<Template> = OnceLock::new();
        let mut server = Self::new(Kind::Mariadb);
        DATA.get_or_init(|| mariadb_data(&install)).copy_to(&server.dir);
        server.file(
            "init.sql",
            &format!(
                "create database {DATABASE};\ncreate user {USER}@'%' identified by '{PASSWORD}';\n\
                 grant all on {DATABASE}.* to {USER}@'%';\n"
            ),
        );
        server.start();
        // Empties the file, because its statements must be run only at the first start.
        server.file("init.sql", "");
        Ok(server)
    }

    pub fn redis() -> Result<Self, String> {
        Self::redis_with(&[])
    }

    pub fn redis_replica(master: &Self) -> Result<Self, String> {
        let (ip, port) = (master.address.ip().to_string(), master.address.port().to_string());
        Self::redis_with(&["--replicaof", &ip, &port, "--masterauth", PASSWORD])
    }

    /// A sentinel that watches a server under this name and promotes its replica when it fails.
    pub fn sentinel(master: &Self, name: &str) -> Result<Self, String> {
        redis_program().ok_or("neither redis-server nor valkey-server is installed")?;
        let mut server = Self::new(Kind::Sentinel);
        let (ip, port) = (master.address.ip(), master.address.port());
        server.file(
            "sentinel.conf",
            &format!(
                "bind 127.0.0.1\nport {}\ndir {}\nsentinel monitor {name} {ip} {port} 1\nsentinel auth-pass {name} {PASSWORD}\n\
                 sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 2000\n",
                server.address.port(),
                server.dir.display()
            ),
        );
        server.start();
        Ok(server)
    }

    pub fn redis_cluster() -> Result<[Self; 2], String> {
        let start = || {
            let bus = free_address().port().to_string();
            let files = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
            let server = Self::redis_with(&[&files[..], &["--cluster-port", &bus]].concat())?;
            Ok::<_, String>((server, bus))
        };
        let ((first, _), (second, bus)) = (start()?, start()?);
        first.say("CLUSTER ADDSLOTSRANGE 0 8191");
        second.say("CLUSTER ADDSLOTSRANGE 8192 16383");
        first.say(&format!("CLUSTER MEET 127.0.0.1 {} {bus}", second.address.port()));
        for server in [&first, &second] {
            eventually("the cluster is complete", || {
                let info = server.say("CLUSTER INFO");
                info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:2")
            });
        }
        Ok([first, second])
    }

    fn redis_with(arguments: &[&str]) -> Result<Self, String> {
        redis_program().ok_or("neither redis-server nor valkey-server is installed")?;
        let mut server = Self::new(Kind::Redis);
        server.tls_address.set_port(free_address().port());
        server.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        server.start();
        Ok(server)
    }

    pub fn say(&self, line: &str) -> String {
        let mut stream = TcpStream::connect(self.address).expect("the server accepts connections");
        stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is not zero");
        write!(stream, "AUTH {PASSWORD}\r\n{line}\r\nQUIT\r\n").expect("the command is sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server responds");
        let rest = answer.strip_prefix("+OK\r\n").unwrap_or(&answer);
        rest.strip_suffix("+OK\r\n").unwrap_or(rest).to_owned()
    }

    fn new(kind: Kind) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("turnpike-store-{}-{number}", std::process::id()));
        make_dir(&dir);
        let address = free_address();
        let authority = dir.join("ca.pem");
        let server =
            Self { address, tls_address: address, authority, dir, kind, arguments: Vec::new(), child: None };
        let (certificate, authority) = Certificate::of_authority(&["localhost"]);
        for (name, text) in
            [("ca.pem", &authority), ("cert.pem", &certificate.pem), ("key.pem", &certificate.key)]
        {
            server.file(name, text);
        }
        fs::set_permissions(&server.authority, fs::Permissions::from_mode(0o644))
            .expect("the file belongs to this user");
        server
    }

    /// Starts or restarts the server with its data, and waits until it answers.
    pub fn start(&mut self) {
        let log = fs::File::create(self.dir.join("log")).expect("the directory is writable");
        let mut command = self.program();
        let errors = log.try_clone().expect("a descriptor is left");
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        self.child = Some(child);
        let ready = self.kind.says_when_ready();
        eventually(&format!("{command:?} is ready"), || {
            let said = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "the server exited: {said}");
            said.contains(ready) && TcpStream::connect(self.address).is_ok()
        });
    }

    fn program(&self) -> Command {
        let port = self.address.port();
        let path = |name: &str| self.dir.join(name).display().to_string();
        match self.kind {
            Kind::Postgres => {
                let programs = postgres_programs().expect("the program was found before");
                let mut command = self.command(&programs.join("postgres"));
                command.args(["-D", "data"]);
                for setting in [
                    "listen_addresses=127.0.0.1".to_owned(),
                    format!("port={port}"),
                    format!("unix_socket_directories={}", self.dir.display()),
                    format!("ssl_cert_file={}", path("cert.pem")),
                    format!("ssl_key_file={}", path("key.pem")),
                    "ssl=on".to_owned(),
                    "fsync=off".to_owned(),
                    // Keeps shared memory in files of the data directory instead of /dev/shm, where it would survive a crash.
                    "dynamic_shared_memory_type=mmap".to_owned(),
                    "shared_buffers=16MB".to_owned(),
                    "log_destination=stderr".to_owned(),
                ] {
                    command.args(["-c", &setting]);
                }
                command
            }
            Kind::Mariadb => {
                let mut command = self.command(&installed("mariadbd").expect("the program was found before"));
                command.args([
                    "--no-defaults",
                    &format!("--datadir={}", path("data")),
                    "--bind-address=127.0.0.1",
                    "--skip-name-resolve",
                ]);
                command.arg(format!("--port={port}")).arg(format!("--socket={}", path("socket")));
                command
                    .arg(format!("--pid-file={}", path("pid")))
                    .arg(format!("--init-file={}", path("init.sql")));
                command
                    .arg(format!("--ssl-cert={}", path("cert.pem")))
                    .arg(format!("--ssl-key={}", path("key.pem")));
                command.args([
                    MARIADB_LOG,
                    "--innodb-flush-log-at-trx-commit=0",
                    "--innodb-buffer-pool-size=16M",
                ]);
                command
            }
            Kind::Redis => {
                let mut command = self.command(&redis_program().expect("the program was found before"));
                command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--requirepass", PASSWORD]);
                command.args(["--dir", &self.dir.display().to_string(), "--appendonly", "no"]);
                command.args([
                    "--tls-port",
                    &self.tls_address.port().to_string(),
                    "--tls-auth-clients",
                    "no",
                ]);
                command.args(["--tls-cert-file", &path("cert.pem"), "--tls-key-file", &path("key.pem")]);
                command.args(["--tls-ca-cert-file", &path("ca.pem")]).args(&self.arguments);
                command
            }
            Kind::Sentinel => {
                let mut command = self.command(&redis_program().expect("the program was found before"));
                command.args(["sentinel.conf", "--sentinel"]);
                command
            }
        }
    }

    pub fn stop(&mut self) {
        // SIGINT is PostgreSQL's fast shutdown (SIGKILL would leave shared memory behind); the others stop on SIGTERM.
        self.signal(if self.kind == Kind::Postgres { "INT" } else { "TERM" });
        self.ends();
    }

    /// Kills the server as in a crash, so that unwritten data is lost.
    pub fn kill(&mut self) {
        // SIGQUIT stops all processes of PostgreSQL immediately, SIGKILL only the first one.
        self.signal(if self.kind == Kind::Postgres { "QUIT" } else { "KILL" });
        self.ends();
    }

    pub fn signal(&self, name: &str) {
        let Some(child) = &self.child else { return };
        let kill = format!("kill -{name} {}", child.id());
        let _ = Command::new("sh").args(["-c", &kill]).status();
    }

    fn ends(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let deadline = Instant::now() + PATIENCE / 4;
        while Instant::now() < deadline {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = child.kill();
        let _ = child.wait();
    }

    pub fn url(&self, address: SocketAddr, options: &str) -> String {
        let password = PASSWORD.replace('%', "%25");
        match self.kind {
            Kind::Postgres => format!("postgres://{USER}:{password}@{address}/{DATABASE}{options}"),
            Kind::Mariadb => format!("mysql://{USER}:{password}@{address}/{DATABASE}{options}"),
            Kind::Redis | Kind::Sentinel => format!("redis://:{password}@{address}/0{options}"),
        }
    }

    pub fn coturn_words(&self) -> String {
        let (ip, port) = (self.address.ip(), self.address.port());
        match self.kind {
            Kind::Postgres => {
                format!("host={ip} port={port} dbname={DATABASE} user={USER} password='{PASSWORD}'")
            }
            Kind::Mariadb => {
                format!("host={ip} port={port} dbname={DATABASE} user={USER} password={PASSWORD}")
            }
            Kind::Redis | Kind::Sentinel => format!("ip={ip} port={port} dbname=0 password={PASSWORD}"),
        }
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        file_in(&self.dir, name, content)
    }

    fn command(&self, program: &Path) -> Command {
        command_in(&self.dir, program)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    target: SocketAddr,
    delay: AtomicU64,
    holds: AtomicBool,
    refuses: AtomicBool,
    garbles: AtomicBool,
    ends: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
    accepted: AtomicUsize,
}

impl Proxy {
    pub fn new(target: SocketAddr) -> Self {
        Self::on(Ipv4Addr::LOCALHOST, target)
    }

    pub fn on(ip: Ipv4Addr, target: SocketAddr) -> Self {
        let listener = TcpListener::bind((ip, 0)).expect("a free port");
        let address = listener.local_addr().expect("the socket is bound");
        let state = Arc::new(State {
            target,
            delay: AtomicU64::new(0),
            holds: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            garbles: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            open: Mutex::default(),
            accepted: AtomicUsize::new(0),
        });
        let accepting = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if accepting.ends.load(Ordering::Relaxed) {
                    return;
                }
                accepting.accept(&client);
            }
        });
        Self { address, state }
    }

    pub fn delay(&self, delay: Duration) {
        self.state.delay.store(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Withholds all data without closing connections.
    pub fn hold(&self, holds: bool) {
        self.state.holds.store(holds, Ordering::Relaxed);
    }

    /// Closes existing and new connections.
    pub fn refuse(&self, refuses: bool) {
        self.state.refuses.store(refuses, Ordering::Relaxed);
        if refuses {
            self.state.end_all();
        }
    }

    /// Corrupts every other byte of the server's replies.
    pub fn garble(&self, garbles: bool) {
        self.state.garbles.store(garbles, Ordering::Relaxed);
    }

    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ends.store(true, Ordering::Relaxed);
        self.state.end_all();
        let _ = TcpStream::connect(self.address);
    }
}

impl State {
    fn accept(self: &Arc<Self>, client: &TcpStream) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        if self.refuses.load(Ordering::Relaxed) {
            return;
        }
        let Ok(server) = TcpStream::connect(self.target) else { return };
        for stream in [client, &server] {
            let _ = stream.set_nodelay(true);
        }
        let copies = [(client, &server, false), (&server, client, true)]
            .map(|(from, to, answers)| (from.try_clone(), to.try_clone(), answers));
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.extend([client, &server].into_iter().filter_map(|stream| stream.try_clone().ok()));
        drop(open);
        for (from, to, answers) in copies {
            let (Ok(from), Ok(to)) = (from, to) else { return };
            let state = Arc::clone(self);
            thread::spawn(move || {
                let _ = state.pass_on(from, to, answers);
            });
        }
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream, answers: bool) -> io::Result<()> {
        let mut buffer = [0; 16_384];
        loop {
            let len = from.read(&mut buffer)?;
            if len == 0 {
                return to.shutdown(std::net::Shutdown::Write);
            }
            thread::sleep(Duration::from_millis(self.delay.load(Ordering::Relaxed)));
            while self.holds.load(Ordering::Relaxed) && !self.ends.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
            }
            if answers && self.garbles.load(Ordering::Relaxed) {
                buffer[..len].iter_mut().step_by(2).for_each(|byte| *byte ^= 0x55);
            }
            to.write_all(&buffer[..len])?;
        }
    }

    fn end_all(&self) {
        for stream in self.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn postgres_data(programs: &Path) -> Template {
    Template::new("postgres", |dir| {
        let password = file_in(dir, "password", PASSWORD);
        run(command_in(dir, &programs.join("initdb"))
            .args(["-D", "data", "-U", USER, "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C"])
            .arg(format!("--pwfile={}", password.display())));
        let create = file_in(dir, "create.sql", &format!("create database {DATABASE}\n"));
        let create = fs::File::open(create).expect("the file exists");
        let mut alone = command_in(dir, &programs.join("postgres"));
        run(alone.args(["--single", "-D", "data", "-c", "fsync=off", "postgres"]).stdin(create));
    })
}

fn mariadb_data(install: &Path) -> Template {
    Template::new("mariadb", |dir| {
        run(command_in(dir, install).args([
            "--no-defaults",
            // MariaDB would resolve a relative path from the program's directory.
            &format!("--datadir={}", dir.join("data").display()),
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            MARIADB_LOG,
        ]));
    })
}

/// Finds a program on the PATH or in the sbin directories, which are not on the PATH of ordinary users.
pub fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let servers = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(servers).map(|dir| dir.join(name)).find(|program| program.is_file())
}

fn postgres_programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut places: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    places.sort();
    places.extend(installed("initdb").and_then(|initdb| Some(initdb.parent()?.to_owned())));
    let has_both = |place: &PathBuf| ["initdb", "postgres"].iter().all(|name| place.join(name).is_file());
    places.into_iter().rev().find(has_both)
}

fn redis_program() -> Option<PathBuf> {
    installed("redis-server").or_else(|| installed("valkey-server"))
}
