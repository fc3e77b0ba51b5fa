//! Fuzz target: arbitrary requests over each kind of connection. Responses are documented and contain no
//! secret; changes need permission.

use std::{
    net::Ipv4Addr,
    panic::AssertUnwindSafe,
    sync::{Mutex, MutexGuard, atomic::AtomicUsize},
    time::SystemTime,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
    join,
    runtime::{Builder, Runtime},
    sync::Semaphore,
};
use turnpike_api::{
    ClientRefusals, Drain, Draining, Job, Later, NotReloaded, Process, Program, RefusalFilter, Reloaded,
};
use turnpike_config::{
    AdminAccess, AdminSettings, AuthSettings, ConfiguredUser, RealmSettings, Secret, Settings, UserSecret,
    api_keys,
};
use turnpike_net::Datapath;
use turnpike_relay::{Config, Relay, RelayAddress, RelayState, certificates::Certificate};
use turnpike_stores::{
    ApiKey, Database, Directory, DirectoryLimits as StoreLimits, Edit, SqliteUse, StoreAddress,
};
use turnpike_testkit::{
    Dir,
    fuzz::{self, Input},
};

use super::*;
use crate::{
    accounts::AccountStore,
    application_access::ApplicationGate,
    changes::Changes,
    problem::Problem,
    program::{Owner, ServerView},
    routes,
};

const FULL: &str = "full-0123456789abcdef";
const READ: &str = "read-0123456789abcdef";
const KEY: &str = "tpk_shop.0123456789abcdefghijklmnopqrstuvwxyzABCDEFG";
const PASSWORD: &str = "a password of alice";
const SECRET: &str = "a secret of the realm";
/// Secrets that no response may contain.
const PRIVATE: [&str; 5] = [FULL, READ, KEY, PASSWORD, SECRET];

/// Maximum length of a response in bytes; longer than a page of allocations or users.
const LONGEST: u64 = 1 << 20;

const METHODS: [&str; 8] = ["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "FETCH"];
/// All paths except those with delayed responses.
const PATHS: [&str; 34] = [
    "/",
    "/livez",
    "/readyz",
    "/healthz",
    "/metrics",
    "/openapi.json",
    "/web/main.js",
    "/v1/access",
    "/v1/refusals",
    "/v1/status",
    "/v1/build",
    "/v1/config",
    "/v1/log",
    "/v1/reload",
    "/v1/drain",
    "/v1/allocations",
    "/v1/allocations/00000000000000000000000000000000",
    "/v1/users",
    "/v1/users/alice",
    "/v1/users/%F0%9F%A6%80",
    "/v1/secrets",
    "/v1/secrets/rotation",
    "/v1/secrets/dc365e79d41cfae1",
    "/v1/keys",
    "/v1/keys/shop",
    "/v1/realms",
    "/v1/realms/tenant.example",
    "/v1/limits",
    "/v1/listeners",
    "/v1/certificates",
    "/v1/credentials",
    "/v1/allocations/",
    "//livez",
    "http://localhost/v1/status",
];
const QUERIES: [&str; 14] = [
    "realm",
    "limit",
    "cursor",
    "user",
    "client",
    "transport",
    "relayed",
    "service",
    "username",
    "ttl",
    "key",
    "api",
    "colour",
    "kid",
];
const VALUES: [&str; 16] = [
    "alice",
    "tenant.example",
    "0",
    "1",
    "1000",
    "4294967295",
    "18446744073709551616",
    "-1",
    "turn",
    "udp",
    "192.0.2.0/24",
    "2001:db8::1",
    "6578616d706c652e6f7267.616c696365",
    "%00",
    "%ff",
    "a+b%20c",
];
const MEMBERS: [&str; 17] = [
    "name",
    "realm",
    "password",
    "secret",
    "overlap_s",
    "sha256",
    "max_ttl",
    "rate",
    "max_allocations",
    "max_allocations_per_user",
    "bits_per_second_per_allocation",
    "level",
    "deadline_s",
    "user",
    "ttl",
    "kid",
    "colour",
];
const JSON: [&str; 14] = [
    "\"alice\"",
    "\"tenant.example\"",
    "\"north\"",
    "\"\"",
    "\" a \"",
    "\"info,turnpike=debug\"",
    "\"abababababababababababababababababababababababababababababababab\"",
    "null",
    "0",
    "60",
    "-1",
    "4294967296",
    "1e3",
    "[{}]",
];
const HEADERS: [&str; 18] = [
    "Authorization: Bearer full-0123456789abcdef",
    "Authorization: bearer  read-0123456789abcdef",
    "Authorization: Bearer tpk_shop.0123456789abcdefghijklmnopqrstuvwxyzABCDEFG",
    "Authorization: Basic YTpi",
    "Host: localhost",
    "Host: turn.example.org:9641",
    "Host: evil.example",
    "Host: [::1]:9641",
    "Origin: http://localhost",
    "Origin: https://page.example",
    "Origin: null",
    "Sec-Fetch-Site: cross-site",
    "Sec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document",
    "Access-Control-Request-Method: POST",
    "Content-Type: application/json; charset=utf-8",
    "Content-Type: application/x-www-form-urlencoded",
    "Accept: text/html, application/openmetrics-text",
    "Expect: 100-continue",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Unix,
    Loopback(AdminAccess),
    Tls,
    Application,
}

const WAYS: [Way; 5] = [
    Way::Unix,
    Way::Loopback(AdminAccess::None),
    Way::Loopback(AdminAccess::Read),
    Way::Tls,
    Way::Application,
];

struct Double {
    relay: Arc<Relay>,
    settings: Mutex<Settings>,
    store: Mutex<AccountStore>,
    told: AtomicUsize,
}

impl Double {
    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().expect("the lock is not poisoned")
    }

    fn store(&self) -> AccountStore {
        self.store.lock().expect("the lock is not poisoned").clone()
    }

    fn is_told(&self) {
        self.told.fetch_add(1, Ordering::Relaxed);
    }
}

