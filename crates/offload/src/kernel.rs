//! The programs in the kernel: loaded, attached to the interfaces that there are, and kept attached to those that come.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    io::{self, Write},
    net::SocketAddr,
    ops::RangeInclusive,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, MapError, PerCpuArray},
    programs::Xdp,
    util::KernelVersion,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use crate::{
    error::OffloadError,
    flows::{Flows, REST_NS, now_ns},
    layout::{self, Count, FlowKey, GATEWAY_WORDS, HOP_WORDS, STATE_WORDS},
    lent::{Inherited, Lent, LentLink, LentWay, MAPS},
    links::{self, Link},
    mapped_array::MappedArray,
    netlink::{Interface, NeighbourNews, Netlink, News},
    ports::Ports,
    routes::Routes,
    slots::Slots,
    verification::{classifier, load_classifier, load_program},
    xdp,
};

/// Built by `bpf/build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/relay.o");

/// The program for TC, by whose name leftovers are found too.
const PROGRAM: &str = "turnpike";
/// The program for XDP.
const XDP_PROGRAM: &str = "turnpike_xdp";

/// The first kernel with bpf_check_mtu.
const TELLS_MTU: KernelVersion = KernelVersion::new(5, 12, 0);

/// How often the kernel is told which neighbours XDP sends to: before it asks itself whether they are still there.
const NEIGHBOURS_EVERY: Duration = Duration::from_secs(10);
/// When the kernel is asked again that could not be asked.
const AGAIN: Duration = Duration::from_secs(1);
/// The watcher rests so long when neighbours were lost.
const AFTER_LOST: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// What the program is made for.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where a server's clients send their datagrams; a forwarder has none here.
    pub listeners: Vec<SocketAddr>,
    /// Ports of relayed transport addresses; may be empty.
    pub relay_ports: RangeInclusive<u16>,
    /// Flows that there may be, each in one direction.
    pub flows: u32,
    /// Sockets that take what goes up.
    pub sockets: u32,
    /// How the program is attached.
    pub hook: Hook,
}

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// As this kernel can.
    Best,
    /// As a link (Linux 6.6), which ends with the process, however that ends.
    Tcx,
    /// As a filter, which stays if the process is killed: until the next start, or with the flows' own time.
    Clsact,
    /// In the driver, by a link; [`Hook::Best`] on interfaces whose driver cannot, if there is one that can.
    Xdp,
    /// The same by any driver, which is slower than TC: for tests.
    XdpGeneric,
}

impl Hook {
    /// Whether it sees packets before GRO does.
    #[must_use]
    pub fn is_xdp(self) -> bool {
        matches!(self, Self::Xdp | Self::XdpGeneric)
    }

    /// As users know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Best => "best",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
            Self::Xdp => "xdp",
            Self::XdpGeneric => "xdp-generic",
        }
    }
}

/// An interface on which lone datagrams are relayed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Its name.
    pub interface: String,
    /// How the program is attached: not [`Hook::Best`].
    pub hook: Hook,
    /// Why that is not XDP, where that was asked for.
    pub why: Option<String>,
}

/// A program that is loaded, and mostly attached. Dropped, it is not.
pub struct Kernel {
    shared: Arc<Shared>,
    stage: Mutex<Stage>,
    stop: OwnedFd,
    settings: Settings,
    /// Of maps that another process goes on with as long as this one does not: what is to be looked at from then on.
    due: Mutex<Option<(Vec<SocketAddr>, RangeInclusive<u16>)>>,
    /// Whether this one has the flows of the process before.
    keeps_flows: bool,
}

enum Stage {
    Loaded(Box<Watcher>),
    /// By the watcher on that thread.
    Attached(JoinHandle<()>),
    Detached,
}

/// What workers and the watcher share.
pub(crate) struct Shared {
    /// A descriptor of the map of flows, to be cloned.
    pub(crate) flows: MapData,
    pub(crate) states: MappedArray,
    pub(crate) drained: MappedArray,
    pub(crate) routes: Routes,
    /// Classes of ports.
    pub(crate) ports: Ports,
    pub(crate) state_slots: Mutex<Slots>,
    pub(crate) socket_slots: Mutex<Slots>,
    pub(crate) most_flows: u32,
    /// Flows that there are, and that there was no room for.
    pub(crate) held: AtomicU64,
    pub(crate) refused: AtomicU64,
    /// Distinguishes installations, over all workers, and from those of a process before.
    pub(crate) stamp: AtomicU64,
    pub(crate) first_stamp: u64,
    /// Flows of a process before that workers have made their own, until it is known that all have.
    pub(crate) adopted: Mutex<HashSet<FlowKey>>,
    /// How long after a program has seen it a packet may come to its socket.
    pub(crate) gap_ns: u64,
    counts: Mutex<PerCpuArray<MapData, u64>>,
    /// [`MAPS`].
    maps: Vec<OwnedFd>,
    /// By the interface's number.
    links: Mutex<BTreeMap<u32, Attached>>,
    /// Another process has the links and the flows.
    is_handed_on: AtomicBool,
    hook: Hook,
}

