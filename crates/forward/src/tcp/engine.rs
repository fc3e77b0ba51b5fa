//! TCP engine: rules, listeners, the table of connections, and timers.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use slab::Slab;
use socket2::SockRef;
use turnpike_copy::{CopyDirection, Mover};
use turnpike_net::{Event, Interest, Poller, TcpSocket, is_exhaustion};
use turnpike_offload::Sockmap;

use super::{
    attempt::Opening,
    check::Check,
    connection::Connection,
    pacing_queue::Pacing,
    side::{CLIENT, LISTENER, StreamSide, TARGET, Tick, token},
    talk::Talk,
};
use crate::{
    Address, ConnectionReport, EndReason, RuleId, RuleSnapshot, TargetFailure,
    batching::WakeUp,
    common::ForwardCommon,
    here::Here,
    listen::Acceptor,
    rate::Pace,
    state::{ConnectionSlot, RuleState},
    tally::{Tallies, TargetSlot},
    targets::Seat,
};

/// Milliseconds between timer checks, which is the precision of connect and idle timeouts.
pub(super) const TICK_MS: u64 = 100;
/// Maximum number of connections checked for idleness per tick. Checking a hundred thousand takes three
/// seconds and does not delay other work.
const SCAN: usize = 4096;
/// Maximum connections accepted per listener and wake-up.
const MOST_ACCEPTS: u32 = 64;
/// Number of wake-ups with a single connection after which the next wake-up tries to accept a second one
/// again. Until then, no connection is missed, because level-triggered epoll reports a second one anyway.
const SINGLES: u32 = 16;
/// Age in milliseconds at which the target's socket gets SO_KEEPALIVE. Keepalive does nothing for the first
/// two hours anyway (tcp(7)), and short connections save the system call.
const KEEPALIVE_AGE_MS: u64 = 10_000;

pub(super) struct LocalRule {
    pub(super) state: Arc<RuleState>,
    pub(super) counters: RuleSnapshot,
    pub(super) tallies: Tallies,
    connections: usize,
    /// True if the listeners are closed; the entry is removed once its last connection ends.
    removed: bool,
}

struct Listener {
    socket: Acceptor,
    rule: usize,
    /// Offset of the port in the rule's range.
    offset: u16,
    /// Number of connections to accept per wake-up; adapted to avoid calls that find none waiting.
    appetite: u32,
    /// Consecutive wake-ups with a single connection since accepting a second one was last tried.
    singles: u32,
    paused: bool,
}

impl LocalRule {
    pub(super) fn sit(&mut self, seat: Seat) -> Option<Seat> {
        self.tallies.of(seat.slot()).open += 1;
        Some(seat)
    }

    pub(super) fn stand_up(&mut self, seat: Seat) {
        self.tallies.of(seat.slot()).open -= 1;
    }

    #[inline]
    pub(super) fn moved(&mut self, seat: Option<&Seat>, side: StreamSide, bytes: u64) {
        let (to_target, to_client) = if side == StreamSide::Client { (bytes, 0) } else { (0, bytes) };
        self.counters.to_target_bytes += to_target;
        self.counters.to_client_bytes += to_client;
        if let Some(seat) = seat {
            self.tallies.moved(seat.slot(), to_target, to_client);
        }
    }

    /// Counts a failed connect and prefers other targets.
    pub(super) fn connect_failed(&mut self, seat: &Seat, error: &io::Error) {
        self.tallies.of(seat.slot()).failed(TargetFailure::of(error));
        self.state.targets.suspect(seat.member());
    }

    /// Like [`LocalRule::connect_failed`], for a connection that waits for a full Unix socket queue and has no seat.
    pub(super) fn queue_full(&mut self, slot: TargetSlot) {
        self.tallies.of(slot).failed(TargetFailure::Timeout);
        if let Some(member) = self.state.targets.member(slot) {
            self.state.targets.suspect(&member);
        }
    }
}

