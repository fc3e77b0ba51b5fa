//! The port forwarder's runtime: listeners, TCP connections, UDP sessions.
//!
//! One worker is one thread with its own `SO_REUSEPORT` listeners and its own connections and sessions; nothing on the
//! data path is shared or locked. This crate reads no configuration file and prints nothing: `ops` turns command lines and
//! files into [`Rule`]s and hears of connections through [`ConnectionLog`].
#![forbid(unsafe_code)]

pub mod access;
mod balance;
mod common;
mod cross;
mod gather;
mod listen;
mod preflight;
mod resolver;
pub mod rule;
pub mod runtime;
mod state;
mod surroundings;
mod tally;
mod targets;
mod tcp;
#[cfg(test)]
mod testing;
pub mod udp;
mod worker;

pub use access::{Access, Pattern};
pub use rule::{Balance, CopyMode, Endpoint, Host, MOST_WEIGHT, PortRange, Protocol, Rule, RuleId};
pub use runtime::{
    ConnectionLog, ConnectionReport, EndReason, Forwarder, RuleSnapshot, Settings, StartError,
};
pub use tally::{CONNECT_BOUNDS, Failure, Slot, Tally, TargetSnapshot};
pub use turnpike_wire::proxy_protocol::ProxyVersion;
