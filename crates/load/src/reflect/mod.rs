//! Reflector, the opposite end of every generator. It returns datagrams to their sender, and serves TCP connections, whose first bytes
//! select the workload (see [`crate::greeting`]).

mod connection;
mod tcp;
mod udp;

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    thread,
};

use clap::Args;
use turnpike_net::Datapath;
use turnpike_offload::{Echo, Echoed};
use turnpike_wire::address::socket_address;
use turnpike_worker::{Frame, Workers};

use crate::LoadError;

pub(crate) use connection::MSG_TRUNC;

pub(crate) const DEFAULT_PORT: u16 = 3480;

/// Size in bytes of the receive and send buffers of each UDP socket.
const BUFFER: usize = 8 << 20;

/// Flags of `turnpike reflect`. If no addresses are given, it listens on port 3480 of all addresses, for UDP
/// and TCP.
#[derive(Clone, Debug, Default, Args)]
pub struct ReflectConfig {
    /// UDP address to reflect on; may be repeated [default without --tcp: port 3480 of all addresses, including IPv6 if
    /// available]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address)]
    pub listen: Vec<SocketAddr>,

    /// TCP address for load tcp, rr and connect; echoes the data of all other clients; may be repeated [default
    /// without --listen: as for UDP]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address)]
    pub tcp: Vec<SocketAddr>,

    /// Threads for UDP, 1 to 1024, and the same number for TCP [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,

    /// Data path: auto, basic, mmsg or gso; with kernel, the kernel returns datagrams that arrive over
    /// Ethernet, and auto applies to all others (needs CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON like `serve`;
    /// bypasses netfilter)
    #[arg(long, value_name = "D", default_value = "auto")]
    pub datapath: ReflectPath,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReflectPath {
    /// The kernel returns datagrams that arrive over Ethernet; the best socket path handles all others.
    Kernel,
    Step(Datapath),
}

impl ReflectPath {
    /// Socket path for datagrams that the kernel does not return.
    pub fn step(self) -> Datapath {
        match self {
            Self::Kernel => Datapath::best().0,
            Self::Step(step) => step,
        }
    }
}

impl Default for ReflectPath {
    fn default() -> Self {
        Self::Step(Datapath::best().0)
    }
}

impl FromStr for ReflectPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "kernel" => Ok(Self::Kernel),
            step => step.parse().map(Self::Step).map_err(|_| "expected auto, basic, mmsg, gso or kernel"),
        }
    }
}

impl ReflectConfig {
    pub fn workers(&self) -> usize {
        self.workers.map_or_else(|| thread::available_parallelism().map_or(1, usize::from), usize::from)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReflectStats {
    /// Datagrams, including those returned by the kernel.
    pub received: u64,
    pub received_bytes: u64,
    pub sent: u64,
    /// Number of datagrams in `sent` that the kernel returned without passing them to a worker.
    pub in_kernel: u64,
    /// Datagrams that a send call rejected.
    pub refused: u64,
    /// Datagrams dropped because the receive buffer was full.
    pub kernel_drops: u64,
    pub connections: u64,
    /// Bytes received over TCP, including greetings.
    pub tcp_received_bytes: u64,
    pub tcp_sent_bytes: u64,
}

impl ReflectStats {
    fn add(&mut self, other: Self) {
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.sent += other.sent;
        self.refused += other.refused;
        self.kernel_drops += other.kernel_drops;
        self.connections += other.connections;
        self.tcp_received_bytes += other.tcp_received_bytes;
        self.tcp_sent_bytes += other.tcp_sent_bytes;
    }
}

/// A running reflector. It stops when dropped.
pub struct Reflector {
    listeners: Vec<SocketAddr>,
    tcp_listeners: Vec<SocketAddr>,
    echo: Option<Echo>,
    workers: Workers<(), ReflectStats>,
}

type ReflectFrame = Frame<(), ReflectStats>;

trait ReflectWorker: Send + 'static {
    fn frame(&mut self) -> &mut ReflectFrame;
    fn wake_up(&mut self) -> io::Result<()>;
    fn stats(&self) -> ReflectStats;
}

impl Reflector {
    /// Binds all sockets and starts the workers.
    ///
    /// # Errors
    /// If a socket cannot be bound or a thread cannot be started. All sockets are closed in that case.
    pub fn start(config: &ReflectConfig) -> Result<Self, LoadError> {
        let (step, workers) = (config.datapath.step(), config.workers());
        let everywhere = config.listen.is_empty() && config.tcp.is_empty();
        let datagrams = per_worker(
            &config.listen,
            everywhere,
            workers,
            |address, shared| udp::bind(address, step, shared),
            turnpike_net::UdpSocket::local_addr,
        )?;
        let streams =
            per_worker(&config.tcp, everywhere, workers, tcp::bind, tcp::ReflectListener::local_addr)?;
        let mut reflector = Self {
            listeners: datagrams.addresses,
            tcp_listeners: streams.addresses,
            echo: None,
            workers: Workers::default(),
        };
        for (number, sockets) in datagrams.sockets.into_iter().enumerate() {
            let worker = udp::UdpReflectWorker::new(sockets, step);
            reflector.spawn(format!("reflect-{number}"), worker)?;
        }
        for (number, listeners) in streams.sockets.into_iter().enumerate() {
            reflector.spawn(format!("reflect-tcp-{number}"), tcp::TcpReflectWorker::new(listeners))?;
        }
        if config.datapath == ReflectPath::Kernel {
            let echo = Echo::start(&reflector.listeners)?;
            if echo.interfaces().is_empty() {
                return Err(LoadError::NoEthernet);
            }
            reflector.echo = Some(echo);
        }
        Ok(reflector)
    }

