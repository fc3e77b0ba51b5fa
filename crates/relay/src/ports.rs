//! Ports of relayed transport addresses: drawn unpredictably (RFC 8656 section 7.2), counted over all workers, kept in quarantine
//! after use, and held for 30 s where a client reserved one (EVEN-PORT with R = 1).

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
use turnpike_net::{Datapath, ListenOptions, TcpListener, UdpOptions, UdpSocket};
use turnpike_turn::server::{Client, Family, OpenRelay, OpenResult, PortRequest, RelayTransport, UserRef};

use crate::{
    Config, RelayAddress,
    pool_bits::{Bits, Drawn, PoolBits, QUARANTINE_MS, Quarantined},
    routes::source_of_route,
};

/// Milliseconds for which a reserved port is held (RFC 8656 section 7.2 recommends at least 30 s).
const RESERVATION_MS: u64 = 30_000;
/// Reservations that one user may have at a time, and never more than a quarter of all: who asks for a pair of ports takes the
/// second within a round trip, so that this is four calls that begin at once.
const MOST_PER_USER: usize = 4;
/// Draws before a free port is searched one by one.
const DRAWS: usize = 32;
/// Ports of other programs that one search passes over before it gives up.
const BIND_ATTEMPTS: usize = 256;

/// Connections of peers that wait to be accepted: an allocation may have few at a time, and an unknown peer shall not fill memory.
const BACKLOG: u32 = 64;

/// A bound relay socket.
pub(crate) struct Opened {
    pub(crate) socket: UdpSocket,
    /// What the client is told.
    pub(crate) relayed: SocketAddr,
}

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Family,
    /// The machine lacks the addresses of this family.
    Absent,
    Port,
    /// Other programs have the ports.
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

/// All ports of all relay addresses; shared by the workers.
pub(crate) struct Ports {
    plan: RwLock<Arc<Plan>>,
    options: UdpOptions,
    /// Of sockets that several allocations share.
    shared_options: UdpOptions,
    /// Whose turn it is, by family: one count for both would give every dual-stack allocation the same two addresses.
    next: [AtomicUsize; 2],
    reservations: Mutex<Reservations>,
}

/// Which addresses and ports there are: what a reload may change.
struct Plan {
    pools: Vec<Pool>,
    range: RangeInclusive<u16>,
    /// Ranges of before, of which something was still open at the last reload.
    former: Vec<RangeInclusive<u16>>,
    /// Ranges of realms that have their own, and all ports of these.
    realms: HashMap<Box<str>, RangeInclusive<u16>, RandomState>,
    owned: Bits,
    most_reservations: usize,
    in_turn: bool,
    /// See [`Config::absent`].
    absent: Vec<IpAddr>,
}

/// By token.
type Reservations = HashMap<[u8; 8], Reservation, RandomState>;

struct Reservation {
    opened: Opened,
    /// See [`UserRef::key`].
    owner: Box<str>,
    expires_ms: u64,
}

/// What relayed transport addresses were made of, on its way to another process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Known {
    pub(crate) addresses: Vec<RelayAddress>,
    pub(crate) ranges: Vec<RangeInclusive<u16>>,
}

/// A reservation on its way to another process, beside its socket.
#[derive(Serialize, Deserialize)]
pub(crate) struct Reserved {
    token: [u8; 8],
    owner: Box<str>,
    left_ms: u64,
    relayed: SocketAddr,
    drops: u32,
}

#[derive(Clone)]
struct Pool {
    address: RelayAddress,
    /// Whether ports are drawn from it. One that a reload has taken away is kept for as long as something is open there.
    drawn: bool,
    /// Of the address that is bound, whatever clients are told.
    bits: Arc<PoolBits>,
}

/// A port in quarantine on its way to another process.
#[derive(Serialize, Deserialize)]
pub(crate) struct LateUse {
    bound: SocketAddr,
    left_ms: u64,
}

/// Part of the ports that a draw takes from.
#[derive(Clone, Copy)]
enum Stock {
    Free,
    /// Ports in quarantine, because no address of the family has a free one.
    Quarantined,
}

/// Ports that a realm may use.
struct Span<'a> {
    range: &'a RangeInclusive<u16>,
    /// Ports of other realms.
    but: Option<&'a Bits>,
}

impl Span<'_> {
    fn has(&self, port: u16) -> bool {
        self.range.contains(&port) && self.but.is_none_or(|but| !but.has(port))
    }
}

