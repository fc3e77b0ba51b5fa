//! Starting, watching and stopping the workers.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use turnpike_net::{
    PassedSockets, TcpListener, UdpOptions, UdpSocket, passed,
    rx::RxStats,
    tx::TxStats,
    worker::{Published, Sender, Workers},
};
use turnpike_offload::{Hook, Kernel, OffloadError};
use turnpike_turn::server::{
    CredentialQuery, Credentials, Destination, Effect, Lookup, LookupId, NatDiscovery, Newcomer, NonceKeys,
    OwnEndpoints, QuotaRefusal, ServerConfig, Stats, Transport, User,
};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

use crate::{
    Config, DtlsConfig, DtlsStats, Layout, RealmLimits, RelayAddress, StreamConfig, discovery,
    gate::{Quotas, SharedStore},
    peers::PeerStats,
    ports::Ports,
    stream::{Admission, StreamStats},
    worker::{Command, Mailbox, Snapshot, Worker},
};

/// Users and their keys; shared by all workers, asked on requests only.
pub trait CredentialStore: Send + Sync {
    /// As [`turnpike_turn::server::Gate::check`]: called on a worker's thread, it must not wait.
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup;

    /// Finds out what [`CredentialStore::check`] has answered by [`Lookup::Later`]. Must not wait either: `answer` may be given within
    /// 10 s and from any thread. A store that always knows is never asked.
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
impl CredentialStore for () {
    fn check(
        &self,
        _: User<'_>,
        _: &str,
        _: KeyAlgorithm,
        _: u64,
        _: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup {
        Lookup::NoSuchUser
    }
}

/// Hears of sessions and refusals, from the workers' threads; must not block.
pub trait SessionLog: Send + Sync {
    /// One effect of worker number `worker`.
    fn effect(&self, worker: usize, effect: &Effect);
}

/// Writes nothing.
impl SessionLog for () {
    fn effect(&self, _: usize, _: &Effect) {}
}

/// What a server has to do with others that are one service with it; shared by all workers, asked on requests only. Nothing of it may wait.
pub trait Fleet: Send + Sync {
    /// Counts one more allocation against the limits that all servers share, or refuses.
    ///
    /// # Errors
    /// Which limit.
    fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal>;
    /// Counts one less.
    fn release(&self, realm: &str, identity: &str);
    /// As [`turnpike_turn::server::Gate::is_banned`].
    fn is_banned(&self, unix: u64, realm: &str, names: [&str; 2], client: IpAddr) -> bool;
    /// As [`turnpike_turn::server::Gate::elsewhere`].
    fn elsewhere(&self, newcomer: &Newcomer<'_>, transport: Transport) -> Option<Destination>;
    /// As [`turnpike_turn::server::Gate::node`].
    fn node(&self, node: u16, transport: Transport, v4: bool) -> Option<Destination>;
}

/// An allocation that counts for several limits at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedQuota<'a> {
    /// The realm of its user.
    pub realm: &'a str,
    /// Whom quotas count.
    pub identity: &'a str,
    /// The most that the realm may have, where there is such a limit.
    pub of_realm: Option<usize>,
    /// The most that the user may have.
    pub of_user: usize,
}

/// Why the relay did not start; each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what their fields are")]
pub enum StartError {
    /// A listener could not be bound.
    #[error("cannot listen on {protocol} {address}: {source}; {remedy}")]
    Listen { protocol: &'static str, address: SocketAddr, source: io::Error, remedy: String },
    /// A relay address is not one of this machine.
    #[error(
        "relay address {address} cannot be bound: {source}; name an address of this machine with --relay-ip"
    )]
    RelayAddress { address: IpAddr, source: io::Error },
    /// NAT discovery is configured on an address that nobody listens on.
    #[error("NAT discovery needs a UDP listener on {address}, or on its port and all addresses")]
    NatDiscovery { address: SocketAddr },
    /// The path through the kernel cannot be had.
    #[error("--datapath kernel (or xdp): {0}")]
    Kernel(#[from] OffloadError),
    /// Threads, epoll or the like.
    #[error(
        "cannot start a worker: {0}; raise the limit of open files (ulimit -n) or of threads (ulimit -u)"
    )]
    Worker(#[from] io::Error),
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
}

/// A running relay. Dropping it stops the workers.
pub struct Relay {
    listeners: Listeners,
    workers: Workers<Command, Snapshot>,
    store: SharedStore,
    quotas: Arc<Quotas>,
    own: Own,
    discovery: Vec<NatDiscovery>,
    in_force: Mutex<InForce>,
    /// Behind the workers, so that it is dropped after them.
    kernel: Option<Arc<Kernel>>,
}

/// What all workers of a relay share, or have in common.
pub(crate) struct Common {
    pub(crate) config: Config,
    /// With real ports.
    pub(crate) listeners: Listeners,
    pub(crate) layout: Arc<Layout>,
    pub(crate) store: SharedStore,
    pub(crate) quotas: Arc<Quotas>,
    pub(crate) ports: Arc<Ports>,
    pub(crate) streams: Arc<StreamConfig>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) dtls: Arc<DtlsConfig>,
    pub(crate) log: Arc<dyn SessionLog>,
    pub(crate) fleet: Option<Arc<dyn Fleet>>,
    pub(crate) kernel: Option<Arc<Kernel>>,
}

