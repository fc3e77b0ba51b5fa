//! Clients of one thread with their sockets or connections: sends, receives and retransmits. The modes (`packet`, `allocate`, `bind`)
//! decide what to send.

use std::{io, mem, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_client::{ClientTransport, Datagrams, ErrorCounts, Framing, Security, ServerLinks, links};
use turnpike_net::{Event as Ready, Poller};
use turnpike_turn::{
    client::{
        self, BindProgress, Client, ConnectionId, DataConnection, Event, Failure, Incoming, Relayed, Request,
    },
    random::Seed,
};
use turnpike_wire::{channel_data::ChannelData, frame, indication};

use super::{
    DataVia, Mode, TurnLoadConfig, moves::ClientMoves, reconnects::Reconnects,
    redirect_history::RedirectHistory,
};
use crate::{
    LoadError,
    clock::Clock,
    run::RunTimes,
    traffic::{Carrier, PEER, Sink},
};

const SWEEP_NS: u64 = 20_000_000;

pub(super) struct TurnEndpoint {
    pub(super) client: Client,
    pub(super) settings: Arc<client::Config>,
    pub(super) history: RedirectHistory,
    timeout: u64,
    binding: Option<DataConnection>,
    pub(super) peer: SocketAddr,
    header: DataHeader,
}

/// ChannelData or Send header for payloads of one length, kept so that it need not be encoded for each payload.
struct DataHeader {
    bytes: [u8; indication::MAX_HEADER_LEN],
    len: usize,
    payload: usize,
}

impl TurnEndpoint {
    #[inline]
    fn prepare(&mut self, payload: usize) {
        if self.header.payload != payload {
            #[expect(clippy::cast_possible_truncation, reason = "validated: at most 65,000 bytes")]
            let payload_len = payload as u16;
            self.header.len = self.client.send_header(self.peer, payload_len, &mut self.header.bytes);
            self.header.payload = payload;
        }
    }

    pub(super) fn forget_header(&mut self) {
        self.header.payload = 0;
    }

    #[inline]
    fn channel_data<'a>(&self, message: &'a [u8]) -> Option<&'a [u8]> {
        let [a, b, c, d, rest @ ..] = message else { return None };
        let ours = self.header.len == ChannelData::HEADER_LEN && self.header.bytes[..2] == [*a, *b];
        if ours { rest.get(..usize::from(u16::from_be_bytes([*c, *d]))) } else { None }
    }
}

pub(super) struct TurnEngine {
    pub(super) endpoints: Vec<TurnEndpoint>,
    pub(super) events: Vec<(usize, Event)>,
    pub(super) bound: Vec<(usize, Result<(), Failure>)>,
    pub(super) errors: ErrorCounts,
    /// Endpoint for which an ICMP port unreachable arrived from its server's address.
    pub(super) unreachable: Option<usize>,
    pub(super) redirects: u64,
    pub(super) moves: ClientMoves,
    pub(super) reconnects: Reconnects,
    /// True if clients bind a channel to their peer, instead of only creating a permission.
    pub(super) binds: bool,
    clock: Clock,
    poller: Poller,
    ready: Vec<Ready>,
    answered: Vec<usize>,
    next_sweep_ns: u64,
    wire: EngineSockets,
    /// True if ChannelData is padded, as on streams (RFC 8656 section 12.5). Send indications are always
    /// padded.
    pads: bool,
    piece: usize,
    relays_streams: bool,
}

enum EngineSockets {
    Datagrams(Box<Datagrams>),
    Links(Box<ServerLinks>),
}

