//! UDP sockets, made with every option that the data path wants, and the table that [`crate::Tx`] sends through.

use std::{
    cell::Cell,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{passed, rlimit, sys, tcp};

/// How a socket is made. The default asks for nothing.
#[derive(Clone, Debug, Default)]
pub struct UdpOptions {
    /// SO_REUSEPORT: several workers, one port.
    pub reuse_port: bool,
    /// Receive buffer in bytes; SO_RCVBUFFORCE is tried first.
    pub recv_buffer: Option<usize>,
    /// Send buffer in bytes; SO_SNDBUFFORCE is tried first.
    pub send_buffer: Option<usize>,
    /// UDP_GRO: receive super-packets. Only for [`crate::Datapath::Gso`].
    pub gro: bool,
    /// Learn the destination address of each datagram (IP_PKTINFO); for wildcard sockets.
    pub packet_info: bool,
    /// Learn TOS and TTL (traffic class and hop limit) of each datagram.
    pub ip_header: bool,
    /// IP_RECVERR: ICMP errors can be read with [`crate::error_queue::read`].
    pub errors: bool,
    /// On an IPv6 address: also IPv4 datagrams, whose addresses are told as IPv4 (ipv6(7), IPV6_V6ONLY off).
    pub dual_stack: bool,
    /// IP_FREEBIND: the address need not be this machine's yet.
    pub freebind: bool,
}

/// IP_PMTUDISC_OMIT (ip(7), Linux 3.15): no DF, fragments by the MTU of the interface and not by that of the path, which
/// routers see to. With IP_PMTUDISC_DONT the kernel refuses super-packets of segments beyond the path MTU, so that a client
/// who claims a small one (an ICMP error about datagrams to itself is enough) would switch GSO off for all of a listener's.
const MAY_FRAGMENT_V4: i32 = libc::IP_PMTUDISC_OMIT;

/// DF, whatever the path's MTU is thought to be. With the common IP_PMTUDISC_DO the kernel would itself drop what exceeds it,
/// and the client that searches for the MTU (RFC 8656 section 11.5) would hear of the first ICMP error and then nothing.
const DONT_FRAGMENT_V4: i32 = libc::IP_PMTUDISC_PROBE;
const DONT_FRAGMENT_V6: i32 = libc::IPV6_PMTUDISC_PROBE;

/// A bound, non-blocking UDP socket. IPv6 sockets are IPV6_V6ONLY unless [`UdpOptions::dual_stack`] is asked for. Unless a datagram
/// asks for DF, the kernel may fragment it.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    local: SocketAddr,
    gso: Cell<GsoHabit>,
    /// How many buffers the last receive calls found worth asking for.
    appetite: Cell<u8>,
    /// Calls for one buffer that brought one, since a call for two was last tried.
    singles: Cell<u8>,
    /// The kernel's drop counter as last seen.
    drops_seen: Cell<u32>,
    ttl: Cell<TtlHabit>,
}

/// Which segments may leave in super-packets. A kernel that refuses them may mean a path that is narrow for a minute only, so that it is asked again:
/// after so many flushes, because no clock is read here, and after twice as many each time that it refuses again.
#[derive(Clone, Copy, Debug)]
struct GsoHabit {
    /// The longest such segment: 0 where it refused a short one.
    limit: u16,
    /// Flushes until larger ones are tried again.
    flushes: u32,
    /// How many they were at the start of this pause; 0 before the first.
    pause: u32,
}

impl GsoHabit {
    const NO_LIMIT: Self = Self { limit: u16::MAX, flushes: 0, pause: 0 };
    /// A try in vain costs as much as two or three flushes more.
    const FIRST_PAUSE: u32 = 1 << 10;
    /// A second or a few where GSO matters.
    const LONGEST_PAUSE: u32 = 1 << 16;
}

/// Which TTL or hop limit a socket sends with when a datagram does not name one, and whether another has become usual. A
/// relay socket's datagrams come from one client and mostly have one TTL; naming it in each costs 2 % of a thin flow.
#[derive(Clone, Copy, Debug, Default)]
struct TtlHabit {
    /// The socket option as we set it; 0 is the kernel's default.
    set: u8,
    /// That default, known once `set` is not 0.
    default: u8,
    /// The last one that had to be named, and how many messages in a row did.
    named: u8,
    times: u8,
}

impl UdpSocket {
    /// Binds. Port 0 lets the kernel choose.
    ///
    /// # Errors
    /// Those of socket(2), setsockopt(2) and bind(2).
    pub fn bind(address: SocketAddr, options: &UdpOptions) -> io::Result<Self> {
        Self::bind_prepared(address, options, |_| Ok(()))
    }