impl Common {
    pub(crate) fn new(
        config: Config,
        listeners: Listeners,
        layout: Layout,
        credentials: Arc<dyn CredentialStore>,
        log: Arc<dyn SessionLog>,
        kernel: Option<Arc<Kernel>>,
    ) -> Self {
        let quotas = Quotas::new(config.max_allocations, config.max_allocations_per_user);
        quotas.limit(&config.realm_limits);
        let StreamConfig { max_idle, max_idle_per_address, .. } = config.streams;
        Self {
            listeners,
            layout: Arc::new(layout),
            store: Arc::new(RwLock::new(credentials)),
            quotas: Arc::new(quotas),
            ports: Arc::new(Ports::new(&config)),
            streams: Arc::new(config.streams.clone()),
            admission: Arc::new(Admission::new(max_idle, max_idle_per_address)),
            dtls: Arc::new(config.dtls.clone()),
            log,
            fleet: None,
            kernel,
            config,
        }
    }
}

/// What the workers have, to be sent again when a part of it changes.
struct InForce {
    server: ServerConfig,
    layout: Layout,
    /// Of this machine.
    addresses: Vec<IpAddr>,
}

/// Where a relay listens, with real ports where the configuration said 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listeners {
    /// UDP.
    pub udp: Vec<SocketAddr>,
    /// TCP, and TLS where there is a certificate.
    pub tcp: Vec<SocketAddr>,
    /// TLS, and TCP where that is not refused.
    pub tls: Vec<SocketAddr>,
    /// DTLS; an address that is in `udp` too is one socket for both.
    pub dtls: Vec<SocketAddr>,
}