impl TurnEngine {
    /// Opens datagram sockets immediately; connections are opened on first use.
    pub(super) fn new(
        config: &TurnLoadConfig,
        security: Option<&Security>,
        (count, first): (usize, usize),
        clock: Clock,
    ) -> Result<Self, LoadError> {
        let poller = Poller::new().map_err(LoadError::system("cannot create an epoll instance"))?;
        let relays_streams = config.relayed == Relayed::Tcp;
        let wire = if config.transport() == ClientTransport::Udp {
            let mut datagrams = Datagrams::new(config.datapath, config.clients);
            for number in first..first + count {
                let server = config.server_of(number);
                match config.address_of_client(number) {
                    Some(address) => datagrams
                        .share(address, server, &poller)
                        .map_err(|source| LoadError::ClientAddress { address, source })?,
                    None => datagrams
                        .add(server, &poller)
                        .map_err(|source| LoadError::Socket { server, source })?,
                }
            }
            EngineSockets::Datagrams(Box::new(datagrams))
        } else {
            let settings = links::LinkSettings {
                server: config.server_of(0),
                transport: config.transport(),
                security,
                patience: config.setup_timeout,
                abortive: matches!(config.mode, Mode::Allocate | Mode::Bind),
            };
            let links = if relays_streams { 2 * count } else { count };
            EngineSockets::Links(Box::new(ServerLinks::new(&settings, links)?))
        };
        let settings = client_settings(config);
        let endpoint = |number| {
            let settings = as_user(&settings, config.users, first + number);
            TurnEndpoint {
                client: Client::new(Arc::clone(&settings), Seed(rand::random())),
                settings,
                history: RedirectHistory::new(config.server_of(first + number)),
                timeout: u64::MAX,
                binding: None,
                peer: config.peer_of_client(first + number),
                header: DataHeader { bytes: [0; indication::MAX_HEADER_LEN], len: 0, payload: 0 },
            }
        };
        Ok(Self {
            endpoints: (0..count).map(endpoint).collect(),
            events: Vec::new(),
            bound: Vec::new(),
            errors: ErrorCounts::new(),
            unreachable: None,
            redirects: 0,
            moves: ClientMoves::new(config, count, first),
            reconnects: Reconnects::new(config, count, first),
            binds: config.via == DataVia::Channel && !relays_streams,
            clock,
            poller,
            ready: Vec::new(),
            answered: Vec::new(),
            next_sweep_ns: 0,
            wire,
            pads: config.transport().is_stream() || config.via == DataVia::Send,
            piece: config.size,
            relays_streams,
        })
    }

    /// Replaces a client's socket with a new one on `port` (0 means any port). No messages may be queued for the old socket.
    pub(super) fn reopen(&mut self, index: usize, port: u16) -> io::Result<()> {
        match &mut self.wire {
            EngineSockets::Datagrams(datagrams) => {
                datagrams.reopen(index, self.endpoints[index].history.server, &self.poller, port)
            }
            EngineSockets::Links(links) => {
                links.close(index);
                Ok(())
            }
        }
    }

    pub(super) fn set_peer(&mut self, peer: SocketAddr) {
        self.endpoints.iter_mut().for_each(|endpoint| endpoint.peer = peer);
    }

    /// Closes the peer connections (RFC 6062) before their allocations are deleted, because the server would otherwise close them and this
    /// would count as data loss.
    pub(super) fn close_peer_connections(&mut self) {
        if let EngineSockets::Links(links) = &mut self.wire {
            links.close_from(self.endpoints.len());
        }
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.clock.ns() / 1_000_000
    }

    pub(super) fn redirect(
        &mut self,
        index: usize,
        server: SocketAddr,
        name: Option<&str>,
    ) -> Result<(), links::InvalidDomain> {
        let EngineSockets::Links(links) = &mut self.wire else { return Ok(()) };
        links.redirect(index, server, name)?;
        if self.relays_streams {
            links.redirect(self.endpoints.len() + index, server, name)?;
        }
        Ok(())
    }

    pub(super) fn restore_server(&mut self, index: usize) {
        let EngineSockets::Links(links) = &mut self.wire else { return };
        links.restore_server(index);
        links.restore_server(self.endpoints.len() + index);
    }

