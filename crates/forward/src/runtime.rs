//! Starting, changing, watching and stopping the workers.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool, mpsc},
    time::{Duration, Instant},
};

use hashbrown::HashMap;
use strum::{IntoStaticStr, VariantArray};
use turnpike_net::{Datapath, PassedSockets, worker::Workers};
use turnpike_offload::{Hook, Kernel, OffloadError};

use crate::{
    Access, Address, Rule, RuleId, ZonedIp,
    binder::{self, Active, Binder, NewRules, Rules, Waiting},
    circles::Circles,
    common::Common,
    gauge::Gauge,
    here::Listening,
    kernel::Loaded,
    listen::{Held, Kind},
    resolver::Resolver,
    tally::TargetSnapshot,
    upgrade::{ForwarderHandover, Matched},
    worker::{Change, Command, Snapshots, Worker},
};

/// Settings of all rules. `workers`, `datapath`, the three of the kernel and `busy_poll` are fixed at the start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Threads; at least 1.
    pub workers: usize,
    /// How datagrams enter and leave.
    pub datapath: Datapath,
    /// Whether the kernel forwards lone datagrams itself, in rules that do not say ([`Rule::kernel`]); `datapath` is for all others.
    pub kernel: bool,
    /// Flows that it may have, two a session; sessions beyond stay in user space.
    pub max_kernel_flows: u32,
    /// How its program is attached.
    pub kernel_hook: Hook,
    /// How long a worker that has just had something to do looks for more before it sleeps; zero sleeps at once.
    pub busy_poll: Duration,
    /// Asked before each rule's own.
    pub access: Access,
    /// Connections and sessions of all rules at a time.
    pub max_connections: usize,
    /// Age at which a resolved name is resolved again.
    pub resolve_every: Duration,
    /// Start although some rules cannot be bound.
    pub keep_going: bool,
    /// The program is to end: a start or a reload waits for no names any more.
    pub stopping: Arc<AtomicBool>,
    /// Sockets of listeners that somebody else has bound; those of addresses that no rule listens on are left alone.
    pub passed: Arc<PassedSockets>,
}

/// Why the forwarder did not start, or why a reload was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A rule's listener could not be bound.
    #[error("rule {rule}: cannot listen on {address}: {source}; {remedy}")]
    Listen { rule: String, address: Address, source: io::Error, remedy: &'static str },
    /// The name that a rule listens on has no address.
    #[error(
        "rule {rule}: cannot listen on {listener}: {error}; check the name, or set keep_going if it comes later"
    )]
    Name { rule: String, listener: String, error: String },
    /// A rule's sockets towards its targets cannot be made as it asks.
    #[error("rule {rule}: cannot send {what}: {source}; {remedy}")]
    Outgoing { rule: String, what: String, source: io::Error, remedy: &'static str },
    /// What another process serves is not configured here.
    #[error(
        "the process to be upgraded has the rule {rule} ({addresses}), which is gone or has another protocol or other ports: reload that \
         process first (SIGHUP)"
    )]
    RuleGone { rule: String, addresses: String },
    /// The kernel cannot forward datagrams itself.
    #[error("--datapath kernel: {0}")]
    Datapath(#[source] OffloadError),
    /// The kernel cannot pass streams on itself.
    #[error("--copy kernel: {0}")]
    Copy(#[source] OffloadError),
    /// Threads, epoll or the like.
    #[error(
        "cannot start a worker: {0}; raise the limit of open files (ulimit -n) or of threads (ulimit -u)"
    )]
    Worker(#[from] io::Error),
}

