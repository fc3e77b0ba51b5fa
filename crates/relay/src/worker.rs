//! One worker: one thread, its own sockets, its own state machine. The life of a packet is [`Worker::run`], read from top to
//! bottom.

mod dtls;
mod emptied;
mod handoff;
pub(crate) mod offload;
mod out;
mod peers;
mod streams;

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use turnpike_net::{
    CopyMode, Datapath, ListenOptions, Rx, SocketId, Sockets, Span, Tx, UdpOptions, UdpSocket,
    error_queue::{self, IcmpError},
    poll::{Event, Poller},
    worker::{self, Inbox, Published},
};
use turnpike_turn::{
    random::Seed,
    server::{
        AllocationId, Client, ClosedReason, CredentialQuery, Credentials, Effect, Family, ListenerId,
        LookupId, OpenRelay, OpenRequest, OpenResult, RelayId, RelayTransport, Seat, Server, ServerConfig,
        Source, Transport,
    },
    time::Now,
};
use turnpike_wire::address::canonical;

use crate::{
    Config, Layout, PendingLookup, SessionLog, StartError, WorkerSnapshot,
    dtls::Associations,
    gate::WorkerGate,
    peers::{FIRST_TOKEN as FIRST_PEER_TOKEN, Peers},
    ports::{Opened, Ports, Refusal},
    runtime::{Common, Listeners, passed_error},
    sessions::Question,
    stream::{StreamListeners, Streams},
};
use handoff::Handoff;
pub(crate) use handoff::Mailbox;
use offload::Offload;
use out::{Out, side};

/// Between two publications of the counters, in milliseconds.
const PUBLISH_MS: u64 = 100;
/// Datagrams taken from one listener in one tick, so that relay sockets get their turn.
const LISTENER_SHARE: usize = 512;
/// ICMP errors read from one socket in one tick.
const ERRORS: usize = 16;
/// The token of the waker; sockets use their id.
const WAKER: u64 = u64::MAX;

/// What the control thread asks of a worker.
pub(crate) enum Command {
    SetDraining(bool),
    Reconfigure(Arc<ServerConfig>, Arc<Layout>),
    Handoff(Box<Handoff>),
    Credentials(LookupId, Credentials),
    Answer(Question),
    Stop,
}

impl worker::Command for Command {
    const STOP: Self = Self::Stop;
}

impl worker::Asked for Command {
    fn ask(question: worker::Question) -> Self {
        Self::Answer(Box::new(move |_, _| drop(question)))
    }
}

/// What the control thread may look at.
pub(crate) type Snapshot = Published<WorkerSnapshot>;

/// What a socket is for, by its id.
#[derive(Clone, Copy)]
enum Role {
    Free,
    /// For plain UDP: which of its listeners.
    Listener(usize),
    /// For DTLS: which of its listeners.
    Dtls(usize),
    /// For plain UDP and DTLS.
    Both(usize, usize),
    Relay(RelayId),
}

/// What came behind a message, on a stream.
#[derive(Clone, Copy)]
enum Behind<'a> {
    /// From the client.
    Received(Span),
    /// With the stream, from another worker.
    HandedOver(&'a [u8]),
}

const NOTHING: Behind<'static> = Behind::HandedOver(&[]);

impl Behind<'_> {
    fn to_vec(self, rx: &Rx) -> Vec<u8> {
        match self {
            Self::Received(span) => rx.bytes(span).to_vec(),
            Self::HandedOver(bytes) => bytes.to_vec(),
        }
    }
}

struct Listener {
    socket: SocketId,
    bound: SocketAddr,
    number: ListenerId,
}

pub(crate) struct Worker {
    number: usize,
    server: Server<WorkerGate>,
    poller: Poller,
    rx: Rx,
    out: Out,
    sockets: Sockets,
    listeners: Vec<Listener>,
    roles: Vec<Role>,
    peers: Peers,
    ports: Arc<Ports>,
    mailboxes: Arc<[Mailbox]>,
    log: Arc<dyn SessionLog>,
    /// Where the data path is the kernel's.
    offload: Option<Offload>,
    inbox: Inbox<Command>,
    snapshot: Arc<Snapshot>,
    counted: WorkerSnapshot,
    started: Instant,
    published_ms: u64,
    /// Whether something happened since the last publication.
    dirty: bool,
    complained: bool,
}