    pub(super) fn is_broken(&self, index: usize) -> bool {
        match &self.wire {
            EngineSockets::Datagrams(_) => false,
            EngineSockets::Links(links) => links.is_broken(index),
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.clock.ns()
    }

    #[inline]
    fn push_with(&mut self, index: usize, len: usize, fill: impl FnMut(&mut [u8])) {
        match &mut self.wire {
            EngineSockets::Datagrams(datagrams) => datagrams.push_with(index, len, fill),
            EngineSockets::Links(links) => links.push_with(index, len, fill),
        }
    }

    fn push_to_peer(&mut self, index: usize, len: usize, fill: impl FnMut(&mut [u8])) {
        self.push_with(self.endpoints.len() + index, len, fill);
    }

    pub(super) fn allocate_again(&mut self, index: usize, settings: Arc<client::Config>) {
        let now = self.now_ms();
        let endpoint = &mut self.endpoints[index];
        endpoint.client = Client::new(Arc::clone(&settings), Seed(rand::random()));
        endpoint.settings = settings;
        endpoint.forget_header();
        let _ = endpoint.client.allocate(now);
        self.pump(index);
    }

    pub(super) fn bind_connection(&mut self, index: usize, connection: ConnectionId) {
        let endpoint = &mut self.endpoints[index];
        endpoint.binding = Some(endpoint.client.data_connection(connection));
        self.pump_binding(index);
    }

    pub(super) fn pump(&mut self, index: usize) {
        let endpoint = &mut self.endpoints[index];
        while let Some(bytes) = endpoint.client.poll_transmit() {
            match &mut self.wire {
                EngineSockets::Datagrams(datagrams) => {
                    datagrams.push_with(index, bytes.len(), |out| out.copy_from_slice(bytes));
                }
                EngineSockets::Links(links) => {
                    links.push_with(index, bytes.len(), |out| out.copy_from_slice(bytes));
                }
            }
        }
        while let Some(event) = endpoint.client.poll_event() {
            self.events.push((index, event));
        }
        endpoint.timeout = endpoint.client.poll_timeout().unwrap_or(u64::MAX);
    }

    fn pump_binding(&mut self, index: usize) {
        let bytes = self.endpoints[index].binding.as_mut().and_then(DataConnection::poll_transmit);
        if let Some(bytes) = bytes {
            self.push_to_peer(index, bytes.len(), |out| out.copy_from_slice(&bytes));
        }
    }

    pub(super) fn setup_failure(&self, config: &TurnLoadConfig) -> Option<LoadError> {
        let transport = config.transport();
        match &self.wire {
            EngineSockets::Datagrams(_) => self.unreachable.map(|index| {
                let server = self.endpoints[index].history.server;
                self.blame(index, LoadError::Unreachable { server })
            }),
            EngineSockets::Links(links) => links.broken.as_ref().map(|broken| {
                let (what, during_setup) = (broken.what.clone(), broken.during_setup);
                let index = broken.link % self.endpoints.len();
                let server = self.endpoints[index].history.server;
                self.blame(index, LoadError::Link { transport, server, what, during_setup })
            }),
        }
    }

    pub(super) fn handshakes(&self) -> (u64, u64) {
        match &self.wire {
            EngineSockets::Datagrams(_) => (0, 0),
            EngineSockets::Links(links) => (links.full_handshakes, links.resumed_handshakes),
        }
    }

    pub(super) fn sweep(&mut self) {
        let now_ns = self.clock.ns();
        if now_ns < self.next_sweep_ns {
            return;
        }
        self.next_sweep_ns = now_ns + SWEEP_NS;
        let now = now_ns / 1_000_000;
        self.reconnect_silent_clients(now_ns);
        if let EngineSockets::Links(links) = &mut self.wire {
            links.sweep(&mut self.errors);
        }
        for index in 0..self.endpoints.len() {
            if self.endpoints[index].timeout <= now {
                self.endpoints[index].client.handle_timeout(now);
                self.pump(index);
            }
        }
    }

    /// Returns the number of messages received.
    pub(super) fn drive(&mut self, timeout: Duration, sink: &mut impl Sink) -> Result<usize, LoadError> {
        self.ready.clear();
        let events = self.poller.wait(Some(timeout)).map_err(LoadError::system("epoll_wait"))?;
        self.ready.extend_from_slice(events);
        let mut messages = 0;
        for position in 0..self.ready.len() {
            let ready = self.ready[position];
            if ready.token == PEER {
                sink.peer_is_ready();
                continue;
            }
            if ready.token == Datagrams::SHARED {
                messages += self.drain_shared(sink);
                continue;
            }
            let Ok(index) = usize::try_from(ready.token) else { continue };
            messages += match &mut self.wire {
                EngineSockets::Datagrams(_) => self.drain_socket(index, sink),
                EngineSockets::Links(_) if index < self.endpoints.len() => {
                    self.drain_link(ready, index, sink)
                }
                EngineSockets::Links(_) => self.drain_peer_link(ready, index - self.endpoints.len(), sink),
            };
        }
        Ok(messages)
    }

    fn drain_socket(&mut self, index: usize, sink: &mut impl Sink) -> usize {
        let Self { wire: EngineSockets::Datagrams(datagrams), endpoints, errors, clock, .. } = self else {
            return 0;
        };
        let Some(endpoint) = endpoints.get_mut(index) else { return 0 };
        let (mut messages, mut unexpected, mut control, mut data, mut now_ns) = (0, 0, false, false, 0);
        let unreachable = datagrams.receive(index, errors, |datagram| match datagram {
            // The clock is read once per batch, because all its datagrams had arrived when the receive call returned.
            None => now_ns = clock.ns(),
            Some((datagram, _)) => {
                messages += 1;
                match deliver(endpoint, index, now_ns, datagram, sink) {
                    Delivered::Data => data = true,
                    Delivered::Control => control = true,
                    Delivered::Unexpected => unexpected += 1,
                }
            }
        });
        self.unreachable = self.unreachable.or(unreachable.then_some(index));
        if data {
            self.reconnects.heard(index, now_ns);
        }
        self.delivered(index, control, unexpected);
        messages
    }

    fn drain_shared(&mut self, sink: &mut impl Sink) -> usize {
        let Self { wire: EngineSockets::Datagrams(datagrams), endpoints, errors, clock, answered, .. } = self
        else {
            return 0;
        };
        let (mut messages, mut unexpected, mut now_ns) = (0, 0, 0);
        datagrams.receive_shared(errors, |datagram| match datagram {
            None => now_ns = clock.ns(),
            Some((datagram, index)) => {
                messages += 1;
                let delivered = match index.and_then(|index| Some((index, endpoints.get_mut(index)?))) {
                    Some((index, endpoint)) => (index, deliver(endpoint, index, now_ns, datagram, sink)),
                    None => (0, Delivered::Unexpected),
                };
                match delivered {
                    (_, Delivered::Data) => {}
                    (index, Delivered::Control) => answered.push(index),
                    (_, Delivered::Unexpected) => unexpected += 1,
                }
            }
        });
        self.delivered(0, false, unexpected);
        while let Some(index) = self.answered.pop() {
            self.delivered(index, true, 0);
        }
        messages
    }

    fn drain_link(&mut self, ready: Ready, index: usize, sink: &mut impl Sink) -> usize {
        let Self { wire: EngineSockets::Links(links), endpoints, errors, clock, poller, .. } = self else {
            return 0;
        };
        let Some(endpoint) = endpoints.get_mut(index) else { return 0 };
        let (mut messages, mut unexpected, mut control, mut data) = (0, 0, false, false);
        let now_ns = clock.ns();
        links.serve(ready, poller, errors, &mut |message| {
            messages += 1;
            match deliver(endpoint, index, now_ns, message, sink) {
                Delivered::Data => data = true,
                Delivered::Control => control = true,
                Delivered::Unexpected => unexpected += 1,
            }
            None
        });
        if data {
            self.reconnects.heard(index, now_ns);
        }
        self.delivered(index, control, unexpected);
        messages
    }

    fn drain_peer_link(&mut self, ready: Ready, index: usize, sink: &mut impl Sink) -> usize {
        let Self {
            wire: EngineSockets::Links(links), endpoints, errors, clock, poller, bound, piece, ..
        } = self
        else {
            return 0;
        };
        let Some(endpoint) = endpoints.get_mut(index) else { return 0 };
        let mut messages = 0;
        let now_ns = clock.ns();
        let piece = *piece;
        links.serve(ready, poller, errors, &mut |message| {
            messages += 1;
            let Some(binding) = &mut endpoint.binding else {
                sink.payload(index, now_ns, message);
                return None;
            };
            match binding.handle_message(message) {
                Ok(BindProgress::Pending) => None,
                Ok(BindProgress::Bound) => {
                    endpoint.binding = None;
                    bound.push((index, Ok(())));
                    Some(Framing::Fixed(piece))
                }
                Err(failure) => {
                    bound.push((index, Err(failure)));
                    None
                }
            }
        });
        self.pump_binding(index);
        messages
    }

    fn delivered(&mut self, index: usize, control: bool, unexpected: u64) {
        if unexpected > 0 {
            *self.errors.entry("unexpected_datagram").or_default() += unexpected;
        }
        if control {
            self.reconnects.answered(index, self.clock.ns());
            self.pump(index);
        }
    }
}

impl Carrier for TurnEngine {
    #[inline]
    fn push(&mut self, client: usize, count: usize, len: usize, mut fill: impl FnMut(&mut [u8])) {
        if self.relays_streams {
            return (0..count).for_each(|_| self.push_to_peer(client, len, &mut fill));
        }
        let Self { endpoints, wire, pads, reconnects, errors, .. } = self;
        if reconnects.is_away(client) {
            *errors.entry("no_allocation").or_default() += count as u64;
            return;
        }
        let endpoint = &mut endpoints[client];
        endpoint.prepare(len);
        let DataHeader { bytes, len: start, .. } = &endpoint.header;
        let end = start + len;
        let padding = if *pads { usize::from(frame::padding(len)) } else { 0 };
        let mut fill = |out: &mut [u8]| {
            out[..*start].copy_from_slice(&bytes[..*start]);
            fill(&mut out[*start..end]);
            out[end..].fill(0);
        };
        match wire {
            EngineSockets::Datagrams(datagrams) => {
                datagrams.push_run(client, None, (count, end + padding), fill);
            }
            EngineSockets::Links(links) => {
                (0..count).for_each(|_| links.push_with(client, end + padding, &mut fill));
            }
        }
    }

