//! Non-blocking TCP sockets. To save system calls, accepted sockets inherit TCP_NODELAY, SO_KEEPALIVE and
//! timers from the listener.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{
        RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrAny, SocketFlags, acceptfrom_with,
        getpeername, recv, send, sendmsg, shutdown,
        sockopt::{set_socket_keepalive, set_socket_linger, set_tcp_nodelay, socket_error},
    },
};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{passed, rlimit, sys};

/// Maximum number of buffers per sendmsg(2) (UIO_MAXIOV).
const MOST_PIECES: usize = 1024;
/// ioctl(2) request (tcp(7), asm-generic/sockios.h) missing from the C library: tests for an urgent byte at
/// the read position.
pub const SIOCATMARK: libc::Ioctl = 0x8905;

/// Listener options; all off by default.
#[derive(Clone, Debug, Default)]
pub struct ListenOptions {
    /// SO_REUSEPORT, for several workers on one port.
    pub reuse_port: bool,
    /// Maximum number of connections waiting for accept, capped at net.core.somaxconn; 0 selects that cap.
    pub backlog: u32,
    /// TCP_NODELAY of accepted sockets.
    pub nodelay: bool,
    /// SO_KEEPALIVE of accepted sockets.
    pub keepalive: bool,
    /// TCP_NOTSENT_LOWAT of accepted sockets in bytes: a write fails while this much is unsent. Otherwise the
    /// send buffer grows to megabytes, and a slow link delivers datagrams that are seconds old.
    pub unsent_limit: Option<u32>,
    /// TCP_DEFER_ACCEPT in seconds: a connection can be accepted once its first bytes arrive, or after about
    /// this time. Until then it occupies the SYN queue. If the queue is full, SYN cookies take over and
    /// connections can be accepted immediately.
    pub defer_accept: Option<u32>,
    /// IPV6_V6ONLY off: an IPv6 listener also accepts IPv4 and reports IPv4 addresses (ipv6(7)).
    pub dual_stack: bool,
    /// IP_FREEBIND: the address may be configured later.
    pub freebind: bool,
    /// Timers of accepted sockets.
    pub timers: TcpTimers,
}

/// Keepalive and retransmission timeouts; `None` keeps the system's setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpTimers {
    /// TCP_KEEPIDLE: idle time before the first probe, in whole seconds, at most 32,767.
    pub keepalive_idle: Option<Duration>,
    /// TCP_KEEPINTVL: time between probes, in whole seconds, at most 32,767.
    pub keepalive_interval: Option<Duration>,
    /// TCP_KEEPCNT: unanswered probes before the connection ends, at most 127.
    pub keepalive_count: Option<u32>,
    /// TCP_USER_TIMEOUT: time for which sent data may stay unacknowledged, in milliseconds.
    pub user_timeout: Option<Duration>,
}

impl TcpTimers {
    /// Fills in Linux's defaults (tcp(7)), to reset a socket that had other timers.
    fn or_defaults(&self) -> Self {
        Self {
            keepalive_idle: self.keepalive_idle.or(Some(Duration::from_secs(7200))),
            keepalive_interval: self.keepalive_interval.or(Some(Duration::from_secs(75))),
            keepalive_count: self.keepalive_count.or(Some(9)),
            user_timeout: self.user_timeout.or(Some(Duration::ZERO)),
        }
    }

    fn set(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let seconds = |time: Duration| i32::try_from(time.as_secs()).unwrap_or(i32::MAX);
        let millis = |time: Duration| i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
        let count = |count: u32| i32::try_from(count).unwrap_or(i32::MAX);
        let options = [
            (libc::TCP_KEEPIDLE, self.keepalive_idle.map(seconds)),
            (libc::TCP_KEEPINTVL, self.keepalive_interval.map(seconds)),
            (libc::TCP_KEEPCNT, self.keepalive_count.map(count)),
            (libc::TCP_USER_TIMEOUT, self.user_timeout.map(millis)),
        ];
        for (name, value) in options {
            if let Some(value) = value {
                sys::set_option(fd, libc::IPPROTO_TCP, name, value)?;
            }
        }
        Ok(())
    }
}