impl Worker {
    /// A worker that has bound its sockets and does not serve yet; how it is reached, and what it lets others see.
    pub(crate) fn new(number: usize, common: &Common) -> Result<(Self, Mailbox, Arc<Snapshot>), StartError> {
        let config = &common.config;
        let mut poller = Poller::new()?;
        poller.set_busy_poll(config.busy_poll);
        let (sender, inbox) = worker::inbox(&poller, WAKER)?;
        let started = Instant::now();
        let out = Out {
            tx: Tx::new(config.datapath),
            listeners: Vec::new(),
            relays: Vec::new(),
            ttl_expired: 0,
            streams: Self::listen_streams(number, common, &poller)?,
            dtls: Associations::new(
                Arc::clone(&common.layout),
                Arc::clone(&common.dtls),
                config.server.nonce_keys.clone(),
                config.workers,
                started,
            ),
        };
        let (store, quotas, ports) = (&common.store, &common.quotas, &common.ports);
        let fleet = common.fleet.as_ref().map(Arc::clone);
        let gate = WorkerGate::new(Arc::clone(store), Arc::clone(quotas), Arc::clone(ports), fleet);
        let (settings, seed) = (Arc::new(config.server.clone()), Seed(rand::random()));
        let snapshot = Arc::<Snapshot>::default();
        let offload = common.kernel.as_ref().map(|kernel| kernel.flows()).transpose()?;
        // The state machine's clock began with `started`.
        let base_ns = || {
            let since = u64::try_from(started.elapsed().as_nanos()).unwrap_or_default();
            turnpike_offload::now_ns().saturating_sub(since)
        };
        let offload = offload.map(|flows| Offload::new(flows, base_ns(), config.server.channels));
        let mut worker = Self {
            number,
            server: Server::of_many(settings, gate, seat(number, config), seed),
            poller,
            rx: Rx::new(config.datapath),
            out,
            sockets: Sockets::default(),
            listeners: Vec::new(),
            roles: Vec::new(),
            peers: Peers::new(CopyMode::Auto),
            ports: Arc::clone(ports),
            mailboxes: Arc::new([]),
            log: Arc::clone(&common.log),
            offload,
            inbox,
            snapshot: Arc::clone(&snapshot),
            counted: WorkerSnapshot::default(),
            started,
            published_ms: 0,
            dirty: true,
            complained: false,
        };
        let Listeners { udp, dtls, .. } = &common.listeners;
        for address in udp {
            worker.listen(*address, config)?;
        }
        for address in dtls {
            worker.listen_dtls(*address, udp.iter().position(|udp| udp == address), config)?;
        }
        Ok((worker, Mailbox { worker: sender, backlog: Arc::default() }, snapshot))
    }

    fn listen_streams(number: usize, common: &Common, poller: &Poller) -> Result<Streams, StartError> {
        let Listeners { tcp, tls, .. } = &common.listeners;
        let passed = &common.config.passed;
        let bind = |address, options: &ListenOptions| passed.tcp(number, address, options);
        let bound = StreamListeners::bind(tcp, tls, &common.streams, common.config.reuses_ports(), bind);
        let listeners = bound.map_err(|(address, source)| {
            let protocol = if tcp.contains(&address) { "tcp" } else { "tls" };
            passed_error(passed, protocol, address, source)
        })?;
        let (layout, config) = (Arc::clone(&common.layout), Arc::clone(&common.streams));
        Ok(Streams::new(layout, config, Arc::clone(&common.admission), listeners, poller)?)
    }

    fn listen(&mut self, address: SocketAddr, config: &Config) -> Result<(), StartError> {
        let place = self.listeners.len();
        let number = config.layout().number(Transport::Udp, place, None);
        let (socket, bound) = self.bind_udp("udp", address, Role::Listener(place), config)?;
        self.listeners.push(Listener { socket, bound, number });
        let index = usize::from(number.0);
        if self.out.listeners.len() <= index {
            self.out.listeners.resize(index + 1, None);
        }
        self.out.listeners[index] = Some((socket, address.ip().is_unspecified()));
        Ok(())
    }

