//! Ports of relayed transport addresses: drawn unpredictably (RFC 8656 section 7.2), counted over all workers, and held for 30 s
//! where a client reserved one (EVEN-PORT with R = 1).

use std::{
    io,
    net::SocketAddr,
    ops::RangeInclusive,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use rand::Rng;
use turnpike_net::{Datapath, ListenOptions, TcpListener, UdpOptions, UdpSocket};
use turnpike_turn::server::{Family, OpenRelay, OpenResult, PortWish, RelayTransport};

use crate::{Config, RelayAddress, pool_bits::PoolBits, quotas::user_key};

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
    pools: Vec<Pool>,
    range: RangeInclusive<u16>,
    options: UdpOptions,
    /// Whose turn it is, by family: one count for both would give every dual-stack allocation the same two addresses.
    next: [AtomicUsize; 2],
    most_reservations: usize,
    reservations: Mutex<Reservations>,
}

/// By token.
type Reservations = HashMap<[u8; 8], Reservation, RandomState>;

struct Reservation {
    opened: Opened,
    /// See [`user_key`].
    owner: Box<str>,
    expires_ms: u64,
}

/// Realm and user, as quotas count them.
type Owner<'a> = (&'a str, &'a str);

struct Pool {
    address: RelayAddress,
    bits: PoolBits,
}

