//! Programs in the kernel: loaded, and kept attached to the current interfaces.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Write},
    net::SocketAddr,
    ops::RangeInclusive,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    thread::{self, JoinHandle},
};

use rustix::event::{EventfdFlags, eventfd};
use strum::VariantArray as _;

use crate::{
    claim::Claim,
    error::OffloadError,
    flows::Flows,
    handover::{PassedKernel, PassedLink, PassedWay, ReceivedKernel},
    layout::Count,
    links::{self, HookDirection, Link},
    netlink::{NeighbourNews, Netlink, News},
    object::load_object,
    settings::{Attachment, Hook, KernelSettings},
    shared::SharedMaps,
    watcher::Watcher,
};

pub struct Kernel {
    shared: Arc<SharedMaps>,
    stage: Mutex<AttachStage>,
    stop: OwnedFd,
    settings: KernelSettings,
    /// Ports that must be set once the previous process has released the shared maps.
    due: Mutex<Option<(Vec<SocketAddr>, RangeInclusive<u16>)>>,
    keeps_flows: bool,
    /// Released after the filters are detached.
    claim: Option<Claim>,
}

enum AttachStage {
    Loaded(Box<Watcher>),
    Attached(JoinHandle<()>),
    Detached,
}

#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Indexed by [`Count`].
    pub counts: [u64; Count::VARIANTS.len()],
    pub flows: u64,
    pub most_flows: u64,
    pub refused: u64,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self { counts: [0; Count::VARIANTS.len()], flows: 0, most_flows: 0, refused: 0 }
    }
}

impl Kernel {
    /// Loads the program and attaches it to each Ethernet interface that is up and has an address. After an
    /// error, nothing stays attached.
    pub fn start(settings: &KernelSettings) -> Result<Self, OffloadError> {
        let kernel = Self::load(settings)?;
        kernel.attach()?;
        Ok(kernel)
    }

    /// Loads the program for [`Kernel::attach`]; until then another process may have its own program
    /// attached.
    pub fn load(settings: &KernelSettings) -> Result<Self, OffloadError> {
        Self::prepare(settings, ReceivedKernel::default())
    }

    /// Loads the program that will replace another process's program. `passed` and `descriptors` are the result
    /// of [`Kernel::export_fds`] in that process, which keeps everything until [`Kernel::attach`].
    pub fn from_handover(
        settings: &KernelSettings,
        passed: PassedKernel,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self, OffloadError> {
        let mut settings = settings.clone();
        let sockets = passed.sockets;
        let received = passed.open(descriptors, &settings).map_err(OffloadError::Handover)?;
        if received.maps.is_some() {
            settings.sockets = sockets;
        }
        Self::prepare(&settings, received)
    }

    fn prepare(settings: &KernelSettings, received: ReceivedKernel) -> Result<Self, OffloadError> {
        let ReceivedKernel { maps, links: received, claim } = received;
        let keeps_flows = maps.is_some();
        let mut object = load_object(settings, maps)?;
        let shared = Arc::new(SharedMaps::new(settings, &mut object)?);
        let at_tc = match settings.hook {
            asked @ (Hook::Tcx | Hook::Clsact) => asked,
            _ if links::reach_tc() => Hook::Tcx,
            _ => Hook::Clsact,
        };
        let claim = match claim {
            // A version without claims may have passed its filters.
            None if at_tc == Hook::Clsact => Some(Claim::take()?),
            other => other,
        };
        // Subscribe first, so that a change in between is seen twice rather than missed.
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
            received,
            complained: BTreeSet::new(),
            leases: settings.leases,
            rules: if settings.leases { News::of_rules() } else { Vec::new() },
        };
        let looked_at = (settings.listeners.clone(), settings.relay_ports.clone());
        let kernel = Self {
            shared,
            stage: Mutex::new(AttachStage::Loaded(Box::new(watcher))),
            stop,
            settings: settings.clone(),
            due: Mutex::new(Some(looked_at)),
            keeps_flows,
            claim,
        };
        if !keeps_flows {
            kernel.look_at_what_is_due();
        }
        Ok(kernel)
    }