    fn bind_udp(
        &mut self,
        protocol: &'static str,
        address: SocketAddr,
        role: Role,
        config: &Config,
    ) -> Result<(SocketId, SocketAddr), StartError> {
        let options = UdpOptions {
            reuse_port: config.reuses_ports(),
            recv_buffer: Some(config.listener_buffer),
            send_buffer: Some(config.listener_buffer),
            gro: config.datapath == Datapath::Gso,
            packet_info: address.ip().is_unspecified(),
            ip_header: true,
            errors: false,
            dual_stack: false,
        };
        let socket = config
            .passed
            .udp(self.number, address, &options)
            .map_err(|error| passed_error(&config.passed, protocol, address, error))?;
        let bound = socket.local_addr();
        Ok((self.adopt(socket, role)?, bound))
    }

    /// Serves until told to stop.
    pub(crate) fn run(&mut self) {
        let mut events: Vec<Event> = Vec::new();
        let mut now = self.now();
        if self.offload.is_some() {
            // Its looks are due within tens of microseconds.
            let _ = turnpike_net::limits::exact_timers();
        }
        loop {
            let at_most = self.offload.as_mut().and_then(Offload::before_wait);
            match self.poller.wait_until_within(now.ms, self.due(), at_most) {
                Ok(ready) => {
                    events.clear();
                    events.extend_from_slice(ready);
                }
                Err(error) => {
                    tracing::error!(worker = self.number, %error, "epoll failed; this worker ends");
                    return;
                }
            }
            now = self.now();
            self.counted.wakeups += u64::from(at_most != Some(Duration::ZERO) || !events.is_empty());
            self.dirty |= !events.is_empty();
            if let Some(offload) = &mut self.offload {
                offload.after_wait(&events, events.len() < Poller::FULL, self.rx.stats().kernel_drops);
                self.dirty |= offload.sweep(now.ms, &mut self.server);
            }
            let first = self.out.streams.begin_tick(&events);
            events.rotate_left(first);
            for event in &events {
                if !self.rx.has_room() {
                    self.flush();
                }
                let role = usize::try_from(event.token).ok().and_then(|index| self.roles.get(index)).copied();
                match role {
                    Some(Role::Listener(place)) => self.receive_from_clients(now, place),
                    Some(Role::Relay(relay)) => self.receive_from_peers(now, relay, event),
                    Some(Role::Dtls(place)) => self.receive_by_dtls(now, place, None),
                    Some(Role::Both(plain, place)) => self.receive_by_dtls(now, place, Some(plain)),
                    _ if event.token == WAKER => {
                        if self.handle_commands(now) {
                            return;
                        }
                    }
                    _ if event.token >= FIRST_PEER_TOKEN => self.serve_peers(now, event),
                    _ => self.serve_stream(now, event),
                }
            }
            self.serve_accepted(now);
            if self.out.streams.poll_timeout().is_some_and(|due| due <= now.ms) {
                self.out.streams.handle_timeout(now.ms, &self.poller);
                self.dirty = true;
            }
            if self.out.dtls.poll_timeout().is_some_and(|due| due <= now.ms) {
                self.out.dtls.handle_timeout(now.ms, &mut self.out.tx);
                self.dirty = true;
            }
            if self.peers.poll_timeout().is_some_and(|due| due <= now.ms) {
                self.resume_peers(now);
            }
            if self.server.poll_timeout().is_some_and(|due| due <= now.ms) {
                self.server.handle_timeout(now);
                self.dirty = true;
            }
            // Before the flush: some of them have a reply.
            self.carry_out_effects(now, NOTHING);
            self.flush();
            while let Some(client) = self.out.streams.next_gone().or_else(|| self.out.dtls.next_gone()) {
                self.server.disconnected(now, &client);
            }
            self.carry_out_effects(now, NOTHING);
            // Farewells to DTLS clients that had to give way.
            if self.out.tx.queued() > 0 {
                self.flush();
            }
            self.publish(now.ms);
        }
    }