/// Why a connection or session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum EndReason {
    /// Both sides had said all.
    Finished,
    /// RST from the client.
    ClientReset,
    /// RST from the target, or ICMP that says that nobody listens there any more.
    TargetReset,
    /// The target of a UDP session failed its health check, and there is a healthy one.
    TargetDown,
    /// The target of a UDP session is none any more: its name has lost the address, or its weight is 0.
    TargetGone,
    /// No byte for the idle timeout.
    Idle,
    /// No target could be reached.
    ConnectFailed,
    /// Refused by allow and deny lists.
    Denied,
    /// No byte of the one side for the half-close timeout, after the other had said all.
    HalfClosed,
    /// Refused by a limit on connections.
    Limit,
    /// The limit on connections of one client ([`crate::Limits::connections_per_client`]); counted, not reported.
    ClientLimit,
    /// The limit on new connections of one client ([`crate::Limits::new_connections_per_client`]); counted, not reported.
    ClientRate,
    /// A UDP session that gave its place to a new one: it was the longest idle when a limit was reached.
    Evicted,
    /// A malformed PROXY header, or none, from one of [`Rule::proxy_protocol_from`].
    BadProxyHeader,
    /// A PROXY header from somebody else.
    UntrustedProxy,
    /// The client is the other end of a chain of rules that leads back to this one; counted, and reported once.
    Circle,
    /// Its rule was removed or changed (UDP), or the forwarder stops.
    Shutdown,
}

impl EndReason {
    /// True if it is only counted: neither a client beyond its limits nor a circle of rules must fill the log.
    pub(crate) fn is_quiet(self) -> bool {
        matches!(self, Self::ClientLimit | Self::ClientRate | Self::Circle)
    }
}

/// One ended connection or session; for its log line.
#[derive(Clone, Debug)]
pub struct ConnectionReport {
    /// Rule.
    pub rule: RuleId,
    /// Client.
    pub client: Address,
    /// The target that was reached, if any; of a UDP session also the one that was tried last.
    pub target: Option<Address>,
    /// Bytes from the client to the target.
    pub to_target: u64,
    /// Bytes from the target to the client.
    pub to_client: u64,
    /// How long it lived.
    pub lived: Duration,
    /// Why it ended.
    pub reason: EndReason,
}

/// Hears of ended connections, from the workers' threads; must not block.
pub trait ConnectionLog: Send + Sync {
    /// One connection or session is over.
    fn ended(&self, report: ConnectionReport);
}

/// What the kernel has moved itself, to the target and to the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByKernel {
    /// Datagrams (UDP).
    pub datagrams: [u64; 2],
    /// Bytes of UDP's payload and of TCP.
    pub bytes: [u64; 2],
}

impl ByKernel {
    pub(crate) fn add(&mut self, datagrams: [u64; 2], bytes: [u64; 2]) {
        for (sum, more) in [(&mut self.datagrams, datagrams), (&mut self.bytes, bytes)] {
            sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }
}

/// State of a rule's listeners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RuleStanding {
    /// Bound.
    Listening,
    /// Not bound yet, for this reason, and is tried again ([`Settings::keep_going`]).
    Waiting(String),
    /// Its last connections end.
    #[default]
    Closed,
}

/// Counters of one rule, over all workers, at most 100 ms old; what the kernel moves itself at most a second more.
#[derive(Clone, Debug, Default)]
pub struct RuleSnapshot {
    /// State of its listeners.
    pub standing: RuleStanding,
    /// Connections and sessions now.
    pub active: u64,
    /// Since the start.
    pub accepted: u64,
    /// Ended, by reason.
    pub ended: Vec<(EndReason, u64)>,
    /// Bytes to targets.
    pub to_target_bytes: u64,
    /// Bytes to clients.
    pub to_client_bytes: u64,
    /// Datagrams to targets (UDP).
    pub to_target_datagrams: u64,
    /// Datagrams to clients (UDP).
    pub to_client_datagrams: u64,
    /// Bytes of TCP that never entered user space.
    pub spliced_bytes: u64,
    /// Of all these what the kernel has moved itself, without waking a worker up.
    pub kernel: ByKernel,
    /// Datagrams dropped: session limit, queue overflow, too long for the other side.
    pub dropped_datagrams: u64,
    /// By address of a target, those that had none of it included. An address that a name has lost is among them until its
    /// last connection ends.
    pub targets: Vec<TargetSnapshot>,
    /// Datagrams dropped because the rule or the session had moved its bytes a second.
    pub limited_datagrams: u64,
    /// Times that a TCP connection stopped reading because the rule or it had moved its bytes a second.
    pub pauses: u64,
}

