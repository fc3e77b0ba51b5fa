//! Keeps the programs attached to the current interfaces, and their tables of routes and neighbours up to
//! date.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use aya::Ebpf;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    time::{ClockId, clock_gettime},
};

use crate::{
    error::OffloadError,
    handover::{PassedLink, PassedWay},
    links::{self, HookDirection, Link},
    netlink::{Interface, NeighbourNews, Netlink, News},
    object::{LEAVES, PROGRAM, tc_descriptor, xdp_descriptor},
    obstacles,
    settings::{Attachment, Hook},
    shared::{Attached, SharedMaps},
    verification::classifier,
    xdp,
};

/// Interval at which XDP's neighbour entries are reported to the kernel as in use; shorter than the kernel's
/// own confirmation interval.
const NEIGHBOURS_EVERY: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_secs(1);
/// Minimum time between two readings of the rules, and the inverse of their maximum CPU share (1/20).
const RULES_AGAIN: Duration = Duration::from_millis(50);
const RULES_SHARE: u32 = 20;
const AFTER_LOST: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

pub(crate) struct Watcher {
    pub(crate) shared: Arc<SharedMaps>,
    pub(crate) object: Ebpf,
    pub(crate) netlink: Netlink,
    pub(crate) news: News,
    pub(crate) neighbours: NeighbourNews,
    pub(crate) stop: OwnedFd,
    pub(crate) at_tc: Hook,
    pub(crate) received: Vec<(PassedLink, Option<OwnedFd>)>,
    pub(crate) complained: BTreeSet<u32>,
    /// Also attaches the program that grants leases.
    pub(crate) leases: bool,
    /// Notifications about rules that may prevent leases.
    pub(crate) rules: Vec<News>,
}

impl Watcher {
    pub(crate) fn run(mut self) {
        let mut used = Instant::now();
        let (mut failed, mut due, mut rest_until) = (false, false, used);
        loop {
            let stopped = {
                let readable = PollFlags::IN;
                let mut fds = vec![
                    PollFd::new(&self.stop, readable),
                    PollFd::new(&self.news, readable),
                    PollFd::new(&self.neighbours, readable),
                ];
                fds.extend(self.rules.iter().map(|rules| PollFd::new(rules, readable)));
                let rest = rest_until.saturating_duration_since(Instant::now());
                let at_most = [(due, rest), (failed, AGAIN), (true, NEIGHBOURS_EVERY)].into_iter();
                let at_most = at_most.filter_map(|(holds, time)| holds.then_some(time)).min();
                let at_most = at_most.and_then(|time| Timespec::try_from(time).ok());
                let _ = poll(&mut fds, at_most.as_ref());
                !fds[0].revents().is_empty()
            };
            if stopped {
                break;
            }
            let changed = self.news.heard();
            if changed | self.shared.routes.are_unknown() | failed {
                let had_failed = std::mem::replace(&mut failed, false);
                for done in [self.attach(false), self.follow_routes()] {
                    if let Err(error) = done {
                        failed = true;
                        if !had_failed {
                            tracing::warn!("{error}: the kernel path keeps its known routes and retries");
                        }
                    }
                }
            }
            let is_time = used.elapsed() >= NEIGHBOURS_EVERY;
            if is_time {
                used = Instant::now();
            }
            // iptables-legacy sends no notifications.
            due |= self.rules.iter().fold(is_time | changed, |heard, rules| rules.heard() | heard);
            if due && Instant::now() >= rest_until {
                let began = cpu_time();
                failed |= self.follow_rules();
                // Reading a large rule set takes a while, so limit how often it happens.
                let rest = cpu_time().saturating_sub(began) * RULES_SHARE;
                rest_until = Instant::now() + rest.clamp(RULES_AGAIN, AGAIN);
                due = false;
            }
            if let Err(error) = self.follow_neighbours(is_time) {
                tracing::warn!(
                    "cannot read the neighbours of this machine ({error}): the kernel path keeps the known ones"
                );
            }
        }
    }

    pub(crate) fn follow_routes(&mut self) -> Result<(), OffloadError> {
        let by_xdp = |(number, it): (&u32, &Attached)| matches!(it.link, Link::Xdp(_)).then_some(*number);
        let xdp = self.shared.links().iter().filter_map(by_xdp).collect();
        Ok(self.shared.routes.refresh(&mut self.netlink, &xdp)?)
    }

