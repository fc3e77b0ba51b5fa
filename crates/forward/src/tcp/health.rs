//! Health checks: a TCP connect to each target, as often as its rule says, closed at once.

use std::sync::Arc;

use turnpike_net::{TcpSocket, poll::Event};

use super::engine::{Engine, HEALTH, Tick, token};
use crate::{Protocol, state::RuleState, targets::Candidate};

/// One target under watch.
pub(super) struct Check {
    state: Arc<RuleState>,
    target: usize,
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
        for target in 0..state.targets.len() {
            self.checks.insert(Check {
                state: Arc::clone(state),
                target,
                due: now,
                interval: ms(interval),
                patience: ms(interval.min(state.rule.connect_timeout)),
                socket: None,
            });
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
            match check.state.targets.candidate(check.target, 0, 0) {
                // A name without an answer says nothing about its target.
                Candidate::Pending => check.due = tick.now + check.interval,
                Candidate::Exhausted => conclude(check, false, tick.now),
                Candidate::At(address) => {
                    // Not the client's address, which a check does not have.
                    let options =
                        turnpike_net::ConnectOptions { transparent: false, ..check.state.connect.clone() };
                    let begun = TcpSocket::connect(address, &options).and_then(|socket| {
                        tick.poller.add_edge(&socket, token(HEALTH, key)).map(|()| socket)
                    });
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
    if check.state.targets.set_healthy(check.target, healthy) {
        let rule = &check.state.rule;
        let to = rule.targets.get(check.target).map(tracing::field::display);
        if healthy {
            tracing::info!(rule = rule.id.0, to, "a target answers again");
        } else {
            tracing::warn!(rule = rule.id.0, to, "a target does not answer; others take its connections");
        }
    }
}
