//! Sessions that the kernel forwards itself (`turnpike_offload`): a flow each way, from a session's first datagram to its end, and what the
//! two have counted. What they leave to user space takes its usual way, in the same order.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use turnpike_net::{Rx, SocketId, Sockets, UdpSocket, poll::Event, rx::Received};
use turnpike_offload::{Counted, DrainedSockets, Flows, GroControl, Installed, Kind, NewFlow, State, now_ns};
use turnpike_wire::address::canonical;

use super::{
    Engine, RuleKey, TOKENS, Tick,
    engine::{narrow, socket_of},
    rules::RuleState,
    sessions::{Inward, Outward, Session},
};

/// Each session's counters are read once in ten of these, in milliseconds.
const SWEEP_MS: u64 = 100;
const SWEEPS: usize = 10;

/// One worker's part of the kernel path.
pub(super) struct Offload {
    flows: Flows,
    emptied: DrainedSockets,
    /// `None` where that makes no difference to the program.
    gathering: Option<GroControl>,
    /// [`now_ns`] when the worker's clock began.
    base_ns: u64,
    /// Whether sessions get flows.
    is_active: bool,
    /// Sessions that have flows.
    open: usize,
    swept: u64,
    sweep: usize,
}

/// What a session has in the kernel.
pub(super) struct Across {
    to_target: (Installed, State),
    to_client: (Installed, State),
    outward: SocketId,
    /// When the flows end if nobody extends them.
    expires: u64,
}

impl Offload {
    fn new(flows: Flows, now: u64, is_active: bool) -> Self {
        let base_ns = now_ns().saturating_sub(now.saturating_mul(1_000_000));
        let emptied = DrainedSockets::new(flows.gap_ns());
        let gathering = (!flows.come_before_gro()).then(GroControl::default);
        Self { flows, emptied, gathering, base_ns, is_active, open: 0, swept: now, sweep: 0 }
    }

    /// When there are counters to be read.
    pub(super) fn due(&self) -> Option<u64> {
        (self.open > 0).then_some(self.swept + SWEEP_MS)
    }

    /// What a receive call has brought through this socket, which is still to be sent. `empties` says whether it shows that there was no more.
    pub(super) fn received(&mut self, socket: SocketId, received: Received, empties: bool, rx: &Rx) {
        let mut gathering = self.gathering.as_mut().filter(|_| self.emptied.is_needed(socket.0));
        let mut is_bulk = false;
        for buffer in rx.buffers(received) {
            is_bulk |= buffer.count() > 1;
            if let Some(gathering) = &mut gathering {
                gathering.saw(socket.0, buffer.count(), true);
            }
        }
        if is_bulk {
            self.emptied.bulk(socket.0);
        }
        if empties {
            self.emptied.received(socket.0);
        }
    }

    /// All that was received has been sent.
    pub(super) fn flushed(&mut self, sockets: &Sockets) {
        self.emptied.flushed(&self.flows);
        if let Some(gathering) = &mut self.gathering {
            gathering.end_tick(|id| sockets.set_gro(SocketId(id), false));
        }
    }

    /// Nothing goes across from now on: all sockets gather.
    fn gather(&mut self, sockets: &Sockets) {
        if let Some(gathering) = &mut self.gathering {
            gathering.end(|id| _ = sockets.set_gro(SocketId(id), true));
        }
    }

    /// A socket is about to be closed, its flows are gone.
    pub(super) fn forget(&mut self, SocketId(socket): SocketId) {
        if let Some(gathering) = &mut self.gathering {
            gathering.forget(socket);
        }
        if let Some(number) = self.emptied.forget(socket) {
            self.flows.give_back_socket(number);
        }
    }

    /// Removes the flows of a session; what they have counted since the last time.
    pub(super) fn release(&mut self, across: Across) -> [Counted; 2] {
        self.open -= 1;
        self.forget(across.outward);
        [across.to_target, across.to_client].map(|flow| self.remove(flow))
    }

    /// The flows of a session whose client asks `asked`, and which reaches `target` from `from`. `None` where there is no room, which is
    /// counted, or where an address needs an interface beside it, for which a flow has no place.
    fn install(
        &mut self,
        [client, asked, from, target]: [SocketAddr; 4],
        [listener, outward]: [SocketId; 2],
        expires: u64,
    ) -> Option<Box<Across>> {
        let is_odd = |address: &SocketAddr| match address.ip() {
            IpAddr::V6(ip) => ip.is_unspecified() || ip.is_unicast_link_local(),
            IpAddr::V4(ip) => ip.is_unspecified(),
        };
        if [client, asked, from, target].iter().any(is_odd) {
            return None;
        }
        let listener = listener.0;
        let [of_client, of_target] = [listener, outward.0].map(|socket| {
            let slot = self.emptied.slot(socket, || self.flows.socket());
            // What came until now may be on its way.
            self.emptied.touch(socket);
            slot
        });
        let there = of_client.and_then(|socket| self.flow([client, asked, from, target], socket, expires));
        let back = there.as_ref().and(of_target);
        let back = back.and_then(|socket| self.flow([target, from, asked, client], socket, expires));
        match (there, back) {
            (Some(to_target), Some(to_client)) => {
                self.open += 1;
                Some(Box::new(Across { to_target, to_client, outward, expires }))
            }
            (there, _) => {
                if let Some(there) = there {
                    self.remove(there);
                }
                self.forget(outward);
                None
            }
        }
    }

