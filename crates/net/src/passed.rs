//! Listening sockets passed by the service manager at startup (sd_listen_fds(3)). A listener on one of their
//! addresses gets a duplicate of the descriptor; the original stays here for later reloads.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use socket2::{Domain, Protocol, SockRef, Type};

use crate::{BindError, ListenOptions, TcpListener, UdpOptions, UdpSocket, sys};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SocketProtocol {
    Udp,
    Tcp,
}

impl From<&SocketProtocol> for &'static str {
    fn from(transport: &SocketProtocol) -> Self {
        match transport {
            SocketProtocol::Udp => "udp",
            SocketProtocol::Tcp => "tcp",
        }
    }
}

#[derive(Debug)]
pub struct PassedSocket {
    /// FileDescriptorName= of the unit, or else the unit's name (systemd.socket(5)).
    pub name: String,
    pub transport: SocketProtocol,
    pub address: SocketAddr,
    descriptor: OwnedFd,
}

/// All passed sockets. Several may share an address, one per worker.
#[derive(Debug, Default)]
pub struct PassedSockets(Vec<PassedSocket>);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PassedError {
    /// LISTEN_FDS and its related variables are inconsistent, or a descriptor is missing.
    #[error("cannot take the sockets passed by the service manager (LISTEN_FDS): {0}")]
    Announced(#[source] io::Error),
    #[error(
        "the service manager passed a descriptor named {name:?} that {problem}; in the .socket unit, use ListenDatagram= for UDP, \
         and ListenStream= with Accept=no for TCP"
    )]
    Unusable { name: String, problem: &'static str },
}

impl PassedSockets {
    /// Takes the passed sockets; empty on later calls. Call this before the process opens anything, because
    /// the descriptors are identified only by number.
    pub fn from_service_manager() -> Result<Self, PassedError> {
        static TAKEN: AtomicBool = AtomicBool::new(false);
        if TAKEN.swap(true, Ordering::Relaxed) {
            return Ok(Self::default());
        }
        let passed = sd_notify::listen_fds_with_names().map_err(PassedError::Announced)?;
        // SAFETY: the service manager made these descriptors for this process (LISTEN_PID), each is open (it
        // was just made close-on-exec), and nothing else owns them, as this runs once.
        Self::new(passed.map(|(number, name)| (unsafe { OwnedFd::from_raw_fd(number) }, name)))
    }

    pub fn new(passed: impl IntoIterator<Item = (OwnedFd, String)>) -> Result<Self, PassedError> {
        let look = |(descriptor, name)| match look_at(&descriptor) {
            Ok((transport, address)) => Ok(PassedSocket { name, transport, address, descriptor }),
            Err(problem) => Err(PassedError::Unusable { name, problem }),
        };
        passed.into_iter().map(look).collect::<Result<_, _>>().map(Self)
    }

    pub fn iter(&self) -> impl Iterator<Item = &PassedSocket> {
        self.0.iter()
    }

    /// Duplicates all passed sockets, for [`PassedSockets::new`] in a new process.
    pub fn lend(&self) -> io::Result<Vec<(OwnedFd, String)>> {
        self.0.iter().map(|one| Ok((one.descriptor.try_clone()?, one.name.clone()))).collect()
    }

    #[must_use]
    pub fn count(&self, transport: SocketProtocol, address: SocketAddr) -> usize {
        self.at(transport, address).count()
    }

    /// Checks that a listener could bind, and returns its address (port 0 is resolved). Probes without
    /// SO_REUSEPORT, so that a port in use is an error instead of being shared silently, unless a socket was
    /// passed for it. Only the families and `freebind` of the options matter.
    pub fn probe(
        &self,
        transport: SocketProtocol,
        address: SocketAddr,
        options: &ListenOptions,
    ) -> io::Result<SocketAddr> {
        let &ListenOptions { dual_stack, freebind, .. } = options;
        match transport {
            _ if self.count(transport, address) > 0 => Ok(address),
            SocketProtocol::Udp => {
                let alone = UdpOptions { dual_stack, freebind, ..UdpOptions::default() };
                UdpSocket::bind(address, &alone).map(|socket| socket.local_addr())
            }
            SocketProtocol::Tcp => TcpListener::probe(
                address,
                &ListenOptions { dual_stack, freebind, ..ListenOptions::default() },
            ),
        }
    }