    fn receive_from_clients(&mut self, now: Now, place: usize) {
        let Listener { socket, .. } = self.listeners[place];
        let mut share = LISTENER_SHARE;
        while self.rx.has_room() {
            let Some(listening) = self.sockets.get(socket) else { return };
            let Ok(received) = self.rx.recv(listening) else { return };
            if let Some(offload) = self.offload.as_mut().filter(|_| received.emptied) {
                offload.received(socket);
            }
            for index in received.first..received.first + received.count {
                self.route_client_buffer(now, place, index);
            }
            share = share.saturating_sub(received.count);
            if !received.more || share == 0 {
                return;
            }
        }
    }

    /// Routes the datagrams of one received buffer: all of one client.
    fn route_client_buffer(&mut self, now: Now, place: usize, index: usize) {
        let Listener { bound, number, .. } = self.listeners[place];
        let mut routed = 0;
        loop {
            let Some(buffer) = self.rx.buffer(index) else { return };
            let local = SocketAddr::new(buffer.local.unwrap_or(bound.ip()), bound.port());
            let client = Client { listener: number, address: buffer.from, local: canonical(local) };
            let source = Source::from(client);
            let mut datagrams = buffer.datagrams();
            if routed > 0 {
                datagrams.nth(routed - 1);
            }
            let mut paused = false;
            for datagram in datagrams.by_ref() {
                let verdict = self.server.from_client(now, &source, datagram);
                paused = self.out.carry_out(&self.rx, &buffer, verdict) && self.server.has_effects();
                if paused {
                    break;
                }
            }
            if !paused {
                return;
            }
            // What follows changes what the loop above borrows; it happens on requests only, and on few of them.
            routed = buffer.count() - datagrams.count();
            self.carry_out_effects(now, NOTHING);
        }
    }

    fn receive_from_peers(&mut self, now: Now, relay: RelayId, event: &Event) {
        let Some(socket) = self.out.relay_socket(relay) else { return };
        let Some(socket) = self.sockets.get(socket) else { return };
        if event.error {
            let mut errors = [None; ERRORS];
            let mut count = 0;
            let _ = error_queue::read(socket, ERRORS, |error| {
                errors[count] = Some(error);
                count += 1;
            });
            for IcmpError { to, icmp_type, code, info, .. } in errors.into_iter().flatten() {
                let verdict = self.server.from_icmp(now, relay, to, icmp_type, code, info);
                self.out.reply(verdict);
            }
        }
        let Ok(received) = self.rx.recv(socket) else { return };
        for buffer in self.rx.buffers(received) {
            for datagram in buffer.datagrams() {
                let verdict = self.server.from_peer(now, relay, buffer.from, datagram);
                self.out.carry_out(&self.rx, &buffer, verdict);
            }
        }
    }

    fn flush(&mut self) {
        self.out.tx.flush(&mut self.sockets, &self.rx);
        self.out.streams.flush(&self.rx, &self.poller);
        self.out.dtls.flushed();
        self.rx.reset();
        if let Some(offload) = &mut self.offload {
            offload.flushed();
        }
    }

    /// Opens the relay sockets of a new allocation and answers its client.
    fn open(&mut self, now: Now, request: &OpenRequest) {
        let first = self.open_one(now, request.allocation, &request.first);
        let second = request.second.map(|wish| self.open_one(now, request.allocation, &wish));
        let verdict = self.server.opened(now, request.allocation, first, second);
        self.out.reply(verdict);
    }