    /// As [`UdpSocket::bind`], but `prepare` sets further options before the address is bound: SO_MARK, SO_BINDTODEVICE,
    /// IP_TRANSPARENT.
    ///
    /// # Errors
    /// Those of `prepare`, socket(2), setsockopt(2) and bind(2).
    pub fn bind_prepared(
        address: SocketAddr,
        options: &UdpOptions,
        prepare: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let socket =
            Socket::new(Domain::for_address(address), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        let socket = rlimit::ours(socket)?;
        if options.reuse_port {
            socket.set_reuse_port(true)?;
        }
        if address.is_ipv6() {
            socket.set_only_v6(!options.dual_stack)?;
        }
        if options.freebind {
            tcp::set_freebind(&socket, address)?;
        }
        set_options(socket.as_fd(), address.is_ipv6(), options)?;
        prepare(socket.as_fd())?;
        socket.bind(&address.into())?;
        Self::of(socket.into(), 0)
    }

    /// Takes a socket that somebody else has bound. What has to be said before that, SO_REUSEPORT and IPV6_V6ONLY, stays as it is.
    pub(crate) fn adopt(descriptor: OwnedFd, options: &UdpOptions) -> io::Result<Self> {
        let socket = Self::of(descriptor, 0)?;
        let adopted = SockRef::from(&socket);
        passed::check_families(&adopted, socket.local, options.dual_stack)?;
        adopted.set_nonblocking(true)?;
        set_options(socket.as_fd(), socket.is_v6(), options)?;
        Ok(socket)
    }

    /// Takes over a socket that another process has made and lent: as it is, with what waits in it. `drops` is what
    /// [`UdpSocket::lend`] said there.
    ///
    /// # Errors
    /// `InvalidInput` for what is no UDP socket; those of getsockname(2).
    pub fn take_over(fd: OwnedFd, drops: u32) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        if (option(libc::SO_TYPE)?, option(libc::SO_PROTOCOL)?) != (libc::SOCK_DGRAM, libc::IPPROTO_UDP) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no UDP socket"));
        }
        Self::of(fd, drops)
    }

    /// Makes it what a process expects that takes it over: nothing is set that only this one knows of. The kernel's drop counter as
    /// last seen, so that no drop is counted twice and none is missed. It goes on here as before if nobody takes it.
    pub fn lend(&self) -> u32 {
        if self.ttl.get().set != 0 {
            let (level, name) = self.ttl_option();
            // Where it fails, datagrams that name no TTL keep the one that was usual.
            let _ = sys::set_option(self.as_fd(), level, name, -1);
            self.ttl.set(TtlHabit::default());
        }
        self.drops_seen.get()
    }

    /// The kernel's drop counter as [`UdpSocket::lend`] has told it, where that was not known yet.
    pub fn expect_drops(&self, drops: u32) {
        self.drops_seen.set(drops);
    }

    fn of(fd: OwnedFd, drops: u32) -> io::Result<Self> {
        Ok(Self::at(sys::local_address(fd.as_fd())?, fd, drops))
    }

    pub(crate) fn at(local: SocketAddr, fd: OwnedFd, drops: u32) -> Self {
        Self {
            local,
            fd,
            gso: Cell::new(GsoHabit::NO_LIMIT),
            appetite: Cell::new(1),
            singles: Cell::new(0),
            drops_seen: Cell::new(drops),
            ttl: Cell::default(),
        }
    }

    /// How much waits to be received, in bytes of the kernel's memory (SO_MEMINFO, Linux 4.12); 0 where the kernel does not tell.
    pub fn backlog(&self) -> usize {
        // Of the numbers that it has the first alone: SK_MEMINFO_RMEM_ALLOC.
        let bytes = sys::get_option(self.as_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO);
        bytes.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
    }

    fn set_option_gro(&self, on: bool) -> io::Result<()> {
        sys::set_option(self.as_fd(), sys::SOL_UDP, sys::UDP_GRO, on.into())
    }

    /// True if super-packets are received.
    ///
    /// # Errors
    /// Those of getsockopt(2): ENOPROTOOPT before Linux 5.13.
    pub fn gathers(&self) -> io::Result<bool> {
        Ok(sys::get_option(self.as_fd(), sys::SOL_UDP, sys::UDP_GRO)? != 0)
    }

    /// Has super-packets received from now on, as [`UdpOptions::gro`] does, or single datagrams. False where the latter has to wait until
    /// the socket is empty: the kernel tells the segment size of a super-packet when it is received, and then only if the socket still
    /// takes such. One that comes later it segments.
    ///
    /// # Errors
    /// Those of setsockopt(2): ENOPROTOOPT before Linux 5.0.
    pub fn set_gro(&self, on: bool) -> io::Result<bool> {
        if on {
            return self.set_option_gro(true).map(|()| true);
        }
        if self.backlog() > 0 {
            return Ok(false);
        }
        self.set_option_gro(false)?;
        if self.backlog() > 0 {
            self.set_option_gro(true)?;
            return Ok(false);
        }
        Ok(true)
    }

    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The address that datagrams leave from: of a connected socket the one that the route has.
    ///
    /// # Errors
    /// Those of getsockname(2).
    pub fn source(&self) -> io::Result<SocketAddr> {
        sys::local_address(self.fd.as_fd())
    }

    /// connect(2): datagrams from elsewhere are refused by the kernel, [`crate::Route::to`] may be `None`.
    ///
    /// # Errors
    /// Those of connect(2).
    pub fn connect(&self, peer: SocketAddr) -> io::Result<()> {
        Ok(rustix::net::connect(&self.fd, &peer)?)
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.local.is_ipv6()
    }

    pub(crate) fn gso_limit(&self) -> u16 {
        self.gso.get().limit
    }

    /// After the kernel refused a super-packet of this segment size. A size beyond the smallest MTU that IPv6 allows
    /// says something about the path, so only segments of that size step down; a small one says that the socket or
    /// its device cannot do it at all.
    pub(crate) fn step_down(&self, segment: u16) {
        const ALWAYS_FITS: u16 = 1232;
        let limit = if segment > ALWAYS_FITS { segment - 1 } else { 0 };
        let known = self.gso.get();
        let pause = (known.pause * 2).clamp(GsoHabit::FIRST_PAUSE, GsoHabit::LONGEST_PAUSE);
        self.gso.set(GsoHabit { limit: limit.min(known.limit), flushes: pause, pause });
    }

    /// Counts a flush after a step-down; after enough of them all segments may be tried again.
    #[cold]
    pub(crate) fn pause_gso(&self) {
        let mut gso = self.gso.get();
        gso.flushes = gso.flushes.saturating_sub(1);
        if gso.flushes == 0 {
            gso.limit = u16::MAX;
        }
        self.gso.set(gso);
    }

    pub(crate) fn appetite(&self) -> u8 {
        self.appetite.get()
    }

    /// Learns from a call that asked for `ask` buffers, of `most` possible ones, and got `got`.
    ///
    /// A call for two costs a third more than one for one when the second is not there (815 ns against 616), so that
    /// thin flows try it only now and then; a flood doubles from there.
    pub(crate) fn digest(&self, ask: u8, got: u8, most: u8) {
        const PATIENCE: u8 = 8;
        let appetite = self.appetite.get();
        if got == ask {
            if appetite == 1 {
                let singles = self.singles.get() + 1;
                if singles < PATIENCE {
                    return self.singles.set(singles);
                }
                self.singles.set(0);
            }
            // Not less than before: the arena's end may have cut the call short.
            self.appetite.set(ask.saturating_mul(2).min(most).max(appetite));
        } else if got < 2 || got.saturating_mul(4) <= ask {
            self.appetite.set((ask / 2).max(1));
        }
    }

    /// Datagrams dropped since the last call, given the kernel's running counter.
    pub(crate) fn drops_since(&self, counter: u32) -> u32 {
        counter.wrapping_sub(self.drops_seen.replace(counter))
    }

    /// The TTL that a message's control data must name so that it leaves with `wanted` (0: the kernel's default); 0 for none.
    /// With `may_set`, which asks that nothing gathered for this socket is unsent, a TTL that is wanted again and again
    /// becomes the socket's own.
    pub(crate) fn ttl_to_name(&self, wanted: u8, may_set: bool) -> u8 {
        /// A setsockopt(2) costs about as much as naming the TTL that often.
        const USUAL: u8 = 16;
        let mut habit = self.ttl.get();
        if wanted == habit.set {
            return 0;
        }
        if wanted == 0 {
            return habit.default;
        }
        habit.times = if wanted == habit.named { habit.times.saturating_add(1) } else { 1 };
        habit.named = wanted;
        let name = if habit.times >= USUAL && may_set && self.set_ttl(&mut habit, wanted).is_ok() {
            0
        } else {
            wanted
        };
        self.ttl.set(habit);
        name
    }

    fn ttl_option(&self) -> (i32, i32) {
        if self.is_v6() {
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS)
        } else {
            (libc::IPPROTO_IP, libc::IP_TTL)
        }
    }

    fn set_ttl(&self, habit: &mut TtlHabit, wanted: u8) -> io::Result<()> {
        let (level, name) = self.ttl_option();
        if habit.set == 0 {
            let default = sys::get_option(self.as_fd(), level, name)?;
            habit.default = u8::try_from(default).map_err(|_| io::ErrorKind::InvalidData)?;
        }
        sys::set_option(self.as_fd(), level, name, wanted.into())?;
        habit.set = wanted;
        Ok(())
    }

    /// Sets or clears DF for what is sent next.
    pub(crate) fn set_dont_fragment(&self, on: bool) -> io::Result<()> {
        let (level, name, value) = match (self.is_v6(), on) {
            (false, true) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, DONT_FRAGMENT_V4),
            (false, false) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, MAY_FRAGMENT_V4),
            (true, true) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, DONT_FRAGMENT_V6),
            (true, false) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_WANT),
        };
        sys::set_option(self.as_fd(), level, name, value)
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What can be said of a socket before and after it is bound.
fn set_options(fd: BorrowedFd<'_>, is_v6: bool, options: &UdpOptions) -> io::Result<()> {
    let on = |level, name| sys::set_option(fd, level, name, 1);
    set_buffer(fd, options.recv_buffer, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)?;
    set_buffer(fd, options.send_buffer, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)?;
    on(libc::SOL_SOCKET, libc::SO_RXQ_OVFL)?;
    if options.gro {
        on(sys::SOL_UDP, sys::UDP_GRO)?;
    }
    if is_v6 {
        if options.dual_stack {
            sys::set_option(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, MAY_FRAGMENT_V4)?;
        }
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_WANT)?;
        if options.packet_info {
            on(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)?;
        }
        if options.ip_header {
            on(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS)?;
            on(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT)?;
        }
        if options.errors {
            on(libc::IPPROTO_IPV6, libc::IPV6_RECVERR)?;
        }
    } else {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, MAY_FRAGMENT_V4)?;
        if options.packet_info {
            on(libc::IPPROTO_IP, libc::IP_PKTINFO)?;
        }
        if options.ip_header {
            on(libc::IPPROTO_IP, libc::IP_RECVTOS)?;
            on(libc::IPPROTO_IP, libc::IP_RECVTTL)?;
        }
        if options.errors {
            on(libc::IPPROTO_IP, libc::IP_RECVERR)?;
        }
    }
    Ok(())
}