impl Plan {
    /// In place of one that had these pools, and these ranges.
    fn new(config: &Config, before: &[Pool], ranges: Vec<RangeInclusive<u16>>) -> Self {
        let known = |address: &RelayAddress| before.iter().find(|pool| pool.address.bind == address.bind);
        let bits =
            |address: &RelayAddress| known(address).map_or_else(Arc::default, |pool| Arc::clone(&pool.bits));
        let drawn = |address: &RelayAddress| Pool { address: *address, drawn: true, bits: bits(address) };
        let is_left =
            |pool: &&Pool| !config.relay.contains(&pool.address) && pool.bits.has_open(&(0..=u16::MAX));
        let left = before.iter().filter(is_left).map(|pool| Pool { drawn: false, ..pool.clone() });
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

    /// With these ranges of before, but for those that lie within its own.
    fn with_former(mut self, mut ranges: Vec<RangeInclusive<u16>>) -> Self {
        ranges.retain(|range| !(self.range.contains(range.start()) && self.range.contains(range.end())));
        self.former = ranges;
        self
    }

    /// Ports of this realm.
    fn span(&self, realm: &str) -> Span<'_> {
        match self.realms.get(realm) {
            Some(range) => Span { range, but: None },
            None => self.common(),
        }
    }

    /// Addresses of a family that are configured.
    fn configured(&self, family: Family) -> impl Iterator<Item = &Pool> + Clone {
        let is_of = move |pool: &&Pool| pool.drawn && pool.address.bind.is_ipv4() == (family == Family::V4);
        self.pools.iter().filter(is_of)
    }

    /// Addresses of a family that ports are drawn from: those that the machine has.
    fn drawn(&self, family: Family) -> impl Iterator<Item = &Pool> + Clone {
        self.configured(family).filter(|pool| !self.absent.contains(&pool.address.bind))
    }

