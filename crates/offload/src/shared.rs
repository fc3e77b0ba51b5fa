//! State shared by workers, the watcher and the control thread.

use std::{
    collections::{BTreeMap, HashSet},
    os::fd::OwnedFd,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use aya::{
    Ebpf,
    maps::{MapData, PerCpuArray},
};

use crate::{
    clock::now_ns,
    error::OffloadError,
    handover::MAPS,
    layout::{self, FlowKey, GATEWAY_WORDS, HOP_WORDS, STATE_WORDS, STREAMS_WORDS},
    links::Link,
    mapped_array::MappedArray,
    object::{array, data, descriptor, map_error, take},
    ports::Ports,
    routes::Routes,
    settings::{Attachment, Hook, KernelSettings},
    slots::{REST_NS, Slots},
};

pub(crate) struct SharedMaps {
    pub(crate) flows: MapData,
    /// `None` without leases.
    pub(crate) departures: Option<MapData>,
    pub(crate) states: MappedArray,
    /// See [`crate::streams::Streams`].
    pub(crate) streams: MappedArray,
    pub(crate) drained: MappedArray,
    pub(crate) routes: Routes,
    pub(crate) ports: Ports,
    pub(crate) state_slots: Mutex<Slots>,
    pub(crate) socket_slots: Mutex<Slots>,
    pub(crate) measures: bool,
    pub(crate) most_flows: u32,
    /// Number of current flows, and of flows refused for lack of room.
    pub(crate) held: AtomicU64,
    pub(crate) refused: AtomicU64,
    /// Next stamp. Stamps are unique per installation, across all workers and previous processes.
    pub(crate) stamp: AtomicU64,
    pub(crate) first_stamp: u64,
    /// Flows taken over from a previous process, until all workers have taken theirs.
    pub(crate) adopted: Mutex<HashSet<FlowKey>>,
    /// Maximum time until a packet seen by a program reaches its socket, in nanoseconds.
    pub(crate) gap_ns: u64,
    pub(crate) counts: Mutex<PerCpuArray<MapData, u64>>,
    pub(crate) maps: Vec<OwnedFd>,
    links: Mutex<BTreeMap<u32, Attached>>,
    pub(crate) is_handed_on: AtomicBool,
    pub(crate) hook: Hook,
    /// Description of the rule that prevents leases.
    obstacle: Mutex<Option<String>>,
    /// True while there is an obstacle.
    pub(crate) is_blocked: AtomicBool,
}

impl SharedMaps {
    pub(crate) fn new(settings: &KernelSettings, object: &mut Ebpf) -> Result<Self, OffloadError> {
        let words = |count: u32| count as usize;
        let by_xdp = settings.hook.is_xdp();
        let own = |name: &&str| Ok::<_, OffloadError>(descriptor(object, name)?.try_clone_to_owned()?);
        let maps = MAPS.iter().map(own).collect::<Result<_, _>>()?;
        let ports = array(object, "ports", 2048)?;
        let counts = PerCpuArray::try_from(take(object, "counts")?).map_err(map_error)?;
        let stamp = now_ns();
        Ok(Self {
            states: array(object, "states", words(settings.states()) * STATE_WORDS)?,
            streams: array(object, "streams", words(settings.streams()) * STREAMS_WORDS)?,
            drained: array(object, "drained", words(settings.sockets))?,
            routes: Routes::new(
                array(object, "routes", words(settings.flows))?,
                array(object, "gateways", words(settings.flows) * GATEWAY_WORDS)?,
                by_xdp.then(|| array(object, "hops", words(settings.hops()) * HOP_WORDS)).transpose()?,
            )?,
            ports: Ports::new(ports),
            flows: data(take(object, "flows")?)?,
            departures: settings.leases.then(|| data(take(object, "departures")?)).transpose()?,
            state_slots: Mutex::new(Slots::new(settings.states(), REST_NS)),
            socket_slots: Mutex::new(Slots::new(settings.sockets, REST_NS)),
            measures: settings.measures,
            most_flows: settings.flows,
            held: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            // Starts at the current time: as there is less than one installation per nanosecond, later
            // processes use higher stamps.
            stamp: AtomicU64::new(stamp),
            first_stamp: stamp,
            adopted: Mutex::default(),
            gap_ns: if by_xdp { layout::XDP_GAP_NS } else { layout::TC_GAP_NS },
            counts: Mutex::new(counts),
            maps,
            links: Mutex::default(),
            is_handed_on: AtomicBool::new(false),
            hook: settings.hook,
            obstacle: Mutex::default(),
            is_blocked: AtomicBool::new(false),
        })
    }

    pub(crate) fn links(&self) -> MutexGuard<'_, BTreeMap<u32, Attached>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn obstacle(&self) -> MutexGuard<'_, Option<String>> {
        self.obstacle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the obstacle and returns the previous one.
    pub(crate) fn set_obstacle(&self, obstacle: Option<String>) -> Option<String> {
        self.is_blocked.store(obstacle.is_some(), Ordering::Relaxed);
        std::mem::replace(&mut *self.obstacle(), obstacle)
    }

    pub(crate) fn detach_all(&self) {
        let is_handed_on = self.is_handed_on.load(Ordering::Relaxed);
        for attached in std::mem::take(&mut *self.links()).into_values() {
            // A passed link stays attached through the other process's descriptors. A passed filter has none, so it
            // must not be detached.
            let stays = |link: &Link| is_handed_on && attached.is_passed && matches!(link, Link::Filter(_));
            let links = [attached.leaves, Some(attached.link)].into_iter().flatten();
            links.filter(|link| !stays(link)).for_each(Link::detach);
        }
    }
}

pub(crate) struct Attached {
    /// `None` for loopback, where nothing is relayed.
    pub(crate) told: Option<Attachment>,
    pub(crate) link: Link,
    /// Program at TC egress, if leases are required.
    pub(crate) leaves: Option<Link>,
    pub(crate) is_passed: bool,
}

impl Attached {
    pub(crate) fn new(told: Option<Attachment>, link: Link, leaves: Option<Link>) -> Self {
        Self { told, link, leaves, is_passed: false }
    }

    pub(crate) fn detach(self) {
        self.leaves.into_iter().for_each(Link::detach);
        self.link.detach();
    }
}
