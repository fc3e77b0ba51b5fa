//! UDP engine of one worker: listeners, sockets and sessions. [`Engine::on_event`] handles a datagram from
//! top to bottom; TCP streams are in `streams.rs`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use slab::Slab;
use turnpike_net::{
    Datapath, Event, QueuedError, Route, Rx, RxStats, SocketId, SocketProtocol, Sockets, Tx, TxStats,
    is_exhaustion,
};
use turnpike_wire::{address::canonical, proxy_protocol};

use super::{
    Admission, ChosenTarget, UdpTick,
    kernel_flows::Offload,
    outgoing,
    rule_state::{Listener, RuleState, SocketKind},
    sessions::{
        ATTEMPTS, Arrival, Gate, Inward, Key, List, Outward, Reached, Session, SessionStage, SessionTable,
        addressed, connected,
    },
    tokens::{INWARD, LISTENER, OUTWARD, inward_token, outward_token, slot_of},
    unanswered::Unanswered,
};
use crate::{
    ConnectionReport, EndReason, Protocol, Rule, TargetFailure,
    bridge::{SCRATCH, Stream},
    rate::{DOWN, Pace, UP},
};

/// Maximum buffers per listener and tick, for fairness; a super-packet counts as one.
const LISTENER_SHARE: usize = 512;
/// Maximum buffers per session socket and tick.
const TARGET_SHARE: usize = 64;
/// Maximum ICMP errors read per socket and tick.
const ERRORS: usize = 16;
/// Maximum sockets of ended sessions that wait for the next flush.
const LEAVING: usize = 64;
/// Maximum sessions that expire per tick, so that ten thousand expiring together do not stall the worker.
const EXPIRIES: usize = 256;

/// Maximum sessions whose kernel counters are read before one of them is evicted.
const LOOKS: u8 = 16;

/// UDP sessions of one worker, including sessions between UDP and TCP.
pub struct Engine {
    pub(super) datapath: Datapath,
    pub(super) rx: Rx,
    pub(super) tx: Tx,
    pub(super) sockets: Sockets,
    pub(super) listeners: Slab<Listener>,
    pub(super) rules: Slab<RuleState>,
    pub(super) sessions: SessionTable,
    pub(super) scratch: Box<[u8]>,
    /// Bytes copied into `tx` since the last flush.
    pub(super) copied: u64,
    pub(super) offload: Option<Offload>,
    /// Sockets of ended sessions, closed once their queued datagrams have been sent.
    pub(super) leaving: Vec<SocketId>,
    pub(super) unanswered: Unanswered,
    /// Lower bound on the time of the next timer.
    due: Option<u64>,
    pub(super) draining: bool,
    complained: bool,
}

impl Engine {
    pub fn new(datapath: Datapath) -> Self {
        Self {
            datapath,
            rx: Rx::new(datapath),
            tx: Tx::new(datapath),
            sockets: Sockets::default(),
            listeners: Slab::new(),
            rules: Slab::new(),
            sessions: SessionTable::default(),
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            copied: 0,
            offload: None,
            leaving: Vec::with_capacity(LEAVING + 2),
            unanswered: Unanswered::default(),
            due: None,
            draining: false,
            complained: false,
        }
    }

    /// Handles an event whose token has the bit [`TOKENS`]. Datagrams to send wait for [`Engine::flush`].
    pub fn on_event(&mut self, event: &Event, tick: &mut UdpTick<'_>) {
        if !self.rx.has_room() {
            self.flush();
        }
        let at = slot_of(event.token);
        match event.token & 3 {
            LISTENER => match self.listeners.get(at as usize).map(|listener| &listener.kind) {
                Some(SocketKind::Datagrams(socket)) => {
                    let socket = *socket;
                    self.receive_from_clients(Key::of_listener(at), socket, tick);
                }
                Some(SocketKind::Streams { .. }) => self.accept(at, tick),
                None => {}
            },
            OUTWARD => match self.sessions.get(at).map(|session| &session.outward) {
                Some(Outward::Datagrams(socket)) => {
                    self.receive_from_target::<false>(at, *socket, event, tick);
                }
                Some(Outward::Addressed(addressed)) => match addressed.route {
                    Route { socket, to: None, .. } => {
                        self.receive_from_target::<false>(at, socket, event, tick);
                    }
                    Route { socket, .. } => self.receive_from_target::<true>(at, socket, event, tick),
                },
                Some(Outward::Stream(_)) => self.on_target_stream(at, event, tick),
                None => {}
            },
            INWARD => {
                match self.sessions.get(at).map(|session| (&session.inward, session.inward.own_socket())) {
                    Some((Inward::Datagrams { key, .. }, Some(socket))) => {
                        let key = *key;
                        self.receive_from_clients(key, socket, tick);
                    }
                    Some((Inward::Stream(_), _)) => self.on_client_stream(at, event, tick),
                    _ => {}
                }
            }
            _ => {}
        }
    }

