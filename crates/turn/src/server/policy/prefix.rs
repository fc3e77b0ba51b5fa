//! Prefixes of client addresses, which group the addresses of one customer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixLengths {
    /// 0 to 32. Default 32.
    pub v4: u8,
    /// 0 to 128. Default 64.
    pub v6: u8,
}

impl Default for PrefixLengths {
    fn default() -> Self {
        Self::HOST
    }
}

impl PrefixLengths {
    /// A single host, which uses the addresses of an IPv6 /64 (RFC 8981).
    pub const HOST: Self = Self { v4: 32, v6: 64 };
    /// A subscriber or small site: a host that can forge one source address can usually forge its neighbours'
    /// too.
    pub const SITE: Self = Self { v4: 24, v6: 56 };

    #[must_use]
    pub fn of(self, ip: IpAddr) -> IpAddr {
        match ip.to_canonical() {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.v4.min(32))).unwrap_or(0);
                Ipv4Addr::from_bits(ip.to_bits() & mask).into()
            }
            IpAddr::V6(ip) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.v6.min(128))).unwrap_or(0);
                Ipv6Addr::from_bits(ip.to_bits() & mask).into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_keeps_the_leading_bits() {
        let of = |v4, v6, ip: &str| PrefixLengths { v4, v6 }.of(ip.parse().unwrap()).to_string();
        assert_eq!(of(32, 64, "192.0.2.7"), "192.0.2.7");
        assert_eq!(of(24, 64, "192.0.2.7"), "192.0.2.0");
        assert_eq!(of(24, 64, "::ffff:192.0.2.7"), "192.0.2.0");
        assert_eq!(of(0, 64, "192.0.2.7"), "0.0.0.0");
        assert_eq!(of(32, 64, "2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(of(32, 128, "2001:db8::1"), "2001:db8::1");
        assert_eq!(of(32, 0, "2001:db8::1"), "::");
        assert_eq!(
            PrefixLengths::SITE.of("2001:db8:1:2ff:ffff::1".parse().unwrap()).to_string(),
            "2001:db8:1:200::"
        );
    }
}
