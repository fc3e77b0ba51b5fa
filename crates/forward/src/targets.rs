//! Targets of a rule: their addresses, the choice among them, and their health.
//!
//! A *member* is one address of a configured target; a name has one member per address. Balancing treats all
//! members of a rule alike.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, PoisonError},
    time::Instant,
};

use slab::Slab;

use crate::{
    Address, Balance, Endpoint, Host, Rule, UnixName, ZonedIp,
    balance::{self, Weighed},
    resolver::ResolvedName,
    sync::{
        RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    tally::{Tallies, TargetSlot, TargetSnapshot},
};

/// Milliseconds for which other members are preferred to one that was unreachable.
const SUSPECT_MS: u64 = 1000;

/// Maximum number of former members shown, so that a name whose addresses keep changing cannot fill the
/// metrics while old connections remain.
const MOST_SHOWN_FORMER: usize = 64;

/// All targets of a rule, shared by all workers. A reload can change them; sessions with a former target
/// continue.
pub(crate) struct Targets {
    members: RwLock<Members>,
    /// Source address, if configured; restricts targets to its address family.
    source: Option<IpAddr>,
    /// Restricts targets to the client's address family.
    transparent: bool,
    turn: AtomicU64,
    began: Instant,
}

struct Configured {
    endpoint: Endpoint,
    /// `None` for a literal address.
    name: Option<Arc<ResolvedName>>,
    /// Version of the name's addresses on which the members are based.
    seen: AtomicU32,
}

#[derive(Default)]
struct Members {
    configured: Vec<Configured>,
    balance: Balance,
    /// Ordered as in the configuration; addresses of a name are in the order of [`ResolvedName::addresses`].
    current: Vec<Arc<TargetMember>>,
    /// Current members, and former members that still have connections.
    slots: Slab<Arc<TargetMember>>,
    next_serial: u32,
}

pub(crate) struct TargetMember {
    pub(crate) slot: TargetSlot,
    place: MemberAddress,
    /// Configured target; its weight is stored separately.
    endpoint: Endpoint,
    weight: AtomicU32,
    key: u64,
    active: AtomicU64,
    healthy: AtomicBool,
    /// Time until which other members are preferred, in milliseconds since [`Targets::began`]; 0 if not
    /// suspected.
    suspect_until: AtomicU64,
    /// Last known state, for metrics.
    up: AtomicBool,
}

/// Address of a member without its port.
#[derive(Clone, PartialEq, Eq)]
enum MemberAddress {
    Ip(ZonedIp),
    Unix(UnixName),
}

/// Counts as a connection to the member until dropped.
pub(crate) struct Seat {
    member: Arc<TargetMember>,
    slot: TargetSlot,
}

pub(crate) enum Pick {
    At(Seat, Address),
    NoTarget,
    /// An unresolved name may affect the choice.
    Pending,
}

impl Targets {
    /// `name` resolves a host name; its flag allows addresses without a route.
    pub(crate) fn new(rule: &Rule, name: impl FnMut(&str, bool) -> Arc<ResolvedName>) -> Self {
        let targets = Self {
            members: RwLock::default(),
            source: rule.source.map(ZonedIp::ip),
            transparent: rule.transparent,
            turn: AtomicU64::new(0),
            began: Instant::now(),
        };
        targets.change(rule, name);
        targets
    }

    /// Applies the targets of `rule`, whose other settings are unchanged. Remaining members keep their state.
    pub(crate) fn change(&self, rule: &Rule, mut name: impl FnMut(&str, bool) -> Arc<ResolvedName>) {
        // A different routing table may apply, so our own routes prove nothing.
        let any_route = rule.mark.is_some() || rule.device.is_some() || rule.transparent;
        let configured = rule.targets.iter().map(|endpoint| Configured {
            endpoint: endpoint.clone(),
            name: match &endpoint.host {
                Host::Ip(_) | Host::Unix(_) => None,
                Host::Name(host) => Some(name(host, any_route)),
            },
            seen: AtomicU32::new(0),
        });
        let configured = configured.collect();
        let mut members = self.write();
        members.configured = configured;
        members.balance = rule.balance;
        members.rebuild(self.source);
    }

    pub(crate) fn are_of(&self, rule: &Rule) -> bool {
        let members = self.read();
        members.balance == rule.balance
            && members.configured.iter().map(|target| &target.endpoint).eq(&rule.targets)
    }

    /// True if there may be more than one address.
    pub(crate) fn has_choice(&self) -> bool {
        let configured = &self.read().configured;
        configured.len() > 1 || configured.iter().any(|target| target.name.is_some())
    }

    /// Selects a member for a client, excluding `tried`. `offset` is the listener's port minus the first of
    /// its range. If `wait` is true, returns [`Pick::Pending`] if an unresolved name may change the choice.
    /// All clients of a Unix socket count as one source.
    pub(crate) fn pick(&self, client: Option<IpAddr>, offset: u16, tried: &[TargetSlot], wait: bool) -> Pick {
        let members = self.up_to_date();
        let client = client.map(|client| client.to_canonical());
        let usable = |member: &&TargetMember| {
            member.weight() > 0
                && !(self.transparent && client.is_some_and(|client| member.place.is_foreign_to(client)))
                && !tried.contains(&member.slot)
        };
        let all = members.current.iter().map(Arc::as_ref).filter(usable);
        let chosen = self.choose(members.balance, client.unwrap_or(Ipv6Addr::UNSPECIFIED.into()), all);
        if wait && members.has_to_wait(chosen) {
            return Pick::Pending;
        }
        let member = chosen.and_then(|chosen| members.slots.get(chosen.slot.at as usize));
        member.map_or(Pick::NoTarget, |member| Pick::At(Seat::take(member), member.address(offset)))
    }

    /// If no member is healthy, all count as healthy, because failing checks must not turn away clients that
    /// a target would serve.
    fn choose<'a>(
        &self,
        balance: Balance,
        client: IpAddr,
        all: impl Iterator<Item = &'a TargetMember> + Clone,
    ) -> Option<&'a TargetMember> {
        let healthy = all.clone().filter(|member| self.is_healthy(member));
        let turn = || self.turn.fetch_add(1, Ordering::Relaxed);
        match balance {
            Balance::RoundRobin => {
                let turn = turn();
                balance::in_turn(turn, healthy).or_else(|| balance::in_turn(turn, all))
            }
            Balance::LeastConnections => {
                let turn = turn();
                balance::least_busy(turn, healthy).or_else(|| balance::least_busy(turn, all))
            }
            Balance::Failover => healthy.clone().next().or_else(|| all.clone().next()),
            Balance::Source => {
                balance::by_source(client, healthy).or_else(|| balance::by_source(client, all))
            }
        }
    }

    /// Seat at this address, for a handed-over session.
    pub(crate) fn at(&self, address: SocketAddr, offset: u16) -> Option<Seat> {
        let members = self.up_to_date();
        let found = members.current.iter().find(|member| member.address(offset) == Address::Ip(address));
        found.map(Seat::take)
    }

    /// Releases the seat of a session that kept only its slot.
    pub(crate) fn leave(&self, slot: TargetSlot) {
        if let Some(member) = self.member(slot) {
            member.active.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn member(&self, slot: TargetSlot) -> Option<Arc<TargetMember>> {
        self.read().slots.get(slot.at as usize).filter(|member| member.slot == slot).map(Arc::clone)
    }

    /// Records a failed attempt, after which other members are tried first for a while.
    pub(crate) fn suspect(&self, member: &TargetMember) {
        member.up.store(false, Ordering::Relaxed);
        member.suspect_until.store(self.now() + SUSPECT_MS, Ordering::Relaxed);
    }

    /// True if a member fails its health checks while another one passes them.
    pub(crate) fn is_down(&self, slot: TargetSlot) -> bool {
        let members = self.read();
        let healthy = |member: &Arc<TargetMember>| member.healthy.load(Ordering::Relaxed);
        let fails =
            members.slots.get(slot.at as usize).is_some_and(|member| member.slot == slot && !healthy(member));
        fails && members.current.iter().any(healthy)
    }

    /// True if a connection or session has a former target ([`Targets::is_former`]).
    pub(crate) fn has_former(&self) -> bool {
        let members = self.up_to_date();
        let mut busy = members.slots.iter().filter(|(_, member)| member.active.load(Ordering::Relaxed) > 0);
        busy.any(|(_, member)| members.is_former(member))
    }

    /// True if a member gets no new connections because its name lost the address or its weight is 0.
    pub(crate) fn is_former(&self, slot: TargetSlot) -> bool {
        let members = self.read();
        let member = members.slots.get(slot.at as usize).filter(|member| member.slot == slot);
        member.is_none_or(|member| members.is_former(member))
    }

    pub(crate) fn current(&self) -> Vec<Arc<TargetMember>> {
        self.up_to_date().current.clone()
    }

    /// Describes all current members and some former ones, with the counters of one worker.
    pub(crate) fn describe(&self, tallies: &Tallies) -> Vec<TargetSnapshot> {
        let members = self.up_to_date();
        let is_current =
            |member: &&Arc<TargetMember>| members.current.iter().any(|other| Arc::ptr_eq(other, member));
        let left = members.slots.iter().map(|(_, member)| member).filter(|member| !is_current(member));
        let known = members.current.iter().chain(left.take(MOST_SHOWN_FORMER));
        known.filter_map(|member| Some(member.describe().with(tallies.get(member.slot)?))).collect()
    }

    fn is_healthy(&self, member: &TargetMember) -> bool {
        let until = member.suspect_until.load(Ordering::Relaxed);
        member.healthy.load(Ordering::Relaxed) && (until == 0 || until <= self.now())
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn read(&self) -> RwLockReadGuard<'_, Members> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Members> {
        self.members.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn up_to_date(&self) -> RwLockReadGuard<'_, Members> {
        let members = self.read();
        if members.configured.iter().all(Configured::is_up_to_date) {
            return members;
        }
        drop(members);
        self.write().rebuild(self.source);
        self.read()
    }
}

impl Members {
    /// Applies the current addresses of names. Remaining members keep their state; a member whose address is
    /// gone gets no new connections and is removed once its last connection ends. Addresses whose family
    /// differs from that of `source` are skipped.
    fn rebuild(&mut self, source: Option<IpAddr>) {
        let Self { configured, current, slots, next_serial, .. } = self;
        current.clear();
        for target in configured.iter() {
            // Read the version before the addresses, so that addresses that change in between are read again
            // next time.
            let version = target.name.as_ref().map_or(0, |name| name.version());
            for place in target.places() {
                if source.is_some_and(|source| place.is_foreign_to(source)) {
                    continue;
                }
                let is_taken =
                    |member: &Arc<TargetMember>| current.iter().any(|current| Arc::ptr_eq(current, member));
                let known = slots.iter().map(|(_, member)| member).find(|member| {
                    member.place == place
                        && member.endpoint.is_same_place(&target.endpoint)
                        && !is_taken(member)
                });
                let member = known.map(Arc::clone).unwrap_or_else(|| {
                    *next_serial = next_serial.wrapping_add(1);
                    let entry = slots.vacant_entry();
                    #[expect(
                        clippy::cast_possible_truncation,
                        reason = "there are far fewer than 2^32 members"
                    )]
                    let slot = TargetSlot { at: entry.key() as u32, serial: *next_serial };
                    Arc::clone(entry.insert(Arc::new(TargetMember::new(slot, place, &target.endpoint))))
                });
                member.weight.store(target.endpoint.weight.into(), Ordering::Relaxed);
                current.push(member);
            }
            target.seen.store(version, Ordering::Release);
        }
        // Seats are taken under the read lock, so none can be taken now.
        slots.retain(|_, member| {
            member.active.load(Ordering::Relaxed) > 0
                || current.iter().any(|current| Arc::ptr_eq(current, member))
        });
    }

    /// True if an unresolved name could change the choice; never true for round robin.
    fn has_to_wait(&self, chosen: Option<&TargetMember>) -> bool {
        let is_pending = |target: &Configured| {
            target.endpoint.weight > 0 && target.name.as_ref().is_some_and(|name| name.version() == 0)
        };
        match (self.balance, chosen) {
            (Balance::Failover, Some(chosen)) => self
                .configured
                .iter()
                .take_while(|target| !chosen.endpoint.is_same_place(&target.endpoint))
                .any(is_pending),
            (Balance::RoundRobin | Balance::LeastConnections, Some(_)) => false,
            (Balance::Source, _) | (_, None) => self.configured.iter().any(is_pending),
        }
    }

    fn is_former(&self, member: &Arc<TargetMember>) -> bool {
        member.weight() == 0 || !self.current.iter().any(|current| Arc::ptr_eq(current, member))
    }
}

