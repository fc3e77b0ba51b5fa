//! A worker: one thread with its own sockets and state machine. [`Worker::run`] shows the path of a packet
//! from top to bottom.

mod dtls;
mod handoff;
mod listeners;
pub(crate) mod offload;
mod out;
mod peers;
mod relays;
mod shared;
mod streams;
mod tunnel;
mod upgrade;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::Range,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use turnpike_net::{ArenaSpan, Buffer, Event, Poller, Rx, SocketId, Sockets, Tx, UdpSocket, rlimit};
use turnpike_offload::WorkerClock;
use turnpike_turn::{
    random::Seed,
    server::{
        AllocationSlot, Client, ClosedReason, CredentialQuery, Effect, Family, LookupId, LookupResult,
        QualityReport, RelayId, ReplayGuard, Server, Source, WorkerId,
    },
    time::Now,
};
use turnpike_wire::address::canonical;
use turnpike_worker::{Frame, HandoverStep, INBOX};

use crate::{
    AllocationLog, Config, Layout, PendingLookup, StartError, WorkerSnapshot,
    coalesce::Coalescer,
    common::RelayCommon,
    dtls::Associations,
    handed_on::{self, HandedOn},
    layout::Listener,
    link::ClientLinkKind,
    listening::{self, Named},
    peers::{FIRST_TOKEN as FIRST_PEER_TOKEN, Peers},
    policy::WorkerPolicy,
    ports::Ports,
    stream::Streams,
};
use handoff::Handoff;
pub(crate) use handoff::Mailbox;
use listeners::Lingering;
pub(crate) use listeners::Reconfigure;
use offload::{FlowSide, Offload};
use out::Out;
use relays::PortHolder;
use shared::SharedPorts;
use tunnel::Tunnels;

/// Maximum datagrams per tick from one listener or shared relay socket, for fairness.
const SHARE: usize = 512;

pub(crate) struct Probe {
    pub(crate) asked: Instant,
    pub(crate) answer: ToldWait,
}

type ToldWait = Box<dyn FnOnce(Duration) + Send>;

/// Query from another thread, run between two ticks.
pub(crate) type WorkerQuery = Box<dyn FnOnce(&mut Server<WorkerPolicy>, Now) + Send>;

/// Query for the quality of the allocations in these slots.
pub(crate) struct QualityQuery {
    pub(crate) slots: Range<u32>,
    pub(crate) each: Box<dyn FnMut(&QualityReport) + Send>,
    /// Receives the first slot that is left.
    pub(crate) answer: Box<dyn FnOnce(Option<u32>) + Send>,
}

pub(crate) enum Command {
    SetDraining(bool),
    Reconfigure(Box<Reconfigure>),
    Handoff(Box<Handoff>),
    FinishLookup(LookupId, LookupResult),
    EndAt(Arc<[IpAddr]>),
    Answer(WorkerQuery),
    ReportQuality(QualityQuery),
    Publish(Probe),
    /// Sends duplicates of the sockets of these listeners.
    ExportSockets(Arc<[Named]>, mpsc::Sender<io::Result<Vec<OwnedFd>>>),
    /// Stops the kernel fast path; replies once no flows are left in the kernel.
    SuspendFlows(mpsc::Sender<()>),
    /// Returns the number of handoffs handled since the last call; sent only to paused workers.
    Settle(mpsc::Sender<usize>),
    Upgrade(HandoverStep),
}

impl From<HandoverStep> for Command {
    fn from(step: HandoverStep) -> Self {
        Self::Upgrade(step)
    }
}

#[derive(Clone, Copy)]
enum Role {
    Free,
    Listener(usize),
    Dtls(usize),
    Both(usize, usize),
    Relay(PortHolder),
}

#[derive(Clone, Copy)]
enum TrailingBytes<'a> {
    Received(ArenaSpan),
    HandedOver(&'a [u8]),
}

const NO_TRAILING: TrailingBytes<'static> = TrailingBytes::HandedOver(&[]);

