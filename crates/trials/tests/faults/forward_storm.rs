//! Thousands of clients of `turnpike forward` reconnect within a second after its process is killed.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    Row, Wanted, as_before,
    forwarder::Forwarder,
    or_thorough,
    row::complaints,
    talks::{client_of, foretold, whole},
    within,
};
use turnpike_trials::{SOON, need};

/// Interval between a client's messages; a client that lost its connection reconnects within this time.
const TURN: Duration = Duration::from_secs(1);
const PIECE: usize = 64;

#[derive(Default)]
struct Kind {
    first: AtomicU64,
    /// Times at which returning clients were first served by the second process.
    back: Mutex<Vec<Instant>>,
    sent: AtomicU64,
    right: AtomicU64,
    wrong: AtomicU64,
}

struct Storm {
    tcp: SocketAddr,
    udp: SocketAddr,
    clients: u32,
    ends: AtomicBool,
    /// Number of the current process: 0, or 1 after the first process has exited.
    process: AtomicU64,
    streams: Kind,
    datagrams: Kind,
    failed: AtomicU64,
}

impl Kind {
    fn served(&self, process: u64) {
        if process == 0 {
            self.first.fetch_add(1, Relaxed);
        } else {
            self.back.lock().expect("no thread panics while holding the lock").push(Instant::now());
        }
    }

    fn came_back(&self, sent: &[u8], came: &[u8]) {
        let figure = if sent == came { &self.right } else { &self.wrong };
        figure.fetch_add(1, Relaxed);
    }
}

impl Storm {
    /// Offset of a client within an interval, which spreads the clients evenly.
    fn place(&self, number: u32) -> Duration {
        TURN * number / self.clients
    }

    fn stream(&self, number: u32) {
        for life in 0.. {
            thread::sleep(self.place(number));
            if self.ends.load(Relaxed) {
                return;
            }
            match TcpStream::connect_timeout(&self.tcp, SOON) {
                Ok(stream) => self.talk(&stream, u64::from(number + life * self.clients)),
                Err(_) => {
                    self.failed.fetch_add(1, Relaxed);
                    thread::sleep(TURN / 10);
                }
            }
        }
    }