impl Configured {
    fn is_up_to_date(&self) -> bool {
        let seen = self.seen.load(Ordering::Acquire);
        self.name.as_ref().is_none_or(|name| name.version() == seen)
    }

    fn places(&self) -> Vec<MemberAddress> {
        match (&self.endpoint.host, &self.name) {
            (Host::Ip(ip), _) => vec![MemberAddress::Ip((*ip).into())],
            (Host::Unix(name), _) => vec![MemberAddress::Unix(name.clone())],
            (Host::Name(_), Some(name)) => name.addresses().into_iter().map(MemberAddress::Ip).collect(),
            (Host::Name(_), None) => Vec::new(),
        }
    }
}

impl MemberAddress {
    /// True if the address families differ.
    fn is_foreign_to(&self, from: IpAddr) -> bool {
        matches!(self, Self::Ip(address) if address.ip().is_ipv4() != from.is_ipv4())
    }

    fn key(&self, port: u16) -> u64 {
        match self {
            Self::Ip(address) => balance::key(address.ip(), port),
            Self::Unix(name) => balance::key_of_name(&name.to_string()),
        }
    }
}

impl TargetMember {
    fn new(slot: TargetSlot, place: MemberAddress, endpoint: &Endpoint) -> Self {
        Self {
            slot,
            weight: AtomicU32::new(endpoint.weight.into()),
            key: place.key(endpoint.ports.first),
            place,
            endpoint: endpoint.clone(),
            active: AtomicU64::new(0),
            healthy: AtomicBool::new(true),
            suspect_until: AtomicU64::new(0),
            up: AtomicBool::new(true),
        }
    }

