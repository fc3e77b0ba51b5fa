//! Stream listeners: bound by the thread that starts the relay, then used by their worker.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use turnpike_net::{ListenOptions, Poller, TcpListener, TcpSocket, is_exhaustion};
use turnpike_turn::server::{Client, PrefixLengths, Transport};
use turnpike_wire::{address::canonical, frame::Framer};

use super::{
    CloseReason, Connection, ConnectionStage, SWEEP_MS, StreamConfig, StreamToken, Streams, channel::Channel,
    connection::NONE, outbox::Outbox,
};

/// Seconds for which the kernel holds back a connection without data (TCP_DEFER_ACCEPT). TURN clients send
/// immediately, so the accept and the first message share one wake-up.
const SILENT_SECONDS: u32 = 1;
/// Milliseconds for which a listener pauses after descriptors or memory have run out.
pub(super) const PAUSE_MS: u64 = 1000;
/// Milliseconds between attempts to admit new connections while all existing ones are protected.
const RETRY_MS: u64 = 20;
/// Maximum unsent bytes per connection in the kernel, where relayed datagrams can no longer be dropped.
const UNSENT_LIMIT: u32 = 128 << 10;

pub(super) struct Listener {
    /// Socket; `None` if closed or passed to another process. The listener's connections continue.
    pub(super) socket: Option<TcpListener>,
    pub(super) tls_only: bool,
    /// True if the socket is not polled, for lack of descriptors or slots.
    pub(super) paused: bool,
}

pub(crate) fn listen_options() -> ListenOptions {
    ListenOptions {
        reuse_port: true,
        nodelay: true,
        keepalive: true,
        unsent_limit: Some(UNSENT_LIMIT),
        defer_accept: Some(SILENT_SECONDS),
        ..ListenOptions::default()
    }
}

impl Streams {
    pub(crate) fn listen(&mut self, place: usize, socket: TcpListener, poller: &Poller) -> io::Result<()> {
        poller.add(&socket, StreamToken::Listener(place).get())?;
        if self.listeners.len() <= place {
            let closed = || Listener { socket: None, tls_only: false, paused: false };
            self.listeners.resize_with(place + 1, closed);
        }
        self.listeners[place] = Listener { socket: Some(socket), tls_only: false, paused: false };
        self.set_tls_only();
        Ok(())
    }

    pub(crate) fn close_listener(&mut self, place: usize, now_ms: u64, poller: &Poller) {
        self.accept(place, now_ms, poller);
        let Some(listener) = self.listeners.get_mut(place) else { return };
        // If another process shares the socket, closing it does not remove it from the poller. Paused
        // listeners are not polled.
        if let Some(socket) = listener.socket.take() {
            let _ = poller.remove(&socket);
        }
        listener.paused = false;
    }

    pub(super) fn set_tls_only(&mut self) {
        for placed in self.layout.placed(Transport::Tcp) {
            if let Some(listener) = self.listeners.get_mut(placed.place) {
                listener.tls_only = placed.secure && self.config.tls_only;
            }
        }
    }

    pub(crate) fn accept(&mut self, place: usize, now_ms: u64, poller: &Poller) {
        for _ in 0..StreamConfig::ACCEPTS {
            let Some(Listener { socket: Some(listening), .. }) = self.listeners.get(place) else { return };
            if self.idle.is_crowded_by_all(now_ms) {
                // New connections wait in the backlog.
                return self.pause_listener(place, now_ms + RETRY_MS, poller);
            }
            match listening.accept() {
                Ok(Some((socket, peer))) => {
                    let bound = listening.local_addr();
                    self.take((place, bound), socket, canonical(peer), now_ms, poller);
                }
                Ok(None) => return,
                Err(error) => {
                    if is_exhaustion(&error) {
                        self.stats.accept_pauses += 1;
                        self.pause_listener(place, now_ms + PAUSE_MS, poller);
                    }
                    return;
                }
            }
        }
    }

    /// Stops polling a listener for a while; otherwise, the poller would keep reporting it immediately.
    fn pause_listener(&mut self, place: usize, until_ms: u64, poller: &Poller) {
        let Some(Listener { socket: Some(listening), paused, .. }) = self.listeners.get_mut(place) else {
            return;
        };
        if poller.remove(listening).is_ok() {
            *paused = true;
            self.resume_by(until_ms);
        }
    }

    fn resume_by(&mut self, until_ms: u64) {
        self.resume_ms = Some(self.resume_ms.map_or(until_ms, |resume_ms| resume_ms.min(until_ms)));
    }