/// TOS and TTL recorded for data from a stream or another worker, so that relayed datagrams get the defaults
/// (RFC 8656 section 15.2).
const UNMARKED: (u8, u8) = (0, 0);

impl TrailingBytes<'_> {
    fn to_vec(self, rx: &Rx) -> Vec<u8> {
        match self {
            Self::Received(span) => rx.bytes(span).to_vec(),
            Self::HandedOver(bytes) => bytes.to_vec(),
        }
    }
}

/// Datagrams of a received buffer. The spans do not borrow the arena, so effects can be carried out between
/// two of them.
fn datagrams(rx: &Rx, buffer: &Buffer<'_>) -> impl Iterator<Item = ArenaSpan> + use<> {
    let (mut rest, size) = (Some(rx.span(buffer.bytes)), u32::try_from(buffer.segment_size.max(1)));
    let size = size.unwrap_or(u32::MAX);
    std::iter::from_fn(move || {
        let ArenaSpan { offset, len } = rest?;
        rest = (len > size).then(|| ArenaSpan { offset: offset + size, len: len - size });
        Some(ArenaSpan { offset, len: len.min(size) })
    })
}

pub(crate) struct Worker {
    pub(crate) frame: Frame<Command, WorkerSnapshot>,
    server: Server<WorkerPolicy>,
    coalescer: Option<Coalescer>,
    rx: Rx,
    out: Out,
    sockets: Sockets,
    layout: Arc<Layout>,
    listeners: Vec<Listener>,
    lingering: Lingering,
    roles: Vec<Role>,
    peers: Peers,
    handed_on: HandedOn,
    ports: Arc<Ports>,
    shared: SharedPorts,
    mailboxes: Arc<[Mailbox]>,
    log: Arc<dyn AllocationLog>,
    offload: Option<Offload>,
    /// Notified once the kernel no longer relays anything.
    suspended: Option<mpsc::Sender<()>>,
    tunnels: Tunnels,
    /// Allocations exported to another process, dropped on `forget`.
    handed_over: Vec<AllocationSlot>,
    replays: ReplayGuard,
    counted: WorkerSnapshot,
    asked: Vec<(Duration, ToldWait)>,
    complained: bool,
}

