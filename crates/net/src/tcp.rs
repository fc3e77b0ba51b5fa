//! TCP sockets, non-blocking, made with as few calls as the data path allows: what a listener sets, the sockets that it
//! accepts inherit (TCP_NODELAY, SO_KEEPALIVE).

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

use crate::{ZonedIp, passed, rlimit, sys};

/// Pieces of one sendmsg(2) (UIO_MAXIOV).
const MOST_PIECES: usize = 1024;
/// A request of ioctl(2) (tcp(7), asm-generic/sockios.h) that the C library leaves out: whether an urgent byte is next.
pub const SIOCATMARK: libc::Ioctl = 0x8905;

/// How a listener is made. The default asks for nothing.
#[derive(Clone, Debug, Default)]
pub struct ListenOptions {
    /// SO_REUSEPORT: several workers, one port.
    pub reuse_port: bool,
    /// Connections that wait to be accepted; the kernel caps it at net.core.somaxconn. 0 asks for that cap.
    pub backlog: u32,
    /// TCP_NODELAY of accepted sockets.
    pub nodelay: bool,
    /// SO_KEEPALIVE of accepted sockets.
    pub keepalive: bool,
    /// TCP_NOTSENT_LOWAT of accepted sockets in bytes: once so much waits to be sent for the first time, a write takes no more.
    /// The kernel's own buffer grows to megabytes, which is seconds of stale datagrams behind a slow link.
    pub unsent_limit: Option<u32>,
    /// TCP_DEFER_ACCEPT in seconds: connections are accepted when their first bytes have come, or when about so much time is over.
    /// Meanwhile they are half-open to the kernel; once its queue of those is full, SYN cookies make up for it, which accept at
    /// once.
    pub defer_accept: Option<u32>,
    /// On an IPv6 address: also take IPv4 connections, whose addresses are told as IPv4 (ipv6(7), IPV6_V6ONLY off).
    pub dual_stack: bool,
    /// IP_FREEBIND: the address need not be this machine's yet.
    pub freebind: bool,
}

/// When the kernel asks a silent peer whether it is still there, and when it gives up. `None` is as the machine is configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpTimers {
    /// TCP_KEEPIDLE: silence before the first keepalive probe, in whole seconds, at most 32767.
    pub keepalive_idle: Option<Duration>,
    /// TCP_KEEPINTVL: time between two probes, in whole seconds, at most 32767.
    pub keepalive_interval: Option<Duration>,
    /// TCP_KEEPCNT: probes without an answer that end the connection, at most 127.
    pub keepalive_count: Option<u32>,
    /// TCP_USER_TIMEOUT: bytes without an acknowledgement for so long end the connection.
    pub user_timeout: Option<Duration>,
}

impl TcpTimers {
    /// The same, with Linux's defaults (tcp(7)) for what is not set: for a socket that had others before.
    #[must_use]
    pub fn or_defaults(&self) -> Self {
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

/// A listening, non-blocking socket. IPv6 listeners are IPV6_V6ONLY unless [`ListenOptions::dual_stack`] is asked for.
#[derive(Debug)]
pub struct TcpListener {
    fd: OwnedFd,
    local: SocketAddr,
}

impl TcpListener {
    /// Binds (with SO_REUSEADDR, so that a restart does not wait for TIME_WAIT) and listens. Port 0 lets the kernel choose.
    ///
    /// # Errors
    /// Those of socket(2), setsockopt(2), bind(2) and listen(2).
    pub fn bind(address: SocketAddr, options: &ListenOptions) -> io::Result<Self> {
        let socket = bound(address, options)?;
        Self::listen(socket.into(), options)
    }

    /// Takes a listener that somebody else has bound. What has to be said before that, SO_REUSEPORT and IPV6_V6ONLY, stays as it is.
    pub(crate) fn adopt(descriptor: OwnedFd, options: &ListenOptions) -> io::Result<Self> {
        let local = sys::local_address(descriptor.as_fd())?;
        passed::check_families(&SockRef::from(&descriptor), local, options.dual_stack)?;
        SockRef::from(&descriptor).set_nonblocking(true)?;
        Self::listen(descriptor, options)
    }

    fn listen(fd: OwnedFd, options: &ListenOptions) -> io::Result<Self> {
        let backlog = if options.backlog == 0 { i32::MAX } else { options.backlog.cast_signed().max(1) };
        let this = Self { local: sys::local_address(fd.as_fd())?, fd };
        this.set_inherited(options.nodelay, options.keepalive)?;
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

    /// Takes over a listening socket that another process has made, with the clients that wait in it.
    ///
    /// # Errors
    /// `InvalidInput` for what is no listening TCP socket; those of getsockname(2).
    pub fn take_over(fd: OwnedFd) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        let found = (option(libc::SO_TYPE)?, option(libc::SO_PROTOCOL)?, option(libc::SO_ACCEPTCONN)?);
        if found != (libc::SOCK_STREAM, libc::IPPROTO_TCP, 1) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no listening TCP socket"));
        }
        Ok(Self { local: sys::local_address(fd.as_fd())?, fd })
    }

    /// Checks that a listener of these options could bind, and returns its address: the kernel chooses one for port 0. Without
    /// SO_REUSEPORT, so that a second program on the same port hears of it instead of silently sharing it. With
    /// [`ListenOptions::dual_stack`] the IPv4 port has to be free too.
    ///
    /// # Errors
    /// Those of socket(2), setsockopt(2) and bind(2).
    pub fn probe(address: SocketAddr, options: &ListenOptions) -> io::Result<SocketAddr> {
        let alone = ListenOptions { reuse_port: false, ..options.clone() };
        sys::local_address(bound(address, &alone)?.as_fd())
    }

    /// What accepted sockets inherit from now on.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_inherited(&self, nodelay: bool, keepalive: bool) -> io::Result<()> {
        set_tcp_nodelay(&self.fd, nodelay)?;
        Ok(set_socket_keepalive(&self.fd, keepalive)?)
    }

