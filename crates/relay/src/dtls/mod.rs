//! Clients over DTLS 1.2 and 1.3, whose associations sit in front of the worker's state machine.
//!
//! ```text
//! Rx::recv ─▶ Associations::receive         first byte, ClientHello, cookie; then dimpl
//!              └─ plaintext ─▶ arena ─▶ Server::from_client     one message each, in place
//! Verdict::ToClient, Reply ─▶ Associations::relay, reply ─▶ dimpl ─▶ Tx::push_bytes
//! ```
//!
//! A ClientHello without a valid cookie ([`cookie`]) gets a reply, and no state is kept; with a valid cookie,
//! it starts a handshake. Handshakes, fragmented ClientHellos ([`fragments`]) and associations without an
//! allocation are limited, and the oldest of each kind is evicted. Quotas limit associations with an
//! allocation.

mod admit;
mod association;
pub mod config;
mod context;
mod cookie;
mod fragments;
mod hello;
mod provider;
mod record;
pub mod stats;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use slab::Slab;
use turnpike_net::{ArenaSpan, Route, Rx, SocketId, Tx};
use turnpike_turn::server::{Client, Effect, NonceKeys, PrefixLengths, Source, Transport};
use turnpike_wire::address::canonical;

pub use config::DtlsConfig;
pub use context::{DtlsContext, DtlsError};
pub use stats::{DtlsDrop, DtlsEnd, DtlsFailure, DtlsStats};

use crate::{
    Layout,
    bounded::{Bounded, Limits, idle_limits, share},
    layout::Listener,
    link::{Generations, LinkSlot},
    turned_away::{Noted, TurnedAway},
};
use association::{Association, AssociationStage, Drained};
use cookie::CookieKeys;
use fragments::Fragments;
use record::Sifted;

/// Maximum handshakes started per flush. Each takes about 150 µs, during which datagrams wait.
const ADMISSIONS: u32 = 16;
/// Maximum length of a datagram during a handshake, because dimpl limits only the number of queued datagrams.
const MAX_HANDSHAKE: usize = 4096;
/// Maximum plaintext of a record (RFC 6347 section 4.1).
const MAX_PLAINTEXT: usize = 1 << 14;
/// Minimum time until a timer fires, in milliseconds.
const TIMER_MS: u64 = 10;

pub(crate) struct Associations {
    layout: Arc<Layout>,
    config: Arc<DtlsConfig>,
    workers: usize,
    started: Instant,
    listeners: Vec<Listener>,
    cookies: CookieKeys,
    /// Unix time at `started` in seconds; after that, the monotonic clock is used.
    began: u64,
    table: Slab<Association>,
    by_client: HashMap<Client, usize, RandomState>,
    /// Last lookup, cached because a client's datagrams often arrive one after another.
    last: Option<(Client, usize)>,
    generations: Generations,
    half_open: Bounded,
    fragments: Fragments,
    idle: Bounded,
    timers: BTreeSet<(u64, usize)>,
    admissions_left: u32,
    /// Clients whose associations have ended, to be reported to the state machine.
    gone: Vec<Client>,
    /// Clients whose associations have ended, to be reported to the new process if it has the sockets.
    ended: Option<Vec<Client>>,
    arrived: Vec<ArenaSpan>,
    plain: Vec<u8>,
    scratch: Vec<u8>,
    /// First ClientHello, as its body and as the complete packet.
    hello: [Vec<u8>; 2],
    answer: Vec<u8>,
    sifted: Vec<u8>,
    now_ms: u64,
    stats: DtlsStats,
    noted: Noted,
}

/// A worker's limits on handshakes.
fn half_open_limits(config: &DtlsConfig, workers: usize) -> Limits {
    [config.limits.half_open, config.limits.half_open_per_network].map(|limit| share(limit, workers))
}

impl Associations {
    /// Arena space needed for a receive call and its plaintext. A call reads up to 16 super-packets of 64
    /// KiB, or 32 datagrams without GRO, and plaintext is shorter than its records. Two cases exceed this and
    /// may lose datagrams: 32 datagrams of 64 KiB, and tiny records whose size triples because of alignment.
    pub(crate) const ROOM: usize = 3 << 20;

