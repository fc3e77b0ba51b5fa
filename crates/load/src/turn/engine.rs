//! The sockets of one thread, with a TURN client behind each: sending, receiving, retransmitting. What the traffic is, the
//! modes decide.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_net::{Datapath, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket, poll::Poller};
use turnpike_turn::client::{self, Client, Event, Incoming};

use super::Config;
use crate::{LoadError, clock::Clock, run::Errors};

/// How often clients are asked whether something is due.
const SWEEP_NS: u64 = 20_000_000;

/// One socket and its client.
pub(super) struct Endpoint {
    pub(super) client: Client,
    socket: SocketId,
    /// When the client wants to be called, in milliseconds.
    timeout: u64,
}

/// Who takes what arrives.
pub(super) trait Sink {
    /// Looks at a datagram before the client does; true when it was taken.
    fn raw(&mut self, _index: usize, _now_ns: u64, _datagram: &[u8]) -> bool {
        false
    }
    /// Takes application data that the client recognised.
    fn payload(&mut self, _index: usize, _now_ns: u64, _payload: &[u8]) {}
}

/// Takes nothing: while clients are set up or taken down.
pub(super) struct NoData;
impl Sink for NoData {}

/// All that one thread drives.
pub(super) struct Engine {
    pub(super) tx: Tx,
    pub(super) endpoints: Vec<Endpoint>,
    /// What clients reported, by endpoint; whoever drives the engine empties it.
    pub(super) events: Vec<(usize, Event)>,
    pub(super) errors: Errors,
    /// An ICMP "port unreachable" came from the server's address.
    pub(super) unreachable: bool,
    clock: Clock,
    sockets: Sockets,
    poller: Poller,
    rx: Rx,
    ready: Vec<usize>,
    next_sweep_ns: u64,
    /// Datagrams that the kernel has not taken, as last seen.
    refused: u64,
}

impl Engine {
    /// Opens a socket for each of `count` clients, connected to the server.
    pub(super) fn new(config: &Config, count: usize, clock: Clock) -> Result<Self, LoadError> {
        let mut engine = Self {
            tx: Tx::new(config.datapath),
            endpoints: Vec::with_capacity(count),
            events: Vec::new(),
            errors: Errors::new(),
            unreachable: false,
            clock,
            sockets: Sockets::default(),
            poller: Poller::new().map_err(LoadError::system("cannot create an epoll instance"))?,
            rx: Rx::new(config.datapath),
            ready: Vec::new(),
            next_sweep_ns: 0,
            refused: 0,
        };
        let server = config.server;
        let settings = client_settings(config);
        for index in 0..count {
            let open = open(config, 0).and_then(|socket| engine.watch(socket, index));
            let socket = open.map_err(|source| LoadError::Socket { server, source })?;
            let client = Client::new(Arc::clone(&settings));
            engine.endpoints.push(Endpoint { client, socket, timeout: u64::MAX });
        }
        Ok(engine)
    }

    fn watch(&mut self, socket: UdpSocket, index: usize) -> io::Result<SocketId> {
        self.poller.add(&socket, index as u64)?;
        Ok(self.sockets.insert(socket))
    }

    /// Gives an endpoint another socket, from this source port. Nothing may be queued for the old one.
    pub(super) fn reopen(&mut self, index: usize, config: &Config, port: u16) -> io::Result<()> {
        let socket = open(config, port)?;
        let old = self.endpoints[index].socket;
        self.endpoints[index].socket = self.watch(socket, index)?;
        self.sockets.remove(old);
        Ok(())
    }

    /// Milliseconds, as clients count them.
    pub(super) fn now_ms(&self) -> u64 {
        self.clock.ns() / 1_000_000
    }

    #[inline]
    pub(super) fn route(&self, index: usize) -> Route {
        let socket = self.endpoints[index].socket;
        Route { socket, to: None, from: None, tos: 0, ttl: 0, dont_fragment: false }
    }

    /// Replaces an endpoint's client by one that has done nothing yet.
    pub(super) fn renew(&mut self, index: usize, settings: &Arc<client::Config>) {
        self.endpoints[index].client = Client::new(Arc::clone(settings));
        self.endpoints[index].timeout = u64::MAX;
    }

    /// Queues what the client wants to send, and notes what it reports.
    pub(super) fn pump(&mut self, index: usize) {
        let route = self.route(index);
        let endpoint = &mut self.endpoints[index];
        while let Some(bytes) = endpoint.client.poll_transmit() {
            self.tx.push_bytes(&route, bytes);
        }
        while let Some(event) = endpoint.client.poll_event() {
            self.events.push((index, event));
        }
        endpoint.timeout = endpoint.client.poll_timeout().unwrap_or(u64::MAX);
    }

