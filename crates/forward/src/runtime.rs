//! Starts, reloads, monitors and stops the workers.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool, mpsc},
    time::{Duration, Instant},
};

use hashbrown::HashMap;
use strum::{IntoStaticStr, VariantArray};
use turnpike_net::{BindError, Datapath, PassedSockets};
use turnpike_offload::{Kernel, OffloadError};
use turnpike_worker::Workers;

use crate::{
    Access, Address, Rule, RuleId, ZonedIp,
    binder::{self, Active, Binder, NewRules, RuleTable, WaitingRule},
    circles::Circles,
    common::ForwardCommon,
    gauge::Gauge,
    here::Listening,
    kernel::Loaded,
    listen::{ListenerKind, RemovedListeners},
    resolver::Resolver,
    tally::TargetSnapshot,
    upgrade::{ForwarderHandover, Matched},
    worker::{Command, ForwardSnapshots, RuleChange, Worker},
};

/// Settings for all rules. `workers`, `datapath`, the kernel settings and `busy_poll` cannot be changed by a
/// reload.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of worker threads; at least 1.
    pub workers: usize,
    pub datapath: Datapath,
    /// Default of [`Rule::kernel`]: true if the kernel forwards single datagrams.
    pub kernel: bool,
    /// Maximum number of kernel flows, two per session; additional sessions stay in user space.
    pub max_kernel_flows: u32,
    /// Uses the kernel path only for sessions that this machine's firewall, routing and IPsec leave
    /// unchanged, and starts even if that path is unavailable.
    pub kernel_leases: bool,
    /// Time for which an idle worker polls before it sleeps; if zero, it sleeps immediately.
    pub busy_poll: Duration,
    /// Checked before each rule's own lists.
    pub access: Access,
    pub max_connections: usize,
    /// Interval between lookups of a name.
    pub resolve_every: Duration,
    /// Start even if some rules cannot be bound.
    pub keep_going: bool,
    /// Set to true when the program stops, so that a start or reload in progress no longer waits for names.
    pub stopping: Arc<AtomicBool>,
    /// Listening sockets from the service manager; those whose addresses no rule uses are left alone.
    pub passed: Arc<PassedSockets>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error("rule {rule}: {error}")]
    Listen { rule: String, error: BindError },
    /// The name in `listen` did not resolve to an address.
    #[error(
        "rule {rule}: cannot listen on {listener}: {error}; check the name, or set keep_going to start without this rule"
    )]
    Name { rule: String, listener: String, error: String },
    #[error("rule {rule}: cannot send {what}: {source}; {remedy}")]
    Outgoing { rule: String, what: String, source: io::Error, remedy: &'static str },
    /// The old process serves a rule that the new process does not have.
    #[error(
        "the running process serves rule {rule} ({addresses}), which was removed here or has a different protocol or port: reload the \
         running process first (SIGHUP)"
    )]
    RuleGone { rule: String, addresses: String },
    #[error("--datapath kernel: {0}")]
    Datapath(#[source] OffloadError),
    #[error("--copy kernel: {0}")]
    Copy(#[source] OffloadError),
    #[error(
        "cannot start a worker: {0}; raise the limit on open files (ulimit -n) or on threads (ulimit -u)"
    )]
    Worker(#[from] io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum EndReason {
    /// Both sides sent FIN.
    Finished,
    ClientReset,
    /// RST from the target, or an ICMP port unreachable.
    TargetReset,
    /// The target of a UDP session failed its health check while another is healthy.
    TargetDown,
    /// The target of a UDP session was removed: its name lost the address, or its weight is 0.
    TargetGone,
    Idle,
    ConnectFailed,
    /// Refused by allow and deny lists.
    Denied,
    HalfClosed,
    Limit,
    /// Refused by [`crate::Limits::max_connections_per_client`]; counted, not reported.
    ClientLimit,
    /// Refused by [`crate::Limits::new_connections_per_client`]; counted, not reported.
    ClientRate,
    /// UDP session evicted to make room for a new one at a limit; it had been idle the longest.
    Evicted,
    /// Malformed or missing PROXY header from a proxy in [`Rule::proxy_protocol_from`].
    BadProxyHeader,
    /// PROXY header from an address that is not a trusted proxy.
    UntrustedProxy,
    /// The client came through a forwarding loop; counted, and logged once.
    Circle,
    /// The rule was removed or changed (UDP), or the forwarder stopped.
    Shutdown,
}

impl EndReason {
    /// True if this reason is only counted, so that neither clients beyond their limits nor a forwarding loop can
    /// fill the log.
    pub(crate) fn is_quiet(self) -> bool {
        matches!(self, Self::ClientLimit | Self::ClientRate | Self::Circle)
    }
}

/// An ended connection or session, for the log.
#[derive(Clone, Debug)]
pub struct ConnectionReport {
    pub rule: RuleId,
    pub client: Address,
    /// Target that was reached, if any; for UDP, the last target tried if none was reached.
    pub target: Option<Address>,
    /// Bytes to the target.
    pub to_target: u64,
    /// Bytes to the client.
    pub to_client: u64,
    pub lived: Duration,
    pub reason: EndReason,
}

