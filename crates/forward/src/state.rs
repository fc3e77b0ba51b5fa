//! What the workers share of one rule, and what each of them counts for it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use turnpike_net::{ConnectOptions, passed::Transport};

use crate::{
    Balance, EndReason, Rule, RuleSnapshot, circles::Circles, clients::Clients, gauge::Gauge, listen::Kind,
    rate::Rates, targets::Targets,
};

/// Shortest and longest time between two sessions that find out whether targets answer which never have, in milliseconds. It doubles with
/// each: the first may be of a client that no target would answer.
const FIRST_EXPLORE_MS: u64 = 2000;
const LONGEST_EXPLORE_MS: u64 = 3_600_000;

/// One rule in force; shared by all workers, never locked on the data path.
pub(crate) struct RuleState {
    /// Unique in the life of the forwarder: a changed rule has a new one.
    pub(crate) key: u32,
    /// Without its targets: those can change, and are in `targets`.
    pub(crate) rule: Rule,
    pub(crate) targets: Targets,
    /// How outgoing sockets of this rule are made; [`Rule::transparent`] sets the source per client.
    pub(crate) connect: ConnectOptions,
    /// Connections and sessions now, and the limit on them.
    pub(crate) active: Gauge,
    /// What single clients have, where the rule limits that.
    pub(crate) clients: Option<Clients>,
    /// Bytes a second, where the rule limits them.
    pub(crate) rates: Option<Arc<Rates>>,
    /// The kernel forwards its datagrams where it can.
    pub(crate) goes_across: bool,
    /// No target could be reached at the last try.
    unreachable: AtomicBool,
    /// How often a target was found to be unhealthy, or healthy again.
    turns: AtomicU64,
    /// A target has answered a datagram of some session.
    answers: AtomicBool,
    /// When a session may next find out whether any target answers, and the time from then to the one after.
    explore_at: AtomicU64,
    explore_wait: AtomicU64,
    /// A client was refused as a part of a circle.
    in_circle: AtomicBool,
}

impl RuleState {
    /// `kernel` as in [`crate::Settings::kernel`].
    pub(crate) fn new(key: u32, rule: Rule, targets: Targets, kernel: bool) -> Self {
        let connect = rule.connect_options();
        Self {
            key,
            goes_across: rule.kernel.unwrap_or(kernel) && rule.kernel_obstacle().is_none(),
            active: Gauge::new(rule.max_connections),
            clients: Clients::new(&rule.limits),
            rates: Rates::new(&rule.limits),
            rule: without_targets(rule),
            targets,
            connect,
            unreachable: AtomicBool::new(false),
            turns: AtomicU64::new(0),
            answers: AtomicBool::new(false),
            explore_at: AtomicU64::new(0),
            explore_wait: AtomicU64::new(FIRST_EXPLORE_MS),
            in_circle: AtomicBool::new(false),
        }
    }

    /// True if this is how `rule` is served, its targets aside.
    pub(crate) fn is_like(&self, rule: &Rule) -> bool {
        self.rule.id == rule.id && self.rule == without_targets(rule.clone())
    }

    /// A health check found something new.
    pub(crate) fn health_turned(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// Grows with each [`RuleState::health_turned`].
    pub(crate) fn health_turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// A target has sent something to a session.
    pub(crate) fn has_answered(&self) {
        // Read alone first: this is asked for each session, by all workers.
        if !self.answers() {
            self.answers.store(true, Ordering::Relaxed);
        }
    }

    /// True if targets are known to answer. Those of a one-way protocol such as syslog never do.
    pub(crate) fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    /// True if a session is to find out which targets answer, where none has answered yet.
    pub(crate) fn explores(&self, now: u64) -> bool {
        let (due, wait) =
            (self.explore_at.load(Ordering::Relaxed), self.explore_wait.load(Ordering::Relaxed));
        let explores = now >= due
            && self
                .explore_at
                .compare_exchange(due, now + wait, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if explores {
            self.explore_wait.store((2 * wait).min(LONGEST_EXPLORE_MS), Ordering::Relaxed);
        }
        explores
    }

    /// Number of rules of this process that a client has come through. A circle of them is reported once.
    ///
    /// # Errors
    /// [`EndReason::Circle`] for one that has come through too many.
    pub(crate) fn hops(&self, circles: &Circles, client: SocketAddr) -> Result<u8, EndReason> {
        let hops = circles.hops(Kind::of(self.rule.protocol).speaks(), client);
        if hops.is_err() && !self.in_circle.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                rule = self.rule.id.0,
                "rules lead to each other in a circle that this one is a part of: its clients from there are refused; check its targets, \
                 and the addresses of their names"
            );
        }
        hops
    }

