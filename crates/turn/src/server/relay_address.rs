//! Addresses of a machine on which relayed transport addresses are made.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// An address that relayed transport addresses are made on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayAddress {
    /// Address to bind.
    pub bind: IpAddr,
    /// Address to tell clients, where a NAT stands in front of the server.
    pub external: Option<IpAddr>,
}
