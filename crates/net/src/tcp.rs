//! TCP sockets, non-blocking, made with as few calls as the data path allows: what a listener sets, the sockets that it
//! accepts inherit (TCP_NODELAY, SO_KEEPALIVE).

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    time::Duration,
};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{
    ZonedIp, passed, rlimit,
    sys::{self, RawAddress},
};

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
        // SAFETY: no pointers.
        sys::check(unsafe { libc::listen(this.fd.as_raw_fd(), backlog) })?;
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

    /// Whether nobody else has this address, and the port that the kernel would choose for port 0. Without SO_REUSEPORT,
    /// so that a second program on the same port is told so instead of silently sharing it.
    ///
    /// # Errors
    /// Those of socket(2), setsockopt(2) and bind(2).
    pub fn probe(address: SocketAddr) -> io::Result<SocketAddr> {
        Self::probe_as(address, &ListenOptions::default())
    }

    /// As [`TcpListener::probe`], for a listener of these options. With [`ListenOptions::dual_stack`] the IPv4 port has to be free too.
    ///
    /// # Errors
    /// As for [`TcpListener::probe`].
    pub fn probe_as(address: SocketAddr, options: &ListenOptions) -> io::Result<SocketAddr> {
        let alone = ListenOptions { reuse_port: false, ..options.clone() };
        sys::local_address(bound(address, &alone)?.as_fd())
    }

    /// What accepted sockets inherit from now on.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_inherited(&self, nodelay: bool, keepalive: bool) -> io::Result<()> {
        let fd = self.fd.as_fd();
        sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, nodelay.into())?;
        sys::set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, keepalive.into())
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
        let mut raw = RawAddress::empty();
        let mut len = RawAddress::SIZE;
        let Some(fd) = accept(self.fd.as_fd(), (&raw mut raw).cast(), &raw mut len)? else { return Ok(None) };
        Ok(raw.get().map(|peer| (TcpSocket { fd }, peer)))
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

