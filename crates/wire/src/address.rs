//! Transport addresses in one canonical form, so that a check on an address cannot be walked around by
//! spelling it differently.

use std::net::{IpAddr, SocketAddr};

/// An IPv4-mapped IPv6 address (`::ffff:a.b.c.d`) becomes the IPv4 address it stands for; flow label and scope
/// are dropped. Every address is passed through here once, when parsed or received.
#[must_use]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(canonical_ip(address.ip()), address.port())
}

/// The same for an address without a port.
#[must_use]
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_address_becomes_the_one_it_stands_for() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(canonical(address("[::ffff:10.0.0.1]:7")), address("10.0.0.1:7"));
        assert_eq!(canonical(address("10.0.0.1:7")), address("10.0.0.1:7"));
        assert_eq!(canonical(address("[2001:db8::1]:7")), address("[2001:db8::1]:7"));
        // IPv4-compatible, 6to4 and NAT64 addresses are other hosts on the wire; the peer rules look into them.
        assert_eq!(canonical(address("[::10.0.0.1]:7")), address("[::10.0.0.1]:7"));
        assert_eq!(canonical(address("[64:ff9b::10.0.0.1]:7")), address("[64:ff9b::10.0.0.1]:7"));
    }

    #[test]
    fn scope_and_flow_label_do_not_make_another_address() {
        let scoped = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 99, 3);
        assert_eq!(canonical(scoped.into()), "[fe80::1]:7".parse().unwrap());
    }
}
