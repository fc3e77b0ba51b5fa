//! Binds the ports of rules on the control thread, so that errors are reported with the rule before
//! any client is served.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use turnpike_net::{
    BindError, Datapath, PassedSockets, SocketFile, SocketProtocol, TcpListener, TcpSocket, UnixListener,
};
use turnpike_wire::address::UnixName;

use crate::{
    Address, Bind, Protocol, Rule, StartError, handover,
    udp::{UdpListeners, listeners::tcp_options},
};

/// Place of the address in the configuration, for error messages.
const IN_RULE: &str = "in this rule";

/// Sockets of a rule for one worker.
pub(crate) enum RuleSockets {
    /// Listeners, each with the offset of its port in the rule's range.
    Tcp(Vec<(u16, Tcp)>),
    Udp(UdpListeners),
}

pub(crate) enum Tcp {
    Fresh(Acceptor),
    /// The worker reuses the listener of a rule that the same command removes, so no waiting client
    /// is lost.
    Inherited(Address),
}

#[derive(Debug)]
pub(crate) enum Acceptor {
    Tcp(TcpListener),
    Unix(UnixListener, UnixName),
}

impl Acceptor {
    fn take_over(socket: OwnedFd, rule: &Rule) -> io::Result<Self> {
        match &rule.bind {
            Bind::Ip(_) | Bind::Name(_) => TcpListener::take_over(socket).map(Self::Tcp),
            Bind::Unix(name) => {
                UnixListener::take_over(socket).map(|listener| Self::Unix(listener, name.clone()))
            }
        }
    }

    /// Accepts a connection; returns `None` if none is waiting. The client of a Unix socket gets the
    /// listener's name.
    pub(crate) fn accept(&self) -> io::Result<Option<(TcpSocket, Address)>> {
        match self {
            Self::Tcp(listener) => {
                Ok(listener.accept()?.map(|(socket, client)| (socket, Address::Ip(client))))
            }
            Self::Unix(listener, _) => Ok(listener.accept()?.map(|socket| (socket, self.address()))),
        }
    }

    pub(crate) fn address(&self) -> Address {
        match self {
            Self::Tcp(listener) => Address::Ip(listener.local_addr()),
            Self::Unix(_, name) => Address::Unix(name.clone()),
        }
    }

    /// Applies a new rule's options to the listener; accepted sockets inherit them.
    pub(crate) fn set_inherited(&self, rule: &Rule) {
        if let Self::Tcp(listener) = self {
            // If this fails, accepted sockets keep the options of the old rule.
            let _ = listener.set_inherited(&tcp_options(rule, true));
        }
    }
}

impl AsFd for Acceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }
}

/// Takes over a rule's listeners from another process, for each worker in the order of the rule's
/// range. The file of a Unix socket still belongs to the old process.
pub(crate) fn take_over(rule: &Rule, of_workers: Vec<Vec<OwnedFd>>) -> io::Result<BoundRule> {
    let mut all = Vec::with_capacity(of_workers.len());
    let mut addresses = Vec::new();
    for sockets in of_workers {
        let bound = if ListenerKind::of(rule.protocol) == ListenerKind::Tcp {
            let sockets = sockets.into_iter().map(|socket| Acceptor::take_over(socket, rule));
            let sockets = sockets.collect::<io::Result<Vec<_>>>()?;
            addresses = sockets.iter().map(Acceptor::address).collect();
            RuleSockets::Tcp((0..).zip(sockets.into_iter().map(Tcp::Fresh)).collect())
        } else {
            let listeners = UdpListeners::take_over(rule, sockets)?;
            addresses = listeners.addresses().into_iter().map(Address::Ip).collect();
            RuleSockets::Udp(listeners)
        };
        all.push(bound);
    }
    Ok((addresses, None, all))
}

/// Listeners of removed rules.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemovedListeners(pub(crate) Vec<(ListenerKind, Address)>);

