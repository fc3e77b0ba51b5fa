//! Address families.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use turnpike_wire::stun::{FAMILY_IPV4, FAMILY_IPV6};

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    pub(crate) fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// As attributes name it.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::V4 => FAMILY_IPV4,
            Self::V6 => FAMILY_IPV6,
        }
    }

    /// Reads REQUESTED-ADDRESS-FAMILY and ADDITIONAL-ADDRESS-FAMILY (RFC 8656 sections 18.6 and 18.11). `Err` is the number of a
    /// family that there is not; `None` a malformed attribute.
    pub(crate) fn read(value: &[u8]) -> Option<Result<Self, u8>> {
        match *value {
            [FAMILY_IPV4, _, _, _] => Some(Ok(Self::V4)),
            [FAMILY_IPV6, _, _, _] => Some(Ok(Self::V6)),
            [other, _, _, _] => Some(Err(other)),
            _ => None,
        }
    }
}