    /// Returns the socket of worker `worker` on this address: a passed one, or a newly bound one if too few
    /// were passed. `InvalidInput` if BindIPv6Only= of a wildcard address does not match `options`.
    pub fn udp(&self, worker: usize, address: SocketAddr, options: &UdpOptions) -> io::Result<UdpSocket> {
        match self.claim(SocketProtocol::Udp, address, worker)? {
            Some(passed) => UdpSocket::adopt(passed, options),
            None => UdpSocket::bind(address, options),
        }
    }

    pub fn tcp(
        &self,
        worker: usize,
        address: SocketAddr,
        options: &ListenOptions,
    ) -> io::Result<TcpListener> {
        match self.claim(SocketProtocol::Tcp, address, worker)? {
            Some(passed) => TcpListener::adopt(passed, options),
            None => TcpListener::bind(address, options),
        }
    }

    /// Replaces the remedy if [`PassedSockets::udp`] or [`PassedSockets::tcp`] has failed for a passed address.
    #[must_use]
    pub fn explain(&self, transport: SocketProtocol, address: SocketAddr, error: BindError) -> BindError {
        match self.remedy(transport, address, error.source.kind()) {
            Some(remedy) => BindError { remedy: remedy.to_owned(), ..error },
            None => error,
        }
    }

    fn remedy(
        &self,
        transport: SocketProtocol,
        address: SocketAddr,
        failed: io::ErrorKind,
    ) -> Option<&'static str> {
        match failed {
            _ if self.count(transport, address) == 0 => None,
            io::ErrorKind::AddrInUse => Some(
                "the service manager passed fewer sockets for this address than there are workers: in the .socket unit, set ReusePort=yes \
                 and repeat the line once per worker, or configure fewer workers",
            ),
            io::ErrorKind::InvalidInput => Some("set BindIPv6Only= in the .socket unit"),
            _ => None,
        }
    }

    fn at(&self, transport: SocketProtocol, address: SocketAddr) -> impl Iterator<Item = &PassedSocket> {
        self.0.iter().filter(move |one| (one.transport, one.address) == (transport, address))
    }

    fn claim(
        &self,
        transport: SocketProtocol,
        address: SocketAddr,
        nth: usize,
    ) -> io::Result<Option<OwnedFd>> {
        self.at(transport, address).nth(nth).map(|one| one.descriptor.try_clone()).transpose()
    }
}