/// accept4(2) with the errors of a listening socket sorted: `None` when there is no connection to have. `name` and `len` are
/// null, or describe a [`RawAddress`].
pub(crate) fn accept(
    listener: BorrowedFd<'_>,
    name: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> io::Result<Option<OwnedFd>> {
    rlimit::room_for_one(listener)?;
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the pointers are null or describe memory of the caller's; the kernel writes no more than `len`.
    match sys::check(unsafe { libc::accept4(listener.as_raw_fd(), name, len, flags) }) {
        // SAFETY: accept4 gave this descriptor to nobody else.
        Ok(fd) => rlimit::ours(unsafe { OwnedFd::from_raw_fd(fd) }).map(Some),
        Err(error) => match error.raw_os_error() {
            // accept(2): network errors of the new connection are reported here and are to be treated like EAGAIN.
            Some(
                libc::EAGAIN
                | libc::EINTR
                | libc::ECONNABORTED
                | libc::EPROTO
                | libc::ENETDOWN
                | libc::ENOPROTOOPT
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::EHOSTUNREACH
                | libc::EOPNOTSUPP
                | libc::ENETUNREACH,
            ) => Ok(None),
            _ => Err(error),
        },
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
    let mut raw = RawAddress::empty();
    let len = raw.set(address);
    let fd: OwnedFd = socket.into();
    // SAFETY: the pointer and length describe `raw`.
    match sys::check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const raw).cast(), len) }) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(TcpSocket { fd }),
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
    /// SO_REUSEPORT for that: SO_REUSEADDR alone does not get past a socket that listens (Linux, inet_csk_bind_conflict).
    ///
    /// # Errors
    /// As for [`TcpSocket::connect`]; `AddrNotAvailable` where this very connection exists already or is in TIME_WAIT.
    pub fn connect_from(local: SocketAddr, address: SocketAddr) -> io::Result<Self> {
        begin(bound(local, &ListenOptions { reuse_port: true, ..ListenOptions::default() })?, address)
    }

    /// Receives; `Ok(0)` is the end of the stream (or an empty `buffer`).
    ///
    /// # Errors
    /// Those of recv(2); `WouldBlock` when nothing waits.
    #[inline]
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the pointer and length describe `buffer`.
        size(unsafe { libc::recv(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) })
    }

    /// As [`TcpSocket::read`], but what it shows stays to be read (MSG_PEEK).
    ///
    /// # Errors
    /// Those of recv(2); `WouldBlock` when nothing waits.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the pointer and length describe `buffer`.
        size(unsafe {
            libc::recv(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_PEEK)
        })
    }

    /// Sends what fits; never raises SIGPIPE.
    ///
    /// # Errors
    /// Those of send(2); `WouldBlock` when nothing fits.
    #[inline]
    pub fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the pointer and length describe `bytes`.
        size(unsafe {
            libc::send(self.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL)
        })
    }

    /// Sends several pieces in one call, as far as they fit; of more than 1024 pieces the first 1024. Never raises
    /// SIGPIPE, unlike writev(2).
    ///
    /// # Errors
    /// Those of sendmsg(2); `WouldBlock` when nothing fits.
    #[inline]
    pub fn write_vectored(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_pieces(pieces, libc::MSG_NOSIGNAL)
    }

    /// As [`TcpSocket::write_vectored`] where more follows at once: the kernel keeps the last, unfilled segment for it (MSG_MORE),
    /// TCP_NODELAY or not.
    ///
    /// # Errors
    /// Those of sendmsg(2); `WouldBlock` when nothing fits.
    #[inline]
    pub fn write_vectored_more(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_pieces(pieces, libc::MSG_NOSIGNAL | libc::MSG_MORE)
    }

    #[inline]
    fn send_pieces(&self, pieces: &[IoSlice<'_>], flags: libc::c_int) -> io::Result<usize> {
        // SAFETY: all members are integers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // `IoSlice` has the layout of `iovec`, as its documentation promises; the kernel only reads them.
        message.msg_iov = pieces.as_ptr().cast_mut().cast();
        message.msg_iovlen = pieces.len().min(MOST_PIECES) as _;
        // SAFETY: `message` describes `pieces`, which outlive the call.
        size(unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const message, flags) })
    }

    /// Sends FIN once all that was written has left; reading goes on.
    ///
    /// # Errors
    /// Those of shutdown(2); ENOTCONN when the other side is gone.
    pub fn shutdown_write(&self) -> io::Result<()> {
        // SAFETY: no pointers.
        sys::check(unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_WR) }).map(|_| ())
    }

    /// Closes with RST instead of FIN (SO_LINGER with a time of 0, socket(7)); what is unsent is lost.
    pub fn reset(self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the pointer and length describe `linger`. Where it fails, the close that follows sends FIN.
        unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                std::mem::size_of::<libc::linger>() as u32,
            )
        };
    }

    /// TCP_NODELAY: also pushes out what Nagle's algorithm holds back.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        sys::set_option(self.fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, on.into())
    }

    /// Sets its timers; keepalive itself is [`TcpSocket::set_keepalive`].
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_timers(&self, timers: &TcpTimers) -> io::Result<()> {
        timers.set(self.fd.as_fd())
    }

    /// SO_KEEPALIVE, with the machine's own times (tcp(7)).
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_keepalive(&self, on: bool) -> io::Result<()> {
        sys::set_option(self.fd.as_fd(), libc::SOL_SOCKET, libc::SO_KEEPALIVE, on.into())
    }

    /// SO_OOBINLINE: an urgent byte stays in the stream. May be set when one is announced, before it is read.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_oob_inline(&self, on: bool) -> io::Result<()> {
        sys::set_option(self.fd.as_fd(), libc::SOL_SOCKET, libc::SO_OOBINLINE, on.into())
    }

    /// SIOCATMARK (tcp(7)): whether the next byte to be read is an urgent one. False where it cannot be told.
    pub fn is_at_urgent_byte(&self) -> bool {
        let mut is_there: libc::c_int = 0;
        // SAFETY: SIOCATMARK writes an integer.
        let asked = sys::check(unsafe { libc::ioctl(self.fd.as_raw_fd(), SIOCATMARK, &raw mut is_there) });
        asked.is_ok() && is_there != 0
    }

    /// Bytes that the kernel has taken to be sent, whether they are on their way, acknowledged or neither. Counted from somewhere: only
    /// differences mean something. While others write it may say less than there is, never more.
    ///
    /// # Errors
    /// Those of getsockopt(2) and ioctl(2).
    pub fn written(&self) -> io::Result<u64> {
        // In this order: what is acknowledged in between is missed, and not counted twice.
        let acknowledged = self.acknowledged()?;
        let mut queued: libc::c_int = 0;
        // SAFETY: SIOCOUTQ (tcp(7)) writes an integer.
        sys::check(unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) })?;
        Ok(acknowledged + u64::from(queued.unsigned_abs()))
    }

    /// TCP_INFO's tcpi_bytes_acked (Linux 4.1), behind what the C library's structure has of it.
    fn acknowledged(&self) -> io::Result<u64> {
        const AT: usize = 120;
        const MOST: u32 = 256;
        let mut info = [0_u8; MOST as usize];
        let mut len = MOST;
        // SAFETY: the pointers and length describe `info`.
        sys::check(unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        })?;
        let told = info[..len as usize].get(AT..).and_then(|rest| rest.first_chunk());
        told.map(|bytes| u64::from_ne_bytes(*bytes)).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// TCP_USER_TIMEOUT: how long sent data may stay unacknowledged before the connection is dropped.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_user_timeout(&self, timeout: Duration) -> io::Result<()> {
        let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        sys::set_option(self.fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, ms)
    }

    /// SO_ERROR: why a connect failed or a connection broke, if it did; asking clears it.
    ///
    /// # Errors
    /// Those of getsockopt(2), and the error itself.
    pub fn take_error(&self) -> io::Result<()> {
        let mut error: libc::c_int = 0;
        let mut len = std::mem::size_of::<libc::c_int>() as u32;
        // SAFETY: the pointers and length describe `error`.
        sys::check(unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ERROR,
                (&raw mut error).cast(),
                &raw mut len,
            )
        })?;
        if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
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
        let mut raw = RawAddress::empty();
        let mut len = RawAddress::SIZE;
        // SAFETY: the pointer and length describe `raw`; the kernel writes no more than `len`.
        sys::check(unsafe { libc::getpeername(self.fd.as_raw_fd(), (&raw mut raw).cast(), &raw mut len) })?;
        raw.get().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
    }
}

impl AsFd for TcpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
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

/// Turns a byte count or -1 into a result.
pub(crate) fn size(value: isize) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::last_os_error())
}
