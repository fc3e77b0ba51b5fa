//! New clients that arrive at a fixed rate, each sending its first Allocate from a port of its own.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use turnpike_testkit::stun;

/// Sockets kept open for replies.
const WAITING: usize = 256;
const NONCE_LEN: usize = 24;

pub struct Newcomers {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Arrived>>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Arrived {
    pub sent: u64,
    pub challenged: u64,
    pub refused: u64,
}

impl Newcomers {
    /// Sends the first requests of `rate` clients per second over UDP, from `networks` addresses in different /24s; if there is only one,
    /// it is 127.0.0.1.
    pub fn arrive(server: SocketAddr, rate: u32, networks: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let stop = Arc::clone(&stop);
            thread::spawn(move || arrive(server, rate, networks, &stop))
        };
        Self { stop, thread: Some(thread) }
    }

    pub fn stop(mut self) -> Arrived {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("joined once");
        thread.join().expect("newcomers do not panic")
    }
}

impl Drop for Newcomers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn arrive(server: SocketAddr, rate: u32, networks: u32, stop: &AtomicBool) -> Arrived {
    let interval = Duration::from_secs(1) / rate;
    let mut arrived = Arrived::default();
    let mut waiting = VecDeque::with_capacity(WAITING);
    let started = Instant::now();
    for number in 0_u32.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        thread::sleep((interval * number).saturating_sub(started.elapsed()));
        let socket = UdpSocket::bind((source(number % networks), 0)).expect("loopback has free ports");
        socket.set_nonblocking(true).expect("a socket");
        // Datagrams are lost if the server's socket buffer is full, as on a network.
        if socket.send_to(&stun::allocate_request(None), server).is_ok() {
            arrived.sent += 1;
        }
        waiting.push_back(socket);
        if waiting.len() == WAITING {
            waiting.pop_front().iter().for_each(|socket| arrived.count(socket));
        }
    }
    thread::sleep(Duration::from_millis(100));
    waiting.iter().for_each(|socket| arrived.count(socket));
    arrived
}

impl Arrived {
    fn count(&mut self, socket: &UdpSocket) {
        let mut buffer = [0; 1024];
        let Ok(len) = socket.recv(&mut buffer) else { return };
        let answer = stun::Message::stun(&buffer[..len]);
        if answer.error() == Some(401) && answer.challenge().nonce.len() == NONCE_LEN {
            self.challenged += 1;
        } else {
            self.refused += 1;
        }
    }
}

fn source(network: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x7F00_0001 + (network << 8)).into()
}
