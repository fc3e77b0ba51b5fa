//! Binding the ports of rules, on the control thread: a rule that cannot be bound is named before anything is served.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use turnpike_net::{Datapath, ListenOptions, TcpListener, UdpOptions, UdpSocket};

use crate::{Protocol, Rule, StartError, handover, udp::Listeners};

/// The sockets of one rule for one worker.
pub(crate) enum Bound {
    /// With the place of its port in the rule's range.
    Tcp(Vec<(u16, Tcp)>),
    Udp(Listeners),
}

/// Where a listener comes from.
pub(crate) enum Tcp {
    Fresh(TcpListener),
    /// The worker has it, for a rule that leaves by the same command: no client that waits in its queue is lost.
    Inherited(SocketAddr),
}

/// Where a forwarder listens already, for rules that are about to leave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(pub(crate) Vec<(Kind, SocketAddr)>);

/// What a port belongs to, and which engine listens on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// TCP, by the TCP engine.
    Tcp,
    /// TCP, by the UDP engine.
    Crossing,
    Udp,
}

impl Kind {
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
}

impl Held {
    /// Takes an address over, if it is there.
    fn claim(&mut self, kind: Kind, address: SocketAddr) -> bool {
        let found = self.0.iter().position(|held| *held == (kind, address));
        found.map(|at| self.0.swap_remove(at)).is_some()
    }

    /// Whether this process is what keeps a port busy; by port alone, as a wildcard address overlaps with all others.
    fn occupies(&self, kind: Kind, port: u16) -> bool {
        self.0.iter().any(|(held, at)| held.is_udp() == kind.is_udp() && at.port() == port)
    }
}

/// Binds every port of a rule for every worker.
pub(crate) fn bind(
    rule: &Rule,
    workers: usize,
    datapath: Datapath,
    held: &mut Held,
) -> Result<(Vec<SocketAddr>, Vec<Bound>), StartError> {
    let kind = Kind::of(rule.protocol);
    let wanted = (rule.ports.first..=rule.ports.last).map(|port| SocketAddr::new(rule.bind, port));
    if kind == Kind::Tcp {
        return bind_tcp(rule, wanted, workers, held);
    }
    for address in wanted {
        if !held.occupies(kind, address.port()) {
            probe(kind, address).map_err(|source| listen_error(rule, address, source))?;
        }
    }
    let named = |(address, source)| listen_error(rule, address, source);
    let first = Listeners::bind(rule, datapath, true).map_err(named)?;
    let addresses = first.addresses();
    let mut all = Vec::with_capacity(workers);
    for _ in 1..workers {
        all.push(Bound::Udp(first.bind_again(rule, datapath).map_err(named)?));
    }
    all.push(Bound::Udp(first));
    Ok((addresses, all))
}

fn bind_tcp(
    rule: &Rule,
    wanted: impl Iterator<Item = SocketAddr>,
    workers: usize,
    held: &mut Held,
) -> Result<(Vec<SocketAddr>, Vec<Bound>), StartError> {
    // SO_REUSEPORT also where there is one worker: a rule that takes the port over by a reload may be of another protocol.
    let options = ListenOptions {
        reuse_port: true,
        nodelay: rule.nodelay,
        keepalive: rule.keepalive,
        ..Default::default()
    };
    let mut addresses = Vec::new();
    let mut sockets: Vec<Vec<(u16, Tcp)>> = (0..workers).map(|_| Vec::new()).collect();
    for (offset, address) in (0_u16..).zip(wanted) {
        if held.claim(Kind::Tcp, address) {
            addresses.push(address);
            sockets.iter_mut().for_each(|all| all.push((offset, Tcp::Inherited(address))));
            continue;
        }
        let named = |source| listen_error(rule, address, source);
        let real = if held.occupies(Kind::Tcp, address.port()) {
            address
        } else {
            TcpListener::probe(address).map_err(named)?
        };
        addresses.push(real);
        for all in &mut sockets {
            all.push((offset, Tcp::Fresh(TcpListener::bind(real, &options).map_err(named)?)));
        }
    }
    Ok((addresses, sockets.into_iter().map(Bound::Tcp).collect()))
}

/// Without SO_REUSEPORT: a second program on the same port is told so, instead of silently sharing it.
fn probe(kind: Kind, address: SocketAddr) -> io::Result<()> {
    if kind.is_udp() {
        match UdpSocket::bind(address, &UdpOptions::default()) {
            // The one before us is ending. Whether it was ours to share with, SO_REUSEPORT decides.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && handover::is_left(address.port()) => {
                Ok(())
            }
            bound => bound.map(drop),
        }
    } else {
        TcpListener::probe(address).map(drop)
    }
}

/// Says what to do about a listener that cannot be bound.
fn listen_error(rule: &Rule, address: SocketAddr, source: io::Error) -> StartError {
    let remedy = match source.kind() {
        io::ErrorKind::AddrInUse => "another program or rule has this port: stop it, or choose another port",
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need CAP_NET_BIND_SERVICE: grant it (setcap cap_net_bind_service=ep), or choose a higher port"
        }
        io::ErrorKind::AddrNotAvailable => match address.ip() {
            IpAddr::V4(_) => "choose an address of this machine (ip address), or 0.0.0.0 for all",
            IpAddr::V6(_) => "choose an address of this machine (ip address), or [::] for all",
        },
        _ if turnpike_net::tcp::is_exhaustion(&source) => "raise the limit of open files (ulimit -n)",
        _ => "choose another address",
    };
    StartError::Listen { rule: rule.id.0.clone(), address, source, remedy }
}
