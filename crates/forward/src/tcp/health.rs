//! Health checks: a TCP connect to each target, as often as its rule says, closed at once.

use std::sync::Arc;

use turnpike_net::{TcpSocket, poll::Event};

use super::engine::{Engine, HEALTH, Tick, token};
use crate::{Protocol, state::RuleState, targets::Member};

/// One address of a target under watch.
pub(super) struct Check {
    state: Arc<RuleState>,
    member: Arc<Member>,
    /// When to begin the next, or to give up the one under way; milliseconds.
    due: u64,
    interval: u64,
    patience: u64,
    socket: Option<TcpSocket>,
}

impl Check {
    pub(super) fn is_for(&self, state: &Arc<RuleState>) -> bool {
        Arc::ptr_eq(&self.state, state)
    }
}

impl Engine {
    /// Begins to watch a rule's targets, if it asks for that and they speak TCP.
    pub(super) fn watch_health(&mut self, state: &Arc<RuleState>, now: u64) {
        let Some(interval) = state.rule.health_check else { return };
        if matches!(state.rule.protocol, Protocol::Udp | Protocol::TcpToUdp { .. }) {
            return;
        }
        let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 4).max(1);
        for member in state.targets.current() {
            if self.checks.iter().any(|(_, check)| Arc::ptr_eq(&check.member, &member)) {
                continue;
            }
            self.checks.insert(Check {
                state: Arc::clone(state),
                member,
                due: now,
                interval: ms(interval),
                patience: ms(interval.min(state.rule.connect_timeout)),
                socket: None,
            });
        }
    }

    /// Watches the addresses that names have now, and no others.
    pub(super) fn update_checks(&mut self, now: u64) {
        if !self.checks_health {
            return;
        }
        let checked =
            self.rules.iter().filter(|(_, rule)| !rule.removed && rule.state.rule.health_check.is_some());
        let states: Vec<Arc<RuleState>> = checked.map(|(_, rule)| Arc::clone(&rule.state)).collect();
        let current: Vec<Arc<Member>> = states.iter().flat_map(|state| state.targets.current()).collect();
        self.checks.retain(|_, check| current.iter().any(|member| Arc::ptr_eq(member, &check.member)));
        for state in &states {
            self.watch_health(state, now);
        }
    }

    pub(super) fn health_due(&self) -> Option<u64> {
        self.checks.iter().map(|(_, check)| check.due).min()
    }

    pub(super) fn check_health(&mut self, tick: Tick<'_>) {
        for (key, check) in self.checks.iter_mut().filter(|(_, check)| check.due <= tick.now) {
            if check.socket.take().is_some() {
                // The one before has not ended.
                conclude(check, false, tick.now);
                continue;
            }
            // Not the client's address, which a check does not have.
            let options = turnpike_net::ConnectOptions { transparent: false, ..check.state.connect.clone() };
            let begun = TcpSocket::connect(check.member.address(0), &options)
                .and_then(|socket| tick.poller.add_edge(&socket, token(HEALTH, key)).map(|()| socket));
            match begun {
                Ok(socket) => {
                    check.socket = Some(socket);
                    check.due = tick.now + check.patience;
                }
                // Our own want is not the target's fault.
                Err(error) if turnpike_net::tcp::is_exhaustion(&error) => {
                    check.due = tick.now + check.interval;
                }
                Err(_) => conclude(check, false, tick.now),
            }
        }
    }

    pub(super) fn on_health(&mut self, key: usize, event: &Event, tick: Tick<'_>) {
        let Some(check) = self.checks.get_mut(key) else { return };
        let Some(socket) = check.socket.take() else { return };
        let answered = !event.error || socket.take_error().is_ok();
        // RST: neither side keeps a TIME_WAIT for a question.
        socket.reset();
        conclude(check, answered, tick.now);
    }
}

fn conclude(check: &mut Check, healthy: bool, now: u64) {
    check.due = now + check.interval;
    if check.member.set_healthy(healthy) {
        let rule = &check.state.rule.id.0;
        let to = check.member.address(0);
        if healthy {
            tracing::info!(rule, %to, "a target answers again");
        } else {
            tracing::warn!(rule, %to, "a target does not answer; others take its connections");
        }
    }
}
