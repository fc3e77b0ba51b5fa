//! The reflector: every datagram goes back to where it came from.
//!
//! Each worker has its own `SO_REUSEPORT` socket per address. A received super-packet leaves as one again, because its
//! datagrams lie next to each other in the arena.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

use turnpike_net::{
    Datapath, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket,
    poll::{Poller, Waker},
};

use crate::LoadError;

/// The port of [`Config::default`].
pub const DEFAULT_PORT: u16 = 3480;

/// Settings of a reflector.
#[derive(Clone, Debug)]
pub struct Config {
    /// Addresses to listen on. Empty (the default): port 3480 of all addresses, IPv6 where the machine has it.
    pub listen: Vec<SocketAddr>,
    /// Threads; default: one per core.
    pub workers: usize,
    /// Step of the ladder; default: the best.
    pub datapath: Datapath,
    /// Receive and send buffer of each socket in bytes. Default 8 MiB.
    pub buffer: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            datapath: Datapath::best().0,
            buffer: 8 << 20,
        }
    }
}

/// What a reflector has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Datagrams received.
    pub received: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Datagrams sent back.
    pub sent: u64,
    /// Datagrams that the kernel did not take.
    pub refused: u64,
    /// Datagrams that the kernel dropped before they could be received.
    pub kernel_drops: u64,
}

/// A running reflector. Dropping it stops it.
pub struct Reflector {
    listeners: Vec<SocketAddr>,
    workers: Vec<Handle>,
    stop: Arc<AtomicBool>,
}

struct Handle {
    thread: Option<JoinHandle<()>>,
    waker: Waker,
    counters: Arc<Counters>,
}

/// [`Stats`] as the worker publishes them, once a wake-up.
#[derive(Default)]
struct Counters {
    received: AtomicU64,
    received_bytes: AtomicU64,
    sent: AtomicU64,
    refused: AtomicU64,
    kernel_drops: AtomicU64,
}

const WAKE: u64 = u64::MAX;

impl Reflector {
    /// Binds all sockets and starts the workers; on error nothing is left open.
    pub fn start(config: &Config) -> Result<Self, LoadError> {
        if config.workers == 0 {
            return Err(LoadError::Config("a reflector needs at least one worker".to_owned()));
        }
        let listeners = probe_all(config)?;
        let mut sockets = Vec::with_capacity(config.workers);
        for _ in 0..config.workers {
            let more = listeners.iter().map(|address| bind(*address, config));
            sockets.push(more.collect::<Result<_, _>>()?);
        }
        let mut reflector = Self { listeners, workers: Vec::new(), stop: Arc::default() };
        for (number, sockets) in sockets.into_iter().enumerate() {
            let handle = spawn(number, sockets, config.datapath, &reflector.stop)
                .map_err(LoadError::system("cannot start a reflector thread"))?;
            reflector.workers.push(handle);
        }
        Ok(reflector)
    }

    /// The addresses listened on, with real ports where the configuration said 0.
    #[must_use]
    pub fn listeners(&self) -> &[SocketAddr] {
        &self.listeners
    }

    /// What all workers together have done.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut total = Stats::default();
        for Handle { counters, .. } in &self.workers {
            total.received += counters.received.load(Relaxed);
            total.received_bytes += counters.received_bytes.load(Relaxed);
            total.sent += counters.sent.load(Relaxed);
            total.refused += counters.refused.load(Relaxed);
            total.kernel_drops += counters.kernel_drops.load(Relaxed);
        }
        total
    }

    /// Stops and joins the workers.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Reflector {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for worker in &self.workers {
            worker.waker.wake();
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // A worker that panicked has said so itself.
                let _ = thread.join();
            }
        }
    }
}

/// Binds each address once without SO_REUSEPORT, with which a second reflector would silently take half of the traffic.
/// Gives the real ports where the configuration said 0.
fn probe_all(config: &Config) -> Result<Vec<SocketAddr>, LoadError> {
    if !config.listen.is_empty() {
        return config.listen.iter().map(|address| probe(*address)).collect();
    }
    let mut listeners = vec![probe((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT).into())?];
    match probe((Ipv6Addr::UNSPECIFIED, DEFAULT_PORT).into()) {
        Ok(address) => listeners.push(address),
        // Nobody asked for IPv6, and many containers have none.
        Err(LoadError::Listen { source, .. }) if source.kind() != io::ErrorKind::AddrInUse => {}
        Err(error) => return Err(error),
    }
    Ok(listeners)
}

