//! One forwarding rule, already parsed: it cannot hold what cannot be run.

use std::{net::IpAddr, time::Duration};

use turnpike_net::ConnectOptions;
pub use turnpike_net::CopyMode;
use turnpike_wire::proxy_protocol::ProxyVersion;

use crate::{Access, Pattern};

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
    /// A name, resolved again when its answer is older than [`crate::Settings::resolve_every`]; several addresses are tried in turn.
    Name(String),
}

/// A target: with a port range, port i of the listener's range maps to port i of the target's; a lone port serves the whole range.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Host.
    pub host: Host,
    /// Ports.
    pub ports: PortRange,
}

/// How one of several targets is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// In turn.
    #[default]
    RoundRobin,
    /// The one with the fewest connections.
    LeastConnections,
    /// The first that is healthy.
    Failover,
}

/// A datagram to ask a target with, and the answer that makes it a healthy one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Its payload.
    pub send: Vec<u8>,
    /// How a good answer begins; if empty, any answer is good.
    pub expect: Vec<u8>,
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
    /// Health checks of the targets this often, a TCP connect or, where they speak UDP, a datagram; `None` for none.
    pub health_check: Option<Duration>,
    /// What a check asks a target that speaks UDP. Without it an empty datagram is sent, and the target is healthy unless ICMP says
    /// that nobody listens there.
    pub health_question: Option<Question>,
    /// Source address of outgoing connections and datagrams.
    pub source: Option<IpAddr>,
    /// SO_BINDTODEVICE of outgoing sockets.
    pub device: Option<String>,
    /// SO_MARK of outgoing sockets.
    pub mark: Option<u32>,
    /// Outgoing sockets carry the client's own address (IP_TRANSPARENT).
    pub transparent: bool,
    /// Proxies of ours, by prefix: each of their connections begins with a PROXY header (either version), which is believed. All
    /// others are clients themselves, and one that sends a header is refused. If empty, nobody is a proxy and nothing is looked at.
    pub proxy_protocol_from: Vec<Pattern>,
    /// Send a PROXY header to targets.
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
    /// TCP_NODELAY on both sides. Default true.
    pub nodelay: bool,
    /// Connections or sessions of this rule at a time.
    pub max_connections: usize,
    /// How bytes move (TCP).
    pub copy: CopyMode,
}

impl Rule {
    /// Whether this client is one of [`Rule::proxy_protocol_from`].
    pub(crate) fn is_proxy(&self, client: IpAddr) -> bool {
        self.proxy_protocol_from.iter().any(|prefix| prefix.matches(client))
    }

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
