//! Active rules, and rules waiting to be bound. Owned by the control thread.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use hashbrown::HashMap;
use turnpike_net::{Datapath, SocketFile};

use crate::{
    Address, Bind, Rule, Settings, StartError, ZonedIp,
    kernel::Loaded,
    listen::{self, BoundRule, RemovedListeners, RuleSockets},
    preflight,
    resolver::{ResolvedName, Resolver},
    state::RuleState,
    targets::Targets,
    upgrade::Matched,
};

/// Maximum time for which a start or reload waits for the addresses of named listeners. With
/// [`Settings::keep_going`], `SHORT_PATIENCE` applies instead.
const PATIENCE: Duration = Duration::from_secs(10);
const SHORT_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct RuleTable {
    pub(crate) active: Vec<Active>,
    pub(crate) next_key: u32,
    pub(crate) loaded: Loaded,
    /// Rules that could not be bound; they wait only if [`Settings::keep_going`] is set.
    pub(crate) waiting: Vec<WaitingRule>,
    /// Last known addresses of named listeners.
    pub(crate) names: HashMap<String, ZonedIp>,
    pub(crate) drained: bool,
}

pub(crate) struct Active {
    pub(crate) state: Arc<RuleState>,
    pub(crate) addresses: Vec<Address>,
    /// File of a Unix socket, removed with the rule.
    pub(crate) file: Option<SocketFile>,
}

pub(crate) struct WaitingRule {
    pub(crate) rule: Rule,
    pub(crate) error: String,
    /// Name in `listen`, resolved while the rule waits.
    name: Option<Arc<ResolvedName>>,
}

impl WaitingRule {
    fn new(rule: Rule, error: &StartError, resolver: &Resolver) -> Self {
        let name = host_of(&rule).map(|host| resolver.name(host, true));
        Self { rule, error: error.to_string(), name }
    }

    fn resolved(&self) -> Rule {
        let address = self.name.as_ref().and_then(|name| name.addresses().first().copied());
        with_address(&self.rule, address)
    }
}

/// Replaces names in `listen` with their addresses, waiting for lookups if necessary. A rule whose name has
/// never had an address keeps the name. The caller must hold the returned names until the rules are bound;
/// otherwise, the resolver drops them and looks them up again.
pub(crate) fn resolved(
    rules: &[Rule],
    resolver: &Resolver,
    known: &mut HashMap<String, ZonedIp>,
    may_come_later: bool,
    stopping: &AtomicBool,
) -> (Vec<Rule>, Vec<Arc<ResolvedName>>) {
    let names: Vec<_> =
        rules.iter().map(|rule| host_of(rule).map(|host| (host, resolver.name(host, true)))).collect();
    let deadline = Instant::now() + if may_come_later { SHORT_PATIENCE } else { PATIENCE };
    let before = std::mem::take(known);
    let mut all = Vec::with_capacity(rules.len());
    for (rule, name) in rules.iter().zip(&names) {
        let Some((host, name)) = name else {
            all.push(rule.clone());
            continue;
        };
        name.wait(deadline, stopping);
        let address = name.addresses().first().or_else(|| before.get(*host)).copied();
        known.extend(address.map(|address| ((*host).to_owned(), address)));
        all.push(with_address(rule, address));
    }
    (all, names.into_iter().flatten().map(|(_, name)| name).collect())
}

fn host_of(rule: &Rule) -> Option<&str> {
    match &rule.bind {
        Bind::Name(host) => Some(host),
        Bind::Ip(_) | Bind::Unix(_) => None,
    }
}

fn with_address(rule: &Rule, address: Option<ZonedIp>) -> Rule {
    match (&rule.bind, address) {
        (Bind::Name(_), Some(address)) => Rule { bind: Bind::Ip(address), ..rule.clone() },
        _ => rule.clone(),
    }
}