pub(crate) struct Engine {
    pub(super) common: Arc<ForwardCommon>,
    pub(super) rules: Slab<LocalRule>,
    listeners: Slab<Listener>,
    pub(super) connections: Slab<Connection>,
    pub(super) openings: Slab<Opening>,
    pub(super) checks: Slab<Check>,
    /// Only one worker checks the health of targets.
    pub(super) checks_health: bool,
    pub(super) watched: Vec<Arc<RuleState>>,
    pub(super) mover: Mover,
    pub(super) here: Here,
    /// Flows with more data than one turn allows.
    pub(super) again: Vec<(usize, StreamSide)>,
    /// Spare memory for [`Engine::again`].
    resumed: Vec<(usize, StreamSide)>,
    pub(super) pacing: Pacing,
    pub(super) sockmap: Option<Sockmap>,
    /// Maps pair numbers to connections.
    pub(super) joined: Vec<Option<usize>>,
    pub(super) pairs: usize,
    /// Directions waiting to be checked again, each with the time of the check.
    pub(super) waiting: Vec<(u64, usize, StreamSide)>,
    /// Time of the last read of kernel counters, and the part of the connections that it covered.
    pub(super) swept: u64,
    pub(super) sweep: usize,
    ticked: u64,
    cursor: usize,
    /// True if the last scan found entries with timers; `scan_found` is the same for the current scan.
    scan: bool,
    scan_found: bool,
    /// True if a connection being opened waits for a descriptor; it takes precedence over new clients.
    pub(super) starving: bool,
    any_paused: bool,
    complained: bool,
    /// True if something was counted since the last tick; not all counting happens during events.
    pub(super) any_counted: bool,
    pub(super) wake_up: WakeUp,
}

impl Engine {
    pub(crate) fn new(common: Arc<ForwardCommon>, checks_health: bool) -> Self {
        Self {
            common,
            rules: Slab::new(),
            listeners: Slab::new(),
            connections: Slab::new(),
            openings: Slab::new(),
            checks: Slab::new(),
            checks_health,
            watched: Vec::new(),
            mover: Mover::default(),
            here: Here::default(),
            again: Vec::new(),
            resumed: Vec::new(),
            pacing: Pacing::default(),
            sockmap: None,
            joined: Vec::new(),
            pairs: 0,
            waiting: Vec::new(),
            swept: 0,
            sweep: 0,
            ticked: 0,
            cursor: 0,
            scan: false,
            scan_found: false,
            starving: false,
            any_paused: false,
            complained: false,
            any_counted: false,
            wake_up: WakeUp::default(),
        }
    }

    /// Starts serving a rule. Each socket comes with the offset of its port in the rule's range.
    pub(crate) fn add_rule(
        &mut self,
        state: &Arc<RuleState>,
        sockets: Vec<(u16, Acceptor)>,
        tick: Tick<'_>,
    ) -> io::Result<()> {
        let rule = self.rules.insert(LocalRule {
            state: Arc::clone(state),
            counters: RuleSnapshot::default(),
            tallies: Tallies::default(),
            connections: 0,
            removed: false,
        });
        for (offset, socket) in sockets {
            let entry = self.listeners.vacant_entry();
            watch(&socket, entry.key(), tick.poller)?;
            entry.insert(Listener { socket, rule, offset, appetite: 1, singles: 0, paused: false });
        }
        self.watch_health(state, tick.now);
        Ok(())
    }

    /// Removes a rule's listeners; its connections may finish.
    pub(crate) fn remove_rule(&mut self, state: &Arc<RuleState>, tick: Tick<'_>) -> Vec<Acceptor> {
        let found = self.rules.iter().find(|(_, rule)| Arc::ptr_eq(&rule.state, state) && !rule.removed);
        let Some(key) = found.map(|(key, _)| key) else { return Vec::new() };
        let keys: Vec<usize> =
            self.listeners.iter().filter(|(_, listener)| listener.rule == key).map(|(key, _)| key).collect();
        let mut sockets = Vec::with_capacity(keys.len());
        for key in keys {
            let listener = self.listeners.remove(key);
            // A paused listener is not watched.
            let _ = tick.poller.remove(&listener.socket);
            sockets.push(listener.socket);
        }
        self.unwatch_health(state);
        self.rules[key].removed = true;
        self.forget_rule_if_over(key);
        sockets
    }

