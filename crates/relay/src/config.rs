//! Runtime settings.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, SystemTime},
};

use turnpike_net::{Datapath, PassedSockets};
use turnpike_offload::Hook;
use turnpike_turn::server::{AllocationLimits, RealmLimits, RelayAddress, ServerConfig};

use crate::{DtlsConfig, Layout, StreamConfig};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayState {
    pub address: RelayAddress,
    /// True if the machine has the address; if not, no allocation is granted on it.
    pub is_up: bool,
    pub since: SystemTime,
}

#[derive(Clone, Debug)]
pub struct Config {
    /// UDP listeners. Those on wildcard addresses reply from the address that the client sent to.
    pub listen: Vec<SocketAddr>,
    /// TCP and TLS listeners. If one has port 0 and the address of a listener in `listen`, it gets that
    /// listener's port.
    pub streams: StreamConfig,
    pub dtls: DtlsConfig,
    /// Listening sockets bound by the parent process, used for configured addresses.
    pub passed: Arc<PassedSockets>,
    /// Number of worker threads; at least 1.
    pub workers: usize,
    pub datapath: Datapath,
    /// Hook of the kernel fast path for single datagrams between bound channels; `datapath` handles
    /// everything else.
    pub kernel: Option<Hook>,
    /// Uses the kernel path only for flows that this machine's firewall, routing and IPsec leave unchanged,
    /// and starts without that path if it is unavailable.
    pub kernel_leases: bool,
    /// Maximum number of flows in the kernel, one per direction; additional flows stay in user space.
    pub kernel_flows: u32,
    /// Time for which an idle worker polls before it sleeps; if zero, it sleeps immediately.
    pub busy_poll: Duration,
    /// Maximum delay of a datagram, added so that the next wake-up handles more datagrams (`coalesce.rs`);
    /// zero disables this.
    pub coalesce: Duration,
    /// Relay addresses. If a family has several, a client gets the address to which it sent or, if that is
    /// not a relay address, the source address of the route to the client.
    pub relay: Vec<RelayAddress>,
    pub relay_in_turn: bool,
    pub ports: RangeInclusive<u16>,
    /// Number of shared relay sockets per relay address and worker for UDP clients; all other clients share
    /// an equal number. Peer addresses distinguish the allocations on a socket. With 0, each allocation has
    /// its own socket.
    pub shared_ports: usize,
    /// Configured addresses that this machine does not have. Their listeners wait, and no allocation uses them.
    pub absent: Vec<IpAddr>,
    /// Addresses of this machine. If a peer has one of these addresses, clients can reach only the relay's ports on
    /// it ([`turnpike_turn::server::PeerRules`]).
    pub addresses: Vec<IpAddr>,
    pub listeners_beside: Vec<SocketAddr>,
    /// Size in bytes of the receive and send buffers of each listener and shared relay socket.
    pub listener_buffer: usize,
    /// Size in bytes of the receive and send buffers of each relay socket.
    pub relay_buffer: usize,
    pub limits: AllocationLimits,
    pub realm_limits: Vec<RealmLimits>,
    /// Maximum idle time of a half-closed peer connection (RFC 6062), after which the open direction is also
    /// closed.
    pub half_closed: Duration,
    pub server: ServerConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            streams: StreamConfig::default(),
            dtls: DtlsConfig::default(),
            passed: Arc::default(),
            workers: 1,
            datapath: Datapath::best().0,
            kernel: None,
            kernel_leases: false,
            kernel_flows: 65_536,
            busy_poll: Duration::ZERO,
            coalesce: Duration::ZERO,
            relay: Vec::new(),
            relay_in_turn: false,
            ports: 49152..=65535,
            shared_ports: 0,
            absent: Vec::new(),
            addresses: Vec::new(),
            listeners_beside: Vec::new(),
            listener_buffer: 1 << 20,
            relay_buffer: 256 << 10,
            limits: AllocationLimits::default(),
            realm_limits: Vec::new(),
            half_closed: Self::HALF_CLOSED,
            server: ServerConfig::default(),
        }
    }
}

impl Config {
    /// Default of [`Config::half_closed`]. Replies rarely take longer, and keep-alive probes never end a
    /// connection whose peer is still there.
    pub const HALF_CLOSED: Duration = Duration::from_secs(60);

    pub fn layout(&self) -> Layout {
        Layout::new(&self.listen, &self.dtls.listen, &self.streams)
    }

    pub fn relays_up(&self) -> impl Iterator<Item = &RelayAddress> {
        self.relay.iter().filter(|relay| !self.absent.contains(&relay.bind))
    }

    /// Returns true if a TCP listener of this process, such as the admin interface, accepts connections to `to`.
    pub(crate) fn accepts_at(&self, to: SocketAddr) -> bool {
        let is_here = to.ip().is_loopback() || self.addresses.contains(&to.ip());
        let of_streams = self.streams.listen.iter().chain(&self.streams.tls_listen);
        of_streams.chain(&self.listeners_beside).any(|at| {
            let everywhere = at.ip().is_unspecified() && at.is_ipv4() == to.is_ipv4() && is_here;
            at.port() == to.port() && (at.ip() == to.ip() || everywhere)
        })
    }

    /// Maximum number of reserved ports (EVEN-PORT with R = 1): a sixteenth of the ports of all relay
    /// addresses.
    pub fn max_reservations(&self) -> usize {
        (self.ports.len() * self.relay.len() / 16).max(1)
    }
}
