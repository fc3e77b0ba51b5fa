//! Sessions forwarded by the kernel (`turnpike_offload`): each has a flow per direction, with counters, from
//! its first datagram until it ends. Datagrams that user space handles keep their order.

use std::{net::SocketAddr, time::Duration};

use turnpike_net::Event;
use turnpike_offload::{Counted, Flows};
use turnpike_wire::address::canonical;

use super::{
    Engine, RuleKey, TOKENS, UdpTick,
    kernel_flows::Offload,
    rule_state::{RuleState, socket_of},
    sessions::{Inward, Outward, Session},
    tokens::narrow,
};

impl Engine {
    /// Offloads sessions of [`Engine::offload_rule`]; `is_active` is false until the program is attached.
    pub(crate) fn use_kernel(&mut self, flows: Flows, now: u64, is_active: bool) {
        self.offload = Some(Offload::new(flows, now, is_active));
    }

    /// Stops kernel forwarding until [`Engine::resume_across`].
    pub(crate) fn suspend_across(&mut self, tick: &mut UdpTick<'_>) {
        if let Some(offload) = &mut self.offload {
            offload.is_active = false;
            offload.sockets.end(&self.sockets);
        }
        self.release_all(tick);
    }

    pub(crate) fn resume_across(&mut self, now: u64) {
        let Some(offload) = &mut self.offload else { return };
        offload.is_active = true;
        for at in 0..self.sessions.capacity() {
            self.send_across(narrow(at), now);
        }
    }

    pub(crate) fn goes_across(&self) -> bool {
        self.offload.is_some()
    }

    /// Lets the kernel forward sessions of a rule that was just added.
    pub(crate) fn offload_rule(&mut self, key: RuleKey) {
        for (_, state) in self.rules.iter_mut().filter(|(_, state)| state.key == key) {
            state.goes_across = true;
        }
    }

    /// Maximum time to wait for events.
    pub(crate) fn before_wait(&mut self) -> Option<Duration> {
        self.offload.as_mut().and_then(|offload| offload.sockets.before_wait())
    }

    /// Records the events of a wake-up before they are handled; `are_all` is true if nothing else is ready.
    /// Returns true if the kernel has forwarded something.
    pub(crate) fn after_wait(&mut self, events: &[Event], are_all: bool, tick: &mut UdpTick<'_>) -> bool {
        let Some(Offload { flows, sockets, .. }) = &mut self.offload else { return false };
        let of_ours = events.iter().filter(|event| event.token & TOKENS != 0);
        let ready = of_ours.filter_map(|event| socket_of(&self.listeners, &self.sessions, event.token));
        sockets.after_wait(ready, are_all, self.rx.stats().kernel_drops, &self.sockets, flows);
        self.sweep(tick)
    }

    /// Installs kernel flows for a session if they are allowed and not installed yet.
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

    /// Counts data forwarded by the kernel since the last read and refreshes the session; returns true if
    /// there was any.
    pub(super) fn book(&mut self, at: u32, tick: &mut UdpTick<'_>) -> bool {
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
        if let Inward::Datagrams { reply, .. } = &session.inward {
            offload.sockets.went_across(reply.socket, to_target.datagrams);
            offload.sockets.went_across(across.outward, to_client.datagrams);
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

    /// Moves all sessions to user space.
    pub(super) fn recall(&mut self, tick: &mut UdpTick<'_>) {
        if let Some(offload) = &mut self.offload {
            offload.sockets.end(&self.sockets);
        }
        self.release_all(tick);
        self.offload = None;
    }

    fn release_all(&mut self, tick: &mut UdpTick<'_>) {
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

    /// Reads the counters of some sessions and turns GRO on or off on their sockets.
    fn sweep(&mut self, tick: &mut UdpTick<'_>) -> bool {
        let Some(offload) = &mut self.offload else { return false };
        let Some(some) = offload.sockets.begin_sweep(tick.now, self.sessions.capacity()) else {
            return false;
        };
        let any = offload.open > 0 && some.fold(false, |any, at| self.book(narrow(at), tick) | any);
        if let Some(offload) = &mut self.offload {
            offload.sockets.end_sweep(tick.now, &self.sockets);
        }
        any
    }
}

impl RuleState {
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
