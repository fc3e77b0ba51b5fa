//! CPU cost per datagram of the load generator, compared with a bare loop that makes the same system calls
//! without looking at the data.
//!
//! ```text
//! cargo build --release && cargo run --release -p turnpike-net --example ceiling -- target/release/turnpike [ROUNDS]
//! ```
//!
//! The two run alternately against the same `turnpike reflect`. The output is the CPU time of the sending
//! thread per returned datagram (proc(5), schedstat), including its kernel time, and the median ratio.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "developer tool; panics show the location")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use libc::{c_int, iovec, mmsghdr};
use turnpike_net::Poller;

/// Bytes per datagram.
const SIZE: usize = 120;
const TIME: Duration = Duration::from_secs(2);
const WARMUP: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    sockets: usize,
    /// Consecutive datagrams of one socket, sent as a super-packet.
    burst: usize,
    /// Datagrams per second over all sockets. `None` sends at full speed, limited to `window` datagrams in
    /// flight per socket.
    rate: Option<u32>,
    window: usize,
}

const SHAPES: [Shape; 4] = [
    Shape { name: "flood of 1", sockets: 1, burst: 32, rate: None, window: 1_024 },
    Shape { name: "flood of 8", sockets: 8, burst: 32, rate: None, window: 256 },
    Shape { name: "thin, 64 at 40,000/s", sockets: 64, burst: 1, rate: Some(40_000), window: 0 },
    Shape { name: "thin, 1,000 at 40,000/s", sockets: 1_000, burst: 1, rate: Some(40_000), window: 0 },
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let binary = arguments.next().expect("the path of the turnpike program");
    let rounds: usize = arguments.next().map_or(6, |text| text.parse().expect("a number of rounds"));
    let reflector = Reflector::start(&binary);
    for shape in SHAPES {
        let mut found: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        let mut ratios = Vec::new();
        for round in 0..=rounds {
            let bare = bare(shape, reflector.address);
            let load = load(&binary, shape, reflector.address);
            if round > 0 {
                found.entry("bare").or_default().push(bare);
                found.entry("load").or_default().push(load);
                ratios.push(load / bare);
            }
        }
        let (least, most) =
            (ratios.iter().copied().fold(f64::MAX, f64::min), ratios.iter().copied().fold(0.0, f64::max));
        println!(
            "{:<24} bare {:6.0} ns, load {:6.0} ns per datagram and round trip; ratio {:.2} ({least:.2}..{most:.2}), {rounds} rounds",
            shape.name,
            median(&mut found["bare"].clone()),
            median(&mut found["load"].clone()),
            median(&mut ratios),
        );
    }
}

/// Nanoseconds of CPU per datagram of `turnpike load udp`.
fn load(binary: &str, shape: Shape, server: SocketAddr) -> f64 {
    let number = |value: usize| value.to_string();
    let mut command = Command::new(binary);
    command.args(["load", "udp", &server.to_string(), "--json", "-", "--threads", "1"]);
    command.args([
        "--clients",
        &number(shape.sockets),
        "--burst",
        &number(shape.burst),
        "--size",
        &number(SIZE),
    ]);
    let time = |time: Duration| time.as_secs_f64().to_string();
    command.args(["--duration", &time(TIME), "--warmup", &time(WARMUP)]);
    match shape.rate {
        Some(rate) => command.args(["--rate", &rate.to_string()]),
        None => command.args(["--rate", "max", "--window", &number(shape.window)]),
    };
    let output = command.stderr(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let figure = |name: &str| -> f64 {
        let (_, rest) =
            text.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name} in {text}"));
        rest.split([',', '}']).next().unwrap().parse().unwrap()
    };
    figure("generator_cpu_s") * 1e9 / figure("received")
}