    /// Sends the datagrams of all events since the last call. Call once per wake-up.
    pub fn flush(&mut self) {
        self.send_queued();
        self.rx.reset();
    }

    /// Runs timers: idle sessions, connect timeouts, paused listeners. Returns true if something has changed.
    pub fn on_tick(&mut self, tick: &mut UdpTick<'_>) -> bool {
        if self.due.is_none_or(|due| tick.now < due) {
            return false;
        }
        let mut budget = EXPIRIES;
        for slot in 0..self.rules.capacity() {
            while let Some(at) = self.expired(slot, tick.now) {
                if budget == 0 {
                    self.send_queued();
                    return true;
                }
                budget -= 1;
                // The kernel may have forwarded data since the last check.
                if self.book(at, tick) {
                    continue;
                }
                match self.sessions.get(at).map(|session| session.stage) {
                    Some(SessionStage::Connecting) => self.try_next_target(at, TargetFailure::Timeout, tick),
                    Some(SessionStage::Closing) => self.end(at, EndReason::Finished, tick),
                    // During a drain, the session may have reached the drain's shorter timeout.
                    _ if self.draining => self.end(at, EndReason::Shutdown, tick),
                    _ => self.end(at, EndReason::Idle, tick),
                }
            }
        }
        self.seek_answers(tick);
        self.send_queued();
        let resumed = self.resume_listeners(tick);
        let lists = self.rules.iter().flat_map(|(_, state)| state.lists.all());
        let expiries = lists.filter_map(|list| self.sessions.due(list));
        self.due = expiries.chain(resumed).chain(self.unanswered.due()).min();
        budget < EXPIRIES
    }

    /// Time at which [`Engine::on_tick`] next has work, on the clock of [`UdpTick::now`].
    pub fn next_timeout(&self) -> Option<u64> {
        let offload = self.offload.as_ref().and_then(Offload::due);
        [self.due, offload].into_iter().flatten().min()
    }

    pub fn active(&self) -> usize {
        self.sessions.len()
    }

    pub fn rx_stats(&self) -> &RxStats {
        self.rx.stats()
    }

    pub fn tx_stats(&self) -> &TxStats {
        self.tx.stats()
    }

    /// Receives from a socket to which clients send. `key` contains the listener and, if the socket is bound
    /// to only one address, the destination address. Returns true if more datagrams may be queued.
    pub(super) fn receive_from_clients(
        &mut self,
        key: Key,
        socket: SocketId,
        tick: &mut UdpTick<'_>,
    ) -> bool {
        let mut share = LISTENER_SHARE;
        while self.rx.has_room() {
            let Some(listening) = self.sockets.get(socket) else { return false };
            let Ok(received) = self.rx.recv(listening) else { return false };
            if let Some(offload) = &mut self.offload {
                offload.received(socket, received, received.emptied, &self.rx);
            }
            for index in received.first..received.first + received.count {
                self.send_to_target(key, index, tick);
            }
            share = share.saturating_sub(received.count);
            if !received.more || share == 0 {
                return received.more;
            }
        }
        true
    }

