//! A forwarder between a test's own clients and servers, on loopback.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::print_stdout, reason = "says why a test did not run")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use turnpike_forward::{
    Access, Address, Balance, ConnectionLog, ConnectionReport, CopyMode, Endpoint, Forwarder, Host, Limits,
    PortRange, Protocol, Rule, RuleId, RuleSnapshot, Settings,
};
use turnpike_net::Datapath;

/// Nothing on loopback takes so long, however busy the machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn rule(id: &str, target: SocketAddr) -> Rule {
    Rule {
        id: RuleId(id.to_owned()),
        protocol: Protocol::Tcp,
        bind: [127, 0, 0, 1].into(),
        ipv6_only: true,
        socket_mode: None,
        ports: PortRange { first: 0, last: 0 },
        targets: vec![endpoint(target)],
        balance: Balance::RoundRobin,
        health_check: None,
        health_question: None,
        source: None,
        device: None,
        mark: None,
        transparent: false,
        proxy_protocol_from: Vec::new(),
        send_proxy: None,
        access: Access::default(),
        idle_timeout: None,
        half_close_timeout: None,
        connect_timeout: Duration::from_secs(10),
        keepalive: true,
        nodelay: true,
        max_connections: 100_000,
        limits: Limits::default(),
        copy: CopyMode::Auto,
    }
}

pub fn endpoint(target: SocketAddr) -> Endpoint {
    Endpoint {
        host: Host::Ip(target.ip()),
        ports: PortRange { first: target.port(), last: target.port() },
        weight: 1,
    }
}

pub fn settings() -> Settings {
    Settings {
        workers: 1,
        datapath: Datapath::Basic,
        busy_poll: Duration::ZERO,
        access: Access::default(),
        max_connections: 100_000,
        resolve_every: Duration::from_secs(60),
        keep_going: false,
    }
}

/// Remembers every report.
#[derive(Default)]
pub struct Reports(Mutex<Vec<ConnectionReport>>);

impl ConnectionLog for Reports {
    fn ended(&self, report: ConnectionReport) {
        self.0.lock().unwrap().push(report);
    }
}

impl Reports {
    pub fn all(&self) -> Vec<ConnectionReport> {
        self.0.lock().unwrap().clone()
    }

    /// Waits until so many connections have ended.
    pub fn wait(&self, count: usize) -> Vec<ConnectionReport> {
        until(|| (self.all().len() >= count).then(|| self.all()), "reports")
    }
}

pub struct Running {
    pub forwarder: Forwarder,
    pub log: Arc<Reports>,
}

impl Running {
    pub fn start(rules: &[Rule]) -> Self {
        Self::start_with(&settings(), rules)
    }

    pub fn start_with(settings: &Settings, rules: &[Rule]) -> Self {
        let log = Arc::new(Reports::default());
        let (forwarder, failed) =
            Forwarder::start(settings, rules, log.clone()).expect("the forwarder starts");
        assert!(failed.is_empty(), "{failed:?}");
        Self { forwarder, log }
    }

    pub fn address(&self, id: &str) -> SocketAddr {
        let found = self.forwarder.listeners().into_iter().find(|(rule, _)| rule.0 == id);
        socket_address(&found.expect("the rule listens").1)
    }

    pub fn connect(&self, id: &str) -> TcpStream {
        client(self.address(id))
    }

    pub fn snapshot(&self, id: &str) -> RuleSnapshot {
        let found = self.forwarder.snapshots().into_iter().find(|(rule, _)| rule.0 == id);
        found.map(|(_, snapshot)| snapshot).unwrap_or_default()
    }
}

/// The address of a listener that is no Unix socket.
pub fn socket_address(address: &Address) -> SocketAddr {
    match address {
        Address::Ip(address) => *address,
        Address::Unix(name) => panic!("{name} has no port"),
    }
}

pub fn client(address: SocketAddr) -> TcpStream {
    patient(TcpStream::connect(address).expect("the forwarder accepts"))
}

/// A socket whose reads and writes do not hang for ever.
pub fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

pub fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let stream = until(|| listener.accept().ok().map(|(stream, _)| stream), "a connection");
    stream.set_nonblocking(false).unwrap();
    patient(stream)
}

/// A server that says its name to everyone, then echoes until the end. Ends with the process.
pub fn greeter(name: &'static str) -> SocketAddr {
    let (listener, address) = listener();
    serve_greetings(listener, name);
    address
}

pub fn serve_greetings(listener: TcpListener, name: &'static str) {
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut stream = patient(stream);
                if stream.write_all(name.as_bytes()).is_err() {
                    return;
                }
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

pub fn read_exactly(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).expect("so many bytes");
    bytes
}

pub fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("a clean end");
    bytes
}

/// Closes with RST.
pub fn reset(stream: TcpStream) {
    turnpike_net::TcpSocket::from(std::os::fd::OwnedFd::from(stream)).reset();
}

/// Waits for a condition.
pub fn until<T>(mut condition: impl FnMut() -> Option<T>, what: &str) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Byte number `at` of a stream that does not repeat within a pipe or buffer.
pub fn byte(at: u64, seed: u64) -> u8 {
    ((at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

pub fn pattern(from: u64, len: usize, seed: u64) -> Vec<u8> {
    (from..from + len as u64).map(|at| byte(at, seed)).collect()
}

/// Runs `body` in namespaces of its own, `kinds` being letters of unshare(1): this test starts itself again inside, if `probe`
/// works there. Says why not where the machine does not let it.
pub fn in_namespaces(test: &str, kinds: &str, probe: &[&str], body: impl FnOnce()) {
    const INSIDE: &str = "TURNPIKE_FORWARD_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let allowed = |flags: &String| {
        let output = Command::new("unshare").arg(flags).args(probe).output();
        output.is_ok_and(|output| output.status.success())
    };
    // A user namespace needs no privilege, but is often forbidden in containers, where root may do without.
    let Some(flags) = [format!("-{kinds}"), format!("-r{kinds}")].into_iter().find(allowed) else {
        return println!("SKIPPED: {test}: unshare -{kinds} {} does not work here", probe.join(" "));
    };
    let output = Command::new("unshare")
        .arg(flags)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} failed inside its namespace");
    assert!(text.contains("1 passed"), "{test} did not run inside its namespace");
}

/// Runs a program that must succeed.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
