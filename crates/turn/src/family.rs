use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use turnpike_wire::stun::{FAMILY_IPV4, FAMILY_IPV6};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::V4 => FAMILY_IPV4,
            Self::V6 => FAMILY_IPV6,
        }
    }

    /// `Err` contains an unknown family number; `None` means a malformed attribute.
    pub(crate) fn read(value: &[u8]) -> Option<Result<Self, u8>> {
        match *value {
            [FAMILY_IPV4, _, _, _] => Some(Ok(Self::V4)),
            [FAMILY_IPV6, _, _, _] => Some(Ok(Self::V6)),
            [other, _, _, _] => Some(Err(other)),
            _ => None,
        }
    }
}