    /// Sends what is queued; returns how many datagrams the kernel did not take.
    pub(super) fn flush(&mut self) -> u64 {
        if self.tx.queued() == 0 {
            return 0;
        }
        self.tx.flush(&mut self.sockets, &self.rx);
        let stats = self.tx.stats();
        let refused = stats.would_block + stats.too_big + stats.refused;
        if refused == self.refused {
            return 0;
        }
        let dropped = refused - self.refused;
        self.refused = refused;
        for (name, count) in [
            ("send_would_block", stats.would_block),
            ("send_too_big", stats.too_big),
            ("send_refused", stats.refused),
        ] {
            if count > 0 {
                self.errors.insert(name, count);
            }
        }
        dropped
    }

    /// Calls clients whose time has come.
    pub(super) fn sweep(&mut self) {
        let now_ns = self.clock.ns();
        if now_ns < self.next_sweep_ns {
            return;
        }
        self.next_sweep_ns = now_ns + SWEEP_NS;
        let now = now_ns / 1_000_000;
        for index in 0..self.endpoints.len() {
            if self.endpoints[index].timeout <= now {
                self.endpoints[index].client.handle_timeout(now);
                self.pump(index);
            }
        }
    }

    /// Waits for at most `timeout`, then hands over what has arrived. Returns how many datagrams that was.
    pub(super) fn receive(&mut self, timeout: Duration, sink: &mut impl Sink) -> Result<usize, LoadError> {
        self.ready.clear();
        let events = self.poller.wait(Some(timeout)).map_err(LoadError::system("epoll_wait"))?;
        self.ready.extend(events.iter().filter_map(|event| usize::try_from(event.token).ok()));
        let mut datagrams = 0;
        for position in 0..self.ready.len() {
            datagrams += self.drain(self.ready[position], sink);
        }
        Ok(datagrams)
    }

    /// Receives from one socket.
    fn drain(&mut self, index: usize, sink: &mut impl Sink) -> usize {
        /// Receive calls before the other sockets, and sending, have their turn.
        const CALLS: usize = 4;
        let mut datagrams = 0;
        let mut control = false;
        let Some(endpoint) = self.endpoints.get_mut(index) else { return 0 };
        let Some(socket) = self.sockets.get(endpoint.socket) else { return 0 };
        for _ in 0..CALLS {
            // What is queued for sending lies in `tx`, never in this arena.
            self.rx.reset();
            let received = match self.rx.recv(socket) {
                Ok(received) => received,
                Err(error) => {
                    let refused = error.kind() == io::ErrorKind::ConnectionRefused;
                    self.unreachable |= refused;
                    *self.errors.entry(if refused { "port_unreachable" } else { "receive" }).or_default() +=
                        1;
                    continue;
                }
            };
            // One reading for the batch: these datagrams were all here when the call returned.
            let now_ns = self.clock.ns();
            for buffer in self.rx.buffers(received) {
                for datagram in buffer.datagrams() {
                    datagrams += 1;
                    if sink.raw(index, now_ns, datagram) {
                        continue;
                    }
                    match endpoint.client.handle_datagram(now_ns / 1_000_000, datagram) {
                        Incoming::Data { payload, .. } => sink.payload(index, now_ns, payload),
                        Incoming::Control => control = true,
                        Incoming::Ignored(_) => *self.errors.entry("unexpected_datagram").or_default() += 1,
                    }
                }
            }
            if !received.more {
                break;
            }
        }
        if control {
            self.pump(index);
        }
        datagrams
    }
}

/// Settings of the TURN clients of a run.
pub(super) fn client_settings(config: &Config) -> Arc<client::Config> {
    let mut settings = client::Config::new(config.user.as_str(), config.password.as_str());
    if config.peer.is_ipv6() {
        settings.family = Some(turnpike_wire::turn_types::AddressFamily::IPV6);
    }
    Arc::new(settings)
}

/// A socket connected to the server; port 0 lets the kernel choose.
fn open(config: &Config, port: u16) -> io::Result<UdpSocket> {
    /// Receive buffers of all clients together, as far as the kernel allows.
    const ALL_BUFFERS: usize = 128 << 20;
    let buffer = (ALL_BUFFERS / config.clients).clamp(256 << 10, 8 << 20);
    let options = UdpOptions {
        recv_buffer: Some(buffer),
        send_buffer: Some(buffer.min(4 << 20)),
        gro: config.datapath == Datapath::Gso,
        ..UdpOptions::default()
    };
    let any: SocketAddr = match config.server {
        SocketAddr::V4(_) => ([0; 4], port).into(),
        SocketAddr::V6(_) => ([0_u16; 8], port).into(),
    };
    let socket = UdpSocket::bind(any, &options)?;
    socket.connect(config.server)?;
    Ok(socket)
}
