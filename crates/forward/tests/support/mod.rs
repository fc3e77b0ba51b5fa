//! A forwarder between clients and servers of the test, on loopback.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use turnpike_forward::{
    Access, Address, ConnectionLog, ConnectionReport, CopyMode, Forwarder, Rule, RuleSnapshot, Settings,
};
use turnpike_net::Datapath;
use turnpike_offload::{OffloadError, Sockmap};
use turnpike_testkit::alone::skip;
pub(crate) use turnpike_testkit::{PATIENCE, eventually, free_address};

pub(crate) fn rule(id: &str, target: SocketAddr) -> Rule {
    Rule::new(id, ([127, 0, 0, 1], 0).into(), target.into())
}

pub(crate) fn settings() -> Settings {
    Settings {
        workers: 1,
        datapath: Datapath::Basic,
        kernel: false,
        max_kernel_flows: 1024,
        kernel_leases: false,
        busy_poll: Duration::ZERO,
        access: Access::default(),
        max_connections: 100_000,
        resolve_every: Duration::from_secs(60),
        keep_going: false,
        stopping: Arc::default(),
        passed: Arc::default(),
    }
}

/// All copy modes. If the kernel mode is not available, it is left out with a message.
pub(crate) fn copy_modes() -> Vec<CopyMode> {
    let modes = vec![CopyMode::Auto, CopyMode::Splice, CopyMode::Buffer];
    if kernel_passes_on() { [modes, vec![CopyMode::Kernel]].concat() } else { modes }
}

/// True if the kernel can forward connections here.
pub(crate) fn kernel_passes_on() -> bool {
    static OBSTACLE: LazyLock<Option<String>> = LazyLock::new(|| match Sockmap::load(1, 1) {
        Ok(_) => None,
        Err(
            error @ (OffloadError::Capability { .. } | OffloadError::Unsound | OffloadError::Kernel { .. }),
        ) => Some(error.to_string()),
        Err(error) => panic!("{error}"),
    });
    if let Some(obstacle) = &*OBSTACLE {
        skip(&format!("copy = \"kernel\": {obstacle}"));
    }
    OBSTACLE.is_none()
}

/// Alternates messages until the kernel forwards them; returns the bytes sent in each direction.
pub(crate) fn chat(running: &Running, id: &str, client: &mut TcpStream, server: &mut TcpStream) -> u64 {
    let before = running.snapshot(id).kernel.bytes;
    let mut said = 0;
    eventually("the kernel forwards messages", || {
        for _ in 0..10 {
            client.write_all(&pattern(said, 32, 11)).expect("the connection is open");
            assert_eq!(read_exactly(server, 32), pattern(said, 32, 11));
            server.write_all(&pattern(said, 32, 12)).expect("the connection is open");
            assert_eq!(read_exactly(client, 32), pattern(said, 32, 12));
            said += 32;
        }
        running.snapshot(id).kernel.bytes.iter().zip(before).all(|(now, before)| *now > before)
    });
    said
}

#[derive(Default)]
pub(crate) struct Reports(Mutex<Vec<ConnectionReport>>);

impl ConnectionLog for Reports {
    fn ended(&self, report: ConnectionReport) {
        self.0.lock().unwrap().push(report);
    }
}

impl Reports {
    pub(crate) fn all(&self) -> Vec<ConnectionReport> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn wait(&self, count: usize) -> Vec<ConnectionReport> {
        eventually("the reports", || Some(self.all()).filter(|all| all.len() >= count))
    }
}

pub(crate) struct Running {
    pub(crate) forwarder: Forwarder,
    pub(crate) log: Arc<Reports>,
}

impl Running {
    pub(crate) fn start(rules: &[Rule]) -> Self {
        Self::start_with(&settings(), rules)
    }

    pub(crate) fn start_with(settings: &Settings, rules: &[Rule]) -> Self {
        let log = Arc::new(Reports::default());
        let (forwarder, failed) =
            Forwarder::start(settings, rules, log.clone()).expect("the forwarder starts");
        assert!(failed.is_empty(), "{failed:?}");
        Self { forwarder, log }
    }

    pub(crate) fn address(&self, id: &str) -> SocketAddr {
        let found = self.forwarder.listeners().into_iter().find(|(rule, _)| rule.0 == id);
        socket_address(&found.expect("the rule listens").1)
    }

    pub(crate) fn connect(&self, id: &str) -> TcpStream {
        client(self.address(id))
    }

    pub(crate) fn snapshot(&self, id: &str) -> RuleSnapshot {
        let found = self.forwarder.snapshots().into_iter().find(|(rule, _)| rule.0 == id);
        found.map(|(_, snapshot)| snapshot).unwrap_or_default()
    }
}

pub(crate) fn socket_address(address: &Address) -> SocketAddr {
    match address {
        Address::Ip(address) => *address,
        Address::Unix(name) => panic!("{name} has no port"),
    }
}

/// First byte that a new client receives. If the forwarder resets the connection, `connect` may already fail.
pub(crate) fn first_byte(address: SocketAddr) -> io::Result<u8> {
    let mut byte = [0];
    patient(TcpStream::connect(address)?).read_exact(&mut byte)?;
    Ok(byte[0])
}

pub(crate) fn client(address: SocketAddr) -> TcpStream {
    patient(TcpStream::connect(address).expect("the forwarder accepts"))
}

/// Sets timeouts for reads and writes.
pub(crate) fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub(crate) fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

pub(crate) fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let stream = eventually("a connection arrives", || listener.accept().ok().map(|(stream, _)| stream));
    stream.set_nonblocking(false).unwrap();
    patient(stream)
}

/// Server that sends its name to each client, then echoes. Runs until the process exits.
pub(crate) fn greeter(name: &'static str) -> SocketAddr {
    let (listener, address) = listener();
    serve_greetings(listener, name);
    address
}

pub(crate) fn serve_greetings(listener: TcpListener, name: &'static str) {
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

pub(crate) fn read_exactly(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).expect("enough bytes");
    bytes
}

pub(crate) fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an end of stream without a reset");
    bytes
}

pub(crate) fn reset(stream: TcpStream) {
    turnpike_net::TcpSocket::from(std::os::fd::OwnedFd::from(stream)).reset();
}

/// Byte number `at` of a pattern that does not repeat within a pipe or buffer.
pub(crate) fn byte(at: u64, seed: u64) -> u8 {
    ((at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

pub(crate) fn pattern(from: u64, len: usize, seed: u64) -> Vec<u8> {
    (from..from + len as u64).map(|at| byte(at, seed)).collect()
}
