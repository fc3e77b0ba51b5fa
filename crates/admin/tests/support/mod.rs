//! A program with an admin interface, clients of its relay, and a client that sends raw requests.

mod document;
pub(crate) mod examples;
pub(crate) mod log;
mod together;

use std::{
    fs,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::SystemTime,
};

use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use serde_json::Value;
use tokio::sync::oneshot;
use tracing_subscriber::filter::LevelFilter;
use turnpike_admin::{
    AccountStore, AdminInterface, AllocationQualities, Applications, Owner, ServerView, Serving,
};
use turnpike_api::{
    ClientRefusals, Drain, Draining, FleetAdmin, Job, Later, NotReloaded, Process, Program, RefusalFilter,
    Reloaded, RuleStatus,
};
use turnpike_config::{AdminAccess, AdminAddress, AdminSettings, Secret, Settings, api_keys};
use turnpike_events::Events;
use turnpike_net::Datapath;
use turnpike_relay::{
    Config, Relay, RelayAddress, RelayState,
    certificates::{self, Certificate},
};
use turnpike_stores::{Database, Directory, DirectoryLimits, SqliteUse, StoreAddress, UsageStore};
pub(crate) use turnpike_testkit::PATIENCE as SOON;
use turnpike_testkit::stun;
use turnpike_turn::server::{AllocationLimits, ClientNetworks, PeerRules, ServerConfig};
use turnpike_wire::address::UnixName;

pub(crate) use together::{Member, Together};

pub(crate) const FULL: &str = "full-0123456789abcdef";
pub(crate) const READ: &str = "read-0123456789abcdef";

pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Short, because socket paths are at most 107 bytes long.
        let path = std::env::temp_dir().join(format!("tpa-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn socket(&self, name: &str) -> AdminAddress {
        AdminAddress::Unix(self.path(name).to_str().unwrap().parse::<UnixName>().unwrap())
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// State of an address that has been up, or has been absent, since 1970.
pub(crate) fn relay_state(bind: IpAddr, is_up: bool) -> RelayState {
    let address = RelayAddress { bind, external: Some([192, 0, 2, 1].into()) };
    RelayState { address, is_up, since: SystemTime::UNIX_EPOCH }
}

pub(crate) struct Double {
    relay: Option<Arc<Relay>>,
    pub(crate) settings: Mutex<Settings>,
    pub(crate) store: Mutex<Option<AccountStore>>,
    pub(crate) usage: Mutex<Option<Arc<UsageStore>>>,
    pub(crate) networks: Mutex<Option<Arc<dyn ClientNetworks>>>,
    pub(crate) qualities: Mutex<Option<Arc<dyn AllocationQualities>>>,
    pub(crate) certificates: Mutex<Arc<[Certificate]>>,
    pub(crate) reload: Mutex<Result<Reloaded, NotReloaded>>,
    pub(crate) drained: Mutex<Vec<Drain>>,
    pub(crate) draining: AtomicBool,
    pub(crate) relays: Mutex<Vec<RelayState>>,
    pub(crate) level: Mutex<String>,
    pub(crate) ended: AtomicBool,
    pub(crate) refusals: Mutex<Vec<ClientRefusals>>,
    pub(crate) rules: Mutex<Vec<RuleStatus>>,
    pub(crate) events: Arc<Events>,
    /// `None` for a forwarder.
    fleet: Option<Arc<Member>>,
}

impl Double {
    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap()
    }
}

impl Process for Double {
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
    fn reload(&self) -> Later<'_, Result<Reloaded, NotReloaded>> {
        let result = self.reload.lock().unwrap().clone();
        Box::pin(async { result })
    }
    fn drain(&self, wanted: Drain) -> Later<'_, Option<Draining>> {
        self.drained.lock().unwrap().push(wanted);
        self.draining.store(true, Ordering::Relaxed);
        let ended = self.ended.load(Ordering::Relaxed);
        let deadline_s = wanted.deadline_s.map_or(30.0, f64::from);
        Box::pin(async move { (!ended).then_some(Draining { open: 7, deadline_s }) })
    }
    fn log_level(&self) -> String {
        self.level.lock().unwrap().clone()
    }
    fn set_log_level(&self, level: &str) -> Result<(), String> {
        let is_level = |text: &str| !text.is_empty() && text.parse::<LevelFilter>().is_ok();
        if !level.split(',').all(|directive| is_level(directive.rsplit('=').next().unwrap_or_default())) {
            return Err("not a level".to_owned());
        }
        *self.level.lock().unwrap() = level.to_owned();
        Ok(())
    }
    fn sandbox(&self) -> Option<turnpike_api::Sandbox> {
        Some(turnpike_api::Sandbox {
            system_calls: Some(200),
            read: Some(vec!["/etc".to_owned()]),
            written: None,
            capabilities: Some(Vec::new()),
            missing: vec!["files are not restricted: this is a test".to_owned()],
        })
    }
}