/// What the program and its maps are at.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// By [`Count`].
    pub counts: [u64; Count::VARIANTS.len()],
    /// Flows in the map.
    pub flows: u64,
    /// Flows that it holds at most.
    pub most_flows: u64,
    /// Flows for which there was no room, so far.
    pub refused: u64,
}

impl Kernel {
    /// Loads the program and attaches it to each Ethernet interface that is up and has an address.
    ///
    /// # Errors
    /// [`OffloadError`], which says what to change; then nothing is left attached.
    pub fn start(settings: &Settings) -> Result<Self, OffloadError> {
        let kernel = Self::load(settings)?;
        kernel.attach()?;
        Ok(kernel)
    }

    /// Loads the program, for [`Kernel::attach`]: another process may have its own attached until then.
    ///
    /// # Errors
    /// As for [`Kernel::start`].
    pub fn load(settings: &Settings) -> Result<Self, OffloadError> {
        Self::prepare(settings, Inherited::default())
    }

    /// The same in the place of another process, by what [`Kernel::lend`] of that one gave: [`Kernel::attach`] has these programs take the place
    /// of that one's. Until then that one has everything that it had.
    ///
    /// # Errors
    /// As for [`Kernel::start`].
    pub fn succeed(settings: &Settings, lent: Lent, descriptors: Vec<OwnedFd>) -> Result<Self, OffloadError> {
        let mut settings = settings.clone();
        let sockets = lent.sockets;
        let inherited = lent.open(descriptors, &settings).map_err(OffloadError::Inherited)?;
        if inherited.maps.is_some() {
            settings.sockets = sockets;
        }
        Self::prepare(&settings, inherited)
    }

    fn prepare(settings: &Settings, inherited: Inherited) -> Result<Self, OffloadError> {
        let Inherited { maps, links: inherited } = inherited;
        let keeps_flows = maps.is_some();
        let mut object = load_object(settings, maps)?;
        let shared = Arc::new(Shared::new(settings, &mut object)?);
        let at_tc = match settings.hook {
            asked @ (Hook::Tcx | Hook::Clsact) => asked,
            _ if links::reach_tc() => Hook::Tcx,
            _ => Hook::Clsact,
        };
        // News first: what changes in between is then seen once more, and not missed.
        let news = News::new()?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let watcher = Watcher {
            shared: Arc::clone(&shared),
            object,
            netlink: Netlink::new()?,
            news,
            neighbours: NeighbourNews::new()?,
            stop: stop.try_clone()?,
            at_tc,
            inherited,
            complained: BTreeSet::new(),
        };
        let looked_at = (settings.listeners.clone(), settings.relay_ports.clone());
        let kernel = Self {
            shared,
            stage: Mutex::new(Stage::Loaded(Box::new(watcher))),
            stop,
            settings: settings.clone(),
            due: Mutex::new(Some(looked_at)),
            keeps_flows,
        };
        if !keeps_flows {
            kernel.look_at_what_is_due();
        }
        Ok(kernel)
    }

