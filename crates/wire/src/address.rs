//! Canonical form of transport addresses, so that no other notation can bypass a check, and addresses in text
//! form.

mod unix_name;
mod zoned_ip;

use std::net::{IpAddr, SocketAddr};

pub use unix_name::UnixName;
pub use zoned_ip::{AddressError, ZonedIp, socket_address, split_zone};

/// Converts IPv4-mapped addresses to IPv4 and drops flow label and scope. Applied once to each address.
#[must_use]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(canonical_ip(address.ip()), address.port())
}

#[must_use]
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// True for addresses that the Internet does not route to a single host: loopback, link-local, private,
/// carrier-grade NAT (RFC 6598), and IPv4 service continuity (RFC 7335).
#[must_use]
pub fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            let is_shared = a == 100 && b & 0xC0 == 64;
            let is_of_ipv6_network = [a, b, c] == [192, 0, 0] && d < 8;
            ip.is_private() || ip.is_loopback() || ip.is_link_local() || is_shared || is_of_ipv6_network
        }
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

/// True if the public and private addresses of a NAT mapping appear to be swapped.
#[must_use]
pub fn is_swapped(local: IpAddr, public: IpAddr) -> bool {
    is_private(public) && !is_private(local) && local.is_ipv4() == public.is_ipv4()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_ranges_match_the_rfcs() {
        for (text, expected) in [
            ("10.0.0.5", true),
            ("172.31.255.255", true),
            ("172.32.0.0", false),
            ("192.168.1.1", true),
            ("100.63.255.255", false),
            ("100.64.0.0", true),
            ("100.127.255.255", true),
            ("100.128.0.0", false),
            ("169.254.9.9", true),
            ("127.0.0.1", true),
            ("192.0.0.7", true),
            ("192.0.0.8", false),
            ("203.0.113.5", false),
            ("::1", true),
            ("fd00::1", true),
            ("fe80::1", true),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_private(text.parse().unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn a_mapped_address_becomes_ipv4() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(canonical(address("[::ffff:10.0.0.1]:7")), address("10.0.0.1:7"));
        assert_eq!(canonical(address("10.0.0.1:7")), address("10.0.0.1:7"));
        assert_eq!(canonical(address("[2001:db8::1]:7")), address("[2001:db8::1]:7"));
        // On the wire, these addresses are different hosts. The peer rules check the embedded addresses.
        assert_eq!(canonical(address("[::10.0.0.1]:7")), address("[::10.0.0.1]:7"));
        assert_eq!(canonical(address("[64:ff9b::10.0.0.1]:7")), address("[64:ff9b::10.0.0.1]:7"));
    }

    #[test]
    fn scope_and_flow_label_are_dropped() {
        let scoped = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 99, 3);
        assert_eq!(canonical(scoped.into()), "[fe80::1]:7".parse().unwrap());
    }
}