    /// Forwards a received buffer to the target. All of it is from one client, so the session is looked up
    /// only once.
    fn send_to_target(&mut self, key: Key, index: usize, tick: &mut UdpTick<'_>) {
        let Some(buffer) = self.rx.buffer(index) else { return };
        let key = Key { client: buffer.from, local: key.local.or(buffer.local), ..key };
        let Some(at) = self.sessions.find(&key).or_else(|| self.open(key, tick)) else {
            let dropped = self.rx.buffer(index).map_or(0, |buffer| buffer.count());
            // `None` if a drain has closed the listener.
            if let Some(listener) = self.listeners.get(key.listener as usize) {
                self.rules[listener.rule as usize].counters.dropped_datagrams += dropped as u64;
            }
            return;
        };
        let (Some(buffer), Some(session)) = (self.rx.buffer(index), self.sessions.get_mut(at)) else {
            return;
        };
        let state = &mut self.rules[session.rule as usize];
        let (mut bytes, mut datagrams) = (buffer.bytes.len() as u64, 0);
        let mut gate = Gate::new(session.pace.as_deref(), UP, tick.now);
        match &mut session.outward {
            Outward::Datagrams(socket) => {
                let route = connected(*socket);
                for datagram in buffer.datagrams() {
                    if gate.admits(datagram) {
                        self.tx.push(&route, &[], self.rx.span(datagram), 0);
                        datagrams += 1;
                    }
                }
                bytes -= gate.bytes;
            }
            Outward::Addressed(addressed) => {
                for datagram in buffer.datagrams() {
                    if gate.admits(datagram) {
                        self.tx.push(&addressed.route, &addressed.header, self.rx.span(datagram), 0);
                        datagrams += 1;
                    }
                }
                bytes -= gate.bytes;
            }
            Outward::Stream(stream) => match stream.send(buffer.datagrams().filter(|one| gate.admits(one))) {
                Ok(sent) => {
                    (bytes, datagrams) = (sent.bytes, sent.datagrams);
                    state.counters.dropped_datagrams += sent.dropped;
                    stream.watch(outward_token(at), tick.poller);
                }
                Err(_) => return self.end(at, EndReason::TargetReset, tick),
            },
        }
        state.counters.limited_datagrams += gate.limited;
        session.to_target += bytes;
        // Data that waits for a connect is counted for the target that accepts the connection.
        state.moved(session.choice.filter(|_| session.stage != SessionStage::Connecting), bytes, 0);
        state.counters.to_target_datagrams += datagrams;
        self.sessions.touch(at, tick.now, &mut state.lists);
    }