    /// Attaches what was only loaded, in the place of the programs of a process before, where there was one. Filters must not meet those of
    /// others: of two with our name the older one goes.
    ///
    /// # Errors
    /// As for [`Kernel::start`].
    pub fn attach(&self) -> Result<(), OffloadError> {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *stage, Stage::Detached) {
            Stage::Loaded(mut watcher) => {
                self.look_at_what_is_due();
                if self.keeps_flows {
                    let left = self.flows()?.remove_strangers();
                    tracing::debug!("{left} flows of the process before are nobody's");
                }
                watcher.take_links_over();
                watcher.attach(true)?;
                watcher.follow_routes()?;
                let run = move || watcher.run();
                *stage = Stage::Attached(thread::Builder::new().name("offload".to_owned()).spawn(run)?);
            }
            other => *stage = other,
        }
        Ok(())
    }

    /// What another process needs to go on in the place of this one ([`Kernel::succeed`]), with its descriptors. Nothing changes by that.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn lend(&self) -> io::Result<(Lent, Vec<OwnedFd>)> {
        let mut descriptors: Vec<OwnedFd> =
            self.shared.maps.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        let mut links = Vec::new();
        for (number, attached) in &mut *self.shared.links() {
            attached.is_lent = true;
            let way = match &attached.link {
                Link::Tcx(link) => (LentWay::Tcx, Some(link)),
                Link::Xdp(link) => (LentWay::Xdp, Some(link)),
                Link::Filter(filter) => (LentWay::Filter(filter.clone()), None),
            };
            descriptors.extend(way.1.map(OwnedFd::try_clone).transpose()?);
            links.push(LentLink { number: *number, told: attached.told.clone(), way: way.0 });
        }
        Ok((Lent::new(&self.settings, links), descriptors))
    }

    /// Whether it has the maps of the process before, and with them its flows: then that one lets them be.
    #[must_use]
    pub fn keeps_flows(&self) -> bool {
        self.keeps_flows
    }

    /// Another process has what was lent: lets go of it, and follows nothing any more. What has been counted can still be asked for.
    pub fn hand_on(&self) {
        self.shared.is_handed_on.store(true, Ordering::Relaxed);
        self.detach();
    }

    /// Takes the program from all interfaces, for good. What it has counted can still be asked for.
    pub fn detach(&self) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let Stage::Attached(watcher) = std::mem::replace(&mut *stage, Stage::Detached) else { return };
        if let Ok(mut stop) = self.stop.try_clone().map(File::from) {
            let _ = stop.write_all(&1_u64.to_ne_bytes());
        }
        let _ = watcher.join();
        self.shared.detach_all();
    }

    fn look_at_what_is_due(&self) {
        let due = self.due.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((listeners, relay_ports)) = due {
            self.set_ports(&listeners, relay_ports);
        }
    }

    /// A worker's way to the flows.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn flows(&self) -> Result<Flows, OffloadError> {
        Flows::new(Arc::clone(&self.shared))
    }

    /// Clients send to these listeners from now on, and relayed transport addresses have these ports. Flows there are stay where they are.
    pub fn set_ports(&self, listeners: &[SocketAddr], relay_ports: RangeInclusive<u16>) {
        // What was due is so no more.
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let listeners: Vec<u16> = listeners.iter().map(SocketAddr::port).collect();
        self.shared.ports.set(&listeners, relay_ports);
    }

    /// The interfaces on which it relays, by name.
    #[must_use]
    pub fn attached(&self) -> Vec<Attachment> {
        let links = self.shared.links();
        let mut told: Vec<Attachment> = links.values().filter_map(|it| it.told.clone()).collect();
        told.sort_by(|one, other| one.interface.cmp(&other.interface));
        told
    }

    /// What has been counted.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        // They count where they are.
        let is_here = !self.shared.is_handed_on.load(Ordering::Relaxed);
        let mut snapshot = Snapshot {
            flows: if is_here { self.shared.held.load(Ordering::Relaxed) } else { 0 },
            most_flows: if is_here { self.shared.most_flows.into() } else { 0 },
            refused: self.shared.refused.load(Ordering::Relaxed),
            ..Snapshot::default()
        };
        let counts = self.shared.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, sum) in (0..).zip(&mut snapshot.counts) {
            *sum = counts.get(&index, 0).map_or(0, |values| values.iter().sum());
        }
        snapshot
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.detach();
    }
}

impl Settings {
    /// A state for each flow, and for each client one more; a client has two flows at least.
    fn states(&self) -> u32 {
        self.flows.saturating_add(self.flows / 2)
    }

    /// Next hops, which XDP alone asks for.
    fn hops(&self) -> u32 {
        if self.hook.is_xdp() { self.flows } else { 1 }
    }
}

impl Shared {
    /// Takes the maps from the object.
    fn new(settings: &Settings, object: &mut Ebpf) -> Result<Self, OffloadError> {
        let words = |count: u32| count as usize;
        let by_xdp = settings.hook.is_xdp();
        let own = |name: &&str| Ok::<_, OffloadError>(descriptor(object, name)?.try_clone_to_owned()?);
        let maps = MAPS.iter().map(own).collect::<Result<_, _>>()?;
        let ports = array(object, "ports", 2048)?;
        let counts = PerCpuArray::try_from(take(object, "counts")?).map_err(map_error)?;
        let stamp = now_ns();
        Ok(Self {
            states: array(object, "states", words(settings.states()) * STATE_WORDS)?,
            drained: array(object, "drained", words(settings.sockets))?,
            routes: Routes::new(
                array(object, "routes", words(settings.flows))?,
                array(object, "gateways", words(settings.flows) * GATEWAY_WORDS)?,
                by_xdp.then(|| array(object, "hops", words(settings.hops()) * HOP_WORDS)).transpose()?,
            )?,
            ports: Ports::new(ports),
            flows: data(take(object, "flows")?)?,
            state_slots: Mutex::new(Slots::new(settings.states(), REST_NS)),
            socket_slots: Mutex::new(Slots::new(settings.sockets, REST_NS)),
            most_flows: settings.flows,
            held: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            // Nobody installs one in each nanosecond, so that later processes have higher ones.
            stamp: AtomicU64::new(stamp),
            first_stamp: stamp,
            adopted: Mutex::default(),
            gap_ns: if by_xdp { layout::XDP_GAP_NS } else { layout::TC_GAP_NS },
            counts: Mutex::new(counts),
            maps,
            links: Mutex::default(),
            is_handed_on: AtomicBool::new(false),
            hook: settings.hook,
        })
    }