    #[inline]
    fn queued(&self) -> usize {
        match &self.wire {
            EngineSockets::Datagrams(datagrams) => datagrams.queued(),
            EngineSockets::Links(links) => links.queued(),
        }
    }

    fn flush(&mut self) -> u64 {
        match &mut self.wire {
            EngineSockets::Datagrams(datagrams) => datagrams.flush(&mut self.errors),
            EngineSockets::Links(links) => links.flush(&self.poller, &mut self.errors),
        }
    }

    /// Always true for UDP, because a socket does not report in advance that its buffer is full.
    fn can_send(&self, client: usize) -> bool {
        let has_room = match &self.wire {
            EngineSockets::Datagrams(_) => true,
            EngineSockets::Links(links) if self.relays_streams => {
                links.has_room(self.endpoints.len() + client)
            }
            EngineSockets::Links(links) => links.has_room(client),
        };
        has_room && !self.moves.is_moving(client)
    }

    fn receive(&mut self, timeout: Duration, sink: &mut impl Sink) -> Result<usize, LoadError> {
        self.sweep();
        self.flush();
        let received = self.drive(timeout, sink)?;
        for (index, event) in mem::take(&mut self.events) {
            if self.returning(index, &event) {
                sink.forget(index);
                continue;
            }
            let error = match event {
                Event::Migrated { .. } => {
                    self.moves.done(index, self.clock.ns());
                    sink.forget(index);
                    continue;
                }
                Event::Failed { request: Request::Migrate, failure } => {
                    self.moves.refused(index, &failure);
                    continue;
                }
                Event::Failed { request: Request::Refresh, .. } => "refresh_failed",
                Event::Failed { .. } => "permission_refresh_failed",
                Event::Icmp { .. } => "icmp",
                _ => continue,
            };
            *self.errors.entry(error).or_default() += 1;
        }
        Ok(received)
    }