/// Nanoseconds of CPU per datagram of the bare loop.
fn bare(shape: Shape, server: SocketAddr) -> f64 {
    let mut poller = Poller::new().unwrap();
    let mut sockets: Vec<Bare> =
        (0..shape.sockets).map(|index| Bare::new(server, &poller, index, shape.burst)).collect();
    let payload = vec![0x5A_u8; SIZE * shape.burst];
    let mut buffer = vec![0_u8; 1 << 16];
    let mut messages = Messages::new();
    // Avoids late wake-ups, as the generator does.
    let _ = turnpike_net::rlimit::exact_timers();
    let begin = Instant::now();
    // Time and count of the last received datagrams.
    let mut last = (Duration::ZERO, 0);
    let (mut measured_from, mut received, mut turn, mut sent) = (None, 0_u64, 0, 0_u64);
    loop {
        let now = begin.elapsed();
        if measured_from.is_none() && now >= WARMUP {
            measured_from = Some((cpu(), received));
        }
        if now >= WARMUP + TIME {
            break;
        }
        let mut wait = Duration::ZERO;
        if received > last.1 {
            last = (now, received);
        } else if now - last.0 > Duration::from_millis(100) {
            // Datagrams in flight are lost and must not block the windows forever.
            sockets.iter_mut().for_each(|socket| socket.under_way = 0);
            last.0 = now;
        }
        match shape.rate {
            Some(rate) => {
                let due = (now.as_secs_f64() * f64::from(rate)) as u64;
                for _ in 0..due.saturating_sub(sent).min(256) {
                    sockets[turn].send(&payload);
                    turn = (turn + 1) % sockets.len();
                    sent += 1;
                }
                let next = Duration::from_secs_f64((sent + 1) as f64 / f64::from(rate));
                // Sleeps at least 50 us, as the generator does.
                wait = next.saturating_sub(begin.elapsed()).max(Duration::from_micros(50));
            }
            None => {
                let before = sent;
                for socket in &mut sockets {
                    let bursts = (shape.window.saturating_sub(socket.under_way) / shape.burst).min(MESSAGES);
                    let taken = messages.send(socket, &payload, bursts);
                    socket.under_way += taken * shape.burst;
                    sent += taken as u64;
                }
                // Waits while all windows are full, as the generator does.
                if sent == before {
                    wait = Duration::from_millis(1);
                }
            }
        }
        for event in poller.wait(Some(wait)).unwrap() {
            let socket = &mut sockets[event.token as usize];
            // Makes one call; epoll reports remaining datagrams again.
            let count = match shape.rate {
                Some(_) => usize::from(socket.receive(&mut buffer) > 0),
                None => messages.receive(socket),
            };
            received += count as u64;
            socket.under_way = socket.under_way.saturating_sub(count);
        }
    }
    let (from, before) = measured_from.unwrap();
    let spent = cpu() - from;
    spent.as_nanos() as f64 / (received - before) as f64
}

struct Bare {
    socket: UdpSocket,
    under_way: usize,
}

impl Bare {
    fn new(server: SocketAddr, poller: &Poller, index: usize, burst: usize) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(server).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut options =
            vec![(libc::SOL_UDP, libc::UDP_GRO, 1), (libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 20)];
        if burst > 1 {
            options.push((libc::SOL_UDP, libc::UDP_SEGMENT, SIZE as c_int));
        }
        for (level, name, value) in options {
            let length = size_of::<c_int>() as libc::socklen_t;
            // SAFETY: the pointer and length describe `value`.
            let set = unsafe {
                libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length)
            };
            assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        }
        poller.add(&socket, index as u64).unwrap();
        Self { socket, under_way: 0 }
    }

    fn send(&self, payload: &[u8]) {
        let _ = self.socket.send(payload);
    }

    fn receive(&self, buffer: &mut [u8]) -> usize {
        self.socket.recv(buffer).unwrap_or(0)
    }
}

/// Messages per call.
const MESSAGES: usize = 16;

/// Arguments of sendmmsg(2) and recvmmsg(2), reused.
struct Messages {
    buffers: Vec<Vec<u8>>,
    iovecs: Vec<iovec>,
    headers: Vec<mmsghdr>,
}

impl Messages {
    fn new() -> Self {
        // SAFETY: zero is a valid value for every member of `mmsghdr`.
        let empty: mmsghdr = unsafe { std::mem::zeroed() };
        let nothing = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self {
            buffers: vec![vec![0; 1 << 16]; MESSAGES],
            iovecs: vec![nothing; MESSAGES],
            headers: vec![empty; MESSAGES],
        }
    }

    fn point_at_iovecs(&mut self) {
        for (header, iovec) in self.headers.iter_mut().zip(&mut self.iovecs) {
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
        }
    }

    /// Sends the payload `count` times; returns the number accepted.
    fn send(&mut self, socket: &Bare, payload: &[u8], count: usize) -> usize {
        let whole = iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
        self.iovecs.fill(whole);
        self.point_at_iovecs();
        let fd = socket.socket.as_raw_fd();
        // SAFETY: there are at least `count` headers, each with one iovec, which describes `payload`.
        let sent = unsafe { libc::sendmmsg(fd, self.headers.as_mut_ptr(), count as u32, 0) };
        usize::try_from(sent).unwrap_or(0)
    }

    fn receive(&mut self, socket: &Bare) -> usize {
        for (iovec, buffer) in self.iovecs.iter_mut().zip(&mut self.buffers) {
            *iovec = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        }
        self.point_at_iovecs();
        let fd = socket.socket.as_raw_fd();
        let (headers, none) = (self.headers.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: there are `MESSAGES` headers, each with one iovec, which describes an otherwise unused
        // buffer.
        let got = unsafe { libc::recvmmsg(fd, headers, MESSAGES as u32, libc::MSG_DONTWAIT, none) };
        let got = usize::try_from(got).unwrap_or(0);
        self.headers[..got].iter().map(|header| (header.msg_len as usize).div_ceil(SIZE)).sum()
    }
}

fn cpu() -> Duration {
    let books = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(books.split_whitespace().next().unwrap().parse().unwrap())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Reflector {
    child: Child,
    address: SocketAddr,
}

impl Reflector {
    fn start(binary: &str) -> Self {
        let mut command = Command::new(binary);
        command.args(["reflect", "--listen", "127.0.0.1:0", "--workers", "1"]).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = lines.next().unwrap().unwrap();
        let address = line.rsplit_once(' ').unwrap().1.parse().unwrap();
        Self { child, address }
    }
}

impl Drop for Reflector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
