//! Sessions that leave a target because it was removed or never responds. This runs from timers and uses only
//! counters and timestamps that exist anyway.

use std::cmp::Reverse;

use super::{
    ChosenTarget, Engine, RuleKey, UdpTick, outgoing,
    sessions::{Arrival, Inward},
    tokens::narrow,
    unanswered::NextCheck,
};
use crate::{EndReason, TargetFailure};

/// Milliseconds without data from a former target after which a session leaves it.
const SILENCE_MS: u64 = 5000;
/// Milliseconds from the first datagram of a session to the first check of whether the target has responded.
/// The interval doubles with each check, so that a slow target eventually gets enough time.
const FIRST_LOOK_MS: u64 = 500;
const LONGEST_LOOK_MS: u64 = 32_000;
/// Maximum checks per tick.
const LOOKS: usize = 256;

impl Engine {
    /// Ends sessions with a rule's former targets: immediately if the target has never responded, otherwise
    /// once it has sent nothing for a while. The client's next datagram starts a session with another target.
    /// Returns true if such sessions remain.
    pub(crate) fn leave_former(
        &mut self,
        key: RuleKey,
        is_former: impl Fn(Option<ChosenTarget>) -> bool,
        tick: &mut UdpTick<'_>,
    ) -> bool {
        let found = self.rules.iter().find(|(_, state)| state.key == key && !state.removed);
        // During a drain, no new session would replace this one.
        let Some((slot, _)) = found.filter(|_| !self.draining) else { return false };
        let mut remain = false;
        for at in self.sessions.of_rule(narrow(slot)) {
            if !self.sessions.get(at).is_some_and(|session| is_former(session.choice)) {
                continue;
            }
            // The kernel may have forwarded responses in the meantime.
            self.book(at, tick);
            let Some(session) = self.sessions.get_mut(at) else { continue };
            if session.heard.bytes != session.to_client {
                (session.heard.bytes, session.heard.at) = (session.to_client, tick.now);
            }
            if session.answered && tick.now < session.heard.at + SILENCE_MS {
                remain = true;
            } else {
                self.end(at, EndReason::TargetGone, tick);
            }
        }
        self.send_queued();
        remain
    }

    /// Schedules checks of a new session until its target responds.
    pub(super) fn await_answer(&mut self, at: u32, tick: &mut UdpTick<'_>) {
        let Some(session) = self.sessions.get(at) else { return };
        let state = &self.rules[session.rule as usize];
        if session.answered || !state.rule.targets_speak_udp() || !tick.worker.has_choice(state.key) {
            return;
        }
        let now = tick.now;
        let (due, wait, opened) = (now + FIRST_LOOK_MS, FIRST_LOOK_MS, session.opened);
        let look = NextCheck { due, at, opened, since: now, wait, tried: Vec::new(), explores: false };
        self.unanswered.0.push(Reverse(look));
        self.expect_at(Some(due));
    }

    /// Moves a session to another target if the client has sent again without having received a response, and
    /// targets of the rule are known to respond. If no target has ever responded, as with a one-way protocol,
    /// only a single session tries them all.
    pub(super) fn seek_answers(&mut self, tick: &mut UdpTick<'_>) {
        for _ in 0..LOOKS {
            let Some(mut look) = self.unanswered.pop(tick.now) else { return };
            self.book(look.at, tick);
            let session = self.sessions.get(look.at);
            let Some(session) = session.filter(|session| session.opened == look.opened) else { continue };
            if session.answered || self.draining {
                continue;
            }
            let key = self.rules[session.rule as usize].key;
            let is_repeated = self.sessions.stamp(look.at) > look.since;
            if is_repeated {
                look.explores |= !tick.worker.answers(key) && tick.worker.explores(key, tick.now);
                if (look.explores || tick.worker.answers(key)) && self.choose_another(&mut look, tick) {
                    look.since = tick.now;
                }
            }
            look.wait = (look.wait * 2).min(LONGEST_LOOK_MS);
            look.due = tick.now + look.wait;
            self.unanswered.0.push(Reverse(look));
        }
    }

    /// Moves a session to an untried target or, after a full round, to any other target. Returns false if
    /// there is no other target.
    fn choose_another(&mut self, look: &mut NextCheck, tick: &mut UdpTick<'_>) -> bool {
        let Some(session) = self.sessions.get(look.at) else { return false };
        let (rule, client, port, hops) = (session.rule, session.client, session.port, session.hops);
        let asked = if let Inward::Datagrams { key, .. } = &session.inward { key.local } else { None };
        let key = self.rules[rule as usize].key;
        let silent = session.choice.map(|choice| choice.target);
        look.tried.extend(silent);
        let choice = tick.worker.choose(key, client, port, &look.tried).or_else(|| {
            // After a round without a response, return to the regular choice.
            look.explores = false;
            look.tried = silent.into_iter().collect();
            tick.worker.choose(key, client, port, &look.tried)
        });
        let Some(choice) = choice else { return false };
        let arrival = Arrival { rule, client, port, hops };
        let (outward, link) = match self.open_towards(arrival, choice, look.at, asked, tick) {
            Ok(reached) => reached,
            Err(error) => {
                let is_unreachable = outgoing::is_unreachable(&error);
                self.rules[rule as usize].failed(choice, is_unreachable.then(|| TargetFailure::of(&error)));
                tick.worker.release(key, choice, is_unreachable);
                return false;
            }
        };
        let (Some(session), state) = (self.sessions.get_mut(look.at), &mut self.rules[rule as usize]) else {
            return false;
        };
        if let (Some(offload), Some(across)) = (&mut self.offload, session.across.take()) {
            state.forwarded_across(session, offload.release(*across));
        }
        session.link = link;
        self.leaving.extend(std::mem::replace(&mut session.outward, outward).socket());
        if let Some(silent) = session.choice.replace(choice) {
            state.left(silent, Some(TargetFailure::Timeout));
            // The target is not considered unhealthy, because any client can send data that it does not
            // respond to.
            tick.worker.release(key, silent, false);
        }
        state.took(choice);
        session.tried = choice.address;
        session.attempts = session.attempts.saturating_add(1);
        tracing::debug!(rule = state.rule.id.0, to = %choice.address, "no response; trying another target for this session");
        self.send_across(look.at, tick.now);
        if self.is_leaving_full() {
            self.send_queued();
        }
        true
    }
}