    fn open_one(&mut self, now: Now, allocation: AllocationId, wish: &OpenRelay) -> OpenResult {
        if wish.transport == RelayTransport::Tcp {
            return self.open_tcp(allocation, wish);
        }
        let owner = self.server.owner(allocation).unwrap_or_default();
        let opened = match self.ports.open(wish, owner, now.ms) {
            Ok(opened) => opened,
            Err(refusal) => return self.refuse(refusal),
        };
        let Opened { socket, relayed } = opened;
        let bound = socket.local_addr();
        let relay = RelayId { allocation, family: wish.family };
        match self.adopt(socket, Role::Relay(relay)) {
            Ok(id) => {
                self.out.set_relay(allocation, wish.family, id);
                if let Some(offload) = &mut self.offload {
                    offload.relay_opened(relay, id, bound);
                }
                OpenResult::Opened { relayed }
            }
            Err(_) => {
                self.ports.release(bound);
                self.refuse(Refusal::File)
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> OpenResult {
        let remedy = match refusal {
            Refusal::Port => {
                self.counted.ports_exhausted += 1;
                "every relay port is taken: widen --relay-ports or add a --relay-ip"
            }
            Refusal::File => {
                self.counted.files_exhausted += 1;
                "no file descriptor or memory for another relay socket: raise the limit of open files (ulimit -n)"
            }
            Refusal::Family | Refusal::Reservation => return refusal.result(),
        };
        if !self.complained {
            self.complained = true;
            tracing::warn!(
                worker = self.number,
                "allocation refused with 508: {remedy}; said once, counted on"
            );
        }
        refusal.result()
    }

    /// Takes a socket into the table and watches it.
    fn adopt(&mut self, socket: UdpSocket, role: Role) -> io::Result<SocketId> {
        let id = self.sockets.insert(socket);
        let index = id.0 as usize;
        if self.roles.len() <= index {
            self.roles.resize(index + 1, Role::Free);
        }
        let watched = match self.sockets.get(id) {
            Some(socket) => self.poller.add(socket, u64::from(id.0)),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        };
        if let Err(error) = watched {
            self.sockets.remove(id);
            return Err(error);
        }
        self.roles[index] = role;
        Ok(id)
    }

    /// Does what the state machine asks for, in its order. `behind` the message that it was fed last.
    fn carry_out_effects(&mut self, now: Now, behind: Behind<'_>) {
        while let Some(mut effect) = self.server.poll_effect() {
            if let Some(offload) = &mut self.offload {
                offload.hear(&mut effect, &mut self.server, &self.out.listeners);
            }
            self.out.streams.effect(now.ms, &effect);
            self.out.dtls.effect(now.ms, &effect, &mut self.out.tx);
            self.log.effect(self.number, &effect);
            match effect {
                Effect::Open(request) => self.open(now, &request),
                Effect::Connect(request) => self.connect(now, &request),
                Effect::Bind { connection, source } => self.bind(now, connection, &source.client, behind),
                Effect::LookUp(query) => self.look_up(query),
                Effect::Closed { allocation, .. } => {
                    for family in [Family::V4, Family::V6] {
                        self.close(RelayId { allocation, family });
                    }
                    self.close_all_tcp(allocation);
                }
                Effect::RelayClosed { relay } => {
                    self.close(relay);
                    self.close_tcp(relay);
                }
                Effect::ConnectionClosed { connection, .. } => self.peers.drop_connection(connection),
                Effect::ConnectTimedOut { allocation, connection } => {
                    self.give_up(now, allocation, connection);
                }
                Effect::HandOver { worker, source, request } => {
                    self.hand_over(&source.client, worker, request, behind);
                }
                Effect::Forward { worker, via, source, request } => {
                    self.send(worker, Handoff::Request { via, source, request });
                }
                Effect::Answer { via, source, arrival, reply } => {
                    self.send(via, Handoff::Reply { source, arrival, reply });
                }
                Effect::Fetch { request, datagram } => self.fetch(request, datagram),
                Effect::Move(request) => self.export(now, &request, Box::default()),
                _ => {}
            }
        }
    }

    /// Asks the credential store for what a request waits for.
    fn look_up(&mut self, query: CredentialQuery) {
        let Some(own) = self.mailboxes.get(self.number) else { return };
        let answer = PendingLookup::new(query.lookup, own.worker.clone());
        self.server.gate_mut().look_up(query, answer);
    }

    fn close(&mut self, relay: RelayId) {
        let pair = self.out.relays.get_mut(relay.allocation.index as usize);
        let Some(id) = pair.and_then(|pair| pair[side(relay.family)].take()) else { return };
        if let Some(offload) = &mut self.offload {
            offload.relay_closed(relay);
        }
        // What is queued leaves before its socket does. The arena keeps what is still to be routed.
        self.out.tx.flush(&mut self.sockets, &self.rx);
        self.roles[id.0 as usize] = Role::Free;
        if let Some(socket) = self.sockets.remove(id) {
            self.ports.release(socket.local_addr());
        }
    }

    /// Carries out what the control thread and other workers ask for; true means the end.
    fn handle_commands(&mut self, now: Now) -> bool {
        self.inbox.acknowledge();
        while let Some(command) = self.inbox.command() {
            match command {
                Command::SetDraining(draining) => self.server.set_draining(draining),
                Command::Reconfigure(config, layout) => {
                    let (channels, keys) = (config.channels, config.nonce_keys.clone());
                    self.server.reconfigure(now, config);
                    if let Some(offload) = &mut self.offload {
                        offload.restrict(channels, &mut self.server);
                    }
                    self.carry_out_effects(now, NOTHING);
                    self.out.streams.lay_out(Arc::clone(&layout));
                    self.out.dtls.reconfigure(layout, keys);
                }
                Command::Handoff(handoff) => self.take_handoff(now, *handoff),
                Command::Credentials(lookup, credentials) => {
                    let verdict = self.server.credentials(now, lookup, credentials);
                    self.out.reply(verdict);
                    self.carry_out_effects(now, NOTHING);
                    self.dirty = true;
                }
                Command::Answer(question) => {
                    question(&mut self.server, now);
                    self.carry_out_effects(now, NOTHING);
                    // One a tick, so that packets wait for one at most.
                    self.inbox.wake_again();
                    return false;
                }
                Command::Stop => {
                    self.flush();
                    self.server.close_all(now, ClosedReason::Shutdown);
                    self.carry_out_effects(now, NOTHING);
                    self.out.streams.shutdown(&self.poller);
                    self.out.dtls.shutdown(&mut self.out.tx);
                    self.flush();
                    self.dirty = true;
                    self.publish(self.published_ms + PUBLISH_MS);
                    return true;
                }
            }
        }
        false
    }

    fn now(&self) -> Now {
        let ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Now { ms, unix }
    }

    /// When the next timer is due, or the counters must be published.
    fn due(&self) -> Option<u64> {
        let timer = self.server.poll_timeout();
        let publish = self.dirty.then_some(self.published_ms + PUBLISH_MS);
        let (streams, dtls) = (self.out.streams.poll_timeout(), self.out.dtls.poll_timeout());
        let offload = self.offload.as_ref().and_then(Offload::due);
        [timer, publish, streams, dtls, self.peers.poll_timeout(), offload].into_iter().flatten().min()
    }

    fn publish(&mut self, now_ms: u64) {
        if !self.dirty || now_ms < self.published_ms + PUBLISH_MS {
            return;
        }
        self.published_ms = now_ms;
        self.dirty = false;
        self.ports.expire(now_ms);
        for (connection, to_peer, to_client) in self.peers.carried() {
            self.server.connection_carried(connection, to_peer, to_client);
        }
        let counted = &mut self.counted;
        counted.peers = self.peers.stats();
        counted.allocations = self.server.allocations() as u64;
        counted.turn.clone_from(self.server.stats());
        counted.rx = *self.rx.stats();
        counted.tx = *self.out.tx.stats();
        counted.ttl_expired = self.out.ttl_expired;
        counted.across = self.offload.as_ref().map(|offload| offload.across().pairs()).unwrap_or_default();
        counted.streams = self.out.streams.stats();
        counted.dtls = self.out.dtls.stats();
        self.snapshot.update(|snapshot| snapshot.clone_from(counted));
    }
}

/// A server has no more workers than there are seats: `config` sees to it.
fn seat(number: usize, config: &Config) -> Seat {
    let of = |count: usize| u16::try_from(count).ok();
    of(number)
        .zip(of(config.workers.max(1)))
        .and_then(|(number, count)| Seat::new(number, count))
        .unwrap_or(Seat::ONLY)
}
