//! Starting, watching and stopping the workers.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use turnpike_net::{
    RxStats, TxStats, UdpOptions, UdpSocket,
    worker::{Sender, Workers},
};
use turnpike_offload::{Hook, Kernel, OffloadError, PassedKernel};
use turnpike_turn::server::{
    CredentialQuery, Credentials, Effect, ListenerId, LookupId, NonceKeys, OwnEndpoints, QuotaRefusal,
    Redirects, Stats, Transport, UserRef, Users,
};

use crate::{
    Config, DtlsConfig, DtlsStats, Layout, RelayAddress, StartError, StreamConfig, TurnedAway,
    common::Common,
    discovery,
    listening::{Change, Listeners, Places, Sockets, Waiting},
    peers::PeerStats,
    policy::SharedStore,
    ports::Ports,
    quotas::Quotas,
    routes,
    stream::StreamStats,
    upgrade::{ReceivedRelay, RelayHandover},
    worker::{Command, Mailbox, Reconfigure, Worker},
};

/// Users and their keys; shared by all workers, asked on requests only.
pub trait CredentialStore: Users + Send + Sync {
    /// Looks up what [`Users::check`] has answered by [`Lookup::Later`]. Must not wait either: `answer` may be given within 10 s and from any
    /// thread. A store that always knows is never asked.
    fn look_up(&self, _query: CredentialQuery, _answer: PendingLookup) {}
}

/// A question to the store that one worker waits for, though it goes on meanwhile. Answered once, from any thread; dropped, it is
/// answered too, by [`Credentials::Unavailable`].
pub struct PendingLookup {
    lookup: LookupId,
    answered: bool,
    worker: Sender<Command>,
}

impl PendingLookup {
    pub(crate) fn new(lookup: LookupId, worker: Sender<Command>) -> Self {
        Self { lookup, answered: false, worker }
    }

    /// What the store has found out.
    pub fn answer(mut self, credentials: Credentials) {
        self.send(credentials);
    }

    fn send(&mut self, credentials: Credentials) {
        if !std::mem::replace(&mut self.answered, true) {
            self.worker.tell(Command::Credentials(self.lookup, credentials));
        }
    }
}

impl Drop for PendingLookup {
    fn drop(&mut self) {
        self.send(Credentials::Unavailable);
    }
}

/// Knows nobody.
impl CredentialStore for () {}

/// Hears of sessions and refusals, from the workers' threads; must not block.
pub trait SessionLog: Send + Sync {
    /// One effect of worker number `worker`.
    fn effect(&self, worker: usize, effect: &Effect);
    /// Clients whose connection or DTLS handshake came to nothing.
    fn turned_away(&self, _worker: usize, _turned: &TurnedAway) {}
}

/// Writes nothing.
impl SessionLog for () {
    fn effect(&self, _: usize, _: &Effect) {}
}

/// Other servers of the same service; shared by all workers, asked on requests only. None of it may wait.
pub trait Fleet: Redirects + Send + Sync {
    /// Counts one more allocation against the limits that all servers share, or refuses.
    ///
    /// # Errors
    /// Which limit.
    fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal>;
    /// Counts one less.
    fn release(&self, user: UserRef<'_>);
    /// As [`turnpike_turn::server::Restrictions::is_banned`].
    fn is_banned(&self, unix: u64, user: UserRef<'_>, username: &str, client: IpAddr) -> bool;
}

/// An allocation that counts for several limits at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedQuota<'a> {
    /// Its user.
    pub user: UserRef<'a>,
    /// The most that the realm may have, where there is such a limit.
    pub of_realm: Option<usize>,
    /// The most that the user may have.
    pub of_user: usize,
}

/// What one worker has counted, at most 100 ms old.
#[derive(Clone, Debug, Default)]
pub struct WorkerSnapshot {
    /// Allocations that exist.
    pub allocations: u64,
    /// The state machine's counters.
    pub turn: Stats,
    /// Receive occupancy.
    pub rx: RxStats,
    /// Send occupancy.
    pub tx: TxStats,
    /// Times that the worker woke up.
    pub wakeups: u64,
    /// Times that it paused, so that its next wake-up carries more.
    pub pauses: u64,
    /// Allocations refused because every port of the range is taken.
    pub ports_exhausted: u64,
    /// Allocations refused because the process may open no more files.
    pub files_exhausted: u64,
    /// Datagrams dropped because their TTL or hop limit ended here (RFC 8656 section 15.1).
    pub ttl_expired: u64,
    /// TCP and TLS connections.
    pub streams: StreamStats,
    /// Connections to peers (RFC 6062).
    pub peers: PeerStats,
    /// Messages between workers that were lost because one did not keep up; clients repeat what matters.
    pub handoffs_lost: u64,
    /// DTLS associations.
    pub dtls: DtlsStats,
    /// Datagrams and bytes of their payload that the kernel has relayed, at most a second old: to peers, to clients. They are in
    /// `turn` too.
    pub across: [(u64, u64); 2],
    /// Channels of which the kernel was not told, because their allocation has a limit of bits per second.
    pub kernel_limited: u64,
    /// Allocations by listener, in the order of [`Layout`]; those at the end may be missing.
    pub listeners: Vec<u32>,
}

/// How many allocations have clients that come by this listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerCount {
    /// How they come.
    pub transport: Transport,
    /// Where they come to.
    pub address: SocketAddr,
    /// The server name that they asked for, where that leads to realms of its own.
    pub server_name: Option<String>,
    /// How many.
    pub allocations: u64,
}

