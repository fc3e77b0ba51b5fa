//! Limits of a server, under the names that `[limits]` of its configuration gives them. The defaults are the documented ones.

use std::{ops::RangeInclusive, time::Duration};

/// Limits of what allocations hold, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Permissions per allocation.
    pub permissions: usize,
    /// Channels per allocation.
    pub channels: usize,
    /// Connections to peers, of all workers.
    pub peer_connections: usize,
    /// Connections to peers per allocation, including those under way.
    pub peer_connections_per_allocation: usize,
    /// Connections to peers per user.
    pub peer_connections_per_user: usize,
    /// Default of LIFETIME, in seconds.
    pub default_lifetime: u32,
    /// Highest LIFETIME that is granted, in seconds.
    pub max_lifetime: u32,
    /// Ends an allocation when the time-limited credential that made it expires: clients cannot change the credential of a live
    /// allocation.
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

/// Limits of allocations, over all workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocationLimits {
    /// Allocations in total.
    pub allocations: usize,
    /// Allocations per user.
    pub allocations_per_user: usize,
    /// Allocations per address prefix of clients ([`super::PrefixLengths`]); `None` for any number.
    pub allocations_per_prefix: Option<usize>,
}

impl Default for AllocationLimits {
    fn default() -> Self {
        Self { allocations: 16_384, allocations_per_user: 1024, allocations_per_prefix: None }
    }
}

/// Limits of clients' connections: TCP, TLS and DTLS. Each worker has its share of the totals, and some more for chance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections without an allocation, in total. Beyond, the oldest gives way once it is 500 ms old; until then new ones wait.
    pub idle_connections: usize,
    /// Connections without an allocation per IPv4 address or IPv6 /64; with DTLS per IPv4 /24 or IPv6 /56.
    pub idle_connections_per_address: usize,
    /// Unfinished DTLS handshakes, in total.
    pub half_open: usize,
    /// Unfinished DTLS handshakes per IPv4 /24 or IPv6 /56.
    pub half_open_per_network: usize,
    /// Time until the first complete message, TLS handshake included; time for a DTLS handshake.
    pub first_message: Duration,
    /// Longest silence of a connection without an allocation.
    pub idle: Duration,
    /// Bytes of relayed datagrams that wait for one client over TCP or TLS. Beyond it the oldest are dropped.
    pub stream_queue: usize,
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
        }
    }
}

impl ConnectionLimits {
    /// [`Self::first_message`] in milliseconds.
    #[must_use]
    pub fn first_message_ms(&self) -> u64 {
        millis(self.first_message)
    }

    /// [`Self::idle`] in milliseconds.
    #[must_use]
    pub fn idle_ms(&self) -> u64 {
        millis(self.idle)
    }
}

fn millis(time: Duration) -> u64 {
    time.as_secs() * 1000 + u64::from(time.subsec_millis())
}

/// Limits of a realm, where they differ from those of all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RealmLimits {
    /// REALM.
    pub realm: String,
    /// Allocations of all its users together; `None` for no limit but [`AllocationLimits::allocations`].
    pub allocations: Option<usize>,
    /// Allocations of each of its users; `None` for [`AllocationLimits::allocations_per_user`].
    pub allocations_per_user: Option<usize>,
    /// Ports of its relayed transport addresses, within those of the server: shared only with realms that name them too. `None` for the
    /// ports that no realm names.
    pub relay_ports: Option<RangeInclusive<u16>>,
}