    fn links(&self) -> MutexGuard<'_, BTreeMap<u32, Attached>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn detach_all(&self) {
        let is_handed_on = self.is_handed_on.load(Ordering::Relaxed);
        for attached in std::mem::take(&mut *self.links()).into_values() {
            // A link lives on by the descriptors of the other process, a filter by itself.
            if !(is_handed_on && attached.is_lent && matches!(attached.link, Link::Filter(_))) {
                attached.link.detach();
            }
        }
    }
}

/// Follows interfaces, routes and neighbours, on a thread of its own.
struct Watcher {
    shared: Arc<Shared>,
    object: Ebpf,
    netlink: Netlink,
    news: News,
    neighbours: NeighbourNews,
    stop: OwnedFd,
    /// How a program is attached to TC.
    at_tc: Hook,
    /// What a process before this one has attached.
    inherited: Vec<(LentLink, Option<OwnedFd>)>,
    /// Interfaces that it could not be attached to, said once.
    complained: BTreeSet<u32>,
}

struct Attached {
    /// `None` for loopback, where nothing is relayed.
    told: Option<Attachment>,
    link: Link,
    /// Whether another process has been told of it.
    is_lent: bool,
}

impl Attached {
    fn new(told: Option<Attachment>, link: Link) -> Self {
        Self { told, link, is_lent: false }
    }
}

