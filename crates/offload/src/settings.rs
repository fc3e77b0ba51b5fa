//! Settings of the programs, and ways to attach them.

use std::{net::SocketAddr, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug)]
pub struct KernelSettings {
    /// Addresses that clients of a server send to; empty for a forwarder.
    pub listeners: Vec<SocketAddr>,
    pub relay_ports: RangeInclusive<u16>,
    pub flows: u32,
    pub sockets: u32,
    pub hook: Hook,
    /// Relays a flow only while a lease shows that this machine lets its datagrams through unchanged: see
    /// [`crate::layout::Lease`].
    pub leases: bool,
    /// Reserves memory to measure the quality of media, which can then be turned on at any time.
    pub measures: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// Best way that this kernel supports.
    Best,
    /// Link at TC (Linux 6.6), which ends with the process, however the process ends.
    Tcx,
    /// Filter at TC, for one process per network namespace. If the process is killed, the filter stays until the
    /// next start, but its flows expire.
    Clsact,
    /// Link in the driver. Interfaces whose driver does not support it use [`Hook::Best`], provided that at
    /// least one driver does.
    Xdp,
    /// XDP with any driver, slower than TC: for tests.
    XdpGeneric,
}

impl Hook {
    #[must_use]
    pub fn is_xdp(self) -> bool {
        matches!(self, Self::Xdp | Self::XdpGeneric)
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Best => "best",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
            Self::Xdp => "xdp",
            Self::XdpGeneric => "xdp-generic",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub interface: String,
    /// Never [`Hook::Best`].
    pub hook: Hook,
    /// Reason why the program is not attached as XDP even though XDP was requested.
    pub why: Option<String>,
}

impl KernelSettings {
    pub(crate) fn states(&self) -> u32 {
        self.flows.saturating_add(self.flows / 2)
    }

    pub(crate) fn streams(&self) -> u32 {
        if self.measures { self.states() } else { 1 }
    }

    pub(crate) fn departures(&self) -> u32 {
        if self.leases { self.flows } else { 1 }
    }

    pub(crate) fn hops(&self) -> u32 {
        if self.hook.is_xdp() { self.flows } else { 1 }
    }
}
