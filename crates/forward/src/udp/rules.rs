//! Rules of an engine and their listeners.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_net::Poller;

use super::{
    ChosenTarget, Engine, RuleKey, UdpListeners, UdpTick,
    listeners::BoundSocket,
    rule_state::{Listener, RuleState, SocketKind},
    sessions::{Inward, List, Lists},
    tokens::{listener_token, narrow},
};
use crate::{EndReason, Rule, RuleId, RuleSnapshot, rate::RuleRates, tally::Tallies};

const DEFAULT_IDLE: Duration = Duration::from_secs(72);
/// Time to wait for more responses to a TCP client that has sent FIN.
const LINGER: Duration = Duration::from_secs(5);

impl Engine {
    /// Starts serving a rule on these listeners; on error, nothing is added.
    pub fn add_rule(
        &mut self,
        key: RuleKey,
        rule: &Rule,
        listeners: UdpListeners,
        poller: &Poller,
    ) -> io::Result<()> {
        let patience = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
        let idle = rule.idle.unwrap_or(DEFAULT_IDLE);
        let lists = Lists {
            connecting: List::new(patience(rule.connect_timeout)),
            active: List::new(patience(idle)),
            closing: List::new(patience(idle.min(LINGER))),
        };
        let slot = narrow(self.rules.insert(RuleState {
            key,
            rule: rule.clone(),
            lists,
            counters: RuleSnapshot::default(),
            tallies: Tallies::default(),
            rates: None,
            goes_across: false,
            removed: false,
        }));
        for (port, bound) in (0_u16..).zip(listeners.bound) {
            if let Err(error) = self.listen(slot, port, bound, poller) {
                drop(self.take_listeners(slot, poller));
                self.rules.remove(slot as usize);
                return Err(error);
            }
        }
        Ok(())
    }

    pub(crate) fn limit_rates(&mut self, key: RuleKey, rates: Option<&Arc<RuleRates>>) {
        for (_, state) in self.rules.iter_mut().filter(|(_, state)| state.key == key) {
            state.rates = rates.cloned();
        }
    }

    /// Stops serving a rule and returns its listeners, to be closed or used by another rule. Sessions of UDP
    /// clients end, since responses to them are sent from the listeners; connections of TCP clients may
    /// finish.
    pub fn remove_rule(&mut self, key: RuleKey, tick: &mut UdpTick<'_>) -> UdpListeners {
        let found = self.rules.iter().find(|(_, state)| state.key == key && !state.removed);
        let Some(slot) = found.map(|(slot, _)| narrow(slot)) else {
            return UdpListeners { bound: Vec::new() };
        };
        for at in self.sessions.of_rule(slot) {
            if self.sessions.get(at).is_some_and(|session| matches!(session.inward, Inward::Datagrams { .. }))
            {
                self.end(at, EndReason::Shutdown, tick);
            }
        }
        self.send_queued();
        let listeners = self.take_listeners(slot, tick.poller);
        let state = &mut self.rules[slot as usize];
        state.removed = true;
        if state.counters.active == 0 {
            self.rules.remove(slot as usize);
        }
        listeners
    }

    pub fn leave_targets(
        &mut self,
        key: RuleKey,
        is_down: impl Fn(ChosenTarget) -> bool,
        tick: &mut UdpTick<'_>,
    ) {
        let Some((slot, _)) = self.rules.iter().find(|(_, state)| state.key == key) else { return };
        for at in self.sessions.of_rule(narrow(slot)) {
            if self.sessions.get(at).and_then(|session| session.choice).is_some_and(&is_down) {
                self.end(at, EndReason::TargetDown, tick);
            }
        }
        self.send_queued();
    }

    pub fn stop(&mut self, tick: &mut UdpTick<'_>) {
        let slots: Vec<u32> = self.rules.iter().map(|(slot, _)| narrow(slot)).collect();
        for slot in slots {
            for at in self.sessions.of_rule(slot) {
                self.end(at, EndReason::Shutdown, tick);
            }
            self.send_queued();
            drop(self.take_listeners(slot, tick.poller));
        }
        self.rules.clear();
    }

    /// Counters of each rule since it was added, including removed ones with open connections.
    pub fn snapshots(&self) -> impl Iterator<Item = (&RuleId, &RuleSnapshot)> {
        self.rules.iter().map(|(_, state)| (&state.rule.id, &state.counters))
    }

    pub(crate) fn tallies(&self) -> impl Iterator<Item = (RuleKey, &RuleId, &Tallies)> {
        self.rules.iter().map(|(_, state)| (state.key, &state.rule.id, &state.tallies))
    }

    pub fn listeners(&self) -> impl Iterator<Item = (&RuleId, SocketAddr)> {
        self.listeners
            .iter()
            .map(|(_, listener)| (&self.rules[listener.rule as usize].rule.id, listener.address))
    }

    fn listen(&mut self, rule: u32, port: u16, bound: BoundSocket, poller: &Poller) -> io::Result<()> {
        let address = bound.address();
        let entry = self.listeners.vacant_entry();
        let token = listener_token(narrow(entry.key()));
        let kind = match bound {
            BoundSocket::Datagrams(socket) => {
                poller.add(&socket, token)?;
                SocketKind::Datagrams(self.sockets.insert(socket))
            }
            BoundSocket::Streams(socket) => {
                poller.add(&socket, token)?;
                SocketKind::Streams { socket, paused_until: None }
            }
        };
        entry.insert(Listener { rule, port, address, kind });
        Ok(())
    }

    pub(super) fn take_listeners(&mut self, rule: u32, poller: &Poller) -> UdpListeners {
        let of_rule = self.listeners.iter().filter(|(_, listener)| listener.rule == rule);
        let mut slots: Vec<(u16, usize)> = of_rule.map(|(slot, listener)| (listener.port, slot)).collect();
        slots.sort_unstable();
        let mut bound = Vec::with_capacity(slots.len());
        for (_, slot) in slots {
            let listener = self.listeners.remove(slot);
            match listener.kind {
                SocketKind::Datagrams(socket) => {
                    if let Some(offload) = &mut self.offload {
                        offload.sockets.forget(socket, &offload.flows);
                    }
                    bound.extend(self.sockets.remove(socket).map(BoundSocket::Datagrams));
                }
                SocketKind::Streams { socket, .. } => bound.push(BoundSocket::Streams(socket)),
            }
        }
        for one in &bound {
            // Fails for a paused listener, which is not watched.
            let _ = match one {
                BoundSocket::Datagrams(socket) => poller.remove(socket),
                BoundSocket::Streams(socket) => poller.remove(socket),
            };
        }
        UdpListeners { bound }
    }
}
