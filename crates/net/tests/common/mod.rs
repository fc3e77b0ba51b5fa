//! What the tests over real sockets share: waiting with a deadline, and network namespaces.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(unreachable_pub, reason = "shared by several test binaries")]

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Command,
    time::{Duration, Instant},
};

use turnpike_net::{Datapath, Route, Rx, SocketId, Sockets, Span, Tx, UdpOptions, UdpSocket, poll::Poller};

pub const DATAPATHS: [Datapath; 3] = [Datapath::Basic, Datapath::Mmsg, Datapath::Gso];
pub const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

const DEADLINE: Duration = Duration::from_secs(10);

/// A datagram, copied out of the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Index of the socket that received it.
    pub at: usize,
    pub from: SocketAddr,
    pub local: Option<IpAddr>,
    pub tos: u8,
    pub ttl: u8,
    pub bytes: Vec<u8>,
}

/// Receives on all sockets until `want` datagrams are there.
///
/// # Panics
/// When they are not there in time.
pub fn receive(rx: &mut Rx, sockets: &[&UdpSocket], want: usize) -> Vec<Datagram> {
    let mut poller = Poller::new().unwrap();
    for (token, socket) in sockets.iter().enumerate() {
        poller.add(socket, token as u64).unwrap();
    }
    let mut datagrams = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    while datagrams.len() < want {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "{} of {want} datagrams came", datagrams.len());
        let ready: Vec<_> = poller.wait(Some(left)).unwrap().iter().map(|e| e.token as usize).collect();
        for at in ready {
            if !rx.has_room() {
                rx.reset();
            }
            let received = rx.recv(sockets[at]).unwrap();
            for buffer in rx.buffers(received) {
                assert_eq!(buffer.datagrams().count(), buffer.count());
                datagrams.extend(buffer.datagrams().map(|bytes| Datagram {
                    at,
                    from: buffer.from,
                    local: buffer.local,
                    tos: buffer.tos,
                    ttl: buffer.ttl,
                    bytes: bytes.to_vec(),
                }));
            }
        }
        rx.reset();
    }
    datagrams
}

/// Waits until the socket has something to receive.
pub fn wait_for_input(socket: &UdpSocket) {
    let mut poller = Poller::new().unwrap();
    poller.add(socket, 0).unwrap();
    let events = poller.wait(Some(DEADLINE)).unwrap();
    assert!(events.iter().any(|e| e.readable), "nothing came in time");
}

/// Waits until the socket has something to report.
pub fn wait_for_error(socket: &UdpSocket) {
    let mut poller = Poller::new().unwrap();
    poller.add(socket, 0).unwrap();
    let events = poller.wait(Some(DEADLINE)).unwrap();
    assert!(events.iter().any(|e| e.error), "no error was reported in time");
}

pub fn bind(ip: IpAddr, options: &UdpOptions) -> UdpSocket {
    UdpSocket::bind(SocketAddr::new(ip, 0), options).unwrap()
}

/// A socket in a table of its own, to send from.
pub struct Sender {
    pub sockets: Sockets,
    pub id: SocketId,
    pub tx: Tx,
    rx: Rx,
}

impl Sender {
    pub fn new(datapath: Datapath, ip: IpAddr, options: &UdpOptions) -> Self {
        let mut sockets = Sockets::default();
        let id = sockets.insert(bind(ip, options));
        Self { sockets, id, tx: Tx::new(datapath), rx: Rx::new(datapath) }
    }

    pub fn socket(&self) -> &UdpSocket {
        self.sockets.get(self.id).unwrap()
    }

    pub fn route(&self, to: SocketAddr) -> Route {
        Route { socket: self.id, to: Some(to), from: None, tos: 0, ttl: 0, dont_fragment: false }
    }

    pub fn flush(&mut self) {
        self.tx.flush(&mut self.sockets, &self.rx);
    }
}

/// An arena with `len` known bytes, and where they lie.
pub fn filled_arena(datapath: Datapath, len: usize) -> (Rx, Span) {
    let socket = bind(V4, &UdpOptions::default());
    let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    std::net::UdpSocket::bind((V4, 0)).unwrap().send_to(&bytes, socket.local_addr()).unwrap();
    let mut rx = Rx::new(datapath);
    wait_for_input(&socket);
    let received = rx.recv(&socket).unwrap();
    let span = rx.span(rx.buffers(received).next().unwrap().bytes);
    assert_eq!(span.len as usize, len);
    (rx, span)
}

/// Waits until a datagram to this address of ours arrives: the kernel sets routes to new addresses up in the background.
///
/// # Panics
/// When it does not in time.
pub fn wait_until_reachable(ip: IpAddr) {
    let deadline = Instant::now() + DEADLINE;
    let socket = std::net::UdpSocket::bind((ip, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let address = socket.local_addr().unwrap();
    while socket.send_to(b"?", address).is_err() || socket.recv(&mut [0; 1]).is_err() {
        assert!(Instant::now() < deadline, "{ip} is not reachable from itself");
    }
}

/// Runs `body` with a network namespace of its own, in which `setup` (lines of ip(8)) was run: this test starts itself
/// again inside. Prints why not where the machine does not let it.
pub fn in_namespace(test: &str, setup: &[&str], body: impl FnOnce()) {
    const INSIDE: &str = "TURNPIKE_NET_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        for line in setup {
            let status = Command::new("ip").args(line.split(' ')).status().unwrap();
            assert!(status.success(), "ip {line}");
        }
        return body();
    }
    let allowed = |flags: &str| {
        let probe = Command::new("unshare").args([flags, "ip", "link", "set", "lo", "up"]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    // A user namespace needs no privilege, but is often forbidden in containers, where root may do without.
    let Some(flags) = ["-n", "-rn"].into_iter().find(|flags| allowed(flags)) else {
        return println!("SKIPPED: {test}: unshare(1) and ip(8) cannot make a network namespace here");
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
