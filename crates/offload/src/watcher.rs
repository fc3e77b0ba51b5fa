//! Keeps the programs attached to the current interfaces, and their tables of routes and neighbours up to
//! date.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use aya::Ebpf;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    error::OffloadError,
    handover::{PassedLink, PassedWay},
    links::{self, Link},
    netlink::{Interface, NeighbourNews, Netlink, News},
    object::{PROGRAM, tc_descriptor, xdp_descriptor},
    settings::{Attachment, Hook},
    shared::{Attached, Shared},
    verification::classifier,
    xdp,
};

/// Interval at which XDP's neighbours are reported as used: shorter than the kernel's own confirmation
/// interval.
const NEIGHBOURS_EVERY: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_secs(1);
const AFTER_LOST: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

pub(crate) struct Watcher {
    pub(crate) shared: Arc<Shared>,
    pub(crate) object: Ebpf,
    pub(crate) netlink: Netlink,
    pub(crate) news: News,
    pub(crate) neighbours: NeighbourNews,
    pub(crate) stop: OwnedFd,
    pub(crate) at_tc: Hook,
    pub(crate) received: Vec<(PassedLink, Option<OwnedFd>)>,
    pub(crate) complained: BTreeSet<u32>,
}

impl Watcher {
    pub(crate) fn run(mut self) {
        let mut used = Instant::now();
        let mut failed = false;
        loop {
            let stopped = {
                let readable = PollFlags::IN;
                let mut fds = [
                    PollFd::new(&self.stop, readable),
                    PollFd::new(&self.news, readable),
                    PollFd::new(&self.neighbours, readable),
                ];
                let at_most = Timespec::try_from(if failed { AGAIN } else { NEIGHBOURS_EVERY }).ok();
                let _ = poll(&mut fds, at_most.as_ref());
                !fds[0].revents().is_empty()
            };
            if stopped {
                break;
            }
            if self.news.heard() | self.shared.routes.are_unknown() | failed {
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
            let PassedLink { number, told, way } = passed;
            match self.take_link_over(told.as_ref(), way, descriptor) {
                Ok(link) => _ = self.shared.links().insert(number, Attached::new(told, link)),
                Err(error) => tracing::debug!("cannot replace a program of the previous process: {error}"),
            }
        }
    }

    fn take_link_over(
        &mut self,
        told: Option<&Attachment>,
        way: PassedWay,
        descriptor: Option<OwnedFd>,
    ) -> Result<Link, OffloadError> {
        let other = || OffloadError::Object("attached in a different way".to_owned());
        // Attached at TC even though XDP is configured: the driver does not support it, or XDP was not
        // configured before.
        let at_tc = told.is_none_or(|told| self.shared.hook.is_xdp() == told.why.is_some());
        match (way, descriptor) {
            (PassedWay::Xdp, Some(link)) if told.is_some_and(|told| told.hook == self.shared.hook) => {
                links::update(link.as_fd(), xdp_descriptor(&mut self.object)?)?;
                Ok(Link::Xdp(link))
            }
            (PassedWay::Tcx, Some(link)) if at_tc && self.at_tc == Hook::Tcx => {
                links::update(link.as_fd(), tc_descriptor(&mut self.object)?)?;
                Ok(Link::Tcx(link))
            }
            (PassedWay::Filter(filter), _) if at_tc && self.at_tc == Hook::Clsact => {
                let replaced = filter.replace(classifier(&mut self.object, PROGRAM)?);
                replaced.map(Link::Filter).map_err(OffloadError::program)
            }
            (PassedWay::Filter(filter), _) => {
                filter.detach();
                Err(other())
            }
            (PassedWay::Xdp | PassedWay::Tcx, Some(link)) => {
                links::detach(&link);
                Err(other())
            }
            _ => Err(other()),
        }
    }

    /// Attaches to new interfaces and detaches from removed ones. A refusal by an interface is an error at
    /// startup; later, it is only logged.
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
                attached.link.detach();
                if let Some(Attachment { interface, .. }) = attached.told.filter(|_| !starting) {
                    tracing::info!("kernel data path: {interface} is down or has lost its address");
                }
            }
        }
        self.complained.retain(|number| numbers.contains(number));
        for interface in wanted {
            if shared.links().contains_key(&interface.number) {
                continue;
            }
            match self.attach_to(&interface) {
                Ok(attached) => {
                    if let Some(told) = attached.told.as_ref().filter(|_| !starting) {
                        let Attachment { interface, hook, .. } = told;
                        tracing::info!("kernel data path: attached to {interface} ({})", hook.name());
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
                        tracing::warn!("{error}: its packets are relayed in user space");
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
            // Packets between our own relayed addresses pass through loopback and mark their flows.
            return Ok(Attached::new(None, self.attach_to_tc(interface)?));
        }
        let mut why = None;
        if self.shared.hook.is_xdp() {
            match xdp::attach(xdp_descriptor(&mut self.object)?, interface, self.shared.hook) {
                Ok(link) => return Ok(Attached::new(Some(told(self.shared.hook, None)), Link::Xdp(link))),
                Err(said) => why = Some(said),
            }
        }
        let link = self.attach_to_tc(interface)?;
        Ok(Attached::new(Some(told(self.at_tc, why)), link))
    }

    fn attach_to_tc(&mut self, interface: &Interface) -> Result<Link, OffloadError> {
        let program = classifier(&mut self.object, PROGRAM)?;
        links::attach_to_tc(program, PROGRAM, interface, self.at_tc == Hook::Tcx)
    }
}