impl RuleSnapshot {
    /// Adds what another worker counted for the same rule.
    pub(crate) fn add(&mut self, other: &Self) {
        self.active += other.active;
        self.accepted += other.accepted;
        for (reason, count) in &other.ended {
            match self.ended.iter_mut().find(|(known, _)| known == reason) {
                Some((_, total)) => *total += count,
                None => self.ended.push((*reason, *count)),
            }
        }
        self.to_target_bytes += other.to_target_bytes;
        self.to_client_bytes += other.to_client_bytes;
        self.to_target_datagrams += other.to_target_datagrams;
        self.to_client_datagrams += other.to_client_datagrams;
        self.spliced_bytes += other.spliced_bytes;
        self.kernel.add(other.kernel.datagrams, other.kernel.bytes);
        self.dropped_datagrams += other.dropped_datagrams;
        other.targets.iter().for_each(|target| target.clone().merge_into(&mut self.targets));
        self.limited_datagrams += other.limited_datagrams;
        self.pauses += other.pauses;
    }
}

/// How long a worker may take to carry a command out.
const CHANGE: Duration = Duration::from_secs(10);

/// A running forwarder. Dropping it stops the workers.
pub struct Forwarder {
    pub(crate) workers: Workers<Command, Snapshots>,
    pub(crate) datapath: Datapath,
    /// When its clock was 0.
    pub(crate) began: Instant,
    total: Arc<Gauge>,
    log: Arc<dyn ConnectionLog>,
    circles: Arc<Circles>,
    resolver: Resolver,
    rules: Mutex<Rules>,
}

impl Forwarder {
    /// Binds the listeners of all rules and starts the workers; on error nothing is left open (unless
    /// [`Settings::keep_going`], which returns the rules that failed).
    ///
    /// # Errors
    /// [`StartError`], which names the rule and says what to change.
    pub fn start(
        settings: &Settings,
        rules: &[Rule],
        log: Arc<dyn ConnectionLog>,
    ) -> Result<(Self, Vec<StartError>), StartError> {
        Self::begin(settings, rules, log, None)
    }

    /// The same in the place of another process, by its sockets: its workers take its sessions in, and serve when they are told to
    /// ([`crate::upgrade`]). There are as many workers as were offered, and the data path is the same.
    ///
    /// # Errors
    /// [`StartError`]; the other process goes on.
    pub fn start_from_handover(
        settings: &Settings,
        rules: &[Rule],
        log: Arc<dyn ConnectionLog>,
        handover: ForwarderHandover,
    ) -> Result<(Self, Vec<StartError>), StartError> {
        Self::begin(settings, rules, log, Some(handover))
    }

