//! Ports of relayed transport addresses. They are chosen unpredictably (RFC 8656 section 7.2), shared by all
//! workers, and quarantined after use. A port that a client reserves (EVEN-PORT with R = 1) is held for 30 s.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use rand::Rng;
use serde::{Deserialize, Serialize};
use turnpike_net::{
    Datapath, ListenOptions, PassedSockets, SocketProtocol, TcpListener, UdpOptions, UdpSocket,
};
use turnpike_turn::server::{Client, Family, OpenRelay, OpenResult, PortRequest, RelayTransport, UserRef};

use crate::{
    Config, RelayAddress,
    pool_bits::{Bits, Drawn, PoolBits, QUARANTINE_MS, Quarantined},
    routes::source_of_route,
};

/// Milliseconds until a reservation expires (RFC 8656 section 7.2 recommends at least 30 s).
const RESERVATION_MS: u64 = 30_000;
/// Maximum concurrent reservations per user, but never more than a quarter of the total limit. Clients use
/// the second port of a pair within a round trip, so this allows four calls to start at once.
const MOST_PER_USER: usize = 4;
const DRAWS: usize = 32;
/// Number of ports in use by other programs that a search skips before it gives up.
const BIND_ATTEMPTS: usize = 256;

/// Maximum number of peer connections waiting to be accepted. An allocation may have only a few at a time,
/// and unknown peers must not fill the memory.
const BACKLOG: u32 = 64;

pub(crate) struct OpenedPort {
    pub(crate) socket: UdpSocket,
    /// Address reported to the client.
    pub(crate) relayed: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Family,
    /// The machine has none of the addresses of this family.
    Absent,
    Port,
    PortsHeld,
    Reservation,
    File,
}

impl Refusal {
    pub(crate) fn result(self) -> OpenResult {
        match self {
            Self::Family => OpenResult::UnsupportedFamily,
            Self::Absent => OpenResult::AddressAbsent,
            Self::PortsHeld => OpenResult::PortsHeld,
            Self::Port | Self::Reservation | Self::File => OpenResult::NoCapacity,
        }
    }
}

pub(crate) struct Ports {
    plan: RwLock<Arc<Plan>>,
    options: UdpOptions,
    shared_options: UdpOptions,
    /// Counter for the next address of each family. With a single counter for both, every dual-stack
    /// allocation would get the same two addresses.
    next: [AtomicUsize; 2],
    reservations: Mutex<Reservations>,
}

struct Plan {
    pools: Vec<PortPool>,
    range: RangeInclusive<u16>,
    /// Ranges from earlier configurations that still had open ports at the last reload.
    former: Vec<RangeInclusive<u16>>,
    /// Ranges of the realms that have their own; `owned` contains all ports in them.
    realms: HashMap<Box<str>, RangeInclusive<u16>, RandomState>,
    owned: Bits,
    most_reservations: usize,
    in_turn: bool,
    absent: Vec<IpAddr>,
}

type Reservations = HashMap<[u8; 8], Reservation, RandomState>;

struct Reservation {
    opened: OpenedPort,
    /// See [`UserRef::key`].
    owner: Box<str>,
    expires_ms: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct UsablePorts {
    pub(crate) addresses: Vec<RelayAddress>,
    pub(crate) ranges: Vec<RangeInclusive<u16>>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Reserved {
    token: [u8; 8],
    owner: Box<str>,
    left_ms: u64,
    relayed: SocketAddr,
    drops: u32,
}

#[derive(Clone)]
struct PortPool {
    address: RelayAddress,
    /// True if new ports are taken from the pool. A pool removed by a reload remains while it has open ports.
    drawn: bool,
    /// Ports of the bound address, regardless of its external address.
    bits: Arc<PoolBits>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct LateUse {
    bound: SocketAddr,
    left_ms: u64,
}

#[derive(Clone, Copy)]
enum Stock {
    Free,
    /// Ports in quarantine, used if no address of the family has a free port.
    Quarantined,
}

struct PortSpan<'a> {
    range: &'a RangeInclusive<u16>,
    but: Option<&'a Bits>,
}

impl PortSpan<'_> {
    fn has(&self, port: u16) -> bool {
        self.range.contains(&port) && self.but.is_none_or(|but| !but.has(port))
    }
}

impl Plan {
    fn new(config: &Config, before: &[PortPool], ranges: Vec<RangeInclusive<u16>>) -> Self {
        let known = |address: &RelayAddress| before.iter().find(|pool| pool.address.bind == address.bind);
        let bits =
            |address: &RelayAddress| known(address).map_or_else(Arc::default, |pool| Arc::clone(&pool.bits));
        let drawn = |address: &RelayAddress| PortPool { address: *address, drawn: true, bits: bits(address) };
        let is_left =
            |pool: &&PortPool| !config.relay.contains(&pool.address) && pool.bits.has_open(&(0..=u16::MAX));
        let left = before.iter().filter(is_left).map(|pool| PortPool { drawn: false, ..pool.clone() });
        let has_open = |range: &RangeInclusive<u16>| before.iter().any(|pool| pool.bits.has_open(range));
        let former = ranges.into_iter().filter(has_open).collect();
        let limits = config.realm_limits.iter();
        let realms: HashMap<_, _, _> = limits
            .filter_map(|limits| Some((limits.realm.as_str().into(), limits.relay_ports.clone()?)))
            .collect();
        let owned = Bits::new();
        realms.values().cloned().flatten().for_each(|port| _ = owned.set(port));
        Self {
            pools: config.relay.iter().map(drawn).chain(left).collect(),
            range: config.ports.clone(),
            former: Vec::new(),
            realms,
            owned,
            most_reservations: config.max_reservations(),
            in_turn: config.relay_in_turn,
            absent: config.absent.clone(),
        }
        .with_former(former)
    }

