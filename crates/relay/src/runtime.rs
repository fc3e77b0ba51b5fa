//! Starts, supervises and stops the workers.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use turnpike_net::{RxStats, TxStats, UdpOptions, UdpSocket};
use turnpike_offload::{Hook, Kernel, OffloadError, PassedKernel};
use turnpike_turn::server::{
    CredentialQuery, Effect, ListenerId, LookupId, LookupResult, NonceKeys, OwnEndpoints, QualityLevel,
    QuotaRefusal, Redirects, Stats, Transport, UserRef, Users, VolumeLimits,
};
use turnpike_worker::{Sender, Workers};

use crate::{
    Config, DtlsConfig, DtlsStats, Layout, RelayAddress, StartError, StreamConfig, TurnedAway,
    common::RelayCommon,
    discovery,
    handed_on::HandOnStats,
    listening::{ListenerChange, ListenerPlaces, ListenerSockets, Listeners, WaitingListener},
    peers::PeerStats,
    policy::SharedStore,
    ports::Ports,
    quotas::Quotas,
    routes,
    stream::StreamStats,
    upgrade::{ReceivedRelay, RelayHandover},
    worker::{Command, Mailbox, Reconfigure, Worker},
};

pub trait CredentialStore: Users + Send + Sync {
    /// Continues a [`Users::check`] that returned [`CredentialCheck::NeedsLookup`]. Must not block.
    /// `lookup` must be finished within 10 s, on any thread. Never called if the store always decides
    /// immediately.
    fn look_up(&self, _query: CredentialQuery, _lookup: PendingLookup) {}
}

/// A worker's pending lookup, to be finished once, from any thread. Dropping it counts as
/// [`LookupResult::Unavailable`].
pub struct PendingLookup {
    id: LookupId,
    finished: bool,
    worker: Sender<Command>,
}

impl PendingLookup {
    pub(crate) fn new(id: LookupId, worker: Sender<Command>) -> Self {
        Self { id, finished: false, worker }
    }

    pub fn finish(mut self, result: LookupResult) {
        self.send(result);
    }

    fn send(&mut self, result: LookupResult) {
        if !std::mem::replace(&mut self.finished, true) {
            self.worker.tell(Command::FinishLookup(self.id, result));
        }
    }
}

impl Drop for PendingLookup {
    fn drop(&mut self) {
        self.send(LookupResult::Unavailable);
    }
}

impl CredentialStore for () {}

/// Receives allocations and refusals; called on the workers' threads and must not block.
pub trait AllocationLog: Send + Sync {
    fn effect(&self, worker: usize, effect: &Effect);
    fn turned_away(&self, _worker: usize, _turned: &TurnedAway) {}
}

impl AllocationLog for () {
    fn effect(&self, _: usize, _: &Effect) {}
}