impl Process for Double {
    fn is_draining(&self) -> bool {
        false
    }
    fn reload(&self) -> Later<'_, Result<Reloaded, NotReloaded>> {
        self.is_told();
        Box::pin(async { Ok(Reloaded::default()) })
    }
    fn drain(&self, wanted: Drain) -> Later<'_, Option<Draining>> {
        self.is_told();
        let deadline_s = wanted.deadline_s.map_or(30.0, f64::from);
        Box::pin(async move { Some(Draining { open: 7, deadline_s }) })
    }
    fn log_level(&self) -> String {
        "info".to_owned()
    }
    fn set_log_level(&self, level: &str) -> Result<(), String> {
        self.is_told();
        if level.is_empty() { Err("no level".to_owned()) } else { Ok(()) }
    }
}

impl Program for Double {
    fn process(&self) -> &dyn Process {
        self
    }
    fn job(&self) -> Job {
        Job::Serve
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
    fn refusals(&self, _: &RefusalFilter, _: usize) -> Option<Vec<ClientRefusals>> {
        Some(Vec::new())
    }
}

impl Owner for Double {
    fn settings(&self) -> AdminSettings {
        Double::settings(self).admin.clone()
    }
    fn server(&self) -> Option<ServerView> {
        Some(ServerView {
            relay: Arc::clone(&self.relay),
            settings: Arc::new(Double::settings(self).clone()),
            store: Some(self.store()),
            certificates: Arc::from(Vec::<Certificate>::new()),
            orders: Vec::new(),
            addresses: Arc::from([RelayState {
                address: RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None },
                is_up: true,
                since: SystemTime::UNIX_EPOCH,
            }]),
            datapath: Datapath::Gso,
            datapath_reason: "as configured".into(),
            usage: None,
            networks: None,
            qualities: None,
        })
    }
}

