//! Addresses of clients, targets and listeners: IP address and port, or Unix socket.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use turnpike_net::{ConnectOptions, TcpSocket};
use turnpike_wire::address::{UnixName, ZonedIp, canonical_ip};

use crate::Host;

/// A client, target or listener. Displayed as `10.0.0.2:80` or `unix:/run/app.sock`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    Ip(SocketAddr),
    /// Unix stream socket. A client is identified by the listener's name, because most clients do
    /// not bind a name.
    Unix(UnixName),
}

impl Address {
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Ip(address) => Some(address.ip()),
            Self::Unix(_) => None,
        }
    }

    /// Port number; 0 for a Unix socket.
    pub fn port(&self) -> u16 {
        match self {
            Self::Ip(address) => address.port(),
            Self::Unix(_) => 0,
        }
    }

    pub fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Starts to connect. The options apply only to IP.
    pub fn connect(&self, options: &ConnectOptions) -> io::Result<TcpSocket> {
        match self {
            Self::Ip(address) => TcpSocket::connect(*address, options),
            Self::Unix(name) => TcpSocket::connect_unix(&name.address()?),
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

/// Listening address of a rule, without ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Bind {
    Ip(ZonedIp),
    /// A local host name, or an address with an interface name. In an active rule, it is replaced by the first address of the
    /// name.
    Name(String),
    /// Unix stream socket, for TCP rules; ports are ignored.
    Unix(UnixName),
}

/// Omits the ports; puts an IPv6 address in brackets.
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

/// True if a listener at `bind` receives packets for `ip`, an address of this machine.
#[must_use]
pub fn hears(bind: IpAddr, ipv6_only: bool, ip: IpAddr) -> bool {
    let (bind, ip) = (canonical_ip(bind), reached(ip));
    bind == ip || bind.is_unspecified() && (bind.is_ipv4() == ip.is_ipv4() || bind.is_ipv6() && !ipv6_only)
}

/// Address that connect(2) reaches, which is loopback for the unspecified address.
#[must_use]
pub fn reached(ip: IpAddr) -> IpAddr {
    match canonical_ip(ip) {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}
