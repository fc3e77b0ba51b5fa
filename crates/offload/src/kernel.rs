//! The programs in the kernel: loaded, attached to the interfaces that there are, and kept attached to those that come.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Write,
    net::SocketAddr,
    ops::RangeInclusive,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, MapError, PerCpuArray},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType, Xdp,
        links::FdLink,
        tc::{NlOptions, SchedClassifierLinkId, TcAttachOptions},
    },
    util::KernelVersion,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use strum::VariantArray as _;

use crate::{
    error::{OffloadError, chain},
    flows::Flows,
    layout::{self, Count, HOP_WORDS, STATE_WORDS},
    netlink::{Interface, NeighbourNews, Netlink, News},
    ports::Ports,
    routes::Routes,
    slots::Slots,
    words::Words,
    xdp,
};

/// Built by `bpf/build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/relay.o");

/// The program for TC, by whose name leftovers are found too.
const PROGRAM: &str = "turnpike";
/// The program for XDP.
const XDP_PROGRAM: &str = "turnpike_xdp";

/// Since when programs are attached to TC by links.
const LINKS: KernelVersion = KernelVersion::new(6, 6, 0);

/// How often the kernel is told which neighbours XDP sends to: before it asks itself whether they are still there.
const NEIGHBOURS_EVERY: Duration = Duration::from_secs(10);

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
    pub(crate) states: Words,
    pub(crate) drained: Words,
    pub(crate) routes: Routes,
    /// Classes of ports.
    pub(crate) ports: Ports,
    pub(crate) state_slots: Mutex<Slots>,
    pub(crate) socket_slots: Mutex<Slots>,
    pub(crate) most_flows: u32,
    /// Flows that there are, and that there was no room for.
    pub(crate) held: AtomicU64,
    pub(crate) refused: AtomicU64,
    /// Distinguishes installations, over all workers.
    pub(crate) stamp: AtomicU64,
    /// How long after a program has seen it a packet may come to its socket.
    pub(crate) gap_ns: u64,
    counts: Mutex<PerCpuArray<MapData, u64>>,
    attached: Mutex<Vec<Attachment>>,
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
        let words = |count: u32| count as usize;
        let by_xdp = settings.hook.is_xdp();
        let hops = if by_xdp { settings.flows } else { 1 };
        // A state for each flow, and for each client one more; a client has two flows at least.
        let states = settings.flows.saturating_add(settings.flows / 2);
        let mut object = EbpfLoader::new()
            .btf(None)
            .map_max_entries("flows", settings.flows.saturating_add(settings.flows / 2))
            .map_max_entries("states", states)
            .map_max_entries("drained", settings.sockets)
            .map_max_entries("routes", settings.flows)
            .map_max_entries("hops", hops)
            .load(OBJECT)
            .map_err(OffloadError::load)?;
        // Before its maps are taken from the object: the program names them by descriptors that are open.
        let program = program(&mut object)?;
        program.load().map_err(OffloadError::program)?;
        // What the kernel does not tell is no reason to refuse.
        if program.info().is_ok_and(|info| info.size_jitted() == 0) {
            return Err(OffloadError::Interpreted);
        }
        if by_xdp {
            xdp::check_kernel()?;
            xdp_program(&mut object)?.load().map_err(OffloadError::program)?;
        }
        let listeners: Vec<u16> = settings.listeners.iter().map(SocketAddr::port).collect();
        let ports = array(&mut object, "ports", 2048)?;
        let counts = PerCpuArray::try_from(take(&mut object, "counts")?).map_err(map_error)?;
        let at_tc = match settings.hook {
            asked @ (Hook::Tcx | Hook::Clsact) => asked,
            _ if KernelVersion::current().is_ok_and(|it| it >= LINKS) => Hook::Tcx,
            _ => Hook::Clsact,
        };
        let shared = Shared {
            states: array(&mut object, "states", words(states) * STATE_WORDS)?,
            drained: array(&mut object, "drained", words(settings.sockets))?,
            routes: Routes::new(
                array(&mut object, "routes", words(settings.flows))?,
                by_xdp.then(|| array(&mut object, "hops", words(hops) * HOP_WORDS)).transpose()?,
            )?,
            ports: Ports::new(ports, &listeners, settings.relay_ports.clone()),
            flows: data(take(&mut object, "flows")?)?,
            state_slots: Mutex::new(Slots::new(states)),
            socket_slots: Mutex::new(Slots::new(settings.sockets)),
            most_flows: settings.flows,
            held: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            stamp: AtomicU64::new(1),
            gap_ns: if by_xdp { layout::XDP_GAP_NS } else { layout::TC_GAP_NS },
            counts: Mutex::new(counts),
            attached: Mutex::default(),
            hook: settings.hook,
        };
        let shared = Arc::new(shared);
        // News first: what changes in between is then seen once more, and not missed.
        let news = News::new()?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let watcher = Watcher {
            shared: Arc::clone(&shared),
            object,
            netlink: Netlink::new()?,
            news,
            neighbours: by_xdp.then(NeighbourNews::new).transpose()?,
            stop: stop.try_clone()?,
            at_tc,
            links: BTreeMap::new(),
            complained: BTreeSet::new(),
        };
        Ok(Self { shared, stage: Mutex::new(Stage::Loaded(Box::new(watcher))), stop })
    }

    /// Attaches what was only loaded. Filters must not meet those of another process: of two with our name the older one goes.
    ///
    /// # Errors
    /// As for [`Kernel::start`].
    pub fn attach(&self) -> Result<(), OffloadError> {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *stage, Stage::Detached) {
            Stage::Loaded(mut watcher) => {
                watcher.attach(true)?;
                watcher.follow_routes()?;
                let run = move || watcher.run();
                *stage = Stage::Attached(thread::Builder::new().name("offload".to_owned()).spawn(run)?);
            }
            other => *stage = other,
        }
        Ok(())
    }

    /// Takes the program from all interfaces, for good. What it has counted can still be asked for.
    pub fn detach(&self) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let Stage::Attached(watcher) = std::mem::replace(&mut *stage, Stage::Detached) else { return };
        if let Ok(mut stop) = self.stop.try_clone().map(File::from) {
            let _ = stop.write_all(&1_u64.to_ne_bytes());
        }
        let _ = watcher.join();
        self.shared.attached.lock().unwrap_or_else(PoisonError::into_inner).clear();
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
        let listeners: Vec<u16> = listeners.iter().map(SocketAddr::port).collect();
        self.shared.ports.set(&listeners, relay_ports);
    }

    /// The interfaces on which it relays, by name.
    #[must_use]
    pub fn attached(&self) -> Vec<Attachment> {
        self.shared.attached.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What has been counted.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot {
            flows: self.shared.held.load(Ordering::Relaxed),
            most_flows: self.shared.most_flows.into(),
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

/// Follows interfaces, routes and neighbours, on a thread of its own.
struct Watcher {
    shared: Arc<Shared>,
    object: Ebpf,
    netlink: Netlink,
    news: News,
    /// For XDP.
    neighbours: Option<NeighbourNews>,
    stop: OwnedFd,
    /// How a program is attached to TC.
    at_tc: Hook,
    /// By the interface's number.
    links: BTreeMap<u32, Attached>,
    /// Interfaces that it could not be attached to, said once.
    complained: BTreeSet<u32>,
}

struct Attached {
    /// `None` for loopback, where nothing is relayed.
    told: Option<Attachment>,
    link: Link,
}

enum Link {
    Tc(SchedClassifierLinkId),
    /// Ends as it is dropped.
    Xdp(FdLink),
}

impl Watcher {
    fn run(mut self) {
        let mut used = Instant::now();
        loop {
            let stopped = {
                let readable = PollFlags::IN;
                let mut fds = vec![PollFd::new(&self.stop, readable), PollFd::new(&self.news, readable)];
                fds.extend(self.neighbours.as_ref().map(|neighbours| PollFd::new(neighbours, readable)));
                let at_most = Timespec::try_from(NEIGHBOURS_EVERY).ok();
                let _ = poll(&mut fds, at_most.as_ref().filter(|_| self.neighbours.is_some()));
                !fds[0].revents().is_empty()
            };
            if stopped {
                break;
            }
            if self.news.heard() {
                for done in [self.attach(false), self.follow_routes()] {
                    if let Err(error) = done {
                        tracing::warn!("{error}: the kernel path keeps what it knows");
                    }
                }
            }
            let is_time = used.elapsed() >= NEIGHBOURS_EVERY;
            if is_time {
                used = Instant::now();
            }
            if let Err(error) = self.follow_neighbours(is_time) {
                tracing::warn!(
                    "cannot read the neighbours of this machine ({error}): XDP keeps those of before"
                );
            }
        }
        self.detach_all();
    }

    fn follow_routes(&mut self) -> Result<(), OffloadError> {
        let by_xdp = |(number, it): (&u32, &Attached)| matches!(it.link, Link::Xdp(_)).then_some(*number);
        let xdp = self.links.iter().filter_map(by_xdp).collect();
        Ok(self.shared.routes.refresh(&mut self.netlink, &xdp)?)
    }

    fn follow_neighbours(&mut self, is_time: bool) -> std::io::Result<()> {
        let Some(neighbours) = &self.neighbours else { return Ok(()) };
        let changed = neighbours.heard();
        let routes = &self.shared.routes;
        if changed.as_ref().is_none_or(|changed| !changed.is_empty()) {
            routes.refresh_neighbours(&mut self.netlink, changed.as_ref())?;
        }
        if is_time { routes.use_neighbours(&mut self.netlink) } else { Ok(()) }
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
        let gone: Vec<u32> = self.links.keys().copied().filter(|number| !numbers.contains(number)).collect();
        for number in gone {
            if let Some(attached) = self.links.remove(&number) {
                self.detach(attached.link);
                if let Some(Attachment { interface, .. }) = attached.told.filter(|_| !starting) {
                    tracing::info!("kernel data path: {interface} is down, or has no address any more");
                }
            }
        }
        self.complained.retain(|number| numbers.contains(number));
        for interface in wanted {
            if self.links.contains_key(&interface.number) {
                continue;
            }
            match self.attach_to(&interface) {
                Ok(attached) => {
                    if let Some(told) = attached.told.as_ref().filter(|_| !starting) {
                        let Attachment { interface, hook, .. } = told;
                        tracing::info!("kernel data path: attached to {interface} ({})", hook.name());
                    }
                    self.links.insert(interface.number, attached);
                }
                // Gone since it was asked for.
                Err(_) if !self.netlink.interfaces()?.iter().any(|it| it.number == interface.number) => {}
                Err(error) if starting => {
                    self.detach_all();
                    return Err(error);
                }
                Err(error) => {
                    if self.complained.insert(interface.number) {
                        tracing::warn!("{error}: what comes by it is relayed in user space");
                    }
                }
            }
        }
        let mut told: Vec<Attachment> = self.links.values().filter_map(|it| it.told.clone()).collect();
        told.sort_by(|one, other| one.interface.cmp(&other.interface));
        if starting
            && self.shared.hook.is_xdp()
            && !told.iter().any(|it| it.hook.is_xdp())
            && !told.is_empty()
        {
            self.detach_all();
            let why = |it: Attachment| format!("{}: {}", it.interface, it.why.unwrap_or_default());
            return Err(OffloadError::Xdp { said: told.into_iter().map(why).collect::<Vec<_>>().join("; ") });
        }
        *self.shared.attached.lock().unwrap_or_else(PoisonError::into_inner) = told;
        Ok(())
    }

    fn attach_to(&mut self, interface: &Interface) -> Result<Attached, OffloadError> {
        let told = |hook, why| Attachment { interface: interface.name.clone(), hook, why };
        if interface.is_loopback {
            // What our relayed addresses send to each other passes by here, and marks its flow.
            return Ok(Attached { told: None, link: self.attach_to_tc(&interface.name)? });
        }
        let mut why = None;
        if self.shared.hook.is_xdp() {
            match xdp::attach(xdp_program(&mut self.object)?, interface, self.shared.hook) {
                Ok(link) => {
                    return Ok(Attached { told: Some(told(self.shared.hook, None)), link: Link::Xdp(link) });
                }
                Err(said) => why = Some(said),
            }
        }
        let link = self.attach_to_tc(&interface.name)?;
        Ok(Attached { told: Some(told(self.at_tc, why)), link })
    }

    fn attach_to_tc(&mut self, name: &str) -> Result<Link, OffloadError> {
        let options = if self.at_tc == Hook::Tcx {
            // Behind what others have there: a firewall comes first.
            TcAttachOptions::TcxOrder(LinkOrder::default())
        } else {
            // An error means that there is one already.
            let _ = aya::programs::tc::qdisc_add_clsact(name);
            // What a process left that was killed.
            let _ = aya::programs::tc::qdisc_detach_program(name, TcAttachType::Ingress, PROGRAM);
            TcAttachOptions::Netlink(NlOptions::default())
        };
        let attached = program(&mut self.object)?.attach_with_options(name, TcAttachType::Ingress, options);
        attached
            .map(Link::Tc)
            .map_err(|error| OffloadError::Attach { interface: name.to_owned(), said: chain(&error) })
    }

    fn detach(&mut self, link: Link) {
        match link {
            // Of an interface that is no more, the kernel has removed it.
            Link::Tc(link) => _ = program(&mut self.object).map(|program| program.detach(link)),
            Link::Xdp(link) => drop(link),
        }
    }

    fn detach_all(&mut self) {
        for attached in std::mem::take(&mut self.links).into_values() {
            self.detach(attached.link);
        }
    }
}

fn program(object: &mut Ebpf) -> Result<&mut SchedClassifier, OffloadError> {
    let program = object.program_mut(PROGRAM).ok_or_else(|| OffloadError::Object(format!("no {PROGRAM}")))?;
    program.try_into().map_err(OffloadError::program)
}

fn xdp_program(object: &mut Ebpf) -> Result<&mut Xdp, OffloadError> {
    let program =
        object.program_mut(XDP_PROGRAM).ok_or_else(|| OffloadError::Object(format!("no {XDP_PROGRAM}")))?;
    program.try_into().map_err(OffloadError::program)
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

pub(crate) fn array(object: &mut Ebpf, name: &'static str, len: usize) -> Result<Words, OffloadError> {
    let data = data(take(object, name)?)?;
    Words::map(data.fd().as_fd(), len)
        .map_err(|source| OffloadError::Kernel { what: "maps in memory (BPF_F_MMAPABLE)", source })
}

pub(crate) fn map_error(error: MapError) -> OffloadError {
    OffloadError::load(error.into())
}