/// Checks that IPV6_V6ONLY is as required. It cannot change after bind(2), and matters only for the wildcard
/// address.
pub(crate) fn check_families(socket: &SockRef<'_>, local: SocketAddr, dual_stack: bool) -> io::Result<()> {
    if !local.is_ipv6() || !local.ip().is_unspecified() || socket.only_v6()? != dual_stack {
        return Ok(());
    }
    let problem = if dual_stack {
        "the passed socket does not accept IPv4 (BindIPv6Only=ipv6-only)"
    } else {
        "the passed socket also accepts IPv4, which has its own listener (BindIPv6Only=both)"
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
}

fn look_at(descriptor: &OwnedFd) -> Result<(SocketProtocol, SocketAddr), &'static str> {
    let socket = SockRef::from(descriptor);
    let domain = socket.domain().map_err(|_| "is not a socket")?;
    if !matches!(domain, Domain::IPV4 | Domain::IPV6) {
        return Err("is neither IPv4 nor IPv6");
    }
    let (kind, protocol) = (socket.r#type().ok(), socket.protocol().ok().flatten());
    let transport = match (kind, protocol) {
        (Some(Type::DGRAM), Some(Protocol::UDP)) => SocketProtocol::Udp,
        (Some(Type::STREAM), Some(Protocol::TCP)) if socket.is_listener().unwrap_or_default() => {
            SocketProtocol::Tcp
        }
        (Some(Type::STREAM), Some(Protocol::TCP)) => return Err("is a connection"),
        _ => return Err("is neither UDP nor TCP"),
    };
    let address = sys::local_address(descriptor.as_fd()).map_err(|_| "has no address")?;
    Ok((transport, address))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener as StdListener, TcpStream, UdpSocket as StdSocket};

    use socket2::Socket;

    use super::*;

    /// Binds a socket as a unit with ReusePort=yes would.
    fn bound(address: &str, kind: Type, protocol: Protocol, only_v6: Option<bool>) -> Socket {
        let address: SocketAddr = address.parse().unwrap();
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol)).unwrap();
        socket.set_reuse_port(true).unwrap();
        if let Some(only_v6) = only_v6 {
            socket.set_only_v6(only_v6).unwrap();
        }
        socket.bind(&address.into()).unwrap();
        if kind == Type::STREAM {
            socket.listen(8).unwrap();
        }
        socket
    }

    fn address(socket: &Socket) -> SocketAddr {
        socket.local_addr().unwrap().as_socket().unwrap()
    }

    fn passed(sockets: impl IntoIterator<Item = Socket>) -> PassedSockets {
        PassedSockets::new(sockets.into_iter().map(|socket| (socket.into(), "turnpike.socket".to_owned())))
            .unwrap()
    }

    fn shared() -> UdpOptions {
        UdpOptions { reuse_port: true, ..UdpOptions::default() }
    }

    #[test]
    fn workers_use_passed_sockets_first_and_bind_more_if_needed() {
        let first = bound("127.0.0.1:0", Type::DGRAM, Protocol::UDP, None);
        let at = address(&first);
        let second = bound(&at.to_string(), Type::DGRAM, Protocol::UDP, None);
        let own = |socket: &Socket| SockRef::from(socket).cookie().unwrap();
        let cookies = [own(&first), own(&second)];
        let passed = passed([first, second]);
        assert_eq!((passed.count(SocketProtocol::Udp, at), passed.count(SocketProtocol::Tcp, at)), (2, 0));
        let sockets: Vec<UdpSocket> =
            (0..3).map(|worker| passed.udp(worker, at, &shared()).unwrap()).collect();
        let found: Vec<u64> = sockets.iter().map(|socket| SockRef::from(socket).cookie().unwrap()).collect();
        assert_eq!(found[..2], cookies);
        assert!(!cookies.contains(&found[2]));
        assert!(sockets.iter().all(|socket| socket.local_addr() == at));
        // A socket that was closed, as in a reload, can be taken again.
        drop(sockets);
        assert_eq!(SockRef::from(&passed.udp(0, at, &shared()).unwrap()).cookie().unwrap(), cookies[0]);
    }

    #[test]
    fn passed_listener_accepts_earlier_connections() {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let client = TcpStream::connect(at).unwrap();
        let passed = PassedSockets::new([(listener.into(), "tls".to_owned())]).unwrap();
        assert_eq!(passed.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["tls"]);
        let taken = passed.tcp(0, at, &ListenOptions { nodelay: true, ..ListenOptions::default() }).unwrap();
        let (_, peer) = taken.accept().unwrap().expect("a waiting connection");
        assert_eq!(peer, client.local_addr().unwrap());
        assert!(taken.accept().unwrap().is_none(), "accept must not block");
    }

    #[test]
    fn busy_port_error_suggests_changing_the_unit() {
        let alone = StdSocket::bind("127.0.0.1:0").unwrap();
        let at = alone.local_addr().unwrap();
        let passed = PassedSockets::new([(alone.into(), "x".to_owned())]).unwrap();
        let failed =
            passed.udp(1, at, &shared()).expect_err("the socket was bound without SO_REUSEPORT").kind();
        assert!(passed.remedy(SocketProtocol::Udp, at, failed).unwrap().contains("ReusePort=yes"));
        assert_eq!(passed.remedy(SocketProtocol::Tcp, at, failed), None);
    }

    #[test]
    fn passed_wildcard_socket_must_match_the_configured_families() {
        if StdSocket::bind("[::1]:0").is_err() {
            println!("SKIPPED: no IPv6 on this machine");
            return;
        }
        for (only_v6, dual_stack, fits) in
            [(true, false, true), (true, true, false), (false, true, true), (false, false, false)]
        {
            let socket = bound("[::]:0", Type::DGRAM, Protocol::UDP, Some(only_v6));
            let (at, passed) = (address(&socket), passed([socket]));
            let taken = passed.udp(0, at, &UdpOptions { dual_stack, ..shared() });
            assert_eq!(taken.is_ok(), fits, "{only_v6} {dual_stack}");
            if let Err(error) = taken {
                let remedy = passed.remedy(SocketProtocol::Udp, at, error.kind());
                assert!(remedy.unwrap().contains("BindIPv6Only="), "{error}");
            }
        }
        // A specific address has one family.
        let socket = bound("[::1]:0", Type::DGRAM, Protocol::UDP, Some(false));
        let at = address(&socket);
        assert!(passed([socket]).udp(0, at, &shared()).is_ok());
    }

    #[test]
    fn unusable_descriptors_are_named_in_the_error() {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let unix = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for (descriptor, problem) in [
            (OwnedFd::from(connection), "is a connection"),
            (unix.into(), "is neither IPv4 nor IPv6"),
            (file.into(), "is not a socket"),
        ] {
            let error = PassedSockets::new([(descriptor, "web".to_owned())]).expect_err(problem).to_string();
            assert!(error.contains("\"web\"") && error.contains(problem), "{error}");
        }
    }
}