impl Listeners {
    /// All of them, in the order of the fields.
    pub fn all(&self) -> impl Iterator<Item = (Transport, SocketAddr)> {
        let Self { udp, tcp, tls, dtls } = self;
        let kinds =
            [(Transport::Udp, udp), (Transport::Tcp, tcp), (Transport::Tls, tls), (Transport::Dtls, dtls)];
        kinds.into_iter().flat_map(|(transport, all)| all.iter().map(move |address| (transport, *address)))
    }
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
        for relay in &config.relay {
            UdpSocket::bind(SocketAddr::new(relay.bind, 0), &UdpOptions::default())
                .map_err(|source| StartError::RelayAddress { address: relay.bind, source })?;
        }
        let listeners = probe_listeners(config)?;
        let own = Own::new(config, &listeners);
        let layout = config.layout();
        let number = |place| layout.number(Transport::Udp, place, None);
        let discovery = discovery::resolve(&config.server.nat_discovery, &listeners.udp, number)?;
        let mut config = config.clone();
        config.server.set_own_endpoints(&own.endpoints(&config.addresses));
        config.server.nat_discovery.clone_from(&discovery);
        config.server.listeners = layout.profiles(&config.server.listeners);
        let in_force = Mutex::new(InForce {
            server: config.server.clone(),
            layout: layout.clone(),
            addresses: config.addresses.clone(),
        });
        let kernel = config.kernel.map(|hook| offload(&config, &listeners, hook)).transpose()?.map(Arc::new);
        let common =
            Common::new(config, listeners.clone(), layout, credentials, log, kernel.as_ref().map(Arc::clone));
        let common = Common { fleet, ..common };
        let (store, quotas) = (Arc::clone(&common.store), Arc::clone(&common.quotas));
        let workers = Workers::default();
        let mut relay = Self { listeners, workers, store, quotas, own, discovery, in_force, kernel };
        let (mut bound, mut mailboxes) = (Vec::new(), Vec::new());
        for number in 0..common.config.workers.max(1) {
            let (worker, mailbox, snapshot) = Worker::new(number, &common)?;
            bound.push((worker, mailbox.worker.clone(), snapshot));
            mailboxes.push(mailbox);
        }
        let mailboxes: Arc<[Mailbox]> = mailboxes.into();
        // Only now: each socket that joins an SO_REUSEPORT group changes which worker a 5-tuple hashes to, and an allocation
        // made before the last one joined would be left with a worker that hears nothing of its client any more.
        for (number, (mut worker, sender, snapshot)) in bound.into_iter().enumerate() {
            worker.set_mailboxes(Arc::clone(&mailboxes));
            relay.workers.spawn(format!("relay-{number}"), sender, snapshot, move || worker.run())?;
        }
        Ok(relay)
    }

    /// The addresses listened on.
    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Which of [`Listeners::all`] each number of a listener belongs to.
    pub(crate) fn places(&self) -> Vec<usize> {
        let in_force = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        in_force.layout.places(&self.listeners)
    }

    /// The way to each worker.
    pub(crate) fn senders(&self) -> impl Iterator<Item = &Sender<Command>> {
        self.workers.senders()
    }

    /// What each worker has counted.
    pub fn snapshots(&self) -> Vec<WorkerSnapshot> {
        self.workers.shared().map(Published::get).collect()
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

    /// New settings of the state machine, users and limits of realms, from now on. Where NAT can be discovered stays. `layout` is
    /// that of the start, with more server names perhaps.
    pub fn reconfigure(
        &self,
        server: &ServerConfig,
        layout: &Layout,
        credentials: &Arc<dyn CredentialStore>,
        realm_limits: &[RealmLimits],
    ) {
        self.quotas.limit(realm_limits);
        *self.store.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(credentials);
        let mut server = server.clone();
        server.nat_discovery.clone_from(&self.discovery);
        server.listeners = layout.profiles(&server.listeners);
        self.change(|in_force| {
            in_force.server = server;
            in_force.layout = layout.clone();
        });
    }

    /// What nonces, tickets and cookies are made with from now on, and which node of a fleet this is.
    pub fn set_keys(&self, keys: NonceKeys, node: Option<u16>) {
        self.change(|in_force| (in_force.server.nonce_keys, in_force.server.node) = (keys, node));
    }

    /// This machine has these addresses, from now on. What the peer rules then refuse ends, as by a reload.
    pub fn set_addresses(&self, addresses: Vec<IpAddr>) {
        self.change(|in_force| in_force.addresses = addresses);
    }

    fn change(&self, change: impl FnOnce(&mut InForce)) {
        // Held until all have it, so that two changes reach each worker in the same order.
        let mut in_force = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut in_force);
        let own = self.own.endpoints(&in_force.addresses);
        in_force.server.set_own_endpoints(&own);
        let (server, layout) = (Arc::new(in_force.server.clone()), Arc::new(in_force.layout.clone()));
        for worker in self.workers.senders() {
            worker.tell(Command::Reconfigure(Arc::clone(&server), Arc::clone(&layout)));
        }
    }

    /// No new allocations from now on, or some again.
    pub fn set_draining(&self, draining: bool) {
        self.workers.senders().for_each(|worker| worker.tell(Command::SetDraining(draining)));
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

/// Loads the program for what is configured.
fn offload(config: &Config, listeners: &Listeners, hook: Hook) -> Result<Kernel, OffloadError> {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let sockets = listeners.udp.len() * config.workers.max(1) + 2 * config.max_allocations;
    Kernel::start(&turnpike_offload::Settings {
        listeners: listeners.udp.clone(),
        relay_ports: config.ports.clone(),
        flows: config.max_kernel_flows,
        sockets: count(sockets),
        hook,
    })
}

/// What is ours beside the addresses of this machine, and stays as it was at the start.
struct Own {
    relays: Vec<RelayAddress>,
    listeners: Vec<SocketAddr>,
    ports: RangeInclusive<u16>,
}

impl Own {
    /// `listeners` are the relay's, with real ports.
    fn new(config: &Config, listeners: &Listeners) -> Self {
        let Listeners { udp, tcp, tls, dtls } = listeners;
        let listeners = [udp, tcp, tls, dtls, &config.listeners_beside].into_iter().flatten();
        // Clients are told more addresses than those of relays where NAT can be discovered.
        let of = |of: &NatDiscovery| [0, 1].map(|at| (of.addresses[at], of.external[at]));
        let told = config.server.nat_discovery.iter().flat_map(of);
        let discovery = told.filter_map(|(bind, external)| {
            external.map(|external| RelayAddress { bind, external: Some(external) })
        });
        Self {
            relays: config.relay.iter().copied().chain(discovery).collect(),
            listeners: listeners.copied().collect(),
            ports: config.ports.clone(),
        }
    }

    fn endpoints(&self, addresses: &[IpAddr]) -> OwnEndpoints {
        let relays = self.relays.iter().map(|relay| (relay.bind, relay.external));
        let listeners = self.listeners.iter().copied();
        OwnEndpoints::new(addresses.iter().copied(), relays, listeners, self.ports.clone())
    }
}

/// Ports that the kernel may choose before one is free for both UDP and TCP.
const PORT_ATTEMPTS: usize = 16;

/// Binds once without SO_REUSEPORT: a second server on the same port is told so, instead of silently sharing it. Gives the real
/// ports where the configuration said 0: for an address that is listened on by UDP and by TCP, the same one. Where a socket was
/// passed there is nothing to find out.
fn probe_listeners(config: &Config) -> Result<Listeners, StartError> {
    let mut listeners = Listeners::default();
    let wanted = &config.streams.listen;
    let mut tcp: Vec<Option<SocketAddr>> = vec![None; wanted.len()];
    let secure = &config.dtls.listen;
    let mut dtls: Vec<Option<SocketAddr>> = vec![None; secure.len()];
    for address in &config.listen {
        let place = (0..wanted.len()).find(|place| wanted[*place] == *address && tcp[*place].is_none());
        let (udp, also) = probe_pair(config, *address, place.is_some())?;
        listeners.udp.push(udp);
        if let Some(place) = place {
            tcp[place] = also;
        }
        let shared = (0..secure.len()).find(|place| secure[*place] == *address && dtls[*place].is_none());
        if let Some(place) = shared {
            dtls[place] = Some(udp);
        }
    }
    for (address, found) in secure.iter().zip(dtls) {
        listeners.dtls.push(found.map_or_else(|| probe_dtls(config, *address), Ok)?);
    }
    for (address, found) in wanted.iter().zip(tcp) {
        listeners.tcp.push(found.map_or_else(|| probe_stream(config, "tcp", *address), Ok)?);
    }
    for address in &config.streams.tls_listen {
        listeners.tls.push(probe_stream(config, "tls", *address)?);
    }
    Ok(listeners)
}

fn probe_pair(
    config: &Config,
    address: SocketAddr,
    also_tcp: bool,
) -> Result<(SocketAddr, Option<SocketAddr>), StartError> {
    let named_by = udp_setting(config, address);
    let mut attempts = 0;
    loop {
        let udp = match probe_udp(config, address) {
            Ok(udp) => udp,
            Err(source) => return Err(cannot_listen("udp", named_by, address, source)),
        };
        if !also_tcp {
            return Ok((udp, None));
        }
        match probe_tcp(config, udp) {
            Ok(tcp) => return Ok((udp, Some(tcp))),
            Err(_) if address.port() == 0 && attempts < PORT_ATTEMPTS => attempts += 1,
            Err(source) => return Err(cannot_listen("tcp", named_by, udp, source)),
        }
    }
}

fn probe_dtls(config: &Config, address: SocketAddr) -> Result<SocketAddr, StartError> {
    probe_udp(config, address).map_err(|source| listen_error("dtls", address, source))
}

fn probe_stream(
    config: &Config,
    protocol: &'static str,
    address: SocketAddr,
) -> Result<SocketAddr, StartError> {
    probe_tcp(config, address).map_err(|source| listen_error(protocol, address, source))
}

fn probe_udp(config: &Config, address: SocketAddr) -> io::Result<SocketAddr> {
    if config.passed.count(passed::Transport::Udp, address) > 0 {
        return Ok(address);
    }
    UdpSocket::bind(address, &UdpOptions::default()).map(|socket| socket.local_addr())
}

fn probe_tcp(config: &Config, address: SocketAddr) -> io::Result<SocketAddr> {
    if config.passed.count(passed::Transport::Tcp, address) > 0 {
        return Ok(address);
    }
    TcpListener::probe(address)
}

/// The flag that names the listeners of a protocol.
fn setting(protocol: &str) -> &'static str {
    match protocol {
        "tls" => "--tls-listen",
        "dtls" => "--dtls-listen",
        _ => "--listen",
    }
}