    /// Target address for a client that arrived at this port offset of the listener.
    pub(crate) fn address(&self, offset: u16) -> Address {
        let ip = match &self.place {
            MemberAddress::Ip(address) => *address,
            MemberAddress::Unix(name) => return Address::Unix(name.clone()),
        };
        let ports = self.endpoint.ports;
        let port = if ports.first == ports.last { ports.first } else { ports.first.saturating_add(offset) };
        ip.at(port).into()
    }

    /// Records that the target accepted a connection or responded.
    pub(crate) fn answered(&self) {
        // Check before writing, because all workers call this and the value rarely changes.
        if !self.up.load(Ordering::Relaxed) {
            self.up.store(true, Ordering::Relaxed);
        }
    }

    /// Records the result of a health check; returns true if it has changed.
    pub(crate) fn set_healthy(&self, healthy: bool) -> bool {
        self.up.store(healthy, Ordering::Relaxed);
        self.healthy.swap(healthy, Ordering::Relaxed) != healthy
    }

    pub(crate) fn describe(&self) -> TargetSnapshot {
        let weight = u16::try_from(self.weight()).unwrap_or(u16::MAX);
        let target = Endpoint { weight, ..self.endpoint.clone() };
        TargetSnapshot::new(target, self.address(0), self.up.load(Ordering::Relaxed))
    }
}

impl Weighed for TargetMember {
    fn weight(&self) -> u64 {
        self.weight.load(Ordering::Relaxed).into()
    }

    fn active(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    fn key(&self) -> u64 {
        self.key
    }
}

impl Seat {
    fn take(member: &Arc<TargetMember>) -> Self {
        member.active.fetch_add(1, Ordering::Relaxed);
        Self { member: Arc::clone(member), slot: member.slot }
    }

    pub(crate) fn slot(&self) -> TargetSlot {
        self.slot
    }

    pub(crate) fn member(&self) -> &TargetMember {
        &self.member
    }

    /// Releases the object but not the seat; see [`Targets::leave`].
    pub(crate) fn keep(self) -> TargetSlot {
        self.member.active.fetch_add(1, Ordering::Relaxed);
        self.slot
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.member.active.fetch_sub(1, Ordering::Relaxed);
    }
}

// Explicit path, because `interleave` includes this file from another directory.
#[cfg(test)]
#[path = "targets/tests.rs"]
mod tests;
