//! One forwarding rule, already parsed: it cannot hold what cannot be run.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use turnpike_net::{ConnectOptions, CopyMode, TcpTimers, UnixName, ZonedIp};
use turnpike_wire::proxy_protocol::ProxyVersion;

use crate::{Access, Address, Bind, Pattern};

/// Names a rule in metrics and logs, and across reloads: equal text is the same rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(pub String);

/// What comes in, and what goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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

impl Protocol {
    /// Its name in TOML and before `://`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::UdpToTcp { .. } => "udptotcp",
            Self::TcpToUdp { .. } => "tcptoudp",
        }
    }

    /// The opposite of [`Protocol::name`]; not framed.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "tcp" => Self::Tcp,
            "udp" => Self::Udp,
            "udptotcp" => Self::UdpToTcp { framed: false },
            "tcptoudp" => Self::TcpToUdp { framed: false },
            _ => return None,
        })
    }
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
    /// A name, or an address with a zone such as `fe80::1%eth0`, resolved again when its answer is older than the forwarder's `resolve_every`. Each of its addresses, of both
    /// families and 16 at most, is balanced as a target of its own.
    Name(String),
    /// A Unix stream socket; the endpoint's ports mean nothing then.
    Unix(UnixName),
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

impl Endpoint {
    /// True if only the weights differ.
    #[must_use]
    pub fn is_same_place(&self, other: &Self) -> bool {
        (&self.host, self.ports) == (&other.host, other.ports)
    }
}

/// Highest weight of a target.
pub const MOST_WEIGHT: u16 = 256;

/// A lone port.
impl From<u16> for PortRange {
    fn from(port: u16) -> Self {
        Self { first: port, last: port }
    }
}

/// Of weight 1.
impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Ip(address.ip()), ports: address.port().into(), weight: 1 }
    }
}

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
            Self::Name(name) if name.contains(':') => write!(f, "[{name}]"),
            Self::Name(name) => f.write_str(name),
            Self::Unix(name) => write!(f, "unix:{name}"),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Unix(_) => self.host.fmt(f),
            host => write!(f, "{host}:{}", self.ports),
        }
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

/// Question to a target, and the answer that makes it healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// A datagram's payload, or the first bytes of a connection: none where the target speaks first.
    pub send: Vec<u8>,
    /// How a good answer begins; if empty, any answer is good.
    pub expect: Vec<u8>,
}

/// Whose PROXY headers are believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// Those of the addresses that fit.
    Network(Pattern),
    /// Those of whoever comes by a Unix socket.
    Unix,
}

/// What a rule allows one client, and how fast it moves bytes. The default limits nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Connections or sessions of one client at a time. A client is an IPv4 address or an IPv6 network of 64 bits; who comes by a
    /// Unix socket is not limited.
    pub connections_per_client: Option<u32>,
    /// New connections or sessions of one client a second, of which as many may come at once.
    pub new_connections_per_client: Option<u32>,
    /// Bytes a second, each way, of all connections together. TCP is slowed down, datagrams beyond it are dropped.
    pub bytes_per_second: Option<u64>,
    /// The same for each connection or session.
    pub bytes_per_second_per_connection: Option<u64>,
}

/// One rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Its name.
    pub id: RuleId,
    /// Protocols.
    pub protocol: Protocol,
    /// What to listen on.
    pub bind: Bind,
    /// On an IPv6 address: whether IPv4 clients are left to others. If not, `[::]` is open to both.
    pub ipv6_only: bool,
    /// IP_FREEBIND of its listeners: their address need not be this machine's yet.
    pub freebind: bool,
    /// Permissions of the file of a Unix socket that is listened on; `None` leaves them to the umask.
    pub socket_mode: Option<u32>,
    /// Ports to listen on.
    pub ports: PortRange,
    /// Targets, at least one.
    pub targets: Vec<Endpoint>,
    /// Choice among them.
    pub balance: Balance,
    /// Health checks of the targets this often, a TCP connect or, where they speak UDP, a datagram; `None` for none.
    pub health_check: Option<Duration>,
    /// Question of a check. Without it a target that speaks TCP is healthy if it accepts; one that speaks UDP gets an empty datagram, and is
    /// healthy unless ICMP reports that its port is closed.
    pub health_question: Option<Question>,
    /// Source address of outgoing connections and datagrams.
    pub source: Option<ZonedIp>,
    /// SO_BINDTODEVICE of outgoing sockets.
    pub device: Option<String>,
    /// SO_MARK of outgoing sockets.
    pub mark: Option<u32>,
    /// Outgoing sockets carry the client's own address (IP_TRANSPARENT).
    pub transparent: bool,
    /// Proxies of ours: each of their connections begins with a PROXY header (either version), which is believed. All
    /// others are clients themselves, and one that sends a header is refused. If empty, nobody is a proxy and nothing is looked at.
    pub proxy_protocol_from: Vec<Proxy>,
    /// Send a PROXY header to targets: in front of a connection, or of each datagram (version 2, from UDP to UDP).
    pub send_proxy: Option<ProxyVersion>,
    /// Who may connect, beside the global lists.
    pub access: Access,
    /// A connection or session without a byte for so long is ended. TCP default: none. UDP default 72 s (as rinetd).
    pub idle_timeout: Option<Duration>,
    /// A TCP connection whose one side has said all is ended when the other has not sent a byte for so long either. Default: none.
    pub half_close_timeout: Option<Duration>,
    /// A TCP connect that takes longer fails over to the next address or target. Default 10 s.
    pub connect_timeout: Duration,
    /// SO_KEEPALIVE on both sides. Default true.
    pub keepalive: bool,
    /// Keepalive and TCP_USER_TIMEOUT on both sides, where they speak TCP. Default: as the machine is configured.
    pub timers: TcpTimers,
    /// TCP_NODELAY on both sides. Default true.
    pub nodelay: bool,
    /// Connections or sessions of this rule at a time.
    pub max_connections: usize,
    /// Limits per client, and of bytes.
    pub limits: Limits,
    /// Answers may come from any port of the target's address (UDP to UDP); otherwise from the port alone that was asked. What the client
    /// sends goes to the latter either way.
    pub any_port: bool,
    /// How bytes move (TCP).
    pub copy: CopyMode,
    /// Whether the kernel forwards lone datagrams itself (UDP); `None` is as the forwarder's `kernel` says, where the rule allows it.
    pub kernel: Option<bool>,
}