/// Transport protocol of a port, and the engine that listens on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    Tcp,
    /// TCP listener of the UDP engine.
    Crossing,
    Udp,
}

impl ListenerKind {
    pub(crate) fn of(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::Tcp,
            Protocol::TcpToUdp { .. } => Self::Crossing,
            Protocol::Udp | Protocol::UdpToTcp { .. } => Self::Udp,
        }
    }

    fn is_udp(self) -> bool {
        self == Self::Udp
    }

    pub(crate) fn speaks(self) -> SocketProtocol {
        if self.is_udp() { SocketProtocol::Udp } else { SocketProtocol::Tcp }
    }
}

impl RemovedListeners {
    fn claim(&mut self, kind: ListenerKind, address: &Address) -> bool {
        let found = self.0.iter().position(|(held, at)| *held == kind && at == address);
        found.map(|at| self.0.swap_remove(at)).is_some()
    }

    /// Returns true if this process already listens on the port. The address does not matter,
    /// because a wildcard overlaps with all others.
    fn occupies(&self, kind: ListenerKind, port: u16) -> bool {
        self.0.iter().any(|(held, at)| held.is_udp() == kind.is_udp() && !at.is_unix() && at.port() == port)
    }
}

pub(crate) type BoundRule = (Vec<Address>, Option<SocketFile>, Vec<RuleSockets>);

/// Binds every port of a rule for every worker, unless `passed` has a socket for it.
pub(crate) fn bind(
    rule: &Rule,
    workers: usize,
    datapath: Datapath,
    held: &mut RemovedListeners,
    passed: &PassedSockets,
) -> Result<BoundRule, StartError> {
    let kind = ListenerKind::of(rule.protocol);
    let ip = match (&rule.bind, kind) {
        (Bind::Ip(ip), _) => *ip,
        (Bind::Unix(name), ListenerKind::Tcp) => return bind_unix(rule, name, workers, held),
        (Bind::Unix(name), _) => {
            let error = BindError {
                place: format!("unix:{name}"),
                source: io::ErrorKind::Unsupported.into(),
                remedy: "only rules from TCP to TCP can listen on a Unix socket".to_owned(),
            };
            return Err(listen_error(rule, error));
        }
        // Active rules have addresses instead of names.
        (Bind::Name(_), _) => return Err(io::Error::from(io::ErrorKind::InvalidInput).into()),
    };
    let wanted = (rule.ports.first..=rule.ports.last).map(|port| ip.at(port));
    if kind == ListenerKind::Tcp {
        let (addresses, bound) = bind_tcp(rule, wanted, workers, held, passed)?;
        return Ok((addresses, None, bound));
    }
    for address in wanted {
        if !held.occupies(kind, address.port()) {
            probe(kind, rule, passed, address)
                .map_err(|source| listen_error(rule, ip_error(rule, address, source)))?;
        }
    }
    let named = |(address, source): (SocketAddr, _)| bind_error(rule, passed, address, source);
    let first = UdpListeners::bind(rule, datapath, true, passed).map_err(named)?;
    let addresses = first.addresses().into_iter().map(Address::Ip).collect();
    let mut all = Vec::with_capacity(workers);
    for worker in 1..workers {
        all.push(RuleSockets::Udp(first.bind_again(rule, datapath, (passed, worker)).map_err(named)?));
    }
    all.push(RuleSockets::Udp(first));
    Ok((addresses, None, all))
}