    /// Sets the former ranges, leaving out those inside the current range.
    fn with_former(mut self, mut ranges: Vec<RangeInclusive<u16>>) -> Self {
        ranges.retain(|range| !(self.range.contains(range.start()) && self.range.contains(range.end())));
        self.former = ranges;
        self
    }

    fn span(&self, realm: &str) -> PortSpan<'_> {
        match self.realms.get(realm) {
            Some(range) => PortSpan { range, but: None },
            None => self.common(),
        }
    }

    fn configured(&self, family: Family) -> impl Iterator<Item = &PortPool> + Clone {
        let is_of =
            move |pool: &&PortPool| pool.drawn && pool.address.bind.is_ipv4() == (family == Family::V4);
        self.pools.iter().filter(is_of)
    }

    fn drawn(&self, family: Family) -> impl Iterator<Item = &PortPool> + Clone {
        self.configured(family).filter(|pool| !self.absent.contains(&pool.address.bind))
    }

    fn pool(&self, bound: SocketAddr) -> Option<&PortPool> {
        self.pools.iter().find(|pool| pool.address.bind == bound.ip())
    }

    fn common(&self) -> PortSpan<'_> {
        PortSpan { range: &self.range, but: Some(&self.owned) }
    }
}

impl Ports {
    pub(crate) fn new(config: &Config) -> Self {
        let options = |buffer| UdpOptions {
            gro: config.datapath == Datapath::Gso,
            ip_header: true,
            errors: true,
            recv_buffer: Some(buffer),
            send_buffer: Some(buffer),
            ..UdpOptions::default()
        };
        Self {
            plan: RwLock::new(Arc::new(Plan::new(config, &[], Vec::new()))),
            options: options(config.relay_buffer),
            shared_options: options(config.listener_buffer),
            next: Default::default(),
            reservations: Mutex::default(),
        }
    }

    /// Applies a new configuration; open ports stay open.
    pub(crate) fn reconfigure(&self, config: &Config) {
        let mut plan = self.plan.write().unwrap_or_else(PoisonError::into_inner);
        let ranges = plan.former.iter().chain([&plan.range]).cloned().collect();
        *plan = Arc::new(Plan::new(config, &plan.pools, ranges));
    }

    pub(crate) fn former_ranges(&self) -> Vec<RangeInclusive<u16>> {
        self.plan().former.clone()
    }

    pub(crate) fn addresses(&self) -> Vec<RelayAddress> {
        self.plan().pools.iter().map(|pool| pool.address).collect()
    }

    /// Chooses among several relay addresses of a family: the one to which the client sent or, failing that,
    /// the source address of the route to the client. Returns `None` if neither is a relay address, or if the
    /// configuration uses the addresses in turn.
    pub(crate) fn address_for(&self, family: Family, client: &Client) -> Option<IpAddr> {
        let plan = self.plan();
        if plan.in_turn || plan.drawn(family).nth(1).is_none() {
            return None;
        }
        let drawn = |ip: &IpAddr| plan.drawn(family).any(|pool| pool.address.bind == *ip);
        let routed = || source_of_route(client.address).filter(drawn);
        Some(client.local.ip()).filter(drawn).or_else(routed)
    }

