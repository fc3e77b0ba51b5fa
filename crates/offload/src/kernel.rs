//! The program in the kernel: loaded, attached to the interfaces that there are, and kept attached to those that come.

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
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, MapError, PerCpuArray},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        tc::{NlOptions, SchedClassifierLinkId, TcAttachOptions},
    },
    util::KernelVersion,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use strum::VariantArray as _;

use crate::{
    error::{OffloadError, chain},
    flows::Flows,
    layout::{Count, STATE_WORDS},
    netlink::{Interface, Netlink, News},
    ports::Ports,
    routes::Routes,
    slots::Slots,
    words::Words,
};

/// Built by `bpf/build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/relay.o");

/// The program's name, by which leftovers are found too.
const PROGRAM: &str = "turnpike";

/// Since when programs are attached by links.
const LINKS: KernelVersion = KernelVersion::new(6, 6, 0);

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
}

/// A program that is attached. Dropped, it is not.
pub struct Kernel {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
    stop: OwnedFd,
}

/// What workers and the watcher share.
pub(crate) struct Shared {
    /// A descriptor of the map of flows, to be cloned.
    pub(crate) flows: MapData,
    pub(crate) states: Words,
    pub(crate) drained: Words,
    pub(crate) routes: Routes,
    pub(crate) ports: Ports,
    pub(crate) state_slots: Mutex<Slots>,
    pub(crate) socket_slots: Mutex<Slots>,
    pub(crate) most_flows: u32,
    /// Flows that there are, and that there was no room for.
    pub(crate) held: AtomicU64,
    pub(crate) refused: AtomicU64,
    /// Distinguishes installations, over all workers.
    pub(crate) stamp: AtomicU64,
    counts: Mutex<PerCpuArray<MapData, u64>>,
    attached: Mutex<BTreeSet<String>>,
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
        let words = |count: u32| count as usize;
        // A state for each flow, and for each client one more; a client has two flows at least.
        let states = settings.flows.saturating_add(settings.flows / 2);
        let mut object = EbpfLoader::new()
            .btf(None)
            .map_max_entries("flows", settings.flows.saturating_add(settings.flows / 2))
            .map_max_entries("states", states)
            .map_max_entries("drained", settings.sockets)
            .map_max_entries("routes", settings.flows)
            .load(OBJECT)
            .map_err(OffloadError::load)?;
        // Before its maps are taken from the object: the program names them by descriptors that are open.
        let program = program(&mut object)?;
        program.load().map_err(OffloadError::program)?;
        // What the kernel does not tell is no reason to refuse.
        if program.info().is_ok_and(|info| info.size_jitted() == 0) {
            return Err(OffloadError::Interpreted);
        }
        let listeners: Vec<u16> = settings.listeners.iter().map(SocketAddr::port).collect();
        let ports = array(&mut object, "ports", 2048)?;
        let counts = PerCpuArray::try_from(take(&mut object, "counts")?).map_err(map_error)?;
        let hook = match settings.hook {
            Hook::Best if KernelVersion::current().is_ok_and(|it| it >= LINKS) => Hook::Tcx,
            Hook::Best => Hook::Clsact,
            asked => asked,
        };
        let shared = Shared {
            states: array(&mut object, "states", words(states) * STATE_WORDS)?,
            drained: array(&mut object, "drained", words(settings.sockets))?,
            routes: Routes::new(array(&mut object, "routes", words(settings.flows))?)?,
            ports: Ports::new(ports, &listeners, settings.relay_ports.clone()),
            flows: data(take(&mut object, "flows")?)?,
            state_slots: Mutex::new(Slots::new(states)),
            socket_slots: Mutex::new(Slots::new(settings.sockets)),
            most_flows: settings.flows,
            held: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            stamp: AtomicU64::new(1),
            counts: Mutex::new(counts),
            attached: Mutex::default(),
            hook,
        };
        let shared = Arc::new(shared);
        // News first: what changes in between is then seen once more, and not missed.
        let news = News::new()?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let mut watcher = Watcher {
            shared: Arc::clone(&shared),
            object,
            netlink: Netlink::new()?,
            news,
            stop: stop.try_clone()?,
            links: BTreeMap::new(),
            complained: BTreeSet::new(),
        };
        watcher.attach(true)?;
        let watcher = thread::Builder::new().name("offload".to_owned()).spawn(move || watcher.run())?;
        Ok(Self { shared, watcher: Some(watcher), stop })
    }

    /// A worker's way to the flows.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn flows(&self) -> Result<Flows, OffloadError> {
        Flows::new(Arc::clone(&self.shared))
    }

    /// The interfaces that it is attached to, by name.
    #[must_use]
    pub fn interfaces(&self) -> Vec<String> {
        self.shared.attached.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// How it is attached: by links, or by filters.
    #[must_use]
    pub fn hook(&self) -> Hook {
        self.shared.hook
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
        if let Ok(mut stop) = self.stop.try_clone().map(File::from) {
            let _ = stop.write_all(&1_u64.to_ne_bytes());
        }
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Follows interfaces and routes, on a thread of its own.
struct Watcher {
    shared: Arc<Shared>,
    object: Ebpf,
    netlink: Netlink,
    news: News,
    stop: OwnedFd,
    /// By the interface's number.
    links: BTreeMap<u32, (String, SchedClassifierLinkId)>,
    /// Interfaces that it could not be attached to, said once.
    complained: BTreeSet<u32>,
}

impl Watcher {
    fn run(mut self) {
        loop {
            let stopped = {
                let readable = PollFlags::IN;
                let mut fds = [PollFd::new(&self.news, readable), PollFd::new(&self.stop, readable)];
                let _ = poll(&mut fds, None);
                !fds[1].revents().is_empty()
            };
            if stopped {
                break;
            }
            if self.news.heard() {
                if let Err(error) = self.shared.routes.refresh(&mut self.netlink) {
                    tracing::warn!(
                        "cannot read the routes of this machine ({error}): the kernel path keeps those of before"
                    );
                }
                if let Err(error) = self.attach(false) {
                    tracing::warn!("{error}");
                }
            }
        }
        self.detach_all();
    }

    /// Attaches to what has come, lets go of what is gone. At the start, an interface that refuses is an error; later it is said.
    fn attach(&mut self, starting: bool) -> Result<(), OffloadError> {
        let addressed = self.netlink.with_addresses()?;
        let wanted: Vec<Interface> = self
            .netlink
            .interfaces()?
            .into_iter()
            .filter(|it| it.is_ethernet && it.is_up && !it.is_port && addressed.contains(&it.number))
            .collect();
        let numbers: BTreeSet<u32> = wanted.iter().map(|interface| interface.number).collect();
        let gone: Vec<u32> = self.links.keys().copied().filter(|number| !numbers.contains(number)).collect();
        for number in gone {
            if let Some((name, link)) = self.links.remove(&number) {
                // Of an interface that is no more, the kernel has removed it.
                let _ = program(&mut self.object)?.detach(link);
                if !starting {
                    tracing::info!("kernel data path: {name} is down, or has no address any more");
                }
            }
        }
        self.complained.retain(|number| numbers.contains(number));
        for Interface { number, name, .. } in wanted {
            if self.links.contains_key(&number) {
                continue;
            }
            match self.attach_to(&name) {
                Ok(link) => {
                    if !starting {
                        tracing::info!("kernel data path: attached to {name}");
                    }
                    self.links.insert(number, (name, link));
                }
                Err(error) if starting => {
                    self.detach_all();
                    return Err(error);
                }
                Err(error) => {
                    if self.complained.insert(number) {
                        tracing::warn!("{error}: what comes by it is relayed in user space");
                    }
                }
            }
        }
        let names = self.links.values().map(|(name, _)| name.clone()).collect();
        *self.shared.attached.lock().unwrap_or_else(PoisonError::into_inner) = names;
        Ok(())
    }

    fn attach_to(&mut self, name: &str) -> Result<SchedClassifierLinkId, OffloadError> {
        let options = if self.shared.hook == Hook::Tcx {
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
        attached.map_err(|error| OffloadError::Attach { interface: name.to_owned(), said: chain(&error) })
    }

    fn detach_all(&mut self) {
        let links = std::mem::take(&mut self.links);
        let Ok(program) = program(&mut self.object) else { return };
        for (_, link) in links.into_values() {
            let _ = program.detach(link);
        }
    }
}

fn program(object: &mut Ebpf) -> Result<&mut SchedClassifier, OffloadError> {
    let program = object.program_mut(PROGRAM).ok_or_else(|| OffloadError::Object(format!("no {PROGRAM}")))?;
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