/// Binds one socket that all workers share, because Unix sockets do not support SO_REUSEPORT.
fn bind_unix(
    rule: &Rule,
    name: &UnixName,
    workers: usize,
    held: &mut RemovedListeners,
) -> Result<BoundRule, StartError> {
    let address = Address::Unix(name.clone());
    if held.claim(ListenerKind::Tcp, &address) {
        let inherited = |_| RuleSockets::Tcp(vec![(0, Tcp::Inherited(address.clone()))]);
        let bound = (0..workers).map(inherited).collect();
        return Ok((vec![address], None, bound));
    }
    let named = |source| listen_error(rule, BindError::unix(&address, source, IN_RULE));
    let bound = name.address().and_then(|at| UnixListener::bind(&at, rule.socket_mode));
    let (first, file) = bound.map_err(named)?;
    let one = |listener| RuleSockets::Tcp(vec![(0, Tcp::Fresh(Acceptor::Unix(listener, name.clone())))]);
    let mut bound = Vec::with_capacity(workers);
    for _ in 1..workers {
        bound.push(one(first.try_clone().map_err(named)?));
    }
    bound.push(one(first));
    Ok((vec![address], Some(file), bound))
}

fn bind_tcp(
    rule: &Rule,
    wanted: impl Iterator<Item = SocketAddr>,
    workers: usize,
    held: &mut RemovedListeners,
    passed: &PassedSockets,
) -> Result<(Vec<Address>, Vec<RuleSockets>), StartError> {
    // SO_REUSEPORT even for a single worker, because a reload may give the port to a rule with another
    // protocol.
    let options = tcp_options(rule, true);
    let mut addresses = Vec::new();
    let mut sockets: Vec<Vec<(u16, Tcp)>> = (0..workers).map(|_| Vec::new()).collect();
    for (offset, address) in (0_u16..).zip(wanted) {
        if held.claim(ListenerKind::Tcp, &address.into()) {
            addresses.push(address.into());
            sockets.iter_mut().for_each(|all| all.push((offset, Tcp::Inherited(address.into()))));
            continue;
        }
        let named = |source| bind_error(rule, passed, address, source);
        let real = if held.occupies(ListenerKind::Tcp, address.port()) {
            address
        } else {
            probe(ListenerKind::Tcp, rule, passed, address).map_err(named)?
        };
        addresses.push(real.into());
        for (worker, all) in sockets.iter_mut().enumerate() {
            let listener = passed.tcp(worker, real, &options).map_err(named)?;
            all.push((offset, Tcp::Fresh(Acceptor::Tcp(listener))));
        }
    }
    Ok((addresses, sockets.into_iter().map(RuleSockets::Tcp).collect()))
}

/// Checks that the port is free, and returns the address; port 0 is resolved to the kernel's choice.
fn probe(
    kind: ListenerKind,
    rule: &Rule,
    passed: &PassedSockets,
    address: SocketAddr,
) -> io::Result<SocketAddr> {
    match passed.probe(kind.speaks(), address, &tcp_options(rule, false)) {
        // The previous process is draining, so binding with SO_REUSEPORT will work if it runs as the
        // same user.
        Err(error)
            if kind.is_udp()
                && error.kind() == io::ErrorKind::AddrInUse
                && handover::is_left(address.port()) =>
        {
            Ok(address)
        }
        probed => probed,
    }
}

/// If the service manager passed sockets for this address, the error explains how to use those.
fn bind_error(rule: &Rule, passed: &PassedSockets, address: SocketAddr, source: io::Error) -> StartError {
    let error = ip_error(rule, address, source);
    listen_error(rule, passed.explain(ListenerKind::of(rule.protocol).speaks(), address, error))
}

fn ip_error(rule: &Rule, address: SocketAddr, source: io::Error) -> BindError {
    let kind = source.kind();
    let error = BindError::ip(address, source, IN_RULE);
    match kind {
        io::ErrorKind::AddrInUse if address.is_ipv6() && !rule.ipv6_only => {
            error.or("set ipv6_only to leave IPv4 to it")
        }
        io::ErrorKind::AddrNotAvailable => {
            error.or("set keep_going or freebind if the address appears later")
        }
        _ => error,
    }
}

fn listen_error(rule: &Rule, error: BindError) -> StartError {
    StartError::Listen { rule: rule.id.0.clone(), error }
}