    fn begin(
        settings: &Settings,
        rules: &[Rule],
        log: Arc<dyn ConnectionLog>,
        handover: Option<ForwarderHandover>,
    ) -> Result<(Self, Vec<StartError>), StartError> {
        let count = settings.workers.max(1);
        let takes_over = handover.is_some();
        // One clock, so that buckets of tokens can be shared.
        let began = handover.as_ref().map_or_else(Instant::now, ForwarderHandover::began);
        let total = Arc::new(Gauge::new(settings.max_connections));
        let circles = Arc::<Circles>::default();
        let common = Arc::new(Common {
            access: settings.access.clone(),
            total: Arc::clone(&total),
            log: Arc::clone(&log),
            circles: Arc::clone(&circles),
            listening: Listening::default(),
        });
        let mut workers = (0..count)
            .map(|number| Worker::new((number, began), settings.datapath, settings.busy_poll, &common))
            .collect::<io::Result<Vec<_>>>()?;
        let of_resolver: Vec<_> = workers.iter().map(|worker| worker.frame.sender.clone()).collect();
        let resolved = move || of_resolver.iter().for_each(|sender| sender.tell(Command::TargetsChanged));
        let resolver = Resolver::start(settings.resolve_every, ZonedIp::look_up, resolved)?;
        let mut forwarder = Self {
            workers: Workers::default(),
            datapath: settings.datapath,
            began,
            total,
            log,
            circles,
            resolver,
            rules: Mutex::new(Rules::default()),
        };
        let mut names = HashMap::new();
        // What another process gives has to be matched by its address.
        let may_come_later = settings.keep_going && !takes_over;
        let (resolved, _held) =
            binder::resolved(rules, &forwarder.resolver, &mut names, may_come_later, &settings.stopping);
        let matched = handover.map(|handover| handover.matched(&resolved)).transpose()?.unwrap_or_default();
        let mut binder = Binder { matched, ..forwarder.binder(settings, count) };
        let NewRules { active, of_workers, failed, waiting } = binder.bind(rules.iter().zip(&resolved))?;
        let Binder { key: next_key, mut matched, .. } = binder;
        let mut loaded = Loaded::default();
        let states = active.iter().map(|active| &*active.state);
        let before = takes_over.then(|| matched.take_kernel());
        let parts = loaded.provide(settings, count, before, states)?;
        let common = forwarder.common(settings, &active);
        for ((worker, come), parts) in workers.iter_mut().zip(of_workers).zip(parts) {
            worker.set_common(&common);
            worker.take(parts)?;
            for (state, bound) in come {
                worker.add_rule(&state, bound, &mut HashMap::new())?;
            }
        }
        let key = |rule: &Rule| {
            active.iter().find(|active| active.state.is_like(rule)).map(|active| active.state.key)
        };
        let keys: Vec<Option<u32>> = resolved.iter().map(key).collect();
        // A rule that was offered has been taken over, or all has failed.
        let keys = matched.keys(&keys).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        forwarder.rules = Mutex::new(Rules { active, next_key, loaded, waiting, names, drained: false });
        for mut worker in workers {
            worker.handed_over = Arc::clone(&keys);
            let name = format!("forward-{}", worker.frame.number);
            let run = move |mut worker: Worker| {
                if takes_over { worker.run_from_handover() } else { worker.run() }
            };
            forwarder.workers.spawn(name, worker, |worker| &mut worker.frame, run)?;
        }
        if takes_over {
            forwarder.workers.import(matched.into_channels())?;
        }
        Ok((forwarder, failed))
    }

    /// The addresses listened on, with real ports where the rule said 0.
    pub fn listeners(&self) -> Vec<(RuleId, Address)> {
        let rules = self.rules();
        let each = rules.active.iter().flat_map(|rule| {
            rule.addresses.iter().map(|address| (rule.state.rule.id.clone(), address.clone()))
        });
        each.collect()
    }

