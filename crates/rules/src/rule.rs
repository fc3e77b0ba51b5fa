//! One parsed forwarding rule; the type cannot represent an invalid rule.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use turnpike_net::{ConnectOptions, TcpTimers};
use turnpike_wire::{
    address::{UnixName, ZonedIp},
    proxy_protocol::ProxyVersion,
};

use crate::{Access, Address, Bind, Pattern};

/// Identifies a rule in metrics and logs, and across reloads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(pub String);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    Tcp,
    Udp,
    /// Each UDP session becomes a TCP connection. If `framed`, a two-byte big-endian length before each datagram preserves
    /// boundaries; otherwise each datagram is one write, as in oxidinetd.
    UdpToTcp {
        framed: bool,
    },
    /// Each TCP connection becomes a UDP session. `framed` has the same meaning; otherwise, each read becomes
    /// one datagram.
    TcpToUdp {
        framed: bool,
    },
}

impl Protocol {
    /// Name in TOML, and in a URI before `://`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::UdpToTcp { .. } => "udptotcp",
            Self::TcpToUdp { .. } => "tcptoudp",
        }
    }

    /// Inverse of [`Protocol::name`]; the result is not framed.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortRange {
    pub first: u16,
    /// Never below `first`.
    pub last: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    Ip(IpAddr),
    /// A name, or an address with a zone such as `fe80::1%eth0`. It is resolved again when the
    /// result is older than the forwarder's `resolve_every`. Each of its addresses (of both
    /// families, at most 16) is a separate target for balancing.
    Name(String),
    /// Unix stream socket; ports are ignored.
    Unix(UnixName),
}

/// A target. Port i of the listener's range maps to port i of the target's range; a single target
/// port serves the listener's whole range.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub host: Host,
    pub ports: PortRange,
    /// Weight among the rule's targets, 0 to [`MOST_WEIGHT`]. Each address of a name gets this
    /// weight. 0 stops new connections.
    pub weight: u16,
}

impl Endpoint {
    #[must_use]
    pub fn is_same_place(&self, other: &Self) -> bool {
        (&self.host, self.ports) == (&other.host, other.ports)
    }
}

pub const MOST_WEIGHT: u16 = 256;

impl From<u16> for PortRange {
    fn from(port: u16) -> Self {
        Self { first: port, last: port }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Ip(address.ip()), ports: address.port().into(), weight: 1 }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        if self.last == self.first { Ok(()) } else { write!(f, "-{}", self.last) }
    }
}

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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    #[default]
    RoundRobin,
    /// Target with the fewest connections relative to its weight.
    LeastConnections,
    /// First healthy target; ignores weights, except for 0.
    Failover,
    /// Always the same target for a client address; clients are distributed by weight.
    Source,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Payload of the datagram, or first bytes sent over the connection; empty if the target sends
    /// first.
    pub send: Vec<u8>,
    /// Prefix that the response must have; if empty, any response will do.
    pub expect: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proxy {
    Network(Pattern),
    Unix,
}

/// Limits per client, and bandwidth limits. Unlimited by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Maximum concurrent connections or sessions per client. A client is an IPv4 address or an IPv6 /64; clients of a Unix
    /// socket are not limited.
    pub max_connections_per_client: Option<u32>,
    /// Maximum new connections or sessions per second for each client; the burst has the same size.
    pub new_connections_per_client: Option<u32>,
    /// Bytes per second in each direction for all connections together. TCP is slowed down; datagrams beyond the limit are dropped.
    pub max_bytes_per_second: Option<u64>,
    pub max_bytes_per_second_per_connection: Option<u64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    pub id: RuleId,
    pub protocol: Protocol,
    pub bind: Bind,
    /// If true, an IPv6 listener accepts only IPv6 clients; if false, `[::]` also accepts IPv4
    /// clients.
    pub ipv6_only: bool,
    /// Sets IP_FREEBIND on listeners, so that the address need not exist yet.
    pub freebind: bool,
    /// File mode of a listening Unix socket; `None` uses the umask.
    pub socket_mode: Option<u32>,
    pub ports: PortRange,
    /// Never empty.
    pub targets: Vec<Endpoint>,
    pub balance: Balance,
    /// Interval between health checks, which connect to TCP targets and send UDP targets a
    /// datagram; `None` disables them.
    pub health: Option<Duration>,
    /// Data that a health check sends, and expects in response. If `None`, a TCP target is healthy if it
    /// accepts the connection; a UDP target is sent an empty datagram and is healthy unless ICMP reports a
    /// closed port.
    pub health_question: Option<Question>,
    /// Source address of outgoing connections and datagrams.
    pub source: Option<ZonedIp>,
    pub device: Option<String>,
    pub mark: Option<u32>,
    /// Outgoing sockets use the client's address (IP_TRANSPARENT).
    pub transparent: bool,
    /// Trusted proxies. Each of their connections must start with a PROXY header of either version.
    /// Other clients are refused if they send a header. If the list is empty, headers are not
    /// parsed.
    pub proxy_protocol_from: Vec<Proxy>,
    /// Sends a PROXY header to targets: at the start of each connection, or before each datagram
    /// (version 2, UDP to UDP).
    pub send_proxy: Option<ProxyVersion>,
    /// Applies in addition to the global lists.
    pub access: Access,
    /// Ends a connection or session that has had no data for this long. Default for TCP: no
    /// timeout; for UDP: 72 s (as in rinetd).
    pub idle: Option<Duration>,
    /// Ends a TCP connection when one side has closed and the other has sent nothing for this long.
    /// Default: no timeout.
    pub half_close_timeout: Option<Duration>,
    /// Timeout for a TCP connect, after which the next address or target is tried. Default 10 s.
    pub connect_timeout: Duration,
    /// SO_KEEPALIVE on both sides. Default true.
    pub keepalive: bool,
    /// Keepalive and TCP_USER_TIMEOUT on both TCP sides. Default: the machine's settings.
    pub timers: TcpTimers,
    /// TCP_NODELAY on both sides. Default true.
    pub nodelay: bool,
    /// Maximum concurrent connections or sessions of this rule.
    pub max_connections: usize,
    pub limits: Limits,
    /// Accepts responses from any port of the target's address (UDP to UDP); otherwise only from the target's port. The client's datagrams
    /// go to the target's port in both cases.
    pub any_port: bool,
    pub copy: CopyMode,
    /// True if the kernel forwards single datagrams (UDP); `None` uses the forwarder's `kernel` setting if the rule allows it.
    pub kernel: Option<bool>,
}