struct Bench {
    runtime: Runtime,
    program: Arc<Double>,
    routers: [Router; 2],
    stores: AtomicUsize,
    /// Contents of an unchanged store.
    pristine: String,
    dir: Dir,
}

#[test]
fn admin_requests() {
    let bench = AssertUnwindSafe(Bench::new());
    fuzz::target("admin_requests", seeds, |bytes| bench.check(bytes));
}

impl Bench {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (dir, settings) = (Dir::new(), settings());
        let (store, pristine) = runtime.block_on(async {
            let store = store_of(&dir, 0).await;
            let pristine = contents(&store).await;
            (store, pristine)
        });
        let config = Config {
            listen: vec![(Ipv4Addr::LOCALHOST, 0).into()],
            workers: 1,
            relay: vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: None }],
            ..Config::default()
        };
        let relay = Relay::start(&config, Arc::new(()), Arc::new(())).expect("loopback");
        let program = Arc::new(Double {
            relay: Arc::new(relay),
            settings: Mutex::new(settings),
            store: Mutex::new(store),
            told: AtomicUsize::new(0),
        });
        let routers = runtime.block_on(async {
            let program = Arc::clone(&program) as Arc<dyn Owner>;
            let gate = ApplicationGate::new(Arc::clone(&program), None);
            [
                routes::router(Arc::clone(&program), Changes::default(), None),
                routes::for_applications(program, gate),
            ]
        });
        Self { runtime, program, routers, stores: AtomicUsize::new(0), pristine, dir }
    }

    fn check(&self, bytes: &[u8]) {
        let mut input = Input::new(bytes);
        let way = *input.choice(&WAYS);
        let request = if input.below(4) == 0 { input.rest().to_vec() } else { request(&mut input) };
        if waits(way, &request) {
            return;
        }
        let told = self.program.told.load(Ordering::Relaxed);
        let answer = self.runtime.block_on(self.ask(way, &request));
        is_described(way, &request, &answer);
        let said = String::from_utf8_lossy(&answer);
        for private in PRIVATE.iter().filter(|private| !has(&request, private)) {
            assert!(!said.contains(private), "{private:?} in {said}");
        }
        let changed = self.restore() || told != self.program.told.load(Ordering::Relaxed);
        assert!(!changed || may_change(way, &request), "{way:?}: {}", String::from_utf8_lossy(&request));
    }

    async fn ask(&self, way: Way, request: &[u8]) -> Vec<u8> {
        let from = (Ipv4Addr::LOCALHOST, 50_000).into();
        let (via, router) = match way {
            Way::Unix => (Via::Unix(Some(0)), &self.routers[0]),
            Way::Loopback(access) => {
                Double::settings(&self.program).admin.loopback = access;
                (Via::Loopback(from), &self.routers[0])
            }
            Way::Tls => (Via::Tls(from, None), &self.routers[0]),
            Way::Application => (Via::Loopback(from), &self.routers[1]),
        };
        // Practically no timeouts, because the machine may be busy.
        let day = Duration::from_secs(86_400);
        let limits = ConnectionLimits { head: day, whole: day, ..ConnectionLimits::of_one(1) };
        let http = http(limits);
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("the only permit");
        let router = router.clone();
        let (mut client, server) = duplex(1 << 16);
        let asks = async {
            let mut answer = Vec::new();
            // The server may have closed the connection already.
            let _ = client.write_all(request).await;
            let _ = client.shutdown().await;
            let _ = (&mut client).take(LONGEST + 1).read_to_end(&mut answer).await;
            drop(client);
            answer
        };
        let (answer, ()) =
            join!(asks, speak(&http, server, router, via, limits, RequestProgress::new(place), &ADMIN));
        answer
    }

    fn restore(&self) -> bool {
        let store = self.program.store();
        let changed = self.runtime.block_on(contents(&store)) != self.pristine;
        if changed {
            let last = self.stores.fetch_add(1, Ordering::Relaxed);
            let fresh = self.runtime.block_on(store_of(&self.dir, last + 1));
            *self.program.store.lock().expect("the lock is not poisoned") = fresh;
            let _ = std::fs::remove_dir_all(self.dir.at(&last.to_string()));
        }
        changed
    }
}