    /// Opens a listening socket for peer connections (RFC 6062) on any of the realm's ports, preferably on
    /// the address `first`.
    pub(crate) fn open_tcp(
        &self,
        family: Family,
        realm: &str,
        first: Option<IpAddr>,
        now_ms: u64,
    ) -> Result<(TcpListener, SocketAddr), Refusal> {
        let plan = self.plan();
        let span = plan.span(realm);
        self.on_some_address(&plan, (family, first), now_ms, |pool, stock| {
            self.draw(pool, stock, &span, |_| true, Self::listen)
        })
    }

    /// Opens a UDP port, preferably on the address `first`. Only the user who reserved a port can open it.
    pub(crate) fn open(
        &self,
        wish: &OpenRelay,
        user: UserRef<'_>,
        first: Option<IpAddr>,
        now_ms: u64,
    ) -> Result<OpenedPort, Refusal> {
        let plan = self.plan();
        let span = plan.span(user.realm);
        match wish.port {
            PortRequest::Any | PortRequest::Own => {
                self.on_some_address(&plan, (wish.family, first), now_ms, |pool, stock| {
                    self.draw(pool, stock, &span, |_| true, Self::bind)
                })
            }
            PortRequest::Even => {
                let is_even = |port: u16| port.is_multiple_of(2);
                self.on_some_address(&plan, (wish.family, first), now_ms, |pool, stock| {
                    self.draw(pool, stock, &span, is_even, Self::bind)
                })
            }
            PortRequest::EvenAndReserveNext(token) => {
                let (owner, most) = (user.key(), plan.most_reservations);
                self.on_some_address(&plan, (wish.family, first), now_ms, |pool, stock| {
                    self.draw_pair((pool, stock), &span, token, (&owner, most), now_ms)
                })
            }
            PortRequest::Reserved(token) => self.take_reserved(token, &user.key(), now_ms),
        }
    }

    /// Opens a UDP socket shared by several allocations, on any port outside the ranges of realms.
    pub(crate) fn open_shared(
        &self,
        family: Family,
        first: Option<IpAddr>,
        now_ms: u64,
    ) -> Result<OpenedPort, Refusal> {
        let plan = self.plan();
        let span = plan.common();
        let bind = |ports: &Self, pool: &PortPool, port| ports.bind_with(&ports.shared_options, pool, port);
        self.on_some_address(&plan, (family, first), now_ms, |pool, stock| {
            self.draw(pool, stock, &span, |_| true, bind)
        })
    }

    pub(crate) fn has_own(&self, realm: &str) -> bool {
        self.plan().realms.contains_key(realm)
    }

    pub(crate) fn are_relayed(&self, address: SocketAddr, transport: RelayTransport) -> bool {
        let is_of = |pool: &&PortPool| {
            pool.address.bind == address.ip() || pool.address.external == Some(address.ip())
        };
        self.plan().pools.iter().filter(is_of).any(|pool| pool.bits.is_open(address.port(), transport))
    }

    pub(crate) fn close(&self, socket: UdpSocket, now_ms: u64) {
        let bound = socket.local_addr();
        drop(socket);
        self.release(bound, now_ms);
    }

    /// Quarantines the port of a closed socket, because peers of the previous client may still send to it.
    pub(crate) fn release(&self, bound: SocketAddr, now_ms: u64) {
        if let Some(pool) = self.plan().pool(bound) {
            pool.bits.quarantine(Quarantined { port: bound.port(), until_ms: now_ms + QUARANTINE_MS });
        }
    }

    pub(crate) fn quarantined(&self, now_ms: u64) -> Vec<LateUse> {
        let of_pool = |pool: &PortPool| {
            let bind = pool.address.bind;
            pool.bits.quarantined().into_iter().map(move |Quarantined { port, until_ms }| LateUse {
                bound: SocketAddr::new(bind, port),
                left_ms: until_ms.saturating_sub(now_ms),
            })
        };
        self.plan().pools.iter().flat_map(of_pool).collect()
    }

    pub(crate) fn adopt_quarantined(&self, now_ms: u64, late: &[LateUse]) {
        let plan = self.plan();
        for LateUse { bound, left_ms } in late {
            if let Some(pool) = plan.pool(*bound) {
                let until_ms = now_ms + left_ms.min(&QUARANTINE_MS);
                pool.bits.adopt_quarantined(Quarantined { port: bound.port(), until_ms });
            }
        }
    }