/// What names this UDP listener. Those of NAT discovery stand among the others, which serve TCP too unless nobody wants that.
fn udp_setting(config: &Config, address: SocketAddr) -> &'static str {
    let of_discovery =
        |of: &NatDiscovery| of.addresses.contains(&address.ip()) && of.ports.contains(&address.port());
    let is_discovery = config.server.nat_discovery.iter().any(of_discovery);
    if is_discovery && !config.streams.listen.contains(&address) {
        "nat_discovery.addresses and nat_discovery.ports"
    } else {
        setting("udp")
    }
}

/// Says what to do about a listener that cannot be bound.
fn listen_error(protocol: &'static str, address: SocketAddr, source: io::Error) -> StartError {
    cannot_listen(protocol, setting(protocol), address, source)
}

/// The same for a listener of which sockets may have been passed.
pub(crate) fn passed_error(
    sockets: &PassedSockets,
    protocol: &'static str,
    address: SocketAddr,
    source: io::Error,
) -> StartError {
    let by_udp = matches!(protocol, "udp" | "dtls");
    let transport = if by_udp { passed::Transport::Udp } else { passed::Transport::Tcp };
    match sockets.remedy(transport, address, source.kind()) {
        Some(remedy) => StartError::Listen { protocol, address, source, remedy: remedy.to_owned() },
        None => listen_error(protocol, address, source),
    }
}