impl Worker {
    pub(crate) fn new(
        number: usize,
        common: &RelayCommon,
        sockets: listening::ListenerSockets,
    ) -> Result<Self, StartError> {
        let (config, started) = (&common.config, common.started);
        let mut frame = Frame::new(number, started)?;
        frame.poller.busy_poll = config.busy_poll;
        let (layout, streams) = (Arc::clone(&common.layout), Arc::clone(&common.streams));
        let out = Out {
            tx: Tx::new(config.datapath),
            listeners: Vec::new(),
            relays: Vec::new(),
            ttl_expired: 0,
            streams: Streams::new(Arc::clone(&layout), streams, config.workers),
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
        let policy = WorkerPolicy::new(Arc::clone(store), Arc::clone(quotas), Arc::clone(ports), fleet);
        let (settings, seed) = (Arc::new(config.server.clone()), Seed(rand::random()));
        let offload = common.kernel.as_ref().map(|kernel| kernel.flows()).transpose()?;
        // The state machine's clock starts at `started`.
        let clock = WorkerClock::at(started.elapsed());
        let (range, is_active) = (config.server.channels, !common.takes_over);
        let offload = offload.map(|flows| Offload::new(flows, clock, range, is_active));
        let mut worker = Self {
            frame,
            server: Server::for_worker(settings, policy, worker_id(number, config), seed),
            coalescer: (!config.coalesce.is_zero()).then(|| Coalescer::new(config.coalesce)),
            rx: Rx::new(config.datapath),
            out,
            sockets: Sockets::default(),
            layout,
            listeners: Vec::new(),
            lingering: Lingering::default(),
            roles: Vec::new(),
            peers: Peers::new(config.half_closed),
            handed_on: HandedOn::new(&common.streams.limits, config.workers, config.half_closed),
            ports: Arc::clone(ports),
            shared: SharedPorts::new(config),
            mailboxes: Arc::new([]),
            log: Arc::clone(&common.log),
            offload,
            suspended: None,
            tunnels: Tunnels::default(),
            handed_over: Vec::new(),
            replays: config.server.replays.clone(),
            counted: WorkerSnapshot::default(),
            asked: Vec::new(),
            complained: false,
        };
        if worker.offload.is_some() {
            worker.server.tell_first_use();
        }
        worker.listen(sockets)?;
        Ok(worker)
    }

    pub(crate) fn run(&mut self) {
        let mut events: Vec<Event> = Vec::new();
        let mut now = self.begin_tick();
        // Wake-ups are delayed for datagrams only, not for streams, handoffs or commands.
        let mut by_datagrams = true;
        if self.coalescer.is_some() || self.offload.is_some() {
            // Pauses and checks for drained sockets are due within tens of microseconds.
            let _ = rlimit::exact_timers();
        }
        loop {
            if let Some(coalescer) = self.coalescer.as_mut().filter(|_| by_datagrams) {
                coalescer.pause(self.rx.stats().datagrams);
            }
            let at_most = self.offload.as_mut().and_then(Offload::before_wait);
            let due = self.due();
            if let Err(error) = self.frame.wait(now.ms, due, at_most, &mut events) {
                tracing::error!(worker = self.frame.number, %error, "epoll failed; this worker stops");
                return;
            }
            now = self.begin_tick();
            by_datagrams = true;
            if let Some(coalescer) = &mut self.coalescer {
                coalescer.woke();
            }
            self.counted.wakeups += u64::from(at_most != Some(Duration::ZERO) || !events.is_empty());
            self.frame.dirty |= !events.is_empty();
            if let Some(offload) = &mut self.offload {
                let (are_all, lost) = (events.len() < Poller::FULL, self.rx.stats().kernel_drops);
                offload.after_wait(&events, are_all, lost, &self.sockets);
                let sockets = (&self.sockets, &self.out.listeners[..]);
                self.frame.dirty |= offload.sweep(now.ms, &mut self.server, sockets);
            }
            self.walk_offload();
            let first = self.out.streams.begin_tick(&events);
            events.rotate_left(first);
            for event in &events {
                if !self.rx.has_room() {
                    self.flush();
                }
                let role = usize::try_from(event.token).ok().and_then(|index| self.roles.get(index)).copied();
                match role {
                    Some(Role::Listener(place)) => self.receive_from_clients(now, place),
                    Some(Role::Relay(holder)) => self.receive_from_peers(now, holder, event),
                    Some(Role::Dtls(place)) => self.receive_by_dtls(now, place, None),
                    Some(Role::Both(plain, place)) => self.receive_by_dtls(now, place, Some(plain)),
                    _ => {
                        by_datagrams = false;
                        if self.serve_others(now, event) {
                            return;
                        }
                    }
                }
            }
            self.serve_accepted(now);
            self.handle_timeouts(now);
            // Effects come before the flush, because some of them send replies.
            self.carry_out_effects(now, NO_TRAILING);
            self.flush();
            self.tell_gone(now);
            // Flush again for the closing alerts to evicted DTLS clients.
            if self.out.tx.queued() > 0 {
                self.flush();
            }
            self.publish(now.ms);
        }
    }
    fn handle_timeouts(&mut self, now: Now) {
        if self.out.streams.poll_timeout().is_some_and(|due| due <= now.ms) {
            self.out.streams.handle_timeout(now.ms, &self.frame.poller);
            self.resume_streams(now);
            self.frame.dirty = true;
        }
        if self.out.dtls.poll_timeout().is_some_and(|due| due <= now.ms) {
            self.out.dtls.handle_timeout(now.ms, &mut self.out.tx);
            self.frame.dirty = true;
        }
        if self.peers.poll_timeout().is_some_and(|due| due <= now.ms) {
            self.resume_peers(now);
        }
        if self.handed_on.poll_timeout().is_some_and(|due| due <= now.ms) {
            self.handed_on.handle_timeout(now.ms);
            self.frame.dirty = true;
        }
        if self.server.poll_timeout().is_some_and(|due| due <= now.ms) {
            self.server.handle_timeout(now);
            while let Some((lookup, result)) = self.server.next_finished_lookup(now) {
                self.finish_lookup(now, lookup, result);
            }
            self.frame.dirty = true;
        }
        if self.lingering.due().is_some_and(|due| due <= now.ms) {
            self.close_forsaken(now);
        }
    }

    /// Handles events other than datagrams: commands, other workers, client and peer streams. Returns true if
    /// the worker must stop.
    fn serve_others(&mut self, now: Now, event: &Event) -> bool {
        match event.token {
            INBOX => return self.handle_commands(now),
            tunnel::TO_OLD => self.hear_of_old(),
            tunnel::TO_NEW => self.receive_from_new(now),
            handed_on::FIRST_TOKEN..=handed_on::LAST_TOKEN => self.handed_on.on_event(event, now.ms),
            FIRST_PEER_TOKEN.. => self.serve_peers(now, event),
            _ => self.serve_stream(now, event),
        }
        false
    }

    fn receive_from_clients(&mut self, now: Now, place: usize) {
        let Listener { socket, .. } = self.listeners[place];
        let mut share = SHARE;
        while self.rx.has_room() {
            let Some(listening) = self.sockets.get(socket) else { return };
            let Ok(received) = self.rx.recv(listening) else { return };
            if let Some(offload) = &mut self.offload {
                offload.received((socket, FlowSide::Clients), received, received.emptied, &self.rx);
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

    /// Routes the datagrams of one buffer, all from the same client.
    fn route_client_buffer(&mut self, now: Now, place: usize, index: usize) {
        let Listener { bound, number, .. } = self.listeners[place];
        let Some(buffer) = self.rx.buffer(index) else { return };
        let local = SocketAddr::new(buffer.local.unwrap_or(bound.ip()), bound.port());
        let client = Client { listener: number, address: buffer.from, local: canonical(local) };
        let (source, marks) = (Source::from(client), (buffer.tos, buffer.ttl));
        for datagram in datagrams(&self.rx, &buffer) {
            let verdict = self.server.from_client(now, &source, self.rx.bytes(datagram));
            if self.out.carry_out(&self.rx, marks, verdict) {
                self.carry_out_effects(now, NO_TRAILING);
            }
        }
    }

    fn flush(&mut self) {
        self.out.tx.flush(&mut self.sockets, &self.rx);
        self.out.streams.flush(&self.rx, &self.frame.poller);
        self.out.dtls.flushed();
        self.rx.reset();
        if let Some(offload) = &mut self.offload {
            offload.flushed(&mut self.server, (&self.sockets, &self.out.listeners));
        }
    }

    fn adopt(&mut self, socket: UdpSocket, role: Role) -> io::Result<SocketId> {
        let id = self.sockets.insert(socket);
        let index = id.0 as usize;
        if self.roles.len() <= index {
            self.roles.resize(index + 1, Role::Free);
        }
        let watched = match self.sockets.get(id) {
            Some(socket) => self.frame.poller.add(socket, u64::from(id.0)),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        };
        if let Err(error) = watched {
            self.sockets.remove(id);
            return Err(error);
        }
        self.roles[index] = role;
        Ok(id)
    }

    /// Carries out the effects of the state machine in order. `behind` is the data that follows the message
    /// that caused them.
    fn carry_out_effects(&mut self, now: Now, behind: TrailingBytes<'_>) {
        while let Some(mut effect) = self.server.poll_effect() {
            if let Some(offload) = &mut self.offload {
                offload.hear(&mut effect, &mut self.server, &self.out.listeners);
            }
            self.out.streams.effect(now.ms, &effect);
            self.out.dtls.effect(now.ms, &effect, &mut self.out.tx);
            self.log.effect(self.frame.number, &effect);
            match effect {
                Effect::Open(request) => self.open(now, &request),
                Effect::Connect(request) => self.connect(now, &request),
                Effect::Bind { connection, source } => self.bind(now, connection, &source.client, behind),
                Effect::LookUp(query) => self.look_up(query),
                Effect::Slow { client, until_ms } => {
                    let behind = behind.to_vec(&self.rx);
                    self.out.streams.slow_down(&client, &behind, until_ms, &self.frame.poller);
                }
                Effect::Closed { allocation, .. } => {
                    for family in [Family::V4, Family::V6] {
                        self.close(now, RelayId { allocation, family });
                    }
                    self.close_all_tcp(now, allocation);
                }
                Effect::RelayClosed { relay } => {
                    self.close(now, relay);
                    self.close_tcp(now, relay);
                }
                Effect::ConnectionClosed { connection, .. } => self.peers.drop_connection(connection),
                Effect::ConnectTimedOut { allocation, connection } => {
                    self.give_up(now, allocation, connection);
                }
                Effect::HandOver { worker, source, request } => {
                    self.hand_over(now, &source.client, worker, request, behind);
                }
                Effect::Forward { worker, via, occupied, source, request } => {
                    self.send(worker, Handoff::Request { via, occupied, source, request });
                }
                Effect::Decline { via, source, request } => {
                    self.send(via, Handoff::Declined { owner: self.own_number(), source, request });
                }
                Effect::MoveOver { worker, pending_move } => {
                    self.send(worker, Handoff::MoveOver { from: self.own_number(), pending_move });
                }
                Effect::Deleted { via, deletion } => _ = self.send(via, Handoff::Deleted(deletion)),
                Effect::Answer { via, source, pending_move, reply } => {
                    self.send(via, Handoff::Reply { source, pending_move, reply });
                }
                Effect::Fetch { request, datagram } => self.fetch(request, datagram),
                Effect::Move(request) => self.export(now, &request, Box::default()),
                _ => {}
            }
        }
    }

    /// TCP knows the round trip to its client better than passing transactions do.
    fn report_quality(&mut self, QualityQuery { slots, mut each, answer }: QualityQuery) {
        let end = self.server.slots();
        for slot in slots.start..slots.end.min(end) {
            let Some(mut report) = self.server.report_quality(slot) else { continue };
            if let ClientLinkKind::Stream(place) = ClientLinkKind::of(report.link) {
                let round_trip_us = self.out.streams.round_trip_us(place).map(u64::from);
                report.measured.client.round_trip_us = round_trip_us;
            }
            each(&report);
        }
        answer((slots.end < end).then_some(slots.end));
    }

    fn look_up(&mut self, query: CredentialQuery) {
        let answer = PendingLookup::new(query.lookup, self.frame.sender.clone());
        self.server.policy_mut().look_up(query, answer);
    }

    fn finish_lookup(&mut self, now: Now, lookup: LookupId, result: LookupResult) {
        let verdict = self.server.finish_lookup(now, lookup, result);
        self.out.reply(verdict);
        self.carry_out_effects(now, NO_TRAILING);
        self.frame.dirty = true;
    }

    /// Handles commands from the control thread and from other workers. Returns true if the worker must stop.
    fn handle_commands(&mut self, now: Now) -> bool {
        while let Some(command) = self.frame.command() {
            // End the tick here: packets must wait for at most one query, and after an upgrade step the clock
            // must be read again.
            let ends_tick =
                matches!(command, Command::Answer(_) | Command::ReportQuality(_) | Command::Upgrade(_));
            self.handle_command(now, command);
            if ends_tick {
                break;
            }
        }
        if self.frame.is_stopped {
            self.shut_down(self.now());
        }
        self.frame.is_stopped
    }

    fn handle_command(&mut self, now: Now, command: Command) {
        match command {
            Command::SetDraining(draining) => self.server.set_draining(draining),
            Command::Reconfigure(new) => self.reconfigure(now, *new),
            Command::Handoff(handoff) => self.take_handoff(now, *handoff),
            Command::FinishLookup(lookup, result) => self.finish_lookup(now, lookup, result),
            Command::EndAt(gone) => self.end_relays_at(now, &gone),
            Command::Answer(question) => {
                question(&mut self.server, now);
                self.carry_out_effects(now, NO_TRAILING);
            }
            Command::ReportQuality(query) => self.report_quality(query),
            Command::Publish(Probe { asked, answer }) => self.asked.push((asked.elapsed(), answer)),
            Command::ExportSockets(named, answer) => _ = answer.send(self.export_sockets(&named)),
            Command::SuspendFlows(done) => self.suspend_offload(done),
            Command::Upgrade(step) => self.upgrade(now, step),
            // This command is handled only while the worker is paused.
            Command::Settle(_) => {}
        }
    }

    fn shut_down(&mut self, now: Now) {
        self.flush();
        self.server.close_all(now, ClosedReason::Shutdown);
        self.carry_out_effects(now, NO_TRAILING);
        self.out.streams.shutdown(&self.frame.poller);
        self.out.dtls.shutdown(&mut self.out.tx);
        self.handed_on.shutdown();
        self.flush();
        self.publish_now(now.ms);
    }

    /// Reads the clock for a tick.
    fn begin_tick(&mut self) -> Now {
        let us = self.frame.now_us();
        self.server.set_microseconds(us % 1000);
        Now { ms: us / 1000, unix: unix() }
    }

    fn now(&self) -> Now {
        Now { ms: self.frame.now_ms(), unix: unix() }
    }

    fn due(&self) -> Option<u64> {
        let timer = self.server.poll_timeout();
        let (streams, dtls) = (self.out.streams.poll_timeout(), self.out.dtls.poll_timeout());
        let offload = self.offload.as_ref().and_then(Offload::due);
        let (peers, lingering) = (self.peers.poll_timeout(), self.lingering.due());
        let handed_on = self.handed_on.poll_timeout();
        [timer, streams, dtls, peers, handed_on, offload, lingering].into_iter().flatten().min()
    }

    fn publish(&mut self, now_ms: u64) {
        if !self.asked.is_empty() || self.frame.is_publication_due(now_ms) {
            self.publish_now(now_ms);
            self.asked.drain(..).for_each(|(waited, answer)| answer(waited));
        }
    }

    fn publish_now(&mut self, now_ms: u64) {
        self.ports.expire(now_ms);
        for turned in self.out.streams.turned_away().chain(self.out.dtls.turned_away()) {
            self.log.turned_away(self.frame.number, &turned);
        }
        for (connection, to_peer, to_client) in self.peers.carried() {
            self.server.connection_carried(connection, to_peer, to_client);
        }
        let counted = &mut self.counted;
        counted.peers = self.peers.stats();
        counted.handed_on = self.handed_on.stats();
        counted.allocations = self.server.allocations() as u64;
        counted.listeners.clear();
        counted.listeners.extend_from_slice(self.server.allocations_by_listener());
        counted.turn.clone_from(self.server.stats());
        counted.rx = *self.rx.stats();
        counted.tx = *self.out.tx.stats();
        counted.pauses = self.coalescer.as_ref().map_or(0, Coalescer::pauses);
        counted.ttl_expired = self.out.ttl_expired;
        counted.across = self.offload.as_ref().map(|offload| offload.across().pairs()).unwrap_or_default();
        counted.kernel_limited = self.offload.as_ref().map_or(0, Offload::limited);
        counted.streams = self.out.streams.stats();
        counted.dtls = self.out.dtls.stats();
        self.frame.publish(now_ms, |snapshot| snapshot.clone_from(counted));
    }
}

/// `config` ensures that the number of workers does not exceed the range of worker ids.
fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn worker_id(number: usize, config: &Config) -> WorkerId {
    let of = |count: usize| u16::try_from(count).ok();
    of(number)
        .zip(of(config.workers.max(1)))
        .and_then(|(number, count)| WorkerId::new(number, count))
        .unwrap_or(WorkerId::ONLY)
}
