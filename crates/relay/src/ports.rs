//! Ports of relayed transport addresses: drawn unpredictably (RFC 8656 section 7.2), counted over all workers, and held for 30 s
//! where a client reserved one (EVEN-PORT with R = 1).

use std::{
    io,
    net::SocketAddr,
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
use turnpike_turn::server::{Family, OpenRelay, OpenResult, PortWish, RelayTransport, gate::user_key};

use crate::{
    Config, RelayAddress,
    pool_bits::{Bits, PoolBits},
};

/// Milliseconds for which a reserved port is held (RFC 8656 section 7.2 recommends at least 30 s).
const RESERVATION_MS: u64 = 30_000;
/// Reservations that one user may have at a time, and never more than a quarter of all: who asks for a pair of ports takes the
/// second within a round trip, so that this is four calls that begin at once.
const MOST_PER_USER: usize = 4;
/// Draws before a free port is searched one by one.
const DRAWS: usize = 32;
/// Ports that other programs may have taken before we give up.
const BIND_ATTEMPTS: usize = 64;

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
    Port,
    Reservation,
    File,
}

impl Refusal {
    pub(crate) fn result(self) -> OpenResult {
        match self {
            Self::Family => OpenResult::UnsupportedFamily,
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
}

/// By token.
type Reservations = HashMap<[u8; 8], Reservation, RandomState>;

struct Reservation {
    opened: Opened,
    /// See [`user_key`].
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

/// Realm and user, as quotas count them.
type Owner<'a> = (&'a str, &'a str);

#[derive(Clone)]
struct Pool {
    address: RelayAddress,
    /// Whether ports are drawn from it. One that a reload has taken away is kept for as long as something is open there.
    drawn: bool,
    /// Of the address that is bound, whatever clients are told.
    bits: Arc<PoolBits>,
}

/// What of a range somebody may have.
struct Span<'a> {
    range: &'a RangeInclusive<u16>,
    /// Not these.
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

    /// Opens a listening socket for connections of peers (RFC 6062), on any port of the realm's.
    pub(crate) fn open_tcp(&self, family: Family, realm: &str) -> Result<(TcpListener, SocketAddr), Refusal> {
        let plan = self.plan();
        let span = plan.span(realm);
        self.in_turn(&plan, family, |pool| self.draw(pool, &span, |_| true, Self::listen))
    }

    /// Opens what was wished for, for datagrams. What `owner` reserves, nobody else can have.
    pub(crate) fn open(
        &self,
        wish: &OpenRelay,
        (realm, user): Owner<'_>,
        now_ms: u64,
    ) -> Result<Opened, Refusal> {
        let plan = self.plan();
        let span = plan.span(realm);
        match wish.port {
            PortWish::Any | PortWish::Own => {
                self.in_turn(&plan, wish.family, |pool| self.draw(pool, &span, |_| true, Self::bind))
            }
            PortWish::Even => {
                let is_even = |port: u16| port.is_multiple_of(2);
                self.in_turn(&plan, wish.family, |pool| self.draw(pool, &span, is_even, Self::bind))
            }
            PortWish::EvenAndReserveNext(token) => {
                let (owner, most) = (user_key(realm, user), plan.most_reservations);
                self.in_turn(&plan, wish.family, |pool| {
                    self.draw_pair(pool, &span, token, (&owner, most), now_ms)
                })
            }
            PortWish::Reserved(token) => self.take_reserved(token, &user_key(realm, user), now_ms),
        }
    }

    /// Opens a socket for datagrams that several allocations are to share, on any port that no realm has for itself.
    pub(crate) fn open_shared(&self, family: Family) -> Result<Opened, Refusal> {
        let plan = self.plan();
        let span = plan.common();
        let bind = |ports: &Self, pool: &Pool, port| ports.bind_with(&ports.shared_options, pool, port);
        self.in_turn(&plan, family, |pool| self.draw(pool, &span, |_| true, bind))
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

    /// Gives back the port of a closed socket.
    pub(crate) fn release(&self, bound: SocketAddr) {
        if let Some(pool) = self.plan().pools.iter().find(|pool| pool.address.bind == bound.ip()) {
            pool.bits.free(bound.port());
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
            let _ = socket.start_gro();
        }
    }

    /// A relay socket for datagrams that another process has bound is ours from now on.
    pub(crate) fn adopt(&self, bound: SocketAddr) {
        if let Some(pool) = self.plan().pools.iter().find(|pool| pool.address.bind == bound.ip()) {
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
    pub(crate) fn surrender_reserved(&self) {
        for (_, reservation) in self.reservations().drain() {
            self.release(reservation.opened.socket.local_addr());
        }
    }

    /// Closes reservations whose time is over.
    pub(crate) fn expire(&self, now_ms: u64) {
        self.reservations().retain(|_, reservation| {
            let keep = reservation.expires_ms > now_ms;
            if !keep {
                self.release(reservation.opened.socket.local_addr());
            }
            keep
        });
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
        span: &Span<'_>,
        suits: impl Fn(u16) -> bool,
        bind: impl Fn(&Self, &Pool, u16) -> io::Result<T>,
    ) -> Result<T, Refusal> {
        for _ in 0..BIND_ATTEMPTS {
            let port = pool.claim(span, &suits).ok_or(Refusal::Port)?;
            match bind(self, pool, port) {
                Ok(opened) => return Ok(opened),
                Err(error) => self.after_bind_error(pool, port, &error)?,
            }
        }
        Err(Refusal::Port)
    }

    /// `owner` may reserve, and all together so many.
    fn draw_pair(
        &self,
        pool: &Pool,
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
        for _ in 0..BIND_ATTEMPTS {
            let has_next = |port: u16| port < u16::MAX && span.has(port + 1) && !bits.is_taken(port + 1);
            let suits = |port: u16| port.is_multiple_of(2) && has_next(port);
            let port = pool.claim(span, suits).ok_or(Refusal::Port)?;
            if !bits.take(port + 1) {
                bits.free(port);
                continue;
            }
            let opened = match self.bind(pool, port) {
                Ok(opened) => opened,
                Err(error) => {
                    bits.free(port + 1);
                    self.after_bind_error(pool, port, &error)?;
                    continue;
                }
            };
            match self.bind(pool, port + 1) {
                Ok(next) => {
                    let mut reservations = self.reservations();
                    // Nobody waited for these binds, and another worker may have taken the last place meanwhile.
                    if !Self::may_reserve(&reservations, owner) {
                        drop((opened, next));
                        bits.free(port);
                        bits.free(port + 1);
                        return Err(Refusal::Reservation);
                    }
                    let expires_ms = now_ms + RESERVATION_MS;
                    reservations
                        .insert(token, Reservation { opened: next, owner: owner.0.into(), expires_ms });
                    return Ok(opened);
                }
                Err(error) => {
                    bits.free(port);
                    self.after_bind_error(pool, port + 1, &error)?;
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
        if reservation.expires_ms > now_ms {
            Ok(reservation.opened)
        } else {
            self.release(reservation.opened.socket.local_addr());
            Err(Refusal::Reservation)
        }
    }

    /// Tries the pools of a family, beginning with another one each time, until one has what is wished for.
    fn in_turn<T>(
        &self,
        plan: &Plan,
        family: Family,
        attempt: impl Fn(&Pool) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let suits = |pool: &&Pool| pool.drawn && pool.address.bind.is_ipv4() == (family == Family::V4);
        let count = plan.pools.iter().filter(suits).count();
        if count == 0 {
            return Err(Refusal::Family);
        }
        let turn = self.next[family as usize].fetch_add(1, Ordering::Relaxed) % count;
        let mut refused = Refusal::Family;
        for pool in plan.pools.iter().filter(suits).cycle().skip(turn).take(count) {
            match attempt(pool) {
                // This address is full, or is gone from the machine; that says nothing about the next.
                Err(Refusal::Port) => refused = Refusal::Port,
                Err(Refusal::Family) => {}
                done => return done,
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
        let address = TcpListener::probe(SocketAddr::new(pool.address.bind, port))?;
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

    /// A port that another program has is passed over; anything else ends the search.
    fn after_bind_error(&self, pool: &Pool, port: u16, error: &io::Error) -> Result<(), Refusal> {
        pool.bits.free(port);
        match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Ok(()),
            io::ErrorKind::AddrNotAvailable => Err(Refusal::Family),
            _ => Err(Refusal::File),
        }
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
        (start..=*range.end()).chain(*range.start()..start).find(|port| take(*port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use turnpike_testkit::randomness;

    use crate::RealmLimits;

    const ALICE: Owner<'static> = ("here", "alice");

    fn ports(range: RangeInclusive<u16>) -> Ports {
        ports_on(range, &[IpAddr::V4(Ipv4Addr::LOCALHOST)])
    }

    fn ports_on(range: RangeInclusive<u16>, addresses: &[IpAddr]) -> Ports {
        let on = |bind: &IpAddr| RelayAddress { bind: *bind, external: None };
        ports_of(range, addresses.iter().map(on).collect())
    }

    fn ports_of(range: RangeInclusive<u16>, relay: Vec<RelayAddress>) -> Ports {
        Ports::new(&Config { relay, ports: range, ..Config::default() })
    }

    fn wish(port: PortWish) -> OpenRelay {
        OpenRelay { family: Family::V4, transport: RelayTransport::Udp, port }
    }

    #[test]
    fn a_reservation_goes_on_in_another_process_for_as_long_as_it_would_have() {
        let (here, there) = (ports(22_140..=22_147), ports(22_140..=22_147));
        let token = [5; 8];
        let opened = here.open(&wish(PortWish::EvenAndReserveNext(token)), ALICE, 1000).unwrap();
        let lent = here.lend_reserved(11_000).unwrap();
        for (reserved, socket) in lent {
            let text = serde_json::to_string(&reserved).unwrap();
            there.adopt_reserved(500, serde_json::from_str(&text).unwrap(), socket).unwrap();
        }
        there.adopt(opened.socket.local_addr());
        here.surrender_reserved();
        let next = opened.relayed.port() + 1;
        assert!(there.are_relayed((Ipv4Addr::LOCALHOST, next).into(), RelayTransport::Udp));
        assert!(!here.are_relayed((Ipv4Addr::LOCALHOST, next).into(), RelayTransport::Udp));
        let reserved = wish(PortWish::Reserved(token));
        assert_eq!(here.open(&reserved, ALICE, 11_000).err(), Some(Refusal::Reservation));
        there.expire(20_499);
        assert_eq!(there.open(&reserved, ALICE, 20_499).unwrap().relayed.port(), next);
        // Both ports are somebody's there.
        let others: Vec<_> = (0..6).map(|_| there.open(&wish(PortWish::Any), ALICE, 0).unwrap()).collect();
        assert_eq!(others.len(), 6);
        assert_eq!(there.open(&wish(PortWish::Any), ALICE, 0).err(), Some(Refusal::Port));
    }

    #[test]
    fn every_port_of_the_range_is_given_once_and_then_none() {
        let ports = ports(22_100..=22_115);
        let mut open = Vec::new();
        let refusal = loop {
            match ports.open(&wish(PortWish::Any), ALICE, 0) {
                Ok(opened) => open.push(opened),
                Err(refusal) => break refusal,
            }
        };
        assert_eq!(refusal, Refusal::Port);
        let mut given: Vec<u16> = open.iter().map(|o| o.relayed.port()).collect();
        let in_order = given.clone();
        given.sort_unstable();
        given.dedup();
        assert_eq!(given.len(), open.len());
        assert!(open.len() >= 10, "most of the range is free on this machine: {given:?}");
        assert_ne!(in_order, given, "drawn, not counted up");
        ports.release(open.pop().unwrap().socket.local_addr());
        assert!(ports.open(&wish(PortWish::Any), ALICE, 0).is_ok());
    }

    /// RFC 8656 section 7.2 wants them unpredictable. Ports come again, once they have been given back.
    #[test]
    fn relay_ports_are_as_if_by_chance() {
        let ports = ports(49_152..=65_535);
        let drawn = (0..randomness::SAMPLES).map(|_| {
            let opened =
                ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|refusal| panic!("{refusal:?}"));
            ports.release(opened.socket.local_addr());
            (opened.relayed.port() - 49_152).to_be_bytes().to_vec()
        });
        randomness::judge(&drawn.collect::<Vec<_>>(), &[0x3F, 0xFF]).unwrap();
    }

    #[test]
    fn an_even_port_comes_with_its_neighbour_held_under_the_token() {
        let ports = ports(22_200..=22_299);
        let first = ports
            .open(&wish(PortWish::EvenAndReserveNext([7; 8])), ALICE, 1000)
            .unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(first.relayed.port() % 2, 0);
        assert_eq!(
            ports.open(&wish(PortWish::Reserved([8; 8])), ALICE, 1000).err(),
            Some(Refusal::Reservation)
        );
        let second =
            ports.open(&wish(PortWish::Reserved([7; 8])), ALICE, 30_999).unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(second.relayed.port(), first.relayed.port() + 1);
        assert_eq!(
            ports.open(&wish(PortWish::Reserved([7; 8])), ALICE, 1000).err(),
            Some(Refusal::Reservation)
        );
    }

    #[test]
    fn a_reservation_ends_after_thirty_seconds_and_frees_its_port() {
        let ports = ports(22_300..=22_301);
        let first = ports
            .open(&wish(PortWish::EvenAndReserveNext([7; 8])), ALICE, 0)
            .unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(ports.open(&wish(PortWish::Any), ALICE, 0).err(), Some(Refusal::Port));
        ports.expire(29_999);
        assert_eq!(ports.reservations().len(), 1);
        ports.expire(30_000);
        assert_eq!(ports.reservations().len(), 0);
        let again = ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(again.relayed.port(), first.relayed.port() + 1);
    }

    #[test]
    fn what_is_relayed_is_known_by_address_and_transport_for_as_long_as_it_is_open() {
        let external = "192.0.2.9".parse().ok();
        let address = RelayAddress { bind: "127.0.0.1".parse().unwrap(), external };
        let ports = ports_of(22_700..=22_799, vec![address]);
        let (udp, tcp) = (RelayTransport::Udp, RelayTransport::Tcp);
        let opened = ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}"));
        let (bound, told) = (opened.socket.local_addr(), opened.relayed);
        assert!(ports.are_relayed(bound, udp) && ports.are_relayed(told, udp));
        assert!(!ports.are_relayed(bound, tcp), "a client by TCP may have the same number");
        assert!(!ports.are_relayed(SocketAddr::new("127.0.0.2".parse().unwrap(), bound.port()), udp));
        ports.release(bound);
        assert!(!ports.are_relayed(bound, udp) && !ports.are_relayed(told, udp));

        let (listener, told) = ports.open_tcp(Family::V4, "here").unwrap_or_else(|e| panic!("{e:?}"));
        assert!(ports.are_relayed(listener.local_addr(), tcp) && ports.are_relayed(told, tcp));
        assert!(!ports.are_relayed(told, udp));
        // Who is in the way of another draw is not taken for it.
        let program = std::net::UdpSocket::bind("127.0.0.1:22800").unwrap();
        let one = ports_of(22_800..=22_800, vec![address]);
        assert_eq!(one.open(&wish(PortWish::Any), ALICE, 0).err(), Some(Refusal::Port));
        assert!(!one.are_relayed(program.local_addr().unwrap(), udp));
    }

    #[test]
    fn a_family_without_address_is_named_as_such() {
        let ports = ports(22_400..=22_401);
        let v6 = OpenRelay { family: Family::V6, transport: RelayTransport::Udp, port: PortWish::Any };
        assert_eq!(ports.open(&v6, ALICE, 0).err(), Some(Refusal::Family));
    }

    #[test]
    fn each_address_of_a_family_gives_all_its_ports_to_dual_stack_allocations_too() {
        let addresses = ["127.0.0.1", "127.0.0.2", "::1"].map(|ip| ip.parse().unwrap());
        let ports = ports_on(22_500..=22_531, &addresses);
        let v6 = OpenRelay { family: Family::V6, transport: RelayTransport::Udp, port: PortWish::Any };
        let mut open = Vec::new();
        for _ in 0..16 {
            open.push(ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}")));
            // The other half of a dual-stack allocation. Not every machine has IPv6.
            open.extend(ports.open(&v6, ALICE, 0));
        }
        let on = |open: &[Opened], ip: &IpAddr| open.iter().filter(|o| o.relayed.ip() == *ip).count();
        assert_eq!((on(&open, &addresses[0]), on(&open, &addresses[1])), (8, 8), "in turn");

        // With the addresses unequally full, a turn on a full one goes to the other.
        let (first, kept): (Vec<_>, Vec<_>) = open.into_iter().partition(|o| o.relayed.ip() == addresses[0]);
        first.iter().for_each(|opened| ports.release(opened.socket.local_addr()));
        drop(first);
        let mut open = kept;
        let refusal = loop {
            match ports.open(&wish(PortWish::Any), ALICE, 0) {
                Ok(opened) => open.push(opened),
                Err(refusal) => break refusal,
            }
        };
        assert_eq!(refusal, Refusal::Port);
        // Other programs may hold a few.
        assert!(on(&open, &addresses[0]) >= 28 && on(&open, &addresses[1]) >= 28);
    }

    #[test]
    fn a_token_is_worth_nothing_to_another_user_or_realm_and_stays_good_for_its_owner() {
        let ports = ports(22_700..=22_799);
        let first = ports
            .open(&wish(PortWish::EvenAndReserveNext([7; 8])), ALICE, 0)
            .unwrap_or_else(|e| panic!("{e:?}"));
        for thief in [("here", "bob"), ("there", "alice"), ("", ""), ("here", ""), ("here\0alice", "")] {
            let stolen = ports.open(&wish(PortWish::Reserved([7; 8])), thief, 0);
            assert_eq!(stolen.err(), Some(Refusal::Reservation), "{thief:?}");
        }
        let second =
            ports.open(&wish(PortWish::Reserved([7; 8])), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(second.relayed.port(), first.relayed.port() + 1);
    }

    #[test]
    fn one_user_can_reserve_a_few_ports_and_leaves_the_others_to_others() {
        let ports = ports(22_800..=23_311);
        assert_eq!(ports.plan().most_reservations, 32);
        let reserve = |owner: Owner<'_>, token: u64| {
            let opened = ports.open(&wish(PortWish::EvenAndReserveNext(token.to_be_bytes())), owner, 0)?;
            // The allocation is deleted at once; the port next to it stays reserved.
            ports.release(opened.socket.local_addr());
            Ok(())
        };
        let taken = |owner| (0..50).take_while(|_| reserve(owner, rand::random()).is_ok()).count();
        assert_eq!(taken(ALICE), MOST_PER_USER);
        assert_eq!(taken(("there", "alice")), MOST_PER_USER, "a namesake is somebody else");
        assert_eq!(taken(("here", "bob")), MOST_PER_USER);
        // What she takes up counts no more, and she alone gets its place.
        ports.reservations().retain(|_, held| *held.owner != *user_key("here", "bob"));
        assert_eq!(reserve(ALICE, 1).err(), Some(Refusal::Reservation));
        assert_eq!(reserve(("here", "bob"), 1), Ok(()));
        assert!(ports.open(&wish(PortWish::Reserved(1_u64.to_be_bytes())), ("here", "bob"), 0).is_ok());
        assert_eq!(taken(("here", "bob")), MOST_PER_USER);
        // All together have their bound, too.
        let users: Vec<String> = (0..20).map(|n| format!("user{n}")).collect();
        let all: usize = users.iter().map(|user| taken(("here", user))).sum();
        assert_eq!(all, ports.plan().most_reservations - 3 * MOST_PER_USER);
    }

    #[test]
    fn a_short_range_of_ports_is_shared_out_too() {
        let ports = ports(23_400..=23_463);
        assert_eq!(ports.plan().most_reservations, 4);
        let reserve = |owner, token: [u8; 8]| {
            ports.open(&wish(PortWish::EvenAndReserveNext(token)), owner, 0).map(drop)
        };
        assert_eq!(reserve(ALICE, [1; 8]), Ok(()));
        assert_eq!(reserve(ALICE, [2; 8]), Err(Refusal::Reservation), "a quarter of four");
        assert_eq!(reserve(("here", "bob"), [3; 8]), Ok(()));
    }

    #[test]
    fn reservations_that_outlive_their_allocations_cannot_take_all_ports() {
        let ports = ports(22_600..=22_663);
        let mut given = 0;
        for n in 0..200_u64 {
            let user = n.to_string();
            let wish = wish(PortWish::EvenAndReserveNext(n.to_be_bytes()));
            let Ok(opened) = ports.open(&wish, ("here", &user), 0) else { break };
            given += 1;
            // The allocation is deleted at once; the port next to it stays reserved.
            ports.release(opened.socket.local_addr());
        }
        assert_eq!(given, 4, "a sixteenth of the ports");
        assert_eq!(
            ports.open(&wish(PortWish::EvenAndReserveNext([9; 8])), ALICE, 29_999).err(),
            Some(Refusal::Reservation)
        );
        assert!(ports.open(&wish(PortWish::Any), ALICE, 0).is_ok(), "who reserves nothing is not refused");
        assert!(ports.open(&wish(PortWish::EvenAndReserveNext([9; 8])), ALICE, 30_000).is_ok());
    }

    fn realm(realm: &str, range: RangeInclusive<u16>) -> RealmLimits {
        RealmLimits { realm: realm.to_owned(), relay_ports: Some(range), ..RealmLimits::default() }
    }

    fn drawn(ports: &Ports, owner: Owner<'_>) -> Vec<u16> {
        let open = std::iter::from_fn(|| ports.open(&wish(PortWish::Any), owner, 0).ok());
        // All of them at once, or one would be drawn twice.
        let open: Vec<_> = open.collect();
        open.iter().for_each(|opened| ports.release(opened.socket.local_addr()));
        let mut drawn: Vec<u16> = open.iter().map(|opened| opened.relayed.port()).collect();
        drawn.sort_unstable();
        drawn
    }

    #[test]
    fn a_realm_has_the_ports_of_its_range_and_nobody_else_has_them() {
        let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let config = Config {
            relay: vec![RelayAddress { bind, external: None }],
            ports: 23_500..=23_547,
            realm_limits: vec![
                realm("blue", 23_510..=23_519),
                realm("red", 23_520..=23_529),
                realm("also red", 23_520..=23_529),
            ],
            ..Config::default()
        };
        let ports = Ports::new(&config);
        for (of, range) in
            [("blue", 23_510..=23_519), ("red", 23_520..=23_529), ("also red", 23_520..=23_529)]
        {
            let drawn = drawn(&ports, (of, "alice"));
            // Other programs may have a few.
            assert!(drawn.len() >= 8 && drawn.iter().all(|port| range.contains(port)), "{of}: {drawn:?}");
        }
        let others = drawn(&ports, ALICE);
        let is_others = |port: &u16| (23_500..=23_509).contains(port) || (23_530..=23_547).contains(port);
        assert!(others.len() >= 20 && others.iter().all(is_others), "{others:?}");
        // A pair lies within the range as a whole.
        for token in 0..4_u64 {
            let pair = PortWish::EvenAndReserveNext(token.to_be_bytes());
            let Ok(opened) = ports.open(&wish(pair), ("blue", &token.to_string()), 0) else { continue };
            assert!((23_510..=23_518).contains(&opened.relayed.port()), "{}", opened.relayed);
        }
    }

    #[test]
    fn a_reload_draws_elsewhere_and_leaves_open_what_is_open() {
        let external = |text: &str| text.parse().ok();
        let at = |ip: &str, external| RelayAddress { bind: ip.parse().unwrap(), external };
        let config = |relay: Vec<RelayAddress>, range| Config { relay, ports: range, ..Config::default() };
        let ports = Ports::new(&config(vec![at("127.0.0.1", external("192.0.2.1"))], 23_600..=23_619));
        let opened = ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}"));
        let bound = opened.socket.local_addr();
        // The same address is told otherwise from now on, and there is another one.
        let next = vec![at("127.0.0.1", external("192.0.2.9")), at("127.0.0.2", None)];
        ports.reconfigure(&config(next, 23_700..=23_719));
        assert!(ports.are_relayed(opened.relayed, RelayTransport::Udp), "as it was told");
        assert!(ports.are_relayed(bound, RelayTransport::Udp));
        let mut told = std::collections::HashSet::new();
        for _ in 0..4 {
            let new = ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}"));
            assert!((23_700..=23_719).contains(&new.relayed.port()));
            told.insert(new.relayed.ip().to_string());
            ports.release(new.socket.local_addr());
        }
        assert_eq!(told.len(), 2, "{told:?}");
        assert_eq!(ports.addresses().len(), 3);
        assert_eq!(ports.former_ranges(), [23_600..=23_619]);
        // Taken away, an address is forgotten with what is open there.
        ports.reconfigure(&config(vec![at("127.0.0.2", None)], 23_700..=23_719));
        assert!(ports.are_relayed(bound, RelayTransport::Udp));
        ports.release(bound);
        ports.reconfigure(&config(vec![at("127.0.0.2", None)], 23_700..=23_719));
        assert_eq!(ports.addresses(), [at("127.0.0.2", None)]);
        assert!(ports.former_ranges().is_empty());
        assert!(!ports.are_relayed(bound, RelayTransport::Udp));
        // Back again, and no port is given twice.
        ports.reconfigure(&config(vec![at("127.0.0.1", None)], 23_600..=23_619));
        drop(opened);
        assert!(drawn(&ports, ALICE).len() >= 16);
    }
}