impl Ports {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            pools: config.relay.iter().copied().map(Pool::new).collect(),
            range: config.ports.clone(),
            options: UdpOptions {
                gro: config.datapath == Datapath::Gso,
                ip_header: true,
                errors: true,
                recv_buffer: Some(config.relay_buffer),
                send_buffer: Some(config.relay_buffer),
                ..UdpOptions::default()
            },
            next: Default::default(),
            most_reservations: config.max_reservations(),
            reservations: Mutex::default(),
        }
    }

    /// Opens a listening socket for connections of peers (RFC 6062), on any port.
    pub(crate) fn open_tcp(&self, family: Family) -> Result<(TcpListener, SocketAddr), Refusal> {
        self.in_turn(family, |pool| self.draw(pool, |_| true, Self::listen))
    }

    /// Opens what was wished for, for datagrams. What `owner` reserves, nobody else can have.
    pub(crate) fn open(
        &self,
        wish: &OpenRelay,
        (realm, user): Owner<'_>,
        now_ms: u64,
    ) -> Result<Opened, Refusal> {
        match wish.port {
            PortWish::Any => self.in_turn(wish.family, |pool| self.draw(pool, |_| true, Self::bind)),
            PortWish::Even => {
                self.in_turn(wish.family, |pool| self.draw(pool, |port| port.is_multiple_of(2), Self::bind))
            }
            PortWish::EvenAndReserveNext(token) => {
                let owner = user_key(realm, user);
                self.in_turn(wish.family, |pool| self.draw_pair(pool, token, &owner, now_ms))
            }
            PortWish::Reserved(token) => self.take_reserved(token, &user_key(realm, user), now_ms),
        }
    }

    /// Whether this is a relayed transport address of somebody, as bound or as clients are told.
    pub(crate) fn are_relayed(&self, address: SocketAddr, transport: RelayTransport) -> bool {
        let is_of =
            |pool: &&Pool| pool.address.bind == address.ip() || pool.address.external == Some(address.ip());
        self.pools.iter().filter(is_of).any(|pool| pool.bits.is_open(address.port(), transport))
    }

    /// Gives back the port of a closed socket.
    pub(crate) fn release(&self, bound: SocketAddr) {
        if let Some(pool) = self.pools.iter().find(|pool| pool.address.bind == bound.ip()) {
            pool.bits.free(bound.port());
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
    fn may_reserve(&self, reservations: &Reservations, owner: &str) -> bool {
        let most = MOST_PER_USER.min(self.most_reservations / 4).max(1);
        reservations.len() < self.most_reservations
            && reservations.values().filter(|held| *held.owner == *owner).count() < most
    }

    fn reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw<T>(
        &self,
        pool: &Pool,
        suits: impl Fn(u16) -> bool,
        bind: impl Fn(&Self, &Pool, u16) -> io::Result<T>,
    ) -> Result<T, Refusal> {
        for _ in 0..BIND_ATTEMPTS {
            let port = pool.claim(&self.range, &suits).ok_or(Refusal::Port)?;
            match bind(self, pool, port) {
                Ok(opened) => return Ok(opened),
                Err(error) => self.after_bind_error(pool, port, &error)?,
            }
        }
        Err(Refusal::Port)
    }

    fn draw_pair(&self, pool: &Pool, token: [u8; 8], owner: &str, now_ms: u64) -> Result<Opened, Refusal> {
        self.expire(now_ms);
        if !self.may_reserve(&self.reservations(), owner) {
            return Err(Refusal::Reservation);
        }
        for _ in 0..BIND_ATTEMPTS {
            let suits = |port: u16| {
                port.is_multiple_of(2) && port < *self.range.end() && !pool.bits.is_taken(port + 1)
            };
            let port = pool.claim(&self.range, suits).ok_or(Refusal::Port)?;
            if !pool.bits.take(port + 1) {
                pool.bits.free(port);
                continue;
            }
            let opened = match self.bind(pool, port) {
                Ok(opened) => opened,
                Err(error) => {
                    pool.bits.free(port + 1);
                    self.after_bind_error(pool, port, &error)?;
                    continue;
                }
            };
            match self.bind(pool, port + 1) {
                Ok(next) => {
                    let mut reservations = self.reservations();
                    // Nobody waited for these binds, and another worker may have taken the last place meanwhile.
                    if !self.may_reserve(&reservations, owner) {
                        drop((opened, next));
                        pool.bits.free(port);
                        pool.bits.free(port + 1);
                        return Err(Refusal::Reservation);
                    }
                    let expires_ms = now_ms + RESERVATION_MS;
                    reservations.insert(token, Reservation { opened: next, owner: owner.into(), expires_ms });
                    return Ok(opened);
                }
                Err(error) => {
                    pool.bits.free(port);
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
        family: Family,
        attempt: impl Fn(&Pool) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let suits = |pool: &&Pool| pool.address.bind.is_ipv4() == (family == Family::V4);
        let count = self.pools.iter().filter(suits).count();
        if count == 0 {
            return Err(Refusal::Family);
        }
        let turn = self.next[family as usize].fetch_add(1, Ordering::Relaxed) % count;
        let mut refused = Refusal::Family;
        for pool in self.pools.iter().filter(suits).cycle().skip(turn).take(count) {
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
        let socket = UdpSocket::bind(SocketAddr::new(pool.address.bind, port), &self.options)?;
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
    fn new(address: RelayAddress) -> Self {
        Self { address, bits: PoolBits::new() }
    }

    /// Draws a free port that suits, and takes it. Random draws first; in a range that is nearly full, one by one
    /// from a random start.
    fn claim(&self, range: &RangeInclusive<u16>, suits: impl Fn(u16) -> bool) -> Option<u16> {
        let mut random = rand::rng();
        for _ in 0..DRAWS {
            let port = random.random_range(range.clone());
            if suits(port) && self.bits.take(port) {
                return Some(port);
            }
        }
        let start = random.random_range(range.clone());
        (start..=*range.end()).chain(*range.start()..start).find(|port| suits(*port) && self.bits.take(*port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use turnpike_testkit::randomness;

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
    fn every_port_of_the_range_is_given_once_and_then_none() {
        let ports = ports(42_100..=42_115);
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
        let ports = ports(42_200..=42_299);
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
        let ports = ports(42_300..=42_301);
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
        let ports = ports_of(42_700..=42_799, vec![address]);
        let (udp, tcp) = (RelayTransport::Udp, RelayTransport::Tcp);
        let opened = ports.open(&wish(PortWish::Any), ALICE, 0).unwrap_or_else(|e| panic!("{e:?}"));
        let (bound, told) = (opened.socket.local_addr(), opened.relayed);
        assert!(ports.are_relayed(bound, udp) && ports.are_relayed(told, udp));
        assert!(!ports.are_relayed(bound, tcp), "a client by TCP may have the same number");
        assert!(!ports.are_relayed(SocketAddr::new("127.0.0.2".parse().unwrap(), bound.port()), udp));
        ports.release(bound);
        assert!(!ports.are_relayed(bound, udp) && !ports.are_relayed(told, udp));

        let (listener, told) = ports.open_tcp(Family::V4).unwrap_or_else(|e| panic!("{e:?}"));
        assert!(ports.are_relayed(listener.local_addr(), tcp) && ports.are_relayed(told, tcp));
        assert!(!ports.are_relayed(told, udp));
        // Who is in the way of another draw is not taken for it.
        let program = std::net::UdpSocket::bind("127.0.0.1:42800").unwrap();
        let one = ports_of(42_800..=42_800, vec![address]);
        assert_eq!(one.open(&wish(PortWish::Any), ALICE, 0).err(), Some(Refusal::Port));
        assert!(!one.are_relayed(program.local_addr().unwrap(), udp));
    }

    #[test]
    fn a_family_without_address_is_named_as_such() {
        let ports = ports(42_400..=42_401);
        let v6 = OpenRelay { family: Family::V6, transport: RelayTransport::Udp, port: PortWish::Any };
        assert_eq!(ports.open(&v6, ALICE, 0).err(), Some(Refusal::Family));
    }

    #[test]
    fn each_address_of_a_family_gives_all_its_ports_to_dual_stack_allocations_too() {
        let addresses = ["127.0.0.1", "127.0.0.2", "::1"].map(|ip| ip.parse().unwrap());
        let ports = ports_on(42_500..=42_531, &addresses);
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
        let ports = ports(42_700..=42_799);
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
        let ports = ports(42_800..=43_311);
        assert_eq!(ports.most_reservations, 32);
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
        assert_eq!(all, ports.most_reservations - 3 * MOST_PER_USER);
    }

    #[test]
    fn a_short_range_of_ports_is_shared_out_too() {
        let ports = ports(43_400..=43_463);
        assert_eq!(ports.most_reservations, 4);
        let reserve = |owner, token: [u8; 8]| {
            ports.open(&wish(PortWish::EvenAndReserveNext(token)), owner, 0).map(drop)
        };
        assert_eq!(reserve(ALICE, [1; 8]), Ok(()));
        assert_eq!(reserve(ALICE, [2; 8]), Err(Refusal::Reservation), "a quarter of four");
        assert_eq!(reserve(("here", "bob"), [3; 8]), Ok(()));
    }

    #[test]
    fn reservations_that_outlive_their_allocations_cannot_take_all_ports() {
        let ports = ports(42_600..=42_663);
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
}