    /// The pool that this address is bound in.
    fn pool(&self, bound: SocketAddr) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.address.bind == bound.ip())
    }

    /// Ports of realms that have none of their own.
    fn common(&self) -> Span<'_> {
        Span { range: &self.range, but: Some(&self.owned) }
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

    /// From now on addresses and ports are those of this configuration. What is open stays open.
    pub(crate) fn reconfigure(&self, config: &Config) {
        let mut plan = self.plan.write().unwrap_or_else(PoisonError::into_inner);
        let ranges = plan.former.iter().chain([&plan.range]).cloned().collect();
        *plan = Arc::new(Plan::new(config, &plan.pools, ranges));
    }

    /// Ranges of before a reload, of which something was still open then.
    pub(crate) fn former_ranges(&self) -> Vec<RangeInclusive<u16>> {
        self.plan().former.clone()
    }

    /// All addresses, those included on which something is still open.
    pub(crate) fn addresses(&self) -> Vec<RelayAddress> {
        self.plan().pools.iter().map(|pool| pool.address).collect()
    }

    /// The relay address for a client, of several of a family: that to which the client came, or else that from which the machine would
    /// send to the client. `None` if neither is a relay address, and where the configuration wants them in turn.
    pub(crate) fn address_for(&self, family: Family, client: &Client) -> Option<IpAddr> {
        let plan = self.plan();
        if plan.in_turn || plan.drawn(family).nth(1).is_none() {
            return None;
        }
        let drawn = |ip: &IpAddr| plan.drawn(family).any(|pool| pool.address.bind == *ip);
        let routed = || source_of_route(client.address).filter(drawn);
        Some(client.local.ip()).filter(drawn).or_else(routed)
    }

    /// Opens a listening socket for connections of peers (RFC 6062), on any port of the realm's; on the address `first` if it has one.
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

    /// Opens a port for datagrams, on the address `first` if it has one. A port that `owner` reserves is for `owner` only.
    pub(crate) fn open(
        &self,
        wish: &OpenRelay,
        user: UserRef<'_>,
        first: Option<IpAddr>,
        now_ms: u64,
    ) -> Result<Opened, Refusal> {
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

    /// Opens a socket for datagrams that several allocations are to share, on any port that no realm has for itself.
    pub(crate) fn open_shared(
        &self,
        family: Family,
        first: Option<IpAddr>,
        now_ms: u64,
    ) -> Result<Opened, Refusal> {
        let plan = self.plan();
        let span = plan.common();
        let bind = |ports: &Self, pool: &Pool, port| ports.bind_with(&ports.shared_options, pool, port);
        self.on_some_address(&plan, (family, first), now_ms, |pool, stock| {
            self.draw(pool, stock, &span, |_| true, bind)
        })
    }

    /// Whether a realm has ports of its own.
    pub(crate) fn has_own(&self, realm: &str) -> bool {
        self.plan().realms.contains_key(realm)
    }

    /// Whether this is a relayed transport address of somebody, as bound or as clients are told.
    pub(crate) fn are_relayed(&self, address: SocketAddr, transport: RelayTransport) -> bool {
        let is_of =
            |pool: &&Pool| pool.address.bind == address.ip() || pool.address.external == Some(address.ip());
        self.plan().pools.iter().filter(is_of).any(|pool| pool.bits.is_open(address.port(), transport))
    }

    /// Closes a relay socket and gives back its port.
    pub(crate) fn close(&self, socket: UdpSocket, now_ms: u64) {
        let bound = socket.local_addr();
        drop(socket);
        self.release(bound, now_ms);
    }

    /// Gives back the port of a closed socket. It stays in quarantine for a while: peers of the previous client may still send to it.
    pub(crate) fn release(&self, bound: SocketAddr, now_ms: u64) {
        if let Some(pool) = self.plan().pool(bound) {
            pool.bits.quarantine(Quarantined { port: bound.port(), until_ms: now_ms + QUARANTINE_MS });
        }
    }

    /// Ports in quarantine, for [`Ports::adopt_quarantined`] of another process.
    pub(crate) fn quarantined(&self, now_ms: u64) -> Vec<LateUse> {
        let of_pool = |pool: &Pool| {
            let bind = pool.address.bind;
            pool.bits.quarantined().into_iter().map(move |Quarantined { port, until_ms }| LateUse {
                bound: SocketAddr::new(bind, port),
                left_ms: until_ms.saturating_sub(now_ms),
            })
        };
        self.plan().pools.iter().flat_map(of_pool).collect()
    }

    /// Takes in the ports that another process has in quarantine.
    pub(crate) fn adopt_quarantined(&self, now_ms: u64, late: &[LateUse]) {
        let plan = self.plan();
        for LateUse { bound, left_ms } in late {
            if let Some(pool) = plan.pool(*bound) {
                let until_ms = now_ms + left_ms.min(&QUARANTINE_MS);
                pool.bits.adopt_quarantined(Quarantined { port: bound.port(), until_ms });
            }
        }
    }

    /// Addresses and ranges of which something may be open, for [`Ports::take_over`] of another process.
    pub(crate) fn known(&self) -> Known {
        let plan = self.plan();
        let addresses = plan.pools.iter().map(|pool| pool.address).collect();
        Known { addresses, ranges: plan.former.iter().chain([&plan.range]).cloned().collect() }
    }

    /// Knows what another process did, where this configuration has it no more: until a reload finds that nothing is open there.
    pub(crate) fn take_over(&self, config: &Config, known: Known) {
        let mut plan = self.plan.write().unwrap_or_else(PoisonError::into_inner);
        let bits = |address: &RelayAddress| {
            let same = plan.pools.iter().find(|pool| pool.address.bind == address.bind);
            same.map_or_else(Arc::default, |pool| Arc::clone(&pool.bits))
        };
        let left = known.addresses.iter().filter(|address| !config.relay.contains(address));
        let left = left.map(|address| Pool { address: *address, drawn: false, bits: bits(address) });
        let pools = plan.pools.iter().cloned().chain(left).collect();
        *plan = Arc::new(Plan { pools, ..Plan::new(config, &[], Vec::new()) }.with_former(known.ranges));
    }

    /// A socket that somebody else has opened, perhaps with another data path, is to be one as those opened here.
    pub(crate) fn prepare(&self, socket: &UdpSocket) {
        if self.options.gro {
            // Where it cannot be changed nothing is gathered.
            let _ = socket.set_gro(true);
        }
    }

    /// A relay socket for datagrams that another process has bound is ours from now on.
    pub(crate) fn adopt(&self, bound: SocketAddr) {
        if let Some(pool) = self.plan().pool(bound) {
            pool.bits.take(bound.port());
            pool.bits.opened(bound.port(), RelayTransport::Udp);
        }
    }

    /// All reservations as data, with their sockets, which stay open here.
    ///
    /// # Errors
    /// Those of dup(2).
    pub(crate) fn lend_reserved(&self, now_ms: u64) -> io::Result<Vec<(Reserved, OwnedFd)>> {
        let reservations = self.reservations();
        let lend = |(token, reservation): (&[u8; 8], &Reservation)| {
            let Reservation { opened: Opened { socket, relayed }, owner, expires_ms } = reservation;
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

    /// Takes in a reservation of another process.
    ///
    /// # Errors
    /// Those of [`UdpSocket::take_over`].
    pub(crate) fn adopt_reserved(&self, now_ms: u64, reserved: Reserved, socket: OwnedFd) -> io::Result<()> {
        let Reserved { token, owner, left_ms, relayed, drops } = reserved;
        let socket = UdpSocket::take_over(socket, drops)?;
        self.adopt(socket.local_addr());
        let expires_ms = now_ms + left_ms.min(RESERVATION_MS);
        let reservation = Reservation { opened: Opened { socket, relayed }, owner, expires_ms };
        self.reservations().insert(token, reservation);
        Ok(())
    }

    /// Another process has them all now.
    pub(crate) fn surrender_reserved(&self, now_ms: u64) {
        for (_, reservation) in self.reservations().drain() {
            self.close(reservation.opened.socket, now_ms);
        }
    }

    /// Closes reservations whose time is over.
    pub(crate) fn expire(&self, now_ms: u64) {
        for (_, reservation) in self.reservations().extract_if(|_, held| held.expires_ms <= now_ms) {
            self.close(reservation.opened.socket, now_ms);
        }
    }

    /// Whether this user may reserve one more. No quota counts reservations, and they outlive their allocations: without bounds of
    /// their own, one user who allocates and deletes in turn would hold every port, or every one that may be reserved.
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
        pool: &Pool,
        stock: Stock,
        span: &Span<'_>,
        suits: impl Fn(u16) -> bool,
        bind: impl Fn(&Self, &Pool, u16) -> io::Result<T>,
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

    /// `owner` may reserve, and all together so many.
    fn draw_pair(
        &self,
        (pool, stock): (&Pool, Stock),
        span: &Span<'_>,
        token: [u8; 8],
        owner: (&str, usize),
        now_ms: u64,
    ) -> Result<Opened, Refusal> {
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
                    // Nobody waited for these binds, and another worker may have taken the last place meanwhile.
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

    /// To others a token is as unknown as one that was never given, and the reservation stays.
    fn take_reserved(&self, token: [u8; 8], owner: &str, now_ms: u64) -> Result<Opened, Refusal> {
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

    /// Tries the pools of a family until one has a suitable port: a free one, or else one in quarantine. Begins with the address `first`, or
    /// else with another one each time.
    fn on_some_address<T>(
        &self,
        plan: &Plan,
        (family, first): (Family, Option<IpAddr>),
        now_ms: u64,
        attempt: impl Fn(&Pool, Stock) -> Result<T, Refusal>,
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
                    // This address is full, or is gone from the machine; the next one may have a port.
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

    fn bind(&self, pool: &Pool, port: u16) -> io::Result<Opened> {
        self.bind_with(&self.options, pool, port)
    }

    fn bind_with(&self, options: &UdpOptions, pool: &Pool, port: u16) -> io::Result<Opened> {
        let socket = UdpSocket::bind(SocketAddr::new(pool.address.bind, port), options)?;
        pool.bits.opened(port, RelayTransport::Udp);
        let told = pool.address.external.unwrap_or(pool.address.bind);
        Ok(Opened { socket, relayed: SocketAddr::new(told, port) })
    }

    /// SO_REUSEPORT lets connections to peers leave from the same port, and would let any program of this user in as well: whether
    /// one has it is asked without.
    fn listen(&self, pool: &Pool, port: u16) -> io::Result<(TcpListener, SocketAddr)> {
        let address =
            TcpListener::probe(SocketAddr::new(pool.address.bind, port), &ListenOptions::default())?;
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

/// Ports of other programs that a search has met. They stay taken until it is over, so that it meets each of them once.
struct PassedOver<'a> {
    bits: &'a PoolBits,
    ports: Vec<Drawn>,
}

impl<'a> PassedOver<'a> {
    fn of(bits: &'a PoolBits) -> Self {
        Self { bits, ports: Vec::new() }
    }

    /// Why there is no port in the end: other programs are told of where they have most.
    fn refusal(&self, span: &Span<'_>) -> Refusal {
        if 2 * self.ports.len() > span.range.len() { Refusal::PortsHeld } else { Refusal::Port }
    }

    /// Passes over a port that another program has; any other error ends the search.
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

impl Pool {
    /// Draws a free port that suits, and takes it. Random draws first; in a range that is nearly full, one by one
    /// from a random start.
    fn claim(&self, span: &Span<'_>, suits: impl Fn(u16) -> bool) -> Option<u16> {
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

    /// Takes an even port and the next one. `None` if another worker was faster.
    fn claim_pair(&self, stock: Stock, span: &Span<'_>) -> Result<Option<[Drawn; 2]>, Refusal> {
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