    fn take(
        &mut self,
        (place, bound): (usize, SocketAddr),
        socket: TcpSocket,
        peer: SocketAddr,
        now_ms: u64,
        poller: &Poller,
    ) {
        self.stats.accepted += 1;
        let id = self.layout.number(Transport::Tcp, place, None);
        let local = if bound.ip().is_unspecified() { socket.local_addr().unwrap_or(bound) } else { bound };
        let proxied = self.config.proxies.iter().any(|proxy| proxy.contains(peer.ip()));
        if !(proxied || self.config.clients.admits(peer.ip())) {
            return self.turn_away(peer, CloseReason::ClientRefused);
        }
        // Behind a proxy, the address is not known until the header has been read.
        let network = (!proxied).then(|| PrefixLengths::HOST.of(peer.ip()));
        let crowded =
            network.filter(|network| self.waiting.has(*network) || self.idle.is_crowded_by(*network, now_ms));
        if crowded.is_some_and(|network| self.waiting.in_the_way_of(network).is_some()) {
            return self.turn_away(peer, CloseReason::LimitAddress);
        }
        if crowded.is_none() {
            self.make_room(network);
        }
        let entry = self.connections.vacant_entry();
        let slot = entry.key();
        entry.insert(Connection {
            socket,
            channel: Channel::Plain,
            generation: self.generations.draw(),
            stage: if proxied { ConnectionStage::Proxied } else { ConnectionStage::Unknown },
            client: Client { listener: id, address: peer, local: canonical(local) },
            proxied: false,
            superseded: false,
            framer: Framer::new(),
            outbox: Outbox::new(self.config.limits.stream_queue),
            first: NONE,
            last: NONE,
            touched: false,
            watches_readable: true,
            watches_writable: false,
            paused: false,
            deadline_ms: now_ms + self.config.limits.first_message_ms(),
            barren: 0,
            ended: false,
            spoke: false,
            allocated: false,
            trusted: false,
            place: Some(match crowded {
                Some(network) => self.waiting.enter(slot, Some(network), now_ms),
                None => self.idle.enter(slot, network, now_ms),
            }),
            waiting: crowded.is_some(),
            failure: None,
            closing: None,
            listener: place,
        });
        // Waiting connections are the first to be closed at the total limit.
        if self.idle.len() + self.waiting.len() > self.idle.most()
            && let Some(newest) = self.waiting.newest()
        {
            self.remove(newest, CloseReason::LimitAddress);
        }
        if crowded.is_some() {
            return self.resume_by(now_ms + RETRY_MS);
        }
        self.next_sweep_ms.get_or_insert(now_ms + SWEEP_MS);
        if poller.add(&self.connections[slot].socket, StreamToken::Connection(slot).get()).is_err() {
            return self.remove(slot, CloseReason::Broken);
        }
        self.accepted.push_back(slot);
    }

    fn turn_away(&mut self, peer: SocketAddr, reason: CloseReason) {
        self.stats.closed[reason as usize] += 1;
        self.noted.note(peer, Transport::Tcp, None, ("connection", reason.into()));
    }

    pub(super) fn admit(&mut self, now_ms: u64, poller: &Poller) {
        let waiting: Vec<usize> = self.waiting.slots().collect();
        for slot in waiting {
            let network = PrefixLengths::HOST.of(self.connections[slot].address().ip());
            if self.idle.is_crowded(network, now_ms) {
                continue;
            }
            self.uncount(slot);
            self.make_room(Some(network));
            let connection = &mut self.connections[slot];
            connection.waiting = false;
            connection.deadline_ms = now_ms + self.config.limits.first_message_ms();
            connection.place = Some(self.idle.enter(slot, Some(network), now_ms));
            self.next_sweep_ms.get_or_insert(now_ms + SWEEP_MS);
            if poller.add(&self.connections[slot].socket, StreamToken::Connection(slot).get()).is_err() {
                self.remove(slot, CloseReason::Broken);
            }
        }
        if !self.waiting.is_empty() {
            self.resume_by(now_ms + RETRY_MS);
        }
    }

    pub(crate) fn listening(&self, place: usize) -> Option<&TcpListener> {
        self.listeners.get(place)?.socket.as_ref()
    }

    /// Stops accepting, because another process has the sockets. Connections continue.
    pub(crate) fn leave_listeners(&mut self, poller: &Poller) {
        for listener in &mut self.listeners {
            // The new process keeps the socket open, so closing it here does not remove it from the poller.
            // Paused listeners are not polled.
            if let Some(socket) = listener.socket.take() {
                let _ = poller.remove(&socket);
            }
            listener.paused = false;
        }
    }

    pub(crate) fn next_accepted(&mut self) -> Option<usize> {
        self.accepted.pop_front()
    }

    /// Evicts the oldest connection without an allocation: from the same address if that is at its limit,
    /// otherwise from any address.
    fn make_room(&mut self, network: Option<IpAddr>) {
        if let Some(slot) = network.and_then(|network| self.idle.in_the_way_of(network)) {
            self.evict(slot, CloseReason::LimitAddress);
        } else if let Some(slot) = self.idle.in_the_way_of_all() {
            self.evict(slot, CloseReason::Evicted);
        }
    }

    /// Counts a connection towards the limit of the address in its PROXY header, unless that address has too
    /// many recent ones.
    pub(super) fn count_for(&mut self, slot: usize, address: IpAddr, now_ms: u64) -> Result<(), CloseReason> {
        let network = PrefixLengths::HOST.of(address);
        if self.idle.is_crowded_by(network, now_ms) {
            return Err(CloseReason::LimitAddress);
        }
        if let Some(oldest) = self.idle.in_the_way_of(network) {
            self.evict(oldest, CloseReason::LimitAddress);
        }
        if let Some(number) = self.connections[slot].place {
            self.idle.set_network(number, network);
        }
        Ok(())
    }

    fn evict(&mut self, slot: usize, reason: CloseReason) {
        self.uncount(slot);
        self.close(slot, reason);
    }
}