fn settings() -> Settings {
    let user = |name: &str| ConfiguredUser {
        name: name.to_owned(),
        secret: UserSecret::Password(Secret::new(PASSWORD)),
    };
    let mut settings = Settings {
        realm: "example.org".to_owned(),
        auth: AuthSettings {
            users: vec![user("alice")],
            secrets: vec![Secret::new(SECRET)],
            ..AuthSettings::default()
        },
        realms: vec![RealmSettings {
            name: "tenant.example".to_owned(),
            users: vec![user("carol")],
            ..RealmSettings::default()
        }],
        ..Settings::default()
    };
    settings.admin.tokens = vec![Secret::new(FULL)];
    settings.admin.read_tokens = vec![Secret::new(READ)];
    settings.admin.hosts = vec!["turn.example.org".to_owned()];
    settings.credentials.hosts = vec!["turn.example.org".to_owned()];
    settings.credentials.origins = vec!["https://page.example".to_owned()];
    settings
}

/// Opens a store that contains one API key.
async fn store_of(dir: &Dir, number: usize) -> AccountStore {
    let file = dir.at(&number.to_string()).join("turnpike.sqlite");
    let (address, limits) = (StoreAddress::Sqlite(file), StoreLimits::default());
    let database = Database::new(&address, 1, SqliteUse::Own, &limits);
    let store = Directory::new(database, "memory".to_owned(), limits);
    let (name, hash) = ("shop".to_owned(), api_keys::hash(&Secret::new(KEY)));
    // The rate limit is so high that requests never reach it.
    let key = ApiKey { name, hash, realm: None, max_ttl: None, rate: Some(1_000_000) };
    store.edit(&Edit::PutApiKey(key)).await.expect("writable");
    store
}

async fn contents(store: &AccountStore) -> String {
    let users = loop {
        // A busy machine may exceed the store's deadline.
        if let Ok(users) = store.users(None, None).await {
            break users;
        }
    };
    let mut secrets: Vec<String> = store
        .all_secrets()
        .iter()
        .flat_map(|(realm, of)| {
            of.iter().map(move |secret| format!("{realm} {} {secret:?}", secret.value.reveal()))
        })
        .collect();
    secrets.sort_unstable();
    let realms = store.rules().map(|rules| format!("{:?}", rules.realms));
    format!("{users:?} {secrets:?} {:?} {realms:?}", store.api_keys())
}

fn has(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn may_change(way: Way, request: &[u8]) -> bool {
    way == Way::Unix || (way != Way::Application && has(request, FULL))
}

/// Returns true for requests with a delayed response.
fn waits(way: Way, request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let right = |shown: &str| match way {
        Way::Application => shown == KEY,
        _ => shown == FULL || shown == READ,
    };
    let behind = |mark: &'static str| {
        let small = text.to_ascii_lowercase();
        let places: Vec<usize> = small.match_indices(mark).map(|(at, _)| at + mark.len()).collect();
        places.into_iter().map(|at| text[at..].to_owned()).collect::<Vec<_>>()
    };
    let wrong_token = behind("authorization:").iter().any(|rest| {
        let value = rest.lines().next().unwrap_or_default().trim();
        value
            .split_once(' ')
            .is_some_and(|(scheme, token)| scheme.eq_ignore_ascii_case("bearer") && !right(token.trim()))
    });
    let wrong_key = way == Way::Application
        && ["key", "api"].into_iter().flat_map(&behind).any(|rest| {
            let value = rest.strip_prefix('=').map(|rest| rest.split(['&', ' ', '\r', '\n', '#']).next());
            value.flatten().is_some_and(|value| !right(value))
        });
    wrong_token || wrong_key || ["/v1/live", "/v1/workers"].iter().any(|path| text.contains(path))
}

