//! Source addresses of the default routes, and advice for relay addresses that this machine does not have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use crate::RelayAddress;

#[must_use]
pub fn route_addresses() -> Vec<IpAddr> {
    DESTINATIONS.iter().copied().filter_map(source_of_route).filter(|ip| !ip.is_loopback()).collect()
}

/// Documentation addresses (RFC 5737, RFC 3849), which no host has. Packets to them take the default route.
const DESTINATIONS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
];

/// Returns the source address that the kernel would use. connect(2) on a UDP socket looks up the route and
/// sends nothing.
#[must_use]
pub fn source_of_route(destination: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if destination.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(destination).ok()?;
    let source = socket.local_addr().ok()?.ip();
    let usable = match source {
        IpAddr::V4(address) => !address.is_unspecified() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unspecified() && !address.is_unicast_link_local(),
    };
    usable.then_some(source)
}

/// Name of the interface through which the default route sends packets from `from`, one of our addresses.
/// `None` if there is no such route or the lookup fails.
#[must_use]
pub fn interface_of_route(from: IpAddr) -> Option<String> {
    let to = DESTINATIONS.into_iter().find(|to| to.is_ipv4() == from.is_ipv4())?;
    turnpike_offload::interface_of_route(from, to.ip()).ok().flatten()
}

#[must_use]
pub fn relay_address_remedy(address: &RelayAddress) -> String {
    let RelayAddress { bind, external } = *address;
    let is_here = |ip: &IpAddr| UdpSocket::bind((*ip, 0)).is_ok();
    if let Some(local) = external.filter(is_here) {
        return format!("{local} is this machine's address: write it first, {local}={bind}");
    }
    match (external, route_addresses().into_iter().find(|own| own.is_ipv4() == bind.is_ipv4())) {
        (Some(public), Some(local)) => {
            format!("write LOCAL=PUBLIC with an address of this machine, here {local}={public}")
        }
        (None, Some(local)) => format!(
            "behind a NAT write LOCAL=PUBLIC, here {local}={bind}; otherwise choose an address of this machine"
        ),
        (_, None) => "name an address of this machine in relay.addresses (--relay-ip)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_to_loopback_has_a_loopback_source() {
        let source = source_of_route(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        assert_eq!(source, Some(Ipv4Addr::LOCALHOST.into()));
    }

    #[test]
    fn remedy_corrects_a_swapped_pair_of_addresses() {
        let ip = |text: &str| -> IpAddr { text.parse().expect("an address") };
        let told =
            relay_address_remedy(&RelayAddress { bind: ip("198.51.100.7"), external: Some(ip("127.0.0.1")) });
        assert_eq!(told, "127.0.0.1 is this machine's address: write it first, 127.0.0.1=198.51.100.7");
        let told = relay_address_remedy(&RelayAddress { bind: ip("198.51.100.7"), external: None });
        let is_advice =
            told.starts_with("behind a NAT write LOCAL=PUBLIC, here ") && told.contains("=198.51.100.7");
        assert!(is_advice || told.starts_with("name an address of this machine"), "{told}");
    }
}
