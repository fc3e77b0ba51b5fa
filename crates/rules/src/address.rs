//! Ends of connections (an address and port, or a Unix socket), and listeners.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use turnpike_net::{ConnectOptions, TcpSocket, UnixName, ZonedIp, unix};
use turnpike_wire::address::canonical_ip;

use crate::Host;

/// A client, a target or a listener. Shown as `10.0.0.2:80` or `unix:/run/app.sock`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP or UDP.
    Ip(SocketAddr),
    /// A Unix stream socket; a client has that of the listener, as most clients bind none.
    Unix(UnixName),
}

impl Address {
    /// The IP address, where there is one.
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Ip(address) => Some(address.ip()),
            Self::Unix(_) => None,
        }
    }

    /// The port; 0 where there is none.
    pub fn port(&self) -> u16 {
        match self {
            Self::Ip(address) => address.port(),
            Self::Unix(_) => 0,
        }
    }

    /// Whether it is a Unix socket.
    pub fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Begins to connect. The options are for IP alone.
    pub fn connect(&self, options: &ConnectOptions) -> io::Result<TcpSocket> {
        match self {
            Self::Ip(address) => TcpSocket::connect(*address, options),
            Self::Unix(name) => unix::connect(name),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Unix(name) => write!(f, "unix:{name}"),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

/// The listening address of a rule, without its ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Bind {
    /// An address of this machine.
    Ip(ZonedIp),
    /// A name of this machine, or an address whose interface is looked up by name. A rule in force has the first address of the name in its place.
    Name(String),
    /// A Unix stream socket, for rules from TCP to TCP; the rule's ports mean nothing then.
    Unix(UnixName),
}

/// Without the rule's ports; an IPv6 address in brackets.
impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) if ip.ip().is_ipv6() => write!(f, "[{ip}]"),
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => Host::Name(name.clone()).fmt(f),
            Self::Unix(name) => write!(f, "unix:{name}"),
        }
    }
}

/// To listen there.
impl From<Host> for Bind {
    fn from(host: Host) -> Self {
        match host {
            Host::Ip(ip) => ip.into(),
            Host::Name(name) => Self::Name(name),
            Host::Unix(name) => Self::Unix(name),
        }
    }
}

impl<T: Into<IpAddr>> From<T> for Bind {
    fn from(ip: T) -> Self {
        Self::Ip(ZonedIp::from(ip))
    }
}

/// True if a listener at `bind` takes what is sent to `ip`, an address of this machine.
#[must_use]
pub fn hears(bind: IpAddr, ipv6_only: bool, ip: IpAddr) -> bool {
    let (bind, ip) = (canonical_ip(bind), reached(ip));
    bind == ip || bind.is_unspecified() && (bind.is_ipv4() == ip.is_ipv4() || bind.is_ipv6() && !ipv6_only)
}

/// The address that connect(2) makes of this one: the loopback address of the unspecified one.
#[must_use]
pub fn reached(ip: IpAddr) -> IpAddr {
    match canonical_ip(ip) {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}