impl Watcher {
    fn run(mut self) {
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
                            tracing::warn!("{error}: the kernel path keeps what it knows, and asks again");
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
                    "cannot read the neighbours of this machine ({error}): the kernel path keeps those of before"
                );
            }
        }
    }

    fn follow_routes(&mut self) -> Result<(), OffloadError> {
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
            // Whoever floods the link with addresses that nobody has makes such news without end.
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

    /// Has these programs take the place of those of the process before, where they would be attached in the same way.
    fn take_links_over(&mut self) {
        for (lent, descriptor) in std::mem::take(&mut self.inherited) {
            let LentLink { number, told, way } = lent;
            match self.take_link_over(told.as_ref(), way, descriptor) {
                Ok(link) => _ = self.shared.links().insert(number, Attached::new(told, link)),
                // It may be gone by now; where it is not, it is attached anew.
                Err(error) => tracing::debug!("a program of the process before cannot be replaced: {error}"),
            }
        }
    }

    fn take_link_over(
        &mut self,
        told: Option<&Attachment>,
        way: LentWay,
        descriptor: Option<OwnedFd>,
    ) -> Result<Link, OffloadError> {
        let other = || OffloadError::Object("it is attached in another way".to_owned());
        // At TC although XDP is wanted: because its driver cannot, or because there XDP was not wanted.
        let at_tc = told.is_none_or(|told| self.shared.hook.is_xdp() == told.why.is_some());
        match (way, descriptor) {
            (LentWay::Xdp, Some(link)) if told.is_some_and(|told| told.hook == self.shared.hook) => {
                links::update(link.as_fd(), xdp_descriptor(&mut self.object)?)?;
                Ok(Link::Xdp(link))
            }
            (LentWay::Tcx, Some(link)) if at_tc && self.at_tc == Hook::Tcx => {
                links::update(link.as_fd(), tc_descriptor(&mut self.object)?)?;
                Ok(Link::Tcx(link))
            }
            (LentWay::Filter(filter), _) if at_tc && self.at_tc == Hook::Clsact => {
                let replaced = filter.replace(classifier(&mut self.object, PROGRAM)?);
                replaced.map(Link::Filter).map_err(OffloadError::program)
            }
            (LentWay::Filter(filter), _) => {
                filter.detach();
                Err(other())
            }
            (LentWay::Xdp | LentWay::Tcx, Some(link)) => {
                links::detach(&link);
                Err(other())
            }
            _ => Err(other()),
        }
    }

    /// Attaches to what has come, lets go of what is gone. At the start, an interface that refuses is an error; later it is said.
    fn attach(&mut self, starting: bool) -> Result<(), OffloadError> {
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
                    tracing::info!("kernel data path: {interface} is down, or has no address any more");
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
                // Gone since it was asked for.
                Err(_) if !self.netlink.interfaces()?.iter().any(|it| it.number == interface.number) => {}
                Err(error) if starting => {
                    shared.detach_all();
                    return Err(error);
                }
                Err(error) => {
                    if self.complained.insert(interface.number) {
                        tracing::warn!("{error}: what comes by it is relayed in user space");
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
            // What our relayed addresses send to each other passes by here, and marks its flow.
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

/// Whether this kernel tells a program how much fits through an interface (bpf_check_mtu). One that does not has [`Routes`] do so, which hear of
/// a change a moment later.
fn tells_mtu() -> bool {
    KernelVersion::current().is_ok_and(|it| it >= TELLS_MTU)
}

/// The programs, verified and not attached, with maps as large as the settings say; these take the place of maps of the same names.
fn load_object(settings: &Settings, lent: Option<Vec<OwnedFd>>) -> Result<Ebpf, OffloadError> {
    let mut object = EbpfLoader::new()
        .btf(None)
        .override_global("kernel_tells_mtu", &u32::from(tells_mtu()), true)
        .map_max_entries("flows", settings.flows.saturating_add(settings.flows / 2))
        .map_max_entries("states", settings.states())
        .map_max_entries("drained", settings.sockets)
        .map_max_entries("routes", settings.flows)
        .map_max_entries("gateways", settings.flows)
        .map_max_entries("hops", settings.hops())
        .load(OBJECT)
        .map_err(OffloadError::load)?;
    for (name, lent) in MAPS.iter().zip(lent.iter().flatten()) {
        let what = "descriptors of maps (dup3)";
        let kernel = |source| OffloadError::Kernel { what, source };
        links::stand_for(descriptor(&object, name)?, lent).map_err(kernel)?;
    }
    drop(lent);
    // Before its maps are taken from the object: the program names them by descriptors that are open.
    load_classifier(&mut object, PROGRAM)?;
    if settings.hook.is_xdp() {
        xdp::check_kernel()?;
        let program = xdp_program(&mut object)?;
        load_program(|| program.load())?;
    }
    Ok(object)
}

fn xdp_program(object: &mut Ebpf) -> Result<&mut Xdp, OffloadError> {
    let program =
        object.program_mut(XDP_PROGRAM).ok_or_else(|| OffloadError::Object(format!("no {XDP_PROGRAM}")))?;
    program.try_into().map_err(OffloadError::program)
}

fn tc_descriptor(object: &mut Ebpf) -> Result<BorrowedFd<'_>, OffloadError> {
    Ok(classifier(object, PROGRAM)?.fd().map_err(OffloadError::program)?.as_fd())
}

fn xdp_descriptor(object: &mut Ebpf) -> Result<BorrowedFd<'_>, OffloadError> {
    Ok(xdp_program(object)?.fd().map_err(OffloadError::program)?.as_fd())
}

/// That of a map that has not been taken from the object.
fn descriptor<'o>(object: &'o Ebpf, name: &str) -> Result<BorrowedFd<'o>, OffloadError> {
    match object.map(name) {
        Some(Map::HashMap(data) | Map::Array(data)) => Ok(data.fd().as_fd()),
        _ => Err(OffloadError::Object(format!("no map {name}"))),
    }
}

pub(crate) fn take(object: &mut Ebpf, name: &'static str) -> Result<Map, OffloadError> {
    object.take_map(name).ok_or_else(|| OffloadError::Object(format!("no map {name}")))
}

fn data(map: Map) -> Result<MapData, OffloadError> {
    match map {
        Map::HashMap(data) | Map::Array(data) => Ok(data),
        _ => Err(OffloadError::Object("a map of another type".to_owned())),
    }
}

pub(crate) fn array(object: &mut Ebpf, name: &'static str, len: usize) -> Result<MappedArray, OffloadError> {
    let data = data(take(object, name)?)?;
    MappedArray::map(data.fd().as_fd(), len)
        .map_err(|source| OffloadError::Kernel { what: "maps in memory (BPF_F_MMAPABLE)", source })
}

pub(crate) fn map_error(error: MapError) -> OffloadError {
    OffloadError::load(error.into())
}