/// Receives ended connections from the worker threads; must not block.
pub trait ConnectionLog: Send + Sync {
    fn ended(&self, report: ConnectionReport);
}

/// Traffic that the kernel forwarded on its own, to the target and to the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByKernel {
    /// UDP only.
    pub datagrams: [u64; 2],
    /// UDP payload and TCP data.
    pub bytes: [u64; 2],
}

impl ByKernel {
    pub(crate) fn add(&mut self, datagrams: [u64; 2], bytes: [u64; 2]) {
        for (sum, more) in [(&mut self.datagrams, datagrams), (&mut self.bytes, bytes)] {
            sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RuleStanding {
    Listening,
    /// Could not be bound, for this reason; binding is retried ([`Settings::keep_going`]).
    Waiting(String),
    /// Removed, but some connections are still open.
    #[default]
    Closed,
}

/// Counters of a rule over all workers, at most 100 ms old; kernel counters may be up to one second older.
#[derive(Clone, Debug, Default)]
pub struct RuleSnapshot {
    pub standing: RuleStanding,
    pub active: u64,
    pub accepted: u64,
    pub ended: Vec<(EndReason, u64)>,
    pub to_target_bytes: u64,
    pub to_client_bytes: u64,
    /// UDP only.
    pub to_target_datagrams: u64,
    /// UDP only.
    pub to_client_datagrams: u64,
    /// TCP bytes that never entered user space.
    pub spliced_bytes: u64,
    /// Part of this traffic that the kernel forwarded without waking a worker.
    pub kernel: ByKernel,
    /// Datagrams dropped because of the session limit, a full queue or their length.
    pub dropped_datagrams: u64,
    /// One entry per address of a target, including unused addresses. A former address of a name stays until
    /// its last connection ends.
    pub targets: Vec<TargetSnapshot>,
    /// Datagrams dropped because of the bandwidth limit of the rule or session.
    pub limited_datagrams: u64,
    /// Number of times a TCP connection paused reading because of a bandwidth limit.
    pub pauses: u64,
}

impl RuleSnapshot {
    pub(crate) fn count_ends(&mut self, reason: EndReason, count: u64) {
        match self.ended.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, total)) => *total += count,
            None => self.ended.push((reason, count)),
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.active += other.active;
        self.accepted += other.accepted;
        other.ended.iter().for_each(|(reason, count)| self.count_ends(*reason, *count));
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

const CHANGE: Duration = Duration::from_secs(10);

/// A running forwarder. Dropping it stops the workers.
pub struct Forwarder {
    pub(crate) workers: Workers<Command, ForwardSnapshots>,
    pub(crate) datapath: Datapath,
    pub(crate) began: Instant,
    total: Arc<Gauge>,
    log: Arc<dyn ConnectionLog>,
    circles: Arc<Circles>,
    resolver: Resolver,
    rules: Mutex<RuleTable>,
}

impl Forwarder {
    /// Binds all listeners and starts the workers. On error, everything is closed again; with
    /// [`Settings::keep_going`], rules that cannot be bound are returned instead.
    pub fn start(
        settings: &Settings,
        rules: &[Rule],
        log: Arc<dyn ConnectionLog>,
    ) -> Result<(Self, Vec<StartError>), StartError> {
        Self::begin(settings, rules, log, None)
    }

    /// Like [`Forwarder::start`], but takes over the sockets and sessions of another process, and serves
    /// clients once [`crate::upgrade`] completes. The data path and the number of workers must be the same.
    /// On error, the other process continues.
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
        // One clock for all workers, so that they can share token buckets.
        let began = handover.as_ref().map_or_else(Instant::now, ForwarderHandover::began);
        let total = Arc::new(Gauge::new(settings.max_connections));
        let circles = Arc::<Circles>::default();
        let common = Arc::new(ForwardCommon {
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
            rules: Mutex::new(RuleTable::default()),
        };
        let mut names = HashMap::new();
        // Handed-over listeners are matched by address, so names must be resolved already.
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
        // Every offered rule was taken over, or the start would have failed earlier.
        let keys = matched.keys(&keys).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        forwarder.rules = Mutex::new(RuleTable { active, next_key, loaded, waiting, names, drained: false });
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

    /// Addresses of all listeners; ports chosen by the kernel are resolved.
    pub fn listeners(&self) -> Vec<(RuleId, Address)> {
        let rules = self.rules();
        let each = rules.active.iter().flat_map(|rule| {
            rule.addresses.iter().map(|address| (rule.state.rule.id.clone(), address.clone()))
        });
        each.collect()
    }

    /// Applies new rules and resolves all names again. Connections of unchanged rules continue; those of
    /// removed and changed rules may finish, but their listeners close. If only targets change, listeners,
    /// connections and sessions stay; a session leaves a target that was removed or has weight 0 once the
    /// target stops responding. If an old and a new rule share a TCP address, its listener is handed over, so
    /// no waiting client is lost.
    ///
    /// On error the old rules stay active. With [`Settings::keep_going`], rules that cannot be bound are
    /// returned and retried by [`Forwarder::retry`]; it is still an error if no rule could be bound.
    pub fn reload(&self, settings: &Settings, rules: &[Rule]) -> Result<Vec<StartError>, StartError> {
        // The lock is not held here, because name servers may be slow and counters must remain readable.
        let mut names = self.rules().names.clone();
        let (resolved, _held) =
            binder::resolved(rules, &self.resolver, &mut names, settings.keep_going, &settings.stopping);
        let mut in_force = self.rules();
        in_force.names = names;
        let is_kept = |active: &Active| resolved.iter().any(|rule| active.state.is_like(rule));
        let is_new =
            |(_, rule): &(&Rule, &Rule)| !in_force.active.iter().any(|active| active.state.is_like(rule));
        let mut held = RemovedListeners::default();
        for active in in_force.active.iter().filter(|active| !is_kept(active)) {
            let kind = ListenerKind::of(active.state.rule.protocol);
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

    /// Tries to bind waiting rules, since an address, name or device may appear later. Returns the rules that
    /// are now active.
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
        let is_bound = |waiting: &WaitingRule| ids.contains(&waiting.rule.id);
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

    fn put_in_force(
        &self,
        in_force: &mut RuleTable,
        settings: &Settings,
        NewRules { active: mut newcomers, of_workers, .. }: NewRules,
        is_kept: impl Fn(&Active) -> bool,
    ) -> Result<(), StartError> {
        let states = newcomers.iter().map(|active| &*active.state);
        let parts = in_force.loaded.provide(settings, self.workers.count(), None, states)?;
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
            Command::Change(Box::new(RuleChange { common, parts, leave, come, done }))
        });
        Ok(())
    }

    /// Counters of each rule, including unused and waiting rules. A removed rule stays until its last
    /// connection ends.
    pub fn snapshots(&self) -> Vec<(RuleId, RuleSnapshot)> {
        let rules = self.rules();
        let mut all: Vec<(RuleId, RuleSnapshot)> = Vec::with_capacity(rules.active.len());
        for Active { state, .. } in &rules.active {
            // Start with the current state; the workers' snapshots only add counts.
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

    pub fn kernel(&self) -> Option<Arc<Kernel>> {
        self.rules().loaded.kernel().map(Arc::clone)
    }

    /// Reason why the kernel path is not used although [`Settings::kernel_leases`] requests it.
    pub fn kernel_lack(&self) -> Option<String> {
        self.rules().loaded.lack().map(str::to_owned)
    }

    /// Closes the listeners. Connections continue, as do UDP sessions that had a datagram in the last two
    /// seconds. When this returns, other processes of this user can listen on the ports.
    pub fn drain(&self) {
        let mut rules = self.rules();
        rules.waiting.clear();
        rules.drained = true;
        // Remove the socket files first, so that a successor can listen there.
        rules.active.iter_mut().for_each(|active| active.file = None);
        drop(rules);
        // Done in two steps, because as long as only some workers listen, the kernel distributes datagrams
        // differently, and those of live sessions would reach the wrong workers.
        self.tell_all(Command::Drain);
        self.tell_all(Command::Unlisten);
    }

    /// Sends each worker a command and waits until all have replied.
    fn tell_all(&self, command: impl FnMut(mpsc::Sender<()>) -> Command) {
        if let Err(error) = self.workers.ask(CHANGE, "complete its command", command) {
            tracing::error!("{error}: the worker is stuck or has ended");
        }
    }

    pub fn active(&self) -> u64 {
        self.total.now()
    }

    /// True if a worker has ended unexpectedly, so that some clients are not served.
    pub fn has_failed(&self) -> bool {
        self.workers.have_failed()
    }

    /// False if a worker has run no commands since the last call that returned true.
    #[must_use]
    pub fn makes_progress(&self) -> bool {
        self.workers.make_progress()
    }

    pub fn stop(self) {
        drop(self);
    }

    fn binder<'a>(&'a self, settings: &'a Settings, workers: usize) -> Binder<'a> {
        let Self { datapath, resolver, .. } = self;
        let (held, matched) = (RemovedListeners::default(), Matched::default());
        Binder { settings, datapath: *datapath, resolver, workers, key: 0, held, matched }
    }

    fn common(&self, settings: &Settings, rules: &[Active]) -> Arc<ForwardCommon> {
        Arc::new(ForwardCommon {
            access: settings.access.clone(),
            total: Arc::clone(&self.total),
            log: Arc::clone(&self.log),
            circles: Arc::clone(&self.circles),
            listening: Listening::new(rules),
        })
    }

    pub(crate) fn rules(&self) -> MutexGuard<'_, RuleTable> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
