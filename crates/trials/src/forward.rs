//! Runs `turnpike forward` and the servers behind it.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    thread,
};

use super::{
    Dir, Metrics, Program, SOON, V4, eventually, http, may_load_programs, skip,
    turnpike::{address_after, upgradable},
};

/// Copy modes to test; includes the kernel mode only if this kernel supports it.
pub fn copies() -> Vec<&'static str> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.trim().parse::<u32>().ok());
    let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let mut copies = vec!["auto", "splice", "buffer"];
    if version >= (6, 16) && may_load_programs().is_ok() {
        copies.push("kernel");
    } else {
        skip("copy = \"kernel\" needs root and Linux 6.16");
    }
    copies
}

pub struct Forward {
    pub program: Program,
    pub admin: SocketAddr,
    dir: Dir,
}

impl Forward {
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_in(Dir::new(), arguments)
    }

    pub fn start_file(name: &str, text: &str) -> Self {
        let dir = Dir::new();
        dir.file(name, text);
        Self::start_in(dir, &["-c", name])
    }

    pub fn start_in(dir: Dir, arguments: &[&str]) -> Self {
        let all: Vec<&str> = ["forward", "--admin", "127.0.0.1:0"].iter().chain(arguments).copied().collect();
        let mut program = Program::start(upgradable(&all).current_dir(dir.path()));
        let admin = address_after(&program.line_with(" on http://"), " on http://");
        let forward = Self { program, admin, dir };
        eventually("/healthz answers", || forward.health());
        forward
    }

    /// Listener address from the log line that contains `text`, such as `rule web`.
    pub fn address(&mut self, text: &str) -> SocketAddr {
        let found = eventually(&format!("a listener with {text:?}"), || {
            let listening = |line: &String| line.contains("listening on ") && line.contains(text);
            self.program.lines().into_iter().find(listening)
        });
        let label =
            if found.contains("listening on tcp") { "listening on tcp " } else { "listening on udp " };
        address_after(&found, label)
    }

    pub fn health(&self) -> Option<u16> {
        http::get(self.admin, "/healthz").ok().map(|(status, _)| status)
    }

    pub fn metrics(&self) -> Metrics {
        let (status, text) = http::get(self.admin, "/metrics").expect("the admin interface answers");
        assert_eq!(status, 200);
        Metrics::new(text)
    }

    /// Waits until the sum of a counter over all rules reaches this value.
    pub fn wait_for(&self, family: &str, label: &str, wanted: u64) {
        eventually(&format!("{family}{{{label}}} is {wanted}"), || {
            self.metrics().sum(family, label) == wanted
        });
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("the test's own directory is writable");
    }

    pub fn reload(&mut self, answer: &str) {
        let before = self.count(answer);
        self.program.signal("HUP");
        eventually(&format!("another line with {answer:?} is logged"), || self.count(answer) > before);
    }

    fn count(&self, text: &str) -> usize {
        self.program.lines().iter().filter(|line| line.contains(text)).count()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Starts a TCP echo server, which shuts down its side of a connection after the client has done so.
pub fn tcp_echo() -> SocketAddr {
    let listener = TcpListener::bind((V4, 0)).expect("loopback has a free port");
    let address = listener.local_addr().expect("the socket is bound");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || echo(stream));
        }
    });
    address
}

fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..len]).is_err() {
            return;
        }
    }
}

pub fn udp_echo() -> SocketAddr {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    let address = socket.local_addr().expect("the socket is bound");
    thread::spawn(move || {
        let mut buffer = vec![0; 65_535];
        while let Ok((len, client)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..len], client);
        }
    });
    address
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, SOON).expect("the listener accepts connections");
    stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    stream.set_write_timeout(Some(SOON)).expect("the timeout is not zero");
    stream
}

pub fn say(stream: &mut TcpStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).expect("the write succeeds");
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).expect("the target responds");
    String::from_utf8(answer).expect("the echo arrives")
}

pub fn say_udp(address: SocketAddr, text: &str) -> String {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    socket.connect(address).expect("loopback is reachable");
    socket.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    socket.send(text.as_bytes()).expect("the send on loopback succeeds");
    let mut buffer = vec![0; 2048];
    let len = socket.recv(&mut buffer).expect("the target responds");
    String::from_utf8(buffer[..len].to_vec()).expect("the echo arrives")
}
