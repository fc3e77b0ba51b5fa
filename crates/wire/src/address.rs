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