    fn talk(&self, mut stream: &TcpStream, number: u64) {
        // A client can connect to the second process only after the first one has exited, so this is the process that serves the
        // connection.
        let (process, mut position) = (self.process.load(Relaxed), 0);
        while !self.ends.load(Relaxed) {
            let piece: Vec<u8> = (position..).take(PIECE).map(|at| foretold(number, at)).collect();
            let mut back = [0; PIECE];
            stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
            self.streams.sent.fetch_add(1, Relaxed);
            if stream.write_all(&piece).and_then(|()| stream.read_exact(&mut back)).is_err() {
                return;
            }
            self.streams.came_back(&piece, &back);
            if position == 0 {
                self.streams.served(process);
            }
            position += PIECE as u64;
            // Until the next message, nothing may arrive except the end of the connection.
            stream.set_read_timeout(Some(TURN)).expect("the timeout is not zero");
            match stream.read(&mut back) {
                Ok(0) => return,
                Ok(_) => _ = self.streams.wrong.fetch_add(1, Relaxed),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    fn datagrams(&self, number: u32) {
        let socket = client_of(self.udp);
        thread::sleep(self.place(number));
        let number = u64::from(number) << 32;
        // Position of the first datagram sent to the second process, and the processes that have served the client.
        let (mut position, mut found, mut served) = (0, None, [false; 2]);
        while !self.ends.load(Relaxed) {
            let due = Instant::now() + TURN;
            if self.process.load(Relaxed) > 0 {
                found.get_or_insert(position);
            }
            self.datagrams.sent.fetch_add(1, Relaxed);
            // Ignores ICMP errors while the port is closed.
            let _ = socket.send(&datagram(number, position));
            let mut back = [0; 2 * PIECE];
            while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                socket.set_read_timeout(Some(left)).expect("the timeout is not zero");
                match socket.recv(&mut back) {
                    Ok(len) => {
                        let of = back[..8].try_into().map_or(0, u64::from_be_bytes).min(position);
                        self.datagrams.came_back(&datagram(number, of), &back[..len]);
                        let process = u64::from(found.is_some_and(|first| of >= first));
                        if !std::mem::replace(&mut served[usize::from(process > 0)], true) {
                            self.datagrams.served(process);
                        }
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(_) => thread::sleep(left.min(TURN / 20)),
                }
            }
            position += 1;
        }
    }

    fn kinds(&self) -> [&Kind; 2] {
        [&self.streams, &self.datagrams]
    }
}

/// Datagram of a client: its number, then predictable bytes.
fn datagram(client: u64, number: u64) -> Vec<u8> {
    number
        .to_be_bytes()
        .into_iter()
        .chain((8..PIECE as u64).map(|at| foretold(client + number, at)))
        .collect()
}

fn descriptors(wanted: u64) -> Result<(), String> {
    let limits = fs::read_to_string("/proc/self/limits").map_err(|error| error.to_string())?;
    let most = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    match most.and_then(|most| most.parse::<u64>().ok()) {
        Some(most) if most < wanted => Err(format!("{wanted} descriptors are needed: ulimit -n {wanted}")),
        _ => Ok(()),
    }
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn thousands_reconnect_to_a_forwarder() {
    let clients: u32 = or_thorough(200, 2_000);
    // Two descriptors per connection (the second one at the target) and one per UDP socket.
    need!(descriptors(u64::from(3 * clients) + 200));
    let mut forwarder = Forwarder::local(Wanted::default());
    whole(forwarder.tcp, forwarder.udp);
    within(SOON, "the test run has ended", || forwarder.kept().sessions == 0);
    let before = forwarder.kept();
    let storm = Storm {
        tcp: forwarder.tcp,
        udp: forwarder.udp,
        clients,
        ends: AtomicBool::new(false),
        process: AtomicU64::new(0),
        streams: Kind::default(),
        datagrams: Kind::default(),
        failed: AtomicU64::new(0),
    };
    let mut said = 0;
    thread::scope(|scope| {
        let storm = &storm;
        for number in 0..clients {
            let small = || thread::Builder::new().stack_size(256 << 10);
            small().spawn_scoped(scope, move || storm.stream(number)).expect("a thread more");
            small().spawn_scoped(scope, move || storm.datagrams(number)).expect("a thread more");
        }
        // Ends the clients even if an assertion fails.
        let _ends = Ends(&storm.ends);
        let all =
            |count: &dyn Fn(&Kind) -> u64| storm.kinds().map(count).iter().all(|of| *of >= clients.into());
        within(SOON * 2, "all clients are served", || all(&|kind| kind.first.load(Relaxed)));
        said = forwarder.lines().len();
        forwarder.kill();
        storm.process.store(1, Relaxed);
        forwarder.again();
        let back =
            |kind: &Kind| kind.back.lock().expect("no thread panics while holding the lock").len() as u64;
        within(SOON * 2, "all return", || all(&back));
    });
    let took = storm.kinds().map(|kind| {
        let back = kind.back.lock().expect("no thread panics while holding the lock");
        let (first, last) = (back.iter().min(), back.iter().max());
        last.expect("all return").duration_since(*first.expect("all return")).as_secs_f64()
    });
    assert_eq!(storm.kinds().map(|kind| kind.wrong.load(Relaxed)), [0, 0], "the echo matches");
    whole(forwarder.tcp, forwarder.udp);
    as_before(|| forwarder.kept(), before, SOON);
    let mut row = Row::new(
        "thousands_reconnect_to_a_forwarder",
        "forward: SIGKILL and restart; 2,000 TCP and 2,000 UDP clients return within 1 s",
    );
    row.note(format!(
        "{clients} connections served within {:.1} s of the first, and as many sessions within {:.1} s; {} connects failed; {} stream pieces \
         correct, none wrong",
        took[0],
        took[1],
        storm.failed.load(Relaxed),
        storm.streams.right.load(Relaxed)
    ));
    row.limit("seconds from first to last client", took[0].max(took[1]), 5.0);
    let [sent, right] = [&storm.datagrams.sent, &storm.datagrams.right].map(|figure| figure.load(Relaxed));
    let seen = json!({ "sent": sent, "lost": sent - right });
    row.tell(
        &seen,
        &complaints(&forwarder.lines()[said..]),
        (before, forwarder.kept()),
        u64::from(2 * clients),
    );
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
