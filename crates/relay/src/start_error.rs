//! Reasons why a relay does not start.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use turnpike_offload::OffloadError;

/// Why the relay did not start; each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A listener could not be bound.
    #[error("cannot listen on {protocol} {address}: {source}; {remedy}")]
    Listen { protocol: &'static str, address: SocketAddr, source: io::Error, remedy: String },
    /// A relay address is not one of this machine.
    #[error("relay address {address} cannot be bound: {source}; {remedy}")]
    RelayAddress { address: IpAddr, source: io::Error, remedy: String },
    /// NAT discovery is configured on an address that nobody listens on.
    #[error("NAT discovery needs a UDP listener on {address}, or on its port and all addresses")]
    NatDiscovery { address: SocketAddr },
    /// What another process listens on is not configured here.
    #[error(
        "the process to be upgraded listens on {protocol} {address}, which is not configured any more: put it back, or restart, which \
         ends its sessions"
    )]
    ListenerGone { protocol: &'static str, address: SocketAddr },
    /// The path through the kernel cannot be had.
    #[error("--datapath kernel (or xdp): {0}")]
    Kernel(#[from] OffloadError),
    /// Threads, epoll or the like.
    #[error(
        "cannot start a worker: {0}; raise the limit of open files (ulimit -n) or of threads (ulimit -u)"
    )]
    Worker(#[from] io::Error),
}
