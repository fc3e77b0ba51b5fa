//! One forwarding rule, already parsed: it cannot hold what cannot be run.

use std::{fmt, net::IpAddr, time::Duration};

use turnpike_net::ConnectOptions;
pub use turnpike_net::CopyMode;
use turnpike_wire::proxy_protocol::ProxyVersion;

use crate::Access;

/// Names a rule in metrics and logs, and across reloads: equal text is the same rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(pub String);

/// What comes in, and what goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP to TCP.
    Tcp,
    /// UDP to UDP.
    Udp,
    /// Each UDP session becomes a TCP connection. `framed`: two bytes of length (big endian) before each datagram keep its
    /// boundaries; otherwise one datagram, one write, as oxidinetd does.
    UdpToTcp {
        /// Length-prefixed.
        framed: bool,
    },
    /// Each TCP connection becomes a UDP session. `framed` as above; otherwise one read, one datagram.
    TcpToUdp {
        /// Length-prefixed.
        framed: bool,
    },
}

/// An inclusive range of ports; a lone port is a range of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortRange {
    /// First.
    pub first: u16,
    /// Last, not below `first`.
    pub last: u16,
}

/// Where to connect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// An address.
    Ip(IpAddr),
    /// A name, resolved again when its answer is older than [`crate::Settings::resolve_every`]. Each of its addresses, of both
    /// families and 16 at most, is balanced as a target of its own.
    Name(String),
}

/// A target: with a port range, port i of the listener's range maps to port i of the target's; a lone port serves the whole range.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Host.
    pub host: Host,
    /// Ports.
    pub ports: PortRange,
    /// Its share among the rule's targets, at most [`MOST_WEIGHT`]; that of each address of a name. With 0 it gets no new
    /// connections.
    pub weight: u16,
}

/// Highest weight of a target.
pub const MOST_WEIGHT: u16 = 256;

/// `80` or `80-90`.
impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        if self.last == self.first { Ok(()) } else { write!(f, "-{}", self.last) }
    }
}

/// As it stands in front of a port.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(IpAddr::V6(address)) => write!(f, "[{address}]"),
            Self::Ip(address) => write!(f, "{address}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.ports)
    }
}

/// How one of several targets is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// In turn, by weight.
    #[default]
    RoundRobin,
    /// The one with the fewest connections for its weight.
    LeastConnections,
    /// The first that is healthy; weights but 0 mean nothing.
    Failover,
    /// The same one for the same client address, by weight.
    Source,
}

/// One rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Its name.
    pub id: RuleId,
    /// Protocols.
    pub protocol: Protocol,
    /// Address to listen on.
    pub bind: IpAddr,
    /// Ports to listen on.
    pub ports: PortRange,
    /// Targets, at least one.
    pub targets: Vec<Endpoint>,
    /// Choice among them.
    pub balance: Balance,
    /// Health checks of the targets: a TCP connect this often; `None` for none.
    pub health_check: Option<Duration>,
    /// Source address of outgoing connections and datagrams.
    pub source: Option<IpAddr>,
    /// SO_BINDTODEVICE of outgoing sockets.
    pub device: Option<String>,
    /// SO_MARK of outgoing sockets.
    pub mark: Option<u32>,
    /// Outgoing sockets carry the client's own address (IP_TRANSPARENT).
    pub transparent: bool,
    /// Expect a PROXY header from clients (either version) and believe it.
    pub accept_proxy: bool,
    /// Send a PROXY header to targets.
    pub send_proxy: Option<ProxyVersion>,
    /// Who may connect, beside the global lists.
    pub access: Access,
    /// A connection or session without a byte for so long is ended. TCP default: none. UDP default 72 s (as rinetd).
    pub idle_timeout: Option<Duration>,
    /// A TCP connect that takes longer fails over to the next address or target. Default 10 s.
    pub connect_timeout: Duration,
    /// SO_KEEPALIVE on both sides. Default true.
    pub keepalive: bool,
    /// TCP_NODELAY on both sides. Default true.
    pub nodelay: bool,
    /// Connections or sessions of this rule at a time.
    pub max_connections: usize,
    /// How bytes move (TCP).
    pub copy: CopyMode,
}

impl Rule {
    /// How its outgoing TCP sockets are made. Those of a [`Rule::transparent`] one also want the client's address as source.
    pub(crate) fn connect_options(&self) -> ConnectOptions {
        ConnectOptions {
            source: self.source,
            device: self.device.clone(),
            mark: self.mark,
            transparent: self.transparent,
        }
    }
}