impl Program for Double {
    fn process(&self) -> &dyn Process {
        self
    }
    fn job(&self) -> Job {
        if self.relay.is_some() { Job::Serve } else { Job::Forward }
    }
    fn to_toml(&self) -> String {
        Double::settings(self).to_toml()
    }
    fn open(&self) -> u64 {
        7
    }
    fn metrics(&self) -> String {
        "# TYPE turnpike_draining gauge\nturnpike_draining 0.0\n# EOF\n".to_owned()
    }
    fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<ClientRefusals>> {
        self.relay.as_ref()?;
        let refusals = self.refusals.lock().unwrap();
        let fits = |refusal: &&ClientRefusals| {
            let client: SocketAddr = refusal.client.parse().unwrap();
            wanted.client.as_ref().is_none_or(|prefix| prefix.contains(client.ip()))
                && wanted.user.as_ref().is_none_or(|user| refusal.user.iter().any(|own| own.contains(user)))
        };
        Some(refusals.iter().filter(fits).take(most).cloned().collect())
    }
    fn rules(&self) -> Vec<RuleStatus> {
        self.rules.lock().unwrap().clone()
    }
    fn fleet(&self) -> Option<Arc<dyn FleetAdmin>> {
        self.fleet.as_ref().map(|member| Arc::<Member>::clone(member) as Arc<dyn FleetAdmin>)
    }
}

impl Owner for Double {
    fn events(&self) -> Option<Arc<Events>> {
        self.relay.as_ref().map(|_| Arc::clone(&self.events))
    }
    fn settings(&self) -> AdminSettings {
        Double::settings(self).admin.clone()
    }
    fn server(&self) -> Option<ServerView> {
        if self.ended.load(Ordering::Relaxed) {
            return None;
        }
        Some(ServerView {
            relay: Arc::clone(self.relay.as_ref()?),
            settings: Arc::new(Double::settings(self).clone()),
            store: self.store.lock().unwrap().clone(),
            certificates: Arc::clone(&self.certificates.lock().unwrap()),
            orders: Vec::new(),
            addresses: self.relays.lock().unwrap().clone().into(),
            datapath: Datapath::Gso,
            datapath_reason: "as configured".into(),
            usage: self.usage.lock().unwrap().clone(),
            networks: self.networks.lock().unwrap().clone(),
            qualities: self.qualities.lock().unwrap().clone(),
        })
    }
}

/// A program on a thread of its own, which stands in for the control thread.
pub(crate) struct Running {
    pub(crate) program: Arc<Double>,
    pub(crate) tcp: Vec<SocketAddr>,
    pub(crate) applications: Vec<SocketAddr>,
    pub(crate) dir: Dir,
    close: tokio::sync::mpsc::UnboundedSender<()>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn server(workers: usize) -> Self {
        Self::start(Some(workers), with_tokens)
    }

    pub(crate) fn node(together: &Together, name: &str, workers: usize) -> Self {
        Self::start_as(Some(together.join(name)), Some(workers), |settings, dir| {
            with_tokens(&mut settings.admin, dir);
        })
    }

    pub(crate) fn start(workers: Option<usize>, change: impl FnOnce(&mut AdminSettings, &Dir)) -> Self {
        Self::configured(workers, |settings, dir| change(&mut settings.admin, dir))
    }

    pub(crate) fn configured(workers: Option<usize>, change: impl FnOnce(&mut Settings, &Dir)) -> Self {
        Self::start_as(workers.map(|_| Member::alone()), workers, change)
    }