    pub(crate) fn new(
        layout: Arc<Layout>,
        config: Arc<DtlsConfig>,
        keys: NonceKeys,
        workers: usize,
        started: Instant,
    ) -> Self {
        let half_open = half_open_limits(&config, workers);
        Self {
            layout,
            workers,
            started,
            listeners: Vec::new(),
            cookies: CookieKeys::new(keys),
            began: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            table: Slab::new(),
            by_client: HashMap::default(),
            last: None,
            generations: Generations::default(),
            half_open: Bounded::new(half_open),
            fragments: Fragments::new(half_open),
            idle: Bounded::new(idle_limits(&config.limits, workers)),
            timers: BTreeSet::new(),
            admissions_left: ADMISSIONS,
            gone: Vec::new(),
            ended: None,
            arrived: Vec::new(),
            plain: Vec::new(),
            scratch: vec![0; 2048],
            hello: Default::default(),
            answer: Vec::new(),
            sifted: Vec::new(),
            now_ms: 0,
            stats: DtlsStats::default(),
            noted: Noted::default(),
            config,
        }
    }

    pub(crate) fn listen(&mut self, place: usize, socket: SocketId, bound: SocketAddr) {
        let number = self.layout.number(Transport::Dtls, place, None);
        if self.listeners.len() <= place {
            self.listeners.resize_with(place + 1, || Listener::NONE);
        }
        self.listeners[place] = Listener { socket, bound, number };
    }

    /// Ends the remaining associations of a closed listener. Their closing alerts are sent through its
    /// socket, which is no longer read.
    pub(crate) fn close_listener(&mut self, place: usize, tx: &mut Tx) {
        let theirs =
            |(slot, association): (usize, &Association)| (association.place == place).then_some(slot);
        let slots: Vec<usize> = self.table.iter().filter_map(theirs).collect();
        self.end(&slots, tx);
        if let Some(listener) = self.listeners.get_mut(place) {
            *listener = Listener::NONE;
        }
    }

    pub(crate) fn reconfigure(&mut self, layout: Arc<Layout>, config: Arc<DtlsConfig>, keys: NonceKeys) {
        let half_open = half_open_limits(&config, self.workers);
        self.half_open.limit(half_open);
        self.fragments.limit(half_open);
        self.idle.limit(idle_limits(&config.limits, self.workers));
        (self.layout, self.config, self.cookies) = (layout, config, CookieKeys::new(keys));
    }

    pub(crate) fn places(&self) -> usize {
        self.listeners.len()
    }

    pub(crate) fn listening(&self, place: usize) -> Option<(SocketId, SocketAddr)> {
        let listener = self.listeners.get(place).filter(|it| it.socket != Listener::NONE.socket);
        listener.map(|listener| (listener.socket, listener.bound))
    }

    pub(crate) fn client(&self, place: usize, from: SocketAddr, local: Option<IpAddr>) -> Client {
        let Listener { bound, number, .. } = self.listeners[place];
        let local = SocketAddr::new(local.unwrap_or(bound.ip()), bound.port());
        Client { listener: number, address: from, local: canonical(local) }
    }

