//! What the UDP engine asks of its worker: lists, limits, targets, the log.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hashbrown::HashMap;

use crate::{
    ConnectionReport,
    common::Common,
    state::RuleState,
    targets::{Pick, Targets},
    udp::{Admission, Choice, RuleKey, Surroundings},
};

/// The rules of one worker that the UDP engine serves.
pub(crate) struct Around {
    pub(crate) common: Arc<Common>,
    rules: HashMap<RuleKey, Entry, foldhash::fast::RandomState>,
}

struct Entry {
    state: Arc<RuleState>,
    /// Sessions of this worker.
    sessions: u64,
    removed: bool,
}

impl Around {
    pub(crate) fn new(common: Arc<Common>) -> Self {
        Self { common, rules: HashMap::default() }
    }

    pub(crate) fn add(&mut self, state: &Arc<RuleState>) {
        let entry = Entry { state: Arc::clone(state), sessions: 0, removed: false };
        self.rules.insert(RuleKey(state.key), entry);
    }

    pub(crate) fn targets(&self, key: RuleKey) -> Option<&Targets> {
        self.rules.get(&key).map(|entry| &entry.state.targets)
    }

    /// To be called after the engine has removed the rule: it stays for its last sessions.
    pub(crate) fn remove(&mut self, key: RuleKey) {
        if let Some(entry) = self.rules.get_mut(&key) {
            entry.removed = true;
            if entry.sessions == 0 {
                self.rules.remove(&key);
            }
        }
    }
}

impl Surroundings for Around {
    fn permits(&mut self, rule: RuleKey, client: IpAddr) -> bool {
        self.rules.get(&rule).is_some_and(|entry| self.common.admits(&entry.state.rule, client))
    }

    fn enter(&mut self, rule: RuleKey) -> Admission {
        let Some(entry) = self.rules.get_mut(&rule) else { return Admission::RuleFull };
        if !self.common.total.enter() {
            return Admission::TotalFull;
        }
        if !entry.state.active.enter() {
            self.common.total.leave();
            return Admission::RuleFull;
        }
        entry.sessions += 1;
        Admission::Entered
    }

    fn leave(&mut self, rule: RuleKey) {
        let Some(entry) = self.rules.get_mut(&rule) else { return };
        self.common.total.leave();
        entry.state.active.leave();
        entry.sessions = entry.sessions.saturating_sub(1);
        if entry.removed && entry.sessions == 0 {
            self.rules.remove(&rule);
        }
    }

    /// A name without an answer is passed over: a datagram cannot wait for it.
    fn choose(&mut self, rule: RuleKey, client: SocketAddr, port: u16) -> Option<Choice> {
        match self.targets(rule)?.pick(client.ip(), port, &[], false) {
            Pick::At(seat, address) => Some(Choice { target: seat.keep(), address }),
            Pick::Nobody | Pick::Pending => None,
        }
    }

    fn answered(&mut self, rule: RuleKey, choice: Choice) {
        if let Some(member) = self.targets(rule).and_then(|targets| targets.member(choice.target)) {
            member.answered();
        }
    }

    fn release(&mut self, rule: RuleKey, choice: Choice, failed: bool) {
        let Some(targets) = self.targets(rule) else { return };
        if let Some(member) = targets.member(choice.target).filter(|_| failed) {
            targets.suspect(&member);
        }
        targets.leave(choice.target);
    }

    fn ended(&mut self, report: ConnectionReport) {
        self.common.log.ended(report);
    }
}