/// A running relay. Dropping it stops the workers.
pub struct Relay {
    pub(crate) workers: Workers<Command, WorkerSnapshot>,
    store: SharedStore,
    quotas: Arc<Quotas>,
    pub(crate) ports: Arc<Ports>,
    in_force: Mutex<InForce>,
    /// Behind the workers, so that it is dropped after them.
    pub(crate) kernel: Option<Arc<Kernel>>,
}

/// What the workers have, to be sent again when a part of it changes.
pub(crate) struct InForce {
    /// The whole configuration, but for what the fields below say; what only a start takes is that of the start.
    pub(crate) config: Config,
    pub(crate) layout: Layout,
    pub(crate) places: Places,
    streams: Arc<StreamConfig>,
    dtls: Arc<DtlsConfig>,
}

impl InForce {
    /// Makes what each worker is told of it, with its new sockets.
    fn commands(&self) -> impl Fn(Sockets) -> Command + use<> {
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

/// What a reload has changed of the listeners, by protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Relistened {
    /// Listened on from now on.
    pub opened: Vec<(&'static str, SocketAddr)>,
    /// Closed: streams at once, UDP and DTLS when their last client is gone; they take no new ones.
    pub closed: Vec<(&'static str, SocketAddr)>,
}

impl Relay {
    /// Binds all listeners, probes every relay address and starts the workers; on error nothing is left open.
    ///
    /// # Errors
    /// [`StartError`], which says what to change.
    pub fn start(
        config: &Config,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn SessionLog>,
    ) -> Result<Self, StartError> {
        Self::start_in(None, config, credentials, log)
    }

    /// The same in a fleet.
    ///
    /// # Errors
    /// As [`Relay::start`].
    pub fn start_in(
        fleet: Option<Arc<dyn Fleet>>,
        config: &Config,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn SessionLog>,
    ) -> Result<Self, StartError> {
        Self::begin(fleet, config, &config.layout(), credentials, log, None)
    }

    /// The same in the place of another process, by its sockets: its workers take its sessions in, and serve when they are told to
    /// ([`crate::upgrade`]). The configuration has as many workers as were offered, and the same data path; `layout` is the one that was
    /// offered, and has followed the listeners of this configuration.
    ///
    /// # Errors
    /// [`StartError`]; the other process goes on.
    pub fn start_from_handover(
        fleet: Option<Arc<dyn Fleet>>,
        config: &Config,
        layout: &Layout,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn SessionLog>,
        handover: RelayHandover,
    ) -> Result<Self, StartError> {
        Self::begin(fleet, config, layout, credentials, log, Some(handover))
    }

    fn begin(
        fleet: Option<Arc<dyn Fleet>>,
        config: &Config,
        layout: &Layout,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn SessionLog>,
        handover: Option<RelayHandover>,
    ) -> Result<Self, StartError> {
        probe_relay_addresses(config, &[])?;
        let takes_over = handover.is_some();
        let received = handover.map(|handover| handover.open(config.workers)).transpose()?;
        let ReceivedRelay { places, sockets: received_sockets, channels, known, kernel: of_kernel } =
            received.unwrap_or_default();
        let Change { places, mut sockets, closing, held, .. } = places.change(layout, config)?;
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
        let kernel = config.kernel.map(|hook| offload(&config, &places.listeners(), hook, of_kernel));
        let kernel = kernel.transpose()?.map(Arc::new);
        if let Some(kernel) = kernel.as_ref().filter(|_| !takes_over) {
            kernel.attach()?;
        }
        let of_workers = kernel.as_ref().map(Arc::clone);
        let common = Common::new(config, layout.clone(), credentials, log, of_workers, takes_over);
        let common = Common { fleet, ..common };
        common.ports.take_over(&common.config, known);
        let in_force = InForce {
            config: common.config.clone(),
            layout: layout.clone(),
            places,
            streams: Arc::clone(&common.streams),
            dtls: Arc::clone(&common.dtls),
        };
        // What is refused here, or lasts longer than it may here, ends before anybody is served.
        let first = takes_over.then(|| in_force.commands());
        let mut relay = Self {
            workers: Workers::default(),
            store: Arc::clone(&common.store),
            quotas: Arc::clone(&common.quotas),
            ports: Arc::clone(&common.ports),
            in_force: Mutex::new(in_force),
            kernel,
        };
        relay.start_workers(&common, sockets, first)?;
        if takes_over {
            relay.workers.import(channels)?;
        }
        Ok(relay)
    }

    /// Binds the sockets of all workers, and then runs them. In the place of another process each has a command to carry out `first`.
    fn start_workers(
        &mut self,
        common: &Common,
        sockets: Vec<Sockets>,
        first: Option<impl Fn(Sockets) -> Command>,
    ) -> Result<(), StartError> {
        let workers = sockets.into_iter().enumerate();
        let workers = workers.map(|(number, sockets)| Worker::new(number, common, sockets));
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        let mailboxes: Arc<[Mailbox]> = workers.iter().map(Mailbox::of).collect();
        // Only now: each socket that joins an SO_REUSEPORT group changes which worker a 5-tuple hashes to, and an allocation
        // made before the last one joined would be left with a worker that hears nothing of its client any more.
        for mut worker in workers {
            worker.set_mailboxes(Arc::clone(&mailboxes));
            let takes_over = first.is_some();
            if let Some(first) = &first {
                worker.frame.defer(first(Sockets::default()));
            }
            let name = format!("relay-{}", worker.frame.number);
            let run = move |mut worker: Worker| {
                if takes_over { worker.run_from_handover() } else { worker.run() }
            };
            self.workers.spawn(name, worker, |worker| &mut worker.frame, run)?;
        }
        Ok(())
    }

    /// The addresses listened on.
    pub fn listeners(&self) -> Listeners {
        self.in_force().places.listeners()
    }

    /// Listeners that have no socket yet.
    pub fn waiting(&self) -> Vec<Waiting> {
        self.in_force().places.waiting().to_vec()
    }

    /// The way to each worker.
    pub(crate) fn senders(&self) -> impl Iterator<Item = &Sender<Command>> {
        self.workers.senders()
    }

    /// What each worker has counted.
    pub fn snapshots(&self) -> Vec<WorkerSnapshot> {
        self.workers.snapshots()
    }

    /// Number of allocations.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.snapshots().iter().map(|snapshot| snapshot.allocations).sum()
    }

    /// How many allocations each listener has, as `snapshots` say: one entry for each transport of an address, and one more for each server
    /// name that leads to realms of its own. A listener that a reload has taken away is among them as long as it has any.
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
                // As bound, with the real port.
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

    /// The path through the kernel, where that was asked for.
    #[must_use]
    pub fn kernel(&self) -> Option<&Kernel> {
        self.kernel.as_deref()
    }

    /// Allocations of each realm that has any, over all workers and in no order.
    pub fn realms(&self) -> Vec<(Box<str>, usize)> {
        self.quotas.held()
    }

    /// Users that have an allocation, over all realms.
    #[must_use]
    pub fn users(&self) -> usize {
        self.quotas.users()
    }

    /// The numbers of all listeners there have been.
    pub fn layout(&self) -> Layout {
        self.in_force().layout.clone()
    }

    /// Another configuration from now on: listeners, relay addresses and ports, limits, the state machine's settings, users. What is in
    /// [`Config`] beside these stays as it was at the start. `layout` is [`Relay::layout`] that has followed the new listeners; the
    /// configuration's [`turnpike_turn::server::ServerConfig::listeners`] are by its numbers.
    ///
    /// # Errors
    /// [`StartError`], if something cannot be bound; then nothing has changed.
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
        let Change { places, sockets, opened, closing, held } = in_force.places.change(layout, &config)?;
        settle(&mut config, layout, &places)?;
        // Nothing can fail from here on.
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

    /// What nonces, tickets and cookies are made with from now on, and which node of a fleet this is.
    pub fn set_keys(&self, keys: NonceKeys, node: Option<u16>) {
        let mut in_force = self.in_force();
        (in_force.config.server.nonce_keys, in_force.config.server.node) = (keys, node);
        self.put_into_force(&in_force, Vec::new());
    }

    /// This machine has these addresses, from now on. What the peer rules then refuse ends, as by a reload.
    pub fn set_addresses(&self, addresses: Vec<IpAddr>) {
        let mut in_force = self.in_force();
        in_force.config.addresses = addresses;
        let own = self.own_endpoints(&in_force.config, &in_force.places);
        in_force.config.server.set_own_endpoints(&own);
        self.put_into_force(&in_force, Vec::new());
    }

    /// Addresses from which something is relayed, those of before a reload included.
    #[must_use]
    pub fn relay_addresses(&self) -> Vec<RelayAddress> {
        self.ports.addresses()
    }

    /// Ends what is relayed from these addresses, which the machine has lost.
    pub fn end_at(&self, gone: &[IpAddr]) {
        let gone: Arc<[IpAddr]> = gone.into();
        self.workers.tell(|| Command::EndAt(Arc::clone(&gone)));
    }

    /// With what is left of before a reload.
    fn own_endpoints(&self, config: &Config, places: &Places) -> OwnEndpoints {
        own_endpoints(config, places, &self.ports.addresses(), self.ports.former_ranges())
    }

    /// Held until all workers have been told, so that two changes reach each of them in the same order.
    pub(crate) fn in_force(&self) -> MutexGuard<'_, InForce> {
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells each worker, and gives it its new sockets.
    fn put_into_force(&self, in_force: &InForce, sockets: Vec<Sockets>) {
        let (command, mut sockets) = (in_force.commands(), sockets.into_iter());
        for worker in self.workers.senders() {
            worker.tell(command(sockets.next().unwrap_or_default()));
        }
    }

    /// No new allocations from now on, or some again.
    pub fn set_draining(&self, draining: bool) {
        self.workers.tell(|| Command::SetDraining(draining));
    }

    /// Whether a worker has ended though nobody stopped it: the relay no longer serves all its clients.
    pub fn has_failed(&self) -> bool {
        self.workers.have_failed()
    }

    /// Whether all workers have taken commands since the last call of this; one that hangs has not.
    #[must_use]
    pub fn makes_progress(&self) -> bool {
        self.workers.make_progress()
    }

    /// Ends all sessions and joins the workers.
    pub fn stop(self) {
        drop(self);
    }
}

/// Loads the program for what is configured; it is still to be attached.
fn offload(
    config: &Config,
    listeners: &Listeners,
    hook: Hook,
    before: Option<(PassedKernel, Vec<OwnedFd>)>,
) -> Result<Kernel, OffloadError> {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let sockets = listeners.udp.len() * config.workers.max(1) + 2 * config.limits.allocations;
    let settings = turnpike_offload::Settings {
        listeners: listeners.udp.clone(),
        relay_ports: config.ports.clone(),
        flows: config.kernel_flows,
        sockets: count(sockets),
        hook,
    };
    match before {
        None => Kernel::load(&settings),
        Some((passed, descriptors)) => Kernel::from_handover(&settings, passed, descriptors),
    }
}

/// Whether each of those that the machine has, and that `known` lacks, can be bound.
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

/// Fills in what a configuration says of listeners once they are bound: their numbers and profiles.
fn settle(config: &mut Config, layout: &Layout, places: &Places) -> Result<(), StartError> {
    let (numbers, udp) = places.udp();
    let number = |at: usize| {
        numbers.get(at).map_or(ListenerId(u16::MAX), |place| layout.number(Transport::Udp, *place, None))
    };
    config.server.nat_discovery = discovery::resolve(&config.server.nat_discovery, &udp, number)?;
    config.server.listeners = layout.profiles(&config.server.listeners);
    Ok(())
}

/// What is ours: the addresses of this machine, these relay addresses with their ports and those of before, and all listeners.
fn own_endpoints(
    config: &Config,
    places: &Places,
    relays: &[RelayAddress],
    former: Vec<RangeInclusive<u16>>,
) -> OwnEndpoints {
    let relays = relays.iter().map(|relay| (relay.bind, relay.external));
    let listeners = places.bound().chain(config.listeners_beside.iter().copied());
    // Clients are told more addresses than those of relays where NAT can be discovered.
    let discovery = config.server.nat_discovery.iter().flat_map(|of| of.external).flatten();
    OwnEndpoints::new(config.addresses.iter().copied(), relays, listeners, config.ports.clone())
        .with_former_ports(former)
        .with_external(discovery)
}
