//! What the runtime is told at start.

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

/// A relay address, and whether the machine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayState {
    /// The address.
    pub address: RelayAddress,
    /// Whether the machine has it: allocations are granted on no other.
    pub is_up: bool,
    /// Since when that is so.
    pub since: SystemTime,
}

/// Settings of the runtime, already validated.
#[derive(Clone, Debug)]
pub struct Config {
    /// UDP listeners; wildcard addresses answer from the address they were asked on.
    pub listen: Vec<SocketAddr>,
    /// TCP and TLS. A listener of the same address and port 0 as one of `listen` gets that one's port.
    pub streams: StreamConfig,
    /// DTLS.
    pub dtls: DtlsConfig,
    /// Sockets of listeners that somebody else has bound; those of addresses that are listened on anyway.
    pub passed: Arc<PassedSockets>,
    /// Threads; at least 1.
    pub workers: usize,
    /// Step of the ladder.
    pub datapath: Datapath,
    /// How the kernel relays lone datagrams between bound channels, if it does; `datapath` is for all others.
    pub kernel: Option<Hook>,
    /// Flows that it may have, each in one direction; more stay in user space.
    pub kernel_flows: u32,
    /// How long a worker that has just had something to do looks for more before it sleeps; zero sleeps at once.
    pub busy_poll: Duration,
    /// By how long a worker may delay a datagram so that its next wake-up carries more (`coalesce.rs`); zero by none.
    pub coalesce: Duration,
    /// Relay addresses. Of several of a family a client gets the one that it came to, or else the one from which the machine would send to it.
    pub relay: Vec<RelayAddress>,
    /// Whether relay addresses of a family are used in turn instead, whatever the client came to.
    pub relay_in_turn: bool,
    /// Ports of relayed transport addresses.
    pub ports: RangeInclusive<u16>,
    /// Relay sockets on each relay address that each worker has for all its clients over UDP together, and as many for all others; told apart
    /// by their peers. 0 gives each allocation its own.
    pub shared_ports: usize,
    /// Addresses that are named here and that this machine lacks: listeners there wait, and nothing is relayed from there.
    pub absent: Vec<IpAddr>,
    /// Addresses of this machine: peers reach none of their ports but the relay's ([`turnpike_turn::server::PeerRules`]).
    pub addresses: Vec<IpAddr>,
    /// Listeners of this process beside the relay's own, which no peer reaches either.
    pub listeners_beside: Vec<SocketAddr>,
    /// Receive and send buffer of each listener, and of each relay socket that is shared, in bytes.
    pub listener_buffer: usize,
    /// Receive and send buffer of each relay socket in bytes.
    pub relay_buffer: usize,
    /// Limits of allocations.
    pub limits: AllocationLimits,
    /// Realms with limits of their own.
    pub realm_limits: Vec<RealmLimits>,
    /// Longest silence of a connection to a peer (RFC 6062) that one side has closed. The other may still answer, and then is cut off.
    pub half_closed: Duration,
    /// The state machine's settings.
    pub server: ServerConfig,
}

/// Nothing is listened on or relayed yet; one worker, and numbers for a machine that has other things to do.
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
    /// Default of [`Config::half_closed`]. An answer that takes longer is rare, and keep-alive probes never end a peer that is alive.
    pub const HALF_CLOSED: Duration = Duration::from_secs(60);

    /// What the numbers of its listeners stand for.
    pub fn layout(&self) -> Layout {
        Layout::new(&self.listen, &self.dtls.listen, &self.streams)
    }

    /// Relay addresses that this machine has.
    pub fn relays_up(&self) -> impl Iterator<Item = &RelayAddress> {
        self.relay.iter().filter(|relay| !self.absent.contains(&relay.bind))
    }

    /// Ports that may be reserved (EVEN-PORT with R = 1) and not yet used, over all relay addresses: a sixteenth of them.
    pub fn max_reservations(&self) -> usize {
        (self.ports.len() * self.relay.len() / 16).max(1)
    }
}
