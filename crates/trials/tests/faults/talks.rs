//! Clients of a forwarder: TCP streams and UDP sessions to an echo server. Every stream byte is predictable and checked; a client whose
//! connection ends opens a new one.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::within;
use turnpike_trials::SOON;

/// Bytes per write, two writes every 10 ms.
const PIECE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(10);
const WINDOW: Duration = Duration::from_millis(500);
/// Minimum that a client receives in a window while it is served: a quarter of its stream bytes, half of its datagrams.
const FAIR: [u64; 2] = [50 * PIECE as u64 / 4, 50 / 2];

/// After this message the target keeps the connection open.
pub(super) const HOLD: &[u8] = b"do not hang up";
const GREETING: &[u8] = b"are you there?";
const ENOUGH: Duration = Duration::from_secs(6);

pub(super) struct Target {
    pub(super) tcp: SocketAddr,
    pub(super) udp: SocketAddr,
    ends: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<Weak<TcpStream>>>>,
    visits: Arc<Visits>,
}

#[derive(Default)]
struct Visits {
    connections: AtomicU64,
    heard: AtomicU64,
}

impl Target {
    pub(super) fn on(ip: IpAddr) -> Self {
        let listener = TcpListener::from(many_may_wait(ip).expect("a free port"));
        let socket = UdpSocket::bind((ip, 0)).expect("a free port");
        socket.set_read_timeout(Some(PAUSE * 10)).expect("the timeout is not zero");
        let ends = Arc::new(AtomicBool::new(false));
        let target = Self {
            tcp: listener.local_addr().expect("the socket is bound"),
            udp: socket.local_addr().expect("the socket is bound"),
            ends: Arc::clone(&ends),
            streams: Arc::default(),
            visits: Arc::default(),
        };
        let (over, streams) = (Arc::clone(&ends), Arc::clone(&target.streams));
        let visits = Arc::clone(&target.visits);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if over.load(Relaxed) {
                    return;
                }
                visits.connections.fetch_add(1, Relaxed);
                let stream = Arc::new(stream);
                streams
                    .lock()
                    .expect("no thread panics while holding the lock")
                    .push(Arc::downgrade(&stream));
                let (over, visits) = (Arc::clone(&over), Arc::clone(&visits));
                thread::spawn(move || {
                    let said_something = || _ = visits.heard.fetch_add(1, Relaxed);
                    if echo(&stream, said_something).is_ok_and(|said| said == HOLD) {
                        while !over.load(Relaxed) {
                            thread::sleep(PAUSE * 10);
                        }
                    }
                });
            }
        });
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !ends.load(Relaxed) {
                if let Ok((len, client)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..len], client);
                }
            }
        });
        target
    }

    /// Number of connections so far, and number of those that sent data.
    pub(super) fn visits(&self) -> [u64; 2] {
        [&self.visits.connections, &self.visits.heard].map(|figure| figure.load(Relaxed))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
        let _ = TcpStream::connect(self.tcp);
        for stream in self
            .streams
            .lock()
            .expect("no thread panics while holding the lock")
            .iter()
            .filter_map(Weak::upgrade)
        {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn many_may_wait(ip: IpAddr) -> std::io::Result<socket2::Socket> {
    let address = SocketAddr::new(ip, 0);
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Served,
    Refused,
    Unheard,
}

/// Outcome of a new TCP connection within [`ENOUGH`].
pub(super) fn newcomer(server: SocketAddr) -> Fate {
    let end = Instant::now() + ENOUGH;
    let stream = match TcpStream::connect_timeout(&server, ENOUGH) {
        Ok(stream) => stream,
        Err(error) => return Fate::of(&error),
    };
    let left = end.saturating_duration_since(Instant::now()).max(PAUSE);
    stream.set_read_timeout(Some(left)).expect("the timeout is not zero");
    let asked = (&stream).write_all(GREETING);
    Fate::told(asked.and_then(|()| (&stream).read_exact(&mut [0; GREETING.len()])))
}

/// Outcome for a new UDP client that sends two datagrams of `len` bytes per second.
pub(super) fn newcomer_of_udp(server: SocketAddr, len: usize) -> Fate {
    let socket = client_of(server);
    socket.set_read_timeout(Some(ENOUGH / 12)).expect("the timeout is not zero");
    let (datagram, mut back) = (vec![7; len], vec![0; len]);
    let mut fate = Fate::Unheard;
    for _ in 0..12 {
        let asked = socket.send(&datagram);
        match Fate::told(asked.and_then(|_| socket.recv(&mut back)).map(drop)) {
            Fate::Served if back == datagram => return Fate::Served,
            Fate::Served | Fate::Unheard => {}
            Fate::Refused => fate = Fate::Refused,
        }
    }
    fate
}

impl Fate {
    fn told(asked: std::io::Result<()>) -> Self {
        asked.map_or_else(|error| Self::of(&error), |()| Self::Served)
    }

    fn of(error: &std::io::Error) -> Self {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        if matches!(error.kind(), TimedOut | WouldBlock) { Self::Unheard } else { Self::Refused }
    }
}

pub(super) fn whole(tcp: SocketAddr, udp: SocketAddr) {
    let seen = Talks::begin(tcp, udp, 2).end();
    assert_eq!(
        (&seen["cut"], &seen["lost"]),
        (&0.into(), &0.into()),
        "the control clients lost data: {seen}"
    );
}

pub(super) fn client_of(server: SocketAddr) -> UdpSocket {
    let local: IpAddr = if server.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((local, 0)).expect("a free port");
    socket.connect(server).expect("the destination is reachable");
    socket
}

/// Echoes until the client has finished; returns the first bytes. `heard` is called when the first data arrives.
fn echo(mut stream: &TcpStream, heard: impl FnOnce()) -> std::io::Result<Vec<u8>> {
    let (mut buffer, mut beginning) = (vec![0; 64 << 10], Vec::new());
    let mut heard = Some(heard);
    loop {
        let len = stream.read(&mut buffer)?;
        if len == 0 {
            return Ok(beginning);
        }
        if let Some(heard) = heard.take() {
            heard();
        }
        // Keeps one byte more, so that a longer message is detected.
        let more = (HOLD.len() + 1 - beginning.len()).min(len);
        beginning.extend_from_slice(&buffer[..more]);
        stream.write_all(&buffer[..len])?;
    }
}

#[derive(Default)]
struct Seen {
    ends: AtomicBool,
    /// Stream bytes that were echoed correctly.
    right: AtomicU64,
    wrong: AtomicU64,
    /// Correct stream bytes and datagrams, by client number.
    served: Vec<[AtomicU64; 2]>,
    connections: AtomicU64,
    cut: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    strange: AtomicU64,
    doubled: AtomicU64,
    reordered: AtomicU64,
    longest_ms: AtomicU64,
}

pub(super) struct Talks {
    seen: Arc<Seen>,
    threads: Vec<JoinHandle<()>>,
}

impl Talks {
    pub(super) fn begin(tcp: SocketAddr, udp: SocketAddr, clients: u64) -> Self {
        let served = (0..clients).map(|_| <[AtomicU64; 2]>::default()).collect();
        let seen = Arc::new(Seen { served, ..Seen::default() });
        let mut threads = Vec::new();
        for (place, number) in (0..clients).enumerate() {
            let own = Arc::clone(&seen);
            threads.push(thread::spawn(move || {
                let mut connection = number;
                while !own.ends.load(Relaxed) {
                    connection += clients;
                    own.stream(tcp, connection, &own.served[place][0]);
                }
            }));
            let own = Arc::clone(&seen);
            threads.push(thread::spawn(move || own.datagrams(udp, number, &own.served[place][1])));
        }
        let talks = Self { seen, threads };
        talks.flow();
        talks
    }

    /// Waits until all clients are served in the same window. TCP back-off may delay this by some windows.
    pub(super) fn flow(&self) {
        let figures = || -> Vec<[u64; 2]> {
            let of = |client: &[AtomicU64; 2]| client.each_ref().map(|figure| figure.load(Relaxed));
            self.seen.served.iter().map(of).collect()
        };
        let mut last = figures();
        within(SOON * 2, "each client's stream and datagrams flow", || {
            thread::sleep(WINDOW);
            let now = figures();
            let flow = now
                .iter()
                .zip(&last)
                .all(|(now, last)| (0..2).all(|kind| now[kind] - last[kind] >= FAIR[kind]));
            last = now;
            flow
        });
    }

    /// Ends the clients; asserts that no byte was wrong.
    pub(super) fn end(self) -> Value {
        self.seen.ends.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("no client panics"));
        let seen = &self.seen;
        let [right, wrong, connections, cut, sent, received, strange, doubled, reordered, longest] = [
            &seen.right,
            &seen.wrong,
            &seen.connections,
            &seen.cut,
            &seen.sent,
            &seen.received,
            &seen.strange,
            &seen.doubled,
            &seen.reordered,
            &seen.longest_ms,
        ]
        .map(|figure| figure.load(Relaxed));
        assert_eq!(
            (wrong, strange),
            (0, 0),
            "wrong bytes and unexpected datagrams; {right} bytes were correct"
        );
        json!({
            "sent": sent, "lost": sent - received, "duplicated": doubled, "reordered": reordered,
            "pause_ms_max": longest, "stream_bytes": right, "connections": connections, "cut": cut,
        })
    }
}

impl Seen {
    fn stream(&self, server: SocketAddr, number: u64, served: &AtomicU64) {
        let Ok(mut stream) = TcpStream::connect_timeout(&server, Duration::from_secs(1)) else {
            return thread::sleep(Duration::from_millis(100));
        };
        self.connections.fetch_add(1, Relaxed);
        stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is not zero");
        stream.set_write_timeout(Some(PATIENCE)).expect("the timeout is not zero");
        let mut back = stream.try_clone().expect("a descriptor is left");
        let cut = thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let (mut position, mut buffer) = (0, vec![0; PIECE]);
                let mut last = Instant::now();
                loop {
                    match back.read(&mut buffer) {
                        Ok(len @ 1..) => {
                            let wrong = (position..)
                                .zip(&buffer[..len])
                                .filter(|(at, byte)| foretold(number, *at) != **byte);
                            let wrong = wrong.count() as u64;
                            self.wrong.fetch_add(wrong, Relaxed);
                            self.right.fetch_add(len as u64 - wrong, Relaxed);
                            served.fetch_add(len as u64 - wrong, Relaxed);
                            position += len as u64;
                            self.note(&mut last);
                        }
                        // Only data that was sent may come back, and all of it must if the connection is closed properly.
                        Ok(0) => return Some(position),
                        Err(_) => return None,
                    }
                }
            });
            let (mut position, mut whole) = (0, true);
            while whole && !self.ends.load(Relaxed) {
                let bytes: Vec<u8> =
                    (position..position + PIECE as u64).map(|at| foretold(number, at)).collect();
                whole = stream.write_all(&bytes).is_ok();
                position += PIECE as u64;
                thread::sleep(PAUSE);
            }
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let read = reader.join().expect("the thread does not panic");
            !whole || read != Some(position)
        });
        self.cut.fetch_add(cut.into(), Relaxed);
    }

    /// Datagrams of one client, with client number and sequence number.
    fn datagrams(&self, server: SocketAddr, client: u64, served: &AtomicU64) {
        let socket = client_of(server);
        socket.set_read_timeout(Some(PAUSE)).expect("the timeout is not zero");
        let (mut next, mut highest, mut seen) = (0_u64, None, std::collections::HashSet::new());
        let (mut last, mut buffer) = (Instant::now(), [0; 2048]);
        let mut receive = |highest: &mut Option<u64>, next: u64| {
            let Ok(len) = socket.recv(&mut buffer) else { return };
            let number = |at: usize| {
                buffer[..len]
                    .get(at..at + 8)
                    .map(|bytes| u64::from_be_bytes(bytes.try_into().expect("8 of them")))
            };
            match (number(0), number(8)) {
                (Some(of), Some(number)) if of == client && number < next && len == 100 => {
                    if !seen.insert(number) {
                        self.doubled.fetch_add(1, Relaxed);
                        return;
                    }
                    self.received.fetch_add(1, Relaxed);
                    served.fetch_add(1, Relaxed);
                    if highest.is_some_and(|highest| number < highest) {
                        self.reordered.fetch_add(1, Relaxed);
                    }
                    *highest = (*highest).max(Some(number));
                    self.note(&mut last);
                }
                _ => _ = self.strange.fetch_add(1, Relaxed),
            }
        };
        let mut due = Instant::now();
        while !self.ends.load(Relaxed) {
            if Instant::now() >= due {
                let mut datagram = [0; 100];
                datagram[..8].copy_from_slice(&client.to_be_bytes());
                datagram[8..16].copy_from_slice(&next.to_be_bytes());
                // Ignores ICMP errors caused by a closed port; the datagram is lost.
                let _ = socket.send(&datagram);
                self.sent.fetch_add(1, Relaxed);
                next += 1;
                due += PAUSE;
            }
            receive(&mut highest, next);
        }
        let end = Instant::now() + PAUSE * 30;
        while Instant::now() < end {
            receive(&mut highest, next);
        }
    }

    fn note(&self, last: &mut Instant) {
        let now = Instant::now();
        let pause = now.duration_since(std::mem::replace(last, now));
        self.longest_ms.fetch_max(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX), Relaxed);
    }
}

/// Byte of a connection at an offset; differs from adjacent bytes and from other connections.
pub(super) fn foretold(connection: u64, at: u64) -> u8 {
    let mixed = (at ^ connection.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    mixed.to_be_bytes()[0]
}