    /// Receives from the target. With `ANY_PORT`, the socket is not connected, and the target may send from
    /// other ports.
    fn receive_from_target<const ANY_PORT: bool>(
        &mut self,
        at: u32,
        socket: SocketId,
        event: &Event,
        tick: &mut UdpTick<'_>,
    ) {
        let refused = event.error && self.is_refused(socket);
        let mut share = TARGET_SHARE;
        while self.rx.has_room() {
            let Some(receiving) = self.sockets.get(socket) else { return };
            let received = match self.rx.recv(receiving) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return self.end_refused(at, tick);
                }
                Err(_) => break,
            };
            if let Some(offload) = &mut self.offload {
                offload.received(socket, received, false, &self.rx);
            }
            let Some(session) = self.sessions.get_mut(at) else { return };
            let state = &mut self.rules[session.rule as usize];
            let (mut bytes, mut datagrams, mut broken) = (0, 0, false);
            let mut gate = Gate::new(session.pace.as_deref(), DOWN, tick.now);
            for buffer in self.rx.buffers(received) {
                if ANY_PORT && buffer.from.ip().to_canonical() != session.tried.ip().to_canonical() {
                    continue;
                }
                match &mut session.inward {
                    Inward::Datagrams { reply, .. } => {
                        for datagram in buffer.datagrams() {
                            if gate.admits(datagram) {
                                self.tx.push(reply, &[], self.rx.span(datagram), 0);
                                datagrams += 1;
                            }
                        }
                        bytes += buffer.bytes.len() as u64;
                    }
                    Inward::Stream(stream) => {
                        match stream.send(buffer.datagrams().filter(|one| gate.admits(one))) {
                            Ok(sent) => {
                                bytes += sent.bytes;
                                datagrams += sent.datagrams;
                                state.counters.dropped_datagrams += sent.dropped;
                            }
                            Err(_) => broken = true,
                        }
                    }
                }
            }
            state.counters.limited_datagrams += gate.limited;
            if matches!(session.inward, Inward::Datagrams { .. }) {
                bytes -= gate.bytes;
            }
            if broken {
                return self.end(at, EndReason::ClientReset, tick);
            }
            if received.count > 0 && (!ANY_PORT || datagrams > 0) {
                if !std::mem::replace(&mut session.answered, true)
                    && let Some(choice) = session.choice
                {
                    tick.worker.answered(state.key, choice);
                }
                session.to_client += bytes;
                state.moved(session.choice, 0, bytes);
                state.counters.to_client_datagrams += datagrams;
                if let Inward::Stream(stream) = &mut session.inward {
                    stream.watch(inward_token(at), tick.poller);
                }
                self.sessions.touch(at, tick.now, &mut state.lists);
            }
            share = share.saturating_sub(received.count);
            if !received.more || share == 0 {
                break;
            }
        }
        if refused {
            self.end_refused(at, tick);
        }
    }

    /// True if an ICMP port unreachable (RFC 792) or ICMPv6 port unreachable (RFC 4443 section 3.1) is
    /// queued. Other errors may be temporary, for example while a router reboots, or may concern only one
    /// oversized datagram.
    fn is_refused(&self, socket: SocketId) -> bool {
        let Some(socket) = self.sockets.get(socket) else { return false };
        let mut refused = false;
        let _ = socket.read_errors(ERRORS, |QueuedError { icmp_type, code, v6, .. }| {
            refused |= if v6 { (icmp_type, code) == (1, 4) } else { (icmp_type, code) == (3, 3) };
        });
        refused
    }

    fn end_refused(&mut self, at: u32, tick: &mut UdpTick<'_>) {
        // The kernel may have forwarded responses.
        self.book(at, tick);
        let answered = self.sessions.get(at).is_some_and(|session| session.answered);
        self.end(at, if answered { EndReason::TargetReset } else { EndReason::ConnectFailed }, tick);
    }

    /// Starts a session for a new UDP client. Refusals are counted, not reported: anyone can forge thousands
    /// of sources per second.
    #[cold]
    fn open(&mut self, key: Key, tick: &mut UdpTick<'_>) -> Option<u32> {
        if self.draining {
            return None;
        }
        let Listener { rule, port, kind: SocketKind::Datagrams(socket), .. } =
            self.listeners.get(key.listener as usize)?
        else {
            return None;
        };
        let (rule, port) = (*rule, *port);
        let reply = Route { to: Some(key.client), from: key.local, ..connected(*socket) };
        let state = &mut self.rules[rule as usize];
        if !tick.worker.permits(state.key, key.client.ip()) {
            state.counters.count_ends(EndReason::Denied, 1);
            return None;
        }
        let hops = tick.worker.hops(state.key, key.client);
        let admitted = hops.and_then(|hops| {
            tick.worker.admit_client(state.key, key.client.ip(), tick.now)?;
            Ok(hops)
        });
        let hops = match admitted {
            Ok(hops) => hops,
            Err(reason) => {
                state.counters.count_ends(reason, 1);
                return None;
            }
        };
        let arrival = Arrival { rule, client: key.client, port, hops };
        if !self.make_room(rule, tick) {
            tick.worker.dismiss_client(self.rules[rule as usize].key, key.client.ip());
            return None;
        }
        let Some((reached, choice)) = self.reach(arrival, key.local, tick) else {
            let state = &mut self.rules[rule as usize];
            tick.worker.dismiss_client(state.key, key.client.ip());
            tick.worker.leave(state.key);
            state.counters.count_ends(EndReason::ConnectFailed, 1);
            return None;
        };
        let inward = Inward::Datagrams { key, reply };
        let at = self.begin(Session::new(arrival, inward, reached, choice, tick.now), tick);
        self.send_across(at, tick.now);
        Some(at)
    }

    /// Counts a new session of a rule, evicting the longest idle session if necessary.
    fn make_room(&mut self, rule: u32, tick: &mut UdpTick<'_>) -> bool {
        let key = self.rules[rule as usize].key;
        let admission = tick.worker.enter(key);
        if admission == Admission::Entered {
            return true;
        }
        // The kernel may have forwarded data for some sessions since the last check.
        let mut looks = LOOKS;
        let idle = loop {
            let lists = (admission == Admission::RuleFull).then(|| &self.rules[rule as usize].lists);
            let of_all = self.rules.iter().map(|(_, state)| &state.lists).filter(|_| lists.is_none());
            let Some(idle) = self.sessions.longest_idle(lists.into_iter().chain(of_all)) else {
                return false;
            };
            if looks == 0 || !self.book(idle, tick) {
                break idle;
            }
            looks -= 1;
        };
        self.end(idle, EndReason::Evicted, tick);
        tick.worker.enter(key) == Admission::Entered
    }

    /// Opens a socket towards one of the rule's targets, watched under the token of the next session. `asked`
    /// is the address that the client sent to, if the listener has several.
    pub(super) fn reach(
        &mut self,
        arrival: Arrival,
        asked: Option<IpAddr>,
        tick: &mut UdpTick<'_>,
    ) -> Option<(Reached, ChosenTarget)> {
        let Arrival { rule, client, port, .. } = arrival;
        let next = self.sessions.next();
        let key = self.rules[rule as usize].key;
        for _ in 0..ATTEMPTS {
            let choice = tick.worker.choose(key, client, port, &[])?;
            match self.open_towards(arrival, choice, next, asked, tick) {
                Ok(reached) => return Some((reached, choice)),
                Err(error) => {
                    let unreachable = outgoing::is_unreachable(&error);
                    let failure = unreachable.then(|| TargetFailure::of(&error));
                    self.rules[rule as usize].failed(choice, failure);
                    tick.worker.release(key, choice, unreachable);
                    self.complain(&error);
                    if !unreachable {
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Opens a socket towards this target for the session in slot `at`; see [`Engine::reach`] for `asked`.
    pub(super) fn open_towards(
        &mut self,
        arrival: Arrival,
        choice: ChosenTarget,
        at: u32,
        asked: Option<IpAddr>,
        tick: &mut UdpTick<'_>,
    ) -> io::Result<Reached> {
        let token = outward_token(at);
        let header = self.header(arrival, asked);
        let Arrival { rule, client, hops, .. } = arrival;
        let state = &self.rules[rule as usize];
        if let Protocol::UdpToTcp { framed } = state.rule.protocol {
            let (socket, link) = outgoing::watched_stream(state, arrival, choice.address, token, tick)?;
            return Ok((Outward::Stream(Box::new(Stream::new(socket, framed, true))), link));
        }
        let leads_here = tick.worker.approach(state.key, choice.address, asked, tick.now)?;
        let socket = outgoing::datagrams(&state.rule, client, choice.address, self.datapath)?;
        tick.poller.add(&socket, token)?;
        let local =
            leads_here.then(|| outgoing::source_of(&socket, &state.rule, choice.address)).transpose()?;
        let link = local.map(|local| tick.worker.circles().link(SocketProtocol::Udp, local, hops));
        let any_port = state.rule.any_port.then_some(choice.address);
        Ok((addressed(self.sockets.insert(socket), any_port, header), link))
    }

    /// PROXY header for each datagram to the target; empty if the rule sends no headers. See
    /// [`Engine::reach`] for `asked`.
    pub(super) fn header(
        &self,
        Arrival { rule, client, port, .. }: Arrival,
        asked: Option<IpAddr>,
    ) -> Vec<u8> {
        let Rule { protocol: Protocol::Udp, send_proxy: Some(_), .. } = &self.rules[rule as usize].rule
        else {
            return Vec::new();
        };
        let is_its_own = |listener: &Listener| (listener.rule, listener.port) == (rule, port);
        let listener = self.listeners.iter().map(|(_, listener)| listener).find(|one| is_its_own(one));
        let listening = listener.map_or(client, |listener| listener.address);
        let asked = SocketAddr::new(asked.unwrap_or(listening.ip()), listening.port());
        proxy_protocol::encode_for_datagrams(canonical(client), canonical(asked))
    }

    pub(super) fn begin(&mut self, mut session: Session, tick: &mut UdpTick<'_>) -> u32 {
        let state = &mut self.rules[session.rule as usize];
        if let Some(choice) = session.choice {
            state.took(choice);
        }
        session.pace = Pace::of(state.rates.as_ref());
        state.counters.active += 1;
        state.counters.accepted += 1;
        let rule = session.rule;
        let at = self.sessions.insert(session, &mut state.lists);
        self.expect(rule);
        self.await_answer(at, tick);
        at
    }

    pub(super) fn end(&mut self, at: u32, reason: EndReason, tick: &mut UdpTick<'_>) {
        let Some(rule) = self.sessions.get(at).map(|session| session.rule) else { return };
        let state = &mut self.rules[rule as usize];
        let Some(mut session) = self.sessions.remove(at, &mut state.lists) else { return };
        // Remove the record before the socket is closed, because another session may then get the same port.
        session.link = None;
        if let (Some(offload), Some(across)) = (&mut self.offload, session.across.take()) {
            state.forwarded_across(&mut session, offload.release(*across));
        }
        state.counters.active -= 1;
        state.counters.count_ends(reason, 1);
        let failed = !session.answered && matches!(reason, EndReason::ConnectFailed | EndReason::TargetReset);
        tick.worker.dismiss_client(state.key, session.client.ip());
        tick.worker.leave(state.key);
        if let Some(choice) = session.choice {
            // For UDP, only ICMP reports a failure; a TCP target that closes without sending data counts as
            // having refused.
            state.left(choice, failed.then_some(TargetFailure::Refused));
            tick.worker.release(state.key, choice, failed);
        }
        tick.worker.ended(ConnectionReport {
            rule: state.rule.id.clone(),
            client: session.client.into(),
            target: Some(session.tried.into()),
            to_target: session.to_target,
            to_client: session.to_client,
            lived: Duration::from_millis(tick.now.saturating_sub(session.opened)),
            reason,
        });
        if state.removed && state.counters.active == 0 {
            self.rules.remove(rule as usize);
        }
        let outward = session.outward.socket();
        // If an event of the ended session is still pending in this wake-up, its token leads to no session, or to
        // a new one without data.
        self.leaving.extend(outward.into_iter().chain(session.inward.own_socket()));
        if self.is_leaving_full() {
            self.send_queued();
        }
    }

    pub(super) fn is_leaving_full(&self) -> bool {
        self.leaving.len() >= LEAVING
    }

    /// Adjusts the timer to the first sessions in a rule's lists.
    pub(super) fn expect(&mut self, rule: u32) {
        let lists = self.rules[rule as usize].lists;
        let due = lists.all().into_iter().filter_map(|list| self.sessions.due(list)).min();
        self.expect_at(due);
    }

    pub(super) fn expect_at(&mut self, due: Option<u64>) {
        self.due = [self.due, due].into_iter().flatten().min();
    }

    /// Sends queued datagrams, then closes the sockets that were waiting for that. The arena keeps data that
    /// has not been routed yet.
    pub(super) fn send_queued(&mut self) {
        self.tx.flush(&mut self.sockets, &self.rx);
        if let Some(offload) = &mut self.offload {
            offload.sockets.flushed(&self.sockets, &offload.flows);
        }
        self.copied = 0;
        for socket in self.leaving.drain(..) {
            self.sockets.remove(socket);
        }
    }

    pub(super) fn complain(&mut self, error: &io::Error) {
        if self.complained {
            return;
        }
        self.complained = true;
        let remedy = if is_exhaustion(error) {
            "raise the limit on open files (ulimit -n)"
        } else if error.kind() == io::ErrorKind::AddrInUse {
            "no local port is free; widen net.ipv4.ip_local_port_range, or lower `idle` or `max_connections` of UDP rules"
        } else {
            "check the rule's targets, source, device and mark, and the routes to them"
        };
        tracing::warn!(%error, "cannot open a socket towards a target: {remedy}; logged once");
    }

    fn expired(&self, slot: usize, now: u64) -> Option<u32> {
        let lists = self.rules.get(slot)?.lists;
        let due = |list: &&List| self.sessions.due(list).is_some_and(|due| due <= now);
        lists.all().into_iter().find(due)?.head()
    }
}