    pub(crate) fn turned_away(&mut self) -> impl Iterator<Item = TurnedAway> + '_ {
        self.noted.drain()
    }

    pub(crate) fn stats(&self) -> DtlsStats {
        let half_open = self.half_open.len() as u64;
        DtlsStats { half_open, open: self.table.len() as u64 - half_open, ..self.stats }
    }

    /// Processes a datagram: replies at the DTLS level and decrypts messages into the arena
    /// ([`Associations::arrived`]). Returns the client as the state machine identifies it, or `None` if it
    /// has no association.
    pub(crate) fn receive(
        &mut self,
        now_ms: u64,
        client: Client,
        span: ArenaSpan,
        rx: &mut Rx,
        tx: &mut Tx,
    ) -> Option<Source> {
        self.now_ms = now_ms;
        self.arrived.clear();
        self.stats.datagrams += 1;
        let datagram = rx.bytes(span);
        // The first byte shows that this is not DTLS (RFC 7983 section 7).
        if !matches!(datagram.first(), Some(20..=63)) {
            self.count_drop(DtlsDrop::NotDtls);
            return None;
        }
        let fed = if hello::is_hello(datagram) {
            self.take_hello(now_ms, client, datagram, tx)
        } else {
            self.feed(now_ms, &client, datagram)
        };
        let slot = fed?;
        let was_open = self.table[slot].is_open();
        let source = self.table[slot].source(slot);
        let Drained { connected, closed, said, .. } = self.drain(now_ms, slot, tx, Some(rx));
        if was_open && self.arrived.is_empty() && !(connected || closed || said) {
            self.count_drop(DtlsDrop::NoEffect);
        }
        Some(source)
    }

    pub(crate) fn arrived(&self, index: usize) -> Option<ArenaSpan> {
        self.arrived.get(index).copied()
    }

    pub(crate) fn relay(
        &mut self,
        to: LinkSlot,
        [header, payload]: [&[u8]; 2],
        padding: u8,
        (tos, ttl): (u8, u8),
        tx: &mut Tx,
    ) {
        let Some(slot) = self.slot_at(to) else { return };
        let len = header.len() + payload.len() + usize::from(padding);
        if len > MAX_PLAINTEXT {
            return self.count_drop(DtlsDrop::RecordTooLong);
        }
        self.plain.clear();
        self.plain.extend_from_slice(header);
        self.plain.extend_from_slice(payload);
        self.plain.resize(len, 0);
        let association = &mut self.table[slot];
        let sent = association.dtls.send_application_data(&self.plain);
        let route = Route { tos, ttl, ..self.route_to(slot) };
        let association = &mut self.table[slot];
        // One message per datagram, because some clients expect that.
        let drained = association.drain(&route, tx, None, &mut self.scratch, &mut self.stats);
        self.stats.sent += 1;
        match sent {
            Ok(_) => self.note(slot, drained.timer),
            Err(error) => self.remove(slot, association::end(&error)),
        }
    }

    pub(crate) fn reply(&mut self, to: LinkSlot, bytes: &[u8], tx: &mut Tx) {
        self.relay(to, [bytes, &[]], 0, (0, 0), tx);
    }

    pub(crate) fn flushed(&mut self) {
        self.admissions_left = ADMISSIONS;
    }

    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        self.timers.first().map(|(due, _)| *due)
    }

    pub(crate) fn handle_timeout(&mut self, now_ms: u64, tx: &mut Tx) {
        self.now_ms = now_ms;
        // Messages of the previous datagram must not be mistaken for new ones.
        self.arrived.clear();
        let now = self.instant(now_ms);
        while let Some(&(due, slot)) = self.timers.first()
            && due <= now_ms
        {
            self.timers.pop_first();
            let association = &mut self.table[slot];
            association.armed_ms = u64::MAX;
            if association.deadline_ms <= now_ms {
                match association.stage {
                    // Nothing followed the plaintext alert, so the client itself sent it.
                    AssociationStage::HalfOpen(_) if association.alerted => {
                        self.fail(slot, DtlsFailure::Closed);
                    }
                    AssociationStage::HalfOpen(_) => self.fail(slot, DtlsFailure::Timeout),
                    AssociationStage::Idle(_) | AssociationStage::Allocated => {
                        self.close(slot, DtlsEnd::Idle, tx);
                    }
                }
                continue;
            }
            if association.timer_ms <= now_ms {
                association.timer_ms = u64::MAX;
                if let Err(error) = association.dtls.handle_timeout(now) {
                    self.give_up(slot, &error);
                    continue;
                }
                self.drain(now_ms, slot, tx, None);
            } else {
                self.arm(slot);
            }
        }
    }

    pub(crate) fn next_gone(&mut self) -> Option<Client> {
        self.gone.pop()
    }

    /// Clients with an association or a handshake in progress, as identified by the sockets.
    pub(crate) fn clients(&self) -> impl Iterator<Item = Client> {
        self.by_client.keys().copied()
    }

    /// Records that a new process has the sockets and must be notified of ended associations
    /// ([`Associations::next_ended`]).
    pub(crate) fn left_behind(&mut self) {
        self.ended = Some(Vec::new());
    }

    pub(crate) fn next_ended(&mut self) -> Option<Client> {
        self.ended.as_mut()?.pop()
    }

    pub(crate) fn effect(&mut self, now_ms: u64, effect: &Effect, tx: &mut Tx) {
        let [released, allocated] = effect.clients();
        released.iter().for_each(|client| self.released(now_ms, client, tx));
        allocated.iter().for_each(|client| self.allocated(client));
    }

    pub(crate) fn serves(&self, place: LinkSlot) -> bool {
        self.slot_at(place).is_some()
    }

    /// Exempts the association from the idle limits while it has an allocation.
    pub(crate) fn allocated(&mut self, client: &Client) {
        let Some(slot) = self.slot_of(client) else { return };
        let association = &mut self.table[slot];
        if let AssociationStage::Idle(number) = association.stage {
            self.idle.leave(number);
            association.stage = AssociationStage::Allocated;
            association.deadline_ms = u64::MAX;
        }
    }

    /// Makes an association without an allocation subject to the idle limits again.
    pub(crate) fn released(&mut self, now_ms: u64, client: &Client, tx: &mut Tx) {
        let Some(slot) = self.slot_of(client) else { return };
        if self.table[slot].stage == AssociationStage::Allocated {
            self.become_idle(now_ms, slot, tx);
        }
    }

    pub(crate) fn shutdown(&mut self, tx: &mut Tx) {
        let slots: Vec<usize> = self.table.iter().map(|(slot, _)| slot).collect();
        self.end(&slots, tx);
    }

    fn end(&mut self, slots: &[usize], tx: &mut Tx) {
        for slot in slots {
            if self.table[*slot].is_open() {
                self.close(*slot, DtlsEnd::Shutdown, tx);
            } else {
                self.fail(*slot, DtlsFailure::Other);
            }
        }
    }

    fn feed(&mut self, now_ms: u64, client: &Client, datagram: &[u8]) -> Option<usize> {
        let Some(slot) = self.slot_of(client) else {
            self.count_drop(DtlsDrop::NoAssociation);
            return None;
        };
        let now = self.instant(now_ms);
        let association = &mut self.table[slot];
        let mut datagram = datagram;
        if !association.is_open() {
            if datagram.len() > MAX_HANDSHAKE {
                self.count_drop(DtlsDrop::TooLong);
                return None;
            }
            // Plaintext alerts are unauthenticated, so an attacker who knows the address and port could end the
            // handshake (RFC 6347 section 4.1.2.7 advises against that). dimpl acts on them until it has
            // keys.
            if let Sifted::Rest(rest) = record::without_plain_alerts(datagram, &mut self.sifted) {
                association.alerted = true;
                self.stats.dropped[DtlsDrop::PlainAlert as usize] += 1;
                if rest.is_empty() {
                    return None;
                }
                datagram = rest;
            }
        }
        let fed =
            association.dtls.handle_timeout(now).and_then(|()| association.dtls.handle_packet(datagram));
        if let Err(error) = fed {
            self.give_up(slot, &error);
            return None;
        }
        Some(slot)
    }

    fn drain(&mut self, now_ms: u64, slot: usize, tx: &mut Tx, rx: Option<&mut Rx>) -> Drained {
        let route = self.route_to(slot);
        let association = &mut self.table[slot];
        let arena = rx.map(|rx| (rx, &mut self.arrived));
        let drained = association.drain(&route, tx, arena, &mut self.scratch, &mut self.stats);
        let Drained { connected, closed, timer, .. } = drained;
        if connected && let AssociationStage::HalfOpen(number) = association.stage {
            self.half_open.leave(number);
            if association.is_1_3() {
                self.stats.handshakes_1_3 += 1;
            } else {
                self.stats.handshakes_1_2 += 1;
            }
            self.become_idle(now_ms, slot, tx);
        } else if !self.arrived.is_empty() && matches!(association.stage, AssociationStage::Idle(_)) {
            association.deadline_ms = now_ms + self.config.limits.idle_ms();
        }
        self.note(slot, timer);
        if closed {
            let open = self.table[slot].is_open();
            if open {
                self.remove(slot, DtlsEnd::Client);
            } else {
                self.fail(slot, DtlsFailure::Closed);
            }
        }
        drained
    }

    fn become_idle(&mut self, now_ms: u64, slot: usize, tx: &mut Tx) {
        let network = PrefixLengths::SITE.of(self.table[slot].client.address.ip());
        if let Some(other) = self.idle.in_the_way(network) {
            self.close(other, DtlsEnd::Evicted, tx);
        }
        let number = self.idle.enter(slot, Some(network), now_ms);
        let association = &mut self.table[slot];
        association.stage = AssociationStage::Idle(number);
        association.deadline_ms = now_ms + self.config.limits.idle_ms();
        self.arm(slot);
    }

    fn close(&mut self, slot: usize, end: DtlsEnd, tx: &mut Tx) {
        let route = self.route_to(slot);
        let association = &mut self.table[slot];
        // An association is removed even if it cannot send its close_notify.
        if association.dtls.close().is_ok() {
            association.drain(&route, tx, None, &mut self.scratch, &mut self.stats);
        }
        self.remove(slot, end);
    }

    fn give_up(&mut self, slot: usize, error: &dimpl::Error) {
        if self.table[slot].is_open() {
            self.remove(slot, association::end(error));
        } else {
            self.fail(slot, association::failure(error));
        }
    }

    fn fail(&mut self, slot: usize, why: DtlsFailure) {
        self.stats.failed[why as usize] += 1;
        if why != DtlsFailure::Other {
            let address = self.table[slot].client.address;
            self.noted.note(address, Transport::Dtls, None, ("dtls_handshake", why.into()));
        }
        self.remove(slot, DtlsEnd::Handshake);
    }

    fn remove(&mut self, slot: usize, end: DtlsEnd) {
        let association = self.table.remove(slot);
        self.stats.ended[end as usize] += 1;
        self.timers.remove(&(association.armed_ms, slot));
        self.by_client.remove(&association.client);
        self.last = None;
        if let Some(ended) = &mut self.ended {
            ended.push(association.client);
        }
        match association.stage {
            AssociationStage::HalfOpen(number) => self.half_open.leave(number),
            AssociationStage::Idle(number) => {
                self.idle.leave(number);
                self.gone.push(association.known_as());
            }
            AssociationStage::Allocated => self.gone.push(association.known_as()),
        }
    }

    pub(crate) fn count_lost(&mut self) {
        self.count_drop(DtlsDrop::OldProcess);
    }

    fn count_drop(&mut self, why: DtlsDrop) {
        self.stats.dropped[why as usize] += 1;
    }

    fn note(&mut self, slot: usize, timer: Option<Instant>) {
        let Some(timer) = timer else { return };
        let since = timer.saturating_duration_since(self.started).as_millis();
        // A timer that is always due must not starve other work.
        let soonest = self.now_ms + TIMER_MS;
        self.table[slot].timer_ms = u64::try_from(since).unwrap_or(u64::MAX).saturating_add(1).max(soonest);
        self.arm(slot);
    }

    fn arm(&mut self, slot: usize) {
        let association = &mut self.table[slot];
        let due = association.deadline_ms.min(association.timer_ms);
        if due < association.armed_ms {
            self.timers.remove(&(association.armed_ms, slot));
            association.armed_ms = due;
            self.timers.insert((due, slot));
        }
    }

    fn slot_at(&self, LinkSlot { slot, generation }: LinkSlot) -> Option<usize> {
        let association = self.table.get(slot)?;
        (association.generation == generation && association.is_open()).then_some(slot)
    }

    /// Slot of the client's association. `client` may contain the listener number of its server name or the one
    /// for clients without a name.
    fn slot_of(&mut self, client: &Client) -> Option<usize> {
        let place = self.layout.dtls_place(client.listener)?;
        let unnamed = Client { listener: self.listeners.get(place)?.number, ..*client };
        let slot = match &self.last {
            Some((last, slot)) if *last == unnamed => *slot,
            _ => {
                let slot = *self.by_client.get(&unnamed)?;
                self.last = Some((unnamed, slot));
                slot
            }
        };
        (unnamed == *client || self.table[slot].listener == client.listener).then_some(slot)
    }

    fn place(&self, client: &Client) -> usize {
        self.layout.dtls_place(client.listener).unwrap_or_default()
    }

    fn route_to(&self, slot: usize) -> Route {
        let Association { place, client, .. } = &self.table[slot];
        self.route(*place, client)
    }

    fn route(&self, place: usize, client: &Client) -> Route {
        let listener = &self.listeners[place];
        Route {
            socket: listener.socket,
            to: Some(client.address),
            from: listener.bound.ip().is_unspecified().then_some(client.local.ip()),
            tos: 0,
            ttl: 0,
            dont_fragment: false,
        }
    }

    fn unix(&self, now_ms: u64) -> u64 {
        self.began + now_ms / 1000
    }

    fn instant(&self, now_ms: u64) -> Instant {
        self.started + Duration::from_millis(now_ms)
    }
}