/// Rules added at startup or by a reload, with bound listeners.
pub(crate) struct NewRules {
    pub(crate) active: Vec<Active>,
    pub(crate) of_workers: Vec<Vec<(Arc<RuleState>, RuleSockets)>>,
    pub(crate) failed: Vec<StartError>,
    pub(crate) waiting: Vec<WaitingRule>,
}

pub(crate) struct Binder<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) datapath: Datapath,
    pub(crate) resolver: &'a Resolver,
    pub(crate) workers: usize,
    pub(crate) key: u32,
    pub(crate) held: RemovedListeners,
    /// Listeners taken over from another process.
    pub(crate) matched: Matched,
}

impl Binder<'_> {
    /// Binds rules, each given both as configured and as [`resolved`].
    pub(crate) fn bind<'r>(
        &mut self,
        rules: impl Iterator<Item = (&'r Rule, &'r Rule)>,
    ) -> Result<NewRules, StartError> {
        let mut new = self.nothing();
        for (place, (configured, rule)) in rules.enumerate() {
            match self.bind_one(place, rule) {
                Ok(bound) => self.add(rule, bound, &mut new),
                Err(error) if self.settings.keep_going => {
                    new.waiting.push(WaitingRule::new(configured.clone(), &error, self.resolver));
                    new.failed.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(new)
    }

    /// Retries waiting rules; updates the error of those that fail again.
    pub(crate) fn retry(&mut self, waiting: &mut [WaitingRule]) -> NewRules {
        let mut new = self.nothing();
        for waiting in waiting {
            let rule = waiting.resolved();
            match self.bind_one(usize::MAX, &rule) {
                Ok(bound) => self.add(&rule, bound, &mut new),
                Err(error) => waiting.error = error.to_string(),
            }
        }
        new
    }

    fn nothing(&self) -> NewRules {
        let of_workers = std::iter::repeat_with(Vec::new).take(self.workers).collect();
        NewRules { active: Vec::new(), of_workers, failed: Vec::new(), waiting: Vec::new() }
    }

    fn add(&mut self, rule: &Rule, (addresses, file, bound): BoundRule, new: &mut NewRules) {
        let targets = Targets::new(rule, |host, any_route| self.resolver.name(host, any_route));
        let state = Arc::new(RuleState::new(self.key, rule.clone(), targets, self.settings.kernel));
        self.key = self.key.wrapping_add(1);
        for (of_worker, bound) in new.of_workers.iter_mut().zip(bound) {
            of_worker.push((Arc::clone(&state), bound));
        }
        new.active.push(Active { state, addresses, file });
    }

    fn bind_one(&mut self, place: usize, rule: &Rule) -> Result<BoundRule, StartError> {
        if let Bind::Name(host) = &rule.bind {
            let error = self.resolver.name(host, true).error();
            return Err(StartError::Name {
                rule: rule.id.0.clone(),
                listener: format!("{}:{}", rule.bind, rule.ports),
                error: error.unwrap_or_else(|| "no answer from the name server".to_owned()),
            });
        }
        preflight::check(rule)?;
        match self.matched.listeners(place) {
            Some(listeners) => Ok(listen::take_over(rule, listeners)?),
            None => listen::bind(rule, self.workers, self.datapath, &mut self.held, &self.settings.passed),
        }
    }
}

/// If an old and a new rule share a Unix socket, passes its file on to the new rule and sets the new rule's
/// permissions.
pub(crate) fn hand_files_over(left: &mut [Active], newcomers: &mut [Active]) {
    for new in newcomers.iter_mut().filter(|new| new.file.is_none()) {
        let old = left.iter_mut().find(|old| old.file.is_some() && old.addresses == new.addresses);
        new.file = old.and_then(|old| old.file.take());
        if let Some(file) = &new.file
            && let Err(error) = file.set_mode(new.state.rule.socket_mode)
        {
            tracing::warn!(rule = new.state.rule.id.0, %error, "cannot change the permissions of the Unix socket");
        }
    }
}
