//! Worker state used by the UDP engine: access lists, limits, targets and the log.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hashbrown::HashMap;

use crate::{
    Address, ConnectionReport, EndReason, TargetSlot,
    circles::Circles,
    common::ForwardCommon,
    here::Here,
    state::RuleState,
    targets::{Pick, Targets},
    udp::{Admission, ChosenTarget, RuleKey, WorkerContext},
};

pub(crate) struct WorkerRules {
    pub(crate) common: Arc<ForwardCommon>,
    rules: HashMap<RuleKey, PendingEntry, foldhash::fast::RandomState>,
    here: Here,
}

struct PendingEntry {
    state: Arc<RuleState>,
    sessions: u64,
    removed: bool,
    /// Last seen value of [`RuleState::health_turns`].
    turns: u64,
    /// True if another process has handed over a session whose target does not exist here.
    has_orphans: bool,
}

impl WorkerRules {
    pub(crate) fn new(common: Arc<ForwardCommon>) -> Self {
        Self { common, rules: HashMap::default(), here: Here::default() }
    }

    pub(crate) fn add(&mut self, state: &Arc<RuleState>) {
        let (state, turns) = (Arc::clone(state), state.health_turns());
        let key = RuleKey(state.key);
        let entry = PendingEntry { state, sessions: 0, removed: false, turns, has_orphans: false };
        self.rules.insert(key, entry);
    }

    pub(crate) fn targets(&self, key: RuleKey) -> Option<&Targets> {
        self.rules.get(&key).map(|entry| &entry.state.targets)
    }

    /// UDP rules for which the health of a target has changed since the last call.
    pub(crate) fn turned(&mut self) -> Vec<Arc<RuleState>> {
        let news = self.rules.values_mut().filter(|entry| entry.turns != entry.state.health_turns());
        let seen = news.map(|entry| {
            entry.turns = entry.state.health_turns();
            Arc::clone(&entry.state)
        });
        seen.filter(|state| state.rule.targets_speak_udp()).collect()
    }

    pub(crate) fn with_former_targets(&mut self) -> Vec<Arc<RuleState>> {
        let rules = self.rules.values_mut().filter(|entry| !entry.removed);
        let former = rules.filter(|entry| entry.has_orphans || entry.state.targets.has_former());
        former.map(|entry| Arc::clone(&entry.state)).collect()
    }

    pub(crate) fn has_no_orphans(&mut self, key: RuleKey) {
        if let Some(entry) = self.rules.get_mut(&key) {
            entry.has_orphans = false;
        }
    }

    /// Removes a rule after its last session has ended. Call after the engine has removed the rule.
    pub(crate) fn remove(&mut self, key: RuleKey) {
        if let Some(entry) = self.rules.get_mut(&key) {
            entry.removed = true;
            if entry.sessions == 0 {
                self.rules.remove(&key);
            }
        }
    }
}

impl WorkerContext for WorkerRules {
    fn permits(&mut self, rule: RuleKey, client: IpAddr) -> bool {
        self.rules.get(&rule).is_some_and(|entry| self.common.admits(&entry.state.rule, client))
    }

    fn admit_client(&mut self, rule: RuleKey, client: IpAddr, now: u64) -> Result<(), EndReason> {
        let clients = self.rules.get(&rule).and_then(|entry| entry.state.clients.as_ref());
        clients.map_or(Ok(()), |clients| clients.enter(client, now))
    }

    fn dismiss_client(&mut self, rule: RuleKey, client: IpAddr) {
        if let Some(clients) = self.rules.get(&rule).and_then(|entry| entry.state.clients.as_ref()) {
            clients.leave(client);
        }
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

    fn resume(
        &mut self,
        rule: RuleKey,
        client: IpAddr,
        port: u16,
        target: Option<SocketAddr>,
    ) -> Option<ChosenTarget> {
        let entry = self.rules.get_mut(&rule)?;
        self.common.total.resume();
        entry.state.active.resume();
        entry.sessions += 1;
        if let Some(clients) = &entry.state.clients {
            clients.resume(client);
        }
        let seat = target.and_then(|address| Some((entry.state.targets.at(address, port)?, address)));
        entry.has_orphans |= seat.is_none();
        let (seat, address) = seat?;
        Some(ChosenTarget { target: seat.keep(), address })
    }

    /// Skips unresolved names, because a datagram cannot wait for a lookup.
    fn choose(
        &mut self,
        rule: RuleKey,
        client: SocketAddr,
        port: u16,
        tried: &[TargetSlot],
    ) -> Option<ChosenTarget> {
        match self.targets(rule)?.pick(Some(client.ip()), port, tried, false) {
            Pick::At(seat, Address::Ip(address)) => Some(ChosenTarget { target: seat.keep(), address }),
            // Datagrams cannot be sent to a stream.
            Pick::At(_, Address::Unix(_)) | Pick::NoTarget | Pick::Pending => None,
        }
    }

    fn has_choice(&mut self, rule: RuleKey) -> bool {
        self.targets(rule).is_some_and(Targets::has_choice)
    }

    fn answers(&mut self, rule: RuleKey) -> bool {
        self.rules.get(&rule).is_some_and(|entry| entry.state.answers())
    }

    fn explores(&mut self, rule: RuleKey, now: u64) -> bool {
        self.rules.get(&rule).is_some_and(|entry| entry.state.explores(now))
    }

    fn hops(&mut self, rule: RuleKey, client: SocketAddr) -> Result<u8, EndReason> {
        self.rules.get(&rule).map_or(Ok(0), |entry| entry.state.hops(&self.common.circles, client))
    }

    fn approach(
        &mut self,
        rule: RuleKey,
        target: SocketAddr,
        asked: Option<IpAddr>,
        now: u64,
    ) -> io::Result<bool> {
        let Some(entry) = self.rules.get(&rule) else { return Ok(false) };
        self.here.approach(&self.common.listening, &entry.state, &target.into(), || asked, now)
    }

    fn circles(&mut self) -> Arc<Circles> {
        Arc::clone(&self.common.circles)
    }

    fn answered(&mut self, rule: RuleKey, choice: ChosenTarget) {
        if let Some(entry) = self.rules.get(&rule) {
            entry.state.has_answered();
        }
        if let Some(member) = self.targets(rule).and_then(|targets| targets.member(choice.target)) {
            member.answered();
        }
    }

    fn release(&mut self, rule: RuleKey, choice: ChosenTarget, failed: bool) {
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