    /// Timers of the sockets that are accepted from now on.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_timers(&self, timers: &TcpTimers) -> io::Result<()> {
        timers.set(self.fd.as_fd())
    }

    /// Takes one connection; `None` when none waits. A connection that was reset while it waited counts as none.
    ///
    /// # Errors
    /// Those of accept4(2): EMFILE, ENFILE, ENOBUFS and ENOMEM ask for a pause.
    pub fn accept(&self) -> io::Result<Option<(TcpSocket, SocketAddr)>> {
        let Some((fd, peer)) = accept(self.fd.as_fd())? else { return Ok(None) };
        let peer = peer.and_then(|peer| sys::address(peer, false).ok());
        Ok(peer.map(|peer| (TcpSocket { fd }, peer)))
    }

    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// accept4(2) with the errors of a listening socket sorted: `None` when there is no connection to have.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<(OwnedFd, Option<SocketAddrAny>)>> {
    rlimit::room_for_one(listener)?;
    match acceptfrom_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok((fd, peer)) => rlimit::ours(fd).map(|fd| Some((fd, peer))),
        // accept(2): network errors of the new connection are reported here and are to be treated like EAGAIN.
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
    let socket = rlimit::ours(socket)?;
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

fn begin(socket: Socket, address: SocketAddr) -> io::Result<TcpSocket> {
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpSocket { fd: socket.into() }),
        Err(error) => Err(error.into()),
    }
}

/// How an outgoing socket is made. The default asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Source address; the port stays the kernel's choice, made at connect time (IP_BIND_ADDRESS_NO_PORT), so that ports run
    /// out per destination and not per source address.
    pub source: Option<ZonedIp>,
    /// SO_BINDTODEVICE.
    pub device: Option<String>,
    /// SO_MARK; needs CAP_NET_ADMIN.
    pub mark: Option<u32>,
    /// IP_TRANSPARENT: `source` may be an address of somebody else; needs CAP_NET_ADMIN.
    pub transparent: bool,
}

/// A connected or connecting, non-blocking socket: TCP's, or one of [`crate::unix`], where what only TCP has (TCP_NODELAY,
/// a reset, addresses) fails or does nothing. Dropping it closes it.
#[derive(Debug)]
pub struct TcpSocket {
    fd: OwnedFd,
}

impl TcpSocket {
    /// Begins to connect. Writability tells that it is done, an error event that it failed: ask [`TcpSocket::take_error`].
    ///
    /// # Errors
    /// Those of socket(2), setsockopt(2), bind(2), and of connect(2) but EINPROGRESS; `AddrNotAvailable` for a source of the
    /// other family.
    pub fn connect(address: SocketAddr, options: &ConnectOptions) -> io::Result<Self> {
        if options.source.is_some_and(|source| source.ip().is_ipv6() != address.is_ipv6()) {
            return Err(io::Error::new(
                io::ErrorKind::AddrNotAvailable,
                "the source address and the target are of different families",
            ));
        }
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        let socket = rlimit::ours(socket)?;
        if let Some(device) = &options.device {
            socket.bind_device(Some(device.as_bytes()))?;
        }
        if let Some(mark) = options.mark {
            socket.set_mark(mark)?;
        }
        if options.transparent {
            let (level, name) = if address.is_ipv6() {
                (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT)
            } else {
                (libc::IPPROTO_IP, libc::IP_TRANSPARENT)
            };
            sys::set_option(socket.as_fd(), level, name, 1)?;
        }
        if let Some(source) = options.source {
            sys::set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
            socket.bind(&source.at(0).into())?;
        }
        begin(socket, address)
    }