    pub(crate) fn known(&self) -> UsablePorts {
        let plan = self.plan();
        let addresses = plan.pools.iter().map(|pool| pool.address).collect();
        UsablePorts { addresses, ranges: plan.former.iter().chain([&plan.range]).cloned().collect() }
    }

    /// Keeps addresses and ranges of another process that are missing from this configuration, until a reload
    /// finds no open ports in them.
    pub(crate) fn take_over(&self, config: &Config, known: UsablePorts) {
        let mut plan = self.plan.write().unwrap_or_else(PoisonError::into_inner);
        let bits = |address: &RelayAddress| {
            let same = plan.pools.iter().find(|pool| pool.address.bind == address.bind);
            same.map_or_else(Arc::default, |pool| Arc::clone(&pool.bits))
        };
        let left = known.addresses.iter().filter(|address| !config.relay.contains(address));
        let left = left.map(|address| PortPool { address: *address, drawn: false, bits: bits(address) });
        let pools = plan.pools.iter().cloned().chain(left).collect();
        *plan = Arc::new(Plan { pools, ..Plan::new(config, &[], Vec::new()) }.with_former(known.ranges));
    }

    /// Sets the options of our own sockets on a socket that another process opened, perhaps for a different
    /// data path.
    pub(crate) fn prepare(&self, socket: &UdpSocket) {
        if self.options.gro {
            // If this fails, received datagrams are not coalesced, which is harmless.
            let _ = socket.set_gro(true);
        }
    }

    pub(crate) fn adopt(&self, bound: SocketAddr) {
        if let Some(pool) = self.plan().pool(bound) {
            pool.bits.take(bound.port());
            pool.bits.opened(bound.port(), RelayTransport::Udp);
        }
    }

    /// Returns all reservations with duplicates of their sockets. Fails if dup(2) fails.
    pub(crate) fn lend_reserved(&self, now_ms: u64) -> io::Result<Vec<(Reserved, OwnedFd)>> {
        let reservations = self.reservations();
        let lend = |(token, reservation): (&[u8; 8], &Reservation)| {
            let Reservation { opened: OpenedPort { socket, relayed }, owner, expires_ms } = reservation;
            let reserved = Reserved {
                token: *token,
                owner: owner.clone(),
                left_ms: expires_ms.saturating_sub(now_ms),
                relayed: *relayed,
                drops: socket.lend(),
            };
            Ok((reserved, socket.as_fd().try_clone_to_owned()?))
        };
        reservations.iter().map(lend).collect()
    }

    pub(crate) fn adopt_reserved(&self, now_ms: u64, reserved: Reserved, socket: OwnedFd) -> io::Result<()> {
        let Reserved { token, owner, left_ms, relayed, drops } = reserved;
        let socket = UdpSocket::take_over(socket, drops)?;
        self.adopt(socket.local_addr());
        let expires_ms = now_ms + left_ms.min(RESERVATION_MS);
        let reservation = Reservation { opened: OpenedPort { socket, relayed }, owner, expires_ms };
        self.reservations().insert(token, reservation);
        Ok(())
    }

    pub(crate) fn surrender_reserved(&self, now_ms: u64) {
        for (_, reservation) in self.reservations().drain() {
            self.close(reservation.opened.socket, now_ms);
        }
    }

    pub(crate) fn expire(&self, now_ms: u64) {
        for (_, reservation) in self.reservations().extract_if(|_, held| held.expires_ms <= now_ms) {
            self.close(reservation.opened.socket, now_ms);
        }
    }

    /// Returns true if this user may reserve another port. Reservations outlive their allocations and are not
    /// covered by quotas: without these limits, a user could occupy all ports by repeatedly creating and
    /// deleting allocations.
    fn may_reserve(reservations: &Reservations, (owner, most): (&str, usize)) -> bool {
        let most_per_user = MOST_PER_USER.min(most / 4).max(1);
        reservations.len() < most
            && reservations.values().filter(|held| *held.owner == *owner).count() < most_per_user
    }