/// Listening, non-blocking socket. IPv6 listeners are IPV6_V6ONLY unless [`ListenOptions::dual_stack`] is
/// set.
#[derive(Debug)]
pub struct TcpListener {
    fd: OwnedFd,
    local: SocketAddr,
}

impl TcpListener {
    /// Binds with SO_REUSEADDR, so that a restart does not wait for TIME_WAIT, and listens. Port 0 lets the
    /// kernel choose.
    pub fn bind(address: SocketAddr, options: &ListenOptions) -> io::Result<Self> {
        let socket = bound(address, options)?;
        Self::listen(socket.into(), options)
    }

    /// Takes over a listener bound by the service manager. SO_REUSEPORT and IPV6_V6ONLY cannot change after
    /// bind(2), so they stay as they are.
    pub(crate) fn adopt(descriptor: OwnedFd, options: &ListenOptions) -> io::Result<Self> {
        let local = sys::local_address(descriptor.as_fd())?;
        passed::check_families(&SockRef::from(&descriptor), local, options.dual_stack)?;
        SockRef::from(&descriptor).set_nonblocking(true)?;
        Self::listen(descriptor, options)
    }

    fn listen(fd: OwnedFd, options: &ListenOptions) -> io::Result<Self> {
        let backlog = if options.backlog == 0 { i32::MAX } else { options.backlog.cast_signed().max(1) };
        let this = Self { local: sys::local_address(fd.as_fd())?, fd };
        this.set_options(options)?;
        options.timers.set(this.as_fd())?;
        if let Some(limit) = options.unsent_limit {
            let limit = i32::try_from(limit).unwrap_or(i32::MAX);
            sys::set_option(this.fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, limit)?;
        }
        if let Some(seconds) = options.defer_accept {
            let seconds = i32::try_from(seconds).unwrap_or(i32::MAX);
            sys::set_option(this.fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, seconds)?;
        }
        rustix::net::listen(&this.fd, backlog)?;
        Ok(this)
    }

    /// Takes over a listener from another process, including its waiting connections. `InvalidInput` if it is
    /// not a listening TCP socket.
    pub fn take_over(fd: OwnedFd) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        let found = (option(libc::SO_TYPE)?, option(libc::SO_PROTOCOL)?, option(libc::SO_ACCEPTCONN)?);
        if found != (libc::SOCK_STREAM, libc::IPPROTO_TCP, 1) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a listening TCP socket"));
        }
        Ok(Self { local: sys::local_address(fd.as_fd())?, fd })
    }

    /// Binds without listening, and returns the address.
    pub(crate) fn probe(address: SocketAddr, options: &ListenOptions) -> io::Result<SocketAddr> {
        sys::local_address(bound(address, options)?.as_fd())
    }

    /// Sets TCP_NODELAY, SO_KEEPALIVE and timers of sockets that are accepted after this call. Timers without
    /// a value get Linux's default, because the listener may have had others.
    pub fn set_inherited(&self, options: &ListenOptions) -> io::Result<()> {
        self.set_options(options)?;
        options.timers.or_defaults().set(self.as_fd())
    }

    fn set_options(&self, options: &ListenOptions) -> io::Result<()> {
        set_tcp_nodelay(&self.fd, options.nodelay)?;
        Ok(set_socket_keepalive(&self.fd, options.keepalive)?)
    }

    /// Accepts a connection; `None` if none is waiting or it has been reset in the meantime. After EMFILE,
    /// ENFILE, ENOBUFS or ENOMEM, pause before retrying.
    pub fn accept(&self) -> io::Result<Option<(TcpSocket, SocketAddr)>> {
        let Some((fd, peer)) = accept(self.fd.as_fd())? else { return Ok(None) };
        let peer = peer.and_then(|peer| sys::address(peer, false).ok());
        Ok(peer.map(|peer| (TcpSocket { fd }, peer)))
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// accept4(2); `None` if no connection is available.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<(OwnedFd, Option<SocketAddrAny>)>> {
    rlimit::room_for_one(listener)?;
    match acceptfrom_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok((fd, peer)) => rlimit::unreserved(fd).map(|fd| Some((fd, peer))),
        // Pending network errors of the new connection must be treated like EAGAIN (accept(2)).
        Err(
            Errno::AGAIN
            | Errno::INTR
            | Errno::CONNABORTED
            | Errno::PROTO
            | Errno::NETDOWN
            | Errno::NOPROTOOPT
            | Errno::HOSTDOWN
            | Errno::NONET
            | Errno::HOSTUNREACH
            | Errno::OPNOTSUPP
            | Errno::NETUNREACH,
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn bound(address: SocketAddr, options: &ListenOptions) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    let socket = rlimit::unreserved(socket)?;
    socket.set_reuse_address(true)?;
    if options.reuse_port {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(!options.dual_stack)?;
    }
    if options.freebind {
        set_freebind(&socket, address)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

pub(crate) fn set_freebind(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    if address.is_ipv6() { socket.set_freebind_v6(true) } else { socket.set_freebind_v4(true) }
}

/// Sets the options of outgoing sockets that affect the route.
pub(crate) fn set_outgoing(
    socket: &Socket,
    address: SocketAddr,
    device: Option<&str>,
    mark: Option<u32>,
    transparent: bool,
) -> io::Result<()> {
    if let Some(device) = device {
        socket.bind_device(Some(device.as_bytes()))?;
    }
    if let Some(mark) = mark {
        socket.set_mark(mark)?;
    }
    match (transparent, address.is_ipv6()) {
        (true, false) => socket.set_ip_transparent_v4(true),
        (true, true) => socket.set_ip_transparent_v6(true),
        (false, _) => Ok(()),
    }
}

fn begin(socket: Socket, address: SocketAddr) -> io::Result<TcpSocket> {
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpSocket { fd: socket.into() }),
        Err(error) => Err(error.into()),
    }
}

/// Options of outgoing sockets; all off by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Source address with port 0. The kernel chooses the port at connect time (IP_BIND_ADDRESS_NO_PORT), so
    /// ports are limited per destination and not per source address.
    pub source: Option<SocketAddr>,
    /// SO_BINDTODEVICE.
    pub device: Option<String>,
    /// SO_MARK; needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// IP_TRANSPARENT: `source` need not belong to this machine; needs CAP_NET_ADMIN.
    pub transparent: bool,
}

