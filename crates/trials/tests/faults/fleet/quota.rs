//! A user who continuously requests allocations from all nodes and keeps them, to measure by how much a fleet-wide limit is ever exceeded.

use std::{
    io,
    net::UdpSocket,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use turnpike_testkit::stun;

use super::network::{NODES, node_address};

pub(super) const GREEDY: &str = "greedy";

const PAUSE: Duration = Duration::from_millis(15);

pub(super) struct Greedy {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    password: &'static str,
    ends: AtomicBool,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    sockets: [Vec<UdpSocket>; NODES],
    granted: [u64; NODES],
    losses: [u32; NODES],
    most: usize,
}

impl Held {
    fn count(&self) -> usize {
        self.sockets.iter().map(Vec::len).sum()
    }
}

impl Greedy {
    pub(super) fn start(password: &'static str) -> Self {
        let shared = Arc::new(Shared { password, ends: AtomicBool::new(false), held: Mutex::default() });
        let ask = |node: usize| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.ask_again_and_again(node))
        };
        let threads = (0..NODES).map(ask).collect();
        Self { shared, threads }
    }

    pub(super) fn count(&self) -> usize {
        self.shared.held().count()
    }

    pub(super) fn count_at(&self, node: usize) -> usize {
        self.shared.held().sockets[node].len()
    }

    /// Maximum number of simultaneous allocations since the last call.
    pub(super) fn most(&self) -> usize {
        let mut held = self.shared.held();
        let now = held.count();
        std::mem::replace(&mut held.most, now)
    }

    /// Returns a function, for use in another thread, that counts the allocations granted so far by a node.
    pub(super) fn granted(&self) -> impl Fn(usize) -> u64 + Send + use<> {
        let shared = Arc::clone(&self.shared);
        move |node| shared.held().granted[node]
    }

    pub(super) fn has_lost(&self, node: usize) {
        let mut held = self.shared.held();
        held.sockets[node].clear();
        held.losses[node] += 1;
    }
}

impl Drop for Greedy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_again_and_again(&self, node: usize) {
        let mut spare: Option<(UdpSocket, stun::Challenge)> = None;
        while !self.ends.load(Relaxed) {
            let losses = self.held().losses[node];
            let Some((socket, challenge)) = spare.take().or_else(|| challenged(node).ok()) else {
                thread::sleep(PAUSE);
                continue;
            };
            match exchange(&socket, &stun::allocate_request(Some((GREEDY, self.password, &challenge)))) {
                Ok(answer) if answer.error().is_none() => {
                    let mut held = self.held();
                    if held.losses[node] == losses {
                        held.sockets[node].push(socket);
                        held.granted[node] += 1;
                        held.most = held.most.max(held.count());
                    }
                }
                Ok(answer) => {
                    // A stale nonce is replaced; redirects are not followed, because they lead to nodes that are already in use.
                    if answer.error() != Some(438) {
                        spare = Some((socket, challenge));
                    }
                    thread::sleep(PAUSE);
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }
}

fn challenged(node: usize) -> io::Result<(UdpSocket, stun::Challenge)> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(node_address(node))?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let answer = exchange(&socket, &stun::allocate_request(None))?;
    match answer.error() {
        Some(401 | 438) => Ok((socket, answer.challenge())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn exchange(socket: &UdpSocket, request: &[u8]) -> io::Result<stun::Message> {
    let mut buffer = [0; 2048];
    socket.send(request)?;
    let len = socket.recv(&mut buffer)?;
    Ok(stun::Message::stun(&buffer[..len]))
}