    fn start_as(
        fleet: Option<Arc<Member>>,
        workers: Option<usize>,
        change: impl FnOnce(&mut Settings, &Dir),
    ) -> Self {
        let dir = Dir::new();
        let mut settings = Settings::default();
        settings.admin.listen =
            vec![dir.socket("a.sock"), AdminAddress::Tcp((Ipv4Addr::LOCALHOST, 0).into())];
        settings.admin.loopback = AdminAccess::Read;
        settings.credentials.listen = vec![(Ipv4Addr::LOCALHOST, 0).into()];
        change(&mut settings, &dir);
        let began = settings.clone();
        let program = Arc::new(Double {
            relay: workers.map(|workers| Arc::new(relay(workers))),
            settings: Mutex::new(settings),
            store: Mutex::default(),
            usage: Mutex::default(),
            networks: Mutex::default(),
            qualities: Mutex::default(),
            certificates: Mutex::new([].into()),
            reload: Mutex::new(Ok(Reloaded::default())),
            drained: Mutex::default(),
            draining: AtomicBool::new(false),
            relays: vec![relay_state(Ipv4Addr::LOCALHOST.into(), true)].into(),
            level: Mutex::new("info".to_owned()),
            ended: AtomicBool::new(false),
            refusals: Mutex::default(),
            rules: Mutex::default(),
            events: Arc::new(Events::new("/turnpike/one")),
            fleet,
        });
        let (stop, mut stopped) = oneshot::channel::<()>();
        let (close, mut closes) = tokio::sync::mpsc::unbounded_channel();
        let (found, addresses) = mpsc::channel();
        let (served, state) = (Arc::clone(&program), dir.path(STATE));
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let opened = store(&state);
                opened.read().await.unwrap();
                *served.store.lock().unwrap() = Some(opened);
                let interface = AdminInterface::listen(served.job(), &began.admin, true, Vec::new()).unwrap();
                let applications = Applications::listen(&began, Vec::new()).unwrap();
                found.send((interface.addresses(), applications.addresses())).unwrap();
                let serving =
                    [applications.serve(Arc::clone(&served) as Arc<dyn Owner>), interface.serve(served)];
                loop {
                    tokio::select! {
                        _ = &mut stopped => break,
                        Some(()) = closes.recv() => serving.iter().for_each(Serving::close),
                    }
                }
            });
        });
        let (tcp, applications) = addresses.recv_timeout(SOON).expect("listening");
        Self { program, tcp, applications, dir, close, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn close(&self) {
        self.close.send(()).unwrap();
    }

    pub(crate) fn member(&self) -> &Member {
        self.program.fleet.as_ref().expect("a server")
    }

    pub(crate) fn relay(&self) -> &Relay {
        self.program.relay.as_ref().expect("a server")
    }

    pub(crate) fn allocated(&self) -> (UdpSocket, SocketAddr) {
        let client = stun::Client::new(self.relay().listeners().udp[0]);
        let allocated = client.ask(&stun::allocate_request(None));
        (client.socket().try_clone().unwrap(), allocated.address(stun::attribute::XOR_RELAYED_ADDRESS))
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&str>) -> Answer {
        let mut stream = UnixStream::connect(self.dir.path("a.sock")).unwrap();
        exchange(&mut stream, &request(method, path, "localhost", &[], body))
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, None)
    }

    pub(crate) fn get_with(&self, path: &str, header: (&str, &str)) -> Answer {
        let mut stream = UnixStream::connect(self.dir.path("a.sock")).unwrap();
        exchange(&mut stream, &request("GET", path, "localhost", &[header], None))
    }

    pub(crate) fn ask_tcp(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.say_tcp(&request(method, path, &self.tcp[0].to_string(), headers, None))
    }

    pub(crate) fn apply(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> Answer {
        let at = self.applications[0];
        let bytes = request(method, path, &at.to_string(), headers, body);
        exchange(&mut TcpStream::connect(at).unwrap(), &bytes)
    }

    pub(crate) fn key(&self, name: &str, more: Value) -> String {
        let key = api_keys::make(name, rand::random());
        let mut body = more;
        body["name"] = name.into();
        body["sha256"] = api_keys::hash_digits(&key).into();
        let answer = self.ask("POST", "/v1/keys", Some(&body.to_string()));
        assert_eq!(answer.status, 201, "{answer:?}");
        key.reveal().to_owned()
    }

    pub(crate) fn say_tcp(&self, bytes: &[u8]) -> Answer {
        exchange(&mut TcpStream::connect(self.tcp[0]).unwrap(), bytes)
    }

    pub(crate) fn stop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

fn with_tokens(settings: &mut AdminSettings, _: &Dir) {
    settings.tokens = vec![Secret::new(FULL)];
    settings.read_tokens = vec![Secret::new(READ)];
}

pub(crate) const STATE: &str = "state/turnpike.sqlite";

/// Must be called on a runtime.
pub(crate) fn store(file: &Path) -> AccountStore {
    let (address, limits) = (StoreAddress::Sqlite(file.to_owned()), DirectoryLimits::default());
    let database = Database::new(&address, 1, SqliteUse::Own, &limits);
    Directory::new(database, address.to_string(), limits)
}

fn relay(workers: usize) -> Relay {
    let config = Config {
        listen: vec![(Ipv4Addr::LOCALHOST, 0).into()],
        workers,
        relay: vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None }],
        ports: 30_000..=39_999,
        limits: AllocationLimits {
            allocations: 2000,
            allocations_per_user: 2000,
            ..AllocationLimits::default()
        },
        server: ServerConfig {
            authenticate: false,
            relay_v6: false,
            peers: PeerRules { allow: vec!["127.0.0.0/8".parse().unwrap()], ..PeerRules::default() },
            ..ServerConfig::default()
        },
        ..Config::default()
    };
    Relay::start(&config, Arc::new(()), Arc::new(())).unwrap()
}