    /// UDP addresses with their actual ports.
    pub fn listeners(&self) -> &[SocketAddr] {
        &self.listeners
    }

    /// TCP addresses with their actual ports.
    pub fn tcp_listeners(&self) -> &[SocketAddr] {
        &self.tcp_listeners
    }

    pub fn in_kernel(&self) -> &[String] {
        self.echo.as_ref().map_or(&[], Echo::interfaces)
    }

    pub fn stats(&self) -> ReflectStats {
        let mut total = ReflectStats::default();
        if let Some(Echoed { datagrams, bytes }) = self.echo.as_ref().map(Echo::echoed) {
            total.in_kernel = datagrams;
            total.received = datagrams;
            total.received_bytes = bytes;
            total.sent = datagrams;
        }
        self.workers.snapshots().into_iter().for_each(|stats| total.add(stats));
        total
    }

    /// Stops and joins the workers and returns the final counts, unlike [`Self::stats`], whose counts may lag behind.
    pub fn stop(mut self) -> ReflectStats {
        self.workers.stop();
        self.stats()
    }

    fn spawn(&mut self, name: String, worker: io::Result<impl ReflectWorker>) -> Result<(), LoadError> {
        let started = worker.and_then(|worker| {
            self.workers.spawn(name, worker, ReflectWorker::frame, |mut worker| {
                while !worker.frame().is_stopped && worker.wake_up().is_ok() {
                    let stats = worker.stats();
                    worker.frame().publish(0, |published| *published = stats);
                }
            })
        });
        started.map_err(LoadError::system("cannot start a reflector thread"))
    }
}

/// One socket per address and worker.
struct PerWorker<S> {
    addresses: Vec<SocketAddr>,
    sockets: Vec<Vec<S>>,
}

/// Binds each address once per worker, after a test without SO_REUSEPORT. Without this test, a second reflector could be started on the
/// same address unnoticed and would take half of the traffic.
fn per_worker<S>(
    wanted: &[SocketAddr],
    everywhere: bool,
    workers: usize,
    bind: impl Fn(SocketAddr, bool) -> Result<S, LoadError>,
    address: impl Fn(&S) -> SocketAddr,
) -> Result<PerWorker<S>, LoadError> {
    let all = |addresses: &[SocketAddr], shared| -> Result<Vec<S>, LoadError> {
        addresses.iter().map(|address| bind(*address, shared)).collect()
    };
    let mut probes = all(wanted, false)?;
    if everywhere {
        probes.push(bind((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT).into(), false)?);
        match bind((Ipv6Addr::UNSPECIFIED, DEFAULT_PORT).into(), false) {
            Ok(socket) => probes.push(socket),
            Err(LoadError::Listen(error)) if error.source.kind() != io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    // For port 0, all workers bind the port that the kernel chose.
    let addresses: Vec<_> = probes.iter().map(address).collect();
    drop(probes);
    let workers = if addresses.is_empty() { 0 } else { workers };
    let sockets = (0..workers).map(|_| all(&addresses, true)).collect::<Result<_, _>>()?;
    Ok(PerWorker { addresses, sockets })
}