/// Checks the format and length of a response, and that errors have the documented form.
fn is_described(way: Way, request: &[u8], answer: &[u8]) {
    assert!(answer.len() as u64 <= LONGEST);
    if answer.is_empty() {
        return;
    }
    let told = || format!("{way:?} {} {}", String::from_utf8_lossy(request), String::from_utf8_lossy(answer));
    let text = str::from_utf8(answer).unwrap_or_else(|_| panic!("{}", told()));
    let text = text.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(text);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { panic!("{}", told()) };
    let status: u16 = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    // This is possible on a busy machine.
    let is_slow = status == 503 && body.contains("store_unavailable");
    assert!((200..500).contains(&status) || is_slow, "{}", told());
    let header = |wanted: &str| {
        let lines = head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(name, _)| *name == wanted).map(|(_, value)| value).collect::<Vec<_>>().join(", ")
    };
    let media = header("content-type");
    if body.is_empty() {
        return;
    }
    assert_eq!(
        (&*header("cache-control"), &*header("x-content-type-options")),
        ("no-store", "nosniff"),
        "{}",
        told()
    );
    if status >= 400 {
        let problem: Problem =
            serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {}", told()));
        assert_eq!(
            (&*problem.kind, problem.status, &*media),
            ("about:blank", status, "application/problem+json")
        );
        assert!(problem.detail.len() > 10 && !problem.code.is_empty(), "{}", told());
        return;
    }
    // Without a token, a client learns only that the program exists.
    let knows = match way {
        Way::Unix | Way::Loopback(AdminAccess::Read | AdminAccess::Full) => true,
        Way::Loopback(AdminAccess::None) | Way::Tls => has(request, FULL) || has(request, READ),
        Way::Application => has(request, KEY),
    };
    let is_said = ["application/json", "application/toml", "application/openmetrics"];
    let tells = is_said.iter().any(|kind| media.starts_with(kind)) || media.contains("version=");
    assert!(knows || !tells, "{}", told());
}

/// Builds a request, mostly from valid parts.
fn request(input: &mut Input<'_>) -> Vec<u8> {
    let mut request = Vec::new();
    let text = |input: &mut Input<'_>, among: &[&str]| -> Vec<u8> {
        match usize::from(input.byte()) {
            known if known < 224 => among[known % among.len()].as_bytes().to_vec(),
            _ => input.bytes().to_vec(),
        }
    };
    request.extend(text(input, &METHODS));
    request.push(b' ');
    request.extend(text(input, &PATHS));
    for number in 0..input.below(4) {
        request.push(if number == 0 { b'?' } else { b'&' });
        request.extend(text(input, &QUERIES));
        request.push(b'=');
        request.extend(text(input, &VALUES));
    }
    request.extend_from_slice(b" HTTP/1.1\r\n");
    // Adds a Host header, usually a valid one.
    if input.below(8) > 0 {
        request.extend_from_slice(b"Host: localhost\r\n");
    }
    for _ in 0..input.below(5) {
        request.extend(text(input, &HEADERS));
        request.extend_from_slice(b"\r\n");
    }
    let body = match input.below(4) {
        0 => Vec::new(),
        1 => input.long_bytes().to_vec(),
        2 => {
            let pairs =
                (0..1 + input.below(4)).map(|_| [text(input, &QUERIES), text(input, &VALUES)].join(&b'='));
            pairs.collect::<Vec<_>>().join(&b'&')
        }
        _ => {
            request.extend_from_slice(b"Content-Type: application/json\r\n");
            let members = (0..input.below(6)).map(|_| {
                let name = String::from_utf8_lossy(&text(input, &MEMBERS)).into_owned();
                [serde_json::to_vec(&name).expect("a text"), text(input, &JSON)].join(&b':')
            });
            [b"{".to_vec(), members.collect::<Vec<_>>().join(&b','), b"}".to_vec()].concat()
        }
    };
    if !body.is_empty() {
        request.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
    }
    request.extend_from_slice(b"\r\n");
    request.extend(body);
    request
}