    /// Begins to connect, as [`TcpSocket::connect`], from the very address and port on which a listener of ours waits. Both need
    /// SO_REUSEPORT for that: SO_REUSEADDR alone does not get past a socket that listens (Linux, inet_csk_bind_conflict). With TCP_NODELAY,
    /// since the first answer may be the request of a protocol that waits for small messages, and with SO_KEEPALIVE.
    ///
    /// # Errors
    /// As for [`TcpSocket::connect`]; `AddrNotAvailable` where this very connection exists already or is in TIME_WAIT.
    pub fn connect_from(local: SocketAddr, address: SocketAddr) -> io::Result<Self> {
        let socket = bound(local, &ListenOptions { reuse_port: true, ..ListenOptions::default() })?;
        socket.set_tcp_nodelay(true)?;
        socket.set_keepalive(true)?;
        begin(socket, address)
    }

    /// Receives; `Ok(0)` is the end of the stream (or an empty `buffer`).
    ///
    /// # Errors
    /// Those of recv(2); `WouldBlock` when nothing waits.
    #[inline]
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&self.fd, buffer, RecvFlags::empty())?.0)
    }

    /// As [`TcpSocket::read`], but what it shows stays to be read (MSG_PEEK).
    ///
    /// # Errors
    /// Those of recv(2); `WouldBlock` when nothing waits.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&self.fd, buffer, RecvFlags::PEEK)?.0)
    }

    /// Sends what fits; never raises SIGPIPE.
    ///
    /// # Errors
    /// Those of send(2); `WouldBlock` when nothing fits.
    #[inline]
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.fd, bytes, SendFlags::NOSIGNAL)?)
    }

    /// Sends several pieces in one call, as far as they fit; of more than 1024 pieces the first 1024. Never raises SIGPIPE, unlike
    /// writev(2). Where `more` follows at once, the kernel keeps the last, unfilled segment for it (MSG_MORE), TCP_NODELAY or not.
    ///
    /// # Errors
    /// Those of sendmsg(2); `WouldBlock` when nothing fits.
    #[inline]
    pub fn write_vectored(&self, pieces: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
        let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
        let pieces = &pieces[..pieces.len().min(MOST_PIECES)];
        Ok(sendmsg(&self.fd, pieces, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Sends FIN once all that was written has left; reading goes on.
    ///
    /// # Errors
    /// Those of shutdown(2); ENOTCONN when the other side is gone.
    pub fn shutdown_write(&self) -> io::Result<()> {
        Ok(shutdown(&self.fd, Shutdown::Write)?)
    }

    /// Closes with RST instead of FIN (SO_LINGER with a time of 0, socket(7)); what is unsent is lost.
    pub fn reset(self) {
        // Where it fails, the close that follows sends FIN.
        let _ = set_socket_linger(&self.fd, Some(Duration::ZERO));
    }

    /// Sets its timers; SO_KEEPALIVE itself is another option.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_timers(&self, timers: &TcpTimers) -> io::Result<()> {
        timers.set(self.fd.as_fd())
    }

    /// SIOCATMARK (tcp(7)): whether the next byte to be read is an urgent one. False where it cannot be told.
    pub(crate) fn is_at_urgent_byte(&self) -> bool {
        ioctl_int(self.fd.as_fd(), SIOCATMARK).is_ok_and(|is_there| is_there != 0)
    }

    /// Bytes that the kernel has taken to be sent, whether they are on their way, acknowledged or neither. Counted from somewhere: only
    /// differences mean something. While others write it may say less than there is, never more.
    ///
    /// # Errors
    /// Those of getsockopt(2) and ioctl(2).
    pub fn written(&self) -> io::Result<u64> {
        // In this order: what is acknowledged in between is missed, and not counted twice.
        let acknowledged = self.acknowledged()?;
        // SIOCOUTQ of tcp(7).
        let queued = ioctl_int(self.fd.as_fd(), libc::TIOCOUTQ)?;
        Ok(acknowledged + u64::from(queued.unsigned_abs()))
    }

    /// TCP_INFO's tcpi_bytes_acked (Linux 4.1), behind what the C library's structure has of it.
    fn acknowledged(&self) -> io::Result<u64> {
        const AT: usize = 120;
        let mut info = [0_u8; 256];
        let told = sys::get_option_bytes(self.fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
        let told = told.get(AT..).and_then(|rest| rest.first_chunk());
        told.map(|bytes| u64::from_ne_bytes(*bytes)).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// SO_ERROR: why a connect failed or a connection broke, if it did; asking clears it.
    ///
    /// # Errors
    /// Those of getsockopt(2), and the error itself.
    pub fn take_error(&self) -> io::Result<()> {
        Ok(socket_error(&self.fd)??)
    }

    /// This side's address.
    ///
    /// # Errors
    /// Those of getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        sys::local_address(self.fd.as_fd())
    }

    /// The other side's address.
    ///
    /// # Errors
    /// Those of getpeername(2).
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

    /// Nothing is kept back.
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

/// Whether an error says that the process or the machine is out of descriptors or memory, so that the same call may succeed
/// later.
pub fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// ioctl(2) with a request that writes an integer.
fn ioctl_int(fd: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<libc::c_int> {
    let mut value = 0;
    // SAFETY: the requests of this file write one integer, and `value` is one.
    sys::check(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) })?;
    Ok(value)
}
