//! State of a rule that the workers share, and the counters of one worker for it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use turnpike_net::{ConnectOptions, SocketProtocol};

use crate::{
    Balance, EndReason, Rule, circles::Circles, clients::ClientCounts, gauge::Gauge, listen::ListenerKind,
    rate::RuleRates, targets::Targets,
};

/// Initial and maximum interval in milliseconds between sessions that test whether any target responds. The
/// interval doubles with each test, because a client may send data that no target would respond to.
const FIRST_EXPLORE_MS: u64 = 2000;
const LONGEST_EXPLORE_MS: u64 = 3_600_000;

/// Active rule, shared by all workers without locks on the data path.
pub(crate) struct RuleState {
    /// Unique within the forwarder; a changed rule gets a new key.
    pub(crate) key: u32,
    /// The rule as configured, without its targets, which can change.
    pub(crate) rule: Rule,
    pub(crate) targets: Targets,
    /// Options of outgoing sockets; with [`Rule::transparent`] the source is set per client.
    pub(crate) connect: ConnectOptions,
    pub(crate) active: Gauge,
    pub(crate) clients: Option<ClientCounts>,
    pub(crate) rates: Option<Arc<RuleRates>>,
    /// True if the kernel forwards the rule's datagrams where possible.
    pub(crate) goes_across: bool,
    /// True if the last attempt reached no target.
    unreachable: AtomicBool,
    /// Number of changes to the health of targets.
    turns: AtomicU64,
    answers: AtomicBool,
    /// Earliest time of the next test of whether targets respond, and the interval after it; milliseconds.
    explore_at: AtomicU64,
    explore_wait: AtomicU64,
    /// True once a client has been refused because of a forwarding loop.
    in_circle: AtomicBool,
}

impl RuleState {
    pub(crate) fn new(key: u32, rule: Rule, targets: Targets, kernel: bool) -> Self {
        let connect = rule.connect_options();
        Self {
            key,
            goes_across: rule.kernel.unwrap_or(kernel) && rule.kernel_obstacle().is_none(),
            active: Gauge::new(rule.max_connections),
            clients: ClientCounts::new(&rule.limits),
            rates: RuleRates::new(&rule.limits),
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

    /// True if `rule` differs at most in its targets.
    pub(crate) fn is_like(&self, rule: &Rule) -> bool {
        self.rule.id == rule.id && self.rule == without_targets(rule.clone())
    }

    pub(crate) fn health_turned(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn health_turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    pub(crate) fn has_answered(&self) {
        // Check before writing, because all workers call this for each session.
        if !self.answers() {
            self.answers.store(true, Ordering::Relaxed);
        }
    }

    /// True if targets are known to respond. Targets of one-way protocols such as syslog never do.
    pub(crate) fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    /// True if no target has responded yet and a session may now test whether any does.
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

    /// Returns the number of rules of this process through which a client has come. Above the limit,
    /// returns [`EndReason::Circle`] and logs this once.
    pub(crate) fn hops(&self, circles: &Circles, client: SocketAddr) -> Result<u8, EndReason> {
        let hops = circles.hops(ListenerKind::of(self.rule.protocol).speaks(), client);
        if hops.is_err() && !self.in_circle.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                rule = self.rule.id.0,
                "the rule is part of a forwarding loop; clients that come through it are refused: check its targets and \
                 the addresses of their names"
            );
        }
        hops
    }

    pub(crate) fn targets_speak(&self) -> SocketProtocol {
        if self.rule.targets_speak_udp() { SocketProtocol::Udp } else { SocketProtocol::Tcp }
    }

    /// Records that no target was reachable; returns true if one was reachable before.
    pub(crate) fn is_now_unreachable(&self) -> bool {
        !self.unreachable.swap(true, Ordering::Relaxed)
    }

    /// Records that a target was reached; returns true if none was reachable before.
    pub(crate) fn is_reached_again(&self) -> bool {
        // Check before writing, because all workers call this for each connection.
        self.unreachable.load(Ordering::Relaxed) && self.unreachable.swap(false, Ordering::Relaxed)
    }
}

fn without_targets(rule: Rule) -> Rule {
    Rule { targets: Vec::new(), balance: Balance::default(), ..rule }
}

/// Slot counted towards the limits of the rule, the process and the client; freed on drop.
pub(crate) struct ConnectionSlot {
    rule: Arc<RuleState>,
    total: Arc<Gauge>,
    client: Option<IpAddr>,
}

impl ConnectionSlot {
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

    /// Counts the client once it is known, or returns the limit it exceeds.
    pub(crate) fn of_client(&mut self, client: IpAddr, now: u64) -> Result<(), EndReason> {
        if let Some(clients) = &self.rule.clients {
            clients.enter(client, now)?;
            self.client = Some(client);
        }
        Ok(())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        if let (Some(clients), Some(client)) = (&self.rule.clients, self.client) {
            clients.leave(client);
        }
        self.rule.active.leave();
        self.total.leave();
    }
}