/// Connected or connecting, non-blocking TCP or Unix stream socket. On Unix sockets, TCP features
/// (TCP_NODELAY, reset, addresses) fail or do nothing. Dropping it closes it.
#[derive(Debug)]
pub struct TcpSocket {
    fd: OwnedFd,
}

impl TcpSocket {
    /// Starts connecting. Writability means success, an error event means failure: see
    /// [`TcpSocket::take_error`]. `AddrNotAvailable` if the source belongs to the other address family.
    pub fn connect(address: SocketAddr, options: &ConnectOptions) -> io::Result<Self> {
        if options.source.is_some_and(|source| source.is_ipv6() != address.is_ipv6()) {
            return Err(io::Error::new(
                io::ErrorKind::AddrNotAvailable,
                "the source address and the target have different address families",
            ));
        }
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        let socket = rlimit::unreserved(socket)?;
        set_outgoing(&socket, address, options.device.as_deref(), options.mark, options.transparent)?;
        if let Some(source) = options.source {
            sys::set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
            socket.bind(&source.into())?;
        }
        begin(socket, address)
    }

    /// Starts connecting from the address and port of one of our own listeners. Both sockets need
    /// SO_REUSEPORT: SO_REUSEADDR does not allow a bind next to a listening socket (Linux,
    /// inet_csk_bind_conflict). Sets SO_KEEPALIVE, and also TCP_NODELAY, because the first data may be a
    /// request of a protocol with small messages. `AddrNotAvailable` if this connection exists already or is
    /// in TIME_WAIT.
    pub fn connect_from(local: SocketAddr, address: SocketAddr) -> io::Result<Self> {
        let socket = bound(local, &ListenOptions { reuse_port: true, ..ListenOptions::default() })?;
        socket.set_tcp_nodelay(true)?;
        socket.set_keepalive(true)?;
        begin(socket, address)
    }

