//! Which peers may be relayed to ("Safe by default").

use std::{net::IpAddr, str::FromStr};

/// An address prefix, such as `10.0.0.0/8`, `2001:db8::/32` or a lone address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// First address.
    pub base: IpAddr,
    /// Leading bits that count.
    pub bits: u8,
}

impl FromStr for Cidr {
    type Err = String;
    fn from_str(_text: &str) -> Result<Self, Self::Err> {
        todo!()
    }
}

/// Deny rules win over allow rules; allow rules win over the built-in refusal of special ranges.
#[derive(Clone, Debug, Default)]
pub struct PeerRules {
    /// Allowed though special.
    pub allow: Vec<Cidr>,
    /// Refused though public.
    pub deny: Vec<Cidr>,
}

impl PeerRules {
    /// Whether this peer may be relayed to, in any spelling of its address.
    #[must_use]
    pub fn permits(&self, _peer: IpAddr) -> bool {
        todo!()
    }
}