fn probe(address: SocketAddr) -> Result<SocketAddr, LoadError> {
    match UdpSocket::bind(address, &UdpOptions::default()) {
        Ok(socket) => Ok(socket.local_addr()),
        Err(source) => Err(LoadError::Listen { address, source }),
    }
}

fn bind(address: SocketAddr, config: &Config) -> Result<UdpSocket, LoadError> {
    let options = UdpOptions {
        reuse_port: true,
        recv_buffer: Some(config.buffer),
        send_buffer: Some(config.buffer),
        gro: config.datapath == Datapath::Gso,
        // A reply must leave from the address that was asked.
        packet_info: address.ip().is_unspecified(),
        ..UdpOptions::default()
    };
    UdpSocket::bind(address, &options).map_err(|source| LoadError::Listen { address, source })
}

fn spawn(
    number: usize,
    sockets: Vec<UdpSocket>,
    datapath: Datapath,
    stop: &Arc<AtomicBool>,
) -> io::Result<Handle> {
    let mut worker = Worker::new(sockets, datapath)?;
    let waker = Waker::new(&worker.poller, WAKE)?;
    let (counters, stop) = (Arc::<Counters>::default(), Arc::clone(stop));
    let published = Arc::clone(&counters);
    let thread = std::thread::Builder::new().name(format!("reflect-{number}")).spawn(move || {
        while !stop.load(Relaxed) && worker.wake_up().is_ok() {
            worker.publish(&published);
        }
    })?;
    Ok(Handle { thread: Some(thread), waker, counters })
}

struct Worker {
    sockets: Sockets,
    poller: Poller,
    rx: Rx,
    tx: Tx,
    ready: Vec<SocketId>,
}

impl Worker {
    fn new(sockets: Vec<UdpSocket>, datapath: Datapath) -> io::Result<Self> {
        let (poller, mut table) = (Poller::new()?, Sockets::default());
        for socket in sockets {
            let id = table.insert(socket);
            if let Some(socket) = table.get(id) {
                poller.add(socket, id.0.into())?;
            }
        }
        Ok(Self { sockets: table, poller, rx: Rx::new(datapath), tx: Tx::new(datapath), ready: Vec::new() })
    }

    /// Waits, then reflects what has arrived.
    fn wake_up(&mut self) -> io::Result<()> {
        self.ready.clear();
        let events = self.poller.wait(None)?.iter();
        let ids = events.filter_map(|event| u32::try_from(event.token).ok().map(SocketId));
        self.ready.extend(ids);
        for index in 0..self.ready.len() {
            self.reflect(self.ready[index]);
        }
        self.send();
        Ok(())
    }

    fn reflect(&mut self, id: SocketId) {
        /// Receive calls before the other sockets have their turn.
        const CALLS: usize = 8;
        let Some(socket) = self.sockets.get(id) else { return };
        for _ in 0..CALLS {
            // Errors are ICMP's answers to what was sent back; the next call receives.
            let Ok(received) = self.rx.recv(socket) else { continue };
            for buffer in self.rx.buffers(received) {
                let route = Route {
                    socket: id,
                    to: Some(buffer.from),
                    from: buffer.local,
                    tos: 0,
                    ttl: 0,
                    dont_fragment: false,
                };
                for datagram in buffer.datagrams() {
                    self.tx.push(&route, &[], self.rx.span(datagram), 0);
                }
            }
            if !received.more {
                return;
            }
            if !self.rx.has_room() {
                self.tx.flush(&mut self.sockets, &self.rx);
                return self.rx.reset();
            }
        }
    }

    fn send(&mut self) {
        self.tx.flush(&mut self.sockets, &self.rx);
        self.rx.reset();
    }

    fn publish(&self, counters: &Counters) {
        let (rx, tx) = (self.rx.stats(), self.tx.stats());
        counters.received.store(rx.datagrams, Relaxed);
        counters.received_bytes.store(rx.bytes, Relaxed);
        counters.kernel_drops.store(rx.kernel_drops, Relaxed);
        counters.sent.store(tx.datagrams, Relaxed);
        counters.refused.store(tx.would_block + tx.too_big + tx.refused, Relaxed);
    }
}