/// SO_RCVBUFFORCE needs CAP_NET_ADMIN and passes net.core.rmem_max; without it the kernel gives what it allows.
pub(crate) fn set_buffer(fd: BorrowedFd<'_>, bytes: Option<usize>, force: i32, plain: i32) -> io::Result<()> {
    let Some(bytes) = bytes else { return Ok(()) };
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    sys::set_option(fd, libc::SOL_SOCKET, force, bytes)
        .or_else(|_| sys::set_option(fd, libc::SOL_SOCKET, plain, bytes))
}

/// Key of a socket in [`Sockets`]; dense and reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketId(pub u32);

impl SocketId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The sockets of one worker.
#[derive(Default)]
pub struct Sockets {
    slots: slab::Slab<UdpSocket>,
}

impl Sockets {
    /// Takes a socket.
    pub fn insert(&mut self, socket: UdpSocket) -> SocketId {
        #[expect(clippy::cast_possible_truncation, reason = "descriptors are fewer than 2^31")]
        SocketId(self.slots.insert(socket) as u32)
    }

    /// Gives it back (dropping it closes it). Call [`crate::Tx::flush`] first: what is queued for it is dropped.
    pub fn remove(&mut self, id: SocketId) -> Option<UdpSocket> {
        self.slots.try_remove(id.index())
    }

    /// Looks one up.
    pub fn get(&self, id: SocketId) -> Option<&UdpSocket> {
        self.slots.get(id.index())
    }

    /// [`UdpSocket::set_gro`] of one; true once that is settled. Where it is not there, or the kernel refuses, there is nothing to wait for.
    pub fn set_gro(&self, id: SocketId, on: bool) -> bool {
        self.get(id).is_none_or(|socket| socket.set_gro(on).unwrap_or(true))
    }
}