    fn seen_as(&self, client: usize) -> Option<SocketAddr> {
        Some(self.endpoints[client].client.allocation()?.relayed)
    }

    fn poller(&self) -> &Poller {
        &self.poller
    }

    fn errors(&mut self) -> &mut ErrorCounts {
        &mut self.errors
    }

    fn plan(&mut self, schedule: RunTimes) {
        self.moves.plan(schedule);
        self.reconnects.plan(schedule);
    }

    #[inline]
    fn is_due(&self, now_ns: u64) -> bool {
        self.moves.is_due(now_ns)
    }

    fn tend(&mut self) {
        self.start_moves();
    }

    #[inline]
    fn hold(&mut self, client: usize, due_ns: u64) -> bool {
        self.moves.hold(client, due_ns)
    }

    #[inline]
    fn is_releasing(&self) -> bool {
        self.moves.is_releasing()
    }

    fn release(&mut self) -> Option<(usize, u64)> {
        self.moves.release()
    }

    fn is_waiting(&self) -> bool {
        self.moves.any_under_way()
    }

    fn give_up(&mut self) {
        self.moves.end();
    }

    fn lost(&mut self, client: usize, count: u64) {
        self.reconnects.lost(client, count);
    }
}

enum Delivered {
    Data,
    Control,
    Unexpected,
}

#[inline]
fn deliver(
    endpoint: &mut TurnEndpoint,
    index: usize,
    now_ns: u64,
    message: &[u8],
    sink: &mut impl Sink,
) -> Delivered {
    if let Some(payload) = endpoint.channel_data(message) {
        sink.payload(index, now_ns, payload);
        return Delivered::Data;
    }
    match endpoint.client.handle_datagram(now_ns / 1_000_000, message) {
        Incoming::Data { payload, .. } => {
            sink.payload(index, now_ns, payload);
            Delivered::Data
        }
        Incoming::Control => Delivered::Control,
        Incoming::Ignored(_) => Delivered::Unexpected,
    }
}

/// Settings with the name of user `number`: if there are several users, the number is appended to the name.
pub(super) fn as_user(settings: &Arc<client::Config>, users: usize, number: usize) -> Arc<client::Config> {
    if users == 1 {
        return Arc::clone(settings);
    }
    let mut settings = client::Config::clone(settings);
    settings.username.push_str(&(number % users).to_string());
    Arc::new(settings)
}

pub(super) fn client_settings(config: &TurnLoadConfig) -> Arc<client::Config> {
    let (user, password) = config.user.as_ref().map_or(("", ""), |user| (&*user.name, &*user.password));
    let mut settings = client::Config::new(user, password);
    if let Some(token) = &config.access_token {
        settings.username.clone_from(&token.kid);
        settings.access_token = Some(token.secret.clone());
    }
    settings.mobility = config.migrate.is_some();
    settings.family = config.address_family();
    settings.relayed = config.relayed;
    if config.transport().is_stream() {
        settings.timing = client::Timing::RELIABLE;
    }
    Arc::new(settings)
}
