//! Maps the addresses and ports of NAT discovery (RFC 5780) to listener numbers.

use std::net::{IpAddr, SocketAddr};

use turnpike_turn::server::{ListenerId, NatDiscovery};

use crate::StartError;

/// Fills in the listener of each address and port: the one bound to it, or else the wildcard listener of its
/// port and family. `number` maps the index of a UDP listener to its number.
pub(crate) fn resolve(
    wanted: &[NatDiscovery],
    listeners: &[SocketAddr],
    number: impl Fn(usize) -> ListenerId,
) -> Result<Vec<NatDiscovery>, StartError> {
    let mut resolved = wanted.to_vec();
    for discovery in &mut resolved {
        for (ip, row) in discovery.addresses.iter().zip(&mut discovery.listeners) {
            for (port, listener) in discovery.ports.iter().zip(row) {
                let address = SocketAddr::new(*ip, *port);
                let place = listener_at(listeners, address);
                *listener = place.map(&number).ok_or(StartError::NatDiscovery { address })?;
            }
        }
    }
    Ok(resolved)
}

fn listener_at(listeners: &[SocketAddr], address: SocketAddr) -> Option<usize> {
    let any: IpAddr = if address.is_ipv4() {
        std::net::Ipv4Addr::UNSPECIFIED.into()
    } else {
        std::net::Ipv6Addr::UNSPECIFIED.into()
    };
    let position = |wanted: SocketAddr| listeners.iter().position(|bound| *bound == wanted);
    position(address).or_else(|| position(SocketAddr::new(any, address.port())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_listener_precedes_wildcard_and_missing_listener_is_an_error() {
        let wanted = NatDiscovery {
            addresses: ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().unwrap()),
            external: [None; 2],
            ports: [3478, 3479],
            listeners: [[ListenerId(0); 2]; 2],
        };
        let all = ["[::]:3478", "0.0.0.0:3478", "10.0.0.2:3479", "10.0.0.1:3479", "10.0.0.1:3478"]
            .map(|at| at.parse().unwrap());
        let number = |place: usize| ListenerId(u16::try_from(place).unwrap());
        let resolved = resolve(&[wanted], &all, number).unwrap();
        assert_eq!(resolved[0].listeners, [[4, 3], [1, 2]].map(|row| row.map(ListenerId)));
        let missing = resolve(&[wanted], &all[..3], number).unwrap_err().to_string();
        assert!(missing.contains("10.0.0.1:3479"), "{missing}");
    }
}
