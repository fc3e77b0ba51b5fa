//! The TURN server's runtime: workers, listeners, relay sockets.
//!
//! A worker is one thread with its own `SO_REUSEPORT` client sockets, [`turnpike_turn::server::Server`],
//! relay sockets and timers. Global state (quotas, reservations) lives in sharded tables that only requests
//! touch. This crate reads no files and prints nothing; `serve` configures it through [`Config`],
//! [`CredentialStore`], [`Fleet`] and [`AllocationLog`].
#![forbid(unsafe_code)]

pub mod allocations;
mod bounded;
pub mod certificates;
mod coalesce;
mod common;
pub mod config;
mod discovery;
pub mod dtls;
pub mod handed_on;
pub mod layout;
mod link;
mod listening;
mod peers;
mod policy;
mod pool_bits;
mod ports;
mod quotas;
mod routes;
pub mod runtime;
mod start_error;
pub mod stream;
mod turned_away;
pub mod upgrade;
mod worker;

// Types shared between threads are imported from `crate::sync`, which `interleave` replaces to try every
// interleaving.
use std::sync;

pub use config::{Config, RelayState};
pub use dtls::{DtlsConfig, DtlsContext, DtlsDrop, DtlsEnd, DtlsError, DtlsFailure, DtlsStats};
pub use handed_on::{HandOnEnd, HandOnStats, HandedOnBy};
pub use layout::Layout;
pub use listening::{Listeners, WaitingListener};
pub use peers::PeerStats;
pub use routes::{interface_of_route, relay_address_remedy, route_addresses, source_of_route};
pub use runtime::{
    AllocationLog, CredentialStore, Fleet, ListenerCount, PendingLookup, Relay, Relistened, SharedQuota,
    WorkerSnapshot,
};
pub use start_error::StartError;
pub use stream::{
    CertificateError, ChainFault, CloseReason, HandshakeFailure, Identity, StreamConfig, StreamStats,
    TicketKeys, TlsContext,
};
pub use turned_away::TurnedAway;
pub use turnpike_offload::{
    Attachment, Count as KernelCount, Hook, Kernel, OffloadError, Snapshot as KernelSnapshot,
};
pub use turnpike_rules::HandOnRule;
pub use turnpike_turn::server::{RealmLimits, RelayAddress};

/// Number of shards of each table that the workers share, enough to make contention rare.
const SHARDS: usize = 16;