/// From any TCP port of this machine to nobody.
impl Default for Rule {
    fn default() -> Self {
        Self {
            id: RuleId(String::new()),
            protocol: Protocol::Tcp,
            bind: Bind::Ip(Ipv4Addr::UNSPECIFIED.into()),
            ipv6_only: true,
            freebind: false,
            socket_mode: None,
            ports: PortRange { first: 0, last: 0 },
            targets: Vec::new(),
            balance: Balance::default(),
            health_check: None,
            health_question: None,
            source: None,
            device: None,
            mark: None,
            transparent: false,
            proxy_protocol_from: Vec::new(),
            send_proxy: None,
            access: Access::default(),
            idle_timeout: None,
            half_close_timeout: None,
            connect_timeout: Duration::from_secs(10),
            keepalive: true,
            timers: TcpTimers::default(),
            nodelay: true,
            max_connections: usize::MAX,
            limits: Limits::default(),
            any_port: false,
            copy: CopyMode::Auto,
            kernel: None,
        }
    }
}

impl Rule {
    /// From a TCP port to a TCP target, with the defaults that [`Rule`] names, and nothing limited.
    pub fn new(id: &str, listen: SocketAddr, target: Endpoint) -> Self {
        let (bind, ports) = (listen.ip().into(), listen.port().into());
        Self { id: RuleId(id.to_owned()), bind, ports, targets: vec![target], ..Self::default() }
    }

    /// Whether this client is one of [`Rule::proxy_protocol_from`].
    pub fn is_proxy(&self, client: &Address) -> bool {
        self.proxy_protocol_from.iter().any(|proxy| match (proxy, client) {
            (Proxy::Network(pattern), Address::Ip(client)) => pattern.matches(client.ip()),
            (Proxy::Unix, Address::Unix(_)) => true,
            _ => false,
        })
    }

    /// What keeps the kernel from forwarding this rule's datagrams itself, whatever is asked for.
    pub fn kernel_obstacle(&self) -> Option<&'static str> {
        let Limits { bytes_per_second, bytes_per_second_per_connection, .. } = self.limits;
        let obstacles = [
            (self.protocol != Protocol::Udp, "only from UDP to UDP nothing but addresses has to be changed"),
            (
                bytes_per_second.or(bytes_per_second_per_connection).is_some(),
                "a rate limit needs user-space forwarding",
            ),
            (self.transparent, "packets with the client's own address have a route of their own"),
            (self.send_proxy.is_some(), "PROXY headers are added in user space"),
            (self.any_port, "answers from any port are sorted out in user space"),
            (self.device.is_some(), "device may lead by another route than the kernel's"),
            (self.mark.is_some(), "mark may lead by another route than the kernel's"),
        ];
        obstacles.into_iter().find_map(|(is_there, what)| is_there.then_some(what))
    }

    /// Whether what goes out is UDP.
    pub fn targets_speak_udp(&self) -> bool {
        matches!(self.protocol, Protocol::Udp | Protocol::TcpToUdp { .. })
    }

    /// How its outgoing TCP sockets are made. Those of a [`Rule::transparent`] one also want the client's address as source.
    pub fn connect_options(&self) -> ConnectOptions {
        ConnectOptions {
            source: self.source,
            device: self.device.clone(),
            mark: self.mark,
            transparent: self.transparent,
        }
    }
}