pub(crate) fn request(
    method: &str,
    path: &str,
    host: &str,
    headers: &[(&str, &str)],
    body: Option<&str>,
) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if let Some(body) = body {
        text += &format!("Content-Length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "Content-Type") {
            text += "Content-Type: application/json\r\n";
        }
    }
    (text + "\r\n" + body.unwrap_or_default()).into_bytes()
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, wanted: &str) -> &str {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let found: Vec<&str> =
            lines.filter(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value).collect();
        assert_eq!(found.len(), 1, "{wanted} in {}", self.head);
        found[0]
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub(crate) fn problem(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/problem+json");
        let problem = self.json();
        assert_eq!(problem["status"], status);
        assert_eq!(problem["type"], "about:blank");
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.len() > 10), "{problem}");
        problem["code"].as_str().expect("a code").to_owned()
    }

    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        assert_eq!(self.header("content-type"), "application/json");
        self.json()
    }
}

pub(crate) fn exchange(stream: &mut (impl Read + Write), bytes: &[u8]) -> Answer {
    // The server may have closed the connection already.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&piece[..length]),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof) =>
            {
                break;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let text = String::from_utf8(answer).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    assert!(!chunked, "responses are short and not chunked");
    let answer = Answer { status, head: head.to_owned(), body: body.to_owned() };
    document::check(bytes, &answer);
    answer
}

/// Sends a request over TLS as the client in `config`.
pub(crate) fn exchange_tls(to: SocketAddr, config: &Arc<ClientConfig>, bytes: &[u8]) -> io::Result<Answer> {
    let name = ServerName::try_from("admin.example.org").unwrap();
    let connection = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
    let mut stream = StreamOwned::new(connection, TcpStream::connect(to)?);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    // TLS 1.3 reports a refused client certificate only at this point.
    stream.write_all(bytes)?;
    stream.flush()?;
    let mut first = [0; 1];
    if stream.read(&mut first)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(exchange(&mut Behind { first: Some(first[0]), stream }, &[]))
}

struct Behind<S> {
    first: Option<u8>,
    stream: S,
}

impl<S: Read> Read for Behind<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.first.take() {
            Some(first) => {
                buffer[0] = first;
                Ok(1)
            }
            None => self.stream.read(buffer),
        }
    }
}

impl<S: Write> Write for Behind<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

pub(crate) fn certificates_in(cert: &Path, key: &Path) -> Arc<[Certificate]> {
    let identity = certificates::read(cert, key).expect("a certificate");
    [Certificate { file: cert.into(), identity }].into()
}