    fn plan(&self) -> Arc<Plan> {
        Arc::clone(&self.plan.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw<T>(
        &self,
        pool: &PortPool,
        stock: Stock,
        span: &PortSpan<'_>,
        suits: impl Fn(u16) -> bool,
        bind: impl Fn(&Self, &PortPool, u16) -> io::Result<T>,
    ) -> Result<T, Refusal> {
        let mut passed_over = PassedOver::of(&pool.bits);
        for _ in 0..BIND_ATTEMPTS {
            let drawn = match stock {
                Stock::Free => pool.claim(span, &suits).map(|port| Drawn { port, until_ms: None }),
                Stock::Quarantined => pool.bits.take_quarantined(|port| span.has(port) && suits(port)),
            };
            let Some(drawn) = drawn else { return Err(passed_over.refusal(span)) };
            match bind(self, pool, drawn.port) {
                Ok(opened) => return Ok(opened),
                Err(error) => passed_over.add(drawn, &error)?,
            }
        }
        Err(Refusal::PortsHeld)
    }

    /// `owner` contains the user's key, and the maximum number of reservations of all users together.
    fn draw_pair(
        &self,
        (pool, stock): (&PortPool, Stock),
        span: &PortSpan<'_>,
        token: [u8; 8],
        owner: (&str, usize),
        now_ms: u64,
    ) -> Result<OpenedPort, Refusal> {
        self.expire(now_ms);
        if !Self::may_reserve(&self.reservations(), owner) {
            return Err(Refusal::Reservation);
        }
        let bits = &pool.bits;
        let mut passed_over = PassedOver::of(bits);
        for _ in 0..BIND_ATTEMPTS {
            let Some([even, odd]) = pool.claim_pair(stock, span)? else { continue };
            let opened = match self.bind(pool, even.port) {
                Ok(opened) => opened,
                Err(error) => {
                    bits.give_back(odd);
                    passed_over.add(even, &error)?;
                    continue;
                }
            };
            match self.bind(pool, odd.port) {
                Ok(next) => {
                    let mut reservations = self.reservations();
                    // Another worker may have taken the last reservation during the binds.
                    if !Self::may_reserve(&reservations, owner) {
                        drop((opened, next));
                        bits.give_back(even);
                        bits.give_back(odd);
                        return Err(Refusal::Reservation);
                    }
                    let expires_ms = now_ms + RESERVATION_MS;
                    reservations
                        .insert(token, Reservation { opened: next, owner: owner.0.into(), expires_ms });
                    return Ok(opened);
                }
                Err(error) => {
                    drop(opened);
                    bits.give_back(even);
                    passed_over.add(odd, &error)?;
                }
            }
        }
        Err(Refusal::Port)
    }

    /// Another user's token is refused like an unknown one, and its reservation stays in place.
    fn take_reserved(&self, token: [u8; 8], owner: &str, now_ms: u64) -> Result<OpenedPort, Refusal> {
        let mut reservations = self.reservations();
        if reservations.get(&token).is_none_or(|reservation| *reservation.owner != *owner) {
            return Err(Refusal::Reservation);
        }
        let reservation = reservations.remove(&token).ok_or(Refusal::Reservation)?;
        if self.plan().absent.contains(&reservation.opened.socket.local_addr().ip()) {
            self.release(reservation.opened.socket.local_addr(), now_ms);
            Err(Refusal::Absent)
        } else if reservation.expires_ms > now_ms {
            Ok(reservation.opened)
        } else {
            self.close(reservation.opened.socket, now_ms);
            Err(Refusal::Reservation)
        }
    }

    /// Tries the pools of a family, first for free ports and then for quarantined ones. Starts with the
    /// address `first` if given, otherwise with the next one in turn.
    fn on_some_address<T>(
        &self,
        plan: &Plan,
        (family, first): (Family, Option<IpAddr>),
        now_ms: u64,
        attempt: impl Fn(&PortPool, Stock) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let pools = plan.drawn(family);
        let count = pools.clone().count();
        if count == 0 {
            let is_absent = plan.configured(family).next().is_some();
            return Err(if is_absent { Refusal::Absent } else { Refusal::Family });
        }
        pools.clone().for_each(|pool| pool.bits.end_quarantine(now_ms));
        let first = first.and_then(|ip| pools.clone().position(|pool| pool.address.bind == ip));
        let first =
            first.unwrap_or_else(|| self.next[family as usize].fetch_add(1, Ordering::Relaxed) % count);
        let mut refused = Refusal::Absent;
        for stock in [Stock::Free, Stock::Quarantined] {
            for pool in pools.clone().cycle().skip(first).take(count) {
                match attempt(pool, stock) {
                    // This address is full or no longer on the machine, so try the next one.
                    Err(Refusal::PortsHeld) => refused = Refusal::PortsHeld,
                    Err(Refusal::Port) if refused == Refusal::PortsHeld => {}
                    Err(Refusal::Port) if matches!(stock, Stock::Free) => refused = Refusal::Port,
                    Err(Refusal::Port | Refusal::Absent) => {}
                    done => return done,
                }
            }
        }
        Err(refused)
    }

    fn bind(&self, pool: &PortPool, port: u16) -> io::Result<OpenedPort> {
        self.bind_with(&self.options, pool, port)
    }

    fn bind_with(&self, options: &UdpOptions, pool: &PortPool, port: u16) -> io::Result<OpenedPort> {
        let socket = UdpSocket::bind(SocketAddr::new(pool.address.bind, port), options)?;
        pool.bits.opened(port, RelayTransport::Udp);
        let told = pool.address.external.unwrap_or(pool.address.bind);
        Ok(OpenedPort { socket, relayed: SocketAddr::new(told, port) })
    }

    /// Connections to peers use the same local port, so SO_REUSEPORT is needed. That would also let this
    /// user's other programs share the port, so a bind without it first checks that the port is free.
    fn listen(&self, pool: &PortPool, port: u16) -> io::Result<(TcpListener, SocketAddr)> {
        let address = SocketAddr::new(pool.address.bind, port);
        let address =
            PassedSockets::default().probe(SocketProtocol::Tcp, address, &ListenOptions::default())?;
        let options = ListenOptions {
            reuse_port: true,
            backlog: BACKLOG,
            nodelay: true,
            keepalive: true,
            ..ListenOptions::default()
        };
        let socket = TcpListener::bind(address, &options)?;
        pool.bits.opened(port, RelayTransport::Tcp);
        let told = pool.address.external.unwrap_or(pool.address.bind);
        Ok((socket, SocketAddr::new(told, port)))
    }
}

/// Ports that a search has found to be in use by other programs. They stay taken until the search ends, so
/// that each is tried only once.
struct PassedOver<'a> {
    bits: &'a PoolBits,
    ports: Vec<Drawn>,
}

impl<'a> PassedOver<'a> {
    fn of(bits: &'a PoolBits) -> Self {
        Self { bits, ports: Vec::new() }
    }

