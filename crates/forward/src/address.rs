//! Where somebody is who speaks TCP with us: an address and port, or a Unix socket.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
};

use turnpike_net::{ConnectOptions, TcpSocket, UnixName, ZonedIp, unix};

use crate::Host;

/// A client, a target or a listener. Shown as `10.0.0.2:80` or `unix:/run/app.sock`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// Of TCP or UDP.
    Ip(SocketAddr),
    /// A Unix stream socket. Clients hardly ever have one of their own: theirs is the one that they came in by.
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

    pub(crate) fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Begins to connect. The options are for IP alone.
    pub(crate) fn connect(&self, options: &ConnectOptions) -> io::Result<TcpSocket> {
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

/// What a rule listens on, beside its ports.
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