    fn follow_neighbours(&mut self, is_time: bool) -> std::io::Result<()> {
        let changed = self.neighbours.heard();
        let routes = &self.shared.routes;
        let those = |which: fn(bool) -> bool| {
            let all = changed.as_ref()?.iter();
            Some(all.filter(|(_, is_there)| which(**is_there)).map(|(hop, _)| *hop).collect::<BTreeSet<_>>())
        };
        let known = those(|is_there| !is_there);
        let is_much = known.is_none();
        let lost = known.map_or_else(|| routes.lost_gateways(&mut self.netlink), Ok)?;
        if is_much || !lost.is_empty() {
            routes.refresh_lost(&mut self.netlink, &lost)?;
            // Waits, to limit the load caused by a flood of unreachable addresses on the link.
            let _ = poll(&mut [PollFd::new(&self.stop, PollFlags::IN)], Some(&AFTER_LOST));
        }
        if !self.shared.hook.is_xdp() {
            return Ok(());
        }
        let changed = those(|_| true);
        if changed.as_ref().is_none_or(|changed| !changed.is_empty()) {
            routes.refresh_neighbours(&mut self.netlink, changed.as_ref())?;
        }
        if is_time { routes.use_neighbours(&mut self.netlink) } else { Ok(()) }
    }

    /// Replaces the previous process's programs if they are attached in the same way.
    pub(crate) fn take_links_over(&mut self) {
        for (passed, descriptor) in std::mem::take(&mut self.received) {
            let PassedLink { number, told, way, direction } = passed;
            match self.take_link_over(told.as_ref(), (way, direction), descriptor) {
                Ok(link) if direction == HookDirection::Egress => {
                    // The link at ingress comes first for each interface.
                    match self.shared.links().get_mut(&number) {
                        Some(attached) => attached.leaves = Some(link),
                        None => link.detach(),
                    }
                }
                Ok(link) => _ = self.shared.links().insert(number, Attached::new(told, link, None)),
                Err(error) => tracing::debug!("cannot replace a program of the previous process: {error}"),
            }
        }
    }

    fn take_link_over(
        &mut self,
        told: Option<&Attachment>,
        (way, direction): (PassedWay, HookDirection),
        descriptor: Option<OwnedFd>,
    ) -> Result<Link, OffloadError> {
        let name = if direction == HookDirection::Egress { LEAVES } else { PROGRAM };
        let is_wanted = direction == HookDirection::Ingress || self.leases;
        // Attached at TC even though XDP is configured: the driver does not support it, or XDP was not
        // configured before.
        let at_tc = told.is_none_or(|told| self.shared.hook.is_xdp() == told.why.is_some());
        match (way, descriptor) {
            (PassedWay::Xdp, Some(link)) if told.is_some_and(|told| told.hook == self.shared.hook) => {
                links::update(link.as_fd(), xdp_descriptor(&mut self.object)?)?;
                Ok(Link::Xdp(link))
            }
            (PassedWay::Tcx, Some(link)) if is_wanted && at_tc && self.at_tc == Hook::Tcx => {
                links::update(link.as_fd(), tc_descriptor(&mut self.object, name)?)?;
                Ok(Link::Tcx(link))
            }
            (PassedWay::Filter(filter), _) if is_wanted && at_tc && self.at_tc == Hook::Clsact => {
                let replaced = filter.replace(classifier(&mut self.object, name)?);
                replaced.map(Link::Filter).map_err(OffloadError::program)
            }
            (PassedWay::Filter(filter), _) => {
                filter.detach();
                Err(OffloadError::OtherHook)
            }
            (PassedWay::Xdp | PassedWay::Tcx, Some(link)) => {
                links::detach(&link);
                Err(OffloadError::OtherHook)
            }
            _ => Err(OffloadError::OtherHook),
        }
    }

    /// Looks for rules that prevent leases. While one exists, no program grants leases: flows leave the
    /// kernel, in order, when their leases end. Returns true if [`Self::attach`] must be called.
    pub(crate) fn follow_rules(&mut self) -> bool {
        if !self.leases {
            return false;
        }
        let unknown = |error| Some(format!("this machine's rules cannot be read ({error})"));
        let found = obstacles::find(&mut self.netlink, self.at_tc == Hook::Tcx).unwrap_or_else(unknown);
        let before = self.shared.set_obstacle(found.clone());
        match (&before, &found) {
            (_, Some(found)) if before.as_ref() != Some(found) => {
                tracing::info!("data path kernel: {found}, so all flows stay in user space");
            }
            (Some(_), None) => tracing::info!("data path kernel: no rule keeps flows in user space any more"),
            _ => {}
        }
        if found.is_some() {
            let leaves: Vec<Link> =
                self.shared.links().values_mut().filter_map(|attached| attached.leaves.take()).collect();
            leaves.into_iter().for_each(Link::detach);
        }
        before.is_some() && found.is_none()
    }