/// Other servers of the same service, shared by all workers. Used for requests, not for relayed data.
/// Methods must not block.
pub trait Fleet: Redirects + Send + Sync {
    /// Counts an allocation against the limits shared by all servers, or returns the limit that would be
    /// exceeded.
    fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal>;
    fn release(&self, user: UserRef<'_>);
    /// See [`turnpike_turn::server::Restrictions::volume_limits`].
    fn volume_limits(&self, _user: UserRef<'_>, _username: &str) -> VolumeLimits {
        VolumeLimits::default()
    }
    /// See [`turnpike_turn::server::Restrictions::is_banned`].
    fn is_banned(&self, unix: u64, user: UserRef<'_>, username: &str, client: IpAddr) -> bool;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedQuota<'a> {
    pub user: UserRef<'a>,
    pub of_realm: Option<usize>,
    pub of_user: usize,
}

/// Counters of one worker, at most 100 ms old.
#[derive(Clone, Debug, Default)]
pub struct WorkerSnapshot {
    pub allocations: u64,
    pub turn: Stats,
    pub rx: RxStats,
    pub tx: TxStats,
    pub wakeups: u64,
    pub pauses: u64,
    /// Allocations refused because all ports of the range were taken.
    pub ports_exhausted: u64,
    /// Allocations refused because the process had run out of file descriptors.
    pub files_exhausted: u64,
    /// Datagrams dropped because their TTL or hop limit reached zero here (RFC 8656 section 15.1).
    pub ttl_expired: u64,
    pub streams: StreamStats,
    pub peers: PeerStats,
    pub handed_on: HandOnStats,
    /// Messages between workers that were lost because the receiver was too slow; clients retransmit
    /// important ones.
    pub handoffs_lost: u64,
    pub dtls: DtlsStats,
    /// Datagrams and payload bytes relayed by the kernel to peers and to clients, at most 1 s old; included
    /// in `turn`.
    pub across: [(u64, u64); 2],
    /// Channels kept out of the kernel because their allocation has a bandwidth limit.
    pub kernel_limited: u64,
    /// Allocations per listener in the order of [`Layout`]; trailing entries may be missing.
    pub listeners: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerCount {
    pub transport: Transport,
    pub address: SocketAddr,
    /// Server name requested by the clients, if it selects its own realms.
    pub server_name: Option<String>,
    pub allocations: u64,
}

pub struct Relay {
    pub(crate) workers: Workers<Command, WorkerSnapshot>,
    store: SharedStore,
    quotas: Arc<Quotas>,
    pub(crate) ports: Arc<Ports>,
    in_force: Mutex<InForce>,
    /// Declared after the workers, so that it is dropped after them.
    pub(crate) kernel: Option<Arc<Kernel>>,
    kernel_lack: Option<String>,
}

/// State sent to the workers, kept so that it can be sent again when part of it changes.
pub(crate) struct InForce {
    /// Configuration; the fields below take precedence over it. Settings that a reload cannot change keep
    /// their initial values.
    pub(crate) config: Config,
    pub(crate) layout: Layout,
    pub(crate) places: ListenerPlaces,
    streams: Arc<StreamConfig>,
    dtls: Arc<DtlsConfig>,
}

impl InForce {
    fn commands(&self) -> impl Fn(ListenerSockets) -> Command + use<> {
        let (server, layout) = (Arc::new(self.config.server.clone()), Arc::new(self.layout.clone()));
        let (streams, dtls) = (Arc::clone(&self.streams), Arc::clone(&self.dtls));
        let config = Arc::new(self.config.clone());
        move |sockets| {
            Command::Reconfigure(Box::new(Reconfigure {
                server: Arc::clone(&server),
                layout: Arc::clone(&layout),
                streams: Arc::clone(&streams),
                dtls: Arc::clone(&dtls),
                config: Arc::clone(&config),
                sockets,
            }))
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Relistened {
    pub opened: Vec<(&'static str, SocketAddr)>,
    /// Stream listeners close immediately; UDP and DTLS listeners accept no new clients and close after their
    /// last client.
    pub closed: Vec<(&'static str, SocketAddr)>,
}

impl Relay {
    /// Binds all listeners, tests every relay address and starts the workers. On error, everything is closed
    /// again, and [`StartError`] suggests a remedy.
    pub fn start(
        config: &Config,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn AllocationLog>,
    ) -> Result<Self, StartError> {
        Self::start_in(None, config, credentials, log)
    }

    /// Like [`Relay::start`], but as a member of a fleet.
    pub fn start_in(
        fleet: Option<Arc<dyn Fleet>>,
        config: &Config,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn AllocationLog>,
    ) -> Result<Self, StartError> {
        Self::begin(fleet, config, &config.layout(), credentials, log, None)
    }

    /// Takes over another process's sockets ([`crate::upgrade`]): the workers import its allocations and
    /// serve no clients until they are started. The number of workers and the data path must match the
    /// offer; `layout` is the offered layout after [`Layout::follow`] with the new listeners. On error,
    /// the other process continues.
    pub fn start_from_handover(
        fleet: Option<Arc<dyn Fleet>>,
        config: &Config,
        layout: &Layout,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn AllocationLog>,
        handover: RelayHandover,
    ) -> Result<Self, StartError> {
        Self::begin(fleet, config, layout, credentials, log, Some(handover))
    }

    fn begin(
        fleet: Option<Arc<dyn Fleet>>,
        config: &Config,
        layout: &Layout,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn AllocationLog>,
        handover: Option<RelayHandover>,
    ) -> Result<Self, StartError> {
        probe_relay_addresses(config, &[])?;
        let takes_over = handover.is_some();
        let received = handover.map(|handover| handover.open(config.workers)).transpose()?;
        let ReceivedRelay { places, sockets: received_sockets, channels, known, kernel: of_kernel } =
            received.unwrap_or_default();
        let ListenerChange { places, mut sockets, closing, held, .. } = places.change(layout, config)?;
        if let Some((protocol, address)) = closing.first().copied() {
            return Err(StartError::ListenerGone { protocol, address });
        }
        held.keep();
        for (all, received) in sockets.iter_mut().zip(received_sockets) {
            all.extend(received);
        }
        let mut config = config.clone();
        settle(&mut config, layout, &places)?;
        let relays = [&config.relay[..], &known.addresses].concat();
        let own = own_endpoints(&config, &places, &relays, known.ranges.clone());
        config.server.set_own_endpoints(&own);
        let offloads = |hook| {
            let kernel = offload(&config, &places.listeners(), hook, of_kernel)?;
            if !takes_over {
                kernel.attach()?;
            }
            Ok::<_, OffloadError>(Arc::new(kernel))
        };
        let (kernel, kernel_lack) = match config.kernel.map(offloads) {
            Some(Err(error)) if config.kernel_leases => (None, Some(error.to_string())),
            other => (other.transpose()?, None),
        };
        let of_workers = kernel.as_ref().map(Arc::clone);
        let common = RelayCommon::new(config, layout.clone(), credentials, log, of_workers, takes_over);
        let common = RelayCommon { fleet, ..common };
        common.ports.take_over(&common.config, known);
        let in_force = InForce {
            config: common.config.clone(),
            layout: layout.clone(),
            places,
            streams: Arc::clone(&common.streams),
            dtls: Arc::clone(&common.dtls),
        };
        // Before any client is served, applies this configuration's rules and limits to the imported
        // allocations.
        let first = takes_over.then(|| in_force.commands());
        let mut relay = Self {
            workers: Workers::default(),
            store: Arc::clone(&common.store),
            quotas: Arc::clone(&common.quotas),
            ports: Arc::clone(&common.ports),
            in_force: Mutex::new(in_force),
            kernel,
            kernel_lack,
        };
        relay.start_workers(&common, sockets, first)?;
        if takes_over {
            relay.workers.import(channels)?;
        }
        Ok(relay)
    }

    /// Binds the sockets of all workers, then runs them. During a takeover, each worker first runs the
    /// command `first`.
    fn start_workers(
        &mut self,
        common: &RelayCommon,
        sockets: Vec<ListenerSockets>,
        first: Option<impl Fn(ListenerSockets) -> Command>,
    ) -> Result<(), StartError> {
        let workers = sockets.into_iter().enumerate();
        let workers = workers.map(|(number, sockets)| Worker::new(number, common, sockets));
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        let mailboxes: Arc<[Mailbox]> = workers.iter().map(Mailbox::of).collect();
        // Workers start only after all sockets are bound. Each socket that joins an SO_REUSEPORT group moves
        // some 5-tuples to another worker, so clients that already had an allocation would reach the wrong
        // worker.
        for mut worker in workers {
            worker.set_mailboxes(Arc::clone(&mailboxes));
            let takes_over = first.is_some();
            if let Some(first) = &first {
                worker.frame.defer(first(ListenerSockets::default()));
            }
            let name = format!("relay-{}", worker.frame.number);
            let run = move |mut worker: Worker| {
                if takes_over { worker.run_from_handover() } else { worker.run() }
            };
            self.workers.spawn(name, worker, |worker| &mut worker.frame, run)?;
        }
        Ok(())
    }

    pub fn listeners(&self) -> Listeners {
        self.in_force().places.listeners()
    }

    pub fn waiting(&self) -> Vec<WaitingListener> {
        self.in_force().places.waiting().to_vec()
    }

    pub(crate) fn senders(&self) -> impl Iterator<Item = &Sender<Command>> {
        self.workers.senders()
    }

    pub fn snapshots(&self) -> Vec<WorkerSnapshot> {
        self.workers.snapshots()
    }

    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.snapshots().iter().map(|snapshot| snapshot.allocations).sum()
    }

    /// Number of allocations per listener according to `snapshots`: one entry for each transport of an
    /// address, and one for each server name with its own realms. Removed listeners are included as long as
    /// they have allocations.
    #[must_use]
    pub fn by_listener(&self, snapshots: &[WorkerSnapshot]) -> Vec<ListenerCount> {
        let in_force = self.in_force();
        let counted = |number: usize| {
            let counts = snapshots.iter().filter_map(|snapshot| snapshot.listeners.get(number));
            counts.map(|count| u64::from(*count)).sum::<u64>()
        };
        let mut counts = Vec::new();
        for (number, (entry, (place, is_open))) in
            in_force.layout.entries().zip(in_force.layout.places()).enumerate()
        {
            let allocations = counted(number);
            if is_open || allocations > 0 {
                let bound = in_force.places.bound_to(entry.transport, place);
                counts.push(ListenerCount {
                    transport: entry.transport,
                    address: bound.unwrap_or(entry.address),
                    server_name: entry.server_name.map(str::to_owned),
                    allocations,
                });
            }
        }
        counts
    }

    #[must_use]
    pub fn kernel(&self) -> Option<&Kernel> {
        self.kernel.as_deref()
    }

    /// Reason why the kernel path is not used although [`Config::kernel_leases`] requests it.
    pub fn kernel_lack(&self) -> Option<&str> {
        self.kernel_lack.as_deref()
    }

    /// Allocations per realm across all workers in arbitrary order, without empty realms.
    pub fn realms(&self) -> Vec<(Box<str>, usize)> {
        self.quotas.held()
    }

    #[must_use]
    pub fn users(&self) -> usize {
        self.quotas.users()
    }

    pub fn layout(&self) -> Layout {
        self.in_force().layout.clone()
    }

    /// Applies a new configuration: listeners, relay addresses and ports, limits, settings of the state
    /// machine, and users. All other settings of [`Config`] keep their initial values. `layout` is
    /// [`Relay::layout`] after [`Layout::follow`] with the new listeners;
    /// [`turnpike_turn::server::ServerConfig::listeners`] uses its numbers. If something cannot be bound,
    /// nothing changes.
    pub fn reconfigure(
        &self,
        config: &Config,
        layout: &Layout,
        credentials: &Arc<dyn CredentialStore>,
    ) -> Result<Relistened, StartError> {
        let mut in_force = self.in_force();
        let before = &in_force.config;
        probe_relay_addresses(config, &before.relay)?;
        let mut config = Config {
            workers: before.workers,
            datapath: before.datapath,
            kernel: before.kernel,
            kernel_leases: before.kernel_leases,
            kernel_flows: before.kernel_flows,
            busy_poll: before.busy_poll,
            coalesce: before.coalesce,
            shared_ports: before.shared_ports,
            listener_buffer: before.listener_buffer,
            relay_buffer: before.relay_buffer,
            listeners_beside: before.listeners_beside.clone(),
            passed: Arc::clone(&before.passed),
            ..config.clone()
        };
        let ListenerChange { places, sockets, opened, closing, held } =
            in_force.places.change(layout, &config)?;
        settle(&mut config, layout, &places)?;
        // Nothing can fail after this.
        held.keep();
        self.quotas.limit(&config);
        self.ports.reconfigure(&config);
        let own = self.own_endpoints(&config, &places);
        config.server.set_own_endpoints(&own);
        *self.store.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(credentials);
        if let Some(kernel) = &self.kernel {
            let bound: Vec<_> = places.bound_by_udp().collect();
            kernel.set_ports(&bound, config.ports.clone());
        }
        (in_force.streams, in_force.dtls) = (Arc::new(config.streams.clone()), Arc::new(config.dtls.clone()));
        (in_force.config, in_force.layout, in_force.places) = (config, layout.clone(), places);
        self.put_into_force(&in_force, sockets);
        Ok(Relistened { opened, closed: closing })
    }

    /// Replaces the keys for nonces, tickets and cookies, and this node's number in a fleet.
    pub fn set_keys(&self, keys: NonceKeys, node: Option<u16>) {
        let mut in_force = self.in_force();
        (in_force.config.server.nonce_keys, in_force.config.server.node) = (keys, node);
        self.put_into_force(&in_force, Vec::new());
    }

    /// Replaces the addresses of this machine. Ends allocations that the peer rules no longer permit, as
    /// after a reload.
    pub fn set_addresses(&self, addresses: Vec<IpAddr>) {
        let mut in_force = self.in_force();
        in_force.config.addresses = addresses;
        let own = self.own_endpoints(&in_force.config, &in_force.places);
        in_force.config.server.set_own_endpoints(&own);
        self.put_into_force(&in_force, Vec::new());
    }

    #[must_use]
    pub fn relay_addresses(&self) -> Vec<RelayAddress> {
        self.ports.addresses()
    }

    pub fn end_at(&self, gone: &[IpAddr]) {
        let gone: Arc<[IpAddr]> = gone.into();
        self.workers.tell(|| Command::EndAt(Arc::clone(&gone)));
    }

    fn own_endpoints(&self, config: &Config, places: &ListenerPlaces) -> OwnEndpoints {
        own_endpoints(config, places, &self.ports.addresses(), self.ports.former_ranges())
    }

    /// Hold the guard until all workers have been sent their commands, so that concurrent changes reach every
    /// worker in the same order.
    pub(crate) fn in_force(&self) -> MutexGuard<'_, InForce> {
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_into_force(&self, in_force: &InForce, sockets: Vec<ListenerSockets>) {
        let (command, mut sockets) = (in_force.commands(), sockets.into_iter());
        for worker in self.workers.senders() {
            worker.tell(command(sockets.next().unwrap_or_default()));
        }
    }

    pub fn set_draining(&self, draining: bool) {
        self.workers.tell(|| Command::SetDraining(draining));
    }

    /// Returns true if a worker has ended unexpectedly, so that some clients are no longer served.
    pub fn has_failed(&self) -> bool {
        self.workers.have_failed()
    }

    /// Returns true if all workers have run commands since the last call; a hung worker runs none.
    #[must_use]
    pub fn makes_progress(&self) -> bool {
        self.workers.make_progress()
    }

    pub fn stop(self) {
        drop(self);
    }
}

/// Loads the eBPF program; the caller attaches it.
fn offload(
    config: &Config,
    listeners: &Listeners,
    hook: Hook,
    before: Option<(PassedKernel, Vec<OwnedFd>)>,
) -> Result<Kernel, OffloadError> {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let sockets = listeners.udp.len() * config.workers.max(1) + 2 * config.limits.allocations;
    let settings = turnpike_offload::KernelSettings {
        listeners: listeners.udp.clone(),
        relay_ports: config.ports.clone(),
        flows: config.kernel_flows,
        sockets: count(sockets),
        hook,
        leases: config.kernel_leases,
        measures: config.server.quality != QualityLevel::Off,
    };
    match before {
        None => Kernel::load(&settings),
        Some((passed, descriptors)) => Kernel::from_handover(&settings, passed, descriptors),
    }
}

/// Checks that each available relay address missing from `known` can be bound.
fn probe_relay_addresses(config: &Config, known: &[RelayAddress]) -> Result<(), StartError> {
    for relay in config.relays_up().filter(|relay| !known.contains(relay)) {
        UdpSocket::bind(SocketAddr::new(relay.bind, 0), &UdpOptions::default()).map_err(|source| {
            StartError::RelayAddress {
                address: relay.bind,
                source,
                remedy: routes::relay_address_remedy(relay),
            }
        })?;
    }
    Ok(())
}

fn settle(config: &mut Config, layout: &Layout, places: &ListenerPlaces) -> Result<(), StartError> {
    if let Some(rule) = config.streams.hand_on.iter().find(|rule| config.accepts_at(rule.to)) {
        return Err(StartError::HandOnToItself { to: rule.to });
    }
    let (numbers, udp) = places.udp();
    let number = |at: usize| {
        numbers.get(at).map_or(ListenerId(u16::MAX), |place| layout.number(Transport::Udp, *place, None))
    };
    config.server.nat_discovery = discovery::resolve(&config.server.nat_discovery, &udp, number)?;
    config.server.listeners = layout.profiles(&config.server.listeners);
    Ok(())
}

/// Endpoints of this server: addresses of this machine, relay addresses with current and former ports, and
/// all listeners.
fn own_endpoints(
    config: &Config,
    places: &ListenerPlaces,
    relays: &[RelayAddress],
    former: Vec<RangeInclusive<u16>>,
) -> OwnEndpoints {
    let relays = relays.iter().map(|relay| (relay.bind, relay.external));
    let listeners = places.bound().chain(config.listeners_beside.iter().copied());
    // NAT discovery reveals additional external addresses to clients.
    let discovery = config.server.nat_discovery.iter().flat_map(|of| of.external).flatten();
    OwnEndpoints::new(config.addresses.iter().copied(), relays, listeners, config.ports.clone())
        .with_former_ports(former)
        .with_external(discovery)
}
