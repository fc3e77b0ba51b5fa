//! Reasons why a relay does not start.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use turnpike_net::BindError;
use turnpike_offload::OffloadError;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error(transparent)]
    Listen(#[from] BindError),
    #[error("cannot bind relay address {address}: {source}; {remedy}")]
    RelayAddress { address: IpAddr, source: io::Error, remedy: String },
    #[error("NAT discovery needs a UDP listener on {address}, or a wildcard listener on its port")]
    NatDiscovery { address: SocketAddr },
    #[error(
        "the running process listens on {protocol} {address}, which is no longer configured: add it again, or restart, which ends the \
         allocations"
    )]
    ListenerGone { protocol: &'static str, address: SocketAddr },
    #[error("server.hand_on: {to} is this server itself; give the address of the web server")]
    HandOnToItself { to: SocketAddr },
    #[error("--datapath kernel (or xdp): {0}")]
    Kernel(#[from] OffloadError),
    #[error(
        "cannot start a worker: {0}; raise the limit on open files (ulimit -n) or on threads (ulimit -u)"
    )]
    Worker(#[from] io::Error),
}
