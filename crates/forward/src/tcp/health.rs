//! Health checks of targets at the rule's interval: a TCP connect, followed by a request if configured, or a
//! datagram for UDP targets.

use std::sync::Arc;

use turnpike_net::Event;

use super::{
    check::{Check, CheckSocket},
    engine::Engine,
    side::{HEALTH, Tick, token},
};
use crate::{datagram_check, state::RuleState, targets::TargetMember};

impl Engine {
    /// Starts checking a rule's targets, if checks are configured and this worker performs them.
    pub(crate) fn watch_health(&mut self, state: &Arc<RuleState>, now: u64) {
        if self.checks_health && state.rule.health.is_some() {
            self.watched.push(Arc::clone(state));
            self.watch_members(state, now);
        }
    }

    pub(crate) fn unwatch_health(&mut self, state: &Arc<RuleState>) {
        self.watched.retain(|watched| !Arc::ptr_eq(watched, state));
        self.checks.retain(|_, check| !check.is_for(state));
    }

    /// Adjusts the checks to the current addresses of names.
    pub(super) fn update_checks(&mut self, now: u64) {
        let current: Vec<Arc<TargetMember>> =
            self.watched.iter().flat_map(|state| state.targets.current()).collect();
        self.checks.retain(|_, check| current.iter().any(|member| Arc::ptr_eq(member, &check.member)));
        for state in self.watched.clone() {
            self.watch_members(&state, now);
        }
    }

    fn watch_members(&mut self, state: &Arc<RuleState>, now: u64) {
        let Some(interval) = state.rule.health else { return };
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
                asked: None,
            });
        }
    }

    pub(super) fn health_due(&self) -> Option<u64> {
        self.checks.iter().map(|(_, check)| check.due).min()
    }

    pub(super) fn check_health(&mut self, tick: Tick<'_>) {
        for (key, check) in self.checks.iter_mut().filter(|(_, check)| check.due <= tick.now) {
            match check.asked.take() {
                None => {}
                // The check has timed out.
                Some(CheckSocket::Connect(_) | CheckSocket::Stream(_)) => {
                    conclude(check, false, tick.now);
                    continue;
                }
                Some(CheckSocket::Datagram(mut asked)) => {
                    match asked.go_on(&check.state.rule) {
                        Some(healthy) => conclude(check, healthy, tick.now),
                        None => {
                            check.asked = Some(CheckSocket::Datagram(asked));
                            check.due = tick.now + check.patience / datagram_check::TRIES;
                        }
                    }
                    continue;
                }
            }
            match CheckSocket::begin(check, &check.member.address(0), token(HEALTH, key), tick.poller) {
                Ok(asked) => {
                    let shares =
                        if matches!(asked, CheckSocket::Datagram(_)) { datagram_check::TRIES } else { 1 };
                    check.due = tick.now + check.patience / shares;
                    check.asked = Some(asked);
                }
                // Our own lack of resources proves nothing about the target.
                Err(error) if turnpike_net::is_exhaustion(&error) => {
                    check.due = tick.now + check.interval;
                }
                Err(_) => conclude(check, false, tick.now),
            }
        }
    }

    pub(super) fn on_health(&mut self, key: usize, event: &Event, tick: Tick<'_>) {
        let Some(check) = self.checks.get_mut(key) else { return };
        match check.asked.take() {
            None => {}
            Some(CheckSocket::Connect(socket)) => {
                let answered = !event.error || socket.take_error().is_ok();
                // RST, so that neither side is left in TIME_WAIT.
                socket.reset();
                conclude(check, answered, tick.now);
            }
            Some(CheckSocket::Stream(mut asked)) => {
                let question = check.state.rule.health_question.as_ref();
                match question.and_then(|question| asked.go_on(event, question)) {
                    Some(healthy) => {
                        asked.reset();
                        conclude(check, healthy, tick.now);
                    }
                    None => check.asked = Some(CheckSocket::Stream(asked)),
                }
            }
            Some(CheckSocket::Datagram(asked)) => match asked.hear(&check.state.rule) {
                Some(healthy) => conclude(check, healthy, tick.now),
                None => check.asked = Some(CheckSocket::Datagram(asked)),
            },
        }
    }
}

fn conclude(check: &mut Check, healthy: bool, now: u64) {
    check.due = now + check.interval;
    if check.member.set_healthy(healthy) {
        check.state.health_turned();
        let rule = &check.state.rule;
        let to = tracing::field::display(check.member.address(0));
        if healthy {
            tracing::info!(rule = rule.id.0, to, "target is healthy again");
        } else {
            tracing::warn!(rule = rule.id.0, to, "target fails its health check; using other targets");
        }
    }
}
