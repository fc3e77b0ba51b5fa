//! The reflector: the far end of every generator. Datagrams go back to where they came from; TCP connections do what
//! their first bytes ask for (see [`crate::greeting`]).

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
use turnpike_net::{
    Datapath, socket_address,
    worker::{Frame, Workers},
};
use turnpike_offload::{Echo, Echoed};

use crate::LoadError;

pub(crate) use connection::MSG_TRUNC;

/// The port of a reflector that names none.
pub(crate) const DEFAULT_PORT: u16 = 3480;

/// Receive and send buffer of each UDP socket in bytes.
const BUFFER: usize = 8 << 20;

/// Settings of a reflector, which are the flags of `turnpike reflect`. With neither UDP nor TCP addresses (the default) it listens for
/// both on port 3480 of all addresses, IPv6 where the machine has it.
#[derive(Clone, Debug, Default, Args)]
pub struct Config {
    /// UDP address to reflect on; repeat for several [default, without --tcp too: port 3480 of all addresses, IPv6 where
    /// there is any]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address)]
    pub listen: Vec<SocketAddr>,

    /// TCP address to serve load tcp, rr and connect on, and an echo to any other client; repeat for several [default,
    /// without --listen too: as for UDP]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address)]
    pub tcp: Vec<SocketAddr>,

    /// Threads, 1 to 1024, for UDP and as many for TCP [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,

    /// How datagrams enter and leave: auto, basic, mmsg or gso; kernel: sent back in the kernel where they come by Ethernet, as auto elsewhere
    /// (as for `serve`: CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON; netfilter does not see them)
    #[arg(long, value_name = "D", default_value = "auto")]
    pub datapath: ReflectPath,
}

/// How datagrams enter and leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReflectPath {
    /// The kernel itself sends back what comes by Ethernet; the rest goes by the best step.
    Kernel,
    /// By a step of the ladder.
    Step(Datapath),
}

impl ReflectPath {
    /// The step of what does not go by the kernel.
    #[must_use]
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

impl Config {
    /// Threads for UDP, and as many for TCP.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.map_or_else(|| thread::available_parallelism().map_or(1, usize::from), usize::from)
    }
}

/// What a reflector has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReflectStats {
    /// Datagrams received.
    pub received: u64,
    /// Bytes of them.
    pub received_bytes: u64,
    /// Datagrams sent back.
    pub sent: u64,
    /// Those of them that the kernel sent back itself.
    pub in_kernel: u64,
    /// Datagrams that the kernel did not take.
    pub refused: u64,
    /// Datagrams that the kernel dropped before they could be received.
    pub kernel_drops: u64,
    /// TCP connections taken.
    pub connections: u64,
    /// Bytes received over TCP, greetings included.
    pub tcp_received_bytes: u64,
    /// Bytes sent over TCP.
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

/// A running reflector. Dropping it stops it.
pub struct Reflector {
    listeners: Vec<SocketAddr>,
    tcp_listeners: Vec<SocketAddr>,
    echo: Option<Echo>,
    workers: Workers<(), ReflectStats>,
}

/// A worker, which takes no commands.
type ReflectFrame = Frame<(), ReflectStats>;

/// One thread's work: waits, then does what there is to do.
trait ReflectWorker: Send + 'static {
    fn frame(&mut self) -> &mut ReflectFrame;
    fn wake_up(&mut self) -> io::Result<()>;
    fn stats(&self) -> ReflectStats;
}

impl Reflector {
    /// Binds all sockets and starts the workers; on error nothing is left open.
    ///
    /// # Errors
    /// When an address cannot be listened on, or a thread not be started.
    pub fn start(config: &Config) -> Result<Self, LoadError> {
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

    /// The UDP addresses listened on, with real ports where the configuration said 0.
    pub fn listeners(&self) -> &[SocketAddr] {
        &self.listeners
    }

    /// The TCP addresses listened on, with real ports where the configuration said 0.
    pub fn tcp_listeners(&self) -> &[SocketAddr] {
        &self.tcp_listeners
    }

    /// The interfaces by which the kernel itself sends datagrams back, by name.
    pub fn in_kernel(&self) -> &[String] {
        self.echo.as_ref().map_or(&[], Echo::interfaces)
    }

    /// What all workers together have done, and the kernel.
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

    /// Stops and joins the workers. What they have done by then is final; before, [`Self::stats`] may
    /// lag behind replies that have left.
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

/// A socket per address for each worker, or for none where there is no address.
struct PerWorker<S> {
    addresses: Vec<SocketAddr>,
    sockets: Vec<Vec<S>>,
}

/// Binds each address once unshared (without SO_REUSEPORT, with which a second reflector would silently take half of the traffic), and
/// then once for each worker.
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
            // Many containers have no IPv6.
            Err(LoadError::Listen { source, .. }) if source.kind() != io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    // The kernel's choice, where the wish was port 0, is the workers' wish.
    let addresses: Vec<_> = probes.iter().map(address).collect();
    drop(probes);
    let workers = if addresses.is_empty() { 0 } else { workers };
    let sockets = (0..workers).map(|_| all(&addresses, true)).collect::<Result<_, _>>()?;
    Ok(PerWorker { addresses, sockets })
}