/// Each path with each method and full access, changes with valid bodies, and each kind of connection once.
fn seeds() -> Vec<Vec<u8>> {
    let whole = |way: u8, text: &str| [&[way, 0][..], text.as_bytes()].concat();
    let asked = |way: u8, method: &str, path: &str, more: &str, body: &str| {
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        whole(way, &format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n{more}{length}\r\n{body}"))
    };
    let mut seeds: Vec<Vec<u8>> = PATHS.iter().map(|path| asked(0, "GET", path, "", "")).collect();
    let json = "Content-Type: application/json\r\n";
    for (path, body) in [
        ("/v1/users", "{\"name\":\"dora\",\"password\":\"hunter4hunter4\"}"),
        ("/v1/secrets", "{\"secret\":\"north\",\"realm\":\"tenant.example\"}"),
        ("/v1/secrets/rotation", "{\"overlap_s\":60}"),
        (
            "/v1/realms",
            "{\"name\":\"blue.example\",\"max_allocations\":7,\"bits_per_second_per_allocation\":64000}",
        ),
        (
            "/v1/keys",
            "{\"name\":\"shop-2\",\"sha256\":\"abababababababababababababababababababababababababababababababab\",\"rate\":5}",
        ),
        ("/v1/credentials", "{\"user\":\"alice\",\"ttl\":60}"),
        ("/v1/drain", "{\"deadline_s\":0}"),
        ("/v1/reload", ""),
    ] {
        seeds.push(asked(0, "POST", path, json, body));
        seeds.push(asked(2, "POST", path, &format!("{json}Authorization: Bearer {FULL}\r\n"), body));
        seeds.push(asked(3, "POST", path, &format!("{json}Authorization: Bearer {READ}\r\n"), body));
    }
    seeds.push(asked(0, "PUT", "/v1/log", json, "{\"level\":\"info,turnpike=debug\"}"));
    for path in [
        "/v1/users/alice",
        "/v1/keys/shop",
        "/v1/realms/tenant.example?realm=x",
        "/v1/secrets/dc365e79d41cfae1",
    ] {
        seeds.push(asked(0, "DELETE", path, "", ""));
    }
    for path in [
        "/v1/users?realm=example.org&limit=2&cursor=1",
        "/v1/allocations?user=a&client=192.0.2.0/24&transport=udp&limit=5",
        "/v1/refusals?client=2001:db8::/32&limit=9",
        "/?service=turn&username=alice&ttl=60",
    ] {
        seeds.push(asked(0, "GET", path, "", ""));
    }
    let key = format!("Authorization: Bearer {KEY}\r\nOrigin: https://page.example\r\n");
    seeds.push(asked(4, "POST", "/v1/credentials", &format!("{json}{key}"), "{\"user\":\"bob\"}"));
    seeds.push(asked(4, "GET", &format!("/?service=turn&username=bob&key={KEY}"), "", ""));
    let preflight = "Origin: https://page.example\r\nAccess-Control-Request-Method: POST\r\n";
    seeds.push(asked(4, "OPTIONS", "/v1/credentials", preflight, ""));
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    seeds.push(asked(4, "POST", "/", form, &format!("service=turn&username=bob&api={KEY}")));
    seeds.push(asked(1, "GET", "/metrics", "Accept: application/openmetrics-text\r\n", ""));
    seeds.push(asked(
        3,
        "GET",
        "/",
        "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n",
        "",
    ));
    let chunks = "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"nam\r\n0\r\n\r\n";
    seeds.push(whole(0, &format!("POST /v1/users HTTP/1.1\r\nHost: localhost\r\n{json}{chunks}")));
    // Generated from meaningful parts.
    seeds.extend([
        vec![0, 1, 1, 17, 0, 1, 0, 3, 2, 0, 0, 2, 2],
        vec![2, 1, 1, 20, 0, 1, 1, 0, 3, 2, 3, 2, 1, 1],
        vec![4, 1, 0, 30, 1, 8, 1, 1, 2, 2, 9, 0],
    ]);
    seeds
}