    fn flow(
        &mut self,
        [remote, local, from, to]: [SocketAddr; 4],
        socket: u32,
        expires: u64,
    ) -> Option<(Installed, State)> {
        let state = self.flows.state().ok()?;
        let (kind, expires_ns) = (Kind::Forward, self.ns(expires));
        let new = NewFlow { kind, remote, local, channel: None, from, to, state: &state, socket, expires_ns };
        match self.flows.install(&new) {
            Ok(flow) => Some((flow, state)),
            Err(_) => {
                self.flows.give_back_state(state);
                None
            }
        }
    }

    fn remove(&mut self, (flow, state): (Installed, State)) -> Counted {
        self.flows.remove(flow);
        self.flows.give_back_state(state)
    }

    /// What has been counted since the last time. Flows of a session that lives are extended in time, also where user space alone has heard of
    /// it, which was `heard`.
    fn counted(&mut self, across: &mut Across, heard: u64, patience: u64, now: u64) -> [Counted; 2] {
        let counted =
            [&mut across.to_target, &mut across.to_client].map(|(_, state)| self.flows.counted(state));
        let lives = now.saturating_sub(heard) <= patience || counted.iter().any(|counted| !counted.is_zero());
        if lives && across.expires < now.saturating_add(patience).saturating_add(patience / 2) {
            across.expires = now.saturating_add(patience.saturating_mul(2));
            let expires_ns = self.ns(across.expires);
            for (flow, _) in [&mut across.to_target, &mut across.to_client] {
                // Where it fails, the flow ends early and its datagrams go up.
                let _ = self.flows.extend(flow, expires_ns);
            }
        }
        counted
    }

    fn ns(&self, ms: u64) -> u64 {
        self.base_ns.saturating_add(ms.saturating_mul(1_000_000))
    }
}

impl Engine {
    /// Sessions of [`Engine::offload_rule`] go across the kernel from now on; `is_active` unless the program is still to be attached.
    pub(crate) fn use_kernel(&mut self, flows: Flows, now: u64, is_active: bool) {
        self.offload = Some(Offload::new(flows, now, is_active));
    }

    /// The kernel forwards nothing from now on, until [`Engine::resume_across`].
    pub(crate) fn suspend_across(&mut self, tick: &mut Tick<'_>) {
        if let Some(offload) = &mut self.offload {
            offload.is_active = false;
            offload.gather(&self.sockets);
        }
        self.release_all(tick);
    }

    /// The kernel forwards what it can from now on.
    pub(crate) fn resume_across(&mut self, now: u64) {
        let Some(offload) = &mut self.offload else { return };
        offload.is_active = true;
        for at in 0..self.sessions.capacity() {
            self.send_across(narrow(at), now);
        }
    }

    /// Whether the kernel forwards sessions.
    pub(crate) fn goes_across(&self) -> bool {
        self.offload.is_some()
    }

    /// The kernel forwards sessions of this rule, which was just added, where it can.
    pub(crate) fn offload_rule(&mut self, key: RuleKey) {
        for (_, state) in self.rules.iter_mut().filter(|(_, state)| state.key == key) {
            state.goes_across = true;
        }
    }

    /// Before the worker waits for events: how long at most.
    pub(crate) fn before_wait(&mut self) -> Option<Duration> {
        self.offload.as_mut().and_then(|offload| offload.emptied.before_wait(now_ns()))
    }

    /// What the worker was told, before any of it is handled; `are_all` says that there is nothing else ready. True if the kernel has
    /// forwarded something.
    pub(crate) fn after_wait(&mut self, events: &[Event], are_all: bool, tick: &mut Tick<'_>) -> bool {
        let Some(Offload { flows, emptied, .. }) = &mut self.offload else { return false };
        let of_ours = events.iter().filter(|event| event.token & TOKENS != 0);
        let ready = of_ours.filter_map(|event| socket_of(&self.listeners, &self.sessions, event.token));
        let lost = self.rx.stats().kernel_drops;
        let backlog = |socket| self.sockets.get(SocketId(socket)).map_or(0, UdpSocket::backlog);
        emptied.after_wait(now_ns(), ready.map(|socket| socket.0), are_all, (lost, backlog), flows);
        self.sweep(tick)
    }

