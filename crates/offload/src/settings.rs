//! What the programs are made for, and how they are attached.

use std::{net::SocketAddr, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

/// What the program is made for.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where a server's clients send their datagrams; a forwarder has none here.
    pub listeners: Vec<SocketAddr>,
    /// Ports of relayed transport addresses; may be empty.
    pub relay_ports: RangeInclusive<u16>,
    /// Flows that there may be, each in one direction.
    pub flows: u32,
    /// Sockets that take what goes up.
    pub sockets: u32,
    /// How the program is attached.
    pub hook: Hook,
}

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// As this kernel can.
    Best,
    /// As a link (Linux 6.6), which ends with the process, however that ends.
    Tcx,
    /// As a filter, which stays if the process is killed: until the next start, or with the flows' own time.
    Clsact,
    /// In the driver, by a link; [`Hook::Best`] on interfaces whose driver cannot, if there is one that can.
    Xdp,
    /// The same by any driver, which is slower than TC: for tests.
    XdpGeneric,
}

impl Hook {
    /// Whether it sees packets before GRO does.
    #[must_use]
    pub fn is_xdp(self) -> bool {
        matches!(self, Self::Xdp | Self::XdpGeneric)
    }

    /// As users know it.
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

/// An interface on which lone datagrams are relayed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Its name.
    pub interface: String,
    /// How the program is attached: not [`Hook::Best`].
    pub hook: Hook,
    /// Why that is not XDP, where that was asked for.
    pub why: Option<String>,
}

impl Settings {
    /// A state for each flow, and for each client one more; a client has two flows at least.
    pub(crate) fn states(&self) -> u32 {
        self.flows.saturating_add(self.flows / 2)
    }

    /// Next hops, which XDP alone asks for.
    pub(crate) fn hops(&self) -> u32 {
        if self.hook.is_xdp() { self.flows } else { 1 }
    }
}
