//! Parsed forwarding rules: listeners, targets, limits and access lists. Also contains the TURN server's rules
//! that hand connections on to a web server.
//!
//! Rules are parsed from the configuration or converted from other programs' files, and are run by the
//! forwarder.
#![forbid(unsafe_code)]

mod access;
mod address;
mod hand_on;
mod rule;

pub use access::{Access, Pattern};
pub use address::{Address, Bind, hears, reached};
pub use hand_on::{HandOnRule, NamePattern, ProtocolName, Selector, TURN_PROTOCOLS};
pub use rule::{
    Balance, CopyMode, Endpoint, Host, Limits, MOST_WEIGHT, PortRange, Protocol, Proxy, Question, Rule,
    RuleId,
};
pub use turnpike_net::TcpTimers;
pub use turnpike_wire::{
    address::{UnixName, ZonedIp},
    proxy_protocol::ProxyVersion,
};
