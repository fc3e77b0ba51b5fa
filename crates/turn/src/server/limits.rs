//! The `[limits]` section of the configuration, with the documented defaults.

use std::{ops::RangeInclusive, time::Duration};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    pub permissions: usize,
    pub channels: usize,
    /// Maximum number across all workers.
    pub peer_connections: usize,
    /// Includes connections being established.
    pub peer_connections_per_allocation: usize,
    pub peer_connections_per_user: usize,
    /// LIFETIME in seconds if the client requests none.
    pub default_lifetime: u32,
    /// Highest LIFETIME granted, in seconds.
    pub max_lifetime: u32,
    /// Ends an allocation when its time-limited credential expires; clients cannot change the credential of a
    /// live allocation.
    pub end_with_credential: bool,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            permissions: 64,
            channels: 64,
            peer_connections: 4096,
            peer_connections_per_allocation: 32,
            peer_connections_per_user: 1024,
            default_lifetime: 600,
            max_lifetime: 3600,
            end_with_credential: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocationLimits {
    pub allocations: usize,
    pub allocations_per_user: usize,
    /// `None` for no limit. See [`super::PrefixLengths`].
    pub allocations_per_prefix: Option<usize>,
}

impl Default for AllocationLimits {
    fn default() -> Self {
        Self { allocations: 16_384, allocations_per_user: 1024, allocations_per_prefix: None }
    }
}

/// Each worker gets its share of the totals, plus some slack for uneven distribution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Total number of connections without an allocation. At the limit, the oldest is closed once it is 500
    /// ms old.
    pub idle_connections: usize,
    /// Maximum per address: an IPv4 address or IPv6 /64; for DTLS, an IPv4 /24 or IPv6 /56.
    pub idle_connections_per_address: usize,
    pub half_open: usize,
    /// Maximum per network: an IPv4 /24 or IPv6 /56.
    pub half_open_per_network: usize,
    /// Maximum time until the first complete message, including the TLS handshake; for DTLS, maximum time for
    /// the handshake.
    pub first_message: Duration,
    /// Maximum idle time of a connection without an allocation.
    pub idle: Duration,
    /// Maximum bytes of relayed datagrams queued for one TCP or TLS client; beyond that, the oldest datagrams
    /// are dropped.
    pub stream_queue: usize,
    /// Maximum number of connections handed on to a web server; additional ones are closed.
    pub handed_on: usize,
    /// An address is an IPv4 address or IPv6 /64.
    pub handed_on_per_address: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            idle_connections: 4096,
            idle_connections_per_address: 512,
            half_open: 1024,
            half_open_per_network: 256,
            first_message: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            stream_queue: 256 << 10,
            handed_on: 4096,
            handed_on_per_address: 256,
        }
    }
}

impl ConnectionLimits {
    #[must_use]
    pub fn first_message_ms(&self) -> u64 {
        millis(self.first_message)
    }

    #[must_use]
    pub fn idle_ms(&self) -> u64 {
        millis(self.idle)
    }
}

fn millis(time: Duration) -> u64 {
    time.as_secs() * 1000 + u64::from(time.subsec_millis())
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RealmLimits {
    pub realm: String,
    /// Allocations of all users of the realm; `None` if only [`AllocationLimits::allocations`] limits them.
    pub allocations: Option<usize>,
    pub allocations_per_user: Option<usize>,
    /// `None` for the ports that no realm lists. Only realms with the same ports share them.
    pub relay_ports: Option<RangeInclusive<u16>>,
}