    /// Receives; `Ok(0)` means end of stream (or an empty `buffer`), `WouldBlock` an empty queue.
    #[inline]
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&self.fd, buffer, RecvFlags::empty())?.0)
    }

    /// Like [`TcpSocket::read`], but leaves the bytes in the queue (MSG_PEEK).
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&self.fd, buffer, RecvFlags::PEEK)?.0)
    }

    /// Sends as much as fits, without SIGPIPE; `WouldBlock` if nothing fits.
    #[inline]
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.fd, bytes, SendFlags::NOSIGNAL)?)
    }

    /// Sends up to 1,024 buffers in one call, as much as fits, without SIGPIPE; `WouldBlock` if nothing fits.
    /// `more` means that another write follows: the kernel holds back an incomplete last segment (MSG_MORE),
    /// even with TCP_NODELAY.
    #[inline]
    pub fn write_vectored(&self, pieces: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
        let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
        let pieces = &pieces[..pieces.len().min(MOST_PIECES)];
        Ok(sendmsg(&self.fd, pieces, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Sends FIN after all written data; reading stays possible. ENOTCONN if the connection is gone.
    pub fn shutdown_write(&self) -> io::Result<()> {
        Ok(shutdown(&self.fd, Shutdown::Write)?)
    }

    /// Closes with RST (SO_LINGER of 0, socket(7)) and drops unsent data.
    pub fn reset(self) {
        // If this fails, close sends FIN.
        let _ = set_socket_linger(&self.fd, Some(Duration::ZERO));
    }

    /// Sets the timers; SO_KEEPALIVE itself is a separate option.
    pub fn set_timers(&self, timers: &TcpTimers) -> io::Result<()> {
        timers.set(self.fd.as_fd())
    }

    /// SIOCATMARK (tcp(7)): true if the next byte is urgent.
    pub fn is_at_urgent_byte(&self) -> bool {
        ioctl_int(self.fd.as_fd(), SIOCATMARK).is_ok_and(|is_there| is_there != 0)
    }

    /// Number of bytes that the kernel has accepted so far, acknowledged or not, plus an unknown constant.
    /// During concurrent writes the result may be too low, never too high.
    pub fn written(&self) -> io::Result<u64> {
        // The order matters: an acknowledgement that arrives in between is missed rather than counted twice.
        let acknowledged = self.acknowledged()?;
        // SIOCOUTQ of tcp(7).
        let queued = ioctl_int(self.fd.as_fd(), libc::TIOCOUTQ)?;
        Ok(acknowledged + u64::from(queued.unsigned_abs()))
    }

    /// tcpi_bytes_acked of TCP_INFO (Linux 4.1), beyond the end of the C library's structure.
    fn acknowledged(&self) -> io::Result<u64> {
        self.info::<8, 120>().map(u64::from_ne_bytes)
    }

    /// Smoothed round trip in microseconds: tcpi_rtt of TCP_INFO.
    pub fn round_trip_us(&self) -> io::Result<u32> {
        self.info::<4, 68>().map(u32::from_ne_bytes)
    }

    /// Field of TCP_INFO with `LEN` bytes at the offset `AT`.
    fn info<const LEN: usize, const AT: usize>(&self) -> io::Result<[u8; LEN]> {
        let mut info = [0_u8; 256];
        let told = sys::get_option_bytes(self.fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
        let field = told.get(AT..).and_then(|rest| rest.first_chunk());
        field.copied().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Returns and clears SO_ERROR, the reason for a failed or broken connection.
    pub fn take_error(&self) -> io::Result<()> {
        Ok(socket_error(&self.fd)??)
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        sys::local_address(self.fd.as_fd())
    }

    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let peer = getpeername(&self.fd)?.ok_or(io::ErrorKind::Unsupported)?;
        sys::address(peer, false)
    }
}

impl AsFd for TcpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl io::Write for &TcpSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (*self).write(bytes)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        (*self).write_vectored(pieces, false)
    }

    /// Writes are unbuffered.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<OwnedFd> for TcpSocket {
    /// Takes a connected, non-blocking stream socket.
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

/// True if descriptors or memory are exhausted, so that the call may succeed later.
pub fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

fn ioctl_int(fd: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<libc::c_int> {
    let mut value = 0;
    // SAFETY: each ioctl used in this file writes one integer, and `value` is one.
    sys::check(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) })?;
    Ok(value)
}