    /// Reason for the refusal. Blames other programs if they use most of the range.
    fn refusal(&self, span: &PortSpan<'_>) -> Refusal {
        if 2 * self.ports.len() > span.range.len() { Refusal::PortsHeld } else { Refusal::Port }
    }

    /// Skips a port that another program uses; any other error ends the search.
    fn add(&mut self, port: Drawn, error: &io::Error) -> Result<(), Refusal> {
        self.ports.push(port);
        match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Ok(()),
            io::ErrorKind::AddrNotAvailable => Err(Refusal::Absent),
            _ => Err(Refusal::File),
        }
    }
}

impl Drop for PassedOver<'_> {
    fn drop(&mut self) {
        self.ports.iter().for_each(|port| self.bits.give_back(*port));
    }
}

impl PortPool {
    /// Takes a random free port that is suitable; in a nearly full range, takes the next one after a random
    /// starting point.
    fn claim(&self, span: &PortSpan<'_>, suits: impl Fn(u16) -> bool) -> Option<u16> {
        let (mut random, range) = (rand::rng(), span.range);
        let take = |port: u16| span.has(port) && suits(port) && self.bits.take(port);
        for _ in 0..DRAWS {
            let port = random.random_range(range.clone());
            if take(port) {
                return Some(port);
            }
        }
        let start = random.random_range(range.clone());
        let not_taken = |range| self.bits.not_taken(range);
        not_taken(start..=*range.end()).chain(not_taken(*range.start()..=start)).find(|port| take(*port))
    }

    /// Takes a free even port and the next one; returns `None` if another worker took one first.
    fn claim_pair(&self, stock: Stock, span: &PortSpan<'_>) -> Result<Option<[Drawn; 2]>, Refusal> {
        let bits = &self.bits;
        if let Stock::Quarantined = stock {
            return bits.take_quarantined_pair(|port| span.has(port)).map(Some).ok_or(Refusal::Port);
        }
        let has_next = |port: u16| port < u16::MAX && span.has(port + 1) && !bits.is_taken(port + 1);
        let suits = |port: u16| port.is_multiple_of(2) && has_next(port);
        let port = self.claim(span, suits).ok_or(Refusal::Port)?;
        if bits.take(port + 1) {
            return Ok(Some([port, port + 1].map(|port| Drawn { port, until_ms: None })));
        }
        bits.free(port);
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
