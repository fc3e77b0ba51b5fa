//! UDP sockets with the options of the data path, and the table that [`crate::Tx`] sends through.

use std::{
    cell::Cell,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{QueuedError, error_queue, passed, rlimit, sys, tcp};

/// Socket options; all off by default.
#[derive(Clone, Debug, Default)]
pub struct UdpOptions {
    /// SO_REUSEPORT, for several workers on one port.
    pub reuse_port: bool,
    /// Size of the receive buffer in bytes; SO_RCVBUFFORCE is tried first.
    pub recv_buffer: Option<usize>,
    /// Size of the send buffer in bytes; SO_SNDBUFFORCE is tried first.
    pub send_buffer: Option<usize>,
    /// UDP_GRO: receive super-packets. Only for [`crate::Datapath::Gso`].
    pub gro: bool,
    /// IP_PKTINFO: report the destination address of each datagram, for wildcard sockets.
    pub packet_info: bool,
    /// Report TOS and TTL (traffic class and hop limit) of each datagram.
    pub ip_header: bool,
    /// IP_RECVERR: queue ICMP errors for [`UdpSocket::read_errors`].
    pub errors: bool,
    /// IPV6_V6ONLY off: an IPv6 socket also receives IPv4 and reports IPv4 addresses (ipv6(7)).
    pub dual_stack: bool,
    /// IP_FREEBIND: the address may be configured later.
    pub freebind: bool,
    /// SO_BINDTODEVICE.
    pub device: Option<String>,
    /// SO_MARK; needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// IP_TRANSPARENT: the address need not belong to this machine; needs CAP_NET_ADMIN.
    pub transparent: bool,
}

/// IP_PMTUDISC_OMIT (ip(7), Linux 3.15): no DF; the kernel fragments according to the MTU of the interface
/// and leaves the rest of the path to routers. With IP_PMTUDISC_DONT the kernel refuses super-packets with
/// segments above the path MTU. A client that claims a small path MTU (an ICMP error is enough) would disable
/// GSO for the whole listener.
const MAY_FRAGMENT_V4: i32 = libc::IP_PMTUDISC_OMIT;

/// DF regardless of the path MTU. With the usual IP_PMTUDISC_DO the kernel itself drops datagrams above the
/// path MTU, so a client that probes for the MTU (RFC 8656 section 11.5) would see one ICMP error and then nothing.
const DONT_FRAGMENT_V4: i32 = libc::IP_PMTUDISC_PROBE;
const DONT_FRAGMENT_V6: i32 = libc::IPV6_PMTUDISC_PROBE;

/// Bound, non-blocking UDP socket. IPv6 sockets are IPV6_V6ONLY unless [`UdpOptions::dual_stack`] is set. The
/// kernel may fragment datagrams sent without DF.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    local: SocketAddr,
    gso: Cell<GsoHabit>,
    /// Number of buffers to request in the next receive call.
    appetite: Cell<u8>,
    /// Number of consecutive one-buffer calls that were full since a call for two buffers was last tried.
    singles: Cell<u8>,
    drops_seen: Cell<u32>,
    ttl: Cell<TtlHabit>,
}

/// Segment size limit for super-packets. A refusal may come from a path that has a small MTU for only a
/// minute, so larger segments are retried after a pause. The pause is counted in flushes, because no clock is
/// read here. It doubles with each additional refusal.
#[derive(Clone, Copy, Debug)]
struct GsoHabit {
    /// Maximum segment size; 0 after a refusal of a short segment.
    limit: u16,
    /// Flushes until the next retry.
    flushes: u32,
    /// Length of this pause in flushes; 0 before the first.
    pause: u32,
}

impl GsoHabit {
    const NO_LIMIT: Self = Self { limit: u16::MAX, flushes: 0, pause: 0 };
    /// First pause in flushes. A failed retry costs as much as two or three flushes.
    const FIRST_PAUSE: u32 = 1 << 10;
    /// Longest pause in flushes: a few seconds at rates where GSO matters.
    const LONGEST_PAUSE: u32 = 1 << 16;
}