    pub(crate) fn set_common(&mut self, common: &Arc<ForwardCommon>) {
        self.common = Arc::clone(common);
    }

    pub(crate) fn drain(&mut self, tick: Tick<'_>) {
        for listener in self.listeners.drain() {
            // Closing does not remove the socket from the poller if other workers share it. A paused socket
            // is not watched.
            let _ = tick.poller.remove(&listener.socket);
        }
    }

    pub(crate) fn listening(&self, rule: u32) -> Vec<BorrowedFd<'_>> {
        let is_of = |listener: &&Listener| {
            let of = self.rules.get(listener.rule);
            of.is_some_and(|of| of.state.key == rule && !of.removed)
        };
        let mut found: Vec<&Listener> =
            self.listeners.iter().map(|(_, listener)| listener).filter(is_of).collect();
        found.sort_unstable_by_key(|listener| listener.offset);
        found.into_iter().map(|listener| listener.socket.as_fd()).collect()
    }

    /// Applies this process's options to handed-over listeners.
    pub(crate) fn take_hold(&self) {
        for (_, listener) in &self.listeners {
            listener.socket.set_inherited(&self.rules[listener.rule].state.rule);
        }
    }

    /// Gives up listeners and health checks, because another process has taken them over.
    pub(crate) fn surrender(&mut self, tick: Tick<'_>) {
        self.drain(tick);
        for state in std::mem::take(&mut self.watched) {
            self.unwatch_health(&state);
        }
    }

    pub(crate) fn stop(&mut self, tick: Tick<'_>) {
        self.drain(tick);
        let keys: Vec<usize> = self.connections.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.end(key, EndReason::Shutdown, tick);
        }
    }

    /// True if the event is for a listener. Handle such events last, so that no slot freed by an event of
    /// this wake-up is reused while later events still refer to it.
    pub(crate) fn is_listener(event: &Event) -> bool {
        event.token & 3 == LISTENER
    }

    pub(crate) fn take_wake_up(&mut self) -> WakeUp {
        std::mem::take(&mut self.wake_up)
    }

    pub(crate) fn on_event(&mut self, event: &Event, tick: Tick<'_>) {
        let Ok(key) = usize::try_from(event.token >> 2) else { return };
        if !self.is_traffic(event.token & 3, key) {
            self.wake_up.other += 1;
        }
        match event.token & 3 {
            LISTENER => self.accept(key, tick),
            CLIENT => match self.connections.get(key).map(|connection| connection.opening) {
                Some(None) => self.on_traffic(key, StreamSide::Client, event, tick),
                Some(Some(_)) => self.on_early_client(key, event, tick),
                None => {}
            },
            TARGET => match self.connections.get(key).map(|connection| connection.opening) {
                Some(None) => self.on_traffic(key, StreamSide::Target, event, tick),
                Some(Some(_)) => self.on_connected(key, event, tick),
                None => {}
            },
            _ => self.on_health(key, event, tick),
        }
    }

    fn is_traffic(&self, kind: u64, key: usize) -> bool {
        matches!(kind, CLIENT | TARGET) && self.connections.get(key).is_some_and(|c| c.opening.is_none())
    }

    /// Runs due timers, at most every [`TICK_MS`], and continues flows that used up their turn. Returns true
    /// if anything has been counted outside of event handling since the last call, such as bytes of a
    /// continued flow or ended connections.
    pub(crate) fn on_tick(&mut self, tick: Tick<'_>) -> bool {
        self.do_due(tick);
        std::mem::take(&mut self.any_counted)
    }

    fn do_due(&mut self, tick: Tick<'_>) {
        if !self.again.is_empty() {
            std::mem::swap(&mut self.again, &mut self.resumed);
            for at in 0..self.resumed.len() {
                let (key, side) = self.resumed[at];
                // The connection may have ended and its slot been reused.
                if self.connections.get(key).is_some_and(|connection| connection.opening.is_none()) {
                    self.resume(key, side, tick);
                }
            }
            self.resumed.clear();
        }
        self.pace(tick);
        self.look_at_joined(tick);
        if tick.now < self.ticked + TICK_MS {
            return;
        }
        self.ticked = tick.now;
        self.look_at_openings(tick);
        if !self.starving {
            self.resume_listeners(tick);
        }
        self.look_for_idle(tick);
        self.check_health(tick);
    }

    /// Time at which [`Engine::on_tick`] next has work, on the clock of [`Tick::now`].
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        if !self.again.is_empty() {
            return Some(0);
        }
        let pressing = self.scan || !self.openings.is_empty() || self.any_paused;
        let due = if pressing { Some(self.ticked + TICK_MS) } else { None };
        // Checks run on ticks, at most every `TICK_MS`.
        let health = self.health_due().map(|due| due.max(self.ticked + TICK_MS));
        due.into_iter().chain(health).chain(self.pacing.due()).chain(self.joined_due()).min()
    }

    pub(crate) fn on_resolved(&mut self, tick: Tick<'_>) {
        self.update_checks(tick.now);
        let waiting: Vec<usize> = self
            .openings
            .iter()
            .filter(|(_, opening)| opening.waits_for_name())
            .map(|(_, opening)| opening.connection)
            .collect();
        for key in waiting {
            self.connect_next(key, tick);
        }
    }

    pub(crate) fn snapshots(&self, mut each: impl FnMut(&RuleId, RuleSnapshot)) {
        for (_, rule) in &self.rules {
            let targets = rule.state.targets.describe(&rule.tallies);
            let active = rule.connections as u64;
            each(&rule.state.rule.id, RuleSnapshot { active, targets, ..rule.counters.clone() });
        }
    }

    fn accept(&mut self, key: usize, tick: Tick<'_>) {
        let Some(listener) = self.listeners.get(key) else { return };
        let (appetite, rule, offset) = (listener.appetite, listener.rule, listener.offset);
        let mut got = 0;
        let mut dry = false;
        while got < appetite && !dry {
            let Some(listener) = self.listeners.get(key) else { return };
            if listener.paused {
                return;
            }
            match listener.socket.accept() {
                Ok(Some((socket, client))) => {
                    got += 1;
                    self.admit(rule, offset, socket, client, tick);
                }
                Ok(None) => dry = true,
                Err(error) => {
                    self.pause(key, &error, tick);
                    return;
                }
            }
        }
        let Some(listener) = self.listeners.get_mut(key) else { return };
        listener.singles += 1;
        if dry {
            listener.appetite = got.max(1);
            listener.singles = 0;
        } else if appetite > 1 || listener.singles >= SINGLES {
            listener.appetite = (appetite * 2).min(MOST_ACCEPTS);
        }
    }

    fn admit(&mut self, rule: usize, offset: u16, socket: TcpSocket, client: Address, tick: Tick<'_>) {
        let local = &mut self.rules[rule];
        local.counters.accepted += 1;
        let settings = &local.state.rule;
        let is_proxy = settings.is_proxy(&client);
        // Behind a proxy, the lists apply to the client named in the header.
        if !is_proxy && !self.common.admits_from(settings, &client) {
            return self.refuse(rule, client, EndReason::Denied);
        }
        let hops = match &client {
            Address::Ip(client) => local.state.hops(&self.common.circles, *client),
            Address::Unix(_) => Ok(0),
        };
        let hops = match hops {
            Ok(hops) => hops,
            Err(reason) => return self.refuse(rule, client, reason),
        };
        let Some(mut place) = ConnectionSlot::take(&local.state, &self.common.total) else {
            return self.refuse(rule, client, EndReason::Limit);
        };
        if !is_proxy
            && let Some(ip) = client.ip()
            && let Err(reason) = place.of_client(ip, tick.now)
        {
            return self.refuse(rule, client, reason);
        }
        let (nodelay, keepalive) = (settings.nodelay, settings.keepalive);
        let unvouched = !is_proxy && !settings.proxy_protocol_from.is_empty();
        local.connections += 1;
        let key = self.connections.vacant_key();
        let opening =
            self.openings.insert(Opening::new(key, &local.state.rule, (offset, hops), tick.now, is_proxy));
        let pace = Pace::of(local.state.rates.as_ref());
        let mut up = CopyDirection::new(nodelay);
        if client.is_unix() {
            up.thorough = true;
        }
        self.connections.insert(Connection {
            rule,
            link: None,
            client: socket,
            target: None,
            up,
            down: CopyDirection::default(),
            client_address: client,
            target_address: None,
            seat: None,
            opening: u32::try_from(opening).ok(),
            began: tick.now,
            active: tick.now,
            client_writable: false,
            unvouched,
            keepalive_due: keepalive,
            place,
            pace,
            talk: Talk::default(),
            across: None,
        });
        self.scan = true;
        self.scan_found = true;
        if !is_proxy {
            return self.connect_next(key, tick);
        }
        let client = &self.connections[key].client;
        if let Err(error) = tick.poller.add_with(client, token(CLIENT, key), Interest::EdgeRead) {
            self.complain(&error);
            self.end(key, EndReason::Limit, tick);
        }
    }

    /// Refuses a client; the caller closes its socket.
    fn refuse(&mut self, rule: usize, client: Address, reason: EndReason) {
        let local = &mut self.rules[rule];
        local.counters.count_ends(reason, 1);
        if reason.is_quiet() {
            return;
        }
        self.common.log.ended(ConnectionReport {
            rule: local.state.rule.id.clone(),
            client,
            target: None,
            to_target: 0,
            to_client: 0,
            lived: Duration::ZERO,
            reason,
        });
    }

    /// Ends a connection. A reset is passed on; a truncated stream is also reset, so that it is not mistaken
    /// for a complete one.
    pub(super) fn end(&mut self, key: usize, reason: EndReason, tick: Tick<'_>) {
        self.book(key, tick.now);
        let Some(mut connection) = self.connections.try_remove(key) else { return };
        connection.link = None;
        if let Some(across) = connection.across.take() {
            self.part(*across, tick.now);
        }
        if let Some(opening) = connection.opening {
            self.openings.try_remove(opening as usize);
        }
        self.mover.reclaim(&mut connection.up);
        self.mover.reclaim(&mut connection.down);
        let local = &mut self.rules[connection.rule];
        if let Some(seat) = connection.seat {
            local.stand_up(seat);
        }
        local.counters.count_ends(reason, 1);
        local.connections -= 1;
        self.any_counted = true;
        // Drop the slot before the report, whose reader may rely on the slot being free.
        drop(connection.place);
        let reached = connection.opening.is_none();
        if !reason.is_quiet() {
            self.common.log.ended(ConnectionReport {
                rule: local.state.rule.id.clone(),
                client: connection.client_address,
                target: connection.target_address.filter(|_| reached),
                to_target: connection.up.bytes,
                to_client: connection.down.bytes,
                lived: Duration::from_millis(tick.now.saturating_sub(connection.began)),
                reason,
            });
        }
        match reason {
            EndReason::Finished
            | EndReason::Denied
            | EndReason::Limit
            | EndReason::ClientLimit
            | EndReason::ClientRate
            | EndReason::BadProxyHeader => {}
            // The header has not been read, so closing the socket would reset the connection anyway.
            EndReason::UntrustedProxy => connection.client.reset(),
            EndReason::ClientReset => {
                if let Some(target) = connection.target.take() {
                    target.reset();
                }
            }
            EndReason::TargetReset | EndReason::ConnectFailed => connection.client.reset(),
            _ => {
                connection.client.reset();
                if let Some(target) = connection.target.take() {
                    target.reset();
                }
            }
        }
        self.forget_rule_if_over(connection.rule);
    }

    /// Pauses a listener while descriptors or memory are exhausted. Clients wait in the kernel's queue, where
    /// level-triggered polling would otherwise wake the worker forever.
    fn pause(&mut self, key: usize, error: &io::Error, tick: Tick<'_>) {
        if let Some(listener) = self.listeners.get_mut(key) {
            listener.paused = tick.poller.remove(&listener.socket).is_ok();
            listener.appetite = 1;
        }
        self.any_paused = true;
        self.complain(error);
    }

    /// Pauses all listeners, because there was no descriptor for an accepted connection's target.
    pub(super) fn pause_all(&mut self, error: &io::Error, tick: Tick<'_>) {
        for (_, listener) in self.listeners.iter_mut().filter(|(_, listener)| !listener.paused) {
            listener.paused = tick.poller.remove(&listener.socket).is_ok();
            listener.appetite = 1;
        }
        self.any_paused = true;
        self.complain(error);
    }

    fn resume_listeners(&mut self, tick: Tick<'_>) {
        if !self.any_paused {
            return;
        }
        for (key, listener) in self.listeners.iter_mut().filter(|(_, listener)| listener.paused) {
            listener.paused = watch(&listener.socket, key, tick.poller).is_err();
        }
        self.any_paused = self.listeners.iter().any(|(_, listener)| listener.paused);
    }

    pub(super) fn complain(&mut self, error: &io::Error) {
        if !self.complained {
            self.complained = true;
            if is_exhaustion(error) {
                tracing::warn!(%error, "accepting is paused until descriptors or memory are free; raise the limit on open files \
                 (ulimit -n) or lower the limit on connections; logged once");
            } else {
                tracing::warn!(%error, "cannot serve a connection; logged once");
            }
        }
    }

    fn look_for_idle(&mut self, tick: Tick<'_>) {
        if !self.scan {
            return;
        }
        let end = self.cursor + SCAN;
        let mut idle: Vec<(usize, EndReason)> = Vec::new();
        for key in self.cursor..end.min(self.connections.capacity()) {
            let Some(connection) = self.connections.get_mut(key) else { continue };
            let rule = &self.rules[connection.rule].state.rule;
            if connection.opening.is_some() {
                self.scan_found = true;
                continue;
            }
            if connection.keepalive_due {
                if tick.now.saturating_sub(connection.began) >= KEEPALIVE_AGE_MS {
                    connection.keepalive_due = false;
                    if let Some(target) = &connection.target {
                        // If this fails, the connection is broken, which the next event reports.
                        let _ = SockRef::from(target).set_keepalive(true);
                    }
                } else {
                    self.scan_found = true;
                }
            }
            self.scan_found |= rule.idle.is_some() || rule.half_close_timeout.is_some();
            let silent = Duration::from_millis(tick.now.saturating_sub(connection.active));
            let over = |limit: Option<Duration>| limit.is_some_and(|limit| silent >= limit);
            if connection.half_done() && over(rule.half_close_timeout) {
                idle.push((key, EndReason::HalfClosed));
            } else if over(rule.idle) {
                idle.push((key, EndReason::Idle));
            }
        }
        self.cursor = end;
        if end >= self.connections.capacity() {
            self.cursor = 0;
            self.scan = self.scan_found;
            self.scan_found = false;
        }
        for (key, reason) in idle {
            // The kernel may have forwarded data since the last check.
            if !self.book(key, tick.now) {
                self.end(key, reason, tick);
            }
        }
    }

    fn forget_rule_if_over(&mut self, key: usize) {
        if self.rules.get(key).is_some_and(|rule| rule.removed && rule.connections == 0) {
            self.rules.remove(key);
        }
    }
}

fn watch(socket: &Acceptor, key: usize, poller: &Poller) -> io::Result<()> {
    match socket {
        Acceptor::Tcp(_) => poller.add(socket, token(LISTENER, key)),
        Acceptor::Unix(..) => poller.add_with(socket, token(LISTENER, key), Interest::Exclusive),
    }
}