    /// Attaches the loaded program, replacing the previous process's, if any. Filters of both processes must
    /// not coexist: of two with this name, the older one is removed.
    pub fn attach(&self) -> Result<(), OffloadError> {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *stage, AttachStage::Detached) {
            AttachStage::Loaded(mut watcher) => {
                self.look_at_what_is_due();
                if self.keeps_flows {
                    let left = self.flows()?.remove_strangers();
                    tracing::debug!("removed flows of the previous process that were not taken over: {left}");
                }
                watcher.take_links_over();
                watcher.follow_rules();
                watcher.attach(true)?;
                watcher.follow_routes()?;
                let run = move || watcher.run();
                *stage = AttachStage::Attached(thread::Builder::new().name("offload".to_owned()).spawn(run)?);
            }
            other => *stage = other,
        }
        Ok(())
    }

    /// Exports what another process needs for [`Kernel::from_handover`], with its descriptors. Changes
    /// nothing.
    pub fn export_fds(&self) -> io::Result<(PassedKernel, Vec<OwnedFd>)> {
        let claim = self.claim.as_ref().map(Claim::try_clone);
        let maps = self.shared.maps.iter().map(OwnedFd::try_clone);
        let mut descriptors: Vec<OwnedFd> = claim.into_iter().chain(maps).collect::<io::Result<_>>()?;
        let mut links = Vec::new();
        for (number, attached) in &mut *self.shared.links() {
            attached.is_passed = true;
            let leaves = attached.leaves.as_ref().map(|link| (HookDirection::Egress, link));
            for (direction, link) in [(HookDirection::Ingress, &attached.link)].into_iter().chain(leaves) {
                let (way, descriptor) = match link {
                    Link::Tcx(link) => (PassedWay::Tcx, Some(link)),
                    Link::Xdp(link) => (PassedWay::Xdp, Some(link)),
                    Link::Filter(filter) => (PassedWay::Filter(filter.clone()), None),
                };
                descriptors.extend(descriptor.map(OwnedFd::try_clone).transpose()?);
                links.push(PassedLink { number: *number, told: attached.told.clone(), way, direction });
            }
        }
        Ok((PassedKernel::new(&self.settings, links, self.claim.is_some()), descriptors))
    }

    /// True if this process uses the maps and flows of the previous one, which must then not remove them.
    #[must_use]
    pub fn keeps_flows(&self) -> bool {
        self.keeps_flows
    }

    /// Releases everything after another process has taken it over. Counters stay available.
    pub fn hand_on(&self) {
        self.shared.is_handed_on.store(true, Ordering::Relaxed);
        self.detach();
    }

    /// Detaches the program from all interfaces permanently. Counters stay available.
    pub fn detach(&self) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let AttachStage::Attached(watcher) = std::mem::replace(&mut *stage, AttachStage::Detached) else {
            return;
        };
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

    pub fn flows(&self) -> Result<Flows, OffloadError> {
        Flows::new(Arc::clone(&self.shared))
    }

    /// Sets the ports of listeners and relayed transport addresses. Existing flows stay.
    pub fn set_ports(&self, listeners: &[SocketAddr], relay_ports: RangeInclusive<u16>) {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let listeners: Vec<u16> = listeners.iter().map(SocketAddr::port).collect();
        self.shared.ports.set(&listeners, relay_ports);
    }

    #[must_use]
    pub fn attached(&self) -> Vec<Attachment> {
        let links = self.shared.links();
        let mut told: Vec<Attachment> = links.values().filter_map(|it| it.told.clone()).collect();
        told.sort_by(|one, other| one.interface.cmp(&other.interface));
        told
    }

    #[must_use]
    pub fn has_leases(&self) -> bool {
        self.settings.leases
    }

    /// Describes the rule of this machine that keeps all flows in user space, if there is one. Only with
    /// [`KernelSettings::leases`].
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        self.shared.obstacle().clone()
    }

    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        // Only the process that has the flows counts them.
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