/// Tracks the TTLs that a socket sends. A relay socket sends the datagrams of one client, most of which have
/// the same TTL. Setting it with a control message per datagram costs 2 % of the time for a thin flow, so a
/// frequent TTL becomes the socket option.
#[derive(Clone, Copy, Debug, Default)]
struct TtlHabit {
    /// TTL set as the socket option; 0 means the kernel's default.
    set: u8,
    /// The kernel's default, known once `set` is not 0.
    default: u8,
    /// Last TTL sent as a control message, and the number of consecutive messages with it.
    named: u8,
    times: u8,
}

impl UdpSocket {
    /// Binds; port 0 lets the kernel choose.
    pub fn bind(address: SocketAddr, options: &UdpOptions) -> io::Result<Self> {
        let socket =
            Socket::new(Domain::for_address(address), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        let socket = rlimit::unreserved(socket)?;
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
        tcp::set_outgoing(&socket, address, options.device.as_deref(), options.mark, options.transparent)?;
        socket.bind(&address.into())?;
        Self::of(socket.into(), 0)
    }

    /// Takes over a socket bound by the service manager. SO_REUSEPORT and IPV6_V6ONLY cannot change after
    /// bind(2), so they stay as they are.
    pub(crate) fn adopt(descriptor: OwnedFd, options: &UdpOptions) -> io::Result<Self> {
        let socket = Self::of(descriptor, 0)?;
        let adopted = SockRef::from(&socket);
        passed::check_families(&adopted, socket.local, options.dual_stack)?;
        adopted.set_nonblocking(true)?;
        set_options(socket.as_fd(), socket.is_v6(), options)?;
        Ok(socket)
    }

    /// Takes over a socket from another process, including its queued datagrams. `drops` is the result of
    /// [`UdpSocket::lend`] in that process. `InvalidInput` if it is not a UDP socket.
    pub fn take_over(fd: OwnedFd, drops: u32) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        if (option(libc::SO_TYPE)?, option(libc::SO_PROTOCOL)?) != (libc::SOCK_DGRAM, libc::IPPROTO_UDP) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a UDP socket"));
        }
        Self::of(fd, drops)
    }

    /// Prepares the socket for another process: restores the default TTL and returns the last value of the
    /// kernel's drop counter, so that no drop is lost or counted twice. The socket stays usable here.
    pub fn lend(&self) -> u32 {
        if self.ttl.get().set != 0 {
            let (level, name) = self.ttl_option();
            // If this fails, datagrams sent without an explicit TTL keep using the last frequent TTL.
            let _ = sys::set_option(self.as_fd(), level, name, -1);
            self.ttl.set(TtlHabit::default());
        }
        self.drops_seen.get()
    }

    /// Sets the drop counter from [`UdpSocket::lend`], if it was unknown at [`UdpSocket::take_over`].
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

    /// Receive queue in bytes of kernel memory (SO_MEMINFO, Linux 4.12); 0 if unknown.
    pub fn backlog(&self) -> usize {
        // Read only the first number, SK_MEMINFO_RMEM_ALLOC.
        let bytes = sys::get_option(self.as_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO);
        bytes.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
    }

    fn set_option_gro(&self, on: bool) -> io::Result<()> {
        sys::set_option(self.as_fd(), sys::SOL_UDP, sys::UDP_GRO, on.into())
    }

    /// True if UDP_GRO is on. Fails with ENOPROTOOPT before Linux 5.13.
    pub fn gathers(&self) -> io::Result<bool> {
        Ok(sys::get_option(self.as_fd(), sys::SOL_UDP, sys::UDP_GRO)? != 0)
    }

    /// Turns UDP_GRO on or off. Returns false if turning it off has to wait until the socket is empty: the
    /// kernel reports the segment size of a queued super-packet only while the option is on. Fails with
    /// ENOPROTOOPT before Linux 5.0.
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

    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Source address of outgoing datagrams; on a connected socket it is chosen by the route.
    pub fn source(&self) -> io::Result<SocketAddr> {
        sys::local_address(self.fd.as_fd())
    }

    /// connect(2): the kernel then drops datagrams from other sources, and [`crate::Route::to`] may be
    /// `None`.
    pub fn connect(&self, peer: SocketAddr) -> io::Result<()> {
        Ok(rustix::net::connect(&self.fd, &peer)?)
    }

    /// Reads up to `limit` queued ICMP errors, skipping locally generated ones, and returns how many were read.
    /// An empty queue is not an error.
    pub fn read_errors(&self, limit: usize, each: impl FnMut(QueuedError)) -> io::Result<usize> {
        error_queue::read(self, limit, each)
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.local.is_ipv6()
    }

    pub(crate) fn gso_limit(&self) -> u16 {
        self.gso.get().limit
    }

    /// Handles a refused super-packet. A segment above 1,232 bytes (the IPv6 minimum MTU without headers) may
    /// exceed the path MTU, so the limit falls just below its size. If a smaller segment is refused, the socket
    /// or its device cannot segment.
    pub(crate) fn step_down(&self, segment: u16) {
        const ALWAYS_FITS: u16 = 1232;
        let limit = if segment > ALWAYS_FITS { segment - 1 } else { 0 };
        let known = self.gso.get();
        let pause = (known.pause * 2).clamp(GsoHabit::FIRST_PAUSE, GsoHabit::LONGEST_PAUSE);
        self.gso.set(GsoHabit { limit: limit.min(known.limit), flushes: pause, pause });
    }

    /// Counts a flush after a step-down, and lifts the limit after enough of them.
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

    /// Adapts to a call that asked for `ask` of at most `most` buffers and got `got`.
    ///
    /// A call for two buffers costs a third more than a call for one if there is no second datagram (815 ns
    /// against 616), so thin flows try it only occasionally. In a flood, the number of buffers then doubles
    /// with each full call.
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
            // If `ask` was small only because the arena was almost full, the number must not fall.
            self.appetite.set(ask.saturating_mul(2).min(most).max(appetite));
        } else if got < 2 || got.saturating_mul(4) <= ask {
            self.appetite.set((ask / 2).max(1));
        }
    }

    /// Datagrams dropped since the last call, from the kernel's running counter.
    pub(crate) fn drops_since(&self, counter: u32) -> u32 {
        counter.wrapping_sub(self.drops_seen.replace(counter))
    }

    /// Returns the TTL for the control message that makes a datagram leave with TTL `wanted` (0 is the
    /// kernel's default), or 0 if none is needed. If `may_set` is true, which requires that all gathered
    /// messages have been sent, a frequent TTL becomes the socket option.
    pub(crate) fn ttl_to_name(&self, wanted: u8, may_set: bool) -> u8 {
        /// Number of control messages that together cost about as much as one setsockopt(2).
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

impl From<UdpSocket> for OwnedFd {
    fn from(socket: UdpSocket) -> Self {
        socket.fd
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sets options that are valid before and after bind(2).
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

/// Sets a buffer size. SO_RCVBUFFORCE needs CAP_NET_ADMIN and may exceed net.core.rmem_max, which caps the
/// fallback.
pub(crate) fn set_buffer(fd: BorrowedFd<'_>, bytes: Option<usize>, force: i32, plain: i32) -> io::Result<()> {
    let Some(bytes) = bytes else { return Ok(()) };
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    sys::set_option(fd, libc::SOL_SOCKET, force, bytes)
        .or_else(|_| sys::set_option(fd, libc::SOL_SOCKET, plain, bytes))
}

/// Key of a socket in [`Sockets`]. Keys are dense and reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketId(pub u32);

impl SocketId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Default)]
pub struct Sockets {
    slots: Vec<Option<UdpSocket>>,
    /// Indices of empty slots.
    free: Vec<u32>,
}

impl Sockets {
    pub fn insert(&mut self, socket: UdpSocket) -> SocketId {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = Some(socket);
            return SocketId(index);
        }
        self.slots.push(Some(socket));
        #[expect(clippy::cast_possible_truncation, reason = "there are fewer than 2^31 descriptors")]
        SocketId(self.slots.len() as u32 - 1)
    }

    /// Removes a socket. Call [`crate::Tx::flush`] first, because queued datagrams of a removed socket are
    /// dropped.
    pub fn remove(&mut self, id: SocketId) -> Option<UdpSocket> {
        let socket = self.slots.get_mut(id.index())?.take();
        self.free.extend(socket.is_some().then_some(id.0));
        socket
    }

    pub fn get(&self, id: SocketId) -> Option<&UdpSocket> {
        self.slots.get(id.index())?.as_ref()
    }
}