    /// Attaches to new interfaces and detaches from removed ones. A failure to attach is an error at startup;
    /// after that, it is merely logged.
    pub(crate) fn attach(&mut self, starting: bool) -> Result<(), OffloadError> {
        let addressed = self.netlink.with_addresses()?;
        let relays = |it: &Interface| it.is_ethernet && !it.is_port;
        let wanted: Vec<Interface> = self
            .netlink
            .interfaces()?
            .into_iter()
            .filter(|it| it.is_up && addressed.contains(&it.number) && (it.is_loopback || relays(it)))
            .collect();
        let numbers: BTreeSet<u32> = wanted.iter().map(|interface| interface.number).collect();
        let shared = Arc::clone(&self.shared);
        let gone: Vec<u32> =
            shared.links().keys().copied().filter(|number| !numbers.contains(number)).collect();
        for number in gone {
            let attached = shared.links().remove(&number);
            if let Some(attached) = attached {
                let told = attached.told.clone();
                attached.detach();
                if let Some(Attachment { interface, .. }) = told.filter(|_| !starting) {
                    tracing::info!("data path kernel: {interface} is down or has lost its address");
                }
            }
        }
        self.complained.retain(|number| numbers.contains(number));
        for interface in wanted {
            let is_complete =
                |it: &Attached| !self.leases || self.shared.obstacle().is_some() || it.leaves.is_some();
            let known = shared.links().get(&interface.number).map(is_complete);
            match known {
                Some(true) => continue,
                // The attachment was taken over from a process without leases, or an obstacle is gone.
                Some(false) => match self.attach_leaves(&interface) {
                    Ok(leaves) => {
                        if let Some(attached) = shared.links().get_mut(&interface.number) {
                            attached.leaves = leaves;
                        }
                        continue;
                    }
                    Err(error) => {
                        if self.complained.insert(interface.number) {
                            tracing::warn!("{error}: packets of this interface are relayed in user space");
                        }
                        continue;
                    }
                },
                None => {}
            }
            match self.attach_to(&interface) {
                Ok(attached) => {
                    if let Some(told) = attached.told.as_ref().filter(|_| !starting) {
                        let Attachment { interface, hook, .. } = told;
                        tracing::info!("data path kernel: attached to {interface} ({})", hook.name());
                    }
                    shared.links().insert(interface.number, attached);
                }
                Err(_) if !self.netlink.interfaces()?.iter().any(|it| it.number == interface.number) => {}
                Err(error) if starting => {
                    shared.detach_all();
                    return Err(error);
                }
                Err(error) => {
                    if self.complained.insert(interface.number) {
                        tracing::warn!("{error}: packets of this interface are relayed in user space");
                    }
                }
            }
        }
        let mut told: Vec<Attachment> = shared.links().values().filter_map(|it| it.told.clone()).collect();
        if starting
            && self.shared.hook.is_xdp()
            && !told.iter().any(|it| it.hook.is_xdp())
            && !told.is_empty()
        {
            shared.detach_all();
            told.sort_by(|one, other| one.interface.cmp(&other.interface));
            let why = |it: Attachment| format!("{}: {}", it.interface, it.why.unwrap_or_default());
            return Err(OffloadError::Xdp { said: told.into_iter().map(why).collect::<Vec<_>>().join("; ") });
        }
        Ok(())
    }

    fn attach_to(&mut self, interface: &Interface) -> Result<Attached, OffloadError> {
        let told = |hook, why| Attachment { interface: interface.name.clone(), hook, why };
        if interface.is_loopback {
            // Packets between our own relayed addresses pass through loopback; a program there marks their
            // flows.
            let leaves = self.attach_leaves(interface)?;
            return Ok(Attached::new(None, self.attach_to_tc(interface)?, leaves));
        }
        let mut why = None;
        if self.shared.hook.is_xdp() {
            match xdp::attach(xdp_descriptor(&mut self.object)?, interface, self.shared.hook) {
                Ok(link) => {
                    let leaves = self.attach_leaves(interface)?;
                    return Ok(Attached::new(Some(told(self.shared.hook, None)), Link::Xdp(link), leaves));
                }
                Err(said) => why = Some(said),
            }
        }
        let leaves = self.attach_leaves(interface)?;
        let link = self.attach_to_tc(interface)?;
        Ok(Attached::new(Some(told(self.at_tc, why)), link, leaves))
    }

    fn attach_to_tc(&mut self, interface: &Interface) -> Result<Link, OffloadError> {
        let program = classifier(&mut self.object, PROGRAM)?;
        links::attach_to_tc(program, PROGRAM, (interface, HookDirection::Ingress), self.at_tc == Hook::Tcx)
    }

    fn attach_leaves(&mut self, interface: &Interface) -> Result<Option<Link>, OffloadError> {
        if !self.leases || self.shared.obstacle().is_some() {
            return Ok(None);
        }
        let program = classifier(&mut self.object, LEAVES)?;
        let at = (interface, HookDirection::Egress);
        links::attach_to_tc(program, LEAVES, at, self.at_tc == Hook::Tcx).map(Some)
    }
}

/// CPU time of this thread; elapsed time would also depend on the load of the machine.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