/// The same for one that `named_by` names.
fn cannot_listen(
    protocol: &'static str,
    named_by: &str,
    address: SocketAddr,
    source: io::Error,
) -> StartError {
    let remedy = match source.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another program has this port: stop it, or choose another port with {named_by}")
        }
        io::ErrorKind::PermissionDenied => format!(
            "ports below 1024 need CAP_NET_BIND_SERVICE: grant it (setcap cap_net_bind_service=ep), or choose a \
             higher port with {named_by}"
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("choose an address of this machine (ip address) with {named_by}")
        }
        _ => format!("choose another address with {named_by}"),
    };
    StartError::Listen { protocol, address, source, remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_names_the_setting_of_the_listener() {
        let told = |protocol, kind: io::ErrorKind| {
            listen_error(protocol, ([10, 0, 0, 1], 443).into(), kind.into()).to_string()
        };
        for kind in [
            io::ErrorKind::AddrInUse,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::AddrNotAvailable,
            io::ErrorKind::Other,
        ] {
            for (protocol, flag) in [
                ("udp", " --listen"),
                ("tcp", " --listen"),
                ("tls", " --tls-listen"),
                ("dtls", " --dtls-listen"),
            ] {
                let text = told(protocol, kind);
                assert!(text.ends_with(flag) && text.contains(&format!("{protocol} 10.0.0.1:443")), "{text}");
            }
        }
    }
}