    /// Has the kernel forward a session, if it may and does not yet.
    pub(super) fn send_across(&mut self, at: u32, now: u64) {
        let (Some(offload), Some(session)) = (&mut self.offload, self.sessions.get_mut(at)) else { return };
        let state = &self.rules[session.rule as usize];
        if !state.goes_across || !offload.is_active || session.across.is_some() {
            return;
        }
        let (Inward::Datagrams { key, reply }, Outward::Datagrams(outward)) =
            (&session.inward, &session.outward)
        else {
            return;
        };
        let sockets = [reply.socket, *outward];
        let [Some(listening), Some(sending)] = sockets.map(|socket| self.sockets.get(socket)) else { return };
        let Ok(from) = sending.source() else { return };
        let listening = listening.local_addr();
        let asked = SocketAddr::new(key.local.unwrap_or(listening.ip()), listening.port());
        let ends = [session.client, asked, from, session.tried].map(canonical);
        let expires = now.saturating_add(state.lists.active.patience.saturating_mul(2));
        session.across = offload.install(ends, sockets, expires);
    }

    /// Counts what the kernel has forwarded of a session since the last look, which is a sign of life. True if there was something.
    pub(super) fn book(&mut self, at: u32, tick: &mut Tick<'_>) -> bool {
        let heard = self.sessions.stamp(at);
        let (Some(offload), Some(session)) = (&mut self.offload, self.sessions.get_mut(at)) else {
            return false;
        };
        let Some(across) = &mut session.across else { return false };
        let state = &mut self.rules[session.rule as usize];
        let counted = offload.counted(across, heard, state.lists.active.patience, tick.now);
        let [to_target, to_client] = &counted;
        if to_target.is_zero() && to_client.is_zero() {
            return false;
        }
        if let (Some(gathering), Inward::Datagrams { reply, .. }) = (&mut offload.gathering, &session.inward)
        {
            gathering.went_across(reply.socket.0, to_target.datagrams);
            gathering.went_across(across.outward.0, to_client.datagrams);
        }
        if !to_client.is_zero()
            && !std::mem::replace(&mut session.answered, true)
            && let Some(choice) = session.choice
        {
            tick.worker.answered(state.key, choice);
        }
        state.forwarded_across(session, counted);
        self.sessions.touch(at, tick.now, &mut state.lists);
        true
    }

    /// All sessions take the way through user space from now on.
    pub(super) fn recall(&mut self, tick: &mut Tick<'_>) {
        if let Some(offload) = &mut self.offload {
            offload.gather(&self.sockets);
        }
        self.release_all(tick);
        self.offload = None;
    }

    fn release_all(&mut self, tick: &mut Tick<'_>) {
        for at in 0..self.sessions.capacity() {
            let at = narrow(at);
            self.book(at, tick);
            let (Some(offload), Some(session)) = (&mut self.offload, self.sessions.get_mut(at)) else {
                continue;
            };
            let Some(across) = session.across.take() else { continue };
            self.rules[session.rule as usize].forwarded_across(session, offload.release(*across));
        }
    }

    /// Reads the counters of some sessions, and has sockets gather or not.
    fn sweep(&mut self, tick: &mut Tick<'_>) -> bool {
        let Some(offload) = &mut self.offload else { return false };
        if tick.now < offload.swept + SWEEP_MS {
            return false;
        }
        offload.swept = tick.now;
        if let Some(gathering) = &mut offload.gathering {
            gathering.judge(tick.now, |id| _ = self.sockets.set_gro(SocketId(id), true));
        }
        if offload.open == 0 {
            return false;
        }
        offload.sweep = (offload.sweep + 1) % SWEEPS;
        let some = (offload.sweep..self.sessions.capacity()).step_by(SWEEPS);
        some.fold(false, |any, at| self.book(narrow(at), tick) | any)
    }
}

impl RuleState {
    /// Counts what the kernel has forwarded of a session.
    pub(super) fn forwarded_across(&mut self, session: &mut Session, [to_target, to_client]: [Counted; 2]) {
        session.to_target += to_target.bytes;
        session.to_client += to_client.bytes;
        self.moved(session.choice, to_target.bytes, to_client.bytes);
        self.counters.to_target_datagrams += to_target.datagrams;
        self.counters.to_client_datagrams += to_client.datagrams;
        self.counters
            .kernel
            .add([to_target.datagrams, to_client.datagrams], [to_target.bytes, to_client.bytes]);
    }
}