    /// Transport towards its targets.
    pub(crate) fn targets_speak(&self) -> Transport {
        if self.rule.targets_speak_udp() { Transport::Udp } else { Transport::Tcp }
    }

    /// A connection found no target; `true` when that is news.
    pub(crate) fn is_now_unreachable(&self) -> bool {
        !self.unreachable.swap(true, Ordering::Relaxed)
    }

    /// A connection reached a target; `true` when that is news.
    pub(crate) fn is_reached_again(&self) -> bool {
        // Read alone first: this is asked for each connection, by all workers.
        self.unreachable.load(Ordering::Relaxed) && self.unreachable.swap(false, Ordering::Relaxed)
    }
}

fn without_targets(rule: Rule) -> Rule {
    Rule { targets: Vec::new(), balance: Balance::default(), ..rule }
}

/// A place under the limits of a rule and of the process; dropping it gives the place back.
pub(crate) struct Place {
    rule: Arc<RuleState>,
    total: Arc<Gauge>,
    client: Option<IpAddr>,
}

impl Place {
    /// `None` when either limit is reached.
    pub(crate) fn take(rule: &Arc<RuleState>, total: &Arc<Gauge>) -> Option<Self> {
        if !total.enter() {
            return None;
        }
        if !rule.active.enter() {
            total.leave();
            return None;
        }
        Some(Self { rule: Arc::clone(rule), total: Arc::clone(total), client: None })
    }

    /// Once it is known who the client is: a place among its own, or why there is none.
    pub(crate) fn of_client(&mut self, client: IpAddr, now: u64) -> Result<(), EndReason> {
        if let Some(clients) = &self.rule.clients {
            clients.enter(client, now)?;
            self.client = Some(client);
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let (Some(clients), Some(client)) = (&self.rule.clients, self.client) {
            clients.leave(client);
        }
        self.rule.active.leave();
        self.total.leave();
    }
}

/// What one worker counts for one rule; plain integers, published every 100 ms.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) accepted: u64,
    pub(crate) ended: [u64; REASONS.len()],
    pub(crate) to_target_bytes: u64,
    pub(crate) to_client_bytes: u64,
    pub(crate) to_target_datagrams: u64,
    pub(crate) to_client_datagrams: u64,
    pub(crate) spliced_bytes: u64,
    /// Bytes that the kernel passed from socket to socket, to the target and to the client.
    pub(crate) kernel_bytes: [u64; 2],
    pub(crate) dropped_datagrams: u64,
    pub(crate) pauses: u64,
}

/// Every reason, in the order of [`Counters::ended`].
const REASONS: [EndReason; 17] = [
    EndReason::Finished,
    EndReason::ClientReset,
    EndReason::TargetReset,
    EndReason::TargetDown,
    EndReason::TargetGone,
    EndReason::Idle,
    EndReason::ConnectFailed,
    EndReason::Denied,
    EndReason::HalfClosed,
    EndReason::Limit,
    EndReason::Evicted,
    EndReason::ClientLimit,
    EndReason::ClientRate,
    EndReason::BadProxyHeader,
    EndReason::UntrustedProxy,
    EndReason::Circle,
    EndReason::Shutdown,
];

impl Counters {
    pub(crate) fn count_end(&mut self, reason: EndReason) {
        if let Some(index) = REASONS.iter().position(|other| *other == reason) {
            self.ended[index] += 1;
        }
    }

    pub(crate) fn add_to(&self, snapshot: &mut RuleSnapshot) {
        snapshot.accepted += self.accepted;
        for (reason, count) in REASONS.iter().zip(self.ended) {
            if count == 0 {
                continue;
            }
            match snapshot.ended.iter_mut().find(|(other, _)| other == reason) {
                Some((_, total)) => *total += count,
                None => snapshot.ended.push((*reason, count)),
            }
        }
        snapshot.to_target_bytes += self.to_target_bytes;
        snapshot.to_client_bytes += self.to_client_bytes;
        snapshot.to_target_datagrams += self.to_target_datagrams;
        snapshot.to_client_datagrams += self.to_client_datagrams;
        snapshot.spliced_bytes += self.spliced_bytes;
        snapshot.kernel.add([0; 2], self.kernel_bytes);
        snapshot.dropped_datagrams += self.dropped_datagrams;
        snapshot.pauses += self.pauses;
    }
}