    /// Adds, changes and removes rules; connections of unchanged rules live on, those of removed and changed ones are left to
    /// finish, their listeners close. Where only targets change, the listeners stay, and so do connections and sessions; a session
    /// leaves a target that is removed, or has weight 0 now, when it is silent. A TCP address that an old and a new rule share is handed over, so that no client
    /// waiting there is lost. On error the old rules stay in force. With [`Settings::keep_going`] rules that cannot be bound are
    /// left out and returned, unless no rule would be in force any more, and [`Forwarder::retry`] tries them again.
    ///
    /// Names are resolved again at once.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn reload(&self, settings: &Settings, rules: &[Rule]) -> Result<Vec<StartError>, StartError> {
        // Without the lock: a name server may be slow, and counters are asked for meanwhile.
        let mut names = self.rules().names.clone();
        let (resolved, _held) =
            binder::resolved(rules, &self.resolver, &mut names, settings.keep_going, &settings.stopping);
        let mut in_force = self.rules();
        in_force.names = names;
        let is_kept = |active: &Active| resolved.iter().any(|rule| active.state.is_like(rule));
        let is_new =
            |(_, rule): &(&Rule, &Rule)| !in_force.active.iter().any(|active| active.state.is_like(rule));
        let mut held = Held::default();
        for active in in_force.active.iter().filter(|active| !is_kept(active)) {
            let kind = Kind::of(active.state.rule.protocol);
            held.0.extend(active.addresses.iter().map(|address| (kind, address.clone())));
        }
        let mut binder =
            Binder { held, key: in_force.next_key, ..self.binder(settings, self.workers.count()) };
        let mut new = binder.bind(rules.iter().zip(&resolved).filter(is_new))?;
        let none_would_be_left = new.active.is_empty() && !in_force.active.iter().any(is_kept);
        if none_would_be_left
            && !in_force.active.is_empty()
            && let Some(error) = new.failed.pop()
        {
            return Err(error);
        }
        let next_key = binder.key;
        let (failed, waiting) = (std::mem::take(&mut new.failed), std::mem::take(&mut new.waiting));
        self.put_in_force(&mut in_force, settings, new, is_kept)?;
        self.change_targets(&in_force.active, &resolved);
        (in_force.next_key, in_force.waiting) = (next_key, waiting);
        drop(in_force);
        self.resolver.refresh(settings.resolve_every);
        Ok(failed)
    }

    fn change_targets(&self, active: &[Active], rules: &[Rule]) {
        for Active { state, .. } in active {
            let rule = rules.iter().find(|rule| state.is_like(rule));
            if let Some(rule) = rule.filter(|rule| !state.targets.are_of(rule)) {
                state.targets.change(rule, |host, any_route| self.resolver.name(host, any_route));
            }
        }
        self.workers.tell(|| Command::TargetsChanged);
    }

    /// Tries the rules again that could not be bound, since an address, a name or a device may appear later. Returns those that are in
    /// force from now on.
    pub fn retry(&self, settings: &Settings) -> Vec<RuleId> {
        let mut in_force = self.rules();
        if in_force.waiting.is_empty() {
            return Vec::new();
        }
        let mut binder = Binder { key: in_force.next_key, ..self.binder(settings, self.workers.count()) };
        let new = binder.retry(&mut in_force.waiting);
        if new.active.is_empty() {
            return Vec::new();
        }
        let next_key = binder.key;
        let ids: Vec<RuleId> = new.active.iter().map(|active| active.state.rule.id.clone()).collect();
        let is_bound = |waiting: &Waiting| ids.contains(&waiting.rule.id);
        if let Err(error) = self.put_in_force(&mut in_force, settings, new, |_| true) {
            for waiting in in_force.waiting.iter_mut().filter(|waiting| is_bound(waiting)) {
                waiting.error = error.to_string();
            }
            return Vec::new();
        }
        in_force.next_key = next_key;
        in_force.waiting.retain(|waiting| !is_bound(waiting));
        ids
    }

    /// Has the workers serve new rules in place of those that are not kept.
    fn put_in_force(
        &self,
        in_force: &mut Rules,
        settings: &Settings,
        NewRules { active: mut newcomers, of_workers, .. }: NewRules,
        is_kept: impl Fn(&Active) -> bool,
    ) -> Result<(), StartError> {
        let states = newcomers.iter().map(|active| &*active.state);
        let parts = in_force.loaded.provide(settings, self.workers.count(), None, states)?;
        // Nothing can fail from here on.
        let (kept, mut left): (Vec<Active>, Vec<Active>) = in_force.active.drain(..).partition(is_kept);
        in_force.active = kept;
        binder::hand_files_over(&mut left, &mut newcomers);
        in_force.active.extend(newcomers);
        self.total.set_limit(settings.max_connections);
        let common = self.common(settings, &in_force.active);
        let leave: Vec<_> = left.iter().map(|active| Arc::clone(&active.state)).collect();
        let (mut of_workers, mut parts) = (of_workers.into_iter(), parts.into_iter());
        self.tell_all(|done| {
            let (common, leave) = (Arc::clone(&common), leave.clone());
            let (come, parts) = (of_workers.next().unwrap_or_default(), parts.next().unwrap_or_default());
            Command::Change(Box::new(Change { common, parts, leave, come, done }))
        });
        Ok(())
    }

    /// Counters of each rule, those included that have no clients or wait to be bound. A removed rule is among them until its last
    /// connection ends.
    pub fn snapshots(&self) -> Vec<(RuleId, RuleSnapshot)> {
        let rules = self.rules();
        let mut all: Vec<(RuleId, RuleSnapshot)> = Vec::with_capacity(rules.active.len());
        for Active { state, .. } in &rules.active {
            // What holds of a target now stands first; workers add only their counts.
            let targets = state.targets.current().iter().map(|member| member.describe()).collect();
            let standing = if rules.drained { RuleStanding::Closed } else { RuleStanding::Listening };
            all.push((state.rule.id.clone(), RuleSnapshot { standing, targets, ..RuleSnapshot::default() }));
        }
        all.extend(rules.waiting.iter().map(|waiting| {
            let standing = RuleStanding::Waiting(waiting.error.clone());
            (waiting.rule.id.clone(), RuleSnapshot { standing, ..RuleSnapshot::default() })
        }));
        drop(rules);
        for (id, snapshot) in self.workers.snapshots().into_iter().flatten() {
            match all.iter_mut().find(|(other, _)| *other == id) {
                Some((_, total)) => total.add(&snapshot),
                None => all.push((id, snapshot)),
            }
        }
        all
    }

    /// The path through the kernel, where some rule has asked for it.
    pub fn kernel(&self) -> Option<Arc<Kernel>> {
        self.rules().loaded.kernel().map(Arc::clone)
    }

    /// Closes the listeners; connections live on, and so do UDP sessions with a datagram in the last two seconds. When this returns
    /// other processes of this user can listen on the same ports.
    pub fn drain(&self) {
        let mut rules = self.rules();
        rules.waiting.clear();
        rules.drained = true;
        // First, so that a successor may listen there.
        rules.active.iter_mut().for_each(|active| active.file = None);
        drop(rules);
        // In two steps: while some workers still listen and others do not, the kernel spreads datagrams in another way than before,
        // and those of living sessions would arrive at workers that do not know them.
        self.tell_all(Command::Drain);
        self.tell_all(Command::Unlisten);
    }

    /// Waits until all workers have carried out a command, each of which answers on the channel that it gets.
    fn tell_all(&self, command: impl FnMut(mpsc::Sender<()>) -> Command) {
        if let Err(error) = self.workers.ask(CHANGE, "carry out its command", command) {
            tracing::error!("{error}: it is stuck or gone");
        }
    }

    /// Connections and sessions now.
    pub fn active(&self) -> u64 {
        self.total.now()
    }

    /// Whether a worker has ended though nobody stopped it: the forwarder no longer serves all its clients.
    pub fn has_failed(&self) -> bool {
        self.workers.have_failed()
    }

    /// Whether all workers have taken commands since the last call of this; one that hangs has not.
    #[must_use]
    pub fn makes_progress(&self) -> bool {
        self.workers.make_progress()
    }

    /// Ends everything and joins the workers.
    pub fn stop(self) {
        drop(self);
    }

    /// For so many workers; nothing is held or inherited.
    fn binder<'a>(&'a self, settings: &'a Settings, workers: usize) -> Binder<'a> {
        let Self { datapath, resolver, .. } = self;
        let (held, matched) = (Held::default(), Matched::default());
        Binder { settings, datapath: *datapath, resolver, workers, key: 0, held, matched }
    }

    fn common(&self, settings: &Settings, rules: &[Active]) -> Arc<Common> {
        Arc::new(Common {
            access: settings.access.clone(),
            total: Arc::clone(&self.total),
            log: Arc::clone(&self.log),
            circles: Arc::clone(&self.circles),
            listening: Listening::new(rules),
        })
    }

    pub(crate) fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
