//! Port forwarder runtime: listeners, TCP connections, UDP sessions.
//!
//! A worker is a thread with its own `SO_REUSEPORT` listeners, connections and sessions; nothing on the data
//! path is shared or locked. This crate reads no configuration and prints nothing: `config` parses [`Rule`]s,
//! and [`ConnectionLog`] receives ended connections.
#![forbid(unsafe_code)]

mod balance;
mod batching;
mod binder;
mod bridge;
mod circles;
mod clients;
mod common;
mod datagram_check;
mod gauge;
mod handover;
mod here;
mod kernel;
mod listen;
mod preflight;
mod rate;
mod resolver;
pub mod runtime;
mod state;
mod tally;
mod targets;
mod tcp;
#[cfg(test)]
mod testing;
pub mod udp;
pub mod upgrade;
mod worker;
mod worker_context;

// Types shared between threads are imported from `crate::sync`. The crate `interleave` replaces
// this module to try every interleaving.
use std::sync;

pub use runtime::{
    ByKernel, ConnectionLog, ConnectionReport, EndReason, Forwarder, RuleSnapshot, RuleStanding, Settings,
    StartError,
};
pub use tally::{CONNECT_BOUNDS, Tally, TargetFailure, TargetSlot, TargetSnapshot};
pub use turnpike_offload::{Count as KernelCount, Kernel, OffloadError, Snapshot as KernelSnapshot};
pub use turnpike_rules::{
    Access, Address, Balance, Bind, CopyMode, Endpoint, Host, Limits, MOST_WEIGHT, Pattern, PortRange,
    Protocol, Proxy, ProxyVersion, Question, Rule, RuleId, TcpTimers, UnixName, ZonedIp, hears,
};