/// Method that copies the bytes of a TCP connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Copies through a pipe while the connection carries bulk data, otherwise through a buffer.
    #[default]
    Auto,
    /// splice(2), as long as pipes are available.
    Splice,
    Buffer,
    /// Like `Auto`, but the kernel forwards interactive traffic through a sockmap.
    Kernel,
}

impl CopyMode {
    /// True for splice(2), false for a buffer, `None` if it depends on the traffic.
    #[must_use]
    pub fn splices(self) -> Option<bool> {
        match self {
            Self::Splice => Some(true),
            Self::Buffer => Some(false),
            Self::Auto | Self::Kernel => None,
        }
    }
}

/// Rule without targets, on a TCP port that the kernel chooses.
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
            health: None,
            health_question: None,
            source: None,
            device: None,
            mark: None,
            transparent: false,
            proxy_protocol_from: Vec::new(),
            send_proxy: None,
            access: Access::default(),
            idle: None,
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
    /// Forwards a TCP port to a TCP target, with the defaults of [`Rule`] and no limits.
    pub fn new(id: &str, listen: SocketAddr, target: Endpoint) -> Self {
        let (bind, ports) = (listen.ip().into(), listen.port().into());
        Self { id: RuleId(id.to_owned()), bind, ports, targets: vec![target], ..Self::default() }
    }

    pub fn is_proxy(&self, client: &Address) -> bool {
        self.proxy_protocol_from.iter().any(|proxy| match (proxy, client) {
            (Proxy::Network(pattern), Address::Ip(client)) => pattern.matches(client.ip()),
            (Proxy::Unix, Address::Unix(_)) => true,
            _ => false,
        })
    }

    pub fn kernel_obstacle(&self) -> Option<&'static str> {
        let Limits { max_bytes_per_second, max_bytes_per_second_per_connection, .. } = self.limits;
        let obstacles = [
            (self.protocol != Protocol::Udp, "only rules from UDP to UDP can be forwarded in the kernel"),
            (
                max_bytes_per_second.or(max_bytes_per_second_per_connection).is_some(),
                "a rate limit needs user-space forwarding",
            ),
            (self.transparent, "packets with the client's source address need their own route"),
            (self.send_proxy.is_some(), "PROXY headers are added in user space"),
            (self.any_port, "responses from any port are matched in user space"),
            (self.device.is_some(), "device can select a route that the kernel path does not use"),
            (self.mark.is_some(), "mark can select a route that the kernel path does not use"),
        ];
        obstacles.into_iter().find_map(|(is_there, what)| is_there.then_some(what))
    }

    pub fn targets_speak_udp(&self) -> bool {
        matches!(self.protocol, Protocol::Udp | Protocol::TcpToUdp { .. })
    }

    /// Options of outgoing TCP sockets. A [`Rule::transparent`] rule also sets the client's address
    /// as the source.
    pub fn connect_options(&self) -> ConnectOptions {
        ConnectOptions {
            source: self.source.map(|ip| ip.at(0)),
            device: self.device.clone(),
            mark: self.mark,
            transparent: self.transparent,
        }
    }
}
