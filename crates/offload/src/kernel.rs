//! The programs in the kernel: loaded, attached to the interfaces that there are, and kept attached to those that come.

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
    error::OffloadError,
    flows::Flows,
    handover::{PassedKernel, PassedLink, PassedWay, ReceivedKernel},
    layout::Count,
    links::{self, Link},
    netlink::{NeighbourNews, Netlink, News},
    object::load_object,
    settings::{Attachment, Hook, Settings},
    shared::Shared,
    watcher::Watcher,
};

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
        Self::prepare(settings, ReceivedKernel::default())
    }

    /// The same in the place of another process, by what [`Kernel::export_fds`] of that one gave: [`Kernel::attach`] has these programs take the place
    /// of that one's. Until then that one has everything that it had.
    ///
    /// # Errors
    /// As for [`Kernel::start`].
    pub fn from_handover(
        settings: &Settings,
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

    fn prepare(settings: &Settings, received: ReceivedKernel) -> Result<Self, OffloadError> {
        let ReceivedKernel { maps, links: received } = received;
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
            received,
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

    /// What another process needs to go on in the place of this one ([`Kernel::from_handover`]), with its descriptors. Nothing changes by that.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn export_fds(&self) -> io::Result<(PassedKernel, Vec<OwnedFd>)> {
        let mut descriptors: Vec<OwnedFd> =
            self.shared.maps.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        let mut links = Vec::new();
        for (number, attached) in &mut *self.shared.links() {
            attached.is_passed = true;
            let way = match &attached.link {
                Link::Tcx(link) => (PassedWay::Tcx, Some(link)),
                Link::Xdp(link) => (PassedWay::Xdp, Some(link)),
                Link::Filter(filter) => (PassedWay::Filter(filter.clone()), None),
            };
            descriptors.extend(way.1.map(OwnedFd::try_clone).transpose()?);
            links.push(PassedLink { number: *number, told: attached.told.clone(), way: way.0 });
        }
        Ok((PassedKernel::new(&self.settings, links), descriptors))
    }

    /// Whether it has the maps of the process before, and with them its flows: then that one lets them be.
    #[must_use]
    pub fn keeps_flows(&self) -> bool {
        self.keeps_flows
    }

    /// Another process has what was passed: lets go of it, and follows nothing any more. What has been counted can still be asked for.
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
